//! The role of a queue that serves one ring of a client.
//!
//! 1. What can be done now is done in one turn: finished bios are answered, new requests are taken,
//!    and the driver is called once for all of it. Then the thread sleeps until a kick, the end of
//!    an I/O or an order comes. It asks for kicks first, and looks once more. With polling it looks
//!    for a while ([`super::poll`]) before it does that.
//! 2. Kicks and calls are files that the client has given, and may be anything. Kicks are read only
//!    without waiting, calls are written by the ring: no client stops its thread.
//! 3. A request is in flight once, and is answered once. A ring on which something is wrong is not
//!    looked at again; the client's other rings go on, and so do other clients.
//! 4. A worker that ends answers what it has taken, as far as that comes back in time. The newest
//!    ones that did not come back it gives back: for the driver they are still to be taken.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::io::{Errno, IoSliceMut, ReadWriteFlags, preadv2};
use udm::bio::Bio;
use udm::buffer::{Buffer, BufferPool, CLIENT_POOL_BYTES_MAX};
use udm::device::{Device, Driver, InFlight, LATE_SECONDS};
use udm::error::Result;
use udm::queue::{Core, Queue, Role, Turn, now};
use udm::ring::Event;
use udm::sync::atomic::{AtomicBool, Ordering};
use udm::sync::{Arc, Mutex, lock};
use udm::units::{BIO_BYTES_MAX, Nanos, SECOND};

use crate::budget::{BUDGET, Share};

use super::chain::Chain;
use super::memory::Memory;
use super::poll::{GLANCES, Poller, glance};
use super::proto::{Violation, wrong};
use super::request::{
    Begun, Facts, HEADER_BYTES, ID_BYTES, Phase, Request, held_bytes, take_buffer,
};
use super::virtqueue::Virtqueue;

/// Bytes of a ring's requests in flight; one request may be more.
pub const HELD_BYTES_MAX: u64 = 16 << 20;
/// How long a worker that is stopped waits for requests.
const STOP_SECONDS_MAX: u64 = 20;
/// The same, if all of them wait for room or for resume.
const PARKED_SECONDS_MAX: u64 = 2;
/// Time between two checks for late requests, while any is in flight.
const LOOK_NS: Nanos = SECOND;
/// Glances at a ring while requests are with the device: the loop's rest, which answers them, has
/// its turn in less than a microsecond.
const GLANCES_BESIDE_IO: u32 = 16;
/// A driver that looks sees the first answers of a turn while the next requests are served: after
/// this many.
const SHOWN: u32 = 8;
/// Time between two tries to get memory that other clients hold.
const STARVED_LOOK_NS: Nanos = SECOND / 100;

/// Requests of a worker to its queue's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    Kick,
    Call,
    Report,
}

/// What a ring is served with. All of it may change while it is served.
#[derive(Clone, Debug)]
pub struct Orders {
    /// The client's memory.
    pub memory: Arc<Memory>,
    /// How the driver is called; without it, the driver looks by itself.
    pub call: Option<Arc<OwnedFd>>,
    /// Where it is reported that the ring is broken.
    pub err: Option<Arc<OwnedFd>>,
    /// Writes are durable when they are done.
    pub is_write_through: bool,
}

/// What others ask of a worker, and what is known of it.
#[derive(Debug)]
struct Desk {
    orders: Mutex<Orders>,
    has_changed: AtomicBool,
    outcome: Mutex<Outcome>,
}

/// A ring that is to be served.
#[derive(Debug)]
pub struct Served {
    /// The ring.
    pub ring: Virtqueue,
    /// How the driver says that there are requests.
    pub kick: Arc<OwnedFd>,
    /// How long the ring is looked at before that is waited for.
    pub poller: Poller,
}

/// What has become of a ring.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Where it is, once the worker has ended.
    pub base: u32,
    /// What is wrong with the ring.
    pub violation: Option<Violation>,
}

