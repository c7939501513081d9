//! Loop devices: the file or device below each, and other users of it.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, stat};
use rustix::io::Errno;

use super::holders::{self, Number};
use super::ioctls::{self, Inode};
use crate::units::SECTOR;

/// The file or device below a loop device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Below {
    /// A file.
    File(Inode),
    /// A block device, by whatever node.
    Device(Number),
}

impl Below {
    fn of(stat: &rustix::fs::Stat) -> Below {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => Below::Device((major(stat.st_rdev), minor(stat.st_rdev))),
            _ => Below::File(((major(stat.st_dev), minor(stat.st_dev)), stat.st_ino)),
        }
    }
}

/// A loop device of this machine, or a part of it.
struct Loop {
    name: String,
    /// The name of the device that it is, or is a part of.
    whole: String,
    /// The path of its file.
    path: PathBuf,
    below: Option<Below>,
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
        let (path, start) = file_of(&folder)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let device = rustix::fs::open(Path::new("/dev").join(name), flags, Mode::empty());
        let told = device.ok().and_then(ioctls::loop_file);
        let told = told.map(|(inode, device)| device.map_or(Below::File(inode), Below::Device));
        Some(Loop {
            name: name.to_owned(),
            whole: name.to_owned(),
            below: told.or_else(|| stat(&path).ok().map(|stat| Below::of(&stat))),
            path,
            start,
            end: start.saturating_add(number_in(&folder.join("size"))?.saturating_mul(SECTOR)),
            is_read_only: number_in(&folder.join("ro")) == Some(1),
        })
    }

    /// The loop device that sysfs describes in `folder`, or that a partition there is a part of.
    fn at(folder: &Path) -> Option<Loop> {
        let name = folder.file_name()?.to_str()?;
        if !folder.join("partition").exists() {
            return Loop::of(name);
        }
        Loop::of(folder.parent()?.file_name()?.to_str()?)?.part(folder, name)
    }

    /// Its partition `name`.
    fn part(&self, folder: &Path, name: &str) -> Option<Loop> {
        let bytes = |file: &str| Some(number_in(&folder.join(file))?.saturating_mul(SECTOR));
        let start = self.start.saturating_add(bytes("start")?);
        let (name, path) = (name.to_owned(), self.path.clone());
        let (whole, end) = (self.name.clone(), start.saturating_add(bytes("size")?));
        Some(Loop { name, whole, path, start, end, ..*self })
    }

    /// Its partitions, or the whole if it has none.
    fn parts(self) -> Vec<Loop> {
        let folder = Path::new("/sys/block").join(&self.name);
        let names = holders::names_in(&folder);
        let parts = names.iter().filter(|name| folder.join(name).join("partition").exists());
        let parts: Vec<Loop> =
            parts.filter_map(|name| self.part(&folder.join(name), name)).collect();
        if parts.is_empty() { vec![self] } else { parts }
    }

    fn overlaps(&self, other: &Loop) -> bool {
        self.below.is_some()
            && self.below == other.below
            && self.start < other.end
            && other.start < self.end
    }

    /// Whether it has a user with a claim.
    fn is_claimed(&self) -> bool {
        holders::is_claimed(Path::new("/dev").join(&self.name))
    }
}

/// The path of a loop device's file, and the first byte that the device has of it. `folder` is the
/// device's in sysfs.
pub(super) fn file_of(folder: &Path) -> Option<(PathBuf, u64)> {
    let mut path = std::fs::read(folder.join("loop/backing_file")).ok()?;
    path.pop_if(|last| *last == b'\n');
    Some((OsString::from_vec(path).into(), number_in(&folder.join("loop/offset"))?))
}

fn number_in(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// A loop device over the open file or block device, unless both only read: its users change the
/// file. A device and its partitions count as one.
pub(super) fn device_on(file: impl AsFd, is_read_only: bool) -> Option<String> {
    let own = Below::of(&fstat(file).ok()?);
    let own = match own {
        Below::File(_) => vec![own],
        Below::Device(number) => {
            let related = holders::related(number).into_iter().map(|(_, number)| number);
            related.chain([number]).map(Below::Device).collect()
        }
    };
    let is_on = |device: &Loop| device.below.is_some_and(|below| own.contains(&below));
    let may_both = |device: &Loop| is_read_only && device.is_read_only;
    let device = Loop::all().into_iter().find(|found| is_on(found) && !may_both(found))?;
    Some(format!("/dev/{0} (`losetup --detach /dev/{0}` ends that)", device.name))
}

/// The file or device below an open loop device, or below a partition of one.
pub(super) struct Foundation {
    own: Loop,
}

impl Foundation {
    /// None for other devices.
    pub fn of(device: impl AsFd) -> Option<Foundation> {
        let stat = fstat(device).ok()?;
        let folder = holders::folder((major(stat.st_rdev), minor(stat.st_rdev)));
        Loop::at(&folder.canonicalize().ok()?).map(|own| Foundation { own })
    }

    /// The path of its file.
    pub fn path(&self) -> &Path {
        &self.own.path
    }

    /// The user of another loop device with some of the same bytes, unless both only read.
    pub fn neighbour(&self) -> Option<String> {
        let own = &self.own;
        let is_in_the_way = |other: &Loop| {
            let may_both = other.is_read_only && own.is_read_only;
            other.overlaps(own) && !may_both && other.is_claimed()
        };
        let mut others = Loop::all().into_iter().filter(|other| other.name != own.whole);
        let other = others.find_map(|other| other.parts().into_iter().find(is_in_the_way))?;
        Some(format!("the user of /dev/{}, which has the same file", other.name))
    }

    /// The file or device.
    pub fn below(&self) -> Option<Below> {
        self.own.below
    }

    /// Opens it, if the path leads there.
    pub fn open(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(&self.own.path, flags, Mode::empty())?;
        let found = Below::of(&fstat(&file)?);
        if Some(found) == self.own.below { Ok(file) } else { Err(Errno::STALE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_file_overlap_where_they_share_bytes() {
        let part = |file: u64, start: u64, end: u64| Loop {
            name: String::new(),
            whole: String::new(),
            path: PathBuf::new(),
            below: Some(Below::File(((8, 1), file))),
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
        let unknown = || Loop { below: None, ..part(5, 100, 200) };
        assert!(!unknown().overlaps(&unknown()));
        let device = |minor| Loop { below: Some(Below::Device((8, minor))), ..part(5, 100, 200) };
        assert!(device(1).overlaps(&device(1)) && !device(1).overlaps(&device(2)));
        assert!(!device(1).overlaps(&own));
    }
}
