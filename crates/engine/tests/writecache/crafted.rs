//! Media that no udm wrote: entries of every kind, and what becomes of them.

use std::sync::Arc;

use udm::disk::{Disk, SimDisk};
use udm::error::Status;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;
use udm::writecache::Mode;
use udm::writecache::inspect::inspect;
use udm::writecache::layout::{Entry, Geometry, Superblock};
use udm::writecache::media::Medium;
use udm::writecache::walk::Damage;
use zerocopy::IntoBytes;

use crate::fixture::{Cache, Fixture, mode_of};

const FREE: u64 = u64::MAX;

/// A cache of 1 MiB with commit counter `seq`, whose entry `i` is `entries[i]` and whose data
/// block `i` is filled with `i + 1`; in front of an origin of 0xEE.
fn crafted(table: &str, seq: u64, entries: &[(u64, u64)], origin_bytes: u64) -> Fixture {
    let mode = mode_of(table);
    let mut image = vec![0xFF; 1 << 20];
    let geometry = Geometry::of_size(0, image.len() as u64, 4096).unwrap();
    let mut superblock = Superblock::fresh(&geometry);
    superblock.seq_count.set(seq);
    image[..64].copy_from_slice(superblock.as_bytes());
    for (nth, (sector, seq)) in entries.iter().enumerate() {
        let (nth, entry) = (nth as u64, Entry::new(*sector, *seq));
        let at = geometry.entry_at(nth) as usize;
        image[at..at + 16].copy_from_slice(entry.as_bytes());
        let at = geometry.block_at(nth) as usize;
        image[at..at + 4096].fill(nth as u8 + 1);
    }
    let origin = SimDisk::new(origin_bytes, 512).named("origin");
    origin.poke(0, &vec![0xEE; origin_bytes as usize]);
    Fixture::over(table, Cache::of_image(mode, &image), Arc::new(origin))
}

fn medium(cache: &Cache) -> Medium {
    match cache {
        Cache::Memory(pmem) => Medium::Pmem(pmem.clone()),
        Cache::Disk(disk) => Medium::Disk(disk.clone()),
    }
}

fn in_both_modes(test: impl Fn(&str, Mode)) {
    test("p O C 4096 0", Mode::Pmem);
    test("s O C 4096 0", Mode::Ssd);
}

#[test]
fn the_specifications_example_recovers_as_in_the_kernel() {
    in_both_modes(|table, _| {
        let entries =
            [(8, 5), (8, 7), (8, 6), (16, 9), (16, 8), (24, 100), (32, FREE - 1), (40, 0)];
        let mut fixture = crafted(table, 9, &entries, 1 << 20);
        let report = inspect(&medium(&fixture.cache), 0, Some(1 << 20)).unwrap();
        assert_eq!((report.census.live, report.census.superseded), (3, 2));
        assert_eq!((report.census.uncommitted, report.dirty_bytes), (3, 3 * 4096));
        fixture.open();
        assert_eq!(fixture.status(3), fixture.status(2) - 3);
        for (block, wanted) in [(1, 2), (2, 5), (3, 0xEE), (4, 0xEE), (5, 8)] {
            assert_eq!(fixture.read(block * 4096, 4096), [wanted; 4096], "block {block}");
        }
        // The next counters do not bring back what was never committed.
        for round in 0..120_u64 {
            fixture.write(0, &[round as u8; 4096], true);
        }
        fixture.remove();
        fixture.open();
        assert_eq!(fixture.read(3 * 4096, 8192), [0xEE; 8192]);
        for index in [0, 2, 3, 5, 6] {
            let (sector, seq) = fixture.entry(index);
            assert!(seq == FREE || sector == 0, "entry {index}: {sector} {seq}");
        }
    });
}

/// With plenty of free slots, only this makes a round mark them.
#[test]
fn the_first_commit_does_not_bring_back_what_was_never_committed() {
    in_both_modes(|table, _| {
        let mut entries = vec![(0, FREE); 201];
        entries[200] = (24, 9);
        let mut fixture = crafted(table, 9, &entries, 1 << 20);
        fixture.open();
        fixture.write(0, &[7; 4096], true);
        fixture.power_cut(&mut Prng::new(1));
        fixture.open();
        assert_eq!(fixture.read(0, 4096), [7; 4096]);
        assert_eq!(fixture.read(3 * 4096, 4096), [0xEE; 4096]);
    });
}

