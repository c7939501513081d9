//! Interleavings of threads, tried from seeds: the engine's own code with `shuttle`'s locks and
//! atomics (see `sync`), where another thread may run at every access. One seed decides the
//! schedule and the story's own choices; the same seed gives the same run.
//!
//! Variables: `SCHEDULES_STORY=name` plays only that story, `SCHEDULES_SEED=s` only that schedule
//! (with the long run: begins there), `SCHEDULES_MUTANT=Name` tries only that mutant,
//! `SCHEDULES_SECONDS=n` bounds the long run.

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

pub mod history;
pub mod scene;
pub mod stage;

/// Schedules of each story in the normal run.
const SCHEDULES: u64 = 512;
/// Mutants must be killed within this many times as many schedules: a change elsewhere also changes
/// the schedules, and must not let a mutant survive by chance.
const PATIENCE: u64 = 4;
/// Schedules played before it is another story's turn.
const TURN: u64 = 16;
/// Schedules that once found a defect; part of the normal run.
const REGRESSIONS: [(&str, u64); 0] = [];
/// A schedule that is not over after this many steps runs for ever.
const STEPS_MAX: usize = 60_000;

/// A story: what threads do, once. Panics when a promise is broken.
#[derive(Debug)]
pub(crate) struct Story {
    /// Its name.
    pub(crate) name: &'static str,
    /// Plays it with choices of its own.
    pub(crate) play: fn(Prng),
    /// How many times as often as others it is played: it is short, or it looks for something rare.
    pub(crate) times: u64,
}

/// Counts of a run.
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

/// The state that the schedules of one run share with the stories.
#[derive(Debug, Default)]
struct Stage {
    seed: AtomicU64,
    counts: Mutex<Counts>,
}

/// A scheduler whose every schedule has a seed of its own.
#[derive(Debug)]
struct Seeded {
    seeds: std::ops::Range<u64>,
    stage: Arc<Stage>,
    prng: Prng,
    mode: Mode,
    step: u64,
    hash: u64,
}

impl Seeded {
    fn new(seeds: std::ops::Range<u64>, stage: Arc<Stage>) -> Seeded {
        Seeded { seeds, stage, prng: Prng::new(0), mode: Mode::Uniform, step: 0, hash: 0 }
    }

