//! The effects of a commit on the blocks: slots become free or writable, and marks are removed.

use crate::mutants::{self, Mutant};

use super::blocks::Blocks;
use super::changes::Changes;
use super::metadata::bits::{Bits, words_of};

impl Blocks {
    /// Whether the medium says of clean slots that they are dirty.
    pub(super) fn has_marks(&self) -> bool {
        let words = 0..words_of(self.slots.count().into());
        let is_more = |word| self.slots.marked_word(word) & !self.slots.dirty().word(word) != 0;
        words.into_iter().any(is_more)
    }

    /// A commit with `changes` is durable, and marked the slots of these words.
    pub(super) fn committed(&mut self, changes: &Changes, wanted: &[(u64, u64)]) {
        for &slot in &changes.fresh {
            if self.slots.block(slot).is_some() {
                self.slots.settle(slot);
            }
        }
        self.mark(wanted);
        self.changes.committed();
        if mutants::is(Mutant::FreedEarly) {
            return;
        }
        changes.retired.iter().for_each(|slot| self.slots.give_back(*slot));
        for &(slot, block) in &changes.leaving {
            self.slots.give_back(slot);
            self.in_flight.end_move(block);
        }
    }

    /// The medium has these slots marked as dirty.
    pub(super) fn mark(&mut self, wanted: &[(u64, u64)]) {
        for &(word, bits) in wanted {
            let mapped = self.slots.mapped_word(word);
            self.slots.put_marked(word, self.slots.marked_word(word) | bits & mapped);
            self.touched[0].set(word);
        }
    }

    /// Removes the marks of slots that are clean and were not written to recently; or of all clean
    /// slots with `is_all`. Data must be flushed before the commit.
    pub(super) fn tidy(&mut self, is_all: bool) {
        let mut written = Bits::new(u64::from(self.slots.count()));
        let blocks: Vec<u64> = self.in_flight.written().collect();
        let slots = blocks.into_iter().filter_map(|block| self.slots.find(block));
        slots
            .filter(|_| !mutants::is(Mutant::ClearedUnderWrite))
            .for_each(|slot| written.set(slot.into()));
        for word in 0..words_of(self.slots.count().into()) {
            let is_cold = self.touched.iter().all(|touched| !touched.is_set(word));
            let before = self.slots.marked_word(word);
            let after = before & (self.slots.dirty().word(word) | written.word(word));
            if after != before && (is_cold || is_all) {
                self.slots.put_marked(word, after);
                self.changes.note_word(word);
                self.changes.cleared.push((word, before & !after));
            }
        }
        self.touched.swap(0, 1);
        self.touched[0].clear_all();
    }
}
