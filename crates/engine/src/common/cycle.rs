//! The cycle of write-back: a batch is written to the slow device, the device is flushed, and only
//! then does the batch count as written back. After a failure the batch is written again; the pause
//! before each attempt grows.
//!
//! Each engine decides which data a batch has, and what changes when the batch ends.

use crate::base::retry::Retry;
use crate::error::Status;
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

#[cfg(test)]
mod tests {
    use super::*;

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
