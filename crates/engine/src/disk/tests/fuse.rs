//! Facts about a file on FUSE, whose attributes the kernel may take from its cache.

use std::io::{ErrorKind, Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::disks::folder;
use crate::disk::facts::stat;

/// Operations of the protocol: fuse(4).
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
const MODE: u32 = 0o100_600;

/// A mount that consists of one file, unmounted at the end.
struct Mount<'a>(&'a Path);

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(self.0).status().unwrap();
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

/// The answer to an operation; an error for unknown ones. Attributes are valid for an hour.
fn answer(operation: u32, size: u64) -> Result<Vec<u8>, i32> {
    match operation {
        // Version 7.31, read-ahead, flags, background requests, bytes of a write, and zeroes.
        INIT => Ok(words(&[7, 31, 0, 0, 0, 4096, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
        GETATTR => {
            let valid = [longs(&[3600]), words(&[0, 0])].concat();
            let numbers = longs(&[1, size, size / 512, 1, 1, 1]);
            let rest = words(&[0, 0, 0, MODE, 1, 0, 0, 0, 4096, 0]);
            Ok([valid, numbers, rest].concat())
        }
        OPEN => Ok(longs(&[1, 0])),
        FLUSH | RELEASE => Ok(Vec::new()),
        _ => Err(libc::ENOSYS),
    }
}

/// Serves the file, of the present `size`, from its mount until it is unmounted.
fn serve(mut device: &std::fs::File, size: &AtomicU64, has_failed: &AtomicBool) {
    let mut request = vec![0; 1 << 17];
    loop {
        let len = match device.read(&mut request) {
            Ok(len) => len,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
            Err(_) if has_failed.load(Ordering::SeqCst) => return,
            // The file is not mounted yet.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(_) => continue,
        };
        let word = |at: usize| {
            let bytes = request[..len].get(at..at + 4).unwrap_or_default();
            bytes.try_into().map_or(0, u32::from_le_bytes)
        };
        if [FORGET, BATCH_FORGET, INTERRUPT].contains(&word(4)) {
            continue;
        }
        let (body, error) = match answer(word(4), size.load(Ordering::SeqCst)) {
            Ok(body) => (body, 0),
            Err(errno) => (Vec::new(), -errno),
        };
        let head = words(&[16 + body.len() as u32, error.cast_unsigned(), word(8), word(12)]);
        let _ = device.write(&[head, body].concat());
    }
}

#[test]
fn the_facts_about_a_file_are_the_present_ones() {
    let Ok(device) = std::fs::File::options().read(true).write(true).open("/dev/fuse") else {
        return eprintln!("SKIPPED: /dev/fuse cannot be opened");
    };
    // For `mount`, which gets it.
    rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::empty()).unwrap();
    let folder = folder();
    let path = folder.path().join("file");
    std::fs::write(&path, "").unwrap();
    let (size, has_failed) = (AtomicU64::new(4096), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| serve(&device, &size, &has_failed));
        let fd = std::os::fd::AsRawFd::as_raw_fd(&device);
        let options = format!("fd={fd},rootmode={MODE:o},user_id=0,group_id=0");
        let mut mount = Command::new("mount");
        mount.args(["-i", "-t", "fuse", "-o", &options, "udm-test"]).arg(&path);
        let outcome = mount.output();
        if !outcome.as_ref().is_ok_and(|output| output.status.success()) {
            has_failed.store(true, Ordering::SeqCst);
            return eprintln!("SKIPPED: no FUSE file can be mounted: {outcome:?}");
        }
        let _mount = Mount(&path);
        rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::CLOEXEC).unwrap();
        let file = std::fs::File::open(&path).unwrap().into();
        assert_eq!(stat(&file).unwrap().stx_size, 4096);
        size.store(8192, Ordering::SeqCst);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 4096, "the kernel has a cache");
        assert_eq!(stat(&file).unwrap().stx_size, 8192);
    });
}
