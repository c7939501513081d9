//! Collection: key_tail follows dirty_tail, and segments that no logged key needs are reused.
//! Kernel counterpart: `cache_gc.c`.
//!
//! Order, for each slice of the log: the keys give up their references in memory; key_tail moves
//! past them, durably; log segments before it are free; data segments without references get their
//! generation raised, durably, and are free. So every key that a crash could bring back points to
//! space that was not reused.

use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::units::BLOCK;

use super::Pcache;
use super::keylog::{LogReader, after};
use super::layout::{GC_PERCENT_DEFAULT, Key, Position, REGION_BYTES, Record};
use super::retain::{Keeper, Pass};
use super::retention::{Retention, USES_MAX};
use super::segment::{LOG_RESERVE, Segments};

/// Key sets passed before key_tail is stored.
const SLICE_SETS: usize = 64;
/// Most keys passed before key_tail is stored, when hot data is kept: no more is dropped than is
/// needed, and keys that are logged again soon free their old position.
const KEPT_KEYS_MAX: usize = 32;
/// But a slice is a small part (1 / n) of a small cache.
const KEPT_SHARE: u64 = 256;
/// Most keys that a write passes: twice as many as a segment full of blocks has.
pub(super) const PIECE_KEYS: usize = 8 << 10;

/// Passes over the log per tick. Each pass costs a block one use, so after this many passes
/// condemned data is dropped.
pub(super) const ROUNDS_MAX: u32 = USES_MAX as u32 + 1;
/// Full sweeps of the index in the time in which every segment is reused once. Between two sweeps
/// at most half as many slots die as the cache has blocks.
const SWEEPS_PER_TURN: u64 = 2;
/// Most regions of the index that a tick examines and sweeps: about a millisecond.
const SWEEP_LOOKS: u64 = 32 << 10;
const SWEEP_REGIONS: u64 = 256;

/// The state of collection.
#[derive(Debug, Default)]
pub(super) struct Gc {
    reader: LogReader,
    /// Keys of reused segments are in the log up to here: a kernel would mis-count them.
    stale_until: Option<Position>,
    /// A CLEAN key before this position is hidden by older keys and must not outlive them: key_tail
    /// passes all of this range in one step.
    together_until: Option<Position>,
    is_stuck: bool,
    /// Passing everything once was not enough.
    is_pressed: bool,
    keeper: Keeper,
}

/// How far a slice has come.
#[derive(Debug, Default)]
struct Passed {
    at: Position,
    sets: usize,
    keys: usize,
    /// Segments that were released before it.
    released_before: usize,
    /// Segments of the log that key_tail has left.
    left_logs: Vec<u32>,
}

/// How far the index is swept.
#[derive(Debug, Default)]
pub(super) struct Sweep {
    /// The next region.
    at: u64,
    /// Segments that had been reused at the last look.
    recycled: u64,
    /// Sweeping that is due for them, in regions times segments.
    owed: u64,
}

/// A slice of the log: how it is passed, and where it ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slice {
    pub(super) pass: Pass,
    pub(super) sets_max: usize,
    pub(super) keys_max: usize,
    /// Ends when this many segments are free.
    pub(super) freed_max: Option<usize>,
    /// Ends there, and nowhere else.
    pub(super) until: Option<Position>,
}

impl Slice {
    /// A slice for the background of a cache of this many blocks, which needs this many segments.
    pub(super) fn new(pass: Pass, blocks: u64, missing: u32) -> Slice {
        let (keys_max, freed_max) = match pass {
            Pass::Drop => (usize::MAX, None),
            Pass::Yield => (usize::MAX, Some(missing as usize)),
            Pass::Keep => ((blocks / KEPT_SHARE).clamp(1, KEPT_KEYS_MAX as u64) as usize, None),
        };
        Slice { pass, sets_max: SLICE_SETS, keys_max, freed_max, until: None }
    }

    /// The piece of collection that a write does.
    pub(super) fn piece(pass: Pass) -> Slice {
        let (sets_max, keys_max) = (usize::MAX, PIECE_KEYS);
        Slice { pass, sets_max, keys_max, freed_max: Some(1), until: None }
    }

    /// Passes everything up to `until` in one step.
    pub(super) fn until(until: Position) -> Slice {
        let (sets_max, keys_max) = (usize::MAX, usize::MAX);
        Slice { pass: Pass::Keep, sets_max, keys_max, freed_max: None, until: Some(until) }
    }
}

