//! Damage to a cache device that gets past its checksums: fields are changed and the structure is
//! sealed again. Some damage is blunt, too: bytes overwritten, zeroed, copied, unreadable.

use std::sync::atomic::Ordering;

use udm::crc::pcache_crc;
use udm::pcache::layout::{
    CACHE_INFO_AT, DIRTY_TAIL_AT, KEY_BYTES, KEY_TAIL_AT, KEYS_MAX, KSET_BYTES_MAX,
    KSET_HEADER_BYTES, KsetHeader, PAGE_STRIDE, REGION_BYTES, Record, SEGMENT_META_BYTES,
    SEGMENTS_AT, SMALL_STRIDE, SUPERBLOCK_AT, kset_bytes, parse_record, seal_kset,
};
use udm::units::SECTOR;
use zerocopy::IntoBytes;

use super::world::{BACKING_BYTES, World};
use crate::input::Input;

/// A field: where it stands in its structure, its bytes, and which limit it is near to.
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

/// Does one thing to the media that nobody should do.
pub fn damage(world: &mut World, input: &mut Input<'_>) {
    let kind = input.u8();
    let slot = u64::from(kind >> 7);
    let segment = input.u8();
    let Some(segment) = u64::from(segment).checked_rem(world.segments()) else {
        return blunt(world, input, kind);
    };
    let geometry = world.geometry;
    let physical = segment as u32;
    match kind % 32 {
        0 | 1 => world.edit(SUPERBLOCK_AT, 24, &SUPERBLOCK, input),
        2 | 3 => world.edit(CACHE_INFO_AT + slot * PAGE_STRIDE, 24, &INFO, input),
        4 | 5 => world.edit(KEY_TAIL_AT + slot * SMALL_STRIDE, 16, &TAIL, input),
        6 | 7 => world.edit(DIRTY_TAIL_AT + slot * SMALL_STRIDE, 16, &TAIL, input),
        8 | 9 => {
            let at = geometry.segment_info_at(physical) + slot * PAGE_STRIDE;
            world.edit(at, 16, &SEGMENT_INFO, input);
        }
        10 | 11 => {
            let at = geometry.generation_at(physical) + slot * SMALL_STRIDE;
            world.edit(at, 16, &GENERATION, input);
        }
        12 | 13 => world.edit(slot * LABEL_STRIDE, LABEL_STRIDE as usize, &LABEL, input),
        14..=18 => edit_record(world, physical, input),
        19..=22 => plant_keys(world, physical, input),
        23 => plant_last(world, physical, input),
        24 | 25 => plant_open_key(world, input),
        26 => {
            let words = world.shared.words();
            let nth = input.below(words.len() as u64) as usize;
            words[nth].store(input.near(KEYS_MAX as u64), Ordering::Relaxed);
        }
        _ => blunt(world, input, kind),
    }
}

/// Bytes that obey no structure.
fn blunt(world: &mut World, input: &mut Input<'_>, kind: u8) {
    let len_bytes = world.len_bytes();
    let at = input.near(len_bytes);
    let at = if at < len_bytes { at } else { return };
    let room = (len_bytes - at) as usize;
    match kind % 4 {
        0 => {
            let count = usize::from(input.u8()).min(room);
            world.pmem.poke(at, input.take(count));
        }
        1 => world.pmem.poke(at, &vec![0; usize::from(input.u16()).min(room)]),
        2 => {
            let from = input.below(len_bytes);
            let len = usize::from(input.u16()).min(room).min((len_bytes - from) as usize);
            let bytes = world.pmem.peek(from, len);
            world.pmem.poke(at, &bytes);
        }
        _ if room >= 64 => {
            let at = at / 64 * 64;
            world.is_poisoned = true;
            world.has_poisoned_records |= world.is_record(at);
            world.pmem.poison(at, 64);
        }
        _ => {}
    }
}

impl World {
    /// Segments on the medium, by its size.
    fn segments(&self) -> u64 {
        self.geometry.segments_on(self.len_bytes())
    }

