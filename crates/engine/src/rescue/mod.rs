//! Newer data that a cache has for its origin, found by reading alone: for a cache that must not be
//! written to, because it was cut short, or because the user says so.
//!
//! An engine reads its own media and fills in a [`Salvage`]: for each part of the origin for which
//! the cache has newer data, where that is, or that it is lost. Then there are two ways:
//! [`Salvage::write_back`] brings the origin up to date as far as possible, and [`View`] serves
//! both together, to read.
//!
//! 1. The cache device is never stored to. So all of this can be repeated, with the same result.
//! 2. What is lost is never read from the origin, which has an older version of it. Such a read
//!    fails.
//! 3. If a cache cannot say any more which of its data is dirty, its engine must refuse.

pub(crate) mod gather;
mod view;

use std::collections::BTreeMap;

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::crc::pcache_crc;
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

/// A range: first byte, and how many.
pub type Range = (u64, u64);

/// Newer data that a cache has for its origin.
#[derive(Debug)]
pub struct Salvage {
    pmem: Arc<dyn Pmem>,
    /// By the first byte on the origin; none overlaps another.
    parts: BTreeMap<u64, Part>,
    /// The cache had newer data for more than is known here, and it is unknown for what.
    pub has_more: bool,
    /// What the user should know.
    pub notes: Vec<String>,
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

impl Salvage {
    /// Empty, for a cache on `pmem`.
    pub fn new(pmem: Arc<dyn Pmem>) -> Salvage {
        Salvage { pmem, parts: BTreeMap::new(), has_more: false, notes: Vec::new() }
    }

    /// The cache has `len` newer bytes for `offset` of the origin, at `at`. Those beyond the
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

    /// Whether the cache's newest data for a range is what stands at `at`.
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

    /// Writes all data that is there to `origin`, and makes it durable. `told` is called with the
    /// number of bytes written, and returns whether to go on. What cannot be read is lost from then
    /// on.
    pub fn write_back(
        &mut self,
        origin: &Arc<dyn Disk>,
        mut told: impl FnMut(u64) -> Result<()>,
    ) -> Result<u64> {
        let mut written = 0;
        let mut unreadable = Vec::new();
        let mut ios = Vec::with_capacity(PIECES_MAX);
        for (&first, part) in self.parts.iter().filter(|(_, part)| part.at.is_some()) {
            // A checksum covers the whole part, so that is read as one piece.
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
        let what = "writing what the cache has";
        Error::new(Kind::Io, format!("{}: {what}: {status}", disk.limits().name))
    })
}

/// How much of a cache device is missing, if it is shorter than its superblock says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Its length according to its superblock, at least.
    pub wanted_bytes: u64,
    /// Its present length.
    pub left_bytes: u64,
}

impl Cut {
    /// Of a device that has `left_bytes`, and needs `wanted_bytes`.
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

/// What to do about a cache that was cut short, for errors.
pub const CUT_ADVICE: &str = "`udm recover` writes back what is left of its dirty data, and with \
                              `?readonly` behind the names of both devices the table serves it to \
                              read";

#[cfg(test)]
mod tests;
