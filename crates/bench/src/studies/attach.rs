//! How long a writecache takes to open, compared with a bare read of its metadata: by the number of
//! its entries, and by their content.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::local::Local;
use udm::prng::Prng;
use udm::writecache::OpenOptions;
use udm::writecache::format::format;
use udm::writecache::inspect::load_geometry;
use udm::writecache::layout::{ENTRY_BYTES, SEQ_COUNT_AT, SUPERBLOCK_BYTES};
use udm::writecache::media::Medium;

use crate::args::TargetName;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Setup, open_disk, open_untouched, ram_disk};
use crate::stats::{median, ratios};
use crate::targets::{
    Ground, disk_in_words, forget, memory_in_words, open_writecache, writecache_memory,
};
use crate::unit::Unit;

/// The position of the number of entries in the superblock.
const BLOCKS_AT: u64 = 16;
/// The commit counter of a cache that was in use for a while.
const SEQ: u64 = 1000;
/// Older versions, and entries without a commit, that a crash leaves at most: a batch.
const BATCH: u64 = 65_536;

/// The contents of the entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// All are free.
    Free,
    /// Each is the only one of its block; blocks in random order.
    Live,
    /// So are most; a batch was being committed, whose entries are there before the counter, and
    /// the older versions of the one before are not marked free.
    Crash,
}

const KINDS: [(&str, Left); 3] =
    [("empty", Left::Free), ("full", Left::Live), ("full, after a crash", Left::Crash)];

/// Times of one cache, round by round.
#[derive(Clone, Debug, Default)]
struct Times {
    bare: Vec<f64>,
    attach: Vec<f64>,
    first_read: Vec<f64>,
}

/// Where caches are made.
struct Fixture {
    path: PathBuf,
    is_memory: bool,
    block_bytes: u32,
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let repeats = setup.repeats(3, 7);
    let counts: &[u64] = setup.choose(&[10_000, 100_000], &[100_000, 500_000, 1_000_000]);
    let mut study = Study::new(
        "recovery",
        "how long attaching takes, by entries",
        "Metadata as a writecache leaves it is made by hand: empty, full of blocks \
         in random order, and as a crash leaves it (of one batch the entries without their \
         commit, of another the older versions). Then all processors open it, if it is large, in \
         turns with a bare read of the metadata to memory. The first read is timed from the \
         opening of the medium.",
    );
    let fixture = Fixture::new(setup, &mut study, counts[counts.len() - 1])?;
    study.fact("repeats", repeats.to_string());
    let columns = [
        ("bare read", Unit::Nanos),
        ("attach", Unit::Nanos),
        ("first read", Unit::Nanos),
        ("entries per second", Unit::PerSecond),
    ];
    let mut table = Table::new("attach", &columns);
    let mut plot = Plot::lines(
        "Attach time, by entries",
        Axis::log("entries", Unit::Number),
        Axis::log("time", Unit::Nanos),
    );
    let mut found = Vec::new();
    for (kind, left) in KINDS {
        let (mut points, mut bare) = (Vec::new(), Vec::new());
        for &count in counts {
            let times = fixture.measure(count, left, repeats)?;
            let nanos = median(&times.attach);
            let rate = count as f64 * 1e9 / nanos;
            let label = format!("{} entries, {kind}", Unit::PerSecond.text(count as f64));
            table
                .row(label.clone(), &[median(&times.bare), nanos, median(&times.first_read), rate]);
            study.repeats(label, Unit::Nanos, &times.attach);
            points.push((count as f64, nanos));
            bare.push((count as f64, median(&times.bare)));
            found.push(times);
        }
        plot.add(kind, points);
        if left == Left::Crash {
            plot.add("bare read of the metadata", bare);
        }
    }
    study.tables.push(table);
    study.plots.push(plot);
    claims(&mut study, &found, counts);
    Ok(study)
}

/// `found`: by kind, then by count.
fn claims(study: &mut Study, found: &[Times], counts: &[u64]) {
    let many = counts[counts.len() - 1] as f64;
    let of_largest = |kind: usize| &found[kind * counts.len() + counts.len() - 1];
    for nth in [1, 2] {
        let times = of_largest(nth);
        let rates: Vec<f64> = times.attach.iter().map(|nanos| many * 1000.0 / nanos).collect();
        let what = format!("million entries per second, largest cache, {}", KINDS[nth].0);
        study.claims.push(Claim::new(what, &rates, None));
    }
    for (nth, (kind, _)) in KINDS.into_iter().enumerate() {
        let times = of_largest(nth);
        let what = format!("attach / bare read of the metadata, {kind}");
        study.claims.push(Claim::new(what, &ratios(&times.attach, &times.bare), None));
    }
    let first: Vec<f64> = found[0].first_read.iter().map(|nanos| nanos / 1e6).collect();
    let what = "milliseconds until the first read, small empty cache";
    study.claims.push(Claim::new(what, &first, Some(Promise::AtMost(50.0))));
}

impl Fixture {
    /// A place for caches of up to `count` entries.
    fn new(setup: &Setup, study: &mut Study, count: u64) -> Result<Fixture> {
        study.fact("target", setup.target.name());
        let is_memory = setup.target == TargetName::WritecacheP;
        // All of a file in memory is there; on a disk, only what is written.
        let (folder, block_bytes) = match is_memory {
            true => (&setup.places.memory, 512),
            false => (&setup.places.disk, 4096),
        };
        let bytes = (count + 2048) * (u64::from(block_bytes) + ENTRY_BYTES);
        let path = setup.cache_path(folder, "recovery", bytes)?;
        let fixture = Fixture { path, is_memory, block_bytes };
        let cache = match is_memory {
            true => memory_in_words(&open_untouched(&fixture.path)?),
            false => disk_in_words(&fixture.path, &open_disk(&fixture.path)?),
        };
        study.fact("cache", cache);
        study.fact("bytes of a block", block_bytes.to_string());
        Ok(fixture)
    }

