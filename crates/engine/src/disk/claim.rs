//! The claim on an open file or block device, against everybody who may use it at the same time:
//! udm by this or another path, QEMU, loop devices, and swap.

use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::Duration;

use rustix::fs::{FileType, FlockOperation, flock};
use rustix::io::Errno;

use super::mode::OpenMode;
use super::{byte_locks, holders, loops};

/// The reason for a refused claim.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unclaimed {
    /// Another user has a claim. Its name, if known.
    InUse(Option<String>),
    /// The file cannot be examined or locked.
    Failed(Errno),
}

/// Claims an open file or device until the descriptor is closed. Inspection needs no claim.
pub(crate) fn claim(file: impl AsFd, mode: OpenMode) -> Result<(), Unclaimed> {
    let file = file.as_fd();
    if mode == OpenMode::ReadOnly {
        return Ok(());
    }
    let stat = rustix::fs::fstat(file).map_err(Unclaimed::Failed)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        // Against others, O_EXCL is enough; and udev locks block devices now and then.
        return match loops::user_below(file, |file| user(file.as_fd(), mode)) {
            Some(who) => Err(Unclaimed::InUse(Some(who))),
            None => lock_bytes(file, mode),
        };
    }
    if holders::is_swap(file) {
        let who = "the kernel, which swaps to it (`swapoff` ends that)";
        return Err(Unclaimed::InUse(Some(who.into())));
    }
    if let Some(device) = loops::device_on(file, mode == OpenMode::Shared) {
        return Err(Unclaimed::InUse(Some(device)));
    }
    lock(file, mode)
}

/// The user with a lock on the file, whose name may be unknown.
fn user(file: BorrowedFd<'_>, mode: OpenMode) -> Option<Option<String>> {
    match lock(file, mode) {
        Err(Unclaimed::InUse(who)) => Some(who),
        // Where locks do not work, users cannot have one.
        Ok(()) | Err(Unclaimed::Failed(_)) => None,
    }
}

fn lock(file: BorrowedFd<'_>, mode: OpenMode) -> Result<(), Unclaimed> {
    let operation = match mode {
        OpenMode::Shared => FlockOperation::NonBlockingLockShared,
        OpenMode::Exclusive | OpenMode::ReadOnly => FlockOperation::NonBlockingLockExclusive,
    };
    match soon(|| flock(file, operation)) {
        Ok(()) => lock_bytes(file, mode),
        Err(Errno::WOULDBLOCK) => Err(Unclaimed::InUse(holders::of(file))),
        Err(errno) => Err(Unclaimed::Failed(errno)),
    }
}

fn lock_bytes(file: BorrowedFd<'_>, mode: OpenMode) -> Result<(), Unclaimed> {
    let lock = || byte_locks::take(file, mode).then_some(()).ok_or(Errno::WOULDBLOCK);
    let who = "QEMU, or a program that locks as QEMU does";
    soon(lock).map_err(|_| Unclaimed::InUse(Some(who.into())))
}

/// Takes a lock. A lock outlives its closed descriptor as long as a child of another thread has a
/// copy, from its fork to its exec; so udm retries for a tenth of a second before it reports a
/// lock.
fn soon(lock: impl Fn() -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    for _ in 0..50 {
        match lock() {
            Err(Errno::WOULDBLOCK) => thread::sleep(Duration::from_millis(2)),
            locked => return locked,
        }
    }
    lock()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_inspects_has_no_claim_and_needs_none() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let again = || std::fs::File::options().read(true).write(true).open(file.path()).unwrap();
        let first = again();
        assert_eq!(claim(&first, OpenMode::ReadOnly), Ok(()));
        let second = again();
        assert_eq!(claim(&second, OpenMode::Exclusive), Ok(()));
        assert_eq!(claim(again(), OpenMode::ReadOnly), Ok(()));
        for mode in [OpenMode::Exclusive, OpenMode::Shared] {
            assert!(matches!(claim(&first, mode), Err(Unclaimed::InUse(_))), "{mode:?}");
        }
    }
}
