//! Flushes of files by several rings, of which some fail.

use std::time::Duration;

use super::disks::{empty_file, folder};
use super::{bare, io, next, pattern, read, transfer, write};
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo, FileDisk, FileOptions, IoMode, Ring};
use crate::error::Status;
use crate::sync::Arc;
use crate::units::MIB;

const FAILED: Result<(), Status> = Err(Status::Io);

fn opened(folder: &tempfile::TempDir, mode: IoMode) -> (Arc<FileDisk>, Arc<dyn Disk>) {
    let options = FileOptions { io: mode, ..FileOptions::default() };
    let disk = Arc::new(FileDisk::open(empty_file(folder, MIB), &options).unwrap());
    (disk.clone(), disk)
}

fn flush(disk: &Arc<dyn Disk>, ring: &mut Ring) -> Result<(), Status> {
    bare(disk, ring, Op::Flush, 0, 0)
}

fn begin_flush(disk: &Arc<dyn Disk>, ring: &mut Ring) {
    disk.start(io(disk, Op::Flush, 0, 0, Buffer::empty(), 0), ring);
}

#[test]
fn a_failed_flush_is_said_once_to_each_ring_that_has_written() {
    let folder = folder();
    for mode in [IoMode::Auto, IoMode::Buffered, IoMode::Lazy] {
        let (file, disk) = opened(&folder, mode);
        let mut rings: Vec<Ring> = (0..4).map(|_| Ring::new(8).unwrap()).collect();
        for ring in &mut rings[..3] {
            write(&disk, ring, 0, &pattern(4096, 1)).unwrap();
        }
        assert_eq!(bare(&disk, &mut rings[2], Op::WriteZeroes, 4096, 4096), Ok(()));
        file.fail_flushes(1);
        assert_eq!(flush(&disk, &mut rings[0]), FAILED);
        assert!(disk.is_owing());
        // This ring wrote no data, so its successful flush covers no lost data.
        assert_eq!(flush(&disk, &mut rings[3]), Ok(()));
        for (nth, expected) in [(0, Ok(())), (1, FAILED), (2, FAILED)] {
            assert_eq!(flush(&disk, &mut rings[nth]), expected, "{mode:?} ring {nth}");
        }
        assert!(!disk.is_owing());
        rings.iter_mut().for_each(|ring| assert_eq!(flush(&disk, ring), Ok(())));
        assert_eq!(file.errors().count, 1, "the kernel said it once");
    }
}

#[test]
fn want_of_memory_passes() {
    let folder = folder();
    for mode in [IoMode::Auto, IoMode::Buffered, IoMode::Lazy] {
        let (file, disk) = opened(&folder, mode);
        let mut ring = Ring::new(8).unwrap();
        let data = pattern(8192, 3);
        file.be_short(7);
        assert_eq!(write(&disk, &mut ring, 4096, &data), Ok(()), "{mode:?}");
        file.be_short(2);
        assert_eq!(read(&disk, &mut ring, 4096, 8192).unwrap(), data, "{mode:?}");
        file.be_short(2);
        assert_eq!(bare(&disk, &mut ring, Op::WriteZeroes, 4096, 4096), Ok(()), "{mode:?}");
        assert_eq!(flush(&disk, &mut ring), Ok(()));
        assert_eq!(file.errors().count, 0, "no error is counted");
        // The shortage ends.
        file.be_short(u64::MAX);
        disk.start(transfer(&disk, Op::Write, 4096, Buffer::from_bytes(&data), 0), &mut ring);
        let end = (0..100_000).find_map(|_| {
            ring.submit_and_wait(Some(Duration::from_millis(50)));
            ring.pop_completed()
        });
        assert_eq!(end.unwrap().result, FAILED, "{mode:?}");
        file.be_short(0);
        assert_eq!(file.errors().count, 1);
        assert_eq!(read(&disk, &mut ring, 8192, 4096).unwrap(), data[4096..], "{mode:?}");
    }
}

#[test]
fn flushes_that_were_asked_for_meanwhile_fail_too() {
    let folder = folder();
    let (file, disk) = opened(&folder, IoMode::Auto);
    let mut rings: Vec<Ring> = (0..3).map(|_| Ring::new(8).unwrap()).collect();
    for expected in [FAILED, Ok(())] {
        rings.iter_mut().for_each(|ring| write(&disk, ring, 0, &pattern(4096, 1)).unwrap());
        file.fail_flushes(u64::from(expected.is_err()));
        rings.iter_mut().for_each(|ring| begin_flush(&disk, ring));
        let ends = rings.iter_mut().map(|ring| next(ring).result);
        assert!(ends.into_iter().all(|end| end == expected));
        assert!(!disk.is_owing());
    }
}

#[test]
fn who_waits_for_the_flush_of_a_ring_that_goes_hears_of_it() {
    let folder = folder();
    let (_, disk) = opened(&folder, IoMode::Auto);
    let mut rings: Vec<Ring> = (0..3).map(|_| Ring::new(8).unwrap()).collect();
    rings.iter_mut().for_each(|ring| begin_flush(&disk, ring));
    // The result of that flush is unknown.
    drop(rings.remove(0));
    rings.iter_mut().for_each(|ring| assert_eq!(next(ring).result, FAILED));
    // A waiting flush is dropped as well.
    let mut first = Ring::new(8).unwrap();
    begin_flush(&disk, &mut first);
    rings.iter_mut().for_each(|ring| begin_flush(&disk, ring));
    drop(rings.remove(0));
    assert_eq!(next(&mut first).result, Ok(()));
    assert_eq!(next(&mut rings[0]).result, FAILED, "it waited for one that never was made");
    assert_eq!(flush(&disk, &mut first), Ok(()));
    drop((first, rings));
    assert_eq!(Arc::strong_count(&disk), 1, "a reference to the disk is left");
}

#[test]
fn threads_that_flush_together_all_come_back() {
    let folder = folder();
    let (file, disk) = opened(&folder, IoMode::Auto);
    let failed: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4_u64)
            .map(|nth| {
                let (file, disk) = (&file, &disk);
                scope.spawn(move || {
                    let mut ring = Ring::new(16).unwrap();
                    let mut failed = 0;
                    for round in 0..60 {
                        write(disk, &mut ring, nth * 4096, &pattern(4096, round)).unwrap();
                        if nth == 0 && round == 30 {
                            file.fail_flushes(1);
                        }
                        (0..3).for_each(|_| begin_flush(disk, &mut ring));
                        let ends: Vec<DiskIo> = (0..3).map(|_| next(&mut ring)).collect();
                        failed += usize::from(ends.iter().any(|io| io.result.is_err()));
                    }
                    failed
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!((1..=8).contains(&failed), "{failed}");
    assert_eq!(file.errors().count, 1);
}
