//! Waiting in a client's socket: the thread polls the socket for a moment before it sleeps in it.
//!
//! A halted core takes tens of microseconds to wake, which is most of the time of a small request.
//! So if a client was fast with its last requests, the thread polls the client's socket for a
//! moment before it sleeps there. After each poll it yields the core.
//!
//! Wasted polling is bounded. At most half of the cores poll at a time, no request is polled for
//! longer than [`WATCH_NS`], and each client has a credit. A poll that saves a sleep raises the
//! credit by the cost of the sleep, and the time spent polling is subtracted. A client without
//! credit is not polled, except for a small part of the time, to notice when it becomes fast. So on
//! average a request is polled for no longer than a sleep costs. The time spent is counted.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::now;
use crate::sync::OnceLock;
use crate::sync::statics::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::units::Nanos;

/// A socket is polled for at most this long before its thread sleeps in it.
const WATCH_NS: Nanos = 50_000;
/// A client whose next request comes within this time may be worth polling for. It is twice the sum
/// of the wake-up time of a thread on an idle core and the same time again.
const BRISK_NS: Nanos = 200_000;
/// The cost of a sleep, which a watch saves.
const SLEEP_NS: i64 = 25_000;
/// The credit that a fast client earns by a request that was not polled for.
const TRUST_NS: i64 = 2_000;
/// The largest credit: if a client becomes slow, at most this much time is wasted.
const CREDIT_MAX: i64 = 500_000;

/// The state of waiting in one client's socket.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The last bytes came within [`BRISK_NS`].
    is_brisk: bool,
    /// Nanoseconds of polling that may be wasted.
    credit: i64,
}

/// The time that polling has cost this process, and how often it helped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watched {
    /// Nanoseconds spent polling.
    pub nanos: u64,
    /// Requests that came while their socket was watched.
    pub caught: u64,
    /// Polls that found no bytes: the thread had to sleep.
    pub missed: u64,
}

static NANOS: AtomicU64 = AtomicU64::new(0);
static CAUGHT: AtomicU64 = AtomicU64::new(0);
static MISSED: AtomicU64 = AtomicU64::new(0);

/// The cost of polling so far.
pub fn watched() -> Watched {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Watched { nanos: read(&NANOS), caught: read(&CAUGHT), missed: read(&MISSED) }
}

impl Watch {
    /// Waits until bytes arrive, and returns their number; 0 at the end of the stream.
    pub(super) fn receive(
        &mut self,
        socket: &OwnedFd,
        memory: &mut [u8],
    ) -> rustix::io::Result<usize> {
        let since = now();
        if self.is_worth_it() {
            let watched = watch(socket, memory, since);
            if let Watching::Caught(_) | Watching::Missed = watched {
                let is_caught = matches!(watched, Watching::Caught(_));
                self.has_watched(now() - since, is_caught);
            }
            if let Watching::Caught(result) = watched {
                return result;
            }
        }
        let result = sleep(socket, memory);
        self.has_slept(now() - since);
        result
    }

    fn is_worth_it(&self) -> bool {
        self.is_brisk && self.credit >= 0
    }

    /// A watch of this length has ended, with bytes or without.
    fn has_watched(&mut self, nanos: Nanos, is_caught: bool) {
        let spent = i64::try_from(nanos).unwrap_or(i64::MAX);
        let saved = if is_caught { SLEEP_NS } else { 0 };
        self.credit = self.credit.saturating_add(saved).saturating_sub(spent).min(CREDIT_MAX);
        let counter = if is_caught { &CAUGHT } else { &MISSED };
        counter.fetch_add(1, Ordering::Relaxed);
        NANOS.fetch_add(nanos, Ordering::Relaxed);
        self.is_brisk = true;
    }

    /// The thread has slept, and waited this long.
    fn has_slept(&mut self, nanos: Nanos) {
        self.is_brisk = nanos < BRISK_NS;
        if self.is_brisk {
            self.credit = (self.credit + TRUST_NS).min(CREDIT_MAX);
        }
    }
}

