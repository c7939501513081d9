//! The whole system from one seed: a device with a cache, alone or between other lines, or without
//! one and with tables that change; several clients, a background and
//! malicious devices on one virtual clock; the clients' view is compared with a model.
//!
//! `cargo test -p udm --test simulate` runs the regression seeds and a fixed number of histories.
//! After `--`: `--seed N [--ops K] [--keep LIST]` replays one; `--seconds S [--seed N]` soaks;
//! `--histories N --survey` lists what fails; `--mutants` (with `--features mutants`) lets the
//! simulation look for deliberate bugs, `--own-mutants` for those that it must find.
//!
//! Not simulated, because udm cannot notice: lost and misdirected writes of the origin (it reports
//! success, and the origin stores no checksums), rot of cached data without
//! `data_crc`, and rot of the newest key set (which looks like an append that a power cut tore).
//! Rot of the label is left out: it names the ranges that were damaged before. After rot of
//! cache_info a server's shared memory is taken for another medium's: its writes may be lost.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

mod actions;
mod cached;
mod machine;
mod oracle;
mod plan;
mod run;
mod shrink;
mod stress;

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use plan::{CACHE_FROM, PLAIN_FROM, WRITECACHE_FROM};
use run::Tally;
use shrink::{Failure, replay, shrunk};

/// Histories of a plain run, of pcache, of writecache, of cache and without a cache, and their
/// steps.
const HISTORIES: u64 = 500;
const WRITECACHE_HISTORIES: u64 = 200;
const CACHE_HISTORIES: u64 = 200;
const PLAIN_HISTORIES: u64 = 100;
const HISTORIES_OF_ALL: u64 = HISTORIES + WRITECACHE_HISTORIES + CACHE_HISTORIES + PLAIN_HISTORIES;
const STEPS: usize = 400;
/// How long real threads run.
const STRESS: Duration = Duration::from_secs(8);
/// Histories that look for each deliberate bug.
#[cfg(feature = "mutants")]
const MUTANT_HISTORIES: u64 = 400;

/// Seeds that found something once.
const REGRESSIONS: &[u64] = &[
    1_099_511_628_043,
    10,
    140,
    20_026,
    20_897,
    4_294_967_312,
    4_294_967_538,
    4_294_969_863,
    68_719_477_748,
    68_719_478_509,
    68_719_478_667,
    4_315_228_534,
    4_372_308_421,
    550_033_036,
    68_796_818_327,
    68_796_818_831,
];

#[derive(Default)]
struct Args {
    seed: Option<u64>,
    seconds: Option<u64>,
    steps: Option<usize>,
    keep: Option<Vec<usize>>,
    histories: Option<u64>,
    is_survey: bool,
    is_mutants: bool,
    is_own: bool,
    is_skipped: bool,
}

fn main() -> ExitCode {
    let args = parse(std::env::args().skip(1));
    if args.is_skipped {
        return ExitCode::SUCCESS;
    }
    std::panic::set_hook(Box::new(shrink::remember_panic));
    let steps = args.steps.unwrap_or(STEPS);
    if args.is_mutants {
        return mutants(steps, args.is_own);
    }
    if let (Some(seed), None, None) = (args.seed, args.seconds, args.histories) {
        return replay_one(seed, steps, args.keep);
    }
    let seeds = if args.seconds.is_none() { REGRESSIONS } else { &[] };
    let start = Instant::now();
    let (tally, failure) = run_many(&args, seeds);
    report(&tally, start.elapsed());
    match failure {
        None => stress_some(&args),
        Some(failure) => {
            let failure = shrunk(failure);
            println!("{failure}");
            ExitCode::FAILURE
        }
    }
}

/// Runs histories on all cores until there are enough, the time has passed, or one fails.
fn run_many(args: &Args, regressions: &[u64]) -> (Tally, Option<Failure>) {
    let steps = args.steps.unwrap_or(STEPS);
    let seconds = args.seconds.map(Duration::from_secs);
    let first = args.seed.unwrap_or(1);
    let histories = match seconds {
        Some(_) => u64::MAX,
        None => args.histories.unwrap_or(HISTORIES_OF_ALL),
    };
    let is_plain = seconds.is_none() && args.histories.is_none();
    let start = Instant::now();
    let next = AtomicU64::new(0);
    let is_over = AtomicBool::new(false);
    let sum = Mutex::new((Tally::default(), None::<Failure>));
    let work = || {
        loop {
            let nth = next.fetch_add(1, Ordering::SeqCst);
            let known = regressions.len() as u64;
            let is_late = seconds.is_some_and(|seconds| start.elapsed() >= seconds);
            if is_over.load(Ordering::SeqCst) || is_late || nth >= histories.saturating_add(known) {
                return;
            }
            let seed = match regressions.get(nth as usize) {
                Some(seed) => *seed,
                None => seed_of(first, nth - known, is_plain),
            };
            let (tally, failure) = replay(seed, steps, None);
            let mut sum = sum.lock().unwrap();
            sum.0.add(&tally);
            if seconds.is_some() && sum.0.histories % 500 == 0 {
                report(&sum.0, start.elapsed());
            }
            if let Some(failure) = failure {
                if args.is_survey {
                    println!("{}", failure.headline());
                    continue;
                }
                is_over.store(true, Ordering::SeqCst);
                sum.1.get_or_insert(failure);
            }
        }
    };
    on_all_cores(work);
    sum.into_inner().unwrap()
}

fn on_all_cores(work: impl Fn() + Copy + Send) {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(work);
        }
    });
}

