//! Tests of transactions: written data is read back, valid blocks are never overwritten, and every
//! count is right.

use super::super::bits::{Bits, words_of};
use super::super::block::u32_at;
use super::super::contents::mapping;
use super::super::superblock::CLEAN_SHUTDOWN;
use super::super::transaction::Reached;
use super::*;
use crate::error::Kind;
use crate::prng::Prng;

#[test]
fn a_format_is_what_the_kernel_writes() {
    let v1 = [0x765d_012f, 0x9659_3b1e, 0xc360_e452, 0x2c9f_4f8e, 0xcb20_942a, 0x49d8_085d, 0];
    let v2 =
        [0xdcae_dde9, 0x43c6_aa64, 0xc360_e452, 0xf93b_6b46, 0xcb20_942a, 0x49d8_085d, 0xcb3d_da35];
    for (version, expected) in [(1, v1), (2, v2)] {
        let (ram, disk) = device(2048);
        formatted(&disk, version);
        let image = ram.image();
        let sums = [0, 1, 2, 3, 4, 5, 6].map(|nth| u32_at(&image[nth * BLOCK_BYTES..], 0));
        assert_eq!(sums, expected, "version {version}");
        assert!(image[7 * BLOCK_BYTES..].iter().all(|byte| *byte == 0));
        spotless(&disk);
    }
}

#[test]
fn a_device_that_is_too_small_or_too_large_is_formatted_as_far_as_it_goes() {
    assert_eq!(format(5, 64, 1).unwrap_err().kind(), Kind::NoSpace);
    assert_eq!(format(6, 64, 2).unwrap_err().kind(), Kind::NoSpace);
    assert_eq!(format(100, 65, 2).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(format(100, 64, 3).unwrap_err().kind(), Kind::Invalid);
    for blocks in [7, 16_320, 16_321, 40_000] {
        let (_, disk) = device(blocks);
        let writer = formatted(&disk, 2);
        assert_eq!(writer.space().1, blocks);
        spotless(&disk);
    }
    // Only its superblock is examined: 16 GiB are a lot of memory.
    let Formatted { transaction, writer } = format(5_000_000, 64, 2).unwrap();
    assert_eq!((writer.space().1, transaction.blocks().len()), (4_161_600, 255 + 5));
}

/// The contents of a cache as a test changes them, with marks.
struct Model {
    contents: Contents,
    mappings: Bits,
    dirty: Bits,
}

impl Model {
    fn new() -> Model {
        Model { contents: Contents::empty(0), mappings: Bits::new(0), dirty: Bits::new(0) }
    }

    fn resize(&mut self, slots: u64) {
        self.contents.mappings.resize(slots as usize, 0);
        self.contents.dirty.resize(slots);
        self.mappings.resize(slots.div_ceil(509));
        self.dirty.resize(words_of(slots).div_ceil(509));
    }

    /// Maps a slot to a block that no other slot has, or to none.
    fn put(&mut self, slot: u64, is_used: bool, is_dirty: bool) {
        self.contents.mappings[slot as usize] =
            mapping(is_used.then_some(slot << 10 | slot & 1023));
        self.contents.dirty.put(slot, is_used && is_dirty);
        self.mappings.set(slot / 509);
        self.dirty.set(slot / 64 / 509);
    }

    fn change(&self, mut superblock: Superblock) -> Change<'_> {
        let version = superblock.version();
        superblock.fields.discard_blocks.set(self.contents.discards.len());
        Change {
            superblock,
            mappings: self.contents.next_mappings(version, Some(&self.mappings)),
            dirty: self.contents.next_dirty(version, Some(&self.dirty)),
            hints: self.contents.next_hints(),
            discards: self.contents.next_discards(),
        }
    }

    fn commit(&self, disk: &Arc<dyn Disk>, writer: &mut Writer) {
        let superblock = writer.superblock().clone();
        commit(disk, writer, &self.change(superblock));
    }

    fn unmark(&mut self) {
        self.mappings = Bits::new(self.mappings.len());
        self.dirty = Bits::new(self.dirty.len());
    }
}