impl Gc {
    /// Collection that passes all records before `stale_until` as soon as it can, and all records
    /// before `together_until` in one step.
    pub(super) fn new(stale_until: Option<Position>, together_until: Option<Position>) -> Gc {
        let mut gc = Gc { stale_until, ..Gc::default() };
        gc.pass_together(together_until);
        gc
    }

    /// All of the log is replayed: all records before this position are to be passed in one step.
    pub(super) fn pass_together(&mut self, until: Option<Position>) {
        self.together_until = until.filter(|_| !mutants::is(Mutant::HiddenCleanOutlives));
    }

    /// Damage in the log stops collection.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_stuck
    }

    /// Whether another pass over the log would free no segment.
    pub(super) fn is_futile(&self) -> bool {
        self.is_stuck || !self.keeper.has_kept()
    }

    /// No more segments must be condemned.
    pub(super) fn relax(&mut self) {
        self.is_pressed = false;
    }

    /// An operation has failed: key_tail may not match the references.
    pub(super) fn stop(&mut self) {
        self.is_stuck = true;
    }

    /// Whether the next slice has a fixed end, at any distance.
    pub(super) fn passes_together(&self) -> bool {
        self.together_until.is_some()
    }
}

/// Collection has its own lock: a write that needs space does a piece of collection.
#[derive(Debug)]
pub(super) struct Collector {
    gc: Mutex<Gc>,
    retention: Box<dyn Retention>,
    /// Free segments that writes leave for data that collection moves, in addition to the log's
    /// own.
    write_reserve: u32,
    /// Whether any data was kept, moved or dropped yet. Before that, the index lacks the history of
    /// blocks.
    has_retained: AtomicBool,
    /// Segments with kept data whose keys are after dirty data in the log.
    pinned: AtomicU32,
}

impl Collector {
    pub(super) fn new(gc: Gc, retention: Box<dyn Retention>, segments: &Segments) -> Collector {
        let write_reserve = match retention.fills_cache() {
            true => (segments.count() / 128).min(3),
            false => 0,
        };
        Collector {
            gc: Mutex::new(gc),
            retention,
            write_reserve,
            has_retained: AtomicBool::new(false),
            pinned: AtomicU32::new(0),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Gc> {
        lock(&self.gc)
    }

    /// `None`: another thread is collecting.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Gc>> {
        self.gc.try_lock().ok()
    }

    /// Which data stays when space is short.
    pub(super) fn retention(&self) -> &dyn Retention {
        &*self.retention
    }

    pub(super) fn write_reserve(&self) -> u32 {
        self.write_reserve
    }

    pub(super) fn has_retained(&self) -> bool {
        self.has_retained.load(Ordering::Relaxed)
    }

    pub(super) fn note_retained(&self) {
        self.has_retained.store(true, Ordering::Relaxed);
    }

    pub(super) fn pinned(&self) -> u32 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Sets the number of segments with data kept after dirty keys.
    pub(super) fn set_pinned(&self, segments: u32) {
        self.pinned.store(segments, Ordering::Relaxed);
    }

    /// Adds one to that number.
    pub(super) fn add_pinned(&self) {
        self.pinned.fetch_add(1, Ordering::Relaxed);
    }
}

impl Pcache {
    /// The number of segments in use at which collection begins. A policy that fills the cache
    /// begins when space is short, unless the user asked for more free space than the kernel's
    /// default leaves.
    pub(super) fn gc_threshold(&self) -> u32 {
        let percent = self.identity.gc_percent();
        if percent >= GC_PERCENT_DEFAULT && self.collector.retention().fills_cache() {
            return self.segments.count() + 1 - self.free_wanted();
        }
        (u64::from(self.segments.count()) * u64::from(percent) / 100) as u32
    }

    /// Free segments that waiting writes need at least.
    pub(super) fn free_wanted(&self) -> u32 {
        let count = self.segments.count();
        match self.collector.retention().fills_cache() {
            true => {
                let ahead = (count / 256).clamp(if count < 8 { 1 } else { 2 }, 16);
                LOG_RESERVE + self.collector.write_reserve() + ahead
            }
            false => LOG_RESERVE + (count / 16).max(1),
        }
    }

    /// Free segments that fills leave for writes, in addition to the log's own.
    pub(super) fn fill_reserve(&self) -> u32 {
        match self.collector.retention().fills_cache() {
            true => self.collector.write_reserve() + 1,
            false => (self.segments.count() / 16).max(1),
        }
    }

