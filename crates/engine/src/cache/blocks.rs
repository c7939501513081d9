//! The blocks of the origin, under one lock: where each is, what is under way there, and whether a
//! request may go on. The lock is held for a look, never during I/O or while data is copied.
//!
//! 1. A slot is written to when the medium says that it is dirty, and not before.
//! 2. A block that moves is read where it is right: what has not come yet, and what has begun to
//!    leave, at the origin.
//! 3. A write of a block that leaves waits until the medium has forgotten the slot.
//! 4. A clean slot that cannot be read is not used any more: its block is read at the origin, and
//!    leaves as soon as nothing is under way there.
//! 5. What a write brought into a new slot is read when the medium has its mapping, and zeroes
//!    below a slot when it has forgotten that: earlier, a death would take back what was seen.

use std::collections::HashSet;

use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::Arc;

use super::args::Mode;
use super::changes::Changes;
use super::metadata::bits::{Bits, words_of};
use super::policy::{Admission, Fill, Miss, Policy, Uses};
use super::slots::Slots;
use super::traffic::{Mover, Traffic};

/// Where a request goes with a part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// To the origin.
    Origin,
    /// To a slot.
    Slot(u32),
    /// To a slot and to the origin.
    Both(u32),
    /// A write of a whole block, to a slot that will hold it.
    New(u32),
    /// To the origin. The data goes to a slot that has a part of the block, after the answer.
    Fill {
        /// The slot.
        slot: u32,
        /// Number of the fill.
        id: u32,
    },
    /// Zeroes of a whole block, to the origin below a slot, which is given up then.
    Below(u32),
}

/// Whether a request may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// It may.
    Go(Way),
    /// When something that is under way there has ended.
    Wait,
    /// After the next commit.
    Commit,
    /// Never.
    Fail(Status),
}

/// What is wrong with the devices.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trouble {
    /// The cache device lost what it had said it has.
    pub(super) has_lost: bool,
    /// Commits fail.
    pub(super) is_stuck: bool,
    /// How often the origin lost what it had said it has; it may still show that.
    pub(super) doubts: u64,
}

/// The kernel's counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stats {
    pub(super) read_hits: u64,
    pub(super) read_misses: u64,
    pub(super) write_hits: u64,
    pub(super) write_misses: u64,
    pub(super) promotions: u64,
    pub(super) demotions: u64,
}

/// The blocks.
#[derive(Debug)]
pub(super) struct Blocks {
    pub(super) slots: Slots,
    pub(super) traffic: Traffic,
    pub(super) changes: Changes,
    pub(super) policy: Box<dyn Policy>,
    pub(super) stats: Stats,
    pub(super) trouble: Trouble,
    /// Something may be copied for blocks that come.
    pub(super) may_copy: bool,
    /// A block found no free slot.
    pub(super) wants_room: bool,
    /// Something for the background came.
    pub(super) has_work: bool,
    /// Commits that have begun.
    pub(super) rounds: u64,
    uses: Arc<Uses>,
    mode: Mode,
    admits: bool,
    /// Words of slots that were written to since the last look, and before.
    pub(super) touched: [Bits; 2],
    /// Slots that could not be read when they were clean.
    unreadable: HashSet<u32>,
}

impl Blocks {
    /// `admits`: blocks may come.
    pub(super) fn new(
        slots: Slots,
        version: u32,
        policy: Box<dyn Policy>,
        uses: Arc<Uses>,
        mode: Mode,
        admits: bool,
    ) -> Blocks {
        let count = u64::from(slots.count());
        let touched = Bits::new(words_of(count));
        Blocks {
            slots,
            traffic: Traffic::default(),
            changes: Changes::new(version, count),
            policy,
            stats: Stats::default(),
            trouble: Trouble::default(),
            may_copy: true,
            wants_room: false,
            has_work: false,
            rounds: 0,
            uses,
            mode,
            admits,
            touched: [touched.clone(), touched],
            unreadable: HashSet::new(),
        }
    }