#[test]
fn whatever_is_written_is_read_again_and_every_count_is_right() {
    for seed in 0..8 {
        let version = 1 + seed as u32 % 2;
        let mut prng = Prng::new(seed);
        let (_, disk) = device(2500);
        let mut writer = formatted(&disk, version);
        let mut model = Model::new();
        for round in 0..40 {
            if round % 5 == 0 {
                model.resize(
                    [0, 1, 509, 510, 64 * 509, 64 * 509 + 1, 300_000][prng.below(7) as usize],
                );
                model.contents.discards = Bits::new(prng.below(16_384));
                model.contents.hints = None;
            }
            let slots = model.contents.slots();
            for _ in 0..prng.below(400) * slots.min(1) {
                model.put(prng.below(slots), !prng.one_in(3), prng.one_in(2));
            }
            if prng.one_in(4) {
                let hints = (0..slots).map(|slot| (slot % 64) as u32).collect();
                model.contents.hints = Some(hints);
            }
            if !model.contents.discards.is_empty() {
                let at = prng.below(model.contents.discards.len());
                model.contents.discards.set(at);
            }
            let mut superblock = writer.superblock().clone();
            superblock.put_flag(CLEAN_SHUTDOWN, prng.one_in(2));
            commit(&disk, &mut writer, &model.change(superblock.clone()));
            model.unmark();
            let loaded = spotless(&disk);
            assert_eq!(loaded.contents, model.contents, "seed {seed}, round {round}");
            assert_eq!(loaded.superblock.is_clean(), superblock.is_clean());
            assert_eq!(&loaded.superblock, writer.superblock());
            assert_eq!((&loaded.places, &loaded.counts), (&writer.places, &writer.counts));
            if prng.one_in(3) {
                writer = Writer::new(&loaded).unwrap();
            }
        }
    }
}

#[test]
fn one_change_writes_as_little_as_the_kernel_does() {
    for version in [1, 2] {
        let (_, disk) = device(4096);
        let mut writer = formatted(&disk, version);
        let mut model = Model::new();
        model.resize(262_144);
        model.commit(&disk, &mut writer);
        model.unmark();
        model.put(200_000, true, false);
        model.dirty = Bits::new(model.dirty.len());
        let change = model.change(writer.superblock().clone());
        let mut change = Change { dirty: Next::Same, ..change };
        if version == 1 {
            change.dirty = Next::Nothing;
        }
        change.discards = Next::Same;
        let transaction = writer.prepare(&change).unwrap();
        // The array's block, leaf, root, bitmap and index; the superblock is the sixth.
        assert_eq!(transaction.blocks().len(), 5);
        writer.committed(transaction);
        let transaction = writer.prepare(&Change::of_superblock(writer.superblock().clone()));
        assert!(transaction.unwrap().blocks().is_empty(), "only the superblock");
    }
}

#[test]
fn no_block_is_written_that_counts() {
    let mut prng = Prng::new(9);
    let (ram, disk) = device(300);
    let mut writer = formatted(&disk, 2);
    let mut model = Model::new();
    model.resize(20_000);
    for round in 0..200 {
        let before = ram.image();
        let used = writer.counts.used.clone();
        (0..20).for_each(|_| model.put(prng.below(20_000), true, prng.one_in(2)));
        let mut transaction = writer.prepare(&model.change(writer.superblock().clone())).unwrap();
        let mut addresses: Vec<u64> = transaction.blocks().iter().map(|(at, _)| *at).collect();
        assert!(addresses.iter().all(|at| !used.is_set(*at) && *at > 0), "round {round}");
        addresses.dedup();
        assert_eq!(addresses.len(), transaction.blocks().len(), "none twice");
        // A crash before the superblock, after any of these blocks: the last transaction is valid.
        for (at, block) in transaction.blocks().iter().take(prng.below(99) as usize) {
            ram.poke(at * BLOCK_BYTES as u64, block.as_slice());
        }
        spotless(&disk);
        transaction.carry_out(&disk).unwrap();
        writer.committed(transaction);
        spotless(&disk);
        let after = ram.image();
        let unchanged = |at: u64| {
            let range = at as usize * BLOCK_BYTES..(at as usize + 1) * BLOCK_BYTES;
            before[range.clone()] == after[range]
        };
        assert!(used.iter().all(|at| at == 0 || unchanged(at)), "round {round}");
        model.unmark();
    }
}

