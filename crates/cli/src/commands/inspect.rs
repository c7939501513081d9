//! `inspect`: what a cache device holds, by reading alone.
//!
//! A device in use is read while it changes. What is read then can contradict itself, which the
//! engine notices as damage; so such a device is read again a few times before damage is
//! believed, and the answer says that it is a snapshot.

mod pcache;
mod writecache;

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use udm::pcache::inspect as pcache_inspect;
use udm::pcache::layout::Geometry;
use udm::pmem::dax::DaxPmem;
use udm::pmem::{Persistence, Pmem};
use udm::shm::{Keeper, Served};
use udm::sync::Arc;
use udm::table::Word;
use udm::units::{SECTOR, human_bytes};
use udm::writecache::inspect as writecache_inspect;
use udm::writecache::media::Medium;

use crate::args::InspectArgs;
use crate::columns::pairs;
use crate::output::{print, print_json, print_note};
use crate::runtime::RuntimeDir;

/// How often a device in use is read before what is wrong with it counts.
const TRIES_IN_USE: usize = 5;

/// Time between two of those.
const TRY_EVERY: Duration = Duration::from_millis(50);

/// `udm inspect`.
pub fn inspect(args: &InspectArgs) -> Result<()> {
    let found = look_at(&args.cache_device, args.start_sector)?;
    if args.json.json {
        return print_json(&shape(&found));
    }
    print(&describe(&found))?;
    if found.is_in_use {
        print_note("the device is in use, so this is a snapshot of something that moves");
    }
    Ok(())
}

/// A cache device that was looked at.
#[derive(Debug)]
pub struct Found {
    /// As it was named.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// Whether somebody has it open for use.
    pub is_in_use: bool,
    /// What makes stores to it durable.
    pub persistence: Persistence,
    /// What it holds.
    pub contents: Contents,
    /// The server that has it, or had it and died.
    pub served: Option<Served>,
}

impl Found {
    /// Whether memory has, or may have, what the medium has not.
    fn has_more(&self) -> bool {
        self.served.as_ref().is_some_and(|served| served.is_of_this_boot)
    }
}

/// What a cache device holds.
#[derive(Debug)]
pub enum Contents {
    /// Of dm-pcache.
    Pcache(pcache_inspect::Report),
    /// Of dm-writecache.
    Writecache(writecache_inspect::Report),
}

/// Reads `word`, which names a cache device as tables do; a writecache begins at `start_sector`.
pub fn look_at(word: &str, start_sector: u64) -> Result<Found> {
    let path = Word::new(word).device()?.path;
    let is_in_use = is_in_use(Path::new(&path))?;
    let tries = if is_in_use { TRIES_IN_USE } else { 1 };
    let mut failed = anyhow!("{path}: not read");
    for nth in 0..tries {
        if nth > 0 {
            thread::sleep(TRY_EVERY);
        }
        let pmem = Arc::new(DaxPmem::open_read_only(Path::new(&path))?);
        let size_bytes = pmem.len_bytes();
        let persistence = pmem.medium().persistence;
        match read(pmem, start_sector) {
            Ok((contents, served)) => {
                let name = path;
                return Ok(Found { name, size_bytes, is_in_use, persistence, contents, served });
            }
            Err(error) => failed = anyhow!(error),
        }
    }
    if is_in_use {
        failed = failed.context("the device is in use, and could not be read in one piece");
    }
    Err(failed)
}

fn read(pmem: Arc<DaxPmem>, start_sector: u64) -> udm::error::Result<(Contents, Option<Served>)> {
    let runtime = RuntimeDir::locate().unwrap_or_default();
    let medium = Medium::Pmem(pmem.clone());
    let start = start_sector.saturating_mul(SECTOR);
    if start > 0 || writecache_inspect::is_writecache(&medium, start) {
        let report = writecache_inspect::inspect(&medium, start, None)?;
        let served = report.served(&medium, &Keeper::folder(&runtime, "writecache", None));
        return Ok((Contents::Writecache(report), served));
    }
    let report = pcache_inspect::inspect(pmem, Geometry::KERNEL)?;
    let served = report.served(&Keeper::folder(&runtime, "pcache", None));
    Ok((Contents::Pcache(report), served))
}

/// Whether a server holds the device. Asked by a shared lock that is given up at once.
fn is_in_use(path: &Path) -> Result<bool> {
    let place = || format!("open cache device {}", path.display());
    let file = std::fs::File::open(path).with_context(place)?;
    Ok(flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK))
}

/// For people.
fn describe(found: &Found) -> String {
    let mut rows: Vec<(&str, String)> =
        vec![("Cache device", found.name.clone()), ("Size", human_bytes(found.size_bytes))];
    let (format, more, damage) = match &found.contents {
        Contents::Pcache(report) => {
            ("pcache", pcache::rows(report, found.has_more()), pcache::damage(report))
        }
        Contents::Writecache(report) => {
            let rows = writecache::rows(report, found.has_more());
            ("writecache", rows, writecache::damage(report))
        }
    };
    rows.insert(1, ("Format", format!("{format} (version 1)")));
    rows.extend(more);
    if let Some(served) = &found.served {
        rows.push(("Served", of_server(found, served)));
    }
    if damage.is_empty() {
        rows.push(("Damage", "none".into()));
    }
    rows.extend(damage.into_iter().map(|line| ("Damage", line)));
    pairs(&rows)
}

/// What is not on the medium.
fn of_server(found: &Found, served: &Served) -> String {
    let place = &served.place;
    match (served.is_of_this_boot, found.is_in_use) {
        (true, true) => {
            format!("writes that were acknowledged and not flushed are in memory at {place}")
        }
        (true, false) => {
            let is_there = if is_there(served) { "" } else { ", WHICH IS NOT THERE" };
            format!(
                "its server died; writes that it had acknowledged and not flushed are in memory at \
                 {place}{is_there}"
            )
        }
        (false, _) => {
            "its server died, and the machine was started again since: writes that it had \
                       acknowledged and not flushed are lost"
                .into()
        }
    }
}

fn is_there(served: &Served) -> bool {
    Path::new(&served.place).exists()
}

/// For programs.
fn shape(found: &Found) -> Value {
    let mut shape = match &found.contents {
        Contents::Pcache(report) => pcache::shape(report),
        Contents::Writecache(report) => writecache::shape(report),
    };
    shape["cache_device"] = json!(found.name);
    shape["size_bytes"] = json!(found.size_bytes);
    shape["is_in_use"] = json!(found.is_in_use);
    shape["served"] = json!(found.served.as_ref().map(|served| json!({
        "attach_id": served.id,
        "is_of_this_boot": served.is_of_this_boot,
        "memory": served.place,
        "memory_is_there": is_there(served),
    })));
    shape
}
