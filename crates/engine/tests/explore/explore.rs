//! From a trace to its crash states, and from a crash state to what may happen next.
//!
//! States are made just before each fence of the cache medium and before each flush of the
//! origin completes: whatever a crash at an earlier moment of the same epoch can leave can be
//! left at its end as well, and what is promised only grows. The death of the process is tried
//! after every single event.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use udm::prng::Prng;

use crate::judge::{Judge, Scope, Shown, words};
use crate::machine::{Machine, Scene, Setup, shared_of};
use crate::model::{Model, SLOTS};
use crate::program::{Step, aftermath};
use crate::trace::{Event, InFlight};
use crate::twin::{Beyond, Decision, LINE, PendingLine, Twin, hash_line, mix};

/// How much of the space of states is tried.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Leaves of one crash point up to which all are tried.
    pub exhaust: usize,
    /// Leaves tried beyond that, by chance.
    pub sample: usize,
    /// Of so many states, one goes on: a second history, and crashes in it.
    pub onward_one_in: u64,
    /// Crashes in a row.
    pub depth: u32,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub histories: u64,
    /// Attached and judged.
    pub judged: u64,
    /// Of those, states that differ from all others of their history.
    pub distinct: u64,
    /// Crash points whose states were all tried, and those sampled.
    pub exhausted: u64,
    pub sampled: u64,
    /// Deaths of the process.
    pub deaths: u64,
    /// States from which a further history ran.
    pub onward: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Counts) {
        self.histories += other.histories;
        self.judged += other.judged;
        self.distinct += other.distinct;
        self.exhausted += other.exhausted;
        self.sampled += other.sampled;
        self.deaths += other.deaths;
        self.onward += other.onward;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} histories, {} states attached and judged, {} of them distinct ({} deaths of the \
             process); {} crash points exhausted, {} sampled; {} states went on",
            self.histories,
            self.judged,
            self.distinct,
            self.deaths,
            self.exhausted,
            self.sampled,
            self.onward
        )
    }
}

/// A promise broken, with the way there.
pub type Found = Result<(), String>;

pub struct Explorer {
    pub setup: Setup,
    pub effort: Effort,
    pub counts: Counts,
    pub prng: Prng,
    seen: HashSet<u64>,
}

/// The exploration of one trace.
struct Walk {
    twin: Arc<Twin>,
    judge: Judge,
    model: Model,
    in_flight: InFlight,
    shared: Vec<u64>,
    /// Shared memory of an earlier attach: must not be taken for this one's.
    stale_shared: Vec<u64>,
    image_hash: u64,
    attaches: u64,
    has_changed: bool,
    no_lines: Arc<[PendingLine]>,
    touches_reuse: bool,
    /// Whether the origin alone is consistent.
    is_origin_fine: bool,
}

impl Explorer {
    pub fn new(setup: Setup, effort: Effort, seed: u64) -> Explorer {
        let prng = Prng::new(seed ^ 0xC2A5_41B7);
        Explorer { setup, effort, counts: Counts::default(), prng, seen: HashSet::new() }
    }

    /// Runs `program` on `scene` and tries every crash of it.
    pub fn history(&mut self, scene: &Scene, program: &[Step], depth: u32) -> Found {
        let mut machine = Machine::new(self.setup, scene, self.prng.next_u64());
        let outcome = quietly(|| machine.run(program));
        let trace = std::mem::take(&mut machine.trace.lock().unwrap().events);
        let attaches = machine.attaches();
        drop(machine);
        // The crash states first: they tell more than the end of the story.
        self.walk(scene, trace, attaches, depth)?;
        outcome.map_err(|what| format!("while the program ran: {what}"))
    }

    fn walk(&mut self, scene: &Scene, trace: Vec<Event>, attaches: u64, depth: u32) -> Found {
        let twin = Arc::new(Twin::new(scene.image.clone(), self.setup.persistence));
        let mut walk = Walk {
            twin,
            judge: Judge::new(&self.setup, shared_of(&[])),
            model: scene.model.clone(),
            in_flight: InFlight::default(),
            shared: words(&shared_of(&scene.shared)),
            stale_shared: scene.shared.clone(),
            image_hash: hash_of(&scene.image),
            attaches: attaches + 1,
            has_changed: true,
            no_lines: Arc::new([]),
            touches_reuse: true,
            is_origin_fine: scene.model.origin_alone().is_ok(),
        };
        let last = trace.len();
        for (nth, event) in trace.into_iter().enumerate() {
            let at = |what: String| format!("event {nth} of {last}: {what}");
            let is_border = match &event {
                Event::Fence | Event::Elsewhere(..) => true,
                Event::OriginDone(id, _) => walk.model.is_origin_flush(*id),
                _ => false,
            };
            if is_border {
                self.power_cuts(&mut walk, depth).map_err(at)?;
            }
            self.apply(&mut walk, event);
            walk.model.claim_holds().map_err(at)?;
            walk.is_origin_fine = walk.model.origin_alone().is_ok();
            self.death(&mut walk, depth).map_err(at)?;
        }
        self.power_cuts(&mut walk, depth).map_err(|what| format!("at the end: {what}"))
    }

