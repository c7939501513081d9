//! Requests that are in flight for too long: which, and what each of them waits for. The queue that
//! has a request notices this when it checks every second or so. Others ask the device, or register
//! with `on_late`. A request that is served immediately is never recorded here.

use super::{Device, Driver};
use crate::bio::Op;
use crate::disk::Ring;
use crate::sync::{Mutex, lock};
use crate::target::Port;
use crate::units::{Nanos, SECOND};

/// A request that is in flight for longer than this is late.
pub const LATE_SECONDS: u64 = 10;

/// A request that has been in flight for a while, as the role that took it knows it.
#[derive(Clone, Copy, Debug)]
pub struct InFlight {
    /// Its bio's token.
    pub token: u64,
    /// What it asks for.
    pub op: Op,
    /// Its first byte.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
    /// It has been in flight for at least this long.
    pub age: Nanos,
    /// It was not reported before.
    pub is_new: bool,
}

/// A late request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LateRequest {
    /// The port that it came through.
    pub port: usize,
    /// What it asks for.
    pub op: Op,
    /// Its first byte.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
    /// For how long it has been in flight, at least.
    pub age: Nanos,
    /// What it waits for, in a few words.
    pub waits_for: &'static str,
    /// Whether this is the first time that it is found to be late.
    pub is_new: bool,
}

impl LateRequest {
    /// For how many seconds it has been in flight.
    pub fn seconds(&self) -> u64 {
        self.age / SECOND
    }
}

impl LateRequest {
    /// What it asks for, in words.
    pub fn what(&self) -> String {
        let LateRequest { op, offset, len, .. } = self;
        let name = match op {
            Op::Read => "read",
            Op::Write => "write",
            Op::Flush => "flush",
            Op::Discard => "discard",
            Op::WriteZeroes => "write of zeroes",
        };
        match op {
            Op::Flush => name.to_owned(),
            _ => format!("{name}, {len} bytes at {offset}"),
        }
    }
}

impl std::fmt::Display for LateRequest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (what, seconds) = (self.what(), self.seconds());
        write!(out, "{what}: not answered for {seconds} s; it waits for {}", self.waits_for)
    }
}

type Teller = Box<dyn Fn(&LateRequest) + Send + Sync>;

/// Those of a device.
#[derive(Default)]
pub(super) struct LateRequests(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    requests: Vec<LateRequest>,
    total: u64,
    teller: Option<Teller>,
}

impl std::fmt::Debug for LateRequests {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "LateRequests({})", lock(&self.0).requests.len())
    }
}

impl Device {
    /// Replaces the list of a port's late requests.
    pub fn set_late(&self, port: &Port, requests: Vec<LateRequest>) {
        self.set_late_of(port.id, requests);
    }

    /// The same, for a thread that watches the port of another thread.
    pub fn set_late_of(&self, port: usize, requests: Vec<LateRequest>) {
        let mut late = lock(&self.late.0);
        let late = &mut *late;
        late.requests.retain(|request| request.port != port);
        for request in &requests {
            if request.is_new {
                late.total += 1;
                late.teller.iter().for_each(|tell| tell(request));
            }
        }
        late.requests.extend(requests);
    }

    /// The late requests, oldest first, and how many there were since the start.
    pub fn late_requests(&self) -> (Vec<LateRequest>, u64) {
        let late = lock(&self.late.0);
        let mut requests = late.requests.clone();
        requests.sort_by_key(|request| std::cmp::Reverse(request.age));
        (requests, late.total)
    }

    /// `tell` is called, with little delay, for each request that becomes late.
    pub fn on_late(&self, tell: impl Fn(&LateRequest) + Send + Sync + 'static) {
        lock(&self.late.0).teller = Some(Box::new(tell));
    }

    /// What a bio that is parked in `port` waits for.
    pub fn parked_for(&self, bio: &crate::bio::Bio, port: &Port) -> &'static str {
        self.seat(port).parked_for(bio)
    }
}

impl Driver {
    /// Lets the device know which of the driver's requests are late, and what for.
    pub fn tell_late(&self, late: &[InFlight], ring: &Ring) {
        let (device, port) = (self.device(), self.port());
        let told = late.iter().map(|request| {
            let parked = port.parked.iter().find(|bio| bio.token == request.token);
            let waits_for = match parked {
                Some(bio) => device.parked_for(bio, port),
                None if ring.awaited() > 0 => "a disk",
                None => "its target",
            };
            let InFlight { op, offset, len, age, is_new, .. } = *request;
            LateRequest { port: port.id, op, offset, len, age, waits_for, is_new }
        });
        device.set_late(port, told.collect());
    }
}