    /// Whether a two-slot record of the cache may stand at `at`.
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

/// Where the records at the front of a segment stand, with the place after the last one.
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
fn edit_record(world: &World, physical: u32, input: &mut Input<'_>) {
    let mut data = world.data(physical);
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
        world.change(&mut rest[from..from + KEY_BYTES], &KEY, input);
    } else {
        world.change(rest, &KSET, input);
    }
    let count = u32::from_le_bytes([rest[4], rest[5], rest[6], rest[7]]) as usize;
    let len = match rest[16] & 1 {
        1 => KSET_HEADER_BYTES,
        _ => kset_bytes(count.min(KEYS_MAX)).min(rest.len()),
    };
    let crc = pcache_crc(&rest[4..len]);
    rest[..4].copy_from_slice(&crc.to_le_bytes());
    let bytes = &rest[..len];
    world.pmem.poke(world.geometry.data_at(physical) + at as u64, bytes);
}

/// A key of which most parts make sense.
fn key(world: &World, input: &mut Input<'_>) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    let segment = u64::from(input.u8()) % world.segments();
    let off = input.below(BACKING_BYTES / SECTOR) * SECTOR;
    let len = (u64::from(input.u8() % 24) + 1) * SECTOR;
    let len = len.min(REGION_BYTES - off % REGION_BYTES).min(BACKING_BYTES - off);
    let room = world.limit(Data) - len;
    let generation = world.pmem.peek(world.geometry.generation_at(segment as u32) + 24, 8);
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
        world.change(&mut key, &KEY, input);
    }
    if world.has_data_crc() && choice & 4 == 0 {
        let at = world.geometry.data_at(segment as u32) + place;
        let crc = pcache_crc(&world.pmem.peek(at, len as usize));
        key[32..36].copy_from_slice(&crc.to_le_bytes());
    }
    key
}

/// Where to plant a record: at the end of those that are there, or anywhere.
fn place_for(world: &World, physical: u32, input: &mut Input<'_>) -> usize {
    match input.u8() {
        0..=200 => records(&world.data(physical)).pop().unwrap_or(0),
        _ => (input.near(world.limit(Data)) % world.limit(Data)) as usize / 8 * 8,
    }
}

/// Puts a set of new keys into a segment.
fn plant_keys(world: &World, physical: u32, input: &mut Input<'_>) {
    let at = place_for(world, physical, input);
    let room = world.limit(Data) as usize - at;
    let count = match input.u8() {
        full @ 240.. => KEYS_MAX - usize::from(full - 240),
        few => usize::from(few % 8),
    };
    if kset_bytes(count) > room {
        return;
    }
    let mut set = vec![0; KSET_HEADER_BYTES];
    for _ in 0..count {
        set.extend(key(world, input));
    }
    seal_kset(&mut set, count);
    world.pmem.poke(world.geometry.data_at(physical) + at as u64, &set);
}

/// Sends the log on to another segment.
fn plant_last(world: &World, physical: u32, input: &mut Input<'_>) {
    let at = place_for(world, physical, input);
    if at + KSET_HEADER_BYTES <= world.limit(Data) as usize {
        let last = KsetHeader::last(input.near(world.segments()) as u32);
        world.pmem.poke(world.geometry.data_at(physical) + at as u64, last.as_bytes());
    }
}

/// Words in front of the stripes, and of a stripe, in the memory of open key sets.
const SHARED_HEADER_WORDS: usize = 16;
const STRIPE_HEADER_WORDS: usize = 8;
const STRIPE_WORDS: usize = STRIPE_HEADER_WORDS + KEYS_MAX * KEY_BYTES / 8;

/// Adds a key to what the last server seems to have left in shared memory.
fn plant_open_key(world: &World, input: &mut Input<'_>) {
    let words = world.shared.words();
    let stripes = (words.len() - SHARED_HEADER_WORDS) / STRIPE_WORDS;
    let stripe = usize::from(input.u8()) % stripes;
    let words = &words[SHARED_HEADER_WORDS + stripe * STRIPE_WORDS..][..STRIPE_WORDS];
    let count = words[0].load(Ordering::Relaxed) as usize;
    if count < KEYS_MAX {
        let place = &words[STRIPE_HEADER_WORDS + count * KEY_BYTES / 8..];
        for (word, bytes) in place.iter().zip(key(world, input).chunks_exact(8)) {
            let value = bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
            word.store(value, Ordering::Relaxed);
        }
        words[0].store(count as u64 + 1, Ordering::Relaxed);
    }
}
