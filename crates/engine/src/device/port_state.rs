//! One port's side of a device: accounting, and bios that cross lines.
//!
//! In a table of one line, bios go straight to the target. In a longer one each bio becomes an
//! *outer* bio with children, one for each line it touches. A bio within one line lends its buffer
//! to its only child; other children get copies. Children that a target parks wait here. When the
//! other children of an outer bio are done, the outer bio is parked itself, and its next submit
//! submits the waiting children again, with the progress they had made. If parked bios were retried
//! before that, the children have missed the retry, and free space may never be signalled again, so
//! they are submitted again immediately.
//!
//! A flush covers all writes that were acknowledged, on every port. So a loss by a failed flush, or
//! by a failed write-out, is reported to each port once, at its next flush or write with FUA: see
//! [`PortState::tell`]. Linux does the same for the open descriptors of a file (errseq_t).

use std::collections::VecDeque;

use super::table::{Active, Line};
use crate::base::pending::Pending;
use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
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
            ..PortState::default()
        };
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
    }

    /// The port's parked bios are about to be submitted again, because free space was signalled.
    pub fn begin_retry(&mut self) {
        self.split.retries += 1;
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
        let Some(table) = &self.table else { return port.finish(bio, Err(Status::Io)) };
        if let Err(status) = table.check(&bio) {
            return port.finish(bio, Err(status));
        }
        if bio.len == 0 && bio.op != Op::Flush {
            return port.finish(bio, Ok(()));
        }
        if self.parked_generation != self.generation && !mutants::is(Mutant::ProgressKept) {
            // The progress that a bio made with the earlier targets does not hold for the new ones.
            bio.progress = 0;
            bio.note = 0;
        }
        let mark = Mark::of(port);
        self.in_flight += 1;
        match table.lines() {
            [only] => only.target.submit(bio, port),
            lines => self.split.submit(lines, table.index_at(bio.offset), bio, port),
        }
        self.settle(mark, port, false);
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
        let line = self.line_of(offset, from.bytes().len());
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
        let lines = table.lines();
        let child = match lines {
            [only] => return only.target.parked_for(bio),
            _ => match outer_of(bio) {
                Some(outer) => self.split.outers.value(outer).parked.front(),
                None => return "its turn",
            },
        };
        child.map_or("its turn", |child| lines[line_of(child)].target.parked_for(child))
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

/// Bios of a table with several lines.
#[derive(Debug, Default)]
struct Split {
    outers: Pending<Outer>,
    /// The port's own queues, stored here while the port's queues collect children.
    outside_done: VecDeque<Bio>,
    outside_parked: VecDeque<Bio>,
    /// Children on their way to targets; empty between calls.
    children: VecDeque<Bio>,
    /// How often parked bios were submitted again.
    retries: u64,
    /// Outer bios whose children have missed one of those retries.
    missed: Vec<u32>,
}

/// A bio in its submitted form, and the results of its children.
#[derive(Debug)]
struct Outer {
    /// `None` while it is parked.
    bio: Option<Bio>,
    /// Children inside targets.
    open: usize,
    /// Children that targets parked, each with its line.
    parked: VecDeque<Bio>,
    /// The number of retries of parked bios at the time when the first of its children was parked.
    parked_at: u64,
    /// Whether the only child works on the outer bio's own buffer.
    is_lent: bool,
    status: Result<(), Status>,
}

/// The outer bio that a parked bio is; its note is one more than that.
fn outer_of(bio: &Bio) -> Option<u32> {
    bio.note.checked_sub(1).map(|outer| outer as u32)
}

/// A child's token: its line and its outer bio.
fn child_token(line: usize, outer: u32) -> u64 {
    (line as u64) << 32 | u64::from(outer)
}

fn line_of(child: &Bio) -> usize {
    (child.token >> 32) as usize
}

impl Split {
    fn submit(&mut self, lines: &[Line], first: usize, mut bio: Bio, port: &mut Port) {
        let mut children = std::mem::take(&mut self.children);
        let outer = if let Some(outer) = outer_of(&bio) {
            let known = self.outers.value(outer);
            children.append(&mut known.parked);
            if mutants::is(Mutant::ParkedForgetsError) {
                known.status = Ok(());
            }
            if known.is_lent
                && let Some(child) = children.front_mut()
            {
                std::mem::swap(&mut child.buffer, &mut bio.buffer);
            }
            bio.note = 0;
            known.bio = Some(bio);
            outer
        } else {
            let is_lent = bio.op != Op::Flush && bio.end() <= lines[first].end;
            let (open, parked, status) = (0, VecDeque::new(), Ok(()));
            let parked_at = self.retries;
            let new = Outer { bio: None, open, parked, parked_at, is_lent, status };
            let outer = self.outers.insert(new);
            cut(lines, first, &mut bio, outer, is_lent, port, &mut children);
            self.outers.value(outer).bio = Some(bio);
            outer
        };
        self.outers.value(outer).open = children.len();
        self.visit(lines, port, |split, port| {
            for child in children.drain(..) {
                let line = line_of(&child);
                split.call(line, port, |port| lines[line].target.submit(child, port));
            }
        });
        self.children = children;
    }

    /// Calls into targets with the port's queues emptied, then processes the children that come
    /// out.
    fn visit(&mut self, lines: &[Line], port: &mut Port, calls: impl FnOnce(&mut Self, &mut Port)) {
        self.swap_queues(port);
        calls(self, port);
        self.swap_queues(port);
        self.take_out(lines, port);
        while let Some(place) = self.missed.pop() {
            let outer = self.outers.value(place);
            let children = std::mem::take(&mut outer.parked);
            outer.open = children.len();
            self.swap_queues(port);
            for child in children {
                let line = line_of(&child);
                self.call(line, port, |port| lines[line].target.submit(child, port));
            }
            self.swap_queues(port);
            self.take_out(lines, port);
        }
    }

    /// Processes the children that targets have put out. The port's own bios stay in the outside
    /// queues meanwhile.
    fn take_out(&mut self, lines: &[Line], port: &mut Port) {
        while let Some(child) = self.outside_done.pop_front() {
            self.end_child(lines, child, port);
        }
        while let Some(child) = self.outside_parked.pop_front() {
            self.park_child(child, port);
        }
    }

    fn swap_queues(&mut self, port: &mut Port) {
        std::mem::swap(&mut self.outside_done, &mut port.done);
        std::mem::swap(&mut self.outside_parked, &mut port.parked);
    }

    /// Calls into line `index`, and marks the I/O that comes out with it.
    fn call<T>(&self, index: usize, port: &mut Port, call: impl FnOnce(&mut Port) -> T) -> T {
        let before = port.ios.len();
        let result = call(port);
        for io in port.ios.range_mut(before..) {
            io.line = index as u32;
        }
        result
    }

    fn end_child(&mut self, lines: &[Line], child: Bio, port: &mut Port) {
        let place = child.token as u32;
        let outer = self.outers.value(place);
        outer.open = outer.open.checked_sub(1).expect("each child comes out exactly once");
        outer.status = match mutants::is(Mutant::LastChildCounts) {
            true => child.status,
            false => outer.status.and(child.status),
        };
        let bio = outer.bio.as_mut().expect("an outer bio is here while a child is inside");
        if outer.is_lent {
            bio.buffer = child.buffer;
        } else {
            if bio.op == Op::Read && child.status.is_ok() {
                let at = (lines[line_of(&child)].start + child.offset - bio.offset) as usize;
                let part = &mut bio.buffer.as_mut_slice()[at..at + child.buffer.len()];
                part.copy_from_slice(child.buffer.as_slice());
            }
            port.pool.put(child.buffer);
        }
        self.end_outer(place, port);
    }

    fn park_child(&mut self, mut child: Bio, port: &mut Port) {
        let place = child.token as u32;
        let outer = self.outers.value(place);
        outer.open = outer.open.checked_sub(1).expect("each child comes out exactly once");
        if outer.is_lent {
            let bio = outer.bio.as_mut().expect("an outer bio is here while a child is inside");
            bio.buffer = std::mem::replace(&mut child.buffer, Buffer::empty());
        }
        if outer.parked.is_empty() {
            outer.parked_at = self.retries;
        }
        outer.parked.push_back(child);
        self.end_outer(place, port);
    }

    /// Once no child is inside, the outer bio is done, or parked if a child is.
    fn end_outer(&mut self, place: u32, port: &mut Port) {
        let outer = self.outers.value(place);
        if outer.open > 0 {
            return;
        }
        let has_missed = !outer.parked.is_empty() && outer.parked_at != self.retries;
        if has_missed && !mutants::is(Mutant::LateChildUnheard) {
            // A lent buffer's only child cannot have missed anything.
            assert!(!outer.is_lent, "an only child is parked with its outer bio");
            return self.missed.push(place);
        }
        let mut bio = outer.bio.take().expect("an outer bio is here while a child is inside");
        if outer.parked.is_empty() {
            let status = self.outers.remove(place).status;
            port.finish(bio, status);
        } else {
            bio.note = u64::from(place) + 1;
            port.parked.push_back(bio);
        }
    }
}

/// Makes the children of `bio`, which starts in line `first`; all lines get a flush.
fn cut(
    lines: &[Line],
    first: usize,
    bio: &mut Bio,
    outer: u32,
    is_lent: bool,
    port: &mut Port,
    children: &mut VecDeque<Bio>,
) {
    if bio.op == Op::Flush {
        let flush = |line| Bio::flush(child_token(line, outer));
        let count = if mutants::is(Mutant::FlushOfFirstLine) { 1 } else { lines.len() };
        children.extend((0..count).map(flush));
        return;
    }
    for (index, line) in lines.iter().enumerate().skip(first) {
        let (start, end) = (bio.offset.max(line.start), bio.end().min(line.end));
        if start >= end {
            break;
        }
        let part = (start - bio.offset) as usize..(end - bio.offset) as usize;
        let buffer = match bio.op {
            _ if is_lent => std::mem::replace(&mut bio.buffer, Buffer::empty()),
            Op::Read => port.pool.take(part.len()),
            Op::Write => {
                let mut copy = port.pool.take(part.len());
                copy.as_mut_slice().copy_from_slice(&bio.buffer.as_slice()[part]);
                copy
            }
            Op::Flush | Op::Discard | Op::WriteZeroes => Buffer::empty(),
        };
        let token = child_token(index, outer);
        let fua = bio.fua && (index == first || !mutants::is(Mutant::FuaOfFirstLine));
        let mut child = Bio::bare(bio.op, start - line.start, end - start, fua, token);
        child.buffer = buffer;
        child.is_metadata = bio.is_metadata;
        children.push_back(child);
    }
}
