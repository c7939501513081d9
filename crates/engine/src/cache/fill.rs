//! Requests for partially cached blocks, and fills. A request is answered first, and then its data
//! is stored in the slot. The background reads the further sectors that the policy wants.

use crate::bio::{Bio, Op};
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::target::Port;
use crate::units::{MIB, SECTOR};

use super::background::{ROOM_MAX, ROOM_PART};
use super::blocks::{Blocks, Way};
use super::copy::PIECE_BYTES;
use super::partial::PARTIALS_MAX;
use super::policy::{Fill, Miss, Next};
use super::{Cache, TOKEN_FILL};

/// Most blocks that are promoted at a time for a policy with whole blocks; it asks again for
/// others.
pub(super) const PROMOTIONS_MAX: usize = 64;
/// Bytes of requests that are used for fills, in flight.
pub(super) const FILLS_BYTES_MAX: u64 = 32 * MIB;

/// A part of a request whose data is stored in a slot after the answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spare {
    id: u32,
    /// First byte on the cache device.
    at: u64,
    /// First byte in the bio, and how many there are.
    from: u64,
    len: u64,
}

impl Blocks {
    /// The destination of a read of a block without a mapping, if a slot has a part of the block.
    pub(super) fn read_in_part(&mut self, miss: &Miss) -> Option<Way> {
        let slot = self.slots.partials.slot(miss.block)?;
        if self.slots.partials.has(miss.block, &miss.sectors()) {
            self.stats.read_hits += 1;
            self.touch(slot);
            return Some(Way::Slot(slot));
        }
        self.stats.read_misses += 1;
        self.ask_for_rest(slot, miss);
        Some(self.read_filling(slot, miss))
    }

    /// The same for a write, which udm stores on the origin, and then in the slot.
    pub(super) fn write_in_part(&mut self, miss: &Miss, has_data: bool) -> Option<Way> {
        let slot = self.slots.partials.slot(miss.block)?;
        if has_data {
            self.stats.write_misses = self.stats.write_misses.wrapping_add(1);
            self.ask_for_rest(slot, miss);
        }
        let fills = has_data && self.may_fill();
        let id = self.slots.partials.write_begins(miss.block, miss.sectors(), fills);
        Some(Way::Fill { slot, id })
    }

    /// The slot with a part of a block that is completely overwritten, if the write may go to the
    /// slot alone: the part is forgotten, and no read or fill uses the slot.
    pub(super) fn end_part_for_whole(&mut self, block: u64) -> Option<u32> {
        let slot = self.slots.partials.slot(block)?;
        let is_quiet = self.is_quiet_in_part(block) || mutants::is(Mutant::WholeOverFill);
        if !self.takes_new() || !is_quiet {
            return None;
        }
        self.slots.partials.end(block);
        if self.policy.takes_parts() {
            self.policy.leave(slot, block);
        }
        self.stats.write_hits += 1;
        Some(slot)
    }

    /// Whether no I/O uses the slot with a part of a block, and no fill is in flight to it.
    fn is_quiet_in_part(&self, block: u64) -> bool {
        let is_unused = self.in_flight.is_quiet(block) || mutants::is(Mutant::PartLeftWhileRead);
        is_unused && self.slots.partials.is_quiet(block)
    }

    /// Gives a slot to a block that the policy admits in part. Returns the destination of the
    /// request.
    pub(super) fn enter_in_part(&mut self, miss: &Miss, fill: Fill) -> Way {
        let block = miss.block;
        if !self.is_free(block) {
            return Way::Origin;
        }
        let Some(slot) = self.begin_in_part(block) else { return Way::Origin };
        let way = match miss.is_write {
            true => {
                let id = self.slots.partials.write_begins(block, miss.sectors(), self.may_fill());
                Way::Fill { slot, id }
            }
            false => self.read_filling(slot, miss),
        };
        if let Way::Fill { id, .. } = way {
            self.slots.partials.wait_for(block, id);
        }
        self.note_fill(miss, fill);
        way
    }

    /// Whether a block may be promoted: it is not being moved, and no write is bypassing the cache.
    pub(super) fn is_free(&self, block: u64) -> bool {
        let has_writers =
            self.in_flight.has_writers(block) && !mutants::is(Mutant::PromotedOverWrite);
        self.in_flight.mover(block).is_none() && !has_writers
    }

