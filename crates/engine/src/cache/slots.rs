//! What each slot of the cache device has, as memory knows it and as the medium does.
//!
//! | of a slot | meaning |
//! |---|---|
//! | mapping | the block that it holds, or none |
//! | dirty | it is newer than the origin |
//! | marked | the medium says, durably, that it is dirty |
//! | fresh | its mapping may not be on the medium |
//!
//! 1. What is dirty is marked, and not fresh; but for a block that was written as a whole, until
//!    the commit for which its writer waits.
//! 2. A slot is free when neither memory nor the medium says that it holds a block.

use std::collections::VecDeque;

use super::index::Index;
use super::metadata::Contents;
use super::metadata::bits::Bits;
use super::metadata::contents::{block_of, mapping};

/// The slots.
#[derive(Debug)]
pub(super) struct Slots {
    mappings: Vec<u64>,
    dirty: Bits,
    marked: Bits,
    fresh: Bits,
    free: VecDeque<u32>,
    index: Index,
    dirty_count: u32,
}

impl Slots {
    /// As the medium has it.
    pub(super) fn new(contents: Contents) -> Slots {
        let Contents { mappings, dirty, .. } = contents;
        let count = mappings.len() as u64;
        let mut index = Index::new(count);
        let mut free = VecDeque::new();
        for (slot, value) in mappings.iter().enumerate() {
            match block_of(*value) {
                Some(block) => index.insert(block, slot as u32),
                None => free.push_back(slot as u32),
            }
        }
        let (marked, fresh, dirty_count) = (dirty.clone(), Bits::new(count), dirty.ones() as u32);
        Slots { mappings, dirty, marked, fresh, free, index, dirty_count }
    }

    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        self.mappings.len() as u32
    }

    /// How many are free.
    pub(super) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// How many are dirty.
    pub(super) fn dirty_count(&self) -> u32 {
        self.dirty_count
    }

    /// The slot that holds `block`.
    #[inline]
    pub(super) fn find(&self, block: u64) -> Option<u32> {
        self.index.find(block, &self.mappings)
    }

    /// The block that it holds.
    pub(super) fn block(&self, slot: u32) -> Option<u64> {
        block_of(self.mappings[slot as usize])
    }

    /// Its mapping.
    pub(super) fn mapping(&self, slot: u64) -> u64 {
        self.mappings[slot as usize]
    }

    #[inline]
    pub(super) fn is_dirty(&self, slot: u32) -> bool {
        self.dirty.is_set(slot.into())
    }

    /// Whether the medium has its mapping, and says that it is dirty: it may be written to.
    #[inline]
    pub(super) fn is_writable(&self, slot: u32) -> bool {
        self.marked.is_set(slot.into()) && !self.fresh.is_set(slot.into())
    }

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
        let slots = first..(first + 64).min(self.mappings.len() as u64);
        let bit = |slot: u64| u64::from(self.mapping(slot) != 0) << (slot - first);
        slots.map(bit).fold(0, |word, bit| word | bit)
    }

    /// Changes whether it is dirty. Says whether that is a change.
    #[inline]
    pub(super) fn put_dirty(&mut self, slot: u32, is_dirty: bool) -> bool {
        let is_new = self.is_dirty(slot) != is_dirty;
        if is_new {
            self.dirty.put(slot.into(), is_dirty);
            match is_dirty {
                true => self.dirty_count += 1,
                false => self.dirty_count -= 1,
            }
        }
        is_new
    }

    /// The medium has these bits now, durably, or will have them before it is written to.
    pub(super) fn put_marked(&mut self, word: u64, bits: u64) {
        self.marked.put_word(word, bits);
    }

    /// Takes a free slot.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop_front()
    }

    /// A slot that was taken holds nothing; or its mapping is gone from the medium, too.
    pub(super) fn give_back(&mut self, slot: u32) {
        debug_assert!(self.block(slot).is_none() && !self.free.contains(&slot));
        self.free.push_back(slot);
    }

    /// A slot that was taken holds `block` from now on.
    pub(super) fn map(&mut self, slot: u32, block: u64) {
        self.mappings[slot as usize] = mapping(Some(block));
        self.index.insert(block, slot);
        self.fresh.set(slot.into());
        self.marked.clear(slot.into());
    }

    /// It holds its block no more. It is not free yet.
    pub(super) fn unmap(&mut self, slot: u32, block: u64) {
        self.index.remove(block, &self.mappings);
        self.mappings[slot as usize] = 0;
        self.put_dirty(slot, false);
        self.marked.clear(slot.into());
        self.fresh.clear(slot.into());
    }

    /// Its mapping is durable.
    pub(super) fn settle(&mut self, slot: u32) {
        self.fresh.clear(slot.into());
    }
}
