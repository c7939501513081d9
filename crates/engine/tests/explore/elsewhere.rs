//! The state that a kernel may leave on the medium between two attaches of ours, made by hand from
//! the format's specification: logs without flush marks, keys of reused segments, CLEAN keys that
//! follow dirty ones.

use udm::pcache::layout::{
    CACHE_INFO_AT, CacheInfo, DIRTY_TAIL_AT, GC_PERCENT_MAX, Generation, KEY_CLEAN, KEY_TAIL_AT,
    KSET_HEADER_BYTES, Key, PAGE_STRIDE, Position, Record, SMALL_STRIDE, Sealed, Slotted, Tail,
    kset_bytes, parse_record, seal_kset,
};
use udm::pcache::slots::choose;
use zerocopy::{FromZeros, IntoBytes};

use crate::model::{Model, SECTOR, SLOTS, fill, offset_of};
use crate::of_pcache::GEOMETRY;
use crate::sim::SimMedium;

/// The actions of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Two flushed writes, without marks between them.
    TwoFlushes { first: usize, second: usize },
    /// Reused a segment whose keys are still in the log (its collector crashed).
    StaleKeys,
    /// Logged what the origin had as CLEAN, after a dirty key (its append had failed before).
    CleanBehindDirty { slot: usize },
    /// writecache: was cut off before it committed; its entries have such numbers, beyond S.
    Uncommitted { first: usize, beyond: u64 },
    /// writecache: was cut off before it freed an older version of a sector.
    OlderVersion { slot: usize },
}

/// Changes the medium; returns the slots that got new versions, in order.
pub fn change(sim: &SimMedium, what: What, model: &mut Model, origin: &[u64]) -> Vec<(usize, u64)> {
    let segments = attach_as_kernel(sim);
    match what {
        What::TwoFlushes { first, second } => {
            let wrote: Vec<(usize, u64)> =
                [first, second].map(|slot| (slot, model.next_stamp(slot, false))).into();
            let log = Log::read(sim);
            let free = log.free_segment(segments);
            let Some(free) = free else { return Vec::new() };
            let mut head = log.head;
            for (nth, &(slot, stamp)) in wrote.iter().enumerate() {
                let at = (nth * SECTOR) as u32;
                if !append(sim, &mut head, slot, stamp, free, at, 0) {
                    let wrote = wrote[..nth].to_vec();
                    model.elsewhere_wrote(&wrote);
                    return wrote;
                }
            }
            model.elsewhere_wrote(&wrote);
            wrote
        }
        What::CleanBehindDirty { slot } => {
            let log = Log::read(sim);
            if let Some(free) = log.free_segment(segments) {
                append(sim, &mut log.head.clone(), slot, origin[slot], free, 0, KEY_CLEAN);
            }
            model.elsewhere_wrote(&[]);
            Vec::new()
        }
        What::Uncommitted { .. } | What::OlderVersion { .. } => unreachable!("no pcache"),
        What::StaleKeys => {
            reuse_newest(sim);
            model.elsewhere_wrote(&[]);
            Vec::new()
        }
    }
}

fn load<T: Sealed>(sim: &SimMedium, at: u64) -> T {
    T::read_from_bytes(&sim.peek(at as usize, size_of::<T>())).unwrap()
}

fn current<T: Slotted>(sim: &SimMedium, at: u64, stride: u64) -> (usize, T) {
    let slots: [T; 2] = [load(sim, at), load(sim, at + stride)];
    let seq = |slot: &T| slot.is_sealed().then(|| slot.seq());
    let nth = choose(seq(&slots[0]), seq(&slots[1])).unwrap();
    (nth, slots[nth])
}

/// A kernel stores cache_info at each attach. Says how many segments there are.
fn attach_as_kernel(sim: &SimMedium) -> u32 {
    let (slot, info) = current::<CacheInfo>(sim, CACHE_INFO_AT, PAGE_STRIDE);
    let next = CacheInfo::new(
        info.header.seq.wrapping_add(1),
        info.first_segment.get(),
        info.n_segs.get(),
        info.flags.get(),
    );
    const { assert!(GC_PERCENT_MAX < 128) };
    sim.poke((CACHE_INFO_AT + (1 - slot) as u64 * PAGE_STRIDE) as usize, next.as_bytes());
    info.n_segs.get()
}

