//! The cycle of write-back: a batch is written to the slow device, the device is flushed, and only
//! then does the batch count as written back. After a failure the batch is written again; the pause
//! before each attempt grows. A pause also ends when the device serves a client ([`Served`]).
//!
//! Each engine decides which data a batch has, and what changes when the batch ends.

use crate::base::retry::Retry;
use crate::error::Status;
use crate::sync::atomic::{AtomicU8, Ordering};
use crate::target::Events;
use crate::units::Nanos;

/// The state of the cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No batch is in flight.
    #[default]
    Idle,
    /// Writes of a batch are in flight.
    Writing,
    /// The flush after them is in flight.
    Flushing,
    /// A batch failed. The engine calls [`Cycle::plan_retry`], which sets the pause.
    Failed,
    /// Until this moment.
    Pausing(Nanos),
}

/// The state of write-back that is the same for all engines.
#[derive(Debug, Default)]
pub(crate) struct Cycle {
    phase: Phase,
    retry: Retry,
    /// The end that a pause had before it was ended early.
    was_until: Nanos,
    /// Why the present batch, or the last one, failed.
    failure: Option<Status>,
}

impl Cycle {
    /// Whether no I/O is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        !matches!(self.phase, Phase::Writing | Phase::Flushing)
    }

    /// Whether the flush after a batch is in flight.
    pub(crate) fn is_flushing(&self) -> bool {
        self.phase == Phase::Flushing
    }

    /// When a pause ends.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        match self.phase {
            Phase::Pausing(until) => Some(until),
            _ => None,
        }
    }

    /// The next attempt will probably succeed: end a pause now.
    pub(crate) fn end_pause(&mut self) {
        if let Phase::Pausing(until) = &mut self.phase {
            *until = 0;
        }
    }

    /// Whether a success of a client may end the pause: not if the last attempt began by such a
    /// success and failed, because a device may serve reads and refuse writes.
    pub(crate) fn may_end_early(&self, now: Nanos) -> bool {
        self.deadline().is_some() && now >= self.was_until
    }

    /// A client was served: ends the pause.
    pub(crate) fn end_early(&mut self) {
        if let Some(until) = self.deadline() {
            self.was_until = until;
            self.end_pause();
        }
    }

    /// Attempts on the slow device and their failures.
    pub(crate) fn retry(&self) -> Retry {
        self.retry
    }

    /// Why the present batch will not succeed.
    pub(crate) fn failure(&self) -> Option<Status> {
        self.failure
    }

    /// Whether a batch may begin now. Clears a pause whose time has passed.
    pub(crate) fn is_free(&mut self, now: Nanos) -> bool {
        let is_paused = self.deadline().is_some_and(|until| now < until);
        let is_free = self.is_idle() && !is_paused;
        if is_free {
            self.phase = Phase::Idle;
        }
        is_free
    }

    /// Begins a new batch.
    pub(crate) fn gather(&mut self) {
        self.failure = None;
    }

    /// The batch is being written.
    pub(crate) fn write(&mut self) {
        self.phase = Phase::Writing;
    }

    /// All writes are back, and the device is being flushed.
    pub(crate) fn flush(&mut self) {
        self.phase = Phase::Flushing;
    }

    /// The flush is back.
    pub(crate) fn flushed(&mut self) {
        self.phase = Phase::Idle;
    }

    /// A write of the batch failed. The cycle still waits for the others.
    pub(crate) fn note_failure(&mut self, status: Status) {
        self.failure = Some(status);
    }

    /// Gives up the batch, of which no I/O is in flight.
    pub(crate) fn fail(&mut self) {
        self.phase = Phase::Failed;
    }

    /// The batch is on the device.
    pub(crate) fn succeed(&mut self) {
        self.retry.succeeded();
    }

    /// If a batch failed, sets the time of the next attempt and returns true.
    pub(crate) fn plan_retry(&mut self, now: Nanos) -> bool {
        let has_failed = self.phase == Phase::Failed;
        if has_failed {
            self.phase = Phase::Pausing(self.retry.pause_from(now));
        }
        has_failed
    }
}

/// Whether the slow device has served a request of a client during a pause of write-back. Requests
/// end on any thread, so this is not a part of [`Cycle`], which the background locks.
#[derive(Debug, Default)]
pub(crate) struct Served {
    state: AtomicU8,
}

/// No pause may end early.
const UNWANTED: u8 = 0;
/// The next success ends the pause.
const WANTED: u8 = 1;
/// There was a success.
const SEEN: u8 = 2;

impl Served {
    /// A pause began, or not: whether the next success is to wake the background.
    pub(crate) fn want(&self, is_wanted: bool) {
        self.state.store(if is_wanted { WANTED } else { UNWANTED }, Ordering::SeqCst);
    }

    /// The slow device has served a request of a client.
    #[inline]
    pub(crate) fn note(&self, events: &Events) {
        if self.state.load(Ordering::Relaxed) == WANTED
            && self.state.swap(SEEN, Ordering::SeqCst) == WANTED
        {
            events.work();
        }
    }

    /// The next tick of the background ends a pause, as after a success.
    pub(crate) fn force(&self) {
        self.state.store(SEEN, Ordering::SeqCst);
    }

    /// Whether there was a success since the last call of `want`; returns true once.
    pub(crate) fn take(&self) -> bool {
        self.state.load(Ordering::SeqCst) == SEEN
            && self.state.swap(UNWANTED, Ordering::SeqCst) == SEEN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(cycle: &mut Cycle, now: Nanos) {
        assert!(cycle.is_free(now));
        cycle.gather();
        cycle.write();
        cycle.fail();
        assert!(cycle.plan_retry(now));
    }

    #[test]
    fn a_served_client_ends_a_pause_once() {
        let (mut cycle, served, events) = (Cycle::default(), Served::default(), Events::default());
        served.note(&events);
        assert!(!served.take(), "no pause");
        fail(&mut cycle, 1);
        served.want(cycle.may_end_early(1));
        served.note(&events);
        assert!(served.take() && !served.take());
        let until = cycle.deadline().unwrap();
        cycle.end_early();
        // The attempt fails as well: the device serves reads only.
        fail(&mut cycle, 2);
        assert!(!cycle.may_end_early(2) && !cycle.may_end_early(until - 1));
        let until = cycle.deadline().unwrap();
        fail(&mut cycle, until);
        assert!(cycle.may_end_early(until));
    }

    #[test]
    fn what_failed_pauses_each_time_for_longer() {
        let mut cycle = Cycle::default();
        let mut now = 1;
        let mut pauses = Vec::new();
        for _ in 0..3 {
            assert!(cycle.is_free(now));
            cycle.gather();
            cycle.write();
            assert!(!cycle.is_idle() && !cycle.is_free(now));
            cycle.note_failure(Status::Io);
            cycle.fail();
            assert!(cycle.plan_retry(now) && !cycle.plan_retry(now), "once for each failure");
            let until = cycle.deadline().unwrap();
            assert!(cycle.is_idle() && !cycle.is_free(until - 1));
            pauses.push(until - now);
            now = until;
        }
        assert!(pauses.is_sorted_by(|one, next| one < next), "{pauses:?}");
        assert!(cycle.is_free(now));
        cycle.gather();
        cycle.write();
        cycle.flush();
        assert!(!cycle.is_idle());
        cycle.flushed();
        cycle.succeed();
        assert!(cycle.failure().is_none() && !cycle.retry().is_failing());
    }
}
