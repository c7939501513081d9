//! The entries of one 4 MiB region, in one of two forms: packed while they are few, a flat array
//! once they are many.
//!
//! A form changes under the stripe's lock *and* the side's. So a holder of either lock may rely on
//! it. A reader without a lock checks the form again after it has read an entry.

use crate::base::prefetch::prefetch;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::units::{BLOCK, SECTOR};

use super::flat::{Flat, Flats, Form};
use super::packed::{Packed, RUN_BLOCKS};
use super::rows::{Row, Rows};
use super::{
    BLOCK_SECTORS, KIND_GHOST, KIND_PLACE, KIND_ROW, KIND_SHIFT, Piece, Place, REGION_BLOCKS,
    USES_MASK, USES_SHIFT, is_cached, uses_of, with_uses_after,
};

/// A region with this many entries is flat; those of runs do not count. From there on a flat array,
/// which is faster, takes at most 12 bytes for each entry in use.
pub const FLAT_FROM: usize = REGION_BLOCKS * 2 / 3;

const RUN_BYTES: u64 = RUN_BLOCKS as u64 * BLOCK;

#[derive(Debug, Default)]
pub(super) struct Region {
    form: AtomicU64,
    pub(super) side: Mutex<Side>,
}

/// State that is changed and read under a lock of its own.
#[derive(Debug, Default)]
pub(super) struct Side {
    packed: Packed,
    pub(super) rows: Rows,
    pub(super) free: Vec<u32>,
}

/// The values that a sweep keeps.
pub(super) struct Wanted<L, G> {
    /// Whether a place's generation still holds.
    pub(super) is_live: L,
    /// Whether the time at which a block was dropped is still needed.
    pub(super) remembers: G,
}

impl Region {
    fn form(&self) -> Form {
        Form(self.form.load(Ordering::Relaxed))
    }

    /// The entry of a block, for callers without a lock.
    pub(super) fn entry(&self, flats: &Flats, block: usize) -> u64 {
        loop {
            let form = Form(self.form.load(Ordering::Acquire));
            if let Some(array) = flats.of(form) {
                let entry = array[block].load(Ordering::Acquire);
                // Another region may have the array by now.
                if self.form() == form || mutants::is(Mutant::FormNotRechecked) {
                    return entry;
                }
            } else {
                let side = lock(&self.side);
                if self.form() == form {
                    return side.packed.get(block);
                }
            }
        }
    }

    /// The entry of a block, for callers with the side's lock.
    fn entry_beside(&self, flats: &Flats, side: &Side, block: usize) -> u64 {
        match flats.of(self.form()) {
            Some(array) => array[block].load(Ordering::Relaxed),
            None => side.packed.get(block),
        }
    }

    /// All entries that are not empty, with their blocks, for callers with the side's lock.
    fn each_entry(&self, flats: &Flats, side: &Side, mut see: impl FnMut(usize, u64)) {
        let Some(array) = flats.of(self.form()) else {
            return side.packed.iter().for_each(|(block, entry)| see(block, entry));
        };
        let entries = array.iter().map(|entry| entry.load(Ordering::Relaxed)).enumerate();
        entries.filter(|(_, entry)| *entry != 0).for_each(|(block, entry)| see(block, entry));
    }

    /// Replaces an entry. The stripe is locked, and the side.
    fn put(&self, flats: &Flats, side: &mut Side, block: usize, entry: u64) {
        match flats.of(self.form()) {
            Some(array) => array[block].store(entry, Ordering::Release),
            None => {
                side.packed.put(block, entry);
                if side.packed.len() >= flats.flat_from {
                    self.unpack(flats, side);
                }
            }
        }
    }

    /// Packed entries go to an array, if there is one.
    fn unpack(&self, flats: &Flats, side: &mut Side) {
        let next = flats.take().map(|nth| self.form().next(Some(nth)));
        let Some((next, array)) = next.and_then(|next| Some((next, flats.of(next)?))) else {
            return;
        };
        // A thread that sees an entry in an array of another region also sees that region's new
        // form.
        let order = match mutants::is(Mutant::ArrayRelaxed) {
            true => Ordering::Relaxed,
            false => Ordering::Release,
        };
        side.packed.iter().for_each(|(block, entry)| array[block].store(entry, order));
        self.form.store(next.0, Ordering::Release);
        side.packed = Packed::default();
    }

    /// The entries of an array that has few are packed.
    fn pack(&self, flats: &Flats, side: &mut Side) {
        let form = self.form();
        let Some(nth) = form.array() else { return };
        let mut packed = Packed::default();
        self.each_entry(flats, side, |block, entry| packed.put(block, entry));
        side.packed = packed;
        self.form.store(form.next(None).0, Ordering::Release);
        flats.give_back(nth);
    }

