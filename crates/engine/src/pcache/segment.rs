//! Segments in memory: their use, their references, and the allocation of space in them. Kernel
//! counterpart: `cache_segment.c`, `segment.c`.
//!
//! A segment is free, a stretch of the log, or holds data. A data segment counts references: one
//! per key in the log or in an open key set, and, while it is a data head, references for all keys
//! to come. It is released when the count is 0, by the collector only, and in this order:
//!
//! 1. key_tail has durably passed every key that pointed into it (gc.rs does that);
//! 2. its raised generation is durable;
//! 3. its raised generation is visible to readers: index entries that point there are dead;
//! 4. it is free for reuse.
//!
//! Data never takes the last [`LOG_RESERVE`] free segments. Without space for the log no key could
//! be logged, so no segment could be collected, and a full cache would stay full indefinitely.

use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pcache::slots::SlotState;
use crate::pmem::copy_target::CopyTarget;
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{Mutex, lock};
use crate::units::{BLOCK, SECTOR};

use super::index::Place;
use super::layout::{GENERATION_MAX, Generation, SMALL_STRIDE};
use super::media::Media;
use super::retention::Class;

#[cfg(feature = "mutants")]
mod wrong;

/// Free segments that only the log may take.
pub const LOG_RESERVE: u32 = 2;
/// With fewer segments no write would be possible: one holds the log, one is for data.
pub const SEGMENTS_MIN: u32 = LOG_RESERVE + 2;
/// At most this many data heads; each pins a segment until it is full.
pub const HEADS_MAX: usize = 8;

/// A segment as the attach found it.
#[derive(Clone, Copy, Debug)]
pub struct SegmentOnMedia {
    /// Physical number.
    pub physical: u32,
    /// Current generation.
    pub generation: u64,
    /// Where its record stands.
    pub slot: SlotState,
}

/// The state of one segment.
#[derive(Debug)]
pub struct Segment {
    /// Physical number.
    physical: u32,
    generation: AtomicU64,
    references: AtomicU32,
    /// The current slot of the generation's record; changed by the collector only.
    slot: Mutex<SlotState>,
    /// A [`Class`], as a number; see classes.rs.
    pub(super) class: AtomicU8,
    /// Order in which segments were given their class.
    pub(super) turn: AtomicU64,
    /// How many keys had been logged when data of it was last kept in its place.
    pub(super) kept_at: AtomicU64,
    /// Whether two keys may name the same place of it: it has zeroes, which are stored once for
    /// many keys, or it may have data of a server before this one.
    pub(super) is_shared: AtomicBool,
}

/// A piece of a data segment, taken for a key: it holds a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Logical segment.
    pub segment: u32,
    /// Byte within its data area.
    pub offset: u32,
    /// Bytes; at most what was asked for.
    pub len: u32,
    /// The segment's generation.
    pub generation: u64,
}

#[derive(Debug)]
struct Allocator {
    used: Vec<bool>,
    is_log: Vec<bool>,
    hint: u32,
}

/// The position of a thread's next data. Space is taken by one compare-and-swap: references for all
/// keys that may come were added when the segment was opened, and unused ones are given back when
/// it is full.
#[derive(Debug)]
#[repr(align(128))]
struct Head {
    /// A packed [`HeadPlace`], or [`NO_PLACE`].
    place: AtomicU64,
    /// Held by the thread that opens a new segment.
    opening: Mutex<()>,
}

const NO_PLACE: u64 = u64::MAX;

/// References that a head's segment has from the start: more than its sectors can have keys.
const REFERENCES_AHEAD: u32 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HeadPlace {
    /// Below 2^20, as in the index.
    segment: u32,
    /// Bytes; a multiple of 512.
    offset: u32,
    /// References that went to keys so far.
    keys: u32,
}

impl HeadPlace {
    fn pack(self) -> u64 {
        let sector = u64::from(self.offset) / SECTOR;
        u64::from(self.segment) << 40 | sector << 20 | u64::from(self.keys)
    }

    fn unpack(packed: u64) -> Option<HeadPlace> {
        let field = |shift: u32| ((packed >> shift) & 0xF_FFFF) as u32;
        let offset = field(20) * SECTOR as u32;
        (packed != NO_PLACE).then(|| HeadPlace { segment: field(40), offset, keys: field(0) })
    }
}

