//! Opening a file or block device: exclusively, in the fastest way that works, with its limits.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Statx, StatxFlags};
use rustix::io::ReadWriteFlags;

use super::DiskLimits;
use super::errors::Errors;
use super::files::Files;
use super::identity;
use super::lazy::Lazy;
use super::whole::Whole;
use crate::buffer::{BUFFER_ALIGN, Buffer};
use crate::error::{Error, Kind, Result};
use crate::sync::{Arc, Mutex, Weak, lock};
use crate::units::SECTOR;

/// What a device is opened for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OpenMode {
    /// To read and write, alone: a lock on a file, an exclusive claim of a block device. If it is
    /// in use already: [`Kind::Busy`].
    #[default]
    Exclusive,
    /// To inspect. Takes no lock, changes nothing.
    ReadOnly,
    /// To read, while others only read: a shared lock on a file.
    Shared,
}

/// How bytes get to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// Direct where it works, else buffered.
    #[default]
    Auto,
    /// Past the page cache, or not at all.
    Direct,
    /// Through the page cache.
    Buffered,
    /// Through the page cache, which drops the data right after (Linux 6.14, some file systems).
    DontCache,
    /// Through the page cache, written out early and at a steady pace: never more than
    /// [`LAZY_WINDOW_BYTES`](super::LAZY_WINDOW_BYTES) are dirty, and clean pages are dropped.
    Lazy,
}

impl IoMode {
    /// The text after a device's name in a table that asks for this mode.
    fn suffix(self) -> &'static str {
        match self {
            IoMode::Auto => "",
            IoMode::Direct => "?io=direct",
            IoMode::Buffered => "?io=buffered",
            IoMode::DontCache => "?io=dontcache",
            IoMode::Lazy => "?io=lazy",
        }
    }

    /// The mode that `?io=WORD` after a device asks for.
    pub fn parse(word: &str) -> Result<IoMode> {
        match word {
            "direct" => Ok(IoMode::Direct),
            "buffered" => Ok(IoMode::Buffered),
            "dontcache" => Ok(IoMode::DontCache),
            "lazy" => Ok(IoMode::Lazy),
            _ => Err(Error::new(
                Kind::Invalid,
                format!("io={word}: expected direct, buffered, dontcache or lazy"),
            )),
        }
    }
}

/// How to open a file or block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileOptions {
    /// What for.
    pub mode: OpenMode,
    /// How bytes get there.
    pub io: IoMode,
}

/// An open disk.
pub(super) struct Opened {
    pub limits: DiskLimits,
    pub files: Files,
}

/// What one user of disks has open, and may open again at the same time: the tables of one mapped
/// device share the lock on a file, and the exclusive claim of a block device. An entry ends with
/// the last disk that was opened by it.
#[derive(Debug, Default)]
pub struct Claims {
    held: Mutex<Vec<Weak<OwnedFd>>>,
}

impl Claims {
    /// The descriptor that holds the claim on the target of `path`, if it was opened for the same.
    fn find(&self, path: &Path, is_read_only: bool) -> Option<Arc<OwnedFd>> {
        let there = rustix::fs::stat(path).ok()?;
        let mut held = lock(&self.held);
        held.retain(|claim| claim.strong_count() > 0);
        held.iter().filter_map(Weak::upgrade).find(|claim| {
            let place = |stat: &rustix::fs::Stat| match FileType::from_raw_mode(stat.st_mode) {
                FileType::BlockDevice => (0, 0, stat.st_rdev),
                _ => (stat.st_dev, stat.st_ino, 0),
            };
            let access = rustix::fs::fcntl_getfl(claim).map(|flags| flags & OFlags::RWMODE);
            let is_alike = access.is_ok_and(|access| (access == OFlags::RDONLY) == is_read_only);
            is_alike && rustix::fs::fstat(claim).is_ok_and(|ours| place(&ours) == place(&there))
        })
    }

    fn keep(&self, file: &Arc<OwnedFd>) {
        lock(&self.held).push(Arc::downgrade(file));
    }
}

