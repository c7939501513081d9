//! Measures which store instructions copy fastest to a medium, and chooses a [`CopyPlan`].
//!
//! 1. Measuring changes no byte: it stores the bytes that it has just loaded.
//! 2. The destination's lines are out of the processor's caches when a copy begins, as in a log
//!    that returns to a line rarely; the source is in the caches.
//! 3. Copies are timed in batches, each copy with the fence that makes it durable. The contenders
//!    take turns within each round.
//! 4. A measurement ends at its limit, with the rounds that it has: some virtual machines need
//!    half a minute for all of them.

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::prng::Prng;

use super::Pmem;
use super::copy::{COPY_CLASSES, CopyPlan, Primitive};
use super::dax::{DaxOptions, DaxPmem};

/// The sizes that are measured, in bytes.
pub const SIZES: [usize; 11] =
    [64, 128, 256, 512, 768, 1024, 2048, 4096, 16 << 10, 64 << 10, 1 << 20];

/// Bytes that copies are spread over, and bytes of a scratch file.
pub const WINDOW: u64 = 64 << 20;
/// Byte at which the window begins: a medium's first MiB may have a format's header.
const WINDOW_AT: u64 = 1 << 20;
/// Bytes of a scratch file.
pub const SCRATCH_BYTES: u64 = WINDOW_AT + WINDOW;

/// Bytes of one batch, or one copy if that is larger.
const BATCH_BYTES: usize = 128 << 10;
/// Rounds of the measurement before a first use.
const ROUNDS: usize = 7;
/// The longest time for that.
const LIMIT: Duration = Duration::from_secs(2);
/// The usual primitive is kept unless another one is faster by this factor.
const WORTH_IT: f64 = 0.98;

/// The order of the addresses that copies go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One after the other.
    Sequential,
    /// Anywhere in the window.
    Random,
}

impl Pattern {
    /// Both.
    pub const ALL: [Pattern; 2] = [Pattern::Sequential, Pattern::Random];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Pattern::Sequential => "sequential",
            Pattern::Random => "random",
        }
    }
}

/// A way to copy durably.
#[derive(Clone, Copy)]
pub enum Contender<'a> {
    /// One primitive for all sizes.
    Only(Primitive),
    /// The primitive that a plan has for each size.
    Plan(CopyPlan),
    /// Another library's durable copy of bytes to an address of the medium.
    Other(&'a dyn Fn(u64, &[u8])),
}

/// Nanoseconds for one copy, round by round.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<[[Vec<f64>; SIZES.len()]; 2]>);

impl Times {
    /// The rounds of a contender, by its place in the list of those measured.
    pub fn rounds(&self, contender: usize, size: usize, pattern: Pattern) -> &[f64] {
        &self.0[contender][pattern as usize][size]
    }

    /// Their median.
    pub fn median(&self, contender: usize, size: usize, pattern: Pattern) -> f64 {
        median(self.rounds(contender, size, pattern))
    }
}

/// Primitives that this processor has and that make stores durable.
pub fn candidates() -> Vec<Primitive> {
    Primitive::available().into_iter().filter(|primitive| primitive.is_durable()).collect()
}

/// A medium under measurement.
struct Measured<'a> {
    pmem: &'a mut DaxPmem,
    window: u64,
    prng: Prng,
    next: u64,
    source: Vec<u8>,
}

