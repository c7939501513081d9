//! The list of blocks written since the last commit, in memory that outlives the process. A
//! completed write survives the death of its server even without a flush, because the next server
//! finds its slot and block here. A machine crash loses the list, as it may.
//!
//! Layout, in 64-bit words (native byte order; the memory never leaves the machine):
//!
//! ```text
//! 0  magic, stored last    1  version, stripes    2  attach id, as on the label
//! 3  the boot of the machine    4, 5  present commit counter, and the next one
//! 6  whether the cache device has failed    7  the attach that is taking the memory over
//! 8  whether a flush of the cache device is in flight
//! 16 + stripe * 32:  slots that are being overwritten, each plus one; 0: none (since version 2)
//! 16 + stripes * 32 + (stripe * 2 + list) * n, an equal share of the memory:
//!      0  number of the batch that the list was begun in    1  entries
//!      2 ..  entries of 2 words: block; slot, in bit 32 whether it was overwritten, above that
//!            a fingerprint of its data (since version 3)
//! ```
//!
//! Each stripe has two lists: one is filled while the other one's batch is being committed. A list
//! is emptied once its batch is durable, before any of its slots can be freed. An entry whose slot
//! has since gone to another block is followed by a later one for its own block.

use crate::base::fingerprint::fingerprint_of;
use crate::error::Result;
use crate::mutants::{self, Mutant};
use crate::shm::{Header, Heading, SharedWords};
use crate::sync::SharedWord;
use crate::sync::atomic::Ordering;

#[cfg(feature = "mutants")]
mod wrong;

const MAGIC: u64 = 0x7564_6D77_636F_7031; // "udmwcop1"
/// Version 1 had no overwritten slots; version 2 had no fingerprints of data.
const VERSION: u64 = 3;
/// In an entry's second word: the slot was committed before, and has been overwritten.
const OVERWRITTEN: u64 = 1 << 32;
const HEADER_WORDS: usize = 16;
const LIST_HEADER_WORDS: usize = 2;
/// Slots of a stripe that can be overwritten at the same time.
const OVERWRITING_MAX: usize = 32;
/// Entries of a list, unless memory is given for fewer. With eight stripes this takes as many words
/// as 4096 entries took in version 1.
pub const LIST_MAX: usize = 4096 - OVERWRITING_MAX / 4;
/// Most stripes that a header may claim.
pub const STRIPES_MAX: usize = 16;

const WORD_MAGIC: usize = 0;
const WORD_SHAPE: usize = 1;
const WORD_ATTACH_ID: usize = 2;
const WORD_BOOT: usize = 3;
const WORD_SEQ: usize = 4;
const WORD_SEQ_NEXT: usize = 5;
const WORD_FAILED: usize = 6;
const WORD_ATTACH_NEXT: usize = 7;
const WORD_FLUSHING: usize = 8;
const FINGERPRINT_SHIFT: u32 = 33;

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

/// The next server checks the data of the newest entries of a list, this many: a medium that lacks
/// any write lacks the newest.
const LOOKED_AT_MAX: usize = 64;

/// An entry: this slot holds this block.
pub type Held = (u64, u32);

/// The lists of a cache. A list is appended to under its stripe's lock.
#[derive(Debug)]
pub struct OpenLists {
    shared: SharedWords,
    /// The word where the first list begins.
    lists_at: usize,
    /// Words of a list.
    list_words: usize,
}

/// The writes that a dead server left.
#[derive(Debug)]
pub struct LeftBehind {
    /// The commit counter that the server knew last, and the one that it was about to store.
    pub seqs: [u64; 2],
    /// Whether that server saw its cache device fail.
    pub has_failed: bool,
    /// Whether it died during a flush of its cache device, which may have failed since.
    pub was_flushing: bool,
    /// Entries; the entries of one block are in their order.
    pub held: Vec<Held>,
    /// Slots that were committed, and have been overwritten since.
    pub overwritten: Vec<u32>,
    /// Slots whose overwrite was in progress.
    pub overwriting: Vec<u32>,
    /// Fingerprints of the data of all entries, in their order; 0 for entries that are not checked.
    pub looks: Vec<(Held, u32)>,
}

