//! Checks whether an opened file or device is still complete, and whether its path still leads to
//! it.
//!
//! 1. A part that a file or device has lost once stays lost. The file may be extended again, but
//!    its content there is not the data that was written. So the shortest length ever seen counts
//!    for reads. A medium that lost a part takes no more writes, because they would hide the loss
//!    and could not be read back.
//! 2. Linux does not report that a file was cut short. A read that meets the new end shows it;
//!    otherwise the length must be checked. That costs a system call, so writes check every
//!    [`LOOK_EVERY`], and each time that they reach the end, because such a write alone could
//!    extend a short file to its old length. Flushes always check, after their work, so that data
//!    acknowledged as durable is within the length. So do reads that find zeroes in a file: a write
//!    beyond the cut, in flight then or sent before the next check, extends the file again and
//!    leaves a hole. `recent` then tells how much of the file is left. A file that was cut and
//!    extended to its old length has holes. They count as a cut where all blocks of the file
//!    existed before (`recent` knows), and where the disk's user reads only written data
//!    ([`Whole::has_hole`]).
//! 3. A loop device keeps its size when its file is cut, so that file is checked as well.
//! 4. A name is checked on request. A deleted file exists until it is closed.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat, fstat};
use rustix::time::{ClockId, clock_gettime};

use super::Extent;
use super::recent::Recent;
use super::{holders, holes, loops};
use crate::sync::statics::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::units::SECTOR;

/// Milliseconds between two checks by [`Whole::glance`].
const LOOK_EVERY: u64 = 20;

/// The record of an opened file or device, and of its length.
#[derive(Debug)]
pub(crate) struct Whole {
    path: PathBuf,
    /// The device and inode of the file when it was opened.
    opened_as: Option<(u64, u64)>,
    opened_bytes: u64,
    /// The shortest length seen.
    left_bytes: AtomicU64,
    /// The file has a hole where data was written. `hole_at` is the hole's first byte.
    is_hollow: AtomicBool,
    hole_at: AtomicU64,
    next_look: AtomicU64,
    /// Writes to a file since it was seen whole; devices do not grow by writes.
    recent: Option<Recent>,
    under: Option<Under>,
}

/// The file below a loop device, and where the device ends in it.
#[derive(Debug)]
struct Under {
    file: OwnedFd,
    start: u64,
}

/// A change of the name of an open file or device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// The file was deleted, and its data is lost when it is closed.
    Deleted,
    /// The file was renamed.
    Moved,
    /// The name leads to another file.
    Replaced,
}

impl Absence {
    /// The change, in words that follow the name.
    pub fn words(self) -> &'static str {
        match self {
            Absence::Deleted => "was deleted",
            Absence::Moved => "was moved away",
            Absence::Replaced => "was replaced by something else",
        }
    }
}

impl Whole {
    /// The record of `file`, which was opened as `path` and is `bytes` long.
    pub(crate) fn new(path: &Path, file: impl AsFd, bytes: u64) -> Whole {
        Whole {
            path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
            opened_as: fstat(&file).ok().map(|stat| (stat.st_dev, stat.st_ino)),
            opened_bytes: bytes,
            left_bytes: AtomicU64::new(bytes),
            is_hollow: AtomicBool::new(false),
            hole_at: AtomicU64::new(u64::MAX),
            next_look: AtomicU64::new(0),
            recent: fstat(&file)
                .ok()
                .filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
                .map(|_| Recent::new(&file)),
            under: Under::of(file, bytes),
        }
    }

    /// The length at the time of opening.
    pub(crate) fn opened_bytes(&self) -> u64 {
        self.opened_bytes
    }

    /// The bytes from the start that always existed, by the checks so far.
    #[inline]
    pub(crate) fn left_bytes(&self) -> u64 {
        self.left_bytes.load(Ordering::Relaxed)
    }