    /// The last user of the region is gone.
    pub(super) fn retire(&self, flats: &Flats) {
        if let Some(nth) = self.form().array() {
            flats.give_back(nth);
        }
    }

    /// Makes `[from, from + len)` of the region point to `place` and the places after it, or to no
    /// place. The stripe is locked.
    pub(super) fn set(&self, flats: &Flats, from: u64, len: u64, place: Option<Place>) {
        if len == RUN_BYTES && self.set_run(from, place) {
            return;
        }
        let mut held: Option<MutexGuard<'_, Side>> = None;
        let end = from + len;
        let mut at = from;
        while at < end {
            let block = (at / BLOCK) as usize;
            let piece_end = end.min((at / BLOCK + 1) * BLOCK);
            let place = place.map(|place| place.plus(at - from));
            let array = flats.of(self.form()).filter(|_| piece_end - at == BLOCK);
            if let Some(array) = array {
                held = None;
                self.set_flat(array, block, place.map_or(0, Place::pack));
            } else {
                let side = held.get_or_insert_with(|| lock(&self.side));
                match piece_end - at == BLOCK {
                    true => self.set_block(flats, side, block, place.map_or(0, Place::pack)),
                    false => self.set_sectors(flats, side, block, (at, piece_end), place),
                }
            }
            at = piece_end;
        }
    }

    /// Makes the blocks of a long run point to `place` and the places after it. False if that is
    /// not a run of places, or the region has an array. The stripe is locked. Apart from
    /// [`Region::set`], which would be slower with it.
    #[cold]
    fn set_run(&self, from: u64, place: Option<Place>) -> bool {
        let Some(place) = place.filter(|_| from.is_multiple_of(RUN_BYTES)) else { return false };
        let block = (from / BLOCK) as usize;
        let mut guard = lock(&self.side);
        let Side { packed, free, .. } = &mut *guard;
        let is_packed = self.form().array().is_none();
        if is_packed {
            let mut most_used = packed.run(block);
            packed.put_run(block, place.pack(), |old| {
                if old >> KIND_SHIFT == KIND_ROW {
                    free.push(old as u32);
                }
                if is_cached(old) && uses_of(old) >= uses_of(most_used) {
                    most_used = old;
                }
            });
            packed.change_run(block, |entry| Some(with_uses_after(entry, most_used)));
        }
        is_packed
    }

    /// Replaces a whole block in an array, and frees its row, if it had one. Overwriting counts as
    /// a use of the block.
    fn set_flat(&self, array: &Flat, block: usize, entry: u64) {
        let old = array[block].load(Ordering::Relaxed);
        let entry = with_uses_after(entry, old);
        if old >> KIND_SHIFT == KIND_ROW {
            let mut side = lock(&self.side);
            array[block].store(entry, Ordering::Release);
            side.free.push(old as u32);
        } else {
            let order = match mutants::is(Mutant::EntryRelaxed) {
                true => Ordering::Relaxed,
                false => Ordering::Release,
            };
            array[block].store(entry, order);
        }
    }

    /// As [`Region::set_flat`], packed or not.
    fn set_block(&self, flats: &Flats, side: &mut Side, block: usize, entry: u64) {
        let old = self.entry_beside(flats, side, block);
        self.put(flats, side, block, with_uses_after(entry, old));
        if old >> KIND_SHIFT == KIND_ROW {
            side.free.push(old as u32);
        }
    }

    /// Replaces part of a block: the block gets a row if it has none.
    fn set_sectors(
        &self,
        flats: &Flats,
        side: &mut Side,
        block: usize,
        (from, end): (u64, u64),
        place: Option<Place>,
    ) {
        let old = self.entry_beside(flats, side, block);
        let row = if old >> KIND_SHIFT == KIND_ROW {
            old as u32
        } else {
            if !is_cached(old) && place.is_none() {
                return;
            }
            side.new_row(old)
        };
        let sectors = &mut side.rows[row];
        let first = (from % BLOCK / SECTOR) as usize;
        let count = ((end - from) / SECTOR) as usize;
        for (nth, sector) in sectors[first..][..count].iter_mut().enumerate() {
            *sector = place.map_or(0, |place| place.plus(nth as u64 * SECTOR).pack());
        }
        let entry = side.entry_of(row);
        self.put(flats, side, block, with_uses_after(entry, old));
    }

