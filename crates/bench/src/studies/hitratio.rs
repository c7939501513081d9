//! Hit ratios: the share of references that find their block in the cache, for the engine itself
//! with each of its policies, and for simulated policies from the literature.

mod blocks;
mod served;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use udm::disk::{Disk, DiskIo, DiskLimits, Ring};
use udm::local::{Local, ManualClock};
use udm::pcache::layout::Geometry;
use udm::pcache::{OpenOptions, shared_words};
use udm::pmem::Pmem;
use udm::shm::SharedWords;
use udm::topology::Topology;
use udm::units::{BLOCK, SECOND};

use crate::pcache_rig::PcacheRig;
use crate::policies::Policy;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Setup, open_pmem};
use crate::trace::Trace;
use crate::unit::Unit;

/// Cache sizes, in percent of the different blocks of the trace.
const SIZES: [f64; 8] = [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0];
/// The same, if there is little time.
const SIZES_SMALL: [f64; 5] = [1.0, 5.0, 10.0, 20.0, 40.0];
/// The engine, with the words of its table.
const ENGINES: [(&str, &str); 2] =
    [("udm, fifo", "0 retention fifo"), ("udm, hot", "0 retention hot")];
const HOT: usize = 1;
/// The number of simulated policies that do not know the future.
const ABLE: usize = 4;
/// Segments of the cache that is scaled down: as many as one of 16 GiB has.
const SEGMENTS: u64 = 1023;
/// But none is smaller than this: then there are fewer, so the reserves weigh more than in a real
/// cache, and of a request that is longer than a few segments not all is cached.
const SEGMENT_BLOCKS_MIN: u64 = 4;
/// Bytes of a segment that are not data.
const SEGMENT_META_BYTES: u64 = 12 << 10;
/// After this many requests a tenth of a second has passed.
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

/// How the table begins that compares several traces.
pub const DIFFERENCES: &str = "Hit ratio of the engine minus the best";

/// How often, in the second half of a trace, the blocks are counted that can be read.
const HELD_COUNTS: usize = 16;