impl LeftBehind {
    /// All but the entries of the lists.
    fn without_lists(shared: &SharedWords, version: u64, stripes: usize) -> LeftBehind {
        let words = shared.words();
        let begun = &words[HEADER_WORDS..lists_at(version, stripes)];
        let begun = begun.iter().map(|word| word.load(Ordering::Acquire));
        let overwriting: Vec<u32> =
            begun.filter(|word| *word != 0).map(|word| (word - 1) as u32).collect();
        LeftBehind {
            seqs: [WORD_SEQ, WORD_SEQ_NEXT].map(|word| words[word].load(Ordering::SeqCst)),
            has_failed: words[WORD_FAILED].load(Ordering::Relaxed) != 0,
            was_flushing: words[WORD_FLUSHING].load(Ordering::SeqCst) != 0,
            held: Vec::new(),
            overwritten: overwriting.clone(),
            overwriting,
            looks: Vec::new(),
        }
    }

    fn add(&mut self, entry: &Listed) {
        match entry.is_overwritten {
            true => self.overwritten.push(entry.slot),
            false => self.held.push((entry.block, entry.slot)),
        }
    }
}

/// The two lists of a stripe, the older batch first, each with its number of entries.
fn older_first(
    shared: &SharedWords,
    version: u64,
    stripes: usize,
    stripe: usize,
) -> [(&[SharedWord], usize); 2] {
    let words = shared.words();
    let lists_at = lists_at(version, stripes);
    let list_words = list_words(words.len(), lists_at, stripes);
    let most = (list_words - LIST_HEADER_WORDS) / 2;
    let mut lists =
        [0, 1].map(|list| &words[lists_at + (stripe * 2 + list) * list_words..][..list_words]);
    lists.sort_by_key(|list| list[0].load(Ordering::Relaxed));
    lists.map(|list| (list, (list[1].load(Ordering::Acquire) as usize).min(most)))
}

/// Words that the lists of `stripes` stripes need, for `list_max` entries each.
pub fn words_needed(stripes: usize, list_max: usize) -> usize {
    lists_at(VERSION, stripes) + stripes * 2 * (LIST_HEADER_WORDS + list_max * 2)
}

/// The word where the lists begin.
fn lists_at(version: u64, stripes: usize) -> usize {
    HEADER_WORDS + if version == 1 { 0 } else { stripes * OVERWRITING_MAX }
}

/// Words of a list, if there are `words` words for `stripes` stripes, after `lists_at` others.
fn list_words(words: usize, lists_at: usize, stripes: usize) -> usize {
    words.saturating_sub(lists_at) / (stripes.max(1) * 2)
}

/// The cache device has failed: writes since the last commit must not be trusted.
pub fn note_failure(shared: &SharedWords) {
    if !mutants::is(Mutant::FailureForgotten) {
        shared.words()[WORD_FAILED].store(1, Ordering::SeqCst);
    }
}

/// A flush of the cache device begins. If the server dies before its end, its failure is not
/// reported to any process.
pub fn begin_flush(shared: &SharedWords) {
    if !mutants::is(Mutant::FlushAtDeathTrusted) {
        shared.words()[WORD_FLUSHING].store(1, Ordering::SeqCst);
    }
}

/// Whether the memory belongs to an attach. Returns an error if this udm does not know the memory's
/// version.
pub fn is_of(shared: &SharedWords, attach_id: u64) -> Result<bool> {
    Ok(heading(shared)?.is_some_and(|heading| heading.is_of(attach_id)))
}

fn heading(shared: &SharedWords) -> Result<Option<Heading>> {
    let count = shared.words().len();
    HEADER.read(shared, |version, stripes| {
        count >= HEADER_WORDS
            && list_words(count, lists_at(version, stripes), stripes) >= LIST_HEADER_WORDS
    })
}

/// See [`Header::announce_attach`].
pub fn announce_attach(shared: &SharedWords, owner: u64, attach_id: u64) {
    HEADER.announce_attach(shared, owner, attach_id);
}

/// The next server found this commit counter, one of the two.
pub fn found_seq(shared: &SharedWords, seq: u64) {
    shared.words()[WORD_SEQ].store(seq, Ordering::Release);
}

