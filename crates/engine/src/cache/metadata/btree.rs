//! Trees with numbers as keys: reading one of any shape that is legal.
//!
//! ```text
//! 0    checksum, flags (1 internal, 2 leaf), own address
//! 16   entries in use, most entries, bytes of a value, 0
//! 32   keys, 8 bytes each, space for the most
//!      values
//! ```
//!
//! A tree is read level by level, so that many blocks are read together. A defect of a node loses
//! only the entries below it.

use super::block::Finding;
use super::block::{BLOCK_BYTES, Block, BlockKind, damaged, put_u32, put_u64, u32_at, u64_at};
use super::reading::Reading;

/// Bytes in front of the keys.
const HEADER: usize = 32;
const INTERNAL: u32 = 1;
const LEAF: u32 = 2;
/// No legal tree needs more levels.
pub const LEVELS_MAX: usize = 8;

/// Most entries of a node with values of this many bytes.
pub const fn entries_max(value_bytes: usize) -> usize {
    (BLOCK_BYTES - HEADER) / (8 + value_bytes) / 3 * 3
}

const _: () = assert!(entries_max(4) == 336 && entries_max(8) == 252 && entries_max(16) == 168);

/// The address of a node, and the part of the level below it, or of the tree's entries, that it
/// covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeAt {
    /// Its block.
    pub address: u64,
    /// The first of its children, counted from the level's begin.
    pub start: u64,
    /// How many it has.
    pub len: u64,
}

/// A tree as it was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    /// The nodes, leaves first, the root last.
    pub levels: Vec<Vec<NodeAt>>,
    /// Keys and values, in order of the keys, and the leaf that has them.
    pub entries: Vec<Entry>,
}

/// A key with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: u64,
    /// The value, of 4 or 8 bytes.
    pub value: u64,
    /// The leaf's address.
    pub leaf: u64,
}

/// A node to be read.
#[derive(Clone, Copy, Debug)]
struct Expected {
    address: u64,
    parent: u64,
    /// The parent's keys for it: its first key, and the one after its last.
    first: Option<u64>,
    end: Option<u64>,
}

/// The content of a node.
struct Node {
    is_leaf: bool,
    entries: Vec<(u64, u64)>,
}

impl Tree {
    /// The addresses of all nodes.
    pub fn addresses(&self) -> impl Iterator<Item = u64> {
        self.levels.iter().flatten().map(|node| node.address)
    }
}

/// Reads the tree below `root`, which the superblock names.
pub fn read(reading: &mut Reading<'_>, root: u64, value_bytes: usize) -> Tree {
    let mut tree = Tree::default();
    let mut level = vec![Expected { address: root, parent: 0, first: None, end: None }];
    if let Err(finding) = reading.reach(0, root) {
        reading.damage.add(finding);
        return tree;
    }
    loop {
        let is_root = tree.levels.is_empty();
        let nodes = read_level(reading, &level, value_bytes, is_root);
        let Some(is_leaf) = nodes.first().map(|(_, node)| node.is_leaf) else { break };
        let mut below = Vec::new();
        let mut row = Vec::new();
        for (expected, node) in nodes {
            let address = expected.address;
            if node.is_leaf != is_leaf {
                let what = "its leaves are not all at the same depth";
                reading.damage.add(damaged(address, what));
                continue;
            }
            let start = if is_leaf { tree.entries.len() } else { below.len() } as u64;
            let len = node.entries.len() as u64;
            if is_leaf {
                let entry = |(key, value)| Entry { key, value, leaf: address };
                tree.entries.extend(node.entries.into_iter().map(entry));
            } else {
                descend(reading, &expected, &node, &mut below);
            }
            row.push(NodeAt { address, start, len });
        }
        tree.levels.push(row);
        if is_leaf {
            break;
        }
        if tree.levels.len() == LEVELS_MAX {
            let what = format!("the tree below it has more than {LEVELS_MAX} levels");
            reading.damage.add(damaged(root, what));
            break;
        }
        level = below;
    }
    tree.levels.reverse();
    tree
}

fn read_level(
    reading: &mut Reading<'_>,
    level: &[Expected],
    value_bytes: usize,
    is_root: bool,
) -> Vec<(Expected, Node)> {
    let addresses: Vec<u64> = level.iter().map(|expected| expected.address).collect();
    let mut nodes = Vec::with_capacity(level.len());
    reading.read(BlockKind::Node, &addresses, |reading, nth, block| {
        match parse(reading, block, &level[nth], value_bytes, is_root) {
            Ok(node) => nodes.push((level[nth], node)),
            Err(finding) => reading.damage.add(finding),
        }
    });
    nodes
}

