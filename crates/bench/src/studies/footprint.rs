//! The cost of a cache in space: memory for each cached block, and bytes written to the cache
//! device for each byte that clients write.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result, ensure};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::device::Device;
use udm::disk::Ring;
use udm::local::Local;
use udm::pcache::{self, shared_words};
use udm::prng::Prng;
use udm::shm::SharedWords;
use udm::units::{GIB, MIB};
use udm::writecache::OpenOptions;
use udm::writecache::layout::Geometry;

use crate::args::TargetName;
use crate::background::Background;
use crate::counting::{CountingDisk, CountingPmem, Written};
use crate::heap::bytes_in_use;
use crate::pcache_rig::PcacheRig;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{CACHE_BYTES, Setup, open_disk, open_pmem, ram_disk};
use crate::targets::{Ground, open_writecache, writecache, writecache_memory};
use crate::unit::Unit;

/// Bytes of a region of the pcache's index.
const REGION: u64 = 4 * MIB;
/// Bytes of a writecache's block.
const BLOCK: u64 = 4096;
/// Blocks of it that are written to while its memory is counted.
const WRITTEN_MAX: u64 = 32_768;

/// A load: its name, bytes of a write, whether each is FUA, writes per flush.
type Load = (&'static str, u64, bool, u64);

const LOADS: [Load; 5] = [
    ("4 KiB", 4096, false, 0),
    ("4 KiB, flush behind every 32", 4096, false, 32),
    ("4 KiB, FUA", 4096, true, 0),
    ("512 B", 512, false, 0),
    ("64 KiB", 64 << 10, false, 0),
];

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let mut study = Study::new(
        "footprint",
        "memory per block, and bytes written per byte",
        "Random writes; bytes stored to the cache device are counted at its interface, once while \
         clients write (data and keys, or entries and counters) and once more until all is \
         written back and collected. Memory is what the process has asked for after distinct \
         blocks were cached, less what it had before. A writecache has all of it from the start, \
         for each block that it has room for; buffers of a client's I/O are not counted there.",
    );
    let is_pcache = setup.target == TargetName::Pcache;
    study.fact("target", setup.target.name());
    match is_pcache {
        true => {
            memory(setup, &mut study)?;
            memory_of_scattered(setup, &mut study)?;
        }
        false => writecache_memory_by_blocks(setup, &mut study)?,
    }
    let written = setup.choose(16 * MIB, 128 * MIB);
    let mut columns = vec![("while writing", Unit::Number), ("with write-back", Unit::Number)];
    if !is_pcache {
        columns.push(("of that, metadata", Unit::Number));
    }
    let mut table = Table::new("bytes stored per byte written", &columns);
    let loads: Vec<_> = LOADS.into_iter().filter(|load| is_pcache || load.1 >= BLOCK).collect();
    let names: Vec<&str> = loads.iter().map(|load| load.0).collect();
    let axis = Axis::linear("bytes stored per byte written", Unit::Number);
    let mut bars = Plot::bars("Bytes stored to the cache device per byte", &names, axis);
    let mut points = vec![Vec::new(); columns.len()];
    for (nth, load) in loads.iter().enumerate() {
        let amount = if load.1 == 512 { written / 8 } else { written };
        let ratios = amplification(setup, load, amount)?;
        table.row(load.0, &ratios[..columns.len()]);
        for (points, ratio) in points.iter_mut().zip(ratios) {
            points.push((nth as f64, ratio));
        }
        if nth == 0 {
            let promise = Some(Promise::AtMost(1.03));
            let what = "bytes stored per byte, 4 KiB writes";
            study.claims.push(Claim::new(what, &ratios[..1], promise));
        }
    }
    for ((name, _), points) in columns.into_iter().zip(points) {
        bars.add(name, points);
    }
    study.tables.push(table);
    study.plots.push(bars);
    Ok(study)
}

