//! Interleavings of threads, generated from seeds. The tests run the engine's own code with
//! `shuttle`'s locks and atomics (see `sync`), and the scheduler may switch threads at every
//! access. One seed decides the schedule and the choices of the test case; the same seed gives the
//! same run.
//!
//! Variables: `SCHEDULES_CASE=name` runs only that test case, `SCHEDULES_SEED=s` only that
//! schedule (the long run begins there), `SCHEDULES_MUTANT=Name` tries only that mutant,
//! `SCHEDULES_SHARE=n` plays one schedule in `n` of the normal run, and `SCHEDULES_SECONDS=n`
//! bounds the long run.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

use crate::mutants::{self, Mutant};
use crate::prng::Prng;
use crate::sync::Arc;
use crate::{cache, pcache, ring, writecache};

pub mod base;
pub mod history;
pub mod simulator;

/// Schedules of each case in the normal run.
const SCHEDULES: u64 = 512;
/// Mutants must be killed within their usual number of schedules times this. A change elsewhere
/// also changes the schedules, and must not let a mutant survive by chance.
const PATIENCE: u64 = 4;
/// Schedules played before it is another case's turn.
const TURN: u64 = 16;
/// Schedules that once found a defect; part of the normal run.
const REGRESSIONS: [(&str, u64); 1] = [("crowded", 254)];
/// A schedule that has not ended after this many steps counts as an endless loop.
const STEPS_MAX: usize = 60_000;

/// A test case: the work of some threads. Panics when a promise is broken.
#[derive(Debug)]
pub(crate) struct Case {
    /// Its name.
    pub(crate) name: &'static str,
    /// Plays it with choices of its own.
    pub(crate) play: fn(Prng),
    /// How many times as often as others it is run: it is short, or it looks for a rare state.
    pub(crate) times: u64,
}

/// The counts of a run.
#[derive(Debug, Default)]
struct Counts {
    schedules: u64,
    /// Points at which more than one thread could go on.
    choices: u64,
    /// Hashes of the choices made.
    distinct: HashSet<u64>,
    /// Processor time; others may be using the machine.
    time: Duration,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.schedules += other.schedules;
        self.choices += other.choices;
        self.distinct.extend(other.distinct);
        self.time += other.time;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let distinct = self.distinct.len();
        let (schedules, choices, time) = (self.schedules, self.choices, self.time.as_secs_f64());
        write!(f, "{schedules} schedules, {distinct} distinct, {choices} choices, {time:.2} s")
    }
}

/// How threads are chosen. Each mode finds bugs that the others miss: those that need many
/// switches, few at the right places, or one thread that is held up for long.
#[derive(Debug)]
enum Mode {
    /// Any thread at any point.
    Uniform,
    /// The same thread continues, except once in this many points.
    Sticky(u64),
    /// The thread of the highest priority; at some points it becomes the lowest.
    Priorities { of: HashMap<TaskId, u64>, changes: Vec<u64>, lowest: u64 },
}

/// The state that the schedules of one run share with the cases.
#[derive(Debug, Default)]
struct RunState {
    seed: AtomicU64,
    counts: Mutex<Counts>,
}

/// A scheduler whose every schedule has a seed of its own.
#[derive(Debug)]
struct Seeded {
    seeds: std::ops::Range<u64>,
    run: Arc<RunState>,
    prng: Prng,
    mode: Mode,
    step: u64,
    hash: u64,
}

impl Seeded {
    fn new(seeds: std::ops::Range<u64>, run: Arc<RunState>) -> Seeded {
        Seeded { seeds, run, prng: Prng::new(0), mode: Mode::Uniform, step: 0, hash: 0 }
    }

    /// Counts the schedule that has ended.
    fn book(&mut self) {
        if self.step > 0 {
            let mut counts = self.run.counts.lock().unwrap();
            counts.schedules += 1;
            counts.choices += self.step;
            counts.distinct.insert(self.hash);
            self.step = 0;
        }
    }
}

fn mode_of(prng: &mut Prng) -> Mode {
    match prng.below(4) {
        0 => Mode::Uniform,
        1 | 2 => Mode::Sticky(2 << prng.below(6)),
        _ => {
            let longest = 1 << (5 + prng.below(7));
            let changes = (0..1 + prng.below(6)).map(|_| prng.below(longest)).collect();
            Mode::Priorities { of: HashMap::new(), changes, lowest: u64::MAX / 2 }
        }
    }
}

