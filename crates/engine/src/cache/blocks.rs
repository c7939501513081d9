//! The blocks of the origin, under one lock: the place of each, the I/O in flight there, and
//! whether a request may continue. The lock is held for a lookup, never during I/O or while data is
//! copied.
//!
//! 1. A slot is written to only after the medium has marked it as dirty.
//! 2. While a block is promoted or demoted, reads go to the origin.
//! 3. A write to a block that is being demoted waits until the medium has forgotten the slot.
//! 4. A clean slot that cannot be read is not used any more: its block is read from the origin, and
//!    is dropped as soon as no I/O is in flight there.
//! 5. Data that a write stored in a new slot is read only when the medium has its mapping, and
//!    zeroes below a slot only when the medium has forgotten the slot. Earlier, the death of the
//!    server would take back data that a client has seen.

use std::collections::HashSet;

use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::Arc;

use super::args::Mode;
use super::changes::Changes;
use super::in_flight::{InFlight, Mover};
use super::metadata::Doubt;
use super::metadata::bits::{Bits, words_of};
use super::policy::{Admission, Fill, Miss, Policy, Uses};
use super::slots::Slots;

/// Blocks with failed writes that are remembered one by one; beyond that, all blocks are in doubt.
const HALF_WRITTEN_MAX: usize = 4096;

/// Places where I/O failed.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    /// Slots that could not be read, or written: they are not used any more when they are clean.
    pub(super) slots: HashSet<u32>,
    /// Blocks of the origin where a write failed: a power failure may change what is read there, so
    /// a copy of such a block is not clean.
    pub(super) blocks: HashSet<u64>,
}

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
    /// To the origin. After the answer, the data is stored in a slot that has a part of the block.
    Fill {
        /// The slot.
        slot: u32,
        /// Number of the fill.
        id: u32,
    },
    /// Zeroes of a whole block, to the origin below a slot, which is then given up.
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

