//! What a 4 KiB write costs in process, beside the bare durable copy of the same bytes.
//!
//! Contenders take turns within each round, so that a noisy machine disturbs them alike; each
//! round gives one ratio. Reading the clock, and waiting until all stores have left the processor,
//! costs tens of nanoseconds: it is measured, and taken off each operation timed on its own;
//! medians come from batches of 16 as well.

use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use anyhow::{Result, ensure};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::disk::{RamDisk, Ring};
use udm::local::Local;
use udm::pmem::Pmem;
use udm::pmem::dax::DaxPmem;
use udm::prng::Prng;
use udm::target::{Port, Target};

use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{BackgroundThread, CACHE_BYTES, Cache, Keeper, Setup, bare_memory};
use crate::stats::{mean, median, percentile, ratios, sorted};
use crate::unit::Unit;

const BLOCK: usize = 4096;
const SEGMENT: u64 = 16 << 20;
/// Operations of one contender in one round.
const OPS: usize = 4096;
/// Operations between two looks at the clock, when timed in batches.
const BATCH: usize = 16;
/// Bytes of the mapped device that are written to.
const SPAN: u64 = 256 << 20;
/// Buffers that the workload sends from and reads into.
const BUFFERS: usize = 64;

/// One contender's times, in nanoseconds.
#[derive(Debug, Default)]
struct Times {
    /// Every operation, timed on its own, less the clock.
    single: Vec<f64>,
    /// Each round's median of operations timed on their own.
    round_single: Vec<f64>,
    /// How many of that the slowest in a thousand take.
    round_tail: Vec<f64>,
    /// Each round's median of batches, for one operation.
    round_batch: Vec<f64>,
}

impl Times {
    /// Runs `operation` [`OPS`] times one by one, and as often in batches.
    fn round(&mut self, clock: f64, mut operation: impl FnMut(usize)) {
        let mut singles = Vec::with_capacity(OPS);
        for nth in 0..OPS {
            let start = Instant::now();
            operation(nth);
            // A store fence orders stores without waiting for them, and the clock does not wait
            // either: what is still on its way would be paid for by whatever follows the clock.
            fence(Ordering::SeqCst);
            singles.push((nanos(start) - clock).max(0.0));
        }
        let median_single = median(&singles);
        self.round_single.push(median_single);
        self.round_tail.push(percentile(&sorted(&singles), 99.9) / median_single);
        self.single.extend(singles);
        let mut batches = Vec::with_capacity(OPS / BATCH);
        for first in (0..OPS).step_by(BATCH) {
            let start = Instant::now();
            for nth in first..first + BATCH {
                operation(nth);
            }
            batches.push((nanos(start) - clock) / BATCH as f64);
        }
        self.round_batch.push(median(&batches));
    }

    fn row(&self) -> [f64; COLUMNS.len()] {
        let single = sorted(&self.single);
        let batch = sorted(&self.round_batch);
        [
            percentile(&single, 50.0),
            percentile(&batch, 50.0),
            batch.first().copied().unwrap_or_default(),
            batch.last().copied().unwrap_or_default(),
            mean(&single),
            percentile(&single, 99.0),
            percentile(&single, 99.9),
        ]
    }
}

const COLUMNS: [(&str, Unit); 7] = [
    ("p50", Unit::Nanos),
    ("p50/batch", Unit::Nanos),
    ("low round", Unit::Nanos),
    ("high round", Unit::Nanos),
    ("mean", Unit::Nanos),
    ("p99", Unit::Nanos),
    ("p99.9", Unit::Nanos),
];

fn nanos(since: Instant) -> f64 {
    since.elapsed().as_nanos() as f64
}

/// What timing one operation costs: a fence that finds nothing to wait for, and the clock.
fn clock_nanos() -> f64 {
    let cost = |_| {
        let start = Instant::now();
        fence(Ordering::SeqCst);
        nanos(start)
    };
    median(&(0..20_000).map(cost).collect::<Vec<f64>>())
}

/// Random blocks, and buffers with random bytes.
struct Workload {
    prng: Prng,
    offsets: Vec<u64>,
    buffers: Vec<Buffer>,
}

