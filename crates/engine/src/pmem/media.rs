//! Opening a cache device: its kind, its length, its lock, and the method that makes it durable.
//!
//! 1. No property is assumed. The kernel's information about the opened file (its type, its file
//!    system, whether MAP_SYNC is accepted) decides how stores become durable. Without such
//!    information `msync` is used, which is correct everywhere except on DAX devices.
//! 2. A medium is written by one owner at a time: an exclusive lock on a file or DAX device; O_EXCL
//!    on a block device, which also keeps out mounts and other users.
//! 3. A block device is never taken for DAX because of its `queue/dax`: that describes file systems
//!    on it, while its own pages go through the page cache. If MAP_SYNC is accepted, it is DAX.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, fstatfs, major, minor};
use rustix::io::Errno;

use super::Persistence;
use super::copy::CAN_FLUSH;
use crate::base::area::Area;
use crate::disk::claim::{Unclaimed, claim};
use crate::disk::{OpenMode, holders};
use crate::error::{Error, Kind, Result};
use crate::units::SECTOR;

/// The purpose of opening a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// To inspect, even while it is in use.
    ReadOnly,
    /// To read, while no process may change it.
    Shared,
    /// To use, alone.
    Exclusive,
}

/// The kind of thing that the path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nature {
    /// A character device of the DAX subsystem.
    DaxDevice { is_volatile: bool },
    /// A block device.
    BlockDevice,
    /// A file on a file system that exists in memory only.
    Memory(&'static str),
    /// Any other file.
    File,
}

/// An opened medium, not mapped yet.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: File,
    pub(super) name: String,
    pub(super) kernel_name: String,
    /// The first byte of the used part; if the part is written, a multiple of `page_bytes`.
    pub(super) start: u64,
    /// The bytes of that part.
    pub(super) len_bytes: u64,
    /// The bytes of all of it.
    pub(super) whole_bytes: u64,
    /// The unit in which the kernel maps and unmaps: a memory page, or a huge one.
    pub(super) page_bytes: usize,
    pub(super) nature: Nature,
}

/// How a medium becomes durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Durability {
    pub(super) persistence: Persistence,
    pub(super) is_volatile: bool,
    pub(super) description: String,
}

/// Opens `area` of `path`, and locks it if it is to be used.
pub(super) fn open(path: &Path, access: Access, area: Area) -> Result<Opened> {
    let name = area.named(&path.display().to_string());
    let fail = |e: std::io::Error| Error::from_io("open cache device", path.display(), e);
    let is_block = path.metadata().map_err(fail)?.file_type().is_block_device();
    let mut options = OpenOptions::new();
    options.read(true).write(access == Access::Exclusive);
    if is_block && access == Access::Exclusive {
        options.custom_flags(OFlags::EXCL.bits() as i32);
    }
    let file = match options.open(path) {
        Err(e) if e.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
            return Err(in_use(&name, holders::of_device(path)));
        }
        other => other.map_err(fail)?,
    };
    let mode = match access {
        Access::Exclusive => OpenMode::Exclusive,
        Access::Shared => OpenMode::Shared,
        Access::ReadOnly => OpenMode::ReadOnly,
    };
    match claim(&file, mode) {
        Ok(()) => identify(file, &path.display().to_string(), area, access),
        Err(Unclaimed::InUse(who)) => Err(in_use(&name, who)),
        Err(Unclaimed::Failed(errno)) => {
            Err(Error::from_io("lock cache device", name, errno.into()))
        }
    }
}

fn in_use(name: &str, who: Option<String>) -> Error {
    let who = who.unwrap_or_else(|| "another udm device, a mount or another program".into());
    let message = format!("cache device {name} is in use by {who}; release it there first");
    Error::new(Kind::Busy, message)
}

