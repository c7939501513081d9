//! The wake-up flag of a target's background: whether a change must wake the background thread.
//!
//! While there is work, the background ticks by itself and need not be woken. When it finds no
//! work, it falls asleep in two steps: the first check disarms the flag, and the second check sees
//! everything that was done before the flag was armed again. So a write pays for a wake-up only if
//! the background may be asleep.

use crate::mutants::{self, Mutant};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::target::Events;
use crate::units::Nanos;

/// Armed while the background is sure to look again.
#[derive(Debug)]
pub(crate) struct Wakeup {
    is_armed: AtomicBool,
    events: Arc<Events>,
}

impl Wakeup {
    pub(crate) fn new(events: &Arc<Events>) -> Wakeup {
        Wakeup { is_armed: AtomicBool::new(true), events: events.clone() }
    }

    /// Something changed. Wakes the background if it may be asleep, or if `is_urgent`.
    #[inline]
    pub(crate) fn arm(&self, is_urgent: bool) {
        let was_asleep =
            !self.is_armed.load(Ordering::Relaxed) && !self.is_armed.swap(true, Ordering::SeqCst);
        if was_asleep || is_urgent {
            self.events.work();
        }
    }

    /// The background has work, and looks again by itself.
    pub(crate) fn keep(&self) {
        self.is_armed.store(true, Ordering::SeqCst);
    }

    /// The background is idle. Returns the time of the next check: `pause` after `now` if this
    /// was the first such check, else `None`, which means to sleep until a wake-up.
    pub(crate) fn next_look(&self, now: Nanos, pause: Nanos) -> Option<Nanos> {
        if mutants::is(Mutant::AsleepAtOnce) {
            self.is_armed.store(false, Ordering::SeqCst);
            return None;
        }
        self.is_armed.swap(false, Ordering::SeqCst).then_some(now + pause)
    }
}