    /// A read of a part of a block.
    #[inline]
    pub(super) fn read(&mut self, miss: &Miss) -> Claim {
        let block = miss.block;
        if let Some(slot) = self.slots.find(block) {
            if self.traffic.mover(block) == Some(Mover::Zeroing) {
                return self.wait(block);
            }
            let is_lost = self.trouble.has_lost && self.slots.is_dirty(slot);
            if is_lost && !mutants::is(Mutant::LossServed) {
                return Claim::Fail(Status::Io);
            }
            if self.is_unsettled(slot) {
                return self.commit_first();
            }
            if self.is_unreadable(slot) {
                return self.read_below(block, slot);
            }
            self.stats.read_hits += 1;
            self.touch(slot);
            self.traffic.begin_request(block, false);
            let passes = self.mode == Mode::Passthrough || self.trouble.has_lost;
            return Claim::Go(if passes { Way::Origin } else { Way::Slot(slot) });
        }
        if self.traffic.mover(block) == Some(Mover::Zeroed)
            && !mutants::is(Mutant::UnsettledZeroesSeen)
        {
            return self.commit_first();
        }
        let way = match self.read_in_part(miss) {
            Some(way) => way,
            None => {
                self.stats.read_misses += 1;
                let fill = self.ask(miss);
                fill.map_or(Way::Origin, |fill| self.enter_in_part(miss, fill))
            }
        };
        self.traffic.begin_request(block, false);
        Claim::Go(way)
    }

    /// A write of a part of a block. `is_whole`: it has data for all of it.
    #[inline]
    pub(super) fn write(&mut self, miss: &Miss, is_whole: bool) -> Claim {
        match self.slots.find(miss.block) {
            Some(slot) => self.write_hit(miss, slot),
            None => self.write_miss(miss, is_whole),
        }
    }

    fn write_hit(&mut self, miss: &Miss, slot: u32) -> Claim {
        let block = miss.block;
        let mover = self.traffic.mover(block);
        if self.trouble.has_lost {
            return Claim::Fail(Status::Io);
        }
        if mover == Some(Mover::Zeroing) {
            return self.wait(block);
        }
        if self.mode == Mode::Passthrough {
            if mutants::is(Mutant::PassthroughKept) {
                self.traffic.begin_request(block, true);
                return Claim::Go(Way::Origin);
            }
            return self.invalidate(block, slot);
        }
        if self.is_unreadable(slot) {
            return self.leave_first(block, slot);
        }
        if !self.slots.is_writable(slot) && !mutants::is(Mutant::WrittenUnmarked) {
            if !self.trouble.is_stuck {
                self.changes.want(slot);
            }
            return self.commit_first();
        }
        let goes_through = self.mode == Mode::Writethrough && !self.slots.is_dirty(slot);
        // The last write of two must be the last one on both devices.
        if goes_through && self.traffic.has_writers(block) && !mutants::is(Mutant::ThroughUnordered)
        {
            return self.wait(block);
        }
        let is_seen = !mutants::is(Mutant::RewriteUnseen) && !mutants::is(Mutant::RewriteSeenLate);
        if matches!(mover, Some(Mover::Cleaning { .. })) && is_seen {
            self.traffic.change_move(block, Mover::Cleaning { is_rewritten: true });
        }
        self.stats.write_hits += 1;
        self.touch(slot);
        self.touched[0].set(u64::from(slot) / 64);
        self.traffic.begin_request(block, true);
        if goes_through {
            return Claim::Go(Way::Both(slot));
        }
        if self.slots.soil_part(slot, miss.sectors()) {
            self.policy.set_dirty(slot, true);
            self.has_work |= self.slots.dirty_count() == 1;
        }
        Claim::Go(Way::Slot(slot))
    }

