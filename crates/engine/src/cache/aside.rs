//! Dirty blocks that write-back could not copy, by the device that failed.
//!
//! 1. A copy that fails costs its own block only. The others of its batch become clean.
//! 2. The block is set aside. Its next copies come after pauses that grow, in small pieces, and
//!    after blocks that never failed.
//! 3. A block that failed [`TRIES_MAX`] times is bad. Write-back has done all it can when only bad
//!    blocks are dirty.
//! 4. A device that fails [`ROW_MAX`] copies in a row is dead until a copy works. From then on only
//!    [`PROBES`] blocks are tried after each pause.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::retry::Retry;
use crate::units::Nanos;

/// A block that failed this often in a row is bad.
const TRIES_MAX: u32 = 3;
/// A device that failed this many copies in a row is dead.
const ROW_MAX: u32 = 16;
/// Blocks that are tried on a dead device after a pause.
pub(super) const PROBES: usize = 4;

/// The device that failed a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Culprit {
    /// The cache device was to be read.
    Cache,
    /// The origin was to be written.
    Origin,
}

/// The blocks that one device refused.
#[derive(Debug, Default)]
pub(super) struct Refused {
    /// How often in a row the copy of a slot has failed.
    tries: BTreeMap<u32, u32>,
    /// The bad ones that were not tried since a drain began.
    untried: BTreeSet<u32>,
    /// Copies that failed since one worked.
    row: u32,
    retry: Retry,
    retry_at: Nanos,
    /// The device did something since it refused one of these.
    has_worked: bool,
}

impl Refused {
    fn fail(&mut self, slot: u32) {
        self.row = self.row.saturating_add(1);
        self.untried.remove(&slot);
        *self.tries.entry(slot).or_default() += 1;
        self.has_worked &= !self.is_dead();
    }

    fn worked(&mut self) {
        self.row = 0;
        self.has_worked |= !self.tries.is_empty();
    }

    fn forget(&mut self, slot: u32) {
        self.untried.remove(&slot);
        if self.tries.remove(&slot).is_some() && self.tries.is_empty() {
            *self = Refused { row: self.row, ..Refused::default() };
        }
    }

    fn pause(&mut self, now: Nanos) {
        self.retry_at = self.retry.pause_from(now);
    }

    /// Whether it failed every copy for a while.
    pub(super) fn is_dead(&self) -> bool {
        self.row >= ROW_MAX
    }

    /// How many blocks there are.
    pub(super) fn count(&self) -> u32 {
        self.tries.len() as u32
    }

    /// The slots that are bad.
    pub(super) fn bad(&self) -> impl Iterator<Item = u32> {
        self.tries.iter().filter(|(_, tries)| **tries >= TRIES_MAX).map(|(slot, _)| *slot)
    }

    /// Whether the device works, and some of its blocks are bad.
    pub(super) fn has_bad_blocks(&self) -> bool {
        self.has_worked && self.bad().next().is_some()
    }
}

/// The blocks that were set aside.
#[derive(Debug, Default)]
pub(super) struct Aside {
    /// Slots that the cache device did not give.
    pub(super) unread: Refused,
    /// Slots that the origin did not take.
    pub(super) untaken: Refused,
}

impl Aside {
    fn of(&mut self, culprit: Culprit) -> &mut Refused {
        match culprit {
            Culprit::Cache => &mut self.unread,
            Culprit::Origin => &mut self.untaken,
        }
    }

    /// The copy of a slot has failed.
    pub(super) fn fail(&mut self, slot: u32, culprit: Culprit) {
        self.of(culprit).fail(slot);
    }

    /// A client's read of a dirty slot has failed. Clients may read one block again and again, so
    /// this does not count against the device.
    pub(super) fn note_unread(&mut self, slot: u32) {
        *self.unread.tries.entry(slot).or_default() += 1;
    }

    /// A piece of a copy worked.
    pub(super) fn worked(&mut self, culprit: Culprit) {
        self.of(culprit).worked();
    }

    /// A batch has ended in which the device refused something.
    pub(super) fn pause(&mut self, culprit: Culprit, now: Nanos) {
        self.of(culprit).pause(now);
    }

    /// The slot is not dirty any more.
    #[inline]
    pub(super) fn forget(&mut self, slot: u32) {
        if !self.is_empty() {
            self.unread.forget(slot);
            self.untaken.forget(slot);
        }
    }

