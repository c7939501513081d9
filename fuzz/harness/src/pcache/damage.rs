//! Damage to a cache device that its checksums do not reveal: fields are changed and the structure
//! is sealed again. Other damage is random: bytes overwritten, zeroed, copied, unreadable.

use std::sync::atomic::Ordering;

use udm::base::crc::pcache_crc;
use udm::pcache::layout::{
    CACHE_INFO_AT, DIRTY_TAIL_AT, KEY_BYTES, KEY_TAIL_AT, KEYS_MAX, KSET_BYTES_MAX,
    KSET_HEADER_BYTES, KsetHeader, PAGE_STRIDE, REGION_BYTES, Record, SEGMENT_META_BYTES,
    SEGMENTS_AT, SMALL_STRIDE, SUPERBLOCK_AT, kset_bytes, parse_record, seal_kset,
};
use udm::units::SECTOR;
use zerocopy::IntoBytes;

use super::fixture::{BACKING_BYTES, Fixture};
use crate::input::Input;

/// A field: its offset in the structure, its length, and the limit near which it is set.
type Field = (usize, usize, Limit);

#[derive(Clone, Copy)]
enum Limit {
    Segments,
    Data,
    Backing,
    Keys,
    Generation,
    Bits,
}

use Limit::{Backing, Bits, Data, Generation, Keys, Segments};

const SUPERBLOCK: [Field; 4] = [(4, 4, Bits), (8, 8, Bits), (16, 4, Segments), (20, 4, Bits)];
const INFO: [Field; 5] =
    [(4, 1, Bits), (8, 4, Segments), (12, 4, Segments), (16, 4, Bits), (20, 4, Bits)];
const TAIL: [Field; 3] = [(4, 1, Bits), (8, 4, Segments), (12, 4, Data)];
const SEGMENT_INFO: [Field; 3] = [(4, 1, Bits), (8, 4, Bits), (12, 4, Segments)];
const GENERATION: [Field; 2] = [(4, 1, Bits), (8, 8, Generation)];
const LABEL: [Field; 12] = [
    (4, 1, Bits),
    (6, 2, Bits),
    (8, 8, Bits),
    (16, 8, Bits),
    (24, 8, Backing),
    (32, 4, Segments),
    (36, 4, Data),
    (40, 8, Bits),
    (64, 8, Bits),
    (264, 4, Keys),
    (272, 8, Backing),
    (280, 8, Backing),
];
const LABEL_STRIDE: u64 = 2048;
const KSET: [Field; 3] = [(4, 4, Keys), (8, 8, Bits), (16, 8, Bits)];
const KEY: [Field; 8] = [
    (0, 8, Backing),
    (8, 4, Data),
    (12, 4, Bits),
    (16, 4, Segments),
    (20, 4, Data),
    (24, 8, Generation),
    (32, 4, Bits),
    (36, 4, Bits),
];

/// Damages the media in one way.
pub fn damage(fixture: &mut Fixture, input: &mut Input<'_>) {
    let kind = input.u8();
    let slot = u64::from(kind >> 7);
    let segment = input.u8();
    let Some(segment) = u64::from(segment).checked_rem(fixture.segments()) else {
        return blunt(fixture, input, kind);
    };
    let geometry = fixture.geometry;
    let physical = segment as u32;
    match kind % 32 {
        0 | 1 => fixture.edit(SUPERBLOCK_AT, 24, &SUPERBLOCK, input),
        2 | 3 => fixture.edit(CACHE_INFO_AT + slot * PAGE_STRIDE, 24, &INFO, input),
        4 | 5 => fixture.edit(KEY_TAIL_AT + slot * SMALL_STRIDE, 16, &TAIL, input),
        6 | 7 => fixture.edit(DIRTY_TAIL_AT + slot * SMALL_STRIDE, 16, &TAIL, input),
        8 | 9 => {
            let at = geometry.segment_info_at(physical) + slot * PAGE_STRIDE;
            fixture.edit(at, 16, &SEGMENT_INFO, input);
        }
        10 | 11 => {
            let at = geometry.generation_at(physical) + slot * SMALL_STRIDE;
            fixture.edit(at, 16, &GENERATION, input);
        }
        12 | 13 => fixture.edit(slot * LABEL_STRIDE, LABEL_STRIDE as usize, &LABEL, input),
        14..=18 => edit_record(fixture, physical, input),
        19..=22 => plant_keys(fixture, physical, input),
        23 => plant_last(fixture, physical, input),
        24 | 25 => plant_open_key(fixture, input),
        26 => {
            let words = fixture.shared.words();
            let nth = input.below(words.len() as u64) as usize;
            words[nth].store(input.near(KEYS_MAX as u64), Ordering::Relaxed);
        }
        _ => blunt(fixture, input, kind),
    }
}