    fn write_miss(&mut self, miss: &Miss, is_whole: bool) -> Claim {
        let block = miss.block;
        if is_whole && let Some(slot) = self.end_part_for_whole(block) {
            self.traffic.begin_move(block, Mover::Overwrite);
            self.traffic.begin_request(block, true);
            return Claim::Go(Way::New(slot));
        }
        if let Some(way) = self.write_in_part(miss, true) {
            self.traffic.begin_request(block, true);
            return Claim::Go(way);
        }
        match self.traffic.mover(block) {
            Some(Mover::Leaving | Mover::Zeroed) if !mutants::is(Mutant::LeavingWritten) => {
                return match self.trouble.is_stuck {
                    true => Claim::Fail(Status::Io),
                    false => self.wait(block),
                };
            }
            Some(Mover::Overwrite) => return self.wait(block),
            _ => {}
        }
        self.stats.write_misses = self.stats.write_misses.wrapping_add(1);
        let enters = self.ask(miss);
        let may_be_new = is_whole && enters.is_some() && self.mode == Mode::Writeback;
        if may_be_new && self.traffic.is_quiet(block) {
            if let Some(slot) = self.slots.take() {
                self.traffic.begin_move(block, Mover::Overwrite);
                self.traffic.begin_request(block, true);
                return Claim::Go(Way::New(slot));
            }
            self.wants_room = true;
            self.has_work = true;
        }
        let way = enters.map_or(Way::Origin, |fill| self.enter_in_part(miss, fill));
        self.traffic.begin_request(block, true);
        Claim::Go(way)
    }

    /// Zeroes for a part of a block. `is_whole`: for all of it.
    pub(super) fn zero(&mut self, miss: &Miss, is_whole: bool) -> Claim {
        let block = miss.block;
        let found = self.slots.find(block);
        if found.is_some() && self.trouble.has_lost {
            return Claim::Fail(Status::Io);
        }
        match found {
            Some(slot) if is_whole && self.mode != Mode::Passthrough => {
                if self.trouble.is_stuck {
                    return Claim::Fail(Status::Io);
                }
                if !self.traffic.is_quiet(block) {
                    return self.wait(block);
                }
                if !self.slots.is_dirty(slot) && !mutants::is(Mutant::ZeroedBelowClean) {
                    // The medium may say that the slot equals the origin, so it goes first.
                    self.leave(block, slot);
                    self.traffic.wait(block);
                    return Claim::Commit;
                }
                self.traffic.begin_move(block, Mover::Zeroing);
                self.traffic.begin_request(block, true);
                Claim::Go(Way::Below(slot))
            }
            Some(slot) if mutants::is(Mutant::ZeroesUnseen) => {
                self.write_hit(&Miss { len: 512, ..*miss }, slot)
            }
            Some(slot) => self.write_hit(miss, slot),
            None => match self.traffic.mover(block) {
                Some(Mover::Leaving | Mover::Zeroed) if self.trouble.is_stuck => {
                    Claim::Fail(Status::Io)
                }
                Some(Mover::Leaving | Mover::Zeroed | Mover::Overwrite) => self.wait(block),
                _ => {
                    let way = self.write_in_part(miss, false).unwrap_or(Way::Origin);
                    self.traffic.begin_request(block, true);
                    Claim::Go(way)
                }
            },
        }
    }

    /// In passthrough a write hit gives the slot up, and comes again as a miss.
    fn invalidate(&mut self, block: u64, slot: u32) -> Claim {
        let claim = self.leave_first(block, slot);
        if claim == Claim::Commit {
            self.stats.write_hits += 1;
            // It comes again, as a miss.
            self.stats.write_misses = self.stats.write_misses.wrapping_sub(1);
        }
        claim
    }

    /// A write that waits until its block has left.
    fn leave_first(&mut self, block: u64, slot: u32) -> Claim {
        if self.trouble.is_stuck {
            return Claim::Fail(Status::Io);
        }
        if !self.traffic.is_quiet(block) {
            return self.wait(block);
        }
        self.leave(block, slot);
        self.traffic.wait(block);
        Claim::Commit
    }

