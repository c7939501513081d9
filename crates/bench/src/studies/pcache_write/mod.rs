//! The cost of a 4 KiB write in process, compared with the bare durable copy of the same bytes.
//!
//! The caches are in their steady state: they have the default settings, were filled three times
//! before anything counts, and their background works as in a server. Everything is written back
//! before a contender's turn; otherwise the work of the one before would be measured. The
//! wall-clock time of a request is measured with a disk in memory as the origin: write-back to a
//! file would have to repeat the order of thousands of FUA writes in between, for minutes. The
//! processor time of a request, with all that others do for it, is in `price`, and there the origin
//! is a real file.
//!
//! Contenders take turns within each round, so that a noisy machine disturbs them equally; each
//! round gives one ratio. Reading the clock, and waiting until all stores have left the processor,
//! costs tens of nanoseconds: it is measured, and subtracted from each operation timed on its own;
//! medians come from batches of 16 as well.

mod contenders;
mod price;

use std::sync::Barrier;
use std::time::Instant;

use anyhow::Result;
use udm::local::Local;
use udm::pmem::Pmem;
use udm::pmem::dax::DaxPmem;
use udm::queue::Queue;
use udm::target::Port;
use udm::units::{GIB, MIB};

use crate::load;
use crate::pcache_rig::PcacheRig;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{FILLS, Setup, bare_memory, ram_disk, settle};
use crate::stats::{median, ratios};
use crate::unit::Unit;

use contenders::{
    BLOCK, BUFFERS, BareCopy, COLUMNS, OPS, Times, Workload, clock_nanos, nanos, read_through,
    write_engine, write_through,
};
use price::Price;

/// All contenders' times.
#[derive(Debug, Default)]
struct Results {
    copy: Times,
    engine: Times,
    local: Times,
    fua: Times,
    fua_one: Vec<f64>,
    fua_two: Vec<f64>,
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

/// What all contenders use.
struct Fixture<'a> {
    cache: &'a PcacheRig,
    /// Bytes of the device that are written to; the cache holds all of them.
    span: u64,
    clock: f64,
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let rounds = setup.repeats(5, 15);
    let price = Price::measure(setup, rounds)?;
    let cache = setup.pcache("write-cache", ram_disk(GIB), "0")?;
    let mut copy = BareCopy { pmem: bare_memory(setup, "write-copy")?, at: 0 };
    let background = Queue::background("udm-background", &cache.device)?;
    load::fill_often(&cache.device, FILLS * setup.cache_bytes())?;
    let span = (setup.cache_bytes() / 2).min(cache.device.size_bytes()) / MIB * MIB;
    let fixture = Fixture { cache: &cache, span, clock: clock_nanos() };
    let mut results = Results::default();
    let mut work = Workload::new(1, span);
    let mut local = Local::new(&cache.device)?;
    load::refill(&cache.device, span)?;
    for _ in 0..rounds {
        work.shuffle();
        turns(&mut results, &fixture, &mut copy, &mut local, &mut work)?;
        two_threads(&mut results, &fixture, &copy.pmem)?;
    }
    drop((local, background));
    let mut study = study(&results, &fixture, setup, rounds);
    setup.describe(&mut study, cache.pmem.as_ref())?;
    price.show(setup, &mut study);
    Ok(study)
}

/// One round of those that one thread is enough for.
fn turns(
    results: &mut Results,
    fixture: &Fixture<'_>,
    copy: &mut BareCopy,
    local: &mut Local,
    work: &mut Workload,
) -> Result<()> {
    let Fixture { cache, clock, .. } = *fixture;
    let mut engine_port = Port::new(7);
    copy_round(&mut results.copy, clock, copy, work);
    results.engine.round(clock, |nth| write_engine(cache, &mut engine_port, work, nth));
    settle(&cache.device)?;
    results.local.round(clock, |nth| write_through(local, work, nth, false));
    settle(&cache.device)?;
    results.fua.round(clock, |nth| write_through(local, work, nth, true));
    settle(&cache.device)?;
    read_round(results, clock, &copy.pmem, local, work);
    // The same, while the background writes back all that it can.
    cache.device.set_draining(true);
    copy_round(&mut results.copy_beside, clock, copy, work);
    results.local_beside.round(clock, |nth| write_through(local, work, nth, false));
    cache.device.set_draining(false);
    settle(&cache.device)
}