/// The seed of history `nth`: a plain run goes through pcache's first, others take turns.
fn seed_of(first: u64, nth: u64, is_plain: bool) -> u64 {
    let of = |from: u64, nth: u64| from.wrapping_add(first).wrapping_add(nth);
    if is_plain {
        let of_each = [
            (HISTORIES, 0),
            (WRITECACHE_HISTORIES, WRITECACHE_FROM),
            (CACHE_HISTORIES, CACHE_FROM),
        ];
        let mut nth = nth;
        for (histories, from) in of_each {
            if nth < histories {
                return of(from, nth);
            }
            nth -= histories;
        }
        return of(PLAIN_FROM, nth);
    }
    match nth % 16 {
        _ if first >= WRITECACHE_FROM => of(0, nth),
        15 => of(PLAIN_FROM, nth / 16),
        _ => of([0, WRITECACHE_FROM, CACHE_FROM][nth as usize % 3], nth / 3),
    }
}

fn report(tally: &Tally, elapsed: Duration) {
    let seconds = elapsed.as_secs_f64().max(0.001);
    println!(
        "simulate: {} histories, {} requests, {} moves, {} deaths, {} errors allowed, {} media \
         refused in {seconds:.1} s: {:.0} histories/s, {:.0} requests/s, {:.0} moves/s",
        tally.histories,
        tally.requests,
        tally.moves,
        tally.deaths,
        tally.errors,
        tally.refused,
        tally.histories as f64 / seconds,
        tally.requests as f64 / seconds,
        tally.moves as f64 / seconds,
    );
}

fn replay_one(seed: u64, steps: usize, keep: Option<Vec<usize>>) -> ExitCode {
    let is_minimal = keep.is_some();
    let (tally, failure) = replay(seed, steps, keep);
    report(&tally, Duration::from_secs(1));
    let Some(failure) = failure else { return ExitCode::SUCCESS };
    let failure = if is_minimal { failure } else { shrunk(failure) };
    println!("{failure}");
    ExitCode::FAILURE
}

/// Real threads: a tenth of a soak, or some seconds.
fn stress_some(args: &Args) -> ExitCode {
    let seed = args.seed.unwrap_or(1);
    let time = args.seconds.map_or(STRESS, |seconds| Duration::from_secs(seconds / 10).max(STRESS));
    stress::judge_is_awake();
    match stress::stress(seed, time) {
        Ok(requests) => {
            let seconds = time.as_secs_f64();
            println!("stress: {requests} requests of real threads in {seconds:.1} s, linearizable");
            ExitCode::SUCCESS
        }
        Err(what) => {
            println!("stress: FAILED: {what} (seed {seed}; threads do not replay)");
            ExitCode::FAILURE
        }
    }
}

/// Which deliberate bugs the simulation finds, and in which seed. Those that are its own business
/// must be found.
#[cfg(feature = "mutants")]
fn mutants(steps: usize, is_own: bool) -> ExitCode {
    use udm::mutants::{Mutant, set};
    let from = |first: u64| (first..first + MUTANT_HISTORIES).collect::<Vec<_>>();
    let of_any = |nth| [PLAIN_FROM + nth, WRITECACHE_FROM + nth, nth];
    let any = (1..MUTANT_HISTORIES).flat_map(of_any);
    let any: Vec<u64> = REGRESSIONS.iter().copied().chain(any).collect();
    let own = Mutant::PIECES.iter().map(|mutant| (*mutant, any.clone()));
    let own = own.chain(Mutant::CACHE_TABLES.iter().map(|mutant| (*mutant, from(CACHE_FROM))));
    let others = Mutant::PCACHE.iter().map(|mutant| (*mutant, from(1)));
    let others = others
        .chain(Mutant::WRITECACHE.iter().map(|mutant| (*mutant, from(WRITECACHE_FROM))))
        .chain(Mutant::CACHE.iter().map(|mutant| (*mutant, from(CACHE_FROM))))
        .filter(|_| !is_own);
    let all: Vec<(Mutant, Vec<u64>)> = own.chain(others).collect();
    let next = AtomicU64::new(0);
    let has_survivor = AtomicBool::new(false);
    let work = || {
        while let Some((mutant, seeds)) = all.get(next.fetch_add(1, Ordering::SeqCst) as usize) {
            set(Some(*mutant));
            let killer = seeds.iter().find_map(|seed| replay(*seed, steps, None).1);
            set(None);
            let is_own = [Mutant::PIECES, Mutant::CACHE_TABLES].concat().contains(mutant);
            let survives = killer.is_none() && is_own;
            has_survivor.fetch_or(survives, Ordering::SeqCst);
            let what = killer.map_or("SURVIVES".to_string(), |failure| failure.headline());
            println!("{mutant:?}: {what}");
        }
    };
    on_all_cores(work);
    if has_survivor.into_inner() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

#[cfg(not(feature = "mutants"))]
fn mutants(_: usize, _: bool) -> ExitCode {
    println!("simulate: --mutants needs `--features mutants`");
    ExitCode::FAILURE
}

/// Words that are not ours are a filter of `cargo test`, which means other tests.
fn parse(mut words: impl Iterator<Item = String>) -> Args {
    let mut args = Args::default();
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
        match word.as_str() {
            "--seed" => args.seed = Some(number()),
            "--seconds" => args.seconds = Some(number()),
            "--ops" => args.steps = Some(number() as usize),
            "--histories" => args.histories = Some(number()),
            "--keep" => args.keep = Some(shrink::parse_list(&words.next().expect("a list"))),
            "--mutants" => args.is_mutants = true,
            "--own-mutants" => (args.is_mutants, args.is_own) = (true, true),
            "--survey" => args.is_survey = true,
            "--list" => args.is_skipped = true,
            filter if !filter.starts_with('-') => args.is_skipped |= !"simulate".contains(filter),
            _ => {}
        }
    }
    args
}
