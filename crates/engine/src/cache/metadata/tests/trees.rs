//! Trees and arrays of every legal shape, and of some that are not.

use std::collections::BTreeMap;

use super::super::block::{BlockKind, damaged, put_u32, put_u64};
use super::super::reading::Reading;
use super::super::{array, btree};
use super::*;
use crate::prng::Prng;

/// Blocks in memory, and the next free one.
struct Media {
    bytes: Vec<u8>,
    next: u64,
}

impl Media {
    fn new(blocks: usize) -> Media {
        Media { bytes: vec![0; blocks * BLOCK_BYTES], next: 1 }
    }

    fn put(&mut self, kind: BlockKind, block: Block) -> u64 {
        let address = self.next;
        self.next += 1;
        self.put_at(kind, address, block);
        address
    }

    fn put_at(&mut self, kind: BlockKind, address: u64, mut block: Block) {
        kind.seal(&mut block, address);
        let at = address as usize * BLOCK_BYTES;
        self.bytes[at..at + BLOCK_BYTES].copy_from_slice(&block);
    }

    /// A tree whose nodes have as many entries as chance says, within what is legal.
    fn tree(&mut self, prng: &mut Prng, entries: &[(u64, u64)]) -> u64 {
        let mut row = entries.to_vec();
        let mut is_leaf = true;
        loop {
            let mut above = Vec::new();
            let mut rest = &row[..];
            loop {
                // The rest after a node that is not the last must be enough for another.
                let len = match rest.len() {
                    len if len <= 252 && prng.one_in(2) => len,
                    len if len < 168 => len,
                    len => (84 + prng.below(169) as usize).min(len - 84).min(252),
                };
                let (node, more) = rest.split_at(len);
                let address = self.put(BlockKind::Node, btree::build(is_leaf, 8, node));
                above.push((node.first().map_or(0, |(key, _)| *key), address));
                rest = more;
                if rest.is_empty() {
                    break;
                }
            }
            if let [(_, root)] = above[..] {
                return root;
            }
            row = above;
            is_leaf = false;
        }
    }
}

fn reading(media: &Media) -> Reading<'_> {
    Reading::new(&media.bytes, (media.bytes.len() / BLOCK_BYTES) as u64)
}

#[test]
fn trees_of_any_legal_shape_are_read_as_a_map() {
    let mut prng = Prng::new(1);
    for round in 0..60 {
        let len = [0, 1, 83, 84, 252, 253, 600, 40_000][round % 8];
        let mut key = 0;
        let model: BTreeMap<u64, u64> = (0..len)
            .map(|_| {
                key += 1 + prng.below(5) * prng.below(1 << 40);
                (key, prng.next_u64())
            })
            .collect();
        let mut media = Media::new(1000);
        let entries: Vec<(u64, u64)> = model.clone().into_iter().collect();
        let root = media.tree(&mut prng, &entries);
        let mut reading = reading(&media);
        let tree = btree::read(&mut reading, root, 8);
        assert!(reading.damage.is_empty() && reading.remarks.is_empty(), "{:?}", reading.damage);
        let found: Vec<(u64, u64)> = tree.entries.iter().map(|e| (e.key, e.value)).collect();
        assert_eq!(found, entries);
        assert_eq!(tree.addresses().count() as u64, media.next - 1, "every node, once");
    }
}

/// A tree of two levels, to be spoilt: three leaves of 100 below the root.
fn two_levels() -> (Media, u64, [u64; 3]) {
    let mut media = Media::new(40);
    let leaf =
        |nth: u64| -> Vec<(u64, u64)> { (0..100).map(|n| (nth * 100 + n, 1000 + n)).collect() };
    let leaves = [0, 1, 2].map(|nth| media.put(BlockKind::Node, btree::build(true, 8, &leaf(nth))));
    let root = media.next;
    let children: Vec<(u64, u64)> = (0..3).map(|nth| (nth * 100, leaves[nth as usize])).collect();
    media.put(BlockKind::Node, btree::build(false, 8, &children));
    (media, root, leaves)
}

/// The findings of a read of such a tree when block `at` is changed and sealed again.
fn spoilt(change: impl Fn(&mut Block), which: usize) -> Vec<String> {
    let (mut media, root, leaves) = two_levels();
    let address = if which == 3 { root } else { leaves[which] };
    let at = address as usize * BLOCK_BYTES;
    let mut block = *media.bytes[at..].first_chunk::<BLOCK_BYTES>().unwrap();
    change(&mut block);
    media.put_at(BlockKind::Node, address, block);
    let mut reading = reading(&media);
    btree::read(&mut reading, root, 8);
    reading.damage.list.iter().chain(&reading.remarks.list).map(ToString::to_string).collect()
}

