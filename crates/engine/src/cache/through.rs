//! Blocks that the origin also has: their treatment when the cache device fails.
//!
//! 1. In `writethrough` and `passthrough` without dirty blocks, the origin has all data. The medium
//!    records this, durably ([`Superblock`](super::metadata::Superblock)), before any decision
//!    relies on it. No later server trusts the mappings of a server that died, and an orderly stop
//!    removes the mark.
//! 2. Under that mark, no request fails because of the cache device. A slot that could not be
//!    written is given up. While commits fail, a write goes to the origin, and memory forgets the
//!    slot. After a failed flush of the cache device, every request goes to the origin.
//! 3. Without the mark, a slot that could not be written is given up by a commit, before the client
//!    gets its answer. This applies while dirty blocks of an earlier table are written back.
//! 4. A read that begins while a block is written through goes to the origin: no client sees data
//!    that a failed write or the death of the server takes back.

use super::args::Mode;
use super::blocks::{Blocks, Claim, Way};
use crate::error::Status;
use crate::mutants::{self, Mutant};

impl Blocks {
    /// Whether the medium is to record that its mappings must not be trusted.
    pub(super) fn wants_mark(&self) -> bool {
        self.mode != Mode::Writeback && self.slots.dirty_count() == 0
    }

    /// Whether the medium is to get that mark, or to lose it.
    pub(super) fn is_mark_due(&self) -> bool {
        !self.trouble.has_lost && self.wants_mark() != self.trouble.is_untrusted
    }

    /// A write that the origin takes alone, if it may.
    pub(super) fn go_below(&mut self, block: u64) -> Claim {
        if !self.trouble.is_untrusted {
            return Claim::Fail(Status::Io);
        }
        self.in_flight.begin_request(block, true);
        Claim::Go(Way::Origin)
    }

    /// The same while no commit can remove the block's mapping: memory forgets it.
    pub(super) fn pass_by(&mut self, block: u64, slot: u32) -> Claim {
        if self.trouble.is_untrusted {
            if !self.in_flight.is_quiet(block) {
                return self.wait(block);
            }
            self.retire(block, slot);
        }
        self.go_below(block)
    }

    /// A slot is given up that the medium cannot forget now. A commit makes it free.
    fn retire(&mut self, block: u64, slot: u32) {
        self.unname(block, slot);
        self.changes.retired.push(slot);
    }

    /// A write that waits until its block has left.
    pub(super) fn leave_first(&mut self, block: u64, slot: u32) -> Claim {
        if self.trouble.is_stuck {
            return self.pass_by(block, slot);
        }
        if !self.in_flight.is_quiet(block) {
            return self.wait(block);
        }
        self.leave(block, slot);
        self.in_flight.wait(block);
        Claim::Commit
    }

    #[inline]
    pub(super) fn is_unreadable(&self, slot: u32) -> bool {
        !self.suspects.slots.is_empty()
            && self.suspects.slots.contains(&slot)
            && (!self.slots.is_dirty(slot) || mutants::is(Mutant::StaleFallback))
    }

    /// Whether a write goes to the slot and to the origin. Until both have it, only the origin's
    /// data may be read: it is what remains if the write fails or the server dies.
    #[inline]
    pub(super) fn is_written_through(&self, block: u64, slot: u32) -> bool {
        self.mode == Mode::Writethrough
            && !self.slots.is_dirty(slot)
            && self.in_flight.has_writers(block)
            && !mutants::is(Mutant::ThroughReadEarly)
    }

    /// A read of a block whose slot must not be used, and that is the same on the origin.
    pub(super) fn read_below(&mut self, block: u64, slot: u32) -> Claim {
        if self.in_flight.is_quiet(block) && !self.trouble.is_stuck {
            self.leave(block, slot);
            self.has_work = true;
        }
        self.stats.read_misses += 1;
        self.in_flight.begin_request(block, false);
        Claim::Go(Way::Origin)
    }

    /// A slot could not be read. Whether the origin has the same.
    pub(super) fn cannot_read(&mut self, block: u64, slot: u32) -> bool {
        if self.slots.partials.slot(block) == Some(slot) {
            self.slots.partials.forget(block);
            return true;
        }
        let is_older = self.slots.is_dirty(slot) && !mutants::is(Mutant::StaleFallback);
        let is_there = self.slots.block(slot) == Some(block);
        if is_older && is_there {
            self.slots.aside.note_unread(slot);
        }
        if is_older || !is_there || self.trouble.has_lost {
            return false;
        }
        self.suspects.slots.insert(slot);
        true
    }

    /// A write through a clean slot failed on one of its devices: the slot is not used any more.
    pub(super) fn cannot_write(&mut self, block: u64, slot: u32) {
        if self.slots.block(slot) == Some(block) && !self.slots.is_dirty(slot) {
            self.suspects.slots.insert(slot);
            self.has_work = true;
        }
    }

    /// Slots that failed are given up, as soon as no I/O is in flight there.
    pub(super) fn leave_unreadable(&mut self) {
        let slots: Vec<u32> = self.suspects.slots.iter().copied().collect();
        for slot in slots {
            let Some(block) =
                self.slots.block(slot).filter(|block| self.in_flight.is_quiet(*block))
            else {
                continue;
            };
            if !self.slots.is_dirty(slot) {
                self.leave(block, slot);
            }
        }
    }

    /// Whether the cache device keeps dirty data to itself.
    pub(super) fn cannot_give_back(&self) -> bool {
        let unread = &self.slots.aside.unread;
        unread.is_dead() && unread.count() > 0 || unread.bad().next().is_some()
    }
}
