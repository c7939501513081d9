//! A two-way map between numbers and blocks: the block of a number, and the number of a block.
//! Numbers are slots, or stand for larger pieces of the origin.
//!
//! Blocks with the same hash are a chain of numbers. The hash can be turned back into the block.
//! Its upper bits are the number of the chain, which is stored at the chain's end; so a number
//! stores only the lower bits, next to the link to the next number in the chain. For a million
//! slots and four billion blocks, these are 34 bits for each slot, and the heads of chains are 11
//! more. A table of slots by hash and one of blocks by slot would need 56 to 75 bits.

use super::bit_array::{BitArray, bits_of, ones};

/// Of the golden ratio: upper bits of a product with it depend on all bits of the other factor.
const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// Numbers, and their blocks.
#[derive(Debug)]
pub(super) struct Index {
    /// The first number of each chain, plus 1; 0: it has none.
    heads: BitArray,
    /// For each number the next one, plus 1, or its chain, plus 1 and `count`; 0: without a block.
    /// Above that, the lower bits of the hash.
    links: BitArray,
    count: u32,
    next_bits: u32,
    rest_bits: u32,
    hash: Hash,
}

/// Turns blocks into hashes of as many bits, and back.
#[derive(Debug)]
struct Hash {
    factor: u64,
    inverse: u64,
    mask: u64,
}

impl Hash {
    fn new(bits: u32, key: u64) -> Hash {
        let factor = key >> (u64::BITS - bits.max(1)) | 1;
        // Newton's method: each step doubles the number of correct bits, which is five at first.
        let start = factor.wrapping_mul(3) ^ 2;
        let better =
            |inverse: u64| inverse.wrapping_mul(2_u64.wrapping_sub(factor.wrapping_mul(inverse)));
        let inverse = (0..4).fold(start, |inverse, _| better(inverse));
        Hash { factor, inverse, mask: ones(bits) }
    }

    #[inline]
    fn of(&self, block: u64) -> u64 {
        block.wrapping_mul(self.factor) & self.mask
    }

    fn block(&self, hash: u64) -> u64 {
        hash.wrapping_mul(self.inverse) & self.mask
    }
}

impl Index {
    /// For numbers below `count`, fewer than 2^28, that have none of `blocks` blocks yet.
    pub(super) fn new(count: u64, blocks: u64) -> Index {
        Index::with_key(count, blocks, FACTOR)
    }

    /// The same, with a hash that depends on `key`.
    pub(super) fn with_key(count: u64, blocks: u64, key: u64) -> Index {
        assert!(count < 1 << 28, "numbers have 28 bits");
        // One and a half to three numbers for each chain.
        let chain_bits = bits_of(count * 2 / 3).saturating_sub(1);
        let hash_bits = bits_of(blocks.saturating_sub(1)).max(chain_bits);
        let chains = 1_u64 << chain_bits;
        let next_bits = bits_of(count + chains);
        let rest_bits = hash_bits - chain_bits;
        Index {
            heads: BitArray::new(chains as usize, bits_of(count)),
            links: BitArray::new(count as usize, next_bits + rest_bits),
            count: count as u32,
            next_bits,
            rest_bits,
            hash: Hash::new(hash_bits, key),
        }
    }

    /// How many numbers there are.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// The chain of a block, and the rest of its hash.
    #[inline]
    fn split(&self, block: u64) -> (usize, u64) {
        let hash = self.hash.of(block);
        ((hash >> self.rest_bits) as usize, hash & ones(self.rest_bits))
    }

    /// The link of a number: the next number of its chain, and the rest of the hash.
    #[inline]
    fn link(&self, number: u64) -> (u64, u64) {
        let link = self.links.get(number as usize);
        (link & ones(self.next_bits), link >> self.next_bits)
    }

    /// The number that a link or a head means, if it means one.
    #[inline]
    fn number(&self, next: u64) -> Option<u64> {
        let number = next.wrapping_sub(1);
        (number < u64::from(self.count)).then_some(number)
    }

    /// The number that has `block`.
    #[inline]
    pub(super) fn find(&self, block: u64) -> Option<u32> {
        let (chain, wanted) = self.split(block);
        let mut at = self.number(self.heads.get(chain));
        while let Some(number) = at {
            let (next, rest) = self.link(number);
            if rest == wanted && block <= self.hash.mask {
                return Some(number as u32);
            }
            at = self.number(next);
        }
        None
    }