    /// Counts a use of a block, without the stripe's lock. If the entry changes meanwhile, the use
    /// counts for the earlier entry.
    pub(super) fn note_use(&self, flats: &Flats, block: usize) {
        let form = Form(self.form.load(Ordering::Acquire));
        let Some(array) = flats.of(form) else { return self.note_packed_use(form, block) };
        let seen = array[block].load(Ordering::Relaxed);
        if let Some(next) = used(seen) {
            // No two regions ever have the same place, so at worst another block's row gets the
            // count.
            let (entry, order) = (&array[block], Ordering::Relaxed);
            let _ = entry.compare_exchange(seen, next, order, order);
        }
    }

    /// The blocks of a run share their count.
    #[inline(never)]
    fn note_packed_use(&self, form: Form, block: usize) {
        let mut side = lock(&self.side);
        if self.form() == form
            && !side.packed.change_run(block, used)
            && let Some(next) = used(side.packed.get(block))
        {
            side.packed.put(block, next);
        }
    }

    /// Replaces an entry by the result of `change`; `None`: no change. The stripe is locked.
    pub(super) fn change(
        &self,
        flats: &Flats,
        block: usize,
        change: impl FnOnce(u64) -> Option<u64>,
    ) {
        let mut side = lock(&self.side);
        if let Some(entry) = change(self.entry_beside(flats, &side, block)) {
            self.put(flats, &mut side, block, entry);
        }
    }

    /// Takes over what is a gap here. Under the stripe's lock.
    pub(super) fn join(&self, flats: &Flats, older: &Region) {
        let (mut side, found) = (lock(&self.side), lock(&older.side));
        older.each_entry(flats, &found, |block, entry| {
            let row = || match entry >> KIND_SHIFT {
                KIND_ROW => found.rows[entry as u32],
                _ => row_continuing(entry),
            };
            if is_cached(entry) {
                self.join_block(flats, &mut side, block, entry, row);
            }
        });
    }

    /// Fills the gaps of a block from an older entry, with its row.
    fn join_block(
        &self,
        flats: &Flats,
        side: &mut Side,
        block: usize,
        found: u64,
        found_row: impl Fn() -> Row,
    ) {
        let seen = self.entry_beside(flats, side, block);
        let is_known = seen >> KIND_SHIFT == KIND_PLACE && !mutants::is(Mutant::ReplayCoversNewer);
        if is_known || seen >> KIND_SHIFT == KIND_GHOST {
            return;
        }
        if seen == 0 && found >> KIND_SHIFT == KIND_PLACE {
            return self.put(flats, side, block, found);
        }
        let row = match seen >> KIND_SHIFT {
            KIND_ROW => seen as u32,
            _ => side.new_row(seen),
        };
        let sectors = &mut side.rows[row];
        for (sector, found) in sectors.iter_mut().zip(found_row()) {
            let is_gap = *sector == 0 || mutants::is(Mutant::ReplayCoversNewer);
            *sector = if is_gap { found } else { *sector };
        }
        let uses = u64::from(uses_of(seen).max(uses_of(found))) << USES_SHIFT;
        let entry = side.entry_of(row);
        self.put(flats, side, block, entry | uses);
    }

    /// Drops unneeded values, and takes the form that fits the remaining entries. The stripe is
    /// locked.
    pub(super) fn sweep(
        &self,
        flats: &Flats,
        wanted: &Wanted<impl Fn(Place) -> bool, impl Fn(u64) -> bool>,
    ) {
        let mut guard = lock(&self.side);
        let side = &mut *guard;
        let is_live = |entry: u64| Place::unpack(entry).is_some_and(&wanted.is_live);
        side.packed.sweep_runs(is_live);
        let (mut left, mut dropped) = (0, Vec::new());
        self.each_entry(flats, side, |block, entry| match wanted.has(entry, side) {
            true => left += 1,
            false => dropped.push((block, entry)),
        });
        for (block, entry) in dropped {
            self.put(flats, side, block, 0);
            if entry >> KIND_SHIFT == KIND_ROW {
                side.free.push(entry as u32);
            }
        }
        if left >= flats.flat_from && side.packed.has_used_run() {
            self.unpack(flats, side);
        }
        // Not just below the mark, so that no region goes to and fro.
        if left < flats.flat_from / 2 {
            self.pack(flats, side);
        }
        side.packed.shrink();
        if side.free.len() == side.rows.len() as usize {
            (side.rows, side.free) = (Rows::default(), Vec::new());
        }
    }

