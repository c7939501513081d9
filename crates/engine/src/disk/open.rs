//! Opening a file or block device: exclusively, in the fastest way that works, with its limits.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, Statx};
use rustix::io::ReadWriteFlags;

use super::claim::{self, Unclaimed};
use super::claims::Claims;
use super::errors::Errors;
use super::facts::{self, DIO_ALIGN, stat};
use super::files::Files;
use super::flushing::Flushing;
use super::holders;
use super::identity;
use super::lazy::{Budget, Lazy, ReadMode};
use super::mode::OpenMode;
use super::pacer;
use super::way::DONTCACHE;
use super::whole::Whole;
use super::{DiskLimits, LAZY_WINDOW_BYTES};
use crate::base::area::{Area, sectors_of};
use crate::buffer::{BUFFER_ALIGN, Buffer};
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;
use crate::sync::statics::atomic::{AtomicBool, AtomicU64};
use crate::topology::Topology;
use crate::units::{KIB, MIB, SECTOR};

/// The mode in which bytes get to the device.
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
    /// Through the page cache, written out early and at a steady rate: at most a window is dirty,
    /// and written pages are dropped.
    Lazy,
}

impl IoMode {
    /// The word of `?io=WORD` after a device's name that asks for this mode.
    fn word(self) -> &'static str {
        match self {
            IoMode::Auto => "",
            IoMode::Direct => "direct",
            IoMode::Buffered => "buffered",
            IoMode::DontCache => "dontcache",
            IoMode::Lazy => "lazy",
        }
    }

    /// The modes that `?io=WORD` or `?io=WORD,read=buffered` after a device ask for.
    pub fn parse(text: &str) -> Result<(IoMode, ReadMode)> {
        let invalid = |what: &str| Err(Error::new(Kind::Invalid, format!("io={text}: {what}")));
        let (word, reads) = match text.split_once(',') {
            None => (text, ReadMode::Same),
            Some((word, "read=buffered")) => (word, ReadMode::Buffered),
            Some(_) => return invalid("only read=buffered can follow the comma"),
        };
        let mode = match word {
            "direct" => IoMode::Direct,
            "buffered" => IoMode::Buffered,
            "dontcache" => IoMode::DontCache,
            "lazy" => IoMode::Lazy,
            _ => return invalid("expected direct, buffered, dontcache or lazy"),
        };
        match (mode, reads) {
            (IoMode::Lazy, _) | (_, ReadMode::Same) => Ok((mode, reads)),
            _ => invalid("only lazy has a separate read mode"),
        }
    }
}

/// The bytes that `?window=VALUE` after a device asks for.
pub(crate) fn window_of(value: &str) -> Result<u64> {
    let bytes = sectors_of("window", value)?;
    let (least, most) = (pacer::BUDGET_BYTES_MIN, pacer::BUDGET_BYTES_MAX);
    if !(least..=most).contains(&bytes) || !bytes.is_multiple_of(KIB) {
        let (least, most) = (least / MIB, most / MIB);
        let what = format!("window={value}: expected whole KiB from {least}M to {most}M");
        return Err(Error::new(Kind::Invalid, what));
    }
    Ok(bytes)
}

/// The options for opening a file or block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileOptions {
    /// The purpose.
    pub mode: OpenMode,
    /// The mode of writes.
    pub io: IoMode,
    /// The mode of reads.
    pub reads: ReadMode,
    /// Most bytes that are dirty or under write-out, for [`IoMode::Lazy`]; `None`:
    /// [`LAZY_WINDOW_BYTES`](super::LAZY_WINDOW_BYTES).
    pub window: Option<u64>,
    /// The part of the file or device that is used.
    pub area: Area,
}

/// An open disk.
pub(super) struct Opened {
    pub limits: DiskLimits,
    pub files: Files,
}