#[test]
fn k_entries_that_cannot_be_believed_are_kept_and_reported() {
    in_both_modes(|table, _| {
        let entries = [(8, 1), (9, 1), (4096, 1), (FREE, 1), (16, 1)];
        let mut fixture = crafted(table, 5, &entries, 1 << 20);
        let report = inspect(&medium(&fixture.cache), 0, Some(1 << 20)).unwrap();
        let damage: Vec<Damage> = report.census.places.iter().map(|place| place.damage).collect();
        use Damage::{BeyondOrigin, Misaligned};
        assert_eq!(damage, [Misaligned, BeyondOrigin, BeyondOrigin]);
        fixture.open();
        assert_eq!(fixture.status(3), fixture.status(2) - 5);
        assert_eq!(fixture.fact("quarantined_bytes"), 3 * 4096);
        assert_eq!(fixture.read(4096, 4096), [1; 4096]);
        fixture.write(0, &[7; 4096], true);
        fixture.drain();
        fixture.remove();
        for index in [1, 2, 3] {
            assert_eq!(fixture.entry(index), entries[index as usize], "as it was");
        }
        let origin = fixture.origin.image();
        assert!(origin[4096..8192] == [1; 4096] && origin[8192..12288] == [5; 4096]);
        assert!(origin[12288..] == [0xEE; (1 << 20) - 12288][..]);
        fixture.open();
        assert_eq!(fixture.status(3), fixture.status(2) - 3);
        assert!(fixture.target().facts().iter().any(|fact| fact.name == "damaged_entry"));
    });
}

#[test]
fn twins_with_the_same_data_are_one() {
    in_both_modes(|table, _| {
        let mut fixture = crafted(table, 5, &[(8, 3), (16, 2), (8, 3)], 1 << 20);
        let geometry = Geometry::of_size(0, 1 << 20, 4096).unwrap();
        fixture.cache.poke(geometry.block_at(0), &[3; 4096]);
        fixture.open();
        assert_eq!(fixture.read(4096, 8192), [[3; 4096], [2; 4096]].concat());
        fixture.drain();
        assert_eq!(fixture.origin.image()[4096..8192], [3; 4096]);
        fixture.remove();
        fixture.open();
        assert_eq!(fixture.status(3), fixture.status(2));
    });
}

#[test]
fn twins_that_differ_serve_nobody_until_they_are_written_over() {
    in_both_modes(|table, _| {
        let mut fixture = crafted(table, 5, &[(8, 3), (16, 2), (8, 3)], 1 << 20);
        fixture.open();
        assert_eq!(fixture.try_read(4096, 4096), Err(Status::Corrupt));
        assert_eq!(fixture.read(8192, 4096), [2; 4096]);
        fixture.drain();
        assert_eq!(fixture.origin.image()[4096..8192], [0xEE; 4096], "neither was believed");
        fixture.remove();
        assert_eq!((fixture.entry(0), fixture.entry(2)), ((8, 3), (8, 3)), "as they were");
        fixture.open();
        fixture.write(4096, &[7; 4096], true);
        assert_eq!(fixture.read(4096, 4096), [7; 4096]);
        fixture.tick(SECOND);
        fixture.remove();
        fixture.open();
        assert_eq!(fixture.read(4096, 4096), [7; 4096]);
        fixture.drain();
        fixture.remove();
        fixture.open();
        assert_eq!(fixture.status(3), fixture.status(2));
        assert_eq!(fixture.origin.image()[4096..8192], [7; 4096]);
    });
}

#[test]
fn l_a_block_that_straddles_the_origins_end_is_clipped() {
    in_both_modes(|table, _| {
        let origin_bytes = (1 << 20) + 512;
        let mut fixture = crafted(table, 5, &[(2048, 1), (8, 1)], origin_bytes);
        fixture.open();
        fixture.drain();
        let origin = fixture.origin.image();
        assert_eq!(origin[1 << 20..], [1; 512]);
        assert_eq!(origin[4096..8192], [2; 4096]);
        assert_eq!(fixture.status(1), 0);
    });
}

