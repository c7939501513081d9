//! The changes in memory that the medium does not have yet: the content of the next commit.
//!
//! Marks of changes are kept until a commit with them is durable: [`Changes::put_back`] takes back
//! the marks of a commit that failed.

use std::collections::{BTreeMap, BTreeSet};

use crate::mutants::{self, Mutant};

use super::metadata::array::Elements;
use super::metadata::bits::{Bits, words_of};
use super::metadata::contents::DIRTY;
use super::metadata::writer::Next;
use super::slots::Slots;

/// Elements of a block of mappings, or of words of dirty bits.
const PER_BLOCK: u64 = Elements::Long.per_block();

/// The changes to be committed.
#[derive(Debug)]
pub(super) struct Changes {
    version: u32,
    /// Blocks of the arrays that changed.
    mappings: Bits,
    dirty: Bits,
    /// Slots with mappings that are not durable.
    pub(super) fresh: Vec<u32>,
    /// Slots that are empty now, with the blocks that they held.
    pub(super) leaving: Vec<(u32, u64)>,
    /// Slots that are empty now, for which no request waits.
    pub(super) retired: Vec<u32>,
    /// How many of those a commit under way has.
    committing: u32,
    /// Words of slots that are to be marked: a request waits for that.
    pub(super) wanted: BTreeSet<u32>,
    /// Marks that were taken away, by words.
    pub(super) cleared: Vec<(u64, u64)>,
}

impl Changes {
    /// None, of a cache with `slots` slots.
    pub(super) fn new(version: u32, slots: u64) -> Changes {
        Changes {
            version,
            mappings: Bits::new(slots.div_ceil(PER_BLOCK)),
            dirty: Bits::new(words_of(slots).div_ceil(PER_BLOCK)),
            fresh: Vec::new(),
            leaving: Vec::new(),
            retired: Vec::new(),
            committing: 0,
            wanted: BTreeSet::new(),
            cleared: Vec::new(),
        }
    }

    /// Whether there are any.
    pub(super) fn is_empty(&self) -> bool {
        self.mappings.ones() + self.dirty.ones() == 0
    }

    /// Whether a request or a free slot waits for a commit.
    pub(super) fn is_urgent(&self) -> bool {
        !self.leaving.is_empty() || !self.wanted.is_empty()
    }

    /// Whether the commit depends on data that may not be durable yet.
    pub(super) fn needs_data(&self) -> bool {
        !self.fresh.is_empty() || !self.cleared.is_empty()
    }

    /// The mapping of a slot changed.
    pub(super) fn note_mapping(&mut self, slot: u32) {
        self.mappings.set(u64::from(slot) / PER_BLOCK);
        self.note_word(u64::from(slot) / 64);
    }

    /// The marks of a word changed, or will.
    pub(super) fn note_word(&mut self, word: u64) {
        if self.version >= 2 {
            return self.dirty.set(word / PER_BLOCK);
        }
        // A word may reach over two blocks of mappings.
        self.mappings.set(word * 64 / PER_BLOCK);
        let last = (word * 64 + 63) / PER_BLOCK;
        if last < self.mappings.len() && !mutants::is(Mutant::MarkedShort) {
            self.mappings.set(last);
        }
    }

    /// A request waits until the slots of a word are marked.
    pub(super) fn want(&mut self, slot: u32) {
        let word = slot / 64;
        self.wanted.insert(word);
        self.note_word(word.into());
    }

    /// All of them, to be committed; none are left.
    pub(super) fn take(&mut self, slots: u64) -> Changes {
        let committing = (self.leaving.len() + self.retired.len()) as u32;
        let next = Changes { committing, ..Changes::new(self.version, slots) };
        std::mem::replace(self, next)
    }

    /// How many slots become free by commits.
    pub(super) fn leaving(&self) -> u32 {
        (self.leaving.len() + self.retired.len()) as u32 + self.committing
    }

    /// The commit under way is durable.
    pub(super) fn committed(&mut self) {
        self.committing = 0;
    }

    /// A commit with `failed` is not durable.
    pub(super) fn put_back(&mut self, failed: Changes) {
        self.committing = 0;
        self.mappings.join(&failed.mappings);
        self.dirty.join(&failed.dirty);
        self.fresh.extend(failed.fresh);
        self.leaving.extend(failed.leaving);
        self.retired.extend(failed.retired);
        self.wanted.extend(failed.wanted);
        if !mutants::is(Mutant::ClearedForgotten) {
            self.cleared.extend(failed.cleared);
        }
    }

    /// The new content for the changed blocks of the arrays.
    pub(super) fn picture(&self, slots: &Slots) -> Picture {
        let wanted: BTreeMap<u64, u64> = self
            .wanted
            .iter()
            .map(|word| (u64::from(*word), slots.mapped_word((*word).into())))
            .collect();
        let marks = |word: u64| slots.marked_word(word) | wanted.get(&word).unwrap_or(&0);
        let count = u64::from(slots.count());
        let value = |slot: u64| {
            let is_marked = self.version == 1 && marks(slot / 64) >> (slot % 64) & 1 == 1;
            slots.mapping(slot) | if is_marked { DIRTY } else { 0 }
        };
        Picture {
            mappings: pieces(&self.mappings, count, value),
            dirty: pieces(&self.dirty, words_of(count), marks),
            changed_mappings: self.mappings.clone(),
            changed_dirty: self.dirty.clone(),
            slots: count,
            wanted: wanted.into_iter().collect(),
        }
    }
}

/// The elements of the blocks that changed.
fn pieces(changed: &Bits, len: u64, value: impl Fn(u64) -> u64) -> BTreeMap<u64, Vec<u64>> {
    let piece = |nth: u64| {
        let elements = nth * PER_BLOCK..((nth + 1) * PER_BLOCK).min(len);
        (nth, elements.map(&value).collect())
    };
    changed.iter().map(piece).collect()
}

/// The content for a transaction to write: the state in memory at one moment.
#[derive(Debug)]
pub(super) struct Picture {
    mappings: BTreeMap<u64, Vec<u64>>,
    dirty: BTreeMap<u64, Vec<u64>>,
    changed_mappings: Bits,
    changed_dirty: Bits,
    slots: u64,
    /// Words that requests wait for, with the bits that the medium will have of them.
    wanted: Vec<(u64, u64)>,
}

impl Picture {
    /// The mappings, for a transaction.
    pub(super) fn next_mappings(&self) -> Next<'_> {
        next(self.slots, &self.changed_mappings, &self.mappings)
    }

    /// The dirty bits of version 2, for a transaction.
    pub(super) fn next_dirty(&self) -> Next<'_> {
        next(words_of(self.slots), &self.changed_dirty, &self.dirty)
    }

    /// The words that requests wait for.
    pub(super) fn wanted(&self) -> &[(u64, u64)] {
        &self.wanted
    }
}

fn next<'a>(len: u64, changed: &'a Bits, pieces: &'a BTreeMap<u64, Vec<u64>>) -> Next<'a> {
    let fill = Box::new(move |first: u64, into: &mut [u64]| {
        into.copy_from_slice(&pieces[&(first / PER_BLOCK)]);
    });
    Next::Elements { len, changed: Some(changed), fill }
}
