//! A sample of data: a few of its words, mixed. Memory that outlives its server keeps one for the
//! data that it names, so that a medium which was replaced by an older copy of itself is
//! recognised: it does not hold the data. The sample is cheap enough for every write; a copy that
//! differs in none of the sampled words is not recognised.

/// The sample of `data`; never 0.
#[inline]
pub fn look_of(data: &[u8]) -> u32 {
    debug_assert!(data.len() >= 8);
    let word = |at: usize| {
        let bytes = data.get(at..).and_then(<[u8]>::first_chunk::<8>);
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    mix_look(look_places(data.len()).map(word))
}

/// Where the sample of `len` bytes has its words of eight bytes.
#[inline]
pub fn look_places(len: usize) -> [usize; 3] {
    [0, len / 2, len - 8]
}

/// The sample of data that has these words in those places.
#[inline]
pub fn mix_look(words: [u64; 3]) -> u32 {
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
        assert_ne!(look_of(&zeroes), 0);
        assert!((1..=255).all(|byte| look_of(&[byte; 512]) != look_of(&zeroes)));
        for at in [0, 7, 2048, 4095] {
            let mut other = zeroes;
            other[at] = 0x80;
            assert_ne!(look_of(&other), look_of(&zeroes), "{at}");
        }
    }
}