impl Measured<'_> {
    /// Where the copies of one batch go.
    fn places(&mut self, size: usize, pattern: Pattern) -> Vec<u64> {
        let size = size as u64;
        let slots = self.window / size;
        let count = (BATCH_BYTES as u64 / size).max(1);
        let mut place = || match pattern {
            Pattern::Random => WINDOW_AT + self.prng.below(slots) * size,
            Pattern::Sequential => {
                self.next = if self.next + size > self.window { 0 } else { self.next };
                let at = WINDOW_AT + self.next / size * size;
                self.next += size;
                at
            }
        };
        let mut places: Vec<u64> = (0..count).map(|_| place()).collect();
        if pattern == Pattern::Random {
            // Each place is used once: the second time its lines would be in the caches.
            let mut seen = HashSet::new();
            places.retain(|at| seen.insert(*at));
        }
        places
    }

    /// Fetches the data at the places, and evicts their lines from the caches.
    fn prepare(&mut self, places: &[u64], size: usize) -> Option<()> {
        self.source.resize(places.len() * size, 0);
        self.pmem.set_plan(CopyPlan::only(Primitive::Movnti));
        for (at, part) in places.iter().zip(self.source.chunks_mut(size)) {
            self.pmem.load(*at, part).ok()?;
            self.pmem.store(*at, part);
        }
        self.pmem.drain().ok()
    }

    /// Nanoseconds for one copy of a batch.
    fn time(&mut self, contender: Contender<'_>, places: &[u64], size: usize) -> Option<f64> {
        match contender {
            Contender::Only(primitive) => self.pmem.set_plan(CopyPlan::only(primitive)),
            Contender::Plan(plan) => self.pmem.set_plan(plan),
            Contender::Other(_) => {}
        }
        let pieces = places.iter().zip(self.source.chunks(size));
        let start = Instant::now();
        match contender {
            Contender::Other(copy) => {
                for (at, part) in pieces {
                    copy(*at, part);
                }
            }
            _ => {
                for (at, part) in pieces {
                    self.pmem.store(*at, part);
                    self.pmem.drain().ok()?;
                }
            }
        }
        Some(start.elapsed().as_nanos() as f64 / places.len() as f64)
    }
}