    /// Whether space is so short that writes wait or soon will.
    pub(super) fn is_space_short(&self) -> bool {
        self.signals.room().is_short() || self.segments.free() < self.free_wanted()
    }

    fn wants_collection(&self, gc: &mut Gc) -> bool {
        if gc.stale_until == Some(self.log.key_tail()) {
            gc.stale_until = None;
        }
        gc.stale_until.is_some()
            || self.segments.used() >= self.gc_threshold()
            || self.segments.free() < self.free_wanted()
            || self.signals.room().is_wanted() && !self.has_room()
    }

    /// Passing everything once was not enough: more is condemned.
    pub(super) fn press_collection(&self) {
        let mut gc = self.collector.lock();
        self.condemn_more(self.missing());
        gc.is_pressed = true;
    }

    /// Free segments that are missing, at least one.
    fn missing(&self) -> u32 {
        self.free_wanted().saturating_sub(self.segments.free()).max(1)
    }

    /// Collects as much as is needed and possible, and wakes waiting bios when there is free space.
    pub(super) fn collect(&self, sweep: &mut Sweep) {
        if self.is_space_short() {
            self.drop_zero_extent();
        }
        let mut gc = self.collector.lock();
        self.count_pinned();
        self.condemn();
        let keeps_window = !gc.is_pressed && self.is_window_small();
        gc.keeper.begin(keeps_window);
        while !gc.is_stuck && !self.has_stopped() && self.wants_collection(&mut gc) {
            match self.collect_slice(&mut gc, self.next_slice()) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => gc.stop(),
            }
            // A write that needs space need not wait for the end of all this.
            drop(gc);
            self.tell_room();
            gc = self.collector.lock();
        }
        // Stuck means that key_tail may not match the references.
        if !gc.is_stuck && self.segments.has_released() && self.recycle().is_err() {
            gc.stop();
        }
        drop(gc);
        self.signals.note_collected();
        self.tell_room();
        self.sweep_index(sweep);
    }

    /// How the background passes the next slice.
    fn next_slice(&self) -> Slice {
        let pass = match (self.collector.retention().fills_cache(), self.is_space_short()) {
            (true, true) if self.is_behind() => Pass::Yield,
            (true, _) => Pass::Keep,
            (false, _) => Pass::Drop,
        };
        Slice::new(pass, self.segments.blocks(), self.missing())
    }

    /// Removes dead entries from the index, as fast as segments are reused. So memory depends on
    /// the amount of data that is cached now, not on the amount ever cached.
    fn sweep_index(&self, sweep: &mut Sweep) {
        let (regions, segments) = (self.index.regions(), u64::from(self.segments.count()));
        let recycled = self.counters.recycled_segments.load(Ordering::Relaxed);
        let reused = recycled - std::mem::replace(&mut sweep.recycled, recycled);
        let (lap, more) = (regions * segments, reused.saturating_mul(regions * SWEEPS_PER_TURN));
        sweep.owed = sweep.owed.saturating_add(more).min(lap);
        let now = self.counters.dropped_bytes.load(Ordering::Relaxed) / BLOCK;
        let (mut looks, mut swept) = (0, 0);
        while sweep.owed >= segments && looks < SWEEP_LOOKS && swept < SWEEP_REGIONS {
            sweep.owed -= segments;
            sweep.at = (sweep.at + 1) % regions;
            looks += 1;
            let stripe = self.stripes.of(sweep.at * REGION_BYTES);
            let is_live = |place| self.is_live(place);
            let remembers = |time| self.collector.retention().remembers(now.saturating_sub(time));
            if self.index.is_used(sweep.at) {
                let _state = self.stripes.lock(stripe);
                self.index.sweep(sweep.at, is_live, remembers);
                swept += 1;
            }
        }
    }