    /// Whether a number has a block.
    pub(super) fn is_used(&self, number: u32) -> bool {
        self.link(number.into()).0 != 0
    }

    /// The block that a number has.
    pub(super) fn block(&self, number: u32) -> Option<u64> {
        let (mut next, rest) = self.link(number.into());
        while let Some(number) = self.number(next) {
            next = self.link(number).0;
        }
        let chain = next.checked_sub(1 + u64::from(self.count))?;
        Some(self.hash.block(chain << self.rest_bits | rest))
    }

    /// A number without a block has `block` from now on, which no other number has.
    pub(super) fn insert(&mut self, block: u64, number: u32) {
        assert!(block <= self.hash.mask, "block {block} is beyond the end");
        debug_assert!(!self.is_used(number), "{number} has a block");
        let (chain, rest) = self.split(block);
        let next = match self.heads.get(chain) {
            0 => 1 + u64::from(self.count) + chain as u64,
            first => first,
        };
        self.links.put(number as usize, rest << self.next_bits | next);
        self.heads.put(chain, u64::from(number) + 1);
    }

    /// `number` has `block` no more.
    pub(super) fn remove(&mut self, block: u64, number: u32) {
        let (chain, _) = self.split(block);
        let to_number = u64::from(number) + 1;
        let next = self.link(number.into()).0;
        self.links.put(number as usize, 0);
        let mut at = self.heads.get(chain);
        if at == to_number {
            // The end of a chain is not a head.
            return self.heads.put(chain, self.number(next).map_or(0, |_| next));
        }
        let before = loop {
            let before = self.number(at).expect("a block that is there");
            at = self.link(before).0;
            if at == to_number {
                break before;
            }
        };
        let mask = ones(self.next_bits);
        self.links.change(before as usize, |link| link & !mask | next);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::collections::hash_map::Entry;

    use super::{Hash, Index};
    use crate::prng::Prng;

    #[test]
    fn hashes_can_be_turned_back() {
        let mut prng = Prng::new(6);
        for bits in 0..=48 {
            let hash = Hash::new(bits, prng.next_u64());
            for _ in 0..100 {
                let block = prng.next_u64() & hash.mask;
                assert_eq!(hash.block(hash.of(block)), block, "{bits} bits");
            }
        }
    }

    #[test]
    fn blocks_are_found_after_any_changes() {
        let mut prng = Prng::new(5);
        for (slots, spread) in
            [(1_u32, 1), (1, 0x1_0001), (2, 1), (7, 1), (100, 3), (1000, 1 << 33)]
        {
            let blocks = u64::from(slots) * 2 * spread;
            let mut index = Index::new(slots.into(), blocks);
            let mut model: HashMap<u64, u32> = HashMap::new();
            for _ in 0..5000 {
                let slot = prng.below(slots.into()) as u32;
                let block = prng.below(u64::from(slots) * 2) * spread;
                if let Some((&old, _)) = model.iter().find(|(_, at)| **at == slot) {
                    assert_eq!(index.block(slot), Some(old));
                    index.remove(old, slot);
                    model.remove(&old);
                } else if let Entry::Vacant(place) = model.entry(block) {
                    index.insert(block, slot);
                    place.insert(slot);
                }
                let held = model.iter().find(|(_, at)| **at == slot).map(|(block, _)| *block);
                assert_eq!((index.block(slot), index.is_used(slot)), (held, held.is_some()));
                let asked = prng.below(u64::from(slots) * 2) * spread;
                assert_eq!(index.find(asked), model.get(&asked).copied());
                assert_eq!(index.find(asked | 1 << 50), None, "that is beyond the end");
            }
        }
    }

    #[test]
    fn the_first_and_the_last_block_are_held() {
        for blocks in [1, 2, u64::from(u32::MAX), 1 << 32, 1 << 48] {
            let mut index = Index::new(3, blocks);
            assert_eq!(index.count(), 3);
            index.insert(blocks - 1, 1);
            assert_eq!([0, 1, 2].map(|number| index.block(number)), [None, Some(blocks - 1), None]);
            assert_eq!(index.find(blocks - 1), Some(1));
            index.remove(blocks - 1, 1);
            index.insert(0, 1);
            assert_eq!((index.find(0), index.block(1)), (Some(1), Some(0)));
        }
    }
}
