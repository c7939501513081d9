//! Read-only recovery: newer data that a cache has for its origin, found by reading alone. It is
//! for a cache that must not be written to, because it was cut short or the user requests it.
//!
//! An engine reads its own media and fills in a [`Recovery`]: for each part of the origin for which
//! the cache has newer data, the address of that data, or that it is lost. There are then two
//! methods: [`Recovery::write_back`] brings the origin up to date as far as possible, and [`View`]
//! serves the cache and the origin together, read-only.
//!
//! 1. The cache device is never stored to. So all of this can be repeated, with the same result. A
//!    write-back changes the origin without a record in the cache, so the user must allow a
//!    repetition (`rebind true`).
//! 2. For lost data the origin has only an older version, so it is not read from there. Such a read
//!    fails.
//! 3. If a cache cannot tell any more which of its data is dirty, its engine must refuse.

pub(crate) mod gather;
mod view;

use std::collections::BTreeMap;

use crate::base::crc::pcache_crc;
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Result, Status};
use crate::pmem::Pmem;
use crate::sync::Arc;
use crate::units::{MIB, SECTOR};

pub use view::View;

/// Bytes of one write to the origin.
const PIECE_BYTES: u64 = MIB;
/// This many writes are in flight at a time.
const PIECES_MAX: usize = 16;

/// Places of dirty data that a survey reads.
const SAMPLES_MAX: usize = 256;

/// A range: first byte, and how many.
pub type Range = (u64, u64);

/// Newer data that a cache has for its origin.
#[derive(Debug)]
pub struct Recovery {
    pmem: Arc<dyn Pmem>,
    /// By the first byte on the origin; none overlaps another.
    parts: BTreeMap<u64, Part>,
    /// The cache had more newer data than is known here, at unknown addresses.
    pub has_more: bool,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// The data that a cache without a server holds for its origin, found by reading alone.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// Bytes for which the cache has newer data, readable or not.
    pub dirty_bytes: u64,
    /// Blocks of that data that were read as a sample, and the number that could not be read.
    pub sampled: usize,
    /// See `sampled`.
    pub unread: usize,
    /// The lost ranges of the origin. If some of the sample could not be read, these are all dirty
    /// ranges.
    pub ranges: Vec<Range>,
    /// Whether exactly these ranges are lost.
    pub is_exact: bool,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl Survey {
    /// Whether no block of the sample could be read.
    pub fn is_all_unread(&self) -> bool {
        self.sampled > 0 && self.unread == self.sampled
    }
}

/// Some of `all`, from the first to the last, at equal distances.
pub(crate) fn sample<T: Copy>(all: &[T]) -> Vec<T> {
    let step = all.len().div_ceil(SAMPLES_MAX).max(1);
    let mut some: Vec<T> = all.iter().step_by(step).copied().collect();
    some.extend(all.last().filter(|_| step > 1));
    some
}

/// The cache's data for a part of the origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    len: u64,
    /// Where on the cache device; none if it is lost.
    at: Option<u64>,
    sum: Option<Sum>,
}

/// A checksum, and the range of the cache device that it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sum {
    /// First byte and length.
    pub range: Range,
    /// Computed as pcache does.
    pub crc: u32,
}

/// A part of a requested range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    /// It is read from the origin.
    Origin(u64),
    /// The cache has newer data, which is there or lost.
    Cache(Part),
}

impl Recovery {
    /// Empty, for a cache on `pmem`.
    pub fn new(pmem: Arc<dyn Pmem>) -> Recovery {
        Recovery { pmem, parts: BTreeMap::new(), has_more: false, notes: Vec::new() }
    }

    /// The cache has `len` newer bytes for `offset` of the origin, at `at`. Bytes beyond the
    /// device's present end are lost.
    pub fn put(&mut self, offset: u64, len: u64, at: u64, sum: Option<Sum>) {
        let left = self.pmem.left_bytes();
        let is_checkable = sum.is_none_or(|Sum { range: (at, len), .. }| at + len <= left);
        let there =
            if is_checkable { left.saturating_sub(at).min(len) / SECTOR * SECTOR } else { 0 };
        self.set(offset, there, Some(Part { len: there, at: Some(at), sum }));
        self.lose(offset + there, len - there);
    }