/// A pcache's memory by the number of cached blocks.
fn memory(setup: &Setup, study: &mut Study) -> Result<()> {
    let counts: &[u64] = setup.choose(&[4096, 32_768], &[4096, 32_768, 65_536, 98_304]);
    let columns = [("memory", Unit::Bytes), ("per block", Unit::Bytes)];
    let mut table = Table::new("memory of the process, by 4 KiB blocks cached", &columns);
    let mut plot = Plot::lines(
        "Memory per cached 4 KiB block",
        Axis::linear("blocks", Unit::Number),
        Axis::linear("bytes per block", Unit::Number),
    );
    let disk = ram_disk(GIB);
    let cache = setup.roomy_pcache("footprint", disk, "0")?;
    let mut writer = Writer::new(&cache.device, 4096)?;
    // The first write makes what does not depend on the number of blocks.
    writer.write(0, false)?;
    let before = bytes_in_use();
    let (mut done, mut points) = (1, Vec::new());
    for &count in counts {
        for block in done..count {
            writer.write(block * 4096, false)?;
        }
        done = count;
        let bytes = bytes_in_use().saturating_sub(before) as f64;
        table.row(format!("{count} blocks"), &[bytes, bytes / count as f64]);
        points.push((count as f64, bytes / count as f64));
    }
    let last = points.last().map_or(f64::NAN, |point| point.1);
    plot.add("pcache", points);
    let promise = Some(Promise::AtMost(12.0));
    study.claims.push(Claim::new("bytes of memory per 4 KiB block", &[last], promise));
    study.tables.push(table);
    study.plots.push(plot);
    drop(writer);
    Background::new(&cache.device, Ring::without_kernel())?.drain();
    Ok(())
}

/// A pcache's memory by how scattered what it caches is: a large device of which little is hot.
fn memory_of_scattered(setup: &Setup, study: &mut Study) -> Result<()> {
    let blocks: u64 = setup.choose(4096, 32_768);
    let columns = [("memory", Unit::Bytes), ("per block", Unit::Bytes)];
    let what = format!("memory of the process, {blocks} blocks of 4 KiB cached");
    let mut table = Table::new(what, &columns);
    let names = ["all", "3 in 4", "half", "a tenth", "1 in 100"];
    let axis = Axis::linear("bytes per block", Unit::Number);
    let mut plot =
        Plot::bars("Memory per block, by how many of each 4 MiB are cached", &names, axis);
    let mut points = Vec::new();
    for (nth, (name, per_region)) in names.iter().zip([1024, 768, 512, 102, 10]).enumerate() {
        // Its memory is not taken before something is written back.
        let disk = ram_disk(blocks.div_ceil(per_region) * REGION);
        let cache = setup.roomy_pcache("footprint-scattered", disk, "0")?;
        let mut writer = Writer::new(&cache.device, 4096)?;
        writer.write(0, false)?;
        let before = bytes_in_use();
        for block in 1..blocks {
            let at = block % per_region * (REGION / 4096 / per_region) * 4096;
            writer.write(block / per_region * REGION + at, false)?;
        }
        let bytes = bytes_in_use().saturating_sub(before) as f64;
        let name = format!("{name} of each 4 MiB");
        table.row(name, &[bytes, bytes / blocks as f64]);
        points.push((nth as f64, bytes / blocks as f64));
    }
    plot.add("pcache", points);
    study.tables.push(table);
    study.plots.push(plot);
    Ok(())
}

/// A writecache's memory by the number of its blocks.
fn writecache_memory_by_blocks(setup: &Setup, study: &mut Study) -> Result<()> {
    let counts: &[u64] = setup.choose(&[16_384, 131_072], &[131_072, 524_288, 1_048_576]);
    let columns = [("memory", Unit::Bytes), ("per block", Unit::Bytes)];
    let mut table = Table::new("memory of the process, by blocks of the cache", &columns);
    let mut plot = Plot::lines(
        "Memory per block of the cache",
        Axis::linear("blocks", Unit::Number),
        Axis::linear("bytes per block", Unit::Number),
    );
    let mut points = Vec::new();
    for &count in counts {
        let bytes = writecache_memory_of(setup, count)? as f64;
        table.row(format!("{count} blocks"), &[bytes, bytes / count as f64]);
        points.push((count as f64, bytes / count as f64));
    }
    // The memory that a cache of any size needs is not counted for its blocks.
    let (least, most) = (points[0], points[points.len() - 1]);
    let per_block = (most.1 * most.0 - least.1 * least.0) / (most.0 - least.0);
    plot.add(setup.target.name(), points);
    let promise = Some(Promise::AtMost(24.0));
    study.claims.push(Claim::new("bytes of memory for each block more", &[per_block], promise));
    study.tables.push(table);
    study.plots.push(plot);
    study.notes.push("The kernel's has 72 bytes per block, and in mode s its metadata too.".into());
    Ok(())
}

