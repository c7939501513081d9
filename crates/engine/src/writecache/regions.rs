//! The regions of the mapped device that may have blocks in the cache, one bit for each MiB: the
//! cost of a long discard follows the blocks of its range that are in the cache.

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::units::MIB;

/// Bytes of a region: neighbours share a stripe.
pub const REGION_BYTES: u64 = MIB;

/// A bit for each region. The bit of a region changes under the lock of its stripe.
#[derive(Debug)]
pub struct Regions {
    words: Box<[AtomicU64]>,
    /// Blocks of a region, as a power of two.
    shift: u32,
}

impl Regions {
    /// The regions of an origin, none of which has blocks.
    pub fn new(origin_bytes: u64, block_bytes: u32) -> Regions {
        let words = origin_bytes.div_ceil(REGION_BYTES * 64);
        Regions {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            shift: (REGION_BYTES / u64::from(block_bytes)).ilog2(),
        }
    }

    /// Bytes of memory.
    pub fn memory_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    /// The number of the region of a block.
    #[inline]
    pub fn of(&self, block: u64) -> u64 {
        block >> self.shift
    }

    /// The first block after the region of `block`.
    pub fn end(&self, block: u64) -> u64 {
        (self.of(block) + 1) << self.shift
    }

    /// The region of `block` has blocks.
    #[inline]
    pub fn note(&self, block: u64) {
        let bit = 1 << (self.of(block) % 64);
        if let Some(word) = self.words.get((self.of(block) / 64) as usize)
            && word.load(Ordering::Relaxed) & bit == 0
        {
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// The last block of the region of `block` is gone.
    pub fn forget(&self, block: u64) {
        if let Some(word) = self.words.get((self.of(block) / 64) as usize) {
            word.fetch_and(!(1 << (self.of(block) % 64)), Ordering::SeqCst);
        }
    }

    /// The first block from `block` on whose region may have blocks; `end` if there is none before.
    /// This takes no lock. A block that another thread adds meanwhile may be missed: its write has
    /// not completed.
    pub fn next_used(&self, block: u64, end: u64) -> u64 {
        let mut region = self.of(block);
        while region << self.shift < end {
            let Some(word) = self.words.get((region / 64) as usize) else { break };
            let bits = word.load(Ordering::SeqCst) >> (region % 64);
            if bits != 0 {
                region += u64::from(bits.trailing_zeros());
                break;
            }
            region = (region / 64 + 1) * 64;
        }
        (region << self.shift).max(block).min(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regions_with_blocks_are_visited() {
        let bytes = 15 << 40;
        let regions = Regions::new(bytes, 4096);
        let (region, end) = (REGION_BYTES / 4096, bytes / 4096);
        assert!(regions.memory_bytes() <= bytes / MIB / 8);
        assert_eq!(regions.next_used(0, end), end);
        let used = [0, 63 * region + 5, 64 * region, end - 1];
        used.into_iter().for_each(|block| regions.note(block));
        let mut found = Vec::new();
        let mut block = regions.next_used(0, end);
        while block < end {
            found.push(regions.of(block));
            block = regions.next_used(regions.end(block), end);
        }
        assert_eq!(found, used.map(|block| regions.of(block)));
        assert_eq!(regions.next_used(3, end), 3, "within such a region");
        assert_eq!(regions.next_used(region, 60 * region), 60 * region);
        regions.forget(5);
        assert_eq!(regions.next_used(0, end), 63 * region);
        let beyond = end + 64 * region;
        assert_eq!(regions.next_used(beyond, beyond + 5), beyond, "beyond the origin");
    }
}
