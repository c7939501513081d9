//! How other threads reach a ring: they wake the thread that waits in it, and bring back the
//! results of errands.
//!
//! An errand may also bring back work that goes on in the ring.
//!
//! All go through one eventfd, which the ring watches while its thread sleeps in
//! [`Ring::sleep`], or while an [`Errand`] is out.
//!
//! 1. A wake costs a system call only if the thread sleeps, and none is lost: see [`Bell`].
//! 2. The result of an errand comes out of the ring as that of a job does. The thread that puts a
//!    letter into an empty box signals the ring; the ring empties the box after it has seen the
//!    signal.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::EventfdFlags;

use super::bell::Bell;
use super::kernel::{self, Call, Memory};
use super::{Owner, Ring, Work};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::sync::{Arc, Mutex, lock};

/// Where other threads reach a ring.
#[derive(Debug)]
pub struct Mailbox<D> {
    eventfd: Arc<OwnedFd>,
    bell: Bell,
    letters: Mutex<Vec<Letter<D>>>,
}

/// What an errand brings back.
#[derive(Debug)]
enum Letter<D> {
    /// Nothing.
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
        let letters = Mutex::new(Vec::new());
        Ok(Mailbox { eventfd: Arc::new(eventfd), bell: Bell::default(), letters })
    }

    /// Makes the ring's thread look again if it sleeps ([`Ring::sleep`]), or is about to.
    pub fn wake(&self) {
        if self.bell.ring() {
            self.signal();
        }
    }

    fn post(&self, letter: Letter<D>) {
        let mut letters = lock(&self.letters);
        letters.push(letter);
        let is_first = letters.len() == 1;
        drop(letters);
        if is_first {
            self.signal();
        }
    }

    fn signal(&self) {
        // This fails only if the counter is full, and then the thread is woken as well.
        let _ = rustix::io::write(&self.eventfd, &1_u64.to_le_bytes());
    }
}

/// Work for another thread that a ring waits for, for example that of a thread with one connection
/// for many rings. Dropping it hands back nothing.
#[derive(Debug)]
pub struct Errand<D> {
    mailbox: Arc<Mailbox<D>>,
    brings: Letter<D>,
}

impl<D> Errand<D> {
    /// Brings `done` back to the ring, where it comes out complete.
    pub fn end(mut self, done: D) {
        self.brings = Letter::Done(done);
    }

    /// Brings a job back to the ring, which makes its next call.
    pub(crate) fn go_on(mut self, work: Work<D>) {
        self.brings = Letter::Work(work);
    }
}

impl<D> Drop for Errand<D> {
    fn drop(&mut self) {
        self.mailbox.post(std::mem::replace(&mut self.brings, Letter::Empty));
    }
}

impl<D> Ring<D> {
    /// Where other threads reach this ring. The first call makes it.
    pub fn mailbox(&mut self) -> Result<Arc<Mailbox<D>>> {
        if self.mailbox.is_none() {
            self.mailbox = Some(Arc::new(Mailbox::new()?));
        }
        Ok(self.opened_mailbox().clone())
    }

    /// Work for another thread; until it is handed back it is in flight here.
    pub fn errand(&mut self) -> Result<Errand<D>> {
        let mailbox = self.mailbox()?;
        self.watch_mailbox();
        self.errands += 1;
        Ok(Errand { mailbox, brings: Letter::Empty })
    }

    /// Clears all wakes so far. Check what they were for after this.
    pub fn answer_wakes(&self) {
        self.opened_mailbox().bell.answer();
    }

    /// As [`Ring::submit_and_wait`], but a wake ends it too; it does not begin if one came since
    /// the last [`Ring::answer_wakes`].
    pub fn sleep(&mut self, timeout: Option<Duration>) {
        self.watch_mailbox();
        let mailbox = self.opened_mailbox().clone();
        if mailbox.bell.lie_down() {
            self.submit_and_wait(timeout);
        }
        mailbox.bell.get_up();
    }

    fn opened_mailbox(&self) -> &Arc<Mailbox<D>> {
        self.mailbox.as_ref().expect("a ring that is woken or sends errands has a mailbox")
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

    /// Takes the results of errands. The signal is cleared first: a thread that finds the box empty
    /// after this signals again.
    pub(super) fn empty_mailbox(&mut self) {
        self.is_watched = false;
        let mailbox = self.opened_mailbox().clone();
        let _ = rustix::io::read(&mailbox.eventfd, &mut [0_u8; 8]);
        let letters = std::mem::take(&mut *lock(&mailbox.letters));
        self.errands -= letters.len();
        for letter in letters {
            match letter {
                Letter::Empty => {}
                Letter::Done(done) => self.completed.push_back(done),
                Letter::Work(work) => self.start(work),
            }
        }
        if self.errands > 0 {
            self.watch_mailbox();
        }
    }
}
