//! vhost-user-blk: mapped devices as the disks of virtual machines.
//!
//! | file | job |
//! |---|---|
//! | [`proto`] | messages, and violations of the protocol |
//! | [`memory`] | the client's memory |
//! | [`split`], [`packed`], [`chain`] | a ring of either kind; descriptors of requests |
//! | [`poll`] | the length of busy polling before a thread sleeps |
//! | [`inflight`], [`inflight_packed`] | the log of requests in flight, for the next server |
//! | [`virtqueue`] | a ring of either kind, with its log |
//! | [`request`] | requests to bios, finished bios to answers |
//! | [`config`] | the device's configuration for drivers |
//! | [`session`] | the negotiated state, and the served rings |
//! | [`worker`], [`params`] | one ring, served by a queue of its own; its parameters |
//! | [`connection`], [`claim`] | the socket; the client that owns the rings |
//! | [`uri`], [`counts`] | the address; counters |
//! | [`front`] | the client side, for programs |
//! | this one | a server: its listener, its clients, its shutdown |
//!
//! A client has one thread for its socket and one for each ring, so that several cores serve rings
//! at the same time. All input from a client is untrusted: an invalid message disconnects the
//! client, an invalid ring is not served any more, and other clients are not affected.
//! docs/decisions/2026-11-23-vhost-user-by-hand.md explains why udm implements the protocol itself.

pub mod chain;
pub mod claim;
pub mod config;
pub mod connection;
pub mod counts;
pub mod front;
pub mod inflight;
pub mod inflight_packed;
pub mod memory;
pub mod packed;
pub mod params;
pub mod poll;
pub mod proto;
pub mod request;
pub mod session;
pub mod split;
mod steps;
pub mod uri;
pub mod virtqueue;
pub mod worker;

use std::os::fd::OwnedFd;

use udm::base::limits::{Limit, limit};
use udm::device::Device;
use udm::error::{Error, Kind, Result};
use udm::queue::Queue;
use udm::sync::atomic::{AtomicUsize, Ordering};
use udm::sync::{Arc, Mutex, lock};
use udm::target::{Fact, FactValue};
use udm::units::{Nanos, SECOND};

use crate::export::Export;
use crate::socket::{SocketFile, begin_to_listen, bind_unix};

use claim::{Claim, Ownership};
use connection::{Connection, Signs};
pub use counts::Clients;
use counts::Counts;
use poll::Lookers;
use session::Session;
pub use uri::Uri;

/// The pollers of all servers of this process.
static LOOKERS: Lookers = Lookers::new();

/// Maximum clients of one server. At the limit, a new client replaces the oldest one without a
/// served ring; if there is none, the new client is closed immediately.
pub const CLIENTS_MAX: usize = 8;
/// Maximum clients that were closed for a new one and have not ended yet.
const LEAVING_MAX: usize = 8;

/// Returns every stated maximum.
pub fn limits() -> [Limit; 9] {
    [
        limit("vhost_clients", CLIENTS_MAX as u64, "clients of a vhost-user export"),
        limit("vhost_rings", config::QUEUES_MAX as u64, "rings of a client"),
        limit("vhost_ring_entries", chain::ENTRIES_MAX.into(), "entries of a ring"),
        limit("vhost_chain", chain::CHAIN_MAX as u64, "descriptors of a request"),
        limit("vhost_regions", memory::REGIONS_MAX as u64, "regions of a client's memory"),
        limit("vhost_region_bytes", memory::BYTES_MAX, "a client's memory"),
        limit("vhost_look_ns", poll::LOOK_NS_MAX, "poll=auto: longest poll after a request"),
        limit(
            "vhost_vain_percent",
            100 / poll::VAIN_PARTS,
            "poll=auto: the part of a ring's time for polls that find no request",
        ),
        limit("vhost_held_bytes", worker::HELD_BYTES_MAX, "a ring's requests, if more than one"),
    ]
}

/// State shared by the listener's thread and the clients.
#[derive(Debug)]
struct Shared {
    device: Arc<Device>,
    uri: Uri,
    counts: Arc<Counts>,
    ownership: Arc<Ownership>,
    places: Mutex<Vec<Place>>,
    /// Clients that were closed for a new one.
    leaving: Mutex<Vec<Queue>>,
    clients_max: AtomicUsize,
}

/// A client's entry.
#[derive(Debug)]
struct Place {
    queue: Queue,
    signs: Arc<Signs>,
}

/// A device served over vhost-user. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    export: Option<Queue>,
    /// The listening socket, until clients may connect.
    closed: Option<Arc<OwnedFd>>,
    _socket_file: Option<SocketFile>,
}

impl Server {
    /// Serves `device` at `uri`.
    pub fn start(device: &Arc<Device>, uri: &Uri) -> Result<Server> {
        let mut server = Server::open(device, uri)?;
        server.begin()?;
        Ok(server)
    }

    /// Binds the address without letting clients in.
    pub(crate) fn open(device: &Arc<Device>, uri: &Uri) -> Result<Server> {
        let (socket, socket_file) = bind_unix(&uri.path, &uri.access)?;
        let shared = Arc::new(Shared {
            device: device.clone(),
            uri: uri.clone(),
            counts: Arc::default(),
            ownership: Arc::default(),
            places: Mutex::new(Vec::new()),
            leaving: Mutex::new(Vec::new()),
            clients_max: AtomicUsize::new(CLIENTS_MAX),
        });
        let closed = Some(Arc::new(socket));
        Ok(Server { shared, export: None, closed, _socket_file: socket_file })
    }

