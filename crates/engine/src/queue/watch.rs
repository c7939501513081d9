//! Waiting in a client's socket: a short look out before the sleep.
//!
//! A halted core takes tens of microseconds to wake, which is most of what a small request takes.
//! So the socket of a client that was quick with its last request is watched for a while before
//! the thread sleeps in it, giving the core to whoever wants it after each look. That costs at most
//! half of the cores, and nothing while clients are slow or silent.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::now;
use crate::sync::OnceLock;
use crate::sync::statics::atomic::{AtomicUsize, Ordering};
use crate::units::Nanos;

/// How long a socket is watched before its thread sleeps in it.
const WATCH_NS: Nanos = 100_000;
/// A client that takes no longer for its next request is worth watching for: what waking a thread
/// takes on an idle core, twice, and as much again.
const BRISK_NS: Nanos = 200_000;

/// One client's socket, as far as waiting in it goes.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The last bytes did not keep us waiting for long.
    is_brisk: bool,
}

impl Watch {
    /// Waits until bytes come, and says how many there are now; 0 at the end of the stream.
    pub(super) fn receive(
        &mut self,
        socket: &OwnedFd,
        memory: &mut [u8],
    ) -> rustix::io::Result<usize> {
        let since = now();
        let watched = if self.is_brisk { watch(socket, memory, since) } else { None };
        let result = watched.unwrap_or_else(|| {
            let sleep = || recv(socket, &mut *memory, RecvFlags::empty());
            rustix::io::retry_on_intr(sleep).map(|(count, _)| count)
        });
        self.is_brisk = now() - since < BRISK_NS;
        result
    }
}

/// Looks for bytes until they come or [`WATCH_NS`] are over.
fn watch(socket: &OwnedFd, memory: &mut [u8], since: Nanos) -> Option<rustix::io::Result<usize>> {
    let _place = WatchPlace::take()?;
    loop {
        match recv(socket, &mut *memory, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            result => return Some(result.map(|(count, _)| count)),
        }
        if now() - since >= WATCH_NS {
            return None;
        }
        // Whoever wants this core goes first, the client above all.
        std::thread::yield_now();
    }
}

/// A place among those who may watch their sockets: half of the cores, so that watching never
/// keeps everybody else from working.
struct WatchPlace;

/// Of the whole process; a guess of what is free, which orders nothing.
static WATCHING: AtomicUsize = AtomicUsize::new(0);

impl WatchPlace {
    fn take() -> Option<WatchPlace> {
        static MAX: OnceLock<usize> = OnceLock::new();
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let place = WatchPlace;
        // Counted before it is known to be free; dropping the place takes that back.
        let others = WATCHING.fetch_add(1, Ordering::Relaxed);
        (others < *MAX.get_or_init(|| cores() / 2)).then_some(place)
    }
}

impl Drop for WatchPlace {
    fn drop(&mut self) {
        WATCHING.fetch_sub(1, Ordering::Relaxed);
    }
}
