//! Open key sets: keys that were logged in memory but not on media yet.
//!
//! They live in memory that outlives the process, so that a completed write survives the death of
//! its server even without a flush: the next server finds the keys here and logs them. A machine
//! crash loses them, as it may: they are unflushed writes.
//!
//! Layout, in 64-bit words (native byte order; the memory never leaves the machine):
//!
//! ```text
//! 0       magic, stored last       1       version, number of stripes
//! 2       attach id, as in the label       9       the run of the machine
//! 3 .. 5  cache_info of the medium         6 .. 8  cache_info that is being stored
//! 10      magic, changed by the run of the machine in which the medium failed
//! 16 + stripe * 648:               0       number of keys
//!                                  8 ..    keys of 5 words
//! ```
//!
//! A key's words are stored before the count that covers them, and the kernel keeps every store
//! of a killed process, so a count never covers half a key.

use crate::near::bring_near;
use crate::shm::SharedWords;
use crate::sync::SharedWord;
use crate::sync::atomic::Ordering;

use zerocopy::IntoBytes;

use super::layout::{CacheInfo, KEYS_MAX, Key, Slotted};

const MAGIC: u64 = 0x7564_6D6F_7065_6E31; // "udmopen1"
const VERSION: u64 = 1;
const HEADER_WORDS: usize = 16;
const KEY_WORDS: usize = 5;
const STRIPE_HEADER_WORDS: usize = 8;
const STRIPE_WORDS: usize = STRIPE_HEADER_WORDS + KEYS_MAX * KEY_WORDS;
/// Most stripes that a header may claim.
const STRIPES_MAX: usize = 64;

const WORD_MAGIC: usize = 0;
const WORD_SHAPE: usize = 1;
const WORD_ATTACH_ID: usize = 2;
const WORD_INFO: usize = 3;
const WORD_INFO_NEXT: usize = 6;
const WORD_BOOT: usize = 9;
const WORD_FAILED: usize = 10;

/// The open key sets of a cache, one per stripe. Each is used under its stripe's lock.
#[derive(Debug)]
pub struct OpenSets {
    shared: SharedWords,
    stripes: usize,
}

/// What a dead server left, and to whom it belongs.
#[derive(Debug)]
pub struct LeftBehind {
    /// The attach, as on the label.
    pub attach_id: u64,
    /// cache_info as that server stored it last, and as it was about to store it.
    info: CacheInfo,
    info_next: CacheInfo,
    /// Whether the machine has not been started again since.
    pub is_of_this_boot: bool,
    /// Keys that were not logged.
    pub keys: Vec<Key>,
}

impl LeftBehind {
    /// Whether `info` on the medium is what that server left there.
    pub fn knows(&self, info: &CacheInfo) -> bool {
        [self.info, self.info_next].iter().any(|known| known.as_bytes() == info.as_bytes())
    }

    /// Whether that server stored a newer record than `info`: then the medium has lost it.
    pub fn is_ahead_of(&self, info: &CacheInfo) -> bool {
        (1..=127).contains(&self.info.seq().wrapping_sub(info.seq()))
    }
}

/// Words that `stripes` open sets need.
pub fn words_needed(stripes: usize) -> usize {
    HEADER_WORDS + stripes * STRIPE_WORDS
}

/// The medium has failed: what was stored since the last sync is not to be trusted.
pub fn note_failure(shared: &SharedWords) {
    shared.words()[WORD_FAILED].store(failure(shared), Ordering::SeqCst);
}

/// Whether a server saw the medium fail in this run of the machine, and none has mended it since.
pub fn has_failed(shared: &SharedWords) -> bool {
    shared.words()[WORD_FAILED].load(Ordering::SeqCst) == failure(shared)
}

fn failure(shared: &SharedWords) -> u64 {
    MAGIC ^ shared.boot()
}

impl OpenSets {
    /// Empty sets in `shared`, whatever it held, bound to this attach of this medium.
    pub fn fresh(
        shared: SharedWords,
        stripes: usize,
        attach_id: u64,
        info: &CacheInfo,
    ) -> OpenSets {
        assert!(stripes <= STRIPES_MAX && shared.words().len() >= words_needed(stripes));
        let words = shared.words();
        words[WORD_MAGIC].store(0, Ordering::SeqCst);
        for stripe in 0..stripes {
            words[HEADER_WORDS + stripe * STRIPE_WORDS].store(0, Ordering::Relaxed);
        }
        words[WORD_SHAPE].store(VERSION << 32 | stripes as u64, Ordering::Relaxed);
        words[WORD_ATTACH_ID].store(attach_id, Ordering::Relaxed);
        words[WORD_BOOT].store(shared.boot(), Ordering::Relaxed);
        store_info(words, WORD_INFO, info);
        store_info(words, WORD_INFO_NEXT, info);
        words[WORD_FAILED].store(0, Ordering::Relaxed);
        words[WORD_MAGIC].store(MAGIC, Ordering::SeqCst);
        OpenSets { shared, stripes }
    }

