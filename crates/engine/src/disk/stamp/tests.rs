//! Tests of stamps: a change by a mount or a restore is noticed, and an unchanged origin is not
//! refused.

use super::*;
use crate::disk::{DiskLimits, FileDisk, FileOptions, Match, RamDisk, Recorded, Ring, Same};
use crate::sync::{Mutex, lock};

const BYTES: u64 = 256 * MIB;

fn ram() -> (Arc<RamDisk>, Arc<dyn Disk>) {
    let ram = Arc::new(RamDisk::new(BYTES, 512).with_evidence());
    (ram.clone(), ram)
}

fn found(disk: &Arc<dyn Disk>, noted: Stamp) -> Same {
    ask(disk, Some(noted), BYTES, Match::Exact)
}

fn ask(disk: &Arc<dyn Disk>, stamp: Option<Stamp>, bytes: u64, identity: Match) -> Same {
    Same::of(disk, &Recorded { identity, stamp, bytes })
}

#[test]
fn a_later_change_gets_a_later_time() {
    let second = 1_000_000_000;
    let (fine, coarse) = (5 * second + 3, 5 * second);
    let ms = Duration::from_millis;
    assert_eq!(clock_wait(fine, fine, fine), ms(20));
    assert_eq!(clock_wait(fine, fine, fine + 15_000_000), ms(5));
    assert_eq!(clock_wait(fine, coarse, fine + 20_000_000), ms(0));
    assert_eq!(clock_wait(fine, fine, fine - 10 * second), ms(20), "a server's clock is ahead");
    assert_eq!(clock_wait(coarse, 4 * second, coarse + second / 2), ms(1500));
    assert_eq!(clock_wait(coarse, coarse, coarse + 2 * second), ms(0));
}

#[test]
fn places_that_a_mount_changes_are_seen_in_content() {
    let superblocks = [0, 1024, 64 << 10, 512, BYTES - 512, BYTES - (64 << 10), 2 * MIB, 4 * MIB];
    for at in superblocks {
        let (ram, disk) = ram();
        let noted = Stamp::at_end(&disk, BYTES).unwrap();
        assert_eq!(found(&disk, noted), Same::Yes);
        ram.poke(at, &[1]);
        assert!(matches!(found(&disk, noted), Same::Changed(_)), "byte {at}");
        ram.poke(at, &[0]);
        assert_eq!(found(&disk, noted), Same::Yes);
    }
    // A restored image differs nearly everywhere.
    let (ram, disk) = ram();
    let noted = Stamp::at_end(&disk, BYTES).unwrap();
    (9..250).for_each(|nth| ram.poke(nth * MIB, &vec![7; MIB as usize]));
    assert_eq!(found(&disk, noted), Same::Changed("samples of its content have changed"));
}

