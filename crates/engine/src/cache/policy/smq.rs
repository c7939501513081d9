//! The kernel's policy, stochastic multi-queue: a used block climbs a level, and the least recently
//! used block of the level above descends in its place. So uses are not counted; a block's level
//! compares it with other blocks. A second queue of the same kind, the *hotspot* queue, has larger
//! pieces of the origin, cached or not: a miss in a piece that climbed high enough admits its
//! block.
//!
//! Levels are on the medium as hints, so the kernel continues with the state of this policy.
//!
//! The kernel's rules keep a cache frozen for up to a minute: blocks are admitted at the highest
//! level, are dropped from the lower half only, and levels are redistributed once a minute. Blocks
//! climb one level in a period, so a block that was hot once keeps its slot for 30 periods. With
//! [`Rules::MENDED`] time is counted in accesses, blocks are admitted at a level from which they
//! can be dropped, and a use lifts a block half of the way to the top.

use super::super::index::Index;
use super::super::metadata::bits::Bits;
use super::levels::{Entries, LEVELS, Queue};
use super::uses::Uses;
use super::{Admission, Fill, Miss, Next, Policy, Shape};
use crate::sync::Arc;
use crate::units::SECOND;

/// The least number of pieces in the hotspot queue.
const HOTSPOTS_MIN: usize = 1024;
/// The most blocks of a piece.
const HOTSPOT_BLOCKS_MAX: u64 = 16;
/// Levels at the top of the hotspot queue that share as many entries as the cache has space for.
const HOTSPOT_TOP: usize = 8;
/// From this level on, a use counts as a hit of the policy.
const HIT_LEVEL: u8 = 48;
/// Blocks leave from the levels below this one.
const LEAVE_BELOW: usize = 32;
/// After this many accesses the hotspot queue is redistributed, if accesses are the clock.
const HOTSPOT_PERIOD: u64 = 512;
/// After this many accesses misses of a piece count again, if accesses are the clock.
const TICK: u64 = 8;
/// No level is this high.
const NEVER: u8 = LEVELS as u8;

/// When things happen, and where blocks enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The level at which blocks enter.
    entry_level: u8,
    /// Whether periods end with the clock, as the kernel's do, or after a number of accesses.
    has_clock: bool,
    /// The first use in a period lifts a block by one in this many of the levels above it, and by
    /// one level at least.
    climb: u8,
}

impl Rules {
    /// What Linux 7.2 does.
    pub const KERNEL: Rules = Rules { entry_level: 63, has_clock: true, climb: LEVELS as u8 };
    /// The same, not frozen.
    pub const MENDED: Rules = Rules { entry_level: 31, has_clock: false, climb: 2 };

    /// How many levels a block climbs.
    fn jump(self, level: u8) -> u8 {
        ((LEVELS as u8 - 1 - level) / self.climb).max(1)
    }
}

/// How well a queue predicts what is used.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    hits: u64,
    misses: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grade {
    Poor,
    Fair,
    Well,
}

impl Record {
    fn count(&mut self, level: u8) {
        match level >= HIT_LEVEL {
            true => self.hits += 1,
            false => self.misses += 1,
        }
    }

    fn grade(self) -> Grade {
        match 256 * self.hits / (self.hits + self.misses).max(1) {
            0..16 => Grade::Poor,
            16..32 => Grade::Fair,
            _ => Grade::Well,
        }
    }
}

/// Entries that were missed during this tick, and had their piece before.
#[derive(Debug)]
struct Missed {
    is: Bits,
    entries: Vec<u32>,
}

impl Missed {
    /// One is missed. Whether that is the first time.
    fn put(&mut self, entry: u32) -> bool {
        let is_first = !self.is.is_set(entry.into());
        if is_first {
            self.is.set(entry.into());
            self.entries.push(entry);
        }
        is_first
    }

    fn end_tick(&mut self) {
        self.entries.drain(..).for_each(|entry| self.is.clear(entry.into()));
    }
}

/// Pieces of the origin, by how often something of them was missed.
#[derive(Debug)]
struct Hotspots {
    entries: Entries,
    queue: Queue,
    /// The pieces of entries.
    index: Index,
    /// Entries that have a piece: those before this one.
    used: u32,
    missed: Missed,
    /// Blocks of a piece.
    blocks: u64,
    record: Record,
    jump: u8,
}

