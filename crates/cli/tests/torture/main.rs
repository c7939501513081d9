//! Torture: real servers, clients of our own, and everything that people and machines do to them.
//!
//! `cargo test -p udm-cli --test torture` runs it for some seconds. After `--`: `--seconds S`,
//! `--seed N` (the first world's seed; each world takes the next one), `--worlds N` (this many, and
//! then no more), `--only WORDS` (worlds that have these words in their description), `--workers N`
//! (worlds at a time), `--udm PATH` (another binary).
//!
//! A *world* is one device with its files, from one seed: one to three table lines, caches of small
//! sizes, in memory or on a disk. In each round several connections send pipelined requests that
//! overlap, and the server is killed (`rounds`); between rounds files are moved, copied and cut
//! (`people`). An oracle knows for each sector what may be read (`oracle`), and everything is read
//! after each round. At the end all is drained, and the origins alone must hold it.
//!
//! A seed decides what a world is made of and what is done to it. When exactly a server dies is
//! the machine's choice: a replay does the same things, and finds the same in most cases.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

mod commands;
mod load;
mod nbd;
mod oracle;
mod people;
mod rounds;
mod scene;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use scene::Scene;
use world::World;

/// How long a plain run goes on.
const SECONDS: u64 = 10;

struct Args {
    seconds: u64,
    seed: u64,
    worlds: u64,
    only: String,
    workers: usize,
    udm: PathBuf,
    is_skipped: bool,
}

fn parse(words: impl Iterator<Item = String>) -> Args {
    let mut args = Args {
        seconds: SECONDS,
        seed: 1,
        worlds: u64::MAX,
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
            "--worlds" => args.worlds = number(),
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

/// What was done, over all worlds.
#[derive(Debug, Default)]
struct Tally {
    worlds: u64,
    rounds: u64,
    kills: u64,
    early_kills: u64,
    answered: u64,
    in_flight: u64,
    acts: u64,
    refused: u64,
    drained: u64,
    /// Sectors in which a read showed parts of what was written beside it.
    mixed: u64,
}

impl Tally {
    fn add(&mut self, other: &Tally) {
        self.worlds += other.worlds;
        self.rounds += other.rounds;
        self.kills += other.kills;
        self.early_kills += other.early_kills;
        self.answered += other.answered;
        self.in_flight += other.in_flight;
        self.acts += other.acts;
        self.refused += other.refused;
        self.drained += other.drained;
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
            if nth >= args.worlds {
                return;
            }
            match one_world(&args, args.seed + nth, end) {
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

/// Runs the world of a seed; what was done, or nothing if it failed.
fn one_world(args: &Args, seed: u64, end: Instant) -> Option<Tally> {
    let scene = Scene::from_seed(seed);
    if !scene.to_string().contains(&args.only) {
        return Some(Tally::default());
    }
    let mut world = World::new(&args.udm, scene, end);
    let outcome = catch_unwind(AssertUnwindSafe(|| world.run()));
    world.end();
    if outcome.is_ok() {
        let mixed = world.oracle.mixed();
        return Some(Tally { mixed, ..world.tally });
    }
    world.oracle.show_notes();
    let kept = world.keep();
    println!("torture: FAILED: seed {seed}: {}", world.scene);
    println!("torture: the files are kept in {kept}");
    println!("torture: again: make torture SEED={seed} WORLDS=1 SECONDS=600");
    None
}
