//! Repair of damaged metadata: recovers the readable part.
//!
//! 1. Damage never makes a dirty block clean. If it is unknown whether a block is dirty, the block
//!    counts as dirty.
//! 2. The loss is reported.
//! 3. The damaged device is not written. The result is written to another device.

use super::metadata::array::{Found, Piece};
use super::metadata::bits::Bits;
use super::metadata::contents::{DIRTY, UNKNOWN_FLAGS, VALID, block_of, mapping};
use super::metadata::source::read_one;
use super::metadata::superblock::{CLEAN_SHUTDOWN, NEEDS_CHECK, Superblock};
use super::metadata::survey::{Lengths, Survey, survey_with};
use super::metadata::{Contents, Source};
use super::xml::slots_max;
use crate::error::{Error, Kind, Result};

/// The recovered data.
#[derive(Debug)]
pub struct Repaired {
    /// Flags, statistics and policy.
    pub superblock: Superblock,
    /// The state of the cache's blocks.
    pub contents: Contents,
    /// The damage that was found.
    pub found: Vec<String>,
    /// Changes that lose no data.
    pub notes: Vec<String>,
    /// The lost data.
    pub lost: Vec<String>,
}

/// Reads all readable parts of `source`. An error if no root leads to the mappings.
pub fn repair(source: &dyn Source) -> Result<Repaired> {
    let (superblock, mut found) = superblock(source)?;
    let is_trusted = found.is_empty();
    let survey = survey_with(source, superblock, Lengths::Found);
    found.extend(survey.findings().map(ToString::to_string));
    let more = survey.damage.more + survey.remarks.more;
    if more > 0 {
        found.push(format!("and {more} more findings"));
    }
    let end = |found: &Found| {
        found.pieces.last().map_or(0, |piece| piece.first + piece.values.len() as u64)
    };
    let slots = survey.superblock.slots().max(end(&survey.mappings));
    let slots_max = slots_max(source.blocks()).min(u32::MAX.into());
    if slots > slots_max || (slots > 0 && survey.mappings.pieces.is_empty()) {
        let message = "no mapping can be read, so no repair is possible";
        return Err(Error::new(Kind::Io, message));
    }
    let mut repair = Repair {
        is_clean: is_trusted && survey.superblock.is_clean(),
        contents: Contents::empty(slots),
        notes: Vec::new(),
        lost: Vec::new(),
        survey,
    };
    repair.mappings();
    repair.dirty();
    repair.twice();
    repair.hints();
    repair.discards();
    Ok(repair.done(found))
}

/// The superblock, and its defects. If its checksum is wrong, its fields are used, but not trusted.
fn superblock(source: &dyn Source) -> Result<(Superblock, Vec<String>)> {
    let block = read_one(source, 0)?;
    let error = match Superblock::parse(&block) {
        Ok(Some(superblock)) => return Ok((superblock, Vec::new())),
        Ok(None) => Error::new(Kind::Invalid, "metadata block 0: it is blank"),
        Err(error) => error,
    };
    let superblock = Superblock::unchecked(&block);
    match superblock.has_magic() && superblock.check().is_ok() {
        true => Ok((superblock, vec![error.to_string()])),
        false => Err(error.at("the mappings cannot be found")),
    }
}

struct Repair {
    survey: Survey,
    /// Whether dirty bits, hints and discards count.
    is_clean: bool,
    contents: Contents,
    notes: Vec<String>,
    lost: Vec<String>,
}

/// The ranges of `0..len` that no piece covers.
fn gaps(pieces: &[Piece], len: u64) -> Vec<(u64, u64)> {
    let mut next = 0;
    let mut gaps = Vec::new();
    for piece in pieces {
        gaps.push((next, piece.first));
        next = piece.first + piece.values.len() as u64;
    }
    gaps.push((next, len));
    gaps.retain(|(from, to)| from < to);
    gaps
}

impl Repair {
    /// The mappings, with the flags of version 1.
    fn mappings(&mut self) {
        let unknown = UNKNOWN_FLAGS | if self.survey.dirty.is_some() { DIRTY } else { 0 };
        let mut odd = 0_u64;
        for piece in &self.survey.mappings.pieces {
            for (slot, &value) in (piece.first..).zip(&piece.values) {
                self.contents.mappings[slot as usize] = mapping(block_of(value));
                let is_odd = value & VALID != 0 && value & unknown != 0;
                odd += u64::from(is_odd);
                if is_odd || (self.survey.dirty.is_none() && value & (VALID | DIRTY) == 3) {
                    self.contents.dirty.set(slot);
                }
            }
        }
        if odd > 0 {
            self.notes.push(format!("{odd} slots had unknown flags: they count as dirty"));
        }
        for (from, to) in gaps(&self.survey.mappings.pieces, self.contents.slots()) {
            self.lost.push(format!(
                "slots {from} to {}: their blocks are unknown, and may have been dirty",
                to - 1
            ));
        }
    }

