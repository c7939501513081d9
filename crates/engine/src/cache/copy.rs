//! Copying dirty blocks to the origin, piece by piece.

use std::collections::VecDeque;
use std::ops::Range;

use crate::base::pending::Pending;
use crate::bio::Op;
use crate::disk::DiskIo;
use crate::target::Port;
use crate::units::{KIB, MIB};

use super::aside::Culprit;
use super::{Cache, TOKEN_COPY, waits};

/// Bytes of one I/O.
pub(super) const PIECE_BYTES: u64 = MIB;
/// Pieces of a block in flight.
const PIECES_MAX: u32 = 4;
/// A block that failed before is copied in at most this many pieces, of no less than a page.
const SMALL_PIECES_MAX: u64 = 64;
const SMALL_PIECE_BYTES: u64 = 4 * KIB;

/// A slot, and the block that it holds.
type Mapping = (u32, u64);

/// A block on its way.
#[derive(Debug)]
struct Copying {
    mapping: Mapping,
    /// Bytes of the block for which no I/O has begun.
    left: VecDeque<Range<u64>>,
    outstanding: u32,
    /// Bytes of one I/O.
    piece_bytes: u64,
    /// All of its pieces are tried, even if some fail.
    tries_all: bool,
    result: Result<(), Culprit>,
}

impl Copying {
    fn goes_on(&self) -> bool {
        self.result.is_ok() || self.tries_all
    }
}

/// The blocks on their way.
#[derive(Debug, Default)]
pub(super) struct Copies {
    running: Pending<Copying>,
    /// Pieces that are being read.
    reads: u32,
    /// Pieces that are being written.
    writes: u32,
}

impl Copies {
    /// How many there are.
    pub(super) fn count(&self) -> u64 {
        self.running.count() as u64
    }

    /// The device that they wait for.
    pub(super) fn waits_for(&self) -> Option<&'static str> {
        match (self.reads, self.writes) {
            (0, 0) => None,
            (_, 0) => Some(waits::CACHE),
            (0, _) => Some(waits::ORIGIN),
            _ => Some(waits::EITHER),
        }
    }
}

impl Cache {
    /// The first byte of a block in its slot, and at the origin.
    fn ends(&self, (slot, block): Mapping) -> [u64; 2] {
        [u64::from(slot), block].map(|nth| nth * self.plan.block_bytes)
    }

    /// Begins to copy these bytes of a block; there are some. `has_failed`: in small pieces, so
    /// that as many as possible are copied.
    pub(super) fn begin_copy(
        &self,
        copies: &mut Copies,
        mapping: Mapping,
        left: VecDeque<Range<u64>>,
        has_failed: bool,
        port: &mut Port,
    ) {
        let small =
            (self.plan.block_bytes / SMALL_PIECES_MAX).clamp(SMALL_PIECE_BYTES, PIECE_BYTES);
        let piece_bytes = if has_failed { small } else { PIECE_BYTES };
        let (tries_all, result) = (has_failed, Ok(()));
        let copying = Copying { mapping, left, outstanding: 0, piece_bytes, tries_all, result };
        let place = copies.running.insert(copying);
        self.go_on_copying(copies, place, port);
    }

    /// Reads the next pieces.
    fn go_on_copying(&self, copies: &mut Copies, place: u32, port: &mut Port) {
        let copying = copies.running.value(place);
        let [start, _] = self.ends(copying.mapping);
        while copying.goes_on()
            && copying.outstanding < PIECES_MAX
            && let Some(first) = copying.left.front_mut()
        {
            let (at, len) = (start + first.start, copying.piece_bytes.min(first.end - first.start));
            first.start += len;
            if first.is_empty() {
                copying.left.pop_front();
            }
            let buffer = port.pool.take(len as usize);
            let token = TOKEN_COPY | u64::from(place);
            port.ios.push_back(DiskIo::new(self.cache.disk(), Op::Read, at, buffer, token));
            copying.outstanding += 1;
            copies.reads += 1;
        }
    }

    /// An I/O of a copy is back. A copy that has ended, and the device that failed it.
    pub(super) fn complete_copy(
        &self,
        copies: &mut Copies,
        io: DiskIo,
        port: &mut Port,
    ) -> Option<(Mapping, Result<(), Culprit>)> {
        let place = io.token as u32;
        match io.op {
            Op::Read => copies.reads -= 1,
            _ => copies.writes -= 1,
        }
        let copying = copies.running.value(place);
        let [from, to] = self.ends(copying.mapping);
        if io.op == Op::Read && io.result.is_ok() && copying.goes_on() {
            self.blocks().slots.aside.worked(Culprit::Cache);
            let at = to + (io.offset - from);
            let disk = self.origin.disk();
            port.ios.push_back(DiskIo::new(disk, Op::Write, at, io.buffer, io.token));
            copies.writes += 1;
            return None;
        }
        let culprit = match io.op {
            Op::Write => {
                self.origin.count_write();
                Culprit::Origin
            }
            _ => Culprit::Cache,
        };
        copying.result = copying.result.and(io.result.map_err(|_| culprit));
        copying.outstanding -= 1;
        if io.result.is_ok() {
            self.blocks().slots.aside.worked(culprit);
        }
        port.pool.put(io.buffer);
        let is_begun = copying.left.is_empty() || !copying.goes_on();
        if copying.outstanding == 0 && is_begun {
            let Copying { mapping, result, .. } = copies.running.remove(place);
            return Some((mapping, result));
        }
        self.go_on_copying(copies, place, port);
        None
    }
}