/// A worker, for the client that it serves. Dropping it ends it.
#[derive(Debug)]
pub struct Worker {
    desk: Arc<Desk>,
    queue: Queue,
}

impl Worker {
    /// Serves a ring. `broken` is called if something is wrong with it.
    pub fn start(
        name: &str,
        device: &Arc<Device>,
        served: Served,
        orders: Orders,
        broken: impl FnOnce(&Violation) + Send + 'static,
    ) -> Result<Worker> {
        let outcome = Outcome { base: served.ring.base(), violation: None };
        let desk = Arc::new(Desk {
            orders: Mutex::new(orders.clone()),
            has_changed: AtomicBool::new(false),
            outcome: Mutex::new(outcome),
        });
        let (for_role, device) = (desk.clone(), device.clone());
        let queue = Queue::run(name, move |core| {
            let mut driver = core.driver(&device)?;
            driver.pool().keep_at_most(CLIENT_POOL_BYTES_MAX);
            Ok(Serving::new(driver, served, orders, for_role, Box::new(broken)))
        })?;
        Ok(Worker { desk, queue })
    }

    /// Changes what the ring is served with, soon.
    pub fn order(&self, orders: Orders) {
        *lock(&self.desk.orders) = orders;
        self.desk.has_changed.store(true, Ordering::SeqCst);
        self.queue.wake();
    }

    /// Asks it to end, without waiting for that.
    pub fn stop(&self) {
        self.queue.stop();
    }

    /// Ends it, and waits for that.
    pub fn end(self) -> Outcome {
        drop(self.queue);
        lock(&self.desk.outcome).clone()
    }
}

/// The requests of a ring, by the driver's names for them.
#[derive(Debug)]
struct Requests {
    by_id: Vec<Request>,
    in_flight: usize,
    held_bytes: u64,
    has_late: bool,
}

/// Calls of the driver: at most one is on its way, and one more is remembered.
#[derive(Debug)]
struct Calls {
    buffer: Option<Buffer>,
    is_due: bool,
}

type Broken = Box<dyn FnOnce(&Violation) + Send>;

struct Serving {
    driver: Driver,
    ring: Virtqueue,
    requests: Requests,
    /// The request that is being taken.
    chain: Chain,
    poller: Poller,
    kick: Arc<OwnedFd>,
    is_kick_awaited: bool,
    calls: Calls,
    orders: Orders,
    facts: Facts,
    share: Share,
    desk: Arc<Desk>,
    violation: Option<Violation>,
    broken: Option<Broken>,
    is_err_due: bool,
    is_starved: bool,
    /// Requests wait for others of the ring.
    is_full: bool,
    look_at: Option<Nanos>,
    stopping_since: Option<Nanos>,
}

impl Serving {
    fn new(
        driver: Driver,
        served: Served,
        orders: Orders,
        desk: Arc<Desk>,
        broken: Broken,
    ) -> Serving {
        let mut id = [0; ID_BYTES];
        let name = driver.device().name();
        let len = name.len().min(ID_BYTES);
        id[..len].copy_from_slice(&name.as_bytes()[..len]);
        let Served { ring, kick, poller } = served;
        let by_id = (0..ring.entries()).map(|_| Request::default()).collect();
        Serving {
            driver,
            requests: Requests { by_id, in_flight: 0, held_bytes: 0, has_late: false },
            chain: Chain::default(),
            poller,
            kick,
            is_kick_awaited: false,
            // Whatever was done before this worker, the driver looks once.
            calls: Calls { buffer: Some(Buffer::from_bytes(&1_u64.to_le_bytes())), is_due: true },
            facts: Facts { id, is_write_through: orders.is_write_through },
            orders,
            share: Share::of(&BUDGET),
            desk,
            violation: None,
            broken: Some(broken),
            is_err_due: false,
            is_starved: false,
            is_full: false,
            look_at: None,
            stopping_since: None,
            ring,
        }
    }

