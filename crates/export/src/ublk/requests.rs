//! Who has each request of a queue: a pure state machine, one state for each tag.
//!
//! 1. A tag is with the kernel while a command for it is out. The end of the command is a request,
//!    or the word that the driver wants no more of it.
//! 2. A request is answered once: by the command that fetches the next one with its tag. What comes
//!    back from the device for a request that was answered otherwise meanwhile is dropped.

use std::collections::VecDeque;

use udm::bio::Op;
use udm::device::{InFlight, LATE_SECONDS};
use udm::units::{Nanos, SECOND};

use super::proto::Wish;

/// Where a tag is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// A command for it is out.
    #[default]
    WithKernel,
    /// A request, which is not begun.
    Waiting,
    /// A request with the device.
    InFlight(Wish),
    /// The driver has taken it back.
    Gone,
}

#[derive(Debug, Default)]
struct Tag {
    phase: Phase,
    /// Changes with each request, so that an answer never meets the next one.
    stamp: u32,
    /// When the request was first seen to be in flight.
    seen: Option<Nanos>,
    is_late: bool,
}

/// The requests of a queue.
#[derive(Debug)]
pub struct Requests {
    tags: Vec<Tag>,
    waiting: VecDeque<u16>,
    in_flight: usize,
    held_bytes: u64,
    gone: usize,
    has_late: bool,
}

impl Requests {
    /// A queue with this many tags, for all of which a command goes out.
    pub fn new(depth: u16) -> Requests {
        Requests {
            tags: (0..depth).map(|_| Tag::default()).collect(),
            waiting: VecDeque::new(),
            in_flight: 0,
            held_bytes: 0,
            gone: 0,
            has_late: false,
        }
    }

    /// The command for a tag has ended: with a request, or for good.
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

    /// The oldest request that is not begun.
    pub fn next(&self) -> Option<u16> {
        self.waiting.front().copied()
    }

    /// The oldest request goes to the device. Returns the token of its bio.
    pub fn begin(&mut self, wish: Wish) -> u64 {
        let nth = self.waiting.pop_front().expect("a request waits");
        let tag = &mut self.tags[usize::from(nth)];
        tag.phase = Phase::InFlight(wish);
        tag.stamp = tag.stamp.wrapping_add(1);
        (tag.seen, tag.is_late) = (None, false);
        self.in_flight += 1;
        self.held_bytes += held_bytes(&wish);
        u64::from(tag.stamp) << 32 | u64::from(nth)
    }

    /// The oldest request is answered without a bio. A command goes out for its tag.
    pub fn answer_at_once(&mut self) {
        let tag = self.waiting.pop_front().expect("a request waits");
        self.tags[usize::from(tag)].phase = Phase::WithKernel;
    }

    /// A bio has come back. Returns its request, for which a command goes out, unless that was
    /// answered already.
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

    /// All requests that are here are answered, whatever becomes of their bios: a command goes out
    /// for each.
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

    /// Requests with the device.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Requests that are here.
    pub fn here(&self) -> usize {
        self.in_flight + self.waiting.len()
    }

    /// Bytes of the data of those with the device.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Whether the driver has taken all tags back.
    pub fn is_over(&self) -> bool {
        self.gone == self.tags.len()
    }

    /// Whether there is any reason to look for late requests.
    pub fn may_be_late(&self) -> bool {
        self.in_flight > 0 || self.has_late
    }

    /// Late requests, if there are some or were at the last look.
    pub fn late(&mut self, now: Nanos) -> Option<Vec<InFlight>> {
        let mut late = Vec::new();
        for (token, tag) in (0..).zip(&mut self.tags) {
            let Phase::InFlight(Wish { op, offset, len, .. }) = tag.phase else { continue };
            let age = now - *tag.seen.get_or_insert(now);
            if age >= LATE_SECONDS * SECOND {
                let is_new = !std::mem::replace(&mut tag.is_late, true);
                late.push(InFlight { token, op, offset, len, age, is_new });
            }
        }
        let had_late = std::mem::replace(&mut self.has_late, !late.is_empty());
        (had_late || self.has_late).then_some(late)
    }
}

/// Bytes of memory that a request needs.
pub fn held_bytes(wish: &Wish) -> u64 {
    if matches!(wish.op, Op::Read | Op::Write) { wish.len } else { 0 }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    const DEPTH: u16 = 5;

    /// A driver of the kernel: what clients have asked for, and where it is.
    struct Driver {
        /// For each tag: the request there, if there is one, and whether its server knows of it.
        tags: Vec<Option<(u32, bool)>>,
        answers: Vec<u32>,
        is_stopping: bool,
    }

    /// The driver, the server's requests, and the device under them.
    struct Scene {
        driver: Driver,
        server: Requests,
        /// Tokens of bios that have not come back, with the requests that they are for.
        bios: Vec<(u64, u32)>,
    }

    fn wish(number: u32) -> Wish {
        let offset = u64::from(number) * 4096;
        let (len, shared_at) = (4096, None);
        Wish { op: Op::Write, offset, len, fua: false, is_metadata: false, shared_at }
    }

    impl Scene {
        fn new() -> Scene {
            let tags = vec![None; DEPTH.into()];
            let driver = Driver { tags, answers: Vec::new(), is_stopping: false };
            Scene { driver, server: Requests::new(DEPTH), bios: Vec::new() }
        }

        /// A client asks for something, if there is a tag for it.
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

        /// A command with an answer comes to the driver.
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

        /// The server dies. The next one fetches, and is given again what was not answered.
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

        /// The driver wants no more: it takes idle tags back, the others when they are answered.
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
            let mut scene = Scene::new();
            for (step, nth) in steps {
                match step {
                    0..12 => scene.ask(),
                    12..24 => scene.begin(),
                    24..35 => scene.end(nth),
                    35 => scene.answer_at_once(),
                    36 | 37 => scene.kill(),
                    38 => scene.abandon(),
                    _ if nth == 0 => scene.stop(),
                    _ => {}
                }
                let here = scene.driver.tags.iter().flatten().count();
                prop_assert_eq!(scene.server.here(), here);
            }
            scene.stop();
            while scene.server.next().is_some() {
                scene.begin();
            }
            while !scene.bios.is_empty() {
                scene.end(0);
            }
            prop_assert!(scene.server.is_over());
            prop_assert!(scene.driver.answers.iter().all(|count| *count == 1));
        }
    }
}