#[test]
fn superblocks_of_every_wrong_kind_are_refused() {
    in_both_modes(|table, mode| {
        let refused = |at: u64, bytes: &[u8], words: &str| {
            let mut fixture = crafted(table, 5, &[(8, 1)], 1 << 20);
            fixture.cache.poke(at, bytes);
            let error = fixture.try_open(false).unwrap_err().to_string();
            assert!(error.contains(words), "{mode:?}: {error}");
            assert_eq!(fixture.cache.peek(at, bytes.len()), bytes, "the medium is unchanged");
        };
        refused(0, &[1, 0, 0, 0], "Invalid magic in the superblock");
        refused(0, &[0, 0, 0, 0], "Invalid magic in the superblock");
        refused(4, &[2], "Invalid version in the superblock");
        refused(8, &[0, 2], "Block size does not match superblock");
        refused(16, &[0xFF; 8], "Overflow in size calculation");
        refused(16, &[0, 1], "Memory area is too small");
        refused(16, &[0, 0], "Cannot allocate memory");
        refused(24, &[0xFE; 8], "commit counter");
    });
}

#[test]
fn a_grown_device_keeps_its_blocks() {
    let mut fixture = crafted("s O C 4096 0", 5, &[(8, 1)], 1 << 20);
    let mut image = fixture.cache.image();
    image.resize(2 << 20, 0);
    fixture.cache = Cache::of_image(Mode::Ssd, &image);
    fixture.open();
    assert_eq!(fixture.status(2), 254);
    assert_eq!(fixture.target().limits().block_bytes, 4096);
    assert_eq!(fixture.origin.limits().size_bytes, 1 << 20);
}

/// Entries of all kinds, many for most blocks: however many threads share them, the same is found.
#[test]
fn several_threads_find_what_one_finds() {
    const BYTES: u64 = 36 << 20;
    let geometry = Geometry::of_size(0, BYTES, 512).unwrap();
    assert!(geometry.blocks > 64 << 10, "few entries are not shared");
    let mut prng = Prng::new(5);
    let mut image = vec![0; BYTES as usize];
    let mut superblock = Superblock::fresh(&geometry);
    superblock.seq_count.set(40);
    image[..64].copy_from_slice(superblock.as_bytes());
    for nth in 0..geometry.blocks {
        // Duplicates and older versions all over 20 stripes' worth of blocks; some beyond the end.
        let block = prng.below(20) * 2048 + prng.below(if nth % 64 == 0 { 4096 } else { 1900 });
        let seq = match prng.below(8) {
            0 => FREE,
            1 => 40 + prng.below(3),
            _ => prng.below(40),
        };
        let entry = Entry::new(block, seq);
        let at = geometry.entry_at(nth) as usize;
        image[at..at + 16].copy_from_slice(entry.as_bytes());
        let at = geometry.block_at(nth) as usize;
        image[at..at + 512].fill(prng.below(2) as u8 + 1);
    }
    for mode in ["p", "s"] {
        let mut found = Vec::new();
        for threads in [1, 2, 3, 8] {
            let table = format!("{mode} O C 512 2 autocommit_time 3600000");
            let cache = Cache::of_image(mode_of(&table), &image);
            let origin = Arc::new(SimDisk::new(20 << 20, 512).named("origin"));
            let mut fixture = Fixture::over(&table, cache, origin);
            fixture.threads = threads;
            fixture.open();
            let facts: Vec<String> =
                fixture.target().facts().iter().map(|f| format!("{f:?}")).collect();
            let (damaged, facts): (Vec<String>, Vec<String>) =
                facts.into_iter().partition(|fact| fact.contains("damaged_entry"));
            assert_eq!(damaged.len(), 16, "so many are named");
            let mut content = Vec::new();
            for block in 0..(20 << 20) / 512 {
                content.push(fixture.try_read(block * 512, 512).ok());
            }
            assert!(content.iter().any(Option::is_none) && content.iter().any(Option::is_some));
            let status = fixture.target().status();
            found.push((threads, facts, content, status));
        }
        for other in &found[1..] {
            assert_eq!((&found[0].1, &found[0].3), (&other.1, &other.3), "{} threads", other.0);
            assert!(found[0].2 == other.2, "{} threads read something else", other.0);
        }
    }
}
