//! The changes of a transaction, and their new addresses.
//!
//! A [`Writer`] knows the blocks that the last superblock on the device uses. From these and from a
//! [`Change`] it prepares a [`Transaction`]: new content for unused blocks, and a superblock.
//! Preparing has no effect, even if space is missing. The code that carries
//! the transaction out reports the result:
//!
//! * [`Writer::committed`]: the superblock is durable, and its blocks are the valid ones.
//! * [`Writer::abandoned`]: an I/O failed. If the superblock was sent, it is unknown which one is
//!   on the device: the blocks of both are not reused until a later transaction is durable.
//!
//! One transaction is in progress at a time. The caller owns the marks of changes, and keeps them
//! until the transaction is durable.

use std::collections::BTreeMap;

use super::array::{self, Elements, Place};
use super::bits::{Bits, words_of};
use super::block::{Block, BlockKind};
use super::contents::Contents;
use super::counts::{self, Counts, PER_BITMAP, build_bitmap, build_index, refuse_shared};
use super::shape;
use super::superblock::Superblock;
use super::survey::{Loaded, Places};
use super::transaction::{After, Reached, Transaction};
use crate::buffer::Buffer;
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};

/// What an array is to hold.
pub enum Next<'a> {
    /// Its present content.
    Same,
    /// The array is removed.
    Nothing,
    /// Elements.
    Elements {
        /// How many.
        len: u64,
        /// The array's changed blocks, or `None`: all of them may have changed. Blocks that are
        /// added, removed or resized need no mark.
        changed: Option<&'a Bits>,
        /// Puts the elements from a number on into a block.
        fill: Fill<'a>,
    },
}

/// Puts the elements from a number on into a block.
pub type Fill<'a> = Box<dyn Fn(u64, &mut [u64]) + 'a>;

impl std::fmt::Debug for Next<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Next::Same => f.write_str("Same"),
            Next::Nothing => f.write_str("Nothing"),
            Next::Elements { len, .. } => write!(f, "{len} elements"),
        }
    }
}

/// The changes of a transaction.
#[derive(Debug)]
pub struct Change<'a> {
    /// The superblock's flags, statistics, policy and discard geometry. Roots, the number of slots
    /// and the space map are the writer's.
    pub superblock: Superblock,
    /// A mapping for each slot, in the format of the media.
    pub mappings: Next<'a>,
    /// Words of dirty bits. Version 1 has none.
    pub dirty: Next<'a>,
    /// A number for each slot.
    pub hints: Next<'a>,
    /// Words of bits of discard blocks.
    pub discards: Next<'a>,
}

impl<'a> Change<'a> {
    /// A change of the superblock alone.
    pub fn of_superblock(superblock: Superblock) -> Change<'a> {
        let same = || Next::Same;
        Change { superblock, mappings: same(), dirty: same(), hints: same(), discards: same() }
    }

    /// Everything, as `contents` has it.
    pub fn whole(mut superblock: Superblock, contents: &'a Contents) -> Change<'a> {
        superblock.fields.discard_blocks.set(contents.discards.len());
        let version = superblock.version();
        Change {
            mappings: contents.next_mappings(version, None),
            dirty: contents.next_dirty(version, None),
            hints: contents.next_hints(),
            discards: contents.next_discards(),
            superblock,
        }
    }
}

impl Contents {
    /// The mappings, for a transaction.
    pub fn next_mappings<'a>(&'a self, version: u32, changed: Option<&'a Bits>) -> Next<'a> {
        let fill: Fill<'a> = Box::new(move |first, into| {
            let slots = first..first + into.len() as u64;
            into.iter_mut().zip(slots).for_each(|(value, slot)| {
                *value = self.media_mapping(version, slot);
            });
        });
        Next::Elements { len: self.slots(), changed, fill }
    }

    /// The dirty bits, for a transaction. In version 1 they are in the mappings.
    pub fn next_dirty<'a>(&'a self, version: u32, changed: Option<&'a Bits>) -> Next<'a> {
        match version {
            1 => Next::Nothing,
            _ => next_bits(&self.dirty, changed),
        }
    }

    /// The hints, for a transaction.
    pub fn next_hints(&self) -> Next<'_> {
        let Some(hints) = &self.hints else { return Next::Nothing };
        let fill: Fill<'_> = Box::new(move |first, into| {
            let values = hints[first as usize..].iter();
            into.iter_mut().zip(values).for_each(|(into, value)| *into = u64::from(*value));
        });
        Next::Elements { len: hints.len() as u64, changed: None, fill }
    }

    /// The discards, for a transaction.
    pub fn next_discards(&self) -> Next<'_> {
        next_bits(&self.discards, None)
    }
}

fn next_bits<'a>(bits: &'a Bits, changed: Option<&'a Bits>) -> Next<'a> {
    let fill: Fill<'a> = Box::new(move |first, into| {
        (first..).zip(into).for_each(|(nth, word)| *word = bits.word(nth));
    });
    Next::Elements { len: words_of(bits.len()), changed, fill }
}

