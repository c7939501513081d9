//! A file descriptor that can be read while there may be something for a caller to take, for
//! programs with a loop of their own: an eventfd, written by the kernel when it has ended a call,
//! and by all others who have something. (The io_uring's own file does not do: those who poll it
//! are not woken by work that waits for the thread to enter the kernel.)

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::disk::Ring;
use crate::error::{Error, Result};
use crate::sync::atomic::{AtomicBool, Ordering};

/// What a program waits for.
#[derive(Debug)]
pub(super) struct Bell {
    event: OwnedFd,
    /// Whether it was written since it was last read: once does for any number of signals.
    is_rung: AtomicBool,
}

impl Bell {
    /// A bell that the kernel rings for `ring`.
    pub(super) fn new(ring: &Ring) -> Result<Bell> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::from_io("creating", "an eventfd", errno.into()))?;
        ring.signal_to(event.as_fd())?;
        Ok(Bell { event, is_rung: AtomicBool::new(false) })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// There is something to take.
    pub(super) fn ring(&self) {
        if !self.is_rung.swap(true, Ordering::SeqCst) {
            // Any number will do. It fails only if the counter is full, and then it is readable.
            let _ = rustix::io::write(&self.event, &[1; 8]);
        }
    }

    /// The caller is about to look, and sees what was done before any earlier `ring`. The flag is
    /// cleared last: a ring before that needs no signal, one after that makes another. The eventfd
    /// is read even where no flag is seen, as a ring that began before may write after it.
    pub(super) fn answer(&self) {
        let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        self.is_rung.store(false, Ordering::SeqCst);
    }
}