/// The claimed file: one of `claims`, or a newly opened one that is added to them.
fn claim(path: &Path, name: &str, mode: OpenMode, claims: Option<&Claims>) -> Result<Arc<OwnedFd>> {
    let is_read_only = mode != OpenMode::Exclusive;
    let file = match claims.and_then(|claims| claims.find(path, is_read_only)) {
        Some(file) => file,
        None => Arc::new(open_and_claim(path, name, mode)?),
    };
    if let Some(claims) = claims {
        claims.keep(&file);
    }
    Ok(file)
}

/// Opens `path`. A claim in `claims` is no obstacle.
pub(super) fn open(path: &Path, options: &FileOptions, claims: Option<&Claims>) -> Result<Opened> {
    let name = path.display().to_string();
    let fail = |what: &str, errno: rustix::io::Errno| Error::from_io(what, &name, errno.into());
    let is_read_only = options.mode != OpenMode::Exclusive;
    let file = claim(path, &name, options.mode, claims)?;
    let stat = stat(&file).map_err(|errno| fail("examining", errno))?;
    let is_block_device = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::BlockDevice;
    if is_block_device && !is_read_only && is_locked_for_writes(&stat) {
        return Err(read_only(&name, "is a read-only block device"));
    }
    let (end, logical_block) =
        end_and_block(&file, &stat, is_block_device).map_err(|errno| fail("examining", errno))?;
    let size_bytes = end / SECTOR * SECTOR;
    if size_bytes == 0 {
        let why = if end == 0 { "is empty" } else { "is smaller than a sector of 512 bytes" };
        return Err(Error::new(Kind::NoSpace, format!("{name} {why}")));
    }

    let direct = match options.io {
        IoMode::Auto => open_direct(path, &stat, is_read_only, logical_block).ok(),
        IoMode::Direct => Some(
            open_direct(path, &stat, is_read_only, logical_block)
                .map_err(|errno| fail("direct I/O (io=buffered works without it) on", errno))?,
        ),
        IoMode::Buffered | IoMode::DontCache | IoMode::Lazy => None,
    };
    let flags = if options.io == IoMode::DontCache { probe_dontcache(&file, &name)? } else { 0 };
    let lazy = match options.io == IoMode::Lazy && !is_read_only {
        true => {
            Some(open_again(path, &stat, OFlags::RDWR).map_err(|errno| fail("opening", errno))?)
        }
        false => None,
    };
    let (direct, granule) = match direct {
        Some((file, granule)) => (Some(Arc::new(file)), granule),
        None => (None, SECTOR),
    };
    let limits = DiskLimits {
        size_bytes,
        block_bytes: logical_block,
        atomic_bytes: match direct {
            Some(_) => atomic_bytes(&file, &stat, is_block_device, logical_block),
            // Pages in the page cache may change while they are written out.
            None => 0,
        },
        has_discard: !is_read_only && has_discard(&file, &stat, is_block_device),
        identity: identity::of(&file, &stat, is_block_device, size_bytes),
        kernel_name: match is_block_device {
            true => format!("{}:{}", stat.stx_rdev_major, stat.stx_rdev_minor),
            false => name.clone(),
        } + &suffix(options),
        name,
    };
    let files = Files {
        whole: Whole::new(path, &*file, size_bytes),
        errors: Errors::default(),
        buffered: file,
        direct,
        granule,
        flags,
        lazy: lazy.map(|(file, _)| Lazy::new(file)),
        is_block_device,
        block_bytes: logical_block.into(),
        is_read_only,
    };
    Ok(Opened { limits, files })
}

/// Where a file or block device ends, and the bytes of its logical block.
fn end_and_block(
    file: &OwnedFd,
    stat: &Statx,
    is_block_device: bool,
) -> rustix::io::Result<(u64, u32)> {
    if !is_block_device {
        return Ok((stat.stx_size, SECTOR as u32));
    }
    let end = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
    Ok((end, rustix::fs::ioctl_blksszget(file)?))
}

