//! Logical block -> place in the cache: a flat array of packed 8-byte slots per 4 MiB region.
//!
//! A slot names the place of a whole 4 KiB block, or a row of the region's side table where the
//! block's eight sectors have a slot each. Every slot carries the generation of its segment: when
//! a segment is reused its generation rises first, and all slots that point there are dead by
//! comparison, without anybody searching for them.
//!
//! Invariants:
//! 1. Slots change only under the lock of the region's stripe. They are read without it.
//! 2. What a live slot points to is immutable until the segment's generation rises; so a reader
//!    checks the generation, copies, and checks it again.
//! 3. A row of the side table is changed and read under the side table's own lock only, and a
//!    slot that names a row is re-read under that lock before the row is believed.

use crate::mutants::{self, Mutant};
use crate::near::bring_near;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, OnceLock, lock};
use crate::units::{BLOCK, SECTOR};

use super::layout::REGION_BYTES;
use super::retention::USES_MAX;

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
/// Bits of the generation that a slot keeps: a slot would have to survive 2^25 reuses of its
/// segment untouched to be taken for a live one.
const GENERATION_MASK: u64 = (1 << 25) - 1;
/// How often the block was used since it came, up to [`USES_MAX`].
const USES_SHIFT: u32 = 60;
const USES_MASK: u64 = (USES_MAX as u64) << USES_SHIFT;
const GHOST_MASK: u64 = (1 << KIND_SHIFT) - 1;

/// A place in the cache, as a slot packs it: segment, sector within its data area, generation.
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

    fn unpack(slot: u64) -> Option<Place> {
        (slot >> KIND_SHIFT == KIND_PLACE).then_some(Place {
            segment: (slot & ((1 << OFFSET_SHIFT) - 1)) as u32,
            offset: (slot >> OFFSET_SHIFT & 0x7FFF) as u32 * SECTOR as u32,
            generation: (slot >> GENERATION_SHIFT & GENERATION_MASK) as u32,
        })
    }

    /// The place so many bytes further on.
    pub fn plus(self, bytes: u64) -> Place {
        Place { offset: self.offset + bytes as u32, ..self }
    }
}

type Row = [u64; BLOCK_SECTORS];

#[derive(Debug, Default)]
struct SideTable {
    rows: Vec<Row>,
    free: Vec<u32>,
}

/// The slots of one 4 MiB region.
#[derive(Debug)]
struct Region {
    slots: Box<[AtomicU64]>,
    side: Mutex<SideTable>,
}

impl Region {
    fn new() -> Region {
        Region {
            slots: (0..REGION_BLOCKS).map(|_| AtomicU64::new(0)).collect(),
            side: Mutex::default(),
        }
    }
}

/// A run of the logical device with one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Where the cache has it; `None`: only the backing device has it.
    pub place: Option<Place>,
}

/// What a block's slot says of its past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// Nothing.
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
}

impl Index {
    /// An empty index for a device of `len_bytes`. What is said about bytes behind the device is
    /// forgotten; so an index for none takes no memory, whatever it is told.
    pub fn new(len_bytes: u64) -> Index {
        Index { regions: (0..len_bytes.div_ceil(REGION_BYTES)).map(|_| OnceLock::new()).collect() }
    }

