//! A bit-packed array: small numbers of the same few bits, without gaps.

/// Numbers of at most this many bits are in eight bytes, wherever in a byte they begin.
const UNALIGNED_MAX: u32 = 57;
const WORD: usize = 8;

/// The bits that numbers up to `max` take.
pub(super) fn bits_of(max: u64) -> u32 {
    u64::BITS - max.leading_zeros()
}

/// A mask of the lower bits.
pub(super) fn ones(bits: u32) -> u64 {
    u64::MAX.checked_shr(u64::BITS - bits).unwrap_or(0)
}

/// The numbers. All are zero at first.
#[derive(Debug)]
pub(super) struct BitArray {
    bytes: Box<[u8]>,
    /// Bits of a number.
    width: u32,
    mask: u64,
}

impl BitArray {
    /// `count` numbers of at most 64 bits each.
    pub(super) fn new(count: usize, bits: u32) -> BitArray {
        let width = if bits > UNALIGNED_MAX { u64::BITS } else { bits };
        let len = (count * width as usize).div_ceil(8) + WORD;
        BitArray { bytes: vec![0; len].into_boxed_slice(), width, mask: ones(width) }
    }

    /// Where a number is: its bytes, and the bits before it.
    #[inline]
    fn place(&self, nth: usize) -> (usize, u32) {
        let bit = nth * self.width as usize;
        (bit / 8, (bit % 8) as u32)
    }

    #[inline]
    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes[at..at + WORD].try_into().expect("eight bytes"))
    }

    /// Number `nth`.
    #[inline]
    pub(super) fn get(&self, nth: usize) -> u64 {
        let (at, shift) = self.place(nth);
        self.word(at) >> shift & self.mask
    }

    /// Number `nth` becomes what `change` makes of it, which has no more bits.
    #[inline]
    pub(super) fn change(&mut self, nth: usize, change: impl FnOnce(u64) -> u64) {
        let (at, shift) = self.place(nth);
        let word = self.word(at);
        let new = change(word >> shift & self.mask);
        debug_assert!(new & !self.mask == 0, "{new} takes more than {} bits", self.width);
        let word = word & !(self.mask << shift) | new << shift;
        self.bytes[at..at + WORD].copy_from_slice(&word.to_le_bytes());
    }

    /// Number `nth` becomes `new`.
    #[inline]
    pub(super) fn put(&mut self, nth: usize, new: u64) {
        self.change(nth, |_| new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    #[test]
    fn numbers_of_any_width_do_not_touch_their_neighbours() {
        let mut prng = Prng::new(3);
        for bits in 1..=64 {
            let count = 1 + prng.below(40) as usize;
            let (mut row, mut model) = (BitArray::new(count, bits), vec![0; count]);
            for _ in 0..500 {
                let (nth, number) = (prng.below(count as u64) as usize, prng.next_u64());
                model[nth] = number & ones(bits);
                row.put(nth, model[nth]);
                let found: Vec<u64> = (0..count).map(|nth| row.get(nth)).collect();
                assert_eq!(found, model, "{bits} bits");
            }
        }
    }

    #[test]
    fn bits_are_counted() {
        let wanted = [(0, 0), (1, 1), (2, 2), (255, 8), (256, 9), (u64::MAX, 64)];
        wanted.iter().for_each(|(max, bits)| assert_eq!(bits_of(*max), *bits));
        assert_eq!([0, 1, 8, 64].map(ones), [0, 1, 255, u64::MAX]);
    }
}
