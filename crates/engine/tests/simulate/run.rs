//! A history as it happens: steps are carried out, threads and disks move in an order that the
//! steps' seeds decide, and everything that comes out is judged.

use std::collections::BTreeMap;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::device::DeviceState;
use udm::disk::{Effect, Fault, Ring};
use udm::error::{Kind, Status};
use udm::pmem::sim::SimPmem;
use udm::prng::Prng;
use udm::units::{Nanos, SECOND};

use crate::machine::{Machine, Server};
use crate::oracle::{Oracle, SECTOR, encode};
use crate::plan::{Action, Setup, Step, Trouble};

/// After this long without faults all requests must have ended.
const PATIENCE: Nanos = 120 * SECOND;
/// This many moves of the fixture without end are a spin.
const MOVES_MAX: u64 = 400_000;
/// The cache fails writes that wait for an origin that has failed for this long.
const GIVE_UP_AFTER: Nanos = 60 * SECOND;

/// Counts of the events of a history, for the statistics.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub histories: u64,
    pub requests: u64,
    pub moves: u64,
    pub deaths: u64,
    pub errors: u64,
    pub refused: u64,
}

/// Why a history ended before its time.
pub enum Stop {
    /// udm is wrong.
    Wrong(String),
    /// Damaged media were refused, as they may be.
    Refused,
}

pub type Outcome<T = ()> = Result<T, Stop>;

pub fn wrong<T>(what: impl Into<String>) -> Outcome<T> {
    Err(Stop::Wrong(what.into()))
}

/// A request under way.
struct Request {
    op: Op,
    first: usize,
    count: usize,
    fua: bool,
    /// The version it writes, or when it began.
    mark: u64,
    /// The move at which it was submitted.
    since: u64,
}

/// A fixture in motion.
pub struct Run {
    pub setup: Setup,
    pub machine: Machine,
    pub oracle: Oracle,
    pub tally: Tally,
    pub now: Nanos,
    server: Option<Server>,
    requests: BTreeMap<u64, Request>,
    next_token: u64,
    /// The last move at which the origin was faulty; `u64::MAX` while it is.
    pub faulty_until: u64,
    /// Since when write-back may have been failing.
    pub faulty_since: Option<Nanos>,
    pub is_damaged: bool,
    pub has_medium_failed: bool,
    /// What tells that shared memory belongs to the medium is damaged there.
    pub is_orphaned: bool,
    is_removing: bool,
    /// The power cut to come, and the fences until the one after it.
    pub is_cut_armed: bool,
    pub cut_again: u64,
}

impl Run {
    pub fn new(setup: &Setup) -> Outcome<Run> {
        let mut run = Run {
            machine: Machine::new(setup),
            oracle: Oracle::new(setup.sectors()),
            setup: setup.clone(),
            tally: Tally { histories: 1, ..Tally::default() },
            now: 0,
            server: None,
            requests: BTreeMap::new(),
            next_token: 0,
            faulty_until: 0,
            faulty_since: None,
            is_damaged: false,
            has_medium_failed: false,
            is_orphaned: false,
            is_removing: false,
            is_cut_armed: false,
            cut_again: 0,
        };
        let mut prng = Prng::new(setup.seed ^ 0x57A7);
        let again = if prng.one_in(4) { 1 + prng.below(6) } else { 0 };
        run.attach(again, &mut prng)?;
        Ok(run)
    }

    pub fn server(&mut self) -> &mut Server {
        self.server.as_mut().expect("a server runs between steps")
    }

    pub fn state(&mut self) -> DeviceState {
        self.server().device.info().state
    }

    /// Whether everything must come to its end by itself.
    pub fn is_healthy(&self) -> bool {
        self.faulty_until != u64::MAX && !self.has_medium_failed
    }

    pub fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    pub fn step(&mut self, step: &Step) -> Outcome {
        let prng = &mut Prng::new(step.salt);
        match step.action {
            Action::Io { client, op, first, count, fua } => {
                self.submit(client, op, first, count, fua, prng)?;
            }
            Action::Pump { events, is_slow } => {
                for _ in 0..events {
                    self.step_fixture(is_slow, prng)?;
                }
            }
            Action::Pass { nanos } => self.now += nanos,
            Action::Settle => self.settle(prng)?,
            _ => self.rare(&step.action, prng)?,
        }
        self.look_for_cut(prng)
    }

