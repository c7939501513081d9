//! Tests of repairs: damage loses only unreadable data, and never makes a dirty block clean.

use super::super::metadata::block::{Block, BlockKind, put_u64};
use super::super::metadata::superblock::CLEAN_SHUTDOWN;
use super::super::metadata::{BLOCK_BYTES, format::write_whole, load, survey};
use super::*;
use crate::disk::{Disk, RamDisk};
use crate::prng::Prng;
use crate::sync::Arc;

const SLOTS: u64 = 100_000;

/// A cache with every third block dirty.
fn some_contents() -> Contents {
    let mut contents = Contents::empty(SLOTS);
    for slot in (0..SLOTS).filter(|slot| slot % 7 != 0) {
        contents.mappings[slot as usize] = mapping(Some(slot + 5));
        contents.dirty.put(slot, slot % 3 == 0);
    }
    contents.hints = Some((0..SLOTS).map(|slot| (slot % 64) as u32).collect());
    contents.discards = Bits::new(1000);
    contents.discards.set(7);
    contents
}

fn media(version: u32, is_clean: bool) -> (Arc<RamDisk>, Arc<dyn Disk>) {
    let ram = Arc::new(RamDisk::new(4 << 20, 512));
    let disk: Arc<dyn Disk> = ram.clone();
    let mut superblock = Superblock::fresh(version, 64);
    superblock.put_flag(CLEAN_SHUTDOWN, is_clean);
    superblock.fields.discard_sectors.set(1 << 20);
    write_whole(&disk, superblock, &some_contents()).unwrap();
    (ram, disk)
}

/// Changes a block, and seals it.
fn change(ram: &RamDisk, kind: BlockKind, address: u64, what: impl FnOnce(&mut Block)) {
    let mut block = [0; BLOCK_BYTES];
    ram.peek(address * BLOCK_BYTES as u64, &mut block);
    what(&mut block);
    kind.seal(&mut block, address);
    ram.poke(address * BLOCK_BYTES as u64, &block);
}

fn ruin(ram: &RamDisk, address: u64) {
    ram.poke(address * BLOCK_BYTES as u64 + 2000, b"ruined");
}

#[test]
fn what_is_not_damaged_is_kept_as_it_is() {
    for version in [1, 2] {
        let (_, disk) = media(version, true);
        let kept = repair(&disk).unwrap();
        assert_eq!(kept.contents, some_contents());
        assert_eq!((&kept.found, &kept.notes, &kept.lost), (&vec![], &vec![], &vec![]));
        // After an unclean end, the kernel takes all for dirty.
        let (_, disk) = media(version, false);
        let kept = repair(&disk).unwrap();
        assert_eq!(kept.contents.dirty.ones(), some_contents().mapped());
        assert!(kept.contents.hints.is_none() && kept.contents.discards.is_empty());
        assert!(kept.lost.is_empty());
    }
}

#[test]
fn a_ruined_block_costs_its_own_mappings() {
    for version in [1, 2] {
        let (ram, disk) = media(version, true);
        let block = load(&disk).unwrap().places.mappings.blocks[3];
        ruin(&ram, block);
        let kept = repair(&disk).unwrap();
        let lost = "slots 1527 to 2035: their blocks are unknown, and may have been dirty";
        assert_eq!(kept.lost, [lost]);
        let expected = some_contents();
        for slot in 0..SLOTS {
            let is_lost = (1527..2036).contains(&slot);
            let wanted = expected.block(slot).filter(|_| !is_lost);
            assert_eq!(kept.contents.block(slot), wanted);
            assert_eq!(kept.contents.dirty.is_set(slot), expected.dirty.is_set(slot) && !is_lost);
        }
    }
}

#[test]
fn ruined_dirty_bits_hints_and_discards_cost_no_data() {
    let (ram, disk) = media(2, true);
    let places = load(&disk).unwrap().places;
    ruin(&ram, places.dirty.unwrap().blocks[1]);
    ruin(&ram, places.hints.unwrap().blocks[9]);
    ruin(&ram, places.discards.root().unwrap());
    let kept = repair(&disk).unwrap();
    assert!(kept.lost.is_empty(), "{:?}", kept.lost);
    let (expected, first) = (some_contents(), 64 * 509);
    assert_eq!(kept.contents.mappings, expected.mappings);
    for slot in 0..SLOTS {
        let is_unknown = (first..2 * first).contains(&slot) && expected.block(slot).is_some();
        let wanted = expected.dirty.is_set(slot) || is_unknown;
        assert_eq!(kept.contents.dirty.is_set(slot), wanted, "{slot}");
    }
    assert_eq!(kept.notes.len(), 3, "{:?}", kept.notes);
}

#[test]
fn a_superblock_with_a_wrong_checksum_is_used_and_not_believed() {
    let (ram, disk) = media(2, true);
    ram.poke(260, &[9]);
    let kept = repair(&disk).unwrap();
    assert_eq!(kept.contents.mappings, some_contents().mappings);
    assert_eq!(kept.contents.dirty.ones(), some_contents().mapped());
    assert!(kept.found[0].contains("not a valid superblock: its checksum is"), "{:?}", kept.found);
    // No root leads to any data.
    ram.poke(0, &[0; 512]);
    let error = repair(&disk).unwrap_err().to_string();
    assert!(error.contains("block 0: it is blank"), "{error}");
    ram.poke(0, &[7; 512]);
    let error = repair(&disk).unwrap_err().to_string();
    assert!(error.starts_with("the mappings cannot be found: metadata block 0: "), "{error}");
}

