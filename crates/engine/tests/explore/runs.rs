//! The runs: all written programs and a number of random ones; every mutant until it is killed;
//! the long run; the replay of one seed.
//!
//! Variables: `EXPLORE_SEED=s` explores that one history (with the long run: begins there),
//! `EXPLORE_MUTANT=Name` runs that one mutant (with a seed: on that one history),
//! `EXPLORE_SECONDS=n` bounds the long run, `EXPLORE_SURVEY=1` lists all seeds that fail.

#[cfg(feature = "mutants")]
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[cfg(feature = "mutants")]
use udm::mutants::{self, Mutant};

use crate::cases::{
    CACHE, LONG_FROM, PCACHE, PCACHE_REGRESSIONS, WRITECACHE, WRITECACHE_REGRESSIONS, case,
    is_in_short_form,
};
use crate::explore::{Counts, Effort, Explorer, Found, quietly};
use crate::machine::MachineState;
use crate::program::Step;
use crate::subject::Kind;

fn effort(seed: u64) -> Effort {
    match seed < LONG_FROM {
        true => Effort { exhaust: 300, sample: 60, deaths: 8, onward_one_in: 40, depth: 1 },
        false => Effort { exhaust: 400, sample: 80, deaths: 8, onward_one_in: 150, depth: 2 },
    }
}

fn explore(seed: u64, kind: &Arc<dyn Kind>, program: &[Step]) -> (Counts, Found) {
    let mut explorer = Explorer::new(kind, effort(seed), seed);
    // The first case has a blank device; in the others the cache already exists.
    let salt = seed ^ 0x00DD_5EED;
    let initial = match program.is_empty() {
        true => Ok(MachineState::blank(&**kind, salt)),
        false => quietly(|| MachineState::formatted(kind, salt)),
    };
    let found = initial.and_then(|initial| explorer.history(&initial, program, 0));
    explorer.counts.histories = 1;
    (explorer.counts, found)
}

fn explore_seed(seed: u64) -> (Counts, Found) {
    let (kind, program) = case(seed);
    explore(seed, &kind, &program)
}

/// Leaves out whatever the failure does not need, for a while.
fn minimised(seed: u64) -> (Vec<Step>, String) {
    let (kind, mut program) = case(seed);
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
    let (kind, program) = case(seed);
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
fn explore_all(what: &str, next: impl Fn() -> Option<u64> + Sync) -> Counts {
    if std::env::var_os("LOUD").is_none() {
        std::panic::set_hook(Box::new(|_| {}));
    }
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
                if std::env::var_os("EXPLORE_SURVEY").is_some() {
                    println!("seed {seed}: {what}");
                    continue;
                }
                is_over.store(true, Ordering::Relaxed);
                if sum.2.as_ref().is_none_or(|(other, _)| seed < *other) {
                    sum.2 = Some((seed, what));
                }
            }
        }
    });
    let (counts, time, failure) = sum.into_inner().unwrap();
    let rate = counts.judged as f64 / time.as_secs_f64();
    println!("{what}: {counts}; {rate:.0} states/s and core");
    let _ = std::panic::take_hook();
    if let Some((seed, what)) = failure {
        std::panic::set_hook(Box::new(|_| {}));
        let text = describe(seed, &what);
        let _ = std::panic::take_hook();
        panic!("{text}");
    }
    counts
}

/// Explores these seeds, or the one that is asked for.
fn explore_these(what: &str, seeds: Vec<u64>, distinct_min: u64) {
    if std::env::var_os("EXPLORE_MUTANT").is_some() {
        return;
    }
    let wanted = number("EXPLORE_SEED");
    let seeds = match wanted {
        Some(seed) if seeds.contains(&seed) || seed >= LONG_FROM => vec![seed],
        Some(_) => return,
        None => seeds,
    };
    let next = AtomicU64::new(0);
    let take = || seeds.get(next.fetch_add(1, Ordering::Relaxed) as usize).copied();
    let counts = explore_all(what, take);
    if wanted.is_none() {
        let distinct = counts.distinct;
        assert!(distinct >= distinct_min, "fewer than {distinct_min} distinct states: {counts}");
    }
}

/// Everything with the deliberate bugs built in (`make explore`), the short form without.
const IS_WHOLE: bool = cfg!(feature = "mutants");

#[test]
fn every_crash_state_of_pcache_keeps_the_promises() {
    let seeds = PCACHE.filter(|&seed| IS_WHOLE || is_in_short_form(seed, PCACHE));
    let distinct_min = if IS_WHOLE { 1_000_000 } else { 300_000 };
    explore_these("pcache", PCACHE_REGRESSIONS.into_iter().chain(seeds).collect(), distinct_min);
}

