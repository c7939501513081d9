//! What stays in the cache: the share of references that find their block there, for the engine
//! itself with each of its policies, and for the policies of the literature on paper.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use udm::disk::{Disk, DiskIo, DiskLimits, Ring};
use udm::local::{Local, ManualClock};
use udm::pcache::layout::Geometry;
use udm::pcache::{OpenOptions, shared_words};
use udm::pmem::Pmem;
use udm::shm::SharedWords;
use udm::units::{BLOCK, SECOND};

use crate::policies::Policy;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Cache, Setup, open_pmem};
use crate::trace::Trace;
use crate::unit::Unit;

/// Cache sizes, in percent of the different blocks of the trace.
const SIZES: [f64; 8] = [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0];
/// Segments of the cache that is scaled down: as many as one of 16 GiB has.
const SEGMENTS: u64 = 1023;
/// But none is smaller than this: then there are fewer, so the reserves weigh more than in a real
/// cache, and of a request that is longer than a few segments not all is cached.
const SEGMENT_BLOCKS_MIN: u64 = 4;
/// Bytes of a segment that are not data.
const SEGMENT_META_BYTES: u64 = 12 << 10;
/// After so many requests a tenth of a second has passed.
const REQUESTS_PER_TICK: usize = 1000;
/// A flush ends a key set after so large a share of the cache (1 / n) in requests.
const REQUESTS_SHARE: u64 = 256;
/// So far below the best of the policies on paper the engine may be, in percent.
const TOLERANCE: f64 = 0.5;

/// A disk without content: hits are counted, data is not looked at.
#[derive(Debug)]
struct VoidDisk(DiskLimits);

impl Disk for VoidDisk {
    fn limits(&self) -> &DiskLimits {
        &self.0
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        ring.finish(io, Ok(()));
    }
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let trace = match setup.trace() {
        Some(path) => Trace::read(path)?,
        None => Trace::synthetic(1, setup.choose(60_000, 600_000)),
    };
    let mut study = Study::new(
        "hitratio",
        "what stays in the cache: the share of references that find their block there",
        "The requests of a trace go to the engine, in front of a disk without content. The cache \
         is scaled down with its segments: log, reserves and half-filled segments count as cache, \
         the fixed 12 KiB of each segment do not. The other policies are computed on paper: they \
         keep any blocks at no cost. MIN knows the future.",
    );
    let (references, unique) = trace.references();
    study.fact("trace", trace.name.as_str());
    study.fact("references", references.len().to_string());
    study.fact("different blocks", unique.to_string());
    let sizes = sizes(setup, unique);
    let columns: Vec<(String, Unit)> =
        sizes.iter().map(|blocks| (format!("{blocks} blocks"), Unit::Percent)).collect();
    let columns: Vec<(&str, Unit)> =
        columns.iter().map(|(name, unit)| (name.as_str(), *unit)).collect();
    let mut table = Table::new("hit ratio, by cache size", &columns);
    let mut plot = Plot::lines(
        "Hit ratio, by cache size",
        Axis::log("blocks of 4 KiB", Unit::Number),
        Axis::linear("hit ratio", Unit::Percent),
    );
    let mut on_paper = Vec::new();
    let percent = |hits: u64| 100.0 * hits as f64 / references.len() as f64;
    for policy in Policy::ALL {
        let ratio = |&blocks: &u64| percent(policy.hits(&references, unique, blocks as usize));
        on_paper.push((policy.name(), sizes.iter().map(ratio).collect::<Vec<f64>>()));
    }
    let mut engine = Vec::new();
    for (name, words) in [("udm, fifo", "0 retention fifo"), ("udm, hot", "0 retention hot")] {
        let mut ratios = Vec::new();
        for &blocks in &sizes {
            let counts = measure(setup, &trace, blocks, words)?;
            ensure!(counts.references == references.len() as u64, "requests got lost");
            ratios.push(percent(counts.hits));
        }
        engine.push((name, ratios));
    }
    for (name, ratios) in engine.iter().chain(&on_paper) {
        table.row(*name, ratios);
        plot.add(
            *name,
            sizes.iter().map(|&size| size as f64).zip(ratios.iter().copied()).collect(),
        );
    }
    study.tables.push(table);
    study.plots.push(plot);
    // Whoever cannot know the future.
    let best = |nth: usize| on_paper[..4].iter().map(|(_, ratios)| ratios[nth]).fold(0.0, f64::max);
    let least = (0..sizes.len())
        .map(|nth| (engine[1].1[nth] + TOLERANCE) / best(nth).max(TOLERANCE))
        .fold(f64::MAX, f64::min);
    // What is made up says little of the world.
    let promise = setup.trace().map(|_| Promise::AtLeast(1.0));
    let what =
        "udm's hit ratio + 0.5 %, over the best of FIFO, LRU, ARC, S3-FIFO, at the worst size";
    study.claims.push(Claim::new(what, &[least], promise));
    Ok(study)
}

