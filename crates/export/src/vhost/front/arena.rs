//! Memory for the data of a queue's requests, in blocks of powers of two.
//!
//! Free lists keep returned blocks by size. When all blocks are returned, the memory is whole
//! again. So a request that finds no free space starts at the latest when it is the only one.

/// The smallest block.
const BLOCK_BYTES_MIN: u64 = 4096;
/// Number of sizes: up to 32 MiB.
const SIZES: usize = 14;

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Its address.
    pub at: u64,
    size: usize,
}

/// The free memory.
#[derive(Debug)]
pub(super) struct Arena {
    begin: u64,
    end: u64,
    /// Memory from here on was not taken since all of it was free.
    next: u64,
    free: [Vec<u64>; SIZES],
    taken: usize,
}

impl Arena {
    /// An arena in which all of `begin..end` is free.
    pub fn new(begin: u64, end: u64) -> Arena {
        Arena { begin, end, next: begin, free: Default::default(), taken: 0 }
    }

    /// Takes a block of at least `len` bytes, if there is free space.
    pub fn take(&mut self, len: u64) -> Option<Block> {
        let blocks = len.div_ceil(BLOCK_BYTES_MIN).max(1).next_power_of_two();
        let size = blocks.trailing_zeros() as usize;
        let free = self.free.get_mut(size)?;
        let at = free.pop().or_else(|| {
            let (at, bytes) = (self.next, BLOCK_BYTES_MIN << size);
            (bytes <= self.end - at).then(|| {
                self.next = at + bytes;
                at
            })
        })?;
        self.taken += 1;
        Some(Block { at, size })
    }

    /// Returns a block.
    pub fn put(&mut self, block: Block) {
        self.taken -= 1;
        if self.taken == 0 {
            self.next = self.begin;
            self.free.iter_mut().for_each(Vec::clear);
        } else {
            self.free[block.size].push(block.at);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn memory_that_all_came_back_to_is_whole() {
        let mut arena = Arena::new(4096, 4096 + (64 << 20));
        let small: Vec<Block> = std::iter::from_fn(|| arena.take(1)).collect();
        assert_eq!(small.len(), (64 << 20) / 4096);
        assert_eq!(arena.take(32 << 20), None);
        small.into_iter().for_each(|block| arena.put(block));
        assert_eq!(arena.take(32 << 20).unwrap().at, 4096);
        assert!(arena.take((32 << 20) + 1).is_none(), "no block is so large");
    }

    proptest! {
        #[test]
        fn blocks_that_are_taken_never_overlap(
            steps in proptest::collection::vec((1..200_000_u64, any::<u16>()), 1..300),
        ) {
            let mut arena = Arena::new(0, 8 << 20);
            let mut taken: Vec<(Block, u64)> = Vec::new();
            for (len, which) in steps {
                if which % 3 == 0 && !taken.is_empty() {
                    arena.put(taken.swap_remove(usize::from(which) % taken.len()).0);
                } else if let Some(block) = arena.take(len) {
                    prop_assert!(block.at + len <= 8 << 20);
                    for (other, bytes) in &taken {
                        prop_assert!(block.at + len <= other.at || other.at + bytes <= block.at);
                    }
                    taken.push((block, len));
                }
            }
        }
    }
}
