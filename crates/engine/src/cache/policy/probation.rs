//! Our own policy. Blocks are admitted on *probation*, a part of the cache in the order of
//! admission. There a block has only the sectors of requests, and sectors after them if clients
//! read in order. At the end of its probation the block is dropped, or, if it was used often
//! enough, read in whole and *kept*. Kept blocks stay cached while they are used: a CLOCK hand
//! passes over them, and takes a use off each.
//!
//! 1. For a block that is used once, only the data of its request is moved.
//! 2. A block that is admitted again soon after it was dropped counts as used once more than when
//!    it was dropped.
//! 3. A block that will be kept is read in whole as soon as that is known. So is a block that is
//!    already cached when it is written to: only a whole block takes writes without the origin.
//! 4. A dirty block that the hand selects is dropped when it is clean, unless it was used
//!    meanwhile. The hand continues from its position: a second pass would take uses off all other
//!    blocks.
//! 5. Only kept blocks are on the medium; the hint of a block is its uses.

use std::collections::VecDeque;

use super::ghosts::Ghosts;
use super::streams::Streams;
use super::uses::{USES_MAX, Uses};
use super::{Admission, Fill, Miss, Next, Policy, Shape};
use crate::sync::Arc;

/// A block that was used this often when its probation ends is kept.
const USES_TO_STAY: u8 = 3;
/// One in this many slots is for probation...
const PROBATION_SHARE: u32 = 10;
/// ...and no more: only memory knows what blocks have in part.
const PROBATION_MAX: u32 = 1 << 15;

/// Unused space of queues: one in this many slots, and this many.
const SPARE_PART: usize = 8;
const SPARE: usize = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Standing {
    #[default]
    Free,
    OnProbation,
    Kept,
}

/// The state of a slot, in one byte: its class in the lower bits, and flags.
#[derive(Clone, Copy, Debug, Default)]
struct Slot(u8);

impl Slot {
    const STANDING: u8 = 0b11;
    const DIRTY: u8 = 1 << 2;
    /// It is in the probation queue, perhaps for a block that has been dropped.
    const IN_ORDER: u8 = 1 << 3;
    /// The hand took it, and it is being written back.
    const TAKEN: u8 = 1 << 4;

    fn standing(self) -> Standing {
        match self.0 & Slot::STANDING {
            0 => Standing::Free,
            1 => Standing::OnProbation,
            _ => Standing::Kept,
        }
    }

    fn stand(&mut self, standing: Standing) {
        self.0 = self.0 & !Slot::STANDING | standing as u8;
    }

    fn is(self, flag: u8) -> bool {
        self.0 & flag != 0
    }

    /// Sets or clears a flag. Returns its earlier value.
    fn put(&mut self, flag: u8, is_set: bool) -> bool {
        let before = self.is(flag);
        self.0 = self.0 & !flag | if is_set { flag } else { 0 };
        before
    }
}

/// Adds a slot to a queue, which has little more space than it needs.
fn push(queue: &mut VecDeque<u32>, slot: u32) {
    if queue.len() == queue.capacity() {
        queue.reserve_exact(queue.len() / SPARE_PART + SPARE);
    }
    queue.push_back(slot);
}

/// Takes the first slot of a queue.
fn pop(queue: &mut VecDeque<u32>) -> Option<u32> {
    if queue.capacity() > 4 * SPARE && queue.len() < queue.capacity() / 4 * 3 {
        queue.shrink_to(queue.len() + queue.len() / SPARE_PART + SPARE);
    }
    queue.pop_front()
}

/// The policy.
#[derive(Debug)]
pub struct Probation {
    slots: Box<[Slot]>,
    uses: Arc<Uses>,
    block_bytes: u32,
    /// Slots on probation, in the order of admission. A slot whose block was dropped early remains
    /// in the queue until its turn.
    probation: VecDeque<u32>,
    on_probation: u32,
    kept: u32,
    hand: u32,
    /// Slots that the hand took, and that are clean by now.
    cleaned: VecDeque<u32>,
    ghosts: Ghosts,
    streams: Streams,
}

impl Probation {
    fn put_in_order(&mut self, slot: u32) {
        if !self.slots[slot as usize].put(Slot::IN_ORDER, true) {
            push(&mut self.probation, slot);
        }
    }

    /// For an empty cache.
    pub fn new(shape: &Shape, uses: Arc<Uses>) -> Probation {
        Probation {
            uses,
            slots: vec![Slot::default(); shape.slots as usize].into_boxed_slice(),
            block_bytes: shape.block_bytes,
            probation: VecDeque::new(),
            on_probation: 0,
            kept: 0,
            hand: 0,
            cleaned: VecDeque::new(),
            ghosts: Ghosts::new(shape.slots as usize),
            streams: Streams::new(),
        }
    }

    fn probation_max(&self) -> u32 {
        (self.slots.len() as u32 / PROBATION_SHARE).clamp(1, PROBATION_MAX)
    }

