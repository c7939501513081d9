//! Every crash point: a driver and a server of a ring, step by step, and the server dies after each
//! of its stores to memory that outlives it. The driver goes on, the next server takes up what is
//! noted, and may die as well. Each request is answered once; what is done for it is done before
//! its answer, perhaps more than once, and in the order in which it was taken; none is lost.
//!
//! Deliberate bugs ([`Mutant`]) must all be found, or this is not good enough.

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::foreign::Foreign;

use super::super::inflight::Extent;
use super::super::proto::{Region, RingAddresses};
use super::super::steps::{self, Mutant};
use super::*;

const BYTES: u64 = 16 << 10;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const DATA: u64 = 0x3000;
const ENTRIES: u16 = 4;

/// What happens, in this order.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// The driver makes a request of this many descriptors available, if it has as many.
    Offer(u16),
    /// The server takes what is available.
    Fetch,
    /// The request that was taken so long ago is done, and is answered.
    Answer(usize),
    /// The driver sees the answers so far.
    Publish,
    /// The driver takes the answers that it sees.
    Pop,
    /// The server ends in order: it gives back what it has not done, as far as it is the newest.
    End,
}

use Step::{Answer, End, Fetch, Offer, Pop, Publish};

const PROGRAMS: [&[Step]; 5] = [
    &[Offer(1), Fetch, Answer(0), Publish, Pop, Offer(1), Fetch, Answer(0), Publish, Pop],
    // Out of order, in batches, over the end of the ring.
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
    // The first is the last.
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
    // All entries, and one request has all of them.
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

/// What the driver does after a death, before the next server comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    Pops,
    PopsAndOffers,
}

const MEANWHILE: [Meanwhile; 3] = [Meanwhile::Nothing, Meanwhile::Pops, Meanwhile::PopsAndOffers];

type Judged<T> = std::result::Result<T, String>;

/// What is wrong, as the result of a judgement.
fn wrong_because<T>(words: impl Into<String>) -> Judged<T> {
    Err(words.into())
}

/// Memory that outlives servers, its driver, and what it knows.
struct World {
    memory: Memory,
    /// The same, for the driver.
    shared: Foreign,
    notes: Notes,
    is_packed: bool,
    available: Cursor,
    used: Cursor,
    /// Descriptors that are free, or as many names.
    free: Vec<u16>,
    /// Requests without an answer: their numbers and descriptors, by their names.
    waiting: BTreeMap<u16, (u64, Vec<u16>)>,
    offered: u64,
    done: BTreeSet<u64>,
    answered: BTreeSet<u64>,
    /// Where a server ended in order.
    base: u32,
}

/// A server: what it has taken and not answered.
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

impl World {
    fn new(is_packed: bool) -> World {
        let file = memfd();
        let mut memory = Memory::default();
        memory.add(Region { guest: 0, len: BYTES, user: 0, offset: 0 }, &file).unwrap();
        let extent = Extent { bytes: 0, offset: 0, rings: 1, entries: ENTRIES, is_packed }.needed();
        let begin = Cursor { index: 0, is_odd: is_packed };
        World {
            memory,
            shared: Foreign::map(&file, 0, BYTES).unwrap(),
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
        // As QEMU does it: a split ring from its answers on, a packed one from where it was when
        // a server was asked last.
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

    /// The next answer's name, if there is one.
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
    fn fetch(&mut self, world: &World) -> Judged<()> {
        let mut chain = Chain::default();
        while !steps::is_dead() {
            let next = self.ring.peek(&world.memory, &mut chain);
            let next = next.map_err(|violation| format!("a ring is broken: {violation}"))?;
            let Some(id) = next else { return Ok(()) };
            if self.taken.iter().any(|(taken, _, _)| *taken == id) {
                return wrong_because(format!("{id} is taken twice"));
            }
            let place = self.ring.accept(id);
            let number = world.shared.u64_at(chain.readable[0].guest).load(Ordering::Relaxed);
            // What is given back comes again.
            if self.newest.is_some_and(|newest| newest > number) {
                return wrong_because(format!("request {number} is taken after a later one"));
            }
            self.newest = Some(number);
            self.taken.push((id, number, place));
        }
        Ok(())
    }

    fn answer(&mut self, world: &mut World, nth: usize) -> Judged<()> {
        if nth >= self.taken.len() {
            return Ok(());
        }
        let (id, number, _) = self.taken.remove(nth);
        if world.answered.contains(&number) {
            return wrong_because(format!("request {number} is done after its answer"));
        }
        world.done.insert(number);
        self.ring.answer(id, 1);
        Ok(())
    }

    fn end(&mut self, world: &mut World) -> Judged<()> {
        loop {
            let is_newest = |(id, _, place): &(u16, u64, Option<u16>)| {
                place.is_some_and(|place| self.ring.is_newest(*id, place))
            };
            let Some(at) = self.taken.iter().position(is_newest) else { break };
            let (id, _, _) = self.taken.remove(at);
            self.ring.give_back(id);
        }
        if !steps::is_dead() {
            world.base = self.ring.base();
            *self = world.serve()?;
        }
        Ok(())
    }

    fn step(&mut self, world: &mut World, step: Step) -> Judged<()> {
        match step {
            Offer(count) => world.offer(count),
            Fetch => self.fetch(world)?,
            Answer(nth) => self.answer(world, nth)?,
            Publish => self.ring.publish().map_err(|violation| violation.to_string())?,
            Pop => world.pop()?,
            End => self.end(world)?,
        }
        Ok(())
    }
}

/// Runs `program` with servers that live for this many steps, and then one that does not die.
/// Returns whether all of them died.
fn run(is_packed: bool, program: &[Step], lives: &[u64], meanwhile: Meanwhile) -> Judged<bool> {
    let mut world = World::new(is_packed);
    let mut steps_left = program.iter();
    let mut has_all_died = true;
    for life in lives {
        steps::lives_for(*life);
        let mut server = world.serve()?;
        // What an earlier one has left undone comes first.
        server.fetch(&world)?;
        while !steps::is_dead() {
            let Some(step) = steps_left.next() else { break };
            server.step(&mut world, *step)?;
        }
        has_all_died &= steps::is_dead();
        if meanwhile != Meanwhile::Nothing {
            world.pop()?;
        }
        if meanwhile == Meanwhile::PopsAndOffers {
            world.offer(1);
            world.offer(2);
        }
    }
    steps::lives_for(u64::MAX);
    let mut server = world.serve()?;
    let rest: Vec<Step> = steps_left.copied().chain([Fetch, Answer(0), Publish, Pop]).collect();
    server.fetch(&world)?;
    rest.iter().try_for_each(|step| server.step(&mut world, *step))?;
    for _ in 0..2 * ENTRIES {
        [Fetch, Answer(1), Answer(0), Publish, Pop]
            .iter()
            .try_for_each(|step| server.step(&mut world, *step))?;
    }
    if world.waiting.is_empty() {
        return Ok(has_all_died);
    }
    wrong_because(format!("never answered: {:?}", world.waiting))
}

/// All programs, and all moments in which one server dies, or two do. Returns how many there were.
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
                // The second one dies soon: while it takes up, or a little later.
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
