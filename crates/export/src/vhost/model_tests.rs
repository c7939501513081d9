//! Every crash point of a ring: a driver and a server run step by step, and the server dies after
//! each of its stores to memory that outlives it. The driver continues, and the next server
//! recovers the log and may die as well. The checks: each request is answered exactly once; its
//! work is done before its answer, at least once, and in the order of taking; no request is lost.
//!
//! The test must find all deliberate bugs ([`Mutant`]).

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::pmem::client_memory::ClientMemory;

use super::super::inflight::Extent;
use super::super::proto::{Region, RingAddresses};
use super::super::steps::{self, Mutant};
use super::*;

const BYTES: u64 = 16 << 10;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const DATA: u64 = 0x3000;
const ENTRIES: u16 = 4;

/// A step of a program.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// The driver makes a request of this many descriptors available, if it has enough.
    Offer(u16),
    /// The server takes the available requests.
    Fetch,
    /// The server carries out and answers the request at this position among the taken ones.
    Answer(usize),
    /// The server publishes the answers so far.
    Publish,
    /// The driver takes the published answers.
    Pop,
    /// The server ends in order: it gives back the newest requests that it has not carried out.
    End,
}

use Step::{Answer, End, Fetch, Offer, Pop, Publish};

const PROGRAMS: [&[Step]; 5] = [
    &[Offer(1), Fetch, Answer(0), Publish, Pop, Offer(1), Fetch, Answer(0), Publish, Pop],
    // Out of order, in batches, across the end of the ring.
    &[
        Offer(1),
        Offer(2),
        Offer(1),
        Fetch,
        Answer(2),
        Answer(0),
        Publish,
        Pop,
        Offer(2),
        Fetch,
        Answer(1),
        Publish,
        Pop,
        Offer(1),
        Fetch,
        Answer(0),
        Answer(0),
        Publish,
        Pop,
        Offer(2),
    ],
    // The first request is answered last.
    &[
        Offer(1),
        Offer(1),
        Fetch,
        Answer(1),
        Publish,
        Pop,
        Offer(1),
        Fetch,
        Answer(1),
        Publish,
        Pop,
        Offer(1),
        Fetch,
        Answer(1),
        Publish,
        Pop,
        Offer(1),
        Fetch,
        Answer(1),
        Answer(0),
        Publish,
        Pop,
    ],
    // All entries, and a request that takes all of them.
    &[
        Offer(4),
        Fetch,
        Answer(0),
        Publish,
        Pop,
        Offer(1),
        Offer(1),
        Offer(1),
        Offer(1),
        Fetch,
        Answer(3),
        Answer(2),
        Answer(1),
        Answer(0),
        Publish,
        Pop,
        Offer(4),
        Fetch,
    ],
    // Servers that end in order.
    &[
        Offer(1),
        Offer(1),
        Offer(2),
        Fetch,
        Answer(0),
        Publish,
        End,
        Fetch,
        Answer(1),
        Publish,
        Pop,
        Offer(1),
        End,
        Fetch,
        Answer(0),
        Pop,
        Publish,
        End,
        Offer(1),
        Fetch,
    ],
];

/// The driver's action between a death and the next server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    Pops,
    PopsAndOffers,
}

const MEANWHILE: [Meanwhile; 3] = [Meanwhile::Nothing, Meanwhile::Pops, Meanwhile::PopsAndOffers];

type Judged<T> = std::result::Result<T, String>;

/// Returns an error, as the result of a check.
fn wrong_because<T>(words: impl Into<String>) -> Judged<T> {
    Err(words.into())
}

/// Memory that outlives servers, its driver, and the driver's state.
struct Fixture {
    memory: Memory,
    /// The driver's view of the memory.
    shared: ClientMemory,
    notes: Notes,
    is_packed: bool,
    available: Cursor,
    used: Cursor,
    /// Free descriptors (split) or ids (packed).
    free: Vec<u16>,
    /// Unanswered requests: their numbers and descriptors, by id.
    waiting: BTreeMap<u16, (u64, Vec<u16>)>,
    offered: u64,
    done: BTreeSet<u64>,
    answered: BTreeSet<u64>,
    /// The base at which a server ended in order.
    base: u32,
}

/// A server, with its taken and unanswered requests.
struct Server {
    ring: Virtqueue,
    taken: Vec<(u16, u64, Option<u16>)>,
    newest: Option<u64>,
}

fn memfd() -> OwnedFd {
    let file = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES).unwrap();
    file
}

impl Fixture {
    fn new(is_packed: bool) -> Fixture {
        let file = memfd();
        let mut memory = Memory::default();
        memory.add(Region { guest: 0, len: BYTES, user: 0, offset: 0 }, &file).unwrap();
        let extent = Extent { bytes: 0, offset: 0, rings: 1, entries: ENTRIES, is_packed }.needed();
        let begin = Cursor { index: 0, is_odd: is_packed };
        Fixture {
            memory,
            shared: ClientMemory::map(&file, 0, BYTES).unwrap(),
            notes: Notes::map(&extent.make().unwrap(), extent).unwrap(),
            is_packed,
            available: begin,
            used: begin,
            free: (0..ENTRIES).rev().collect(),
            waiting: BTreeMap::new(),
            offered: 0,
            done: BTreeSet::new(),
            answered: BTreeSet::new(),
            base: packed::base(begin, begin),
        }
    }