impl Hotspots {
    fn new(shape: &Shape) -> Hotspots {
        let max = (shape.slots as usize / 4).max(HOTSPOTS_MIN);
        let mut blocks = HOTSPOT_BLOCKS_MAX;
        while blocks > 1 && blocks * max as u64 > shape.origin_blocks {
            blocks /= 2;
        }
        let top = (max / LEVELS).min(shape.slots as usize / blocks as usize);
        Hotspots {
            entries: Entries::new(max),
            queue: Queue::with_top(HOTSPOT_TOP, top),
            index: Index::new(max as u64, shape.origin_blocks.div_ceil(blocks)),
            used: 0,
            missed: Missed { is: Bits::new(max as u64), entries: Vec::new() },
            blocks,
            record: Record::default(),
            jump: 0,
        }
    }

    /// Something of a block's piece was missed. Returns the piece's level.
    fn miss(&mut self, block: u64) -> u8 {
        let piece = block / self.blocks;
        if let Some(entry) = self.index.find(piece) {
            self.record.count(self.entries.level(entry));
            let is_first = self.missed.put(entry);
            self.queue.requeue(&mut self.entries, entry, if is_first { self.jump } else { 0 });
            return self.entries.level(entry);
        }
        self.record.misses += 1;
        let entry = match self.used < self.index.count() {
            true => {
                self.used += 1;
                self.used - 1
            }
            false => {
                let oldest = self.queue.oldest(LEVELS).expect("it is full");
                self.queue.remove(&mut self.entries, oldest);
                let left = self.index.block(oldest).expect("it has a piece");
                self.index.remove(left, oldest);
                self.missed.is.clear(oldest.into());
                oldest
            }
        };
        self.index.insert(piece, entry);
        self.queue.push(&mut self.entries, entry);
        self.entries.level(entry)
    }

    fn end_period(&mut self) {
        self.jump = match self.record.grade() {
            Grade::Poor => 4,
            Grade::Fair => 2,
            Grade::Well => 1,
        };
        self.queue.redistribute(&mut self.entries);
        self.record = Record::default();
    }
}

/// Where a slot is: the mark of its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Without a block, or its block is being dropped.
    Out,
    Clean,
    Dirty,
    /// Its dirty data is on its way to the origin.
    Cleaning,
}

/// The policy.
#[derive(Debug)]
pub struct Smq {
    rules: Rules,
    uses: Arc<Uses>,
    block_bytes: u32,
    entries: Entries,
    clean: Queue,
    dirty: Queue,
    hotspots: Hotspots,
    /// Pieces at this level or above let blocks enter.
    entry_bar: u8,
    accesses: u64,
    slot_period: Period,
    hotspot_period: Period,
    tick_period: Period,
}

/// Ends after a time, or after a number of accesses.
#[derive(Clone, Copy, Debug)]
struct Period {
    length: u64,
    end: u64,
}

impl Period {
    fn new(length: u64) -> Period {
        Period { length, end: 0 }
    }

    fn has_ended(&mut self, now: u64) -> bool {
        let has_ended = now >= self.end;
        if has_ended {
            self.end = now.saturating_add(self.length);
        }
        has_ended
    }
}

impl Smq {
    /// For an empty cache.
    pub fn new(shape: &Shape, rules: Rules, uses: Arc<Uses>) -> Smq {
        let slots = u64::from(shape.slots).max(HOTSPOTS_MIN as u64);
        let periods = match rules.has_clock {
            true => [60 * SECOND, SECOND, 0],
            false => [slots, HOTSPOT_PERIOD, TICK],
        };
        Smq {
            rules,
            uses,
            block_bytes: shape.block_bytes,
            entries: Entries::new(shape.slots as usize),
            clean: Queue::new(),
            dirty: Queue::new(),
            hotspots: Hotspots::new(shape),
            entry_bar: NEVER,
            accesses: 0,
            slot_period: Period::new(periods[0]),
            hotspot_period: Period::new(periods[1]),
            tick_period: Period::new(periods[2]),
        }
    }

    fn access(&mut self) {
        self.accesses += 1;
        if !self.rules.has_clock && self.tick_period.has_ended(self.accesses) {
            self.end_periods(self.accesses);
        }
    }

    fn end_periods(&mut self, now: u64) {
        self.hotspots.missed.end_tick();
        self.entry_bar = match self.hotspots.record.grade() {
            Grade::Poor => 48,
            Grade::Fair => 32,
            Grade::Well => 0,
        };
        if self.hotspot_period.has_ended(now) {
            self.hotspots.end_period();
        }
        if self.slot_period.has_ended(now) {
            self.uses.clear();
            self.dirty.redistribute(&mut self.entries);
            self.clean.redistribute(&mut self.entries);
        }
    }

