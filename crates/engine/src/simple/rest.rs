//! The flush of a suspend: afterwards all written data is durable.
//!
//! A target cannot wait, so the background's tick emits the flush. If the suspend is cancelled, its
//! flush stays in flight and does not count, because later writes may overtake it.

use crate::bio::Op;
use crate::error::Status;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex, lock};
use crate::target::Events;

/// The first token of a suspend's flush. Bios have lower ones.
const FIRST_TOKEN: u64 = 1 << 32;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Rest {
    /// Whether data was written that no suspend has flushed.
    is_unflushed: AtomicBool,
    state: Mutex<State>,
    events: Arc<Events>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of the last flush.
    number: u64,
    step: Step,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Step {
    #[default]
    Idle,
    Wanted,
    UnderWay,
}

impl Rest {
    /// A request goes to the disk.
    #[inline]
    pub(super) fn note(&self, op: Op) {
        if !matches!(op, Op::Read | Op::Flush) && !self.is_unflushed.load(Ordering::SeqCst) {
            self.is_unflushed.store(true, Ordering::SeqCst);
        }
    }

    /// A suspend begins: no bio is in flight.
    pub(super) fn begin(&self) {
        if self.is_unflushed.load(Ordering::SeqCst) {
            lock(&self.state).step = Step::Wanted;
            self.events.work();
        }
    }

    /// The token of the flush to begin now.
    pub(super) fn start(&self) -> Option<u64> {
        let mut state = lock(&self.state);
        if state.step != Step::Wanted {
            return None;
        }
        state.step = Step::UnderWay;
        state.number += 1;
        Some(FIRST_TOKEN + state.number)
    }

    /// Handles a completed I/O if it is the flush of a suspend. Returns whether it is.
    pub(super) fn end(&self, token: u64, result: Result<(), Status>) -> bool {
        if token < FIRST_TOKEN {
            return false;
        }
        let mut state = lock(&self.state);
        if state.step == Step::UnderWay && token == FIRST_TOKEN + state.number {
            state.step = Step::Idle;
            self.is_unflushed.store(result.is_err(), Ordering::SeqCst);
        }
        true
    }

    /// Whether the suspend is complete.
    pub(super) fn is_idle(&self) -> bool {
        lock(&self.state).step == Step::Idle
    }

    /// Whether the flush succeeded.
    pub(super) fn is_durable(&self) -> bool {
        !self.is_unflushed.load(Ordering::SeqCst)
    }

    /// Bios are served again.
    pub(super) fn resume(&self) {
        lock(&self.state).step = Step::Idle;
    }

    pub(super) fn events(&self) -> &Arc<Events> {
        &self.events
    }
}