/// The commit counter is about to become `seq`: until that is confirmed, both it and the old one
/// mean "still this medium".
pub fn announce_seq(shared: &SharedWords, seq: u64) {
    if !mutants::is(Mutant::SeqUnannounced) {
        shared.words()[WORD_SEQ_NEXT].store(seq, Ordering::Release);
    }
}

impl OpenLists {
    /// Empty lists in `shared`, which is new or whose entries are committed, bound to this attach.
    /// At every moment the memory names its attach, and has only its own entries: the server may
    /// die at any point in here.
    pub fn begin(shared: SharedWords, stripes: usize, attach_id: u64, seq: u64) -> OpenLists {
        let words = shared.words();
        assert!(stripes <= STRIPES_MAX && words.len() >= words_needed(stripes, 1));
        let (version, old) = HEADER.shape(&shared);
        // The counts of the old shape first, then the counts of the new one, whose addresses may
        // differ.
        for (version, stripes) in [(version.min(VERSION), old.min(STRIPES_MAX)), (VERSION, stripes)]
        {
            let lists_at = lists_at(version, stripes);
            let list_words = list_words(words.len(), lists_at, stripes);
            let counts = (0..stripes * 2).map(|list| lists_at + list * list_words + 1);
            for word in (HEADER_WORDS..lists_at).chain(counts) {
                words.get(word).into_iter().for_each(|word| word.store(0, Ordering::SeqCst));
            }
        }
        let lists_at = lists_at(VERSION, stripes);
        let list_words = list_words(words.len(), lists_at, stripes);
        HEADER.set_shape(&shared, stripes);
        words[WORD_SEQ_NEXT].store(seq, Ordering::SeqCst);
        words[WORD_SEQ].store(seq, Ordering::SeqCst);
        words[WORD_FLUSHING].store(0, Ordering::Relaxed);
        words[WORD_FAILED].store(0, Ordering::Relaxed);
        HEADER.own(&shared, attach_id);
        OpenLists { shared, lists_at, list_words }
    }

    /// The server ends in order, and the medium records that.
    pub fn end(&self) {
        self.shared.remove();
    }

    /// The writes that a dead server left in `shared`; `None` if no server has used it; an error if
    /// a server of another version has.
    pub fn left_behind(shared: &SharedWords) -> Result<Option<LeftBehind>> {
        let Some(Heading { version, stripes, .. }) = heading(shared)? else {
            return Ok(None);
        };
        #[cfg(feature = "mutants")]
        if wrong::leaves() {
            return Ok(Some(LeftBehind::wrongly_of(shared, version, stripes)));
        }
        let mut left = LeftBehind::without_lists(shared, version, stripes);
        for (list, count) in
            (0..stripes).flat_map(|stripe| older_first(shared, version, stripes, stripe))
        {
            for (nth, entry) in entries(list, count).enumerate() {
                left.add(&entry);
                // An entry that is not checked still cancels the fingerprint of an older one.
                let is_looked_at = version > 2 && nth + LOOKED_AT_MAX >= count;
                let look = if is_looked_at { entry.look } else { 0 };
                left.looks.push(((entry.block, entry.slot), look));
            }
        }
        Ok(Some(left))
    }

    /// Entries that a list has room for.
    pub fn list_max(&self) -> usize {
        (self.list_words - LIST_HEADER_WORDS) / 2
    }

    fn list(&self, stripe: usize, list: usize) -> &[SharedWord] {
        let at = self.lists_at + (stripe * 2 + list) * self.list_words;
        &self.shared.words()[at..][..self.list_words]
    }

    fn overwriting(&self, stripe: usize) -> &[SharedWord] {
        &self.shared.words()[HEADER_WORDS + stripe * OVERWRITING_MAX..][..OVERWRITING_MAX]
    }

    /// Records that `slots` are about to be overwritten. Returns `false` if they do not fit. Called
    /// under the stripe's lock, as are all changes of a stripe's words.
    pub fn begin_overwrite(&self, stripe: usize, slots: &[u32]) -> bool {
        let words = self.overwriting(stripe);
        let free = || words.iter().filter(|word| word.load(Ordering::Relaxed) == 0);
        if free().count() < slots.len() {
            return false;
        }
        for (slot, place) in slots.iter().zip(free()) {
            place.store(u64::from(*slot) + 1, Ordering::Release);
        }
        true
    }

