//! `recover` of a cache with a metadata device: its dirty blocks are copied to the origin, flushed
//! there, and then marked clean, a batch at a time.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::json;
use udm::cache::Devices;
use udm::cache::binding;
use udm::cache::drain::Drain;
use udm::cache::metadata::load;
use udm::disk::{Claims, Disk, FileDisk, FileOptions, OpenMode};
use udm::pmem::Pmem;
use udm::pmem::dax::DaxPmem;
use udm::sync::Arc;
use udm::table::{DeviceOptions, DeviceWord, Table, Word};
use udm::targets::{Fast, TargetType, Wanted};
use udm::units::{SECTOR, human_bytes};

use super::super::remove::Interrupts;
use crate::args::media::RecoverArgs;
use crate::commands::print_result;
use crate::progress::Progress;

/// Unreadable slots that are named.
const NAMED_MAX: usize = 16;

/// The names of the three devices.
#[derive(Debug)]
pub struct Words {
    /// The device with the metadata.
    pub metadata: String,
    /// The device with the blocks.
    pub cache: String,
    /// The origin.
    pub origin: String,
}

impl Words {
    /// The metadata and the blocks share a device, as `create --fast` lays them out.
    pub fn on_one_device(args: &RecoverArgs, kind: &TargetType) -> Result<Words> {
        let device = Word::new(&args.cache_device).device()?;
        let (path, area) = (Path::new(&device.path), device.options.area);
        let pmem: Arc<dyn Pmem> = Arc::new(DaxPmem::open_read_only(path, area)?);
        let wanted = Wanted {
            origin: &args.origin,
            origin_bytes: SECTOR,
            fast: &args.cache_device,
            fast_bytes: pmem.len_bytes(),
            nature: Fast::Disk,
            origin_block_bytes: SECTOR,
            fast_block_bytes: SECTOR,
            mode: None,
            policy: None,
            block_bytes: None,
            found: kind.shape_of(&pmem),
        };
        let (name, kind_name) = (&args.cache_device, kind.name);
        let has_shape = wanted.found.is_some();
        let line = has_shape.then(|| kind.line(&wanted)).transpose();
        let line = line.with_context(|| {
            format!("{name} has the metadata of a {kind_name}: give META CACHE ORIGIN")
        })?;
        let line = line.with_context(|| {
            format!("{name} has the metadata of a {kind_name}, which is damaged: `udm cache check`")
        })?;
        let table = Table::parse(&line)?;
        let words = &table.lines[0].args;
        let word = |nth: usize| words[nth].text.clone();
        Ok(Words { metadata: word(0), cache: word(1), origin: word(2) })
    }

    /// A table that names the three devices, to identify them.
    pub fn table(&self) -> String {
        let words = [&self.metadata, &self.cache, &self.origin];
        let [metadata, cache, origin] = words.map(|word| Word::new(word.as_str()).quoted());
        format!("0 1 cache {metadata} {cache} {origin} 128 0 default 0")
    }
}

/// Writes back the dirty data.
pub fn recover(args: &RecoverArgs, words: &Words) -> Result<()> {
    let Words { metadata, cache, origin } = words;
    let options = [(args.truncate, "--truncate"), (args.start_sector != 0, "--start-sector")];
    if let Some((_, option)) = options.iter().find(|(is_given, _)| *is_given) {
        bail!("{option} does not apply to a cache with a metadata device");
    }
    // Each device is opened exclusively: a device in use by another process is refused.
    let mode = if args.dry_run { OpenMode::Shared } else { OpenMode::Exclusive };
    // Two of the devices may be parts of the same device.
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
        binding::check(&devices, &loaded.superblock, "give --rebind")?;
    }
    let mut drain = Drain::new(devices, loaded, (!args.rebind).then_some("give --rebind"))?;
    let dirty = drain.left_bytes();
    if args.dry_run {
        let text = format!(
            "{origin}: {} would be written, and all blocks marked as clean in {metadata}",
            human_bytes(dirty)
        );
        return report(args, words, &text, 0, dirty, 0);
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
                "interrupted; {} of dirty data are still safe in {cache}: run the command again to \
                 continue",
                human_bytes(drain.left_bytes())
            );
        }
    }
    drain.finish()?;
    progress.finish();
    let lost = drain.unreadable();
    let lost_bytes = lost.len() as u64 * drain.block_bytes();
    let text = match lost.len() {
        0 => format!("{origin}: all dirty data of {cache} is written back"),
        _ => String::new(),
    };
    report(args, words, &text, dirty - lost_bytes, lost_bytes, lost_bytes)?;
    if lost.is_empty() {
        return Ok(());
    }
    let more = if lost.len() > NAMED_MAX { " and more" } else { "" };
    let named: Vec<String> = lost.iter().take(NAMED_MAX).map(u64::to_string).collect();
    bail!(
        "{cache}: {} in blocks {}{more} cannot be read, and stay dirty; all other dirty blocks \
         were written to {origin}",
        human_bytes(lost_bytes),
        named.join(", ")
    )
}

fn report(
    args: &RecoverArgs,
    words: &Words,
    text: &str,
    drained_bytes: u64,
    dirty_bytes: u64,
    damaged_bytes: u64,
) -> Result<()> {
    let value = json!({
        "metadata": words.metadata,
        "cache_device": words.cache,
        "origin": words.origin,
        "drained_bytes": drained_bytes,
        "dirty_bytes": dirty_bytes,
        "damaged_bytes": damaged_bytes,
    });
    print_result(args.json, text, &value)
}