    /// Counts the schedule that is over.
    fn book(&mut self) {
        if self.step > 0 {
            let mut counts = self.stage.counts.lock().unwrap();
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
        self.stage.seed.store(seed, Ordering::SeqCst);
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
    /// The message of the first panic of a schedule on this thread; `None`: no schedule is played.
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

/// Lists of stories, and of the deliberate races that they must find.
type Room = (&'static [&'static [Story]], &'static [&'static [Mutant]]);

const ROOMS: [Room; 3] = [
    (
        &[pcache::schedules::STORIES, ring::schedules::STORIES],
        &[Mutant::PCACHE_RACES, Mutant::DRIVING_RACES, &[Mutant::FillNotCancelled]],
    ),
    (&[writecache::schedules::STORIES], &[Mutant::WRITECACHE_RACES]),
    (
        &[cache::schedules::STORIES],
        &[Mutant::CACHE_RACES, &[Mutant::LeftWhileRead, Mutant::PromotedOverWrite]],
    ),
];

/// Plays `story` under the schedules of `seeds` until one fails; returns which, and how. On a
/// thread of its own: the scheduler's state there cannot be used after a failure.
fn play(
    story: &Story,
    mutant: Option<Mutant>,
    seeds: std::ops::Range<u64>,
    counts: &mut Counts,
) -> Option<(u64, String)> {
    let on_thread = || {
        mutants::set(mutant);
        play_here(story, seeds, counts)
    };
    std::thread::scope(|scope| scope.spawn(on_thread).join().unwrap())
}

fn play_here(
    story: &Story,
    seeds: std::ops::Range<u64>,
    counts: &mut Counts,
) -> Option<(u64, String)> {
    let stage = Arc::new(Stage::default());
    let mut config = Config::new();
    config.stack_size = 2 << 20;
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(STEPS_MAX);
    config.silence_warnings = true;
    config.ungraceful_shutdown_config.immediately_return_on_panic = true;
    let runner = Runner::new(Seeded::new(seeds, stage.clone()), config);
    let on_stage = stage.clone();
    let body = story.play;
    SAID.set(Some(String::new()));
    let result = catch_unwind(AssertUnwindSafe(|| {
        runner.run(move || body(Prng::new(on_stage.seed.load(Ordering::SeqCst))))
    }));
    counts.add(std::mem::take(&mut *stage.counts.lock().unwrap()));
    counts.time += processor_time();
    result.err().map(|_| {
        let said = SAID.take().filter(|said| !said.is_empty()).expect("a panic that says why");
        (stage.seed.load(Ordering::SeqCst), said)
    })
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn number(name: &str) -> Option<u64> {
    variable(name).map(|value| value.parse().unwrap())
}

fn wanted_stories() -> Vec<&'static Story> {
    let name = variable("SCHEDULES_STORY");
    let is_wanted = |story: &&Story| name.as_ref().is_none_or(|name| name == story.name);
    ROOMS
        .iter()
        .flat_map(|(stories, _)| stories.iter().copied())
        .flatten()
        .filter(is_wanted)
        .collect()
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

fn replay(story: &Story, seed: u64, what: &str) -> String {
    let name = story.name;
    format!("{name}: {what}\n  replay: make schedules SCHEDULES_STORY={name} SCHEDULES_SEED={seed}")
}

#[test]
fn every_schedule_keeps_the_promises() {
    if variable("SCHEDULES_MUTANT").is_some() {
        return;
    }
    listen_to_panics();
    let stories = wanted_stories();
    let next = AtomicU64::new(0);
    let failures = Mutex::new(Vec::new());
    on_all_cores(|| {
        while let Some(story) = stories.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            let mut counts = Counts::default();
            let seeds = match number("SCHEDULES_SEED") {
                Some(seed) => seed..seed + 1,
                None => 0..SCHEDULES * story.times,
            };
            let regressions = REGRESSIONS.iter().filter(|(name, _)| *name == story.name);
            let failed = regressions
                .map(|(_, seed)| *seed..*seed + 1)
                .chain([seeds])
                .find_map(|seeds| play(story, None, seeds, &mut counts));
            println!("{}: {counts}", story.name);
            failures.lock().unwrap().extend(failed.map(|(seed, what)| replay(story, seed, &what)));
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// The first story and schedule that shows the mutant, and how many were tried.
fn kill(mutant: Mutant, stories: &[&Story]) -> Option<(String, u64)> {
    let mut counts = Counts::default();
    for turn in 0..PATIENCE * SCHEDULES / TURN {
        for story in stories {
            let turns = TURN * story.times;
            let seeds = match number("SCHEDULES_SEED") {
                Some(seed) => seed..seed + 1,
                None => turn * turns..(turn + 1) * turns,
            };
            if let Some((seed, what)) = play(story, Some(mutant), seeds, &mut counts) {
                return Some((format!("{} {seed}: {what}", story.name), counts.schedules));
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
    let wanted_stories = wanted_stories();
    let mutants: Vec<(Mutant, Vec<&Story>)> = ROOMS
        .iter()
        .flat_map(|(stories, mutants)| {
            let is_here = |story: &&&Story| {
                stories.iter().copied().flatten().any(|here| here.name == story.name)
            };
            let stories: Vec<_> = wanted_stories.iter().filter(is_here).copied().collect();
            mutants.iter().copied().flatten().map(move |mutant| (*mutant, stories.clone()))
        })
        .collect();
    let next = AtomicU64::new(0);
    let survivors = Mutex::new(Vec::new());
    on_all_cores(|| {
        while let Some((mutant, stories)) =
            mutants.get(next.fetch_add(1, Ordering::Relaxed) as usize)
        {
            let name = format!("{mutant:?}");
            if wanted.as_ref().is_some_and(|wanted| *wanted != name) {
                continue;
            }
            match kill(*mutant, stories) {
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
    let stories = wanted_stories();
    let end = Instant::now() + Duration::from_secs(number("SCHEDULES_SECONDS").unwrap_or(60));
    let next = AtomicU64::new(0);
    let first = (1 + number("SCHEDULES_SEED").unwrap_or(0)) << 32;
    let sum = Mutex::new((Counts::default(), None));
    on_all_cores(|| {
        let mut counts = Counts::default();
        let mut failed = None;
        while Instant::now() < end && failed.is_none() {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            let story = stories[(turn % stories.len() as u64) as usize];
            let start = first + turn / stories.len() as u64 * TURN;
            failed = play(story, None, start..start + TURN, &mut counts)
                .map(|(seed, what)| replay(story, seed, &what));
        }
        let mut sum = sum.lock().unwrap();
        sum.0.add(counts);
        sum.1 = sum.1.take().or(failed);
    });
    let (counts, failure) = sum.into_inner().unwrap();
    println!("{counts}");
    assert!(failure.is_none(), "\n{}", failure.unwrap_or_default());
}
