//! From a trace to its crash states, and from a crash state to its possible successors.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use udm::prng::Prng;

use crate::in_flight::InFlight;
use crate::judge::{Judge, Scope, Shown, words};
use crate::machine::{Machine, MachineState, shared_of};
use crate::model::{Model, SLOTS};
use crate::program::{Step, aftermath};
use crate::sectors::{DiskEvent, End, Sectors};
use crate::sim::{Beyond, Decision, PendingLine, SimMedium, hash_line, mix};
use crate::subject::{Devices, Kind};
use crate::trace::Event;

/// How much of the space of states is tried.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Leaves of one crash point up to which all are tried.
    pub exhaust: usize,
    /// Leaves tried beyond that, by chance.
    pub sample: usize,
    /// Of this many states, one goes on: a second history, and crashes in it.
    pub onward_one_in: u64,
    /// States of one death of the process up to which all are tried, where there are several.
    pub deaths: usize,
    /// Crashes in a row.
    pub depth: u32,
}

/// The numbers of explored states.
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
    pub kind: Arc<dyn Kind>,
    pub effort: Effort,
    pub counts: Counts,
    pub prng: Prng,
    seen: HashSet<u64>,
}

/// The exploration of one trace.
struct Walk {
    sim: Arc<SimMedium>,
    judge: Judge,
    model: Model,
    in_flight: InFlight,
    shared: Vec<u64>,
    /// Shared memory of an earlier attach: must not be taken for this one's.
    stale_shared: Vec<u64>,
    /// Shared memory as it once was, but of an attach of another medium.
    foreign_shared: Vec<u64>,
    image_hash: u64,
    attaches: u64,
    boot: u64,
    has_changed: bool,
    touches_reuse: bool,
    /// Whether the origin alone is consistent.
    is_origin_fine: bool,
}

impl Explorer {
    pub fn new(kind: &Arc<dyn Kind>, effort: Effort, seed: u64) -> Explorer {
        let prng = Prng::new(seed ^ 0xC2A5_41B7);
        Explorer {
            kind: kind.clone(),
            effort,
            counts: Counts::default(),
            prng,
            seen: HashSet::new(),
        }
    }

    /// Runs `program` on `initial` and tries every crash of it.
    pub fn history(&mut self, initial: &MachineState, program: &[Step], depth: u32) -> Found {
        let mut machine = Machine::new(&self.kind, initial, self.prng.next_u64());
        let outcome = quietly(|| machine.run(program));
        let trace = std::mem::take(&mut machine.trace.lock().unwrap().events);
        let attaches = machine.attaches();
        drop(machine);
        // The crash states first: they tell more than the end of the case.
        self.walk(initial, trace, attaches, depth)?;
        outcome.map_err(|what| format!("while the program ran: {what}"))
    }

