//! The flushes of a disk: one call at a time, shared by all requests that arrive meanwhile.
//!
//! If two flushes ran at the same time, one could succeed although the other got the error for lost
//! data that both cover. And a flush that begins after several requests covers all of them. This is
//! a state machine without I/O, clock and threads; `file` drives it.
//!
//! 1. A ring that wants a flush while none is in flight is the leader: it makes the call. Other
//!    rings wait. When the call has ended, one of the waiting rings leads the next flush, which is
//!    for all of them.
//! 2. A failed flush fails for all rings that it was made for, and for those that already wait. All
//!    rings that have written since the last good flush get the error at their next flush: see
//!    `pending_errors`.

use super::pending_errors::PendingErrors;
use crate::error::Status;
use crate::mutants::{self, Mutant};

#[cfg(test)]
mod tests;

/// A flush that another ring makes, or that waits for the next one.
#[derive(Debug)]
struct Asker<W> {
    ring: u64,
    who: W,
    /// The ring has a pending error of an earlier flush.
    is_owed: bool,
}

/// The flush that is being made.
#[derive(Debug)]
struct UnderWay<W> {
    leader: u64,
    /// The leader has a pending error of an earlier flush.
    is_owed: bool,
    /// The moment when the flush began.
    moment: u64,
    others: Vec<Asker<W>>,
}

/// The results of a flush that has ended.
#[derive(Debug)]
pub(super) struct Ended<W> {
    /// The result for its leader.
    pub own: Result<(), Status>,
    /// The results for other rings.
    pub others: Vec<(W, Result<(), Status>)>,
    /// The ring that makes the next flush.
    pub leader: Option<W>,
}

/// The flushes of a disk. `W`: a flush that waits.
#[derive(Debug)]
pub(super) struct Flushes<W> {
    pub pending_errors: PendingErrors,
    under_way: Option<UnderWay<W>>,
    waiting: Vec<Asker<W>>,
}

impl<W> Default for Flushes<W> {
    fn default() -> Self {
        Flushes { pending_errors: PendingErrors::default(), under_way: None, waiting: Vec::new() }
    }
}

impl<W> Flushes<W> {
    /// Whether `ring`, which wants a flush, makes it now. Otherwise it has to [`Flushes::wait`].
    pub(super) fn try_lead(&mut self, ring: u64) -> bool {
        if self.under_way.is_some() && !mutants::is(Mutant::FlushesOverlap) {
            return false;
        }
        let (is_owed, moment) = (self.pending_errors.collect(ring), self.pending_errors.now());
        let others = self.under_way.take().map_or(Vec::new(), |under_way| under_way.others);
        self.under_way = Some(UnderWay { leader: ring, is_owed, moment, others });
        true
    }

    /// `ring` waits for the next flush.
    pub(super) fn wait(&mut self, ring: u64, who: W) {
        let is_owed = self.pending_errors.collect(ring);
        self.waiting.push(Asker { ring, who, is_owed });
    }

    /// The call has ended. `next`: all rings have lower numbers.
    pub(super) fn ended(&mut self, result: Result<(), Status>, next: u64) -> Ended<W> {
        let Some(UnderWay { leader, is_owed, moment, others }) = self.under_way.take() else {
            return Ended { own: result, others: Vec::new(), leader: None };
        };
        let status = |is_owed: bool| if is_owed { Err(Status::Io) } else { result };
        let mut told = others;
        match result {
            Ok(()) if mutants::is(Mutant::FlushCoversLater) => {
                self.pending_errors.succeeded(self.pending_errors.now());
            }
            Ok(()) => self.pending_errors.succeeded(moment),
            Err(_) => {
                self.pending_errors.failed(next);
                if !mutants::is(Mutant::WaitingUntold) {
                    told.append(&mut self.waiting);
                }
                let rings = told.iter().map(|asker| asker.ring).chain([leader]);
                rings.for_each(|ring| self.pending_errors.has_heard(ring));
            }
        }
        let others = told.into_iter().map(|asker| (asker.who, status(asker.is_owed))).collect();
        Ended { own: status(is_owed), others, leader: self.next_leader() }
    }

    /// The first waiting ring makes the next flush, for all waiting rings.
    fn next_leader(&mut self) -> Option<W> {
        let mut others = std::mem::take(&mut self.waiting);
        if others.is_empty() {
            return None;
        }
        let Asker { ring, who, is_owed } = others.remove(0);
        self.under_way =
            Some(UnderWay { leader: ring, is_owed, moment: self.pending_errors.now(), others });
        Some(who)
    }

    /// A background write-out has failed. The requested flushes fail, regardless of the kernel's
    /// results for them, and so do the next flushes of rings that wrote.
    pub(super) fn write_out_failed(&mut self, next: u64) {
        self.pending_errors.failed(next);
        if let Some(under_way) = &mut self.under_way {
            under_way.is_owed = true;
            self.pending_errors.has_heard(under_way.leader);
            self.waiting.iter_mut().chain(&mut under_way.others).for_each(|asker| {
                asker.is_owed = true;
                self.pending_errors.has_heard(asker.ring);
            });
        }
    }
}
