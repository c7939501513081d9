//! The negotiated state of a client: features, memory, rings. Each message changes a part of it,
//! and starts and stops the workers of rings accordingly.
//!
//! A ring is served as soon as it has its size, addresses and kick, and is enabled. A thread of its
//! own serves it until the client stops it, changes its parameters, or disconnects. An invalid
//! message ends the connection; earlier messages are not undone.

use std::os::fd::OwnedFd;

use rustix::net::{SendFlags, send};
use udm::device::{Device, Reported};
use udm::sync::Arc;

use super::LOOKERS;
use super::chain::Shape;
use super::claim::Claim;
use super::config::{self, QUEUES_MAX, blk};
use super::counts::Counts;
use super::inflight::{Extent, Notes};
use super::memory::{Memory, REGIONS_MAX};
use super::params::Params;
use super::poll::{Poll, Poller};
use super::proto::{
    Message, REGION_BYTES, Region, Reply, Request, RingAddresses, Violation, config_has_changed,
    feature, protocol, ring_addresses, u32_at, wrong,
};
use super::virtqueue::Virtqueue;
use super::worker::{Served, Worker};

/// Bits of the number that accompanies a ring's file: the ring, and a flag for a missing file.
const RING_MASK: u64 = 0xff;
const HAS_NO_FILE: u64 = 1 << 8;

/// A client.
#[derive(Debug)]
pub struct Session {
    name: String,
    device: Arc<Device>,
    features: u64,
    /// Whether the client has chosen its features.
    has_features: bool,
    protocol_features: u64,
    memory: Arc<Memory>,
    /// The log of requests in flight.
    notes: Option<Notes>,
    rings: Vec<Ring>,
    /// The channel for notices to the client.
    backend: Option<OwnedFd>,
    /// The device's size that this client has read, or was notified of.
    known_bytes: Option<u64>,
    poll: Poll,
    /// The features that this client is not offered.
    withheld: u64,
    counts: Arc<Counts>,
    /// Required before a ring is served, unless several clients may be.
    claim: Option<Claim>,
}

#[derive(Debug, Default)]
struct Ring {
    entries: u16,
    /// Its position while it is not served.
    base: u32,
    addresses: Option<RingAddresses>,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    err: Option<Arc<OwnedFd>>,
    is_enabled: bool,
    worker: Option<Worker>,
    /// The losses that were reported to its last worker: a client that stops a ring and starts it
    /// again, such as a virtual machine that is paused, gets the error of each later loss.
    reported: Option<Reported>,
}

impl Ring {
    /// Stops its worker, if it has one.
    fn rest(&mut self) {
        if let Some(worker) = self.worker.take() {
            let outcome = worker.end();
            (self.base, self.reported) = (outcome.base, outcome.reported.or(self.reported));
        }
    }
}

impl Session {
    /// Creates a client of `device`. Its threads are named `name` and a number. Failed rings and
    /// the poll time are counted in `counts`.
    pub fn new(name: &str, device: &Arc<Device>, poll: Poll, counts: Arc<Counts>) -> Session {
        Session {
            name: name.to_owned(),
            device: device.clone(),
            features: 0,
            has_features: false,
            protocol_features: 0,
            memory: Arc::default(),
            notes: None,
            rings: (0..QUEUES_MAX).map(|_| Ring::default()).collect(),
            backend: None,
            known_bytes: None,
            poll,
            withheld: 0,
            counts,
            claim: None,
        }
    }

    /// Makes the client's rings depend on a claim: they are served only while no other client's
    /// are.
    pub fn alone(mut self, claim: Claim) -> Session {
        self.claim = Some(claim);
        self
    }

    /// The same client, which is not offered these features.
    pub fn without(mut self, features: u64) -> Session {
        self.withheld = features;
        self
    }

    fn offered(&self) -> u64 {
        config::features(&self.device) & !self.withheld
    }

    /// Number of served rings.
    pub fn served(&self) -> u64 {
        self.rings.iter().filter(|ring| ring.worker.is_some()).count() as u64
    }

