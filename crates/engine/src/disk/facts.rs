//! The facts that the kernel has about a file or a block device, by which `identity` knows it.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Statx, StatxFlags};

use super::ioctls::{self, Inode, Uuid};
use crate::units::SECTOR;

/// STATX_DIOALIGN.
pub(super) const DIO_ALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// File systems with rules of their own, by `f_type`.
const FUSE: u64 = 0x6573_5546;
const FAT: u64 = 0x4D44;
const EXFAT: u64 = 0x2011_BAB0;
const XFS: u64 = 0x5846_5342;
const BCACHEFS: u64 = 0xCA45_1A4E;

pub(super) const NFS: u64 = 0x6969;
pub(super) const SMB: [u64; 3] = [0x517B, 0xFF53_4D42, 0xFE53_4D42];

/// File systems of servers: NFS, 9p, SMB (three), Ceph, AFS (two), Coda, Lustre, VirtualBox. A
/// server may export a clone or a snapshot, whose files have the same inodes and times of birth.
const REMOTE: [u64; 11] = [
    NFS,
    0x0102_1997,
    SMB[0],
    SMB[1],
    SMB[2],
    0x00C3_6400,
    0x5346_414F,
    0x6B41_4653,
    0x7375_7245,
    0x0BD0_0BD0,
    0x786F_4256,
];

/// The longest chain of loop devices on loop devices that is followed.
const LOOPS_MAX: u32 = 8;

/// The facts about a file. A zero, or empty text, stands for a fact that the kernel does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FileFacts {
    /// The UUID of its file system, if all kernels report it (XFS).
    pub uuid: Uuid,
    /// The UUID that only newer kernels report (Linux 6.9).
    pub late_uuid: Uuid,
    /// `f_fsid`, which may be made of the UUID or of the device's number.
    pub fsid: u64,
    /// Which of the file system's subvolumes, each of which numbers its inodes, unless `f_fsid` has
    /// it.
    pub subvolume: u64,
    /// The number of its inode.
    pub inode: u64,
    /// Whether another mount has the same numbers of inodes.
    pub inodes_last: bool,
    /// Whether a file in a clone or snapshot of its file system may have all of the same numbers.
    pub has_twins: bool,
    /// Seconds and nanoseconds.
    pub born: (i64, u32),
    /// The generation of its inode.
    pub generation: u32,
    /// The type and the source of its mount.
    pub mount: String,
    /// Its path.
    pub path: String,
}

/// The facts about a whole block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DiskFacts {
    /// Found attributes in sysfs: the path there, and the text.
    pub attributes: Vec<(&'static str, String)>,
    /// The kernel's own word for it; without `/sys`, its number.
    pub name: String,
    /// Its size. Without `/sys`, a partition counts as a device of its own.
    pub bytes: u64,
    /// If it is a loop device.
    pub backing: Option<Backing>,
}

/// The backing file of a loop device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Backing {
    /// The file or device, if the path of it leads there.
    pub found: Option<Box<Facts>>,
    /// The path, and the numbers by which the kernel knows the file.
    pub place: String,
    /// The first byte of the file that the loop device has.
    pub start: u64,
}

/// All facts about a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Facts {
    /// A file.
    File(FileFacts),
    /// A block device.
    Disk(DiskFacts),
    /// A partition of a block device: its number, first byte and length.
    Partition(DiskFacts, u64, u64, u64),
}

impl Facts {
    /// The facts that a kernel before Linux 6.9 has. Subvolumes were added in Linux 6.10. Where
    /// inodes do not last, and on remote file systems, the time of birth came late.
    pub fn on_older_kernel(&self) -> Facts {
        match self {
            Facts::File(file) => {
                let late_uuid = Uuid::default();
                let born = if file.inodes_last && !file.has_twins { file.born } else { (0, 0) };
                let has_twins = file.has_twins || file.subvolume != 0;
                Facts::File(FileFacts { late_uuid, subvolume: 0, has_twins, born, ..file.clone() })
            }
            Facts::Disk(disk) => Facts::Disk(disk.on_older_kernel()),
            Facts::Partition(disk, nth, start, len) => {
                Facts::Partition(disk.on_older_kernel(), *nth, *start, *len)
            }
        }
    }
}