/// Bytes without a structure.
fn blunt(fixture: &mut Fixture, input: &mut Input<'_>, kind: u8) {
    let len_bytes = fixture.len_bytes();
    let at = input.near(len_bytes);
    let at = if at < len_bytes { at } else { return };
    let room = (len_bytes - at) as usize;
    match kind % 4 {
        0 => {
            let count = usize::from(input.u8()).min(room);
            fixture.pmem.poke(at, input.take(count));
        }
        1 => fixture.pmem.poke(at, &vec![0; usize::from(input.u16()).min(room)]),
        2 => {
            let from = input.below(len_bytes);
            let len = usize::from(input.u16()).min(room).min((len_bytes - from) as usize);
            let bytes = fixture.pmem.peek(from, len);
            fixture.pmem.poke(at, &bytes);
        }
        _ if room >= 64 => {
            let at = at / 64 * 64;
            fixture.is_poisoned = true;
            fixture.has_poisoned_records |= fixture.is_record(at);
            fixture.pmem.poison(at, 64);
        }
        _ => {}
    }
}

impl Fixture {
    /// Segments on the medium, by its size.
    fn segments(&self) -> u64 {
        self.geometry.segments_on(self.len_bytes())
    }

    /// Whether a two-slot record of the cache may be at `at`.
    fn is_record(&self, at: u64) -> bool {
        let in_segment = at.checked_sub(SEGMENTS_AT).map(|at| at % self.geometry.segment_bytes);
        in_segment.is_none_or(|at| at < SEGMENT_META_BYTES)
    }

    fn limit(&self, limit: Limit) -> u64 {
        match limit {
            Segments => self.segments(),
            Data => u64::from(self.geometry.data_bytes()),
            Backing => BACKING_BYTES,
            Keys => KEYS_MAX as u64 + 1,
            Generation => 1 << 62,
            Bits => 256,
        }
    }

    /// Changes one of `fields` of `bytes`.
    fn change(&self, bytes: &mut [u8], fields: &[Field], input: &mut Input<'_>) {
        let (at, width, limit) = fields[usize::from(input.u8()) % fields.len()];
        let value = input.near(self.limit(limit));
        let place = &mut bytes[at..at + width];
        place.copy_from_slice(&value.to_le_bytes()[..width]);
    }

