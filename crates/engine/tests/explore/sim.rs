//! A simulated medium in memory that records all stores, and can stand for every image that a crash
//! may have left: the content of lines in flight is decided when they are first read.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use udm::error::Status;
use udm::pmem::{Medium, Persistence, Pmem};
use udm::shm::SharedWords;

use crate::subject::Ground;
use crate::trace::{Event, Trace};

/// A line of memory.
pub const LINE: usize = 64;

/// A line in flight: its possible contents after a crash.
#[derive(Clone, Debug)]
pub struct PendingLine {
    pub number: u32,
    /// The first is the content underneath.
    pub options: Vec<Box<[u8]>>,
}

/// One decision that a run asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    pub line: u32,
    pub choice: u32,
    pub options: u32,
}

/// How lines beyond the given decisions are decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beyond {
    /// With the durable content; alternatives come from elsewhere.
    Oldest,
    /// By chance, from this state.
    Random(u64),
}

#[derive(Debug)]
pub struct SimMedium {
    len: u64,
    medium: Medium,
    /// Bytes of a line.
    line: usize,
    state: Mutex<State>,
    meanwhile: Mutex<Option<Meanwhile>>,
}

/// The action of another client after a coming fence.
pub struct Meanwhile {
    fences: u32,
    act: Box<dyn FnOnce() + Send>,
}

impl Meanwhile {
    /// It is done after the fence with this number, from 1 on.
    pub fn new(fences: u32, act: Box<dyn FnOnce() + Send>) -> Meanwhile {
        Meanwhile { fences, act }
    }
}

impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "in {} fences", self.fences)
    }
}

#[derive(Debug)]
struct State {
    line: usize,
    image: Vec<u8>,
    undo: Vec<(u32, u32)>,
    undone: Vec<u8>,
    is_judging: bool,
    lines: Arc<[PendingLine]>,
    /// A bit for each undecided line.
    open: Vec<u64>,
    decisions: Vec<Decision>,
    decided: usize,
    beyond: Option<Beyond>,
    recorder: Option<Recorder>,
}

#[derive(Debug)]
struct Recorder {
    trace: Arc<Mutex<Trace>>,
    shared: SharedWords,
    seen: Vec<u64>,
}

impl SimMedium {
    pub fn new(image: Vec<u8>, ground: Ground) -> SimMedium {
        let persistence = ground.persistence();
        let line = ground.line();
        let medium = Medium {
            name: "sim".into(),
            persistence,
            is_volatile: false,
            description: "explored memory".into(),
            kernel_name: "sim".into(),
        };
        let open = vec![0; image.len().div_ceil(line * 64)];
        let len = image.len() as u64;
        let state = State {
            line,
            image,
            undo: Vec::new(),
            undone: Vec::new(),
            is_judging: false,
            lines: Arc::new([]),
            open,
            decisions: Vec::new(),
            decided: 0,
            beyond: None,
            recorder: None,
        };
        SimMedium { len, medium, line, state: Mutex::new(state), meanwhile: Mutex::default() }
    }

    /// Sets the action of the other client.
    pub fn arrange(&self, meanwhile: Option<Meanwhile>) {
        *self.meanwhile.lock().unwrap() = meanwhile;
    }

    /// It is done now, if it was not done yet.
    pub fn interrupt_now(&self) {
        let due = self.meanwhile.lock().unwrap().take();
        due.into_iter().for_each(|due| (due.act)());
    }