    fn take_orders(&mut self) {
        if !self.desk.has_changed.swap(false, Ordering::SeqCst) {
            return;
        }
        self.orders = lock(&self.desk.orders).clone();
        self.facts.is_write_through = self.orders.is_write_through;
        // A call may have been lost on its way to the old file.
        self.calls.is_due = true;
        if self.violation.is_none() {
            let moved = self.ring.moved(&self.orders.memory);
            self.judge(moved);
        }
    }

    /// Ends the use of the ring if something is wrong with it.
    fn judge<T>(&mut self, result: std::result::Result<T, Violation>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(violation) => {
                if let Some(broken) = self.broken.take() {
                    broken(&violation);
                    self.is_err_due = true;
                }
                self.violation.get_or_insert(violation);
                None
            }
        }
    }

    /// Carries out what can be carried out, and answers what comes back.
    fn pump(&mut self, core: &mut Core<Asks>) -> bool {
        let mut result = Ok(());
        let (requests, ring) = (&mut self.requests, &mut self.ring);
        let memory = &self.orders.memory;
        let is_whole = self.violation.is_none();
        let finish = |mut bio: Bio, _: &mut VecDeque<Bio>, pool: &mut BufferPool| {
            if is_whole && result.is_ok() {
                let answer = requests.finish(&bio, memory);
                result = answer.map(|(id, written)| ring.answer(id, written));
            } else {
                requests.end(bio.token as u16);
            }
            pool.put(take_buffer(&mut bio));
        };
        let has_progress = self.driver.pump(core.ring_mut(), finish);
        self.share.shrink(self.requests.held_bytes as usize);
        self.judge(result);
        has_progress
    }

    /// Takes requests as long as there are some, and memory for them. Returns whether it took any.
    fn fetch(&mut self) -> std::result::Result<bool, Violation> {
        (self.is_starved, self.is_full) = (false, false);
        let mut count = 0;
        let memory = self.orders.memory.clone();
        // No more than a ring full, so that everything else has its turn.
        while count < u32::from(self.ring.entries())
            && let Some(id) = self.ring.peek(&memory, &mut self.chain)?
        {
            let bytes = held_bytes(&self.chain);
            // What is longer is refused, and held by nobody.
            let bytes = if bytes > BIO_BYTES_MAX + HEADER_BYTES { 0 } else { bytes };
            if !self.has_room_for(bytes) {
                break;
            }
            let request = &mut self.requests.by_id[usize::from(id)];
            if request.phase == Phase::InFlight {
                return wrong(format!("request {id} is available again while it is in flight"));
            }
            count += 1;
            std::mem::swap(&mut request.chain, &mut self.chain);
            request.place = self.ring.accept(id);
            match request.begin(&memory, &self.facts, &mut self.driver.intake(), id.into())? {
                Begun::Bio(bio) => {
                    self.requests.begin(id, bytes);
                    self.driver.submit(bio);
                    // Now its buffer is near, and good for the next one.
                    self.answer_done(&memory)?;
                }
                Begun::Done(written) => self.ring.answer(id, written),
            }
            if count % SHOWN == 0 {
                self.ring.publish()?;
            }
        }
        if count > 0 {
            self.ring.refuse_kicks();
        }
        Ok(count > 0)
    }

    /// Answers the bios that have come back.
    fn answer_done(&mut self, memory: &Memory) -> std::result::Result<(), Violation> {
        while let Some(mut bio) = self.driver.pop_done() {
            let answer = self.requests.finish(&bio, memory);
            self.driver.pool().put(take_buffer(&mut bio));
            let (id, written) = answer?;
            self.ring.answer(id, written);
        }
        Ok(())
    }

    /// Whether a request of this many bytes may be taken now.
    fn has_room_for(&mut self, bytes: u64) -> bool {
        let held = self.requests.held_bytes + bytes;
        if self.requests.in_flight > 0 && held > HELD_BYTES_MAX {
            self.is_full = true;
            return false;
        }
        self.is_starved = !self.share.grow(held as usize);
        !self.is_starved
    }

    /// Shows the driver what is done, and calls it if it wants that.
    fn answer(&mut self, core: &mut Core<Asks>) {
        if self.violation.is_none() {
            let published = self.ring.publish();
            if self.judge(published).is_some() && self.ring.needs_call() {
                self.calls.is_due = true;
            }
        }
        self.call(core);
    }

    fn call(&mut self, core: &mut Core<Asks>) {
        if self.calls.is_due
            && let Some(call) = &self.orders.call
            && let Some(buffer) = self.calls.buffer.take()
        {
            self.calls.is_due = false;
            core.desk().signal(call, buffer, Asks::Call);
        }
        if std::mem::take(&mut self.is_err_due)
            && let Some(err) = &self.orders.err
        {
            let one = Buffer::from_bytes(&1_u64.to_le_bytes());
            core.desk().signal(err, one, Asks::Report);
        }
    }

    /// Makes the next kick an event. Returns whether requests have come meanwhile.
    fn await_kick(&mut self, core: &mut Core<Asks>) -> bool {
        if self.violation.is_some() {
            return false;
        }
        let may_sleep = self.ring.may_sleep();
        if self.judge(may_sleep) != Some(true) {
            return true;
        }
        if !self.is_kick_awaited {
            self.is_kick_awaited = true;
            core.desk().poll_readable(&self.kick, Asks::Kick);
        }
        false
    }

    /// Looks at the ring for a moment, if that is to be done before sleeping.
    fn looks(&mut self) -> bool {
        if self.violation.is_some() || !self.poller.goes_on(now) {
            return false;
        }
        let is_calm = self.requests.in_flight == 0;
        // What is wrong is found in the next turn too.
        glance(if is_calm { GLANCES } else { GLANCES_BESIDE_IO }, || {
            self.ring.has_request().unwrap_or(true)
        });
        true
    }

    /// Clears the kick.
    fn was_kicked(&mut self) {
        self.is_kick_awaited = false;
        let mut count = [0; 8];
        let vectors = &mut [IoSliceMut::new(&mut count)];
        // At the file's own position, which an eventfd has not.
        let read = preadv2(&self.kick, vectors, u64::MAX, ReadWriteFlags::NOWAIT);
        let result = match read {
            Ok(8) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            _ => wrong("its kicks do not come through an eventfd"),
        };
        self.judge(result);
    }

    /// When to look for late requests, after having looked if it is time.
    fn look_for_late(&mut self, core: &Core<Asks>) -> Option<Nanos> {
        if self.requests.in_flight == 0 && !self.requests.has_late {
            self.look_at = None;
            return None;
        }
        let now = now();
        let look_at = *self.look_at.get_or_insert(now + LOOK_NS);
        if now >= look_at || self.requests.in_flight == 0 {
            self.look_at = Some(now + LOOK_NS);
            if let Some(late) = self.requests.late(now) {
                self.driver.tell_late(&late, core.ring());
            }
        }
        self.look_at
    }

    /// Whether a worker that is to end may; else until when it waits.
    fn stop_deadline(&mut self) -> Option<Nanos> {
        let since = *self.stopping_since.get_or_insert_with(now);
        let is_parked = self.driver.is_all_parked();
        let seconds = if is_parked { PARKED_SECONDS_MAX } else { STOP_SECONDS_MAX };
        let deadline = since + seconds * SECOND;
        (self.requests.in_flight > 0 && now() < deadline).then_some(deadline)
    }

    /// Gives back the newest requests that were not answered.
    fn give_back(&mut self) {
        let newest = |this: &Serving| {
            let mut requests = this.requests.by_id.iter().enumerate();
            requests.find_map(|(id, request)| {
                let is_in_flight = request.phase == Phase::InFlight;
                let place = request.place.filter(|_| is_in_flight)?;
                this.ring.is_newest(id as u16, place).then_some(id as u16)
            })
        };
        while let Some(id) = newest(self) {
            self.requests.end(id);
            self.ring.give_back(id);
        }
    }
}