    /// A client hands in a request.
    pub fn submit(
        &mut self,
        client: usize,
        op: Op,
        first: usize,
        count: usize,
        fua: bool,
        prng: &mut Prng,
    ) -> Outcome {
        let token = self.next_token;
        self.next_token += 1;
        self.tally.requests += 1;
        let offset = (first * SECTOR) as u64;
        let len = count * SECTOR;
        let (mark, bio) = match op {
            Op::Read => {
                let mut buffer = Buffer::zeroed(len);
                buffer.as_mut_slice().fill(0xEE);
                (self.oracle.begin_read(), Bio::read(offset, buffer, token))
            }
            Op::Write => {
                let version = self.oracle.begin_write(first, count, false);
                let mut buffer = Buffer::zeroed(len);
                encode(first, version, buffer.as_mut_slice());
                (u64::from(version), Bio::write(offset, buffer, fua, token))
            }
            Op::Flush => (self.oracle.begin_flush(), Bio::flush(token)),
            Op::Discard | Op::WriteZeroes => {
                let version = self.oracle.begin_write(first, count, true);
                (u64::from(version), Bio::bare(op, offset, len as u64, fua, token))
            }
        };
        let since = self.tally.moves;
        self.requests.insert(token, Request { op, first, count, fua, mark, since });
        let server = self.server();
        server.device.submit(bio, &mut server.ports[client].port);
        self.look_for_cut(prng)
    }

    /// Lets one event happen, somewhere. Returns false if none is possible.
    pub fn step_fixture(&mut self, is_slow: bool, prng: &mut Prng) -> Outcome<bool> {
        self.tally.moves += 1;
        self.now += prng.below(20_000);
        let disks = self.machine.disks();
        let held = |ring: &Ring| disks.iter().map(|disk| disk.held(ring)).sum::<usize>();
        let now = self.now;
        let server = self.server();
        let threads = server.ports.len() as u64;
        let from = prng.below(threads) as usize;
        let epoch = server.device.events().room_epoch();
        for nth in 0..server.ports.len() {
            let driver = &mut server.ports[(from + nth) % threads as usize];
            let port = &mut driver.port;
            let may_tick = driver.is_background
                && (server.work.is_set() || server.next_tick.is_some_and(|due| due <= now));
            if may_tick && !prng.one_in(3) {
                server.work.clear();
                server.next_tick = server.device.tick(now, port);
            } else if !port.ios.is_empty() {
                let count = 1 + prng.below(port.ios.len() as u64);
                for io in port.ios.drain(..count as usize) {
                    io.disk.clone().start(io, &mut driver.ring);
                }
            } else if driver.ring.has_ended() && !prng.one_in(4) {
                let io = driver.ring.pop_completed().expect("something has ended");
                server.device.complete(io, port);
            } else if held(&driver.ring) > 0 && (!is_slow || prng.one_in(16)) {
                let movable: Vec<_> =
                    disks.iter().filter(|disk| disk.held(&driver.ring) > 0).collect();
                let nth = if movable.len() > 1 { prng.below(movable.len() as u64) } else { 0 };
                movable[nth as usize].step(&mut driver.ring, prng);
            } else if driver.ring.has_ended() {
                continue;
            } else if !port.parked.is_empty() && driver.room_epoch != epoch {
                driver.room_epoch = epoch;
                server.device.retry(port);
            } else if let Some(bio) = port.done.pop_front() {
                self.judge(bio)?;
            } else {
                continue;
            }
            self.look_for_cut(prng)?;
            return Ok(true);
        }
        // Chance may have passed over what can move.
        let server = self.server();
        let is_due = server.work.is_set() || server.next_tick.is_some_and(|due| due <= now);
        let has_work = is_due
            || server
                .ports
                .iter()
                .any(|driver| driver.ring.has_ended() || (is_slow && held(&driver.ring) > 0));
        Ok(has_work)
    }

