//! The role of a queue that serves one ring of a client.
//!
//! 1. One turn does all available work: it answers finished bios, takes new requests, and calls the
//!    driver once for all answers. Then the thread sleeps until a kick, a finished I/O or an order
//!    arrives. Before it sleeps, it asks for kicks and checks the ring once more. With busy
//!    polling, it first polls for a while ([`super::poll`]).
//! 2. Kicks and calls are files of the client, of any kind. Kicks are only read without blocking,
//!    and io_uring writes calls: a client cannot block its thread.
//! 3. A request is in flight once, and is answered once. A ring with an error is not read again;
//!    the client's other rings and other clients are not affected.
//! 4. A stopping worker answers its requests if their bios finish in time. It gives back the newest
//!    requests that did not finish: for the driver, these are not taken yet.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::io::{Errno, IoSliceMut, ReadWriteFlags, preadv2};
use udm::bio::Bio;
use udm::buffer::{Buffer, BufferPool, CLIENT_POOL_BYTES_MAX};
use udm::device::{Device, Driver, InFlight, Reported, SLOW_SECONDS};
use udm::error::Result;
use udm::queue::{Core, Queue, Role, Turn, now};
use udm::ring::Event;
use udm::sync::{Arc, lock};
use udm::units::{BIO_BYTES_MAX, Nanos, SECOND};

use crate::budget::{BUDGET, Share};

use super::chain::Chain;
use super::memory::Memory;
use super::params::{Outcome, Params, ParamsReader, SharedParams};
use super::poll::{GLANCES, Poller, glance};
use super::proto::{Violation, wrong};
use super::request::{
    Begun, Facts, HEADER_BYTES, ID_BYTES, Phase, Request, held_bytes, take_buffer,
};
use super::virtqueue::Virtqueue;

/// Maximum bytes of a ring's requests in flight; a single request may exceed it.
pub const HELD_BYTES_MAX: u64 = 16 << 20;
/// Maximum time that a stopping worker waits for requests.
const STOP_SECONDS_MAX: u64 = 20;
/// The same, if all requests wait for free space or for resume.
const PARKED_SECONDS_MAX: u64 = 2;
/// Time between two checks for slow requests, while any is in flight.
const LOOK_NS: Nanos = SECOND;
/// Checks of a ring while the device works on requests: fewer, so that the rest of the loop, which
/// answers them, runs after less than a microsecond.
const GLANCES_BESIDE_IO: u32 = 16;
/// Answers after which the used ring is published during a turn: a polling driver sees the first
/// answers while the next requests are served.
const SHOWN: u32 = 8;
/// Time between two attempts to get memory that other clients hold.
const STARVED_LOOK_NS: Nanos = SECOND / 100;

/// Time for which an invalid-looking request is read again before the ring fails.
const DOUBT_NS: Nanos = SECOND / 10;

/// Requests of a worker to its queue's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    Kick,
    Call,
    Report,
}

/// A ring to serve.
#[derive(Debug)]
pub struct Served {
    /// The ring.
    pub ring: Virtqueue,
    /// The eventfd by which the driver announces requests.
    pub kick: Arc<OwnedFd>,
    /// Decides how long the ring is polled before the thread waits for a kick.
    pub poller: Poller,
    /// Whether writes must be durable when they end.
    pub is_write_through: bool,
    /// The losses that were reported when the ring was served before.
    pub reported: Option<Reported>,
}

/// A worker, for the client that it serves. Dropping it stops it.
#[derive(Debug)]
pub struct Worker {
    shared: Arc<SharedParams>,
    queue: Queue,
}

impl Worker {
    /// Serves a ring. `broken` is called if the ring has an error.
    pub fn start(
        name: &str,
        device: &Arc<Device>,
        served: Served,
        params: Params,
        broken: impl FnOnce(&Violation) + Send + 'static,
    ) -> Result<Worker> {
        let outcome = Outcome { base: served.ring.base(), ..Outcome::default() };
        let shared = Arc::new(SharedParams::new(params.clone(), outcome));
        let (for_role, device) = (ParamsReader(shared.clone()), device.clone());
        let queue = Queue::run(name, move |core| {
            let mut driver = core.driver(&device)?;
            driver.pool().keep_at_most(CLIENT_POOL_BYTES_MAX);
            served.reported.into_iter().for_each(|reported| driver.continue_from(reported));
            Ok(Serving::new(driver, served, params, for_role, Box::new(broken)))
        })?;
        Ok(Worker { shared, queue })
    }