    /// A slot for a block that is admitted in part, if there is one now.
    pub(super) fn begin_in_part(&mut self, block: u64) -> Option<u32> {
        let takes_parts = self.policy.takes_parts();
        let most = if takes_parts { PARTIALS_MAX } else { PROMOTIONS_MAX };
        let is_full = self.slots.partials.count() >= most || !takes_parts && !self.may_copy;
        let slot = if is_full { None } else { self.slots.take() };
        let is_scarce = takes_parts && self.slots.free() * 2 < self.room();
        let is_lacking = slot.is_none() && (takes_parts || !is_full);
        if is_lacking || is_scarce {
            self.wants_room = true;
            self.has_work = true;
        }
        self.slots.partials.begin(block, slot?);
        if takes_parts {
            self.policy.enter(slot?, block);
        }
        slot
    }

    fn read_filling(&mut self, slot: u32, miss: &Miss) -> Way {
        match self.may_fill() {
            true => {
                let id = self.slots.partials.read_begins(miss.block, miss.sectors());
                id.map_or(Way::Origin, |id| Way::Fill { slot, id })
            }
            false => Way::Origin,
        }
    }

    fn may_fill(&self) -> bool {
        let [of_requests, _] = self.slots.partials.filling();
        !self.trouble.has_lost && of_requests * SECTOR < FILLS_BYTES_MAX
    }

    fn ask_for_rest(&mut self, slot: u32, miss: &Miss) {
        let filled = self.slots.partials.filled(miss.block) * SECTOR as u32;
        let fill = self.policy.gap(slot, miss, filled);
        self.note_fill(miss, fill);
    }

    fn note_fill(&mut self, miss: &Miss, fill: Fill) {
        let end = miss.sectors().end;
        match fill {
            Fill::Asked => return,
            Fill::Ahead(bytes) => {
                let sectors = bytes.div_ceil(SECTOR as u32);
                self.slots.partials.wish(miss.block, end..end.saturating_add(sectors));
            }
            Fill::Whole => self.slots.partials.wish(miss.block, 0..u32::MAX),
        }
        self.has_work |= self.slots.partials.has_gaps();
    }

    /// A fill has ended. If the slot now has the whole block, it gets a mapping. Returns whether it
    /// did.
    fn end_fill(&mut self, block: u64, slot: u32, id: u32, is_done: bool) -> bool {
        let is_whole = self.slots.partials.ended(block, id, is_done);
        if is_whole {
            self.slots.partials.end(block);
            match self.policy.takes_parts() {
                true => self.name(block, slot),
                false => self.enter(block, slot, false),
            }
        }
        is_whole
    }

    /// How many slots are made free together.
    pub(super) fn room(&self) -> u32 {
        (self.slots.count() / ROOM_PART).clamp(1, ROOM_MAX)
    }

    /// Carries out the policy's decision on a slot without a mapping. Returns how many slots become
    /// free; `None`: not possible now.
    pub(super) fn follow_in_part(&mut self, next: Next) -> Option<u32> {
        let (Next::Leave(slot) | Next::Clean(slot) | Next::Complete(slot)) = next;
        let block = self.slots.partials.block(slot)?;
        match next {
            Next::Complete(_) => {
                self.slots.partials.wish(block, 0..u32::MAX);
                Some(0)
            }
            Next::Leave(_) if self.is_quiet_in_part(block) => {
                self.leave_in_part(block, slot);
                Some(1)
            }
            Next::Leave(_) | Next::Clean(_) => {
                self.policy.stay(slot);
                None
            }
        }
    }

    /// The medium never named the slot, so it is free now.
    fn leave_in_part(&mut self, block: u64, slot: u32) {
        self.slots.partials.end(block);
        self.slots.give_back(slot);
        if self.policy.takes_parts() {
            self.policy.leave(slot, block);
            self.stats.demotions += 1;
        }
    }

    /// A block that was to be promoted whole, but cannot because an I/O failed, is given up.
    fn leave_failed(&mut self) {
        if self.policy.takes_parts() {
            return;
        }
        for (block, slot) in self.slots.partials.given_up() {
            if self.in_flight.is_quiet(block) {
                self.leave_in_part(block, slot);
            }
        }
    }

