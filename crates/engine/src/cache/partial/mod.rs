//! Partially cached blocks. Only memory records them: the medium names a block when its slot has
//! all of it.
//!
//! The slot's part of such a block equals the origin: every write goes to the origin, and completes
//! when the origin has it. So losing the slot never loses data.
//!
//! A *fill* stores sectors in the slot: the data of a client's read or write, when the origin has
//! answered, or a *gap*, which the background reads. It begins when its request to the origin does.
//!
//! 1. A write makes its sectors invalid when it begins, and spoils these sectors of each fill.
//! 2. Of fills and writes that overlap, only the first may write to the slot.
//! 3. The sectors of a fill are valid when all of it is in the slot, except for sectors that writes
//!    have spoiled.
//! 4. A slot is given up when no I/O is in flight in its block.
//! 5. Gaps are read when the origin has answered the request that admitted the block.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use crate::mutants::{self, Mutant};

use super::keys::{self, Keys};
use super::ranges::Ranges;

/// Most blocks that are in their slots in part.
pub(super) const PARTIALS_MAX: usize = 1 << 16;

/// A fill, or a write that is not one.
#[derive(Debug)]
struct Fill {
    id: u32,
    sectors: Range<u32>,
    /// Sectors that were written to meanwhile, or more.
    spoiled: Ranges,
    is_good: bool,
    is_gap: bool,
}

impl Fill {
    fn spoil(&mut self, sectors: &Range<u32>) {
        if overlap(&self.sectors, sectors) {
            self.spoiled.cover(sectors.clone());
            self.is_good &= !self.spoiled.contains(&self.sectors);
        }
    }
}

/// A partially cached block. There may be many: 24 bytes for each.
#[derive(Debug)]
struct Partial {
    valid: Ranges,
    wish: Wish,
}

/// The sectors of a block that the background is to read.
#[derive(Clone, Copy, Debug, Default)]
struct Wish {
    start: u32,
    /// In the lower bits; above them, whether the block is in the queue of the background.
    end: u32,
}

impl Wish {
    const IS_QUEUED: u32 = 1 << 31;

    fn get(self) -> Range<u32> {
        self.start..self.end & !Wish::IS_QUEUED
    }

    fn put(&mut self, wish: Range<u32>) {
        *self = Wish { start: wish.start, end: wish.end | self.end & Wish::IS_QUEUED };
    }

    fn is_queued(self) -> bool {
        self.end & Wish::IS_QUEUED != 0
    }

    fn put_queued(&mut self, is_queued: bool) {
        self.end = self.get().end | if is_queued { Wish::IS_QUEUED } else { 0 };
    }
}

/// The fills and writes in flight in a block.
#[derive(Debug, Default)]
struct Work {
    fills: Vec<Fill>,
    /// The fill that admitted the block, until the origin has answered.
    first: Option<u32>,
}

impl Work {
    fn overlaps(&self, sectors: &Range<u32>) -> bool {
        self.fills.iter().any(|fill| overlap(&fill.sectors, sectors))
    }

    /// None of its fills brings anything.
    fn spoil(&mut self) {
        self.fills.iter_mut().for_each(|fill| fill.is_good = false);
    }
}

/// The first wanted sectors of a block that are missing, and not in flight.
fn gap(of: &Partial, work: Option<&Work>) -> Option<Range<u32>> {
    if work.is_some_and(|work| work.first.is_some()) && !mutants::is(Mutant::GapsFirst) {
        return None;
    }
    let fills = work.map_or(&[][..], |work| &work.fills);
    let under_way = || fills.iter().map(|fill| fill.sectors.clone());
    let all = || of.valid.iter().chain(under_way());
    let Range { mut start, end } = of.wish.get();
    while let Some(over) = all().find(|range| range.contains(&start)) {
        start = over.end;
    }
    let later = all().map(|range| range.start).filter(|first| *first > start);
    let end = later.min().map_or(end, |first| first.min(end));
    (start < end).then_some(start..end)
}

fn overlap(one: &Range<u32>, other: &Range<u32>) -> bool {
    one.start < other.end && other.start < one.end
}

/// A gap that the background is to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    pub(super) block: u64,
    pub(super) id: u32,
    pub(super) sectors: Range<u32>,
}

/// The blocks that are in their slots in part.
#[derive(Debug)]
pub(super) struct Partials {
    /// The blocks and their slots, in places of the same numbers.
    blocks: Keys,
    slots: Keys,
    partials: Vec<Partial>,
    /// By blocks with anything under way.
    works: HashMap<u64, Work>,
    /// Blocks with gaps that the background is to fill.
    queue: VecDeque<u64>,
    block_sectors: u32,
    last_id: u32,
    under_way: usize,
    /// Sectors of fills, of requests and of gaps.
    filling: [u64; 2],
}

