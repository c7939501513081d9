//! The tree that we write over the blocks of an array: as flat as can be, and even, so that every
//! node but the root is half full at least. A tree of the same length has the same shape, so what
//! has not changed below a node need not be written again.

use super::array::Place;
use super::block::{Block, BlockKind};
use super::btree::{self, NodeAt, entries_max};
use super::writer::Draft;
use crate::error::Result;

/// Children of a node.
const CHILDREN_MAX: u64 = entries_max(8) as u64;

/// The nodes of a row over `children`: the first child of each, and how many it has.
fn row_over(children: u64) -> impl Iterator<Item = (u64, u64)> {
    let nodes = children.div_ceil(CHILDREN_MAX).max(1);
    let (few, longer) = (children / nodes, children % nodes);
    (0..nodes).map(move |nth| {
        let start = nth * few + nth.min(longer);
        (start, few + u64::from(nth < longer))
    })
}

/// Puts a tree over `blocks`. Nodes of the tree `old` are taken over where nothing has changed
/// below them; the others are let go.
pub fn build(draft: &mut Draft<'_>, old: &Place, blocks: &[u64]) -> Result<Vec<Vec<NodeAt>>> {
    let mut levels: Vec<Vec<NodeAt>> = Vec::new();
    // Of the row below: the first key under each, and where it is.
    let mut below: Vec<(u64, u64)> = (0..).zip(blocks.iter().copied()).collect();
    let mut kept = Vec::new();
    loop {
        let (mut row, mut above) = (Vec::new(), Vec::new());
        for (start, len) in row_over(below.len() as u64) {
            let children = &below[start as usize..(start + len) as usize];
            let address = match same_node(old, levels.len(), start, children) {
                Some(address) => {
                    kept.push(address);
                    address
                }
                None => draft.write(BlockKind::Node, node(levels.is_empty(), children))?,
            };
            row.push(NodeAt { address, start, len });
            above.push((children.first().map_or(0, |(key, _)| *key), address));
        }
        let is_root = row.len() == 1;
        levels.push(row);
        if is_root {
            break;
        }
        below = above;
    }
    let nodes = old.levels.iter().flatten().map(|node| node.address);
    nodes.filter(|address| !kept.contains(address)).for_each(|address| draft.free(address));
    Ok(levels)
}

fn node(is_leaf: bool, children: &[(u64, u64)]) -> Block {
    btree::build(is_leaf, 8, children)
}

/// The node of the tree `old` that has exactly these children.
fn same_node(old: &Place, level: usize, start: u64, children: &[(u64, u64)]) -> Option<u64> {
    let row = old.levels.get(level)?;
    let node = row[row.binary_search_by_key(&start, |node| node.start).ok()?];
    let range = start as usize..(start + node.len) as usize;
    let is_same = node.len == children.len() as u64
        && match level.checked_sub(1) {
            None => old.blocks.get(range)?.iter().eq(children.iter().map(|(_, at)| at)),
            Some(below) => {
                let nodes = old.levels[below].get(range)?;
                nodes.iter().map(|node| node.address).eq(children.iter().map(|(_, at)| *at))
            }
        };
    is_same.then_some(node.address)
}

#[cfg(test)]
mod tests {
    use super::row_over;

    #[test]
    fn rows_are_even_and_without_gaps() {
        for children in 0..3000 {
            let row: Vec<(u64, u64)> = row_over(children).collect();
            let mut next = 0;
            for &(start, len) in &row {
                assert_eq!(start, next);
                assert!(len <= 252 && (row.len() == 1 || len >= 84), "{children}: {len}");
                next += len;
            }
            assert_eq!((next, row.len() as u64), (children, children.div_ceil(252).max(1)));
        }
    }
}
