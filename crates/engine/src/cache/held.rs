//! Which block each of many holds: four bytes for each, and two more if blocks have longer numbers.

/// None.
pub(super) const NO_BLOCK: u64 = u64::MAX;

/// The blocks that slots hold, or others that have numbers.
#[derive(Debug)]
pub(super) struct Held {
    low: Box<[u32]>,
    high: Box<[u16]>,
}

impl Held {
    /// Of `count` that hold nothing yet, of `blocks` blocks.
    pub(super) fn new(count: u64, blocks: u64) -> Held {
        let is_wide = blocks > u64::from(u32::MAX);
        let high = if is_wide { count as usize } else { 0 };
        Held { low: vec![u32::MAX; count as usize].into(), high: vec![u16::MAX; high].into() }
    }

    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        self.low.len() as u32
    }

    /// The block that number `nth` holds, or [`NO_BLOCK`].
    #[inline]
    pub(super) fn get(&self, nth: u32) -> u64 {
        let low = self.low[nth as usize];
        match self.high.get(nth as usize) {
            Some(high) if (*high, low) == (u16::MAX, u32::MAX) => NO_BLOCK,
            Some(high) => u64::from(*high) << 32 | u64::from(low),
            None if low == u32::MAX => NO_BLOCK,
            None => low.into(),
        }
    }

    /// Blocks have numbers of 48 bits, of which the last one is of none.
    pub(super) fn put(&mut self, nth: u32, block: u64) {
        self.low[nth as usize] = block as u32;
        if let Some(high) = self.high.get_mut(nth as usize) {
            *high = (block >> 32) as u16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_any_number_are_held() {
        for blocks in [1, u64::from(u32::MAX), 1 << 32, 1 << 40] {
            let mut held = Held::new(3, blocks);
            let last = blocks - 1;
            held.put(1, last);
            assert_eq!([held.get(0), held.get(1), held.get(2)], [NO_BLOCK, last, NO_BLOCK]);
            held.put(1, NO_BLOCK);
            held.put(2, last / 2);
            assert_eq!([held.get(0), held.get(1), held.get(2)], [NO_BLOCK, NO_BLOCK, last / 2]);
        }
    }
}
