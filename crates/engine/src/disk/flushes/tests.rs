//! Flushes against a model: a page cache that loses pages and reports that once, and rings that
//! write and flush, driven by a seed.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::prng::Prng;
use crate::sync::Arc;

/// A flush of a ring: the ring, and how many of its writes had ended when it was requested.
type Asked = (usize, usize);

/// A write: whether it has ended, and whether it is lost and its ring did not get an error yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    InFlight,
    /// The same; a part of it is lost. An error that the ring gets meanwhile is not about it.
    InFlightLost,
    Dirty,
    Durable,
    Lost,
}

impl Page {
    fn is_in_flight(self) -> bool {
        matches!(self, Page::InFlight | Page::InFlightLost)
    }
}

struct Fixture {
    flushes: Flushes<Asked>,
    lives: Vec<Arc<()>>,
    /// All writes of each ring.
    pages: Vec<Vec<Page>>,
    /// For each ring, the beginnings of its writes in flight.
    begun: Vec<VecDeque<u64>>,
    /// Calls to the kernel that have not ended: the leader of each, and how many writes of each
    /// ring it covers.
    calls: Vec<(Asked, Vec<usize>)>,
    /// The kernel owes the next call an error.
    is_unreported: bool,
    /// Whether flushes get the error of a failed write-out; if not, only the write-out gets it.
    says_to_flushes: bool,
    /// Flushes of each ring that have not been answered.
    open: Vec<usize>,
    /// How many flushes of each ring may get an error, and how many did.
    may_hear: Vec<usize>,
    told: Vec<usize>,
    wrong: Option<String>,
    prng: Prng,
}

impl Fixture {
    fn new(rings: usize, says_to_flushes: bool, seed: u64) -> Fixture {
        Fixture {
            flushes: Flushes::default(),
            lives: (0..rings).map(|_| Arc::default()).collect(),
            pages: vec![Vec::new(); rings],
            begun: vec![VecDeque::new(); rings],
            calls: Vec::new(),
            is_unreported: false,
            says_to_flushes,
            open: vec![0; rings],
            may_hear: vec![0; rings],
            told: vec![0; rings],
            wrong: None,
            prng: Prng::new(seed),
        }
    }

    fn step(&mut self) {
        let ring = self.prng.below(self.lives.len() as u64) as usize;
        match self.prng.below(10) {
            0..3 => {
                let life = Arc::downgrade(&self.lives[ring]);
                let begun = self.flushes.pending_errors.begin_write(ring as u64, || life);
                self.begun[ring].push_back(begun);
                self.pages[ring].push(Page::InFlight);
            }
            3..6 => self.end_write(ring),
            6 | 7 => self.ask(ring),
            8 => self.end_call(),
            _ => self.write_out(),
        }
    }

    fn end_write(&mut self, ring: usize) {
        let Some(page) = self.pages[ring].iter_mut().find(|page| page.is_in_flight()) else {
            return;
        };
        *page = if *page == Page::InFlight { Page::Dirty } else { Page::Lost };
        let begun = self.begun[ring].pop_front().expect("it began");
        self.flushes.pending_errors.end_write(ring as u64, begun);
    }

    fn ask(&mut self, ring: usize) {
        self.open[ring] += 1;
        let asked = (ring, ended_of(&self.pages[ring]));
        match self.flushes.try_lead(ring as u64) {
            true => self.begin_call(asked),
            false => self.flushes.wait(ring as u64, asked),
        }
    }

    fn begin_call(&mut self, led: Asked) {
        self.calls.push((led, self.pages.iter().map(|pages| ended_of(pages)).collect()));
    }

    /// Some dirty page reaches the device, or is lost.
    fn write_out(&mut self) {
        let ring = self.prng.below(self.lives.len() as u64) as usize;
        let wanted = if self.prng.one_in(4) { Page::InFlight } else { Page::Dirty };
        let Some(page) = self.pages[ring].iter_mut().find(|page| **page == wanted) else {
            return;
        };
        let is_lost = self.prng.one_in(4);
        *page = match (wanted, is_lost) {
            (Page::InFlight, true) => Page::InFlightLost,
            (Page::InFlight, false) => Page::InFlight,
            (_, true) => Page::Lost,
            (_, false) => Page::Durable,
        };
        if !is_lost {
            return;
        }
        match self.says_to_flushes {
            true => self.is_unreported = true,
            false => {
                self.note_failure();
                self.flushes.write_out_failed(self.lives.len() as u64);
            }
        }
    }

    /// Each requested flush may get the error, and so may the next one of each ring, and the one
    /// after each write that is in flight.
    fn note_failure(&mut self) {
        for (ring, may_hear) in self.may_hear.iter_mut().enumerate() {
            *may_hear += self.open[ring] + 1 + self.begun[ring].len();
        }
    }