impl Workload {
    fn new(seed: u64) -> Workload {
        let mut prng = Prng::new(seed);
        let fresh = |_| {
            let mut buffer = Buffer::zeroed(BLOCK);
            prng.fill(buffer.as_mut_slice());
            buffer
        };
        let buffers = (0..BUFFERS).map(fresh).collect();
        let mut workload = Workload { prng, offsets: Vec::new(), buffers };
        workload.shuffle();
        workload
    }

    /// Chooses the blocks of the next round.
    fn shuffle(&mut self) {
        let blocks = SPAN / BLOCK as u64;
        self.offsets = (0..OPS).map(|_| self.prng.below(blocks) * BLOCK as u64).collect();
    }

    fn take(&mut self, nth: usize) -> Buffer {
        std::mem::replace(&mut self.buffers[nth % BUFFERS], Buffer::empty())
    }

    fn put(&mut self, nth: usize, buffer: Buffer) {
        self.buffers[nth % BUFFERS] = buffer;
    }
}

/// Memory that is filled as a cache fills its own: block by block within random segments.
struct BareCopy {
    pmem: DaxPmem,
    at: u64,
}

impl BareCopy {
    fn store(&mut self, prng: &mut Prng, bytes: &[u8]) {
        if self.at.is_multiple_of(SEGMENT) {
            self.at = prng.below(CACHE_BYTES / SEGMENT) * SEGMENT;
        }
        self.pmem.store(self.at, bytes);
        self.pmem.drain().expect("memory does not fail");
        self.at += BLOCK as u64;
    }
}

fn write_through(local: &mut Local, work: &mut Workload, nth: usize, fua: bool) {
    let bio = Bio::write(work.offsets[nth], work.take(nth), fua, nth as u64);
    local.submit(bio);
    let done = local.wait().expect("a bio was submitted");
    assert!(done.status.is_ok(), "a write failed");
    work.put(nth, done.buffer);
}

fn read_through(local: &mut Local, work: &mut Workload, nth: usize) {
    local.submit(Bio::read(work.offsets[nth], work.take(nth), nth as u64));
    let done = local.wait().expect("a bio was submitted");
    assert!(done.status.is_ok(), "a read failed");
    work.put(nth, done.buffer);
}

fn write_engine(cache: &Cache, port: &mut Port, work: &mut Workload, nth: usize) {
    let bio = Bio::write(work.offsets[nth], work.take(nth), false, nth as u64);
    cache.pcache.submit(bio, port);
    let done = port.done.pop_front().expect("there is room, so a write ends at once");
    assert!(done.status.is_ok(), "a write failed");
    work.put(nth, done.buffer);
}

/// All contenders' times.
#[derive(Debug, Default)]
struct Results {
    copy: Times,
    engine: Times,
    local: Times,
    fua: Times,
    copy_beside: Times,
    local_beside: Times,
    load: Times,
    hit: Times,
    /// Operations per microsecond with one thread and with two.
    write_one: Vec<f64>,
    write_two: Vec<f64>,
    read_one: Vec<f64>,
    read_two: Vec<f64>,
    copy_one: Vec<f64>,
    copy_two: Vec<f64>,
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let rounds = setup.repeats(7, 15);
    let backing = Arc::new(RamDisk::new(1 << 30, 512));
    // Nobody makes room while a write is timed: a drain in between has to collect as well.
    let cache = setup.cache("write-cache", backing, "0 retention fifo")?;
    let mut copy = BareCopy { pmem: bare_memory(setup, "write-copy")?, at: 0 };
    let clock = clock_nanos();
    let mut results = Results::default();
    let mut work = Workload::new(1);
    let mut local = Local::without_kernel(&cache.device)?;
    // Every block has its place in the index, and the memory has been touched.
    fill(&cache, &mut local, &mut work)?;
    let mut engine_port = Port::new(7);
    for _ in 0..rounds {
        work.shuffle();
        copy_round(&mut results.copy, clock, &mut copy, &mut work);
        results.engine.round(clock, |nth| {
            write_engine(&cache, &mut engine_port, &mut work, nth);
        });
        results.local.round(clock, |nth| write_through(&mut local, &mut work, nth, false));
        results.fua.round(clock, |nth| write_through(&mut local, &mut work, nth, true));
        Keeper::new(&cache.device, Ring::without_kernel())?.drain();
        read_round(&mut results, clock, &copy.pmem, &mut local, &mut work);
        beside_background(&mut results, clock, &cache, &mut copy, &mut local, &mut work);
        Keeper::new(&cache.device, Ring::without_kernel())?.drain();
        two_threads(&mut results, &cache, &copy.pmem)?;
    }
    drop(local);
    Ok(study(&results, clock, rounds))
}

