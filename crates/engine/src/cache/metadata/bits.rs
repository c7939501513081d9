//! A row of bits, in words of 64: dirty bits, discards, blocks in use, blocks that changed.

/// A row of bits. Those of the last word that are beyond the end are zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bits {
    words: Vec<u64>,
    len: u64,
}

/// The words that `bits` bits take.
pub fn words_of(bits: u64) -> u64 {
    bits.div_ceil(64)
}

impl Bits {
    /// `len` zeroes.
    pub fn new(len: u64) -> Bits {
        Bits { words: vec![0; words_of(len) as usize], len }
    }

    /// The first `len` bits of `words`, which are as many as that takes. Also whether there was
    /// a one after them.
    pub fn from_words(words: Vec<u64>, len: u64) -> (Bits, bool) {
        assert_eq!(words.len() as u64, words_of(len), "as many words as the bits take");
        let mut bits = Bits { words, len };
        let before = bits.words.last().copied();
        bits.trim();
        let is_trimmed = bits.words.last().copied() != before;
        (bits, is_trimmed)
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bit `at`; zero beyond the end.
    pub fn is_set(&self, at: u64) -> bool {
        self.words.get((at / 64) as usize).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    /// Makes it a one.
    pub fn set(&mut self, at: u64) {
        assert!(at < self.len, "bit {at} of {}", self.len);
        self.words[(at / 64) as usize] |= 1 << (at % 64);
    }

    /// Makes it a zero.
    pub fn clear(&mut self, at: u64) {
        assert!(at < self.len, "bit {at} of {}", self.len);
        self.words[(at / 64) as usize] &= !(1 << (at % 64));
    }

    /// Makes it what `is_one` says.
    pub fn put(&mut self, at: u64, is_one: bool) {
        if is_one { self.set(at) } else { self.clear(at) }
    }

    /// How many ones there are.
    pub fn ones(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Where they are.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.words.iter().enumerate().flat_map(|(nth, &word)| {
            let rest = |word: u64| (word != 0).then_some(word);
            std::iter::successors(rest(word), move |word| rest(word & (word - 1)))
                .map(move |word| nth as u64 * 64 + u64::from(word.trailing_zeros()))
        })
    }

    /// Word `nth`; zero beyond the end.
    pub fn word(&self, nth: u64) -> u64 {
        self.words.get(nth as usize).copied().unwrap_or(0)
    }

    /// Sets word `nth` to `word`; bits beyond the end stay 0.
    pub fn put_word(&mut self, nth: u64, word: u64) {
        self.words[nth as usize] = word;
        self.trim();
    }

    /// Makes every bit a zero.
    pub fn clear_all(&mut self) {
        self.words.fill(0);
    }

    /// Sets every bit that is set in `other`, which has the same length.
    pub fn join(&mut self, other: &Bits) {
        assert_eq!(self.len, other.len, "rows of the same length");
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
    }

    /// Makes it longer, by zeroes, or shorter.
    pub fn resize(&mut self, len: u64) {
        self.words.resize(words_of(len) as usize, 0);
        self.len = len;
        self.trim();
    }

    fn trim(&mut self) {
        if let (Some(last), used @ 1..) = (self.words.last_mut(), self.len % 64) {
            *last &= (1 << used) - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Bits;

    #[test]
    fn bits_are_where_they_were_put_and_none_is_behind_the_end() {
        let mut bits = Bits::new(130);
        [0, 63, 64, 129].iter().for_each(|at| bits.set(*at));
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 63, 64, 129]);
        assert_eq!((bits.ones(), bits.word(2), bits.word(9)), (4, 2, 0));
        bits.clear(63);
        assert!(!bits.is_set(63) && bits.is_set(64) && !bits.is_set(1000));
        bits.put_word(2, u64::MAX);
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 64, 128, 129]);
        let mut other = Bits::new(130);
        other.set(5);
        bits.join(&other);
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 5, 64, 128, 129]);
        bits.clear(5);
        bits.resize(65);
        bits.resize(200);
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 64]);
        bits.clear_all();
        assert_eq!((bits.ones(), bits.len()), (0, 200));
        let (bits, is_trimmed) = Bits::from_words(vec![u64::MAX], 3);
        assert_eq!((bits.ones(), is_trimmed), (3, true));
        assert_eq!(Bits::from_words(vec![7], 3), (bits, false));
    }
}
