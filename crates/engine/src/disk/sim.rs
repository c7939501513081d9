//! A malicious disk: it does everything that the contract of disks allows, and faults beyond that.
//!
//! It has a volatile write cache that only a flush empties. I/O is either carried out immediately
//! or held until the simulator picks one; picking decides the order. After a crash, each sector has
//! the durable content or any content that was written since, whether that write had completed or
//! not:
//!
//! 1. A write takes effect when it completes. Until then, a crash may keep any of its sectors.
//! 2. A flush that completes makes the writes durable that had completed before the flush
//!    *started*. A write that completed during the flush may still be lost.
//! 3. A flush that fails decides for each unflushed sector. The sector becomes durable after all,
//!    or may still become durable, or is gone. In the worst case, which is the behaviour of page
//!    caches, the sector stays readable but no later flush makes it durable.
//! 4. A discarded sector reads as zeroes or as before; either is possible.
//! 5. Only the failed flush gets the error, unless the disk is to behave as files do
//!    ([`SimDisk::say_to_all`]).
//! 6. All choices come from the caller's stream of numbers or from the disk's own seed.

use std::collections::BTreeMap;
use std::ops::Range;

use super::fault::{Effect, Fault};
use super::pending_errors::PendingErrors;
use super::ram::{Counters, DiskCounts};
use super::{Disk, DiskIo, DiskLimits, Evidence, Extent, Ring, carry_out_with, check};
use crate::bio::Op;
use crate::error::Status;
use crate::prng::Prng;
use crate::ring::number_of_the_next;
use crate::sync::{Arc, Mutex, lock};
use crate::topology::Topology;
use crate::units::SECTOR;

/// A sector's content. Sectors that are not in a map are zeroes.
type Sector = Arc<[u8; SECTOR as usize]>;

/// A malicious disk.
pub struct SimDisk {
    limits: DiskLimits,
    counters: Counters,
    state: Mutex<State>,
    has_evidence: bool,
    has_holes: bool,
}

struct State {
    /// The content that reads return.
    visible: BTreeMap<u64, Sector>,
    /// The content after every crash at least, unless a newer content is kept.
    durable: BTreeMap<u64, Sector>,
    /// Contents written since the last flush, oldest first, with the number of the write.
    volatile: BTreeMap<u64, Vec<(u64, Sector)>>,
    /// Counts effects of writes.
    sequence: u64,
    /// Started and not completed, oldest first.
    held: Vec<Held>,
    is_holding: bool,
    faults: Vec<Fault>,
    prng: Prng,
    /// Data lost by a failed flush can be read until a crash.
    shows_lost: bool,
    /// The pending errors of failed flushes, if every ring that wrote is to get them.
    pending_errors: Option<PendingErrors>,
}

struct Held {
    io: DiskIo,
    ring: u64,
    /// The number of the last write that had taken effect when this was started.
    sequence: u64,
    /// The same moment, for the pending errors.
    moment: u64,
    /// The same for a change: the result of its `begin_write`.
    begun: u64,
    /// The effect of a fault on it.
    effect: Option<Effect>,
}

impl SimDisk {
    /// A disk of zeroes that carries out I/O immediately.
    pub fn new(size_bytes: u64, block_bytes: u32) -> SimDisk {
        let limits = DiskLimits {
            name: "sim".into(),
            size_bytes: size_bytes / SECTOR * SECTOR,
            block_bytes,
            atomic_bytes: block_bytes,
            has_discard: true,
            topology: Topology::default(),
            identity: "sim".into(),
            kernel_name: "sim".into(),
        };
        SimDisk::with_content(limits, BTreeMap::new(), false)
    }

    /// The same disk under another name, which is also its identity.
    pub fn named(mut self, name: &str) -> SimDisk {
        self.limits.name = name.into();
        self.limits.identity = name.into();
        self.limits.kernel_name = name.into();
        self
    }

    /// The same disk, whose content caches record when they end.
    pub fn with_evidence(mut self) -> SimDisk {
        self.has_evidence = true;
        self
    }

