//! The runs: all written programs and a number of random ones; every mutant until it is killed;
//! the long run; the replay of one seed.
//!
//! Variables: `EXPLORE_SEED=s` explores that one history (with the long run: begins there),
//! `EXPLORE_MUTANT=Name` runs that one mutant (with a seed: on that one history),
//! `EXPLORE_SECONDS=n` bounds the long run.

use std::sync::{Arc, Mutex};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use udm::mutants::{self, Mutant};
use udm::pmem::Persistence;
use udm::prng::Prng;

use crate::explore::{Counts, Effort, Explorer, Found, quietly};
use crate::machine::Scene;
use crate::of_pcache::PcacheKind;
use crate::program::{Step, WRITTEN, random, written};
use crate::subject::Kind;

/// Histories of the normal run. Mutants must be killed within them.
const HISTORIES: u64 = 480 + ADAPTIVE;
/// So many of them, the last ones, with the order `adaptive`.
const ADAPTIVE: u64 = 40;
/// Long histories that once found a defect; part of the normal run.
const REGRESSIONS: [u64; 1] = [
    // A server died owing the mark behind what it had found; the next one logged its keys first.
    6_000_031,
];
/// From here on, seeds mean long histories, tried harder.
const LONG_FROM: u64 = 1_000_000;
const TABLES: [&str; 3] = ["C B 0", "C B 2 data_crc true", "C B 2 writeback_order fast"];
/// A target and what is done with it.
type Story = (Arc<dyn Kind>, Vec<Step>);
const ADAPTIVE_TABLE: &str = "C B 2 writeback_order adaptive";

/// What a seed stands for. The first ones are the written programs, without and with data CRCs.
fn story(seed: u64) -> Story {
    let mut prng = Prng::new(seed);
    if seed < 2 * WRITTEN as u64 {
        let (table, nth) = (seed as usize / WRITTEN, seed as usize % WRITTEN);
        let segments = if nth + 1 == WRITTEN { 7 } else { 10 };
        let kind = PcacheKind::new(segments, Persistence::Cpu, TABLES[table]);
        return (Arc::new(kind), written(nth));
    }
    let segments = 8 + prng.below(5);
    let persistence = if prng.one_in(4) { Persistence::Msync } else { Persistence::Cpu };
    let table = TABLES[[0, 0, 0, 1, 1, 2][prng.below(6) as usize]];
    let is_adaptive = match seed < LONG_FROM {
        true => (HISTORIES - ADAPTIVE..HISTORIES).contains(&seed),
        false => seed % 8 == 3,
    };
    let table = if is_adaptive { ADAPTIVE_TABLE } else { table };
    let longest = if seed < LONG_FROM { 40 } else { 120 };
    let len = 6 + prng.below(longest) as usize;
    let has_kernel = prng.one_in(3);
    let kind = PcacheKind::new(segments, persistence, table);
    (Arc::new(kind), random(&mut prng, len, has_kernel))
}

fn effort(seed: u64) -> Effort {
    match seed < LONG_FROM {
        true => Effort { exhaust: 300, sample: 60, deaths: 8, onward_one_in: 40, depth: 1 },
        false => Effort { exhaust: 400, sample: 80, deaths: 8, onward_one_in: 150, depth: 2 },
    }
}

fn explore(seed: u64, kind: &Arc<dyn Kind>, program: &[Step]) -> (Counts, Found) {
    let mut explorer = Explorer::new(kind, effort(seed), seed);
    // The first story is that of a blank device; in the others the cache is there already.
    let salt = seed ^ 0x00DD_5EED;
    let scene = match program.is_empty() {
        true => Ok(Scene::blank(&**kind, salt)),
        false => quietly(|| Scene::formatted(kind, salt)),
    };
    let found = scene.and_then(|scene| explorer.history(&scene, program, 0));
    explorer.counts.histories = 1;
    (explorer.counts, found)
}

fn explore_seed(seed: u64) -> (Counts, Found) {
    let (kind, program) = story(seed);
    explore(seed, &kind, &program)
}

/// Leaves out whatever the failure does not need, for a while.
fn minimised(seed: u64) -> (Vec<Step>, String) {
    let (kind, mut program) = story(seed);
    let mut what = String::new();
    let end = Instant::now() + Duration::from_secs(20);
    let mut nth = 0;
    while nth < program.len() && Instant::now() < end {
        let step = program.remove(nth);
        match explore(seed, &kind, &program).1 {
            Err(found) if !program.is_empty() => what = found,
            _ => {
                program.insert(nth, step);
                nth += 1;
            }
        }
    }
    (program, what)
}

