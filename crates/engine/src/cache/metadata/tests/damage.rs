//! Defects of metadata are reported with their block, and are refused or tolerated as they deserve.

use super::super::block::{BlockKind, put_u32, put_u64, u64_at};
use super::super::contents::mapping;
use super::*;

/// A cache of 1200 slots with some blocks, in version `version`.
fn some_cache(version: u32) -> (Arc<RamDisk>, Arc<dyn Disk>, Writer) {
    let (ram, disk) = device(128);
    let mut writer = formatted(&disk, version);
    let mut contents = Contents::empty(1200);
    for (slot, block) in [(0, 5), (1, 4096), (600, 7), (1199, 1_000_000)] {
        contents.mappings[slot] = mapping(Some(block));
    }
    [1, 600].iter().for_each(|slot| contents.dirty.set(*slot));
    contents.hints = Some(vec![1; 1200]);
    let superblock = writer.superblock().clone();
    commit(&disk, &mut writer, &Change::whole(superblock, &contents));
    (ram, disk, writer)
}

/// Changes the block at `address`, and seals it.
fn change(ram: &RamDisk, kind: BlockKind, address: u64, what: impl FnOnce(&mut Block)) {
    let mut block = [0; BLOCK_BYTES];
    ram.peek(address * BLOCK_BYTES as u64, &mut block);
    what(&mut block);
    kind.seal(&mut block, address);
    ram.poke(address * BLOCK_BYTES as u64, &block);
}

/// Damage, and remarks.
fn said(disk: &Arc<dyn Disk>) -> (Vec<String>, Vec<String>) {
    let found = survey(disk, survey::superblock(disk).unwrap());
    let lines =
        |findings: &reading::Findings| findings.list.iter().map(|f| f.to_string()).collect();
    (lines(&found.damage), lines(&found.remarks))
}

#[test]
fn what_no_one_can_go_on_with_is_damage() {
    type Spoil = fn(&mut Block);
    let cases: [(u32, Spoil, &str); 5] = [
        (1, |b| put_u64(b, 24, 5 << 16 | 5), "unknown flags in 1 slots, the first is 0"),
        (2, |b| put_u64(b, 24, 5 << 16 | 3), "unknown flags in 1 slots, the first is 0"),
        (2, |b| put_u64(b, 24, 4096 << 16 | 1), "slots 0 and 1 both hold block 4096 of the origin"),
        (2, |b| put_u32(b, 8, 508), "an array block with 508 elements, expected 509"),
        (2, |b| put_u32(b, 12, 4), "an array block with elements of 4 bytes, expected 8"),
    ];
    for (version, spoil, expected) in cases {
        let (ram, disk, writer) = some_cache(version);
        let address = writer.places.mappings.blocks[0];
        change(&ram, BlockKind::Array, address, spoil);
        let (damage, _) = said(&disk);
        assert_eq!(damage, [format!("metadata block {address}: {expected}")]);
        assert!(load(&disk).unwrap_err().to_string().contains(expected));
    }
}

#[test]
fn a_length_that_is_not_the_arrays_is_damage() {
    for slots in [0, 1, 1199, 1201, 2000, u32::MAX] {
        let (ram, disk, _) = some_cache(2);
        change(&ram, BlockKind::Superblock, 0, |block| put_u32(block, 240, slots));
        assert!(!said(&disk).0.is_empty(), "{slots} slots");
    }
    for blocks in [1, 1 << 14, 1 << 40, u64::MAX] {
        let (ram, disk, _) = some_cache(2);
        change(&ram, BlockKind::Superblock, 0, |block| put_u64(block, 224, blocks));
        assert!(!said(&disk).0.is_empty(), "{blocks} discard blocks");
    }
}