/// All segments of a cache, by logical number.
#[derive(Debug)]
pub struct Segments {
    media: Media,
    pub(super) segments: Box<[Segment]>,
    allocator: Mutex<Allocator>,
    used: AtomicU32,
    /// The heads of the window, then the heads of the main part.
    heads: Box<[Head]>,
    window_heads: usize,
    pub(super) turns: AtomicU64,
    /// Segments whose last reference was given up; the collector examines them.
    released: Mutex<Vec<u32>>,
    has_released: AtomicBool,
}

impl Segments {
    /// All free. `found` is the chain in logical order.
    pub fn new(media: Media, found: &[SegmentOnMedia]) -> Segments {
        let segments = found
            .iter()
            .map(|segment| Segment {
                physical: segment.physical,
                generation: AtomicU64::new(segment.generation),
                references: AtomicU32::new(0),
                slot: Mutex::new(segment.slot),
                class: AtomicU8::new(Class::Window as u8),
                turn: AtomicU64::new(0),
                kept_at: AtomicU64::new(0),
                is_shared: AtomicBool::new(false),
            })
            .collect();
        // Every head may pin a whole segment: few heads on few segments.
        let window_heads = (found.len() / 8).clamp(1, HEADS_MAX / 2);
        let heads = window_heads + (found.len() / 64).clamp(1, HEADS_MAX / 2);
        Segments {
            media,
            segments,
            allocator: Mutex::new(Allocator {
                used: vec![false; found.len()],
                is_log: vec![false; found.len()],
                hint: 0,
            }),
            used: AtomicU32::new(0),
            window_heads,
            turns: AtomicU64::new(0),
            heads: (0..heads)
                .map(|_| Head { place: AtomicU64::new(NO_PLACE), opening: Mutex::default() })
                .collect(),
            released: Mutex::default(),
            has_released: AtomicBool::new(false),
        }
    }

    /// How many segments there are.
    pub fn count(&self) -> u32 {
        self.segments.len() as u32
    }

    /// How many blocks of data they have room for.
    pub fn blocks(&self) -> u64 {
        u64::from(self.count()) * u64::from(self.media.geometry.data_bytes()) / BLOCK
    }

    /// How many segments can be data heads.
    pub fn heads(&self) -> u32 {
        self.heads.len() as u32
    }

    /// Segments in use: log, data and heads.
    pub fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Segments free for anything.
    pub fn free(&self) -> u32 {
        self.count() - self.used()
    }

    /// The segment's present generation. Readers compare it before and after a copy.
    pub fn generation(&self, segment: u32) -> u64 {
        self.segments[segment as usize].generation.load(Ordering::Acquire)
    }

    /// Whether the bytes that were copied from `place` before this call are the place's data: its
    /// segment was not reused since.
    pub fn is_still(&self, place: Place) -> bool {
        // The copy happens before the generation is looked at again.
        if !mutants::is(Mutant::HitUnfenced) {
            fence(Ordering::Acquire);
        }
        place.is_of(self.generation(place.segment))
    }

    /// References held by keys and a head.
    pub fn references(&self, segment: u32) -> u32 {
        self.segments[segment as usize].references.load(Ordering::Relaxed)
    }

    /// Device byte of a place in a segment's data area.
    pub fn data_at(&self, segment: u32, offset: u32) -> u64 {
        let physical = self.segments[segment as usize].physical;
        self.media.geometry.data_at(physical) + u64::from(offset)
    }

    /// One more key points into the segment. The caller holds a reference already, or is the
    /// attach.
    pub fn reference(&self, segment: u32) {
        self.segments[segment as usize].references.fetch_add(1, Ordering::Relaxed);
    }

    /// As [`Segments::reference`], for this many keys.
    pub fn reference_many(&self, segment: u32, keys: u32) {
        self.segments[segment as usize].references.fetch_add(keys, Ordering::Relaxed);
    }

    /// A key is gone.
    pub fn release(&self, segment: u32) {
        self.release_many(segment, 1);
    }

