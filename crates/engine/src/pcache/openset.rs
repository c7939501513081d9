//! Open key sets: keys that are not in the log yet.
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
//! 11      the attach that is taking the memory over
//! 12, 13  the log's end, and its last keys (since version 2)
//! 14, 15  the same when what is being appended is there
//! 16 + stripe * 648:               0       number of keys
//!                                  8 ..    keys of 5 words
//! ```
//!
//! A key's words are stored before the count that covers them, and the kernel keeps every store of
//! a killed process, so a count never covers half a key.
//!
//! The half word that a key does not use holds a fingerprint of its data: some words of it, mixed.
//! If the medium was replaced by an older copy of itself, the fingerprints show that the data of
//! keys is missing, as the log's end shows that keys are missing. An older copy that differs in
//! none of the sampled words is not recognised.

use crate::base::prefetch::prefetch;
use crate::mutants::{self, Mutant};
use crate::shm::{Header, Heading, SharedWords};
use crate::sync::SharedWord;
use crate::sync::atomic::Ordering;

use zerocopy::IntoBytes;

use crate::error::Result;

use super::layout::{CacheInfo, KEYS_MAX, Key, Position, Slotted};

const MAGIC: u64 = 0x7564_6D6F_7065_6E31; // "udmopen1"
/// Version 1 had neither the log's end nor samples of data.
const VERSION: u64 = 2;
const HEADER_WORDS: usize = 16;
const KEY_WORDS: usize = 5;
/// The fingerprint is in a key's last word, in the half that the medium's format leaves at zero.
/// (On a host of the other byte order that is the lower half.)
const LOOK_WORD: usize = KEY_WORDS - 1;
const FINGERPRINT_SHIFT: u32 = if cfg!(target_endian = "little") { 32 } else { 0 };
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
const WORD_ATTACH_NEXT: usize = 11;
const WORD_END: usize = 12;
const WORD_END_NEXT: usize = 14;

const HEADER: Header = Header {
    magic: MAGIC,
    version: VERSION,
    stripes_max: STRIPES_MAX,
    magic_at: WORD_MAGIC,
    shape_at: WORD_SHAPE,
    attach_at: WORD_ATTACH_ID,
    attach_next_at: WORD_ATTACH_NEXT,
    boot_at: WORD_BOOT,
};

/// The open key sets of a cache, one per stripe. Each is used under its stripe's lock.
#[derive(Debug)]
pub struct OpenSets {
    shared: SharedWords,
    stripes: usize,
}

/// The keys that a dead server left, and the owner of its memory.
#[derive(Debug)]
pub struct LeftBehind {
    /// cache_info as that server stored it last, and as it was about to store it.
    info: CacheInfo,
    info_next: CacheInfo,
    /// Keys that were not logged, with fingerprints of their data; 0: unknown.
    pub keys: Vec<(Key, u32)>,
    /// The log's end that the server knew, and the end of the append in progress; `None` for an
    /// older udm.
    pub ends: Option<[LogEnd; 2]>,
}

/// Where a log ends, and the last keys before that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEnd {
    /// Where the next record goes.
    pub position: Position,
    /// The last record with keys.
    pub last: LastSet,
}

/// The last record with keys, which identifies its position in the log: marks and LAST records do
/// not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LastSet {
    /// The position of the record.
    pub position: Position,
    /// The lowest bits of its CRC; `None`: no record was appended since the attach.
    pub crc: Option<u32>,
}

/// Bits of a CRC next to a position of the log: 20 for the segment, 21 for the offset in units of
/// 8.
const CRC_BITS: u32 = 22;

impl LastSet {
    /// Keys that stand at `position` with this CRC.
    pub fn new(position: Position, crc: u32) -> LastSet {
        LastSet { position, crc: Some(crc & ((1 << CRC_BITS) - 1)) }
    }

    fn pack(self) -> u64 {
        let Some(crc) = self.crc else { return 0 };
        let offset = u64::from(self.position.offset / 8) << (CRC_BITS + 1);
        u64::from(self.position.segment) << 44 | offset | u64::from(crc) << 1 | 1
    }

    fn unpack(word: u64) -> LastSet {
        let offset = (word >> (CRC_BITS + 1) & ((1 << 21) - 1)) as u32 * 8;
        let position = Position { segment: (word >> 44) as u32, offset };
        match word & 1 {
            0 => LastSet::default(),
            _ => LastSet::new(position, (word >> 1) as u32),
        }
    }
}