    /// One of the kernel's calls has written out all pages that were dirty when it began, and ends.
    fn end_call(&mut self) {
        if self.calls.is_empty() {
            return;
        }
        let nth = self.prng.below(self.calls.len() as u64) as usize;
        let (led, covered) = self.calls.remove(nth);
        let mut is_lost = false;
        for (pages, covered) in self.pages.iter_mut().zip(covered) {
            for page in pages[..covered].iter_mut().filter(|page| **page == Page::Dirty) {
                let fails = self.prng.one_in(16);
                *page = if fails { Page::Lost } else { Page::Durable };
                is_lost |= fails;
            }
            for page in pages.iter_mut().filter(|page| **page == Page::InFlight) {
                if self.prng.one_in(16) {
                    *page = Page::InFlightLost;
                    is_lost = true;
                }
            }
        }
        let is_good = !(std::mem::take(&mut self.is_unreported) || is_lost);
        if !is_good {
            self.note_failure();
        }
        let result = if is_good { Ok(()) } else { Err(Status::Io) };
        let ended = self.flushes.ended(result, self.lives.len() as u64);
        self.answer(led, ended.own);
        ended.others.into_iter().for_each(|(asked, result)| self.answer(asked, result));
        ended.leader.into_iter().for_each(|led| self.begin_call(led));
    }

    fn answer(&mut self, (ring, writes): Asked, result: Result<(), Status>) {
        self.open[ring] -= 1;
        let lost = self.pages[ring].iter_mut().filter(|page| **page == Page::Lost);
        if result.is_err() {
            self.told[ring] += 1;
            return lost.for_each(|page| *page = Page::Durable);
        }
        if self.pages[ring][..writes].iter().any(|page| *page != Page::Durable) {
            self.wrong = Some(format!("ring {ring} believes in {writes} writes"));
        }
    }

    /// The failure after many steps, if there is one.
    fn run(mut self) -> Option<String> {
        for _ in 0..400 {
            self.step();
            self.wrong = self.wrong.take().or_else(|| {
                (self.calls.len() > 1).then(|| "two flushes at the same time".to_owned())
            });
            if self.wrong.is_some() {
                return self.wrong;
            }
        }
        // A last flush of each ring ends, and all requests get their results.
        for ring in 0..self.lives.len() {
            while !self.begun[ring].is_empty() {
                self.end_write(ring);
            }
            self.ask(ring);
        }
        while !self.calls.is_empty() {
            self.end_call();
        }
        let is_over = self.flushes.waiting.is_empty() && self.flushes.under_way.is_none();
        self.wrong = self.wrong.take().or_else(|| (!is_over).then(|| "someone waits".to_owned()));
        self.wrong.or_else(|| {
            let is_too_often = self.told.iter().zip(&self.may_hear).any(|(told, may)| told > may);
            is_too_often.then(|| format!("{:?} hear, and {:?} may", self.told, self.may_hear))
        })
    }
}

/// How many writes have ended. They end in their order here.
fn ended_of(pages: &[Page]) -> usize {
    pages.iter().filter(|page| !page.is_in_flight()).count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn no_ring_believes_in_what_is_lost(
        rings in 1_usize..5,
        says_to_flushes in any::<bool>(),
        seed in any::<u64>(),
    ) {
        prop_assert_eq!(Fixture::new(rings, says_to_flushes, seed).run(), None);
    }
}

/// Many flushes of one ring wait, and all of them get the same error. An earlier model counted them
/// as too many errors.
#[test]
fn many_flushes_of_one_ring_may_hear_of_one_failure() {
    assert_eq!(Fixture::new(1, false, 7786062775815785900).run(), None);
}

#[cfg(feature = "mutants")]
#[test]
fn the_model_finds_deliberate_bugs() {
    for mutant in Mutant::FLUSHES {
        crate::mutants::set(Some(*mutant));
        let is_found = (0..400).any(|seed| Fixture::new(4, seed % 2 == 0, seed).run().is_some());
        crate::mutants::set(None);
        assert!(is_found, "{mutant:?}");
    }
}

/// Writes of rings that are all there.
struct Plain {
    flushes: Flushes<u64>,
    life: Arc<()>,
}

impl Plain {
    fn new() -> Plain {
        Plain { flushes: Flushes::default(), life: Arc::default() }
    }

    fn write(&mut self, ring: u64) {
        let begun = self.begin_write(ring);
        self.flushes.pending_errors.end_write(ring, begun);
    }

    fn begin_write(&mut self, ring: u64) -> u64 {
        self.flushes.pending_errors.begin_write(ring, || Arc::downgrade(&self.life))
    }

    fn flush(&mut self, ring: u64, result: Result<(), Status>) -> Result<(), Status> {
        assert!(self.flushes.try_lead(ring));
        let Ended { own, others, leader } = self.flushes.ended(result, 100);
        assert!(others.is_empty() && leader.is_none());
        own
    }
}

const FAILED: Result<(), Status> = Err(Status::NoSpace);