    /// The same disk, which reports blocks of zeroes as holes.
    pub fn with_holes(mut self) -> SimDisk {
        self.has_holes = true;
        self
    }

    fn with_content(
        limits: DiskLimits,
        content: BTreeMap<u64, Sector>,
        is_holding: bool,
    ) -> SimDisk {
        let state = State {
            visible: content.clone(),
            durable: content,
            volatile: BTreeMap::new(),
            sequence: 0,
            held: Vec::new(),
            is_holding,
            faults: Vec::new(),
            prng: Prng::new(0),
            shows_lost: false,
            pending_errors: None,
        };
        let (counters, state) = (Counters::default(), Mutex::new(state));
        SimDisk { limits, counters, state, has_evidence: false, has_holes: false }
    }

    /// From now on, whether I/O is held until the simulator completes it.
    pub fn hold(&self, is_holding: bool) {
        lock(&self.state).is_holding = is_holding;
    }

    /// Sets the seed of the disk's own choices.
    pub fn seed(&self, seed: u64) {
        lock(&self.state).prng = Prng::new(seed);
    }

    /// Adds a fault. An I/O meets the first fault that fits it.
    pub fn inject(&self, fault: Fault) {
        lock(&self.state).faults.push(fault);
    }

    /// From now on, every ring that wrote gets the error of a failed flush, as with files.
    pub fn say_to_all(&self) {
        lock(&self.state).pending_errors = Some(PendingErrors::default());
    }

    /// From now on, data lost by a failed flush can be read until a crash, as in a page cache.
    pub fn show_lost(&self) {
        lock(&self.state).shows_lost = true;
    }

    /// Removes all faults. I/O that was stuck is held like any other.
    pub fn heal(&self) {
        let mut state = lock(&self.state);
        state.faults.clear();
        for held in &mut state.held {
            if held.effect == Some(Effect::Stick) {
                held.effect = None;
            }
        }
    }

    /// How many I/Os of `ring` can be completed now.
    pub fn held(&self, ring: &Ring) -> usize {
        lock(&self.state).movable(ring.id()).count()
    }

    /// Completes one I/O of `ring`, any; false if there is none.
    pub fn step(&self, ring: &mut Ring, prng: &mut Prng) -> bool {
        match self.held(ring) as u64 {
            0 => false,
            count => self.complete_one(prng.below(count) as usize, ring),
        }
    }

    /// Completes the I/O of `ring` that was started as number `index` of those held; false if
    /// there is none.
    pub fn complete_one(&self, index: usize, ring: &mut Ring) -> bool {
        let mut state = lock(&self.state);
        let Some(place) = state.movable(ring.id()).nth(index) else { return false };
        let held = state.held.remove(place);
        let (io, result) = state.carry_out(held);
        drop(state);
        ring.finish(io, result);
        true
    }

    /// Completes all I/O of `ring` in the order it was started.
    pub fn complete_all(&self, ring: &mut Ring) {
        while self.complete_one(0, ring) {}
    }

    /// Fails the stuck I/O of `ring`.
    fn fail_stuck(&self, ring: &mut Ring) {
        let mut state = lock(&self.state);
        let stuck = state.held.iter().position(|held| held.ring == ring.id());
        let held = stuck.map(|place| state.held.remove(place));
        drop(state);
        ring.finish(held.expect("an I/O that was started is held").io, Err(Status::Timeout));
    }

    /// Forgets the held I/O: it never completes. Held I/O keeps its disk alive, so a disk that
    /// outlives a crash must be abandoned.
    pub fn abandon(&self) {
        let held = std::mem::take(&mut lock(&self.state).held);
        drop(held);
    }

    /// The disk after a crash: each sector has one of its possible contents, by chance. Faults do
    /// not survive.
    pub fn crash(&self, prng: &mut Prng) -> SimDisk {
        // The extremes are tried far more often than chance by sector would try them.
        match prng.below(4) {
            0 => self.crash_with(|_, _| 0),
            1 => self.crash_with(|_, options| options - 1),
            _ => self.crash_with(|_, options| prng.below(options as u64) as usize),
        }
    }

