//! Copying dirty blocks to the origin, piece by piece.

use std::collections::VecDeque;
use std::ops::Range;

use crate::bio::Op;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::pending::Pending;
use crate::target::Port;
use crate::units::MIB;

use super::{Cache, TOKEN_COPY};

/// Bytes of one I/O.
pub(super) const PIECE_BYTES: u64 = MIB;
/// Pieces of a block in flight.
const PIECES_MAX: u32 = 4;

/// A slot, and the block that it holds.
type Mapping = (u32, u64);

/// A block on its way.
#[derive(Debug)]
struct Copying {
    mapping: Mapping,
    /// Bytes of the block for which no I/O has begun.
    left: VecDeque<Range<u64>>,
    outstanding: u32,
    status: Result<(), Status>,
}

/// The blocks on their way.
#[derive(Debug, Default)]
pub(super) struct Copies {
    running: Pending<Copying>,
}

impl Copies {
    /// How many there are.
    pub(super) fn count(&self) -> u64 {
        self.running.count() as u64
    }
}

impl Cache {
    /// The first byte of a block in its slot, and at the origin.
    fn ends(&self, (slot, block): Mapping) -> [u64; 2] {
        [u64::from(slot), block].map(|nth| nth * self.plan.block_bytes)
    }

    /// Begins to copy these bytes of a block; there are some.
    pub(super) fn begin_copy(
        &self,
        copies: &mut Copies,
        mapping: Mapping,
        left: VecDeque<Range<u64>>,
        port: &mut Port,
    ) {
        let copying = Copying { mapping, left, outstanding: 0, status: Ok(()) };
        let place = copies.running.insert(copying);
        self.go_on_copying(copies, place, port);
    }

    /// Reads the next pieces.
    fn go_on_copying(&self, copies: &mut Copies, place: u32, port: &mut Port) {
        let copying = copies.running.value(place);
        let [start, _] = self.ends(copying.mapping);
        while copying.status.is_ok()
            && copying.outstanding < PIECES_MAX
            && let Some(first) = copying.left.front_mut()
        {
            let (at, len) = (start + first.start, PIECE_BYTES.min(first.end - first.start));
            first.start += len;
            if first.is_empty() {
                copying.left.pop_front();
            }
            let buffer = port.pool.take(len as usize);
            let token = TOKEN_COPY | u64::from(place);
            port.ios.push_back(DiskIo::new(self.cache.disk(), Op::Read, at, buffer, token));
            copying.outstanding += 1;
        }
    }

    /// An I/O of a copy is back. A copy that has ended, and how.
    pub(super) fn complete_copy(
        &self,
        copies: &mut Copies,
        io: DiskIo,
        port: &mut Port,
    ) -> Option<(Mapping, Result<(), Status>)> {
        let place = io.token as u32;
        let copying = copies.running.value(place);
        let [from, to] = self.ends(copying.mapping);
        if io.op == Op::Read && io.result.is_ok() && copying.status.is_ok() {
            let at = to + (io.offset - from);
            let disk = self.origin.disk();
            port.ios.push_back(DiskIo::new(disk, Op::Write, at, io.buffer, io.token));
            return None;
        }
        if io.op == Op::Write {
            self.origin.count_write();
        }
        copying.status = copying.status.and(io.result);
        copying.outstanding -= 1;
        port.pool.put(io.buffer);
        let is_begun = copying.left.is_empty() || copying.status.is_err();
        if copying.outstanding == 0 && is_begun {
            let Copying { mapping, status, .. } = copies.running.remove(place);
            return Some((mapping, status));
        }
        self.go_on_copying(copies, place, port);
        None
    }
}
