//! Dirty blocks that write-back could not read from the cache device.
//!
//! 1. A failed read excludes only its own blocks: the other blocks of the batch are written to the
//!    origin.
//! 2. The blocks of such a read are tried again one by one after growing pauses. A block that
//!    failed [`TRIES_MAX`] times is bad.
//! 3. A device that failed [`ROW_MAX`] reads in a row is dead until a read succeeds. From then on
//!    only [`PROBES`] blocks are tried after each pause.
//!
//! The origin is not involved: its errors belong to the cycle.

use std::collections::BTreeMap;

use crate::base::retry::Retry;
use crate::units::Nanos;

/// A block that failed this often is bad.
const TRIES_MAX: u32 = 3;
/// A device that failed this many reads in a row is dead.
const ROW_MAX: u32 = 16;
/// Blocks of a dead device that are tried after a pause.
pub(super) const PROBES: u64 = 4;

/// The blocks that could not be read.
#[derive(Debug, Default)]
pub(in crate::writecache) struct Unread {
    /// Slots that hold these blocks, with their blocks, and how often each was tried by itself.
    tries: BTreeMap<u32, (u64, u32)>,
    /// Reads that failed since one worked.
    row: u32,
    retry: Retry,
    retry_at: Nanos,
    /// A read failed since the last pause was planned.
    is_new: bool,
}

impl Unread {
    /// A read of a block failed; of several blocks together unless `is_alone`.
    pub(super) fn fail(&mut self, slot: u32, block: u64, is_alone: bool) {
        let (held, tries) = self.tries.entry(slot).or_default();
        if *held != block {
            (*held, *tries) = (block, 0);
        }
        *tries += u32::from(is_alone);
        self.is_new = true;
    }

    /// Counts a read that failed.
    pub(super) fn count_failure(&mut self) {
        self.row = self.row.saturating_add(1);
    }

    /// A read worked.
    pub(super) fn worked(&mut self) {
        self.row = 0;
    }

    /// Forgets the slots for which this is false: they were read, or hold another block.
    pub(super) fn retain(&mut self, mut is_dirty: impl FnMut(u32, u64) -> bool) {
        self.tries.retain(|slot, (block, _)| is_dirty(*slot, *block));
        if self.tries.is_empty() {
            self.retry.succeeded();
            (self.row, self.retry_at) = (0, 0);
        }
    }

    /// Plans the next attempt, if a read failed since the last one was planned. Returns whether it
    /// planned one.
    pub(super) fn plan_retry(&mut self, now: Nanos) -> bool {
        let is_new = std::mem::take(&mut self.is_new);
        if is_new {
            self.retry_at = self.retry.pause_from(now);
        }
        is_new
    }

    /// The next attempt may begin immediately.
    pub(in crate::writecache) fn end_pause(&mut self) {
        self.retry_at = 0;
    }

    /// The time of the next attempt.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        (!self.is_empty()).then_some(self.retry_at)
    }

    /// Whether a slot may be read now.
    pub(super) fn is_due(&self, slot: u32, now: Nanos) -> bool {
        now >= self.retry_at || !self.has(slot) && !self.is_dead()
    }

    /// Whether a slot is to be read by itself.
    pub(super) fn has(&self, slot: u32) -> bool {
        self.tries.contains_key(&slot)
    }

    /// Whether the list of unreadable blocks is empty.
    pub(in crate::writecache) fn is_empty(&self) -> bool {
        self.tries.is_empty()
    }

    /// The number of these blocks.
    pub(in crate::writecache) fn count(&self) -> usize {
        self.tries.len()
    }

    /// Whether the device fails every read.
    pub(in crate::writecache) fn is_dead(&self) -> bool {
        self.row >= ROW_MAX
    }

    /// Whether none of the `dirty` dirty blocks can be read: the device is dead, or each block is
    /// bad.
    pub(in crate::writecache) fn is_all(&self, dirty: u32) -> bool {
        let are_bad = !self.is_empty() && self.count() >= dirty as usize;
        self.is_dead() || are_bad && self.bad().count() == self.count()
    }

    /// The bad blocks.
    pub(in crate::writecache) fn bad(&self) -> impl Iterator<Item = u64> {
        self.tries.values().filter(|(_, tries)| *tries >= TRIES_MAX).map(|(block, _)| *block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_bad_after_three_reads_of_its_own_and_a_device_dead_after_a_row() {
        let mut unread = Unread::default();
        unread.fail(7, 70, false);
        assert!(unread.plan_retry(0) && !unread.plan_retry(0));
        assert!(!unread.is_due(7, 0) && unread.is_due(8, 0));
        for _ in 0..TRIES_MAX {
            assert_eq!(unread.bad().count(), 0);
            unread.fail(7, 70, true);
        }
        assert_eq!(unread.bad().collect::<Vec<_>>(), [70]);
        // The slot holds another block, whose readability is unknown.
        unread.fail(7, 71, false);
        assert_eq!(unread.bad().count(), 0);
        (0..ROW_MAX).for_each(|_| unread.count_failure());
        assert!(unread.is_dead() && !unread.is_due(8, 0) && unread.is_due(8, u64::MAX));
        unread.worked();
        assert!(!unread.is_dead());
        unread.retain(|_, _| false);
        assert!(unread.is_empty() && unread.is_due(7, 0) && unread.deadline().is_none());
    }
}
