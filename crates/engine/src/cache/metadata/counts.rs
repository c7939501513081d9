//! The space map: one count of references for each block of the metadata device.
//!
//! ```text
//! index     checksum, 0, own address, then 255 entries of 16 bytes:
//!           address of a bitmap, free blocks in it, before which none is free
//! bitmap    checksum, 0, own address, then 16,320 counts of two bits
//! overflow  a tree: counts above 2, by block
//! ```
//!
//! The two bits of a count are swapped: 0 is 00, 1 is 10, 2 is 01; 11 is in the overflow tree. In a
//! cache every count is 0 or 1.

use super::bits::Bits;
use super::block::Finding;
use super::block::{BLOCK_BYTES, Block, BlockKind, damaged, put_u32, put_u64, u32_at, u64_at};
use super::btree;
use super::reading::{Findings, Reading};
use super::superblock::MapRoot;

/// Bytes in front of entries and counts.
const HEADER: usize = 16;
/// Blocks whose counts one bitmap has.
pub const PER_BITMAP: u64 = 16_320;
/// Bitmaps that the index has room for.
pub const BITMAPS_MAX: u64 = 255;
/// Blocks that can be managed; the rest of a larger device is not used.
pub const BLOCKS_MAX: u64 = PER_BITMAP * BITMAPS_MAX;

const _: () = assert!(PER_BITMAP as usize == (BLOCK_BYTES - HEADER) * 4);
const _: () = assert!(HEADER + 16 * BITMAPS_MAX as usize == BLOCK_BYTES);

/// The index entry of a bitmap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexEntry {
    /// Its block.
    pub address: u64,
    /// How many of its counts are 0.
    pub free: u32,
    /// No count before this one is 0.
    pub none_free_before: u32,
}

/// The space map as it was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks that have a count.
    pub managed: u64,
    /// Blocks in use, as the superblock has their number.
    pub allocated: u64,
    /// The index' block.
    pub index: u64,
    /// One for each bitmap.
    pub entries: Vec<IndexEntry>,
    /// The nodes of the overflow tree.
    pub overflow: Vec<u64>,
    /// The blocks whose count is not 0.
    pub used: Bits,
    /// Counts that are not 0 or 1.
    pub shared: Vec<(u64, u32)>,
}

/// The most shared blocks that are remembered; there are none in a cache.
const SHARED_MAX: usize = 1000;

/// Reads the space map below `root`.
pub fn read(reading: &mut Reading<'_>, root: &MapRoot) -> Counts {
    let managed = root.managed.get();
    let mut counts = Counts {
        managed: managed.min(BLOCKS_MAX),
        allocated: root.allocated.get(),
        index: root.index.get(),
        ..Counts::default()
    };
    counts.used = Bits::new(counts.managed);
    if managed > BLOCKS_MAX {
        let what =
            format!("a space map of {managed} blocks, but at most {BLOCKS_MAX} are supported");
        reading.damage.add(damaged(0, what));
    }
    let overflow = btree::read(reading, root.overflow.get(), 4);
    counts.overflow = overflow.addresses().collect();
    match reading.reach(0, counts.index) {
        Err(finding) => reading.damage.add(finding),
        Ok(()) => reading.read(BlockKind::Index, &[counts.index], |_, _, block| {
            counts.entries = index_entries(block, counts.managed);
        }),
    }
    let mut addresses = Vec::with_capacity(counts.entries.len());
    let mut numbers = Vec::with_capacity(counts.entries.len());
    for (nth, entry) in counts.entries.iter().enumerate() {
        match reading.reach(counts.index, entry.address) {
            Ok(()) => {
                addresses.push(entry.address);
                numbers.push(nth as u64);
            }
            Err(finding) => reading.damage.add(finding),
        }
    }
    reading.read(BlockKind::Bitmap, &addresses, |reading, nth, block| {
        let first = numbers[nth] * PER_BITMAP;
        counts.take(reading, first, addresses[nth], block);
    });
    for entry in overflow.entries {
        match counts.shared.binary_search_by_key(&entry.key, |(block, _)| *block) {
            Ok(nth) if counts.shared[nth].1 == 3 => {
                counts.shared[nth].1 = entry.value.clamp(3, u32::MAX.into()) as u32;
            }
            _ if counts.shared.len() >= SHARED_MAX => {}
            _ => {
                let key = entry.key;
                let what = format!("it has a count for block {key}, whose bitmap has its own");
                reading.remarks.add(damaged(entry.leaf, what));
            }
        }
    }
    counts
}

fn index_entries(block: &Block, managed: u64) -> Vec<IndexEntry> {
    let entry = |at: usize| IndexEntry {
        address: u64_at(block, at),
        free: u32_at(block, at + 8),
        none_free_before: u32_at(block, at + 12),
    };
    let bitmaps = managed.div_ceil(PER_BITMAP) as usize;
    (0..bitmaps).map(|nth| entry(HEADER + 16 * nth)).collect()
}