/// Adds the children of `node` to `below`.
fn descend(reading: &mut Reading<'_>, own: &Expected, node: &Node, below: &mut Vec<Expected>) {
    for (nth, &(key, address)) in node.entries.iter().enumerate() {
        let end = node.entries.get(nth + 1).map(|(next, _)| *next).or(own.end);
        let parent = own.address;
        match reading.reach(parent, address) {
            Ok(()) => below.push(Expected { address, parent, first: Some(key), end }),
            Err(finding) => reading.damage.add(finding),
        }
    }
}

/// Parses `block`, which is a node by its checksum.
fn parse(
    reading: &mut Reading<'_>,
    block: &Block,
    expected: &Expected,
    value_bytes: usize,
    is_root: bool,
) -> Result<Node, Finding> {
    let address = expected.address;
    let wrong = |what: String| Err(damaged(address, what));
    let (flags, count, most, width) =
        (u32_at(block, 4), u32_at(block, 16), u32_at(block, 20), u32_at(block, 24));
    let is_leaf = match flags {
        INTERNAL => false,
        LEAF => true,
        _ => {
            return wrong(format!("a node that is neither internal nor a leaf (flags {flags:#x})"));
        }
    };
    let wanted = if is_leaf { value_bytes } else { 8 };
    if width as usize != wanted {
        return wrong(format!("a node with values of {width} bytes, expected {wanted}"));
    }
    if !most.is_multiple_of(3) || most == 0 || most as usize > entries_max(wanted) {
        let right = entries_max(wanted);
        return wrong(format!("a node with room for {most} entries, expected {right}"));
    }
    if count > most {
        return wrong(format!("a node with {count} entries, and room for {most}"));
    }
    if count == 0 && !(is_root && is_leaf) {
        return wrong("a node without entries".into());
    }
    if !is_root && count < most / 3 {
        let what = format!("a node with {count} entries, fewer than a third of {most}");
        reading.remarks.add(damaged(address, what));
    }
    let (count, values_at) = (count as usize, HEADER + 8 * most as usize);
    let value = |nth: usize| match wanted {
        4 => u64::from(u32_at(block, values_at + 4 * nth)),
        _ => u64_at(block, values_at + 8 * nth),
    };
    let entries: Vec<(u64, u64)> =
        (0..count).map(|nth| (u64_at(block, HEADER + 8 * nth), value(nth))).collect();
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].0 >= pair[1].0) {
        return wrong(format!("key {} follows key {}", pair[1].0, pair[0].0));
    }
    check_borders(reading, expected, &entries)?;
    Ok(Node { is_leaf, entries })
}

/// Whether the keys are within what the parent says.
fn check_borders(
    reading: &mut Reading<'_>,
    expected: &Expected,
    entries: &[(u64, u64)],
) -> Result<(), Finding> {
    let Expected { address, parent, first, end } = *expected;
    let (Some(wanted), Some(&(found, _)), Some(&(last, _))) =
        (first, entries.first(), entries.last())
    else {
        return Ok(());
    };
    if found < wanted || end.is_some_and(|end| last >= end) {
        let end = end.map_or(String::new(), |end| format!(", and less than {end}"));
        let what = format!(
            "a node with keys {found} to {last}, but block {parent} says {wanted} or more{end}"
        );
        return Err(damaged(address, what));
    }
    if found != wanted {
        let what = format!("its first key is {found}, but block {parent} says {wanted}");
        reading.remarks.add(damaged(address, what));
    }
    Ok(())
}

/// A node with values of 8 bytes, or an empty leaf with values of 4, to be sealed.
pub fn build(is_leaf: bool, value_bytes: usize, entries: &[(u64, u64)]) -> Block {
    let most = entries_max(value_bytes);
    assert!(entries.len() <= most, "{} entries in a node", entries.len());
    assert!(value_bytes == 8 || entries.is_empty(), "values of 8 bytes");
    let mut block = [0; BLOCK_BYTES];
    put_u32(&mut block, 4, if is_leaf { LEAF } else { INTERNAL });
    put_u32(&mut block, 16, entries.len() as u32);
    put_u32(&mut block, 20, most as u32);
    put_u32(&mut block, 24, value_bytes as u32);
    for (nth, &(key, value)) in entries.iter().enumerate() {
        put_u64(&mut block, HEADER + 8 * nth, key);
        put_u64(&mut block, HEADER + 8 * (most + nth), value);
    }
    block
}