#[test]
fn a_failure_is_said_once_to_each_ring_with_unflushed_writes_and_to_no_other() {
    let mut plain = Plain::new();
    plain.write(3);
    assert_eq!(plain.flush(9, Ok(())), Ok(()));
    plain.write(1);
    plain.write(2);
    assert!(!plain.flushes.pending_errors.has_any());
    assert_eq!(plain.flush(1, FAILED), FAILED);
    assert!(plain.flushes.pending_errors.has_any());
    assert_eq!(plain.flush(1, Ok(())), Ok(()), "it got the error");
    assert_eq!(plain.flush(3, Ok(())), Ok(()), "its writes were flushed before");
    assert_eq!(plain.flush(4, Ok(())), Ok(()), "it has not written");
    assert_eq!(plain.flush(2, Ok(())), Err(Status::Io), "a good flush does not cover lost data");
    assert_eq!(plain.flush(2, Ok(())), Ok(()));
    assert!(!plain.flushes.pending_errors.has_any());
    // The next failure is about later writes.
    plain.write(2);
    assert_eq!(plain.flush(2, FAILED), FAILED);
    assert_eq!(plain.flush(1, Ok(())), Ok(()));
}

#[test]
fn a_second_failure_does_not_erase_the_first() {
    let mut plain = Plain::new();
    plain.write(1);
    plain.write(2);
    assert_eq!(plain.flush(2, FAILED), FAILED);
    // The writes of the first ring count as flushed now, and are still lost.
    assert_eq!(plain.flush(2, Ok(())), Ok(()));
    plain.write(2);
    plain.flushes.write_out_failed(100);
    assert_eq!(plain.flushes.pending_errors.losses(), 2);
    for ring in [1, 2] {
        assert_eq!(plain.flush(ring, Ok(())), Err(Status::Io), "ring {ring}");
        assert_eq!(plain.flush(ring, Ok(())), Ok(()), "ring {ring}");
    }
}

/// A long write may lose its first pieces to a failure that is answered before its last one ends.
#[test]
fn an_error_before_the_end_of_a_write_is_not_about_that_write() {
    let mut plain = Plain::new();
    let begun = plain.begin_write(1);
    assert_eq!(plain.flush(1, FAILED), FAILED);
    assert_eq!(plain.flush(1, Ok(())), Ok(()), "nothing was acknowledged since");
    let losses = plain.flushes.pending_errors.losses();
    assert!(plain.flushes.pending_errors.end_write(1, begun));
    assert_eq!(plain.flushes.pending_errors.losses(), losses + 1, "other rings' clients get it");
    assert_eq!(plain.flush(1, Ok(())), Err(Status::Io));
    assert_eq!(plain.flush(1, Ok(())), Ok(()));
    plain.write(1);
    assert_eq!(plain.flush(1, Ok(())), Ok(()));
}

#[test]
fn who_asks_while_a_flush_fails_hears_of_it_and_others_share_the_next() {
    let mut flushes = Flushes::default();
    assert!(flushes.try_lead(1));
    for ring in [2, 3, 4] {
        assert!(!flushes.try_lead(ring));
        flushes.wait(ring, ring);
    }
    let ended = flushes.ended(Ok(()), 9);
    assert_eq!((ended.own, ended.others, ended.leader), (Ok(()), vec![], Some(2)));
    assert!(!flushes.try_lead(5));
    flushes.wait(5, 5);
    let ended = flushes.ended(FAILED, 9);
    assert_eq!(ended.own, FAILED);
    assert_eq!(ended.others, [(3, FAILED), (4, FAILED), (5, FAILED)]);
    assert_eq!(ended.leader, None);
    assert!(flushes.try_lead(6));
    assert_eq!(flushes.ended(Ok(()), 9).own, Ok(()));
}

#[test]
fn a_ring_that_comes_later_hears_what_a_ring_that_is_gone_should_have_heard() {
    let mut plain = Plain::new();
    plain.write(1);
    plain.write(2);
    plain.life = Arc::default();
    assert_eq!(plain.flush(7, FAILED), FAILED);
    assert_eq!(plain.flush(8, Ok(())), Ok(()), "it was there when it failed");
    assert_eq!(plain.flush(101, Ok(())), Err(Status::Io));
    assert_eq!(plain.flush(102, Ok(())), Ok(()), "one for all that are gone");
    assert!(!plain.flushes.pending_errors.has_any());
}

/// A later failure that loses no data does not replace the pending error of a closed ring.
#[test]
fn a_failure_without_a_loss_does_not_erase_what_a_ring_that_is_gone_should_have_heard() {
    let mut plain = Plain::new();
    plain.write(1);
    plain.life = Arc::default();
    assert_eq!(plain.flush(7, FAILED), FAILED);
    assert_eq!(plain.flush(8, Ok(())), Ok(()));
    assert_eq!(plain.flush(8, FAILED), FAILED);
    assert_eq!(plain.flush(101, Ok(())), Err(Status::Io));
    assert_eq!(plain.flush(102, Ok(())), Ok(()));
}

#[test]
fn rings_that_are_gone_take_no_memory() {
    let mut plain = Plain::new();
    for ring in 0..10_000 {
        plain.life = Arc::default();
        plain.write(ring);
    }
    let rings = plain.flushes.pending_errors.rings();
    assert!(rings < 200, "{rings}");
    assert_eq!(plain.flush(20_000, FAILED), FAILED);
    assert_eq!(plain.flush(20_001, Ok(())), Err(Status::Io));
}