/// Finds out what was opened.
fn identify(mut file: File, device: &str, area: Area, access: Access) -> Result<Opened> {
    let name = area.named(device);
    let fail = |e: std::io::Error| Error::from_io("examine cache device", &name, e);
    let metadata = file.metadata().map_err(fail)?;
    let kind = metadata.file_type();
    let number = format!("{}:{}", major(metadata.rdev()), minor(metadata.rdev()));
    let mut page_bytes = rustix::param::page_size();
    let (len_bytes, nature, kernel_name);
    if kind.is_char_device() {
        let geometry = dax_geometry(&Path::new("/sys/dev/char").join(&number), &name)?;
        (len_bytes, page_bytes) = (geometry.len_bytes, geometry.align_bytes);
        nature = Nature::DaxDevice { is_volatile: geometry.is_volatile };
        kernel_name = number;
    } else if kind.is_block_device() {
        len_bytes = file.seek(SeekFrom::End(0)).map_err(fail)?;
        nature = Nature::BlockDevice;
        kernel_name = number;
    } else if kind.is_file() {
        len_bytes = metadata.len();
        let system = fstatfs(&file).map_err(|e| fail(e.into()))?;
        nature = nature_of_file_system(system.f_type as u64);
        if nature == Nature::Memory(HUGETLBFS) {
            page_bytes = system.f_bsize as usize;
        }
        kernel_name = device.to_owned();
    } else {
        let message = format!("cache device {name} is neither a file nor a device");
        return Err(Error::new(Kind::Unsupported, message));
    }
    if len_bytes == 0 {
        return Err(Error::new(Kind::NoSpace, format!("cache device {name} has a size of 0")));
    }
    // A cache on a disk, at any sector, may be inspected as well.
    let unit = if access == Access::Exclusive { page_bytes as u64 } else { SECTOR };
    let part = area.on(device, len_bytes, (unit, SECTOR))?;
    Ok(Opened {
        file,
        name,
        kernel_name,
        start: part.start,
        len_bytes: part.end - part.start,
        whole_bytes: len_bytes,
        page_bytes,
        nature,
    })
}

const HUGETLBFS: &str = "hugetlbfs";

/// Magic numbers as in statfs(2).
fn nature_of_file_system(magic: u64) -> Nature {
    match magic & 0xFFFF_FFFF {
        0x0102_1994 => Nature::Memory("tmpfs"),
        0x8584_58F6 => Nature::Memory("ramfs"),
        0x9584_58F6 => Nature::Memory(HUGETLBFS),
        _ => Nature::File,
    }
}

/// The size and alignment that sysfs gives for a DAX device.
#[derive(Debug, PartialEq, Eq)]
struct DaxGeometry {
    len_bytes: u64,
    align_bytes: usize,
    is_volatile: bool,
}

/// Reads the geometry of the character device that `folder` in sysfs describes.
fn dax_geometry(folder: &Path, name: &str) -> Result<DaxGeometry> {
    let subsystem = std::fs::read_link(folder.join("subsystem")).unwrap_or_default();
    if subsystem.file_name() != Some("dax".as_ref()) {
        let message = format!("cache device {name} is a character device, but not a DAX device");
        return Err(Error::new(Kind::Unsupported, message));
    }
    let number = |file: &str| -> Option<u64> {
        std::fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
    };
    let len_bytes = number("size").ok_or_else(|| {
        Error::new(Kind::Io, format!("the kernel does not report the size of DAX device {name}"))
    })?;
    // The place of `align` has changed over time; every driver starts from 2 MiB.
    let places = ["align", "device/align", "../dax_region/align", "device/dax_region/align"];
    let align_bytes = places.into_iter().find_map(number).unwrap_or(2 << 20) as usize;
    if !align_bytes.is_power_of_two() || !len_bytes.is_multiple_of(align_bytes as u64) {
        let message = format!(
            "DAX device {name} has {len_bytes} bytes in pages of {align_bytes}, which is invalid"
        );
        return Err(Error::new(Kind::Io, message));
    }
    // Persistent memory is enumerated below an NVDIMM bus; ordinary memory set aside is not.
    let place = folder.canonicalize().unwrap_or_default();
    let is_volatile = !place.to_string_lossy().contains("/ndbus");
    Ok(DaxGeometry { len_bytes, align_bytes, is_volatile })
}