    fn fence(&self) {
        self.state().fence();
        let mut meanwhile = self.meanwhile.lock().unwrap();
        if let Some(waiting) = meanwhile.as_mut() {
            waiting.fences -= 1;
            if waiting.fences == 0 {
                drop(meanwhile);
                self.interrupt_now();
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A run that panicked has ended; the next one starts from `begin`.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// From now on, everything is written to `trace`.
    pub fn record(&self, trace: Arc<Mutex<Trace>>, shared: SharedWords) {
        let seen = shared.words().iter().map(|word| word.load(Ordering::SeqCst)).collect();
        self.state().recorder = Some(Recorder { trace, shared, seen });
    }

    /// Writes down what happened, after what changed in shared memory since the last event.
    pub fn note(&self, event: Event) {
        if let Some(recorder) = &mut self.state().recorder {
            recorder.note_shared();
            recorder.push(event);
        }
    }

    /// Bytes of a line.
    pub fn line(&self) -> usize {
        self.line
    }

    /// Reads bytes; this decides undecided lines.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        let mut state = self.state();
        state.look_at(at, into.len());
        into.copy_from_slice(&state.image[at as usize..][..into.len()]);
    }

    /// Changes what is read there from now on, from outside.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let mut state = self.state();
        state.look_at(at, bytes.len());
        state.change(at as usize, bytes);
    }

    pub fn image(&self) -> Vec<u8> {
        self.state().image.clone()
    }

    pub fn peek(&self, at: usize, len: usize) -> Vec<u8> {
        self.state().image[at..at + len].to_vec()
    }

    /// Changes the durable content, without a trace.
    pub fn poke(&self, at: usize, bytes: &[u8]) {
        self.state().image[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Starts a run that stands for the images that agree with `decisions`, and `beyond` for
    /// undecided lines.
    pub fn begin(&self, lines: &Arc<[PendingLine]>, decisions: &[Decision], beyond: Beyond) {
        let mut state = self.state();
        debug_assert!(!state.is_judging);
        state.lines = lines.clone();
        for line in &**lines {
            state.open[line.number as usize / 64] |= 1 << (line.number % 64);
        }
        state.decisions.clear();
        state.decisions.extend_from_slice(decisions);
        state.decided = 0;
        state.beyond = Some(beyond);
        state.is_judging = true;
    }

    /// Changes the content for the rest of the run.
    pub fn apply<'a>(&self, stores: impl Iterator<Item = (u32, &'a [u8])>) {
        let mut state = self.state();
        stores.for_each(|(at, bytes)| state.change(at as usize, bytes));
    }

    /// A hash of a line's content.
    pub fn hash_line(&self, line: u32) -> u64 {
        hash_line(line, &self.state().image[line as usize * self.line..][..self.line])
    }

    /// Ends the run: everything is as it was. The decisions that it took.
    pub fn end(&self) -> Vec<Decision> {
        let mut state = self.state();
        state.is_judging = false;
        state.beyond = None;
        while let Some((at, len)) = state.undo.pop() {
            let State { image, undone, .. } = &mut *state;
            let from = undone.len() - len as usize;
            image[at as usize..][..len as usize].copy_from_slice(&undone[from..]);
            undone.truncate(from);
        }
        for line in &*state.lines.clone() {
            state.open[line.number as usize / 64] = 0;
        }
        let decided = state.decided;
        state.decisions.truncate(decided);
        state.decisions.clone()
    }
}

/// Mixes bits well.
pub fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// A hash of a line's number and content; an image's hash is all of them, xored.
pub fn hash_line(number: u32, content: &[u8]) -> u64 {
    let words = content.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    words.fold(u64::from(number) + 1, |hash, word| mix(hash.rotate_left(5) ^ word))
}

impl Recorder {
    fn note_shared(&mut self) {
        let mut changed = Vec::new();
        for (nth, word) in self.shared.words().iter().enumerate() {
            let now = word.load(Ordering::Relaxed);
            if now != self.seen[nth] {
                self.seen[nth] = now;
                changed.push((nth as u32, now));
            }
        }
        if !changed.is_empty() {
            self.push(Event::Shared(changed));
        }
    }

    fn push(&self, event: Event) {
        self.trace.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(event);
    }
}

impl State {
    /// Decides every undecided line of `[at, at + len)`.
    fn look_at(&mut self, at: u64, len: usize) {
        if !self.is_judging || len == 0 {
            return;
        }
        let (first, last) = (at as usize / self.line, (at as usize + len - 1) / self.line);
        for word in first / 64..=last / 64 {
            while self.open[word] != 0 {
                let low = first.saturating_sub(word * 64);
                let high = (last - word * 64).min(63);
                let mask = (u64::MAX << low) & (u64::MAX >> (63 - high));
                let bits = self.open[word] & mask;
                if bits == 0 {
                    break;
                }
                self.decide((word * 64) as u32 + bits.trailing_zeros());
            }
        }
    }

    fn decide(&mut self, number: u32) {
        self.open[number as usize / 64] &= !(1 << (number % 64));
        let lines = self.lines.clone();
        let place = lines.binary_search_by_key(&number, |line| line.number).unwrap();
        let line = &lines[place];
        let options = line.options.len() as u32;
        let choice = match self.decisions.get(self.decided) {
            Some(decision) => {
                assert_eq!((decision.line, decision.options), (number, options), "runs differ");
                decision.choice
            }
            None => {
                let choice = match self.beyond.as_mut() {
                    Some(Beyond::Random(seed)) => {
                        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        ((*seed >> 33) % u64::from(options)) as u32
                    }
                    _ => 0,
                };
                self.decisions.push(Decision { line: number, choice, options });
                choice
            }
        };
        self.decided += 1;
        if choice != 0 {
            self.change(number as usize * self.line, &line.options[choice as usize]);
        }
    }

    fn change(&mut self, at: usize, bytes: &[u8]) {
        let State { image, undo, undone, is_judging, .. } = self;
        let place = &mut image[at..at + bytes.len()];
        if *is_judging {
            undo.push((at as u32, bytes.len() as u32));
            undone.extend_from_slice(place);
        }
        place.copy_from_slice(bytes);
    }

    fn store(&mut self, at: u64, bytes: &[u8]) {
        self.look_at(at, bytes.len());
        if let Some(recorder) = &mut self.recorder {
            recorder.note_shared();
            recorder.push(Event::Store { at: at as u32, bytes: bytes.into() });
        }
        self.change(at as usize, bytes);
    }

    fn fence(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.note_shared();
            recorder.push(Event::Fence);
        }
    }
}

impl Pmem for SimMedium {
    fn len_bytes(&self) -> u64 {
        self.len
    }

    fn medium(&self) -> &Medium {
        &self.medium
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        self.state().store(at, bytes);
    }

    fn zero(&self, at: u64, len: u64) {
        self.state().store(at, &vec![0; len as usize]);
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), Status> {
        self.read(at, into);
        Ok(())
    }

    fn drain(&self) -> Result<(), Status> {
        if self.medium.persistence == Persistence::Cpu {
            self.fence();
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), Status> {
        if self.medium.persistence == Persistence::Msync {
            self.fence();
        }
        Ok(())
    }
}
