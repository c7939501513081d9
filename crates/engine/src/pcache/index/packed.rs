//! The entries of a region with few: a bit for each block, and the non-empty entries in the order
//! of their blocks.

use super::REGION_BLOCKS;

const WORD_BITS: usize = u64::BITS as usize;
const WORDS: usize = REGION_BLOCKS.div_ceil(WORD_BITS);

#[derive(Debug, Default)]
pub(super) struct Packed {
    present: [u64; WORDS],
    /// How many entries there are before each word's.
    before: [u16; WORDS],
    entries: Vec<u64>,
}

impl Packed {
    /// The entry of a block; 0: it has none.
    pub(super) fn get(&self, block: usize) -> u64 {
        if self.is_present(block) { self.entries[self.rank(block)] } else { 0 }
    }

    /// Replaces the entry of a block. 0 takes no room.
    pub(super) fn put(&mut self, block: usize, entry: u64) {
        let rank = self.rank(block);
        match (self.is_present(block), entry != 0) {
            (true, true) => self.entries[rank] = entry,
            (false, true) => {
                if self.entries.len() == self.entries.capacity() {
                    // By a quarter: this form exists to save memory.
                    self.entries.reserve_exact((self.entries.len() / 4).max(4));
                }
                self.entries.insert(rank, entry);
                self.flip(block, 1);
            }
            (true, false) => {
                self.entries.remove(rank);
                self.flip(block, u16::MAX);
            }
            (false, false) => {}
        }
    }

    /// Frees memory that was for more entries.
    pub(super) fn shrink(&mut self) {
        if self.entries.len() < self.entries.capacity() / 2 {
            self.entries.shrink_to_fit();
        }
    }

    /// How many entries there are.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// All entries, with their blocks.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, u64)> {
        let blocks = (0..REGION_BLOCKS).filter(|block| self.is_present(*block));
        blocks.zip(self.entries.iter().copied())
    }

    /// Bytes of memory besides the value itself.
    pub(super) fn memory_bytes(&self) -> u64 {
        (self.entries.capacity() * size_of::<u64>()) as u64
    }

    fn is_present(&self, block: usize) -> bool {
        self.present[block / WORD_BITS] >> (block % WORD_BITS) & 1 == 1
    }

    /// How many entries there are before the block's.
    fn rank(&self, block: usize) -> usize {
        let word = block / WORD_BITS;
        let within = self.present[word] & ((1 << (block % WORD_BITS)) - 1);
        usize::from(self.before[word]) + within.count_ones() as usize
    }

    /// Flips a block's bit; `change` is added to the counts before later words.
    fn flip(&mut self, block: usize, change: u16) {
        let word = block / WORD_BITS;
        self.present[word] ^= 1 << (block % WORD_BITS);
        self.before[word + 1..].iter_mut().for_each(|sum| *sum = sum.wrapping_add(change));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    #[test]
    fn entries_stand_where_they_were_put() {
        let (mut packed, mut prng) = (Packed::default(), Prng::new(1));
        let mut flat = vec![0; REGION_BLOCKS];
        for nth in 0..20_000 {
            // Fills, and empties again.
            let (block, one_in) = (prng.below(REGION_BLOCKS as u64) as usize, nth / 4000 + 1);
            let entry = if prng.one_in(one_in) { nth + 1 } else { 0 };
            packed.put(block, entry);
            flat[block] = entry;
            assert_eq!(packed.get(block), entry);
        }
        for (block, entry) in flat.iter().enumerate() {
            assert_eq!(packed.get(block), *entry);
        }
        let known = flat.iter().copied().enumerate().filter(|(_, entry)| *entry != 0);
        assert!(packed.iter().eq(known) && packed.len() > 0);
        (0..REGION_BLOCKS).for_each(|block| packed.put(block, 0));
        assert_eq!(packed.len(), 0);
    }
}
