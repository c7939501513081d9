//! Growing pauses between attempts on a device that fails, and the time since it fails.

use crate::units::{Nanos, SECOND};

/// The first pause.
const PAUSE_MIN: Nanos = SECOND / 10;
/// The longest pause. A working device is noticed within this time. An attempt on a failing device
/// stops at its first errors, so it costs little.
pub const PAUSE_MAX: Nanos = SECOND;
/// Requests wait no longer for a device that has failed for this long.
pub const GIVE_UP_AFTER: Nanos = 60 * SECOND;

/// The state of attempts. The caller passes the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retry {
    pause: Nanos,
    failing_since: Option<Nanos>,
}

impl Retry {
    /// An attempt has failed. Returns until when to pause, longer each time.
    pub fn pause_from(&mut self, now: Nanos) -> Nanos {
        self.failing_since.get_or_insert(now);
        self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        now + self.pause
    }

    /// An attempt has succeeded.
    pub fn succeeded(&mut self) {
        *self = Retry::default();
    }

    /// The pause after the last failure; 0 when all is well.
    pub fn pause(&self) -> Nanos {
        self.pause
    }

    /// Whether the last attempt failed.
    pub fn is_failing(&self) -> bool {
        self.failing_since.is_some()
    }

    /// Whether it has been failing for [`GIVE_UP_AFTER`].
    pub fn is_hopeless(&self, now: Nanos) -> bool {
        self.failing_since.is_some_and(|since| now >= since + GIVE_UP_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_one_attempt_succeeds() {
        let mut retry = Retry::default();
        assert!(!retry.is_failing() && retry.pause() == 0);
        let pauses = [(); 9].map(|()| retry.pause_from(5) - 5);
        assert_eq!(pauses[..3], [SECOND / 10, SECOND / 5, SECOND * 2 / 5]);
        assert_eq!(pauses[8], PAUSE_MAX);
        assert!(!retry.is_hopeless(4 + GIVE_UP_AFTER) && retry.is_hopeless(5 + GIVE_UP_AFTER));
        retry.succeeded();
        assert_eq!(retry, Retry::default());
    }
}