    /// Whether a slot has what a write brought that waits for a commit. Without the commit the
    /// death of the server takes that back, and nobody may have seen it.
    #[inline]
    fn is_unsettled(&self, slot: u32) -> bool {
        self.slots.is_fresh(slot)
            && self.slots.is_dirty(slot)
            && !mutants::is(Mutant::UnsettledSeen)
    }

    /// A request that waits for the next commit, if there will be one.
    fn commit_first(&self) -> Claim {
        if self.trouble.is_stuck { Claim::Fail(Status::Io) } else { Claim::Commit }
    }

    #[inline]
    fn is_unreadable(&self, slot: u32) -> bool {
        !self.unreadable.is_empty()
            && self.unreadable.contains(&slot)
            && (!self.slots.is_dirty(slot) || mutants::is(Mutant::StaleFallback))
    }

    /// A read of a block whose slot cannot be read, and that is the same at the origin.
    fn read_below(&mut self, block: u64, slot: u32) -> Claim {
        if self.traffic.is_quiet(block) && !self.trouble.is_stuck {
            self.leave(block, slot);
            self.has_work = true;
        }
        self.stats.read_misses += 1;
        self.traffic.begin_request(block, false);
        Claim::Go(Way::Origin)
    }

    /// A slot could not be read. Whether the origin has the same.
    pub(super) fn cannot_read(&mut self, block: u64, slot: u32) -> bool {
        if self.slots.partials.slot(block) == Some(slot) {
            self.slots.partials.forget(block);
            return true;
        }
        let is_older = self.slots.is_dirty(slot) && !mutants::is(Mutant::StaleFallback);
        if is_older || self.slots.block(slot) != Some(block) || self.trouble.has_lost {
            return false;
        }
        self.unreadable.insert(slot);
        true
    }

    fn wait(&mut self, block: u64) -> Claim {
        self.traffic.wait(block);
        Claim::Wait
    }

    #[inline]
    pub(super) fn touch(&mut self, slot: u32) {
        if self.uses.touch(slot) {
            self.policy.hit(slot);
        }
    }

    /// Whether blocks may come at all.
    fn takes_blocks(&self) -> bool {
        let is_well = !self.trouble.has_lost && !self.trouble.is_stuck;
        self.admits && self.mode != Mode::Passthrough && is_well
    }

    /// Whether a write of a whole block may go to a slot alone.
    pub(super) fn takes_new(&self) -> bool {
        self.mode == Mode::Writeback && self.takes_blocks()
    }

    /// Asks the policy what becomes of a block that has no slot: whether it is to have one.
    fn ask(&mut self, miss: &Miss) -> Option<Fill> {
        if !self.takes_blocks() {
            return None;
        }
        match self.policy.miss(miss) {
            Admission::Enter(fill) => Some(fill),
            Admission::Pass => None,
        }
    }

    /// The slot of a block with nothing under way is given up. A commit makes it free.
    pub(super) fn leave(&mut self, block: u64, slot: u32) {
        self.traffic.begin_move(block, Mover::Leaving);
        self.drop_slot(block, slot);
    }

    /// The same of a block below which the origin was zeroed.
    pub(super) fn leave_zeroed(&mut self, block: u64, slot: u32) {
        self.traffic.change_move(block, Mover::Zeroed);
        self.drop_slot(block, slot);
    }

    fn drop_slot(&mut self, block: u64, slot: u32) {
        self.unreadable.remove(&slot);
        self.slots.unmap(slot, block);
        self.policy.leave(slot, block);
        self.changes.note_mapping(slot);
        self.stats.demotions += 1;
        if mutants::is(Mutant::FreedEarly) {
            self.slots.give_back(slot);
            self.traffic.end_move(block);
            return;
        }
        self.changes.leaving.push((slot, block));
    }

    /// A block has come into a slot.
    pub(super) fn enter(&mut self, block: u64, slot: u32, is_dirty: bool) {
        self.policy.enter(slot, block);
        self.name(block, slot);
        if is_dirty {
            self.soil(slot);
        }
    }