impl Counts {
    /// The counts of a bitmap whose first block is `first`.
    fn take(&mut self, reading: &mut Reading<'_>, first: u64, address: u64, block: &Block) {
        let mut beyond = 0;
        for (nth, &byte) in block[HEADER..].iter().enumerate() {
            if byte == 0 {
                continue;
            }
            for within in 0..4 {
                let number = first + 4 * nth as u64 + within;
                let count = match byte >> (2 * within) & 3 {
                    0 => continue,
                    2 => 1,
                    1 => 2,
                    _ => 3,
                };
                if number >= self.managed {
                    beyond += 1;
                    continue;
                }
                self.used.set(number);
                if count > 1 && self.shared.len() < SHARED_MAX {
                    self.shared.push((number, count));
                }
            }
        }
        if beyond > 0 {
            let what = format!("it counts {beyond} blocks beyond the last one");
            reading.remarks.add(damaged(address, what));
        }
    }

    /// The first block, and the one after the last, of bitmap `nth`.
    pub fn range(&self, nth: u64) -> (u64, u64) {
        (nth * PER_BITMAP, ((nth + 1) * PER_BITMAP).min(self.managed))
    }

    /// Compares the counts with the reached blocks, and the totals with the counts. A reached block
    /// that is free is damage, because it would be overwritten.
    pub fn check(&self, reached: &Bits, damage: &mut Findings, remarks: &mut Findings) {
        let words = reached.len().max(self.managed).div_ceil(64);
        for nth in 0..words {
            let (reached, used) = (reached.word(nth), self.used.word(nth));
            let ones = |word: u64| (0..64).filter(move |bit| word >> bit & 1 == 1);
            for bit in ones(reached & !used) {
                let what = "it is in use, but free in the space map";
                damage.add(damaged(nth * 64 + bit, what));
            }
            for bit in ones(used & !reached) {
                let what = "it is not in use, but the space map counts it";
                remarks.add(damaged(nth * 64 + bit, what));
            }
        }
        for &(block, count) in &self.shared {
            let what = format!("it is in use once at most, but the space map counts {count} times");
            remarks.add(damaged(block, what));
        }
        if self.allocated != self.used.ones() {
            let (says, is) = (self.allocated, self.used.ones());
            let what = format!("its count of used blocks is {says}; the space map has {is}");
            remarks.add(damaged(0, what));
        }
        for (nth, entry) in self.entries.iter().enumerate() {
            self.check_entry(nth as u64, entry, remarks);
        }
    }

    fn check_entry(&self, nth: u64, entry: &IndexEntry, remarks: &mut Findings) {
        let (first, end) = self.range(nth);
        let used = (first..end).filter(|block| self.used.is_set(*block)).count() as u64;
        // The kernel begins with the same number for every bitmap, even for one that is not full;
        // some tools count only existing blocks.
        let (free, there) = (PER_BITMAP - used, end - first - used);
        if ![free, there].contains(&u64::from(entry.free)) {
            let says = entry.free;
            let what = format!("its count of free blocks of bitmap {nth} is {says}, not {there}");
            remarks.add(damaged(self.index, what));
        }
        let before = u64::from(entry.none_free_before).min(end - first);
        if let Some(block) = (first..first + before).find(|block| !self.used.is_set(*block)) {
            let what = format!(
                "it says that bitmap {nth} has no free block before its {}., but block {block} is \
                free",
                entry.none_free_before
            );
            remarks.add(damaged(self.index, what));
        }
    }
}

/// An index with these entries, to be sealed.
pub fn build_index(entries: &[IndexEntry]) -> Block {
    let mut block = [0; BLOCK_BYTES];
    for (nth, entry) in entries.iter().enumerate() {
        let at = HEADER + 16 * nth;
        put_u64(&mut block, at, entry.address);
        put_u32(&mut block, at + 8, entry.free);
        put_u32(&mut block, at + 12, entry.none_free_before);
    }
    block
}

/// A bitmap of `blocks` counts, to be sealed, and its index entry without the address.
pub fn build_bitmap(blocks: u64, is_used: impl Fn(u64) -> bool) -> (Block, IndexEntry) {
    let mut block = [0; BLOCK_BYTES];
    let (mut used, mut first_free) = (0, None);
    for nth in 0..blocks {
        if is_used(nth) {
            used += 1;
            block[HEADER + nth as usize / 4] |= 2 << (2 * (nth % 4));
        } else if first_free.is_none() {
            first_free = Some(nth);
        }
    }
    let free = (PER_BITMAP - used) as u32;
    let none_free_before = first_free.unwrap_or(blocks) as u32;
    (block, IndexEntry { address: 0, free, none_free_before })
}

/// An error about a space map that cannot be written to.
pub fn refuse_shared(counts: &Counts) -> Result<(), Finding> {
    match counts.shared.first() {
        None => Ok(()),
        Some((block, count)) => {
            Err(damaged(*block, format!("the space map counts {count} references to it")))
        }
    }
}