/// Memory of a writecache of this many blocks, half of which are written to.
fn writecache_memory_of(setup: &Setup, count: u64) -> Result<u64> {
    // All of a file in memory is there; on a disk, only what is written.
    let (block, ground) = match setup.target {
        TargetName::WritecacheP => {
            let path = setup.places.memory.file("footprint", (count + 32) * (512 + 16))?;
            (512, Ground::Memory(Arc::new(open_pmem(&path)?)))
        }
        _ => {
            let path = setup.places.disk.file("footprint", (count + 32) * (4096 + 16))?;
            (4096, Ground::Disk(Arc::new(open_disk(&path)?)))
        }
    };
    let (origin, shared) = (ram_disk(2 * count * block), writecache_memory());
    let options = OpenOptions { force_format: true, ..OpenOptions::new(1) };
    let before = bytes_in_use();
    let words = format!("{block} 4 high_watermark 100 low_watermark 100");
    let device = open_writecache(&words, origin, ground, shared, &options)?;
    let mut writer = Writer::new(&device, block)?;
    for nth in 0..(count / 2).min(WRITTEN_MAX) {
        writer.write(nth * block, false)?;
    }
    // With it go the buffers of its I/O, which do not depend on the number of blocks.
    drop(writer);
    let bytes = bytes_in_use() - before;
    Background::new(&device, Ring::new(64)?)?.drain();
    Ok(bytes)
}

/// Writes from one buffer, one at a time.
struct Writer {
    local: Local,
    spare: Option<Buffer>,
}

impl Writer {
    fn new(device: &Arc<Device>, len: u64) -> Result<Writer> {
        let mut buffer = Buffer::zeroed(len as usize);
        Prng::new(8).fill(buffer.as_mut_slice());
        Ok(Writer { local: Local::new(device)?, spare: Some(buffer) })
    }

    fn write(&mut self, offset: u64, fua: bool) -> Result<()> {
        let buffer = self.spare.take().context("a buffer got lost")?;
        self.local.submit(Bio::write(offset, buffer, fua, 0));
        let done = self.local.wait().context("a write got lost")?;
        ensure!(done.status.is_ok(), "a write failed");
        self.spare = Some(done.buffer);
        Ok(())
    }
}

/// Bytes stored per byte: while writing, until all is written back, and of a writecache's metadata.
fn amplification(setup: &Setup, load: &Load, amount: u64) -> Result<[f64; 3]> {
    let (_, len, fua, flush_every) = *load;
    let written = Arc::new(Written::default());
    let device = counted(setup, &written)?;
    let mut writer = Writer::new(&device, len)?;
    let mut prng = Prng::new(6);
    let (before, metadata_before) = written.now();
    for nth in 0..amount / len {
        writer.write(prng.below(GIB / len) * len, fua)?;
        if flush_every > 0 && (nth + 1).is_multiple_of(flush_every) {
            writer.local.flush().ok().context("a flush failed")?;
        }
    }
    writer.local.flush().ok().context("a flush failed")?;
    drop(writer);
    let per_byte = |bytes: u64| bytes as f64 / amount as f64;
    let while_writing = per_byte(written.now().0 - before);
    Background::new(&device, Ring::new(64)?)?.drain();
    let (bytes, metadata) = written.now();
    Ok([while_writing, per_byte(bytes - before), per_byte(metadata - metadata_before)])
}

/// A fresh cache whose device counts.
fn counted(setup: &Setup, written: &Arc<Written>) -> Result<Arc<Device>> {
    let origin = ram_disk(GIB);
    let memory = || -> Result<_> {
        let below = open_pmem(&setup.places.memory.file("footprint-count", CACHE_BYTES)?)?;
        Ok(Arc::new(CountingPmem { below, written: written.clone() }))
    };
    let ground = match setup.target {
        TargetName::Pcache => {
            let shared = SharedWords::private(shared_words(pcache::OpenOptions::new(1).stripes));
            return Ok(PcacheRig::open("count", memory()?, origin, "0", shared, true)?.device);
        }
        TargetName::WritecacheP => Ground::Memory(memory()?),
        // How many bytes there are does not depend on the disk.
        TargetName::WritecacheS => {
            let below = ram_disk(CACHE_BYTES);
            Ground::Disk(Arc::new(CountingDisk { below, written: written.clone() }))
        }
    };
    let geometry = Geometry::of_size(0, CACHE_BYTES, BLOCK as u32);
    let geometry = geometry.ok().context("a cache has room")?;
    written.metadata_end.store(geometry.data_at, Relaxed);
    writecache(&format!("{BLOCK} 0"), origin, ground)
}
