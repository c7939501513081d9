//! Tests of the evidence that an open file gives.

use super::*;
use crate::disk::{Disk, FileDisk, FileOptions};

#[test]
fn each_mount_of_each_boot_has_its_number() {
    let boots = [1 << 40, 1 << 41 | 3];
    let all = boots.map(|boot| [3, 4, 7].map(|id| mount_number(boot, id)));
    let mut all = all.concat();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 6);
}

/// A file that is known by its place only may have the mount's times.
#[test]
fn the_times_of_a_doubtful_file_are_those_of_a_mount() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("o");
    std::fs::write(&path, [1; 8192]).unwrap();
    let mut disk = FileDisk::open(&path, &FileOptions::default()).unwrap();
    assert!(matches!(disk.evidence(false), Evidence::File { bytes: 8192, .. }));
    disk.doubt();
    let Evidence::Mounted { mount: Some(mount), .. } = disk.evidence(false) else {
        return eprintln!("SKIPPED: the kernel does not number mounts (Linux 6.8)");
    };
    let file = std::fs::File::open(&path).unwrap().into();
    assert_eq!(mount ^ boot(), stat(&file).unwrap().stx_mnt_id);
    assert_ne!(boot(), 0, "this boot has a number");
}
