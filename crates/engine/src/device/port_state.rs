//! One port's side of a device: accounting, and the way of a bio to its targets.
//!
//! In a table of one line, bios go straight to the target, in a longer one through
//! [`split`](super::split). Requests that are not whole blocks are served in pieces that are: see
//! [`parts`](super::parts).
//!
//! A flush covers all writes that were acknowledged, on every port. So a loss by a failed flush, or
//! by a failed write-out, is reported to each port once, at its next flush or write with FUA: see
//! [`PortState::tell`]. Linux does the same for the open descriptors of a file (errseq_t).

use super::block_locks::BlockLocks;
use super::parts::{Next, Parts};
use super::split::Split;
use super::table::{Active, Line};
use crate::bio::{Bio, Op, Part};
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pmem::client_memory::Source;
use crate::pmem::copy_target::CopyTarget;
use crate::sync::Arc;
use crate::target::Port;
use crate::units::{BIO_BYTES_MAX, Nanos, SECTOR};

/// The device's state for one port.
#[derive(Debug, Default)]
pub(super) struct PortState {
    is_attached: bool,
    is_suspended: bool,
    table: Option<Arc<Active>>,
    /// Bios inside targets.
    in_flight: u64,
    generation: u64,
    /// The generation of the table that the progress of this port's parked bios belongs to.
    parked_generation: u64,
    split: Split,
    /// Requests that are not whole blocks, and locks for them.
    parts: Parts,
    /// The losses of the table that were reported to this port.
    told: u64,
    /// A loss of the table before was not reported to it.
    is_owed: bool,
}

/// The losses that were reported to a port, for the next port of the same client: see
/// [`Driver::continue_from`](super::Driver::continue_from).
#[derive(Clone, Copy, Debug)]
pub struct Reported {
    generation: u64,
    told: u64,
    is_owed: bool,
    /// Whether a loss was not reported to the port when it was detached.
    is_pending: bool,
}

/// Lengths of a port's queues before a call into a target.
#[derive(Clone, Copy)]
struct Mark {
    done: usize,
    parked: usize,
}

impl Mark {
    fn of(port: &Port) -> Mark {
        Mark { done: port.done.len(), parked: port.parked.len() }
    }
}

impl PortState {
    pub fn attach(&mut self, table: Option<Arc<Active>>, generation: u64, is_suspended: bool) {
        // A loss that was reported to no port is reported to one that is attached now: it may be
        // the same client again.
        let told = table.as_ref().map_or(0, |table| table.told());
        *self = PortState {
            is_attached: true,
            told,
            is_suspended,
            table,
            generation,
            parked_generation: generation,
            parts: self.parts.renewed(),
            ..PortState::default()
        };
    }

    /// Ends the use of this port.
    pub fn detach(&mut self) {
        *self = PortState { parts: self.parts.renewed(), ..PortState::default() };
    }

    /// Begins to lock the changes of this port, or stops that; see [`BlockLocks`].
    pub fn set_locks(&mut self, port: usize, locks: Option<&Arc<BlockLocks>>, epoch: u16) {
        self.parts.set_locks(port, locks, epoch, self.in_flight);
    }

    /// Its requests that are not whole blocks.
    #[inline]
    pub fn parts(&mut self) -> &mut Parts {
        &mut self.parts
    }

    /// The losses that were reported to this port so far.
    pub fn reported(&self) -> Reported {
        let has_lost = self.table.as_ref().is_some_and(|table| table.losses() != self.told);
        let PortState { generation, told, is_owed, .. } = *self;
        Reported { generation, told, is_owed, is_pending: is_owed || has_lost }
    }

    /// This port serves the client of an earlier port. The client gets the error of each loss that
    /// was not reported to the earlier port, even if other clients got theirs.
    pub fn continue_from(&mut self, earlier: Reported) {
        if earlier.generation == self.generation {
            (self.told, self.is_owed) = (earlier.told, earlier.is_owed);
        } else {
            self.is_owed |= earlier.is_pending;
        }
    }

