//! What the blocks of a cache are: which block of the origin each holds, whether it is dirty, what
//! the policy noted of it, and what of the origin was discarded.
//!
//! It is as compact as it is on media: 8 bytes and a bit for each slot, and 4 bytes more while
//! there are hints, which a policy takes over.

use super::bits::Bits;
use super::superblock::Superblock;

/// Bit of a mapping: the slot is in use.
pub const VALID: u64 = 1;
/// Bit of a mapping, in version 1 and on media only: the slot is dirty.
pub const DIRTY: u64 = 2;
/// The other bits below the origin's block.
pub const UNKNOWN_FLAGS: u64 = 0xFFFC;
/// Where the origin's block begins.
const BLOCK_SHIFT: u32 = 16;

/// The mapping of a slot that holds `block` of the origin, or of one that is not in use.
pub fn mapping(block: Option<u64>) -> u64 {
    block.map_or(0, |block| block << BLOCK_SHIFT | VALID)
}

/// The block of the origin that a mapping leads to.
pub fn block_of(mapping: u64) -> Option<u64> {
    (mapping & VALID != 0).then_some(mapping >> BLOCK_SHIFT)
}

/// What the blocks of a cache are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// A mapping for each slot, without the flag of version 1.
    pub mappings: Vec<u64>,
    /// A bit for each slot; none of one that is not in use.
    pub dirty: Bits,
    /// A number for each slot, if there are any.
    pub hints: Option<Vec<u32>>,
    /// A bit for each discard block.
    pub discards: Bits,
}

impl Contents {
    /// Of a cache of `slots` slots, none in use.
    pub fn empty(slots: u64) -> Contents {
        Contents {
            mappings: vec![0; slots as usize],
            dirty: Bits::new(slots),
            hints: None,
            discards: Bits::default(),
        }
    }

    /// How many slots there are.
    pub fn slots(&self) -> u64 {
        self.mappings.len() as u64
    }

    /// The block of the origin that a slot holds.
    pub fn block(&self, slot: u64) -> Option<u64> {
        self.mappings.get(slot as usize).copied().and_then(block_of)
    }

    /// The slots in use, and the block of the origin that each holds.
    pub fn in_use(&self) -> impl Iterator<Item = (u64, u64)> {
        let slots = self.mappings.iter().enumerate();
        slots.filter_map(|(slot, value)| Some((slot as u64, block_of(*value)?)))
    }

    /// How many slots are in use.
    pub fn mapped(&self) -> u64 {
        self.in_use().count() as u64
    }

    /// What a kernel makes of it when it opens the cache: without a clean shutdown everything is
    /// dirty, and there are neither hints nor discards.
    pub fn opened(mut self, superblock: &Superblock) -> Contents {
        if superblock.is_clean() {
            return self;
        }
        for (slot, _) in self.mappings.iter().enumerate().filter(|(_, value)| **value != 0) {
            self.dirty.set(slot as u64);
        }
        self.hints = None;
        self.discards = Bits::new(self.discards.len());
        self
    }

    /// The mapping of a slot as it is on media.
    pub fn media_mapping(&self, version: u32, slot: u64) -> u64 {
        let is_dirty = version == 1 && self.dirty.is_set(slot);
        self.mappings[slot as usize] | if is_dirty { DIRTY } else { 0 }
    }
}
