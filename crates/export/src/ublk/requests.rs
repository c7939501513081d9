//! The requests of a queue: a pure state machine with one state for each tag.
//!
//! 1. The kernel owns a tag while a command for it is outstanding. The command completes with a
//!    request, or with the driver's notice that it does not need the tag any more.
//! 2. Each request is answered once, by the command that fetches the next request of its tag. If a
//!    request was answered early (with an error), the later completion of its bio is dropped.

use std::collections::VecDeque;

use udm::bio::Op;
use udm::device::{InFlight, SLOW_SECONDS};
use udm::units::{Nanos, SECOND};

use super::proto::Wish;

/// State of a tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// A command for the tag is outstanding.
    #[default]
    WithKernel,
    /// A request that was not started yet.
    Waiting,
    /// A request that the device is working on.
    InFlight(Wish),
    /// The driver has taken the tag back.
    Gone,
}

#[derive(Debug, Default)]
struct Tag {
    phase: Phase,
    /// Changes with each request, so that a late answer never matches the next request.
    stamp: u32,
    /// Time of the first check that found the request in flight.
    seen: Option<Nanos>,
    is_slow: bool,
}

/// The requests of a queue.
#[derive(Debug)]
pub struct Requests {
    tags: Vec<Tag>,
    waiting: VecDeque<u16>,
    in_flight: usize,
    held_bytes: u64,
    gone: usize,
    has_slow: bool,
}

impl Requests {
    /// Creates a queue of `depth` tags; the caller issues a command for each.
    pub fn new(depth: u16) -> Requests {
        Requests {
            tags: (0..depth).map(|_| Tag::default()).collect(),
            waiting: VecDeque::new(),
            in_flight: 0,
            held_bytes: 0,
            gone: 0,
            has_slow: false,
        }
    }

    /// Records the completion of a tag's command: with a request, or for good.
    pub fn came(&mut self, tag: u16, has_request: bool) {
        let phase = &mut self.tags[usize::from(tag)].phase;
        assert_eq!(*phase, Phase::WithKernel, "one command is out for each tag");
        if has_request {
            *phase = Phase::Waiting;
            self.waiting.push_back(tag);
        } else {
            *phase = Phase::Gone;
            self.gone += 1;
        }
    }

    /// Returns the oldest request that was not started.
    pub fn next(&self) -> Option<u16> {
        self.waiting.front().copied()
    }

    /// Starts the oldest request on the device. Returns the token of its bio.
    pub fn begin(&mut self, wish: Wish) -> u64 {
        let nth = self.waiting.pop_front().expect("a request waits");
        let tag = &mut self.tags[usize::from(nth)];
        tag.phase = Phase::InFlight(wish);
        tag.stamp = tag.stamp.wrapping_add(1);
        (tag.seen, tag.is_slow) = (None, false);
        self.in_flight += 1;
        self.held_bytes += held_bytes(&wish);
        u64::from(tag.stamp) << 32 | u64::from(nth)
    }

    /// Answers the oldest request without a bio. The caller issues a command for its tag.
    pub fn answer_at_once(&mut self) {
        let tag = self.waiting.pop_front().expect("a request waits");
        self.tags[usize::from(tag)].phase = Phase::WithKernel;
    }

    /// Records the completion of a bio. Returns its request, for which the caller issues a command;
    /// `None` if the request was already answered.
    pub fn end(&mut self, token: u64) -> Option<(u16, Wish)> {
        let nth = token as u16;
        let tag = &mut self.tags[usize::from(nth)];
        let Phase::InFlight(wish) = tag.phase else { return None };
        if tag.stamp != (token >> 32) as u32 {
            return None;
        }
        tag.phase = Phase::WithKernel;
        self.in_flight -= 1;
        self.held_bytes -= held_bytes(&wish);
        Some((nth, wish))
    }

    /// Answers all requests without waiting for their bios; the caller issues a command for each
    /// tag.
    pub fn abandon(&mut self) -> Vec<u16> {
        self.waiting.clear();
        (self.in_flight, self.held_bytes) = (0, 0);
        let mut tags = Vec::new();
        for (nth, tag) in (0..).zip(&mut self.tags) {
            if matches!(tag.phase, Phase::Waiting | Phase::InFlight(_)) {
                tag.phase = Phase::WithKernel;
                tags.push(nth);
            }
        }
        tags
    }

    /// Number of requests that the device is working on.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Number of unanswered requests.
    pub fn here(&self) -> usize {
        self.in_flight + self.waiting.len()
    }

    /// Data bytes of the requests that the device is working on.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Whether the driver has taken all tags back.
    pub fn is_over(&self) -> bool {
        self.gone == self.tags.len()
    }

    /// Whether a check for slow requests is useful.
    pub fn may_be_slow(&self) -> bool {
        self.in_flight > 0 || self.has_slow
    }

