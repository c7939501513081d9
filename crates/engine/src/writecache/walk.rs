//! The walk over the entries of a cache, for an attach and for inspecting: which are live, and
//! which cannot be trusted.
//!
//! Of several live entries for a block the one with the highest sequence number counts, the others
//! are superseded. A defect of the kernel leaves entries with the same number, whose order is
//! unknown. If their data is the same, the later entry counts, as in the kernel. If their data
//! differs, udm trusts neither, and the block is damaged until it is written again.
//!
//! The entries are read once, in order. An entry that names a block for the second time is
//! postponed to the end, when the earlier entries are read again, all together: single reads would
//! be slow on a disk. Several finders share the work by block: each scans all entries, which is
//! little work, and handles its own entries, which is more.

use std::cmp::Ordering;
use std::collections::HashMap;

use zerocopy::FromBytes;

use crate::base::attaching::AttachProgress;
use crate::base::parallel;
use crate::error::{Kind, Result};
use crate::mutants::{self, Mutant};
use crate::recovery::IN_HOLE;
use crate::units::MIB;

use super::layout::{ENTRY_BYTES, Entry, EntryState, Geometry};
use super::media::Medium;

/// Distances of prefetch, in entries: memory for an entry's block is prefetched in two steps, and
/// the second step uses the data that the first one has loaded.
const AHEAD: [usize; 2] = [24, 12];
/// Several finders read this much at a time: enough to pay for starting their threads.
const SHARED_CHUNK_BYTES: u64 = 2 * MIB;
/// This many places of damage are named; all are counted.
pub const PLACES_MAX: usize = 16;

/// The damage of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// Its sector is not the first of a block.
    Misaligned,
    /// Its sector is beyond the origin's end.
    BeyondOrigin,
    /// Another entry has the same sector and number, but other data.
    Duplicate,
    /// Its block was in a hole of the file.
    Hole,
}

/// A damaged entry, with its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The index of the entry.
    pub index: u64,
    /// The kind of damage.
    pub damage: Damage,
    /// The sector it names.
    pub sector: u64,
    /// Its sequence number.
    pub seq: u64,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match self.damage {
            Damage::Misaligned => "is not at the start of a block",
            Damage::BeyondOrigin => "is beyond the end of the origin",
            Damage::Hole => {
                "belongs to a block in a hole of the file, which was cut short and extended again"
            }
            Damage::Duplicate => "is also in another entry of that number, with other data",
        };
        let Place { index, sector, seq, .. } = self;
        write!(f, "entry {index}: sector {sector} {what} (sequence {seq})")
    }
}

/// The number of entries of each kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Blocks of the origin that are cached, without damaged ones.
    pub live: u64,
    /// Free, and marked so.
    pub free: u64,
    /// Never committed.
    pub uncommitted: u64,
    /// Older than another entry for their block.
    pub superseded: u64,
    /// Not to be trusted.
    pub damaged: u64,
    /// The first damaged entries.
    pub places: Vec<Place>,
}

impl Census {
    fn damage(&mut self, index: u64, entry: &Entry, damage: Damage) {
        self.damaged += 1;
        if self.places.len() < PLACES_MAX {
            let (sector, seq) = (entry.original_sector.get(), entry.seq_count.get());
            self.places.push(Place { index, damage, sector, seq });
        }
    }

    fn add(&mut self, other: Census) {
        let Census { live, free, uncommitted, superseded, damaged, places } = other;
        self.live += live;
        self.free += free;
        self.uncommitted += uncommitted;
        self.superseded += superseded;
        self.damaged += damaged;
        self.places.extend(places);
        self.places.truncate(PLACES_MAX);
    }
}

/// Collects the results of the walk, or a part of them.
pub trait Finder {
    /// Whether `block` is in its part.
    fn is_mine(&self, _block: u64) -> bool {
        true
    }
    /// First prefetch step: entry `index` is live for `block` and will be handled soon.
    fn soon(&self, _block: u64, _index: u64) {}
    /// The second prefetch step.
    fn sooner(&self, _block: u64) {}
    /// The entry that was reported live for `block`, or the last of its duplicates.
    fn known(&self, block: u64) -> Option<u64>;
    /// Entry `index` is live for `block`; all earlier entries for it are superseded.
    fn live(&mut self, block: u64, index: u64);
    /// Entry `index` is superseded by the one that is known for `block`.
    fn superseded(&mut self, block: u64, index: u64);
    /// Entry `index` was never committed.
    fn uncommitted(&mut self, index: u64);
    /// Entry `index` must not be changed, and is not used.
    fn damaged(&mut self, index: u64, entry: &Entry);
    /// Neither the entry known for `block` nor entry `index` may be changed, and reads of the block
    /// must fail.
    fn duplicate(&mut self, block: u64, index: u64, entry: &Entry);
}

