//! Dirty sectors: the sectors of dirty slots that are newer than the origin. Write-back copies only
//! those: if 4 KiB of a 256 KiB block were written, it copies 4 KiB.
//!
//! 1. A slot is listed from the write that makes it dirty until it is clean. A dirty slot that is
//!    not listed is dirty as a whole: the medium only names blocks, so after a start all dirty
//!    slots are.
//! 2. Listed sectors remain listed until all of them are durable on the origin.
//! 3. The list is bounded. If it is full, a slot is dirty as a whole.

use std::ops::Range;

use crate::mutants::{self, Mutant};

use super::keys::{self, Keys};
use super::ranges::Ranges;

/// Most slots that are listed.
pub(super) const PARTS_MAX: usize = 1 << 16;

/// The dirty sectors of slots.
#[derive(Debug)]
pub(super) struct Parts {
    slots: Keys,
    ranges: Vec<Ranges>,
}

impl Parts {
    /// No slots, of this many.
    pub(super) fn new(slots: u64) -> Parts {
        Parts { slots: Keys::new(slots), ranges: Vec::new() }
    }

    fn find(&self, slot: u32) -> Option<usize> {
        self.slots.find(slot.into())
    }

    /// Sectors of a slot that was clean are dirty now.
    pub(super) fn begin(&mut self, slot: u32, sectors: Range<u32>) {
        match self.find(slot) {
            Some(place) => self.ranges[place] = Ranges::of(sectors),
            None if self.ranges.len() == PARTS_MAX => {}
            None => {
                self.slots.push(slot.into());
                keys::push(&mut self.ranges, Ranges::of(sectors));
            }
        }
    }

    /// Sectors of a slot are dirty that was dirty before.
    #[inline]
    pub(super) fn add(&mut self, slot: u32, sectors: Range<u32>) {
        if mutants::is(Mutant::PartUnseen) {
            return;
        }
        if mutants::is(Mutant::WholeTakenForPart) && self.find(slot).is_none() {
            return self.begin(slot, sectors);
        }
        if let Some(place) = self.find(slot) {
            self.ranges[place].cover(sectors);
        }
    }

    /// The slot is clean, or dirty as a whole.
    pub(super) fn forget(&mut self, slot: u32) {
        if let Some(place) = self.find(slot) {
            self.slots.remove(slot.into(), place);
            keys::remove(&mut self.ranges, &self.slots, place);
        }
    }

    /// The dirty sectors of a dirty slot; `None`: all of it.
    pub(super) fn get(&self, slot: u32) -> Option<&Ranges> {
        self.find(slot).map(|place| &self.ranges[place])
    }

    /// Deliberate bug: sectors that are being copied count as copied.
    pub(super) fn empty(&mut self, slot: u32) {
        if let Some(place) = self.find(slot) {
            self.ranges[place] = Ranges::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_room_in_the_list_is_dirty_as_a_whole() {
        let mut parts = Parts::new(1 << 20);
        (0..PARTS_MAX as u32 + 10).for_each(|slot| parts.begin(slot, 0..8));
        assert_eq!(parts.ranges.len(), PARTS_MAX);
        let late = PARTS_MAX as u32;
        parts.add(late, 8..16);
        assert_eq!(parts.get(late), None);
        parts.add(3, 8..16);
        assert_eq!(parts.get(3), Some(&Ranges::of(0..16)));
        parts.forget(3);
        parts.add(3, 0..8);
        assert_eq!(parts.get(3), None, "it may be dirty as a whole");
    }
}