    /// A request has come out: is that an answer it may have?
    fn judge(&mut self, bio: Bio) -> Outcome {
        let request = self.requests.remove(&bio.token).expect("each request comes out once");
        let is_good = bio.status.is_ok();
        if let Err(status) = bio.status {
            self.tally.errors += 1;
            if !self.may_fail(&request, status) {
                let Request { op, first, count, .. } = request;
                return wrong(format!("{op:?} of {first}+{count} failed: {status}"));
            }
        }
        let Request { op, first, count, fua, mark, .. } = request;
        match op {
            Op::Read => {
                let bytes = is_good.then(|| bio.buffer.as_slice());
                self.oracle.end_read(mark, first, bytes).map_err(Stop::Wrong)?;
            }
            Op::Flush if is_good => self.oracle.end_flush(mark),
            Op::Flush => {}
            _ => self.oracle.end_write(mark as u32, first, count, is_good, fua),
        }
        Ok(())
    }

    fn may_fail(&self, request: &Request, status: Status) -> bool {
        let is_read = request.op == Op::Read;
        let is_hopeless = self.faulty_since.is_some_and(|since| self.now >= since + GIVE_UP_AFTER);
        let is_uncached = self.setup.is_range_bare(request.first, request.count);
        match status {
            Status::Io if self.is_removing => true,
            Status::Io if is_uncached && self.faulty_until >= request.since => true,
            _ if self.has_medium_failed => matches!(status, Status::Io | Status::NoSpace),
            // Writes that bypassed a dead server's cache may need a flush of the origin.
            Status::Io if !self.setup.is_pcache() && (request.op == Op::Flush || request.fua) => {
                self.faulty_until >= request.since
            }
            Status::Io => is_read && (self.faulty_until >= request.since || self.is_damaged),
            Status::Corrupt => is_read && self.is_damaged,
            Status::NoSpace => !is_read && (is_hopeless || self.is_damaged),
            _ => false,
        }
    }

    /// All parts are idle: time passes until the next tick. Returns false if none is due.
    fn skip(&mut self) -> bool {
        let now = self.now;
        let Some(due) = self.server().next_tick else { return false };
        self.now = now.max(due);
        true
    }

    /// Moves the fixture until `is_done`, or until it ought to be. Says whether it is.
    pub fn run_until(
        &mut self,
        prng: &mut Prng,
        mut is_done: impl FnMut(&mut Run) -> Outcome<bool>,
    ) -> Outcome<bool> {
        let patience = if self.is_healthy() { PATIENCE } else { 2 * SECOND };
        let (end, moves_end) = (self.now + patience, self.tally.moves + MOVES_MAX);
        while !is_done(self)? {
            let has_moved = self.step_fixture(false, prng)?;
            if (!has_moved && !self.skip()) || self.now > end {
                return Ok(false);
            }
            if self.tally.moves > moves_end {
                return wrong(format!("it spins: {}", self.tell()));
            }
        }
        Ok(true)
    }

    /// All requests end, if they must; requests of a suspended device wait.
    pub fn settle(&mut self, prng: &mut Prng) -> Outcome {
        if self.state() != DeviceState::Active {
            self.run_until(prng, |_| Ok(false))?;
            return Ok(());
        }
        let is_due = self.is_healthy();
        let is_done = self.run_until(prng, |run| Ok(run.requests.is_empty()))?;
        if !is_done && is_due {
            return wrong(format!("requests wait indefinitely: {}", self.tell()));
        }
        Ok(())
    }

    /// The state of the fixture.
    pub fn tell(&mut self) -> String {
        let waiting: Vec<String> = self
            .requests
            .values()
            .take(4)
            .map(|request| format!("{:?} {}+{}", request.op, request.first, request.count))
            .collect();
        let (count, now) = (self.requests.len(), self.now);
        let server = self.server();
        format!(
            "{count} requests ({}), state {:?}, now {now}, next tick {:?}, status {:?}, {:?}",
            waiting.join(", "),
            server.device.info().state,
            server.next_tick,
            server.device.status(),
            server.device.dirty(),
        )
    }

    /// Takes the server away: it is dead, or removed.
    pub fn take_server(&mut self) -> Server {
        self.server.take().expect("a server runs between steps")
    }