    pub fn is_attached(&self) -> bool {
        self.is_attached
    }

    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }

    pub fn is_suspended(&self) -> bool {
        self.is_suspended
    }

    pub fn set_suspended(&mut self, is_suspended: bool) {
        self.is_suspended = is_suspended;
    }

    pub fn set_table(&mut self, table: Option<Arc<Active>>, generation: u64) {
        assert_eq!(self.in_flight, 0, "a table changes while no request is in flight");
        self.is_owed |= self.table.as_ref().is_some_and(|table| table.losses() != self.told);
        self.told = table.as_ref().map_or(0, |table| table.told());
        self.table = table;
        self.generation = generation;
        self.is_suspended = false;
        self.split = Split::default();
        self.parts.forget();
    }

    /// The port's parked bios are about to be submitted again, because free space was signalled.
    pub fn begin_retry(&mut self) {
        self.split.begin_retry();
    }

    /// All parked bios have been submitted since the table changed last.
    pub fn parked_bios_are_current(&mut self) {
        self.parked_generation = self.generation;
    }

    #[inline]
    pub fn submit(&mut self, mut bio: Bio, port: &mut Port) {
        if self.is_suspended {
            return port.parked.push_back(bio);
        }
        if bio.allows_parts || self.parts.is_active() {
            return self.submit_any(bio, port);
        }
        let Some(table) = &self.table else { return port.finish(bio, Err(Status::Io)) };
        if let Err(status) = table.check(&bio) {
            return port.finish(bio, Err(status));
        }
        if bio.len == 0 && bio.op != Op::Flush {
            return port.finish(bio, Ok(()));
        }
        if self.has_other_targets() {
            bio.progress = 0;
            bio.note = 0;
        }
        let mark = Mark::of(port);
        self.in_flight += 1;
        match table.lines() {
            [only] => only.target.submit(bio, port),
            lines => self.split.submit(lines, table.index_at(bio.offset), bio, port),
        }
        self.count_out(mark, port, false);
    }

    /// Whether the progress that a parked bio made with the earlier targets does not hold for the
    /// new ones.
    #[inline]
    fn has_other_targets(&self) -> bool {
        self.parked_generation != self.generation && !mutants::is(Mutant::ProgressKept)
    }

    /// Submits a bio that may be a part of blocks, or must respect the locks of blocks. Apart from
    /// [`PortState::submit`], which would be slower with it.
    #[cold]
    fn submit_any(&mut self, mut bio: Bio, port: &mut Port) {
        if bio.part == Part::Request {
            return self.resume_parts(bio, port);
        }
        let Some(table) = &self.table else { return port.finish(bio, Err(Status::Io)) };
        if let Err(status) = table.check(&bio) {
            return port.finish(bio, Err(status));
        }
        if bio.len == 0 && bio.op != Op::Flush {
            return port.finish(bio, Ok(()));
        }
        if self.has_other_targets() {
            bio.progress = 0;
            bio.note = 0;
        }
        let table = self.table.as_ref().expect("a bio is checked against a table");
        if bio.allows_parts && !table.is_whole(&bio) {
            return self.begin_parts(bio, port);
        }
        if !self.parts.admit(&mut bio) {
            return port.parked.push_back(bio);
        }
        let mark = Mark::of(port);
        self.in_flight += 1;
        self.enter(bio, port);
        self.settle(mark, port, false);
    }

    /// Gives a bio of whole blocks to the targets.
    fn enter(&mut self, bio: Bio, port: &mut Port) {
        let table = self.table.as_ref().expect("a table stays while bios are inside");
        match table.lines() {
            [only] => only.target.submit(bio, port),
            lines => self.split.submit(lines, table.index_at(bio.offset), bio, port),
        }
    }

    /// See [`Target::read_into`](crate::target::Target::read_into).
    #[inline]
    pub fn read_into(&self, offset: u64, into: CopyTarget<'_>, port: usize) -> bool {
        let line = self.line_of(offset, into.len());
        line.is_some_and(|line| line.target.read_into(offset - line.start, into, port))
    }

    /// See [`Target::write_from`](crate::target::Target::write_from).
    #[inline]
    pub fn write_from(&self, offset: u64, from: Source<'_>, fua: bool, port: usize) -> bool {
        // A write with a bio takes part in the locks of blocks.
        let line = self.line_of(offset, from.bytes().len()).filter(|_| !self.parts.is_active());
        line.is_some_and(|line| line.target.write_from(offset - line.start, from, fua, port))
    }

    /// The line that has all of a range, if a request for it may be served now.
    #[inline]
    fn line_of(&self, offset: u64, len: usize) -> Option<&Line> {
        let table = self.table.as_ref().filter(|_| !self.is_suspended)?;
        let line = table.line_at(offset)?;
        let len = len as u64;
        let is_inside = len > 0 && len <= BIO_BYTES_MAX && len <= line.end - offset;
        (is_inside && (offset | len).is_multiple_of(SECTOR)).then_some(line)
    }

    /// The reason for which a parked bio waits.
    pub fn parked_for(&mut self, bio: &Bio) -> &'static str {
        let Some(table) = self.table.as_ref().filter(|_| !self.is_suspended) else {
            return "resume";
        };
        let bio = match bio.part {
            Part::Request => self.parts.parked_piece(bio),
            _ => Some(bio).filter(|bio| !self.parts.is_locked_out(bio)),
        };
        let Some(bio) = bio else { return "other changes of its blocks" };
        match table.lines() {
            [only] => only.target.parked_for(bio),
            lines => match self.split.waiting_child(bio) {
                Some((line, child)) => lines[line].target.parked_for(child),
                None => "its turn",
            },
        }
    }

    /// The part that the disk of an I/O in flight has in its target.
    pub fn role_of(&self, io: &DiskIo) -> &'static str {
        let line = self.table.as_ref().and_then(|table| table.lines().get(io.line as usize));
        line.map_or("a disk", |line| line.target.role_of(&io.disk))
    }

    pub fn complete(&mut self, io: DiskIo, port: &mut Port) {
        let table = self.table.as_ref().expect("a table stays while I/O is in flight");
        let mark = Mark::of(port);
        let is_refusal = io.op == Op::Flush && io.result.is_err();
        match table.lines() {
            [only] => only.target.complete(io, port),
            lines => {
                let index = io.line as usize;
                self.split.visit(lines, port, |split, port| {
                    split.call(index, port, |port| lines[index].target.complete(io, port));
                });
            }
        }
        self.settle(mark, port, is_refusal);
    }

    pub fn tick(&mut self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        let table = self.table.as_ref()?;
        let mark = Mark::of(port);
        let mut next: Option<Nanos> = None;
        match table.lines() {
            [only] => next = only.target.tick(now, port),
            lines => self.split.visit(lines, port, |split, port| {
                for (index, line) in lines.iter().enumerate() {
                    let due = split.call(index, port, |port| line.target.tick(now, port));
                    next = next.into_iter().chain(due).min();
                }
            }),
        }
        self.settle(mark, port, false);
        next
    }

    /// Counts the bios that targets put out since `mark`. `is_refusal`: because a flush has failed.
    #[inline]
    fn settle(&mut self, mark: Mark, port: &mut Port, is_refusal: bool) {
        if self.parts.is_active() {
            self.settle_parts(mark, port);
        }
        self.count_out(mark, port, is_refusal);
    }

    /// The same without pieces of requests.
    #[inline]
    fn count_out(&mut self, mark: Mark, port: &mut Port, is_refusal: bool) {
        let done = port.done.len().checked_sub(mark.done).expect("targets only add to `done`");
        let parked =
            port.parked.len().checked_sub(mark.parked).expect("targets only add to `parked`");
        for nth in mark.done..port.done.len() {
            let bio = &port.done[nth];
            let has_data = matches!(bio.op, Op::Read | Op::Write);
            assert!(!has_data || bio.buffer.len() as u64 == bio.len, "a bio lost its buffer");
            if bio.op == Op::Flush || bio.fua && bio.op != Op::Read {
                self.tell(&mut port.done[nth], is_refusal);
            }
        }
        self.in_flight = self
            .in_flight
            .checked_sub((done + parked) as u64)
            .expect("each bio comes out exactly once, of the port it went into");
    }
}

