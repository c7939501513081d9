//! Flamegraphs: the code that the threads of a study execute, in the program and in the kernel,
//! sampled by the kernel's clock (`perf`) for each case.
//!
//! A study names its cases with [`case`]; the samples until the guard is dropped belong to the
//! case. Without `--flame`, this does nothing. Samples cover the thread that called
//! [`Recorder::start`] and all threads that it starts, but not other programs or the kernel's own
//! threads.

mod draw;
mod program;
mod record;
mod symbols;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use self::program::Program;
use self::record::Record;
use crate::perf::{HERTZ, Ring};
use crate::results::{Flame, Study};

pub use draw::draw;

/// The suffix of the names of kernel functions, as `perf` folds stacks.
const KERNEL_MARK: &str = "_[k]";
/// Rings are emptied this often: they hold a few times what comes meanwhile.
const EMPTIED_EVERY: Duration = Duration::from_millis(10);
/// Different stacks of a case that are kept: the most frequent ones.
const STACKS_MAX: usize = 400;
/// Addresses from here on are the kernel's.
const KERNEL_FROM: u64 = 1 << 63;

/// Samples of all cases, while a study is recorded.
static RECORDING: Mutex<Option<Recording>> = Mutex::new(None);

fn recording() -> MutexGuard<'static, Option<Recording>> {
    // A study that panics leaves what was recorded whole.
    RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread's name, and addresses: the outermost first.
type Stack = (String, Vec<u64>);

struct Recording {
    rings: Vec<Ring>,
    program: Program,
    case: String,
    cases: BTreeMap<String, HashMap<Stack, u64>>,
    /// Titles of cases to compare: before, after.
    pairs: Vec<(String, String)>,
    threads: HashMap<u32, String>,
    lost: u64,
    bytes: Vec<u8>,
}

/// Records until it is finished.
pub struct Recorder {
    is_over: Arc<AtomicBool>,
    empties: Option<JoinHandle<()>>,
    notes: Vec<String>,
}

/// What runs while this lives belongs to a case.
pub struct Case {
    before: Option<String>,
}

/// Names what runs from now on. Cases of one name are one.
pub fn case(name: impl Into<String>) -> Case {
    let before = recording().as_mut().map(|recording| {
        recording.empty();
        std::mem::replace(&mut recording.case, name.into())
    });
    Case { before }
}

impl Drop for Case {
    fn drop(&mut self) {
        let Some(before) = self.before.take() else { return };
        if let Some(recording) = recording().as_mut() {
            recording.empty();
            recording.case = before;
        }
    }
}

/// The same, unless what runs has a name already.
pub fn case_if_unnamed(name: impl FnOnce() -> String) -> Case {
    let is_unnamed = recording().as_ref().is_some_and(|recording| recording.case.is_empty());
    if is_unnamed { case(name()) } else { Case { before: None } }
}

/// Asks for a picture of how `after` differs from `before`, two cases.
pub fn compare(before: &str, after: &str) {
    if let Some(recording) = recording().as_mut() {
        recording.pairs.push((before.to_owned(), after.to_owned()));
    }
}

impl Recording {
    /// Takes what the rings hold.
    fn empty(&mut self) {
        let mut bytes = std::mem::take(&mut self.bytes);
        for nth in 0..self.rings.len() {
            bytes.clear();
            self.rings[nth].take(&mut bytes);
            for record in record::records(&bytes) {
                match record {
                    Record::Sample(sample) => self.add(&sample),
                    Record::Lost(count) => self.lost += count,
                    Record::Broken => self.lost += 1,
                    Record::Other => {}
                }
            }
        }
        self.bytes = bytes;
    }

    fn add(&mut self, sample: &record::Sample<'_>) {
        let name = self.threads.entry(sample.thread).or_insert_with(|| {
            let comm = fs::read_to_string(format!("/proc/self/task/{}/comm", sample.thread));
            let comm = comm.unwrap_or_else(|_| "thread".into());
            // The kernel numbers its helpers.
            comm.trim().trim_end_matches(|digit: char| digit.is_ascii_digit()).replace(';', ",")
        });
        let user = self.program.unwind(sample);
        let frames = user.iter().rev().chain(sample.kernel.iter().rev()).copied().collect();
        let case = self.cases.entry(self.case.clone()).or_default();
        *case.entry((name.clone(), frames)).or_insert(0) += 1;
    }
}

