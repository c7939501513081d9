//! `recover` of a cache with a metadata device: its dirty blocks are copied to the origin, flushed
//! there, and then marked clean, a batch at a time.

use anyhow::{Result, bail};
use serde_json::json;
use udm::cache::binding;
use udm::cache::drain::{Devices, Drain};
use udm::cache::metadata::load;
use udm::disk::{Claims, Disk, FileDisk, FileOptions, OpenMode};
use udm::sync::Arc;
use udm::table::{DeviceOptions, DeviceWord, Word};
use udm::units::human_bytes;

use super::super::remove::Interrupts;
use crate::args::RecoverArgs;
use crate::commands::print_result;
use crate::progress::Progress;

/// Unreadable slots that are named.
const NAMED_MAX: usize = 16;

/// Writes back what is dirty. `args` names the metadata device, the cache device and the origin.
pub fn recover(args: &RecoverArgs, origin: &str) -> Result<()> {
    let (metadata, cache) = (&args.cache_device, &args.origin);
    let options = [
        (args.truncate, "--truncate"),
        (args.accept_loss, "--accept-loss"),
        (args.start_sector != 0, "--start-sector"),
    ];
    if let Some((_, option)) = options.iter().find(|(is_given, _)| *is_given) {
        bail!("{option} has no meaning for a cache with a metadata device");
    }
    // Each is opened for this process alone: in use by another, it is refused.
    let mode = if args.dry_run { OpenMode::Shared } else { OpenMode::Exclusive };
    // Two of them may be parts of one device.
    let parts = Claims::apart();
    let open = |word: &str| -> Result<Arc<dyn Disk>> {
        let DeviceWord { path, options, .. } = Word::new(word).device()?;
        let DeviceOptions { io, reads, window, area, .. } = options;
        let options = FileOptions { mode, io: io.unwrap_or_default(), reads, window, area };
        Ok(Arc::new(FileDisk::open_shared(&path, &options, &parts)?))
    };
    let devices = Devices { metadata: open(metadata)?, cache: open(cache)?, origin: open(origin)? };
    let loaded = load(&devices.metadata).map_err(|error| error.at(metadata))?;
    if !args.rebind {
        binding::check(&devices, &loaded.superblock, "--rebind says so")?;
    }
    let mut drain = Drain::new(devices, loaded)?;
    let dirty = drain.left_bytes();
    if args.dry_run {
        let text = format!(
            "{origin}: {} would be written, and then {metadata} would say that all is clean",
            human_bytes(dirty)
        );
        return report(args, origin, &text, 0, dirty, 0);
    }
    let interrupts = Interrupts::take()?;
    let mut progress = Progress::new(format!("recover {metadata}"));
    progress.update(dirty, false);
    while !drain.is_done() {
        drain.step()?;
        progress.update(drain.left_bytes(), false);
        if interrupts.is_interrupted() && !drain.is_done() {
            progress.pause();
            bail!(
                "interrupted; {} of dirty data stay safe in {cache}: give the command again to go \
                 on",
                human_bytes(drain.left_bytes())
            );
        }
    }
    progress.finish();
    let lost = drain.unreadable();
    let lost_bytes = lost.len() as u64 * drain.block_bytes();
    let text = match lost.len() {
        0 => format!("{origin}: it has everything that {cache} had"),
        _ => String::new(),
    };
    report(args, origin, &text, dirty - lost_bytes, lost_bytes, lost_bytes)?;
    if lost.is_empty() {
        return Ok(());
    }
    let more = if lost.len() > NAMED_MAX { " and more" } else { "" };
    let named: Vec<String> = lost.iter().take(NAMED_MAX).map(u64::to_string).collect();
    bail!(
        "{cache}: {} in blocks {}{more} cannot be read, and stay dirty; all else was written to \
         {origin}",
        human_bytes(lost_bytes),
        named.join(", ")
    )
}

fn report(
    args: &RecoverArgs,
    origin: &str,
    text: &str,
    drained_bytes: u64,
    dirty_bytes: u64,
    damaged_bytes: u64,
) -> Result<()> {
    let value = json!({
        "metadata": args.cache_device,
        "cache_device": args.origin,
        "origin": origin,
        "drained_bytes": drained_bytes,
        "dirty_bytes": dirty_bytes,
        "damaged_bytes": damaged_bytes,
    });
    print_result(args.json, text, &value)
}
