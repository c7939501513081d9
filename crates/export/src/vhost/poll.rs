//! Busy polling: the time for which one side of a ring polls it before it sleeps.
//!
//! Sleeping and waking up costs both sides about 20 us; polling costs a processor. `auto` polls as
//! long as that has paid off lately, within bounds that do not depend on the other side:
//!
//! 1. A poll starts only when a request (or an answer) was found: a silent ring is not polled.
//! 2. A poll ends after twice the usual time between two requests, and after [`LOOK_NS_MAX`] in any
//!    case. If the next request usually arrives later than that, the ring is not polled.
//! 3. Poll time is wasted if the thread sleeps afterwards, and to the extent that a successful poll
//!    takes longer than the sleep that it replaces. At most one part in [`VAIN_PARTS`] of the time
//!    is wasted, plus a saved-up credit of at most [`VAIN_NS_MAX`]. If the scheduler interrupts a
//!    poll, the poll takes longer than planned; that time must be earned back before the next poll.
//! 4. At most half of the processors poll, and all polls except the shortest yield to other
//!    threads.
//!
//! A poll only delays the sleep. Before the thread sleeps, it asks for kicks and checks the ring
//! once more, as without polling, so it never sleeps while a request is available.

use std::str::FromStr;

use udm::error::{Error, Kind, Result};
use udm::sync::Arc;
use udm::sync::statics::atomic::{AtomicU64, AtomicUsize, Ordering};
use udm::units::Nanos;

/// The longest poll of `auto`.
pub const LOOK_NS_MAX: Nanos = 100_000;
/// The shortest poll.
const LOOK_NS_MIN: Nanos = 5_000;
/// The poll time that is not counted as wasted if it replaces a sleep.
const SLEEP_NS: Nanos = 20_000;
/// One in this many parts of the time may be wasted.
pub const VAIN_PARTS: u64 = 10;
/// Poll time that may be wasted at the start, before any of it is earned.
pub const VAIN_NS_MAX: Nanos = 1_000_000;
/// The usual time between two requests is the mean of about this many.
const GAPS: u64 = 8;

/// Checks of a ring before the thread yields: some microseconds. The other side needs about two to
/// ask or answer, and yielding costs half of one, even if no other thread takes the processor.
pub const GLANCES: u32 = 100;

/// Checks a ring up to `most` times, until it has a request. If it has none, another thread
/// may run, possibly the one that this thread waits for.
pub fn glance(most: u32, is_there: impl Fn() -> bool) {
    for _ in 0..most {
        if is_there() {
            return;
        }
        std::hint::spin_loop();
    }
    std::thread::yield_now();
}

/// Whether to poll a ring before sleeping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Poll {
    /// Sleep immediately.
    Never,
    /// Poll as long as it pays off.
    #[default]
    Auto,
    /// Never sleep.
    Always,
}

impl Poll {
    /// Its name in options.
    pub fn name(self) -> &'static str {
        match self {
            Poll::Never => "never",
            Poll::Auto => "auto",
            Poll::Always => "always",
        }
    }
}

impl FromStr for Poll {
    type Err = Error;

    fn from_str(text: &str) -> Result<Poll> {
        let found = [Poll::Never, Poll::Auto, Poll::Always].into_iter().find(|p| p.name() == text);
        let wrong =
            || Error::new(Kind::Invalid, format!("poll={text:?} is not auto, never or always"));
        found.ok_or_else(wrong)
    }
}

/// Number of threads that are polling now, among those that share processors.
#[derive(Debug)]
pub struct Lookers(AtomicUsize);

impl Lookers {
    /// A counter at zero.
    #[expect(clippy::new_without_default, reason = "it is for statics")]
    pub const fn new() -> Lookers {
        Lookers(AtomicUsize::new(0))
    }