    /// Makes `[offset, offset + len)` point to `place` on, or to nothing. The range stays within
    /// one region. The caller holds the lock of the region's stripe.
    pub fn set(&self, offset: u64, len: u64, place: Option<Place>) {
        let Some(region) = self.regions.get((offset / REGION_BYTES) as usize) else { return };
        let region = match place {
            Some(_) => region.get_or_init(|| Box::new(Region::new())),
            None => match region.get() {
                Some(region) => region,
                None => return,
            },
        };
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let block = (at / BLOCK) as usize % REGION_BLOCKS;
            let block_end = (at / BLOCK + 1) * BLOCK;
            let piece_end = end.min(block_end);
            let place = place.map(|place| place.plus(at - offset));
            if piece_end - at == BLOCK {
                region.set_block(block, place.map_or(0, Place::pack));
            } else {
                region.set_sectors(block, at % BLOCK, piece_end - at, place);
            }
            at = piece_end;
        }
    }

    /// Takes over from `older` what is a gap here, of one region. Under the stripe's lock.
    pub fn join(&self, older: &mut Index, region: usize) {
        let found = older.regions.get_mut(region).and_then(OnceLock::take);
        let (Some(found), Some(place)) = (found, self.regions.get(region)) else { return };
        let Err(found) = place.set(found) else { return };
        let Some(region) = place.get() else { return };
        for block in 0..REGION_BLOCKS {
            let slot = found.slots[block].load(Ordering::Relaxed);
            if is_cached(slot) {
                region.join_block(block, slot, || found.row_of(slot));
            }
        }
    }

    /// What is known of a block. Brings its slot near, which is soon to be changed.
    pub fn trace(&self, offset: u64) -> Trace {
        let slot = self.slot(offset).map_or(0, |(_, slot)| slot.load(Ordering::Relaxed));
        match slot >> KIND_SHIFT {
            KIND_GHOST => Trace::Ghost(slot & GHOST_MASK),
            _ => Place::unpack(slot).map_or(Trace::None, Trace::Place),
        }
    }

    /// Counts a use of the blocks of a range. A block that was used often is only looked at.
    pub fn note_use(&self, offset: u64, len: u64) {
        let mut at = offset / BLOCK * BLOCK;
        while at < offset + len {
            if let Some((_, slot)) = self.slot(at) {
                let seen = slot.load(Ordering::Relaxed);
                if seen & USES_MASK != USES_MASK && is_cached(seen) {
                    let next = seen + (1 << USES_SHIFT);
                    // When the slot changes meanwhile, the use belongs to what was there.
                    let _ = slot.compare_exchange(seen, next, Ordering::Relaxed, Ordering::Relaxed);
                }
            }
            at += BLOCK;
        }
    }

    /// How often a block was used since it came.
    pub fn uses(&self, offset: u64) -> u8 {
        let slot = self.slot(offset).map_or(0, |(_, slot)| slot.load(Ordering::Relaxed));
        uses_of(slot)
    }

    /// Says how often the blocks of a range count as used. Under the stripe's lock.
    pub fn set_uses(&self, offset: u64, len: u64, uses: u8) {
        for at in (offset / BLOCK * BLOCK..offset + len).step_by(BLOCK as usize) {
            let Some((_, slot)) = self.slot(at) else { continue };
            let seen = slot.load(Ordering::Relaxed);
            if is_cached(seen) {
                let next = seen & !USES_MASK | u64::from(uses) << USES_SHIFT;
                let _ = slot.compare_exchange(seen, next, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// Makes a range point to nothing; blocks that it has whole remember `time`. Under the
    /// stripe's lock.
    pub fn leave_ghosts(&self, offset: u64, len: u64, time: u64) {
        self.set(offset, len, None);
        for at in (offset.next_multiple_of(BLOCK)..).step_by(BLOCK as usize) {
            if at + BLOCK > offset + len {
                break;
            }
            if let Some((_, slot)) = self.slot(at) {
                slot.store(KIND_GHOST << KIND_SHIFT | time & GHOST_MASK, Ordering::Release);
            }
        }
    }

    /// Brings the slot of a block near: what is soon to be changed should not be waited for then.
    pub fn touch(&self, offset: u64) {
        if let Some(slot) = self.slot(offset) {
            bring_near(slot.1);
        }
    }

    /// Brings the side table's row of a block near, if it has one.
    pub fn touch_row(&self, offset: u64) {
        let Some((region, slot)) = self.slot(offset) else { return };
        let slot = slot.load(Ordering::Relaxed);
        if slot >> KIND_SHIFT == KIND_ROW {
            lock(&region.side).rows.get(slot as u32 as usize).map(bring_near);
        }
    }

    fn slot(&self, offset: u64) -> Option<(&Region, &AtomicU64)> {
        let region = self.regions.get((offset / REGION_BYTES) as usize)?.get()?;
        Some((region, &region.slots[(offset / BLOCK) as usize % REGION_BLOCKS]))
    }

    /// What `[offset, end)` starts with: the longest run with one source. `is_live` tells whether
    /// a place's generation still holds; dead places count as nothing.
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
        let region = self.regions.get((at / REGION_BYTES) as usize);
        let Some(region) = region.and_then(OnceLock::get) else {
            let region_left = REGION_BYTES - at % REGION_BYTES;
            return (region_left.min(end - at), None);
        };
        let block = (at / BLOCK) as usize % REGION_BLOCKS;
        let slot = region.slots[block].load(Ordering::Acquire);
        match slot >> KIND_SHIFT {
            KIND_PLACE => {
                let place = Place::unpack(slot).filter(|place| is_live(*place));
                (block_left, place.map(|place| place.plus(at % BLOCK)))
            }
            KIND_ROW => region.step_in_row(block, slot, at % BLOCK, block_left, is_live),
            _ => (block_left, None),
        }
    }

    /// Bytes of the logical device that live places back. A walk over everything.
    pub fn cached_bytes(&self, is_live: impl Fn(Place) -> bool) -> u64 {
        let is_live = |slot: u64| Place::unpack(slot).is_some_and(&is_live);
        let regions = self.regions.iter().filter_map(OnceLock::get);
        regions.fold(0, |sum, region| {
            let side = lock(&region.side);
            let of_slot = |slot: &AtomicU64| match slot.load(Ordering::Relaxed) {
                slot if slot >> KIND_SHIFT == KIND_ROW => {
                    let row = &side.rows[slot as u32 as usize];
                    row.iter().filter(|slot| is_live(**slot)).count() as u64 * SECTOR
                }
                slot if is_live(slot) => BLOCK,
                _ => 0,
            };
            sum + region.slots.iter().map(of_slot).sum::<u64>()
        })
    }

    /// Bytes of memory that the index takes.
    pub fn memory_bytes(&self) -> u64 {
        let table = size_of_val(&*self.regions) as u64;
        let regions = self.regions.iter().filter_map(OnceLock::get);
        regions.fold(table, |sum, region| {
            let side = lock(&region.side);
            sum + (REGION_BLOCKS * size_of::<AtomicU64>()) as u64
                + (side.rows.capacity() * size_of::<Row>()) as u64
        })
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

impl Region {
    /// Replaces a whole block, and frees the row it may have had. What overwrites something is a
    /// use of the block.
    fn set_block(&self, block: usize, slot: u64) {
        let old = self.slots[block].load(Ordering::Relaxed);
        let slot = with_uses_after(slot, old);
        if old >> KIND_SHIFT == KIND_ROW {
            let mut side = lock(&self.side);
            self.slots[block].store(slot, Ordering::Release);
            side.free.push(old as u32);
        } else {
            let order = match mutants::is(Mutant::SlotRelaxed) {
                true => Ordering::Relaxed,
                false => Ordering::Release,
            };
            self.slots[block].store(slot, order);
        }
    }

    /// Replaces part of a block: the block gets a row if it has none.
    fn set_sectors(&self, block: usize, from: u64, len: u64, place: Option<Place>) {
        let mut side = lock(&self.side);
        let old = self.slots[block].load(Ordering::Relaxed);
        let row = if old >> KIND_SHIFT == KIND_ROW {
            old as u32
        } else {
            if !is_cached(old) && place.is_none() {
                return;
            }
            side.new_row(old)
        };
        let sectors = &mut side.rows[row as usize];
        let first = (from / SECTOR) as usize;
        for (nth, sector) in sectors[first..][..(len / SECTOR) as usize].iter_mut().enumerate() {
            *sector = place.map_or(0, |place| place.plus(nth as u64 * SECTOR).pack());
        }
        let slot = side.slot_of(row);
        self.slots[block].store(with_uses_after(slot, old), Ordering::Release);
    }

    /// Takes over of an older slot, with its row, what is a gap here.
    fn join_block(&self, block: usize, found: u64, found_row: impl Fn() -> Row) {
        let seen = self.slots[block].load(Ordering::Relaxed);
        let is_known = seen >> KIND_SHIFT == KIND_PLACE && !mutants::is(Mutant::ReplayCoversNewer);
        if is_known || seen >> KIND_SHIFT == KIND_GHOST {
            return;
        }
        if seen == 0 && found >> KIND_SHIFT == KIND_PLACE {
            return self.slots[block].store(found, Ordering::Release);
        }
        let found_row = found_row();
        let mut side = lock(&self.side);
        let row = match seen >> KIND_SHIFT {
            KIND_ROW => seen as u32,
            _ => side.new_row(seen),
        };
        let sectors = &mut side.rows[row as usize];
        for (sector, found) in sectors.iter_mut().zip(found_row) {
            let is_gap = *sector == 0 || mutants::is(Mutant::ReplayCoversNewer);
            *sector = if is_gap { found } else { *sector };
        }
        let uses = (uses_of(seen).max(uses_of(found)) as u64) << USES_SHIFT;
        let slot = side.slot_of(row);
        self.slots[block].store(slot | uses, Ordering::Release);
    }

    /// The sectors that a slot of this region names.
    fn row_of(&self, slot: u64) -> Row {
        match slot >> KIND_SHIFT {
            KIND_ROW => lock(&self.side).rows[slot as u32 as usize],
            _ => row_continuing(slot),
        }
    }

    fn step_in_row(
        &self,
        block: usize,
        seen: u64,
        from: u64,
        len: u64,
        is_live: &impl Fn(Place) -> bool,
    ) -> (u64, Option<Place>) {
        let side = lock(&self.side);
        let slot = match mutants::is(Mutant::RowBelieved) {
            true => seen,
            false => self.slots[block].load(Ordering::Relaxed),
        };
        if slot >> KIND_SHIFT != KIND_ROW {
            // It became whole or empty in between.
            let place = Place::unpack(slot).filter(|place| is_live(*place));
            return (len, place.map(|place| place.plus(from)));
        }
        let row = &side.rows[slot as u32 as usize];
        let first = (from / SECTOR) as usize;
        let sectors = &row[first..][..(len / SECTOR) as usize];
        let live = |slot: u64| Place::unpack(slot).filter(|place| is_live(*place));
        let mut run = Piece { offset: from, len: SECTOR, place: live(sectors[0]) };
        for &slot in &sectors[1..] {
            if !run.continues_with(live(slot)) {
                break;
            }
            run.len += SECTOR;
        }
        (run.len, run.place)
    }
}

impl SideTable {
    /// The slot that says the same as a row. A row that none is needed for is free; who reads it
    /// looks at the slot again, under the same lock.
    fn slot_of(&mut self, row: u32) -> u64 {
        match whole_block(&self.rows[row as usize]) {
            Some(whole) => {
                self.free.push(row);
                whole
            }
            None => KIND_ROW << KIND_SHIFT | u64::from(row),
        }
    }

    /// A row whose sectors continue what `slot` said of the whole block.
    fn new_row(&mut self, slot: u64) -> u32 {
        let row = row_continuing(slot);
        match self.free.pop() {
            Some(free) => {
                self.rows[free as usize] = row;
                free
            }
            None => {
                self.rows.push(row);
                (self.rows.len() - 1) as u32
            }
        }
    }
}

/// The sectors of a block that `slot` says is whole, or nothing.
fn row_continuing(slot: u64) -> Row {
    let whole = Place::unpack(slot);
    std::array::from_fn(|nth| whole.map_or(0, |place| place.plus(nth as u64 * SECTOR).pack()))
}

/// Whether a slot names a place or a row.
fn is_cached(slot: u64) -> bool {
    matches!(slot >> KIND_SHIFT, KIND_PLACE | KIND_ROW)
}

fn uses_of(slot: u64) -> u8 {
    if is_cached(slot) { (slot >> USES_SHIFT) as u8 & USES_MAX } else { 0 }
}

/// `slot`, with one more use than `old` had if both name something.
fn with_uses_after(slot: u64, old: u64) -> u64 {
    match is_cached(slot) && is_cached(old) {
        true => slot | u64::from(USES_MAX.min(uses_of(old) + 1)) << USES_SHIFT,
        false => slot,
    }
}

/// The slot that says the same as the row, if one can.
fn whole_block(row: &Row) -> Option<u64> {
    let Some(first) = Place::unpack(row[0]) else {
        return row.iter().all(|&slot| slot == 0).then_some(0);
    };
    // A run that begins near the end of the 15-bit range cannot wrap: data areas are smaller.
    let is_run = (1..BLOCK_SECTORS)
        .all(|nth| row[nth] != 0 && row[nth] == first.plus(nth as u64 * SECTOR).pack());
    is_run.then_some(row[0])
}

#[cfg(test)]
mod tests;
