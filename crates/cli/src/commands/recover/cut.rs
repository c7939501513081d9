//! `recover` of a cache device that was cut short. The device is not changed. The rest of its dirty
//! data is written to the origin, and the lost ranges are listed.

use std::path::Path;

use anyhow::{Result, bail};
use serde_json::json;
use udm::build::{self, SystemOpener};
use udm::pmem::Pmem;
use udm::pmem::dax::DaxPmem;
use udm::recovery::{Cut, Recovery};
use udm::sync::Arc;
use udm::table::{Table, Word};
use udm::targets::{CutCache, TargetType, cut_of};
use udm::units::human_bytes;

use super::super::remove::Interrupts;
use super::in_words_of_recover;
use crate::args::media::RecoverArgs;
use crate::output::{print_json, print_line, print_note};
use crate::progress::Progress;
use crate::runtime::RuntimeDir;

/// Ranges that are listed; `--json` has all.
const NAMED_MAX: usize = 16;

/// Whether the cache device is shorter than its superblock says.
pub fn find(args: &RecoverArgs) -> Result<Option<(&'static TargetType, CutCache)>> {
    let device = Word::new(&args.cache_device).device()?;
    let (path, area) = (Path::new(&device.path), device.options.area);
    let pmem: Arc<dyn Pmem> = Arc::new(DaxPmem::open_read_only(path, area)?);
    Ok(cut_of(&pmem, args.start_sector))
}

/// Writes back the rest of the dirty data.
pub fn recover(args: &RecoverArgs, table: &Table, found: &CutCache) -> Result<()> {
    let runtime = RuntimeDir::open()?;
    let opened = build::recover(table, &SystemOpener::with_memory_in(runtime.path()));
    let (mut recovery, origin) =
        opened.map_err(|error| in_words_of_recover(&anyhow::Error::from(error)))?;
    recovery.notes.iter().for_each(|note| print_note(note));
    let interrupts = Interrupts::take()?;
    let mut progress = Progress::new(format!("recover {}", args.cache_device));
    let dirty = recovery.dirty_bytes();
    let drained = recovery.write_back(&origin, |written| {
        if interrupts.is_interrupted() {
            let what = "interrupted, after it had begun to change the origin: run the command \
                        again with --rebind to start over";
            return Err(udm::error::Error::new(udm::error::Kind::Io, what));
        }
        progress.update(dirty - written, false);
        Ok(())
    })?;
    progress.finish();
    report(args, found.cut, &recovery, drained)
}

/// Reports the recovered and the lost data.
fn report(args: &RecoverArgs, cut: Cut, recovery: &Recovery, drained_bytes: u64) -> Result<()> {
    let RecoverArgs { cache_device, origin, .. } = args;
    let (lost, lost_bytes) = (recovery.lost(), recovery.lost_bytes());
    let is_all = lost.is_empty() && !recovery.has_more;
    if args.json.json {
        let range = |(at, len): &(u64, u64)| json!({ "offset": at, "len": len });
        print_json(&json!({
            "cache_device": cache_device,
            "origin": origin,
            "drained_bytes": drained_bytes,
            "dirty_bytes": 0,
            "damaged_bytes": lost_bytes,
            "lost_bytes": lost_bytes,
            "lost_ranges": lost.iter().map(range).collect::<Vec<_>>(),
            "lost_is_truncated": recovery.has_more,
            "wanted_bytes": cut.wanted_bytes,
            "left_bytes": cut.left_bytes,
        }))?;
    } else {
        for (at, len) in lost.iter().take(NAMED_MAX) {
            print_line(&format!("{origin}: lost: {len} bytes at byte {at}"))?;
        }
        if lost.len() > NAMED_MAX {
            let more = lost.len() - NAMED_MAX;
            print_line(&format!("{origin}: lost: {more} more ranges, which --json lists"))?;
        }
        if is_all {
            print_line(&format!(
                "{origin}: all dirty data of {cache_device} is written back ({}); the cache device \
                 is unchanged: erase its first 64 KiB before you use it again",
                human_bytes(drained_bytes)
            ))?;
        }
    }
    if is_all {
        return Ok(());
    }
    let more = if recovery.has_more { ", and more in unknown ranges" } else { "" };
    bail!(
        "{cache_device}: not all data was recovered: {cut}; {} of dirty data were written to \
         {origin}, and {} in {} ranges are lost{more}; the cache device is unchanged",
        human_bytes(drained_bytes),
        human_bytes(lost_bytes),
        lost.len()
    )
}