    fn release_many(&self, segment: u32, count: u32) {
        let references = &self.segments[segment as usize].references;
        let before = references.fetch_sub(count, Ordering::AcqRel);
        assert!(before >= count, "segment {segment} lost more references than it had");
        if before == count {
            lock(&self.released).push(segment);
            self.has_released.store(true, Ordering::Release);
        }
    }

    /// Marks a segment as used by data that the attach found: data that was kept so far stays.
    pub fn mark_data(&self, segment: u32) {
        self.mark(segment, false);
        self.set_class(segment, Class::Main);
        self.set_shared(segment, true);
    }

    /// Marks a segment as a stretch of the log.
    pub fn mark_log(&self, segment: u32) {
        self.mark(segment, true);
    }

    fn mark(&self, segment: u32, is_log: bool) {
        let mut allocator = lock(&self.allocator);
        let used = &mut allocator.used[segment as usize];
        if !std::mem::replace(used, true) {
            self.used.fetch_add(1, Ordering::Relaxed);
        }
        if is_log {
            allocator.is_log[segment as usize] = true;
        }
    }

    /// Whether a segment is a stretch of the log.
    pub fn is_log(&self, segment: u32) -> bool {
        lock(&self.allocator).is_log[segment as usize]
    }

    /// A free segment for the log; may take the reserve.
    pub fn take_log(&self) -> Option<u32> {
        let mut allocator = lock(&self.allocator);
        let segment = self.take_free(&mut allocator, 0)?;
        allocator.is_log[segment as usize] = true;
        Some(segment)
    }

    fn take_free(&self, allocator: &mut Allocator, reserve: u32) -> Option<u32> {
        if self.free() <= reserve {
            return None;
        }
        let count = self.count();
        let segment = (0..count)
            .map(|nth| (allocator.hint + nth) % count)
            .find(|&segment| !allocator.used[segment as usize])?;
        allocator.used[segment as usize] = true;
        allocator.hint = segment;
        self.used.fetch_add(1, Ordering::Relaxed);
        Some(segment)
    }

    /// The head of a thread for data of a class.
    fn head_of(&self, port: usize, class: Class) -> usize {
        match class {
            Class::Window => port % self.window_heads,
            _ => self.window_heads + port % (self.heads.len() - self.window_heads),
        }
    }

    /// As [`Segments::take`], from a segment of the main part only.
    pub fn take_main(&self, port: usize, len: u32, reserve: u32) -> Option<Space> {
        self.take_at_head(self.head_of(port, Class::Main), len, Some(reserve))
    }

    /// Takes up to `len` bytes of data space, with a reference. `port` spreads threads over heads.
    /// `reserve` free segments are left in addition to the log's own. `None`: no space now.
    pub fn take(&self, port: usize, len: u32, reserve: u32, class: Class) -> Option<Space> {
        let own = self.head_of(port, class);
        if let Some(space) = self.take_at_head(own, len, Some(reserve)) {
            return Some(space);
        }
        // No free segment: all threads may use the rest of the other heads' space.
        (0..self.heads.len())
            .filter(|&head| head != own)
            .find_map(|head| self.take_at_head(head, len, None))
    }

    fn take_at_head(&self, nth: usize, len: u32, reserve: Option<u32>) -> Option<Space> {
        #[cfg(feature = "mutants")]
        if wrong::takes_space() {
            return self.take_at_head_wrongly(nth, len, reserve);
        }
        let head = &self.heads[nth];
        let mut seen = head.place.load(Ordering::Acquire);
        loop {
            let Some(at) = HeadPlace::unpack(seen) else {
                seen = self.open_head(nth, reserve?)?;
                continue;
            };
            let left = self.media.geometry.data_bytes() - at.offset;
            let len = len.min(left);
            let keys = at.keys + 1;
            let next = match len == left {
                true => NO_PLACE,
                false => HeadPlace { offset: at.offset + len, keys, ..at }.pack(),
            };
            let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
            if let Err(now) = head.place.compare_exchange_weak(seen, next, success, failure) {
                seen = now;
                continue;
            }
            // A reader that still copies the old content must see the raised generation as soon as
            // it sees any of the new content: this pairs with the fence after a reader's copy.
            fence(Ordering::Release);
            // The reference that came with the place keeps the generation unchanged.
            let generation = self.generation(at.segment);
            if next == NO_PLACE {
                self.release_many(at.segment, REFERENCES_AHEAD - keys);
            }
            return Some(Space { segment: at.segment, offset: at.offset, len, generation });
        }
    }

