//! The entries of a region with few: a bit for each block, and the non-empty entries in the order
//! of their blocks. A long run has one entry: a discard makes many of them.

use super::{BLOCK_SECTORS, OFFSET_SHIFT, REGION_BLOCKS, USES_MASK};

/// Blocks of a run that is kept as one entry: as many as one key of a discard names.
pub(super) const RUN_BLOCKS: usize = REGION_BLOCKS / 4;
const RUNS: usize = REGION_BLOCKS / RUN_BLOCKS;

const WORD_BITS: usize = u64::BITS as usize;
const WORDS: usize = REGION_BLOCKS.div_ceil(WORD_BITS);

#[derive(Debug, Default)]
pub(super) struct Packed {
    present: [u64; WORDS],
    /// How many entries there are before each word's.
    before: [u16; WORDS],
    entries: Vec<u64>,
    /// The first entries of runs, whose blocks do not have own entries; 0 stands for no run.
    runs: Option<Box<[u64; RUNS]>>,
}

impl Packed {
    /// The entry of a block; 0: it has none.
    pub(super) fn get(&self, block: usize) -> u64 {
        match self.run(block) {
            0 if self.is_present(block) => self.entries[self.rank(block)],
            0 => 0,
            first => in_run(first, block),
        }
    }

    /// Makes `block`, which begins a run, and the blocks after it point to consecutive places, of
    /// which `entry` is the first. Their own entries go to `dropped`.
    pub(super) fn put_run(&mut self, block: usize, entry: u64, mut dropped: impl FnMut(u64)) {
        debug_assert!(block.is_multiple_of(RUN_BLOCKS));
        for word in block / WORD_BITS..(block + RUN_BLOCKS) / WORD_BITS {
            let count = self.present[word].count_ones() as usize;
            let first = usize::from(self.before[word]);
            self.entries.drain(first..first + count).for_each(&mut dropped);
            self.present[word] = 0;
            self.before[word + 1..].iter_mut().for_each(|sum| *sum -= count as u16);
        }
        self.runs.get_or_insert_default()[block / RUN_BLOCKS] = entry;
    }

    /// Replaces the first entry of the run with this block by the result of `change`. False: the
    /// block is not in a run.
    pub(super) fn change_run(
        &mut self,
        block: usize,
        change: impl FnOnce(u64) -> Option<u64>,
    ) -> bool {
        let run = self.runs.as_mut().map(|runs| &mut runs[block / RUN_BLOCKS]);
        let Some(run) = run.filter(|run| **run != 0) else { return false };
        *run = change(*run).unwrap_or(*run);
        true
    }

    /// The first entry of the run with this block, or 0.
    pub(super) fn run(&self, block: usize) -> u64 {
        self.runs.as_ref().map_or(0, |runs| runs[block / RUN_BLOCKS])
    }

    /// Whether a run was used often: then an array is faster.
    pub(super) fn has_used_run(&self) -> bool {
        let is_used = |run: &u64| run & USES_MASK == USES_MASK;
        self.runs.as_ref().is_some_and(|runs| runs.iter().any(is_used))
    }

    /// Drops the runs that are not `wanted`.
    pub(super) fn sweep_runs(&mut self, wanted: impl Fn(u64) -> bool) {
        let Some(runs) = &mut self.runs else { return };
        runs.iter_mut().filter(|run| **run != 0 && !wanted(**run)).for_each(|run| *run = 0);
        if **runs == [0; RUNS] {
            self.runs = None;
        }
    }

    /// Replaces the entry of a block. 0 takes no room.
    pub(super) fn put(&mut self, block: usize, entry: u64) {
        let first = self.run(block);
        if let Some(runs) = self.runs.as_mut().filter(|_| first != 0) {
            runs[block / RUN_BLOCKS] = 0;
            let start = block / RUN_BLOCKS * RUN_BLOCKS;
            for block in start..start + RUN_BLOCKS {
                self.put_one(block, in_run(first, block));
            }
        }
        self.put_one(block, entry);
    }

    fn put_one(&mut self, block: usize, entry: u64) {
        let rank = self.rank(block);
        match (self.is_present(block), entry != 0) {
            (true, true) => self.entries[rank] = entry,
            (false, true) => {
                if self.entries.len() == self.entries.capacity() {
                    // By a quarter: this form exists to save memory.
                    self.entries.reserve_exact((self.entries.len() / 4).max(4));
                }
                self.entries.insert(rank, entry);
                self.flip(block, 1);
            }
            (true, false) => {
                self.entries.remove(rank);
                self.flip(block, u16::MAX);
            }
            (false, false) => {}
        }
    }