    /// The overwriting has ended.
    pub fn end_overwrite(&self, stripe: usize, slots: &[u32]) {
        for word in self.overwriting(stripe) {
            let slot = word.load(Ordering::Relaxed).checked_sub(1);
            if slot.is_some_and(|slot| slots.contains(&(slot as u32))) {
                word.store(0, Ordering::Release);
            }
        }
    }

    /// Entries of a list.
    pub fn len(&self, stripe: usize, list: usize) -> usize {
        self.list(stripe, list)[1].load(Ordering::Acquire) as usize
    }

    /// Appends entries: `slots` hold the blocks from `first` on, with this `data`. The list must
    /// have space. `batch`: the batch that is open now. A later reader of the list finds all of
    /// these entries or none.
    pub fn push(
        &self,
        stripe: usize,
        list: usize,
        first: u64,
        slots: &[u32],
        (batch, data): (u64, &[u8]),
    ) {
        let block_bytes = data.len() / slots.len().max(1);
        let look =
            |nth: usize| data.get(nth * block_bytes..(nth + 1) * block_bytes).map_or(0, look_word);
        self.append(stripe, list, first, slots, batch, look);
    }

    /// The same for a slot that was committed, and has been overwritten. Empty `data`: the data is
    /// unknown.
    pub fn push_overwritten(
        &self,
        stripe: usize,
        list: usize,
        (block, slot): Held,
        (batch, data): (u64, &[u8]),
    ) {
        self.append(stripe, list, block, &[slot], batch, |_| OVERWRITTEN | look_word(data));
    }

    fn append(
        &self,
        stripe: usize,
        list: usize,
        first: u64,
        slots: &[u32],
        batch: u64,
        more: impl Fn(usize) -> u64,
    ) {
        let words = self.list(stripe, list);
        let count = words[1].load(Ordering::Relaxed) as usize;
        if count == 0 {
            words[0].store(batch, Ordering::Relaxed);
        }
        let places = words[LIST_HEADER_WORDS + count * 2..][..slots.len() * 2].as_chunks::<2>().0;
        for (nth, ((place, block), slot)) in places.iter().zip(first..).zip(slots).enumerate() {
            place[0].store(block, Ordering::Relaxed);
            place[1].store(u64::from(*slot) | more(nth), Ordering::Relaxed);
        }
        words[1].store((count + slots.len()) as u64, Ordering::Release);
    }

    /// The present entries of a list, including the entries of overwritten slots.
    pub fn all(&self, stripe: usize, list: usize) -> impl ExactSizeIterator<Item = Held> + '_ {
        let words = self.list(stripe, list);
        let count = words[1].load(Ordering::Acquire) as usize;
        entries(words, count).map(|entry| (entry.block, entry.slot))
    }

    /// Empties a list, once its batch is durable.
    pub fn clear(&self, stripe: usize, list: usize) {
        self.list(stripe, list)[1].store(0, Ordering::Release);
    }

    /// As [`announce_seq`].
    pub fn announce_seq(&self, seq: u64) {
        announce_seq(&self.shared, seq);
    }

    /// As [`begin_flush`].
    pub fn begin_flush(&self) {
        begin_flush(&self.shared);
    }

    /// The flush has succeeded, or its failure is recorded.
    pub fn end_flush(&self) {
        self.shared.words()[WORD_FLUSHING].store(0, Ordering::SeqCst);
    }

    /// As [`note_failure`].
    pub fn note_failure(&self) {
        note_failure(&self.shared);
    }

    /// The commit counter is `seq`.
    pub fn confirm_seq(&self, seq: u64) {
        self.shared.words()[WORD_SEQ].store(seq, Ordering::Release);
    }
}

/// An entry of a list.
struct Listed {
    block: u64,
    slot: u32,
    is_overwritten: bool,
    /// 0: unknown.
    look: u32,
}