impl Partials {
    /// An empty record, for a cache with blocks of this many sectors, this many slots, and an
    /// origin of this many blocks.
    pub(super) fn new(block_sectors: u32, slots: u64, blocks: u64) -> Partials {
        assert!(block_sectors < Wish::IS_QUEUED, "a block has at most 2^21 sectors");
        Partials {
            blocks: Keys::new(blocks),
            slots: Keys::new(slots),
            partials: Vec::new(),
            works: HashMap::default(),
            queue: VecDeque::new(),
            block_sectors,
            last_id: 0,
            under_way: 0,
            filling: [0; 2],
        }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.partials.len()
    }

    #[inline]
    fn get(&self, block: u64) -> Option<&Partial> {
        self.blocks.find(block).map(|place| &self.partials[place])
    }

    /// One that is there.
    fn of(&mut self, block: u64) -> &mut Partial {
        let place = self.blocks.find(block).expect("it is there in part");
        &mut self.partials[place]
    }

    fn fills(&self, block: u64) -> &[Fill] {
        self.works.get(&block).map_or(&[], |work| &work.fills)
    }

    /// Whether anything is under way in any of them.
    pub(super) fn is_busy(&self) -> bool {
        self.under_way > 0
    }

    /// Whether no I/O is in flight in a block.
    pub(super) fn is_quiet(&self, block: u64) -> bool {
        self.fills(block).is_empty()
    }

    /// The slot that has a part of a block.
    #[inline]
    pub(super) fn slot(&self, block: u64) -> Option<u32> {
        self.blocks.find(block).map(|place| self.slots.key(place) as u32)
    }

    /// The block of which a slot has a part.
    pub(super) fn block(&self, slot: u32) -> Option<u64> {
        self.slots.find(slot.into()).map(|place| self.blocks.key(place))
    }

    /// All of them, with their slots.
    pub(super) fn all(&self) -> Vec<(u64, u32)> {
        (0..self.count()).map(|place| self.pair(place)).collect()
    }

    /// The block and the slot of a place.
    fn pair(&self, place: usize) -> (u64, u32) {
        (self.blocks.key(place), self.slots.key(place) as u32)
    }

    /// Whether the slot has these sectors of its block.
    pub(super) fn has(&self, block: u64, sectors: &Range<u32>) -> bool {
        self.get(block).is_some_and(|of| of.valid.contains(sectors))
    }

    /// How many sectors the slot has.
    pub(super) fn filled(&self, block: u64) -> u32 {
        self.get(block).map_or(0, |of| of.valid.len())
    }

    /// Sectors of fills under way: of requests, and of gaps.
    pub(super) fn filling(&self) -> [u64; 2] {
        self.filling
    }

    /// A slot is to have parts of a block, and has none yet.
    pub(super) fn begin(&mut self, block: u64, slot: u32) {
        self.blocks.push(block);
        self.slots.push(slot.into());
        let partial = Partial { valid: Ranges::default(), wish: Wish::default() };
        keys::push(&mut self.partials, partial);
    }

    /// The block is dropped, or is complete. No I/O is in flight in it.
    pub(super) fn end(&mut self, block: u64) {
        let place = self.blocks.find(block).expect("it is there in part");
        debug_assert!(self.is_quiet(block));
        self.works.remove(&block);
        self.slots.remove(self.slots.key(place), place);
        self.blocks.remove(block, place);
        keys::remove(&mut self.partials, &self.blocks, place);
    }

    /// A read of sectors that the slot lacks begins at the origin. The number of its fill, if it
    /// may be one.
    pub(super) fn read_begins(&mut self, block: u64, sectors: Range<u32>) -> Option<u32> {
        self.blocks.find(block)?;
        let is_first = self.works.get(&block).is_none_or(|work| !work.overlaps(&sectors));
        let may_fill = is_first || mutants::is(Mutant::FillsOverlap);
        may_fill.then(|| self.register(block, sectors, true, false))
    }

    /// A write begins at the origin. `has_data`: it may fill. Its number.
    pub(super) fn write_begins(&mut self, block: u64, sectors: Range<u32>, has_data: bool) -> u32 {
        let work = self.works.entry(block).or_default();
        let is_first = !work.overlaps(&sectors) || mutants::is(Mutant::FillsOverlap);
        if !mutants::is(Mutant::FillNotSpoiled) && !mutants::is(Mutant::SpoiledLate) {
            work.fills.iter_mut().for_each(|fill| fill.spoil(&sectors));
        }
        if !mutants::is(Mutant::RewrittenPartValid)
            && (has_data || !mutants::is(Mutant::ZeroedPart))
        {
            self.of(block).valid.remove(&sectors);
        }
        self.register(block, sectors, has_data && is_first, false)
    }

    fn register(&mut self, block: u64, sectors: Range<u32>, is_good: bool, is_gap: bool) -> u32 {
        self.last_id = self.last_id.wrapping_add(1);
        self.under_way += 1;
        self.filling[usize::from(is_gap)] += u64::from(sectors.end - sectors.start);
        let id = self.last_id;
        let fills = &mut self.works.entry(block).or_default().fills;
        fills.push(Fill { id, sectors, spoiled: Ranges::default(), is_good, is_gap });
        id
    }

