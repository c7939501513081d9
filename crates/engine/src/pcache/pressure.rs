//! Room for writes that would have to wait.
//!
//! Clean data is room, but the log gives it back in its own order: a segment is reused when
//! key_tail has passed all keys that name it, and key_tail never passes dirty_tail. So data that is
//! kept in its place, its key logged again at the head, cannot be given up before everything dirty
//! in front of that key is on the backing device. As long as write-back keeps up that is soon, and
//! retention decides what stays. When it does not, every key that is kept is room that a burst of
//! writes cannot have. From there on hot data *yields*: collection drops what it passes, in the
//! window and in the main part, and moves only the hottest, an eighth of it at most, into few
//! segments. So almost all clean data is room at the speed of memory, and the most used data is
//! dropped last. Reads get no room that way: what they miss is cached only while there are free
//! segments to spare.
//!
//! The background collects, from the moment when few segments are free. If it does not run in time,
//! because writers have every processor, the write that takes the last segment does a piece of
//! collection itself, and so does one that finds no space at all: enough to free one segment, never
//! more than [`PIECE_KEYS`] keys, and once in the life of each request. Media that are synced by
//! the kernel are left to the background: a sync would take longest.

use crate::mutants::{self, Mutant};
use crate::pmem::Persistence;
use crate::sync::atomic::Ordering;
use crate::units::BLOCK;

use super::Pcache;
use super::background::Work;
use super::gc::Gc;
use super::layout::Position;
use super::retain::Pass;
use super::segment::LOG_RESERVE;

/// Key sets passed before key_tail is stored.
const SLICE_SETS: usize = 64;
/// Most keys passed before key_tail is stored, when hot data is kept: no more is dropped than is
/// needed, and keys that are logged again soon free the place where they stood.
const KEPT_KEYS_MAX: usize = 32;
/// But a slice is a small part (1 / n) of a small cache.
const KEPT_SHARE: u64 = 256;
/// Most keys that a write passes: what a segment full of blocks has, twice.
pub(super) const PIECE_KEYS: usize = 8 << 10;
/// Hot data yields when this part (1 / n) of the segments without dirty data has data that is kept
/// and whose keys stand after dirty ones.
const PINNED_SHARE: u64 = 8;
/// And this part (1 / n) of the cache's room for data is dirty: more than the batch or two that are
/// always in flight.
const DIRTY_SHARE: u64 = 32;

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
    fn piece(pass: Pass) -> Slice {
        let (sets_max, keys_max) = (usize::MAX, PIECE_KEYS);
        Slice { pass, sets_max, keys_max, freed_max: Some(1), until: None }
    }

    /// Passes everything up to `until` in one step.
    pub(super) fn until(until: Position) -> Slice {
        let (sets_max, keys_max) = (usize::MAX, usize::MAX);
        Slice { pass: Pass::Keep, sets_max, keys_max, freed_max: None, until: Some(until) }
    }
}

impl Pcache {
    /// Whether no more data can be kept after dirty keys, or writes would wait.
    pub(super) fn is_behind(&self) -> bool {
        let room = self.segments.blocks() * BLOCK;
        self.kept_behind() >= 100 && self.stripes.dirty_bytes() > room / DIRTY_SHARE
    }

    /// The segments that have data kept after dirty keys, in percent of those that may. A single
    /// block keeps its whole segment.
    pub(super) fn kept_behind(&self) -> u64 {
        let segment_bytes = u64::from(self.media.geometry.data_bytes());
        let dirty = self.stripes.dirty_bytes() / segment_bytes;
        let clean = u64::from(self.segments.used()).saturating_sub(dirty);
        let pinned = u64::from(self.collector.pinned());
        100 * pinned / (clean / PINNED_SHARE).max(1)
    }

    /// Counts the segments with data whose kept keys stand after dirty_tail.
    pub(super) fn count_pinned(&self) {
        let (_, passed) = self.log.keys();
        self.collector.set_pinned(self.segments.kept_since(passed));
    }

    /// Data of a segment is kept in its place.
    pub(super) fn note_pinned(&self, segment: u32) {
        let (logged, passed) = self.log.keys();
        // The key itself is not logged yet.
        if self.segments.note_kept(segment, logged + 1) <= passed {
            self.collector.add_pinned();
        }
    }

    /// A write has taken space. If that was the last segment, it collects a piece for the next one.
    pub(super) fn collect_ahead(&self) {
        if self.segments.free() > LOG_RESERVE + self.collector.write_reserve() {
            return;
        }
        // Once for each segment taken.
        let used = self.segments.used();
        if self.signals.is_help_due(used) {
            self.collect_piece();
        }
    }

    /// Does a piece of collection for a write. Returns whether there is room now.
    pub(super) fn collect_piece(&self) -> bool {
        let is_slow = self.media.pmem.medium().persistence == Persistence::Msync;
        // What is still to be replayed needs the log as it is.
        let is_replaying = self.is_replaying() && !mutants::is(Mutant::CollectedBeforeReplayed);
        if is_replaying || is_slow || self.background.is_suspended() {
            return false;
        }
        if mutants::is(Mutant::PieceUnlocked) {
            let passed = self.collect_slice(&mut Gc::default(), Slice::piece(Pass::Yield));
            return passed.is_ok() && self.has_room();
        }
        // Another thread is making room.
        let Some(mut gc) = self.collector.try_lock() else { return false };
        if gc.is_stuck() || gc.passes_together() {
            return false;
        }
        if self.segments.has_released() && self.recycle().is_err() {
            gc.stop();
        }
        if self.has_room() {
            return true;
        }
        let pass = if self.collector.retention().fills_cache() { Pass::Yield } else { Pass::Drop };
        if self.collect_slice(&mut gc, Slice::piece(pass)).is_err() {
            gc.stop();
        }
        drop(gc);
        self.counters.helped.fetch_add(1, Ordering::Relaxed);
        self.tell_room();
        self.has_room()
    }

    /// Wakes the background when few segments are free, or when much may be dirty: once for each
    /// segment taken.
    pub(super) fn look_at_space(&self) {
        let used = self.segments.used();
        self.signals.note_used(used, used >= self.gc_threshold());
        self.collect_ahead();
    }

    /// When no room can be made any more, waiting is useless.
    pub(super) fn give_up_if_hopeless(&self, work: &Work) {
        let has_failed_long = work.writeback.retry().is_hopeless(work.now);
        let is_stuck = work.writeback.is_stuck() || self.collector.lock().is_stuck();
        if has_failed_long || is_stuck || self.log.has_failed() {
            self.signals.room().give_up();
        }
    }
}
