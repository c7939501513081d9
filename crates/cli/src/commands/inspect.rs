//! `inspect` reports the contents of a cache device, and only reads.
//!
//! A device in use is read while it changes. Such a snapshot can contradict itself, which the
//! engine reports as damage. So `inspect` reads a device in use a few more times before it reports
//! damage, and labels the answer as a snapshot.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use udm::build::{Opener, SystemOpener};
use udm::common::contents::{Contents, Value as Held};
use udm::pmem::Pmem;
use udm::pmem::dax::DaxPmem;
use udm::shm::{Served, SharedStore};
use udm::sync::Arc;
use udm::table::Word;
use udm::targets::{self, TargetType};
use udm::units::human_bytes;

use crate::args::media::InspectArgs;
use crate::columns::pairs;
use crate::output::{print, print_json, print_note};
use crate::runtime::RuntimeDir;

/// How often a device in use is read before damage is reported.
const TRIES_IN_USE: usize = 5;

/// Time between two such reads.
const TRY_EVERY: Duration = Duration::from_millis(50);

/// Why a device in use cannot be read.
pub const IN_USE: &str = "the device is in use, and changed while it was read: try again";

/// `udm inspect`.
pub fn inspect(args: &InspectArgs) -> Result<()> {
    let found = look_at(&args.cache_device, args.start_sector)?;
    if args.json.json {
        return print_json(&shape(&found));
    }
    print(&describe(&found))?;
    if found.is_in_use {
        print_note("the device is in use, so this is a snapshot, and the contents are changing");
    }
    Ok(())
}

/// A cache device that was inspected.
#[derive(Debug)]
pub struct Found {
    /// The name that the user gave.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// Whether a process has it open for use.
    pub is_in_use: bool,
    /// The type of cache that it holds.
    pub kind: &'static TargetType,
    /// Its contents.
    pub contents: Contents,
}

/// Reads `word`, which names a cache device as tables do. The cache begins at `start_sector`, if
/// its type allows that.
pub fn look_at(word: &str, start_sector: u64) -> Result<Found> {
    let device = SystemOpener::without_memory().resolve(&Word::new(word).device()?)?;
    let (path, area) = (device.path, device.options.area);
    let is_in_use = is_in_use(Path::new(&path))?;
    let tries = if is_in_use { TRIES_IN_USE } else { 1 };
    let mut failed = anyhow!("{path}: not read");
    for nth in 0..tries {
        if nth > 0 {
            thread::sleep(TRY_EVERY);
        }
        let pmem: Arc<dyn Pmem> = Arc::new(DaxPmem::open_read_only(Path::new(&path), area)?);
        let runtime = RuntimeDir::locate().unwrap_or_default();
        let shared_store = |target| SharedStore::folder(&runtime, target, None);
        match targets::inspect(&pmem, start_sector, &shared_store) {
            Ok((kind, contents)) => {
                let size_bytes = pmem.len_bytes();
                let name = area.named(&path);
                return Ok(Found { name, size_bytes, is_in_use, kind, contents });
            }
            Err(error) => failed = anyhow!(error),
        }
    }
    if is_in_use {
        failed = failed.context(IN_USE);
    }
    Err(failed)
}

/// Whether a server, or another program, has the device.
fn is_in_use(path: &Path) -> Result<bool> {
    let place = || format!("open cache device {}", path.display());
    let file = std::fs::File::open(path).with_context(place)?;
    udm::disk::is_in_use(&file).with_context(place)
}

/// For people.
fn describe(found: &Found) -> String {
    let Found { name, size_bytes, kind, contents, .. } = found;
    let version = kind.cache.as_ref().map_or(0, |cache| cache.format_version);
    let format = match kind.cache.as_ref().is_some_and(|cache| cache.has_metadata_device) {
        true => format!("{} metadata", kind.name),
        false => format!("{} (version {version})", kind.name),
    };
    let mut rows: Vec<(&str, String)> = vec![
        ("Cache device", name.clone()),
        ("Format", format),
        ("Size", human_bytes(*size_bytes)),
    ];
    rows.extend(contents.rows.iter().cloned());
    rows.extend(contents.served.iter().map(|served| ("Served", of_server(found, served))));
    if contents.damage.is_empty() {
        rows.push(("Damage", "none".into()));
    }
    rows.extend(contents.damage.iter().map(|line| ("Damage", line.clone())));
    pairs(&rows)
}

/// The data that the server's memory holds in addition to the medium.
fn of_server(found: &Found, served: &Served) -> String {
    let place = &served.place;
    match (served.is_of_this_boot, found.is_in_use) {
        (true, true) => {
            format!("acknowledged, unflushed writes are in shared memory at {place}")
        }
        (true, false) => {
            let is_there = if is_there(served) { "" } else { ", WHICH IS MISSING" };
            format!(
                "its server died; acknowledged, unflushed writes are in shared memory at \
                 {place}{is_there}"
            )
        }
        (false, _) => {
            "its server died, and the machine was rebooted since: acknowledged, unflushed writes \
                       are lost"
                .into()
        }
    }
}

fn is_there(served: &Served) -> bool {
    Path::new(&served.place).exists()
}

/// For programs.
fn shape(found: &Found) -> Value {
    let contents = &found.contents;
    let mut shape = json!({ "format": found.kind.name, "damage": contents.damage });
    for (name, value) in &contents.fields {
        shape[name] = json_of(value);
    }
    shape["cache_device"] = json!(found.name);
    shape["size_bytes"] = json!(found.size_bytes);
    shape["is_in_use"] = json!(found.is_in_use);
    shape["served"] = json!(contents.served.as_ref().map(|served| json!({
        "attach_id": served.id,
        "is_of_this_boot": served.is_of_this_boot,
        "memory": served.place,
        "memory_is_there": is_there(served),
    })));
    shape
}

fn json_of(held: &Held) -> Value {
    match held {
        Held::Nothing => Value::Null,
        Held::Number(number) => json!(number),
        Held::Flag(flag) => json!(flag),
        Held::Text(text) => json!(text),
        Held::List(list) => list.iter().map(json_of).collect(),
        Held::Group(group) => group.iter().map(|(name, held)| (*name, json_of(held))).collect(),
    }
}