    /// The disk after a crash. For each sector with more than one possible content, in ascending
    /// order, `choose(sector, options)` picks one: 0 is the durable content, `options - 1` the
    /// one that was written last.
    pub fn crash_with(&self, mut choose: impl FnMut(u64, usize) -> usize) -> SimDisk {
        let state = lock(&self.state);
        let mut content = state.durable.clone();
        for (sector, mut later) in state.possible() {
            // Of equal contents only the last counts, so that trying all choices needs fewer tries.
            let mut seen: Vec<Sector> = Vec::new();
            later.reverse();
            later.retain(|content| {
                !seen.contains(content) && {
                    seen.push(content.clone());
                    true
                }
            });
            later.reverse();
            let durable = state.durable.get(&sector).cloned().unwrap_or_else(zeroes);
            if later == [durable.clone()] {
                continue;
            }
            let choice = choose(sector, later.len() + 1);
            let chosen = if choice == 0 { durable } else { later.swap_remove(choice - 1) };
            content.insert(sector, chosen);
        }
        let disk = SimDisk::with_content(self.limits.clone(), content, state.is_holding);
        SimDisk { has_evidence: self.has_evidence, has_holes: self.has_holes, ..disk }
    }

    /// The operations so far.
    pub fn counts(&self) -> DiskCounts {
        self.counters.counts()
    }

    /// Copies out what reads would see.
    pub fn peek(&self, offset: u64, bytes: &mut [u8]) {
        copy_out(&lock(&self.state).visible, offset, bytes);
    }

    /// Changes content from outside, durably, as bit rot or a stray program would.
    pub fn poke(&self, offset: u64, bytes: &[u8]) {
        let mut state = lock(&self.state);
        let first = offset / SECTOR;
        let last = (offset + bytes.len() as u64).div_ceil(SECTOR);
        let mut around = vec![0; ((last - first) * SECTOR) as usize];
        copy_out(&state.visible, first * SECTOR, &mut around);
        let start = (offset % SECTOR) as usize;
        around[start..start + bytes.len()].copy_from_slice(bytes);
        for (sector, content) in (first..last).zip(around.as_chunks().0) {
            let content = Arc::new(*content);
            state.visible.insert(sector, content.clone());
            state.durable.insert(sector, content);
            state.volatile.remove(&sector);
        }
    }

    /// All that reads would see.
    pub fn image(&self) -> Vec<u8> {
        self.copied(&lock(&self.state).visible)
    }

    /// The content that every crash would leave where no newer content was written.
    pub fn durable_image(&self) -> Vec<u8> {
        self.copied(&lock(&self.state).durable)
    }

    fn copied(&self, content: &BTreeMap<u64, Sector>) -> Vec<u8> {
        let mut image = vec![0; self.limits.size_bytes as usize];
        copy_out(content, 0, &mut image);
        image
    }

    /// Replaces all content, durably, by `image`, and zeroes after it.
    pub fn load_image(&self, image: &[u8]) {
        let mut state = lock(&self.state);
        state.visible.clear();
        state.durable.clear();
        state.volatile.clear();
        drop(state);
        self.poke(0, image);
    }
}

impl Disk for SimDisk {
    fn limits(&self) -> &DiskLimits {
        &self.limits
    }

    fn evidence(&self, _is_end: bool) -> Evidence {
        if self.has_evidence { Evidence::Content } else { Evidence::Nothing }
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        if let Err(status) = check(&self.limits, &io) {
            return ring.finish(io, Err(status));
        }
        self.counters.count(io.op, io.len);
        let mut state = lock(&self.state);
        let effect = state.faults.iter_mut().find_map(|fault| fault.meet(&io));
        let sequence = state.sequence;
        let begun = state.note_start(&io, ring);
        let moment = state.pending_errors.as_ref().map_or(0, PendingErrors::now);
        let held = Held { io, ring: ring.id(), sequence, moment, begun, effect };
        if state.is_holding || effect == Some(Effect::Stick) {
            return state.held.push(held);
        }
        let (io, result) = state.carry_out(held);
        drop(state);
        ring.finish(io, result);
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        if !self.has_holes {
            return (len, Extent::Data);
        }
        let state = lock(&self.state);
        let is_zero =
            |at: u64| state.visible.get(&(at / SECTOR)).is_none_or(|content| **content == [0; _]);
        let is_hole = is_zero(offset);
        let sectors = (offset..offset + len).step_by(SECTOR as usize);
        let same = sectors.take_while(|at| is_zero(*at) == is_hole).count() as u64;
        (same * SECTOR, if is_hole { Extent::Zeroes } else { Extent::Data })
    }