    /// Gives a head a fresh segment, unless another thread was faster, and returns its place.
    fn open_head(&self, nth: usize, reserve: u32) -> Option<u64> {
        let head = &self.heads[nth];
        let _opening = lock(&head.opening);
        let seen = head.place.load(Ordering::Acquire);
        if seen != NO_PLACE {
            return Some(seen);
        }
        #[cfg(feature = "mutants")]
        if wrong::opens_heads() {
            return self.open_head_wrongly(nth, reserve);
        }
        let segment = self.take_free(&mut lock(&self.allocator), LOG_RESERVE + reserve)?;
        self.set_class(segment, self.class_of_head(nth));
        self.set_shared(segment, false);
        let references = &self.segments[segment as usize].references;
        references.fetch_add(REFERENCES_AHEAD, Ordering::Relaxed);
        let place = HeadPlace { segment, offset: 0, keys: 0 }.pack();
        head.place.store(place, Ordering::Release);
        Some(place)
    }

    fn class_of_head(&self, nth: usize) -> Class {
        if nth < self.window_heads { Class::Window } else { Class::Main }
    }

    /// Segments whose last reference was given up, and that [`Segments::recycle`] has not seen yet.
    pub fn released(&self) -> usize {
        if self.has_released() { lock(&self.released).len() } else { 0 }
    }

    /// Whether [`Segments::recycle`] would find a segment to examine.
    pub fn has_released(&self) -> bool {
        self.has_released.load(Ordering::Acquire)
    }

    /// Raises the generation of data segments whose last reference was given up, durably, and frees
    /// them. Returns how many. Only the collector calls this, and only when key_tail is durably
    /// past every key that was passed.
    ///
    /// `before_reuse` is called for each, before any thread can take it.
    pub fn recycle(&self, before_reuse: impl Fn(u32)) -> Result<u32, Status> {
        #[cfg(feature = "mutants")]
        if wrong::recycles() {
            return self.recycle_wrongly(before_reuse);
        }
        self.has_released.store(false, Ordering::Relaxed);
        let candidates = std::mem::take(&mut *lock(&self.released));
        let mut freed = 0;
        for segment in candidates {
            if !self.is_reusable(segment) {
                continue;
            }
            self.raise_generation(segment)?;
            before_reuse(segment);
            self.set_class(segment, Class::Window);
            self.set_free(segment);
            freed += 1;
        }
        Ok(freed)
    }

    /// Whether a segment is data that no key needs.
    fn is_reusable(&self, segment: u32) -> bool {
        self.references(segment) == 0
            && !self.is_log(segment)
            && lock(&self.allocator).used[segment as usize]
    }

    fn raise_generation(&self, segment: u32) -> Result<(), Status> {
        let info = &self.segments[segment as usize];
        let mut slot = lock(&info.slot);
        let generation = info.generation.load(Ordering::Relaxed) + 1;
        if generation > GENERATION_MAX {
            // Damage that the attach could not detect; the next attach would not accept our record.
            return Err(Status::Corrupt);
        }
        let next = slot.next();
        let record = Generation::new(next.seq, generation);
        let at = self.media.geometry.generation_at(info.physical);
        self.media.store_slot(at, SMALL_STRIDE, next, &record)?;
        *slot = next;
        info.generation.store(generation, Ordering::Release);
        Ok(())
    }

    /// Frees a log segment that key_tail has durably left.
    pub fn free_log(&self, segment: u32) {
        lock(&self.allocator).is_log[segment as usize] = false;
        self.set_free(segment);
    }

    fn set_free(&self, segment: u32) {
        let mut allocator = lock(&self.allocator);
        assert!(std::mem::replace(&mut allocator.used[segment as usize], false));
        if mutants::is(Mutant::UsedUnlocked) {
            drop(allocator);
            return self.used.store(self.used() - 1, Ordering::Relaxed);
        }
        self.used.fetch_sub(1, Ordering::Relaxed);
    }

