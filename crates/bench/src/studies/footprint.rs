//! What a cache costs besides time: memory for each cached block, and bytes written to the cache
//! device for each byte that clients write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use anyhow::{Context, Result, ensure};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::disk::Ring;
use udm::error::Status;
use udm::local::Local;
use udm::pcache::{OpenOptions, shared_words};
use udm::pmem::{Medium, Pmem};
use udm::prng::Prng;
use udm::shm::SharedWords;
use udm::units::{GIB, MIB};

use crate::heap::bytes_in_use;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{CACHE_BYTES, Cache, Keeper, Setup, open_pmem, ram_disk};
use crate::unit::Unit;

/// A medium that counts what is stored to it.
#[derive(Debug)]
struct CountingPmem<P> {
    below: P,
    stored_bytes: AtomicU64,
}

impl<P: Pmem> Pmem for CountingPmem<P> {
    fn len_bytes(&self) -> u64 {
        self.below.len_bytes()
    }

    fn medium(&self) -> &Medium {
        self.below.medium()
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        self.stored_bytes.fetch_add(bytes.len() as u64, Relaxed);
        self.below.store(at, bytes);
    }

    fn zero(&self, at: u64, len: u64) {
        self.stored_bytes.fetch_add(len, Relaxed);
        self.below.zero(at, len);
    }

    fn load(&self, at: u64, into: &mut [u8]) -> std::result::Result<(), Status> {
        self.below.load(at, into)
    }

    fn drain(&self) -> std::result::Result<(), Status> {
        self.below.drain()
    }

    fn sync(&self) -> std::result::Result<(), Status> {
        self.below.sync()
    }
}

/// A load: its name, bytes of a write, whether each is FUA, a flush behind every so many.
const LOADS: [(&str, u64, bool, u64); 5] = [
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
        "Random writes; bytes stored to the cache device are counted at its door, once while \
         clients write (data and keys) and once more until all is written back and collected. \
         Memory is what the process has asked for after distinct blocks were cached, less what \
         it had before.",
    );
    memory(setup, &mut study)?;
    let written = setup.choose(16 * MIB, 128 * MIB);
    let columns = [("while writing", Unit::Number), ("with write-back", Unit::Number)];
    let mut table = Table::new("bytes stored per byte written", &columns);
    let names: Vec<&str> = LOADS.iter().map(|load| load.0).collect();
    let axis = Axis::linear("bytes stored per byte written", Unit::Number);
    let mut bars = Plot::bars("Bytes stored to the cache device per byte", &names, axis);
    let mut points = [Vec::new(), Vec::new()];
    for (nth, (name, len, fua, flush_every)) in LOADS.into_iter().enumerate() {
        let amount = if len == 512 { written / 8 } else { written };
        let ratios = amplification(setup, len, fua, flush_every, amount)?;
        table.row(name, &ratios);
        for (points, ratio) in points.iter_mut().zip(ratios) {
            points.push((nth as f64, ratio));
        }
        if nth == 0 {
            let promise = Some(Promise::AtMost(1.03));
            let what = "bytes stored per byte, 4 KiB writes";
            study.claims.push(Claim::new(what, &ratios[..1], promise));
        }
    }
    for (name, points) in ["while writing", "with write-back"].into_iter().zip(points) {
        bars.add(name, points);
    }
    study.tables.push(table);
    study.plots.push(bars);
    Ok(study)
}

/// Memory by the number of cached blocks.
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
    let cache = setup.cache("footprint", disk, "0")?;
    let mut writer = Writer::new(&cache, 4096)?;
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
    Keeper::new(&cache.device, Ring::without_kernel())?.drain();
    Ok(())
}

/// Writes from one buffer, one at a time.
struct Writer {
    local: Local,
    spare: Option<Buffer>,
}

impl Writer {
    fn new(cache: &Cache, len: u64) -> Result<Writer> {
        let mut buffer = Buffer::zeroed(len as usize);
        Prng::new(8).fill(buffer.as_mut_slice());
        Ok(Writer { local: Local::without_kernel(&cache.device)?, spare: Some(buffer) })
    }

    fn write(&mut self, offset: u64, fua: bool) -> Result<()> {
        let buffer = self.spare.take().context("a buffer got lost")?;
        self.local.submit(Bio::write(offset, buffer, fua, 0));
        let done = self.local.poll().context("the cache is full too early")?;
        ensure!(done.status.is_ok(), "a write failed");
        self.spare = Some(done.buffer);
        Ok(())
    }
}

/// Bytes stored per byte: while writing, and until all is written back.
fn amplification(
    setup: &Setup,
    len: u64,
    fua: bool,
    flush_every: u64,
    amount: u64,
) -> Result<[f64; 2]> {
    let below = open_pmem(&setup.places.memory.file("footprint-count", CACHE_BYTES)?)?;
    let pmem = Arc::new(CountingPmem { below, stored_bytes: AtomicU64::new(0) });
    let shared = SharedWords::private(shared_words(OpenOptions::new(1).stripes));
    let cache = Cache::open("count", pmem.clone(), ram_disk(GIB), "0", shared, true)?;
    let mut writer = Writer::new(&cache, len)?;
    let mut prng = Prng::new(6);
    let before = pmem.stored_bytes.load(Relaxed);
    for nth in 0..amount / len {
        writer.write(prng.below(GIB / len) * len, fua)?;
        if flush_every > 0 && (nth + 1).is_multiple_of(flush_every) {
            writer.local.flush().ok().context("a flush failed")?;
        }
    }
    writer.local.flush().ok().context("a flush failed")?;
    drop(writer);
    let stored = || (pmem.stored_bytes.load(Relaxed) - before) as f64 / amount as f64;
    let while_writing = stored();
    Keeper::new(&cache.device, Ring::without_kernel())?.drain();
    Ok([while_writing, stored()])
}