    fn walk(
        &mut self,
        initial: &MachineState,
        trace: Vec<Event>,
        attaches: u64,
        depth: u32,
    ) -> Found {
        let ground = self.kind.ground();
        let sim = Arc::new(SimMedium::new(initial.image.clone(), ground));
        let shared = shared_of(&*self.kind, &[]).in_boot(initial.boot);
        let devices = Devices::new(&*self.kind, &sim, shared);
        let mut walk = Walk {
            sim,
            judge: Judge::new(&self.kind, devices),
            model: initial.model.clone(),
            in_flight: InFlight::found(ground, &initial.unflushed),
            shared: words(&shared_of(&*self.kind, &initial.shared)),
            stale_shared: initial.shared.clone(),
            foreign_shared: Vec::new(),
            image_hash: hash_of(&initial.image, ground.line()),
            attaches: attaches + 1,
            boot: initial.boot,
            has_changed: true,
            touches_reuse: true,
            is_origin_fine: initial.model.origin_alone().is_ok(),
        };
        let last = trace.len();
        for (nth, event) in trace.into_iter().enumerate() {
            let at = |what: String| format!("event {nth} of {last}: {what}");
            let is_border = match &event {
                Event::Fence | Event::Elsewhere(..) => true,
                Event::Disk(DiskEvent::Done { id, end: End::Good }) => walk.in_flight.is_flush(*id),
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
            self.people(&mut walk).map_err(at)?;
        }
        self.power_cuts(&mut walk, depth).map_err(|what| format!("at the end: {what}"))
    }

    fn apply(&mut self, walk: &mut Walk, event: Event) {
        walk.has_changed = true;
        match event {
            Event::Store { at, bytes } => walk.in_flight.store(at, bytes),
            Event::Fence => {
                let touches = walk.in_flight.touches(|at| self.kind.is_telling(at));
                walk.settle();
                walk.touches_reuse = touches;
            }
            Event::Disk(event) => {
                let Walk { sim, in_flight, image_hash, .. } = walk;
                in_flight.disk(event, sim, |at, bytes| settle(sim, image_hash, at, bytes));
            }
            Event::Shared(changed) => {
                if changed.iter().any(|(nth, _)| *nth == self.kind.owner_words()[0]) {
                    walk.stale_shared = walk.shared.clone();
                }
                for (nth, value) in changed {
                    walk.shared[nth as usize] = value;
                }
            }
            Event::Submit(id, ask) => walk.model.submit(id, ask),
            Event::Ack(id) => walk.model.ack(id),
            Event::Failed(id) => walk.model.failed(id),
            Event::CacheFailed => walk.model.cache_failed(),
            Event::CacheRefused => walk.model.write_failed(),
            Event::Attached => {
                walk.model.attached();
                if let (InFlight::Disk(disk), true) = (&mut walk.in_flight, walk.model.forgets) {
                    disk.forget_failures();
                }
            }
            Event::Claim(is_consistent) => walk.model.claims_consistent = is_consistent,
            Event::Unbound => walk.model.unbound(),
            Event::OriginWrite(id, slots) => walk.model.origin_write(id, &slots),
            Event::OriginDone(id, is_good) => walk.model.origin_done(id, is_good),
            Event::OriginFlush(id) => walk.model.origin_flush(id),
            Event::OriginGone(id) => walk.model.origin_gone(id),
            Event::Left(found) => walk.model.left(&found),
            Event::Elsewhere(image, writes) => {
                // Durable in its present state, even if a write had failed before.
                walk.in_flight = InFlight::found(self.kind.ground(), &Sectors::default());
                walk.image_hash = hash_of(&image, walk.sim.line());
                walk.sim.poke(0, &image);
                walk.model.elsewhere_wrote(&writes);
            }
        }
    }

    /// Every image that a power cut may leave now.
    fn power_cuts(&mut self, walk: &mut Walk, depth: u32) -> Found {
        if !std::mem::take(&mut walk.has_changed) {
            return Ok(());
        }
        let lines = walk.in_flight.left_by_power_cut(&walk.sim);
        set_words(&walk.judge, &[]);
        walk.sim.begin(&lines, &[], Beyond::Random(self.prng.next_u64()));
        let other = quietly(|| walk.judge.other_origin(&walk.model, walk.attaches));
        walk.sim.end();
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
                inspects: walk.touches_reuse
                    || walk.in_flight.touches(|at| self.kind.is_telling(at)),
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
        // Shared memory is gone, or belongs to an attach long ago.
        let is_stale = self.prng.one_in(4);
        let shared = if is_stale { &walk.stale_shared[..] } else { &[] };
        set_words(&walk.judge, shared);
        walk.sim.begin(lines, path, beyond);
        let verdict = quietly(|| walk.judge.state(&walk.sim, &walk.model, scope, walk.attaches));
        let decisions = walk.sim.end();
        self.counts.judged += 1;
        let key: Vec<u8> = decisions.iter().map(|d| d.choice as u8).collect();
        if judged.insert(key) && self.seen.insert(state_hash(walk.image_hash, lines, &decisions)) {
            self.counts.distinct += 1;
        }
        let shown = verdict.map_err(|what| {
            format!("{what} (power cut, {} lines in flight, left {decisions:?})", lines.len())
        })?;
        // What old shared memory gave back is not durable: such states end here.
        let goes_on =
            depth < self.effort.depth && !is_stale && self.prng.one_in(self.effort.onward_one_in);
        if goes_on {
            let mut image = walk.sim.image();
            decide(&mut image, walk.sim.line(), lines, &decisions);
            self.onward(walk, (image, Sectors::default()), &shown, true, depth)?;
        }
        Ok(decisions)
    }

    /// The process dies here; machine and shared memory live on.
    fn death(&mut self, walk: &mut Walk, depth: u32) -> Found {
        let lines = walk.in_flight.left_by_death(&walk.sim);
        let mut path: Vec<Decision> = Vec::new();
        for leaf in 0..self.effort.deaths {
            let is_last = leaf + 1 == self.effort.deaths;
            let beyond = match is_last {
                true => Beyond::Random(self.prng.next_u64()),
                false => Beyond::Oldest,
            };
            if is_last {
                path.clear();
            }
            path = self.one_death(walk, &lines, &path, beyond, depth)?;
            if lines.is_empty() || !next_path(&mut path) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The process dies here, and then its memory is not found: the attach is refused, or all
    /// acknowledged writes are there anyway. Memory of another cache's server, at any address, does
    /// not change this.
    fn people(&mut self, walk: &mut Walk) -> Found {
        if walk.shared.is_empty() || !self.prng.one_in(4) {
            return Ok(());
        }
        let is_refused =
            |found: &Found| found.as_ref().is_err_and(|what| what.starts_with("attach is refused"));
        let lost = self.after_loss(walk, false, false);
        let is_asked_for = is_refused(&lost);
        if !is_asked_for {
            lost.map_err(|what| format!("{what} (death of the process, then memory is lost)"))?;
        }
        let is_memory = walk.shared[0] != 0;
        if is_memory && (walk.foreign_shared.is_empty() || self.prng.one_in(6)) {
            walk.foreign_shared.clone_from(&walk.shared);
            for word in self.kind.owner_words() {
                walk.foreign_shared[word as usize] ^= 1 << 40;
            }
        }
        let found = self.after_loss(walk, true, !is_asked_for);
        match is_asked_for && is_refused(&found) {
            true => Ok(()),
            false => found.map_err(|what| format!("{what} (another cache's memory lies there)")),
        }
    }

    /// The process dies, and its memory is gone; in its place, or where servers before this
    /// version kept theirs, there may be a foreign one.
    fn after_loss(&mut self, walk: &mut Walk, is_foreign: bool, is_old: bool) -> Found {
        let lines = walk.in_flight.left_by_death(&walk.sim);
        let visible = walk.in_flight.visible();
        set_words(&walk.judge, if is_foreign { &walk.foreign_shared } else { &[] });
        let is_origin_fine = walk.is_origin_fine;
        let scope = Scope { is_power_cut: false, is_origin_fine, inspects: false };
        walk.judge.devices.is_old = is_old;
        walk.sim.begin(&lines, &[], Beyond::Oldest);
        walk.sim.apply(visible.iter().copied());
        let verdict = quietly(|| walk.judge.state(&walk.sim, &walk.model, scope, walk.attaches));
        walk.sim.end();
        walk.judge.devices.is_old = false;
        self.counts.judged += 1;
        verdict.map(drop)
    }

    fn one_death(
        &mut self,
        walk: &mut Walk,
        lines: &Arc<[PendingLine]>,
        path: &[Decision],
        beyond: Beyond,
        depth: u32,
    ) -> Result<Vec<Decision>, String> {
        set_words(&walk.judge, &walk.shared);
        let is_origin_fine = walk.is_origin_fine;
        let scope = Scope { is_power_cut: false, is_origin_fine, inspects: false };
        let numbers = walk.in_flight.numbers();
        let hash =
            |sim: &SimMedium| numbers.iter().fold(0, |hash, line| hash ^ sim.hash_line(*line));
        let before = hash(&walk.sim);
        walk.sim.begin(lines, path, beyond);
        let visible = walk.in_flight.visible();
        walk.sim.apply(visible.iter().copied());
        let state = walk.image_hash ^ before ^ hash(&walk.sim);
        let verdict = quietly(|| walk.judge.state(&walk.sim, &walk.model, scope, walk.attaches));
        let decisions = walk.sim.end();
        self.counts.judged += 1;
        self.counts.deaths += 1;
        if self.seen.insert(state_hash(state, lines, &decisions) ^ hash_words(&walk.shared)) {
            self.counts.distinct += 1;
        }
        let shown = verdict.map_err(|what| format!("{what} (death of the process)"))?;
        let goes_on = depth < self.effort.depth && self.prng.one_in(self.effort.onward_one_in);
        if goes_on {
            let mut image = walk.sim.image();
            // Stores to memory count as durable from here on; data in a disk's cache does not.
            if matches!(walk.in_flight, InFlight::Memory(_)) {
                for (at, bytes) in visible {
                    image[at as usize..][..bytes.len()].copy_from_slice(bytes);
                }
            }
            let unflushed = walk.in_flight.left_behind(lines, &decisions);
            self.onward(walk, (image, unflushed), &shown, false, depth)?;
        }
        Ok(decisions)
    }

    /// A further history starts from the state after the crash.
    fn onward(
        &mut self,
        walk: &Walk,
        (image, unflushed): (Vec<u8>, Sectors),
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
        let boot = walk.boot + u64::from(is_power_cut);
        let initial =
            MachineState { image, unflushed, model, shared, attaches: walk.attaches + 1, boot };
        let program = aftermath(&mut self.prng);
        self.counts.onward += 1;
        self.history(&initial, &program, depth + 1)
            .map_err(|what| format!("after a crash, then {program:?}: {what}"))
    }
}

impl Walk {
    /// All data in flight is durable.
    fn settle(&mut self) {
        let Walk { sim, in_flight, image_hash, .. } = self;
        in_flight.fence(|at, bytes| settle(sim, image_hash, at, bytes));
    }
}

/// Bytes become durable.
fn settle(sim: &SimMedium, image_hash: &mut u64, at: u32, bytes: &[u8]) {
    let line = sim.line();
    let lines = at as usize / line..=(at as usize + bytes.len() - 1) / line;
    let hash = || lines.clone().fold(0, |hash, line| hash ^ sim.hash_line(line as u32));
    *image_hash ^= hash();
    sim.poke(at as usize, bytes);
    *image_hash ^= hash();
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

fn decide(image: &mut [u8], line: usize, lines: &[PendingLine], decisions: &[Decision]) {
    for decision in decisions {
        let place = lines.binary_search_by_key(&decision.line, |line| line.number).unwrap();
        let content = &lines[place].options[decision.choice as usize];
        image[decision.line as usize * line..][..line].copy_from_slice(content);
    }
}

fn set_words(judge: &Judge, words: &[u64]) {
    let words = words.iter().copied().chain(std::iter::repeat(0));
    for (word, value) in judge.devices.shared.words().iter().zip(words) {
        word.store(value, std::sync::atomic::Ordering::Relaxed);
    }
}

fn hash_of(image: &[u8], line: usize) -> u64 {
    let lines = image.chunks_exact(line).enumerate();
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