    /// Changes the parameters of the ring soon.
    pub fn update(&self, params: Params) {
        self.shared.give(params);
        self.queue.wake();
    }

    /// Waits until the worker uses only the last parameters.
    pub fn wait_for_update(&self) {
        self.shared.wait();
    }

    /// Asks it to stop, without waiting.
    pub fn stop(&self) {
        self.queue.stop();
    }

    /// Stops it, and waits for its end.
    pub fn end(self) -> Outcome {
        drop(self.queue);
        lock(&self.shared.outcome).clone()
    }
}

/// The requests of a ring, by the driver's ids.
#[derive(Debug)]
struct Requests {
    by_id: Vec<Request>,
    in_flight: usize,
    held_bytes: u64,
    has_slow: bool,
}

/// Calls to the driver: at most one is in flight, and one more is remembered.
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
    params: Params,
    facts: Facts,
    share: Share,
    shared: ParamsReader,
    violation: Option<Violation>,
    broken: Option<Broken>,
    is_err_due: bool,
    /// Requests wait for memory that other clients hold, or for memory of their own.
    is_starved: bool,
    /// When the next request first looked invalid.
    doubted_since: Option<Nanos>,
    /// Requests wait for others of the ring.
    is_full: bool,
    look_at: Option<Nanos>,
    stopping_since: Option<Nanos>,
}

impl Serving {
    fn new(
        driver: Driver,
        served: Served,
        params: Params,
        shared: ParamsReader,
        broken: Broken,
    ) -> Serving {
        let mut id = [0; ID_BYTES];
        let name = driver.device().name();
        let len = name.len().min(ID_BYTES);
        id[..len].copy_from_slice(&name.as_bytes()[..len]);
        let Served { ring, kick, poller, is_write_through, .. } = served;
        let by_id = (0..ring.entries()).map(|_| Request::default()).collect();
        Serving {
            driver,
            requests: Requests { by_id, in_flight: 0, held_bytes: 0, has_slow: false },
            chain: Chain::default(),
            poller,
            kick,
            is_kick_awaited: false,
            // The driver checks once for answers of an earlier worker.
            calls: Calls { buffer: Some(Buffer::from_bytes(&1_u64.to_le_bytes())), is_due: true },
            facts: Facts { id, is_write_through },
            params,
            share: Share::of(&BUDGET),
            shared,
            violation: None,
            broken: Some(broken),
            is_err_due: false,
            is_starved: false,
            doubted_since: None,
            is_full: false,
            look_at: None,
            stopping_since: None,
            ring,
        }
    }

    fn take_orders(&mut self) {
        let Some(params) = self.shared.0.take_changed() else { return };
        self.params = params;
        // A call may have been lost on its way to the old file.
        self.calls.is_due = true;
        if self.violation.is_none() {
            let moved = self.ring.moved(&self.params.memory);
            self.judge(moved);
        }
        self.shared.0.taken();
    }

    /// Ends the use of the ring if it has an error.
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

    /// Runs the device's work, and answers finished bios.
    fn pump(&mut self, core: &mut Core<Asks>) -> bool {
        let mut result = Ok(());
        let (requests, ring) = (&mut self.requests, &mut self.ring);
        let memory = &self.params.memory;
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

    /// Takes requests while there are any and memory for them. Returns whether it took any.
    fn fetch(&mut self) -> std::result::Result<bool, Violation> {
        (self.is_starved, self.is_full) = (false, false);
        let mut count = 0;
        let memory = self.params.memory.clone();
        // At most one ring's worth, so that other work gets its turn. Updates take precedence over
        // the next request.
        while count < u32::from(self.ring.entries())
            && !self.shared.0.has_changed()
            && let Some(id) = self.peek(&memory)?
        {
            let bytes = held_bytes(&self.chain);
            // A longer request is refused and takes no memory.
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
                    // Now its buffer is in the processor's cache, which helps the next request.
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

    /// Reads the next request, `None` if there is none to take now. An invalid-looking request is
    /// judged after a moment: a client that asks for no acknowledgement may use memory before this
    /// server has received the message that adds it.
    fn peek(&mut self, memory: &Memory) -> std::result::Result<Option<u16>, Violation> {
        let result = self.ring.peek(memory, &mut self.chain);
        if result.is_ok() {
            self.doubted_since = None;
        } else if now() < *self.doubted_since.get_or_insert_with(now) + DOUBT_NS {
            self.is_starved = true;
            return Ok(None);
        }
        result
    }

    /// Answers the finished bios.
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

    /// Publishes the answers, and calls the driver if it wants that.
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
            && let Some(call) = &self.params.call
            && let Some(buffer) = self.calls.buffer.take()
        {
            self.calls.is_due = false;
            core.submissions().signal(call, buffer, Asks::Call);
        }
        if std::mem::take(&mut self.is_err_due)
            && let Some(err) = &self.params.err
        {
            let one = Buffer::from_bytes(&1_u64.to_le_bytes());
            core.submissions().signal(err, one, Asks::Report);
        }
    }

    /// Waits for the next kick as an event. Returns whether requests have arrived in the meantime.
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
            core.submissions().poll_readable(&self.kick, Asks::Kick);
        }
        false
    }