#[test]
fn what_is_wrong_with_a_node_is_named_with_its_block() {
    type Spoil = fn(&mut Block);
    let cases: [(usize, Spoil, &str); 12] = [
        (3, |b| put_u64(b, 2048, 4), "metadata block 4: it leads to block 4, which is in use"),
        (3, |b| put_u64(b, 2056, 1), "metadata block 4: it leads to block 1, which is in use"),
        (3, |b| put_u64(b, 2048, 40), "metadata block 4: it leads to block 40, but there are 40"),
        (3, |b| put_u64(b, 2048, u64::MAX), "it leads to block 18446744073709551615, but"),
        (3, |b| put_u32(b, 16, 0), "metadata block 4: a node without entries"),
        (3, |b| put_u64(b, 40, 101), "metadata block 2: a node with keys 100 to 199, but block 4"),
        (1, |b| put_u32(b, 16, 253), "metadata block 2: a node with 253 entries, and room for 252"),
        (1, |b| put_u32(b, 20, 255), "metadata block 2: a node with room for 255 entries"),
        (1, |b| put_u32(b, 24, 4), "metadata block 2: a node with values of 4 bytes, expected 8"),
        (1, |b| put_u32(b, 4, 3), "metadata block 2: a node that is neither"),
        (1, |b| put_u64(b, 40, 100), "metadata block 2: key 100 follows key 100"),
        (1, |b| put_u32(b, 16, 83), "metadata block 2: a node with 83 entries, fewer than a third"),
    ];
    for (which, change, expected) in cases {
        let said = spoilt(change, which);
        assert!(said.iter().any(|line| line.contains(expected)), "{expected}: {said:?}");
    }
    assert_eq!(spoilt(|_| {}, 0), Vec::<String>::new());
    let said = spoilt(|b| put_u64(b, 32, 5), 3);
    assert!(said[0].contains("block 1: a node with keys 0 to 99, but block 4 says 5"), "{said:?}");
    let said = spoilt(|b| put_u64(b, 40, 99 + 1 - 1), 3);
    assert!(said.iter().any(|line| line.contains("less than 99")), "{said:?}");
}

#[test]
fn a_tree_that_leads_into_itself_or_has_no_end_is_read_to_an_end() {
    let mut media = Media::new(64);
    // A chain: each node has the next one as its only child; the last one leads to the first.
    for nth in 1..60_u64 {
        let child = if nth == 59 { 1 } else { nth + 1 };
        media.put(BlockKind::Node, btree::build(false, 8, &[(0, child)]));
    }
    let mut reading = reading(&media);
    btree::read(&mut reading, 1, 8);
    let said = reading.damage.list[0].to_string();
    assert_eq!(said, "metadata block 1: the tree below it has more than 8 levels");
}

#[test]
fn a_block_that_is_torn_or_misplaced_is_named() {
    let (mut media, root, leaves) = two_levels();
    media.bytes[leaves[0] as usize * BLOCK_BYTES + 100] ^= 1;
    let (from, to) = (leaves[1] as usize * BLOCK_BYTES, leaves[2] as usize * BLOCK_BYTES);
    media.bytes.copy_within(from..from + BLOCK_BYTES, to);
    let mut reading = reading(&media);
    let tree = btree::read(&mut reading, root, 8);
    let said: Vec<String> = reading.damage.list.iter().map(ToString::to_string).collect();
    assert!(
        said[0].starts_with("metadata block 1: not a valid tree node: its checksum is 0x"),
        "{said:?}"
    );
    assert_eq!(said[1], "metadata block 3: the tree node there is labelled block 2");
    assert_eq!(tree.entries.len(), 100, "undamaged entries are found");
    // A block of another type is reported as such.
    let block = array::build(array::Elements::Long, &[]);
    let mut sealed = block;
    BlockKind::Array.seal(&mut sealed, 7);
    let finding = BlockKind::Node.check(&sealed, 7).unwrap_err();
    assert_eq!(finding, damaged(7, "it has a block of an array, expected a tree node"));
}

#[test]
fn arrays_of_any_legal_shape_are_read_as_a_list() {
    use array::{Elements, Len};
    let mut prng = Prng::new(2);
    for round in 0..40 {
        let elements = if round % 2 == 0 { Elements::Long } else { Elements::Short };
        let per_block = elements.per_block();
        let len = [0, 1, per_block, per_block + 1, 200_000][round / 2 % 5];
        let model: Vec<u64> = (0..len).map(|_| prng.next_u64() & 0xFFFF_FFFF).collect();
        let mut media = Media::new(1000);
        let blocks: Vec<(u64, u64)> = (0..)
            .zip(model.chunks(per_block as usize))
            .map(|(nth, chunk)| (nth, media.put(BlockKind::Array, array::build(elements, chunk))))
            .collect();
        let root = media.tree(&mut prng, &blocks);
        for expected in [Len::Exactly(len), Len::Any] {
            let mut reading = reading(&media);
            let found = array::read(&mut reading, root, elements, expected);
            assert!(reading.damage.is_empty(), "{:?}", reading.damage);
            let values: Vec<u64> = found.pieces.into_iter().flat_map(|p| p.values).collect();
            assert_eq!(values, model);
            assert_eq!(found.place.len, len);
        }
        for wrong in [len + 1, len + per_block, len.wrapping_sub(1)] {
            let mut reading = reading(&media);
            array::read(&mut reading, root, elements, Len::Exactly(wrong));
            assert!(!reading.damage.is_empty(), "{len} elements were taken for {wrong}");
        }
    }
}

#[test]
fn an_array_with_a_hole_names_it() {
    use array::{Elements, Len};
    let mut media = Media::new(20);
    let full = [1; 509];
    let blocks: Vec<(u64, u64)> = [0, 3, 4]
        .map(|key| (key, media.put(BlockKind::Array, array::build(Elements::Long, &full))))
        .to_vec();
    let root = media.put(BlockKind::Node, btree::build(true, 8, &blocks));
    let mut reading = reading(&media);
    let found = array::read(&mut reading, root, Elements::Long, Len::Exactly(6 * 509));
    let said: Vec<String> = reading.damage.list.iter().map(ToString::to_string).collect();
    assert_eq!(said[0], "metadata block 4: the array below it lacks blocks 1 to 2");
    assert_eq!(said[1], "metadata block 4: the array below it lacks block 5");
    let firsts: Vec<u64> = found.pieces.iter().map(|piece| piece.first).collect();
    assert_eq!(firsts, [0, 3 * 509, 4 * 509]);
}