impl LeftBehind {
    /// Whether `info` on the medium is the record that the server left there.
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

/// Whether the memory belongs to an attach. An error: this udm cannot tell.
pub fn is_of(shared: &SharedWords, attach_id: u64) -> Result<bool> {
    Ok(heading(shared)?.is_some_and(|heading| heading.is_of(attach_id)))
}

fn heading(shared: &SharedWords) -> Result<Option<Heading>> {
    HEADER.read(shared, |_, stripes| shared.words().len() >= words_needed(stripes))
}

/// The next server found the log's end at this one of the two positions.
pub fn found_end(shared: &SharedWords, position: Position) {
    store_end(shared, WORD_END, LogEnd { position, last: LastSet::default() });
}

/// See [`Header::announce_attach`].
pub fn announce_attach(shared: &SharedWords, owner: u64, attach_id: u64) {
    HEADER.announce_attach(shared, owner, attach_id);
}

/// The log is about to end there.
pub fn announce_end(shared: &SharedWords, end: LogEnd) {
    if !mutants::is(Mutant::EndUnannounced) {
        store_end(shared, WORD_END_NEXT, end);
    }
}

/// The log ends there.
pub fn confirm_end(shared: &SharedWords, end: LogEnd) {
    store_end(shared, WORD_END, end);
}

fn store_end(shared: &SharedWords, at: usize, end: LogEnd) {
    let words = shared.words();
    let position = u64::from(end.position.segment) << 32 | u64::from(end.position.offset);
    words[at].store(position, Ordering::Release);
    words[at + 1].store(end.last.pack(), Ordering::Release);
}

fn load_end(words: &[SharedWord], at: usize) -> LogEnd {
    let [position, last] = [at, at + 1].map(|at| words[at].load(Ordering::SeqCst));
    let position = Position { segment: (position >> 32) as u32, offset: position as u32 };
    LogEnd { position, last: LastSet::unpack(last) }
}

/// The medium has failed: data stored since the last sync must not be trusted.
pub fn note_failure(shared: &SharedWords) {
    shared.words()[WORD_FAILED].store(failure(shared), Ordering::SeqCst);
}

/// Whether a server saw the medium fail in this run of the machine, and none has repaired it since.
pub fn has_failed(shared: &SharedWords) -> bool {
    shared.words()[WORD_FAILED].load(Ordering::SeqCst) == failure(shared)
}

fn failure(shared: &SharedWords) -> u64 {
    MAGIC ^ shared.boot()
}

impl OpenSets {
    /// Empty sets in `shared`, which is new or whose keys are in the log, bound to this attach of
    /// this medium. At every moment the memory names its attach, and has only its own keys: the
    /// server may die at any point in here.
    pub fn begin(
        shared: SharedWords,
        stripes: usize,
        attach_id: u64,
        info: &CacheInfo,
        end: Position,
    ) -> OpenSets {
        assert!(stripes <= STRIPES_MAX && shared.words().len() >= words_needed(stripes));
        let words = shared.words();
        // The counts of the old shape first, then the counts of the new one, whose addresses may
        // differ.
        let (_, old) = HEADER.shape(&shared);
        for stripe in (0..old.min(STRIPES_MAX)).chain(0..stripes) {
            if let Some(count) = words.get(HEADER_WORDS + stripe * STRIPE_WORDS) {
                count.store(0, Ordering::SeqCst);
            }
        }
        let end = LogEnd { position: end, last: LastSet::default() };
        store_end(&shared, WORD_END_NEXT, end);
        store_end(&shared, WORD_END, end);
        HEADER.set_shape(&shared, stripes);
        store_info(words, WORD_INFO_NEXT, info);
        store_info(words, WORD_INFO, info);
        words[WORD_FAILED].store(0, Ordering::Relaxed);
        HEADER.own(&shared, attach_id);
        OpenSets { shared, stripes }
    }

    /// The keys that a dead server left in `shared`, in an order that keeps the order of keys of
    /// one region. `None` if no server has used it; an error if a server of another version has.
    pub fn left_behind(shared: &SharedWords) -> Result<Option<LeftBehind>> {
        let Some(Heading { version, stripes, .. }) = heading(shared)? else {
            return Ok(None);
        };
        let words = shared.words();
        let mut keys = Vec::new();
        for stripe in 0..stripes {
            let words = &words[HEADER_WORDS + stripe * STRIPE_WORDS..][..STRIPE_WORDS];
            let count = words[0].load(Ordering::Acquire).min(KEYS_MAX as u64) as usize;
            let look = |nth: usize| if version > 1 { load_look(words, nth) } else { 0 };
            keys.extend((0..count).map(|nth| (load_key(words, nth), look(nth))));
        }
        Ok(Some(LeftBehind {
            info: load_info(words, WORD_INFO),
            info_next: load_info(words, WORD_INFO_NEXT),
            keys,
            ends: (version > 1).then(|| [WORD_END, WORD_END_NEXT].map(|at| load_end(words, at))),
        }))
    }