impl Requests {
    fn begin(&mut self, id: u16, bytes: u64) {
        let request = &mut self.by_id[usize::from(id)];
        request.phase = Phase::InFlight;
        request.held_bytes = bytes;
        (request.seen, request.is_late) = (None, false);
        self.in_flight += 1;
        self.held_bytes += bytes;
    }

    /// A bio has come back: the request's name, and how many bytes the driver finds.
    fn finish(&mut self, bio: &Bio, memory: &Memory) -> std::result::Result<(u16, u32), Violation> {
        let id = bio.token as u16;
        Ok((id, self.end(id).finish(bio, memory)?))
    }

    fn end(&mut self, id: u16) -> &Request {
        let request = &mut self.by_id[usize::from(id)];
        assert_eq!(request.phase, Phase::InFlight, "each bio comes back once");
        request.phase = Phase::Away;
        self.in_flight -= 1;
        self.held_bytes -= request.held_bytes;
        request
    }

    /// Late requests, if there are some or were at the last look.
    fn late(&mut self, now: Nanos) -> Option<Vec<InFlight>> {
        let mut late = Vec::new();
        for (token, request) in self.by_id.iter_mut().enumerate() {
            let (Phase::InFlight, Some((op, offset, len))) = (request.phase, request.what) else {
                continue;
            };
            let age = now - *request.seen.get_or_insert(now);
            if age >= LATE_SECONDS * SECOND {
                let is_new = !std::mem::replace(&mut request.is_late, true);
                late.push(InFlight { token: token as u64, op, offset, len, age, is_new });
            }
        }
        let had_late = std::mem::replace(&mut self.has_late, !late.is_empty());
        (had_late || self.has_late).then_some(late)
    }
}