    /// Returns the parameters that a started ring lacks, if there is such a ring.
    pub fn forgotten(&self) -> Option<Violation> {
        let is_started = |ring: &Ring| ring.is_enabled && ring.kick.is_some();
        let lacks = |ring: &Ring| {
            let needs = [
                (self.has_features, "features"),
                (self.memory.regions() > 0, "memory"),
                (ring.entries > 0, "a size"),
                (ring.addresses.is_some(), "addresses"),
            ];
            needs.into_iter().find(|(is_there, _)| !is_there).map(|(_, what)| what)
        };
        let mut started = self.rings.iter().enumerate().filter(|(_, ring)| is_started(ring));
        let (index, what) = started.find_map(|(index, ring)| Some((index, lacks(ring)?)))?;
        Some(Violation::new(format!("it started ring {index} without {what}")))
    }

    /// Notifies the client if the device's size differs from the size that it knows. The client
    /// then reads the configuration.
    pub fn device_has_changed(&mut self) {
        let has_all = self.protocol_features & protocol::CONFIG != 0;
        let bytes = Some(self.device.size_bytes());
        if let (Some(backend), true) = (&self.backend, has_all && bytes != self.known_bytes) {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let message = config_has_changed();
            // A client that does not read this channel, or has none, may read the size when it
            // likes.
            if matches!(send(backend, &message, flags), Ok(count) if count == message.len()) {
                self.known_bytes = bytes;
            }
        }
    }

    /// Stops all workers.
    pub fn end(&mut self) {
        self.claim.iter().for_each(Claim::leave);
        // All workers get the request first, so that they stop in parallel.
        self.rings.iter().filter_map(|ring| ring.worker.as_ref()).for_each(Worker::stop);
        self.rings.iter_mut().for_each(Ring::rest);
        self.claim.iter().for_each(Claim::release);
    }

    /// Carries out a message, and returns the answer if the client wants one.
    pub fn take(&mut self, message: Message) -> Result<Option<Reply>, Violation> {
        let reply = self.carry_out(message)?;
        if self.served() == 0 {
            self.claim.iter().for_each(Claim::release);
        }
        Ok(reply)
    }

    fn carry_out(&mut self, mut message: Message) -> Result<Option<Reply>, Violation> {
        let (request, needs_reply) = (message.request, message.needs_reply);
        if let Some(reply) = self.ask(&message)? {
            return Ok(Some(reply));
        }
        self.change(&mut message)?;
        let is_asked = needs_reply && self.protocol_features & protocol::REPLY_ACK != 0;
        Ok(is_asked.then(|| Reply::number(request, 0)))
    }

    /// Carries out a message that has an answer of its own.
    fn ask(&mut self, message: &Message) -> Result<Option<Reply>, Violation> {
        let request = message.request;
        let number = |value| Ok(Some(Reply::number(request, value)));
        match request {
            Request::GetFeatures => number(self.offered()),
            Request::GetProtocolFeatures => number(protocol::OFFERED),
            Request::GetQueueNum => number(QUEUES_MAX as u64),
            Request::GetMaxMemSlots => number(REGIONS_MAX as u64),
            Request::GetConfig => {
                let range = config::range(&message.payload)?;
                self.known_bytes = Some(self.device.size_bytes());
                let space = config::space(&self.device);
                let head = &message.payload[..config::HEAD_BYTES];
                Ok(Some(Reply::new(request, &[head, &space[range]].concat())))
            }
            Request::GetInflightFd => {
                let extent = Extent::parse(&message.payload, self.is_packed())?.needed();
                let file = extent.make().map_err(|error| Violation::new(error.to_string()))?;
                let mut payload = extent.print();
                payload.resize(message.payload.len(), 0);
                let reply = Reply::new(request, &payload);
                Ok(Some(Reply { fd: Some(file), ..reply }))
            }
            Request::GetVringBase => {
                let (index, _) = message.ring_state()?;
                let ring = self.ring(index)?;
                ring.rest();
                ring.kick = None;
                Ok(Some(Reply::ring_state(request, index, ring.base)))
            }
            _ => Ok(None),
        }
    }

