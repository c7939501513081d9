//! The mark of devices that failed a flush, in the superblock.
//!
//! A device that fails a flush may return data that it does not have durably, until the machine
//! restarts. The mark is for the servers after the one that met the error, also after the kernel
//! has served the cache. It counts in the boot in which it was written.
//!
//! | bytes | content |
//! |---|---|
//! | 464..468 | `udmd` |
//! | 468..472 | CRC-32C of bytes 472..480 |
//! | 472..480 | the boot, except its lowest two bits; bit 0: the cache device, bit 1: the origin |
//!
//! These bytes are in the first sector, which changes as a whole. The kernel keeps what is there.

use crate::base::crc::crc32c_raw;
use crate::shm::boot;

/// Where the mark is in the superblock.
pub const DOUBT_AT: usize = 464;
/// Bytes of the mark.
pub const DOUBT_BYTES: usize = 16;
const MAGIC: [u8; 4] = *b"udmd";
const CACHE: u64 = 1;
const ORIGIN: u64 = 2;

/// The devices that failed a flush, so that a power failure may lose data that they still return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doubt {
    /// The cache device.
    pub cache: bool,
    /// The origin.
    pub origin: bool,
}

impl Doubt {
    /// The mark in `place`. `None`: these are not bytes of a mark.
    pub(super) fn parse(place: &[u8]) -> Option<Doubt> {
        let (magic, rest) = place.split_at_checked(MAGIC.len())?;
        let (sum, word) = rest.split_at_checked(4)?;
        if magic != MAGIC {
            return None;
        }
        let word: [u8; 8] = word.try_into().ok()?;
        let bits = u64::from_le_bytes(word);
        let counts = sum == sum_of(word) && bits >> 2 == boot() >> 2;
        let has = |bit| counts && bits & bit != 0;
        Some(Doubt { cache: has(CACHE), origin: has(ORIGIN) })
    }

    /// Stores the mark if there is anything to say, even over bytes of another program: without the
    /// mark, data could be lost.
    pub(super) fn put(self, place: &mut [u8]) {
        if self == Doubt::default() {
            return;
        }
        let flags = if self.cache { CACHE } else { 0 } | if self.origin { ORIGIN } else { 0 };
        let word = (boot() & !(CACHE | ORIGIN) | flags).to_le_bytes();
        place[..4].copy_from_slice(&MAGIC);
        place[4..8].copy_from_slice(&sum_of(word));
        place[8..].copy_from_slice(&word);
    }
}

fn sum_of(word: [u8; 8]) -> [u8; 4] {
    (!crc32c_raw(u32::MAX, &word)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_counts_in_its_boot() {
        for (cache, origin) in [(true, false), (false, true), (true, true)] {
            let doubt = Doubt { cache, origin };
            let mut place = [7; DOUBT_BYTES];
            doubt.put(&mut place);
            assert_eq!(Doubt::parse(&place), Some(doubt));
            for (at, what) in [(4, "sum"), (8, "flags"), (12, "boot")] {
                let mut place = place;
                place[at] ^= 3;
                assert_eq!(Doubt::parse(&place), Some(Doubt::default()), "{what}");
            }
            // Another boot, in order.
            let word = (boot() ^ 1 << 40 | CACHE | ORIGIN).to_le_bytes();
            place[4..8].copy_from_slice(&sum_of(word));
            place[8..].copy_from_slice(&word);
            assert_eq!(Doubt::parse(&place), Some(Doubt::default()));
        }
    }

    #[test]
    fn without_a_failed_flush_bytes_of_others_stay() {
        let mut place = [7; DOUBT_BYTES];
        Doubt::default().put(&mut place);
        assert_eq!(place, [7; DOUBT_BYTES]);
        assert_eq!(Doubt::parse(&place), None);
    }
}