/// The fingerprint of a block of data in the form of an entry; 0 for no data.
fn look_word(data: &[u8]) -> u64 {
    if data.is_empty() { 0 } else { u64::from(fingerprint_of(data)) << FINGERPRINT_SHIFT }
}

/// The bits of a fingerprint that fit into an entry.
pub fn look_in_entry(look: u32) -> u32 {
    look & u32::MAX >> (FINGERPRINT_SHIFT - 32)
}

/// The first `count` entries of a list.
fn entries(list: &[SharedWord], count: usize) -> impl ExactSizeIterator<Item = Listed> + '_ {
    let places = list[LIST_HEADER_WORDS..][..count * 2].as_chunks::<2>().0;
    let word = |word: &SharedWord| word.load(Ordering::Relaxed);
    places.iter().map(move |[block, slot]| {
        let (block, slot) = (word(block), word(slot));
        Listed {
            block,
            slot: slot as u32,
            is_overwritten: slot & OVERWRITTEN != 0,
            look: (slot >> FINGERPRINT_SHIFT) as u32,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_server_finds_the_lists_in_order() {
        let shared = SharedWords::private(words_needed(3, 4));
        assert!(OpenLists::left_behind(&shared).unwrap().is_none());
        let lists = OpenLists::begin(shared.clone(), 3, 77, 5);
        lists.push(1, 1, 10, &[1], (5, &[]));
        lists.push(1, 0, 10, &[2], (6, &[]));
        lists.push(0, 0, 3, &[3], (5, &[]));
        lists.push(0, 0, 4, &[7, 5], (5, &[]));
        lists.announce_seq(6);
        let found = OpenLists::left_behind(&shared).unwrap().unwrap();
        assert_eq!(found.held, [(3, 3), (4, 7), (5, 5), (10, 1), (10, 2)]);
        assert!(found.seqs == [5, 6] && is_of(&shared, 77).unwrap());
        lists.clear(1, 1);
        lists.confirm_seq(6);
        let found = OpenLists::left_behind(&shared).unwrap().unwrap();
        assert_eq!((found.held.len(), found.seqs), (4, [6, 6]));
        assert!(lists.all(1, 0).eq([(10, 2)]));
        assert_eq!(lists.len(1, 0), 1);
    }

    #[test]
    fn the_next_server_finds_what_was_being_overwritten() {
        let shared = SharedWords::private(words_needed(2, 4));
        let lists = OpenLists::begin(shared.clone(), 2, 77, 5);
        assert!(lists.begin_overwrite(1, &[7, 8]));
        assert!(lists.begin_overwrite(0, &[0]));
        assert!(!lists.begin_overwrite(1, &[9; OVERWRITING_MAX - 1]));
        lists.push_overwritten(1, 0, (4, 7), (5, &[9; 512]));
        lists.end_overwrite(1, &[7]);
        let mut found = OpenLists::left_behind(&shared).unwrap().unwrap();
        found.overwritten.sort_unstable();
        assert_eq!((found.held, found.overwritten), (vec![], vec![0, 7, 8]));
        let look = look_in_entry(fingerprint_of(&[9; 512]));
        assert_eq!((found.looks, found.overwriting.len()), (vec![((4, 7), look)], 2));
    }

    #[test]
    fn what_a_server_before_left_is_understood() {
        let shared = SharedWords::private(HEADER_WORDS + 4 * (LIST_HEADER_WORDS + 2 * 3));
        let words = shared.words();
        let store = |at: usize, value: u64| words[at].store(value, Ordering::SeqCst);
        store(WORD_SHAPE, 1 << 32 | 2);
        store(WORD_BOOT, shared.boot());
        // The second stripe's first list: block 5 is in slot 6.
        let at = HEADER_WORDS + 2 * (LIST_HEADER_WORDS + 2 * 3);
        [9, 1, 5, 6].into_iter().enumerate().for_each(|(nth, word)| store(at + nth, word));
        store(WORD_MAGIC, MAGIC);
        let found = OpenLists::left_behind(&shared).unwrap().unwrap();
        assert_eq!((found.held, found.overwritten), (vec![(5, 6)], vec![]));
    }
}