    /// Carries out a message that changes the state.
    fn change(&mut self, message: &mut Message) -> Result<(), Violation> {
        match message.request {
            Request::SetOwner => Ok(()),
            Request::ResetOwner => {
                self.end();
                Ok(())
            }
            Request::SetFeatures => self.set_features(message.number()?),
            Request::SetProtocolFeatures => {
                self.protocol_features = message.number()?;
                match self.protocol_features & !protocol::OFFERED {
                    0 => Ok(()),
                    more => wrong(format!("protocol features {more:#x}, which were not offered")),
                }
            }
            Request::SetMemTable => self.set_memory(message),
            Request::AddMemReg => {
                let region = only_region(message)?;
                let file = message.only_fd()?;
                self.change_memory(|memory| memory.add(region, &file))
            }
            Request::RemMemReg => {
                let region = only_region(message)?;
                self.change_memory(|memory| memory.remove(region))
            }
            Request::SetVringNum | Request::SetVringBase | Request::SetVringEnable => {
                let (index, value) = message.ring_state()?;
                self.set_ring(message.request, index, value)
            }
            Request::SetVringAddr => {
                let (index, addresses) = ring_addresses(message.fixed()?)?;
                let ring = self.ring(index)?;
                ring.rest();
                ring.addresses = Some(addresses);
                self.settle(index)
            }
            Request::SetVringKick | Request::SetVringCall | Request::SetVringErr => {
                self.set_file(message)
            }
            Request::SetBackendReqFd => {
                self.backend = Some(message.only_fd()?);
                // The client may know the size from an earlier server: QEMU does not read it again
                // when it reconnects.
                self.device_has_changed();
                Ok(())
            }
            Request::SetInflightFd => {
                let extent = Extent::parse(&message.payload, self.is_packed())?;
                let notes = Notes::map(&message.only_fd()?, extent)?;
                // Served rings use another log, or none.
                self.rings.iter_mut().for_each(Ring::rest);
                self.notes = Some(notes);
                self.settle_all()
            }
            Request::SetConfig => wrong("it writes to the configuration, which is read-only"),
            other => wrong(format!("{other:?} is not a change")),
        }
    }

    fn is_packed(&self) -> bool {
        self.features & feature::RING_PACKED != 0
    }

    fn set_features(&mut self, features: u64) -> Result<(), Violation> {
        let offered = self.offered();
        if features & !offered != 0 {
            let more = features & !offered;
            return wrong(format!("features {more:#x}, which were not offered"));
        }
        if self.has_features && features == self.features {
            return Ok(());
        }
        // A restarted driver may choose other features.
        self.rings.iter_mut().for_each(Ring::rest);
        (self.features, self.has_features) = (features, true);
        // Without protocol features, rings need not be enabled.
        if features & feature::PROTOCOL == 0 {
            self.rings.iter_mut().for_each(|ring| ring.is_enabled = true);
        }
        self.settle_all()
    }

    fn set_memory(&mut self, message: &Message) -> Result<(), Violation> {
        let payload = &message.payload;
        if payload.len() < 8 || payload.len() - 8 < u32_at(payload, 0) as usize * REGION_BYTES {
            return wrong(format!("a table of memory of {} bytes", payload.len()));
        }
        let count = u32_at(payload, 0) as usize;
        if message.fds.len() != count {
            let files = message.fds.len();
            return wrong(format!("a table of {count} regions of memory with {files} files"));
        }
        let mut memory = Memory::default();
        for (bytes, file) in payload[8..].chunks_exact(REGION_BYTES).zip(&message.fds) {
            let bytes = bytes.first_chunk().expect("a chunk has its length");
            memory.add(Region::parse(bytes), file)?;
        }
        self.memory = Arc::new(memory);
        self.update(&self.rings);
        self.settle_all()
    }

    fn change_memory(
        &mut self,
        change: impl FnOnce(&mut Memory) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let mut memory = Memory::clone(&self.memory);
        change(&mut memory)?;
        self.memory = Arc::new(memory);
        self.update(&self.rings);
        self.settle_all()
    }

