//! Running one history, and making one that fails small: steps are left out as long as it fails.

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::time::{Duration, Instant};

use udm::prng::Prng;

use crate::plan::{Setup, Step, setup, steps};
use crate::run::{Outcome, Run, Stop, Tally};

/// Minimising takes no longer.
const SHRINK_TIME: Duration = Duration::from_secs(90);

/// A history that showed a defect.
pub struct Failure {
    seed: u64,
    count: usize,
    /// Which of the seed's first `count` steps were taken.
    kept: Vec<usize>,
    what: String,
}

thread_local! {
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Keeps what a panic says for the report.
pub fn remember_panic(info: &PanicHookInfo<'_>) {
    PANIC.with_borrow_mut(|panic| *panic = info.to_string());
}

/// Runs a seed's first `count` steps, or those of them in `keep`.
pub fn replay(seed: u64, count: usize, keep: Option<Vec<usize>>) -> (Tally, Option<Failure>) {
    let setup = setup(seed);
    let steps = steps(&setup, count);
    let kept = keep.unwrap_or_else(|| (0..count).collect());
    let (tally, what) = run_caught(&setup, &steps, &kept);
    (tally, what.map(|what| Failure { seed, count, kept, what }))
}

fn run_caught(setup: &Setup, steps: &[Step], kept: &[usize]) -> (Tally, Option<String>) {
    let mut tally = Tally::default();
    let result = catch_unwind(AssertUnwindSafe(|| run_steps(setup, steps, kept, &mut tally)));
    let what = match result {
        Ok(Ok(())) => None,
        Ok(Err(Stop::Refused)) => {
            tally.refused = 1;
            None
        }
        Ok(Err(Stop::Wrong(what))) => Some(what),
        Err(_) => Some(PANIC.with_borrow(Clone::clone)),
    };
    (tally, what)
}

fn run_steps(setup: &Setup, steps: &[Step], kept: &[usize], tally: &mut Tally) -> Outcome {
    let mut run = Run::new(setup)?;
    let mut go = || {
        for &nth in kept {
            run.step(&steps[nth])?;
        }
        run.finish(&mut Prng::new(setup.seed ^ 0xF1A1))
    };
    let result = go();
    *tally = run.tally;
    run.abandon();
    result
}

/// The same failure with as few steps as the time allows.
pub fn shrunk(mut failure: Failure) -> Failure {
    let start = Instant::now();
    let setup = setup(failure.seed);
    let steps = steps(&setup, failure.count);
    let mut chunk = failure.kept.len().div_ceil(2).max(1);
    loop {
        let mut from = 0;
        let mut has_shrunk = false;
        while from < failure.kept.len() && start.elapsed() < SHRINK_TIME {
            let to = (from + chunk).min(failure.kept.len());
            let mut fewer = failure.kept.clone();
            fewer.drain(from..to);
            match run_caught(&setup, &steps, &fewer).1 {
                Some(what) => {
                    (failure.kept, failure.what) = (fewer, what);
                    has_shrunk = true;
                }
                None => from = to,
            }
        }
        if start.elapsed() >= SHRINK_TIME || (chunk == 1 && !has_shrunk) {
            return failure;
        }
        if !has_shrunk {
            chunk = chunk.div_ceil(2);
        }
    }
}

impl Failure {
    /// In one line.
    pub fn headline(&self) -> String {
        format!("seed {}: {}", self.seed, self.what.replace('\n', " "))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let setup = setup(self.seed);
        let steps = steps(&setup, self.count);
        writeln!(f, "simulate: FAILED: {}", self.what)?;
        writeln!(f, "  {setup:?}")?;
        for &nth in self.kept.iter().take(60) {
            writeln!(f, "  {nth:4} {:?}", steps[nth].action)?;
        }
        let list = show_list(&self.kept);
        write!(
            f,
            "replay: cargo test -p udm --test simulate -- --seed {} --ops {} --keep {list}",
            self.seed, self.count
        )
    }
}

/// `0-3,7,9-12`
fn show_list(kept: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &nth in kept {
        match runs.last_mut() {
            Some(run) if run.1 + 1 == nth => run.1 = nth,
            _ => runs.push((nth, nth)),
        }
    }
    let show = |(from, to): &(usize, usize)| match from == to {
        true => from.to_string(),
        false => format!("{from}-{to}"),
    };
    if runs.is_empty() {
        return "none".to_string();
    }
    runs.iter().map(show).collect::<Vec<_>>().join(",")
}

/// Reads what [`show_list`] wrote.
pub fn parse_list(list: &str) -> Vec<usize> {
    let number = |word: &str| word.parse::<usize>().expect("a number");
    let parts = list.split(',').filter(|part| *part != "none");
    parts
        .flat_map(|part| match part.split_once('-') {
            Some((from, to)) => number(from)..=number(to),
            None => number(part)..=number(part),
        })
        .collect()
}