/// Opens `path`. A claim in one of `claims` does not conflict, and all of them get an entry.
pub(super) fn open(
    path: &Path,
    options: &FileOptions,
    claims: &[&Claims],
    budget: &Budget,
) -> Result<Opened> {
    let device = path.display().to_string();
    let name = options.area.named(&device);
    let fail = |what: &str, errno: rustix::io::Errno| Error::from_io(what, &name, errno.into());
    let is_read_only = options.mode != OpenMode::Exclusive;
    let (claim, file) = claimed(path, &name, options.mode, claims)?;
    let stat = stat(&file).map_err(|errno| fail("examining", errno))?;
    let is_block_device = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::BlockDevice;
    if is_block_device && !is_read_only && is_locked_for_writes(&stat) {
        return Err(read_only(&name, "is a read-only block device"));
    }
    let (end, logical_block) =
        end_and_block(&file, &stat, is_block_device).map_err(|errno| fail("examining", errno))?;
    let device_bytes = end / SECTOR * SECTOR;
    if device_bytes == 0 {
        let why = if end == 0 { "is empty" } else { "is smaller than a sector of 512 bytes" };
        return Err(Error::new(Kind::NoSpace, format!("{name} {why}")));
    }
    let unit = u64::from(logical_block);
    let part = options.area.on(&device, device_bytes, (unit, unit))?;
    let whole = claims.iter().find_map(|claims| claims.whole(&claim, device_bytes));
    let whole = whole.unwrap_or_else(|| Arc::new(Whole::new(path, &*file, device_bytes)));
    for claims in claims {
        claims.keep(&claim, &whole, part.clone(), &name)?;
    }

    let mut ways = Ways::open(path, &name, options, &file, &stat, logical_block)?;
    let flushing = Arc::new(Flushing::default());
    ways.pace(path, &name, options, (&file, &stat), budget, &flushing)?;
    let facts = facts::of(&file, &stat);
    let limits = DiskLimits {
        size_bytes: part.end - part.start,
        block_bytes: logical_block,
        atomic_bytes: match ways.direct {
            Some(_) => atomic_bytes(&file, &stat, is_block_device, logical_block, part.start),
            // Pages in the page cache may change while they are written out.
            None => 0,
        },
        has_discard: !is_read_only && has_discard(&file, &stat, is_block_device),
        topology: topology(&stat, is_block_device).from(part.start),
        identity: identity::of(&facts, device_bytes, part.start),
        kernel_name: kernel_name(&stat, is_block_device, device) + &suffix(options),
        name,
    };
    let files = Files {
        whole,
        opened: stat,
        is_by_place: identity::is_by_place(&facts),
        written_from: AtomicU64::new(u64::MAX),
        start: part.start,
        errors: Errors::default(),
        flushing,
        _claim: claim,
        buffered: file,
        direct: ways.direct,
        granule: ways.granule,
        flags: ways.flags,
        lazy: ways.lazy,
        is_block_device,
        block_bytes: unit,
        is_read_only,
        keeps_room: AtomicBool::new(false),
    };
    Ok(Opened { limits, files })
}

/// A device node's numbers, as the kernel prints them in a table, or the path of a file.
fn kernel_name(stat: &Statx, is_block_device: bool, path: String) -> String {
    match is_block_device {
        true => format!("{}:{}", stat.stx_rdev_major, stat.stx_rdev_minor),
        false => path,
    }
}

/// The descriptor that holds the claim, and one to work with: the same, unless others use that.
fn claimed(
    path: &Path,
    name: &str,
    mode: OpenMode,
    claims: &[&Claims],
) -> Result<(Arc<OwnedFd>, Arc<OwnedFd>)> {
    let is_read_only = mode != OpenMode::Exclusive;
    let Some(claim) = claims.iter().find_map(|claims| claims.find(path, is_read_only)) else {
        let claim = Arc::new(open_and_claim(path, name, mode)?);
        return Ok((Arc::clone(&claim), claim));
    };
    let access = if is_read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let again = stat(&claim).and_then(|known| open_again(path, &known, access));
    let (file, _) = again.map_err(|errno| Error::from_io("opening", name, errno.into()))?;
    Ok((claim, Arc::new(file)))
}

/// The methods of I/O to the file other than the page cache.
struct Ways {
    direct: Option<Arc<OwnedFd>>,
    granule: u64,
    flags: i32,
    lazy: Option<Arc<Lazy>>,
}

impl Ways {
    fn open(
        path: &Path,
        name: &str,
        options: &FileOptions,
        file: &OwnedFd,
        stat: &Statx,
        logical_block: u32,
    ) -> Result<Ways> {
        let (io, is_read_only) = (options.io, options.mode != OpenMode::Exclusive);
        let fail = |what: &str, errno: rustix::io::Errno| Error::from_io(what, name, errno.into());
        let direct = match io {
            IoMode::Auto => open_direct(path, stat, is_read_only, logical_block).ok(),
            IoMode::Direct => Some(
                open_direct(path, stat, is_read_only, logical_block)
                    .map_err(|errno| fail("direct I/O (io=buffered works without it) on", errno))?,
            ),
            IoMode::Buffered | IoMode::DontCache | IoMode::Lazy => None,
        };
        let flags = if io == IoMode::DontCache { probe_dontcache(file, name)? } else { 0 };
        let (direct, granule) = match direct {
            Some((file, granule)) => (Some(Arc::new(file)), granule),
            None => (None, SECTOR),
        };
        Ok(Ways { direct, granule, flags, lazy: None })
    }