    fn set_ring(&mut self, request: Request, index: usize, value: u32) -> Result<(), Violation> {
        let is_packed = self.is_packed();
        let ring = self.ring(index)?;
        let short = u16::try_from(value);
        match (request, short, value) {
            (Request::SetVringNum, Ok(entries), _) => {
                ring.rest();
                ring.entries = entries;
            }
            // The base of a packed ring is two numbers.
            (Request::SetVringBase, _, base) if short.is_ok() || is_packed => {
                ring.rest();
                ring.base = base;
            }
            (Request::SetVringEnable, _, 0 | 1) => {
                ring.is_enabled = value == 1;
                if !ring.is_enabled {
                    ring.rest();
                }
            }
            _ => return wrong(format!("{request:?} with {value}")),
        }
        self.settle(index)
    }

    fn set_file(&mut self, message: &mut Message) -> Result<(), Violation> {
        let number = message.number()?;
        let (index, has_none) = ((number & RING_MASK) as usize, number & HAS_NO_FILE != 0);
        let file = if has_none { None } else { Some(Arc::new(message.only_fd()?)) };
        let request = message.request;
        let ring = self.ring(index)?;
        match request {
            Request::SetVringKick => {
                if file.is_none() {
                    return wrong("a ring without a kick file descriptor");
                }
                ring.rest();
                ring.kick = file;
            }
            Request::SetVringCall => ring.call = file,
            _ => ring.err = file,
        }
        self.update(&self.rings[index..=index]);
        self.settle(index)
    }

    fn ring(&mut self, index: usize) -> Result<&mut Ring, Violation> {
        match self.rings.get_mut(index) {
            Some(ring) => Ok(ring),
            None => wrong(format!("ring {index} of {QUEUES_MAX}")),
        }
    }

    fn settle_all(&mut self) -> Result<(), Violation> {
        (0..self.rings.len()).try_for_each(|index| self.settle(index))
    }

    /// Serves a ring that is complete and not served yet.
    fn settle(&mut self, index: usize) -> Result<(), Violation> {
        let ring = &self.rings[index];
        let (Some(addresses), Some(kick)) = (ring.addresses, ring.kick.clone()) else {
            return Ok(());
        };
        let is_ready = ring.is_enabled && ring.entries > 0 && self.has_features;
        if !is_ready || ring.worker.is_some() || self.memory.regions() == 0 {
            return Ok(());
        }
        if let (Some(claim), false) = (&self.claim, self.device.is_read_only()) {
            claim.take()?;
        }
        let shape = Shape { entries: ring.entries, addresses, features: self.features };
        let virtqueue =
            Virtqueue::open(shape, &self.memory, ring.base, self.notes.as_ref(), index)?;
        let params = self.params(ring);
        let name = format!("{}.{index}", self.name);
        let counts = self.counts.clone();
        let poller = Poller::new(self.poll, &LOOKERS, counts.polled.clone());
        // A driver that sends no flushes relies on every write being durable.
        let is_write_through = self.features & blk::FLUSH == 0;
        let reported = ring.reported;
        let served = Served { ring: virtqueue, kick, poller, is_write_through, reported };
        let tell = move |violation: &Violation| counts.ring_is_broken(violation);
        let worker = Worker::start(&name, &self.device, served, params, tell);
        let worker = worker
            .map_err(|error| Violation::new(format!("ring {index} is not served: {error}")))?;
        self.rings[index].worker = Some(worker);
        Ok(())
    }

    fn params(&self, ring: &Ring) -> Params {
        Params { memory: self.memory.clone(), call: ring.call.clone(), err: ring.err.clone() }
    }

    /// Informs the workers of these rings of changes. Returns when all of them use the new state.
    fn update(&self, rings: &[Ring]) {
        let served = || rings.iter().filter_map(|ring| Some((ring, ring.worker.as_ref()?)));
        served().for_each(|(ring, worker)| worker.update(self.params(ring)));
        served().for_each(|(_, worker)| worker.wait_for_update());
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the region of a message about one region.
fn only_region(message: &Message) -> Result<Region, Violation> {
    let bytes: &[u8; 8 + REGION_BYTES] = message.fixed()?;
    Ok(Region::parse(bytes[8..].first_chunk().expect("a region follows eight bytes")))
}
