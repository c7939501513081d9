//! Lazy files: windows, the use of the page cache, and their names in tables.

use std::path::Path;
use std::time::Duration;

use super::disks::{empty_file, folder, most_unclean};
use super::{bare, pattern, read, write};
use crate::bio::Op;
use crate::disk::{Budget, Disk, FileDisk, FileOptions, IoMode, ReadMode, Ring};
use crate::error::Status;
use crate::sync::Arc;
use crate::table::Word;
use crate::units::MIB;

fn lazy(path: &Path, reads: ReadMode, window: Option<u64>, budget: &Budget) -> Arc<FileDisk> {
    let options = FileOptions { io: IoMode::Lazy, reads, window, ..FileOptions::default() };
    Arc::new(FileDisk::open_within(path, &options, &[], budget).unwrap())
}

/// Whether the kernel reports the page cache of a file, and the file is on a real disk.
fn is_seen(path: &Path, disk: &FileDisk) -> bool {
    let is_on_disk = rustix::fs::statfs(path).unwrap().f_type != libc::TMPFS_MAGIC;
    if !is_on_disk || disk.cached().is_none() {
        eprintln!("SKIPPED: no cachestat of a file on a disk (Linux 6.5)");
    }
    is_on_disk && disk.cached().is_some()
}

/// Waits until the background is idle.
pub(super) fn settle(disk: &dyn Disk) {
    for _ in 0..6000 {
        let pacing = disk.pacing().unwrap();
        if pacing.dirty_bytes + pacing.write_out_bytes == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("written data is not written out: {:?}", disk.pacing());
}

#[test]
fn the_window_is_what_was_asked_for() {
    let folder = folder();
    let path = empty_file(&folder, 32 * MIB);
    let disk = lazy(&path, ReadMode::Same, Some(2 * MIB), &Budget::default());
    if !is_seen(&path, &disk) {
        return;
    }
    for (len, is_random) in [(4096, true), (MIB, false)] {
        let most = most_unclean(&disk, 32 * MIB, len, is_random);
        assert!(most <= 3 * MIB, "{most} bytes were dirty, written in pieces of {len}");
    }
    let pacing = disk.pacing().unwrap();
    assert_eq!(pacing.window_bytes, 2 * MIB);
    assert!(pacing.waited > 0, "{pacing:?}");
}

#[test]
fn what_was_written_is_written_out_without_a_flush() {
    let folder = folder();
    let path = empty_file(&folder, 8 * MIB);
    let disk = lazy(&path, ReadMode::Same, None, &Budget::default());
    let target: Arc<dyn Disk> = disk.clone();
    let mut ring = Ring::new(8).unwrap();
    write(&target, &mut ring, 4096, &pattern(8192, 1)).unwrap();
    settle(&*disk);
    if is_seen(&path, &disk) {
        assert_eq!(disk.cached().unwrap().unclean_bytes, 0);
    }
    let pacing = disk.pacing().unwrap();
    assert_ne!(pacing.way, "unknown before the first write");
    assert_eq!((pacing.waited, pacing.failed), (0, 0));
}

#[test]
fn what_a_mixed_file_has_read_stays_and_what_it_has_written_does_not() {
    let folder = folder();
    let path = empty_file(&folder, 64 * MIB);
    let mut ring = Ring::new(8).unwrap();
    let filled: Arc<dyn Disk> = lazy(&path, ReadMode::Same, None, &Budget::default());
    (0..64).for_each(|at| write(&filled, &mut ring, at * MIB, &pattern(MIB, at)).unwrap());
    assert_eq!(bare(&filled, &mut ring, Op::Flush, 0, 0), Ok(()));
    drop((ring, filled));
    let mut ring = Ring::new(8).unwrap();
    let disk = lazy(&path, ReadMode::Buffered, None, &Budget::default());
    if !is_seen(&path, &disk) {
        return;
    }
    disk.forget_cached();
    let target: Arc<dyn Disk> = disk.clone();
    (0..8).for_each(|at| drop(read(&target, &mut ring, at * MIB, MIB).unwrap()));
    let before = disk.cached().unwrap().cached_bytes;
    assert!(before >= 8 * MIB, "{before}");
    // Beyond all that was read ahead, and between.
    for at in (32..64).chain(16..20) {
        write(&target, &mut ring, at * MIB, &pattern(MIB / 2, at)).unwrap();
    }
    settle(&*disk);
    let after = disk.cached().unwrap().cached_bytes;
    assert!(after >= 8 * MIB && after <= before + MIB, "{before} before, {after} after");
    assert!(read(&target, &mut ring, 40 * MIB, MIB / 2).unwrap() == pattern(MIB / 2, 40));
}

/// The kernel reports a failed write-out once. The second try finds no dirty pages.
#[test]
fn a_write_out_that_failed_is_not_forgotten_for_one_that_succeeds() {
    let folder = folder();
    let path = empty_file(&folder, MIB);
    let disk = lazy(&path, ReadMode::Same, None, &Budget::default());
    let target: Arc<dyn Disk> = disk.clone();
    let mut ring = Ring::new(8).unwrap();
    disk.fail_write_outs(1);
    // If the kernel writes the first pages out immediately, a batch finds them clean.
    for nth in 0..20 {
        write(&target, &mut ring, 0, &pattern(65536, nth)).unwrap();
        settle(&*disk);
    }
    let pacing = disk.pacing().unwrap();
    assert_eq!((pacing.failed, target.losses()), (1, 1), "{pacing:?}");
    assert_eq!(bare(&target, &mut ring, Op::Flush, 0, 0), Err(Status::Io));
    assert_eq!(bare(&target, &mut ring, Op::Flush, 0, 0), Ok(()));
}

#[test]
fn files_of_one_device_share_the_window() {
    let folder = folder();
    let budget = Budget::default();
    let disks: Vec<Arc<FileDisk>> = (0..2)
        .map(|nth| {
            let path = folder.path().join(format!("{nth}.img"));
            std::fs::File::create(&path).unwrap().set_len(32 * MIB).unwrap();
            lazy(&path, ReadMode::Same, Some((nth + 1) * 2 * MIB), &budget)
        })
        .collect();
    let most = std::thread::scope(|scope| {
        let spawn = |disk: &Arc<FileDisk>| {
            let disk = disk.clone();
            scope.spawn(move || {
                let target: Arc<dyn Disk> = disk.clone();
                let mut ring = Ring::new(8).unwrap();
                let mut most = 0;
                for at in 0..64 {
                    let bytes = pattern(MIB / 2, at);
                    write(&target, &mut ring, at * MIB / 2, &bytes).unwrap();
                    let pacing = disk.pacing().unwrap();
                    most = most.max(pacing.dirty_bytes + pacing.write_out_bytes);
                }
                most
            })
        };
        let threads: Vec<_> = disks.iter().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).max()
    });
    assert!(most <= Some(4 * MIB), "{most:?}: the larger of the two windows counts");
    assert_eq!(disks[0].pacing().unwrap().window_bytes, 4 * MIB);
    disks.iter().for_each(|disk| settle(&**disk));
}

#[test]
fn a_lazy_file_is_named_so_that_it_can_be_opened_again() {
    let folder = folder();
    let path = empty_file(&folder, MIB);
    let name = path.display().to_string();
    for (reads, window, suffix) in [
        (ReadMode::Same, None, "?io=lazy"),
        (ReadMode::Buffered, None, "?io=lazy,read=buffered"),
        (ReadMode::Same, Some(32 * MIB), "?io=lazy&window=32M"),
        (ReadMode::Buffered, Some(3 * MIB / 2), "?io=lazy,read=buffered&window=1536K"),
    ] {
        let disk = lazy(&path, reads, window, &Budget::default());
        assert_eq!(disk.limits().kernel_name, format!("{name}{suffix}"));
        let word = Word::new(disk.limits().kernel_name.as_str()).device().unwrap();
        assert_eq!(word.path, name);
        let options = word.options;
        assert_eq!((options.io, options.reads), (Some(IoMode::Lazy), reads));
        assert_eq!(options.window, window);
    }
}