    fn apply(&mut self, walk: &mut Walk, event: Event) {
        walk.has_changed = true;
        match event {
            Event::Store { at, bytes } => walk.in_flight.push(at, bytes),
            Event::Fence => {
                let touches = walk.in_flight.touches(is_of_reuse);
                walk.settle();
                walk.touches_reuse = touches;
            }
            Event::Shared(changed) => {
                if changed.iter().any(|(nth, _)| *nth == 2) {
                    walk.stale_shared = walk.shared.clone();
                }
                for (nth, value) in changed {
                    walk.shared[nth as usize] = value;
                }
            }
            Event::Submit(id, ask) => walk.model.submit(id, ask),
            Event::Ack(id) => walk.model.ack(id),
            Event::Attached => walk.model.attached(),
            Event::Claim(is_consistent) => walk.model.claims_consistent = is_consistent,
            Event::Unbound => walk.model.unbound(),
            Event::OriginWrite(id, slots) => walk.model.origin_write(id, &slots),
            Event::OriginDone(id, is_good) => walk.model.origin_done(id, is_good),
            Event::OriginFlush(id) => walk.model.origin_flush(id),
            Event::Elsewhere(image, writes) => {
                walk.settle();
                walk.image_hash = hash_of(&image);
                walk.twin.poke(0, &image);
                walk.model.elsewhere_wrote(&writes);
            }
        }
    }