fn fill(cache: &Cache, local: &mut Local, work: &mut Workload) -> Result<()> {
    let mut keeper = Keeper::new(&cache.device, Ring::without_kernel())?;
    for lap in 0..2 {
        for (nth, offset) in (0..SPAN).step_by(BLOCK).enumerate() {
            let buffer = work.take(nth);
            local.submit(Bio::write(offset, buffer, false, lap));
            let done = local.poll();
            ensure!(done.is_some(), "the cache is full too early");
            work.put(nth, done.map_or_else(Buffer::empty, |bio| bio.buffer));
            if (offset + BLOCK as u64).is_multiple_of(SPAN / 8) {
                keeper.drain();
            }
        }
    }
    Ok(())
}

fn copy_round(times: &mut Times, clock: f64, copy: &mut BareCopy, work: &mut Workload) {
    let Workload { prng, buffers, .. } = work;
    times.round(clock, |nth| copy.store(prng, buffers[nth % BUFFERS].as_slice()));
}

/// Reads of what was written in this round, and loads from as many places of such memory.
fn read_round(
    results: &mut Results,
    clock: f64,
    memory: &DaxPmem,
    local: &mut Local,
    work: &mut Workload,
) {
    let Workload { offsets, buffers, .. } = work;
    results.load.round(clock, |nth| {
        let into = buffers[nth % BUFFERS].as_mut_slice();
        memory.load(offsets[nth], into).expect("memory does not fail");
    });
    results.hit.round(clock, |nth| read_through(local, work, nth));
}

/// The same, while another thread writes back and collects.
fn beside_background(
    results: &mut Results,
    clock: f64,
    cache: &Cache,
    copy: &mut BareCopy,
    local: &mut Local,
    work: &mut Workload,
) {
    let _background = BackgroundThread::new(&cache.device);
    cache.device.set_draining(true);
    copy_round(&mut results.copy_beside, clock, copy, work);
    results.local_beside.round(clock, |nth| write_through(local, work, nth, false));
    cache.device.set_draining(false);
}

/// How much one thread does in a microsecond, and how much two do.
fn two_threads(results: &mut Results, cache: &Cache, memory: &DaxPmem) -> Result<()> {
    let writes = |threads| {
        through_threads(cache, threads, |local, work, nth| {
            write_through(local, work, nth, false);
        })
    };
    results.write_one.push(writes(1)?);
    results.write_two.push(writes(2)?);
    let reads = |threads| through_threads(cache, threads, read_through);
    results.read_one.push(reads(1)?);
    results.read_two.push(reads(2)?);
    let copies = |threads| {
        on_threads(threads, |thread| {
            let mut work = Workload::new(20 + thread as u64);
            let half = CACHE_BYTES / 2 * thread as u64;
            let places: Vec<u64> = (0..OPS).map(|nth| half + (nth * BLOCK) as u64).collect();
            Ok(move |nth: usize| {
                memory.store(places[nth % OPS], work.buffers[nth % BUFFERS].as_slice());
                memory.drain().expect("memory does not fail");
                work.prng.next_u64();
            })
        })
    };
    results.copy_one.push(copies(1)?);
    results.copy_two.push(copies(2)?);
    Keeper::new(&cache.device, Ring::without_kernel())?.drain();
    Ok(())
}

fn through_threads(
    cache: &Cache,
    threads: usize,
    operation: impl Fn(&mut Local, &mut Workload, usize) + Sync,
) -> Result<f64> {
    on_threads(threads, |thread| {
        let mut local = Local::without_kernel(&cache.device)?;
        let mut work = Workload::new(10 + thread as u64);
        let operation = &operation;
        Ok(move |nth: usize| operation(&mut local, &mut work, nth % OPS))
    })
}

