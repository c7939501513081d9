//! Reads all of the metadata, part by part, and reports the defects of each part.
//!
//! There are two weights. *Damage* means that a part cannot be read, contradicts another, or would
//! be overwritten; such metadata can only be repaired. A *remark* is harmless, or matters only to a
//! checker.

use super::array::{self, Elements, Found, Len, Place};
use super::bits::{Bits, words_of};
use super::block::{Finding, damaged};
use super::contents::{Contents, DIRTY, UNKNOWN_FLAGS, VALID, block_of, mapping};
use super::counts::{self, BLOCKS_MAX, Counts};
use super::reading::{Findings, Reading};
use super::source::{Source, read_one};
use super::superblock::Superblock;
use crate::error::{Error, Kind, Result};

/// All of the metadata, as far as it could be read.
#[derive(Debug)]
pub struct Survey {
    /// Block 0.
    pub superblock: Superblock,
    /// Blocks of the device.
    pub device_blocks: u64,
    /// The mappings.
    pub mappings: Found,
    /// The dirty bits, which version 2 has.
    pub dirty: Option<Found>,
    /// The hints, if there are any.
    pub hints: Option<Found>,
    /// The discards.
    pub discards: Found,
    /// The space map.
    pub counts: Counts,
    /// The damage.
    pub damage: Findings,
    /// Other irregularities.
    pub remarks: Findings,
    /// The blocks that were reached.
    pub reached: Bits,
}

/// Where the arrays are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The mappings.
    pub mappings: Place,
    /// The dirty bits, which version 2 has.
    pub dirty: Option<Place>,
    /// The hints, if there are any.
    pub hints: Option<Place>,
    /// The discards.
    pub discards: Place,
}

/// Metadata without damage.
#[derive(Debug)]
pub struct Loaded {
    /// Block 0.
    pub superblock: Superblock,
    /// The state of the cache's blocks on media; see [`Contents::opened`].
    pub contents: Contents,
    /// Where that stands.
    pub places: Places,
    /// The space map.
    pub counts: Counts,
    /// Blocks of the device.
    pub device_blocks: u64,
}

/// The superblock of `source`.
pub fn superblock(source: &dyn Source) -> Result<Superblock> {
    match Superblock::parse(&*read_one(source, 0).map_err(Error::from)?)? {
        Some(superblock) => Ok(superblock),
        None => {
            let message = "metadata block 0: it is blank: the device is not formatted";
            Err(Error::new(Kind::Invalid, message))
        }
    }
}

/// How many elements the arrays have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// As many as the superblock says; anything else is damage.
    Told,
    /// As many as are there, to keep what can be kept.
    Found,
}

/// Reads everything that `superblock` leads to.
pub fn survey(source: &dyn Source, superblock: Superblock) -> Survey {
    survey_with(source, superblock, Lengths::Told)
}

/// The same, with arrays as long as `lengths` says. Only what was surveyed with [`Lengths::Told`]
/// can be loaded.
pub fn survey_with(source: &dyn Source, superblock: Superblock, lengths: Lengths) -> Survey {
    let fields = superblock.fields;
    let managed = fields.map.managed.get();
    let device_blocks = source.blocks();
    let mut reading = Reading::new(source, managed.min(device_blocks).min(BLOCKS_MAX));
    if device_blocks < managed {
        let what = format!("a space map of {managed} blocks, but the device has {device_blocks}");
        reading.remarks.add(damaged(0, what));
    }
    let slots = superblock.slots();
    let read = &mut reading;
    let long = |read: &mut Reading<'_>, root: u64, len: u64| {
        let len = match lengths {
            Lengths::Told => Len::Exactly(len),
            Lengths::Found => Len::Any,
        };
        array::read(read, root, Elements::Long, len)
    };
    let mappings = long(read, fields.mapping_root.get(), slots);
    let has_dirty = superblock.version() >= 2;
    let dirty = has_dirty.then(|| long(read, fields.dirty_root.get(), words_of(slots)));
    let discards = long(read, fields.discard_root.get(), words_of(fields.discard_blocks.get()));
    let hint_root = fields.hint_root.get();
    let hints = (hint_root != 0).then(|| array::read(read, hint_root, Elements::Short, Len::Any));
    // What matters most comes first: of two parts that claim a block, the later one is wrong.
    let counts = counts::read(read, &fields.map);
    let Reading { mut damage, mut remarks, reached, .. } = reading;
    // It is unknown which unreadable blocks are in use, so the counts cannot be compared.
    if damage.is_empty() {
        counts.check(&reached, &mut damage, &mut remarks);
    }
    let mut survey = Survey {
        superblock,
        device_blocks,
        mappings,
        dirty,
        hints,
        discards,
        counts,
        damage,
        remarks,
        reached,
    };
    survey.check_mappings();
    survey.check_bits();
    survey.check_origin();
    survey
}