impl DiskFacts {
    fn on_older_kernel(&self) -> DiskFacts {
        let older = |backing: &Backing| Backing {
            found: backing.found.as_ref().map(|found| Box::new(found.on_older_kernel())),
            ..backing.clone()
        };
        DiskFacts { backing: self.backing.as_ref().map(older), ..self.clone() }
    }
}

/// The attributes of a block device in sysfs that may identify it.
pub(super) const ATTRIBUTES: [&str; 11] = [
    "dm/uuid",
    "dm/name",
    "loop/backing_file",
    "md/uuid",
    "wwid",
    "device/wwid",
    "serial",
    "device/serial",
    "backend",
    "device/model",
    "device/uuid",
];

/// The number of a mount, which no other mount of this boot gets. Since Linux 6.8.
pub(super) const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// STATX_SUBVOL: since Linux 6.10.
const SUBVOLUME: StatxFlags = StatxFlags::from_bits_retain(0x8000);

/// AT_STATX_FORCE_SYNC: not from a cache of the kernel. A server of files, or a FUSE program, may
/// know of a change before the kernel does.
const FRESH: AtFlags = AtFlags::from_bits_retain(0x2000);

/// The present information about an open file.
pub(super) fn stat(file: &OwnedFd) -> rustix::io::Result<Statx> {
    let wanted =
        StatxFlags::BASIC_STATS | StatxFlags::BTIME | DIO_ALIGN | MNT_ID_UNIQUE | SUBVOLUME;
    rustix::fs::statx(file, "", AtFlags::EMPTY_PATH | FRESH, wanted)
}

/// The facts about an open file or block device.
pub(super) fn of(file: &OwnedFd, stat: &Statx) -> Facts {
    within(file, stat, LOOPS_MAX)
}

fn within(file: &OwnedFd, stat: &Statx, loops: u32) -> Facts {
    if FileType::from_raw_mode(stat.stx_mode.into()) != FileType::BlockDevice {
        return Facts::File(of_file(file, stat));
    }
    let device = number(stat);
    let own = |name: &str| text_of(folder(device).join(name));
    let value = |name: &str| own(name).and_then(|text| text.parse::<u64>().ok());
    let disk = of_disk(file, device, loops);
    match (value("partition"), value("start"), value("size")) {
        (Some(nth), Some(start), Some(len)) => {
            let (start, len) = (start.saturating_mul(SECTOR), len.saturating_mul(SECTOR));
            Facts::Partition(disk, nth, start, len)
        }
        _ => Facts::Disk(disk),
    }
}

fn of_file(file: &OwnedFd, stat: &Statx) -> FileFacts {
    let kind = kind_of(file);
    let fsid = rustix::fs::fstatvfs(file).map_or(0, |statvfs| statvfs.f_fsid);
    let uuid = if kind == XFS { ioctls::xfs_uuid(file) } else { None };
    let subvolume = subvolume_of(kind, stat.stx_mask, stat.stx_subvol);
    let born = match stat.stx_mask & StatxFlags::BTIME.bits() {
        0 => (0, 0),
        _ => (stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec),
    };
    // A program that serves a FUSE mount would have to answer the request.
    let generation = if kind == FUSE { None } else { ioctls::generation(file) };
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let mount = mount_of(file).unwrap_or_default();
    FileFacts {
        uuid: uuid.unwrap_or_default(),
        late_uuid: ioctls::fs_uuid(file).unwrap_or_default(),
        fsid,
        subvolume,
        inode: stat.stx_ino,
        inodes_last: inodes_last(kind, &mount.1),
        has_twins: has_twins(kind, subvolume),
        born,
        generation: generation.unwrap_or_default(),
        mount: mount.0,
        path: path.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
    }
}

/// The kind of the file system of an open file; 0 if it is unknown.
pub(super) fn kind_of(file: impl AsFd) -> u64 {
    rustix::fs::fstatfs(file).map_or(0, |statfs| statfs.f_type as u64 & 0xFFFF_FFFF)
}

/// Whether another mount of a file system of this kind, with these options, has the same numbers of
/// inodes. SMB has them if the server numbers its files.
fn inodes_last(kind: u64, options: &str) -> bool {
    let is_numbered = !SMB.contains(&kind) || options.split(',').any(|word| word == "serverino");
    ![FUSE, FAT, EXFAT].contains(&kind) && is_numbered
}

/// Which subvolume a file is in, where that tells files apart. `f_fsid` of btrfs has it already.
fn subvolume_of(kind: u64, mask: u32, subvolume: u64) -> u64 {
    if kind == BCACHEFS && mask & SUBVOLUME.bits() != 0 { subvolume } else { 0 }
}

