//! The index: logical block -> place in the cache, in packed 8-byte entries, by 4 MiB region.
//!
//! An entry names the place of a whole 4 KiB block, or a row of the region's side table, which has
//! an entry for each of the block's eight sectors. Every entry carries the generation of its
//! segment. When a segment is reused its generation rises first; all entries that point to it are
//! then dead by comparison, without a search for them. A region with many entries has a flat array
//! of them, which readers use without a lock; a region with few has a packed list (region.rs).
//! Regions are swept at intervals: dead entries are removed, so their memory depends on the amount
//! of data that is cached now. The region itself stays, about 280 bytes (docs/limits.md).
//!
//! Invariants:
//! 1. Entries change only under the lock of the region's stripe. They are read without it.
//! 2. The data that a live entry points to is immutable until the segment's generation rises; so a
//!    reader checks the generation, copies, and checks it again.
//! 3. A row of the side table is changed and read under the side's own lock only, and an entry that
//!    names a row is read again under that lock before the row is used.
//! 4. An array belongs to one region at a time, which names it in its form. A reader without a lock
//!    checks the form again after it has read an entry.

use crate::sync::{Arc, OnceLock};
use crate::units::{BLOCK, SECTOR};

use super::layout::REGION_BYTES;
use super::retention::USES_MAX;

mod flat;
mod packed;
mod region;
mod rows;

use flat::Flats;
pub use region::FLAT_FROM;
use region::{Region, Wanted};

/// Sectors of a block.
const BLOCK_SECTORS: usize = (BLOCK / SECTOR) as usize;
/// Blocks of a region.
const REGION_BLOCKS: usize = (REGION_BYTES / BLOCK) as usize;

const KIND_SHIFT: u32 = 62;
const KIND_PLACE: u64 = 1;
const KIND_ROW: u64 = 2;
const KIND_GHOST: u64 = 3;
const OFFSET_SHIFT: u32 = 20;
const GENERATION_SHIFT: u32 = 35;
/// Bits of the generation that an entry keeps. A dead entry could be mistaken for a live one only
/// after 2^25 reuses of its segment without a sweep.
const GENERATION_MASK: u64 = (1 << 25) - 1;
/// How often the block was used since it was cached, up to [`USES_MAX`].
const USES_SHIFT: u32 = 60;
const USES_MASK: u64 = (USES_MAX as u64) << USES_SHIFT;
const GHOST_MASK: u64 = (1 << KIND_SHIFT) - 1;

/// A place in the cache, as an entry packs it: segment, sector within its data area, generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Logical segment, below 2^20.
    pub segment: u32,
    /// Byte within the data area; a multiple of 512.
    pub offset: u32,
    /// The low bits of the segment's generation.
    pub generation: u32,
}

impl Place {
    /// The place of a key, with its segment's full generation.
    pub fn new(segment: u32, offset: u32, generation: u64) -> Place {
        Place { segment, offset, generation: (generation & GENERATION_MASK) as u32 }
    }

    /// Whether the segment's full generation is still the one of this place.
    pub fn is_of(self, generation: u64) -> bool {
        u64::from(self.generation) == generation & GENERATION_MASK
    }

    fn pack(self) -> u64 {
        debug_assert!(u64::from(self.offset).is_multiple_of(SECTOR));
        KIND_PLACE << KIND_SHIFT
            | u64::from(self.generation) << GENERATION_SHIFT
            | (u64::from(self.offset) / SECTOR) << OFFSET_SHIFT
            | u64::from(self.segment)
    }

    fn unpack(entry: u64) -> Option<Place> {
        (entry >> KIND_SHIFT == KIND_PLACE).then_some(Place {
            segment: (entry & ((1 << OFFSET_SHIFT) - 1)) as u32,
            offset: (entry >> OFFSET_SHIFT & 0x7FFF) as u32 * SECTOR as u32,
            generation: (entry >> GENERATION_SHIFT & GENERATION_MASK) as u32,
        })
    }

    /// The place this many bytes further on.
    pub fn plus(self, bytes: u64) -> Place {
        Place { offset: self.offset + bytes as u32, ..self }
    }
}

/// A run of the logical device with one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The place in the cache; `None`: only the backing device has the data.
    pub place: Option<Place>,
}

/// The history of a block in its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// No history.
    None,
    /// It is at this place, if the place is live.
    Place(Place),
    /// It was dropped at this time, counted in dropped blocks.
    Ghost(u64),
}

/// The whole index.
#[derive(Debug)]
pub struct Index {
    regions: Box<[OnceLock<Box<Region>>]>,
    flats: Arc<Flats>,
}

