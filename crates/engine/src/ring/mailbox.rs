//! How other threads reach a ring: they wake the thread that waits in it, and bring back what it
//! sent them for.
//!
//! Both go through one eventfd, which the ring watches while its thread sleeps in
//! [`Ring::sleep`], or while an [`Errand`] is out.
//!
//! 1. A wake costs a system call only if the thread sleeps, and none is lost: see [`Bell`].
//! 2. What an errand brings comes out of the ring as what a job hands back does. Whoever finds
//!    the box empty tells the ring of it; the ring empties the box after it has heard that.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::EventfdFlags;

use super::bell::Bell;
use super::kernel::{Call, Memory, Work};
use super::{Owner, Ring};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::sync::{Arc, Mutex, lock};

/// Where other threads reach a ring.
#[derive(Debug)]
pub struct Mailbox<D> {
    eventfd: Arc<OwnedFd>,
    bell: Bell,
    /// What ended errands have brought; `None` for nothing.
    letters: Mutex<Vec<Option<D>>>,
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

    fn post(&self, letter: Option<D>) {
        let mut letters = lock(&self.letters);
        letters.push(letter);
        let is_first = letters.len() == 1;
        drop(letters);
        if is_first {
            self.signal();
        }
    }

    fn signal(&self) {
        // The only way to fail is a counter that is full, and then it wakes as well.
        let _ = rustix::io::write(&self.eventfd, &1_u64.to_le_bytes());
    }
}

/// Something that a ring waits for and that another thread does, as a thread that has a connection
/// for many rings. Dropping it brings nothing back.
#[derive(Debug)]
pub struct Errand<D> {
    mailbox: Arc<Mailbox<D>>,
    brings: Option<D>,
}

impl<D> Errand<D> {
    /// Brings `done` back to the ring, where it comes out complete.
    pub fn end(mut self, done: D) {
        self.brings = Some(done);
    }
}

impl<D> Drop for Errand<D> {
    fn drop(&mut self) {
        self.mailbox.post(self.brings.take());
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

    /// Something for another thread to do and to bring back; until then it is in flight here.
    pub fn errand(&mut self) -> Result<Errand<D>> {
        let mailbox = self.mailbox()?;
        self.watch_mailbox();
        self.errands += 1;
        Ok(Errand { mailbox, brings: None })
    }

    /// Hears all wakes so far. What they were for is to be looked at after this.
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
        self.mailbox.as_ref().expect("who can be woken or sends errands has a mailbox")
    }

    fn watch_mailbox(&mut self) {
        if self.is_watched {
            return;
        }
        let file = self.opened_mailbox().eventfd.clone();
        let (call, memory) = (Call::Poll, Memory::One(Buffer::empty()));
        let owner = Owner::Mailbox;
        self.kernel().start(Work { file, call, memory, owner, is_awaited: false });
        self.is_watched = true;
    }

    /// Takes what errands have brought. The signal goes first: who finds the box empty after this
    /// gives another one.
    pub(super) fn empty_mailbox(&mut self) {
        self.is_watched = false;
        let mailbox = self.opened_mailbox().clone();
        let _ = rustix::io::read(&mailbox.eventfd, &mut [0_u8; 8]);
        let letters = std::mem::take(&mut *lock(&mailbox.letters));
        self.errands -= letters.len();
        self.completed.extend(letters.into_iter().flatten());
        if self.errands > 0 {
            self.watch_mailbox();
        }
    }
}
