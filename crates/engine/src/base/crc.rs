//! CRC-32C in the kernel's convention, and a CRC of 64 bits. No other module computes a checksum.
//!
//! The kernel's `crc32c(seed, data)` starts its register at `seed` and inverts neither at the
//! start nor at the end; dm-pcache seeds with 0x3B15A.

use crc_fast::{CrcAlgorithm, Digest};

/// dm-pcache's seed.
pub const PCACHE_SEED: u32 = 0x0003_B15A;

/// The raw CRC-32C register after `data`, started at `register`.
pub fn crc32c_raw(register: u32, data: &[u8]) -> u32 {
    // The library inverts at both ends; inverting the seed and the result undoes it.
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(register));
    digest.update(data);
    !(digest.finalize() as u32)
}

/// The checksum of dm-pcache's structures and data.
pub fn pcache_crc(data: &[u8]) -> u32 {
    crc32c_raw(PCACHE_SEED, data)
}

/// CRC-64/XZ.
pub fn crc64(data: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Xz, data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_one_agrees_with_its_catalogue() {
        assert_eq!(crc64(b"123456789"), 0x995D_C9BB_DF19_39FA);
        assert_eq!(crc64(b""), 0);
    }

    #[test]
    fn agrees_with_the_specification_and_a_second_library() {
        let cases: [(&[u8], u32); 8] = [
            (b"", 0x0003_B15A),
            (b"123456789", 0xE586_8AB2),
            (&[0; 8], 0x46E4_ACEF),
            (&[0; 12], 0x5F84_0B80),
            (&[0; 20], 0xB9B6_9066),
            (&[0; 4096], 0x6035_71B1),
            (&[0xFF; 512], 0xA7F4_E604),
            (&[0x55; 4096], 0x0B22_E4C7),
        ];
        for (data, expected) in cases {
            assert_eq!(pcache_crc(data), expected, "{} bytes", data.len());
            assert_eq!(!crc32c::crc32c_append(!PCACHE_SEED, data), expected);
        }
        assert_eq!(pcache_crc(&[0; 8192]), 0xD555_7D8C);
    }
}