    /// Gaps of a block wait for the answer to the request of this fill, which admitted the block.
    pub(super) fn wait_for(&mut self, block: u64, id: u32) {
        self.works.get_mut(&block).expect("its fill is under way").first = Some(id);
    }

    /// The origin has answered. Returns whether the fill continues, to the slot; else it has ended.
    pub(super) fn answered(&mut self, block: u64, id: u32, has_data: bool) -> bool {
        let work = self.works.get_mut(&block).expect("its fill is under way");
        work.first = work.first.filter(|first| *first != id);
        let fill = work.fills.iter().find(|fill| fill.id == id).expect("it is under way");
        let goes_on = fill.is_good && has_data;
        if mutants::is(Mutant::SpoiledLate) {
            let sectors = fill.sectors.clone();
            let others = work.fills.iter_mut().filter(|fill| fill.id != id);
            others.for_each(|fill| fill.spoil(&sectors));
        }
        match goes_on {
            true => self.enqueue(block),
            false => drop(self.ended(block, id, has_data)),
        }
        goes_on
    }

    /// A fill has ended. Whether the slot has all of the block now.
    pub(super) fn ended(&mut self, block: u64, id: u32, is_done: bool) -> bool {
        let work = self.works.get_mut(&block).expect("its fill is under way");
        let nth = work.fills.iter().position(|fill| fill.id == id).expect("it is under way");
        let Fill { sectors, spoiled, is_good, is_gap, .. } = work.fills.swap_remove(nth);
        let is_last = work.fills.is_empty();
        if is_last {
            self.works.remove(&block);
        }
        self.under_way -= 1;
        self.filling[usize::from(is_gap)] -= u64::from(sectors.end - sectors.start);
        let block_sectors = self.block_sectors;
        let of = self.of(block);
        if is_good && !is_done {
            // It is tried again when a client requests it.
            of.wish.put(0..0);
        }
        match is_done {
            true if is_good => {
                of.valid.add(sectors);
                spoiled.iter().for_each(|gone| of.valid.remove(&gone));
            }
            true => {}
            false if mutants::is(Mutant::ZeroedPart) => {}
            // A failed write to the slot may have damaged sectors that were valid before.
            false => of.valid.remove(&sectors),
        }
        let is_whole = of.valid.contains(&(0..block_sectors))
            || mutants::is(Mutant::NamedInPart) && of.valid.len() > 0;
        let is_whole = is_whole && is_last;
        self.enqueue(block);
        is_whole
    }

    fn enqueue(&mut self, block: u64) {
        let place = self.blocks.find(block).expect("it is there in part");
        let of = &mut self.partials[place];
        if !of.wish.is_queued() && gap(of, self.works.get(&block)).is_some() {
            of.wish.put_queued(true);
            self.queue.push_back(block);
        }
    }

    /// The background is to read these sectors, or as many of them as exist.
    pub(super) fn wish(&mut self, block: u64, sectors: Range<u32>) {
        let whole = 0..self.block_sectors;
        let wish = &mut self.of(block).wish;
        if wish.get() != whole {
            wish.put(sectors.start..sectors.end.min(whole.end));
        }
        self.enqueue(block);
    }

    /// Whether the background has gaps to fill.
    pub(super) fn has_gaps(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The next gap to fill, of at most this many sectors. Its fill has begun.
    pub(super) fn next_gap(&mut self, sectors_max: u32) -> Option<Gap> {
        while let Some(block) = self.queue.pop_front() {
            let Some(place) = self.blocks.find(block) else { continue };
            let of = &mut self.partials[place];
            of.wish.put_queued(false);
            let Some(gap) = gap(of, self.works.get(&block)) else { continue };
            let sectors = gap.start..gap.end.min(gap.start.saturating_add(sectors_max));
            let id = self.register(block, sectors.clone(), true, true);
            self.enqueue(block);
            if self.queue.back() == Some(&block) {
                // One block is brought after the other.
                self.queue.rotate_right(1);
            }
            return Some(Gap { block, id, sectors });
        }
        None
    }

    /// Blocks without I/O in flight and without wanted sectors, with their slots.
    pub(super) fn given_up(&self) -> Vec<(u64, u32)> {
        let over = (0..self.count()).filter(|place| self.partials[*place].wish.get().is_empty());
        let over = over.map(|place| self.pair(place));
        over.filter(|(block, _)| self.is_quiet(*block)).collect()
    }

    /// The slot may have lost what it has of a block.
    pub(super) fn forget(&mut self, block: u64) {
        if let Some(place) = self.blocks.find(block) {
            self.partials[place].valid = Ranges::default();
            self.works.entry(block).and_modify(Work::spoil);
        }
    }

    /// All slots may have lost what they have.
    pub(super) fn lose(&mut self) {
        for of in &mut self.partials {
            of.valid = Ranges::default();
            of.wish.put(0..0);
        }
        self.works.values_mut().for_each(Work::spoil);
    }
}

#[cfg(test)]
mod tests;
