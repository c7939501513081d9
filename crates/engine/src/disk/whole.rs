//! Whether what was opened is still complete, and is still what its path names.
//!
//! 1. What a file or device lost once is lost: it may be made longer again, but what is read there
//!    then is not the data that was written. So the shortest length ever seen counts, for reads;
//!    and a medium that lost a part takes no more writes, which would hide the loss and could not
//!    be found again.
//! 2. Linux does not report that a file was cut short. A read that meets the new end shows it;
//!    otherwise the length must be checked. That costs a system call, so writes check every
//!    [`LOOK_EVERY`], and each time that they reach the end, because such a write alone could make
//!    a short file as long as it was. Flushes always check, after their work: what a client hears
//!    is durable is within the length. So do reads that find zeroes in a file: a write beyond the
//!    cut, in flight then or sent before the next check, makes the file longer again and leaves a
//!    hole. `recent` says how much of the file is left then.
//! 3. A loop device keeps its size when its file is cut, so that file is checked too.
//! 4. A name is checked on request. A deleted file lives as long as it is open.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat, fstat};
use rustix::time::{ClockId, clock_gettime};

use super::recent::Recent;
use crate::sync::statics::atomic::{AtomicU64, Ordering};
use crate::units::SECTOR;

/// Milliseconds between two checks by [`Whole::glance`].
const LOOK_EVERY: u64 = 20;

/// What was opened, and how much of it there was.
#[derive(Debug)]
pub(crate) struct Whole {
    path: PathBuf,
    opened_bytes: u64,
    /// The shortest length seen.
    left_bytes: AtomicU64,
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

/// What happened to the name of something that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// It has no name any more, and ends when it is closed.
    Deleted,
    /// It has another name now.
    Moved,
    /// Its name leads to something else.
    Replaced,
}

impl Absence {
    /// What happened, in words that follow the name.
    pub fn words(self) -> &'static str {
        match self {
            Absence::Deleted => "was deleted",
            Absence::Moved => "was moved away",
            Absence::Replaced => "was replaced by something else",
        }
    }
}

impl Whole {
    /// Of `file`, which was opened as `path` and is `bytes` long.
    pub(crate) fn new(path: &Path, file: impl AsFd, bytes: u64) -> Whole {
        Whole {
            path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
            opened_bytes: bytes,
            left_bytes: AtomicU64::new(bytes),
            next_look: AtomicU64::new(0),
            recent: fstat(&file)
                .ok()
                .filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
                .map(|_| Recent::default()),
            under: Under::of(file, bytes),
        }
    }

    /// How long it was.
    pub(crate) fn opened_bytes(&self) -> u64 {
        self.opened_bytes
    }

    /// Bytes from the start that were always there, as of the checks so far.
    #[inline]
    pub(crate) fn left_bytes(&self) -> u64 {
        self.left_bytes.load(Ordering::Relaxed)
    }

    /// Whether it lost a part, as of the checks so far.
    #[inline]
    pub(crate) fn is_cut(&self) -> bool {
        self.left_bytes() < self.opened_bytes
    }

    /// Checks. Returns whether it is whole, now and before.
    pub(crate) fn look(&self, file: impl AsFd) -> bool {
        let left = match &self.recent {
            Some(recent) => recent.look(&file, self.opened_bytes),
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

    /// Whether `data`, which was read from `offset`, is the file's content there, and not a hole of
    /// a file that was cut and became longer again.
    pub(crate) fn believes(&self, file: impl AsFd, offset: u64, data: &[u8]) -> bool {
        let is_zero = |sector: &[u8]| sector.first_chunk::<8>().is_none_or(|word| *word == [0; 8]);
        if self.recent.is_none() || !data.chunks(SECTOR as usize).any(is_zero) {
            return true;
        }
        self.look(file) || offset + data.len() as u64 <= self.left_bytes()
    }

    /// Checks. What it lost, in words that follow its name, if anything.
    pub(crate) fn loss(&self, file: impl AsFd) -> Option<String> {
        (!self.look(file)).then(|| {
            let (opened, left) = (self.opened_bytes, self.left_bytes());
            format!("was cut short, from {opened} to {left} bytes")
        })
    }

    /// What happened to its name, if anything. The removal of a device node changes nothing.
    pub(crate) fn absence(&self, file: impl AsFd) -> Option<Absence> {
        let own = fstat(file).ok()?;
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
        let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/loop"));
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let path = read("backing_file")?;
        let start = read("offset")?.trim().parse().ok()?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let file = rustix::fs::open(path.trim_end_matches('\n'), flags, Mode::empty()).ok()?;
        let under = Under { file, start };
        // A file of that name that is too short is another one.
        let has_room = length(&under.file)? >= bytes.checked_add(start)?;
        has_room.then_some(under)
    }
}

/// How long something is, if that can be found out.
fn length(file: impl AsFd) -> Option<u64> {
    let stat = fstat(&file).ok()?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Some(stat.st_size as u64),
        FileType::BlockDevice => rustix::fs::seek(file, SeekFrom::End(0)).ok(),
        _ => None,
    }
}