/// Reads metadata that is to be used. Damage is an error.
pub fn load(source: &dyn Source) -> Result<Loaded> {
    survey(source, superblock(source)?).loaded()
}

impl Survey {
    /// The data that a writer needs. Damage is an error.
    pub fn loaded(self) -> Result<Loaded> {
        if let Some(finding) = self.damage.list.first() {
            let error = Error::from(finding.clone());
            return Err(match self.damage.count() {
                1 => error,
                more => Error::new(
                    Kind::Io,
                    format!("{error} (and {} more; `udm cache check` lists them)", more - 1),
                ),
            });
        }
        let slots = self.superblock.slots();
        let values = |found: &Found| -> Vec<u64> {
            found.pieces.iter().flat_map(|piece| piece.values.iter().copied()).collect()
        };
        let on_media = values(&self.mappings);
        let mut dirty = match &self.dirty {
            Some(found) => Bits::from_words(values(found), slots).0,
            None => Bits::new(slots),
        };
        for (slot, &value) in on_media.iter().enumerate() {
            let slot = slot as u64;
            match value & VALID {
                0 => dirty.clear(slot),
                _ if self.dirty.is_none() => dirty.put(slot, value & DIRTY != 0),
                _ => {}
            }
        }
        let hints = self.hints.as_ref().map(|found| {
            let mut hints: Vec<u32> = values(found).into_iter().map(|hint| hint as u32).collect();
            hints.resize(slots as usize, 0);
            hints
        });
        let discard_blocks = self.superblock.fields.discard_blocks.get();
        let contents = Contents {
            mappings: on_media.into_iter().map(|value| mapping(block_of(value))).collect(),
            dirty,
            hints,
            discards: Bits::from_words(values(&self.discards), discard_blocks).0,
        };
        Ok(Loaded {
            superblock: self.superblock,
            contents,
            places: Places {
                mappings: self.mappings.place,
                dirty: self.dirty.map(|found| found.place),
                hints: self.hints.map(|found| found.place),
                discards: self.discards.place,
            },
            counts: self.counts,
            device_blocks: self.device_blocks,
        })
    }

    /// Flags, slots that are not in use, and blocks that two slots have.
    fn check_mappings(&mut self) {
        let unknown = UNKNOWN_FLAGS | if self.dirty.is_some() { DIRTY } else { 0 };
        let mut blocks = Vec::new();
        for piece in &self.mappings.pieces {
            let is_odd = |value: &&u64| **value & unknown != 0;
            let is_left = |value: &&u64| **value & VALID == 0 && **value != 0;
            let values = &piece.values;
            if let Some(at) = values.iter().position(|value| is_odd(&value)) {
                let (count, slot) = (values.iter().filter(is_odd).count(), piece.first + at as u64);
                let what = format!("unknown flags in {count} slots, the first is {slot}");
                self.damage.add(damaged(piece.address, what));
            } else if let Some(at) = values.iter().position(|value| is_left(&value)) {
                let count = values.iter().filter(is_left).count();
                let slot = piece.first + at as u64;
                let what = format!(
                    "{count} slots are not in use, but not zero either, the first is {slot}"
                );
                self.remarks.add(damaged(piece.address, what));
            }
            blocks.extend(values.iter().filter_map(|value| block_of(*value)));
        }
        blocks.sort_unstable();
        for pair in blocks.windows(2).filter(|pair| pair[0] == pair[1]) {
            let slots = self.slots_of(pair[0]);
            if let [(one, _), .., (other, address)] = slots[..] {
                let what =
                    format!("slots {one} and {other} both hold block {} of the origin", pair[0]);
                self.damage.add(damaged(address, what));
            }
            if self.damage.more > 0 {
                break;
            }
        }
    }