/// Operations per microsecond of `threads` threads, each with an operation made by `make`.
fn on_threads<F: FnMut(usize)>(
    threads: usize,
    make: impl Fn(usize) -> Result<F> + Sync,
) -> Result<f64> {
    let gate = Barrier::new(threads);
    let spans: Vec<Result<f64>> = std::thread::scope(|scope| {
        let spawn = |thread| {
            let (gate, make) = (&gate, &make);
            scope.spawn(move || {
                let made = make(thread);
                gate.wait();
                let mut operation = made?;
                let start = Instant::now();
                (0..OPS).for_each(&mut operation);
                Ok(nanos(start))
            })
        };
        let handles: Vec<_> = (0..threads).map(spawn).collect();
        handles.into_iter().map(|handle| handle.join().expect("no panic")).collect()
    });
    let spans = spans.into_iter().collect::<Result<Vec<f64>>>()?;
    Ok(spans.iter().map(|span| OPS as f64 * 1000.0 / span).sum())
}

fn study(results: &Results, clock: f64, rounds: usize) -> Study {
    let about = format!(
        "Random 4 KiB writes to a pcache of {} MiB in memory, and the bare copy of the same bytes \
         to such memory, in turns. Timing one costs {clock:.0} ns, which are taken off.",
        CACHE_BYTES >> 20
    );
    let mut study = Study::new("write", "what a 4 KiB write costs beside the bare copy", &about);
    let contenders = [
        ("bare durable copy", &results.copy),
        ("write, engine", &results.engine),
        ("write, device", &results.local),
        ("FUA write, device", &results.fua),
        ("bare copy, beside background", &results.copy_beside),
        ("write, beside background", &results.local_beside),
        ("bare load", &results.load),
        ("read hit, device", &results.hit),
    ];
    let mut times = Table::new(format!("one thread ({rounds} rounds)"), &COLUMNS);
    let mut bars = Plot::bars("4 KiB, one thread", &["p50, batches", "p99"], nanos_axis());
    for (name, contender) in contenders {
        let values = contender.row();
        times.row(name, &values);
        bars.add(name, vec![(0.0, values[1]), (1.0, values[5])]);
        study.repeats(format!("{name}, ns"), Unit::Nanos, &contender.round_batch);
    }
    let columns = [("one", Unit::Number), ("two", Unit::Number), ("ratio", Unit::Ratio)];
    let mut threads = Table::new("operations per microsecond, by threads", &columns);
    for (name, one, two) in [
        ("write", &results.write_one, &results.write_two),
        ("read hit", &results.read_one, &results.read_two),
        ("bare durable copy", &results.copy_one, &results.copy_two),
    ] {
        threads.row(name, &[median(one), median(two), median(&ratios(two, one))]);
    }
    study.tables = vec![times, threads];
    study.plots.push(bars);
    study.claims = claims(results);
    study
}

fn nanos_axis() -> Axis {
    Axis::log("time of one", Unit::Nanos)
}

fn claims(results: &Results) -> Vec<Claim> {
    let over = |of: &Times, over: &Times| ratios(&of.round_batch, &over.round_batch);
    let single = |of: &Times, over: &Times| ratios(&of.round_single, &over.round_single);
    let micros: Vec<f64> = results.fua.round_batch.iter().map(|nanos| nanos / 1000.0).collect();
    let at_most = |bound| Some(Promise::AtMost(bound));
    let at_least = |bound| Some(Promise::AtLeast(bound));
    let Results { copy, engine, local, copy_beside, local_beside, load, hit, .. } = results;
    let twice = |two: &[f64], one: &[f64]| ratios(two, one);
    vec![
        Claim::new("write / bare copy, p50, batches", &over(local, copy), at_most(1.75)),
        Claim::new("write / bare copy, p50, one by one", &single(local, copy), at_most(2.5)),
        Claim::new("  of it the engine", &over(engine, copy), None),
        Claim::new("write / bare copy, beside write-back", &over(local_beside, copy_beside), None),
        Claim::new(
            "write, p99.9 / p50, beside write-back and collection",
            &local_beside.round_tail,
            at_most(10.0),
        ),
        Claim::new("  bare copy, p99.9 / p50, beside them", &copy_beside.round_tail, None),
        Claim::new("FUA write, p50, microseconds", &micros, at_most(0.9)),
        Claim::new("read hit / bare load, p50", &over(hit, load), at_most(1.5)),
        Claim::new(
            "writes: two threads / one",
            &twice(&results.write_two, &results.write_one),
            at_least(1.8),
        ),
        Claim::new(
            "read hits: two threads / one",
            &twice(&results.read_two, &results.read_one),
            at_least(1.8),
        ),
        Claim::new(
            "  bare durable copies: two threads / one",
            &twice(&results.copy_two, &results.copy_one),
            None,
        ),
    ]
}
