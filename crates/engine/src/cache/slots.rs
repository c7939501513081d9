//! The state of each slot of the cache device, in memory and on the medium.
//!
//! | of a slot | meaning |
//! |---|---|
//! | mapping | the block that it holds, or none |
//! | dirty | it is newer than the origin |
//! | marked | the medium has it marked as dirty, durably |
//! | fresh | its mapping may not be on the medium |
//!
//! 1. Dirty slots are marked, and not fresh, except for a block that was written as a whole, until
//!    the commit for which its writer waits.
//! 2. A slot is free when it holds no block, nor a part of one, in memory or on the medium.

use std::collections::VecDeque;
use std::ops::Range;

use super::aside::Aside;
use super::dirty_sectors::Parts;
use super::index::Index;
use super::metadata::Contents;
use super::metadata::bits::{Bits, words_of};
use super::metadata::contents::mapping;
use super::partial::Partials;
use crate::mutants::{self, Mutant};
use crate::units::SECTOR;

/// The slots.
#[derive(Debug)]
pub(super) struct Slots {
    dirty: Bits,
    marked: Bits,
    fresh: Bits,
    free: Bits,
    free_count: u32,
    /// Where the search for a free slot goes on.
    cursor: u64,
    index: Index,
    dirty_count: u32,
    /// Dirty slots that a drain waits for: those that were dirty when it began.
    awaited: Bits,
    parts: Parts,
    /// Dirty ones that could not be copied.
    pub(super) aside: Aside,
    /// Those without a mapping that have a part of a block.
    pub(super) partials: Partials,
}