    /// The server ends in order, and the medium records that.
    pub fn end(&self) {
        self.shared.remove();
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

    /// Prefetches the place of the next key.
    pub fn touch(&self, stripe: usize) {
        let words = self.stripe(stripe);
        let count = words[0].load(Ordering::Relaxed) as usize % KEYS_MAX;
        prefetch(&words[STRIPE_HEADER_WORDS + count * KEY_WORDS]);
    }

    /// Appends a key and returns the new number of keys. The set must not be full. `look`: the
    /// [`fingerprint_of`] the key's data; 0 if the data is in the log already.
    pub fn push(&self, stripe: usize, key: &Key, look: u32) -> usize {
        let words = self.stripe(stripe);
        let count = words[0].load(Ordering::Relaxed) as usize;
        let mut key: [u64; KEY_WORDS] = zerocopy::transmute!(*key);
        key[LOOK_WORD] |= u64::from(look) << FINGERPRINT_SHIFT;
        let place = &words[STRIPE_HEADER_WORDS + count * KEY_WORDS..][..KEY_WORDS];
        for (word, value) in place.iter().zip(key) {
            word.store(value, Ordering::Relaxed);
        }
        words[0].store(count as u64 + 1, Ordering::Release);
        count + 1
    }

    /// One of a set's keys.
    pub fn key(&self, stripe: usize, nth: usize) -> Key {
        load_key(self.stripe(stripe), nth)
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

fn load_words(stripe: &[SharedWord], nth: usize) -> [u64; KEY_WORDS] {
    std::array::from_fn(|word| {
        stripe[STRIPE_HEADER_WORDS + nth * KEY_WORDS + word].load(Ordering::Relaxed)
    })
}

fn load_key(stripe: &[SharedWord], nth: usize) -> Key {
    let mut words = load_words(stripe, nth);
    words[LOOK_WORD] &= !(u64::from(u32::MAX) << FINGERPRINT_SHIFT);
    zerocopy::transmute!(words)
}

fn load_look(stripe: &[SharedWord], nth: usize) -> u32 {
    (load_words(stripe, nth)[LOOK_WORD] >> FINGERPRINT_SHIFT) as u32
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
    fn the_last_keys_fit_a_word() {
        let position = Position { segment: (1 << 20) - 1, offset: (16 << 20) - 8 };
        for last in [LastSet::default(), LastSet::new(position, u32::MAX)] {
            assert_eq!(LastSet::unpack(last.pack()), last);
        }
    }

    #[test]
    fn the_next_server_finds_what_was_open() {
        let shared = SharedWords::private(words_needed(4));
        let info = CacheInfo::new(1, 0, 31, 0x1182);
        let left = || OpenSets::left_behind(&shared).unwrap();
        assert!(left().is_none());
        let sets = OpenSets::begin(shared.clone(), 4, 77, &info, Position::default());
        assert_eq!(sets.push(2, &key(1), 5), 1);
        assert_eq!(sets.push(2, &key(2), u32::MAX), 2);
        assert_eq!(sets.push(0, &key(3), 0), 1);
        let found = left().unwrap();
        let keys = found.keys.iter().map(|(key, look)| (key.off.get(), *look));
        assert_eq!(keys.collect::<Vec<_>>(), [(3, 0), (1, 5), (2, u32::MAX)]);
        assert!(found.keys.iter().all(|(key, _)| key.as_bytes()[36..] == [0; 4]));
        assert!(found.knows(&info));
        announce_attach(&shared, 77, 78);
        assert!(is_of(&shared, 77).unwrap() && is_of(&shared, 78).unwrap());
        assert!(!is_of(&shared, 79).unwrap());
        announce_attach(&shared, 78, 79);
        assert!(is_of(&shared, 78).unwrap() && is_of(&shared, 79).unwrap());
        announce_attach(&shared, 77, 78);
        sets.clear(2);
        let found = left().unwrap();
        assert_eq!(found.keys.len(), 1);
        let other = CacheInfo::new(2, 0, 31, 0x1182);
        assert!(!found.knows(&other) && !found.is_ahead_of(&other), "the kernel attached");
        let before = CacheInfo::new(0, 0, 31, 0x1182);
        assert!(!found.knows(&before) && found.is_ahead_of(&before), "the medium lost it");
        sets.announce_info(&other);
        let found = left().unwrap();
        assert!(found.knows(&info) && found.knows(&other));
        shared.words()[WORD_SHAPE].store(9 << 32 | 4, Ordering::SeqCst);
        let error = OpenSets::left_behind(&shared).unwrap_err().to_string();
        assert!(error.contains("version 9"), "{error}");
    }
}
