//! The tree that udm writes over the blocks of an array: as flat as possible, and even, so that
//! every node but the root is at least half full. A tree of the same length has the same shape, so
//! nodes without changes below them need not be written again.

use super::array::Place;
use super::block::Block;
use super::btree::{self, NodeAt, entries_max};
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

/// Builds a tree over `blocks`: its levels, and the nodes of the tree `old` that it does not use.
/// Nodes of `old` are reused where no block has changed below them; `write` stores a new node and
/// returns its address.
pub fn build(
    old: &Place,
    blocks: &[u64],
    mut write: impl FnMut(Block) -> Result<u64>,
) -> Result<(Vec<Vec<NodeAt>>, Vec<u64>)> {
    let mut levels: Vec<Vec<NodeAt>> = Vec::new();
    // For the row below: the first key under each node, and its address.
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
                None => write(node(levels.is_empty(), children))?,
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
    let freed = nodes.filter(|address| !kept.contains(address)).collect();
    Ok((levels, freed))
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