impl Slots {
    /// The state on the medium, for an origin of this many blocks, of this many sectors each.
    pub(super) fn new(contents: Contents, origin_blocks: u64, block_sectors: u32) -> Slots {
        let count = contents.slots();
        let mut index = Index::new(count, origin_blocks);
        let mut free = Bits::new(count);
        (0..count).for_each(|slot| match contents.block(slot) {
            Some(block) => index.insert(block, slot as u32),
            None => free.set(slot),
        });
        let dirty = contents.dirty;
        let (marked, fresh, dirty_count) = (dirty.clone(), Bits::new(count), dirty.ones() as u32);
        let (free_count, cursor) = (free.ones() as u32, 0);
        Slots {
            dirty,
            marked,
            fresh,
            free,
            free_count,
            cursor,
            index,
            dirty_count,
            awaited: Bits::default(),
            parts: Parts::new(count),
            aside: Aside::default(),
            partials: Partials::new(block_sectors, count, origin_blocks),
        }
    }

    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        self.index.count()
    }

    /// How many are free.
    pub(super) fn free(&self) -> u32 {
        self.free_count
    }

    /// How many are dirty.
    pub(super) fn dirty_count(&self) -> u32 {
        self.dirty_count
    }

    /// The slot that holds `block`.
    #[inline]
    pub(super) fn find(&self, block: u64) -> Option<u32> {
        self.index.find(block)
    }

    /// The block that it holds.
    pub(super) fn block(&self, slot: u32) -> Option<u64> {
        self.index.block(slot)
    }

    /// Its mapping, as the medium has it.
    pub(super) fn mapping(&self, slot: u64) -> u64 {
        mapping(self.block(slot as u32))
    }

    #[inline]
    pub(super) fn is_dirty(&self, slot: u32) -> bool {
        self.dirty.is_set(slot.into())
    }

    /// Whether the medium has its mapping, and has it marked as dirty, so that it may be written
    /// to.
    #[inline]
    pub(super) fn is_writable(&self, slot: u32) -> bool {
        self.marked.is_set(slot.into()) && !self.fresh.is_set(slot.into())
    }

    #[inline]
    pub(super) fn is_fresh(&self, slot: u32) -> bool {
        self.fresh.is_set(slot.into())
    }

    /// The dirty slots, from one on, in order.
    pub(super) fn dirty(&self) -> &Bits {
        &self.dirty
    }

    /// The bits that the medium has of the slots of a word, or more.
    pub(super) fn marked_word(&self, word: u64) -> u64 {
        self.marked.word(word)
    }

    /// The slots of a word that hold a block.
    pub(super) fn mapped_word(&self, word: u64) -> u64 {
        let first = word * 64;
        let slots = first..(first + 64).min(self.count().into());
        let bit = |slot: u64| u64::from(self.index.is_used(slot as u32)) << (slot - first);
        slots.map(bit).fold(0, |word, bit| word | bit)
    }

    /// All of it is dirty. Says whether it was clean.
    pub(super) fn soil(&mut self, slot: u32) -> bool {
        self.parts.forget(slot);
        self.put_dirty(slot, true)
    }

    /// These sectors of it are also dirty. Returns whether it was clean.
    #[inline]
    pub(super) fn soil_part(&mut self, slot: u32, sectors: Range<u32>) -> bool {
        let was_clean = self.put_dirty(slot, true);
        match was_clean {
            true => self.parts.begin(slot, sectors),
            false => self.parts.add(slot, sectors),
        }
        was_clean
    }

    /// It equals the origin.
    pub(super) fn clean(&mut self, slot: u32) {
        self.parts.forget(slot);
        self.aside.forget(slot);
        self.put_dirty(slot, false);
    }

    /// The data to be written back of a dirty slot, in bytes of its block.
    pub(super) fn write_back_of(&mut self, slot: u32, block_bytes: u64) -> VecDeque<Range<u64>> {
        let bytes = |sectors: Range<u32>| {
            u64::from(sectors.start) * SECTOR..u64::from(sectors.end) * SECTOR
        };
        let found = match self.parts.get(slot) {
            Some(ranges) => ranges.iter().map(bytes).collect(),
            None => std::iter::once(0..block_bytes).collect(),
        };
        if mutants::is(Mutant::PartsTakenEarly) {
            self.parts.empty(slot);
        }
        found
    }

    /// Changes whether it is dirty. Says whether that is a change.
    #[inline]
    fn put_dirty(&mut self, slot: u32, is_dirty: bool) -> bool {
        let is_new = self.is_dirty(slot) != is_dirty;
        if is_new {
            self.dirty.put(slot.into(), is_dirty);
            match is_dirty {
                true => self.dirty_count += 1,
                false => self.dirty_count -= 1,
            }
        }
        if !is_dirty {
            self.end_wait(slot);
        }
        is_new
    }

    /// A drain begins, and waits for the slots that are dirty now; or the drain has ended.
    pub(super) fn await_dirty(&mut self, is_draining: bool) {
        self.awaited = if is_draining { self.dirty.clone() } else { Bits::default() };
    }

    /// The origin has, durably, the slot's data from the start of the drain, or newer data.
    pub(super) fn end_wait(&mut self, slot: u32) {
        if self.awaited.is_set(slot.into()) {
            self.awaited.clear(slot.into());
        }
    }

    /// How many dirty slots write-back must write to the origin: the slots that a drain waits for,
    /// or all.
    pub(super) fn to_drain(&self) -> u32 {
        match self.awaited.is_empty() {
            true => self.dirty_count,
            false => self.awaited.ones() as u32,
        }
    }

    /// Whether only blocks that cannot be written back are left of these slots.
    pub(super) fn has_only_bad(&self) -> bool {
        let counts = |slot: u32| self.awaited.is_empty() || self.awaited.is_set(slot.into());
        self.aside.is_all(self.to_drain(), counts)
    }

    /// Whether a drain waits for it.
    pub(super) fn is_awaited(&self, slot: u32) -> bool {
        !self.awaited.is_empty() && self.awaited.is_set(slot.into())
    }

    /// Those that a drain waits for.
    pub(super) fn awaited(&self) -> &Bits {
        &self.awaited
    }

    /// The medium has these bits now, durably, or will have them before it is written to.
    pub(super) fn put_marked(&mut self, word: u64, bits: u64) {
        self.marked.put_word(word, bits);
    }

    /// Takes a free slot: the next one in order.
    pub(super) fn take(&mut self) -> Option<u32> {
        if self.free_count == 0 {
            return None;
        }
        let (words, first) = (words_of(self.count().into()), self.cursor / 64);
        // The first word follows again at the end, with the slots before the cursor.
        let slot = (0..=words).find_map(|nth| {
            let word = (first + nth) % words;
            let from = if nth == 0 { u64::MAX << (self.cursor % 64) } else { u64::MAX };
            let found = self.free.word(word) & from;
            (found != 0).then(|| word * 64 + u64::from(found.trailing_zeros()))
        })?;
        self.free.clear(slot);
        self.free_count -= 1;
        self.cursor = (slot + 1) % u64::from(self.count());
        Some(slot as u32)
    }

    /// A slot that was taken is empty; or its mapping is also gone from the medium.
    pub(super) fn give_back(&mut self, slot: u32) {
        debug_assert!(self.block(slot).is_none() && !self.free.is_set(slot.into()));
        self.free.set(slot.into());
        self.free_count += 1;
    }

    /// A slot that was taken holds `block` from now on.
    pub(super) fn map(&mut self, slot: u32, block: u64) {
        self.index.insert(block, slot);
        self.fresh.set(slot.into());
        self.marked.clear(slot.into());
    }

    /// It holds its block no more. It is not free yet.
    pub(super) fn unmap(&mut self, slot: u32, block: u64) {
        self.index.remove(block, slot);
        self.clean(slot);
        self.marked.clear(slot.into());
        self.fresh.clear(slot.into());
    }

    /// Its mapping is durable.
    pub(super) fn settle(&mut self, slot: u32) {
        self.fresh.clear(slot.into());
    }
}
