//! Copying blocks between the devices, piece by piece.

use std::collections::VecDeque;
use std::ops::Range;

use crate::bio::Op;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::pending::Pending;
use crate::target::Port;
use crate::units::MIB;

use super::side::Side;
use super::{Cache, TOKEN_COPY};

/// Bytes of one I/O.
pub(super) const PIECE_BYTES: u64 = MIB;
/// Pieces of a block in flight.
const PIECES_MAX: u32 = 4;

/// What a copy is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// From the origin into a slot.
    Promote { block: u64, slot: u32 },
    /// From a slot to the origin.
    Clean { block: u64, slot: u32 },
}

impl Task {
    fn place(self) -> (u64, u32) {
        match self {
            Task::Promote { block, slot } | Task::Clean { block, slot } => (block, slot),
        }
    }
}

/// A block on its way.
#[derive(Debug)]
struct Copying {
    task: Task,
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
    /// Where a copy reads from, where it writes to, and the first byte of the block on each.
    fn ends(&self, task: Task) -> [(&Side, u64); 2] {
        let (block, slot) = task.place();
        let origin = (&self.origin, block * self.plan.block_bytes);
        let cache = (&self.cache, u64::from(slot) * self.plan.block_bytes);
        match task {
            Task::Promote { .. } => [origin, cache],
            Task::Clean { .. } => [cache, origin],
        }
    }

    /// Begins to copy these bytes of a block; there are some.
    pub(super) fn begin_copy(
        &self,
        copies: &mut Copies,
        task: Task,
        left: VecDeque<Range<u64>>,
        port: &mut Port,
    ) {
        let copying = Copying { task, left, outstanding: 0, status: Ok(()) };
        let place = copies.running.insert(copying);
        self.go_on_copying(copies, place, port);
    }

    /// Reads the next pieces.
    fn go_on_copying(&self, copies: &mut Copies, place: u32, port: &mut Port) {
        let copying = copies.running.value(place);
        let [(side, start), _] = self.ends(copying.task);
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
            port.ios.push_back(DiskIo::new(side.disk(), Op::Read, at, buffer, token));
            copying.outstanding += 1;
        }
    }

    /// An I/O of a copy is back. A copy that has ended, and how.
    pub(super) fn complete_copy(
        &self,
        copies: &mut Copies,
        io: DiskIo,
        port: &mut Port,
    ) -> Option<(Task, Result<(), Status>)> {
        let place = io.token as u32;
        let copying = copies.running.value(place);
        let [(_, from), (side, to)] = self.ends(copying.task);
        if io.op == Op::Read && io.result.is_ok() && copying.status.is_ok() {
            let at = to + (io.offset - from);
            port.ios.push_back(DiskIo::new(side.disk(), Op::Write, at, io.buffer, io.token));
            return None;
        }
        if io.op == Op::Write {
            side.count_write();
        }
        copying.status = copying.status.and(io.result);
        copying.outstanding -= 1;
        port.pool.put(io.buffer);
        let is_begun = copying.left.is_empty() || copying.status.is_err();
        if copying.outstanding == 0 && is_begun {
            let Copying { task, status, .. } = copies.running.remove(place);
            return Some((task, status));
        }
        self.go_on_copying(copies, place, port);
        None
    }
}
