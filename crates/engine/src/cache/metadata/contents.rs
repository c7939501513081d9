//! The contents of a cache: the origin block of each slot, whether it is dirty, the policy's hint
//! for it, and the discarded parts of the origin.
//!
//! It is as compact as on media: 8 bytes and a bit for each slot, and 4 bytes more while there are
//! hints, until a policy has read them.

use super::bits::Bits;
use super::superblock::Superblock;
use crate::mutants::{self, Mutant};

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

/// The state of all blocks of a cache.
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
    /// The contents of a cache of `slots` slots, none in use.
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

    /// The contents as a server uses them when it opens the cache. Without a clean shutdown all
    /// blocks are dirty, and there are neither hints nor discards. If the mappings must not be
    /// trusted, the result is empty.
    pub fn opened(mut self, superblock: &Superblock) -> Contents {
        if superblock.is_untrusted && !mutants::is(Mutant::UntrustedBelieved) {
            let discards = Bits::new(self.discards.len());
            return Contents { discards, ..Contents::empty(self.slots()) };
        }
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

    /// The mapping of a slot in the format of the media.
    pub fn media_mapping(&self, version: u32, slot: u64) -> u64 {
        let is_dirty = version == 1 && self.dirty.is_set(slot);
        self.mappings[slot as usize] | if is_dirty { DIRTY } else { 0 }
    }
}