    /// Lets lazy writes take their part of `budget`.
    fn pace(
        &mut self,
        path: &Path,
        name: &str,
        options: &FileOptions,
        (file, stat): (&OwnedFd, &Statx),
        budget: &Budget,
        flushing: &Arc<Flushing>,
    ) -> Result<()> {
        if options.io != IoMode::Lazy {
            return Ok(());
        }
        if options.reads == ReadMode::Same {
            // If the flag is unknown, pages that were read stay in the page cache.
            self.flags = probe_dontcache(file, name).unwrap_or(0);
        }
        if options.mode == OpenMode::Exclusive {
            let (again, _) = open_again(path, stat, OFlags::RDWR)
                .map_err(|errno| Error::from_io("opening", name, errno.into()))?;
            let window = options.window.unwrap_or(LAZY_WINDOW_BYTES);
            self.lazy = Some(Lazy::new(again, name, (window, options.reads), budget, flushing)?);
        }
        Ok(())
    }
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

/// The end of the file or block device at `path`: its last byte, not the end of its last block.
pub fn end_of(path: &Path) -> Result<u64> {
    let fail = |errno: rustix::io::Errno| {
        Error::from_io("examining", path.display().to_string(), errno.into())
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(fail)?;
    let stat = stat(&file).map_err(fail)?;
    let is_block_device = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::BlockDevice;
    Ok(end_and_block(&file, &stat, is_block_device).map_err(fail)?.0)
}

/// The reason why another disk may count as the file or block device at `path`, if there is one.
pub fn doubt_of(path: &Path) -> Option<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let facts = facts::of(&file, &stat(&file).ok()?);
    identity::of(&facts, 0, 0).doubt().map(str::to_owned)
}

/// The text after a device's name in a table that asks for `options`.
fn suffix(options: &FileOptions) -> String {
    let read = if options.reads == ReadMode::Buffered { ",read=buffered" } else { "" };
    let io = Some(options.io.word()).filter(|word| !word.is_empty());
    let io = io.map(|word| format!("io={word}{read}"));
    let window = options.window.map(|bytes| match bytes.is_multiple_of(MIB) {
        true => format!("window={}M", bytes / MIB),
        false => format!("window={}K", bytes / KIB),
    });
    let read_only = (options.mode == OpenMode::Shared).then(|| "readonly".to_owned());
    let words: Vec<String> =
        io.into_iter().chain(window).chain(options.area.words()).chain(read_only).collect();
    if words.is_empty() { String::new() } else { format!("?{}", words.join("&")) }
}

/// The bytes that the device declares to write whole or not at all: its logical block, or its
/// physical one, which is, by the kernel's ABI (`sysfs-block`), the smallest unit that it can write
/// atomically. A file system may put a file's blocks at any address that is aligned to its own
/// blocks; and a part may begin (`start`) within a unit. 0: unknown.
fn atomic_bytes(
    file: &OwnedFd,
    stat: &Statx,
    is_block_device: bool,
    logical: u32,
    start: u64,
) -> u32 {
    let (device, own) = match is_block_device {
        true => ((stat.stx_rdev_major, stat.stx_rdev_minor), u64::from(u32::MAX)),
        false => {
            let block = rustix::fs::fstatvfs(file).map_or(0, |statvfs| statvfs.f_frsize);
            ((stat.stx_dev_major, stat.stx_dev_minor), block)
        }
    };
    if facts::sysfs(device, "loop/backing_file").is_some() {
        // I/O goes through a page cache, or through a file whose blocks can be at any address.
        return 0;
    }
    let number = |file: &str| facts::sysfs(device, file)?.parse::<u32>().ok();
    let physical = number("queue/physical_block_size").filter(|size| size.is_power_of_two());
    match (physical, number("alignment_offset")) {
        (Some(physical), Some(0))
            if own >= u64::from(physical) && start.is_multiple_of(u64::from(physical)) =>
        {
            physical.max(logical)
        }
        _ => logical,
    }
}

/// The units in which the device works best. The units of the device below a file are not the
/// file's, whose blocks can be at any address; but a hole is made of blocks of the file system.
fn topology(stat: &Statx, is_block_device: bool) -> Topology {
    if !is_block_device {
        let discard_bytes = Topology::unit(stat.stx_blksize.into());
        return Topology { discard_bytes, ..Topology::default() };
    }
    let number = |file: &str| facts::sysfs(facts::number(stat), file)?.parse::<u64>().ok();
    let unit = |file: &str| number(file).map_or(0, Topology::unit);
    let (is_aligned, are_discards_aligned) =
        (number("alignment_offset") == Some(0), number("discard_alignment") == Some(0));
    let if_aligned = |file: &str| if is_aligned { unit(file) } else { 0 };
    Topology {
        physical_bytes: if_aligned("queue/physical_block_size"),
        minimum_bytes: if_aligned("queue/minimum_io_size"),
        optimal_bytes: if_aligned("queue/optimal_io_size"),
        discard_bytes: if are_discards_aligned { unit("queue/discard_granularity") } else { 0 },
    }
}

/// A block device may let itself be opened for writing, and then refuse writes.
fn is_locked_for_writes(stat: &Statx) -> bool {
    facts::sysfs(facts::number(stat), "ro").is_some_and(|flag| flag == "1")
}

fn read_only(name: &str, what: &str) -> Error {
    let why = "data could not be written back to it; a linear, delay or flakey device may be \
               read-only (?readonly after its name)";
    Error::new(Kind::Refused, format!("{name} {what}: {why}"))
}

/// Opens `path` so that no other process can open it the same way.
fn open_and_claim(path: &Path, name: &str, mode: OpenMode) -> Result<OwnedFd> {
    let is_read_only = mode != OpenMode::Exclusive;
    let fail = |errno: rustix::io::Errno| Error::from_io("opening", name, errno.into());
    let busy = |who: Option<String>| {
        let who = who.unwrap_or_else(|| "a device, a mount or another program".into());
        Error::new(Kind::Busy, format!("{name} is in use by {who}"))
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
    // Another program of udm may look at this moment whether the device is in use.
    let open = claim::soon(|| match rustix::fs::open(path, flags, Mode::empty()) {
        Err(rustix::io::Errno::BUSY) => Err(rustix::io::Errno::WOULDBLOCK),
        opened => opened,
    });
    let file = open.map_err(|errno| match errno {
        rustix::io::Errno::WOULDBLOCK => busy(holders::of_device(path)),
        rustix::io::Errno::ROFS => read_only(name, "cannot be written"),
        rustix::io::Errno::ACCESS if may_read(path) => {
            read_only(name, "may not be written by this user")
        }
        errno => fail(errno),
    })?;
    let found = rustix::fs::fstat(&file).map_err(fail)?;
    if FileType::from_raw_mode(found.st_mode) != kind {
        // The path has been replaced just now, by something that other flags are for.
        return Err(fail(rustix::io::Errno::STALE));
    }
    match claim::claim(&file, mode) {
        Ok(()) => Ok(file),
        Err(Unclaimed::InUse(who)) => Err(busy(who)),
        Err(Unclaimed::Failed(errno)) => Err(Error::from_io("locking", name, errno.into())),
    }
}

fn may_read(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::READ_OK).is_ok()
}

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
    let mut buffer = Buffer::zeroed(SECTOR as usize);
    let mut parts = [std::io::IoSliceMut::new(buffer.as_mut_slice())];
    let flags = ReadWriteFlags::from_bits_retain(DONTCACHE.cast_unsigned());
    match rustix::io::preadv2(file, &mut parts, 0, flags) {
        Ok(_) => Ok(DONTCACHE),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) => {
            let why = "io=dontcache needs Linux 6.14 and a file system that supports it";
            Err(Error::new(
                Kind::Unsupported,
                format!("{name}: {why}; io=buffered works without it"),
            ))
        }
        Err(errno) => Err(Error::from_io("reading", name, errno.into())),
    }
}