    fn dirty(&mut self) {
        let mut known = Bits::new(self.contents.slots());
        match &self.survey.dirty {
            _ if !self.is_clean => {}
            None => (0..known.len()).for_each(|slot| known.set(slot)),
            Some(found) => {
                for piece in &found.pieces {
                    for (nth, &word) in (piece.first..).zip(&piece.values) {
                        let slots = nth * 64..((nth + 1) * 64).min(known.len());
                        for slot in slots {
                            known.set(slot);
                            if word >> (slot % 64) & 1 == 1 {
                                self.contents.dirty.set(slot);
                            }
                        }
                    }
                }
            }
        }
        let mut unknown = 0;
        for slot in 0..known.len() {
            match self.contents.block(slot) {
                None => self.contents.dirty.clear(slot),
                Some(_) if known.is_set(slot) => {}
                Some(_) => {
                    unknown += 1;
                    self.contents.dirty.set(slot);
                }
            }
        }
        if unknown > 0 {
            let why = if self.is_clean { "cannot be read" } else { "do not count" };
            self.notes.push(format!("{unknown} slots count as dirty: their dirty bits {why}"));
        }
    }

    /// Of slots that hold the same block, one may stay.
    fn twice(&mut self) {
        let mut blocks: Vec<(u64, u64)> =
            self.contents.in_use().map(|(slot, block)| (block, slot)).collect();
        blocks.sort_unstable();
        for same in blocks.chunk_by(|one, other| one.0 == other.0).filter(|same| same.len() > 1) {
            let block = same[0].0;
            let is_dirty = |(_, slot): &&(u64, u64)| self.contents.dirty.is_set(*slot);
            let dirty: Vec<u64> = same.iter().filter(is_dirty).map(|(_, slot)| *slot).collect();
            match dirty[..] {
                [] | [_] => self.notes.push(format!(
                    "{} slots held block {block} of the origin: the clean ones are free now",
                    same.len()
                )),
                [kept, ref others @ ..] => {
                    let others: Vec<String> = others.iter().map(u64::to_string).collect();
                    self.lost.push(format!(
                        "slots {}: they held block {block} of the origin, dirty, as slot {kept} \
                         does; it is unknown which of them is the newest",
                        others.join(", ")
                    ));
                }
            }
            for &(_, slot) in same.iter().filter(|(_, slot)| dirty.first() != Some(slot)) {
                self.contents.mappings[slot as usize] = 0;
                self.contents.dirty.clear(slot);
            }
        }
    }

    fn hints(&mut self) {
        let Some(found) = self.survey.hints.as_ref().filter(|_| self.is_clean) else { return };
        let slots = self.contents.slots();
        if !gaps(&found.pieces, slots).is_empty() {
            self.notes.push("the hints are dropped".into());
            return;
        }
        let hints = found.pieces.iter().flat_map(|piece| &piece.values);
        self.contents.hints = Some(hints.take(slots as usize).map(|hint| *hint as u32).collect());
    }

    fn discards(&mut self) {
        let len = self.survey.superblock.fields.discard_blocks.get();
        let pieces = &self.survey.discards.pieces;
        let words: Vec<u64> =
            pieces.iter().flat_map(|piece| piece.values.iter().copied()).collect();
        let is_whole = gaps(pieces, words.len() as u64).is_empty();
        // The discards give the length of the origin, and are wrong if it has more blocks than
        // that.
        let end = self.survey.origin_blocks().unwrap_or(u64::MAX);
        let is_long_enough = self.contents.in_use().all(|(_, block)| block < end);
        let is_right = is_whole && is_long_enough && words.len() as u64 == len.div_ceil(64);
        if self.is_clean && is_right {
            self.contents.discards = Bits::from_words(words, len).0;
            return;
        }
        if self.is_clean && len > 0 {
            self.notes.push("the discards are dropped".into());
        }
    }

    fn done(self, found: Vec<String>) -> Repaired {
        let Repair { survey, is_clean, contents, notes, lost } = self;
        let mut superblock = survey.superblock;
        // Its cache may have been served since.
        superblock.note = None;
        // All state that counts is known now. Without a clean shutdown, a kernel would ignore it.
        superblock.put_flag(CLEAN_SHUTDOWN, true);
        superblock.put_flag(NEEDS_CHECK, false);
        if contents.discards.is_empty() {
            superblock.fields.discard_sectors.set(0);
        }
        if !is_clean {
            superblock.fields.hint_bytes.set(0);
        }
        Repaired { superblock, contents, found, notes, lost }
    }
}

#[cfg(test)]
mod tests;
