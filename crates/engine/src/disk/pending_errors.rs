//! Pending errors of failed flushes: which rings must still get one.
//!
//! If the kernel could not write data, it reports that to one fsync of an open file. If a device
//! could not empty its cache, it reports that to one flush. But each ring that has written since
//! the last good flush believes that its next flush covers its writes. So each of these rings gets
//! the error once, regardless of the kernel's result for the ring's own flush. The pending error of
//! a ring that has closed goes to a ring that opens later, which may belong to the same client,
//! connected again.
//!
//! A failure may also lose a part of a write that is in flight. An error that is answered before
//! that write has ended is not about it: its sender gets the result of the write later, and relies
//! on the next flush. So the end of such a write counts as a failure of its own.

use std::collections::BTreeMap;

use crate::mutants::{self, Mutant};
use crate::sync::Weak;

/// When this many rings are known, closed rings are removed.
const RINGS_MIN: usize = 64;

/// The writes of one ring.
#[derive(Debug)]
struct Writes {
    /// Alive as long as the ring is open.
    life: Weak<()>,
    in_flight: u64,
    /// The moment at which its last write ended.
    ended: u64,
    is_owed: bool,
}

/// The writes of each ring, and which rings must still get the error of a failed flush.
#[derive(Debug, Default)]
pub(super) struct PendingErrors {
    rings: BTreeMap<u64, Writes>,
    /// Counts the ends of writes: the time, here.
    now: u64,
    /// Writes that had completed by this moment are durable.
    good: u64,
    /// The moment when the last write of a closed ring had ended.
    gone: u64,
    /// Closed rings had a pending error: a ring with this number or a higher one gets it.
    heirs_from: Option<u64>,
    /// Failures that may have lost something.
    losses: u64,
    /// All failures.
    failures: u64,
    /// The number of known rings at which closed ones are searched for.
    crowd: usize,
}

impl PendingErrors {
    /// A ring has begun a write, discard or the like. Pass the result to
    /// [`PendingErrors::end_write`].
    pub(super) fn begin_write(&mut self, ring: u64, life: impl FnOnce() -> Weak<()>) -> u64 {
        if !self.rings.contains_key(&ring) && self.rings.len() >= self.crowd.max(RINGS_MIN) {
            self.bury();
            self.crowd = 2 * self.rings.len();
        }
        let fresh = || Writes { life: life(), in_flight: 0, ended: 0, is_owed: false };
        self.rings.entry(ring).or_insert_with(fresh).in_flight += 1;
        self.failures
    }

    /// The write that had `begun` then has ended, successfully or not. Returns whether an earlier
    /// failure may have lost a part of it.
    pub(super) fn end_write(&mut self, ring: u64, begun: u64) -> bool {
        self.now += 1;
        let loses = begun != self.failures && !mutants::is(Mutant::ErrorForgivesInFlight);
        if let Some(writes) = self.rings.get_mut(&ring) {
            writes.in_flight -= 1;
            writes.ended = self.now;
            writes.is_owed |= loses;
        }
        self.losses += u64::from(loses);
        loses
    }

    /// The current moment: a flush that begins now covers the writes that have completed so far.
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    /// A flush that had begun at `moment` has succeeded.
    pub(super) fn succeeded(&mut self, moment: u64) {
        self.good = self.good.max(moment);
    }

    /// A flush, or a write-out, has failed. `next`: all rings have lower numbers.
    pub(super) fn failed(&mut self, next: u64) {
        if mutants::is(Mutant::FailureSaidToOne) {
            return;
        }
        self.failures += 1;
        self.bury();
        let mut has_lost = self.gone > self.good;
        if has_lost {
            self.heirs_from = Some(next);
        }
        for writes in self.rings.values_mut() {
            // Writes in flight count when they end.
            let is_in_flight = writes.in_flight > 0 && mutants::is(Mutant::ErrorForgivesInFlight);
            let loses = is_in_flight || writes.ended > self.good;
            writes.is_owed &= !mutants::is(Mutant::FailureForgetsEarlier);
            writes.is_owed |= loses;
            has_lost |= loses;
        }
        self.losses += u64::from(has_lost);
    }

    /// The number of failures that may have lost a write, of any ring.
    pub(super) fn losses(&self) -> u64 {
        self.losses
    }

    /// Whether the flush of `ring` must fail. The error then counts as delivered.
    pub(super) fn collect(&mut self, ring: u64) -> bool {
        let is_heir = self.heirs_from.is_some_and(|from| ring >= from);
        if is_heir {
            self.heirs_from = None;
        }
        let own = self.rings.get_mut(&ring).map(|writes| &mut writes.is_owed);
        own.is_some_and(std::mem::take) || is_heir
    }

    /// A flush of `ring` fails.
    pub(super) fn has_heard(&mut self, ring: u64) {
        if let Some(writes) = self.rings.get_mut(&ring) {
            writes.is_owed = false;
        }
    }

    /// Whether any ring has a pending error.
    pub(super) fn has_any(&self) -> bool {
        self.heirs_from.is_some() || self.rings.values().any(|writes| writes.is_owed)
    }

    /// Forgets closed rings, but not their writes.
    fn bury(&mut self) {
        let PendingErrors { rings, now, gone, heirs_from, .. } = self;
        rings.retain(|number, writes| {
            if writes.life.strong_count() > 0 {
                return true;
            }
            // A ring waits for its I/O in flight before it closes.
            let ended = if writes.in_flight > 0 { *now + 1 } else { writes.ended };
            *now = (*now).max(ended);
            *gone = (*gone).max(ended);
            if writes.is_owed {
                *heirs_from = (*heirs_from).max(Some(number + 1));
            }
            false
        });
    }

    /// The number of remembered rings.
    #[cfg(test)]
    pub(super) fn rings(&self) -> usize {
        self.rings.len()
    }
}