/// Knows what the last superblock on the device leads to.
#[derive(Clone, Debug)]
pub struct Writer {
    pub(super) superblock: Superblock,
    pub(super) places: Places,
    pub(super) counts: Counts,
    /// Blocks that can be used: those that are counted and there.
    pub(super) usable: u64,
    /// Blocks that another superblock leads to, which may be on the device.
    in_doubt: Option<Bits>,
    /// The address at which the search for a free block continues.
    cursor: u64,
    /// Counts transactions.
    number: u64,
}

impl Writer {
    /// Continues with the loaded metadata. An error where the kernel would not write either.
    pub fn new(loaded: &Loaded) -> Result<Writer> {
        loaded.superblock.check_writable()?;
        refuse_shared(&loaded.counts)?;
        Ok(Writer::with(
            loaded.superblock.clone(),
            loaded.places.clone(),
            loaded.counts.clone(),
            loaded.device_blocks,
        ))
    }

    pub(super) fn with(
        superblock: Superblock,
        places: Places,
        counts: Counts,
        device_blocks: u64,
    ) -> Writer {
        let usable = counts.managed.min(device_blocks);
        Writer { superblock, places, counts, usable, in_doubt: None, cursor: 0, number: 0 }
    }

    /// The last superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Whether another superblock than the last one may be on the device.
    pub fn is_in_doubt(&self) -> bool {
        self.in_doubt.is_some()
    }

    /// The last block of the device that is in use.
    pub fn last_used(&self) -> Option<u64> {
        self.counts.used.iter().last()
    }

    /// Blocks of the device in use, and blocks that can be.
    pub fn space(&self) -> (u64, u64) {
        (self.counts.used.ones(), self.usable)
    }

    /// The blocks of a transaction for `change`, and the superblock to be written when they are
    /// durable. Lack of space is an error.
    pub fn prepare(&self, change: &Change<'_>) -> Result<Transaction> {
        let mut draft = Draft::new(self);
        let Places { mappings, dirty, hints, discards } = &self.places;
        let long = Elements::Long;
        let is_first = self.superblock.version() == 1;
        let mut array =
            |old: Option<&Place>, elements, next: &Next<'_>| draft.array(old, elements, next);
        let places = Places {
            mappings: array(Some(mappings), long, &change.mappings)?.unwrap_or_default(),
            dirty: array(dirty.as_ref(), long, &change.dirty)?,
            hints: array(hints.as_ref(), Elements::Short, &change.hints)?,
            discards: array(Some(discards), long, &change.discards)?.unwrap_or_default(),
        };
        let counts = draft.counts()?;
        let mut superblock = change.superblock.clone();
        let fields = &mut superblock.fields;
        let slots = places.mappings.len;
        let root = |place: Option<&Place>| place.and_then(Place::root).unwrap_or(0);
        fields.mapping_root.set(root(Some(&places.mappings)));
        fields.dirty_root.set(root(places.dirty.as_ref()));
        fields.hint_root.set(root(places.hints.as_ref()));
        fields.discard_root.set(root(Some(&places.discards)));
        fields.slots.set(slots as u32);
        fields.map.managed.set(counts.managed);
        fields.map.allocated.set(counts.allocated);
        fields.map.index.set(counts.index);
        fields.map.overflow.set(self.superblock.fields.map.overflow.get());
        assert!(u32::try_from(slots).is_ok(), "slots have numbers of 32 bits");
        assert_eq!(places.dirty.is_none(), is_first, "dirty bits are an array of version 2");
        let words = places.dirty.as_ref().map_or(words_of(slots), |place| place.len);
        assert_eq!(words, words_of(slots), "a dirty bit for each slot");
        let words = words_of(fields.discard_blocks.get());
        assert_eq!(places.discards.len, words, "a bit for each discard block");
        assert_eq!(fields.version, self.superblock.fields.version, "the version stays");
        let (mut blocks, cursor) = (draft.blocks, draft.cursor);
        blocks.sort_unstable_by_key(|(address, _)| *address);
        let after = After { superblock, places, counts, cursor };
        let block = after.superblock.build();
        Ok(Transaction::new(blocks, &block, after, self.number))
    }

    /// The superblock of `transaction` is durable.
    pub fn committed(&mut self, transaction: Transaction) {
        let (after, number) = transaction.into_after();
        assert_eq!(number, self.number, "a transaction that was prepared before another one ended");
        let After { superblock, places, counts, cursor } = after;
        let usable = self.usable;
        let number = number + 1;
        *self = Writer { superblock, places, counts, usable, in_doubt: None, cursor, number };
    }

    /// `transaction` failed. Its changes must be in a later one.
    pub fn abandoned(&mut self, transaction: Transaction, reached: Reached) {
        let (after, number) = transaction.into_after();
        assert_eq!(number, self.number, "a transaction that was prepared before another one ended");
        self.number += 1;
        if reached == Reached::Superblock {
            let doubt = self.in_doubt.get_or_insert_with(|| Bits::new(self.counts.managed));
            after.counts.used.iter().for_each(|block| doubt.set(block));
        }
    }
}