#[test]
fn a_block_in_use_that_counts_as_free_is_damage_and_a_leak_is_not() {
    let (ram, disk, writer) = some_cache(2);
    let bitmap = writer.counts.entries[0].address;
    let leaf = writer.places.mappings.levels[0][0].address;
    change(&ram, BlockKind::Bitmap, bitmap, |block| block[16 + leaf as usize / 4] = 0xFF);
    change(&ram, BlockKind::Bitmap, bitmap, |block| block[16 + 25] = 2);
    change(&ram, BlockKind::Bitmap, bitmap, |block| block[16 + leaf as usize / 4] = 0);
    let (damage, remarks) = said(&disk);
    let wrong = format!("metadata block {leaf}: it is in use, but free in the space map");
    assert!(damage.contains(&wrong), "{damage:?}");
    let leak = "metadata block 100: it is not in use, but the space map counts it";
    assert!(remarks.contains(&leak.to_owned()), "{remarks:?}");
}

#[test]
fn counts_that_no_cache_has_can_be_read_and_not_written() {
    let (ram, disk, writer) = some_cache(1);
    let bitmap = writer.counts.entries[0].address;
    change(&ram, BlockKind::Bitmap, bitmap, |block| block[16] |= 3);
    let (damage, remarks) = said(&disk);
    assert!(damage.is_empty(), "{damage:?}");
    let count = "metadata block 0: it is in use once at most, but the space map counts 3 times";
    assert_eq!(remarks, [count]);
    let error = Writer::new(&load(&disk).unwrap()).unwrap_err().to_string();
    assert_eq!(error, "metadata block 0: the space map counts 3 references to it");
}

#[test]
fn totals_that_lie_are_remarks() {
    let (ram, disk, writer) = some_cache(2);
    let index = writer.counts.index;
    change(&ram, BlockKind::Superblock, 0, |block| put_u64(block, 72, 99));
    change(&ram, BlockKind::Index, index, |block| {
        put_u32(block, 24, 9);
        put_u32(block, 28, 128);
    });
    let (damage, remarks) = said(&disk);
    assert!(damage.is_empty());
    let used = writer.space().0;
    let free = (0..).find(|at| !writer.counts.used.is_set(*at)).unwrap();
    assert_eq!(
        remarks,
        [
            format!("metadata block 0: its count of used blocks is 99; the space map has {used}"),
            format!(
                "metadata block {index}: its count of free blocks of bitmap 0 is 9, not {}",
                128 - used
            ),
            format!(
                "metadata block {index}: it says that bitmap 0 has no free block before its 128., \
             but block {free} is free"
            ),
        ]
    );
    // The next transaction corrects them.
    let mut writer = Writer::new(&load(&disk).unwrap()).unwrap();
    let contents = load(&disk).unwrap().contents;
    let superblock = writer.superblock().clone();
    commit(&disk, &mut writer, &Change::whole(superblock, &contents));
    spotless(&disk);
}

#[test]
fn dirty_bits_of_slots_that_are_not_in_use_are_not_believed() {
    let (ram, disk, writer) = some_cache(2);
    let address = writer.places.dirty.as_ref().unwrap().blocks[0];
    change(&ram, BlockKind::Array, address, |block| {
        for word in 0..19 {
            put_u64(block, 24 + 8 * word, u64::MAX);
        }
    });
    let (damage, remarks) = said(&disk);
    assert!(damage.is_empty());
    let what = "1212 slots are dirty and not in use, the first is 2";
    assert_eq!(remarks, [format!("metadata block {address}: {what}")]);
    assert_eq!(load(&disk).unwrap().contents.dirty.iter().collect::<Vec<_>>(), [0, 1, 600, 1199]);
}

#[test]
fn a_slot_that_is_not_in_use_and_not_zero_is_not_in_use() {
    let (ram, disk, writer) = some_cache(2);
    let address = writer.places.mappings.blocks[1];
    change(&ram, BlockKind::Array, address, |block| put_u64(block, 24 + 80, 77 << 16));
    let (damage, remarks) = said(&disk);
    let what = "1 slots are not in use, but not zero either, the first is 519";
    assert_eq!((damage.len(), remarks), (0, vec![format!("metadata block {address}: {what}")]));
    assert_eq!(load(&disk).unwrap().contents.mappings[519], 0);
}