    fn losses(&self) -> u64 {
        lock(&self.state).pending_errors.as_ref().map_or(0, PendingErrors::losses)
    }

    fn is_owing(&self) -> bool {
        lock(&self.state).pending_errors.as_ref().is_some_and(PendingErrors::has_any)
    }

    /// Held I/O is completed in an order of the disk's own; stuck I/O fails.
    fn carry_out(&self, ios: Vec<DiskIo>) -> Vec<DiskIo> {
        carry_out_with(self, ios, Ring::without_kernel(), |ring| {
            while !ring.has_ended() {
                let mut prng = lock(&self.state).prng.clone();
                if !self.step(ring, &mut prng) {
                    self.fail_stuck(ring);
                }
                lock(&self.state).prng = prng;
            }
        })
    }
}

impl std::fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimDisk({:?}, {} bytes)", self.limits.name, self.limits.size_bytes)
    }
}

impl State {
    /// Places in `held` of what `ring` may see completed.
    fn movable(&self, ring: u64) -> impl Iterator<Item = usize> {
        let is_movable = move |held: &Held| held.ring == ring && held.effect != Some(Effect::Stick);
        self.held.iter().enumerate().filter(move |(_, held)| is_movable(held)).map(|(n, _)| n)
    }

    /// For each sector that a crash decides about, all possible contents except the durable one,
    /// oldest first.
    fn possible(&self) -> BTreeMap<u64, Vec<Sector>> {
        let mut possible: BTreeMap<u64, Vec<Sector>> = BTreeMap::new();
        for (sector, versions) in &self.volatile {
            let contents = versions.iter().map(|(_, content)| content.clone());
            possible.insert(*sector, contents.collect());
        }
        for held in &self.held {
            let Some((offset, is_zero)) = held.target() else { continue };
            for (n, sector) in sectors(offset, held.io.len).enumerate() {
                let content = if is_zero { zeroes() } else { part(&held.io, n) };
                possible.entry(sector).or_default().push(content);
            }
        }
        possible
    }

    /// A change begins: recorded for the pending errors.
    fn note_start(&mut self, io: &DiskIo, ring: &Ring) -> u64 {
        match (io.op, &mut self.pending_errors) {
            (Op::Write | Op::WriteZeroes | Op::Discard, Some(pending_errors)) => {
                pending_errors.begin_write(ring.id(), || ring.life())
            }
            _ => 0,
        }
    }

    fn carry_out(&mut self, held: Held) -> (DiskIo, Result<(), Status>) {
        let (ring, moment, begun) = (held.ring, held.moment, held.begun);
        let (io, result) = self.do_it(held);
        let result = match (io.op, &mut self.pending_errors) {
            (Op::Flush, Some(pending_errors)) => {
                match result {
                    Ok(()) => pending_errors.succeeded(moment),
                    Err(_) => pending_errors.failed(number_of_the_next()),
                }
                if pending_errors.collect(ring) { Err(Status::Io) } else { result }
            }
            (Op::Read | Op::Flush, _) | (_, None) => result,
            (_, Some(pending_errors)) => {
                pending_errors.end_write(ring, begun);
                result
            }
        };
        (io, result)
    }