    fn serve(&self) -> Judged<Server> {
        let addresses = RingAddresses { descriptors: 0, used: USED, available: AVAILABLE };
        let features = if self.is_packed { feature::RING_PACKED } else { 0 };
        let shape = Shape { entries: ENTRIES, addresses, features };
        // Like QEMU: a split ring starts at its used index, a packed one at the base that the last
        // server reported.
        let base = if self.is_packed { self.base } else { self.used.index.into() };
        let ring = Virtqueue::open(shape, &self.memory, base, Some(&self.notes), 0);
        let ring = ring.map_err(|violation| format!("a server refuses: {violation}"))?;
        Ok(Server { ring, taken: Vec::new(), newest: None })
    }

    fn put(&self, at: u64, id: u16, last_words: [u16; 2]) {
        self.shared.u64_at(at).store(DATA + u64::from(id) * 8, Ordering::Relaxed);
        self.shared.u32_at(at + 8).store(8, Ordering::Relaxed);
        self.shared.u16_at(at + 12).store(last_words[0], Ordering::Relaxed);
        self.shared.u16_at(at + 14).store(last_words[1], Ordering::Release);
    }

    fn offer(&mut self, count: u16) {
        if self.free.len() < usize::from(count) {
            return;
        }
        let chain = self.free.split_off(self.free.len() - usize::from(count));
        let (id, number) = (chain[0], self.offered);
        self.offered += 1;
        self.shared.u64_at(DATA + u64::from(id) * 8).store(number, Ordering::Relaxed);
        for (nth, descriptor) in chain.iter().enumerate() {
            let next = chain.get(nth + 1);
            let flags = u16::from(next.is_some());
            if self.is_packed {
                let owner = if self.available.is_odd { 1 << 7 } else { 1 << 15 };
                self.put(u64::from(self.available.index) * 16, id, [id, flags | owner]);
                self.available = self.available.after(1, ENTRIES);
            } else {
                let next = next.copied().unwrap_or(0);
                self.put(u64::from(*descriptor) * 16, id, [flags, next]);
            }
        }
        if !self.is_packed {
            let count = self.available.index;
            let entry = AVAILABLE + 4 + u64::from(count % ENTRIES) * 2;
            self.shared.u16_at(entry).store(id, Ordering::Relaxed);
            self.available.index = count.wrapping_add(1);
            self.shared.u16_at(AVAILABLE + 2).store(self.available.index, Ordering::Release);
        }
        fence(Ordering::SeqCst);
        self.waiting.insert(id, (number, chain));
    }

    /// Returns the next answer's id, if there is one.
    fn next_answer(&self) -> Option<u16> {
        if !self.is_packed {
            let count = self.shared.u16_at(USED + 2).load(Ordering::Acquire);
            let entry = USED + 4 + u64::from(self.used.index % ENTRIES) * 8;
            let is_there = count != self.used.index;
            return is_there.then(|| self.shared.u32_at(entry).load(Ordering::Relaxed) as u16);
        }
        let at = u64::from(self.used.index) * 16;
        let flags = self.shared.u16_at(at + 14).load(Ordering::Acquire);
        let (is_available, is_used) = (flags & 1 << 7 != 0, flags & 1 << 15 != 0);
        let is_there = is_available == self.used.is_odd && is_used == self.used.is_odd;
        is_there.then(|| self.shared.u16_at(at + 12).load(Ordering::Relaxed))
    }

    fn pop(&mut self) -> Judged<()> {
        while let Some(id) = self.next_answer() {
            let Some((number, chain)) = self.waiting.remove(&id) else {
                return wrong_because(format!("an answer to {id}, which was not asked"));
            };
            if !self.done.contains(&number) {
                return wrong_because(format!("request {number} is answered, and was not done"));
            }
            self.answered.insert(number);
            self.used = if self.is_packed {
                self.used.after(chain.len() as u16, ENTRIES)
            } else {
                Cursor { index: self.used.index.wrapping_add(1), ..self.used }
            };
            self.free.extend(chain);
        }
        Ok(())
    }
}

impl Server {
    fn fetch(&mut self, fixture: &Fixture) -> Judged<()> {
        let mut chain = Chain::default();
        while !steps::is_dead() {
            let next = self.ring.peek(&fixture.memory, &mut chain);
            let next = next.map_err(|violation| format!("a ring is broken: {violation}"))?;
            let Some(id) = next else { return Ok(()) };
            if self.taken.iter().any(|(taken, _, _)| *taken == id) {
                return wrong_because(format!("{id} is taken twice"));
            }
            let place = self.ring.accept(id);
            let number = fixture.shared.u64_at(chain.readable[0].guest).load(Ordering::Relaxed);
            // Requests that were given back are taken again.
            if self.newest.is_some_and(|newest| newest > number) {
                return wrong_because(format!("request {number} is taken after a later one"));
            }
            self.newest = Some(number);
            self.taken.push((id, number, place));
        }
        Ok(())
    }