    /// What a dead server left in `shared`, in an order that keeps the order of keys of one
    /// region. `None` when nothing that can be understood is there.
    pub fn left_behind(shared: &SharedWords) -> Option<LeftBehind> {
        let words = shared.words();
        if words.len() < HEADER_WORDS || words[WORD_MAGIC].load(Ordering::SeqCst) != MAGIC {
            return None;
        }
        let shape = words[WORD_SHAPE].load(Ordering::Relaxed);
        let stripes = (shape & 0xFFFF_FFFF) as usize;
        let is_known = shape >> 32 == VERSION && stripes <= STRIPES_MAX;
        if !is_known || words.len() < words_needed(stripes) {
            return None;
        }
        let mut keys = Vec::new();
        for stripe in 0..stripes {
            let words = &words[HEADER_WORDS + stripe * STRIPE_WORDS..][..STRIPE_WORDS];
            let count = words[0].load(Ordering::Acquire).min(KEYS_MAX as u64) as usize;
            keys.extend((0..count).map(|nth| load_key(words, nth)));
        }
        Some(LeftBehind {
            attach_id: words[WORD_ATTACH_ID].load(Ordering::Relaxed),
            info: load_info(words, WORD_INFO),
            info_next: load_info(words, WORD_INFO_NEXT),
            is_of_this_boot: words[WORD_BOOT].load(Ordering::Relaxed) == shared.boot(),
            keys,
        })
    }

    /// cache_info is about to be stored: both the old and the new one mean "still this medium".
    pub fn announce_info(&self, info: &CacheInfo) {
        store_info(self.shared.words(), WORD_INFO_NEXT, info);
    }

    /// cache_info was stored.
    pub fn confirm_info(&self, info: &CacheInfo) {
        store_info(self.shared.words(), WORD_INFO, info);
    }

    /// How many stripes there are.
    pub fn stripes(&self) -> usize {
        self.stripes
    }

    fn stripe(&self, stripe: usize) -> &[SharedWord] {
        &self.shared.words()[HEADER_WORDS + stripe * STRIPE_WORDS..][..STRIPE_WORDS]
    }

    /// Keys in a set.
    pub fn len(&self, stripe: usize) -> usize {
        self.stripe(stripe)[0].load(Ordering::Relaxed) as usize
    }

    /// Brings the place of the next key near.
    pub fn touch(&self, stripe: usize) {
        let words = self.stripe(stripe);
        let count = words[0].load(Ordering::Relaxed) as usize % KEYS_MAX;
        bring_near(&words[STRIPE_HEADER_WORDS + count * KEY_WORDS]);
    }

    /// Appends a key and says how many there are now. The set must not be full.
    pub fn push(&self, stripe: usize, key: &Key) -> usize {
        let words = self.stripe(stripe);
        let count = words[0].load(Ordering::Relaxed) as usize;
        let key: [u64; KEY_WORDS] = zerocopy::transmute!(*key);
        let place = &words[STRIPE_HEADER_WORDS + count * KEY_WORDS..][..KEY_WORDS];
        for (word, value) in place.iter().zip(key) {
            word.store(value, Ordering::Relaxed);
        }
        words[0].store(count as u64 + 1, Ordering::Release);
        count + 1
    }

    /// Adds a set's keys to `keys`.
    pub fn collect(&self, stripe: usize, keys: &mut Vec<Key>) {
        let words = self.stripe(stripe);
        let count = words[0].load(Ordering::Relaxed) as usize;
        keys.extend((0..count).map(|nth| load_key(words, nth)));
    }

    /// Empties a set, once its keys are durable in the log.
    pub fn clear(&self, stripe: usize) {
        self.stripe(stripe)[0].store(0, Ordering::Release);
    }
}

fn load_key(stripe: &[SharedWord], nth: usize) -> Key {
    let words: [u64; KEY_WORDS] = std::array::from_fn(|word| {
        stripe[STRIPE_HEADER_WORDS + nth * KEY_WORDS + word].load(Ordering::Relaxed)
    });
    zerocopy::transmute!(words)
}

fn store_info(words: &[SharedWord], at: usize, info: &CacheInfo) {
    let info: [u64; 3] = zerocopy::transmute!(*info);
    for (word, value) in words[at..].iter().zip(info) {
        word.store(value, Ordering::SeqCst);
    }
}

fn load_info(words: &[SharedWord], at: usize) -> CacheInfo {
    let info: [u64; 3] = std::array::from_fn(|word| words[at + word].load(Ordering::SeqCst));
    zerocopy::transmute!(info)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn key(off: u64) -> Key {
        Key { off: off.into(), ..Key::new_zeroed() }
    }

    #[test]
    fn the_next_server_finds_what_was_open() {
        let shared = SharedWords::private(words_needed(4));
        let info = CacheInfo::new(1, 0, 31, 0x1182);
        assert!(OpenSets::left_behind(&shared).is_none());
        let sets = OpenSets::fresh(shared.clone(), 4, 77, &info);
        assert_eq!(sets.push(2, &key(1)), 1);
        assert_eq!(sets.push(2, &key(2)), 2);
        assert_eq!(sets.push(0, &key(3)), 1);
        let found = OpenSets::left_behind(&shared).unwrap();
        assert_eq!(found.keys.iter().map(|key| key.off.get()).collect::<Vec<_>>(), [3, 1, 2]);
        assert!(found.attach_id == 77 && found.knows(&info));
        sets.clear(2);
        let found = OpenSets::left_behind(&shared).unwrap();
        assert_eq!(found.keys.len(), 1);
        let other = CacheInfo::new(2, 0, 31, 0x1182);
        assert!(!found.knows(&other) && !found.is_ahead_of(&other), "the kernel attached");
        let before = CacheInfo::new(0, 0, 31, 0x1182);
        assert!(!found.knows(&before) && found.is_ahead_of(&before), "the medium lost it");
        sets.announce_info(&other);
        let found = OpenSets::left_behind(&shared).unwrap();
        assert!(found.knows(&info) && found.knows(&other));
    }
}
