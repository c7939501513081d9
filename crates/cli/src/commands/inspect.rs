//! `inspect`: what a cache device holds, by reading alone.
//!
//! A device in use is read while it changes. What is read then can contradict itself, which the
//! engine notices as damage; so such a device is read again a few times before damage is
//! believed, and the answer says that it is a snapshot.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use udm::pcache::inspect::{LabelReport, Report};
use udm::pcache::layout::Geometry;
use udm::pmem::Pmem;
use udm::pmem::dax::DaxPmem;
use udm::sync::Arc;
use udm::table::Word;
use udm::units::human_bytes;

use crate::args::InspectArgs;
use crate::columns::pairs;
use crate::output::{print, print_json, print_note};

/// How often a device in use is read before what is wrong with it counts.
const TRIES_IN_USE: usize = 5;

/// Time between two of those.
const TRY_EVERY: Duration = Duration::from_millis(50);

/// `udm inspect`.
pub fn inspect(args: &InspectArgs) -> Result<()> {
    let found = look_at(&args.cache_device)?;
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
    /// What it holds.
    pub report: Report,
}

/// Reads `word`, which names a cache device as tables do.
pub fn look_at(word: &str) -> Result<Found> {
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
        match udm::pcache::inspect::inspect(pmem, Geometry::KERNEL) {
            Ok(report) => return Ok(Found { name: path, size_bytes, is_in_use, report }),
            Err(error) => failed = anyhow!(error),
        }
    }
    if is_in_use {
        failed = failed.context("the device is in use, and could not be read in one piece");
    }
    Err(failed)
}

/// Whether a server holds the device. Asked by a shared lock that is given up at once.
fn is_in_use(path: &Path) -> Result<bool> {
    let place = || format!("open cache device {}", path.display());
    let file = std::fs::File::open(path).with_context(place)?;
    Ok(flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK))
}

/// For people.
fn describe(found: &Found) -> String {
    let report = &found.report;
    let segments = u64::from(report.segments);
    let mut rows: Vec<(&str, String)> = vec![
        ("Cache device", found.name.clone()),
        ("Format", "pcache (version 1)".into()),
        ("Size", human_bytes(found.size_bytes)),
        ("Segments", format!("{segments} of {}", human_bytes(Geometry::KERNEL.segment_bytes))),
        (
            "Used segments",
            format!("{} ({} %)", report.used_segments, {
                u64::from(report.used_segments) * 100 / segments.max(1)
            }),
        ),
        ("Collection from", format!("{} %", report.gc_percent)),
        ("Data CRC", if report.has_data_crc { "yes" } else { "no" }.into()),
        ("Log head", report.head.to_string()),
        ("Dirty tail", report.dirty_tail.to_string()),
        ("Key tail", report.key_tail.to_string()),
        ("Keys", format!("{} ({} of reused segments)", report.keys, report.stale_keys)),
        ("Dirty data", format!("at most {}", human_bytes(report.dirty_bytes))),
    ];
    match &report.label {
        Some(label) => {
            rows.push(("Backing device", label.identity.clone()));
            rows.push(("Backing size", human_bytes(label.backing_bytes)));
        }
        None => rows.push(("Backing device", "not recorded (last written by a kernel)".into())),
    }
    let damage = damage(report);
    if damage.is_empty() {
        rows.push(("Damage", "none".into()));
    }
    rows.extend(damage.into_iter().map(|line| ("Damage", line)));
    pairs(&rows)
}

/// What is damaged, a sentence each.
fn damage(report: &Report) -> Vec<String> {
    let mut lines = report.notes.clone();
    for (offset, len) in report.label.iter().flat_map(|label| &label.bad_ranges) {
        lines.push(format!(
            "dirty data of {} at byte {offset} of the device is lost; reads of it fail",
            human_bytes(*len)
        ));
    }
    lines
}

/// For programs.
fn shape(found: &Found) -> Value {
    let report = &found.report;
    let label = |label: &LabelReport| {
        let ranges: Vec<Value> = label
            .bad_ranges
            .iter()
            .map(|(offset, len)| json!({ "offset": offset, "len": len }))
            .collect();
        json!({
            "backing_identity": label.identity,
            "backing_bytes": label.backing_bytes,
            "bad_ranges": ranges,
        })
    };
    json!({
        "cache_device": found.name,
        "format": "pcache",
        "size_bytes": found.size_bytes,
        "is_in_use": found.is_in_use,
        "segment_bytes": Geometry::KERNEL.segment_bytes,
        "segments": report.segments,
        "used_segments": report.used_segments,
        "gc_percent": report.gc_percent,
        "has_data_crc": report.has_data_crc,
        "head": report.head.to_string(),
        "dirty_tail": report.dirty_tail.to_string(),
        "key_tail": report.key_tail.to_string(),
        "keys": report.keys,
        "stale_keys": report.stale_keys,
        "dirty_bytes": report.dirty_bytes,
        "label": report.label.as_ref().map(label),
        "damage": damage(report),
    })
}
