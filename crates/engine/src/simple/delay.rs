//! delay: a linear mapping that delays requests.
//!
//! `delay <device> <offset> <delay>`, and the same three words again for writes and flushes, and
//! once more for flushes alone. Delays are milliseconds. The kernel's `dm-delay`.
//!
//! The background's tick passes the time to the target. A bio that must wait is parked
//! with a ticket as its progress. Each tick gives all tickets handed out since the last one the
//! same due time, so that none is early. When that time comes they are released, room is signalled,
//! and the drivers submit the bios again. Without a background delayed bios wait without end.
//!
//! `?seek=` after the first device gives the line one arm: reads and writes are served one at a
//! time, in the order of their arrival, and each takes the time that `seek` gives for the distance
//! from the last one. Then it waits for its delay while the next ones run. Flushes do not move the
//! arm.

use std::collections::VecDeque;

use super::{Carrier, Location, Mapping, wrong_count};
use crate::base::seek::Seek;
use crate::bio::{Bio, Op};
use crate::disk::{Disk, DiskIo};
use crate::error::{Kind, Result};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, lock};
use crate::table::Word;
use crate::target::{Events, Extent, Health, Port, Target, TargetLimits};
use crate::units::{Nanos, SECOND, SECTOR};

/// One millisecond.
const MILLISECOND: Nanos = SECOND / 1000;

/// The longest delay, in milliseconds: what 32 bits hold, as in the kernel.
const DELAY_MS_MAX: u64 = u32::MAX as u64;

/// The words of a delay line.
pub const DELAY_WORDS: &str =
    "<device> <offset> <delay> [<device> <offset> <delay> [<device> <offset> <delay>]]";

/// The arguments of a delay line.
#[derive(Clone, Debug)]
pub struct DelayArgs {
    /// The location and the delay in milliseconds of reads, writes and flushes.
    pub lanes: [(Location, u64); 3],
    /// The number of lanes that the line gives.
    pub given: usize,
    /// The seek times of the simulated disk, for reads and writes.
    seek: Option<Seek>,
}

impl DelayArgs {
    /// Reads the words after `delay`.
    pub fn parse(args: &[Word]) -> Result<DelayArgs> {
        if !matches!(args.len(), 3 | 6 | 9) {
            let message = "Requires exactly 3, 6 or 9 arguments: <device> <offset> <delay> \
                           for all, for reads and writes, or for reads, writes and flushes";
            return Err(wrong_count(args, 9, message));
        }
        let lane = |words: &[Word]| -> Result<(Location, u64)> {
            let delay = words[2].number_up_to("the delay in milliseconds", DELAY_MS_MAX)?;
            Ok((Location::parse(&words[0], &words[1])?, delay))
        };
        let given = args.chunks(3).map(lane).collect::<Result<Vec<_>>>()?;
        let of = |n: usize| given[n.min(given.len() - 1)].clone();
        let seek = given[0].0.device.options.seek;
        if let Some(other) = given[1..].iter().find(|lane| lane.0.device.options.seek.is_some()) {
            let what = "seek must follow the first device: the line has one arm";
            return Err(other.0.device.error(Kind::Invalid, what));
        }
        Ok(DelayArgs { lanes: [of(0), of(1), of(2)], given: given.len(), seek })
    }
}

/// The delay target.
#[derive(Debug)]
pub struct Delay {
    lanes: [Lane; 3],
    given: usize,
    arm: Option<Arm>,
    carrier: Carrier,
}

/// The arm of the simulated disk, for reads and writes of a line.
#[derive(Debug)]
struct Arm {
    seek: Seek,
    /// Bytes of the line.
    span: u64,
    state: Mutex<ArmState>,
}

#[derive(Debug, Default)]
struct ArmState {
    /// The requests since the last tick: lane, ticket, first byte and length.
    arrived: VecDeque<(usize, u64, u64, u64)>,
    /// The byte where the last request ended.
    position: u64,
    /// The time when the last request ends.
    free_at: Nanos,
}