    /// Every image that a power cut may leave now.
    fn power_cuts(&mut self, walk: &mut Walk, depth: u32) -> Found {
        if !std::mem::take(&mut walk.has_changed) {
            return Ok(());
        }
        let twin = walk.twin.clone();
        let lines = walk.in_flight.lines(|at| twin.peek(at, LINE).try_into().unwrap());
        set_words(&walk.judge, &[]);
        walk.twin.begin(&lines, &[], Beyond::Random(self.prng.next_u64()));
        let other = quietly(|| walk.judge.other_origin(&walk.twin, &walk.model, walk.attaches));
        walk.twin.end();
        other?;
        let mut path: Vec<Decision> = Vec::new();
        let mut leaves = 0;
        let mut judged = HashSet::new();
        loop {
            let is_sampling = leaves >= self.effort.exhaust;
            if leaves >= self.effort.exhaust + self.effort.sample {
                self.counts.sampled += 1;
                return Ok(());
            }
            let beyond = match is_sampling {
                true => Beyond::Random(self.prng.next_u64()),
                false => Beyond::Oldest,
            };
            if is_sampling {
                path.clear();
            }
            let scope = Scope {
                is_power_cut: true,
                is_origin_fine: walk.is_origin_fine,
                inspects: walk.touches_reuse || walk.in_flight.touches(is_of_reuse),
            };
            let decisions = self.leaf(walk, &lines, &path, beyond, scope, depth, &mut judged)?;
            leaves += 1;
            if !is_sampling {
                path = decisions;
                if !next_path(&mut path) {
                    self.counts.exhausted += 1;
                    return Ok(());
                }
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "all of them differ from leaf to leaf")]
    fn leaf(
        &mut self,
        walk: &mut Walk,
        lines: &Arc<[PendingLine]>,
        path: &[Decision],
        beyond: Beyond,
        scope: Scope,
        depth: u32,
        judged: &mut HashSet<Vec<u8>>,
    ) -> Result<Vec<Decision>, String> {
        // Shared memory is gone, or is that of an attach long past.
        let is_stale = self.prng.one_in(4);
        let shared = if is_stale { &walk.stale_shared[..] } else { &[] };
        set_words(&walk.judge, shared);
        walk.twin.begin(lines, path, beyond);
        let verdict = quietly(|| walk.judge.state(&walk.twin, &walk.model, scope, walk.attaches));
        let decisions = walk.twin.end();
        self.counts.judged += 1;
        let key: Vec<u8> = decisions.iter().map(|d| d.choice as u8).collect();
        if judged.insert(key) && self.seen.insert(state_hash(walk.image_hash, lines, &decisions)) {
            self.counts.distinct += 1;
        }
        let shown = verdict.map_err(|what| {
            format!("{what} (power cut, {} lines in flight, left {decisions:?})", lines.len())
        })?;
        // What old shared memory gave back is not durable: such states end here.
        if depth < self.effort.depth && !is_stale && self.prng.one_in(self.effort.onward_one_in) {
            let image = left_image(&walk.twin, lines, &decisions);
            self.onward(walk, image, &shown, true, depth)?;
        }
        Ok(decisions)
    }

    /// The process dies here; machine and shared memory live on.
    fn death(&mut self, walk: &mut Walk, depth: u32) -> Found {
        set_words(&walk.judge, &walk.shared);
        let is_origin_fine = walk.is_origin_fine;
        let scope = Scope { is_power_cut: false, is_origin_fine, inspects: false };
        let numbers = walk.in_flight.line_numbers();
        let hash = |twin: &Twin| numbers.iter().fold(0, |hash, line| hash ^ twin.hash_line(*line));
        let before = hash(&walk.twin);
        walk.twin.begin(&walk.no_lines, &[], Beyond::Oldest);
        walk.twin.apply(walk.in_flight.stores());
        let state = walk.image_hash ^ before ^ hash(&walk.twin);
        let verdict = quietly(|| walk.judge.state(&walk.twin, &walk.model, scope, walk.attaches));
        walk.twin.end();
        self.counts.judged += 1;
        self.counts.deaths += 1;
        if self.seen.insert(state ^ hash_words(&walk.shared)) {
            self.counts.distinct += 1;
        }
        let shown = verdict.map_err(|what| format!("{what} (death of the process)"))?;
        if depth < self.effort.depth && self.prng.one_in(self.effort.onward_one_in) {
            let mut image = walk.twin.image();
            for (at, bytes) in walk.in_flight.stores() {
                image[at as usize..][..bytes.len()].copy_from_slice(bytes);
            }
            self.onward(walk, image, &shown, false, depth)?;
        }
        Ok(())
    }

    /// A further history starts from what the crash left.
    fn onward(
        &mut self,
        walk: &Walk,
        image: Vec<u8>,
        shown: &[Shown; SLOTS],
        is_power_cut: bool,
        depth: u32,
    ) -> Found {
        let mut model = walk.model.clone();
        let mut found = Vec::with_capacity(SLOTS);
        for (slot, shown) in model.origin.iter_mut().zip(shown) {
            let left: Vec<u64> = match is_power_cut {
                true => slot.possible().collect(),
                false => slot.visible().collect(),
            };
            let origin = left[self.prng.below(left.len() as u64) as usize];
            slot.settle(origin, is_power_cut);
            found.push(match shown {
                Shown::Cached(stamp) => *stamp,
                Shown::Origin => origin,
            });
        }
        model.adopt(&found, is_power_cut);
        let shared = if is_power_cut { Vec::new() } else { walk.shared.clone() };
        let scene = Scene { image, model, shared, attaches: walk.attaches + 1 };
        let program = aftermath(&mut self.prng);
        self.counts.onward += 1;
        self.history(&scene, &program, depth + 1)
            .map_err(|what| format!("after a crash, then {program:?}: {what}"))
    }
}

impl Walk {
    /// What was in flight is durable.
    fn settle(&mut self) {
        for (at, bytes) in self.in_flight.take() {
            let (first, last) = (at as usize / LINE, (at as usize + bytes.len() - 1) / LINE);
            for line in first..=last {
                self.image_hash ^= self.twin.hash_line(line as u32);
            }
            self.twin.poke(at as usize, &bytes);
            for line in first..=last {
                self.image_hash ^= self.twin.hash_line(line as u32);
            }
        }
    }
}

/// Whether a store is part of what lets a segment be reused: a tail, or a generation.
fn is_of_reuse(at: u32) -> bool {
    use crate::machine::GEOMETRY;
    let at = u64::from(at);
    let in_segment = at.wrapping_sub(20480) % GEOMETRY.segment_bytes;
    (16384..20480).contains(&at) || at >= 20480 && (8192..12288).contains(&in_segment)
}

/// The next path in order; false when there is none.
fn next_path(path: &mut Vec<Decision>) -> bool {
    while let Some(last) = path.last_mut() {
        if last.choice + 1 < last.options {
            last.choice += 1;
            return true;
        }
        path.pop();
    }
    false
}

fn left_image(twin: &Twin, lines: &[PendingLine], decisions: &[Decision]) -> Vec<u8> {
    let mut image = twin.image();
    for decision in decisions {
        let place = lines.binary_search_by_key(&decision.line, |line| line.number).unwrap();
        let content = &lines[place].options[decision.choice as usize];
        image[decision.line as usize * LINE..][..LINE].copy_from_slice(content);
    }
    image
}

fn set_words(judge: &Judge, words: &[u64]) {
    let words = words.iter().copied().chain(std::iter::repeat(0));
    for (word, value) in judge.shared.words().iter().zip(words) {
        word.store(value, std::sync::atomic::Ordering::Relaxed);
    }
}

fn hash_of(image: &[u8]) -> u64 {
    let lines = image.chunks_exact(LINE).enumerate();
    lines.fold(0, |hash, (number, line)| hash ^ hash_line(number as u32, line))
}

fn hash_words(words: &[u64]) -> u64 {
    words.iter().fold(1, |hash, word| mix(hash ^ word))
}

fn state_hash(image: u64, lines: &[PendingLine], decisions: &[Decision]) -> u64 {
    decisions.iter().fold(image, |hash, decision| {
        let place = lines.binary_search_by_key(&decision.line, |line| line.number).unwrap();
        let options = &lines[place].options;
        hash ^ hash_line(decision.line, &options[0])
            ^ hash_line(decision.line, &options[decision.choice as usize])
    })
}

/// Turns a panic of the engine into a finding.
pub fn quietly<T>(f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}
