//! Recently dropped blocks (ghosts): two bytes for each, with occasional mistakes. A table of
//! fingerprints, in which a new block replaces an older one.

/// 8 bits of the hash of the block's number, 2 bits for how often it was used, and 6 bits for the
/// time when it was dropped.
type Ghost = u16;

const AGES: u64 = 1 << 6;
const USES_SHIFT: u32 = 6;
const FINGERPRINT_SHIFT: u32 = 8;
/// Places where one block may be.
const WAYS: usize = 4;

/// The blocks that were dropped last. Time is counted in dropped blocks.
#[derive(Debug)]
pub(super) struct Ghosts {
    /// 0: no ghost.
    table: Box<[Ghost]>,
    left: u64,
    /// How many blocks are dropped while a ghost's age grows by one.
    per_age: u64,
}

impl Ghosts {
    /// Remembers about as many blocks as left last.
    pub(super) fn new(blocks: usize) -> Ghosts {
        let len = blocks.max(WAYS).next_multiple_of(WAYS);
        // A ghost is forgotten before its age could be mistaken for a young one's.
        let per_age = (len as u64).div_ceil(AGES / 2);
        Ghosts { table: vec![0; len].into_boxed_slice(), left: 0, per_age }
    }

    /// A block is dropped that was used `uses` times.
    pub(super) fn put(&mut self, block: u64, uses: u8) {
        let now = self.age_now();
        self.left += 1;
        let (ways, ghost) = self.find(block, now);
        let table = &mut self.table[ways..ways + WAYS];
        let age = |other: Ghost| match other {
            0 => AGES,
            other => now.wrapping_sub(u64::from(other)) % AGES,
        };
        let oldest = (0..WAYS).max_by_key(|&way| age(table[way])).expect("there are some");
        table[oldest] = ghost | Ghost::from(uses.min(3)) << USES_SHIFT;
    }

    /// How often a recently dropped block was used. It is forgotten then.
    pub(super) fn take(&mut self, block: u64) -> Option<u8> {
        let now = self.age_now();
        let (ways, ghost) = self.find(block, now);
        let table = &mut self.table[ways..ways + WAYS];
        let is_of_block = |other: Ghost| other >> FINGERPRINT_SHIFT == ghost >> FINGERPRINT_SHIFT;
        let found = table.iter_mut().find(|other| **other != 0 && is_of_block(**other));
        let found = std::mem::take(found?);
        let age = now.wrapping_sub(u64::from(found)) % AGES;
        (age <= AGES / 2).then_some((found >> USES_SHIFT & 3) as u8)
    }

    fn age_now(&self) -> u64 {
        self.left / self.per_age % AGES
    }

    /// The first of the block's slots in the table, and the fingerprint that it would have there.
    fn find(&self, block: u64, now: u64) -> (usize, Ghost) {
        // Fibonacci hashing: the upper bits of the product depend on all bits of the number.
        let hash = block.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let sets = self.table.len() / WAYS;
        let set = ((u128::from(hash) * sets as u128) >> 64) as usize;
        let fingerprint = (hash >> 16) as u16 & 0xFF | 1;
        (set * WAYS, fingerprint << FINGERPRINT_SHIFT | now as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_blocks_are_remembered_and_old_ones_are_not() {
        let mut ghosts = Ghosts::new(10_000);
        (0..100_000).for_each(|block| ghosts.put(block, (block % 4) as u8));
        let found = |ghosts: &mut Ghosts, blocks: std::ops::Range<u64>| {
            let len = blocks.end - blocks.start;
            100 * blocks.filter(|block| ghosts.take(*block).is_some()).count() as u64 / len
        };
        let uses = (99_000..99_500).filter(|block| ghosts.take(*block) == Some((*block % 4) as u8));
        assert!(uses.count() > 470);
        assert!(found(&mut ghosts, 97_000..99_000) > 93);
        assert!(found(&mut ghosts, 0..80_000) < 4, "mistakes are rare");
        assert!(found(&mut ghosts, 97_000..99_000) < 4, "each counts once");
        // All entries grow old, and do not become young again when their age wraps around.
        let mut idle = Ghosts::new(64);
        idle.put(1, 0);
        let mut seen = 0;
        for block in 1_000_000..1_001_000 {
            idle.put(block, 0);
            seen += u64::from(idle.take(1).is_some());
        }
        assert!((1..=8).contains(&seen), "{seen}: once, and where another looks the same");
    }
}
