//! The conformance suite for every kind of disk, and tests of the properties special to each kind.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::conformance::{SIZE, check_all};
use super::{bare, pattern, read, transfer, write};
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{
    Absence, Disk, FileDisk, FileOptions, IoMode, LAZY_WINDOW_BYTES, OpenMode, RamDisk, Ring,
};
use crate::error::{Kind, Status};
use crate::ring::WAYS;
use crate::sync::Arc;

/// A file on the disk of the build, where direct I/O mostly works, unlike in many `/tmp`s.
pub(super) fn folder() -> tempfile::TempDir {
    let place = std::env::current_exe().unwrap();
    tempfile::tempdir_in(place.parent().unwrap()).unwrap()
}

pub(super) fn empty_file(folder: &tempfile::TempDir, len: u64) -> PathBuf {
    let path = folder.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(len).unwrap();
    path
}

fn options(io: IoMode) -> FileOptions {
    FileOptions { io, ..FileOptions::default() }
}

/// A process that another test starts has all locks of this one until its exec, so a file that was
/// just closed may be in use for a moment.
pub(super) fn open(path: &Path, io: IoMode) -> Arc<dyn Disk> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match FileDisk::open(path, &options(io)) {
            Err(error) if error.kind() == Kind::Busy && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            found => return Arc::new(found.unwrap()),
        }
    }
}

#[test]
fn ram_disk_conforms() {
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(SIZE, 512));
    check_all(&disk, &mut Ring::without_kernel());
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(SIZE, 4096));
    check_all(&disk, &mut Ring::new(16).unwrap());
}

#[test]
fn buffered_file_conforms() {
    let folder = folder();
    for way in WAYS {
        let disk = open(&empty_file(&folder, SIZE + 100), IoMode::Buffered);
        check_all(&disk, &mut Ring::in_way(64, way));
    }
}

#[test]
fn direct_file_conforms() {
    let folder = folder();
    let path = empty_file(&folder, SIZE);
    let disk = FileDisk::open(&path, &options(IoMode::Auto)).unwrap();
    if !disk.is_direct() {
        eprintln!("SKIPPED: direct I/O does not work on {}", path.display());
        return;
    }
    let disk: Arc<dyn Disk> = Arc::new(disk);
    check_all(&disk, &mut Ring::new(8).unwrap());
}

/// A write of several sectors only counts as atomic where the device below declares it.
#[test]
fn what_is_written_whole_is_what_the_device_says() {
    let folder = folder();
    let path = empty_file(&folder, SIZE);
    for io in [IoMode::Buffered, IoMode::Lazy] {
        assert_eq!(open(&path, io).limits().atomic_bytes, 0);
    }
    let disk = FileDisk::open(&path, &options(IoMode::Auto)).unwrap();
    if !disk.is_direct() {
        eprintln!("SKIPPED: direct I/O does not work on {}", path.display());
        return;
    }
    let device = rustix::fs::stat(&path).unwrap().st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let said = format!("/sys/dev/block/{major}:{minor}/queue/physical_block_size");
    let said = std::fs::read_to_string(said).ok().map(|size| size.trim().parse::<u32>().unwrap());
    let atomic = disk.limits().atomic_bytes;
    assert!([0, 512, said.unwrap_or(512)].contains(&atomic), "{atomic}, {said:?}");
}

#[test]
fn direct_file_with_coarse_alignment_conforms() {
    let folder = folder();
    let path = empty_file(&folder, SIZE);
    let mut disk = FileDisk::open(&path, &options(IoMode::Auto)).unwrap();
    if !disk.is_direct() {
        eprintln!("SKIPPED: direct I/O does not work on {}", path.display());
        return;
    }
    disk.coarsen(4096);
    let disk: Arc<dyn Disk> = Arc::new(disk);
    check_all(&disk, &mut Ring::new(32).unwrap());
}