    /// Polls the ring for a moment, if the poller decides so. Returns whether it did.
    fn looks(&mut self) -> bool {
        if self.violation.is_some() || !self.poller.goes_on(now) {
            return false;
        }
        let is_calm = self.requests.in_flight == 0;
        // The next turn finds the error again.
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
        // At the file's current position, because an eventfd has none.
        let read = preadv2(&self.kick, vectors, u64::MAX, ReadWriteFlags::NOWAIT);
        let result = match read {
            Ok(8) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            _ => wrong("its kick file descriptor is not an eventfd"),
        };
        self.judge(result);
    }

    /// Checks for slow requests if it is time, and returns the time of the next check.
    fn look_for_slow(&mut self, core: &Core<Asks>) -> Option<Nanos> {
        if self.requests.in_flight == 0 && !self.requests.has_slow {
            self.look_at = None;
            return None;
        }
        let now = now();
        let look_at = *self.look_at.get_or_insert(now + LOOK_NS);
        if now >= look_at || self.requests.in_flight == 0 {
            self.look_at = Some(now + LOOK_NS);
            if let Some(slow) = self.requests.slow(now) {
                self.driver.report_slow(&slow, core.ring());
            }
        }
        self.look_at
    }

    /// Returns the end of a stopping worker's wait; `None` if it may stop now.
    fn stop_deadline(&mut self) -> Option<Nanos> {
        let since = *self.stopping_since.get_or_insert_with(now);
        let is_parked = self.driver.is_all_parked();
        let seconds = if is_parked { PARKED_SECONDS_MAX } else { STOP_SECONDS_MAX };
        let deadline = since + seconds * SECOND;
        (self.requests.in_flight > 0 && now() < deadline).then_some(deadline)
    }

    /// Gives back the newest unanswered requests.
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
        (request.seen, request.is_slow) = (None, false);
        self.in_flight += 1;
        self.held_bytes += bytes;
    }

    /// Finishes a bio. Returns the request's id, and the number of bytes written for the driver.
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

    /// Returns the slow requests; `None` if there are none now and were none at the last check.
    fn slow(&mut self, now: Nanos) -> Option<Vec<InFlight>> {
        let mut slow = Vec::new();
        for (token, request) in self.by_id.iter_mut().enumerate() {
            let (Phase::InFlight, Some((op, offset, len))) = (request.phase, request.what) else {
                continue;
            };
            let age = now - *request.seen.get_or_insert(now);
            if age >= SLOW_SECONDS * SECOND {
                let is_new = !std::mem::replace(&mut request.is_slow, true);
                slow.push(InFlight { token: token as u64, op, offset, len, age, is_new });
            }
        }
        let had_slow = std::mem::replace(&mut self.has_slow, !slow.is_empty());
        (had_slow || self.has_slow).then_some(slow)
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
        let mut deadline = self.look_for_slow(core);
        if is_stopping {
            match self.stop_deadline() {
                Some(stop) => deadline = deadline.into_iter().chain([stop]).min(),
                None => return Turn::Over,
            }
        } else if self.is_starved {
            deadline = Some(now() + STARVED_LOOK_NS);
        } else if self.is_full {
            // Requests in flight end as events, unless some have ended in this turn.
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
        self.driver.report_slow(&[], core.ring());
        self.give_back();
        let (base, violation) = (self.ring.base(), self.violation.take());
        let outcome = Outcome { base, violation, reported: Some(self.driver.reported()) };
        *lock(&self.shared.0.outcome) = outcome;
        // The last call is submitted before the thread ends.
        core.ring_mut().submit();
        core.leave(self.driver);
    }
}