/// The text after a device's name in a table that asks for `options`.
fn suffix(options: &FileOptions) -> String {
    match (options.io.suffix(), options.mode) {
        ("", OpenMode::Shared) => "?readonly".into(),
        (io, OpenMode::Shared) => format!("{io}&readonly"),
        (io, _) => io.into(),
    }
}

/// Bytes that the device says it writes whole or not at all: its logical block, or its physical
/// one, which is, by the kernel's ABI (`sysfs-block`), the smallest unit that it can write
/// atomically. A file system may put a file's blocks anywhere, but aligned to its own. 0: unknown.
fn atomic_bytes(file: &OwnedFd, stat: &Statx, is_block_device: bool, logical: u32) -> u32 {
    let (device, own) = match is_block_device {
        true => ((stat.stx_rdev_major, stat.stx_rdev_minor), u64::from(u32::MAX)),
        false => {
            let block = rustix::fs::fstatvfs(file).map_or(0, |statvfs| statvfs.f_frsize);
            ((stat.stx_dev_major, stat.stx_dev_minor), block)
        }
    };
    if identity::sysfs(device, "loop/backing_file").is_some() {
        // That goes through a page cache, or through a file whose blocks can be anywhere.
        return 0;
    }
    let number = |file: &str| identity::sysfs(device, file)?.parse::<u32>().ok();
    let physical = number("queue/physical_block_size").filter(|size| size.is_power_of_two());
    match (physical, number("alignment_offset")) {
        (Some(physical), Some(0)) if own >= u64::from(physical) => physical.max(logical),
        _ => logical,
    }
}

/// A block device may let itself be opened for writing, and then refuse writes.
fn is_locked_for_writes(stat: &Statx) -> bool {
    identity::sysfs(identity::number(stat), "ro").is_some_and(|flag| flag == "1")
}

fn read_only(name: &str, what: &str) -> Error {
    let why = "what is written could never get there; a linear, delay or flakey device may be \
               read only (?readonly behind its name)";
    Error::new(Kind::Refused, format!("{name} {what}: {why}"))
}

/// Opens `path` so that nothing else can open it the same way.
fn open_and_claim(path: &Path, name: &str, mode: OpenMode) -> Result<OwnedFd> {
    let is_read_only = mode != OpenMode::Exclusive;
    let fail = |errno: rustix::io::Errno| Error::from_io("opening", name, errno.into());
    let busy = || {
        Error::new(
            Kind::Busy,
            format!("{name} is in use: by a device, a mount or another program that claimed it"),
        )
    };
    // Checked before opening: opening some things (a tape, a pipe) has effects.
    let kind = rustix::fs::stat(path).map_err(fail)?;
    let kind = FileType::from_raw_mode(kind.st_mode);
    let mut flags = OFlags::CLOEXEC;
    flags |= if is_read_only { OFlags::RDONLY } else { OFlags::RDWR };
    match kind {
        FileType::RegularFile => {}
        FileType::BlockDevice if is_read_only => {}
        FileType::BlockDevice => flags |= OFlags::EXCL,
        FileType::CharacterDevice => {
            let why = "is a character device: a DAX device can be a cache device, not a disk";
            return Err(Error::new(Kind::Invalid, format!("{name} {why}")));
        }
        _ => {
            let why = "is neither a file nor a block device";
            return Err(Error::new(Kind::Invalid, format!("{name} {why}")));
        }
    }
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        rustix::io::Errno::BUSY => busy(),
        rustix::io::Errno::ROFS => read_only(name, "cannot be written"),
        rustix::io::Errno::ACCESS if may_read(path) => {
            read_only(name, "may not be written by this user")
        }
        errno => fail(errno),
    })?;
    if kind == FileType::RegularFile && mode != OpenMode::ReadOnly {
        let operation = match mode {
            OpenMode::Shared => FlockOperation::NonBlockingLockShared,
            _ => FlockOperation::NonBlockingLockExclusive,
        };
        rustix::fs::flock(&file, operation).map_err(|errno| match errno {
            rustix::io::Errno::WOULDBLOCK => busy(),
            errno => Error::from_io("locking", name, errno.into()),
        })?;
    }
    Ok(file)
}