#[test]
fn dontcache_file_conforms() {
    let folder = folder();
    let path = empty_file(&folder, SIZE);
    match FileDisk::open(&path, &options(IoMode::DontCache)) {
        Ok(disk) => {
            let disk: Arc<dyn Disk> = Arc::new(disk);
            check_all(&disk, &mut Ring::new(64).unwrap());
        }
        Err(error) => {
            assert_eq!(error.kind(), Kind::Unsupported);
            eprintln!("SKIPPED: {error}");
        }
    }
}

#[test]
fn lazy_file_conforms() {
    let folder = folder();
    let disk = open(&empty_file(&folder, SIZE), IoMode::Lazy);
    check_all(&disk, &mut Ring::new(64).unwrap());
}

/// The most unclean bytes while `written` bytes were written in pieces of `len`, at depth 32.
pub(super) fn most_unclean(disk: &Arc<FileDisk>, written: u64, len: u64, is_random: bool) -> u64 {
    let target: Arc<dyn Disk> = disk.clone();
    let mut ring = Ring::new(64).unwrap();
    let bytes = pattern(len, 3);
    let places = disk.limits().size_bytes / len;
    let mut prng = crate::prng::Prng::new(9);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let watch = || {
        let mut most = 0;
        while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
            most = disk.cached().unwrap().unclean_bytes.max(most);
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
        most
    };
    std::thread::scope(|scope| {
        let watcher = scope.spawn(watch);
        let (mut started, mut ended, mut most) = (0, 0, 0);
        while ended < written / len {
            while started < written / len && started < ended + 32 {
                let place = if is_random { prng.below(places) } else { started % places };
                let buffer = Buffer::from_bytes(&bytes);
                target.start(transfer(&target, Op::Write, place * len, buffer, 0), &mut ring);
                started += 1;
            }
            ring.submit_and_wait(Some(std::time::Duration::from_secs(1)));
            while let Some(io) = ring.pop_completed() {
                assert_eq!(io.result, Ok(()));
                ended += 1;
            }
            // The watcher may get no processor.
            most = disk.cached().unwrap().unclean_bytes.max(most);
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        watcher.join().unwrap().max(most)
    })
}

#[test]
fn a_lazy_file_never_has_more_than_the_window_dirty() {
    let folder = folder();
    let path = empty_file(&folder, 64 << 20);
    let disk = Arc::new(FileDisk::open(&path, &options(IoMode::Lazy)).unwrap());
    let kind = rustix::fs::statfs(&path).unwrap().f_type;
    let is_in_memory = kind == libc::TMPFS_MAGIC;
    if is_in_memory || disk.cached().is_none() {
        return eprintln!("SKIPPED: no cachestat of a file on a disk (Linux 6.5)");
    }
    // Small pieces first: a kernel counts a folio that was written large as dirty as a whole.
    for (len, is_random) in [(4096, true), (512, false), (1 << 20, false), (24 << 20, false)] {
        let most = most_unclean(&disk, 64 << 20, len, is_random);
        let what = format!("{most} bytes were dirty, written in pieces of {len}");
        assert!(most <= LAZY_WINDOW_BYTES + (1 << 20), "{what}");
        assert!(most > 0, "{what}");
    }
    let target: Arc<dyn Disk> = disk.clone();
    assert_eq!(bare(&target, &mut Ring::new(8).unwrap(), Op::Flush, 0, 0), Ok(()));
    assert_eq!(disk.cached().unwrap().unclean_bytes, 0);
}

/// A loop device, detached at the end.
pub(super) struct Loop(pub PathBuf);

impl Loop {
    pub fn attach(file: &Path, sector: u32) -> Option<Loop> {
        let sector = sector.to_string();
        let output = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector])
            .arg(file)
            .output();
        match output {
            Ok(output) if output.status.success() => {
                Some(Loop(String::from_utf8(output.stdout).unwrap().trim().into()))
            }
            other => {
                eprintln!("SKIPPED: no loop device: {other:?}");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        Command::new("losetup").arg("--detach").arg(&self.0).status().unwrap();
    }
}

#[test]
fn loop_device_conforms() {
    let folder = folder();
    let path = empty_file(&folder, SIZE);
    let Some(device) = Loop::attach(&path, 512) else { return };
    for io in [IoMode::Direct, IoMode::Buffered, IoMode::Lazy] {
        std::fs::write(&path, vec![0; SIZE as usize]).unwrap();
        let disk = open(&device.0, io);
        check_all(&disk, &mut Ring::new(64).unwrap());
        assert_eq!(disk.limits().block_bytes, 512);
        assert!(disk.limits().identity.words().starts_with("loop on file"), "{:?}", disk.limits());
        assert_eq!(disk.limits().atomic_bytes, 0);
        assert!(disk.limits().kernel_name.starts_with("7:"));
    }
}

/// A file system in memory, unmounted at the end.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(size: &str) -> Option<Tmpfs> {
        let place = folder();
        let options = format!("size={size}");
        let words = ["-t", "tmpfs", "-o", &options, "none"];
        let output = Command::new("mount").args(words).arg(place.path()).output();
        match output {
            Ok(output) if output.status.success() => Some(Tmpfs(place)),
            other => {
                eprintln!("SKIPPED: no tmpfs can be mounted: {other:?}");
                None
            }
        }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        Command::new("umount").arg(self.0.path()).status().unwrap();
    }
}