impl Role for Serving {
    type Tag = Asks;

    fn event(&mut self, event: Event<Asks>, core: &mut Core<Asks>) {
        match event.tag {
            Asks::Kick => self.was_kicked(),
            Asks::Call => {
                self.calls.buffer = Some(event.buffer);
                self.call(core);
            }
            Asks::Report => {}
        }
    }

    fn turn(&mut self, core: &mut Core<Asks>, is_stopping: bool) -> Turn {
        self.take_orders();
        let mut has_progress = self.pump(core);
        if !is_stopping && self.violation.is_none() {
            let fetched = self.fetch();
            has_progress |= self.judge(fetched).unwrap_or(true);
            has_progress |= self.pump(core);
        }
        if has_progress {
            self.answer(core);
            self.poller.found(now);
        }
        self.call(core);
        let mut deadline = self.look_for_late(core);
        if is_stopping {
            match self.stop_deadline() {
                Some(stop) => deadline = deadline.into_iter().chain([stop]).min(),
                None => return Turn::Over,
            }
        } else if self.is_starved {
            deadline = Some(now() + STARVED_LOOK_NS);
        } else if self.is_full {
            // What is in flight ends as an event, unless it has ended in this turn.
            if has_progress {
                core.ring_mut().submit();
                return Turn::Again;
            }
        } else if self.looks() || self.await_kick(core) {
            core.ring_mut().submit();
            return Turn::Again;
        }
        Turn::Idle(deadline)
    }

    fn leave(mut self, core: &mut Core<Asks>) {
        self.driver.tell_late(&[], core.ring());
        self.give_back();
        let outcome = Outcome { base: self.ring.base(), violation: self.violation.take() };
        *lock(&self.desk.outcome) = outcome;
        // The last call is on its way before the thread ends.
        core.ring_mut().submit();
        core.leave(self.driver);
    }
}
