//! vhost-user-blk: mapped devices as the disks of virtual machines.
//!
//! | file | what |
//! |---|---|
//! | [`proto`] | messages, and what breaks the protocol |
//! | [`memory`] | the client's memory |
//! | [`split`], [`packed`], [`chain`] | a ring in it, of either kind; what leads to requests |
//! | [`poll`] | how long to look at a ring before sleeping |
//! | [`inflight`], [`inflight_packed`] | which requests are in flight, for the next server |
//! | [`virtqueue`] | a ring of either kind, with these notes |
//! | [`request`] | requests to bios, finished bios to answers |
//! | [`config`] | what drivers read of the device |
//! | [`session`] | what was agreed on, and which rings are served |
//! | [`worker`] | one ring, served by a queue of its own |
//! | [`connection`] | the socket |
//! | [`uri`], [`counts`] | where to listen; what happened |
//! | [`front`] | the other side: a client, for programs |
//! | this one | a server: its door, its clients, its end |
//!
//! A client has one thread for its socket and one for each of its rings, so rings are served at the
//! same time by as many cores. Nothing that a client sends is trusted: a message that makes no
//! sense costs the client its connection, a broken ring is not served any more, and other clients
//! are not affected. docs/decisions/2026-11-23-vhost-user-by-hand.md says why it is by hand.

pub mod chain;
pub mod config;
pub mod connection;
pub mod counts;
pub mod front;
pub mod inflight;
pub mod inflight_packed;
pub mod memory;
pub mod packed;
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

use udm::device::Device;
use udm::error::{Error, Kind, Result};
use udm::limits::{Limit, limit};
use udm::queue::Queue;
use udm::sync::atomic::{AtomicUsize, Ordering};
use udm::sync::{Arc, Mutex, lock};
use udm::target::{Fact, FactValue};

use crate::door::Door;
use crate::socket::{SocketFile, listen_unix};

use connection::{Connection, Signs};
pub use counts::Clients;
use counts::Counts;
use poll::Lookers;
use session::Session;
pub use uri::Uri;

/// Those of all servers of this process.
static LOOKERS: Lookers = Lookers::new();

/// Most clients of one server. One more takes the place of the oldest that has no ring served; if
/// there is none, it is closed immediately.
pub const CLIENTS_MAX: usize = 8;
/// Clients that were closed to make room, and have not ended yet.
const LEAVING_MAX: usize = 8;

/// Every stated maximum.
pub fn limits() -> [Limit; 9] {
    [
        limit("vhost_clients", CLIENTS_MAX as u64, "clients of a vhost-user export"),
        limit("vhost_rings", config::QUEUES_MAX as u64, "rings of a client"),
        limit("vhost_ring_entries", chain::ENTRIES_MAX.into(), "entries of a ring"),
        limit("vhost_chain", chain::CHAIN_MAX as u64, "descriptors of a request"),
        limit("vhost_regions", memory::REGIONS_MAX as u64, "regions of a client's memory"),
        limit("vhost_region_bytes", memory::BYTES_MAX, "a client's memory"),
        limit("vhost_look_ns", poll::LOOK_NS_MAX, "poll=auto: looking after a request"),
        limit(
            "vhost_vain_percent",
            100 / poll::VAIN_PARTS,
            "poll=auto: the part of a ring's time that is looked at it in vain",
        ),
        limit("vhost_held_bytes", worker::HELD_BYTES_MAX, "a ring's requests, if more than one"),
    ]
}

/// State shared by the door and the clients.
#[derive(Debug)]
struct Shared {
    device: Arc<Device>,
    uri: Uri,
    counts: Arc<Counts>,
    places: Mutex<Vec<Place>>,
    /// Those that were closed to make room.
    leaving: Mutex<Vec<Queue>>,
    clients_max: AtomicUsize,
}

/// A client's place.
#[derive(Debug)]
struct Place {
    queue: Queue,
    signs: Arc<Signs>,
}

/// A device served by vhost-user. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    door: Option<Queue>,
    _socket_file: Option<SocketFile>,
}

impl Server {
    /// Serves `device` at `uri`.
    pub fn start(device: &Arc<Device>, uri: &Uri) -> Result<Server> {
        let (socket, socket_file) = listen_unix(&uri.path, &uri.access)?;
        let shared = Arc::new(Shared {
            device: device.clone(),
            uri: uri.clone(),
            counts: Arc::default(),
            places: Mutex::new(Vec::new()),
            leaving: Mutex::new(Vec::new()),
            clients_max: AtomicUsize::new(CLIENTS_MAX),
        });
        let for_door = shared.clone();
        let door = Queue::listen("udm-vhost", socket, move |connection| {
            for_door.welcome(connection);
        })?;
        Ok(Server { shared, door: Some(door), _socket_file: socket_file })
    }

    /// Counts of its clients.
    pub fn clients(&self) -> Clients {
        self.shared.counts.get()
    }

    fn end(&mut self) {
        // The door first, so that no new client arrives.
        drop(self.door.take());
        let places = std::mem::take(&mut *lock(&self.shared.places));
        places.iter().for_each(|place| place.queue.stop());
        drop(places);
        drop(std::mem::take(&mut *lock(&self.shared.leaving)));
    }
}

impl Door for Server {
    fn uri(&self) -> crate::Uri {
        crate::Uri::Vhost(self.shared.uri.clone())
    }

    fn clients(&self) -> u64 {
        self.shared.counts.get().current
    }

    fn facts(&self) -> Vec<Fact> {
        let counts = self.shared.counts.get();
        let number = |name, count, about| Fact { name, value: FactValue::Number(count), about };
        let last = counts.last_violation.map_or(FactValue::Nothing, FactValue::Text);
        let polled = &self.shared.counts.polled;
        vec![
            number("accepted", counts.accepted, "clients since the door was opened"),
            number("refused", counts.refused, "clients that were turned away: too many"),
            number("violations", counts.violations, "clients that broke the protocol"),
            number("broken_rings", counts.broken_rings, "rings that are not served any more"),
            Fact { name: "last_violation", value: last, about: "what the last of those did" },
            number("polled_us", polled.looked() / 1000, "microseconds of looking at rings"),
            number("polled_in_vain_us", polled.in_vain() / 1000, "of those the ones in vain"),
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
    /// Gives a fresh connection its own queue.
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

    /// Closes the oldest client without a ring that is served. Does not wait for its end.
    fn make_room(&self, places: &mut Vec<Place>) {
        let mut leaving = lock(&self.leaving);
        leaving.retain(|queue| !queue.is_over());
        let is_unused = |place: &Place| !place.signs.is_serving.load(Ordering::Relaxed);
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
        let name = format!("udm-vhost-{}", self.counts.has_come());
        let signs = Arc::new(Signs::default());
        let session = Session::new(&name, &self.device, self.uri.poll, self.counts.clone());
        let (counts, its_signs) = (self.counts.clone(), signs.clone());
        let queue =
            Queue::run(&name, move |_| Ok(Connection::new(socket, session, counts, its_signs)));
        let queue = queue.inspect_err(|_| self.counts.has_gone(None))?;
        Ok(Place { queue, signs })
    }
}