    fn place(&self, slot: u32) -> Place {
        match self.entries.mark(slot) {
            0 => Place::Out,
            1 => Place::Clean,
            2 => Place::Dirty,
            _ => Place::Cleaning,
        }
    }

    fn put_place(&mut self, slot: u32, place: Place) {
        self.entries.set_mark(slot, place as u8);
    }

    fn push(&mut self, slot: u32, place: Place) {
        match place {
            Place::Clean => self.clean.push(&mut self.entries, slot),
            Place::Dirty => self.dirty.push(&mut self.entries, slot),
            Place::Out | Place::Cleaning => {}
        }
        self.put_place(slot, place);
    }

    fn remove(&mut self, slot: u32) {
        let place = self.place(slot);
        self.put_place(slot, Place::Out);
        match place {
            Place::Clean => self.clean.remove(&mut self.entries, slot),
            Place::Dirty => self.dirty.remove(&mut self.entries, slot),
            Place::Out | Place::Cleaning => {}
        }
    }
}

impl Policy for Smq {
    fn name(&self) -> &'static str {
        "smq"
    }

    fn takes_parts(&self) -> bool {
        false
    }

    fn version(&self) -> [u32; 3] {
        [2, 0, 0]
    }

    fn load(&mut self, slot: u32, hint: Option<u32>, is_dirty: bool) {
        // Without a hint the kernel makes one up from the slot's number.
        let made_up = slot.wrapping_mul(0x61C8_8647) >> (32 - 9);
        let level = hint.map_or(made_up % LEVELS as u32, |hint| hint.min(LEVELS as u32 - 1));
        self.entries.set_level(slot, level as u8);
        let place = if is_dirty { Place::Dirty } else { Place::Clean };
        let queue = if is_dirty { &mut self.dirty } else { &mut self.clean };
        queue.push_oldest(&mut self.entries, slot);
        self.put_place(slot, place);
    }

    fn hint(&self, slot: u32) -> u32 {
        u32::from(self.entries.level(slot))
    }

    fn hit(&mut self, slot: u32) {
        self.access();
        let jump = self.rules.jump(self.entries.level(slot));
        match self.place(slot) {
            Place::Clean => self.clean.requeue(&mut self.entries, slot, jump),
            Place::Dirty => self.dirty.requeue(&mut self.entries, slot, jump),
            Place::Out | Place::Cleaning => {}
        }
    }

    fn miss(&mut self, miss: &Miss) -> Admission {
        self.access();
        let level = self.hotspots.miss(miss.block);
        // A write of a whole block needs no copy to enter.
        let is_cheap = miss.is_write && miss.len == self.block_bytes;
        match is_cheap || level >= self.entry_bar {
            true => Admission::Enter(Fill::Whole),
            false => Admission::Pass,
        }
    }

    fn gap(&mut self, _: u32, miss: &Miss, _: u32) -> Fill {
        // Until all of a block is cached, the kernel counts misses of it.
        self.access();
        self.hotspots.miss(miss.block);
        Fill::Whole
    }

    fn enter(&mut self, slot: u32, _: u64) {
        self.uses.set(slot, 0);
        self.entries.set_level(slot, self.rules.entry_level);
        self.push(slot, Place::Clean);
    }

    fn set_dirty(&mut self, slot: u32, is_dirty: bool) {
        let place = self.place(slot);
        let new = if is_dirty { Place::Dirty } else { Place::Clean };
        if place != Place::Out && place != new {
            self.remove(slot);
            self.push(slot, new);
        }
    }

    fn leave(&mut self, slot: u32, _: u64) {
        self.remove(slot);
    }

    fn stay(&mut self, slot: u32) {
        match self.place(slot) {
            Place::Out => self.push(slot, Place::Clean),
            Place::Cleaning => self.push(slot, Place::Dirty),
            Place::Clean | Place::Dirty => {}
        }
    }

    fn next(&mut self) -> Option<Next> {
        if let Some(slot) = self.clean.oldest(LEAVE_BELOW) {
            self.remove(slot);
            return Some(Next::Leave(slot));
        }
        if !self.rules.has_clock && self.clean.len() > 0 {
            // Everything climbed since levels were shared out.
            self.clean.redistribute(&mut self.entries);
            let slot = self.clean.oldest(LEVELS)?;
            self.remove(slot);
            return Some(Next::Leave(slot));
        }
        let slot = self.dirty.oldest(LEVELS)?;
        self.remove(slot);
        self.put_place(slot, Place::Cleaning);
        Some(Next::Clean(slot))
    }

    fn tick(&mut self, now: u64) {
        if self.rules.has_clock {
            self.end_periods(now);
        }
    }
}