/// The failures of the devices.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trouble {
    /// The cache device lost what it had said it has.
    pub(super) has_lost: bool,
    /// Commits fail.
    pub(super) is_stuck: bool,
    /// The medium records, durably, that its mappings must not be trusted: see `through`.
    pub(super) is_untrusted: bool,
    /// How often the origin lost data that it had acknowledged; it may still return that data.
    pub(super) doubts: u64,
    /// How many of these an earlier server met.
    pub(super) inherited: u64,
    /// The devices that failed a flush, as the medium records it: see `doubt`.
    pub(super) told: Doubt,
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
    pub(super) in_flight: InFlight,
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
    pub(super) mode: Mode,
    admits: bool,
    /// Words of slots that were written to since the last look, and before.
    pub(super) touched: [Bits; 2],
    pub(super) suspects: Suspects,
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
            in_flight: InFlight::default(),
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
            suspects: Suspects::default(),
        }
    }

    /// A read of a part of a block.
    #[inline]
    pub(super) fn read(&mut self, miss: &Miss) -> Claim {
        let block = miss.block;
        if let Some(slot) = self.slots.find(block) {
            if self.in_flight.mover(block) == Some(Mover::Zeroing) {
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
            self.in_flight.begin_request(block, false);
            let passes = self.mode == Mode::Passthrough
                || self.trouble.has_lost
                || self.is_written_through(block, slot);
            return Claim::Go(if passes { Way::Origin } else { Way::Slot(slot) });
        }
        if self.in_flight.mover(block) == Some(Mover::Zeroed)
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
        self.in_flight.begin_request(block, false);
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
        let mover = self.in_flight.mover(block);
        if self.trouble.has_lost {
            return self.go_below(block);
        }
        if mover == Some(Mover::Zeroing) {
            return self.wait(block);
        }
        if self.mode == Mode::Passthrough {
            if mutants::is(Mutant::PassthroughKept) {
                self.in_flight.begin_request(block, true);
                return Claim::Go(Way::Origin);
            }
            return self.invalidate(block, slot);
        }
        if self.is_unreadable(slot) {
            return self.leave_first(block, slot);
        }
        if !self.slots.is_writable(slot) && !mutants::is(Mutant::WrittenUnmarked) {
            if self.trouble.is_stuck {
                return self.pass_by(block, slot);
            }
            self.changes.want(slot);
            return self.commit_first();
        }
        let goes_through = self.mode == Mode::Writethrough
            && !self.slots.is_dirty(slot)
            && !mutants::is(Mutant::ThroughDirty);
        // The last write of two must be the last one on both devices.
        if goes_through
            && self.in_flight.has_writers(block)
            && !mutants::is(Mutant::ThroughUnordered)
        {
            return self.wait(block);
        }
        let is_seen = !mutants::is(Mutant::RewriteUnseen) && !mutants::is(Mutant::RewriteSeenLate);
        if matches!(mover, Some(Mover::Cleaning { .. })) && is_seen {
            self.in_flight.change_move(block, Mover::Cleaning { is_rewritten: true });
        }
        self.stats.write_hits += 1;
        self.touch(slot);
        self.touched[0].set(u64::from(slot) / 64);
        self.in_flight.begin_request(block, true);
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
            self.in_flight.begin_move(block, Mover::Overwrite);
            self.in_flight.begin_request(block, true);
            return Claim::Go(Way::New(slot));
        }
        if let Some(way) = self.write_in_part(miss, true) {
            self.in_flight.begin_request(block, true);
            return Claim::Go(way);
        }
        match self.in_flight.mover(block) {
            Some(Mover::Leaving | Mover::Zeroed) if !mutants::is(Mutant::LeavingWritten) => {
                return match self.trouble.is_stuck {
                    true => self.go_below(block),
                    false => self.wait(block),
                };
            }
            Some(Mover::Overwrite) => return self.wait(block),
            _ => {}
        }
        self.stats.write_misses = self.stats.write_misses.wrapping_add(1);
        let enters = self.ask(miss);
        let may_be_new = is_whole && enters.is_some() && self.mode == Mode::Writeback;
        if may_be_new && self.in_flight.is_quiet(block) {
            if let Some(slot) = self.slots.take() {
                self.in_flight.begin_move(block, Mover::Overwrite);
                self.in_flight.begin_request(block, true);
                return Claim::Go(Way::New(slot));
            }
            self.wants_room = true;
            self.has_work = true;
        }
        let way = enters.map_or(Way::Origin, |fill| self.enter_in_part(miss, fill));
        self.in_flight.begin_request(block, true);
        Claim::Go(way)
    }

    /// Zeroes for a part of a block. `is_whole`: for all of it.
    pub(super) fn zero(&mut self, miss: &Miss, is_whole: bool) -> Claim {
        let block = miss.block;
        let found = self.slots.find(block);
        if found.is_some() && self.trouble.has_lost {
            return self.go_below(block);
        }
        match found {
            Some(slot) if is_whole && self.mode != Mode::Passthrough => {
                if self.trouble.is_stuck {
                    return self.pass_by(block, slot);
                }
                if !self.in_flight.is_quiet(block) {
                    return self.wait(block);
                }
                if !self.slots.is_dirty(slot) && !mutants::is(Mutant::ZeroedBelowClean) {
                    // The medium may have the slot as equal to the origin, so the slot is given up
                    // first.
                    self.leave(block, slot);
                    self.in_flight.wait(block);
                    return Claim::Commit;
                }
                self.in_flight.begin_move(block, Mover::Zeroing);
                self.in_flight.begin_request(block, true);
                Claim::Go(Way::Below(slot))
            }
            Some(slot) if mutants::is(Mutant::ZeroesUnseen) => {
                self.write_hit(&Miss { len: 512, ..*miss }, slot)
            }
            Some(slot) => self.write_hit(miss, slot),
            None => match self.in_flight.mover(block) {
                Some(Mover::Leaving | Mover::Zeroed) if self.trouble.is_stuck => {
                    self.go_below(block)
                }
                Some(Mover::Leaving | Mover::Zeroed | Mover::Overwrite) => self.wait(block),
                _ => {
                    let way = self.write_in_part(miss, false).unwrap_or(Way::Origin);
                    self.in_flight.begin_request(block, true);
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

    /// Whether a slot has data of a write that waits for a commit. Without the commit the death of
    /// the server takes the data back, so no client may have seen it.
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

    pub(super) fn wait(&mut self, block: u64) -> Claim {
        self.in_flight.wait(block);
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

    /// Asks the policy whether a block without a slot is to get one.
    fn ask(&mut self, miss: &Miss) -> Option<Fill> {
        if !self.takes_blocks() {
            return None;
        }
        match self.policy.miss(miss) {
            Admission::Enter(fill) => Some(fill),
            Admission::Pass => None,
        }
    }

    /// Gives up the slot of a block without I/O in flight. A commit makes it free.
    pub(super) fn leave(&mut self, block: u64, slot: u32) {
        self.in_flight.begin_move(block, Mover::Leaving);
        self.drop_slot(block, slot);
    }

    /// The same of a block below which the origin was zeroed.
    pub(super) fn leave_zeroed(&mut self, block: u64, slot: u32) {
        self.in_flight.change_move(block, Mover::Zeroed);
        self.drop_slot(block, slot);
    }

    /// Memory knows no block of a slot any more.
    pub(super) fn unname(&mut self, block: u64, slot: u32) {
        self.suspects.slots.remove(&slot);
        self.slots.unmap(slot, block);
        self.policy.leave(slot, block);
        self.changes.note_mapping(slot);
        self.stats.demotions += 1;
    }

    fn drop_slot(&mut self, block: u64, slot: u32) {
        self.unname(block, slot);
        if mutants::is(Mutant::FreedEarly) {
            self.slots.give_back(slot);
            self.in_flight.end_move(block);
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
        let is_doubtful = self.trouble.doubts > 0 || self.suspects.blocks.contains(&block);
        let is_doubtful = is_doubtful && !self.trouble.is_untrusted;
        if is_doubtful && !mutants::is(Mutant::DoubtForgotten) {
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

    /// A flush of the origin failed: data that it returns may be lost after a power failure. Slots
    /// that equal this data, and not the data that was flushed before, are to be written back.
    pub(super) fn doubt(&mut self) {
        self.trouble.doubts += 1;
        self.has_work = true;
        self.soil_doubted();
    }

    /// The same for slots that a repeated commit has put back.
    pub(super) fn soil_doubted(&mut self) {
        // Under that mark no slot is believed, and none is dirty.
        if self.trouble.is_untrusted || mutants::is(Mutant::DoubtForgotten) {
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
                if !mutants::is(Mutant::DoubtedFreshClean) {
                    self.soil(slot);
                }
            } else if self.slots.is_writable(slot) && self.slots.soil(slot) {
                self.policy.set_dirty(slot, true);
            }
        }
    }

    /// A flush of the cache device failed: data written to it since the last good flush may be
    /// lost. Its dirty data is not returned any more, and no commit follows.
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
                is_awaited = self.in_flight.end_move(block).1;
            }
            (Way::New(slot), Err(_)) => {
                self.slots.give_back(slot);
                is_awaited = self.in_flight.end_move(block).1;
            }
            (Way::Below(slot), Ok(())) => self.leave_zeroed(block, slot),
            (Way::Below(slot), Err(_)) => {
                // The origin may have the zeroes, also where the slot was equal to it.
                if !mutants::is(Mutant::ZeroedInPartKept) {
                    self.soil(slot);
                }
                is_awaited = self.in_flight.end_move(block).1;
            }
            (Way::Both(_), Err(_)) if mutants::is(Mutant::ThroughFailedClean) => {}
            (Way::Both(slot), Err(_)) => {
                self.note_half_written(block);
                self.cannot_write(block, slot);
            }
            (Way::Origin | Way::Fill { .. }, Err(_)) if is_write => self.note_half_written(block),
            // A power failure may change what is read there: it is not to become clean.
            (Way::Slot(slot), Err(_)) if is_write && !mutants::is(Mutant::RefusedSlotKept) => {
                self.suspects.slots.insert(slot);
            }
            _ => {}
        }
        self.in_flight.end_request(block, is_write) | is_awaited
    }

    /// Whether the origin may show something else after a power failure than now.
    pub(super) fn is_origin_in_doubt(&self) -> bool {
        self.trouble.doubts > 0 || !self.suspects.blocks.is_empty()
    }

    /// A write of a block failed at the origin.
    fn note_half_written(&mut self, block: u64) {
        if mutants::is(Mutant::HalfWrittenClean) {
            return;
        }
        if self.suspects.blocks.len() >= HALF_WRITTEN_MAX {
            return self.doubt();
        }
        self.suspects.blocks.insert(block);
    }

    /// Deliberate bug: write-back notices a write when it has ended.
    fn see_late(&mut self, block: u64) {
        let is_cleaned = matches!(self.in_flight.mover(block), Some(Mover::Cleaning { .. }));
        if is_cleaned && mutants::is(Mutant::RewriteSeenLate) {
            self.in_flight.change_move(block, Mover::Cleaning { is_rewritten: true });
        }
    }

    /// The number of the first commit that includes the present changes.
    pub(super) fn next_round(&self) -> u64 {
        if mutants::is(Mutant::JoinedLate) {
            return self.rounds.max(1);
        }
        self.rounds + 1
    }

    /// A slot equals the origin, durably, or is dirty as before.
    pub(super) fn cleaned(&mut self, slot: u32, is_clean: bool) {
        if is_clean {
            self.slots.clean(slot);
            self.policy.set_dirty(slot, false);
        } else {
            self.policy.stay(slot);
        }
    }
}