    /// The cache had newer data for a range of the origin, and it is lost.
    pub fn lose(&mut self, offset: u64, len: u64) {
        self.set(offset, len, Some(Part { len, at: None, sum: None }));
    }

    /// The origin's data is the newest that there is.
    pub fn forget(&mut self, offset: u64, len: u64) {
        self.set(offset, len, None);
    }

    fn set(&mut self, offset: u64, len: u64, part: Option<Part>) {
        if len == 0 {
            return;
        }
        let end = offset + len;
        let before = self.parts.range(..offset).next_back().map(|(at, part)| (*at, *part));
        let within = self.parts.range(offset..end).map(|(at, part)| (*at, *part));
        for (at, old) in before.into_iter().chain(within).collect::<Vec<_>>() {
            let old_end = at + old.len;
            if old_end <= offset {
                continue;
            }
            self.parts.remove(&at);
            if at < offset {
                self.parts.insert(at, Part { len: offset - at, ..old });
            }
            if old_end > end {
                self.parts.insert(end, old.behind(end - at));
            }
        }
        if let Some(part) = part {
            self.parts.insert(offset, part);
        }
    }

    /// Whether the cache's newest data for a range is the data at `at`.
    pub fn is_at(&self, offset: u64, at: u64) -> bool {
        self.parts.get(&offset).is_some_and(|part| part.at == Some(at))
    }

    /// Bytes for which the cache has newer data.
    pub fn dirty_bytes(&self) -> u64 {
        self.parts.values().filter(|part| part.at.is_some()).map(|part| part.len).sum()
    }

    /// Bytes whose newest version is lost.
    pub fn lost_bytes(&self) -> u64 {
        self.lost().iter().map(|(_, len)| len).sum()
    }

    /// Where on the origin those are.
    pub fn lost(&self) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        for (&at, part) in self.parts.iter().filter(|(_, part)| part.at.is_none()) {
            join(&mut ranges, (at, part.len));
        }
        ranges
    }

    /// What `[offset, end)` begins with.
    fn piece(&self, offset: u64, end: u64) -> Piece {
        let before = self.parts.range(..=offset).next_back();
        if let Some((&at, part)) = before.filter(|(at, part)| **at + part.len > offset) {
            let part = part.behind(offset - at);
            return Piece::Cache(Part { len: part.len.min(end - offset), ..part });
        }
        let next = self.parts.range(offset..end).next().map_or(end, |(at, _)| *at);
        Piece::Origin(next - offset)
    }

    /// The data that the cache holds, and how much of it is readable.
    pub fn survey(&self) -> Survey {
        let there: Vec<(u64, Part)> = self.parts.iter().map(|(at, part)| (*at, *part)).collect();
        let mut survey = Survey { notes: self.notes.clone(), ..Survey::default() };
        let kept: Vec<&(u64, Part)> = there.iter().filter(|(_, part)| part.at.is_some()).collect();
        let sampled: Vec<&(u64, Part)> = sample(&kept);
        survey.sampled = sampled.len();
        for (_, part) in sampled {
            let mut bytes = [0; SECTOR as usize];
            let at = part.at.unwrap_or_default();
            survey.unread += usize::from(self.pmem.load(at, &mut bytes).is_err());
        }
        survey.ranges = match survey.unread {
            0 => self.lost(),
            _ => there.iter().map(|(at, part)| (*at, part.len)).collect(),
        };
        survey.dirty_bytes = self.dirty_bytes();
        survey.is_exact = !self.has_more && (survey.unread == 0 || survey.is_all_unread());
        survey
    }

    fn load(&self, part: &Part, into: &mut [u8]) -> std::result::Result<(), Status> {
        let at = part.at.ok_or(Status::Io)?;
        let Some(sum) = part.sum else { return self.pmem.load(at, into) };
        let mut whole = vec![0; sum.range.1 as usize];
        self.pmem.load(sum.range.0, &mut whole)?;
        if pcache_crc(&whole) != sum.crc {
            return Err(Status::Corrupt);
        }
        let from = (at - sum.range.0) as usize;
        into.copy_from_slice(&whole[from..from + into.len()]);
        Ok(())
    }

    /// Writes all readable data to `origin`, and makes it durable. `told` is called with the number
    /// of bytes written, and returns whether to continue. From then on, unreadable data is lost.
    pub fn write_back(
        &mut self,
        origin: &Arc<dyn Disk>,
        mut told: impl FnMut(u64) -> Result<()>,
    ) -> Result<u64> {
        let mut written = 0;
        let mut unreadable = Vec::new();
        let mut ios = Vec::with_capacity(PIECES_MAX);
        for (&first, part) in self.parts.iter().filter(|(_, part)| part.at.is_some()) {
            // A checksum covers the whole part, so it is read as one piece.
            let step = if part.sum.is_some() { part.len } else { PIECE_BYTES };
            for at in (0..part.len).step_by(step as usize) {
                let piece = part.behind(at);
                let len = piece.len.min(step);
                let mut buffer = Buffer::zeroed(len as usize);
                match self.load(&piece, buffer.as_mut_slice()) {
                    Err(_) => unreadable.push((first + at, len)),
                    Ok(()) => {
                        written += len;
                        ios.push(DiskIo::new(origin, Op::Write, first + at, buffer, 0));
                    }
                }
                if ios.len() == PIECES_MAX {
                    carry_out(origin, std::mem::take(&mut ios))?;
                    told(written)?;
                }
            }
        }
        carry_out(origin, ios)?;
        carry_out(origin, vec![DiskIo::bare(origin, Op::Flush, 0, 0, 0)])?;
        told(written)?;
        unreadable.into_iter().for_each(|(at, len)| self.lose(at, len));
        Ok(written)
    }
}