    fn do_it(&mut self, held: Held) -> (DiskIo, Result<(), Status>) {
        let target = held.target();
        let Held { mut io, sequence, effect, .. } = held;
        if let Some(Effect::Fail(status)) = effect {
            if io.op == Op::Flush {
                self.lose();
            }
            return (io, Err(status));
        }
        match io.op {
            Op::Read => {
                let from = if let Some(Effect::Misdirect(to)) = effect { to } else { io.offset };
                copy_out(&self.visible, from, io.buffer.as_mut_slice());
                if let Some(Effect::Corrupt(at)) = effect {
                    let at = at.clamp(io.offset, io.offset + io.len - 1) - io.offset;
                    io.buffer.as_mut_slice()[at as usize] ^= 1;
                }
            }
            Op::Flush => self.flush(sequence),
            Op::Write | Op::WriteZeroes | Op::Discard => {
                let Some((offset, is_zero)) = target else { return (io, Ok(())) };
                self.sequence += 1;
                for (n, sector) in sectors(offset, io.len).enumerate() {
                    let is_kept = io.op == Op::Discard || matches!(effect, Some(Effect::Tear(_)));
                    if is_kept && self.prng.one_in(2) {
                        continue;
                    }
                    let content = if is_zero { zeroes() } else { part(&io, n) };
                    self.visible.insert(sector, content.clone());
                    let versions = self.volatile.entry(sector).or_default();
                    versions.push((self.sequence, content));
                }
            }
        }
        match effect {
            Some(Effect::Tear(status)) => (io, Err(status)),
            _ => (io, Ok(())),
        }
    }

    /// Makes all writes durable that had taken effect up to the write with number `sequence`.
    fn flush(&mut self, sequence: u64) {
        let durable = &mut self.durable;
        self.volatile.retain(|sector, versions| {
            let covered = versions.partition_point(|(number, _)| *number <= sequence);
            if let Some((_, content)) = versions.drain(..covered).next_back() {
                durable.insert(*sector, content);
            }
            !versions.is_empty()
        });
    }

    /// The effect of a failed flush on data that was not durable.
    fn lose(&mut self) {
        let State { visible, durable, volatile, prng, shows_lost, .. } = self;
        volatile.retain(|sector, versions| {
            let (_, newest) = versions.last().expect("a volatile sector has a version");
            match prng.below(4) {
                0 => return true,
                1 => {
                    durable.insert(*sector, newest.clone());
                }
                2 if !*shows_lost => {
                    match durable.get(sector) {
                        Some(old) => visible.insert(*sector, old.clone()),
                        None => visible.remove(sector),
                    };
                }
                // The data remains readable, and never becomes durable.
                _ => {}
            }
            false
        });
    }
}

impl Held {
    /// The target of a change, and whether it writes zeroes; `None` if it changes no data.
    fn target(&self) -> Option<(u64, bool)> {
        if matches!(self.io.op, Op::Read | Op::Flush) {
            return None;
        }
        let is_zero = self.io.op != Op::Write;
        match self.effect {
            Some(Effect::Lose | Effect::Fail(_)) => None,
            Some(Effect::Misdirect(to)) => Some((to, is_zero)),
            _ => Some((self.io.offset, is_zero)),
        }
    }
}

fn sectors(offset: u64, len: u64) -> Range<u64> {
    offset / SECTOR..(offset + len) / SECTOR
}

fn zeroes() -> Sector {
    Arc::new([0; SECTOR as usize])
}

/// Sector number `n` of what `io` writes.
fn part(io: &DiskIo, n: usize) -> Sector {
    Arc::new(io.buffer.as_slice().as_chunks().0[n])
}

/// Fills `bytes` with the content at `offset`; both may cross sectors.
fn copy_out(content: &BTreeMap<u64, Sector>, offset: u64, bytes: &mut [u8]) {
    bytes.fill(0);
    let end = offset + bytes.len() as u64;
    for (sector, found) in content.range(offset / SECTOR..end.div_ceil(SECTOR)) {
        let from = (sector * SECTOR).max(offset);
        let to = ((sector + 1) * SECTOR).min(end);
        let within = (from % SECTOR) as usize;
        let len = (to - from) as usize;
        let place = (from - offset) as usize;
        bytes[place..place + len].copy_from_slice(&found[within..within + len]);
    }
}