#[test]
fn the_start_of_each_partition_is_seen() {
    /// Bytes at their places.
    type Pokes<'a> = &'a [(usize, &'a [u8])];
    let tables: [(Pokes<'_>, u64); 2] = [
        // A GPT: entries at sector 2, 128 bytes each, the second one at sector 262,145.
        (
            &[
                (512, b"EFI PART"),
                (512 + 72, &[2]),
                (512 + 84, &[128]),
                (1024 + 32, &[0, 8]),
                (1024 + 128 + 32, &[1, 0, 4]),
            ],
            0x40001 * 512 + 1024,
        ),
        // A DOS table: the first partition at sector 262,144.
        (&[(510, &[0x55, 0xAA]), (446 + 8, &[0, 0, 4])], 0x40000 * 512 + (64 << 10)),
    ];
    for (table, superblock) in tables {
        let (ram, disk) = ram();
        table.iter().for_each(|(at, bytes)| ram.poke(*at as u64, bytes));
        let noted = Stamp::at_end(&disk, BYTES).unwrap();
        ram.poke(superblock, &[1]);
        assert!(matches!(found(&disk, noted), Same::Changed(_)), "byte {superblock}");
    }
    // Hostile tables name places that no disk has.
    let (ram, disk) = ram();
    ram.poke(512, b"EFI PART");
    ram.poke(512 + 72, &[0xFF; 64]);
    ram.poke(510, &[0x55, 0xAA]);
    assert!(Stamp::at_end(&disk, BYTES).is_some());
    ram.poke(512 + 72, &[2, 0, 0, 0, 0, 0, 0, 0]);
    ram.poke(512 + 84, &[128, 0, 0, 0]);
    ram.poke(1024, &[0xFF; 4096]);
    assert!(Stamp::at_end(&disk, BYTES).is_some());
}

#[test]
fn a_device_that_has_grown_is_the_same_where_it_was() {
    let (ram, disk) = ram();
    let noted = Stamp::at_end(&disk, BYTES / 2).unwrap();
    ram.poke(BYTES / 2, &[1]);
    assert_eq!(ask(&disk, Some(noted), BYTES / 2, Match::Exact), Same::Yes);
    let unknown = ask(&disk, None, BYTES / 2, Match::Exact);
    assert_eq!((unknown, Stamp::from_bits(0)), (Same::CannotTell, None));
    // A disk without evidence gets no stamp.
    let silent: Arc<dyn Disk> = Arc::new(RamDisk::new(BYTES, 512));
    assert_eq!(Stamp::at_end(&silent, BYTES), None);
}

/// A file that is known by its place only may have the mount's times.
#[test]
fn times_within_a_mount_count_while_the_mount_is_the_same() {
    let stamp = |areas, mount, times| Stamp::new(IS_THERE | IS_OF_MOUNT, [areas, mount, times]);
    let noted = stamp(1, 2, 3);
    assert_eq!(noted.difference(noted, false), None);
    let why = noted.difference(stamp(1, 2, 4), false);
    assert_eq!(why, Some("it was modified: its times differ"));
    assert_eq!(noted.difference(stamp(1, 5, 4), false), None, "after another mount");
    assert_eq!(noted.difference(stamp(1, 2, 4), true), None, "of a copy");
    assert_eq!(stamp(1, 0, 3).difference(stamp(1, 0, 4), false), None, "an unknown mount");
    for (mount, times) in [(2, 3), (5, 4)] {
        let why = noted.difference(stamp(7, mount, times), false);
        assert_eq!(why, Some("its content has changed"));
    }
}

/// A disk in memory that offers this evidence.
#[derive(Debug)]
struct Offering(RamDisk, Mutex<Evidence>);

impl Disk for Offering {
    fn limits(&self) -> &DiskLimits {
        self.0.limits()
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        self.0.start(io, ring);
    }

    fn evidence(&self, _is_end: bool) -> Evidence {
        *lock(&self.1)
    }
}

const LENGTH: u64 = 8 * MIB;
const FILE: Evidence = Evidence::File { bytes: LENGTH, mtime: 5, ctime: 6 };
const MOUNTED: Evidence = Evidence::Mounted { mount: Some(3), bytes: LENGTH, mtime: 5, ctime: 6 };
const LATER: Evidence = Evidence::Mounted { mount: Some(4), bytes: LENGTH, mtime: 7, ctime: 8 };
const LONGER: Evidence = Evidence::Mounted { mount: Some(3), bytes: 9 * MIB, mtime: 5, ctime: 6 };

/// The answer about a disk that offered `then`, and now offers `now`.
fn answer(then: Evidence, now: Evidence, identity: Match, is_written: bool) -> Same {
    let offering = Arc::new(Offering(RamDisk::new(LENGTH, 512), Mutex::new(then)));
    let disk: Arc<dyn Disk> = offering.clone();
    let noted = Stamp::at_end(&disk, LENGTH);
    assert_eq!(noted.is_some(), then != Evidence::Nothing);
    *lock(&offering.1) = now;
    if is_written {
        offering.0.poke(0, &[1]);
    }
    ask(&disk, noted, LENGTH, identity)
}

#[test]
fn evidence_of_another_kind_counts_where_both_have_the_same() {
    for identity in [Match::Exact, Match::Possible] {
        // The content is always known.
        let pairs = [
            (Evidence::Content, FILE),
            (Evidence::Content, MOUNTED),
            (MOUNTED, FILE),
            (MOUNTED, Evidence::Content),
            (MOUNTED, LATER),
        ];
        for (then, now) in pairs {
            assert_eq!(answer(then, now, identity, false), Same::Yes, "{then:?}, {now:?}");
            let changed = answer(then, now, identity, true);
            assert!(matches!(changed, Same::Changed(_)), "{then:?}, {now:?}: {changed:?}");
        }
        // So are the length and the times, but a mount may have times of its own.
        assert_eq!(answer(FILE, MOUNTED, identity, false), Same::Yes);
        assert_eq!(answer(FILE, LATER, identity, false), Same::CannotTell);
        let longer = answer(FILE, LONGER, identity, false);
        assert!(matches!(longer, Same::Changed(why) if why.contains("length")), "{longer:?}");
        let part = answer(FILE, Evidence::Content, identity, false);
        assert!(matches!(part, Same::Changed(why) if why.contains("part")), "{part:?}");
        for then in [FILE, MOUNTED, Evidence::Content, Evidence::Nothing] {
            assert_eq!(answer(then, Evidence::Nothing, identity, false), Same::CannotTell);
            assert_eq!(answer(Evidence::Nothing, then, identity, false), Same::CannotTell);
        }
    }
}

#[test]
fn another_disk_has_the_data_only_if_that_is_known() {
    let has_its_data = |then, now, is_written| {
        answer(then, now, Match::Other, is_written) == Same::Another { has_its_data: true }
    };
    assert!(has_its_data(Evidence::Content, FILE, false));
    assert!(!has_its_data(Evidence::Content, FILE, true));
    assert!(has_its_data(MOUNTED, Evidence::Content, false));
    assert!(has_its_data(FILE, MOUNTED, false));
    for now in [LATER, LONGER, Evidence::Content, Evidence::Nothing] {
        assert!(!has_its_data(FILE, now, false), "{now:?}");
    }
}

#[test]
fn any_change_of_a_file_is_seen_and_a_copy_keeps_its_mtime() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("origin");
    std::fs::write(&path, vec![1; 8 << 20]).unwrap();
    let open =
        || -> Arc<dyn Disk> { Arc::new(FileDisk::open(&path, &FileOptions::default()).unwrap()) };
    let size = 8 << 20;
    let noted = Stamp::at_end(&open(), size).unwrap();
    let standing = |noted, identity| ask(&open(), Some(noted), size, identity);
    assert_eq!(standing(noted, Match::Exact), Same::Yes);
    // Written, and the mtime set back.
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mtime = file.metadata().unwrap().modified().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", 4 << 20).unwrap();
    assert!(matches!(standing(noted, Match::Exact), Same::Changed(why) if why.contains("mtime")));
    file.set_modified(mtime).unwrap();
    assert!(matches!(standing(noted, Match::Exact), Same::Changed(why) if why.contains("ctime")));
    // A copy with its times has another ctime.
    let copy = standing(noted, Match::Other);
    assert_eq!(copy, Same::Another { has_its_data: true });
    let noted = Stamp::at_end(&open(), size).unwrap();
    file.set_len(9 << 20).unwrap();
    assert_eq!(standing(noted, Match::Other), Same::Another { has_its_data: false });
    let grown = standing(noted, Match::Exact);
    assert!(matches!(grown, Same::Changed(why) if why.contains("length")));
}
