//! Volumes over files: the next volume has all written data, whether the last was closed in
//! order or not.

use std::path::Path;

use super::*;
use crate::error::Status;
use crate::units::MIB;

/// A folder with a slow and a fast file, and the table of a cache over them.
fn ground() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = folder.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(8 * MIB).unwrap();
        path.display().to_string()
    };
    let table = format!("0 16384 writecache s {} {} 4096 0", file("slow"), file("fast"));
    (folder, table)
}

fn memories(folder: &Path) -> usize {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().ends_with(".shm")).count()
}

fn first_byte(volume: &Volume) -> u8 {
    let mut bytes = [0; 4096];
    volume.caller().unwrap().read_at(&mut bytes, 0).unwrap();
    bytes[0]
}

#[test]
fn a_closed_volume_leaves_its_data_and_no_memory() {
    let (folder, table) = ground();
    let options = Options::with_memory_in(folder.path());
    let volume = Volume::open("disk", &table, &options).unwrap();
    assert_eq!(memories(folder.path()), 1, "while it is open");
    let mut caller = volume.caller().unwrap();
    caller.write_at(&[7; 4096], 0, false).unwrap();
    volume.close().unwrap();
    assert_eq!(memories(folder.path()), 0);
    assert_eq!(caller.write_at(&[8; 4096], 0, false), Err(Status::Io), "it is closed");
    drop(caller);
    // Dropping closes as well.
    drop(Volume::open("disk", &table, &options).unwrap());
    assert_eq!(memories(folder.path()), 0);
    assert_eq!(first_byte(&Volume::open("disk", &table, &options).unwrap()), 7);
}

#[test]
fn an_unflushed_write_survives_a_volume_that_was_not_closed() {
    let (folder, table) = ground();
    let options = Options::with_memory_in(folder.path());
    let mut volume = Volume::open("disk", &table, &options).unwrap();
    volume.caller().unwrap().write_at(&[7; 4096], 0, false).unwrap();
    // Like the death of the process: the device does not notice.
    volume.is_closed = true;
    drop(volume);
    assert_eq!(memories(folder.path()), 1);
    let volume = Volume::open("disk", &table, &options).unwrap();
    assert_eq!(first_byte(&volume), 7);
    let other = Volume::open("other", &table, &options).unwrap_err();
    assert_eq!(other.kind(), Kind::Busy, "{other}");
}
