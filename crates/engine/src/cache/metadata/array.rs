//! Arrays: a tree whose keys are 0, 1, 2 and so on, over blocks that are packed with elements.
//!
//! ```text
//! 0    checksum, most elements, elements in use, bytes of an element
//! 16   own address
//! 24   elements
//! ```
//!
//! Every block is full but the last. Only the superblock has the number of elements.

use super::block::Finding;
use super::block::{BLOCK_BYTES, Block, BlockKind, damaged, put_u32, put_u64, u32_at, u64_at};
use super::btree::{self, NodeAt};
use super::reading::Reading;

/// No array has blocks with higher numbers: the most elements are 2^32, or bits of that many words.
const BLOCKS_MAX: u64 = 1 << 32;

/// Bytes in front of the elements.
const HEADER: usize = 24;

/// The kind of the elements of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// Numbers of 8 bytes: mappings, words of bits.
    Long,
    /// Numbers of 4 bytes: hints.
    Short,
}

impl Elements {
    /// Bytes of one.
    pub const fn bytes(self) -> usize {
        match self {
            Elements::Long => 8,
            Elements::Short => 4,
        }
    }

    /// How many a block has room for.
    pub const fn per_block(self) -> u64 {
        ((BLOCK_BYTES - HEADER) / self.bytes()) as u64
    }
}

const _: () = assert!(Elements::Long.per_block() == 509 && Elements::Short.per_block() == 1018);

/// Where an array is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Its blocks, in order.
    pub blocks: Vec<u64>,
    /// The nodes above them, leaves first.
    pub levels: Vec<Vec<NodeAt>>,
    /// How many elements they have.
    pub len: u64,
}

impl Place {
    /// The block of the tree's root, if there is a tree.
    pub fn root(&self) -> Option<u64> {
        Some(self.levels.last()?.first()?.address)
    }

    /// Every block that it takes.
    pub fn addresses(&self) -> impl Iterator<Item = u64> {
        self.levels.iter().flatten().map(|node| node.address).chain(self.blocks.iter().copied())
    }
}

/// How many elements an array should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Len {
    /// This many.
    Exactly(u64),
    /// Any number: hints are not resized together with the mappings.
    Any,
}

/// An array as it was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Where it is.
    pub place: Place,
    /// The blocks that could be read, in order: all of them, if none is damaged.
    pub pieces: Vec<Piece>,
}

/// The elements of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The number of the first element.
    pub first: u64,
    /// The block.
    pub address: u64,
    /// The elements.
    pub values: Vec<u64>,
}

/// Reads the array below `root`. Missing blocks are damage. No more memory is taken than for the
/// elements on the device.
pub fn read(reading: &mut Reading<'_>, root: u64, elements: Elements, len: Len) -> Found {
    let tree = btree::read(reading, root, 8);
    let per_block = elements.per_block();
    let wanted = match len {
        Len::Exactly(len) => len.div_ceil(per_block),
        Len::Any => tree.entries.last().map_or(0, |last| last.key.min(BLOCKS_MAX) + 1),
    };
    let (mut blocks, mut numbers, mut next) = (Vec::new(), Vec::new(), 0);
    for entry in &tree.entries {
        if entry.key >= wanted {
            let what = format!("it has block {} of an array of {wanted} blocks", entry.key);
            reading.damage.add(damaged(entry.leaf, what));
            break;
        }
        note_gap(reading, root, next, entry.key);
        next = entry.key + 1;
        match reading.reach(entry.leaf, entry.value) {
            Ok(()) => {
                blocks.push(entry.value);
                numbers.push(entry.key);
            }
            Err(finding) => reading.damage.add(finding),
        }
    }
    note_gap(reading, root, next, wanted);
    let mut pieces = Vec::with_capacity(blocks.len());
    reading.read(BlockKind::Array, &blocks, |reading, nth, block| {
        let (address, number) = (blocks[nth], numbers[nth]);
        let first = number * per_block;
        let used = match len {
            Len::Exactly(len) => Some((len - first).min(per_block)),
            Len::Any => (number + 1 < wanted).then_some(per_block),
        };
        match check(block, address, elements, used) {
            Err(finding) => reading.damage.add(finding),
            Ok(used) => {
                let values = (0..used as usize).map(|nth| element(block, elements, nth)).collect();
                pieces.push(Piece { first, address, values });
            }
        }
    });
    let len = pieces.iter().map(|piece: &Piece| piece.values.len() as u64).sum();
    Found { place: Place { blocks, levels: tree.levels, len }, pieces }
}

/// Records that blocks `[from, to)` of the array below `root` are missing.
fn note_gap(reading: &mut Reading<'_>, root: u64, from: u64, to: u64) {
    if from < to {
        let what = match to - from {
            1 => format!("the array below it lacks block {from}"),
            _ => format!("the array below it lacks blocks {from} to {}", to - 1),
        };
        reading.damage.add(damaged(root, what));
    }
}

/// Whether `block` is one of an array with such elements; how many it has. `used`: how many it must
/// have.
fn check(
    block: &Block,
    address: u64,
    elements: Elements,
    used: Option<u64>,
) -> Result<u64, Finding> {
    let (most, found, width) = (u32_at(block, 4), u32_at(block, 8), u32_at(block, 12));
    let wrong = |what: String| Err(damaged(address, what));
    if width as usize != elements.bytes() {
        let right = elements.bytes();
        return wrong(format!("an array block with elements of {width} bytes, expected {right}"));
    }
    if u64::from(most) != elements.per_block() {
        let right = elements.per_block();
        return wrong(format!("an array block with room for {most} elements, expected {right}"));
    }
    if used.is_some_and(|used| used != u64::from(found)) || found > most {
        let right = used.map_or(format!("at most {most}"), |used| used.to_string());
        return wrong(format!("an array block with {found} elements, expected {right}"));
    }
    Ok(found.into())
}

fn element(block: &Block, elements: Elements, nth: usize) -> u64 {
    match elements {
        Elements::Long => u64_at(block, HEADER + 8 * nth),
        Elements::Short => u32_at(block, HEADER + 4 * nth).into(),
    }
}

/// A block with these elements, to be sealed.
pub fn build(elements: Elements, values: &[u64]) -> Block {
    assert!(values.len() as u64 <= elements.per_block(), "{} elements in a block", values.len());
    let mut block = [0; BLOCK_BYTES];
    put_u32(&mut block, 4, elements.per_block() as u32);
    put_u32(&mut block, 8, values.len() as u32);
    put_u32(&mut block, 12, elements.bytes() as u32);
    for (nth, &value) in values.iter().enumerate() {
        match elements {
            Elements::Long => put_u64(&mut block, HEADER + 8 * nth, value),
            Elements::Short => put_u32(&mut block, HEADER + 4 * nth, value as u32),
        }
    }
    block
}