    /// Passes a slice of the log. `false`: key_tail has caught up with dirty_tail.
    pub(super) fn collect_slice(&self, gc: &mut Gc, slice: Slice) -> Result<bool, Status> {
        let dirty_tail = match mutants::is(Mutant::CollectDirty) {
            true => self.log.head(),
            false => self.log.dirty_tail(),
        };
        let start = self.log.key_tail();
        let together = gc.together_until.filter(|until| *until != start);
        if let Some(until) = together
            && !self.reaches(gc, start, dirty_tail, until)?
        {
            return Ok(false);
        }
        gc.together_until = None;
        // Unless space is needed, data whose collection was requested is not kept.
        let is_needed = self.is_space_short() || gc.stale_until.is_some();
        gc.keeper.begin_slice(if is_needed { slice.pass } else { Pass::Drop });
        let slice = together.map_or(slice, Slice::until);
        let released_before = self.segments.released();
        let mut passed = Passed { at: start, released_before, ..Passed::default() };
        let walked = self.walk_slice(gc, &slice, dirty_tail, &mut passed);
        if passed.at == start {
            return walked.and(Ok(false));
        }
        if gc.keeper.has_kept() {
            self.signals.arm();
        }
        let is_yielding = slice.pass == Pass::Yield && mutants::is(Mutant::YieldedBeforeKeyTail);
        if mutants::is(Mutant::ReuseBeforeKeyTail) || is_yielding {
            self.recycle()?;
        }
        // The passed part is recorded durably even if the walk failed: its references are gone.
        self.log.set_key_tail(passed.at)?;
        for segment in passed.left_logs {
            self.segments.free_log(segment);
        }
        self.recycle()?;
        walked.and(Ok(true))
    }

    /// The walk of a slice, until it is long enough or reaches dirty_tail.
    fn walk_slice(
        &self,
        gc: &mut Gc,
        slice: &Slice,
        dirty_tail: Position,
        passed: &mut Passed,
    ) -> Result<(), Status> {
        let Gc { reader, keeper, stale_until, .. } = gc;
        let head = self.log.head();
        reader.begin();
        while passed.at != dirty_tail && !self.is_enough(slice, passed) {
            let record = reader.read(&self.media, &self.segments, passed.at, Some(head))?;
            let record = record.ok_or(Status::Corrupt)?;
            let next = after(passed.at, &record);
            match record {
                Record::Last(_) => passed.left_logs.push(passed.at.segment),
                Record::Keys(keys) => {
                    passed.keys += keys.len();
                    self.pass_keys(keys, keeper);
                }
            }
            passed.at = next;
            passed.sets += 1;
            if self.collector.retention().fills_cache() {
                self.count_lap(keeper, passed.at);
            }
            if *stale_until == Some(passed.at) {
                *stale_until = None;
            }
        }
        Ok(())
    }

    fn is_enough(&self, slice: &Slice, passed: &Passed) -> bool {
        if let Some(until) = slice.until {
            return passed.at == until;
        }
        let released = || self.segments.released().saturating_sub(passed.released_before);
        let freed = || released() + passed.left_logs.len();
        passed.sets == slice.sets_max
            || passed.keys >= slice.keys_max
            || slice.freed_max.is_some_and(|max| freed() >= max)
    }

    /// Keys give up their references, after kept data got new ones.
    fn pass_keys(&self, keys: &[Key], keeper: &mut Keeper) {
        if keeper.looks_at_uses() {
            // All cache misses in parallel, not one after the other.
            keys.iter().for_each(|key| self.index.touch(key.off.get()));
        }
        for key in keys {
            let segment = key.segment.get();
            if self.segments.generation(segment) == key.generation.get() {
                self.retain(key, keeper);
                self.segments.release(segment);
            }
        }
        self.counters.collected_keys.fetch_add(keys.len() as u64, Ordering::Relaxed);
    }

    /// Whether `wanted` stands in the log between `from` and `to`.
    fn reaches(
        &self,
        gc: &mut Gc,
        from: Position,
        to: Position,
        wanted: Position,
    ) -> Result<bool, Status> {
        let head = self.log.head();
        let mut at = from;
        gc.reader.begin();
        while at != wanted && at != to {
            let record = gc.reader.read(&self.media, &self.segments, at, Some(head))?;
            at = after(at, &record.ok_or(Status::Corrupt)?);
        }
        Ok(at == wanted)
    }

    pub(super) fn recycle(&self) -> Result<(), Status> {
        let freed = self.segments.recycle(|segment| {
            if let Some(crcs) = &self.crcs {
                crcs.forget(segment);
            }
        })?;
        self.counters.recycled_segments.fetch_add(u64::from(freed), Ordering::Relaxed);
        Ok(())
    }

    /// Whether a waiting write would find room.
    pub(super) fn has_room(&self) -> bool {
        self.segments.free() > LOG_RESERVE + self.collector.write_reserve() && self.log.has_room()
    }

    /// Wakes waiting bios if there is room for them.
    pub(super) fn tell_room(&self) {
        if self.has_room() {
            self.signals.tell_room();
        }
    }
}
