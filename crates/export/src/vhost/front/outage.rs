//! The time between two servers, in which a queue waits for the next one.

use std::os::fd::OwnedFd;

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use udm::error::{Error, Result};
use udm::units::{Nanos, SECOND};

/// Interval of the checks for the server, and of attempts to connect.
pub(super) const ALIVE_NS: Nanos = SECOND / 100;
/// A longer silence means that this thread did not run, or that its program did not ask for
/// answers.
const ABSENCE_NS: Nanos = SECOND;

/// The time between two servers.
#[derive(Debug)]
pub(super) struct Outage {
    /// The end of the wait for the next server.
    pub(super) deadline: Nanos,
    /// The time of the last attempt to connect.
    pub(super) looked_at: Nanos,
    /// Wakes a program's own loop during the wait.
    pub(super) timer: Option<OwnedFd>,
    /// Why the last attempt failed.
    pub(super) error: Option<String>,
}

impl Outage {
    /// Returns the deadline, extended by the time in which this thread could not try: otherwise a
    /// program that was stopped, or whose machine was, would run out of patience without an
    /// attempt.
    pub(super) fn deadline(&mut self, now: Nanos) -> Nanos {
        let absence = now.saturating_sub(self.looked_at);
        if absence > ABSENCE_NS {
            self.deadline += absence;
        }
        self.deadline
    }

    /// Wakes a loop that waits for `bell` at the next attempt. If the timer fails, the loop wakes
    /// only when its program checks by itself.
    pub fn tick(&mut self, bell: &OwnedFd) {
        self.timer = ticks(bell).ok();
    }
}

/// Creates a file that is readable every 10 ms, and adds it to `bell`.
fn ticks(bell: &OwnedFd) -> Result<OwnedFd> {
    let failed =
        |errno: rustix::io::Errno| Error::from_io("making", "a timer for a loop", errno.into());
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(failed)?;
    let tick = Timespec { tv_sec: 0, tv_nsec: ALIVE_NS as i64 };
    let times = Itimerspec { it_interval: tick, it_value: tick };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &times).map_err(failed)?;
    let data = epoll::EventData::new_u64(0);
    epoll::add(bell, &timer, data, epoll::EventFlags::IN).map_err(failed)?;
    Ok(timer)
}