impl Index {
    /// An empty index for a device of `len_bytes`. Changes beyond the device's end are ignored; so
    /// an index for no device takes no memory.
    pub fn new(len_bytes: u64) -> Index {
        Index::with_flats(len_bytes, FLAT_FROM)
    }

    /// As [`Index::new`], with regions that are flat from this many entries on.
    pub fn with_flats(len_bytes: u64, flat_from: usize) -> Index {
        let regions = len_bytes.div_ceil(REGION_BYTES);
        Index {
            regions: (0..regions).map(|_| OnceLock::new()).collect(),
            // A sibling may have as many.
            flats: Arc::new(Flats::new(2 * regions, flat_from)),
        }
    }

    /// An empty index for the same device, whose regions may join this one.
    pub fn sibling(&self) -> Index {
        Index {
            regions: self.regions.iter().map(|_| OnceLock::new()).collect(),
            flats: self.flats.clone(),
        }
    }

    /// How many regions there are.
    pub fn regions(&self) -> u64 {
        self.regions.len() as u64
    }

    /// Makes `[offset, offset + len)` point to `place` and the places after it, or to no place. The
    /// range stays within one region. The caller holds the lock of the region's stripe.
    pub fn set(&self, offset: u64, len: u64, place: Option<Place>) {
        let Some(region) = self.regions.get((offset / REGION_BYTES) as usize) else { return };
        let region = match place {
            Some(_) => region.get_or_init(Box::default),
            None => match region.get() {
                Some(region) => region,
                None => return,
            },
        };
        region.set(&self.flats, offset % REGION_BYTES, len, place);
    }

    /// Copies the places of one region from `older`, a [`Index::sibling`], into the gaps here.
    /// Under the stripe's lock.
    pub fn join(&self, older: &mut Index, region: usize) {
        assert!(Arc::ptr_eq(&self.flats, &older.flats), "an index joins its sibling");
        let found = older.regions.get_mut(region).and_then(OnceLock::take);
        let (Some(found), Some(place)) = (found, self.regions.get(region)) else { return };
        let Err(found) = place.set(found) else { return };
        if let Some(region) = place.get() {
            region.join(&self.flats, &found);
        }
        found.retire(&self.flats);
    }

    /// Whether anything was ever set in a region.
    pub fn is_used(&self, region: u64) -> bool {
        self.regions.get(region as usize).is_some_and(|region| region.get().is_some())
    }

    /// Removes outdated values from a region: dead places, and times at which blocks were dropped
    /// that `remembers` denies. Under the stripe's lock.
    pub fn sweep(
        &self,
        region: u64,
        is_live: impl Fn(Place) -> bool,
        remembers: impl Fn(u64) -> bool,
    ) {
        if let Some(region) = self.regions.get(region as usize).and_then(OnceLock::get) {
            region.sweep(&self.flats, &Wanted { is_live, remembers });
        }
    }

    /// The history of a block. Also prefetches its entry.
    pub fn trace(&self, offset: u64) -> Trace {
        let entry = self.entry(offset);
        match entry >> KIND_SHIFT {
            KIND_GHOST => Trace::Ghost(time_of(entry)),
            _ => Place::unpack(entry).map_or(Trace::None, Trace::Place),
        }
    }

    /// Counts a use of the blocks of a range. If a block has the highest count, this only reads its
    /// entry.
    pub fn note_use(&self, offset: u64, len: u64) {
        let mut at = offset / BLOCK * BLOCK;
        while at < offset + len {
            if let Some(region) = self.region(at) {
                region.note_use(&self.flats, block_of(at));
            }
            at += BLOCK;
        }
    }

    /// How often a block was used since it came.
    pub fn uses(&self, offset: u64) -> u8 {
        uses_of(self.entry(offset))
    }

    /// Sets how often the blocks of a range count as used. Under the stripe's lock.
    pub fn set_uses(&self, offset: u64, len: u64, uses: u8) {
        for at in (offset / BLOCK * BLOCK..offset + len).step_by(BLOCK as usize) {
            let Some(region) = self.region(at) else { continue };
            region.change(&self.flats, block_of(at), |entry| {
                let next = entry & !USES_MASK | u64::from(uses) << USES_SHIFT;
                is_cached(entry).then_some(next)
            });
        }
    }

    /// Removes the places of a range; blocks that lie within the range remember `time`. Under the
    /// stripe's lock.
    pub fn leave_ghosts(&self, offset: u64, len: u64, time: u64) {
        self.set(offset, len, None);
        for at in (offset.next_multiple_of(BLOCK)..).step_by(BLOCK as usize) {
            if at + BLOCK > offset + len {
                break;
            }
            if let Some(region) = self.region(at) {
                let ghost = KIND_GHOST << KIND_SHIFT | time & GHOST_MASK;
                region.change(&self.flats, block_of(at), |_| Some(ghost));
            }
        }
    }