impl PortState {
    /// A flush or a write with FUA is done. It fails if a write was lost since the last loss that
    /// was reported to this port: its flush would have covered the writes of all ports.
    fn tell(&mut self, bio: &mut Bio, is_refusal: bool) {
        let Some(table) = &self.table else { return };
        let losses = table.losses();
        let is_due = self.is_owed || losses != self.told;
        // A write may have failed for a reason of its own.
        let is_own = bio.op != Op::Flush && bio.status.is_err() && !is_refusal;
        if !is_due || is_own {
            return;
        }
        if bio.status.is_ok() {
            if mutants::is(Mutant::LossToldToOne) {
                return;
            }
            bio.status = Err(Status::Io);
        }
        (self.told, self.is_owed) = (losses, false);
        if !mutants::is(Mutant::NewcomerToldAgain) {
            table.note_told(losses);
        }
    }
}

/// Requests that are not whole blocks: see [`super::parts`].
impl PortState {
    fn begin_parts(&mut self, bio: Bio, port: &mut Port) {
        if !self.parts.may_begin(&bio) {
            return port.parked.push_back(bio);
        }
        let table = self.table.as_ref().expect("a bio is checked against a table");
        let block_bytes = table.block_bytes();
        if bio.end().next_multiple_of(block_bytes) > table.size_bytes() {
            return port.finish(bio, Err(Status::Invalid));
        }
        let mark = Mark::of(port);
        self.in_flight += 1;
        let next = self.parts.begin(bio, block_bytes, self.generation, &mut port.pool);
        self.follow(next, port);
        self.settle(mark, port, false);
    }