fn copy_round(times: &mut Times, clock: f64, copy: &mut BareCopy, work: &mut Workload) {
    let Workload { prng, buffers, .. } = work;
    times.round(clock, |nth| copy.store(prng, buffers[nth % BUFFERS].as_slice()));
}

/// Reads of blocks written in this round, and loads from as many places of such memory.
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

/// How much one thread does in a microsecond, and how much two do.
fn two_threads(results: &mut Results, fixture: &Fixture<'_>, memory: &DaxPmem) -> Result<()> {
    let through = |threads, operation: Operation| -> Result<f64> {
        let rate = through_threads(fixture, threads, operation)?;
        settle(&fixture.cache.device)?;
        Ok(rate)
    };
    let write: Operation = |local, work, nth| write_through(local, work, nth, false);
    let fua: Operation = |local, work, nth| write_through(local, work, nth, true);
    results.write_one.push(through(1, write)?);
    results.write_two.push(through(2, write)?);
    results.fua_one.push(through(1, fua)?);
    results.fua_two.push(through(2, fua)?);
    results.read_one.push(through(1, read_through)?);
    results.read_two.push(through(2, read_through)?);
    let half = memory.len_bytes() / 2;
    let copies = |threads| {
        on_threads(threads, |thread| {
            let mut work = Workload::new(20 + thread as u64, fixture.span);
            let blocks = (half / BLOCK as u64) as usize;
            let first = half * thread as u64;
            Ok(move |nth: usize| {
                let at = first + (nth % OPS % blocks * BLOCK) as u64;
                memory.store(at, work.buffers[nth % BUFFERS].as_slice());
                memory.drain().expect("memory does not fail");
                work.prng.next_u64();
            })
        })
    };
    results.copy_one.push(copies(1)?);
    results.copy_two.push(copies(2)?);
    Ok(())
}

type Operation = fn(&mut Local, &mut Workload, usize);

fn through_threads(fixture: &Fixture<'_>, threads: usize, operation: Operation) -> Result<f64> {
    on_threads(threads, |thread| {
        let mut local = Local::new(&fixture.cache.device)?;
        let mut work = Workload::new(10 + thread as u64, fixture.span);
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

fn study(results: &Results, fixture: &Fixture<'_>, setup: &Setup, rounds: usize) -> Study {
    let about = format!(
        "Random 4 KiB writes to a pcache of {} MiB in memory with the default settings, and the \
         bare copy of the same bytes to such memory, in turns. The cache was filled three times \
         before; its background works as in a server. Times are measured with a disk in memory \
         behind the cache, processor time, with that of the background, with a real file. Timing \
         one costs {:.0} ns, which are taken off.",
        setup.cache_bytes() >> 20,
        fixture.clock
    );
    let mut study = Study::new("write", "a 4 KiB write, compared with the bare copy", &about);
    let contenders = [
        ("bare durable copy", &results.copy),
        ("write, engine", &results.engine),
        ("write, device", &results.local),
        ("FUA write, device", &results.fua),
        ("bare copy, with background", &results.copy_beside),
        ("write, with background", &results.local_beside),
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
        ("FUA write", &results.fua_one, &results.fua_two),
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
    let Results { copy, engine, local, fua, copy_beside, local_beside, load, hit, .. } = results;
    let twice = |two: &[f64], one: &[f64]| ratios(two, one);
    vec![
        Claim::new("write / bare copy, p50, batches", &over(local, copy), at_most(1.75)),
        Claim::new("write / bare copy, p50, one by one", &single(local, copy), at_most(2.5)),
        Claim::new("  of it the engine", &over(engine, copy), None),
        Claim::new("write / bare copy, during write-back", &over(local_beside, copy_beside), None),
        Claim::new(
            "write, p99.9 / p50, during write-back and collection",
            &local_beside.round_tail,
            at_most(10.0),
        ),
        Claim::new("  bare copy, p99.9 / p50, in the same run", &copy_beside.round_tail, None),
        Claim::new("FUA write, p50, microseconds", &micros, at_most(0.9)),
        Claim::new("FUA write / bare copy, p50, batches", &over(fua, copy), at_most(2.0)),
        Claim::new("read hit / bare load, p50", &over(hit, load), at_most(1.5)),
        Claim::new(
            "writes: two threads / one",
            &twice(&results.write_two, &results.write_one),
            at_least(1.8),
        ),
        Claim::new(
            "FUA writes: two threads / one",
            &twice(&results.fua_two, &results.fua_one),
            at_least(1.7),
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