impl Recorder {
    /// Begins with the calling thread, and all that it will start; an error says in words why not.
    pub fn start() -> Result<Recorder, String> {
        // Before there are samples: this thread's own work is not the study's.
        let is_over = Arc::new(AtomicBool::new(false));
        let ended = is_over.clone();
        let empties = std::thread::Builder::new().name("udm-flame".into()).spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(EMPTIED_EVERY);
                if let Some(recording) = recording().as_mut() {
                    recording.empty();
                }
            }
        });
        let empties = empties.map_err(|error| error.to_string())?;
        let mut recorder = Recorder { is_over, empties: Some(empties), notes: Vec::new() };
        let mut rings = open(true);
        if rings.is_err() {
            rings = open(false);
            let note = format!("The kernel's part of the stacks is left out: {}.", forbidden());
            recorder.notes.push(note);
        }
        let rings = rings.map_err(|error| format!("{error}; {}", forbidden()))?;
        *recording() = Some(Recording {
            rings,
            program: Program::now(),
            case: String::new(),
            cases: BTreeMap::new(),
            pairs: Vec::new(),
            threads: HashMap::new(),
            lost: 0,
            bytes: Vec::new(),
        });
        Ok(recorder)
    }

    fn end(&mut self) -> Option<Recording> {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.empties.take() {
            let _ = thread.join();
        }
        let mut recording = recording().take()?;
        recording.empty();
        Some(recording)
    }

    /// Ends, and adds the pictures to `study`.
    pub fn finish(mut self, study: &mut Study) {
        let Some(recording) = self.end() else { return };
        let kernel = symbols::of_this_kernel();
        let has_kernel = recording.cases.values().flat_map(HashMap::keys);
        if kernel.is_empty() && has_kernel.flat_map(|(_, frames)| frames).any(is_kernel) {
            self.notes.push(format!(
                "The kernel hides the names of its functions: kernel.kptr_restrict is {}, and 0 \
                 (with kernel.perf_event_paranoid at most 1, or root) shows them.",
                setting("kptr_restrict")
            ));
        }
        let mut flames: BTreeMap<&str, Flame> = BTreeMap::new();
        let rest = match recording.cases.len() {
            0 | 1 => format!("{}: all of it", study.name),
            _ => format!("{}: everything else", study.name),
        };
        for (case, stacks) in &recording.cases {
            let title = if case.is_empty() { &rest } else { case };
            let stacks = folded(&recording.program, &kernel, stacks);
            let flame = Flame { title: title.clone(), stacks, before: Vec::new() };
            flames.insert(case, flame);
        }
        study.flames.extend(flames.values().cloned());
        for (before, after) in &recording.pairs {
            let (Some(old), Some(new)) = (flames.get(&**before), flames.get(&**after)) else {
                continue;
            };
            let title = format!("{after}, compared with {before}: red is more, blue is less");
            let (stacks, before) = (new.stacks.clone(), old.stacks.clone());
            study.flames.push(Flame { title, stacks, before });
        }
        study.notes.append(&mut self.notes);
        study.notes.push(format!(
            "Flamegraphs: {HERTZ} samples per second of processor time of this process, {} lost; \
             blue is the program, orange the kernel. The kernel's own threads, as those that write \
             out pages, are not in them, nor are other programs.",
            recording.lost
        ));
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        drop(self.end());
    }
}

fn is_kernel(address: &u64) -> bool {
    *address >= KERNEL_FROM
}

/// Stacks by names, the most frequent first, in the form that tools for flamegraphs take.
fn folded(
    program: &Program,
    kernel: &symbols::Names,
    stacks: &HashMap<Stack, u64>,
) -> Vec<(String, u64)> {
    let mut names: HashMap<u64, String> = HashMap::new();
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for ((thread, frames), count) in stacks {
        let mut stack = thread.clone();
        for address in frames {
            let name = names.entry(*address).or_insert_with(|| match is_kernel(address) {
                true => format!("{}{KERNEL_MARK}", kernel.find(*address).unwrap_or("[kernel]")),
                false => program.name(*address).replace(';', ","),
            });
            stack.push(';');
            stack.push_str(name);
        }
        *sums.entry(stack).or_insert(0) += count;
    }
    let mut sums: Vec<(String, u64)> = sums.into_iter().collect();
    sums.sort_by(|one, other| other.1.cmp(&one.1).then(one.0.cmp(&other.0)));
    let rest: u64 = sums.iter().skip(STACKS_MAX).map(|(_, count)| count).sum();
    sums.truncate(STACKS_MAX);
    if rest > 0 {
        sums.push(("[rare stacks]".into(), rest));
    }
    sums
}

/// A ring for each processor.
fn open(with_kernel: bool) -> std::io::Result<Vec<Ring>> {
    let online = fs::read_to_string("/sys/devices/system/cpu/online")?;
    processors(online.trim()).into_iter().map(|nth| Ring::open(nth, with_kernel)).collect()
}

/// The numbers of a list as the kernel writes it: 0-3,5.
fn processors(list: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse::<u32>().ok()?);
        Some(first..=last.min(4095))
    };
    list.split(',').filter_map(range).flatten().collect()
}

fn setting(name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
    if text.trim().is_empty() { "not there".into() } else { text.trim().to_owned() }
}

/// Which setting forbids it.
fn forbidden() -> String {
    format!(
        "kernel.perf_event_paranoid is {}, and only root may record then; 1 lets everybody record \
         their own processes with the kernel's part",
        setting("perf_event_paranoid")
    )
}

#[cfg(test)]
mod tests;