    /// Changes one of `fields` of the structure at `at`, and seals it.
    fn edit(&self, at: u64, len: usize, fields: &[Field], input: &mut Input<'_>) {
        let mut bytes = self.pmem.peek(at, len);
        self.change(&mut bytes, fields, input);
        let crc = pcache_crc(&bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        self.pmem.poke(at, &bytes);
    }

    /// The data area of a segment.
    fn data(&self, physical: u32) -> Vec<u8> {
        let len = self.geometry.data_bytes() as usize;
        self.pmem.peek(self.geometry.data_at(physical), len)
    }
}

/// The places of the records at the front of a segment, with the place after the last one.
fn records(data: &[u8]) -> Vec<usize> {
    let mut places = vec![0];
    loop {
        let at = places[places.len() - 1];
        match parse_record(&data[at..data.len().min(at + KSET_BYTES_MAX)]) {
            Some(Record::Keys(keys)) => places.push(at + kset_bytes(keys.len())),
            Some(Record::Last(_)) | None => return places,
        }
    }
}

/// Changes a key, or the head of a key set.
fn edit_record(fixture: &Fixture, physical: u32, input: &mut Input<'_>) {
    let mut data = fixture.data(physical);
    let places = records(&data);
    let at = places[input.below(places.len() as u64) as usize];
    let rest = &mut data[at..];
    if rest.len() < KSET_HEADER_BYTES {
        return;
    }
    let count = u32::from_le_bytes([rest[4], rest[5], rest[6], rest[7]]) as usize;
    let kind = input.u8();
    if kind & 3 != 0 && (1..=KEYS_MAX).contains(&count) && rest.len() >= kset_bytes(count) {
        let from = KSET_HEADER_BYTES + usize::from(kind) % count * KEY_BYTES;
        fixture.change(&mut rest[from..from + KEY_BYTES], &KEY, input);
    } else {
        fixture.change(rest, &KSET, input);
    }
    let count = u32::from_le_bytes([rest[4], rest[5], rest[6], rest[7]]) as usize;
    let len = match rest[16] & 1 {
        1 => KSET_HEADER_BYTES,
        _ => kset_bytes(count.min(KEYS_MAX)).min(rest.len()),
    };
    let crc = pcache_crc(&rest[4..len]);
    rest[..4].copy_from_slice(&crc.to_le_bytes());
    let bytes = &rest[..len];
    fixture.pmem.poke(fixture.geometry.data_at(physical) + at as u64, bytes);
}

/// A key of which most parts make sense.
fn key(fixture: &Fixture, input: &mut Input<'_>) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    let segment = u64::from(input.u8()) % fixture.segments();
    let off = input.below(BACKING_BYTES / SECTOR) * SECTOR;
    let len = (u64::from(input.u8() % 24) + 1) * SECTOR;
    let len = len.min(REGION_BYTES - off % REGION_BYTES).min(BACKING_BYTES - off);
    let room = fixture.limit(Data) - len;
    let generation = fixture.pmem.peek(fixture.geometry.generation_at(segment as u32) + 24, 8);
    key[..8].copy_from_slice(&off.to_le_bytes());
    key[8..12].copy_from_slice(&(len as u32).to_le_bytes());
    key[16..20].copy_from_slice(&(segment as u32).to_le_bytes());
    let place = input.below(room / SECTOR + 1) * SECTOR;
    key[20..24].copy_from_slice(&(place as u32).to_le_bytes());
    key[24..32].copy_from_slice(&generation);
    let choice = input.u8();
    key[12] = choice & 1;
    key[12] <<= 1;
    if choice & 2 != 0 {
        key[24] = key[24].wrapping_sub(1);
    }
    if choice & 0xE0 == 0xE0 {
        fixture.change(&mut key, &KEY, input);
    }
    if fixture.has_data_crc() && choice & 4 == 0 {
        let at = fixture.geometry.data_at(segment as u32) + place;
        let crc = pcache_crc(&fixture.pmem.peek(at, len as usize));
        key[32..36].copy_from_slice(&crc.to_le_bytes());
    }
    key
}

/// The place for a new record: after the existing ones, or anywhere.
fn place_for(fixture: &Fixture, physical: u32, input: &mut Input<'_>) -> usize {
    match input.u8() {
        0..=200 => records(&fixture.data(physical)).pop().unwrap_or(0),
        _ => (input.near(fixture.limit(Data)) % fixture.limit(Data)) as usize / 8 * 8,
    }
}

/// Puts a set of new keys into a segment.
fn plant_keys(fixture: &Fixture, physical: u32, input: &mut Input<'_>) {
    let at = place_for(fixture, physical, input);
    let room = fixture.limit(Data) as usize - at;
    let count = match input.u8() {
        full @ 240.. => KEYS_MAX - usize::from(full - 240),
        few => usize::from(few % 8),
    };
    if kset_bytes(count) > room {
        return;
    }
    let mut set = vec![0; KSET_HEADER_BYTES];
    for _ in 0..count {
        set.extend(key(fixture, input));
    }
    seal_kset(&mut set, count);
    fixture.pmem.poke(fixture.geometry.data_at(physical) + at as u64, &set);
}

/// Continues the log in another segment.
fn plant_last(fixture: &Fixture, physical: u32, input: &mut Input<'_>) {
    let at = place_for(fixture, physical, input);
    if at + KSET_HEADER_BYTES <= fixture.limit(Data) as usize {
        let last = KsetHeader::last(input.near(fixture.segments()) as u32);
        fixture.pmem.poke(fixture.geometry.data_at(physical) + at as u64, last.as_bytes());
    }
}

/// The number of words before the stripes, and of a stripe, in the memory of open key sets.
const SHARED_HEADER_WORDS: usize = 16;
const STRIPE_HEADER_WORDS: usize = 8;
const STRIPE_WORDS: usize = STRIPE_HEADER_WORDS + KEYS_MAX * KEY_BYTES / 8;

/// Adds a key to shared memory, as if the last server had left it there.
fn plant_open_key(fixture: &Fixture, input: &mut Input<'_>) {
    let words = fixture.shared.words();
    let stripes = (words.len() - SHARED_HEADER_WORDS) / STRIPE_WORDS;
    let stripe = usize::from(input.u8()) % stripes;
    let words = &words[SHARED_HEADER_WORDS + stripe * STRIPE_WORDS..][..STRIPE_WORDS];
    let count = words[0].load(Ordering::Relaxed) as usize;
    if count < KEYS_MAX {
        let place = &words[STRIPE_HEADER_WORDS + count * KEY_BYTES / 8..];
        for (word, bytes) in place.iter().zip(key(fixture, input).chunks_exact(8)) {
            let value = bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
            word.store(value, Ordering::Relaxed);
        }
        words[0].store(count as u64 + 1, Ordering::Relaxed);
    }
}
