//! Our own policy. Blocks enter on *probation*, a part of the cache where they stand in the order
//! in which they came. There a block has only what requests brought, or wanted in order; when its
//! time is over, it leaves, or it was used often enough to be brought in whole and *kept*. Kept
//! blocks stay while they are used: a hand goes round over them, and takes a use off each.
//!
//! 1. What is moved for a block that is used once is what its request moved.
//! 2. A block that comes back soon after it left counts as used once more than when it left.
//! 3. Only kept blocks are on the medium; the hint of one is its uses.

use std::collections::VecDeque;

use super::ghosts::Ghosts;
use super::streams::Streams;
use super::uses::{USES_MAX, Uses};
use super::{Admission, Fill, Miss, Next, Policy, Shape};
use crate::sync::Arc;

/// A block that was used this often when its probation ends stays.
const USES_TO_STAY: u8 = 3;
/// One in this many slots is for probation...
const PROBATION_SHARE: u32 = 10;
/// ...and no more: only memory knows what blocks have in part.
const PROBATION_MAX: u32 = 1 << 15;
/// The hand passes at most this many dirty blocks in search of a clean one.
const DIRTY_PASSED: u32 = 64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Standing {
    #[default]
    Free,
    OnProbation,
    Kept,
}

/// What a slot is. Three bytes for each.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    standing: Standing,
    is_dirty: bool,
    /// It stands in the order of those on probation, perhaps for a block that has left.
    is_in_order: bool,
}

/// The policy.
#[derive(Debug)]
pub struct Probation {
    slots: Box<[Slot]>,
    uses: Arc<Uses>,
    block_bytes: u32,
    /// Slots on probation, in the order in which they came. One that was left before its time
    /// stands there until it would have been its turn.
    probation: VecDeque<u32>,
    on_probation: u32,
    kept: u32,
    hand: u32,
    ghosts: Ghosts,
    streams: Streams,
    /// Uses of the block that enters next.
    uses_before: u8,
}

impl Probation {
    fn put_in_order(&mut self, slot: u32) {
        if !std::mem::replace(&mut self.slots[slot as usize].is_in_order, true) {
            self.probation.push_back(slot);
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
            ghosts: Ghosts::new(shape.slots as usize),
            streams: Streams::new(),
            uses_before: 0,
        }
    }

    fn probation_max(&self) -> u32 {
        (self.slots.len() as u32 / PROBATION_SHARE).clamp(1, PROBATION_MAX)
    }

    /// How far ahead of a request it is worth to fill: twice what its stream has had; else as much
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
        while let Some(slot) = self.probation.pop_front() {
            let found = &mut self.slots[slot as usize];
            found.is_in_order = false;
            if found.standing != Standing::OnProbation {
                continue;
            }
            if self.uses.of(slot) < USES_TO_STAY {
                return Some(Next::Leave(slot));
            }
            self.uses.set(slot, 0);
            found.standing = Standing::Kept;
            self.on_probation -= 1;
            self.kept += 1;
            return Some(Next::Complete(slot));
        }
        None
    }

    /// The next kept block that was not used since the hand was there last. Clean ones go first.
    fn turn_hand(&mut self) -> Option<Next> {
        let slots = self.slots.len() as u32;
        let (mut dirty, mut passed) = (None, 0);
        // After as many rounds as there are uses, all are used up.
        for _ in 0..(u64::from(USES_MAX) + 1) * u64::from(slots) {
            let at = self.hand;
            self.hand = (at + 1) % slots;
            let slot = self.slots[at as usize];
            if slot.standing != Standing::Kept {
                continue;
            }
            match self.uses.of(at) {
                0 if !slot.is_dirty => return Some(Next::Leave(at)),
                0 => {
                    dirty = dirty.or(Some(at));
                    passed += 1;
                    if passed == DIRTY_PASSED {
                        break;
                    }
                }
                uses => self.uses.set(at, uses - 1),
            }
        }
        dirty.map(Next::Clean)
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
        self.slots[slot as usize] = Slot { standing: Standing::Kept, is_dirty, is_in_order: false };
        self.uses.set(slot, hint.unwrap_or(0).min(u32::from(USES_MAX)) as u8);
        self.kept += 1;
    }

    fn hint(&self, slot: u32) -> u32 {
        u32::from(self.uses.of(slot))
    }

    fn hit(&mut self, _: u32) {}

    fn miss(&mut self, miss: &Miss) -> Admission {
        self.uses_before = self.ghosts.take(miss.block).map_or(0, |uses| (uses + 1).min(USES_MAX));
        Admission::Enter(self.ahead(miss, 0))
    }

    fn gap(&mut self, slot: u32, miss: &Miss, filled: u32) -> Fill {
        self.uses.touch(slot);
        self.ahead(miss, filled)
    }

    fn enter(&mut self, slot: u32) {
        self.uses.set(slot, std::mem::take(&mut self.uses_before));
        self.slots[slot as usize].standing = Standing::OnProbation;
        self.put_in_order(slot);
        self.on_probation += 1;
    }

    fn set_dirty(&mut self, slot: u32, is_dirty: bool) {
        self.slots[slot as usize].is_dirty = is_dirty;
    }

    fn leave(&mut self, slot: u32, block: u64) {
        let found = &mut self.slots[slot as usize];
        found.is_dirty = false;
        match std::mem::take(&mut found.standing) {
            Standing::Free => {}
            Standing::OnProbation => {
                self.on_probation -= 1;
                self.ghosts.put(block, self.uses.of(slot));
            }
            Standing::Kept => self.kept -= 1,
        }
    }

    fn stay(&mut self, slot: u32) {
        if self.slots[slot as usize].standing == Standing::OnProbation {
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