/// Walks over every entry in order. Each of `finders` has a part of the blocks, and a thread of its
/// own; the first one also has all entries that are not live.
pub fn walk<F: Finder + Send>(
    medium: &Medium,
    geometry: &Geometry,
    seq_count: u64,
    origin_bytes: Option<u64>,
    finders: &mut [F],
    progress: &AttachProgress,
) -> Result<Census> {
    progress.begin("entries", geometry.blocks);
    let is_shared = finders.len() > 1;
    let walk = |(nth, finder)| Walk {
        medium,
        geometry,
        seq_count,
        origin_bytes,
        finder,
        has_rest: nth == 0,
        census: Census::default(),
        repeated: Vec::new(),
    };
    let mut walks: Vec<_> = finders.iter_mut().enumerate().map(walk).collect();
    let chunk_bytes = medium.chunk_bytes().max(if is_shared { SHARED_CHUNK_BYTES } else { 0 });
    let chunk_entries = chunk_bytes / ENTRY_BYTES;
    let mut chunk = Vec::new();
    let mut first = 0;
    while first < geometry.blocks {
        let count = (geometry.blocks - first).min(chunk_entries);
        chunk.resize((count * ENTRY_BYTES) as usize, 0);
        let at = geometry.entry_at(first);
        // The format writes all entries, so a hole does not mean free entries.
        if medium.was_hole(at, chunk.len() as u64) {
            let what = format_args!("a part of the entries at byte {at} {IN_HOLE}");
            return Err(medium.error(Kind::Io, what));
        }
        medium.load(at, &mut chunk)?;
        let entries = <[Entry]>::ref_from_bytes(&chunk).expect("a chunk has whole entries");
        parallel::each(&mut walks, |walk| walk.entries(entries, first));
        first += count;
        progress.has_come_to(first);
    }
    parallel::each(&mut walks, Walk::resolve).into_iter().collect::<Result<()>>()?;
    let mut census = Census::default();
    walks.into_iter().for_each(|walk| census.add(walk.census));
    Ok(census)
}

struct Walk<'a, F> {
    medium: &'a Medium,
    geometry: &'a Geometry,
    seq_count: u64,
    origin_bytes: Option<u64>,
    finder: &'a mut F,
    /// Whether it has the entries that are not live.
    has_rest: bool,
    census: Census,
    /// Live entries, each with its block, for which another was known.
    repeated: Vec<(u64, u64, Entry)>,
}

