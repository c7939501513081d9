//! The next server, when one is gone.
//!
//! 1. A server that is gone answers nothing any more, so a queue first takes what was answered.
//!    What is left is done again, in the order in which it was asked: this side knows which
//!    requests those are, and has their data still. No notes of the server are needed for that, so
//!    it may be of any kind.
//! 2. A write that the server before had carried out, and had not answered, is carried out twice.
//!    That is the same as once: what is written there before the answer is in no order anyway.
//! 3. The rings begin again, empty, in the same memory. A socket that is closed means that the
//!    server is dead or has ended its rings: udm's does that first.
//! 4. One queue connects, and the others find that: each link has a number, and a queue knows the
//!    one that its ring was started with. A try that fails is repeated every 10 ms until the
//!    client's patience is over; then requests end with an error, as without patience.
//! 5. Whatever serves at the address next counts as the same device if it says the same of itself:
//!    it may be longer than before, and have more rings.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use udm::error::{Error, Result};
use udm::queue::now;
use udm::sync::lock;
use udm::units::{Nanos, SECOND};

use super::queue::{ALIVE_NS, Queue};
use super::wire::{ANSWER_LONGEST, Wire};
use super::{Facts, Front, facts, negotiate, share};

/// A connection to one server after the other.
#[derive(Debug)]
pub(super) struct Link {
    wire: Wire,
    number: u64,
}

/// This thread did not run, or its program did not ask for answers, if it is silent for longer.
const ABSENCE_NS: Nanos = SECOND;

/// The time between two servers.
#[derive(Debug)]
pub(super) struct Outage {
    /// When no other is waited for any more.
    deadline: Nanos,
    /// When it was looked for a server last.
    looked_at: Nanos,
    /// What wakes a program's own loop meanwhile.
    timer: Option<OwnedFd>,
}

impl Outage {
    /// The deadline, later by the time in which nobody could look: a program that is stopped, or
    /// whose machine is, would find its patience ended without a try.
    fn deadline(&mut self, now: Nanos) -> Nanos {
        let absence = now.saturating_sub(self.looked_at);
        if absence > ABSENCE_NS {
            self.deadline += absence;
        }
        self.deadline
    }

    /// Wakes a loop that waits for `bell`, for the next try. Without a timer it is not woken before
    /// it looks by itself.
    pub fn tick(&mut self, bell: &OwnedFd) {
        self.timer = ticks(bell).ok();
    }
}

impl Link {
    pub fn first(wire: Wire) -> Link {
        Link { wire, number: 0 }
    }

    /// The connection, if it is the one with this number.
    pub fn wire(&mut self, number: u64) -> Result<&mut Wire> {
        match self.number == number {
            true => Ok(&mut self.wire),
            false => Err(self.wire.wrong("another server is there now")),
        }
    }
}

impl Facts {
    /// Whether a client that relies on these can go on with what a server says now.
    fn are_kept_by(&self, now: &Facts) -> bool {
        let same = Facts { size_bytes: self.size_bytes, queues: self.queues, ..*now };
        same == *self && now.size_bytes >= self.size_bytes && now.queues >= self.queues
    }
}

impl Front {
    /// The number of the connection, and its socket.
    pub(super) fn link(&self) -> Result<(u64, UnixStream)> {
        let link = lock(&self.link);
        Ok((link.number, link.wire.watch()?))
    }

    /// The same of the connection after the one with number `known`, which is made unless another
    /// queue has made it.
    fn link_after(&self, known: u64, left: Nanos) -> Result<(u64, UnixStream)> {
        let mut link = lock(&self.link);
        if link.number == known {
            let wire = self.connect_again(left)?;
            *link = Link { wire, number: known + 1 };
        }
        Ok((link.number, link.wire.watch()?))
    }

    fn connect_again(&self, left: Nanos) -> Result<Wire> {
        let left = Duration::from_nanos(left).max(Duration::from_millis(1));
        let mut wire = Wire::connect(&self.path, left.min(ANSWER_LONGEST))?;
        let features = negotiate(&mut wire)?;
        let facts = facts(&mut wire, features)?;
        if features != self.features || !self.facts.are_kept_by(&facts) {
            return Err(wire.wrong("it is not what was there before"));
        }
        share(&mut wire, &self.file, self.memory.len_bytes())?;
        Ok(wire)
    }
}

impl Queue {
    /// The server is gone, and all that it answered is taken: goes on with the next one, if it is
    /// there. If none comes in time, everything ends with an error.
    pub(super) fn go_on(&mut self) {
        let patience = self.front.patience;
        if patience == 0 {
            return self.fail("it is gone");
        }
        let deadline = match &mut self.outage {
            Some(outage) => outage.deadline(now()),
            None => self.begin_outage(now() + patience),
        };
        // One that takes connections and says nothing leaves time for another.
        let longest = (patience / 3).max(SECOND);
        match self.try_next(deadline.saturating_sub(now()).min(longest)) {
            Ok(()) => self.end_outage(),
            Err(error) if now() >= deadline => {
                let seconds = patience / SECOND;
                self.fail(&format!("it is gone, and after {seconds} s: {error}"));
            }
            Err(_) => self.rest(),
        }
    }

    fn try_next(&mut self, left: Nanos) -> Result<()> {
        (self.link, self.socket) = self.front.link_after(self.link, left)?;
        self.ring.restart();
        let files = [self.kick.as_fd(), self.call.as_fd()];
        self.front.start(self.index, self.link, self.ring.addresses(), files)?;
        let with_head = |(head, sent): (usize, &Option<_>)| sent.map(|sent| (head as u16, sent));
        let mut again: Vec<_> = self.sent.iter().enumerate().filter_map(with_head).collect();
        again.sort_unstable_by_key(|(_, sent)| sent.nth);
        again.into_iter().for_each(|(head, sent)| self.send(head, sent));
        self.show();
        Ok(())
    }

    /// From now on the next server is waited for, until `deadline`.
    fn begin_outage(&mut self, deadline: Nanos) -> Nanos {
        let outage = self.outage.insert(Outage { deadline, looked_at: now(), timer: None });
        if let Some(bell) = &self.bell {
            // Its end would be heard all the time.
            let _ = epoll::delete(bell, &self.socket);
            outage.tick(bell);
        }
        deadline
    }

    fn end_outage(&mut self) {
        self.outage = None;
        if let Some(bell) = &self.bell {
            let data = epoll::EventData::new_u64(0);
            let _ = epoll::add(bell, &self.socket, data, epoll::EventFlags::empty());
        }
    }

    /// Until the next try.
    fn rest(&mut self) {
        let now = now();
        self.alive_at = now + ALIVE_NS;
        let Some(outage) = &mut self.outage else { return };
        outage.looked_at = now;
        if let Some(timer) = &outage.timer {
            let _ = rustix::io::read(timer, &mut [0; 8]);
        }
    }

    /// Waits for the next try, or until `deadline`.
    pub(super) fn sit_out(&self, deadline: Option<Nanos>) {
        let until = deadline.map_or(self.alive_at, |deadline| deadline.min(self.alive_at));
        std::thread::sleep(Duration::from_nanos(until.saturating_sub(now())));
    }
}

/// A file that is readable every 10 ms, seen through `bell`.
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