impl Arm {
    /// A ticket for a new bio, in the order in which the arm serves bios.
    fn queue(&self, nth: usize, lane: &Lane, bio: &Bio) -> u64 {
        let mut state = lock(&self.state);
        let ticket = lane.tickets.fetch_add(1, Ordering::SeqCst) + 1;
        // A discard moves no data under the head.
        let len = if matches!(bio.op, Op::Read | Op::Write) { bio.len } else { 0 };
        state.arrived.push_back((nth, ticket, bio.offset, len));
        ticket
    }

    /// Computes the due times of all new requests.
    fn tick(&self, now: Nanos, lanes: &[Lane; 3]) {
        let mut state = lock(&self.state);
        while let Some((nth, ticket, at, len)) = state.arrived.pop_front() {
            let start = now.max(state.free_at);
            state.free_at = self.seek.end(start, state.position, at, len, self.span);
            state.position = at + len;
            let due = state.free_at + lanes[nth].delay_ms * MILLISECOND;
            lock(&lanes[nth].schedule).due.push_back((due, ticket));
        }
    }
}

/// Reads, writes or flushes.
#[derive(Debug)]
struct Lane {
    mapping: Mapping,
    delay_ms: u64,
    /// Tickets handed out; the first is 1.
    tickets: AtomicU64,
    /// Tickets up to this one no longer wait.
    released: AtomicU64,
    /// Bios that waited and were then sent on.
    gone_on: AtomicU64,
    schedule: Mutex<Schedule>,
}

/// The due times of tickets.
#[derive(Debug, Default)]
struct Schedule {
    /// Tickets up to this one have a due time.
    stamped: u64,
    /// A due time, and the last ticket that has it; its first ticket follows the last one of the
    /// entry before. Both only grow.
    due: VecDeque<(Nanos, u64)>,
}

impl Delay {
    /// Maps `len` bytes to the disks that `args` names and `open` opens.
    pub fn new(
        args: &DelayArgs,
        len: u64,
        open: &mut dyn FnMut(&Location) -> Result<Arc<dyn Disk>>,
    ) -> Result<Delay> {
        let mut lane = |(location, delay_ms): &(Location, u64)| -> Result<Lane> {
            Ok(Lane {
                mapping: Mapping::new(location, len, open(location)?)?,
                delay_ms: *delay_ms,
                tickets: AtomicU64::new(0),
                released: AtomicU64::new(0),
                gone_on: AtomicU64::new(0),
                schedule: Mutex::default(),
            })
        };
        let [read, write, flush] = &args.lanes;
        Ok(Delay {
            lanes: [lane(read)?, lane(write)?, lane(flush)?],
            given: args.given,
            arm: args.seek.map(|seek| Arm { seek, span: len, state: Mutex::default() }),
            carrier: Carrier::default(),
        })
    }

    fn lane(op: Op) -> usize {
        match op {
            Op::Read => 0,
            Op::Write | Op::Discard | Op::WriteZeroes => WRITES,
            Op::Flush => FLUSHES,
        }
    }
}

/// The lane of writes, discards and zeroes, which a suspend flushes.
const WRITES: usize = 1;

/// The lane of flushes, which do not move the arm.
const FLUSHES: usize = 2;

impl Lane {
    /// Releases the tickets that are due at `now`. Returns whether there were any, and the next due
    /// time. `is_timed`: an arm has given each ticket its time.
    fn tick(&self, now: Nanos, is_timed: bool) -> (bool, Option<Nanos>) {
        let mut schedule = lock(&self.schedule);
        let tickets = self.tickets.load(Ordering::SeqCst);
        if tickets > schedule.stamped && !is_timed {
            schedule.stamped = tickets;
            schedule.due.push_back((now + self.delay_ms * MILLISECOND, tickets));
        }
        let mut has_released = false;
        while let Some((due, upto)) = schedule.due.front().copied()
            && due <= now
        {
            schedule.due.pop_front();
            self.released.store(upto, Ordering::SeqCst);
            has_released = true;
        }
        (has_released, schedule.due.front().map(|(due, _)| *due))
    }

    /// Bios that wait.
    fn waiting(&self) -> u64 {
        let gone_on = self.gone_on.load(Ordering::SeqCst);
        self.tickets.load(Ordering::SeqCst).saturating_sub(gone_on)
    }
}