fn may_read(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::READ_OK).is_ok()
}

fn stat(file: &OwnedFd) -> rustix::io::Result<Statx> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME | DIO_ALIGN;
    rustix::fs::statx(file, "", rustix::fs::AtFlags::EMPTY_PATH, wanted)
}

/// STATX_DIOALIGN.
const DIO_ALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// Opens `path` once more. Never exclusively: the other descriptor holds the claim, and that would
/// refuse this one.
fn open_again(path: &Path, known: &Statx, flags: OFlags) -> rustix::io::Result<(OwnedFd, Statx)> {
    let file = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?;
    let found = stat(&file)?;
    let place = |stat: &Statx| {
        (
            stat.stx_dev_major,
            stat.stx_dev_minor,
            stat.stx_ino,
            stat.stx_rdev_major,
            stat.stx_rdev_minor,
        )
    };
    match place(&found) == place(known) {
        true => Ok((file, found)),
        // The path has been replaced by another file just now.
        false => Err(rustix::io::Errno::STALE),
    }
}

/// Opens the same file past the page cache, if that works, and returns its granularity.
fn open_direct(
    path: &Path,
    known: &Statx,
    is_read_only: bool,
    logical_block: u32,
) -> rustix::io::Result<(OwnedFd, u64)> {
    let access = if is_read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let (file, found) = open_again(path, known, access | OFlags::DIRECT)?;
    let is_told = found.stx_mask & DIO_ALIGN.bits() != 0;
    let told = found.stx_dio_offset_align.max(SECTOR as u32).max(logical_block);
    if is_told
        && (found.stx_dio_offset_align == 0 || found.stx_dio_mem_align as usize > BUFFER_ALIGN)
    {
        return Err(rustix::io::Errno::OPNOTSUPP);
    }
    // Verified by I/O: some file systems take the flag and refuse the I/O.
    let candidates = if is_told { [told, told] } else { [logical_block, BUFFER_ALIGN as u32] };
    let mut result = Err(rustix::io::Errno::INVAL);
    for align in candidates {
        let mut buffer = Buffer::zeroed(align as usize);
        result = rustix::io::pread(&file, buffer.as_mut_slice(), 0).map(|_| align);
        if result.is_ok() {
            break;
        }
    }
    let align = u64::from(result?);
    // Above a sector, whole pages: see the second point of `file.rs`.
    let granule = if align <= SECTOR { SECTOR } else { align.max(BUFFER_ALIGN as u64) };
    Ok((file, granule))
}

/// The flag for reads and writes that do not stay in the page cache; an error where it is unknown.
fn probe_dontcache(file: &OwnedFd, name: &str) -> Result<i32> {
    const DONTCACHE: u32 = 0x80;
    let mut buffer = Buffer::zeroed(SECTOR as usize);
    let mut parts = [std::io::IoSliceMut::new(buffer.as_mut_slice())];
    let flags = ReadWriteFlags::from_bits_retain(DONTCACHE);
    match rustix::io::preadv2(file, &mut parts, 0, flags) {
        Ok(_) => Ok(DONTCACHE as i32),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) => {
            let why = "io=dontcache needs Linux 6.14 and a file system that knows it";
            Err(Error::new(Kind::Unsupported, format!("{name}: {why}; io=buffered works without")))
        }
        Err(errno) => Err(Error::from_io("reading", name, errno.into())),
    }
}

/// Whether a discard would do something.
fn has_discard(file: &OwnedFd, stat: &Statx, is_block_device: bool) -> bool {
    if is_block_device {
        let most = identity::sysfs(identity::number(stat), "queue/discard_max_bytes");
        return most.is_some_and(|bytes| bytes != "0");
    }
    // Punching a hole beyond the file's end changes nothing; that it works says that holes do.
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    let behind = stat.stx_size.next_multiple_of(BUFFER_ALIGN as u64);
    rustix::fs::fallocate(file, flags, behind, BUFFER_ALIGN as u64).is_ok()
}
