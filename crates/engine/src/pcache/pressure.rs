//! Space for writes that would have to wait.
//!
//! Clean data is space that can be freed, but the log frees it in its own order: a segment is
//! reused when key_tail has passed all keys that name it, and key_tail never passes dirty_tail. So
//! data that is kept in its place, with its key logged again at the head, cannot be dropped before
//! all dirty data before that key is on the backing device. As long as write-back keeps up that is
//! soon, and retention decides which data is kept. When write-back does not keep up, every key that
//! is kept takes space from a burst of writes. Then hot data *yields*: collection drops all data
//! that it passes, in the window and in the main part, except for the hottest, an eighth of it at
//! most, which it moves into few segments. So almost all clean data can be freed at the speed of
//! memory, and the most used data is dropped last. Reads get no space in this way: read misses are
//! cached only while there are free segments to spare.
//!
//! The background begins to collect when few segments are free. If it does not run in time, because
//! writers use every processor, the write that takes the last segment does a piece of collection
//! itself, and so does a write that finds no space at all. A piece is enough to free one segment,
//! never more than [`PIECE_KEYS`] keys, and each request does it at most once. Media that the
//! kernel syncs are left to the background: a sync would take longest.

use crate::mutants::{self, Mutant};
use crate::pmem::Persistence;
use crate::sync::atomic::Ordering;
use crate::units::BLOCK;

use super::Pcache;
use super::gc::{Gc, Slice};
use super::retain::Pass;
use super::segment::LOG_RESERVE;

/// Hot data yields when this part (1 / n) of the segments without dirty data has kept data whose
/// keys are after dirty ones.
const PINNED_SHARE: u64 = 8;
/// And when this part (1 / n) of the cache's data space is dirty, which is more than the batch or
/// two that are always in flight.
const DIRTY_SHARE: u64 = 32;

impl Pcache {
    /// Whether no more data can be kept after dirty keys without delaying writes.
    pub(super) fn is_behind(&self) -> bool {
        let room = self.segments.blocks() * BLOCK;
        self.kept_behind() >= 100 && self.stripes.dirty_bytes() > room / DIRTY_SHARE
    }

    /// The segments that have data kept after dirty keys, in percent of the most that may. A single
    /// block keeps its whole segment.
    pub(super) fn kept_behind(&self) -> u64 {
        let segment_bytes = u64::from(self.media.geometry.data_bytes());
        let dirty = self.stripes.dirty_bytes() / segment_bytes;
        let clean = u64::from(self.segments.used()).saturating_sub(dirty);
        let pinned = u64::from(self.collector.pinned());
        100 * pinned / (clean / PINNED_SHARE).max(1)
    }

    /// Counts the segments with kept data whose keys are after dirty_tail.
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

    /// A write has taken space. If it took the last segment, it collects a piece for the next
    /// write.
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

    /// Does a piece of collection for a write. Returns whether there is free space now.
    pub(super) fn collect_piece(&self) -> bool {
        let is_slow = self.media.pmem.medium().persistence == Persistence::Msync;
        // A replay in progress needs the log in its present state.
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

    /// Wakes the background when few segments are free, or when much data may be dirty: once for
    /// each segment taken.
    pub(super) fn look_at_space(&self) {
        let used = self.segments.used();
        self.signals.note_used(used, used >= self.gc_threshold());
        self.collect_ahead();
    }
}
