//! A file descriptor for programs with an event loop of their own: it is readable while a caller
//! may have a result to take. It is an eventfd. The kernel writes to it when an I/O call completes,
//! and every other thread that has a result writes to it, as well. (The io_uring's own file does
//! not serve: its pollers are not woken by work that waits for the thread to enter the kernel.)

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::disk::Ring;
use crate::error::{Error, Result};
use crate::sync::atomic::{AtomicBool, Ordering};

/// The notifier that a program waits for.
#[derive(Debug)]
pub(super) struct Notifier {
    event: OwnedFd,
    /// Whether the eventfd was written since it was last read: one write is enough for any number
    /// of signals.
    is_rung: AtomicBool,
}

impl Notifier {
    /// A notifier that the kernel rings for `ring`.
    pub(super) fn new(ring: &Ring) -> Result<Notifier> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::from_io("creating", "an eventfd", errno.into()))?;
        ring.signal_to(event.as_fd())?;
        Ok(Notifier { event, is_rung: AtomicBool::new(false) })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// There is something to take.
    pub(super) fn ring(&self) {
        if !self.is_rung.swap(true, Ordering::SeqCst) {
            // Any number will do. The write fails only if the counter is full, and then the eventfd
            // is readable.
            let _ = rustix::io::write(&self.event, &[1; 8]);
        }
    }

    /// The caller is about to check, and sees the results of all earlier calls of `ring`. The flag
    /// is cleared last: a `ring` before that needs no signal, and a `ring` after that writes
    /// another one. The eventfd is read even if the flag is not set, because a `ring` that began
    /// before may write after the flag is cleared.
    pub(super) fn answer(&self) {
        let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        self.is_rung.store(false, Ordering::SeqCst);
    }
}