impl Part {
    /// The rest of it after its first `len` bytes.
    fn behind(&self, len: u64) -> Part {
        Part { len: self.len - len, at: self.at.map(|at| at + len), ..*self }
    }
}

/// Adds a range that begins at or after the end of the last one.
fn join(ranges: &mut Vec<Range>, (at, len): Range) {
    match ranges.last_mut() {
        Some((first, known)) if *first + *known == at => *known += len,
        _ => ranges.push((at, len)),
    }
}

fn carry_out(disk: &Arc<dyn Disk>, ios: Vec<DiskIo>) -> Result<()> {
    let done = disk.carry_out(ios);
    done.iter().try_for_each(|io| io.result).map_err(|status| {
        let what = "writing dirty data back";
        Error::new(Kind::Io, format!("{}: {what}: {status}", disk.limits().name))
    })
}

/// The missing part of a cache device that is shorter than its superblock says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Its length according to its superblock, at least.
    pub wanted_bytes: u64,
    /// Its present length.
    pub left_bytes: u64,
}

impl Cut {
    /// The missing part of a device that has `left_bytes` and needs `wanted_bytes`.
    pub fn of(left_bytes: u64, wanted_bytes: u64) -> Option<Cut> {
        (left_bytes < wanted_bytes).then_some(Cut { wanted_bytes, left_bytes })
    }
}

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Cut { wanted_bytes, left_bytes } = self;
        write!(f, "it was cut short, from {wanted_bytes} or more bytes to {left_bytes}")
    }
}

/// For errors, after the name and address of data that the cache should have: the data is in a hole
/// of the file.
pub const IN_HOLE: &str = "is in a hole of the file, which was cut short and extended again, or \
                           copied without its zeroes (`cp --sparse=never` keeps them)";

/// What to do about a cache that was cut short, for errors.
pub const CUT_ADVICE: &str = "`udm recover` writes back the rest of its dirty data, and with \
                              `?readonly` after the names of both devices, the table serves it \
                              read-only";

#[cfg(test)]
mod tests;