#[test]
fn every_crash_state_of_writecache_keeps_the_promises() {
    let seeds = WRITECACHE.filter(|&seed| IS_WHOLE || is_in_short_form(seed, WRITECACHE));
    let seeds = WRITECACHE_REGRESSIONS.into_iter().chain(seeds).collect();
    explore_these("writecache", seeds, if IS_WHOLE { 500_000 } else { 150_000 });
}

#[test]
fn every_crash_state_of_cache_keeps_the_promises() {
    let seeds = CACHE.filter(|&seed| IS_WHOLE || is_in_short_form(seed, CACHE));
    explore_these("cache", seeds.collect(), if IS_WHOLE { 500_000 } else { 150_000 });
}

/// The long run: `make soak SECONDS=n SEED=s`.
#[test]
#[ignore = "runs as long as EXPLORE_SECONDS says"]
fn soak() {
    let end = Instant::now() + Duration::from_secs(number("EXPLORE_SECONDS").unwrap_or(60));
    let next = AtomicU64::new(LONG_FROM + number("EXPLORE_SEED").unwrap_or(0) * LONG_FROM);
    explore_all("all targets", || {
        (Instant::now() < end).then(|| next.fetch_add(1, Ordering::Relaxed))
    });
}

/// Mutants that the short form may miss: only histories that it omits kill these.
#[cfg(feature = "mutants")]
const DEAR: [&str; 1] = ["UnflushedWrittenBack"];

/// The seed that killed each mutant last. It is tried first, which saves minutes; if it no longer
/// kills the mutant, the others are tried.
#[cfg(feature = "mutants")]
const KILLERS: &str = include_str!("killers.txt");

/// The seeds to try for `mutant`: the one of [`KILLERS`], if it is in `range`, then `seeds`.
#[cfg(feature = "mutants")]
fn killers_first(mutant: &str, range: &Range<u64>, seeds: &[u64]) -> Vec<u64> {
    let known = KILLERS.lines().filter_map(|line| line.split_once(' '));
    let known = known.filter(|(name, _)| *name == mutant).map(|(_, seed)| seed.parse().unwrap());
    known.filter(|seed| range.contains(seed)).chain(seeds.iter().copied()).collect()
}

/// Runs every mutant of `group` until one of `seeds` kills it: first the seed of [`KILLERS`], then
/// those of the short form.
#[cfg(feature = "mutants")]
fn kill_all(group: &[Mutant], range: Range<u64>) {
    let wanted = std::env::var("EXPLORE_MUTANT").ok();
    let seed = number("EXPLORE_SEED");
    if wanted.is_none() && seed.is_some() {
        return;
    }
    std::panic::set_hook(Box::new(|_| {}));
    let (short, long): (Vec<u64>, Vec<u64>) =
        range.clone().partition(|&seed| is_in_short_form(seed, range.clone()));
    let seeds = seed.map_or([short, long].concat(), |seed| vec![seed]);
    let next = AtomicU64::new(0);
    let late = Mutex::new(Vec::new());
    let survivors = Mutex::new(Vec::new());
    on_all_cores(|| {
        while let Some(&mutant) = group.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            let name = format!("{mutant:?}");
            if wanted.as_ref().is_some_and(|wanted| *wanted != name) {
                continue;
            }
            // The bug is this thread's alone.
            mutants::set(Some(mutant));
            let seeds = match seed {
                Some(_) => seeds.clone(),
                None => killers_first(&name, &range, &seeds),
            };
            let killed = seeds.iter().find_map(|&seed| Some((seed, explore_seed(seed).1.err()?)));
            mutants::set(None);
            match killed {
                Some((seed, what)) => {
                    println!("{name}: killed by seed {seed}: {what}");
                    if !is_in_short_form(seed, range.clone()) && !DEAR.contains(&&*name) {
                        late.lock().unwrap().push((name, seed));
                    }
                }
                None => survivors.lock().unwrap().push(name),
            }
        }
    });
    let survivors = survivors.into_inner().unwrap();
    let _ = std::panic::take_hook();
    assert!(survivors.is_empty(), "mutants survive: {survivors:?}");
    let late = late.into_inner().unwrap();
    assert!(seed.is_some() || late.is_empty(), "the short form misses {late:?}");
}

#[cfg(feature = "mutants")]
#[test]
fn every_mutant_of_pcache_is_killed() {
    kill_all(Mutant::PCACHE, PCACHE);
}

#[cfg(feature = "mutants")]
#[test]
fn every_mutant_of_writecache_is_killed() {
    kill_all(Mutant::WRITECACHE, WRITECACHE);
}