    /// The errors in the accounts, if there are any, when no thread is at work and `keys` point
    /// into the segments.
    #[cfg(all(test, feature = "shuttle"))]
    pub fn audit(&self, keys: &[u32]) -> Result<(), String> {
        let mut expected = vec![0; self.segments.len()];
        keys.iter().for_each(|&segment| expected[segment as usize] += 1);
        for head in &self.heads {
            if let Some(at) = HeadPlace::unpack(head.place.load(Ordering::SeqCst)) {
                expected[at.segment as usize] += REFERENCES_AHEAD - at.keys;
            }
        }
        let allocator = lock(&self.allocator);
        let used = allocator.used.iter().filter(|used| **used).count() as u32;
        if used != self.used() {
            return Err(format!("{} segments count as used, but {used} are", self.used()));
        }
        let released = lock(&self.released).clone();
        for (segment, &expected) in expected.iter().enumerate() {
            let found = self.references(segment as u32);
            let is_data = allocator.used[segment] && !allocator.is_log[segment];
            if found != expected {
                return Err(format!("segment {segment}: {found} references for {expected} keys"));
            }
            let is_due = self.has_released() && released.contains(&(segment as u32));
            if is_data != (expected > 0) && !is_due {
                return Err(format!("segment {segment} has {expected} keys, is data: {is_data}"));
            }
        }
        Ok(())
    }

    /// Loads cached bytes.
    pub fn load(&self, segment: u32, offset: u32, into: &mut [u8]) -> Result<(), Status> {
        self.media.pmem.load(self.data_at(segment, offset), into)
    }

    /// The same, into memory that others use too.
    pub fn load_shared(
        &self,
        segment: u32,
        offset: u32,
        into: CopyTarget<'_>,
    ) -> Result<(), Status> {
        self.media.pmem.load_shared(self.data_at(segment, offset), into)
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Geometry;
    use super::*;
    use crate::pmem::Persistence;
    use crate::pmem::sim::SimPmem;
    use crate::prng::Prng;
    use crate::sync::Arc;

    /// `count` segments with 52 KiB of data each.
    fn segments(count: u32) -> Segments {
        let geometry = Geometry { segment_bytes: 64 << 10, device_bytes_min: 0 };
        let bytes = 20480 + u64::from(count) * geometry.segment_bytes;
        let pmem = Arc::new(SimPmem::new(bytes, Persistence::Cpu));
        let slot = SlotState::unwritten(0);
        let found: Vec<SegmentOnMedia> =
            (0..count).map(|physical| SegmentOnMedia { physical, generation: 7, slot }).collect();
        Segments::new(Media { pmem, geometry, shared: None }, &found)
    }

    #[test]
    fn space_is_given_once_and_references_are_exact() {
        let segments = segments(24);
        let mut prng = Prng::new(1);
        let mut taken: Vec<Space> = Vec::new();
        let classes = [Class::Window, Class::Main];
        // More ports than heads: some share one.
        while let Some(space) = segments.take(
            prng.below(5) as usize,
            (1 + prng.below(16) as u32) * 512,
            0,
            classes[prng.below(2) as usize],
        ) {
            assert!(space.len > 0 && space.generation == 7);
            taken.push(space);
        }
        assert_eq!(segments.free(), LOG_RESERVE);
        taken.sort_by_key(|space| (space.segment, space.offset));
        for pair in taken.windows(2) {
            let is_apart = pair[0].segment != pair[1].segment
                || pair[0].offset + pair[0].len <= pair[1].offset;
            assert!(is_apart, "{pair:?}");
        }
        // No head has space left, so all remaining references belong to keys.
        let bytes: u64 = taken.iter().map(|space| u64::from(space.len)).sum();
        assert_eq!(bytes, u64::from(24 - LOG_RESERVE) * (52 << 10));
        for space in &taken {
            assert!(segments.references(space.segment) > 0);
            segments.release(space.segment);
        }
        assert!((0..24).all(|segment| segments.references(segment) == 0));
        assert_eq!(segments.recycle(|_| ()).unwrap(), 24 - LOG_RESERVE);
    }

    #[test]
    fn a_place_survives_packing() {
        let place = HeadPlace { segment: (1 << 20) - 1, offset: 16_764_928 - 512, keys: 32_767 };
        assert_eq!(HeadPlace::unpack(place.pack()), Some(place));
        assert_eq!(HeadPlace::unpack(NO_PLACE), None);
    }
}
