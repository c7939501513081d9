//! Torture: real servers, clients of our own, and everything that people and machines do to them.
//!
//! `cargo test -p udm-cli --test torture` runs it for some seconds. After `--`: `--seconds S`,
//! `--seed N` (the first case's seed; each case takes the next one), `--cases N` (this many, and
//! then no more), `--only WORDS` (cases that have these words in their description), `--workers N`
//! (cases at a time), `--udm PATH` (another binary).
//!
//! A *case* is one device with its files, from one seed: one to three table lines, caches of small
//! sizes, in memory or on a disk. In each round several connections send pipelined requests that
//! overlap, and the server is killed (`rounds`); between rounds files are moved, copied and cut
//! (`people`), and origins changed. In every second case the devices are disks of our own
//! (`disks`), which fail, hang and lose power (`sick`). An oracle knows for each sector what may be
//! read (`oracle`), and everything is read
//! after each round. At the end all is drained, and the origins alone must hold it.
//!
//! A seed decides the parts of a case and the actions on it. The machine decides when exactly a
//! server dies: a replay does the same actions, and finds the same fault in most cases.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

mod case;
mod commands;
mod disks;
mod fixture;
mod load;
mod nbd;
mod oracle;
mod people;
mod rounds;
mod sick;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use case::Case;
use fixture::Fixture;

/// How long a plain run goes on.
const SECONDS: u64 = 10;

struct Args {
    seconds: u64,
    seed: u64,
    cases: u64,
    only: String,
    workers: usize,
    udm: PathBuf,
    is_skipped: bool,
}

fn parse(words: impl Iterator<Item = String>) -> Args {
    let mut args = Args {
        seconds: SECONDS,
        seed: 1,
        cases: u64::MAX,
        only: String::new(),
        workers: 2,
        udm: PathBuf::from(env!("CARGO_BIN_EXE_udm")),
        is_skipped: false,
    };
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
        match word.as_str() {
            "--seconds" => args.seconds = number(),
            "--seed" => args.seed = number(),
            "--cases" => args.cases = number(),
            "--workers" => args.workers = number() as usize,
            "--only" => args.only = words.next().expect("words"),
            "--udm" => args.udm = PathBuf::from(words.next().expect("a path")),
            // cargo's own test runner takes these; a name selects tests.
            flag if flag.starts_with("--") => {}
            name => args.is_skipped |= !"torture".contains(name),
        }
    }
    args
}

/// The actions, over all cases.
#[derive(Debug, Default)]
struct Tally {
    cases: u64,
    rounds: u64,
    kills: u64,
    early_kills: u64,
    answered: u64,
    in_flight: u64,
    actions: u64,
    refused: u64,
    drained: u64,
    sick: u64,
    power_cuts: u64,
    detached: u64,
    /// Sectors in which a read showed parts of a simultaneous write.
    mixed: u64,
}

impl Tally {
    fn add(&mut self, other: &Tally) {
        self.cases += other.cases;
        self.rounds += other.rounds;
        self.kills += other.kills;
        self.early_kills += other.early_kills;
        self.answered += other.answered;
        self.in_flight += other.in_flight;
        self.actions += other.actions;
        self.refused += other.refused;
        self.drained += other.drained;
        self.sick += other.sick;
        self.power_cuts += other.power_cuts;
        self.detached += other.detached;
        self.mixed += other.mixed;
    }
}

fn main() -> ExitCode {
    let args = parse(std::env::args().skip(1));
    if args.is_skipped {
        return ExitCode::SUCCESS;
    }
    std::panic::set_hook(Box::new(|what| eprintln!("{what}")));
    oracle::check_itself();
    println!("torture: {} seconds from seed {}", args.seconds, args.seed);
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let (next, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let sum = Mutex::new(Tally::default());
    let work = || {
        while !is_over.load(Ordering::SeqCst) && Instant::now() < end {
            let nth = next.fetch_add(1, Ordering::SeqCst);
            if nth >= args.cases {
                return;
            }
            match one_fixture(&args, args.seed + nth, end) {
                Some(tally) => sum.lock().unwrap().add(&tally),
                None => is_over.store(true, Ordering::SeqCst),
            }
        }
    };
    std::thread::scope(|scope| {
        (0..args.workers.max(1)).for_each(|_| {
            scope.spawn(work);
        });
    });
    println!("torture: {:?}", sum.into_inner().unwrap());
    if is_over.into_inner() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs the case of a seed. Returns its tally, or `None` if it failed.
fn one_fixture(args: &Args, seed: u64, end: Instant) -> Option<Tally> {
    let case = Case::from_seed(seed);
    if !case.to_string().contains(&args.only) {
        return Some(Tally::default());
    }
    let mut fixture = Fixture::new(&args.udm, case, end);
    let outcome = catch_unwind(AssertUnwindSafe(|| fixture.run()));
    fixture.end();
    if outcome.is_ok() {
        let mixed = fixture.oracle.mixed();
        return Some(Tally { mixed, ..fixture.tally });
    }
    fixture.oracle.show_notes();
    let kept = fixture.keep();
    println!("torture: FAILED: seed {seed}: {}", fixture.case);
    println!("torture: the files are kept in {kept}");
    println!("torture: again: make torture SEED={seed} CASES=1 SECONDS=600");
    None
}
