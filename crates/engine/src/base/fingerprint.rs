//! A fingerprint of data: a few of its words, mixed. Shared memory that outlives its server keeps a
//! fingerprint for the data that it refers to. If the medium was replaced by an older copy of
//! itself, the fingerprint does not match. It is cheap enough for every write, but it does not
//! detect a copy that differs in none of the sampled words.

/// The sample of `data`; never 0.
#[inline]
pub fn fingerprint_of(data: &[u8]) -> u32 {
    debug_assert!(data.len() >= 8);
    let word = |at: usize| {
        let bytes = data.get(at..).and_then(<[u8]>::first_chunk::<8>);
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    mix_fingerprint(fingerprint_offsets(data.len()).map(word))
}

/// The positions of the 8-byte words that the fingerprint of `len` bytes samples.
#[inline]
pub fn fingerprint_offsets(len: usize) -> [usize; 3] {
    [0, len / 2, len - 8]
}

/// The sample of data that has these words in those places.
#[inline]
pub fn mix_fingerprint(words: [u64; 3]) -> u32 {
    let mixed = words[0] ^ words[1].rotate_left(21) ^ words[2].rotate_left(42);
    // A product: repetition within a word must not cancel out.
    (mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_that_differs_where_it_is_looked_at_looks_different() {
        let zeroes = [0; 4096];
        assert_ne!(fingerprint_of(&zeroes), 0);
        assert!((1..=255).all(|byte| fingerprint_of(&[byte; 512]) != fingerprint_of(&zeroes)));
        for at in [0, 7, 2048, 4095] {
            let mut other = zeroes;
            other[at] = 0x80;
            assert_ne!(fingerprint_of(&other), fingerprint_of(&zeroes), "{at}");
        }
    }
}
