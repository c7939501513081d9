//! Waiting in a client's socket: the thread polls the socket for a moment before it sleeps in it.
//!
//! A halted core takes tens of microseconds to wake, which is most of the time of a small request.
//! So if a client was fast with its last requests, the thread polls the client's socket for a
//! moment before it sleeps there.
//!
//! Wasted polling is bounded. While the clients at work are more than half as many as the cores, no
//! socket is polled: other threads need the cores. No request is polled for longer than
//! [`WATCH_NS`], and each client has a credit. A poll that saves a sleep raises the credit by the
//! cost of the sleep, and the time spent polling is subtracted. A client without credit is not
//! polled, except for a small part of the time, to notice when it becomes fast. So on average a
//! request is polled for no longer than a sleep costs. The time spent is counted.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::now;
use crate::sync::OnceLock;
use crate::sync::statics::atomic::{AtomicU64, Ordering};
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
/// A client counts as at work in the period of its request and in the next one.
const PERIOD_NS: Nanos = 8_000_000;
/// The largest credit: if a client becomes slow, at most this much time is wasted.
const CREDIT_MAX: i64 = 500_000;

/// The state of waiting in one client's socket.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The last bytes came within [`BRISK_NS`].
    is_brisk: bool,
    /// Nanoseconds of polling that may be wasted.
    credit: i64,
    /// The last period in which it was counted as a client.
    counted_in: u64,
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
        let clients = CLIENTS.count(&mut self.counted_in, since / PERIOD_NS);
        if clients <= polled_max() && self.is_worth_it() {
            let watched = watch(socket, memory, since);
            let is_caught = matches!(watched, Watching::Caught(_));
            self.has_watched(now() - since, is_caught);
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
    /// Bytes came, or the socket failed.
    Caught(rustix::io::Result<usize>),
    /// No bytes arrived.
    Missed,
}

/// Polls for bytes until they arrive or [`WATCH_NS`] have passed.
fn watch(socket: &OwnedFd, memory: &mut [u8], since: Nanos) -> Watching {
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

/// The most clients whose sockets are polled: half as many as the cores, so that polling never
/// keeps other threads from working.
fn polled_max() -> u64 {
    static MAX: OnceLock<u64> = OnceLock::new();
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    *MAX.get_or_init(|| cores() as u64 / 2)
}

/// Counts the clients of this process that are at work: those whose threads waited for a request in
/// the present period or in the one before. It is only a count, and orders no memory.
struct Clients(AtomicU64);

static CLIENTS: Clients = Clients(AtomicU64::new(0));

/// The content of a [`Clients`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Census {
    /// The number of the present period.
    period: u64,
    /// Clients that were counted in the period before, and in this one.
    before: u64,
    present: u64,
}

/// Bits of each count, and the largest count.
const COUNT_BITS: u32 = 12;
const COUNT_MAX: u64 = (1 << COUNT_BITS) - 1;

impl Census {
    fn pack(self) -> u64 {
        self.period << (2 * COUNT_BITS) | self.before << COUNT_BITS | self.present
    }

    fn unpack(packed: u64) -> Census {
        let period = packed >> (2 * COUNT_BITS);
        Census { period, before: packed >> COUNT_BITS & COUNT_MAX, present: packed & COUNT_MAX }
    }

    /// With one client more in a period, which is this one or a later one.
    fn plus_one(self, period: u64) -> Census {
        let (before, present) = match period - self.period {
            0 => (self.before, self.present),
            1 => (self.present, 0),
            _ => (0, 0),
        };
        Census { period, before, present: (present + 1).min(COUNT_MAX) }
    }

    fn clients(self) -> u64 {
        self.before.max(self.present)
    }
}

impl Clients {
    /// Counts a client in this period, unless it was counted, and returns the number of clients at
    /// work. `counted_in` belongs to the client: the last period in which it was counted.
    fn count(&self, counted_in: &mut u64, period: u64) -> u64 {
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            let census = Census::unpack(seen);
            // Another thread may have read a later time.
            let period = period.max(census.period);
            if *counted_in == period {
                return census.clients();
            }
            let next = census.plus_one(period);
            let relaxed = Ordering::Relaxed;
            match self.0.compare_exchange_weak(seen, next.pack(), relaxed, relaxed) {
                Ok(_) => {
                    *counted_in = period;
                    return next.clients();
                }
                Err(now) => seen = now,
            }
        }
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
    fn clients_at_work_are_counted_once_in_a_period() {
        let clients = Clients(AtomicU64::new(0));
        let (mut one, mut two, mut three) = (0, 0, 0);
        assert_eq!(clients.count(&mut one, 100), 1);
        assert_eq!(clients.count(&mut one, 100), 1, "again");
        assert_eq!(clients.count(&mut two, 100), 2);
        assert_eq!(clients.count(&mut three, 100), 3);
        assert_eq!(clients.count(&mut one, 101), 3, "the others may be at work in this period too");
        assert_eq!(
            clients.count(&mut two, 100),
            3,
            "an earlier time is counted as the present one"
        );
        assert_eq!(clients.count(&mut one, 102), 2, "one is gone");
        assert_eq!(clients.count(&mut one, 105), 1, "after a pause");
        for nth in 0..2 * COUNT_MAX {
            assert_eq!(clients.count(&mut 0, 106), (nth + 1).min(COUNT_MAX));
        }
        assert_eq!(clients.count(&mut one, 110), 1);
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
