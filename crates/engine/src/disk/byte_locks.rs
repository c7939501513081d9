//! The locks by which QEMU's programs keep each other from a file or a block device, taken and
//! respected here: a disk of a guest is refused, and QEMU refuses a disk that udm has.
//!
//! QEMU locks single bytes, for reading, with locks of the open file description. A locked byte at
//! [`USES`] plus N means that its owner uses permission N, a locked byte at [`FORBIDS`] plus N that
//! its owner forbids N to other programs. Each owner first takes its own bytes and then checks for
//! opposite ones, so that of two at the same time at least one is refused. Source: QEMU's
//! `block/file-posix.c`.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::facts::{NFS, SMB, kind_of};
use super::mode::OpenMode;

/// The byte of the first permission that an owner uses.
const USES: i64 = 100;
/// The byte of the first permission that an owner forbids.
const FORBIDS: i64 = 200;

/// The permissions: distances from [`USES`] and [`FORBIDS`].
const READ: i64 = 0;
const WRITE: i64 = 1;
const WRITE_THE_SAME: i64 = 2;
const RESIZE: i64 = 3;

/// The permissions that the owner of a descriptor uses, and those that it forbids.
fn rules(mode: OpenMode) -> (&'static [i64], &'static [i64]) {
    match mode {
        OpenMode::Exclusive => (&[READ, WRITE], &[READ, WRITE, WRITE_THE_SAME, RESIZE]),
        OpenMode::Shared => (&[READ], &[WRITE, RESIZE]),
        OpenMode::ReadOnly => (&[], &[]),
    }
}

/// Takes the locks of `mode`, which end with the descriptor. False if the locks of another program
/// are in the way.
pub(super) fn take(file: impl AsFd, mode: OpenMode) -> bool {
    let file = file.as_fd();
    let kind = kind_of(file);
    // Their servers know one kind of lock: this one would conflict with `flock` on the same file.
    if kind == NFS || SMB.contains(&kind) {
        return true;
    }
    let (uses, forbids) = rules(mode);
    for byte in uses.iter().map(|at| USES + at).chain(forbids.iter().map(|at| FORBIDS + at)) {
        match lock(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte) {
            Ok(_) => {}
            // Another program locks whole files in another way.
            Err(Errno::AGAIN | Errno::ACCESS) => return false,
            // The file system has no such locks.
            Err(_) => return true,
        }
    }
    are_free(file, opposite(mode))
}

/// Whether no lock of another program is in the way of `mode`. Takes no lock.
pub(super) fn may_use(file: impl AsFd, mode: OpenMode) -> bool {
    are_free(file.as_fd(), opposite(mode))
}

/// The bytes that are locked by those who exclude `mode`.
fn opposite(mode: OpenMode) -> impl Iterator<Item = i64> {
    let (uses, forbids) = rules(mode);
    uses.iter().map(|at| FORBIDS + at).chain(forbids.iter().map(|at| USES + at))
}

/// Whether no byte is locked. A lock that cannot be examined is one that QEMU does not respect
/// either.
fn are_free(file: BorrowedFd<'_>, mut bytes: impl Iterator<Item = i64>) -> bool {
    bytes.all(|byte| {
        lock(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte)
            .map_or(true, |found| found == libc::F_UNLCK)
    })
}

/// Sets or examines a lock of one byte. Returns the kind of the lock that was set or is in the way.
fn lock(file: impl AsFd, command: i32, kind: i32, byte: i64) -> Result<i32, Errno> {
    let mut words = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the kernel reads and writes this structure only, during the call.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, &raw mut words) };
    if result == 0 { Ok(words.l_type.into()) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};

    fn open(path: &std::path::Path) -> File {
        OpenOptions::new().read(true).write(true).open(path).unwrap()
    }

    #[test]
    fn of_two_that_exclude_each_other_the_second_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        use OpenMode::{Exclusive, ReadOnly, Shared};
        for (first, second, is_taken) in [
            (Exclusive, Exclusive, false),
            (Exclusive, Shared, false),
            (Shared, Exclusive, false),
            (Shared, Shared, true),
            (Exclusive, ReadOnly, true),
            (ReadOnly, Exclusive, true),
        ] {
            let (one, other) = (open(file.path()), open(file.path()));
            assert!(take(&one, first));
            assert_eq!(take(&other, second), is_taken, "{first:?} {second:?}");
            drop(one);
            assert!(take(&other, second), "{first:?} has ended");
        }
    }

    #[test]
    fn each_byte_of_another_program_counts() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let is_free_beside = |byte: i64, mode: OpenMode| {
            let (theirs, ours) = (open(file.path()), open(file.path()));
            lock(&theirs, libc::F_OFD_SETLK, libc::F_RDLCK, byte).unwrap();
            take(&ours, mode)
        };
        let refused = |mode: OpenMode| -> Vec<i64> {
            (90..220).filter(|byte| !is_free_beside(*byte, mode)).collect()
        };
        assert_eq!(refused(OpenMode::Exclusive), [100, 101, 102, 103, 200, 201]);
        assert_eq!(refused(OpenMode::Shared), [101, 103, 200]);
        assert_eq!(refused(OpenMode::ReadOnly), [0; 0]);
    }

    #[test]
    fn a_lock_of_another_kind_on_the_whole_file_refuses() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (theirs, ours) = (open(file.path()), open(file.path()));
        lock(&theirs, libc::F_OFD_SETLK, libc::F_WRLCK, USES).unwrap();
        assert!(!take(&ours, OpenMode::Exclusive));
    }
}