    fn answer(&mut self, fixture: &mut Fixture, nth: usize) -> Judged<()> {
        if nth >= self.taken.len() {
            return Ok(());
        }
        let (id, number, _) = self.taken.remove(nth);
        if fixture.answered.contains(&number) {
            return wrong_because(format!("request {number} is done after its answer"));
        }
        fixture.done.insert(number);
        self.ring.answer(id, 1);
        Ok(())
    }

    fn end(&mut self, fixture: &mut Fixture) -> Judged<()> {
        loop {
            let is_newest = |(id, _, place): &(u16, u64, Option<u16>)| {
                place.is_some_and(|place| self.ring.is_newest(*id, place))
            };
            let Some(at) = self.taken.iter().position(is_newest) else { break };
            let (id, _, _) = self.taken.remove(at);
            self.ring.give_back(id);
        }
        if !steps::is_dead() {
            fixture.base = self.ring.base();
            *self = fixture.serve()?;
        }
        Ok(())
    }

    fn step(&mut self, fixture: &mut Fixture, step: Step) -> Judged<()> {
        match step {
            Offer(count) => fixture.offer(count),
            Fetch => self.fetch(fixture)?,
            Answer(nth) => self.answer(fixture, nth)?,
            Publish => self.ring.publish().map_err(|violation| violation.to_string())?,
            Pop => fixture.pop()?,
            End => self.end(fixture)?,
        }
        Ok(())
    }
}

/// Runs `program` with servers that live for these numbers of steps, and then one that does not
/// die. Returns whether all of them died.
fn run(is_packed: bool, program: &[Step], lives: &[u64], meanwhile: Meanwhile) -> Judged<bool> {
    let mut fixture = Fixture::new(is_packed);
    let mut steps_left = program.iter();
    let mut has_all_died = true;
    for life in lives {
        steps::lives_for(*life);
        let mut server = fixture.serve()?;
        // The requests of an earlier server come first.
        server.fetch(&fixture)?;
        while !steps::is_dead() {
            let Some(step) = steps_left.next() else { break };
            server.step(&mut fixture, *step)?;
        }
        has_all_died &= steps::is_dead();
        if meanwhile != Meanwhile::Nothing {
            fixture.pop()?;
        }
        if meanwhile == Meanwhile::PopsAndOffers {
            fixture.offer(1);
            fixture.offer(2);
        }
    }
    steps::lives_for(u64::MAX);
    let mut server = fixture.serve()?;
    let rest: Vec<Step> = steps_left.copied().chain([Fetch, Answer(0), Publish, Pop]).collect();
    server.fetch(&fixture)?;
    rest.iter().try_for_each(|step| server.step(&mut fixture, *step))?;
    for _ in 0..2 * ENTRIES {
        [Fetch, Answer(1), Answer(0), Publish, Pop]
            .iter()
            .try_for_each(|step| server.step(&mut fixture, *step))?;
    }
    if fixture.waiting.is_empty() {
        return Ok(has_all_died);
    }
    wrong_because(format!("never answered: {:?}", fixture.waiting))
}

/// Runs all programs, with all moments at which one server dies, or two do. Returns the number of
/// runs.
fn explore(is_packed: bool, has_two: bool) -> Judged<u64> {
    let mut count = 0;
    for (nth, program) in PROGRAMS.iter().enumerate() {
        for meanwhile in MEANWHILE {
            let mut judge = |lives: &[u64]| {
                count += 1;
                let judged = run(is_packed, program, lives, meanwhile);
                judged.map_err(|said| format!("program {nth}, {lives:?}, {meanwhile:?}: {said}"))
            };
            for first in 0.. {
                if !judge(&[first])? {
                    break;
                }
                // The second server dies soon: during recovery or shortly after it.
                for second in 0..if has_two { 40 } else { 0 } {
                    judge(&[first, second])?;
                }
            }
        }
    }
    Ok(count)
}

#[test]
fn each_request_is_answered_once_wherever_servers_die() {
    for is_packed in [false, true] {
        let count = explore(is_packed, true).unwrap_or_else(|said| panic!("{said}"));
        println!("{count} deaths, packed: {is_packed}");
        assert!(count > 5000, "{count} deaths are not all");
    }
}

#[test]
fn deliberate_bugs_are_found() {
    for (mutant, is_packed) in Mutant::ALL {
        steps::set_mutant(Some(mutant));
        let found = explore(is_packed, true);
        steps::set_mutant(None);
        println!("{mutant:?}: {found:?}");
        assert!(found.is_err(), "{mutant:?} is not found");
    }
}
