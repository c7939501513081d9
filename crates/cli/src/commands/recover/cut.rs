//! `recover` of a cache device that was cut short: nothing more is written to it. The rest of its
//! dirty data goes to the origin, and what is lost is listed.

use std::path::Path;

use anyhow::{Result, bail};
use serde_json::json;
use udm::pmem::Pmem;
use udm::pmem::dax::DaxPmem;
use udm::rescue::{Cut, Salvage};
use udm::sync::Arc;
use udm::table::{Table, Word};
use udm::targets::{CutCache, TargetType, cut_of};
use udm::units::human_bytes;
use udm::world::{self, SystemOpener, make_absolute};

use super::super::remove::Interrupts;
use super::{asked, in_words_of_recover, without_place};
use crate::args::RecoverArgs;
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
pub fn recover(args: &RecoverArgs, kind: &TargetType, found: &CutCache) -> Result<()> {
    let runtime = RuntimeDir::open()?;
    let opener = SystemOpener::with_memory_in(runtime.path());
    let mut table = Table::parse(&kind.recovery_table(&found.shape, &asked(args)))?;
    make_absolute(&mut table, &std::env::current_dir()?);
    let opened = world::salvage(&table, &opener);
    let (mut salvage, origin) =
        opened.map_err(|error| in_words_of_recover(&without_place(&anyhow::Error::from(error))))?;
    salvage.notes.iter().for_each(|note| print_note(note));
    let interrupts = Interrupts::take()?;
    let mut progress = Progress::new(format!("recover {}", args.cache_device));
    let dirty = salvage.dirty_bytes();
    let drained = salvage.write_back(&origin, |written| {
        if interrupts.is_interrupted() {
            let what = "interrupted; give the command again to start over";
            return Err(udm::error::Error::new(udm::error::Kind::Io, what));
        }
        progress.update(dirty - written, false);
        Ok(())
    })?;
    progress.finish();
    report(args, found.cut, &salvage, drained)
}

/// Reports what came back, and what did not.
fn report(args: &RecoverArgs, cut: Cut, salvage: &Salvage, drained_bytes: u64) -> Result<()> {
    let RecoverArgs { cache_device, origin, .. } = args;
    let (lost, lost_bytes) = (salvage.lost(), salvage.lost_bytes());
    let is_all = lost.is_empty() && !salvage.has_more;
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
            "has_more_lost": salvage.has_more,
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
                "{origin}: it has everything that {cache_device} had ({} written), which \
                 stays as it is: erase its first 64 KiB before it is used again",
                human_bytes(drained_bytes)
            ))?;
        }
    }
    if is_all {
        return Ok(());
    }
    let more = if salvage.has_more { ", and more that cannot be named" } else { "" };
    bail!(
        "{cache_device}: not everything came back: {cut}; {} of dirty data were written to \
         {origin}, and {} in {} ranges are lost{more}; the cache device stays as it is",
        human_bytes(drained_bytes),
        human_bytes(lost_bytes),
        lost.len()
    )
}