#[test]
fn a_flush_hears_of_a_write_out_that_failed_before() {
    // A loop device on a sparse file, for which its file system has too little space.
    let Some(small) = Tmpfs::mount("4m") else { return };
    let path = empty_file(&small.0, 64 << 20);
    let Some(device) = Loop::attach(&path, 512) else { return };
    for io in [IoMode::Buffered, IoMode::Lazy] {
        let disk = open(&device.0, io);
        let mut ring = Ring::new(8).unwrap();
        let (mut other, mut reader) = (Ring::new(8).unwrap(), Ring::new(8).unwrap());
        let mib = |ring: &mut Ring, at: u64| {
            write(&disk, ring, at << 20, &pattern(1 << 20, at)).unwrap();
        };
        mib(&mut ring, 0);
        assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Ok(()));
        (8..16).for_each(|at| mib(&mut ring, at));
        if io == IoMode::Lazy {
            // The write-out has met the error, and the rest of the write-out meets none.
            super::lazy::settle(&*disk);
            assert!(disk.pacing().unwrap().failed > 0);
        }
        mib(&mut ring, 0);
        mib(&mut other, 0);
        assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Err(Status::Io), "{io:?}");
        // The kernel has said it, once.
        assert_eq!(bare(&disk, &mut reader, Op::Flush, 0, 0), Ok(()), "{io:?}");
        assert_eq!(bare(&disk, &mut other, Op::Flush, 0, 0), Err(Status::Io), "{io:?}");
        assert_eq!(bare(&disk, &mut other, Op::Flush, 0, 0), Ok(()), "{io:?}");
        assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Ok(()), "{io:?}");
    }
}

#[test]
fn loop_device_with_large_blocks_takes_sectors() {
    let folder = folder();
    let path = empty_file(&folder, 1 << 20);
    let Some(device) = Loop::attach(&path, 4096) else { return };
    let disk = open(&device.0, IoMode::Auto);
    assert_eq!(disk.limits().block_bytes, 4096);
    let mut ring = Ring::new(8).unwrap();
    let mut expected = pattern(1 << 20, 1);
    write(&disk, &mut ring, 0, &expected).unwrap();
    for (at, len) in [(512usize, 512usize), (3584, 1024), (8192, 4096), (5 * 512, 9 * 512)] {
        let bytes = pattern(len as u64, at as u64);
        write(&disk, &mut ring, at as u64, &bytes).unwrap();
        expected[at..at + len].copy_from_slice(&bytes);
        assert!(read(&disk, &mut ring, 0, 1 << 20).unwrap() == expected);
    }
    bare(&disk, &mut ring, Op::WriteZeroes, 16 * 512 + 512, 7 * 512).unwrap();
    expected[17 * 512..24 * 512].fill(0);
    bare(&disk, &mut ring, Op::Discard, 24 * 512, 512).unwrap();
    assert!(read(&disk, &mut ring, 0, 1 << 20).unwrap() == expected);
}

