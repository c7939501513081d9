//! Tests of layouts: the specification's numbers, and labels that no crash makes invalid.

use std::collections::HashMap;

use super::*;
use crate::prng::Prng;

fn of(raw: u64, block_bytes: u32) -> (u64, u64) {
    let geometry = Geometry::of_size(0, raw, block_bytes).unwrap();
    (geometry.blocks, geometry.data_at)
}

#[test]
fn geometry_is_the_specifications() {
    assert_eq!(of(64 << 20, 4096), (16_320, 262_144));
    assert_eq!(of(64 << 20, 512), (127_100, 2_033_664));
    assert_eq!(of(64 << 20, 1024), (64_527, 1_033_216));
    assert_eq!(of(64 << 20, 2048), (32_513, 522_240));
    assert_eq!(of((64 << 20) - 4096, 4096), (16_319, 262_144));
    assert_eq!(of(1 << 30, 4096), (261_123, 4_182_016));
    assert_eq!(of(1 << 40, 4096), (267_390_960, 4_278_255_616));
    assert_eq!(of(8192, 4096), (1, 4096));
    assert_eq!(Geometry::of_size(0, 8191, 4096), Err(GeometryError::TooSmall));
    assert_eq!(Geometry::of_size(0, 1 << 62, 512), Err(GeometryError::TooLarge));
}

#[test]
fn random_sizes_are_filled_and_not_overfilled() {
    let mut prng = Prng::new(1);
    for _ in 0..2000 {
        let block_bytes = 512 << prng.below(8);
        let raw = 512 * prng.below(200_000);
        let fits = |n: u64| {
            let block = u64::from(block_bytes);
            (64 + 16 * n).div_ceil(block) * block + n * block <= raw
        };
        match Geometry::of_size(0, raw, block_bytes) {
            Ok(geometry) => {
                assert!(fits(geometry.blocks), "{raw} {block_bytes}");
                assert!(!fits(geometry.blocks + 1), "{raw} {block_bytes}");
            }
            Err(_) => assert!(!fits(1), "{raw} {block_bytes}"),
        }
    }
}

#[test]
fn the_superblock_is_checked_in_the_kernels_order() {
    let fresh = Superblock::fresh(&Geometry::of_size(0, 8192, 4096).unwrap());
    let check = |superblock: &Superblock, raw| {
        Geometry::of_superblock(superblock, 512, raw, Some(4096)).map_err(|e| e.to_string())
    };
    assert_eq!(check(&fresh, 8192).unwrap().blocks, 1);
    let refused = |change: fn(&mut Superblock), words: &str| {
        let mut superblock = fresh;
        change(&mut superblock);
        let error = check(&superblock, 8192).unwrap_err();
        assert!(error.starts_with(words), "{error}");
    };
    refused(|s| s.magic.set(0), "Invalid magic in the superblock: 0x00000000 at byte 512");
    refused(|s| (s.magic.set(1), s.version.set(2)).0, "Invalid magic in the superblock");
    refused(|s| s.version.set(2), "Invalid version in the superblock: 2 at byte 516");
    refused(|s| s.block_bytes.set(512), "Block size does not match superblock: 512");
    refused(|s| s.blocks.set(1 << 61), "Overflow in size calculation");
    refused(|s| s.blocks.set(2), "Memory area is too small: 2 blocks at byte 528");
    refused(|s| s.blocks.set(0), "Cannot allocate memory");
    // A grown device keeps its old number of blocks.
    assert_eq!(check(&fresh, 1 << 30).unwrap().blocks, 1);
}

#[test]
fn entries_are_found_in_their_sectors() {
    let geometry = Geometry::of_size(0, 1 << 20, 512).unwrap();
    assert_eq!(geometry.entries_in(0), 0..28);
    assert_eq!(geometry.entries_in(1), 28..60);
    for index in 0..geometry.blocks {
        assert!(geometry.entries_in(geometry.sector_of(index)).contains(&index));
    }
    let last = geometry.sector_of(geometry.blocks - 1);
    assert_eq!(geometry.entries_in(last).end, geometry.blocks);
}