    /// How far ahead of a request a fill pays: twice the length of its stream so far; else as much
    /// as the block has already.
    fn ahead(&mut self, miss: &Miss, filled: u32) -> Fill {
        let start = miss.block.saturating_mul(u64::from(self.block_bytes)) + u64::from(miss.offset);
        let followed = self.streams.follow(start, u64::from(miss.len));
        let bytes = followed.map_or(filled, |before| {
            let wanted = (before + u64::from(miss.len)).saturating_mul(2);
            u32::try_from(wanted).unwrap_or(u32::MAX).max(filled)
        });
        let rest = self.block_bytes.saturating_sub(miss.offset.saturating_add(miss.len));
        self.streams.extend(u64::from(bytes.min(rest)));
        match bytes {
            0 => Fill::Asked,
            bytes if bytes >= self.block_bytes => Fill::Whole,
            bytes => Fill::Ahead(bytes),
        }
    }

    /// What becomes of the oldest block on probation.
    fn end_probation(&mut self) -> Option<Next> {
        while let Some(slot) = pop(&mut self.probation) {
            let found = &mut self.slots[slot as usize];
            found.put(Slot::IN_ORDER, false);
            if found.standing() != Standing::OnProbation {
                continue;
            }
            if self.uses.of(slot) < USES_TO_STAY {
                return Some(Next::Leave(slot));
            }
            self.uses.set(slot, 0);
            found.stand(Standing::Kept);
            self.on_probation -= 1;
            self.kept += 1;
            return Some(Next::Complete(slot));
        }
        None
    }

    /// The next kept block that was not used since the hand was there last.
    fn turn_hand(&mut self) -> Option<Next> {
        while let Some(slot) = pop(&mut self.cleaned) {
            let found = self.slots[slot as usize];
            let is_kept = found.standing() == Standing::Kept;
            if is_kept && !found.is(Slot::DIRTY) && self.uses.of(slot) == 0 {
                return Some(Next::Leave(slot));
            }
        }
        let slots = self.slots.len() as u32;
        // After as many rounds as there are uses, all are used up.
        for _ in 0..(u64::from(USES_MAX) + 1) * u64::from(slots) {
            let at = self.hand;
            self.hand = (at + 1) % slots;
            let slot = &mut self.slots[at as usize];
            if slot.standing() != Standing::Kept || slot.is(Slot::TAKEN) {
                continue;
            }
            match self.uses.of(at) {
                0 if !slot.is(Slot::DIRTY) => return Some(Next::Leave(at)),
                0 => {
                    slot.put(Slot::TAKEN, true);
                    return Some(Next::Clean(at));
                }
                uses => self.uses.set(at, uses - 1),
            }
        }
        None
    }
}

impl Policy for Probation {
    fn name(&self) -> &'static str {
        "probation"
    }

    fn takes_parts(&self) -> bool {
        true
    }

    fn version(&self) -> [u32; 3] {
        [1, 0, 0]
    }

    fn load(&mut self, slot: u32, hint: Option<u32>, is_dirty: bool) {
        let found = &mut self.slots[slot as usize];
        found.stand(Standing::Kept);
        found.put(Slot::DIRTY, is_dirty);
        self.uses.set(slot, hint.unwrap_or(0).min(u32::from(USES_MAX)) as u8);
        self.kept += 1;
    }

    fn hint(&self, slot: u32) -> u32 {
        u32::from(self.uses.of(slot))
    }

    fn hit(&mut self, _: u32) {}

    fn miss(&mut self, miss: &Miss) -> Admission {
        Admission::Enter(self.ahead(miss, 0))
    }

    fn gap(&mut self, slot: u32, miss: &Miss, filled: u32) -> Fill {
        self.uses.touch(slot);
        let fill = self.ahead(miss, filled);
        match miss.is_write || self.uses.of(slot) >= USES_TO_STAY {
            true => Fill::Whole,
            false => fill,
        }
    }

    fn enter(&mut self, slot: u32, block: u64) {
        let before = self.ghosts.take(block);
        self.uses.set(slot, before.map_or(0, |uses| (uses + 1).min(USES_MAX)));
        self.slots[slot as usize].stand(Standing::OnProbation);
        self.put_in_order(slot);
        self.on_probation += 1;
    }

    fn set_dirty(&mut self, slot: u32, is_dirty: bool) {
        let found = &mut self.slots[slot as usize];
        found.put(Slot::DIRTY, is_dirty);
        if !is_dirty && found.put(Slot::TAKEN, false) {
            push(&mut self.cleaned, slot);
        }
    }

    fn leave(&mut self, slot: u32, block: u64) {
        let found = &mut self.slots[slot as usize];
        let standing = found.standing();
        found.stand(Standing::Free);
        found.put(Slot::DIRTY | Slot::TAKEN, false);
        match standing {
            Standing::Free => {}
            Standing::OnProbation => {
                self.on_probation -= 1;
                self.ghosts.put(block, self.uses.of(slot));
            }
            Standing::Kept => self.kept -= 1,
        }
    }

    fn stay(&mut self, slot: u32) {
        let found = &mut self.slots[slot as usize];
        found.put(Slot::TAKEN, false);
        if found.standing() == Standing::OnProbation {
            self.put_in_order(slot);
        }
    }

    fn next(&mut self) -> Option<Next> {
        match self.on_probation > self.probation_max() || self.kept == 0 {
            true => self.end_probation(),
            false => self.turn_hand().or_else(|| self.end_probation()),
        }
    }

    fn tick(&mut self, _: u64) {}
}

#[cfg(test)]
mod tests;