#[test]
fn a_device_has_one_owner() {
    let folder = folder();
    let path = empty_file(&folder, 8192);
    let first = FileDisk::open(&path, &options(IoMode::Auto)).unwrap();
    let error = FileDisk::open(&path, &options(IoMode::Auto)).unwrap_err();
    assert_eq!(error.kind(), Kind::Busy);
    assert!(error.to_string().contains("is in use"), "{error}");
    let looks = FileOptions { mode: OpenMode::ReadOnly, ..FileOptions::default() };
    let second: Arc<dyn Disk> = Arc::new(FileDisk::open(&path, &looks).unwrap());
    let mut ring = Ring::new(8).unwrap();
    assert_eq!(write(&second, &mut ring, 0, &[1; 512]), Err(Status::ReadOnly));
    assert_eq!(bare(&second, &mut ring, Op::WriteZeroes, 0, 512), Err(Status::ReadOnly));
    assert_eq!(read(&second, &mut ring, 0, 512).unwrap(), [0; 512]);
    assert_eq!(bare(&second, &mut ring, Op::Flush, 0, 0), Ok(()));
    drop(first);
    FileDisk::open(&path, &options(IoMode::Auto)).unwrap();

    let Some(device) = Loop::attach(&path, 512) else { return };
    let first = FileDisk::open(&device.0, &options(IoMode::Auto)).unwrap();
    let error = FileDisk::open(&device.0, &options(IoMode::Auto)).unwrap_err();
    assert_eq!(error.kind(), Kind::Busy, "{error}");
    drop(first);
}

#[test]
fn what_cannot_be_a_disk_says_why() {
    let folder = folder();
    let kind = |path: &Path| {
        let error = FileDisk::open(path, &options(IoMode::Auto)).unwrap_err();
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        error.kind()
    };
    assert_eq!(kind(&folder.path().join("none")), Kind::NotFound);
    assert_eq!(kind(folder.path()), Kind::Invalid);
    assert_eq!(kind(Path::new("/dev/null")), Kind::Invalid);
    assert_eq!(kind(&empty_file(&folder, 511)), Kind::NoSpace);
    assert_eq!(IoMode::parse("fast").unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn a_file_is_told_from_its_copy() {
    let folder = folder();
    let path = empty_file(&folder, 8192);
    let identity = |path: &Path| open(path, IoMode::Auto).limits().identity.clone();
    let first = identity(&path);
    assert_eq!(identity(&path), first);
    let copy = folder.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    std::fs::rename(&copy, &path).unwrap();
    assert_ne!(identity(&path), first);
    assert!(first.words().len() <= 200 && first.words().contains("inode"), "{first}");
}

#[test]
fn what_was_cut_off_a_file_is_not_read_as_zeroes() {
    let folder = folder();
    let len = 64 << 10;
    for io in [IoMode::Buffered, IoMode::Auto, IoMode::Lazy] {
        let path = empty_file(&folder, len);
        let mut ring = Ring::new(8).unwrap();
        let disk = open(&path, io);
        let bytes = pattern(len, 1);
        write(&disk, &mut ring, 0, &bytes).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(5000).unwrap();
        assert_eq!(read(&disk, &mut ring, 0, len), Err(Status::Io));
        assert!(read(&disk, &mut ring, 0, 4096).unwrap() == bytes[..4096]);
        assert_eq!(read(&disk, &mut ring, 4096, 4096), Err(Status::Io));
        // The disk refuses writes, which could hide the loss, and flushes, which would promise
        // durability.
        assert_eq!(write(&disk, &mut ring, 0, &[7; 512]), Err(Status::Io));
        assert_eq!(bare(&disk, &mut ring, Op::WriteZeroes, 0, 512), Err(Status::Io));
        assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Err(Status::Io));
        // As long as it was, but what was there is gone.
        file.set_len(len).unwrap();
        assert_eq!(read(&disk, &mut ring, 60 << 10, 4096), Err(Status::Io));
        assert_eq!(write(&disk, &mut ring, 60 << 10, &[7; 4096]), Err(Status::Io));
        assert!(disk.loss().unwrap().contains("was cut short, from 65536 to 5000 bytes"));
    }
}

#[test]
fn a_file_that_was_cut_is_noticed_by_whoever_only_writes() {
    let folder = folder();
    let len = 64 << 10;
    let cut = |path: &Path| {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(8192).unwrap();
    };
    let path = empty_file(&folder, len);
    let disk = open(&path, IoMode::Buffered);
    let mut ring = Ring::new(8).unwrap();
    assert_eq!(write(&disk, &mut ring, 0, &[1; 512]), Ok(()));
    cut(&path);
    // The one that would make it as long as it was.
    assert_eq!(write(&disk, &mut ring, len - 512, &[1; 512]), Err(Status::Io));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192);
    drop(disk);

    let path = empty_file(&folder, len);
    let disk = open(&path, IoMode::Buffered);
    assert_eq!(write(&disk, &mut ring, 0, &[1; 512]), Ok(()));
    cut(&path);
    assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Err(Status::Io), "a flush looks");
    assert_eq!(write(&disk, &mut ring, 0, &[1; 512]), Err(Status::Io));
}