/// Sleeps until bytes arrive, without polling.
pub(super) fn sleep(socket: &OwnedFd, memory: &mut [u8]) -> rustix::io::Result<usize> {
    let sleep = || recv(socket, &mut *memory, RecvFlags::empty());
    rustix::io::retry_on_intr(sleep).map(|(count, _)| count)
}

/// How a watch ended.
enum Watching {
    /// Too many threads are watching already.
    NoPlace,
    /// Bytes came, or the socket failed.
    Caught(rustix::io::Result<usize>),
    /// No bytes arrived.
    Missed,
}

/// Polls for bytes until they arrive or [`WATCH_NS`] have passed.
fn watch(socket: &OwnedFd, memory: &mut [u8], since: Nanos) -> Watching {
    let Some(_place) = WatchPlace::take() else { return Watching::NoPlace };
    loop {
        match recv(socket, &mut *memory, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            result => return Watching::Caught(result.map(|(count, _)| count)),
        }
        if now() - since >= WATCH_NS {
            return Watching::Missed;
        }
        // Other threads that want this core run first, above all the client.
        std::thread::yield_now();
    }
}

/// The right to poll a socket. At most half of the cores may have it, so that polling never keeps
/// other threads from working.
struct WatchPlace;

/// For the whole process. It is only a count, and orders no memory.
static WATCHING: AtomicUsize = AtomicUsize::new(0);

impl WatchPlace {
    fn take() -> Option<WatchPlace> {
        static MAX: OnceLock<usize> = OnceLock::new();
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let place = WatchPlace;
        // Counted before the limit is checked; dropping the right takes the count back.
        let others = WATCHING.fetch_add(1, Ordering::Relaxed);
        (others < *MAX.get_or_init(|| cores() / 2)).then_some(place)
    }
}

impl Drop for WatchPlace {
    fn drop(&mut self) {
        WATCHING.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of time spent polling, if each request comes after `gap` and is served in 8 us,
    /// and a thread that sleeps wakes 20 us late.
    fn share_of_time(watch: &mut Watch, gap: Nanos, requests: u64) -> f64 {
        let (mut spent, mut passed) = (0, 0);
        for _ in 0..requests {
            let mut waited = gap;
            if watch.is_worth_it() {
                let looked = gap.min(WATCH_NS);
                watch.has_watched(looked, gap <= WATCH_NS);
                spent += looked;
            } else {
                waited += 20_000;
            }
            if gap > WATCH_NS || waited > gap {
                watch.has_slept(waited);
            }
            passed += waited + 8_000;
        }
        spent as f64 / passed as f64
    }

    #[test]
    fn a_quick_client_is_watched_and_a_slower_one_ever_less() {
        let share = |gap| share_of_time(&mut Watch::default(), gap, 10_000);
        assert!(share(5_000) > 0.35 && share(12_000) > 0.55, "worth it: each saves a sleep");
        let bounds = [(30_000, 0.25), (45_000, 0.07), (80_000, 0.03), (150_000, 0.02)];
        for (gap, most) in bounds {
            assert!(share(gap) < most, "{gap} ns: {}", share(gap));
        }
        assert_eq!(share(1_000_000), 0.0, "a slow client is not watched at all");
    }

    #[test]
    fn a_client_that_becomes_slow_is_soon_let_go() {
        let mut watch = Watch::default();
        share_of_time(&mut watch, 5_000, 100_000);
        assert_eq!(watch.credit, CREDIT_MAX);
        share_of_time(&mut watch, 100_000, 12);
        assert!(!watch.is_worth_it(), "after at most {CREDIT_MAX} ns of wasted polls");
        share_of_time(&mut watch, 5_000, 100);
        assert!(watch.is_worth_it(), "and taken back when it is quick again");
    }
}
