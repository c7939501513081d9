//! Which instructions copy fastest to a medium: measured at first use, and remembered in the state
//! directory for this model of processor and this kind of medium.
//!
//! 1. Measuring leaves every byte as it is: it stores what was there. Even so, a device is measured
//!    only if it is a pcache already and this process holds it exclusively; for a file, a scratch
//!    file on the same file system is measured.
//! 2. Lines are out of the processor's caches when a copy to them begins, as they are in a log that
//!    returns to them rarely; the source of the copy is in the caches.
//! 3. Copies are timed in batches, each copy with the fence after it that makes it durable, and
//!    contenders take turns within each round.
//! 4. If something is missing (a state directory, room for a scratch file), copies stay as they are
//!    without calibration; nothing fails.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use udm::pcache::layout::{SUPERBLOCK_AT, SUPERBLOCK_MAGIC};
use udm::pmem::copy::{CAN_FLUSH, COPY_CLASSES, CopyPlan, Primitive};
use udm::pmem::dax::{DaxOptions, DaxPmem};
use udm::pmem::{Persistence, Pmem};
use udm::prng::Prng;

use crate::libpmem::Libpmem;
use crate::machine::cpu_model;
use crate::stats::median;

/// The sizes that are measured, in bytes.
pub const SIZES: [usize; 11] =
    [64, 128, 256, 512, 768, 1024, 2048, 4096, 16 << 10, 64 << 10, 1 << 20];

/// Bytes that copies are spread over, and bytes of a scratch file.
pub const WINDOW: u64 = 64 << 20;
/// Where the window begins: after whatever stands at the start of a medium.
const WINDOW_AT: u64 = 1 << 20;
/// Bytes of a scratch file.
pub const SCRATCH_BYTES: u64 = WINDOW_AT + WINDOW;

/// Bytes of one batch, or one copy if that is larger.
const BATCH_BYTES: usize = 128 << 10;
/// Rounds of the measurement at first use.
const ROUNDS_AT_FIRST_USE: usize = 7;
/// What is usual stays unless something else is faster by this factor.
const WORTH_IT: f64 = 0.98;

/// The file within the state directory.
const FILE: &str = "copies.json";

/// In which order places are stored to.
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

    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Pattern::Sequential => "sequential",
            Pattern::Random => "random",
        }
    }
}

/// Who copies.
#[derive(Clone, Copy, Debug)]
pub enum Contender<'a> {
    /// One primitive for all sizes.
    Only(Primitive),
    /// What a plan says for each size.
    Plan(CopyPlan),
    /// libpmem.
    Libpmem(&'a Libpmem),
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

/// A medium that is being measured.
struct Bench<'a> {
    pmem: &'a mut DaxPmem,
    window: u64,
    prng: Prng,
    next: u64,
    source: Vec<u8>,
}

