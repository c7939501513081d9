//! The flushes of a disk: one at a time, shared by all that are asked for meanwhile.
//!
//! If two flushes ran at the same time, one could succeed although the other has heard of lost data
//! that both cover. And a flush that begins after several were asked for covers them all. A state
//! machine: no I/O, no clock, no thread; `file` drives it.
//!
//! 1. A ring that wants a flush while none is under way leads: it makes the call. Others wait. When
//!    the call has ended, one of those leads the next flush, which is for all of them.
//! 2. A flush that fails fails for all that it was made for, for those that wait already, and, at
//!    their next flush, for all rings that have written since the last good one: see `debts`.

use super::debts::Debts;
use crate::error::Status;
use crate::mutants::{self, Mutant};

#[cfg(test)]
mod tests;

/// A flush that another ring makes, or that waits for the next one.
#[derive(Debug)]
struct Asker<W> {
    ring: u64,
    who: W,
    /// It is owed an earlier failure.
    is_owed: bool,
}

/// The flush that is being made.
#[derive(Debug)]
struct UnderWay<W> {
    leader: u64,
    /// The leader is owed an earlier failure.
    is_owed: bool,
    /// When it began.
    moment: u64,
    others: Vec<Asker<W>>,
}

/// How a flush has ended.
#[derive(Debug)]
pub(super) struct Ended<W> {
    /// For its leader.
    pub own: Result<(), Status>,
    /// For others.
    pub others: Vec<(W, Result<(), Status>)>,
    /// Who makes the next one.
    pub leader: Option<W>,
}

/// The flushes of a disk. `W`: a flush that waits.
#[derive(Debug)]
pub(super) struct Flushes<W> {
    pub debts: Debts,
    under_way: Option<UnderWay<W>>,
    waiting: Vec<Asker<W>>,
}

impl<W> Default for Flushes<W> {
    fn default() -> Self {
        Flushes { debts: Debts::default(), under_way: None, waiting: Vec::new() }
    }
}

impl<W> Flushes<W> {
    /// Whether `ring`, which wants a flush, makes it now. Otherwise it has to [`Flushes::wait`].
    pub(super) fn try_lead(&mut self, ring: u64) -> bool {
        if self.under_way.is_some() && !mutants::is(Mutant::FlushesOverlap) {
            return false;
        }
        let (is_owed, moment) = (self.debts.collect(ring), self.debts.now());
        let others = self.under_way.take().map_or(Vec::new(), |under_way| under_way.others);
        self.under_way = Some(UnderWay { leader: ring, is_owed, moment, others });
        true
    }

    /// `ring` waits for the next flush.
    pub(super) fn wait(&mut self, ring: u64, who: W) {
        let is_owed = self.debts.collect(ring);
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
                self.debts.succeeded(self.debts.now());
            }
            Ok(()) => self.debts.succeeded(moment),
            Err(_) => {
                self.debts.failed(next);
                if !mutants::is(Mutant::WaitingUntold) {
                    told.append(&mut self.waiting);
                }
                let rings = told.iter().map(|asker| asker.ring).chain([leader]);
                rings.for_each(|ring| self.debts.has_heard(ring));
            }
        }
        let others = told.into_iter().map(|asker| (asker.who, status(asker.is_owed))).collect();
        Ended { own: status(is_owed), others, leader: self.next_leader() }
    }

    /// The first of those that wait makes the next flush, for all of them.
    fn next_leader(&mut self) -> Option<W> {
        let mut others = std::mem::take(&mut self.waiting);
        if others.is_empty() {
            return None;
        }
        let Asker { ring, who, is_owed } = others.remove(0);
        self.under_way = Some(UnderWay { leader: ring, is_owed, moment: self.debts.now(), others });
        Some(who)
    }

    /// A write-out that nobody asked for has failed: flushes that were asked for fail, whatever the
    /// kernel says to them, and so do the next ones of rings that wrote.
    pub(super) fn write_out_failed(&mut self, next: u64) {
        self.debts.failed(next);
        if let Some(under_way) = &mut self.under_way {
            under_way.is_owed = true;
            self.debts.has_heard(under_way.leader);
            self.waiting.iter_mut().chain(&mut under_way.others).for_each(|asker| {
                asker.is_owed = true;
                self.debts.has_heard(asker.ring);
            });
        }
    }
}