#[test]
fn a_transaction_that_failed_is_repeated_without_touching_what_may_count() {
    let mut prng = Prng::new(10);
    let (ram, disk) = device(400);
    let mut writer = formatted(&disk, 2);
    let mut model = Model::new();
    model.resize(20_000);
    model.commit(&disk, &mut writer);
    model.unmark();
    for _ in 0..100 {
        (0..5).for_each(|_| model.put(prng.below(20_000), true, false));
        let mut transaction = writer.prepare(&model.change(writer.superblock().clone())).unwrap();
        match prng.below(3) {
            0 => {
                transaction.carry_out(&disk).unwrap();
                writer.committed(transaction);
                model.unmark();
            }
            // The superblock was sent; it is on the device although the server got no result, or it
            // is not.
            1 => {
                for (at, block) in transaction.blocks() {
                    ram.poke(at * BLOCK_BYTES as u64, block.as_slice());
                }
                if prng.one_in(2) {
                    ram.poke(0, transaction.superblock().as_slice());
                }
                writer.abandoned(transaction, Reached::Superblock);
            }
            _ => writer.abandoned(transaction, Reached::Blocks),
        }
        // Whichever it is, all that it leads to is there.
        spotless(&disk);
    }
}

#[test]
fn without_space_nothing_is_written_and_nothing_has_changed() {
    let (ram, disk) = device(16);
    let mut writer = formatted(&disk, 2);
    let mut model = Model::new();
    model.resize(509);
    model.commit(&disk, &mut writer);
    let before = (ram.image(), format!("{writer:?}"));
    model.resize(509 * 20);
    let error = writer.prepare(&model.change(writer.superblock().clone())).unwrap_err();
    assert_eq!(error.kind(), Kind::NoSpace);
    assert_eq!(
        error.to_string(),
        "the metadata device is full: 9 of 16 blocks are in use, and a transaction needs free \
         blocks"
    );
    assert!((ram.image(), format!("{writer:?}")) == before);
    // Fewer slots.
    model.resize(509);
    model.unmark();
    model.put(3, true, true);
    model.commit(&disk, &mut writer);
    assert_eq!(spotless(&disk).contents, model.contents);
}

#[test]
fn what_is_not_known_of_a_superblock_stays() {
    let (ram, disk) = device(64);
    formatted(&disk, 2);
    let mut block = [0; BLOCK_BYTES];
    ram.peek(0, &mut block);
    block[16..32].copy_from_slice(b"an unknown uuid.");
    block[244] = 0x80;
    block[160] = 5;
    block[4090] = 7;
    block::BlockKind::Superblock.seal(&mut block, 0);
    ram.poke(0, &block);
    let mut writer = Writer::new(&spotless(&disk)).unwrap();
    let contents = Contents::empty(600);
    let superblock = writer.superblock().clone();
    commit(&disk, &mut writer, &Change::whole(superblock, &contents));
    let mut after = [0; BLOCK_BYTES];
    ram.peek(0, &mut after);
    let kept = [16..32, 244..248, 96..192, 292..4096];
    assert!(kept.into_iter().all(|range| after[range.clone()] == block[range]));
    assert_eq!(spotless(&disk).contents, contents);
}

#[test]
fn a_million_slots_are_changed_in_a_moment() {
    let (_, disk) = device(20_000);
    let mut writer = formatted(&disk, 2);
    let mut model = Model::new();
    model.resize(1 << 20);
    (0..1 << 20).for_each(|slot| model.put(slot, true, slot % 3 == 0));
    model.contents.hints = Some((0..1 << 20).map(|slot| slot % 64).collect());
    model.commit(&disk, &mut writer);
    model.unmark();
    assert_eq!(spotless(&disk).contents, model.contents);
    model.put(77_777, false, false);
    let change = Change { hints: Next::Same, ..model.change(writer.superblock().clone()) };
    let transaction = writer.prepare(&change).unwrap();
    // Two arrays with a block, and the nodes above them; the discards have none.
    assert!(transaction.blocks().len() <= 10, "{}", transaction.blocks().len());
}