    /// A slot that has all of a block gets a mapping.
    pub(super) fn name(&mut self, block: u64, slot: u32) {
        self.slots.map(slot, block);
        self.changes.note_mapping(slot);
        self.changes.fresh.push(slot);
        self.stats.promotions += 1;
        if self.trouble.doubts > 0 && !mutants::is(Mutant::DoubtForgotten) {
            self.soil(slot);
        }
    }

    /// A slot that the medium does not know as such is dirty.
    fn soil(&mut self, slot: u32) {
        if self.slots.soil(slot) {
            self.policy.set_dirty(slot, true);
        }
        self.changes.want(slot);
        self.has_work = true;
    }

    /// A flush of the origin failed: what it shows may not be there after a power cut. Slots that
    /// equal what it shows, and not what was flushed before, are to be written back.
    pub(super) fn doubt(&mut self) {
        self.trouble.doubts += 1;
        if mutants::is(Mutant::DoubtForgotten) {
            return;
        }
        let cleared = std::mem::take(&mut self.changes.cleared);
        let slots = cleared.iter().flat_map(|(word, bits)| {
            (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| (word * 64 + bit) as u32)
        });
        let mapped: Vec<u32> = slots.filter(|slot| self.slots.block(*slot).is_some()).collect();
        mapped.into_iter().for_each(|slot| self.soil(slot));
        for slot in 0..self.slots.count() {
            if self.slots.block(slot).is_none() {
                continue;
            }
            if self.slots.is_fresh(slot) {
                self.soil(slot);
            } else if self.slots.is_writable(slot) && self.slots.soil(slot) {
                self.policy.set_dirty(slot, true);
            }
        }
    }

    /// A flush of the cache device failed: what was written to it since the last good one may be
    /// lost. What is dirty there is not shown any more, and nothing is committed.
    pub(super) fn lose(&mut self) {
        self.trouble.has_lost = true;
        self.trouble.is_stuck = true;
        self.slots.partials.lose();
    }

    /// The I/O of a request in a block has ended. Whether others wait for that.
    pub(super) fn end_part(
        &mut self,
        block: u64,
        way: Way,
        is_write: bool,
        status: Result<(), Status>,
    ) -> bool {
        let mut is_awaited = false;
        if is_write {
            self.see_late(block);
        }
        match (way, status) {
            (Way::New(slot), Ok(())) => {
                self.enter(block, slot, true);
                is_awaited = self.traffic.end_move(block).1;
            }
            (Way::New(slot), Err(_)) => {
                self.slots.give_back(slot);
                is_awaited = self.traffic.end_move(block).1;
            }
            (Way::Below(slot), Ok(())) => self.leave_zeroed(block, slot),
            (Way::Below(_), Err(_)) => is_awaited = self.traffic.end_move(block).1,
            // Nobody knows which device has what: the slot counts.
            (Way::Both(_), Err(_)) if mutants::is(Mutant::ThroughFailedClean) => {}
            (Way::Both(slot), Err(_)) if self.slots.soil(slot) => {
                self.policy.set_dirty(slot, true);
            }
            _ => {}
        }
        self.traffic.end_request(block, is_write) | is_awaited
    }

    /// Deliberate bug: write-back hears of a write when that has ended.
    fn see_late(&mut self, block: u64) {
        let is_cleaned = matches!(self.traffic.mover(block), Some(Mover::Cleaning { .. }));
        if is_cleaned && mutants::is(Mutant::RewriteSeenLate) {
            self.traffic.change_move(block, Mover::Cleaning { is_rewritten: true });
        }
    }

    /// The number of the first commit that carries what changes now.
    pub(super) fn next_round(&self) -> u64 {
        if mutants::is(Mutant::JoinedLate) {
            return self.rounds.max(1);
        }
        self.rounds + 1
    }

    /// A slot is as new as the origin, durably, or is dirty as before.
    pub(super) fn cleaned(&mut self, slot: u32, is_clean: bool) {
        if is_clean {
            self.slots.clean(slot);
            self.policy.set_dirty(slot, false);
        } else {
            self.policy.stay(slot);
        }
    }
}
