//! Drains: writing back the slots that were dirty when the drain began.
//!
//! A slot is awaited until its block is on the origin, durably. If a newer version replaces it
//! before, that version is awaited instead. So at the end the origin has all data that was dirty at
//! the beginning, or newer data. Writes to other blocks are never awaited, so a drain ends even if
//! clients never stop. Two rules keep a block that is written all the time from delaying a drain.
//! First, a version that is being written back stays awaited until its batch has ended, even if
//! there is a newer version by then. Second, write-back takes the newest committed version, even if
//! there is an uncommitted one. Blocks are not overwritten in place meanwhile.

use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Mutex, lock};
use crate::target::Waiting;

use super::Writecache;
use super::index::Locked;

/// Slots that a drain waits for. They change under the lock of their block's stripe.
#[derive(Debug, Default)]
pub(super) struct Awaited {
    /// A bit for each slot; empty before the first drain.
    bits: Mutex<Vec<u64>>,
    count: AtomicU32,
}

impl Awaited {
    /// The number of awaited slots.
    pub(super) fn count(&self) -> u32 {
        self.count.load(Ordering::SeqCst)
    }

    fn begin(&self, slots: u32) {
        let mut bits = lock(&self.bits);
        bits.clear();
        bits.resize(slots.div_ceil(64) as usize, 0);
        self.count.store(0, Ordering::SeqCst);
    }

    fn end(&self) {
        lock(&self.bits).clear();
        self.count.store(0, Ordering::SeqCst);
    }

    fn add(&self, slot: u32) {
        let mut bits = lock(&self.bits);
        if let Some(word) = bits.get_mut(slot as usize / 64) {
            let bit = 1 << (slot % 64);
            self.count.fetch_add(u32::from(*word & bit == 0), Ordering::SeqCst);
            *word |= bit;
        }
    }

    /// The origin has the slot's data. Returns whether the slot was awaited.
    pub(super) fn remove(&self, slot: u32) -> bool {
        if self.count() == 0 {
            return false;
        }
        let mut bits = lock(&self.bits);
        let Some(word) = bits.get_mut(slot as usize / 64) else { return false };
        let bit = 1 << (slot % 64);
        let was_awaited = *word & bit != 0;
        *word &= !bit;
        self.count.fetch_sub(u32::from(was_awaited), Ordering::SeqCst);
        was_awaited
    }

    /// `newer` takes the place of `older`.
    pub(super) fn replace(&self, older: u32, newer: u32) {
        if self.remove(older) && !mutants::is(Mutant::AwaitedForgotten) {
            self.add(newer);
        }
    }
}

impl Writecache {
    /// See [`Target::set_draining`](crate::target::Target::set_draining).
    pub(super) fn order_drain(&self, is_draining: bool) {
        if is_draining {
            // First: from here on no block is overwritten in its place.
            self.orders.set_draining(true);
            self.background.lock().end_pause();
            self.orders.awaited.begin(self.index.slots());
            (0..self.index.slots()).for_each(|slot| self.await_slot(slot));
        } else {
            self.orders.awaited.end();
            self.orders.set_draining(false);
        }
        self.events.work();
    }

    fn await_slot(&self, slot: u32) {
        let Some(block) = self.index.dirty_block(slot) else { return };
        let _locked = self.index.lock_of(block);
        if self.index.dirty_block(slot) == Some(block) {
            self.orders.awaited.add(slot);
        }
    }

    /// See [`Target::left_to_drain`](crate::target::Target::left_to_drain).
    pub(super) fn bytes_to_drain(&self) -> u64 {
        let count = if self.orders.is_draining() {
            self.orders.awaited.count()
        } else {
            self.index.dirty()
        };
        u64::from(count) * self.block_bytes()
    }

    /// See [`Target::waits_for`](crate::target::Target::waits_for).
    pub(super) fn awaited_device(&self) -> Option<Waiting> {
        let of_writeback = self.background.lock().writeback().waits_for();
        let of_commit = || (!self.commits.is_idle()).then_some("the cache device");
        let device = of_writeback.or_else(of_commit)?;
        Some(Waiting { device, ended: self.counts.ended.load(Ordering::Relaxed) })
    }

    /// A slot for which a drain may wait is given up: its block's newest version is awaited
    /// instead. The stripe is locked.
    pub(super) fn await_newest(&self, locked: &Locked<'_>, slot: u32) {
        let newest = locked.newest(self.index.word(slot).block());
        if let Some(newest) = newest.filter(|newest| newest.slot != slot) {
            self.orders.awaited.replace(slot, newest.slot);
        }
    }
}