    fn open(&self) -> Result<Ground> {
        Ok(match self.is_memory {
            true => Ground::Memory(Arc::new(open_untouched(&self.path)?)),
            false => Ground::Disk(Arc::new(open_disk(&self.path)?)),
        })
    }

    fn medium(&self) -> Result<Medium> {
        Ok(match self.open()? {
            Ground::Memory(pmem) => Medium::Pmem(pmem),
            Ground::Disk(disk) => Medium::Disk(disk),
        })
    }

    /// Makes a cache and opens it again and again.
    fn measure(&self, count: u64, left: Left, repeats: usize) -> Result<Times> {
        forget(&self.path)?;
        self.make(count, left)?;
        let mut times = Times::default();
        for _ in 0..repeats {
            times.bare.push(self.bare_read(count)?);
            let (attach, first_read) = self.attach(count, left)?;
            times.attach.push(attach);
            times.first_read.push(first_read);
        }
        Ok(times)
    }

    /// Blocks of the origin: twice as many as entries.
    fn origin_blocks(count: u64) -> u64 {
        count * 2
    }

    /// A cache whose first `count` entries are as `left` says. An attach sees no others, as if
    /// the device had grown unnoticed.
    fn make(&self, count: u64, left: Left) -> Result<()> {
        let medium = self.medium()?;
        format(&medium, 0, self.block_bytes)?;
        let (_, geometry) = load_geometry(&medium, 0, Some(self.block_bytes))?;
        ensure!(geometry.blocks >= count, "the cache device is too small");
        let entries = entries(count, left, geometry.block_sectors());
        medium.store(geometry.entry_at(0), &entries)?;
        medium.store(BLOCKS_AT, &count.to_le_bytes())?;
        // The block of the first read has data: a hole in the file would be a loss.
        let (_, geometry) = load_geometry(&medium, 0, Some(self.block_bytes))?;
        for (nth, entry) in entries.chunks_exact(ENTRY_BYTES as usize).enumerate() {
            if entry.starts_with(&[0; 8]) {
                let block = vec![1; self.block_bytes as usize];
                medium.store(geometry.block_at(nth as u64), &block)?;
            }
        }
        medium.store(SEQ_COUNT_AT, &SEQ.to_le_bytes())?;
        Ok(medium.settle()?)
    }

    /// Nanoseconds to bring the metadata to memory, as an attach does.
    fn bare_read(&self, count: u64) -> Result<f64> {
        let medium = self.medium()?;
        let start = Instant::now();
        let mut bytes = vec![0; (count * ENTRY_BYTES) as usize];
        medium.load(SUPERBLOCK_BYTES, &mut bytes)?;
        let nanos = start.elapsed().as_nanos() as f64;
        std::hint::black_box(&bytes);
        Ok(nanos)
    }

    /// Nanoseconds of the attach, and those until the first read was done.
    fn attach(&self, count: u64, left: Left) -> Result<(f64, f64)> {
        let block_bytes = u64::from(self.block_bytes);
        let origin = ram_disk(Fixture::origin_blocks(count) * block_bytes);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let options = OpenOptions { threads, ..OpenOptions::new(1) };
        let words = format!("{block_bytes} 0");
        // The time does not include the end of the previous device's work.
        drop(self.open()?);
        let start = Instant::now();
        let ground = self.open()?;
        // Mapping the memory is the business of the opener, not of the attach.
        let opened = Instant::now();
        let device = open_writecache(&words, origin, ground, writecache_memory(), &options)?;
        let attach = opened.elapsed().as_nanos() as f64;
        let mut local = Local::new(&device)?;
        local.submit(Bio::read(0, Buffer::zeroed(self.block_bytes as usize), 0));
        let done = local.wait().context("the first read got lost")?;
        let first_read = start.elapsed().as_nanos() as f64;
        ensure!(done.status.is_ok(), "the first read failed");
        let live = count - if left == Left::Crash { 2 * batch(count) } else { 0 };
        let dirty = if left == Left::Free { 0 } else { live * block_bytes };
        ensure!(device.dirty().bytes == dirty, "{} bytes are dirty", device.dirty().bytes);
        Ok((attach, first_read))
    }
}

/// Entries without a commit, and as many older versions, in a cache of `count`.
fn batch(count: u64) -> u64 {
    BATCH.min(count / 16)
}

/// `count` entries in the state `left`, as they are on the medium.
fn entries(count: u64, left: Left, block_sectors: u64) -> Vec<u8> {
    if left == Left::Free {
        return vec![0xFF; (count * ENTRY_BYTES) as usize];
    }
    let mut prng = Prng::new(count);
    let mut blocks: Vec<u64> = (0..Fixture::origin_blocks(count)).collect();
    for nth in 0..blocks.len() - 1 {
        let other = nth + prng.below((blocks.len() - nth) as u64) as usize;
        blocks.swap(nth, other);
    }
    let entry = |nth: usize, seq: u64| [blocks[nth] * block_sectors, seq];
    let mut entries: Vec<[u64; 2]> = (0..count as usize).map(|nth| entry(nth, SEQ - 1)).collect();
    if left == Left::Crash {
        // Somewhere among the others: one in this many, and the one after it.
        let batch = batch(count) as usize;
        let step = count as usize / batch;
        for nth in 0..batch {
            entries[nth * step] = entry(nth * step, SEQ);
            entries[nth * step + 1] = entry(nth * 7919 % batch * step + 2, SEQ - 2);
        }
    }
    entries.iter().flatten().flat_map(|word| word.to_le_bytes()).collect()
}