/// See [`FileFacts::has_twins`].
fn has_twins(kind: u64, subvolume: u64) -> bool {
    REMOTE.contains(&kind) || kind == BCACHEFS && subvolume == 0
}

/// The type and the source of the mount that an open file is on, and the options of its file
/// system.
fn mount_of(file: &OwnedFd) -> Option<(String, String)> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).ok()?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim();
    // Paths there may have any bytes.
    let mounts = std::fs::read("/proc/self/mountinfo").ok()?;
    mount_in(&String::from_utf8_lossy(&mounts), id)
}

/// The same for the mount with the number `id` in the text of `mountinfo`.
fn mount_in(mounts: &str, id: &str) -> Option<(String, String)> {
    let line = mounts.lines().find(|line| line.split(' ').next() == Some(id))?;
    let (_, end) = line.split_once(" - ")?;
    let mut words = end.split(' ');
    let place = format!("{} {}", words.next()?, words.next()?);
    Some((place, words.next().unwrap_or_default().to_owned()))
}

fn of_disk(file: &OwnedFd, device: (u32, u32), loops: u32) -> DiskFacts {
    let attribute = |name| Some((name, sysfs(device, name)?));
    let attributes: Vec<_> = ATTRIBUTES.into_iter().filter_map(attribute).collect();
    let sectors = text_of(whole(device).join("size")).and_then(|text| text.parse::<u64>().ok());
    let bytes = sectors.map(|sectors| sectors.saturating_mul(SECTOR));
    let bytes = bytes.or_else(|| rustix::fs::seek(file, SeekFrom::End(0)).ok());
    let path = attributes.iter().find(|(name, _)| *name == "loop/backing_file");
    DiskFacts {
        name: kernel_word(&whole(device)).unwrap_or_else(|| format!("{}:{}", device.0, device.1)),
        bytes: bytes.unwrap_or(0),
        backing: path.map(|(_, path)| backing(file, device, path, loops)),
        attributes,
    }
}

/// The backing file of the loop device that is opened at `device`.
fn backing(file: &OwnedFd, device: (u32, u32), path: &str, loops: u32) -> Backing {
    let known = ioctls::loop_file(file).map(|(inode, _)| inode);
    let start = sysfs(device, "loop/offset").and_then(|text| text.parse().ok()).unwrap_or(0);
    let place = match known {
        Some(((major, minor), inode)) => format!("{path} (device {major}:{minor} inode {inode})"),
        None => path.to_owned(),
    };
    let found = || {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        let stat = stat(&file).ok()?;
        let there = ((stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino);
        let loops = loops_left(known, there, loops)?;
        Some(Box::new(within(&file, &stat, loops)))
    };
    Backing { found: found(), place, start }
}

/// How many more loop devices may be followed below this one. `None` if none may, or if the file
/// at its path (`there`) is not the one that the kernel knows.
fn loops_left(known: Option<Inode>, there: Inode, loops: u32) -> Option<u32> {
    if known == Some(there) { loops.checked_sub(1) } else { None }
}

/// The kernel's own name of a block device: `vda`, `loop0`.
fn kernel_word(folder: &Path) -> Option<String> {
    let link = std::fs::canonicalize(folder).ok()?;
    link.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// The number of a block device, major and minor.
pub(super) fn number(stat: &Statx) -> (u32, u32) {
    (stat.stx_rdev_major, stat.stx_rdev_minor)
}

fn folder((major, minor): (u32, u32)) -> PathBuf {
    format!("/sys/dev/block/{major}:{minor}").into()
}

/// The folder of the disk that a device is, or is a partition of. The kernel resolves the link: the
/// parent folder of a partition's folder is its disk's folder.
fn whole(device: (u32, u32)) -> PathBuf {
    let own = folder(device);
    if own.join("partition").exists() { own.join("..") } else { own }
}

/// The content of `file` in sysfs for a block device, or for the disk that it is a partition of.
/// Empty content counts as none.
pub(super) fn sysfs(device: (u32, u32), file: &str) -> Option<String> {
    text_of(folder(device).join(file)).or_else(|| text_of(whole(device).join(file)))
}

fn text_of(path: PathBuf) -> Option<String> {
    let text = std::fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&text).trim().replace(char::is_control, " ");
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests;
