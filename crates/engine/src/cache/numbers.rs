//! A quick hash of numbers that no client can choose many of: slots, and blocks with requests in
//! flight.

use std::hash::{BuildHasherDefault, Hasher};

/// For maps by number.
pub(super) type ByNumber = BuildHasherDefault<NumberHasher>;

/// Fibonacci hashing; the lower bits, which choose the place, depend on all bits of the number.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    #[inline]
    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    #[inline]
    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}