    /// The clients' requests in flight get no answer.
    pub fn forget_requests(&mut self) {
        self.requests.clear();
        self.oracle.server_died();
    }

    pub fn set_removing(&mut self, is_removing: bool) {
        self.is_removing = is_removing;
    }

    /// At the armed moment the power fails: clients have not seen the results since then.
    pub fn look_for_cut(&mut self, prng: &mut Prng) -> Outcome {
        if !self.is_cut_armed {
            return Ok(());
        }
        let Some(cut) = self.machine.pmem.take_cut() else { return Ok(()) };
        let again = self.cut_again;
        self.power_cut(&cut, again, prng)
    }

    pub fn power_cut(&mut self, pmem: &SimPmem, again: u64, prng: &mut Prng) -> Outcome {
        self.tally.deaths += 1;
        let server = self.take_server();
        self.machine.lose_power(pmem, prng);
        server.die();
        self.forget_requests();
        self.oracle.lose_unflushed(true);
        // A new disk works, and a new cache counts fences again.
        self.has_medium_failed = false;
        if self.faulty_until == u64::MAX {
            self.faulty_until = self.tally.moves;
        }
        self.attach(again, prng)
    }

    /// A server of a cache dies at one of its first I/O of the metadata, or before its first
    /// request, or the power goes.
    fn die_opening(&mut self, after: u64, prng: &mut Prng) {
        self.machine.meta.inject(Fault::new(Effect::Stick).after(2 * after - prng.below(2)));
        if let Ok(server) = self.machine.start(&self.setup) {
            server.die();
        }
        self.tally.deaths += 1;
        self.machine.meta.heal();
        if prng.one_in(2) && !self.has_medium_failed {
            let pmem = self.machine.pmem.clone();
            self.machine.lose_power(&pmem, prng);
            self.oracle.lose_unflushed(true);
        }
    }

    /// Starts a server. Unless `again` is 0, it dies this many fences later, or the power goes.
    pub fn attach(&mut self, mut again: u64, prng: &mut Prng) -> Outcome {
        self.is_cut_armed = false;
        self.faulty_since = if self.is_healthy() { None } else { Some(self.now) };
        if self.setup.is_cache() && again > 0 {
            self.die_opening(again, prng);
        }
        loop {
            let fences = if again > 0 { again } else { u64::MAX };
            self.machine.pmem.arm_cut_with(fences, self.machine.shared());
            let result = self.machine.start(&self.setup);
            if let Some(cut) = self.machine.pmem.take_cut() {
                again = 0;
                self.tally.deaths += 1;
                if let Ok(server) = result {
                    server.die();
                }
                if prng.one_in(2) {
                    self.machine.lose_power(&cut, prng);
                    self.oracle.lose_unflushed(true);
                } else {
                    let words = self.machine.pmem.memory_at_cut();
                    self.machine.go_back(&cut, &words);
                }
                continue;
            }
            match result {
                Ok(server) => {
                    self.server = Some(server);
                    self.is_orphaned = false;
                    return Ok(());
                }
                Err(error) if self.is_damaged => {
                    let kinds = [Kind::Io, Kind::Invalid, Kind::Refused, Kind::Fault];
                    if kinds.contains(&error.kind()) {
                        return Err(Stop::Refused);
                    }
                    return wrong(format!("damaged media: {error}"));
                }
                Err(error) => return wrong(format!("attach: {error}")),
            }
        }
    }

    /// Whether the origin alone can be asked for consistency.
    pub fn is_alone_checked(&self) -> bool {
        let trouble = self.setup.trouble;
        let is_whole = self.setup.is_ordered && !self.setup.is_cut();
        is_whole && !trouble.has_cache() && trouble != Trouble::Medium
    }
}

impl Run {
    /// Ends the fixture, in any state.
    pub fn abandon(mut self) {
        if let Some(server) = self.server.take() {
            self.machine.disks().iter().for_each(|disk| disk.abandon());
            server.die();
        }
    }
}

impl Tally {
    pub fn add(&mut self, other: &Tally) {
        self.histories += other.histories;
        self.requests += other.requests;
        self.moves += other.moves;
        self.deaths += other.deaths;
        self.errors += other.errors;
        self.refused += other.refused;
    }
}
