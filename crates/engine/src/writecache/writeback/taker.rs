//! Selects the blocks of a stripe for a batch.

#[cfg(feature = "mutants")]
use crate::mutants::{self, Mutant};

use super::unread::Unread;
use super::{BATCH_BLOCKS_MAX, Item, PASSED_MAX, WRITE_BYTES_MAX};
use crate::units::Nanos;
use crate::writecache::Writecache;
use crate::writecache::index::{EPOCHS, Found, Locked, REGION_BYTES, State};
use crate::writecache::plan::AGE_EPOCHS;

/// Takes blocks of one stripe for a batch.
pub(super) struct Taker<'a> {
    pub(super) cache: &'a Writecache,
    pub(super) locked: Locked<'a>,
    pub(super) zeroing: &'a [(u64, u64)],
    pub(super) items: &'a mut Vec<Item>,
    pub(super) unread: &'a Unread,
    pub(super) now: Nanos,
    pub(super) needs_commit: bool,
    pub(super) is_draining: bool,
}

impl Taker<'_> {
    /// Takes `share` blocks, oldest first, and their neighbours; with `has_aged` also all blocks
    /// that are too old.
    pub(super) fn take(&mut self, share: u64, has_aged: bool) {
        let until = self.items.len() as u64 + share;
        let mut passed: Option<u32> = None;
        let mut passed_count = 0;
        while passed_count < PASSED_MAX && (self.items.len() as u64) < BATCH_BLOCKS_MAX {
            let next = match passed {
                Some(slot) => self.locked.next_newer(slot),
                None => self.locked.oldest(),
            };
            let Some(slot) = next else { return };
            let word = self.cache.index.word(slot);
            let is_due =
                (self.items.len() as u64) < until || has_aged && self.is_aged(word.epoch());
            if !is_due {
                return;
            }
            if self.can_take(word.block()) == Some(slot) {
                self.take_run(word.block(), slot);
                continue;
            }
            passed = Some(slot);
            if word.state() == State::Live && !self.unread.is_due(slot, self.now) {
                continue;
            }
            // The block is not committed, or its newer version is not.
            self.needs_commit = true;
            passed_count += 1;
        }
    }

    /// The slot to be written back for a block, if there is one now. `None` while an older version
    /// is in flight, in this batch: it would be unknown which of the two versions reaches the
    /// origin last.
    fn can_take(&self, block: u64) -> Option<u32> {
        #[cfg(feature = "mutants")]
        if let Some(slot) = self.can_take_wrongly(block) {
            return slot;
        }
        let is_moving = |older: Found| older.word.state() == State::Outdated;
        let mut versions = self.locked.versions(block);
        let mut newest = versions.next()?;
        // If a block is written all the time, its committed version would never be the newest one.
        while self.is_draining && newest.word.state().is_uncommitted() {
            newest = versions.next()?;
        }
        let is_committed = newest.word.state() == State::Live;
        let is_free = is_committed
            && self.unread.is_due(newest.slot, self.now)
            && !self.is_zeroed(block)
            && !versions.any(is_moving);
        is_free.then_some(newest.slot)
    }

    /// Whether a discard is zeroing a block.
    fn is_zeroed(&self, block: u64) -> bool {
        self.zeroing.iter().any(|range| (range.0..range.1).contains(&block))
    }

    /// Whether a block is so old that the age limit is near.
    fn is_aged(&self, epoch: u64) -> bool {
        let now = self.cache.background.epoch();
        self.cache.plan.ages_at_once() || (now.wrapping_sub(epoch)) % EPOCHS >= AGE_EPOCHS - 1
    }

    /// Takes a block, and its neighbours before and after.
    fn take_run(&mut self, block: u64, slot: u32) {
        let index = &self.cache.index;
        let max = (WRITE_BYTES_MAX / self.cache.block_bytes()).max(1) as usize;
        let stripe_start = index.region_end(block) - REGION_BYTES / self.cache.block_bytes();
        self.take_one(block, slot);
        let mut count = 1;
        let mut at = block;
        while count < max
            && at > stripe_start
            && let Some(slot) = self.can_take(at - 1)
        {
            at -= 1;
            count += 1;
            self.take_one(at, slot);
        }
        let mut at = block + 1;
        while count < max
            && at < index.region_end(block)
            && let Some(slot) = self.can_take(at)
        {
            self.take_one(at, slot);
            at += 1;
            count += 1;
        }
    }

    fn take_one(&mut self, block: u64, slot: u32) {
        self.locked.remove_age(slot);
        self.locked.set_state(slot, State::Cleaning);
        self.items.push(Item { block, slot });
    }
}

#[cfg(feature = "mutants")]
impl Taker<'_> {
    fn can_take_wrongly(&self, block: u64) -> Option<Option<u32>> {
        let takes_unflushed = mutants::is(Mutant::UnflushedWrittenBack);
        let takes_twice = mutants::is(Mutant::BlockTakenTwice);
        if !takes_unflushed && !takes_twice {
            return None;
        }
        let is_moving = |older: Found| older.word.state() == State::Outdated && !takes_twice;
        let mut versions = self.locked.versions(block);
        let Some(newest) = versions.next() else { return Some(None) };
        let state = newest.word.state();
        let is_taken = state == State::Live || state.is_overwritten() && takes_unflushed;
        let is_free = is_taken && !self.is_zeroed(block) && !versions.any(is_moving);
        Some(is_free.then_some(newest.slot))
    }
}
