//! Waiting in a client's socket: polling it for a moment before sleeping in it.
//!
//! A halted core takes tens of microseconds to wake, which is most of what a small request takes.
//! So the thread polls the socket of a client that was quick with its last requests for a moment
//! before it sleeps there. After each look it yields the core.
//!
//! Polling in vain is bounded: at most half of the cores poll at a time; no request is polled for
//! longer than [`WATCH_NS`]; and each client has a credit. A watch that saves a sleep raises it by
//! what the sleep would have cost, and the time spent polling is subtracted. A client without
//! credit is not watched, except for a small part of the time, to see whether it has become quick.
//! So on average a request is watched for no longer than a sleep costs. The time spent is counted.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::now;
use crate::sync::OnceLock;
use crate::sync::statics::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::units::Nanos;

/// How long a socket is watched at most before its thread sleeps in it.
const WATCH_NS: Nanos = 50_000;
/// A client whose next request comes within this time may be worth watching for: twice the time
/// that waking a thread on an idle core takes, and as much again.
const BRISK_NS: Nanos = 200_000;
/// The cost of a sleep, which a watch saves.
const SLEEP_NS: i64 = 25_000;
/// What a quick client earns by a request that was not watched for.
const TRUST_NS: i64 = 2_000;
/// Most credit: if a client becomes slow, this much time is spent in vain.
const CREDIT_MAX: i64 = 500_000;

/// One client's socket, as far as waiting in it goes.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The last bytes came within [`BRISK_NS`].
    is_brisk: bool,
    /// Nanoseconds that may be spent in vain.
    credit: i64,
}

/// What watching has cost this process, and how often it helped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watched {
    /// Nanoseconds spent polling.
    pub nanos: u64,
    /// Requests that came while their socket was watched.
    pub caught: u64,
    /// Watches that ended in vain: the thread had to sleep.
    pub missed: u64,
}

static NANOS: AtomicU64 = AtomicU64::new(0);
static CAUGHT: AtomicU64 = AtomicU64::new(0);
static MISSED: AtomicU64 = AtomicU64::new(0);

/// What watching has cost so far.
pub fn watched() -> Watched {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Watched { nanos: read(&NANOS), caught: read(&CAUGHT), missed: read(&MISSED) }
}

impl Watch {
    /// Waits until bytes come, and says how many there are now; 0 at the end of the stream.
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

/// Waits without a look until bytes come.
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
    /// Nothing came.
    Missed,
}

/// Looks for bytes until they come or [`WATCH_NS`] are over.
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
        // Other threads that want this core go first, the client above all.
        std::thread::yield_now();
    }
}

/// The right to watch a socket. There are as many as half of the cores, so that watching never
/// keeps other threads from working.
struct WatchPlace;

/// For the whole process. It is only a count, and orders no memory.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What part of the time is spent looking, if each request comes after `gap` and is served in
    /// 8 us, and a thread that sleeps wakes 20 us late.
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
        assert!(!watch.is_worth_it(), "after at most {CREDIT_MAX} ns in vain");
        share_of_time(&mut watch, 5_000, 100);
        assert!(watch.is_worth_it(), "and taken back when it is quick again");
    }
}