/// A device's word with one more option after it.
fn with_option(word: &str, option: &str) -> String {
    let has_options = Word::new(word).device().is_ok_and(|device| device.path.len() < word.len());
    format!("{word}{}{option}", if has_options { '&' } else { '?' })
}

impl Target for Delay {
    fn name(&self) -> &'static str {
        "delay"
    }

    fn parked_for(&self, _bio: &Bio) -> &'static str {
        "its delay"
    }

    fn submit(&self, mut bio: Bio, port: &mut Port) {
        let nth = Delay::lane(bio.op);
        let lane = &self.lanes[nth];
        let ticket = bio.note;
        let arm = self.arm.as_ref().filter(|_| nth != FLUSHES);
        if lane.delay_ms == 0 && arm.is_none() {
            self.carrier.send(bio, &lane.mapping, port);
        } else if ticket == 0 {
            bio.note = match arm {
                Some(arm) => arm.queue(nth, lane, &bio),
                None => lane.tickets.fetch_add(1, Ordering::SeqCst) + 1,
            };
            port.parked.push_back(bio);
            self.carrier.rest.events().work();
        } else if ticket <= lane.released.load(Ordering::SeqCst) {
            lane.gone_on.fetch_add(1, Ordering::SeqCst);
            bio.note = 0;
            self.carrier.send(bio, &lane.mapping, port);
        } else {
            port.parked.push_back(bio);
        }
    }

    fn complete(&self, io: DiskIo, port: &mut Port) {
        if let Some(bio) = self.carrier.complete(io, port) {
            port.done.push_back(bio);
        }
    }

    fn tick(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        self.carrier.tick(&self.lanes[WRITES].mapping, port);
        if let Some(arm) = &self.arm {
            arm.tick(now, &self.lanes);
        }
        let is_timed = |nth| self.arm.is_some() && nth != FLUSHES;
        let ticks = [0, WRITES, FLUSHES].map(|nth| self.lanes[nth].tick(now, is_timed(nth)));
        if ticks.iter().any(|(has_released, _)| *has_released) {
            self.carrier.rest.events().room();
        }
        ticks.iter().filter_map(|(_, next)| *next).min()
    }

    fn events(&self) -> Option<&Arc<Events>> {
        Some(self.carrier.rest.events())
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        self.lanes[0].mapping.extent(offset, len)
    }

    fn losses(&self) -> u64 {
        self.lanes[FLUSHES].mapping.losses()
    }

    fn health(&self) -> Health {
        self.lanes[0].mapping.health()
    }

    fn limits(&self) -> TargetLimits {
        let [read, write, flush] = self.lanes.each_ref().map(|lane| lane.mapping.limits());
        TargetLimits { has_discard: write.has_discard, ..read.and(write).and(flush) }
    }

    fn suspend(&self) -> Result<()> {
        self.carrier.rest.begin();
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.carrier.rest.is_idle()
    }

    fn is_durable(&self) -> bool {
        self.carrier.rest.is_durable()
    }

    fn resume(&self) -> Result<()> {
        self.carrier.rest.resume();
        Ok(())
    }

    fn is_read_only(&self) -> bool {
        self.lanes.iter().any(|lane| lane.mapping.disk.is_read_only())
    }

    /// Reads, writes and flushes that wait.
    fn status(&self) -> String {
        let [reads, writes, flushes] = self.lanes.each_ref().map(Lane::waiting);
        format!("{reads} {writes} {flushes}")
    }

    fn table(&self) -> String {
        let words = |lane: &Lane| format!("{} {}", lane.mapping.words(), lane.delay_ms);
        let mut lines: Vec<String> = self.lanes[..self.given].iter().map(words).collect();
        if let Some(arm) = &self.arm {
            let device = &self.lanes[0].mapping.disk.limits().kernel_name;
            let with_arm = with_option(device, &format!("seek={}", arm.seek));
            let rest =
                format!("{} {}", self.lanes[0].mapping.start / SECTOR, self.lanes[0].delay_ms);
            lines[0] = format!("{} {rest}", Word::new(with_arm).quoted());
        }
        lines.join(" ")
    }
}