    /// The run within a block from byte `from` on, at most `len` bytes, if the entry's value is
    /// `seen` and names a row.
    pub(super) fn step_in_row(
        &self,
        flats: &Flats,
        block: usize,
        seen: u64,
        (from, len): (u64, u64),
        is_live: &impl Fn(Place) -> bool,
    ) -> (u64, Option<Place>) {
        let side = lock(&self.side);
        let entry = match mutants::is(Mutant::RowBelieved) {
            true => seen,
            false => self.entry_beside(flats, &side, block),
        };
        let live = |entry: u64| Place::unpack(entry).filter(|place| is_live(*place));
        if entry >> KIND_SHIFT != KIND_ROW {
            // It became whole or empty in between.
            return (len, live(entry).map(|place| place.plus(from)));
        }
        let row = &side.rows[entry as u32];
        let first = (from / SECTOR) as usize;
        let sectors = &row[first..][..(len / SECTOR) as usize];
        let mut run = Piece { offset: from, len: SECTOR, place: live(sectors[0]) };
        for &entry in &sectors[1..] {
            if !run.continues_with(live(entry)) {
                break;
            }
            run.len += SECTOR;
        }
        (run.len, run.place)
    }

    /// Brings the entry of a block near, or what leads there.
    pub(super) fn touch(&self, flats: &Flats, block: usize) {
        match flats.of(Form(self.form.load(Ordering::Acquire))) {
            Some(array) => prefetch(&array[block]),
            None => prefetch(self),
        }
    }

    /// Brings the side table's row of a block near, if it has one.
    pub(super) fn touch_row(&self, flats: &Flats, block: usize) {
        let entry = self.entry(flats, block);
        if entry >> KIND_SHIFT == KIND_ROW {
            lock(&self.side).rows.get(entry as u32).map(prefetch);
        }
    }

    /// Bytes of the logical device that live places back.
    pub(super) fn cached_bytes(&self, flats: &Flats, is_live: impl Fn(Place) -> bool) -> u64 {
        let is_live = |entry: u64| Place::unpack(entry).is_some_and(&is_live);
        let side = lock(&self.side);
        let mut bytes = 0;
        self.each_entry(flats, &side, |_, entry| {
            bytes += match entry >> KIND_SHIFT {
                KIND_ROW => {
                    let row = &side.rows[entry as u32];
                    row.iter().filter(|entry| is_live(**entry)).count() as u64 * SECTOR
                }
                _ if is_live(entry) => BLOCK,
                _ => 0,
            };
        });
        bytes
    }

    /// Bytes of memory, without an array's.
    pub(super) fn memory_bytes(&self) -> u64 {
        let side = lock(&self.side);
        let free = side.free.capacity() * size_of::<u32>();
        let entries = side.packed.memory_bytes() + side.rows.memory_bytes();
        (size_of::<Region>() + free) as u64 + entries
    }
}

/// The entry with one more use, if it can have more.
fn used(entry: u64) -> Option<u64> {
    (entry & USES_MASK != USES_MASK && is_cached(entry)).then(|| entry + (1 << USES_SHIFT))
}

impl<L: Fn(Place) -> bool, G: Fn(u64) -> bool> Wanted<L, G> {
    fn has(&self, entry: u64, side: &Side) -> bool {
        let is_live = |entry: u64| Place::unpack(entry).is_some_and(&self.is_live);
        match entry >> KIND_SHIFT {
            KIND_ROW => side.rows[entry as u32].iter().any(|entry| is_live(*entry)),
            KIND_GHOST => (self.remembers)(super::time_of(entry)),
            _ => is_live(entry),
        }
    }
}

impl Side {
    /// The entry that is equivalent to a row. A row that is not needed becomes free; its readers
    /// check the entry again, under the same lock.
    fn entry_of(&mut self, row: u32) -> u64 {
        match whole_block(&self.rows[row]) {
            Some(whole) => {
                self.free.push(row);
                whole
            }
            None => KIND_ROW << KIND_SHIFT | u64::from(row),
        }
    }

    /// A row whose sectors have the places that `entry` gave to the whole block.
    fn new_row(&mut self, entry: u64) -> u32 {
        let row = row_continuing(entry);
        match self.free.pop() {
            Some(free) => {
                self.rows[free] = row;
                free
            }
            None => self.rows.push(row),
        }
    }
}

/// The sectors of a block whose `entry` is whole or empty.
fn row_continuing(entry: u64) -> Row {
    let whole = Place::unpack(entry);
    std::array::from_fn(|nth| whole.map_or(0, |place| place.plus(nth as u64 * SECTOR).pack()))
}

/// The entry that says the same as the row, if one can.
fn whole_block(row: &Row) -> Option<u64> {
    let Some(first) = Place::unpack(row[0]) else {
        return row.iter().all(|&entry| entry == 0).then_some(0);
    };
    // A run that begins near the end of the 15-bit range cannot wrap: data areas are smaller.
    let is_run = (1..BLOCK_SECTORS)
        .all(|nth| row[nth] != 0 && row[nth] == first.plus(nth as u64 * SECTOR).pack());
    is_run.then_some(row[0])
}
