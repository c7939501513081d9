//! Slow requests: those in flight for too long, and the reason for which each of them waits. The
//! queue that has a request notices this in a check about every second. Other threads ask the
//! device, or register with `on_slow`. A request that is served immediately is never recorded here.

use super::{Device, Driver};
use crate::bio::Op;
use crate::disk::{DiskIo, Ring};
use crate::sync::{Mutex, lock};
use crate::target::Port;
use crate::units::{Nanos, SECOND};

/// A request that is in flight for longer than this is slow.
pub const SLOW_SECONDS: u64 = 10;

/// A request that has been in flight for a while, as recorded by the role that received it.
#[derive(Clone, Copy, Debug)]
pub struct InFlight {
    /// Its bio's token.
    pub token: u64,
    /// The kind of request.
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

/// A slow request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowRequest {
    /// The port that it came through.
    pub port: usize,
    /// The kind of request.
    pub op: Op,
    /// Its first byte.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
    /// For how long it has been in flight, at least.
    pub age: Nanos,
    /// The reason of the wait, in a few words.
    pub waits_for: &'static str,
    /// Whether this is the first time that it is found to be slow.
    pub is_new: bool,
}

impl SlowRequest {
    /// For how many seconds it has been in flight.
    pub fn seconds(&self) -> u64 {
        self.age / SECOND
    }
}

impl SlowRequest {
    /// The request in words.
    pub fn what(&self) -> String {
        let SlowRequest { op, offset, len, .. } = self;
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

impl std::fmt::Display for SlowRequest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (what, seconds) = (self.what(), self.seconds());
        write!(out, "{what}: not answered for {seconds} s; waiting for {}", self.waits_for)
    }
}

type Teller = Box<dyn Fn(&SlowRequest) + Send + Sync>;

/// Those of a device.
#[derive(Default)]
pub(super) struct SlowRequests(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    requests: Vec<SlowRequest>,
    total: u64,
    teller: Option<Teller>,
}

impl std::fmt::Debug for SlowRequests {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "SlowRequests({})", lock(&self.0).requests.len())
    }
}

impl Device {
    /// Replaces the list of a port's slow requests.
    pub fn set_slow(&self, port: &Port, requests: Vec<SlowRequest>) {
        self.set_slow_of(port.id, requests);
    }

    /// The same, for a thread that checks the port of another thread.
    pub fn set_slow_of(&self, port: usize, requests: Vec<SlowRequest>) {
        let mut slow = lock(&self.slow.0);
        let slow = &mut *slow;
        slow.requests.retain(|request| request.port != port);
        for request in &requests {
            if request.is_new {
                slow.total += 1;
                slow.teller.iter().for_each(|tell| tell(request));
            }
        }
        slow.requests.extend(requests);
    }

    /// The slow requests, oldest first, and their total since the start.
    pub fn slow_requests(&self) -> (Vec<SlowRequest>, u64) {
        let slow = lock(&self.slow.0);
        let mut requests = slow.requests.clone();
        requests.sort_by_key(|request| std::cmp::Reverse(request.age));
        (requests, slow.total)
    }

    /// `tell` is called, with little delay, for each request that becomes slow.
    pub fn on_slow(&self, tell: impl Fn(&SlowRequest) + Send + Sync + 'static) {
        lock(&self.slow.0).teller = Some(Box::new(tell));
    }

    /// The reason for which a bio that is parked in `port` waits.
    pub fn parked_for(&self, bio: &crate::bio::Bio, port: &Port) -> &'static str {
        self.seat(port).parked_for(bio)
    }

    /// The part that the disk of an I/O has in its target.
    fn role_of(&self, io: &DiskIo, port: &Port) -> &'static str {
        self.seat(port).role_of(io)
    }
}

impl Driver {
    /// Reports the driver's slow requests and their reasons to the device.
    pub fn report_slow(&self, slow: &[InFlight], ring: &Ring) {
        let (device, port) = (self.device(), self.port());
        let told = slow.iter().map(|request| {
            let parked = port.parked.iter().find(|bio| bio.token == request.token);
            let waits_for = match parked {
                Some(bio) => device.parked_for(bio, port),
                None if ring.awaited() > 0 => {
                    ring.oldest().map_or("a disk", |io| device.role_of(io, port))
                }
                None => "its target",
            };
            let InFlight { op, offset, len, age, is_new, .. } = *request;
            SlowRequest { port: port.id, op, offset, len, age, waits_for, is_new }
        });
        device.set_slow(port, told.collect());
    }
}