/// Measures all `contenders` on `pmem`, whose content stays the same; its copy plan does not.
/// `None` if the medium fails or is too small. After `limit`, rounds are missing or cut off.
pub fn measure(
    pmem: &mut DaxPmem,
    contenders: &[Contender<'_>],
    rounds: usize,
    limit: Duration,
) -> Option<Times> {
    let window = WINDOW.min(pmem.len_bytes().saturating_sub(WINDOW_AT));
    if window < 4 << 20 {
        return None;
    }
    let mut times = Times(vec![Default::default(); contenders.len()]);
    let mut medium = Measured { pmem, window, prng: Prng::new(5), next: 0, source: Vec::new() };
    let begun = Instant::now();
    for round in 0..rounds {
        for pattern in Pattern::ALL {
            for (nth, size) in SIZES.into_iter().enumerate() {
                if begun.elapsed() >= limit {
                    return Some(times);
                }
                let places = medium.places(size, pattern);
                for turn in 0..contenders.len() {
                    // The contenders take turns at being first.
                    let who = (turn + round) % contenders.len();
                    medium.prepare(&places, size)?;
                    let nanos = medium.time(contenders[who], &places, size)?;
                    times.0[who][pattern as usize][nth].push(nanos);
                }
            }
        }
    }
    Some(times)
}

/// The best plan by the measured times of `primitives`, which came first among the contenders; the
/// usual one if a size was not measured.
pub fn choose(primitives: &[Primitive], times: &Times) -> CopyPlan {
    let usual = CopyPlan::usual();
    if times.0.iter().flatten().flatten().any(Vec::is_empty) {
        return usual;
    }
    let mut by_class = [usual.choose(0); COPY_CLASSES];
    for class in 1..COPY_CLASSES {
        let sizes: Vec<usize> =
            (0..SIZES.len()).filter(|nth| CopyPlan::class(SIZES[*nth]) == class).collect();
        // A class that was not measured gets the result of the class below it.
        by_class[class] = by_class[class - 1];
        if sizes.is_empty() {
            continue;
        }
        let cost = |who: usize| -> f64 {
            let cells = sizes.iter().flat_map(|nth| Pattern::ALL.map(|pattern| (*nth, pattern)));
            let relative = cells.map(|(nth, pattern)| {
                let best = (0..primitives.len()).map(|other| times.median(other, nth, pattern));
                times.median(who, nth, pattern) / best.fold(f64::INFINITY, f64::min)
            });
            relative.sum()
        };
        let best = (0..primitives.len()).min_by(|a, b| cost(*a).total_cmp(&cost(*b)));
        let Some(best) = best else { continue };
        let usual = primitives.iter().position(|primitive| *primitive == usual.choose(SIZES[0]));
        let stays = usual.filter(|usual| cost(best) > cost(*usual) * WORTH_IT);
        by_class[class] = primitives[stays.unwrap_or(best)];
    }
    // Pieces below a line are stored in the same way whatever the plan says.
    by_class[0] = by_class[1];
    CopyPlan::new(by_class)
}

/// Measures all primitives and chooses a plan. A file is measured by a scratch file in the same
/// folder, a device only if udm may store to it. `None` if no measurement was possible.
pub(super) fn find_plan(pmem: &mut DaxPmem, may_store: bool) -> Option<CopyPlan> {
    let primitives = candidates();
    let contenders: Vec<_> = primitives.iter().map(|one| Contender::Only(*one)).collect();
    // The name may be the name of a part of it.
    let place = pmem.open_as().unwrap_or_else(|| pmem.medium().name.clone());
    let times = match Scratch::beside(Path::new(&place)) {
        Some(scratch) => {
            let mut pmem = DaxPmem::open(&scratch.0, DaxOptions::default()).ok()?;
            measure(&mut pmem, &contenders, ROUNDS, LIMIT)
        }
        None if may_store => measure(pmem, &contenders, ROUNDS, LIMIT),
        None => None,
    };
    Some(choose(&primitives, &times?))
}

/// A file that exists as long as this value.
#[derive(Debug)]
struct Scratch(PathBuf);

impl Scratch {
    /// A scratch file in the folder of the file at `path`. None if `path` names a device, or the
    /// folder has not enough free space.
    fn beside(path: &Path) -> Option<Scratch> {
        let path = path.canonicalize().ok()?;
        let folder = path.metadata().ok()?.is_file().then(|| path.parent())??;
        let scratch = Scratch(folder.join(format!(".udm-copies-{}", std::process::id())));
        let file = File::options().create_new(true).write(true).open(&scratch.0);
        let Ok(file) = file else {
            // It is not ours to remove.
            std::mem::forget(scratch);
            return None;
        };
        file.set_len(SCRATCH_BYTES).ok()?;
        Some(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The median of at least one number.
fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::super::Persistence;
    use super::super::copy::CAN_FLUSH;
    use super::*;

    fn pmem(folder: &Path) -> DaxPmem {
        let path = folder.join("medium");
        File::create(&path).unwrap().set_len(8 << 20).unwrap();
        let options = DaxOptions { persistence: Some(Persistence::Cpu), ..DaxOptions::default() };
        DaxPmem::open(&path, options).unwrap()
    }

    #[test]
    fn measuring_leaves_the_content_alone() {
        if !CAN_FLUSH {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut pmem = pmem(folder.path());
        let mut content = vec![0; 8 << 20];
        Prng::new(9).fill(&mut content);
        pmem.store(0, &content);
        let primitives = candidates();
        let contenders: Vec<_> = primitives.iter().map(|one| Contender::Only(*one)).collect();
        let times = measure(&mut pmem, &contenders, 1, Duration::MAX).unwrap();
        let mut after = vec![0; content.len()];
        pmem.load(0, &mut after).unwrap();
        assert!(content == after);
        for pattern in Pattern::ALL {
            assert!((0..SIZES.len()).all(|size| times.median(0, size, pattern) > 0.0));
        }
        let times = measure(&mut pmem, &contenders, 1, Duration::ZERO).unwrap();
        assert_eq!(choose(&primitives, &times), CopyPlan::usual());
    }

    #[test]
    fn the_fastest_is_chosen_and_a_tie_changes_nothing() {
        let primitives = candidates();
        if primitives.len() < 2 {
            return;
        }
        let usual = CopyPlan::usual().choose(64);
        let mut times = Times(vec![Default::default(); primitives.len()]);
        for (who, primitive) in primitives.iter().enumerate() {
            for pattern in Pattern::ALL {
                for (nth, size) in SIZES.into_iter().enumerate() {
                    // Another one is much faster below 1 KiB, and a trifle above.
                    let other = if size < 1024 { 50.0 } else { 99.5 };
                    let nanos = if *primitive == usual { 100.0 } else { other };
                    times.0[who][pattern as usize][nth].push(nanos);
                }
            }
        }
        let plan = choose(&primitives, &times);
        assert_ne!(plan.choose(512), usual);
        assert_eq!((plan.choose(4096), plan.choose(1 << 20)), (usual, usual));
    }
}