/// Cache sizes, in blocks.
fn sizes(setup: &Setup, unique: usize) -> Vec<u64> {
    let blocks_min = 8 * SEGMENT_BLOCKS_MIN;
    if !setup.cache_blocks().is_empty() {
        return setup.cache_blocks().to_vec();
    }
    let mut sizes: Vec<u64> = SIZES
        .iter()
        .map(|percent| (unique as f64 * percent / 100.0).round() as u64)
        .filter(|&blocks| blocks >= blocks_min)
        .collect();
    if sizes.is_empty() {
        sizes.push(blocks_min);
    }
    sizes
}

/// What one run found.
struct Counts {
    references: u64,
    hits: u64,
}

/// Sends the trace through a cache with data areas of `blocks` blocks.
fn measure(setup: &Setup, trace: &Trace, blocks: u64, words: &str) -> Result<Counts> {
    let segment_blocks = blocks.div_ceil(SEGMENTS).max(SEGMENT_BLOCKS_MIN);
    let geometry = Geometry {
        segment_bytes: segment_blocks * BLOCK + SEGMENT_META_BYTES,
        device_bytes_min: 0,
    };
    let segments = blocks / segment_blocks;
    let bytes = 5 * BLOCK + segments * geometry.segment_bytes;
    let path = setup.places.memory.file("hitratio", bytes)?;
    let pmem: Arc<dyn Pmem> = Arc::new(open_pmem(&path)?);
    let disk = VoidDisk(DiskLimits {
        name: "void".into(),
        size_bytes: trace.device_blocks() * BLOCK,
        block_bytes: 512,
        atomic_bytes: 512,
        has_discard: false,
        identity: "void".into(),
        kernel_name: "void".into(),
    });
    let mut options = OpenOptions::new(1);
    options.geometry = geometry;
    // An open key set is as large as ever, and must be small beside the cache.
    options.stripes = 1;
    let shared = SharedWords::private(shared_words(options.stripes));
    let cache = Cache::open_with("hitratio", pmem, Arc::new(disk), words, shared, &options)?;
    let counts = replay(&cache, trace, blocks);
    drop(cache);
    std::fs::remove_file(Path::new(&path)).context("the cache file is gone")?;
    counts
}

fn replay(cache: &Cache, trace: &Trace, blocks: u64) -> Result<Counts> {
    // Key sets are scaled down too, by flushes.
    let requests_per_flush = (blocks / REQUESTS_SHARE).clamp(1, 128) as usize;
    let clock = ManualClock::default();
    let mut local = Local::without_kernel(&cache.device)?.with_background(clock.clone());
    let mut counts = Counts { references: 0, hits: 0 };
    let mut memory = Vec::new();
    for (nth, request) in trace.requests.iter().enumerate() {
        let (offset, len) = (request.block * BLOCK, u64::from(request.count) * BLOCK);
        counts.references += u64::from(request.count);
        counts.hits += cache.pcache.cached_bytes_in(offset, len) / BLOCK;
        memory.resize(len as usize, 0);
        let done = match request.is_write {
            true => local.write_at(&memory, offset, false),
            false => local.read_at(&mut memory, offset),
        };
        done.ok().context("a request failed")?;
        if nth % requests_per_flush == 0 {
            local.flush().ok().context("a flush failed")?;
        }
        if nth % REQUESTS_PER_TICK == 0 {
            clock.advance(SECOND / 10);
            cache.device.events().work();
            local.turn();
        }
    }
    Ok(counts)
}