#[test]
fn hints_of_another_length_are_taken_as_far_as_they_go() {
    let (_, disk, mut writer) = some_cache(2);
    let mut contents = load(&disk).unwrap().contents;
    contents.mappings.resize(1300, 0);
    contents.dirty.resize(1300);
    let superblock = writer.superblock().clone();
    let whole = Change::whole(superblock, &contents);
    commit(&disk, &mut writer, &Change { hints: Next::Same, ..whole });
    let hints = load(&disk).unwrap().contents.hints.unwrap();
    assert_eq!((hints.len(), hints[1199], hints[1200]), (1300, 1, 0));
}

#[test]
fn a_superblock_that_is_not_understood_is_refused_in_the_kernels_order() {
    let (ram, disk) = device(16);
    let text = |disk: &Arc<dyn Disk>| survey::superblock(disk).unwrap_err().to_string();
    assert!(text(&disk).contains("block 0: it is blank"));
    formatted(&disk, 2);
    type Spoil = fn(&mut Block);
    let cases: [(Spoil, &str); 5] = [
        (|b| put_u32(b, 252, 4), "unknown features (0x4)"),
        (|b| put_u32(b, 232, 0), "the cache's block size is 0"),
        (|b| put_u32(b, 236, 16), "metadata blocks of 16 sectors, expected 8"),
        (|b| put_u32(b, 40, 3), "unknown version 3 of the metadata"),
        (|b| b[32] = 4, "not cache metadata: magic 0x18c404, expected 0x18c403"),
    ];
    for (spoil, expected) in cases {
        change(&ram, BlockKind::Superblock, 0, spoil);
        assert!(text(&disk).contains(expected), "{}", text(&disk));
    }
    formatted(&disk, 2);
    ram.poke(1000, &[1]);
    assert!(text(&disk).contains("not a valid superblock: its checksum is 0x"), "{}", text(&disk));
    formatted(&disk, 2);
    change(&ram, BlockKind::Superblock, 0, |block| put_u32(block, 248, 1));
    let error = Writer::new(&load(&disk).unwrap()).unwrap_err().to_string();
    assert!(error.contains("features that only allow reading (0x1)"), "{error}");
}

#[test]
fn a_device_that_was_cut_short_is_read_as_far_as_it_is_there() {
    let (ram, _, writer) = some_cache(2);
    let last = writer.counts.used.iter().last().unwrap();
    let short = ram.image()[..(last as usize + 1) * BLOCK_BYTES].to_vec();
    let found = survey(&short, survey::superblock(&short).unwrap());
    assert!(found.damage.is_empty());
    let what =
        format!("metadata block 0: a space map of 128 blocks, but the device has {}", last + 1);
    assert_eq!(found.remarks.list[0].to_string(), what);
    let writer = Writer::new(&found.loaded().unwrap()).unwrap();
    assert_eq!(writer.space().1, last + 1, "no block is written beyond the end");
    let shorter = short[..short.len() - BLOCK_BYTES].to_vec();
    assert!(load(&shorter).is_err());
}

#[test]
fn every_block_says_which_one_it_is() {
    let (ram, disk, writer) = some_cache(2);
    for (at, own) in writer.counts.used.iter().zip(std::iter::repeat([8, 16])) {
        let mut block = [0; BLOCK_BYTES];
        ram.peek(at * BLOCK_BYTES as u64, &mut block);
        assert!(own.iter().any(|place| u64_at(&block, *place) == at), "block {at}");
        // Any bit that is not right is noticed, wherever it is.
        ram.poke(at * BLOCK_BYTES as u64 + 4095, &[block[4095] ^ 8]);
        assert!(load(&disk).is_err(), "block {at}");
        ram.poke(at * BLOCK_BYTES as u64, &block);
    }
    spotless(&disk);
}