/// Whether a discard would do something.
fn has_discard(file: &OwnedFd, stat: &Statx, is_block_device: bool) -> bool {
    if is_block_device {
        let most = facts::sysfs(facts::number(stat), "queue/discard_max_bytes");
        return most.is_some_and(|bytes| bytes != "0");
    }
    // Punching a hole beyond the file's end changes only its times; if that works, holes work.
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    let punch = |file: &OwnedFd, size: u64| {
        let behind = size.next_multiple_of(BUFFER_ALIGN as u64);
        rustix::fs::fallocate(file, flags, behind, BUFFER_ALIGN as u64).is_ok()
    };
    match beside(file, stat) {
        Some(other) => punch(&other, 0),
        None => punch(file, stat.stx_size),
    }
}

/// A file without a name on the same file system. The tests run on this file, because the times of
/// a file that may be an origin show whether another program has changed it, and must not change.
fn beside(file: &OwnedFd, known: &Statx) -> Option<OwnedFd> {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let other = rustix::fs::open(path.parent()?, flags, Mode::RUSR | Mode::WUSR).ok()?;
    let place = |stat: &Statx| (stat.stx_dev_major, stat.stx_dev_minor);
    (place(&stat(&other).ok()?) == place(known)).then_some(other)
}

#[cfg(test)]
mod tests;
