//! Loop devices: the file below each, and other users of that file.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, stat};
use rustix::io::Errno;

use super::holders;
use super::ioctls::{self, Inode};
use crate::units::SECTOR;

/// A loop device of this machine.
struct Loop {
    name: String,
    /// The path of its file.
    path: PathBuf,
    file: Option<Inode>,
    start: u64,
    end: u64,
    is_read_only: bool,
}

impl Loop {
    fn all() -> Vec<Loop> {
        let names = holders::names_in(Path::new("/sys/block"));
        names
            .iter()
            .filter(|name| name.starts_with("loop"))
            .filter_map(|name| Loop::of(name))
            .collect()
    }

    fn of(name: &str) -> Option<Loop> {
        let folder = Path::new("/sys/block").join(name);
        let number = |file: &str| number_in(&folder.join(file));
        let (path, start) = file_of(&folder)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let device = rustix::fs::open(Path::new("/dev").join(name), flags, Mode::empty());
        Some(Loop {
            name: name.to_owned(),
            file: device
                .ok()
                .and_then(ioctls::loop_file)
                .or_else(|| stat(&path).ok().map(inode_of)),
            path,
            start,
            end: start.saturating_add(number("size")?.saturating_mul(SECTOR)),
            is_read_only: number("ro") == Some(1),
        })
    }

    fn overlaps(&self, other: &Loop) -> bool {
        self.file.is_some()
            && self.file == other.file
            && self.start < other.end
            && other.start < self.end
    }

    /// Whether it has a user with a claim.
    fn is_claimed(&self) -> bool {
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        let claim = rustix::fs::open(Path::new("/dev").join(&self.name), flags, Mode::empty());
        claim.is_err_and(|errno| errno == Errno::BUSY)
    }
}

/// The path of a loop device's file, and the first byte that the device has of it. `folder` is the
/// device's in sysfs.
pub(super) fn file_of(folder: &Path) -> Option<(PathBuf, u64)> {
    let path = std::fs::read_to_string(folder.join("loop/backing_file")).ok()?;
    Some((path.trim_end_matches('\n').into(), number_in(&folder.join("loop/offset"))?))
}

fn number_in(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn inode_of(stat: rustix::fs::Stat) -> Inode {
    ((major(stat.st_dev), minor(stat.st_dev)), stat.st_ino)
}

/// A loop device over the open file, unless both only read: its users change the file.
pub(super) fn device_on(file: impl AsFd, is_read_only: bool) -> Option<String> {
    let own = Some(inode_of(fstat(file).ok()?));
    let may_both = |device: &Loop| is_read_only && device.is_read_only;
    let device = Loop::all().into_iter().find(|found| found.file == own && !may_both(found))?;
    Some(format!("/dev/{0} (`losetup --detach /dev/{0}` ends that)", device.name))
}

/// Another user of the file below an open loop device or below a partition of a loop device. `user`
/// locks an open file, or finds its user, whose name may be unknown.
pub(super) fn user_below(
    device: impl AsFd,
    user: impl FnOnce(OwnedFd) -> Option<Option<String>>,
) -> Option<String> {
    let stat = fstat(device).ok()?;
    let folder = holders::folder((major(stat.st_rdev), minor(stat.st_rdev)));
    let folder = folder.canonicalize().ok()?;
    let own = folder.iter().rev().take(2).find_map(|name| Loop::of(name.to_str()?))?;
    let is_in_the_way = |other: &&Loop| {
        let may_both = other.is_read_only && own.is_read_only;
        other.name != own.name && other.overlaps(&own) && !may_both && other.is_claimed()
    };
    if let Some(other) = Loop::all().iter().find(is_in_the_way) {
        return Some(format!("the user of /dev/{}, which has the same file", other.name));
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(&own.path, flags, Mode::empty()).ok()?;
    let stat = fstat(&file).ok()?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_file || Some(inode_of(stat)) != own.file {
        return None;
    }
    let who = user(file)?.unwrap_or_else(|| "another program".into());
    Some(format!("{who}, which has its file {}", own.path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_file_overlap_where_they_share_bytes() {
        let part = |file: u64, start: u64, end: u64| Loop {
            name: String::new(),
            path: PathBuf::new(),
            file: Some(((8, 1), file)),
            start,
            end,
            is_read_only: false,
        };
        let own = part(5, 100, 200);
        for (other, overlaps) in [
            (part(5, 199, 300), true),
            (part(5, 200, 300), false),
            (part(5, 0, 101), true),
            (part(5, 0, 100), false),
            (part(6, 100, 200), false),
        ] {
            assert_eq!(own.overlaps(&other), overlaps, "{} to {}", other.start, other.end);
        }
        let unknown = || Loop { file: None, ..part(5, 100, 200) };
        assert!(!unknown().overlaps(&unknown()));
    }
}
