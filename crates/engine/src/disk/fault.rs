//! Faults of a simulated disk, as a table that tests fill in.

use std::ops::Range;

use super::DiskIo;
use crate::bio::Op;
use crate::error::Status;

/// The effect of a fault on an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The I/O fails and changes no data; a flush that fails loses data, see
    /// [`SimDisk`](super::SimDisk).
    Fail(Status),
    /// A write fails after any of its sectors were written.
    Tear(Status),
    /// A write, discard or zeroing succeeds and changes no data.
    Lose,
    /// It succeeds at this offset instead of its own.
    Misdirect(u64),
    /// A read succeeds with one bit changed in the byte at this offset of the disk, or in the
    /// nearest byte that was read.
    Corrupt(u64),
    /// It is held until [`SimDisk::heal`](super::SimDisk::heal).
    Stick,
}

/// A fault: which I/Os it hits, and its effect on them.
#[derive(Clone, Debug)]
pub struct Fault {
    op: Option<Op>,
    range: Range<u64>,
    skip: u64,
    count: u64,
    effect: Effect,
}

impl Fault {
    /// A permanent fault of every I/O.
    pub fn new(effect: Effect) -> Fault {
        Fault { op: None, range: 0..u64::MAX, skip: 0, count: u64::MAX, effect }
    }

    /// Only of this operation.
    pub fn of(mut self, op: Op) -> Fault {
        self.op = Some(op);
        self
    }

    /// Limits the fault to I/O that touches these bytes. Flushes touch all bytes.
    pub fn within(mut self, range: Range<u64>) -> Fault {
        self.range = range;
        self
    }

    /// Skips this many I/Os that it would have hit.
    pub fn after(mut self, skip: u64) -> Fault {
        self.skip = skip;
        self
    }

    /// Hits only this many times.
    pub fn times(mut self, count: u64) -> Fault {
        self.count = count;
        self
    }

    /// The effect on `io`, if this fault hits it.
    pub(super) fn meet(&mut self, io: &DiskIo) -> Option<Effect> {
        let start = io.offset.max(self.range.start);
        let is_touched = start < (io.offset + io.len).min(self.range.end);
        let is_meant = self.op.is_none_or(|op| op == io.op);
        if self.count == 0 || !is_meant || !(is_touched || io.op == Op::Flush) {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        self.count = self.count.saturating_sub(u64::from(self.count != u64::MAX));
        Some(self.effect)
    }
}