/// The method that makes stores to a medium durable. `is_synchronous`: MAP_SYNC was accepted.
/// `wish`: the user's choice.
pub(super) fn decide(
    nature: Nature,
    is_synchronous: bool,
    wish: Option<Persistence>,
    name: &str,
) -> Result<Durability> {
    let (found, is_volatile, what) = match nature {
        Nature::DaxDevice { is_volatile: false } => (Persistence::Cpu, false, "DAX device"),
        Nature::DaxDevice { is_volatile: true } => {
            (Persistence::Cpu, true, "DAX device of ordinary memory")
        }
        Nature::Memory(system) => (Persistence::Cpu, true, system),
        Nature::File if is_synchronous => {
            (Persistence::Cpu, false, "file on a DAX file system (MAP_SYNC)")
        }
        Nature::BlockDevice if is_synchronous => {
            (Persistence::Cpu, false, "block device with direct access (MAP_SYNC)")
        }
        Nature::File => (Persistence::Msync, false, "file in the page cache"),
        Nature::BlockDevice => (Persistence::Msync, false, "block device through the page cache"),
    };
    let is_dax_device = matches!(nature, Nature::DaxDevice { .. });
    // If the CPU cannot flush, the kernel must, where it can.
    let can_flush = CAN_FLUSH || is_volatile;
    let found = if can_flush || is_dax_device { found } else { Persistence::Msync };
    let persistence = wish.unwrap_or(found);
    if persistence == Persistence::Cpu && !can_flush {
        let message = format!("cache device {name}: stores cannot be flushed on this kind of CPU");
        return Err(Error::new(Kind::Unsupported, message));
    }
    if persistence == Persistence::Msync && is_dax_device {
        let message =
            format!("cache device {name}: a DAX device lacks msync; leave out persist=msync");
        return Err(Error::new(Kind::Invalid, message));
    }
    let mut description = match (is_volatile, persistence) {
        (true, _) => format!("{what}: survives the server, but is VOLATILE: lost at a power cut"),
        (_, Persistence::Cpu) => format!("{what}: stores are durable once flushed from the CPU"),
        (_, Persistence::Msync) => format!("{what}: stores are durable after msync"),
    };
    match wish {
        Some(Persistence::Cpu) if found != persistence => {
            description.push_str(" (because of persist=cpu; msync would be needed)");
        }
        Some(Persistence::Msync) if found != persistence => {
            description.push_str(" (by msync, because of persist=msync)");
        }
        _ => {}
    }
    Ok(Durability { persistence, is_volatile, description })
}

#[cfg(test)]
mod tests {
    use std::fs::create_dir_all;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn dax_devices_are_read_from_sysfs() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("devices/ndbus0/region0/dax0.0");
        create_dir_all(&device).unwrap();
        create_dir_all(root.path().join("bus/dax")).unwrap();
        symlink(root.path().join("bus/dax"), device.join("subsystem")).unwrap();
        std::fs::write(device.join("size"), "1056964608\n").unwrap();
        std::fs::write(device.join("align"), "2097152\n").unwrap();
        let expected =
            DaxGeometry { len_bytes: 1_056_964_608, align_bytes: 2 << 20, is_volatile: false };
        assert_eq!(dax_geometry(&device, "dax0.0").unwrap(), expected);

        std::fs::write(device.join("align"), "3").unwrap();
        assert_eq!(dax_geometry(&device, "dax0.0").unwrap_err().kind(), Kind::Io);
        std::fs::remove_file(device.join("size")).unwrap();
        assert_eq!(dax_geometry(&device, "dax0.0").unwrap_err().kind(), Kind::Io);
        let error = open(Path::new("/dev/null"), Access::Exclusive, Area::default()).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.to_string().contains("not a DAX device"), "{error}");
    }

    #[test]
    fn durability_is_found_out_and_may_be_overruled() {
        use Persistence::{Cpu, Msync};
        let decide = |nature, sync, wish| decide(nature, sync, wish, "x").map_err(|e| e.kind());
        let of = |nature, sync| decide(nature, sync, None).unwrap();
        let devdax = Nature::DaxDevice { is_volatile: false };
        assert_eq!(of(Nature::File, false).persistence, Msync);
        assert_eq!(of(Nature::BlockDevice, false).persistence, Msync);
        assert!(of(Nature::Memory("tmpfs"), false).is_volatile);
        assert!(of(Nature::Memory("tmpfs"), false).description.contains("VOLATILE"));
        assert!(of(Nature::DaxDevice { is_volatile: true }, true).is_volatile);
        assert_eq!(decide(devdax, true, Some(Msync)), Err(Kind::Invalid));
        let forced = decide(Nature::Memory("tmpfs"), false, Some(Msync)).unwrap();
        assert_eq!((forced.persistence, forced.is_volatile), (Msync, true));
        if CAN_FLUSH {
            assert_eq!(of(devdax, true).persistence, Cpu);
            assert_eq!(of(Nature::File, true).persistence, Cpu);
            let forced = decide(Nature::File, false, Some(Cpu)).unwrap();
            assert_eq!(forced.persistence, Cpu);
            assert!(forced.description.contains("msync would be needed"));
        } else {
            assert_eq!(decide(devdax, true, None), Err(Kind::Unsupported));
        }
    }

    #[test]
    fn odd_things_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let kind = |path: &Path| open(path, Access::ReadOnly, Area::default()).unwrap_err().kind();
        assert_eq!(kind(folder.path()), Kind::Unsupported);
        assert_eq!(kind(&folder.path().join("none")), Kind::NotFound);
        let empty = folder.path().join("empty");
        std::fs::write(&empty, "").unwrap();
        assert_eq!(kind(&empty), Kind::NoSpace);
    }
}
