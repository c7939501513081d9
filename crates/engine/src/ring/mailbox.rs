//! The mailbox of a ring: other threads use it to wake the thread that waits in the ring, and to
//! return the results of cross-thread jobs ([`RemoteJob`]).
//!
//! The result may also be work that continues in the ring.
//!
//! All go through one eventfd, which the ring watches while its thread sleeps in [`Ring::sleep`],
//! or while a [`RemoteJob`] is out.
//!
//! 1. A wake costs a system call only if the thread sleeps, and none is lost: see [`Notifier`].
//! 2. The ring returns the result of a remote job in the same way as the result of a job. The
//!    thread that puts a result into an empty mailbox signals the ring; the ring empties the
//!    mailbox after it has seen the signal.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::EventfdFlags;

use super::kernel::{self, Call, Memory};
use super::notifier::Notifier;
use super::{Owner, Ring, Work};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::sync::{Arc, Mutex, lock};

/// Where other threads reach a ring.
#[derive(Debug)]
pub struct Mailbox<D> {
    eventfd: Arc<OwnedFd>,
    notifier: Notifier,
    outcomes: Mutex<Vec<Outcome<D>>>,
}

/// The result of a remote job.
#[derive(Debug)]
enum Outcome<D> {
    /// No result.
    Empty,
    /// A result.
    Done(D),
    /// A job that goes on in the ring.
    Work(Work<D>),
}

impl<D> Mailbox<D> {
    fn new() -> Result<Mailbox<D>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let eventfd = rustix::event::eventfd(0, flags)
            .map_err(|source| Error::from_io("creating", "an eventfd", source.into()))?;
        let outcomes = Mutex::new(Vec::new());
        Ok(Mailbox { eventfd: Arc::new(eventfd), notifier: Notifier::default(), outcomes })
    }

    /// Makes the ring's thread check again if it sleeps ([`Ring::sleep`]), or is about to.
    pub fn wake(&self) {
        if self.notifier.ring() {
            self.signal();
        }
    }

    fn post(&self, outcome: Outcome<D>) {
        let mut outcomes = lock(&self.outcomes);
        outcomes.push(outcome);
        let is_first = outcomes.len() == 1;
        drop(outcomes);
        if is_first {
            self.signal();
        }
    }

    fn signal(&self) {
        // This fails only if the counter is full, and then the thread is woken as well.
        let _ = rustix::io::write(&self.eventfd, &1_u64.to_le_bytes());
    }
}

/// A cross-thread job: work of another thread that a ring waits for, for example a thread with one
/// connection for many rings. If it is dropped, the ring gets no result.
#[derive(Debug)]
pub struct RemoteJob<D> {
    mailbox: Arc<Mailbox<D>>,
    outcome: Outcome<D>,
}

impl<D> RemoteJob<D> {
    /// Returns `done` to the ring, which treats it as complete.
    pub fn end(mut self, done: D) {
        self.outcome = Outcome::Done(done);
    }

    /// Brings a job back to the ring, which makes its next call.
    pub(crate) fn resume(mut self, work: Work<D>) {
        self.outcome = Outcome::Work(work);
    }
}

impl<D> Drop for RemoteJob<D> {
    fn drop(&mut self) {
        self.mailbox.post(std::mem::replace(&mut self.outcome, Outcome::Empty));
    }
}

impl<D> Ring<D> {
    /// The mailbox of this ring, for other threads. The first call makes it.
    pub fn mailbox(&mut self) -> Result<Arc<Mailbox<D>>> {
        if self.mailbox.is_none() {
            self.mailbox = Some(Arc::new(Mailbox::new()?));
        }
        Ok(self.opened_mailbox().clone())
    }

    /// A job for another thread; until its result is returned, it counts as in flight here.
    pub fn remote_job(&mut self) -> Result<RemoteJob<D>> {
        let mailbox = self.mailbox()?;
        self.watch_mailbox();
        self.remote_jobs += 1;
        Ok(RemoteJob { mailbox, outcome: Outcome::Empty })
    }

    /// Clears all wakes so far. The caller checks their reasons after this.
    pub fn answer_wakes(&self) {
        self.opened_mailbox().notifier.answer();
    }

    /// As [`Ring::submit_and_wait`], but a wake also ends it. It does not begin if a wake came
    /// since the last [`Ring::answer_wakes`].
    pub fn sleep(&mut self, timeout: Option<Duration>) {
        self.watch_mailbox();
        let mailbox = self.opened_mailbox().clone();
        if mailbox.notifier.lie_down() {
            self.submit_and_wait(timeout);
        }
        mailbox.notifier.get_up();
    }

    fn opened_mailbox(&self) -> &Arc<Mailbox<D>> {
        self.mailbox.as_ref().expect("a ring that is woken or sends remote_jobs has a mailbox")
    }

    fn watch_mailbox(&mut self) {
        if self.is_watched {
            return;
        }
        let file = self.opened_mailbox().eventfd.clone();
        let (call, memory) = (Call::Poll, Memory::One(Buffer::empty()));
        let owner = Owner::Mailbox;
        let work = kernel::Work { file, call, memory, owner, is_awaited: false };
        self.kernel().start(work);
        self.is_watched = true;
    }

    /// Takes the results of remote jobs. The signal is cleared first: a thread that finds the
    /// mailbox empty after this signals again.
    pub(super) fn empty_mailbox(&mut self) {
        self.is_watched = false;
        let mailbox = self.opened_mailbox().clone();
        let _ = rustix::io::read(&mailbox.eventfd, &mut [0_u8; 8]);
        let outcomes = std::mem::take(&mut *lock(&mailbox.outcomes));
        self.remote_jobs -= outcomes.len();
        for outcome in outcomes {
            match outcome {
                Outcome::Empty => {}
                Outcome::Done(done) => self.completed.push_back(done),
                Outcome::Work(work) => self.start(work),
            }
        }
        if self.remote_jobs > 0 {
            self.watch_mailbox();
        }
    }
}