#[test]
fn unknown_flags_are_kept_and_unknown_features_are_refused() {
    let with = |at: usize, byte: u8| {
        let (ram, disk) = media(2, true);
        change(&ram, BlockKind::Superblock, 0, |block| block[at] |= byte);
        repair(&disk)
    };
    let other = || -> Arc<dyn Disk> { Arc::new(RamDisk::new(4 << 20, 512)) };
    // The flags, and the features that may be unknown.
    for (at, byte) in [(4, 0x80), (7, 0x40), (244, 1)] {
        let (kept, other) = (with(at, byte).unwrap(), other());
        write_whole(&other, kept.superblock, &kept.contents).unwrap();
        let superblock = load(&other).unwrap().superblock;
        assert_eq!(superblock.build()[at] & byte, byte, "{at}");
        assert!(superblock.beyond_xml().is_some());
    }
    // Flags that a writer must know, and flags that a reader must know.
    let (kept, other) = (with(248, 1).unwrap(), other());
    let error = write_whole(&other, kept.superblock, &kept.contents).unwrap_err().to_string();
    assert!(error.contains("only allow reading"), "{error}");
    assert!(with(252, 1).unwrap_err().to_string().contains("unknown features"));
}

#[test]
fn a_wrong_number_of_slots_costs_nothing() {
    for slots in [0, 1, SLOTS - 1, SLOTS + 1, SLOTS + 600] {
        let (ram, disk) = media(2, true);
        change(&ram, BlockKind::Superblock, 0, |block| {
            block[240..244].copy_from_slice(&(slots as u32).to_le_bytes());
        });
        let kept = repair(&disk).unwrap();
        let all = some_contents();
        assert_eq!(kept.contents.mappings[..SLOTS as usize], all.mappings, "{slots} slots");
        assert!((0..SLOTS).all(|slot| kept.contents.dirty.is_set(slot) == all.dirty.is_set(slot)));
    }
}

#[test]
fn discards_of_a_shorter_origin_are_dropped() {
    let (ram, disk) = media(2, true);
    change(&ram, BlockKind::Superblock, 0, |block| put_u64(block, 216, 64));
    let kept = repair(&disk).unwrap();
    assert_eq!(kept.notes, ["the discards are dropped"]);
    assert!(kept.contents.discards.is_empty() && kept.superblock.fields.discard_sectors.get() == 0);
    assert_eq!(kept.contents.mappings, some_contents().mappings);
}

#[test]
fn of_two_slots_with_the_same_block_the_dirty_one_stays() {
    let twice = |one: u64, other: u64| {
        let (ram, disk) = media(2, true);
        let block = load(&disk).unwrap().places.mappings.blocks[0];
        change(&ram, BlockKind::Array, block, |bytes| {
            put_u64(bytes, 24 + 8 * other as usize, mapping(Some(one + 5)));
        });
        let kept = repair(&disk).unwrap();
        (kept.contents.block(one), kept.contents.block(other), kept.lost, kept.notes.len())
    };
    // 3, 6 and 9 are dirty, 1, 2 and 4 are clean.
    assert_eq!(twice(3, 1), (Some(8), None, vec![], 1));
    assert_eq!(twice(1, 3), (None, Some(6), vec![], 1));
    assert_eq!(twice(1, 2), (None, None, vec![], 1));
    let lost = "slots 6: they held block 8 of the origin, dirty, as slot 3 does; it is unknown \
                which of them is the newest";
    assert_eq!(twice(3, 6), (Some(8), None, vec![lost.to_owned()], 0));
}

#[test]
fn whatever_is_ruined_the_result_is_without_a_finding_and_loses_no_dirty_bit() {
    let mut prng = Prng::new(4);
    let expected = some_contents();
    for round in 0..60 {
        let (ram, disk) = media(1 + round % 2, true);
        let used: Vec<u64> = load(&disk).unwrap().counts.used.iter().skip(1).collect();
        (0..1 + prng.below(4))
            .for_each(|_| ruin(&ram, used[prng.below(used.len() as u64) as usize]));
        let Ok(kept) = repair(&disk) else { continue };
        let lines = kept.lost.len();
        for slot in expected.dirty.iter() {
            let is_kept = kept.contents.dirty.is_set(slot)
                && kept.contents.block(slot) == expected.block(slot);
            assert!(is_kept || (kept.contents.block(slot).is_none() && lines > 0), "{slot}");
        }
        let other: Arc<dyn Disk> = Arc::new(RamDisk::new(4 << 20, 512));
        write_whole(&other, kept.superblock, &kept.contents).unwrap();
        let found = survey(&other, survey::superblock(&other).unwrap());
        assert_eq!(found.findings().count(), 0, "{:?}", found.findings().next());
        assert_eq!(found.loaded().unwrap().contents, kept.contents);
    }
}