    /// No request is in flight: partially cached blocks are dropped. Returns whether they are.
    pub(super) fn leave_parts(&mut self) -> bool {
        if self.slots.partials.is_busy() {
            return false;
        }
        for (block, slot) in self.slots.partials.all() {
            self.leave_in_part(block, slot);
        }
        true
    }
}

impl Cache {
    /// The origin has answered a part of a request. Returns whether its data is also stored in the
    /// slot.
    pub(super) fn spare(
        &self,
        blocks: &mut Blocks,
        (block, way): (u64, Way),
        (at, from, len): (u64, u64, u64),
        has_data: bool,
    ) -> Option<Spare> {
        let Way::Fill { slot, id } = way else { return None };
        let block_bytes = self.plan.block_bytes;
        let at = u64::from(slot) * block_bytes + at % block_bytes;
        let goes_on = blocks.slots.partials.answered(block, id, has_data);
        goes_on.then_some(Spare { id, at, from, len })
    }

    /// Has the data of a request, which is about to be answered, written to the slots that lack it.
    pub(super) fn begin_fills(&self, bio: &Bio, spares: &[Spare], port: &mut Port) {
        for &Spare { id, at, from, len } in spares {
            let mut copy = port.pool.take(len as usize);
            let data = &bio.buffer.as_slice()[from as usize..(from + len) as usize];
            copy.as_mut_slice().copy_from_slice(data);
            let token = TOKEN_FILL | u64::from(id);
            let io = DiskIo::new(self.cache.disk(), Op::Write, at, copy, token);
            self.background.hand_over(io);
        }
    }

    /// Reads gaps that the policy wants to have filled, within the limit, which blocks that are
    /// being written back share.
    pub(super) fn fill_gaps(&self, cleaning: u64, port: &mut Port) {
        let limit = self.orders.threshold_bytes();
        let block_bytes = self.plan.block_bytes;
        self.blocks().leave_failed();
        loop {
            let mut blocks = self.blocks();
            let [_, of_gaps] = blocks.slots.partials.filling();
            let of_all = of_gaps * SECTOR + cleaning * block_bytes;
            let is_over = limit == 0 || of_gaps > 0 && of_all >= limit;
            if is_over || blocks.trouble.has_lost {
                return;
            }
            let Some(gap) = blocks.slots.partials.next_gap((PIECE_BYTES / SECTOR) as u32) else {
                return;
            };
            drop(blocks);
            let len = u64::from(gap.sectors.end - gap.sectors.start) * SECTOR;
            let at = gap.block * block_bytes + u64::from(gap.sectors.start) * SECTOR;
            let buffer = port.pool.take(len as usize);
            let token = TOKEN_FILL | u64::from(gap.id);
            port.ios.push_back(DiskIo::new(self.origin.disk(), Op::Read, at, buffer, token));
        }
    }

    /// An I/O of a fill is complete: a gap read from the origin, or data stored in a slot.
    pub(super) fn complete_fill(&self, io: DiskIo, port: &mut Port) {
        let block_bytes = self.plan.block_bytes;
        let (place, offset) = (io.offset / block_bytes, io.offset % block_bytes);
        let id = io.token as u32;
        let is_done = io.result.is_ok() || mutants::is(Mutant::FillUnread);
        if io.op == Op::Write {
            self.cache.count_write();
        }
        let mut blocks = self.blocks();
        let mut is_named = false;
        if io.op == Op::Read {
            let slot = blocks.slots.partials.slot(place).expect("a fill keeps its slot");
            if blocks.slots.partials.answered(place, id, is_done) {
                drop(blocks);
                let at = u64::from(slot) * block_bytes + offset;
                let write = DiskIo::new(self.cache.disk(), Op::Write, at, io.buffer, io.token);
                return port.ios.push_back(write);
            }
        } else {
            let slot = place as u32;
            let block = blocks.slots.partials.block(slot).expect("a fill keeps its slot");
            is_named = blocks.end_fill(block, slot, id, is_done);
        }
        // A slot may be free again.
        let has_work = is_named || !is_done || blocks.slots.partials.has_gaps();
        drop(blocks);
        port.pool.put(io.buffer);
        if has_work || self.orders.is_suspended() {
            self.events.work();
        }
    }

    /// Whether a part of a stage that ended has data for a fill.
    pub(super) fn has_data(bio: &Bio, status: Result<(), Status>) -> bool {
        matches!(bio.op, Op::Read | Op::Write) && status.is_ok()
    }
}