/// A transaction in the making.
pub struct Draft<'a> {
    writer: &'a Writer,
    /// The blocks in use when it is done.
    used: Bits,
    blocks: Vec<(u64, Buffer)>,
    /// The address at which the search for a free block continues, and the number of blocks left.
    cursor: u64,
    left: u64,
    /// Bitmaps that are not as they were, and where they go.
    touched: BTreeMap<u64, Option<u64>>,
}

impl<'a> Draft<'a> {
    fn new(writer: &'a Writer) -> Draft<'a> {
        Draft {
            writer,
            used: writer.counts.used.clone(),
            blocks: Vec::new(),
            cursor: writer.cursor,
            left: writer.usable,
            touched: BTreeMap::new(),
        }
    }

    /// A block that no superblock leads to. The search goes round once, so it finds none twice.
    fn allocate(&mut self) -> Result<u64> {
        let Writer { counts, usable, in_doubt, .. } = self.writer;
        while self.left > 0 {
            let at = if self.cursor < *usable { self.cursor } else { 0 };
            self.cursor = at + 1;
            self.left -= 1;
            let is_doubtful = in_doubt.as_ref().is_some_and(|doubt| doubt.is_set(at));
            if !counts.used.is_set(at) && !is_doubtful {
                self.used.set(at);
                self.touched.entry(at / PER_BITMAP).or_default();
                return Ok(at);
            }
        }
        let message = format!(
            "the metadata device is full: {} of {usable} blocks are in use, and a transaction \
             needs free blocks",
            counts.used.ones()
        );
        Err(Error::new(Kind::NoSpace, message))
    }

    /// The block at `address` is not needed any more when the transaction is done.
    pub fn free(&mut self, address: u64) {
        self.used.clear(address);
        if !mutants::is(Mutant::FreedBitmapUnwritten) {
            self.touched.entry(address / PER_BITMAP).or_default();
        }
    }

    /// Has `block` written somewhere.
    pub fn write(&mut self, kind: BlockKind, block: Block) -> Result<u64> {
        let address = self.allocate()?;
        self.put(kind, address, block);
        Ok(address)
    }

    fn put(&mut self, kind: BlockKind, address: u64, mut block: Block) {
        kind.seal(&mut block, address);
        self.blocks.push((address, Buffer::from_bytes(&block)));
    }

    /// Where an array is when it holds what is `next`.
    fn array(
        &mut self,
        old: Option<&Place>,
        elements: Elements,
        next: &Next<'_>,
    ) -> Result<Option<Place>> {
        let (len, changed, fill) = match next {
            Next::Same => return Ok(old.cloned()),
            Next::Nothing => {
                old.iter().flat_map(|old| old.addresses()).for_each(|address| self.free(address));
                return Ok(None);
            }
            Next::Elements { len, changed, fill } => (*len, changed, fill),
        };
        let none = Place::default();
        let old = old.unwrap_or(&none);
        let per_block = elements.per_block();
        let used = |len: u64, nth: u64| (len - nth * per_block).min(per_block);
        let mut values = vec![0; per_block as usize];
        let mut blocks = Vec::with_capacity(len.div_ceil(per_block) as usize);
        for nth in 0..len.div_ceil(per_block) {
            let before = old.blocks.get(nth as usize).copied();
            let is_as_long = before.is_some() && used(old.len, nth) == used(len, nth);
            let is_same = is_as_long && changed.is_some_and(|changed| !changed.is_set(nth));
            if let Some(before) = before.filter(|_| is_same) {
                blocks.push(before);
                continue;
            }
            let values = &mut values[..used(len, nth) as usize];
            fill(nth * per_block, values);
            blocks.push(self.write(BlockKind::Array, array::build(elements, values))?);
            before.into_iter().for_each(|before| self.free(before));
        }
        old.blocks.iter().skip(blocks.len()).for_each(|address| self.free(*address));
        let (levels, freed) = shape::build(old, &blocks, |node| self.write(BlockKind::Node, node))?;
        freed.into_iter().for_each(|address| self.free(address));
        Ok(Some(Place { blocks, levels, len }))
    }

    /// The space map of the blocks in use, which changes itself: a changed bitmap is written to a
    /// new address, so another bitmap may change as well.
    fn counts(&mut self) -> Result<Counts> {
        let old = &self.writer.counts;
        if self.touched.is_empty() {
            return Ok(old.clone());
        }
        let index = self.allocate()?;
        self.free(old.index);
        while let Some((&nth, _)) = self.touched.iter().find(|(_, home)| home.is_none()) {
            let home = self.allocate()?;
            self.touched.insert(nth, Some(home));
            self.free(old.entries[nth as usize].address);
        }
        let mut counts = Counts { index, ..old.clone() };
        for (nth, home) in std::mem::take(&mut self.touched) {
            let address = home.expect("each has a home");
            let (first, end) = old.range(nth);
            let (block, entry) = build_bitmap(end - first, |nth| self.used.is_set(first + nth));
            counts.entries[nth as usize] = counts::IndexEntry { address, ..entry };
            self.put(BlockKind::Bitmap, address, block);
        }
        self.put(BlockKind::Index, index, build_index(&counts.entries));
        counts.used = self.used.clone();
        counts.allocated = counts.used.ones();
        Ok(counts)
    }
}