impl Scheduler for Seeded {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.book();
        let seed = self.seeds.next()?;
        self.run.seed.store(seed, Ordering::SeqCst);
        self.prng = Prng::new(!seed);
        self.mode = mode_of(&mut self.prng);
        self.hash = 0;
        Some(Schedule::new(seed))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        if let [only] = runnable {
            return Some(only.id());
        }
        self.step += 1;
        let current = current.filter(|id| runnable.iter().any(|task| task.id() == *id));
        let stays = current.filter(|_| !is_yielding);
        let any = |prng: &mut Prng| runnable[prng.below(runnable.len() as u64) as usize].id();
        let chosen = match &mut self.mode {
            Mode::Uniform => any(&mut self.prng),
            Mode::Sticky(long) => match stays {
                Some(id) if !self.prng.one_in(*long) => id,
                _ => any(&mut self.prng),
            },
            Mode::Priorities { of, changes, lowest } => {
                for task in runnable {
                    of.entry(task.id()).or_insert_with(|| u64::MAX / 2 + self.prng.below(1 << 40));
                }
                if (is_yielding || changes.contains(&self.step))
                    && let Some(id) = current
                {
                    *lowest -= 1;
                    of.insert(id, *lowest);
                }
                runnable.iter().map(|task| task.id()).max_by_key(|id| of[id])?
            }
        };
        self.hash = (self.hash ^ (usize::from(chosen) as u64 + 1)).wrapping_mul(0x100_0000_01B3);
        self.hash ^= self.hash >> 29;
        Some(chosen)
    }

    fn next_u64(&mut self) -> u64 {
        self.prng.next_u64()
    }
}

impl Drop for Seeded {
    fn drop(&mut self) {
        self.book();
    }
}

std::thread_local! {
    /// The message of the first panic of a schedule on this thread; `None` while no schedule runs.
    static SAID: std::cell::RefCell<Option<String>> = const { std::cell::RefCell::new(None) };
}

/// Stores the messages of schedules' panics instead of printing them.
fn listen_to_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let is_kept = SAID.with_borrow_mut(|said| {
                let text = panic.payload_as_str().unwrap_or("a panic");
                if let Some(said) = said.as_mut().filter(|said| said.is_empty()) {
                    said.push_str(text);
                }
                said.is_some()
            });
            if !is_kept {
                others(panic);
            }
        }));
    });
}

/// Lists of test cases, and of the deliberate races that they must find.
type Room = (&'static [&'static [Case]], &'static [&'static [Mutant]]);

const ROOMS: [Room; 3] = [
    (
        &[pcache::schedules::CASES, ring::schedules::CASES],
        &[Mutant::PCACHE_RACES, Mutant::DRIVING_RACES, &[Mutant::FillNotCancelled]],
    ),
    (&[writecache::schedules::CASES], &[Mutant::WRITECACHE_RACES]),
    (
        &[cache::schedules::CASES],
        &[Mutant::CACHE_RACES, &[Mutant::LeftWhileRead, Mutant::PromotedOverWrite]],
    ),
];

/// Runs `case` under the schedules of `seeds` until one fails; returns that seed and the failure.
/// Each call has its own thread, because the scheduler's state cannot be used after a failure.
fn play(
    case: &Case,
    mutant: Option<Mutant>,
    seeds: std::ops::Range<u64>,
    counts: &mut Counts,
) -> Option<(u64, String)> {
    let on_thread = || {
        mutants::set(mutant);
        play_here(case, seeds, counts)
    };
    std::thread::scope(|scope| scope.spawn(on_thread).join().unwrap())
}

fn play_here(
    case: &Case,
    seeds: std::ops::Range<u64>,
    counts: &mut Counts,
) -> Option<(u64, String)> {
    let run = Arc::new(RunState::default());
    let mut config = Config::new();
    config.stack_size = 2 << 20;
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(STEPS_MAX);
    config.silence_warnings = true;
    config.ungraceful_shutdown_config.immediately_return_on_panic = true;
    let runner = Runner::new(Seeded::new(seeds, run.clone()), config);
    let run_of_body = run.clone();
    let body = case.play;
    SAID.set(Some(String::new()));
    let result = catch_unwind(AssertUnwindSafe(|| {
        runner.run(move || body(Prng::new(run_of_body.seed.load(Ordering::SeqCst))))
    }));
    counts.add(std::mem::take(&mut *run.counts.lock().unwrap()));
    counts.time += processor_time();
    result.err().map(|_| {
        let said = SAID.take().filter(|said| !said.is_empty()).expect("a panic that says why");
        (run.seed.load(Ordering::SeqCst), said)
    })
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn number(name: &str) -> Option<u64> {
    variable(name).map(|value| value.parse().unwrap())
}

fn wanted_cases() -> Vec<&'static Case> {
    let name = variable("SCHEDULES_CASE");
    let is_wanted = |case: &&Case| name.as_ref().is_none_or(|name| name == case.name);
    ROOMS.iter().flat_map(|(cases, _)| cases.iter().copied()).flatten().filter(is_wanted).collect()
}

/// Processor time of this thread.
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

fn replay(case: &Case, seed: u64, what: &str) -> String {
    let name = case.name;
    format!("{name}: {what}\n  replay: make schedules SCHEDULES_CASE={name} SCHEDULES_SEED={seed}")
}