    /// Prefetches the entry of a block that will be changed soon.
    pub fn touch(&self, offset: u64) {
        if let Some(region) = self.region(offset) {
            region.touch(&self.flats, block_of(offset));
        }
    }

    /// Prefetches the side table's row of a block, if it has one.
    pub fn touch_row(&self, offset: u64) {
        if let Some(region) = self.region(offset) {
            region.touch_row(&self.flats, block_of(offset));
        }
    }

    fn region(&self, offset: u64) -> Option<&Region> {
        Some(self.regions.get((offset / REGION_BYTES) as usize)?.get()?)
    }

    fn entry(&self, offset: u64) -> u64 {
        self.region(offset).map_or(0, |region| region.entry(&self.flats, block_of(offset)))
    }

    /// The first part of `[offset, end)`: the longest run with one source. `is_live` returns
    /// whether a place's generation still holds; dead places count as gaps.
    #[inline]
    pub fn lookup(&self, offset: u64, end: u64, is_live: impl Fn(Place) -> bool) -> Piece {
        let mut run: Option<Piece> = None;
        let mut at = offset;
        while at < end {
            let (len, place) = self.step(at, end, &is_live);
            match &mut run {
                None => run = Some(Piece { offset: at, len, place }),
                Some(run) if run.continues_with(place) => run.len += len,
                Some(_) => break,
            }
            at += len;
        }
        run.unwrap_or(Piece { offset, len: 0, place: None })
    }

    /// The run from `at` within its block, at most to `end`.
    fn step(&self, at: u64, end: u64, is_live: &impl Fn(Place) -> bool) -> (u64, Option<Place>) {
        let block_left = (BLOCK - at % BLOCK).min(end - at);
        let Some(region) = self.region(at) else {
            let region_left = REGION_BYTES - at % REGION_BYTES;
            return (region_left.min(end - at), None);
        };
        let entry = region.entry(&self.flats, block_of(at));
        match entry >> KIND_SHIFT {
            KIND_PLACE => {
                let place = Place::unpack(entry).filter(|place| is_live(*place));
                (block_left, place.map(|place| place.plus(at % BLOCK)))
            }
            KIND_ROW => {
                let range = (at % BLOCK, block_left);
                region.step_in_row(&self.flats, block_of(at), entry, range, is_live)
            }
            _ => (block_left, None),
        }
    }

    /// Bytes of the logical device with live places. Walks the whole index.
    pub fn cached_bytes(&self, is_live: impl Fn(Place) -> bool) -> u64 {
        let regions = self.regions.iter().filter_map(OnceLock::get);
        regions.map(|region| region.cached_bytes(&self.flats, &is_live)).sum()
    }

    /// Bytes of memory that the index takes.
    pub fn memory_bytes(&self) -> u64 {
        let regions = self.regions.iter().filter_map(OnceLock::get);
        let table = size_of_val(&*self.regions) as u64 + self.flats.memory_bytes();
        table + regions.map(|region| region.memory_bytes()).sum::<u64>()
    }
}

impl Drop for Index {
    /// Arrays of a sibling can be used by others.
    fn drop(&mut self) {
        if Arc::strong_count(&self.flats) > 1 {
            let regions = self.regions.iter().filter_map(OnceLock::get);
            regions.for_each(|region| region.retire(&self.flats));
        }
    }
}

impl Piece {
    fn continues_with(&self, next: Option<Place>) -> bool {
        match (self.place, next) {
            (None, None) => true,
            (Some(place), Some(next)) => place.plus(self.len) == next,
            _ => false,
        }
    }
}

/// The number of a block in its region.
fn block_of(offset: u64) -> usize {
    (offset / BLOCK) as usize % REGION_BLOCKS
}

/// When a block that left a ghost was dropped.
fn time_of(entry: u64) -> u64 {
    entry & GHOST_MASK
}

/// Whether an entry names a place or a row.
fn is_cached(entry: u64) -> bool {
    matches!(entry >> KIND_SHIFT, KIND_PLACE | KIND_ROW)
}

fn uses_of(entry: u64) -> u8 {
    if is_cached(entry) { (entry >> USES_SHIFT) as u8 & USES_MAX } else { 0 }
}

/// `entry`, with one more use than `old` if both name a place.
fn with_uses_after(entry: u64, old: u64) -> u64 {
    match is_cached(entry) && is_cached(old) {
        true => entry | u64::from(USES_MAX.min(uses_of(old) + 1)) << USES_SHIFT,
        false => entry,
    }
}

#[cfg(test)]
mod tests;