    /// Whether the file or device lost a part, by the checks so far.
    #[inline]
    pub(crate) fn is_cut(&self) -> bool {
        self.left_bytes() < self.opened_bytes || self.is_hollow()
    }

    /// Whether the file has holes where data was written, by the checks so far: zeroes that are
    /// read from it may not be written data.
    #[inline]
    pub(crate) fn is_hollow(&self) -> bool {
        self.is_hollow.load(Ordering::Relaxed)
    }

    /// All of its blocks were reserved: from now on a hole is a loss.
    pub(crate) fn reserved(&self, file: impl AsFd) {
        if let Some(recent) = &self.recent {
            recent.reserved(file, self.opened_bytes);
        }
    }

    /// Its holes, in order, if it has fewer blocks than bytes.
    pub(crate) fn holes(&self, file: impl AsFd) -> Vec<(u64, u64)> {
        self.recent.as_ref().map_or(Vec::new(), |recent| recent.holes(file, self.opened_bytes))
    }

    /// A hole is about to be punched into it.
    pub(crate) fn punched(&self) {
        if let Some(recent) = &self.recent {
            recent.punched();
        }
    }

    /// Checks. Returns whether it is whole, now and before.
    pub(crate) fn look(&self, file: impl AsFd) -> bool {
        if self.is_hollow() {
            // The file is not written any more, and each check would search all of its holes.
            return false;
        }
        let left = match &self.recent {
            Some(recent) => recent.look(&file, self.opened_bytes).and_then(|seen| {
                // A file that is known to be cut, and is longer again, has lost no further data.
                let is_new = !seen.is_hollow || self.left_bytes() == self.opened_bytes;
                self.is_hollow.fetch_or(seen.is_hollow && is_new, Ordering::Relaxed);
                is_new.then_some(seen.left_bytes)
            }),
            None => length(&file),
        };
        if let Some(bytes) = left {
            self.left_bytes.fetch_min(bytes, Ordering::Relaxed);
        }
        if let Some(under) = &self.under
            && let Some(bytes) = length(&under.file)
        {
            let bytes = bytes.saturating_sub(under.start);
            self.left_bytes.fetch_min(bytes, Ordering::Relaxed);
        }
        !self.is_cut()
    }

    /// The same for frequent callers, about a range up to `end`.
    pub(crate) fn glance(&self, file: impl AsFd, end: u64) -> bool {
        if self.is_cut() {
            return false;
        }
        let now = clock_gettime(ClockId::MonotonicCoarse);
        let now = now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000;
        if end < self.opened_bytes && now < self.next_look.load(Ordering::Relaxed) {
            return true;
        }
        self.next_look.store(now + LOOK_EVERY, Ordering::Relaxed);
        self.look(file)
    }

    /// A write of a range is about to be sent. Pass the result to [`Whole::end_write`].
    pub(crate) fn begin_write(&self, offset: u64, len: u64) -> Option<u64> {
        Some(self.recent.as_ref()?.begin((offset, offset + len)))
    }

    /// The write is back; `is_done`: all of it was written.
    pub(crate) fn end_write(&self, ticket: Option<u64>, is_done: bool) {
        if let (Some(recent), Some(ticket)) = (&self.recent, ticket) {
            recent.end(ticket, is_done);
        }
    }

    /// Whether `data`, which was read from `offset`, is the file's content there. It may instead be
    /// a hole of a file that was cut and became longer again.
    pub(crate) fn believes(&self, file: impl AsFd, offset: u64, data: &[u8]) -> bool {
        if self.recent.is_none() || !has_zeroes(data) {
            return true;
        }
        self.look(file) || offset + data.len() as u64 <= self.left_bytes()
    }