fn data(position: Position) -> usize {
    GEOMETRY.data_at(position.segment) as usize + position.offset as usize
}

struct Log {
    keys: Vec<Key>,
    /// Position of each key's set, parallel to `keys`.
    head: Position,
    segments: Vec<u32>,
}

impl Log {
    fn read(sim: &SimMedium) -> Log {
        let (_, tail) = current::<Tail>(sim, KEY_TAIL_AT, SMALL_STRIDE);
        let mut log = Log { keys: Vec::new(), head: tail.position(), segments: Vec::new() };
        log.segments.push(log.head.segment);
        loop {
            let left = GEOMETRY.data_bytes() - log.head.offset;
            let bytes = sim.peek(data(log.head), left as usize);
            match parse_record(&bytes) {
                None => return log,
                Some(Record::Last(next)) => {
                    log.head = Position { segment: next, offset: 0 };
                    log.segments.push(next);
                }
                Some(Record::Keys(keys)) => {
                    log.keys.extend_from_slice(keys);
                    log.head.offset += kset_bytes(keys.len()) as u32;
                }
            }
        }
    }

    fn free_segment(&self, segments: u32) -> Option<u32> {
        (0..segments).rev().find(|segment| {
            !self.segments.contains(segment)
                && self.keys.iter().all(|key| key.segment.get() != *segment)
        })
    }
}

/// Appends one key with its data as a kernel does. `false`: no room.
fn append(
    sim: &SimMedium,
    head: &mut Position,
    slot: usize,
    stamp: u64,
    segment: u32,
    at: u32,
    flags: u32,
) -> bool {
    let bytes = kset_bytes(1);
    if (GEOMETRY.data_bytes() - head.offset) as usize <= bytes + 2 * KSET_HEADER_BYTES {
        return false;
    }
    let mut sector = [0; SECTOR];
    fill(&mut sector, stamp);
    sim.poke(data(Position { segment, offset: at }), &sector);
    let generation = current::<Generation>(sim, GEOMETRY.generation_at(segment), SMALL_STRIDE);
    let mut key = Key::new_zeroed();
    key.off.set(offset_of(slot));
    key.len.set(SECTOR as u32);
    key.flags.set(flags);
    key.segment.set(segment);
    key.segment_off.set(at);
    key.generation = generation.1.generation;
    let (_, info) = current::<CacheInfo>(sim, CACHE_INFO_AT, PAGE_STRIDE);
    if info.flags.get() & 1 != 0 {
        key.data_crc.set(udm::base::crc::pcache_crc(&sector));
    }
    let mut set = vec![0; bytes + KSET_HEADER_BYTES];
    set[KSET_HEADER_BYTES..bytes].copy_from_slice(key.as_bytes());
    seal_kset(&mut set[..bytes], 1);
    sim.poke(data(*head), &set);
    head.offset += bytes as u32;
    true
}

/// Raises the generation of the segment of the newest written-back key, and fills it with
/// something else, while the key is still in the log.
fn reuse_newest(sim: &SimMedium) {
    let (_, dirty) = current::<Tail>(sim, DIRTY_TAIL_AT, SMALL_STRIDE);
    let log = Log::read(sim);
    if dirty.position() != log.head {
        return;
    }
    let Some(key) = log.keys.last() else { return };
    let segment = key.segment.get();
    let at = GEOMETRY.generation_at(segment);
    let (slot, generation) = current::<Generation>(sim, at, SMALL_STRIDE);
    if generation.generation != key.generation {
        return;
    }
    let next =
        Generation::new(generation.header.seq.wrapping_add(1), generation.generation.get() + 1);
    sim.poke((at + (1 - slot) as u64 * SMALL_STRIDE) as usize, next.as_bytes());
    let foreign = vec![0xA5; GEOMETRY.data_bytes() as usize];
    sim.poke(data(Position { segment, offset: 0 }), &foreign);
    debug_assert!(log.keys.len() >= usize::from(SLOTS == 0));
}