    /// The slots that hold a block of the origin, with the metadata blocks of their mappings.
    fn slots_of(&self, block: u64) -> Vec<(u64, u64)> {
        let in_piece = |piece: &array::Piece| {
            let (first, address) = (piece.first, piece.address);
            let slots = piece.values.iter().enumerate();
            slots
                .filter(|(_, value)| block_of(**value) == Some(block))
                .map(|(nth, _)| (first + nth as u64, address))
                .collect::<Vec<_>>()
        };
        self.mappings.pieces.iter().flat_map(in_piece).collect()
    }

    /// Bits of slots that are not in use, or that do not exist.
    fn check_bits(&mut self) {
        if !self.damage.is_empty() {
            return;
        }
        let slots = self.superblock.slots();
        let values: Vec<&[u64]> =
            self.mappings.pieces.iter().map(|piece| &piece.values[..]).collect();
        let per_block = Elements::Long.per_block();
        let is_valid = |slot: u64| {
            slot < slots
                && values[(slot / per_block) as usize][(slot % per_block) as usize] & VALID != 0
        };
        for piece in self.dirty.iter().flat_map(|found| &found.pieces) {
            let (mut count, mut first) = (0, None);
            for (nth, &word) in piece.values.iter().enumerate().filter(|(_, word)| **word != 0) {
                let start = (piece.first + nth as u64) * 64;
                let set = (start..start + 64).filter(|slot| word >> (slot - start) & 1 == 1);
                for slot in set.filter(|slot| !is_valid(*slot)) {
                    count += 1;
                    first.get_or_insert(slot);
                }
            }
            if let Some(slot) = first {
                let what = format!("{count} slots are dirty and not in use, the first is {slot}");
                self.remarks.add(damaged(piece.address, what));
            }
        }
        let bits = self.superblock.fields.discard_blocks.get();
        if let (Some(piece), used @ 1..) = (self.discards.pieces.last(), bits % 64)
            && piece.values.last().is_some_and(|word| word >> used != 0)
        {
            let what = "discards beyond the last discard block";
            self.remarks.add(damaged(piece.address, what));
        }
        if let Some(found) = &self.hints {
            let hints: usize = found.pieces.iter().map(|piece| piece.values.len()).sum();
            if hints as u64 != slots && self.superblock.is_clean() {
                let what = format!("{hints} hints for {slots} slots");
                self.remarks.add(damaged(self.superblock.fields.hint_root.get(), what));
            }
        }
    }

    /// Mappings to blocks beyond the end of the origin, as far as the discards give its length.
    fn check_origin(&mut self) {
        let Some(end) = self.origin_blocks() else { return };
        for piece in &self.mappings.pieces {
            let mut beyond = piece.values.iter().enumerate().filter_map(|(nth, value)| {
                let block = block_of(*value).filter(|block| *block >= end)?;
                Some((piece.first + nth as u64, block))
            });
            if let Some((slot, block)) = beyond.next() {
                let count = 1 + beyond.count();
                let what = format!(
                    "{count} slots hold blocks beyond the end of the origin ({end} by its \
                     discards), the first is slot {slot} with block {block}"
                );
                self.remarks.add(damaged(piece.address, what));
            }
        }
    }

    /// The most blocks that the origin can have, if that is known.
    pub fn origin_blocks(&self) -> Option<u64> {
        let fields = &self.superblock.fields;
        let sectors = fields.discard_sectors.get().checked_mul(fields.discard_blocks.get())?;
        let is_known = self.superblock.is_clean() && sectors > 0;
        is_known.then(|| sectors.div_ceil(fields.data_sectors.get().into()))
    }

    /// All findings, damage first.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.damage.list.iter().chain(&self.remarks.list)
    }
}