#[test]
fn every_schedule_keeps_the_promises() {
    if variable("SCHEDULES_MUTANT").is_some() {
        return;
    }
    listen_to_panics();
    let cases = wanted_cases();
    let share = number("SCHEDULES_SHARE").unwrap_or(1);
    let next = AtomicU64::new(0);
    let failures = Mutex::new(Vec::new());
    on_all_cores(|| {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            let mut counts = Counts::default();
            let seeds = match number("SCHEDULES_SEED") {
                Some(seed) => seed..seed + 1,
                None => 0..SCHEDULES * case.times / share,
            };
            let regressions = REGRESSIONS.iter().filter(|(name, _)| *name == case.name);
            let failed = regressions
                .map(|(_, seed)| *seed..*seed + 1)
                .chain([seeds])
                .find_map(|seeds| play(case, None, seeds, &mut counts));
            println!("{}: {counts}", case.name);
            failures.lock().unwrap().extend(failed.map(|(seed, what)| replay(case, seed, &what)));
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// The test case and the schedule that found each race last. They are tried first, which saves
/// minutes; if they no longer find the race, the others are tried.
const FINDERS: &str = include_str!("schedules/finders.txt");

/// The case and the schedule of [`FINDERS`] for `mutant`.
fn finder_of<'a>(mutant: Mutant, cases: &[&'a Case]) -> Option<(&'a Case, u64)> {
    let name = format!("{mutant:?}");
    let mut lines = FINDERS.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let words = lines.find(|words| words[0] == name)?;
    let case = cases.iter().find(|case| case.name == words[1])?;
    Some((case, words[2].parse().unwrap()))
}

/// The first test case and schedule that shows the mutant, and how many were tried.
fn kill(mutant: Mutant, cases: &[&Case]) -> Option<(String, u64)> {
    let mut counts = Counts::default();
    if let Some((case, seed)) =
        finder_of(mutant, cases).filter(|_| number("SCHEDULES_SEED").is_none())
        && let Some((seed, what)) = play(case, Some(mutant), seed..seed + 1, &mut counts)
    {
        return Some((format!("{} {seed}: {what}", case.name), counts.schedules));
    }
    for turn in 0..PATIENCE * SCHEDULES / TURN {
        for case in cases {
            let turns = TURN * case.times;
            let seeds = match number("SCHEDULES_SEED") {
                Some(seed) => seed..seed + 1,
                None => turn * turns..(turn + 1) * turns,
            };
            if let Some((seed, what)) = play(case, Some(mutant), seeds, &mut counts) {
                return Some((format!("{} {seed}: {what}", case.name), counts.schedules));
            }
        }
    }
    None
}

#[test]
fn every_race_is_found() {
    let wanted = variable("SCHEDULES_MUTANT");
    if wanted.is_none() && number("SCHEDULES_SEED").is_some() {
        return;
    }
    listen_to_panics();
    let wanted_cases = wanted_cases();
    let mutants: Vec<(Mutant, Vec<&Case>)> = ROOMS
        .iter()
        .flat_map(|(cases, mutants)| {
            let is_here =
                |case: &&&Case| cases.iter().copied().flatten().any(|here| here.name == case.name);
            let cases: Vec<_> = wanted_cases.iter().filter(is_here).copied().collect();
            mutants.iter().copied().flatten().map(move |mutant| (*mutant, cases.clone()))
        })
        .collect();
    let next = AtomicU64::new(0);
    let survivors = Mutex::new(Vec::new());
    on_all_cores(|| {
        while let Some((mutant, cases)) = mutants.get(next.fetch_add(1, Ordering::Relaxed) as usize)
        {
            let name = format!("{mutant:?}");
            if wanted.as_ref().is_some_and(|wanted| *wanted != name) {
                continue;
            }
            match kill(*mutant, cases) {
                Some((how, tried)) => println!("{name}: killed, schedule {tried}, by {how}"),
                None => survivors.lock().unwrap().push(name),
            }
        }
    });
    let survivors = survivors.into_inner().unwrap();
    assert!(survivors.is_empty(), "mutants survive: {survivors:?}");
}

/// The long run: `make soak SECONDS=n SEED=s`.
#[test]
#[ignore = "runs as long as SCHEDULES_SECONDS says"]
fn soak() {
    listen_to_panics();
    let cases = wanted_cases();
    let end = Instant::now() + Duration::from_secs(number("SCHEDULES_SECONDS").unwrap_or(60));
    let next = AtomicU64::new(0);
    let first = (1 + number("SCHEDULES_SEED").unwrap_or(0)) << 32;
    let sum = Mutex::new((Counts::default(), None));
    on_all_cores(|| {
        let mut counts = Counts::default();
        let mut failed = None;
        while Instant::now() < end && failed.is_none() {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            let case = cases[(turn % cases.len() as u64) as usize];
            let start = first + turn / cases.len() as u64 * TURN;
            failed = play(case, None, start..start + TURN, &mut counts)
                .map(|(seed, what)| replay(case, seed, &what));
        }
        let mut sum = sum.lock().unwrap();
        sum.0.add(counts);
        sum.1 = sum.1.take().or(failed);
    });
    let (counts, failure) = sum.into_inner().unwrap();
    println!("{counts}");
    assert!(failure.is_none(), "\n{}", failure.unwrap_or_default());
}