#[test]
fn entries_say_what_the_specification_says() {
    let geometry = Geometry::of_size(0, 1 << 20, 4096).unwrap();
    let state = |sector, seq| geometry.state_of(&Entry::new(sector, seq), 9, Some(1 << 20));
    assert_eq!(state(8, 8), EntryState::Live { block: 1 });
    assert_eq!(state(8, 9), EntryState::Uncommitted);
    assert_eq!(state(8, FREE - 1), EntryState::Uncommitted);
    assert_eq!(state(8, FREE), EntryState::Free);
    assert_eq!(state(9, 8), EntryState::Misaligned);
    assert_eq!(state(2048, 8), EntryState::BeyondOrigin);
    assert_eq!(state(FREE, 8), EntryState::BeyondOrigin);
}

fn is_bound(label: Label, identity: &str, bytes: u64) -> bool {
    label.compare(&identity.into(), bytes) == Match::Exact
}

/// Two halves that are alike together would be worth only one.
#[test]
fn a_label_knows_its_origin_by_64_bits() {
    let mut prng = Prng::new(3);
    let mut halves = HashMap::new();
    let mut alike = 0;
    for _ in 0..1 << 18 {
        let identity = format!("file {:016x}", prng.next_u64());
        let hash = Label::new(&identity, 1 << 20, 5).origin.get();
        if let Some(other) = halves.insert(hash as u32, hash) {
            assert_ne!(hash, other, "{identity}");
            alike += 1;
        }
    }
    assert!(alike > 0);
}

#[test]
fn a_label_is_damaged_or_absent_or_valid() {
    let label = Label::new("file 7", 1 << 20, 5).served(1, "/run/udm");
    assert!(!label.is_damaged() && !Label::new_zeroed().is_damaged());
    // The checked bytes, but bits 40 to 63 of the sectors.
    for at in 0..21 {
        let mut bytes = label.as_bytes().to_vec();
        bytes[at] ^= 1;
        assert!(Label::read_from_bytes(&bytes).unwrap().is_damaged(), "byte {at}");
    }
    // A format of ours, and a first label that a crash cut off, before its first eight bytes.
    for first in [FORMAT_MARK, [0; 8]] {
        let mut bytes = label.as_bytes().to_vec();
        bytes[..Label::ORIGIN_AT].copy_from_slice(&first);
        let label = Label::read_from_bytes(&bytes).unwrap();
        assert!(!label.is_valid() && !label.is_damaged());
    }
}

#[test]
fn a_label_binds() {
    let label = Label::new("file 7", 1 << 20, 5);
    assert!(label.is_valid() && !Label::new_zeroed().is_valid());
    assert!(is_bound(label, "file 7", 1 << 20) && is_bound(label, "file 7", 2 << 20));
    assert!(!is_bound(label, "file 8", 1 << 20) && !is_bound(label, "file 7", 1 << 19));
    let mut next = label;
    next.attach.set(6);
    assert!(next.is_valid(), "an attach changes no checked field");
    let served = label.served(0x123_4567, "/run/udm");
    assert!(served.is_valid() && served.is_served() && !served.at_rest().is_served());
    assert!(served.is_of_boot(0x123_4567) && !served.is_of_boot(0x123_4568));
    assert!(served.is_of_place("/run/udm") && !served.is_of_place("/run/udm2"));
    assert_eq!((served.attach_id(), served.origin_sectors()), (5, 2048));
    assert!(is_bound(served, "file 7", 1 << 20));
    let mut between = served.at_rest();
    between.check = served.check;
    assert!(between.is_valid(), "torn between the two words");
    let mut torn = label;
    torn.origin_sectors.set(6);
    assert!(!torn.is_valid() && torn.is_damaged());
    let stamp = Stamp::from_bits(u64::MAX).unwrap();
    let stamped = served.stamped(stamp, 77);
    assert!(stamped.is_valid() && !stamped.is_served() && stamped.has_stamp());
    assert_eq!((stamped.stamp(77), stamped.stamp(78)), (Some(stamp), None));
    assert!(is_bound(stamped, "file 7", 1 << 20) && stamped.at_rest().stamp(77).is_none());
    let mut between = stamped.at_rest();
    between.check = stamped.check;
    assert!(between.is_valid() && between.stamp(77).is_none(), "torn between the two words");
}