    /// Returns counts of its clients.
    pub fn clients(&self) -> Clients {
        self.shared.counts.get()
    }

    fn end(&mut self) {
        // The listener's thread first, so that no new client arrives.
        drop(self.export.take());
        let places = std::mem::take(&mut *lock(&self.shared.places));
        places.iter().for_each(|place| place.queue.stop());
        drop(places);
        drop(std::mem::take(&mut *lock(&self.shared.leaving)));
    }
}

impl Export for Server {
    fn uri(&self) -> crate::Uri {
        crate::Uri::Vhost(self.shared.uri.clone())
    }

    fn begin(&mut self) -> Result<()> {
        let Some(socket) = self.closed.take() else { return Ok(()) };
        begin_to_listen(&socket, self.shared.uri.path.display())?;
        let shared = self.shared.clone();
        let welcome = move |connection| shared.welcome(connection);
        self.export = Some(Queue::listen("udm-vhost", socket, welcome)?);
        Ok(())
    }

    fn clients(&self) -> u64 {
        self.shared.counts.get().current
    }

    fn facts(&self) -> Vec<Fact> {
        let counts = self.shared.counts.get();
        let number = |name, count, about| Fact { name, value: FactValue::Number(count), about };
        let last = counts.last_violation.map_or(FactValue::Nothing, FactValue::Text);
        let polled = &self.shared.counts.polled;
        let (rings, idle) = self.shared.rings();
        let idle = idle.map_or(FactValue::Nothing, |idle| FactValue::Number(idle / SECOND));
        let about = "how long a client has been connected without a ring, in seconds";
        vec![
            number("rings", rings, "rings that are served now"),
            Fact { name: "without_rings_seconds", value: idle, about },
            number("accepted", counts.accepted, "clients since the export was opened"),
            number(
                "refused",
                counts.refused,
                "clients that were refused because there were too many",
            ),
            number("violations", counts.violations, "clients that violated the protocol"),
            number("failed_rings", counts.failed_rings, "rings that failed"),
            Fact {
                name: "last_violation",
                value: last,
                about: "the last violation of the protocol",
            },
            number(
                "busy_poll_us",
                polled.looked() / 1000,
                "time spent polling rings, in microseconds",
            ),
            number(
                "busy_poll_wasted_us",
                polled.in_vain() / 1000,
                "time of polls that found no request, in microseconds",
            ),
        ]
    }

    fn set_clients_max(&self, max: usize) {
        self.shared.clients_max.store(max.min(CLIENTS_MAX), Ordering::Relaxed);
    }

    fn device_has_changed(&self) -> Result<()> {
        for place in &*lock(&self.shared.places) {
            place.signs.has_changed.store(true, Ordering::SeqCst);
            place.queue.wake();
        }
        Ok(())
    }

    fn stop(mut self: Box<Self>) {
        self.end();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    /// Returns the number of served rings, and how long a client has had none.
    fn rings(&self) -> (u64, Option<Nanos>) {
        let places = lock(&self.places);
        let there = || places.iter().filter(|place| !place.queue.is_over());
        let rings = there().map(|place| place.signs.rings.load(Ordering::Relaxed)).sum();
        (rings, there().filter_map(|place| place.signs.idle()).max())
    }

    /// Gives a new connection its own queue.
    fn welcome(self: &Arc<Shared>, socket: OwnedFd) {
        let mut places = lock(&self.places);
        places.retain(|place| !place.queue.is_over());
        if places.len() >= self.clients_max.load(Ordering::Relaxed) {
            self.make_room(&mut places);
        }
        match self.serve(socket, places.len()) {
            Ok(place) => places.push(place),
            Err(_) => self.counts.was_refused(),
        }
    }

    /// Closes the oldest client without a served ring. Does not wait for its end.
    fn make_room(&self, places: &mut Vec<Place>) {
        let mut leaving = lock(&self.leaving);
        leaving.retain(|queue| !queue.is_over());
        let is_unused = |place: &Place| place.signs.idle().is_some();
        if leaving.len() < LEAVING_MAX
            && let Some(at) = places.iter().position(is_unused)
        {
            let Place { queue, .. } = places.remove(at);
            queue.stop();
            leaving.push(queue);
            self.counts.was_refused();
        }
    }

    fn serve(self: &Arc<Shared>, socket: OwnedFd, others: usize) -> Result<Place> {
        let max = self.clients_max.load(Ordering::Relaxed);
        if others >= max {
            return Err(Error::new(Kind::Busy, format!("{max} clients are connected")));
        }
        let number = self.counts.has_come();
        let name = format!("udm-vhost-{number}");
        let signs = Arc::new(Signs::of_newcomer());
        let mut session = Session::new(&name, &self.device, self.uri.poll, self.counts.clone())
            .without(self.uri.withheld);
        if !self.uri.is_shared {
            session = session.alone(Claim::new(&self.ownership, number));
        }
        let (counts, its_signs) = (self.counts.clone(), signs.clone());
        let queue =
            Queue::run(&name, move |_| Ok(Connection::new(socket, session, counts, its_signs)));
        let queue = queue.inspect_err(|_| self.counts.has_gone(None))?;
        Ok(Place { queue, signs })
    }
}
