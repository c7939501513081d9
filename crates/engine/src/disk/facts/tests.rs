//! Tests of how the kernel's texts and numbers are read.

use super::*;
use crate::disk::identity::{self, Identity, Match};

const EXT4: u64 = 0xEF53;
const BTRFS: u64 = 0x9123_683E;

#[test]
fn some_file_systems_draw_their_inodes_at_each_mount() {
    for kind in [FUSE, FAT, EXFAT] {
        assert!(!inodes_last(kind, "rw"), "{kind:#x}");
    }
    for kind in [EXT4, XFS, BTRFS] {
        assert!(inodes_last(kind, "rw"), "{kind:#x}");
    }
    for kind in SMB {
        assert!(inodes_last(kind, "rw,vers=3.0,serverino"), "{kind:#x}");
        assert!(!inodes_last(kind, "rw,vers=3.0"), "{kind:#x}: its client draws them");
    }
    // As statfs(2) has them.
    assert_eq!([FAT, EXFAT], [0x4D44, 0x2011_BAB0]);
    assert_eq!([FUSE, XFS], [0x6573_5546, 0x5846_5342]);
}

#[test]
fn servers_and_snapshots_may_have_twins_of_a_file() {
    for kind in REMOTE {
        assert!(has_twins(kind, 0) && has_twins(kind, 1), "{kind:#x}");
    }
    // NFS, 9p, SMB, as statfs(2) has them.
    for kind in [0x6969, 0x0102_1997, 0xFF53_4D42, 0xFE53_4D42] {
        assert!(REMOTE.contains(&kind), "{kind:#x}");
    }
    for kind in [EXT4, XFS, BTRFS, FUSE] {
        assert!(!has_twins(kind, 0), "{kind:#x}");
    }
    assert!(has_twins(BCACHEFS, 0) && !has_twins(BCACHEFS, 1));
    let reported = SUBVOLUME.bits();
    assert_eq!(subvolume_of(BCACHEFS, reported, 7), 7);
    assert_eq!(subvolume_of(BCACHEFS, !reported, 7), 0, "the kernel did not report it");
    assert_eq!(subvolume_of(BTRFS, reported, 7), 0, "f_fsid has it");
}

#[test]
fn a_mount_is_found_by_its_number() {
    let mounts = "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
                  2 22 0:5 / /a rw - fuse.sshfs host:/srv rw,user_id=0\n\
                  222 22 0:6 / /a\\040-\\040b rw master:1 - fuse nbdfuse rw\n";
    let found = |id| mount_in(mounts, id);
    let both = |place: &str, options: &str| Some((place.to_owned(), options.to_owned()));
    assert_eq!(found("22"), both("ext4 /dev/sda1", "rw"));
    assert_eq!(found("2"), both("fuse.sshfs host:/srv", "rw,user_id=0"));
    assert_eq!(found("222"), both("fuse nbdfuse", "rw"));
    assert_eq!(found("1"), None, "the number of a parent");
    assert_eq!(mount_in("7 1 0:5 / / rw", "7"), None, "a line that was cut short");
}

#[test]
fn a_file_of_this_process_is_on_a_mount() {
    let file = std::fs::File::open("/proc/self/mountinfo").unwrap().into();
    assert!(mount_of(&file).is_some_and(|(place, _)| place.starts_with("proc ")));
}

#[test]
fn loop_devices_are_followed_to_the_file_that_the_kernel_knows() {
    let (it, other) = (((8, 1), 12), ((8, 1), 13));
    assert_eq!(loops_left(Some(it), it, 2), Some(1));
    assert_eq!(loops_left(Some(it), it, 1), Some(0));
    assert_eq!(loops_left(Some(it), it, 0), None, "the chain is too long");
    assert_eq!(loops_left(Some(it), other, 1), None, "another file is at the path");
    assert_eq!(loops_left(Some(it), ((8, 2), 12), 1), None, "on another device");
    assert_eq!(loops_left(None, it, 1), None);
}

#[test]
fn texts_of_sysfs_are_one_line_and_empty_ones_count_as_absent() {
    let folder = tempfile::tempdir().unwrap();
    let text = |bytes: &[u8]| {
        let path = folder.path().join("serial");
        std::fs::write(&path, bytes).unwrap();
        text_of(path)
    };
    assert_eq!(text(b"  S3Z9 NB\0K\n").as_deref(), Some("S3Z9 NB K"));
    assert_eq!(text(b" \n"), None);
    assert_eq!(text(b""), None);
    assert_eq!(text_of(folder.path().join("none")), None);
}

/// In a container, for example. The devices of a machine must not look like one.
#[test]
fn without_sysfs_the_number_and_the_size_tell_devices_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device");
    let of = |minor, bytes| {
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(bytes).unwrap();
        // No machine has this number.
        let disk = of_disk(&file.into(), (4095, minor), LOOPS_MAX);
        identity::of(&Facts::Disk(disk), bytes, 0)
    };
    let known = of(1, 8192);
    assert_eq!(known.words(), "block device 4095:1 of 8192 bytes");
    assert!(known.doubt().is_some_and(|doubt| doubt.contains("4095:1")));
    let compare = |now: Identity| now.compare(|words| words == known.words());
    assert_eq!(compare(of(1, 8192)), Match::Possible);
    assert_eq!(compare(of(2, 8192)), Match::Other);
    assert_eq!(compare(of(1, 4096)), Match::Other);
}