    fn enter(&self, max: usize) -> bool {
        let add = |count: usize| (count < max).then_some(count + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Poll time of all pollers that share this counter.
#[derive(Debug, Default)]
pub struct Spent {
    looked: AtomicU64,
    in_vain: AtomicU64,
}

impl Spent {
    /// Nanoseconds spent polling.
    pub fn looked(&self) -> Nanos {
        self.looked.load(Ordering::Relaxed)
    }

    /// Wasted nanoseconds among them.
    pub fn in_vain(&self) -> Nanos {
        self.in_vain.load(Ordering::Relaxed)
    }
}

/// A poll in progress.
#[derive(Clone, Copy, Debug)]
struct Look {
    since: Nanos,
    until: Nanos,
}

/// Decides for one ring.
#[derive(Debug)]
pub struct Poller {
    poll: Poll,
    lookers: &'static Lookers,
    lookers_max: usize,
    spent: Arc<Spent>,
    look: Option<Look>,
    /// Time of the last request found, if no poll followed it.
    found_at: Option<Nanos>,
    /// Whether the thread has been idle since then.
    is_idle: bool,
    /// The usual time until the next request.
    gap: Nanos,
    /// Nanoseconds that may be wasted. Negative after a poll that the scheduler interrupted: other
    /// threads need the processor, and the debt must be earned back before the next poll.
    credit: i64,
    credited_at: Option<Nanos>,
}

impl Poller {
    /// Creates a poller for a ring; it counts its time in `spent`.
    pub fn new(poll: Poll, lookers: &'static Lookers, spent: Arc<Spent>) -> Poller {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Poller {
            poll,
            lookers,
            // With one processor, polling only delays the thread that is waited for.
            lookers_max: processors / 2,
            spent,
            look: None,
            found_at: None,
            is_idle: false,
            gap: LOOK_NS_MAX / 2,
            credit: VAIN_NS_MAX as i64,
            credited_at: None,
        }
    }

    /// Whether it polls at all.
    pub fn is_on(&self) -> bool {
        self.poll != Poll::Never
    }

    /// Records that there was work.
    #[inline]
    pub fn found(&mut self, now: impl FnOnce() -> Nanos) {
        if self.is_on() {
            self.learn(now());
        }
    }

    fn learn(&mut self, now: Nanos) {
        if let Some(look) = self.look.take() {
            let spent = now.saturating_sub(look.since);
            self.end(spent, spent.saturating_sub(SLEEP_NS));
        }
        if let (Some(before), true) = (self.found_at, self.is_idle) {
            let gap = now.saturating_sub(before).min(2 * LOOK_NS_MAX);
            self.gap = (self.gap * (GAPS - 1) + gap) / GAPS;
        }
        (self.found_at, self.is_idle) = (Some(now), false);
    }

    /// Called without work to do: returns whether to poll again instead of sleeping.
    #[inline]
    pub fn goes_on(&mut self, now: impl FnOnce() -> Nanos) -> bool {
        self.is_on() && self.decide(now())
    }

    fn decide(&mut self, now: Nanos) -> bool {
        let had_news = !std::mem::replace(&mut self.is_idle, true);
        if let Some(look) = self.look {
            return now < look.until || self.give_up(now, look);
        }
        let is_always = self.poll == Poll::Always;
        let begins = is_always || (had_news && self.found_at.is_some() && self.may_begin(now));
        if begins {
            let len = if is_always { LOOK_NS_MAX } else { self.window() };
            self.look = Some(Look { since: now, until: now + len });
        }
        begins
    }

    /// Returns the maximum length of a poll.
    fn window(&self) -> Nanos {
        match self.gap {
            0..=LOOK_NS_MAX => (2 * self.gap).clamp(LOOK_NS_MIN, LOOK_NS_MAX),
            _ => 0,
        }
    }

    fn may_begin(&mut self, now: Nanos) -> bool {
        let since = self.credited_at.replace(now).unwrap_or(now);
        let earned = now.saturating_sub(since) / VAIN_PARTS;
        self.credit = self.credit.saturating_add_unsigned(earned).min(VAIN_NS_MAX as i64);
        let window = self.window();
        window > 0 && self.credit >= window as i64 && self.lookers.enter(self.lookers_max)
    }

    /// Ends a poll that found no request. Returns whether to poll again.
    fn give_up(&mut self, now: Nanos, look: Look) -> bool {
        let spent = now.saturating_sub(look.since);
        self.look = None;
        self.end(spent, spent);
        let is_always = self.poll == Poll::Always;
        if is_always {
            self.look = Some(Look { since: now, until: now + LOOK_NS_MAX });
        }
        is_always
    }

    fn end(&mut self, spent: Nanos, in_vain: Nanos) {
        self.spent.looked.fetch_add(spent, Ordering::Relaxed);
        self.spent.in_vain.fetch_add(in_vain, Ordering::Relaxed);
        if self.poll == Poll::Auto {
            self.lookers.leave();
            self.credit = self.credit.saturating_sub_unsigned(in_vain);
        }
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        if self.look.take().is_some() {
            self.end(0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn poller(poll: Poll, lookers: &'static Lookers) -> (Poller, Arc<Spent>) {
        let spent = Arc::new(Spent::default());
        let mut poller = Poller::new(poll, lookers, spent.clone());
        poller.lookers_max = 1;
        (poller, spent)
    }

    /// Simulates requests with these gaps; each check costs `step`. Returns the number of requests
    /// found by polling.
    fn run(poller: &mut Poller, now: &mut Nanos, gaps: &[Nanos], step: Nanos) -> usize {
        let mut looked = 0;
        for gap in gaps {
            let next = *now + gap;
            poller.found(|| *now);
            let mut is_awake = true;
            while is_awake && *now < next {
                is_awake = poller.goes_on(|| *now);
                *now += if is_awake { step } else { 0 };
            }
            looked += usize::from(is_awake);
            *now = (*now).max(next);
        }
        looked
    }

    #[test]
    fn it_looks_for_what_comes_soon_and_sleeps_for_what_comes_late() {
        static LOOKERS: Lookers = Lookers::new();
        let (mut poller, spent) = poller(Poll::Auto, &LOOKERS);
        let mut now = 1;
        let soon = run(&mut poller, &mut now, &[3_000; 1000], 100);
        assert!(soon >= 990, "{soon}");
        let before = spent.in_vain();
        assert_eq!(before, 0);
        let late = run(&mut poller, &mut now, &[1_000_000; 1000], 100);
        assert_eq!(late, 0);
        // It has learned after a few requests.
        assert!(spent.in_vain() < 3 * VAIN_NS_MAX, "{}", spent.in_vain());
        let learned = spent.in_vain();
        run(&mut poller, &mut now, &[1_000_000; 1000], 100);
        assert_eq!(spent.in_vain(), learned, "the poller does not poll for late requests");
        let soon = run(&mut poller, &mut now, &[3_000; 1000], 100);
        assert!(soon >= 950, "{soon}: soon again");
    }

    #[test]
    fn a_silent_ring_is_not_looked_at() {
        static LOOKERS: Lookers = Lookers::new();
        let (mut poller, _) = poller(Poll::Auto, &LOOKERS);
        assert!(!poller.goes_on(|| 1), "no poll was ever successful");
        poller.found(|| 10);
        assert!(poller.goes_on(|| 20) && !poller.goes_on(|| 20 + LOOK_NS_MAX));
        // Woken for another reason, it does not poll again.
        assert!(!poller.goes_on(|| 2 * LOOK_NS_MAX) && !poller.goes_on(|| 9 * LOOK_NS_MAX));
    }

    #[test]
    fn never_and_always_are_what_they_say() {
        static LOOKERS: Lookers = Lookers::new();
        let (mut never, spent) = poller(Poll::Never, &LOOKERS);
        never.found(|| unreachable!("time is not read"));
        assert!(!never.goes_on(|| unreachable!("time is not read")));
        assert_eq!(spent.looked(), 0);
        let (mut always, spent) = poller(Poll::Always, &LOOKERS);
        for nth in 0..100 {
            assert!(always.goes_on(|| nth * LOOK_NS_MAX));
        }
        assert_eq!((spent.looked(), spent.in_vain()), (99 * LOOK_NS_MAX, 99 * LOOK_NS_MAX));
    }

    #[test]
    fn only_half_of_the_processors_look() {
        static LOOKERS: Lookers = Lookers::new();
        let ((mut one, _), (mut other, _)) =
            (poller(Poll::Auto, &LOOKERS), poller(Poll::Auto, &LOOKERS));
        one.found(|| 1);
        other.found(|| 1);
        assert!(one.goes_on(|| 2) && !other.goes_on(|| 2));
        drop(one);
        other.found(|| 3);
        assert!(other.goes_on(|| 4));
    }

    proptest! {
        /// The bound of the wasted time holds for any arrival times.
        #[test]
        fn a_part_of_the_time_and_no_more_is_in_vain(
            gaps in proptest::collection::vec(
                prop_oneof![1..200_u64, 1..2 * LOOK_NS_MAX, 1..3_000_000_u64], 1..2000),
            // The last one: the scheduler interrupts the poll.
            steps in proptest::collection::vec(
                prop_oneof![9 => 1..5_000_u64, 1 => 1..20_000_000_u64], 1..20),
        ) {
            static LOOKERS: Lookers = Lookers::new();
            let (mut poller, spent) = poller(Poll::Auto, &LOOKERS);
            poller.lookers_max = usize::MAX;
            let mut now = 7;
            for (gap, step) in gaps.into_iter().zip(steps.iter().cycle()) {
                run(&mut poller, &mut now, &[gap], *step);
            }
            let bound = now / VAIN_PARTS + VAIN_NS_MAX + steps.iter().max().unwrap();
            prop_assert!(spent.in_vain() <= bound, "{} of {now}", spent.in_vain());
            prop_assert!(spent.looked() >= spent.in_vain() && spent.looked() <= now);
        }
    }

    #[test]
    fn words_are_read_as_they_are_printed() {
        for poll in [Poll::Never, Poll::Auto, Poll::Always] {
            assert_eq!(poll.name().parse::<Poll>().unwrap(), poll);
        }
        let error = "often".parse::<Poll>().unwrap_err().to_string();
        assert!(error.contains("auto, never or always"), "{error}");
    }
}
