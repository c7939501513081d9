//! Files that were cut and extended to their old length between two checks.

use super::disks::{empty_file, folder, open};
use super::{bare, read, write};
use crate::bio::Op;
use crate::disk::{IoMode, Ring};
use crate::error::Status;
use crate::units::MIB;

/// Cuts a file, and makes it as long as it was.
fn cut_and_regrow(path: &std::path::Path, cut: u64) {
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(cut).unwrap();
    file.set_len(len).unwrap();
}

/// All data that is read was written before, so a hole is a loss; and zeroes that are written are
/// data.
#[test]
fn a_hole_where_something_was_written_is_a_loss() {
    let folder = folder();
    for io in [IoMode::Auto, IoMode::Buffered, IoMode::Lazy] {
        let path = empty_file(&folder, MIB);
        let (disk, mut ring) = (open(&path, io), Ring::new(8).unwrap());
        assert!(read(&disk, &mut ring, 8192, 4096).is_ok(), "{io:?}: the disk expects no data");
        disk.expect_data(4096);
        assert!(read(&disk, &mut ring, 0, 4096).is_ok(), "{io:?}: in front of it");
        write(&disk, &mut ring, 8192, &[7; 8192]).unwrap();
        write(&disk, &mut ring, 65536, &[0; 4096]).unwrap();
        bare(&disk, &mut ring, Op::WriteZeroes, 12288, 4096).unwrap();
        for at in [8192, 12288, 65536] {
            assert!(read(&disk, &mut ring, at, 4096).is_ok(), "{io:?}: {at}");
        }
        assert_eq!(disk.loss(), None, "{io:?}");
        cut_and_regrow(&path, 12288);
        for at in [12288, 65536] {
            assert_eq!(read(&disk, &mut ring, at, 4096), Err(Status::Io), "{io:?}: {at}");
        }
        assert_eq!(read(&disk, &mut ring, 8192, 4096).unwrap(), [7; 4096], "{io:?}");
        let loss = disk.loss().unwrap();
        assert!(loss.contains("has a hole at byte 12288"), "{io:?}: {loss}");
        assert_eq!(write(&disk, &mut ring, 0, &[1; 4096]), Err(Status::Io), "{io:?}");
        assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Err(Status::Io), "{io:?}");
    }
}

/// All blocks of the file existed once, and a flush finds that some are gone.
#[test]
fn a_full_file_that_was_cut_and_made_as_long_again_fails_its_next_flush() {
    let folder = folder();
    for io in [IoMode::Auto, IoMode::Buffered] {
        let path = folder.path().join("full.img");
        std::fs::write(&path, vec![7; 65536]).unwrap();
        let (disk, mut ring) = (open(&path, io), Ring::new(8).unwrap());
        bare(&disk, &mut ring, Op::Flush, 0, 0).unwrap();
        cut_and_regrow(&path, 8192);
        assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Err(Status::Io), "{io:?}");
        assert_eq!(read(&disk, &mut ring, 32768, 4096), Err(Status::Io), "{io:?}");
        assert!(read(&disk, &mut ring, 0, 4096).is_ok(), "{io:?}");
        assert!(disk.loss().unwrap().contains("extended again"), "{io:?}");
    }
}

/// A range that udm discards itself is not a loss, even in a file whose blocks all existed once.
#[test]
fn holes_that_udm_punches_are_no_loss() {
    let folder = folder();
    let path = folder.path().join("full.img");
    std::fs::write(&path, vec![7; 65536]).unwrap();
    let (disk, mut ring) = (open(&path, IoMode::Auto), Ring::new(8).unwrap());
    bare(&disk, &mut ring, Op::Flush, 0, 0).unwrap();
    bare(&disk, &mut ring, Op::WriteZeroes, 8192, 32768).unwrap();
    assert_eq!(read(&disk, &mut ring, 8192, 4096).unwrap(), [0; 4096]);
    bare(&disk, &mut ring, Op::Flush, 0, 0).unwrap();
    assert_eq!(disk.loss(), None);
}