/// One trace: what each policy keeps of it, by cache size.
struct Found {
    trace: String,
    /// In percent of the trace's different blocks, and in blocks.
    sizes: Vec<(f64, u64)>,
    engine: Vec<(&'static str, Vec<f64>)>,
    on_paper: Vec<(&'static str, Vec<f64>)>,
    /// The average number of blocks in the engine with `retention hot`, and the hit ratio of the
    /// best simulated policy with this many.
    held: Vec<(u64, f64)>,
}

impl Found {
    /// The engine with `retention hot`, minus the best that cannot know the future.
    fn differences(&self) -> Vec<f64> {
        let best = |nth: usize| {
            let able = self.on_paper.iter().take(ABLE);
            able.map(|(_, ratios)| ratios[nth]).fold(0.0, f64::max)
        };
        self.engine[HOT].1.iter().enumerate().map(|(nth, ratio)| ratio - best(nth)).collect()
    }
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let mut study = Study::new(
        "hitratio",
        "hit ratio: the share of references whose block is cached",
        "The requests of a trace go to the engine, in front of a disk without content. The cache \
         is scaled down with its segments: log, reserves and half-filled segments count as cache, \
         the fixed 12 KiB of each segment do not. The other policies are computed on paper: they \
         keep any blocks at no cost. MIN knows the future.",
    );
    if !setup.blocks().is_empty() {
        return by_block_size(setup, study);
    }
    let mut found = Vec::new();
    for path in setup.traces() {
        found.push(replay_all(setup, &Trace::read(path)?, &mut study)?);
    }
    if found.is_empty() {
        let trace = Trace::synthetic(1, setup.choose(60_000, 600_000));
        found.push(replay_all(setup, &trace, &mut study)?);
    }
    for one in &found {
        show(&mut study, one);
    }
    if !setup.traces().is_empty() {
        differences(&mut study, &found);
    }
    for one in &found {
        // Results for synthetic traces do not carry over to real loads.
        let promise = (!setup.traces().is_empty()).then_some(Promise::AtLeast(1.0));
        let best = one.engine[HOT].1.iter().zip(one.differences());
        let least = best
            .map(|(ratio, difference)| (ratio + TOLERANCE) / (ratio - difference).max(TOLERANCE))
            .fold(f64::MAX, f64::min);
        let what = format!(
            "{}: udm's hit ratio + 0.5 %, over the best of FIFO, LRU, ARC, S3-FIFO, at the worst \
             size",
            one.trace
        );
        study.claims.push(Claim::new(what, &[least], promise));
    }
    Ok(study)
}

/// The policies of the target `cache` instead.
fn by_block_size(setup: &Setup, mut study: Study) -> Result<Study> {
    for path in setup.traces() {
        blocks::add(setup, &Trace::read(path)?, &mut study)?;
    }
    if setup.traces().is_empty() {
        let trace = Trace::synthetic(1, setup.choose(60_000, 600_000));
        blocks::add(setup, &trace, &mut study)?;
    }
    Ok(study)
}

/// What each policy keeps of a trace, each on a thread that is free.
fn replay_all(setup: &Setup, trace: &Trace, study: &mut Study) -> Result<Found> {
    let (references, unique) = trace.references();
    let numbers = format!("{} references, {unique} different blocks", references.len());
    study.fact(format!("trace {}", trace.name), numbers);
    let sizes = sizes(setup, unique);
    let percent = |hits: u64| 100.0 * hits as f64 / references.len() as f64;
    let on_paper = |policy: usize, blocks: u64| {
        percent(Policy::ALL[policy].hits(&references, unique, blocks as usize))
    };
    let engine = each(ENGINES.len(), sizes.len(), |who, size| {
        let name = format!("hitratio-{who}-{size}");
        let counts = measure(setup, &name, trace, sizes[size].1, ENGINES[who].1)?;
        ensure!(counts.references == references.len() as u64, "requests got lost");
        Ok((percent(counts.hits), counts.held))
    })?;
    let ratios =
        each(Policy::ALL.len(), sizes.len(), |policy, size| Ok(on_paper(policy, sizes[size].1)))?;
    let held: Vec<u64> = engine[HOT].iter().map(|(_, held)| *held).collect();
    let at_held = each(ABLE, sizes.len(), |policy, size| Ok(on_paper(policy, held[size])))?;
    let best = |size: usize| at_held.iter().map(|ratios| ratios[size]).fold(0.0, f64::max);
    let held = held.iter().enumerate().map(|(size, held)| (*held, best(size))).collect();
    let hits = |row: &Vec<(f64, u64)>| row.iter().map(|(ratio, _)| *ratio).collect();
    Ok(Found {
        trace: trace.name.clone(),
        sizes,
        engine: ENGINES.iter().map(|(name, _)| *name).zip(engine.iter().map(hits)).collect(),
        on_paper: Policy::ALL.iter().map(|policy| policy.name()).zip(ratios).collect(),
        held,
    })
}

/// `measure` of each of `rows` and each of `columns`, on all processors.
fn each<T: Send + Default + Clone>(
    rows: usize,
    columns: usize,
    measure: impl Fn(usize, usize) -> Result<T> + Sync,
) -> Result<Vec<Vec<T>>> {
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<(usize, T)>> {
        let mut done = Vec::new();
        loop {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            if nth >= rows * columns {
                return Ok(done);
            }
            done.push((nth, measure(nth / columns, nth % columns)?));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut all = vec![vec![T::default(); columns]; rows];
    let parts: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    for part in parts {
        for (nth, found) in part? {
            all[nth / columns][nth % columns] = found;
        }
    }
    Ok(all)
}

fn show(study: &mut Study, found: &Found) {
    let columns: Vec<(String, Unit)> =
        found.sizes.iter().map(|(_, blocks)| (format!("{blocks} blocks"), Unit::Percent)).collect();
    let columns: Vec<(&str, Unit)> =
        columns.iter().map(|(name, unit)| (name.as_str(), *unit)).collect();
    let title = format!("{}: hit ratio, by cache size", found.trace);
    let mut table = Table::new(title.as_str(), &columns);
    let mut plot = Plot::lines(
        &title,
        Axis::log("blocks of 4 KiB", Unit::Number),
        Axis::linear("hit ratio", Unit::Percent),
    );
    for (name, ratios) in found.engine.iter().chain(&found.on_paper) {
        table.row(*name, ratios);
        let sizes = found.sizes.iter().map(|(_, blocks)| *blocks as f64);
        plot.add(*name, sizes.zip(ratios.iter().copied()).collect());
    }
    study.tables.push(table);
    study.plots.push(plot);
    study.tables.push(price_of_the_log(found, &columns));
}

/// The loss to old copies, to the log and to reserves, and the loss to the choice of evicted
/// blocks. Simulated policies do not keep old copies, and are measured with as many blocks as the
/// engine had.
fn price_of_the_log(found: &Found, columns: &[(&str, Unit)]) -> Table {
    let title = format!(
        "{}: of the cache's room, what `retention hot` had on average in the second half, and the \
         hit ratio of the best policy on paper with so many blocks",
        found.trace
    );
    let mut table = Table::new(title, columns);
    let share = |((_, blocks), (held, _)): (&(f64, u64), &(u64, f64))| {
        100.0 * *held as f64 / *blocks as f64
    };
    let shares: Vec<f64> = found.sizes.iter().zip(&found.held).map(share).collect();
    let best: Vec<f64> = found.held.iter().map(|(_, best)| *best).collect();
    table.row("readable blocks / room", &shares);
    table.row("best on paper with those", &best);
    table.row("udm, hot", &found.engine[HOT].1);
    table
}

/// All traces in one table; one that is too short for the sizes of the first is left out.
fn differences(study: &mut Study, found: &[Found]) {
    let text = |percent: f64, blocks: u64| match percent > 0.0 {
        true => format!("{percent} %"),
        false => format!("{blocks} blocks"),
    };
    let names: Vec<String> =
        found[0].sizes.iter().map(|(percent, blocks)| text(*percent, *blocks)).collect();
    let columns: Vec<(&str, Unit)> =
        names.iter().map(|name| (name.as_str(), Unit::Number)).collect();
    let title = format!(
        "{DIFFERENCES} of FIFO, LRU, ARC and S3-FIFO on paper, in percentage points, by the size \
         of the cache in parts of the trace's different blocks"
    );
    let mut table = Table::new(title, &columns);
    for one in found.iter().filter(|one| one.sizes.len() == names.len()) {
        table.row(one.trace.as_str(), &one.differences());
    }
    study.tables.push(table);
}

/// Cache sizes: in percent of the different blocks, 0 if the user named blocks; and in blocks.
fn sizes(setup: &Setup, unique: usize) -> Vec<(f64, u64)> {
    let blocks_min = 8 * SEGMENT_BLOCKS_MIN;
    if !setup.cache_blocks().is_empty() {
        return setup.cache_blocks().iter().map(|blocks| (0.0, *blocks)).collect();
    }
    let percents = setup.choose(&SIZES_SMALL[..], &SIZES[..]);
    let mut sizes: Vec<(f64, u64)> = percents
        .iter()
        .map(|percent| (*percent, (unique as f64 * percent / 100.0).round() as u64))
        .filter(|(_, blocks)| *blocks >= blocks_min)
        .collect();
    if sizes.is_empty() {
        sizes.push((0.0, blocks_min));
    }
    sizes
}

/// The results of one run.
struct Counts {
    references: u64,
    hits: u64,
    /// Blocks that could be read from the cache, on average in the second half.
    held: u64,
}

/// Sends the trace through a cache with data areas of `blocks` blocks.
fn measure(setup: &Setup, name: &str, trace: &Trace, blocks: u64, words: &str) -> Result<Counts> {
    let segment_blocks = blocks.div_ceil(SEGMENTS).max(SEGMENT_BLOCKS_MIN);
    let geometry = Geometry {
        segment_bytes: segment_blocks * BLOCK + SEGMENT_META_BYTES,
        device_bytes_min: 0,
    };
    let segments = blocks / segment_blocks;
    let bytes = 5 * BLOCK + segments * geometry.segment_bytes;
    let path = setup.places.memory.file(name, bytes)?;
    let pmem: Arc<dyn Pmem> = Arc::new(open_pmem(&path)?);
    let disk = VoidDisk(DiskLimits {
        name: "void".into(),
        size_bytes: trace.device_blocks() * BLOCK,
        block_bytes: 512,
        atomic_bytes: 512,
        has_discard: false,
        topology: Topology::default(),
        identity: "void".into(),
        kernel_name: "void".into(),
    });
    let mut options = OpenOptions::new(1);
    options.geometry = geometry;
    // An open key set has its usual size, and must be small compared with the cache.
    options.stripes = 1;
    let shared = SharedWords::private(shared_words(options.stripes));
    let cache = PcacheRig::open_with(name, pmem, Arc::new(disk), words, shared, &options)?;
    let counts = replay(&cache, trace, blocks);
    drop(cache);
    std::fs::remove_file(Path::new(&path)).context("the cache file is gone")?;
    counts
}

fn replay(cache: &PcacheRig, trace: &Trace, blocks: u64) -> Result<Counts> {
    // Key sets are scaled down too, by flushes.
    let requests_per_flush = (blocks / REQUESTS_SHARE).clamp(1, 128) as usize;
    let clock = ManualClock::default();
    let mut local = Local::without_kernel(&cache.device)?.with_background(clock.clone());
    let mut counts = Counts { references: 0, hits: 0, held: 0 };
    let mut memory = Vec::new();
    let count_every = (trace.requests.len() / 2 / HELD_COUNTS).max(1);
    let (mut held, mut times) = (0, 0_u32);
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
        if nth > trace.requests.len() / 2 && nth % count_every == 0 {
            held += cache.pcache.cached_bytes_in(0, trace.device_blocks() * BLOCK) / BLOCK;
            times += 1;
        }
    }
    counts.held = held / u64::from(times.max(1));
    Ok(counts)
}