    fn resume_parts(&mut self, bio: Bio, port: &mut Port) {
        match self.parts.resume(bio, self.generation, &mut port.pool) {
            Ok(next) => {
                let mark = Mark::of(port);
                self.in_flight += 1;
                self.follow(next, port);
                self.settle(mark, port, false);
            }
            Err(bio) => self.submit(bio, port),
        }
    }

    fn follow(&mut self, next: Next, port: &mut Port) {
        match next {
            Next::Submit(piece) => self.enter(piece, port),
            Next::Finish(request, status) => port.finish(request, status),
            Next::Park(request) => port.parked.push_back(request),
        }
    }

    /// Processes the bios that targets put out since `mark`: pieces continue their requests.
    #[cold]
    fn settle_parts(&mut self, mark: Mark, port: &mut Port) {
        loop {
            let is_piece = |bio: &Bio| bio.part == Part::Piece;
            let next = if let Some(at) = port.done.range(mark.done..).position(is_piece) {
                let piece = port.done.remove(mark.done + at).expect("it was found there");
                self.parts.piece_done(piece, &mut port.pool)
            } else if let Some(at) = port.parked.range(mark.parked..).position(is_piece) {
                let piece = port.parked.remove(mark.parked + at).expect("it was found there");
                self.parts.piece_parked(piece)
            } else {
                break;
            };
            self.follow(next, port);
        }
        port.done.range_mut(mark.done..).for_each(|bio| self.parts.came_out(bio));
        port.parked.range_mut(mark.parked..).for_each(|bio| self.parts.came_out(bio));
        self.parts.settle();
    }
}