impl<F: Finder> Walk<'_, F> {
    fn state_of(&self, entry: &Entry) -> EntryState {
        self.geometry.state_of(entry, self.seq_count, self.origin_bytes)
    }

    fn entries(&mut self, entries: &[Entry], first: u64) {
        for (nth, entry) in entries.iter().enumerate() {
            self.look_ahead(entries, nth, first);
            self.entry(first + nth as u64, entry);
        }
    }

    /// Entry `nth` of `entries`, the first of which is `first`, is about to be handled.
    fn look_ahead(&self, entries: &[Entry], nth: usize, first: u64) {
        for (step, ahead) in AHEAD.into_iter().enumerate() {
            let Some(entry) = entries.get(nth + ahead) else { continue };
            let EntryState::Live { block } = self.state_of(entry) else { continue };
            if !self.finder.is_mine(block) {
                continue;
            }
            match step {
                0 => self.finder.soon(block, first + (nth + ahead) as u64),
                _ => self.finder.sooner(block),
            }
        }
    }

    fn entry(&mut self, index: u64, entry: &Entry) {
        match self.state_of(entry) {
            EntryState::Live { block } if !self.finder.is_mine(block) => {}
            EntryState::Live { block } if self.finder.known(block).is_some() => {
                self.repeated.push((block, index, *entry));
            }
            EntryState::Live { block } if self.is_in_hole(index) => {
                self.census.damage(index, entry, Damage::Hole);
                self.finder.duplicate(block, index, entry);
            }
            EntryState::Live { block } => {
                self.census.live += 1;
                self.finder.live(block, index);
            }
            _ if !self.has_rest => {}
            EntryState::Free => self.census.free += 1,
            EntryState::Uncommitted => {
                self.census.uncommitted += 1;
                self.finder.uncommitted(index);
            }
            EntryState::Misaligned => self.set_aside(index, entry, Damage::Misaligned),
            EntryState::BeyondOrigin => self.set_aside(index, entry, Damage::BeyondOrigin),
        }
    }

    fn is_in_hole(&self, index: u64) -> bool {
        let len = u64::from(self.geometry.block_bytes);
        self.medium.was_hole(self.geometry.block_at(index), len)
    }

    fn set_aside(&mut self, index: u64, entry: &Entry, damage: Damage) {
        self.census.damage(index, entry, damage);
        self.finder.damaged(index, entry);
    }

    /// Which of the entries for a block counts.
    fn resolve(&mut self) -> Result<()> {
        let repeated = std::mem::take(&mut self.repeated);
        let mut firsts: Vec<u64> =
            repeated.iter().filter_map(|(block, ..)| self.finder.known(*block)).collect();
        firsts.sort_unstable();
        firsts.dedup();
        let places: Vec<u64> = firsts.iter().map(|index| self.geometry.entry_at(*index)).collect();
        let mut seqs: HashMap<u64, u64> =
            repeated.iter().map(|(_, index, entry)| (*index, entry.seq_count.get())).collect();
        self.medium.load_each(&places, ENTRY_BYTES as usize, |nth, bytes| {
            let entry = Entry::read_from_bytes(bytes).expect("it is as long as an entry");
            seqs.insert(firsts[nth], entry.seq_count.get());
        })?;
        for (block, index, entry) in repeated {
            let known = self.finder.known(block).expect("it was known before");
            let seq = seqs[&known];
            self.repeat(block, index, &entry, (known, seq))?;
        }
        Ok(())
    }

    /// `known`, with its sequence number, is live for `block`; so may entry `index` be.
    fn repeat(&mut self, block: u64, index: u64, entry: &Entry, known: (u64, u64)) -> Result<()> {
        let (known, seq) = known;
        let order = entry.seq_count.get().cmp(&seq);
        let order = if mutants::is(Mutant::OlderVersionWins) { order.reverse() } else { order };
        match order {
            Ordering::Less => {
                self.census.superseded += 1;
                self.finder.superseded(block, index);
            }
            Ordering::Equal if !self.has_same_data(known, index)? => {
                self.census.damage(index, entry, Damage::Duplicate);
                self.finder.duplicate(block, index, entry);
            }
            _ if self.is_in_hole(index) => {
                self.census.damage(index, entry, Damage::Hole);
                self.finder.duplicate(block, index, entry);
            }
            _ => {
                self.census.superseded += 1;
                self.finder.live(block, index);
            }
        }
        Ok(())
    }

    fn has_same_data(&self, one: u64, other: u64) -> Result<bool> {
        let load = |index| {
            let mut data = vec![0; self.geometry.block_bytes as usize];
            self.medium.load(self.geometry.block_at(index), &mut data).map(|()| data)
        };
        let end = |index| self.geometry.block_at(index) + u64::from(self.geometry.block_bytes);
        if end(one.max(other)) > self.medium.left_bytes() {
            // Data that was cut off cannot be compared.
            return Ok(false);
        }
        Ok(load(one)? == load(other)?)
    }
}

/// Remembers blocks only: for inspecting, without an attach.
#[derive(Debug, Default)]
pub struct Lookup {
    /// The entry of each block.
    pub blocks: HashMap<u64, u64>,
    /// Blocks that have duplicates.
    pub duplicates: Vec<u64>,
}

impl Finder for Lookup {
    fn known(&self, block: u64) -> Option<u64> {
        self.blocks.get(&block).copied()
    }

    fn live(&mut self, block: u64, index: u64) {
        self.blocks.insert(block, index);
        self.duplicates.retain(|duplicate| *duplicate != block);
    }

    fn superseded(&mut self, _block: u64, _index: u64) {}
    fn uncommitted(&mut self, _index: u64) {}
    fn damaged(&mut self, _index: u64, _entry: &Entry) {}

    fn duplicate(&mut self, block: u64, index: u64, _entry: &Entry) {
        self.blocks.insert(block, index);
        self.duplicates.push(block);
    }
}