fn describe(seed: u64, what: &str) -> String {
    let (kind, program) = story(seed);
    let (least, least_what) = minimised(seed);
    format!(
        "{what}\n  replay: make explore EXPLORE_SEED={seed}\n  on {kind:?}, {} steps\n  \
         enough: {least:?}\n  there: {least_what}",
        program.len()
    )
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// What this thread took of its processor; others may be using the machine.
fn processor_time() -> Duration {
    let times = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(times.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(1))
}

fn on_all_cores(work: impl Fn() + Sync) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(&work);
        }
    });
}

/// Explores seeds in turn on all cores until there are no more or a promise is broken.
fn explore_all(next: impl Fn() -> Option<u64> + Sync) -> Counts {
    std::panic::set_hook(Box::new(|_| {}));
    let sum = Mutex::new((Counts::default(), Duration::ZERO, None::<(u64, String)>));
    let is_over = AtomicBool::new(false);
    on_all_cores(|| {
        while !is_over.load(Ordering::Relaxed)
            && let Some(seed) = next()
        {
            let start = processor_time();
            let (counts, found) = explore_seed(seed);
            let mut sum = sum.lock().unwrap();
            sum.0.add(&counts);
            sum.1 += processor_time() - start;
            if let Err(what) = found {
                is_over.store(true, Ordering::Relaxed);
                if sum.2.as_ref().is_none_or(|(other, _)| seed < *other) {
                    sum.2 = Some((seed, what));
                }
            }
        }
    });
    let (counts, time, failure) = sum.into_inner().unwrap();
    let rate = counts.judged as f64 / time.as_secs_f64();
    println!("{counts}; {rate:.0} states/s and core");
    let _ = std::panic::take_hook();
    if let Some((seed, what)) = failure {
        std::panic::set_hook(Box::new(|_| {}));
        let text = describe(seed, &what);
        let _ = std::panic::take_hook();
        panic!("{text}");
    }
    counts
}

#[test]
fn every_crash_state_keeps_the_promises() {
    if std::env::var_os("EXPLORE_MUTANT").is_some() {
        return;
    }
    let seed = number("EXPLORE_SEED");
    let seeds: Vec<u64> = match seed {
        Some(seed) => vec![seed],
        None => REGRESSIONS.into_iter().chain(0..HISTORIES).collect(),
    };
    let next = AtomicU64::new(0);
    let counts = explore_all(|| seeds.get(next.fetch_add(1, Ordering::Relaxed) as usize).copied());
    if seed.is_none() {
        assert!(counts.distinct >= 1_000_000, "fewer than a million distinct states: {counts}");
    }
}

/// The long run: `make soak SECONDS=n SEED=s`.
#[test]
#[ignore = "runs as long as EXPLORE_SECONDS says"]
fn soak() {
    let end = Instant::now() + Duration::from_secs(number("EXPLORE_SECONDS").unwrap_or(60));
    let next = AtomicU64::new(LONG_FROM + number("EXPLORE_SEED").unwrap_or(0) * LONG_FROM);
    explore_all(|| (Instant::now() < end).then(|| next.fetch_add(1, Ordering::Relaxed)));
}

#[test]
fn every_mutant_is_killed() {
    let wanted = std::env::var("EXPLORE_MUTANT").ok();
    let seed = number("EXPLORE_SEED");
    if wanted.is_none() && seed.is_some() {
        return;
    }
    std::panic::set_hook(Box::new(|_| {}));
    let seeds = seed.map_or(0..HISTORIES, |seed| seed..seed + 1);
    let next = AtomicU64::new(0);
    let survivors = Mutex::new(Vec::new());
    on_all_cores(|| {
        while let Some(&mutant) = Mutant::CRASHES.get(next.fetch_add(1, Ordering::Relaxed) as usize)
        {
            let name = format!("{mutant:?}");
            if wanted.as_ref().is_some_and(|wanted| *wanted != name) {
                continue;
            }
            // The bug is this thread's alone.
            mutants::set(Some(mutant));
            let killed =
                seeds.clone().find_map(|seed| explore_seed(seed).1.err().map(|what| (seed, what)));
            mutants::set(None);
            match killed {
                Some((seed, what)) => println!("{name}: killed by seed {seed}: {what}"),
                None => survivors.lock().unwrap().push(name),
            }
        }
    });
    let survivors = survivors.into_inner().unwrap();
    let _ = std::panic::take_hook();
    assert!(survivors.is_empty(), "mutants survive: {survivors:?}");
}