#[test]
fn a_loop_device_whose_file_was_cut_has_lost_a_part() {
    let folder = folder();
    let path = empty_file(&folder, 1 << 20);
    let Some(device) = Loop::attach(&path, 512) else { return };
    let disk = open(&device.0, IoMode::Auto);
    let mut ring = Ring::new(8).unwrap();
    write(&disk, &mut ring, 0, &pattern(1 << 20, 1)).unwrap();
    assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Ok(()));
    assert_eq!(disk.loss(), None);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(512 << 10).unwrap();
    assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Err(Status::Io));
    assert_eq!(read(&disk, &mut ring, 768 << 10, 4096), Err(Status::Io));
    assert_eq!(write(&disk, &mut ring, 768 << 10, &[1; 4096]), Err(Status::Io));
    assert!(read(&disk, &mut ring, 0, 4096).unwrap() == pattern(1 << 20, 1)[..4096]);
    assert!(disk.loss().unwrap().contains("to 524288 bytes"), "{:?}", disk.loss());
}

#[test]
fn a_disk_knows_what_has_become_of_its_name() {
    let folder = folder();
    let path = empty_file(&folder, 8192);
    let disk = open(&path, IoMode::Auto);
    assert_eq!(disk.absence(), None);
    let away = folder.path().join("away");
    std::fs::rename(&path, &away).unwrap();
    assert_eq!(disk.absence(), Some(Absence::Moved));
    std::fs::write(&path, [0; 8192]).unwrap();
    assert_eq!(disk.absence(), Some(Absence::Replaced));
    std::fs::remove_file(&away).unwrap();
    assert_eq!(disk.absence(), Some(Absence::Deleted));
    let bytes = std::fs::read(disk.open_as().unwrap()).unwrap();
    assert_eq!(bytes, [0; 8192]);
}

#[test]
fn a_file_in_memory_is_a_disk() {
    let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
        return eprintln!("SKIPPED: no /dev/shm");
    };
    file.as_file().set_len(SIZE).unwrap();
    let disk = open(file.path(), IoMode::Auto);
    check_all(&disk, &mut Ring::new(64).unwrap());
}

#[test]
fn a_dropped_ring_finishes_its_writes() {
    let folder = folder();
    let path = empty_file(&folder, 8 << 20);
    let disk = open(&path, IoMode::Auto);
    let mut ring = Ring::new(4).unwrap();
    for n in 0..64u64 {
        let buffer = Buffer::from_bytes(&pattern(64 << 10, n));
        disk.start(transfer(&disk, Op::Write, n * (64 << 10), buffer, n), &mut ring);
    }
    ring.submit();
    for n in 64..128u64 {
        disk.start(transfer(&disk, Op::Read, 0, Buffer::zeroed(64 << 10), n), &mut ring);
    }
    drop(ring);
    assert_eq!(Arc::strong_count(&disk), 1, "a reference to the disk is left");
    let mut ring = Ring::new(4).unwrap();
    assert!(read(&disk, &mut ring, 0, 64 << 10).unwrap() == pattern(64 << 10, 0));
}