    /// Returns the slow requests; `None` if there are none now and were none at the last check.
    pub fn slow(&mut self, now: Nanos) -> Option<Vec<InFlight>> {
        let mut slow = Vec::new();
        for (token, tag) in (0..).zip(&mut self.tags) {
            let Phase::InFlight(Wish { op, offset, len, .. }) = tag.phase else { continue };
            let age = now - *tag.seen.get_or_insert(now);
            if age >= SLOW_SECONDS * SECOND {
                let is_new = !std::mem::replace(&mut tag.is_slow, true);
                slow.push(InFlight { token, op, offset, len, age, is_new });
            }
        }
        let had_slow = std::mem::replace(&mut self.has_slow, !slow.is_empty());
        (had_slow || self.has_slow).then_some(slow)
    }
}

/// Returns the bytes of memory that a request needs.
pub fn held_bytes(wish: &Wish) -> u64 {
    if matches!(wish.op, Op::Read | Op::Write) { wish.len } else { 0 }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    const DEPTH: u16 = 5;

    /// A simulated kernel driver: requests of clients and their state.
    struct Driver {
        /// For each tag its request, if any, and whether the server knows the request.
        tags: Vec<Option<(u32, bool)>>,
        answers: Vec<u32>,
        is_stopping: bool,
    }

    /// The driver, the server's requests, and the device under them.
    struct Fixture {
        driver: Driver,
        server: Requests,
        /// Tokens of bios in flight, each with its request.
        bios: Vec<(u64, u32)>,
    }

    fn wish(number: u32) -> Wish {
        let offset = u64::from(number) * 4096;
        let (len, shared_at) = (4096, None);
        Wish { op: Op::Write, offset, len, fua: false, is_metadata: false, shared_at }
    }

    impl Fixture {
        fn new() -> Fixture {
            let tags = vec![None; DEPTH.into()];
            let driver = Driver { tags, answers: Vec::new(), is_stopping: false };
            Fixture { driver, server: Requests::new(DEPTH), bios: Vec::new() }
        }

        /// A client issues a request, if a tag is free.
        fn ask(&mut self) {
            let driver = &mut self.driver;
            let free = driver.tags.iter().position(Option::is_none);
            if let (Some(tag), false) = (free, driver.is_stopping) {
                let number = driver.answers.len() as u32;
                driver.answers.push(0);
                driver.tags[tag] = Some((number, true));
                self.server.came(tag as u16, true);
            }
        }

        /// The driver receives a command with an answer.
        fn answered(&mut self, tag: u16) {
            let (number, is_known) = self.driver.tags[usize::from(tag)].take().unwrap();
            assert!(is_known, "the server has answered what it was never given");
            self.driver.answers[number as usize] += 1;
            if self.driver.is_stopping {
                self.server.came(tag, false);
            }
        }

        fn begin(&mut self) {
            if let Some(tag) = self.server.next() {
                let (number, _) = self.driver.tags[usize::from(tag)].unwrap();
                let token = self.server.begin(wish(number));
                self.bios.push((token, number));
            }
        }

        fn end(&mut self, nth: usize) {
            if self.bios.is_empty() {
                return;
            }
            let (token, number) = self.bios.swap_remove(nth % self.bios.len());
            if let Some((tag, ended)) = self.server.end(token) {
                assert_eq!(ended, wish(number), "an answer meets its own request");
                assert_eq!(self.driver.tags[usize::from(tag)].unwrap().0, number);
                self.answered(tag);
            }
        }

        fn answer_at_once(&mut self) {
            if let Some(tag) = self.server.next() {
                self.server.answer_at_once();
                self.answered(tag);
            }
        }

        fn abandon(&mut self) {
            for tag in self.server.abandon() {
                self.answered(tag);
            }
            assert_eq!((self.server.here(), self.server.held_bytes()), (0, 0));
        }

        /// The server dies. The driver gives unanswered requests to the next server again.
        fn kill(&mut self) {
            self.server = Requests::new(DEPTH);
            self.bios.clear();
            for (tag, request) in (0..).zip(&self.driver.tags) {
                if request.is_some() {
                    self.server.came(tag, true);
                } else if self.driver.is_stopping {
                    self.server.came(tag, false);
                }
            }
        }

        /// The driver shuts down: it takes back idle tags now, busy tags once they are answered.
        fn stop(&mut self) {
            if !std::mem::replace(&mut self.driver.is_stopping, true) {
                for (tag, request) in (0..).zip(&self.driver.tags) {
                    if request.is_none() {
                        self.server.came(tag, false);
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn each_request_is_answered_once(
            steps in prop::collection::vec((0..40_u8, 0..8_usize), 0..300),
        ) {
            let mut fixture = Fixture::new();
            for (step, nth) in steps {
                match step {
                    0..12 => fixture.ask(),
                    12..24 => fixture.begin(),
                    24..35 => fixture.end(nth),
                    35 => fixture.answer_at_once(),
                    36 | 37 => fixture.kill(),
                    38 => fixture.abandon(),
                    _ if nth == 0 => fixture.stop(),
                    _ => {}
                }
                let here = fixture.driver.tags.iter().flatten().count();
                prop_assert_eq!(fixture.server.here(), here);
            }
            fixture.stop();
            while fixture.server.next().is_some() {
                fixture.begin();
            }
            while !fixture.bios.is_empty() {
                fixture.end(0);
            }
            prop_assert!(fixture.server.is_over());
            prop_assert!(fixture.driver.answers.iter().all(|count| *count == 1));
        }
    }
}
