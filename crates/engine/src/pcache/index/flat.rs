//! Arrays with an entry for each block, for regions with many entries. A region with few entries
//! gives its array back, and another region takes it. The memory is still an array of entries then.
//! A reader that still uses the old array reads entries of another region, and notices this by its
//! own region's form, which has changed.

use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, OnceLock, lock};

use super::REGION_BLOCKS;

/// Arrays in one allocation.
const CHUNK: usize = 4;

/// The entries of a region, by block.
pub(super) type Flat = [AtomicU64];

/// The form of a region's entries: in an array, or packed; and how often it has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form(pub(super) u64);

impl Form {
    /// The array's number.
    pub(super) fn array(self) -> Option<u32> {
        (self.0 as u32).checked_sub(1)
    }

    /// The form after this one.
    pub(super) fn next(self, array: Option<u32>) -> Form {
        let changes = (self.0 >> u32::BITS).wrapping_add(1);
        Form(changes << u32::BITS | array.map_or(0, |array| u64::from(array) + 1))
    }
}

#[derive(Debug, Default)]
struct Spare {
    made: u32,
    free: Vec<u32>,
}

/// All arrays.
#[derive(Debug)]
pub(super) struct Flats {
    chunks: Box<[OnceLock<Box<Flat>>]>,
    spare: Mutex<Spare>,
    /// A region with this many entries gets one.
    pub(super) flat_from: usize,
}

impl Flats {
    /// At most `count_max` arrays, all to be made, for regions with `flat_from` entries.
    pub(super) fn new(count_max: u64, flat_from: usize) -> Flats {
        let chunks = (0..count_max.div_ceil(CHUNK as u64)).map(|_| OnceLock::new()).collect();
        Flats { chunks, spare: Mutex::default(), flat_from }
    }

    /// The array of a form that has one.
    pub(super) fn of(&self, form: Form) -> Option<&Flat> {
        let nth = form.array()? as usize;
        let chunk = self.chunks.get(nth / CHUNK)?.get()?;
        Some(&chunk[nth % CHUNK * REGION_BLOCKS..][..REGION_BLOCKS])
    }

    /// An array of empty entries; `None`: all are taken.
    pub(super) fn take(&self) -> Option<u32> {
        let mut spare = lock(&self.spare);
        if let Some(nth) = spare.free.pop() {
            return Some(nth);
        }
        let nth = spare.made;
        self.chunks
            .get(nth as usize / CHUNK)?
            .get_or_init(|| (0..CHUNK * REGION_BLOCKS).map(|_| AtomicU64::new(0)).collect());
        spare.made += 1;
        Some(nth)
    }

    /// Gives back an array that no region's form names any more.
    pub(super) fn give_back(&self, nth: u32) {
        let Some(array) = self.of(Form(0).next(Some(nth))) else { return };
        // A reader that sees an emptied entry also sees the region's new form.
        let order = match mutants::is(Mutant::ClearedRelaxed) {
            true => Ordering::Relaxed,
            false => Ordering::Release,
        };
        let used = array.iter().filter(|entry| entry.load(Ordering::Relaxed) != 0);
        used.for_each(|entry| entry.store(0, order));
        lock(&self.spare).free.push(nth);
    }

    /// Bytes of memory.
    pub(super) fn memory_bytes(&self) -> u64 {
        let chunks = (lock(&self.spare).made as usize).div_ceil(CHUNK);
        let entries = chunks * CHUNK * REGION_BLOCKS;
        (size_of_val(&*self.chunks) + entries * size_of::<AtomicU64>()) as u64
    }
}