    /// Whether no block is set aside.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.unread.tries.is_empty() && self.untaken.tries.is_empty()
    }

    /// Whether a slot failed before.
    pub(super) fn has(&self, slot: u32) -> bool {
        self.unread.tries.contains_key(&slot) || self.untaken.tries.contains_key(&slot)
    }

    /// Whether a slot may be copied now.
    pub(super) fn is_due(&self, slot: u32, now: Nanos) -> bool {
        [&self.unread, &self.untaken]
            .iter()
            .all(|of| now >= of.retry_at || !of.is_dead() && !of.tries.contains_key(&slot))
    }

    /// The most blocks that may be copied together.
    pub(super) fn most(&self, most: usize) -> usize {
        if self.unread.is_dead() || self.untaken.is_dead() { most.min(PROBES) } else { most }
    }

    /// When the next of these may be copied.
    pub(super) fn retry_at(&self) -> Option<Nanos> {
        let some = [&self.unread, &self.untaken].into_iter().filter(|of| !of.tries.is_empty());
        some.map(|of| of.retry_at).min()
    }

    /// A drain begins: the next copies begin without a pause, and bad blocks get one more try
    /// before the drain may end without them.
    pub(super) fn end_pauses(&mut self) {
        for of in [&mut self.unread, &mut self.untaken] {
            of.retry_at = 0;
            of.untried = if of.is_dead() { BTreeSet::new() } else { of.bad().collect() };
        }
    }

    /// The origin has served a client: its blocks are tried again without a pause.
    pub(super) fn end_pause_of_origin(&mut self) {
        self.untaken.retry_at = 0;
    }

    /// Whether only bad blocks are left of `dirty` dirty ones, and both devices did all they can.
    /// `counts` returns whether a slot is one of those.
    pub(super) fn is_all(&self, dirty: u32, counts: impl Fn(u32) -> bool) -> bool {
        let mut untried = self.unread.untried.iter().chain(&self.untaken.untried);
        if untried.any(|slot| counts(*slot)) {
            return false;
        }
        let mut slots: Vec<u32> = self.unread.bad().collect();
        if self.untaken.has_worked {
            slots.extend(self.untaken.bad());
        }
        slots.sort_unstable();
        slots.dedup();
        slots.retain(|slot| counts(*slot));
        dirty > 0 && slots.len() as u32 >= dirty
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::SECOND;

    #[test]
    fn one_bad_block_is_told_from_a_dead_device() {
        let mut aside = Aside::default();
        for _ in 0..TRIES_MAX {
            assert!(!aside.is_all(1, |_| true));
            aside.fail(7, Culprit::Origin);
            aside.pause(Culprit::Origin, 0);
        }
        assert!(!aside.is_due(7, 0) && aside.is_due(8, 0) && aside.is_due(7, SECOND));
        assert!(!aside.is_all(1, |_| true), "the origin has not taken anything else");
        aside.worked(Culprit::Origin);
        assert!(
            aside.is_all(1, |_| true)
                && !aside.is_all(2, |_| true)
                && aside.untaken.has_bad_blocks()
        );
        for slot in 0..ROW_MAX {
            aside.fail(slot, Culprit::Origin);
        }
        assert!(aside.untaken.is_dead() && !aside.is_all(1, |_| true) && !aside.is_due(99, 0));
        assert_eq!(aside.most(100), PROBES);
        aside.worked(Culprit::Origin);
        (0..ROW_MAX).for_each(|slot| aside.forget(slot));
        assert!(aside.is_empty() && aside.is_due(7, 0) && aside.retry_at().is_none());
    }

    #[test]
    fn a_drain_tries_bad_blocks_once_more() {
        let mut aside = Aside::default();
        (0..TRIES_MAX).for_each(|_| aside.fail(3, Culprit::Cache));
        assert!(aside.is_all(1, |_| true));
        aside.end_pauses();
        assert!(!aside.is_all(1, |_| true) && aside.is_due(3, 0));
        aside.fail(3, Culprit::Cache);
        assert!(aside.is_all(1, |_| true));
        // A dead device is not tried with each of them.
        (0..ROW_MAX).for_each(|_| aside.fail(3, Culprit::Cache));
        aside.end_pauses();
        assert!(aside.is_all(1, |_| true));
    }

    #[test]
    fn a_block_that_cannot_be_read_needs_no_other_to_be_bad() {
        let mut aside = Aside::default();
        (0..TRIES_MAX).for_each(|_| aside.fail(3, Culprit::Cache));
        assert!(aside.is_all(1, |_| true));
        aside.forget(3);
        assert!(!aside.is_all(1, |_| true) && !aside.is_all(0, |_| true));
    }
}