impl Bench<'_> {
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
            // No place twice: its lines would be in the caches the second time.
            let mut seen = std::collections::HashSet::new();
            places.retain(|at| seen.insert(*at));
        }
        places
    }

    /// Fetches what is at the places, and sends their lines out of the caches.
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
            Contender::Libpmem(_) => {}
        }
        let pieces = places.iter().zip(self.source.chunks(size));
        let start = Instant::now();
        match contender {
            Contender::Libpmem(library) => {
                for (at, part) in pieces {
                    library.store(*at, part);
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

/// Measures all `contenders` on `pmem`, whose content stays as it is; its plan does not. None if
/// the medium fails or is too small.
pub fn measure(pmem: &mut DaxPmem, contenders: &[Contender<'_>], rounds: usize) -> Option<Times> {
    let window = WINDOW.min(pmem.len_bytes().saturating_sub(WINDOW_AT));
    if window < 4 << 20 {
        return None;
    }
    let mut times = Times(vec![Default::default(); contenders.len()]);
    let mut bench = Bench { pmem, window, prng: Prng::new(5), next: 0, source: Vec::new() };
    for round in 0..rounds {
        for pattern in Pattern::ALL {
            for (nth, size) in SIZES.into_iter().enumerate() {
                let places = bench.places(size, pattern);
                for turn in 0..contenders.len() {
                    // Nobody is always first.
                    let who = (turn + round) % contenders.len();
                    bench.prepare(&places, size)?;
                    let nanos = bench.time(contenders[who], &places, size)?;
                    times.0[who][pattern as usize][nth].push(nanos);
                }
            }
        }
    }
    Some(times)
}

/// The best plan by what was measured of `primitives`, which came first among the contenders.
pub fn choose(primitives: &[Primitive], times: &Times) -> CopyPlan {
    let usual = CopyPlan::usual();
    let mut by_class = [usual.choose(0); COPY_CLASSES];
    for class in 1..COPY_CLASSES {
        let sizes: Vec<usize> =
            (0..SIZES.len()).filter(|nth| CopyPlan::class(SIZES[*nth]) == class).collect();
        // Of a class that was not measured, as of the one below.
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

/// Makes copies to `pmem` as fast as was found out; finds it out at first use.
pub fn tune(pmem: &mut DaxPmem) {
    if !CAN_FLUSH || pmem.medium().persistence != Persistence::Cpu {
        return;
    }
    if let Some(folder) = state_dir() {
        tune_from(&folder, pmem);
    }
}

fn tune_from(folder: &Path, pmem: &mut DaxPmem) {
    let key = Key::of(pmem);
    let plan = recall(folder, &key).or_else(|| {
        // Nothing is measured that could not be remembered: every start would take longer.
        std::fs::create_dir_all(folder).ok()?;
        let before = pmem.plan();
        let plan = measure_at_first_use(pmem);
        pmem.set_plan(before);
        remember(folder, &key, &plan?).ok()?;
        plan
    });
    if let Some(plan) = plan {
        pmem.set_plan(plan);
    }
}

fn measure_at_first_use(pmem: &mut DaxPmem) -> Option<CopyPlan> {
    let primitives = candidates();
    let contenders: Vec<_> = primitives.iter().map(|one| Contender::Only(*one)).collect();
    // The name may be that of a part of it.
    let place = pmem.open_as().unwrap_or_else(|| pmem.medium().name.clone());
    let times = match Scratch::beside(Path::new(&place)) {
        Some(scratch) => {
            let mut pmem = DaxPmem::open(&scratch.0, DaxOptions::default()).ok()?;
            measure(&mut pmem, &contenders, ROUNDS_AT_FIRST_USE)
        }
        None if is_pcache(pmem) => measure(pmem, &contenders, ROUNDS_AT_FIRST_USE),
        None => None,
    };
    Some(choose(&primitives, &times?))
}

/// Whether the medium says that it is a cache of ours: it is nobody else's to change then.
fn is_pcache(pmem: &DaxPmem) -> bool {
    let mut superblock = [0; 16];
    let is_read = pmem.load(SUPERBLOCK_AT, &mut superblock).is_ok();
    is_read && superblock.windows(8).any(|word| word == SUPERBLOCK_MAGIC.to_le_bytes())
}

/// A file that is gone when this is.
#[derive(Debug)]
pub struct Scratch(pub PathBuf);

impl Scratch {
    /// A scratch file in the folder of the file at `path`; none beside what is no file, and none
    /// where there is no room.
    pub fn beside(path: &Path) -> Option<Scratch> {
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

/// What a calibration is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    cpu: String,
    medium: String,
}

impl Key {
    /// This processor, and the kind of `pmem`.
    pub fn of(pmem: &DaxPmem) -> Key {
        let description = &pmem.medium().description;
        let kind = description.split(':').next().unwrap_or_default();
        Key { cpu: cpu_model(), medium: kind.into() }
    }
}

/// One calibration, as it is remembered: the primitive of each class, by its lowest size.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    #[serde(flatten)]
    key: Key,
    primitives: BTreeMap<u64, String>,
}

/// Where results are kept over restarts, if anywhere.
pub fn state_dir() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let own = set("UDM_STATE_DIR").map(PathBuf::from);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let is_root = status.lines().any(|line| line.starts_with("Uid:\t0\t0\t"));
    let system = is_root.then(|| PathBuf::from("/var/lib/udm"));
    let user = set("XDG_STATE_HOME").map(|folder| Path::new(&folder).join("udm"));
    let home = set("HOME").map(|folder| Path::new(&folder).join(".local/state/udm"));
    own.or(system).or(user).or(home)
}

fn entries(folder: &Path) -> Vec<Entry> {
    let text = std::fs::read_to_string(folder.join(FILE)).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

/// The plan that was remembered, unless it names what this processor lacks.
fn recall(folder: &Path, key: &Key) -> Option<CopyPlan> {
    let entry = entries(folder).into_iter().find(|entry| entry.key == *key)?;
    let candidates = candidates();
    let mut by_class = [CopyPlan::usual().choose(0); COPY_CLASSES];
    for (class, primitive) in by_class.iter_mut().enumerate() {
        let name = entry.primitives.get(&first_size(class))?;
        *primitive = *candidates.iter().find(|candidate| candidate.name() == name)?;
    }
    Some(CopyPlan::new(by_class))
}

/// Keeps a plan for later starts.
pub fn remember(folder: &Path, key: &Key, plan: &CopyPlan) -> std::io::Result<PathBuf> {
    std::fs::create_dir_all(folder)?;
    let mut entries = entries(folder);
    entries.retain(|entry| entry.key != *key);
    let primitive = |class| {
        let size = first_size(class);
        (size, plan.choose(size as usize).name().to_owned())
    };
    entries
        .push(Entry { key: key.clone(), primitives: (0..COPY_CLASSES).map(primitive).collect() });
    // Whole or not at all: another server may be reading.
    let path = folder.join(FILE);
    let draft = folder.join(format!(".{FILE}.{}", std::process::id()));
    std::fs::write(&draft, serde_json::to_string_pretty(&entries)? + "\n")?;
    std::fs::rename(&draft, &path)?;
    Ok(path)
}

/// The smallest size of a class.
fn first_size(class: usize) -> u64 {
    if class == 0 { 0 } else { 32 << class }
}

#[cfg(test)]
mod tests {
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
        let times = measure(&mut pmem, &contenders, 1).unwrap();
        let mut after = vec![0; content.len()];
        pmem.load(0, &mut after).unwrap();
        assert!(content == after);
        for pattern in Pattern::ALL {
            assert!((0..SIZES.len()).all(|size| times.median(0, size, pattern) > 0.0));
        }
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

    #[test]
    fn a_medium_is_tuned_by_what_is_remembered_or_else_measured() {
        let folder = tempfile::tempdir().unwrap();
        let mut pmem = pmem(folder.path());
        let Some(first) = candidates().first().copied() else { return };
        let state = folder.path().join("state");
        let key = Key::of(&pmem);
        remember(&state, &key, &CopyPlan::only(first)).unwrap();
        tune_from(&state, &mut pmem);
        assert_eq!(pmem.plan(), CopyPlan::only(first));
        std::fs::remove_dir_all(&state).unwrap();
        tune_from(&state, &mut pmem);
        assert_eq!(recall(&state, &key), Some(pmem.plan()));
    }

    #[test]
    fn plans_are_remembered_by_processor_and_medium() {
        let folder = tempfile::tempdir().unwrap();
        let key = |medium: &str| Key { cpu: "c".into(), medium: medium.into() };
        let Some(first) = candidates().first().copied() else { return };
        let plan = CopyPlan::only(first);
        remember(folder.path(), &key("a"), &plan).unwrap();
        remember(folder.path(), &key("b"), &CopyPlan::usual()).unwrap();
        assert_eq!(recall(folder.path(), &key("a")), Some(plan));
        assert_eq!(recall(folder.path(), &key("b")), Some(CopyPlan::usual()));
        assert_eq!(recall(folder.path(), &key("c")), None);
        // What this processor lacks, or nobody knows, is measured again.
        let path = folder.path().join(FILE);
        let text = std::fs::read_to_string(&path).unwrap().replace(first.name(), "abacus");
        std::fs::write(&path, text).unwrap();
        assert_eq!(recall(folder.path(), &key("a")), None);
        std::fs::write(&path, "[nonsense").unwrap();
        assert_eq!(recall(folder.path(), &key("b")), None);
    }
}
