//! The claim on an open file or block device, against everybody who may use it at the same time:
//! udm by this or another path, QEMU, loop devices, and swap.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::thread;
use std::time::Duration;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Stat, flock, major, minor};
use rustix::io::Errno;

use super::loops::{Below, Foundation};
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
    let in_use = |who: String| Err(Unclaimed::InUse(Some(who)));
    // The locks come first: of two users at the same time, one sees the other.
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    if is_device {
        // Against others, O_EXCL is enough; and udev locks block devices now and then.
        lock_bytes(file, mode)?;
        if mode == OpenMode::Shared && is_written(file, &stat) {
            let path = fd_path(file);
            return Err(Unclaimed::InUse(holders::of_device(path.as_ref())));
        }
        if is_used_in_part(&stat, mode) {
            return in_use(OF_QEMU.into());
        }
    } else {
        lock(file, mode)?;
        if holders::is_swap(file) {
            return in_use("the kernel, which swaps to it (`swapoff` ends that)".into());
        }
    }
    if let Some(device) = loops::device_on(file, mode == OpenMode::Shared) {
        return in_use(device);
    }
    match is_device.then(|| user_below(file, mode)).flatten() {
        Some(who) => in_use(who),
        None => Ok(()),
    }
}

/// Whether a server, or another program that locks files or claims block devices, uses an open file
/// or device. The locks of this probe are released immediately.
pub fn is_in_use(file: impl AsFd) -> std::io::Result<bool> {
    let file = file.as_fd();
    let stat = rustix::fs::fstat(file)?;
    let has_locked_bytes = || !byte_locks::may_use(file, OpenMode::Exclusive);
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return Ok(is_written(file, &stat) || has_locked_bytes());
    }
    match flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            flock(file, FlockOperation::Unlock)?;
            Ok(has_locked_bytes())
        }
        Err(Errno::WOULDBLOCK) => Ok(true),
        // Where locks do not work, programs cannot have one.
        Err(_) => Ok(false),
    }
}

/// A user with locks like those of QEMU.
const OF_QEMU: &str = "QEMU, another device of udm, or a program that locks as QEMU does";

/// A path to an open file, by whatever name.
fn fd_path(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Whether an open block device has a user that may write to it.
fn is_written(file: BorrowedFd<'_>, stat: &Stat) -> bool {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let probe = || match rustix::fs::open(fd_path(file), flags, Mode::empty()) {
        Err(Errno::BUSY) => Err(Errno::WOULDBLOCK),
        _ => Ok(()),
    };
    // Another reader may probe at the same moment.
    soon(probe).is_err()
        && !holders::is_mounted_read_only((major(stat.st_rdev), minor(stat.st_rdev)))
}

/// Whether QEMU uses a partition of a block device, or the disk that it is a partition of.
fn is_used_in_part(stat: &Stat, mode: OpenMode) -> bool {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let may_use = |name: &str| {
        let device = rustix::fs::open(format!("/dev/{name}"), flags, Mode::empty());
        device.is_err() || device.is_ok_and(|device| byte_locks::may_use(&device, mode))
    };
    let related = holders::related((major(stat.st_rdev), minor(stat.st_rdev)));
    !related.iter().all(|(name, _)| may_use(name))
}

/// Another user of the file or device below an open loop device.
fn user_below(device: BorrowedFd<'_>, mode: OpenMode) -> Option<String> {
    let foundation = Foundation::of(device)?;
    if let Some(who) = foundation.neighbour() {
        return Some(who);
    }
    let user = match (foundation.open(), foundation.below()?) {
        (Ok(file), Below::File(_)) => user(file.as_fd(), mode)?,
        (Ok(_), Below::Device(_)) if holders::is_claimed(foundation.path()) => {
            holders::of_device(foundation.path())
        }
        (Ok(file), Below::Device(_)) => {
            (!byte_locks::may_use(&file, mode)).then(|| Some(OF_QEMU.to_owned()))?
        }
        // It has another name now, or none.
        (Err(_), Below::File(inode)) => Some(holders::of_inode(inode)?),
        (Err(_), Below::Device(_)) => return None,
    };
    let who = user.unwrap_or_else(|| "a device, a mount or another program".into());
    Some(format!("{who}, which has its file {}", foundation.path().display()))
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
    soon(lock).map_err(|_| Unclaimed::InUse(Some(OF_QEMU.into())))
}

/// Takes a lock. A lock outlives its closed descriptor as long as a child of another thread has a
/// copy, from its fork to its exec, and [`is_in_use`] holds one for a moment; so udm retries for a
/// tenth of a second before it reports a lock.
pub(super) fn soon<T>(lock: impl Fn() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
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

    #[test]
    fn a_claimed_file_is_in_use_and_the_probe_claims_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let again = || std::fs::File::options().read(true).write(true).open(file.path()).unwrap();
        for mode in [OpenMode::Exclusive, OpenMode::Shared] {
            let (owner, probe) = (again(), again());
            assert!(!is_in_use(&probe).unwrap());
            assert_eq!(claim(&owner, mode), Ok(()));
            // A reader's lock does not exclude the probe's, but its locked bytes show it.
            assert!(is_in_use(&probe).unwrap(), "{mode:?}");
            drop(owner);
            assert!(!is_in_use(&probe).unwrap());
        }
        // QEMU locks bytes only.
        let (qemu, probe) = (again(), again());
        assert!(byte_locks::take(&qemu, OpenMode::Exclusive));
        assert!(is_in_use(&probe).unwrap());
    }
}