    /// Whether zeroes in `data`, which was read from `offset`, are a hole of the file. If all data
    /// that is read there was written, the file has lost this data, and the loss counts for all I/O
    /// from then on.
    pub(crate) fn has_hole(&self, file: &OwnedFd, offset: u64, data: &[u8]) -> bool {
        let keeps_blocks = self.recent.as_ref().is_some_and(Recent::keeps_blocks);
        if !keeps_blocks || !has_zeroes(data) {
            return false;
        }
        let (mut at, end) = (offset, offset + data.len() as u64);
        while at < end {
            let (len, extent) = holes::extent(file, at, end - at);
            let found = &data[(at - offset) as usize..][..len as usize];
            // A write has stored data other than zeroes meanwhile, or the hole is elsewhere.
            if extent == Extent::Zeroes && found.iter().all(|byte| *byte == 0) {
                self.hole_at.fetch_min(at, Ordering::Relaxed);
                self.is_hollow.store(true, Ordering::Relaxed);
                return true;
            }
            at += len;
        }
        false
    }

    /// Checks the file. Returns the loss, in words that follow the file's name, if there is one.
    pub(crate) fn loss(&self, file: impl AsFd) -> Option<String> {
        (!self.look(&file)).then(|| {
            let (opened, left) = (self.opened_bytes, self.left_bytes());
            if left == opened {
                let hole_at = self.hole_at.load(Ordering::Relaxed);
                return format!(
                    "has a hole at byte {hole_at}, where data had been written: it was cut short \
                     and extended again, or a program replaced zeroes with holes"
                );
            }
            let again = if self.is_hollow() { ", and extended again" } else { "" };
            format!("was cut short, from {opened} to {left} bytes{again}")
        })
    }

    /// Checks the file's name. Returns the change, if there was one. The removal of a device node
    /// does not count.
    pub(crate) fn absence(&self, file: impl AsFd) -> Option<Absence> {
        // The file system under an open file may be gone, as a FUSE program that has ended.
        let Ok(own) = fstat(file) else { return self.is_elsewhere().then_some(Absence::Replaced) };
        let is_file = FileType::from_raw_mode(own.st_mode) == FileType::RegularFile;
        if is_file && own.st_nlink == 0 {
            return Some(Absence::Deleted);
        }
        match rustix::fs::stat(&self.path) {
            Ok(found) if is_same(&own, &found, is_file) => None,
            Ok(_) => Some(Absence::Replaced),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) if is_file => {
                Some(Absence::Moved)
            }
            Err(_) => None,
        }
    }
}

impl Whole {
    /// Whether the path leads to a file, and not to the opened one.
    fn is_elsewhere(&self) -> bool {
        let found = rustix::fs::stat(&self.path).map(|stat| (stat.st_dev, stat.st_ino));
        found.is_ok_and(|found| self.opened_as.is_some_and(|opened| opened != found))
    }
}

/// Whether a sector of `data` may be zeroes. A cheap check of each sector's first word.
fn has_zeroes(data: &[u8]) -> bool {
    let is_zero = |sector: &[u8]| sector.first_chunk::<8>().is_none_or(|word| *word == [0; 8]);
    data.chunks(SECTOR as usize).any(is_zero)
}

fn is_same(own: &Stat, found: &Stat, is_file: bool) -> bool {
    match is_file {
        true => (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino),
        false => {
            let kinds = [own, found].map(|stat| FileType::from_raw_mode(stat.st_mode));
            kinds[0] == kinds[1] && own.st_rdev == found.st_rdev
        }
    }
}

impl Under {
    fn of(file: impl AsFd, bytes: u64) -> Option<Under> {
        let stat = fstat(file).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
            return None;
        }
        let number = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        let (path, start) = loops::file_of(&holders::folder(number))?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        let under = Under { file, start };
        // A file of that name that is too short is another one.
        let has_room = length(&under.file)? >= bytes.checked_add(start)?;
        has_room.then_some(under)
    }
}

/// The length of a file or device, if it can be found out.
fn length(file: impl AsFd) -> Option<u64> {
    let stat = fstat(&file).ok()?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Some(stat.st_size as u64),
        FileType::BlockDevice => rustix::fs::seek(file, SeekFrom::End(0)).ok(),
        _ => None,
    }
}
