//! Bios of a table with several lines.
//!
//! Each bio becomes an *outer* bio with children, one for each line it touches. A bio within one
//! line lends its buffer to its only child; other children get copies. Children that a target parks
//! wait here. When the other children of an outer bio are done, the outer bio is parked itself, and
//! its next submit submits the waiting children again, with the progress they had made. If parked
//! bios were retried before that, the children have missed the retry, and free space may never be
//! signalled again, so they are submitted again immediately.

use std::collections::VecDeque;

use super::table::Line;
use crate::base::pending::Pending;
use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::target::Port;

/// Bios of a table with several lines.
#[derive(Debug, Default)]
pub(super) struct Split {
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
    /// The port's parked bios are about to be submitted again, because free space was signalled.
    pub fn begin_retry(&mut self) {
        self.retries += 1;
    }

    /// A child for which a parked bio waits, and the child's line.
    pub fn waiting_child(&mut self, bio: &Bio) -> Option<(usize, &Bio)> {
        let child = self.outers.get(outer_of(bio)?)?.parked.front()?;
        Some((line_of(child), child))
    }

    /// Submits a bio, which begins in line `first`.
    pub fn submit(&mut self, lines: &[Line], first: usize, mut bio: Bio, port: &mut Port) {
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
    pub fn visit(
        &mut self,
        lines: &[Line],
        port: &mut Port,
        calls: impl FnOnce(&mut Self, &mut Port),
    ) {
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
    pub fn call<T>(&self, index: usize, port: &mut Port, call: impl FnOnce(&mut Port) -> T) -> T {
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