    /// Frees memory that was for more entries.
    pub(super) fn shrink(&mut self) {
        if self.entries.len() < self.entries.capacity() / 2 {
            self.entries.shrink_to_fit();
        }
    }

    /// How many entries there are, without runs.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// All entries, with their blocks.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, u64)> {
        let entries = (0..REGION_BLOCKS).map(|block| (block, self.get(block)));
        entries.filter(|(_, entry)| *entry != 0)
    }

    /// Bytes of memory besides the value itself.
    pub(super) fn memory_bytes(&self) -> u64 {
        let runs = self.runs.as_ref().map_or(0, |runs| size_of_val(&**runs));
        (self.entries.capacity() * size_of::<u64>() + runs) as u64
    }

    fn is_present(&self, block: usize) -> bool {
        self.present[block / WORD_BITS] >> (block % WORD_BITS) & 1 == 1
    }

    /// How many entries there are before the block's.
    fn rank(&self, block: usize) -> usize {
        let word = block / WORD_BITS;
        let within = self.present[word] & ((1 << (block % WORD_BITS)) - 1);
        usize::from(self.before[word]) + within.count_ones() as usize
    }

    /// Flips a block's bit; `change` is added to the counts before later words.
    fn flip(&mut self, block: usize, change: u16) {
        let word = block / WORD_BITS;
        self.present[word] ^= 1 << (block % WORD_BITS);
        self.before[word + 1..].iter_mut().for_each(|sum| *sum = sum.wrapping_add(change));
    }
}

/// The entry of a block in a run.
fn in_run(first: u64, block: usize) -> u64 {
    first + (((block % RUN_BLOCKS * BLOCK_SECTORS) as u64) << OFFSET_SHIFT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pcache::index::Place;
    use crate::prng::Prng;

    #[test]
    fn entries_stand_where_they_were_put() {
        let (mut packed, mut prng) = (Packed::default(), Prng::new(1));
        let mut flat = vec![0; REGION_BLOCKS];
        for nth in 0..20_000 {
            // Fills, and empties again.
            let (block, one_in) = (prng.below(REGION_BLOCKS as u64) as usize, nth / 4000 + 1);
            let entry = if prng.one_in(one_in) { nth + 1 } else { 0 };
            packed.put(block, entry);
            flat[block] = entry;
            assert_eq!(packed.get(block), entry);
        }
        for (block, entry) in flat.iter().enumerate() {
            assert_eq!(packed.get(block), *entry);
        }
        let known = flat.iter().copied().enumerate().filter(|(_, entry)| *entry != 0);
        assert!(packed.iter().eq(known) && packed.len() > 0);
        (0..REGION_BLOCKS).for_each(|block| packed.put(block, 0));
        assert_eq!(packed.len(), 0);
    }

    #[test]
    fn a_run_is_the_entries_of_its_blocks() {
        let place = Place::new(7, 4096, 3);
        let entry = |nth: usize| place.plus((nth * 4096) as u64).pack();
        let mut packed = Packed::default();
        let own = [5, RUN_BLOCKS, RUN_BLOCKS + 100, 2 * RUN_BLOCKS - 1, 2 * RUN_BLOCKS];
        own.iter().for_each(|block| packed.put(*block, 1 + *block as u64));
        let mut dropped = Vec::new();
        packed.put_run(RUN_BLOCKS, place.pack(), |entry| dropped.push(entry as usize - 1));
        assert_eq!(dropped, own[1..4]);
        packed.put_run(RUN_BLOCKS, place.pack(), |_| panic!("a run replaces a run"));
        packed.put(2 * RUN_BLOCKS, 0);
        let mut expected = vec![(5, 6)];
        expected.extend((0..RUN_BLOCKS).map(|nth| (RUN_BLOCKS + nth, entry(nth))));
        assert_eq!((packed.iter().collect::<Vec<_>>(), packed.len()), (expected.clone(), 1));
        packed.sweep_runs(|found| found == place.pack());
        packed.put(RUN_BLOCKS + 9, 0);
        expected.retain(|(block, _)| *block != RUN_BLOCKS + 9);
        assert_eq!((packed.iter().collect::<Vec<_>>(), packed.len()), (expected, RUN_BLOCKS));
        packed.put_run(3 * RUN_BLOCKS, place.pack(), |_| panic!("nothing is there"));
        assert!(packed.change_run(3 * RUN_BLOCKS + 8, |first| Some(first + 1)));
        assert!(!packed.change_run(RUN_BLOCKS, |_| panic!("it is no run any more")));
        assert_eq!(packed.run(3 * RUN_BLOCKS), place.pack() + 1);
        packed.sweep_runs(|_| false);
        assert_eq!((packed.get(3 * RUN_BLOCKS), packed.len()), (0, RUN_BLOCKS));
    }
}
