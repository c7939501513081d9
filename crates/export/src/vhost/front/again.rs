//! Reconnecting: continues with the next server after one has died.
//!
//! 1. A dead server answers no more, so a queue first takes the answers that are there. The
//!    remaining requests are sent again in their original order: the client still has these
//!    requests and their data. This needs no in-flight log of the server, so the next server may be
//!    of any kind.
//! 2. A write that the old server carried out without answering is carried out twice. The effect is
//!    the same as once: until a write is answered, its order with other writes to the same range is
//!    undefined.
//! 3. The rings start again, empty, in the same memory. A closed socket means that the old server
//!    is dead or does not use its rings any more: udm's server stops its rings before it closes the
//!    socket.
//! 4. One queue connects, and the others find the new connection: each link has a number, and a
//!    queue knows the number of the link that its ring was started with. A failed attempt is
//!    repeated every 10 ms until the client's patience ends. Then requests end with an error, as
//!    without patience.
//! 5. The next server at the address is accepted as the same device if it reports the same
//!    properties. Its device may be longer, and may have more rings.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::epoll;
use udm::error::{Error, Result};
use udm::queue::now;
use udm::sync::lock;
use udm::units::{Nanos, SECOND};

use super::outage::{ALIVE_NS, Outage};
use super::queue::Queue;
use super::wire::{ANSWER_LONGEST, Wire};
use super::{Facts, Front, facts, negotiate, share};

/// A connection to one server after the other.
#[derive(Debug)]
pub(super) struct Link {
    wire: Wire,
    number: u64,
}

/// If the deadline leaves less time than this for the last attempt, the attempt may fail for that
/// reason alone, and the error of the earlier attempt says more.
const ATTEMPT_SHORT_NS: Nanos = SECOND / 2;

/// Whether the server took too long.
fn is_timeout(error: &Error) -> bool {
    let source = std::error::Error::source(error);
    let kind = source.and_then(|source| source.downcast_ref()).map(std::io::Error::kind);
    matches!(kind, Some(ErrorKind::WouldBlock | ErrorKind::TimedOut))
}

impl Link {
    pub fn first(wire: Wire) -> Link {
        Link { wire, number: 0 }
    }

    /// Returns the connection, if it is the one with this number.
    pub fn wire(&mut self, number: u64) -> Result<&mut Wire> {
        match self.number == number {
            true => Ok(&mut self.wire),
            false => Err(self.wire.wrong("another server is listening there now")),
        }
    }
}

impl Facts {
    /// Whether a client that relies on these facts can continue with a server that reports `now`.
    fn are_kept_by(&self, now: &Facts) -> bool {
        let same = Facts { size_bytes: self.size_bytes, queues: self.queues, ..*now };
        same == *self && now.size_bytes >= self.size_bytes && now.queues >= self.queues
    }
}

impl Front {
    /// Returns the number of the connection, and its socket.
    pub(super) fn link(&self) -> Result<(u64, UnixStream)> {
        let link = lock(&self.link);
        Ok((link.number, link.wire.watch()?))
    }

    /// Like [`Front::link`], for the connection after the one with number `known`. Connects, unless
    /// another queue has done so.
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
            return Err(wire.wrong("it is not the device that was there before"));
        }
        share(&mut wire, &self.file, self.memory.len_bytes())?;
        Ok(wire)
    }
}

impl Queue {
    /// Continues with the next server, if there is one. The old server is gone, and all its answers
    /// are taken. If no server appears in time, all requests end with an error.
    pub(super) fn go_on(&mut self) {
        let patience = self.front.patience;
        if patience == 0 {
            return self.fail("it disconnected");
        }
        let deadline = match &mut self.outage {
            Some(outage) => outage.deadline(now()),
            None => self.begin_outage(now() + patience),
        };
        // A server that accepts connections without answering must leave time for another attempt.
        let longest = (patience / 3).max(SECOND);
        let left = deadline.saturating_sub(now()).min(longest);
        let Err(error) = self.try_next(left) else { return self.end_outage() };
        let earlier = self.outage.as_mut().and_then(|outage| outage.error.take());
        let is_cut_short = left < ATTEMPT_SHORT_NS || left < longest && is_timeout(&error);
        let error = earlier.filter(|_| is_cut_short).unwrap_or_else(|| error.to_string());
        if now() >= deadline {
            let seconds = patience / SECOND;
            return self.fail(&format!("it disconnected, and after {seconds} s: {error}"));
        }
        if let Some(outage) = &mut self.outage {
            outage.error = Some(error);
        }
        self.rest();
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

    /// Starts to wait for the next server, until `deadline`.
    fn begin_outage(&mut self, deadline: Nanos) -> Nanos {
        let outage =
            self.outage.insert(Outage { deadline, looked_at: now(), timer: None, error: None });
        if let Some(bell) = &self.bell {
            // The closed socket would wake the loop all the time.
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

    /// Sets the time of the next attempt.
    fn rest(&mut self) {
        let now = now();
        self.alive_at = now + ALIVE_NS;
        let Some(outage) = &mut self.outage else { return };
        outage.looked_at = now;
        if let Some(timer) = &outage.timer {
            let _ = rustix::io::read(timer, &mut [0; 8]);
        }
    }

    /// Sleeps until the next attempt, or until `deadline`.
    pub(super) fn sit_out(&self, deadline: Option<Nanos>) {
        let until = deadline.map_or(self.alive_at, |deadline| deadline.min(self.alive_at));
        std::thread::sleep(Duration::from_nanos(until.saturating_sub(now())));
    }
}
