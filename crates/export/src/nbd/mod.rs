//! NBD, fixed newstyle: mapped devices for clients on this machine and others.
//!
//! | file | what |
//! |---|---|
//! | [`proto`] | the wire format |
//! | [`handshake`] | the negotiation before transmission |
//! | [`known`] | what is known of the device without reading it |
//! | [`session`], [`replies`] | requests to bios, finished bios to replies |
//! | [`connection`] | a client from greeting to good-bye, with one receive buffer |
//! | [`secure`], [`tls`] | the same under TLS; certificates and keys |
//! | [`uri`], [`listener`] | where to listen |
//! | [`shared`], `gate` | one address for several doors |
//! | this one | a server: its door, its connections, its end |
//!
//! Everything between the sockets and the device is a pure state machine; the engine's queues drive
//! it, one thread per connection. A client that breaks the protocol loses its connection; other
//! clients are not affected.

pub mod connection;
mod gate;
pub mod handshake;
pub mod known;
pub mod listener;
pub mod proto;
pub mod replies;
pub mod secure;
pub mod session;
pub mod shared;
pub mod tls;
pub mod uri;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use rustls::ServerConfig;
use udm::device::Device;
use udm::error::{Error, Kind, Result};
use udm::limits::{Limit, limit};
use udm::queue::{Queue, Socket};
use udm::sync::atomic::{AtomicUsize, Ordering};
use udm::sync::{Arc, Mutex, lock};
use udm::target::{Fact, FactValue};
use udm::units::BIO_BYTES_MAX;

use crate::budget;
use crate::door::Door;
use crate::socket::SocketFile;

use connection::{Connection, Standing};
use gate::Gate;
use handshake::{Export, Said};
use secure::Secured;
use shared::{Joined, Member};
pub use uri::Uri;

/// Most connections to one server. One more replaces the oldest that is still in its handshake; if
/// there is none, the oldest that has made no request [`UNUSED_SECONDS_MAX`] after it connected; if
/// there is none either, the new one is closed immediately.
pub const CONNECTIONS_MAX: usize = 64;
/// A client that has made no request this long after it connected may be replaced by a new one.
pub const UNUSED_SECONDS_MAX: u64 = 10;
/// Connections that were closed to make room, and have not ended yet.
const LEAVING_MAX: usize = 64;

/// Every stated maximum.
pub fn limits() -> [Limit; 12] {
    [
        limit("nbd_connections", CONNECTIONS_MAX as u64, "clients of an export"),
        limit("nbd_exports", shared::EXPORTS_MAX as u64, "exports with names at an address"),
        limit("nbd_requests", session::REQUESTS_MAX as u64, "requests of a client in flight"),
        limit(
            "nbd_held_bytes",
            session::BYTES_MAX as u64 + BIO_BYTES_MAX,
            "a client's requests and replies, besides free buffers (client_pool_bytes)",
        ),
        limit(
            "nbd_budget_bytes",
            budget::BUDGET_BYTES as u64,
            "requests and replies of all clients together, beyond nbd_free_bytes for each",
        ),
        limit(
            "nbd_free_bytes",
            budget::FREE_BYTES as u64,
            "what a client may hold outside nbd_budget_bytes",
        ),
        limit(
            "nbd_starved_seconds",
            budget::STARVED_SECONDS_MAX,
            "how long a request waits for memory before it fails",
        ),
        limit(
            "nbd_unused_seconds",
            UNUSED_SECONDS_MAX,
            "how long a client without requests keeps its place when there are too many",
        ),
        limit("nbd_option_bytes", proto::OPTION_BYTES_MAX.into(), "an option of the handshake"),
        limit("nbd_handshake_seconds", connection::HANDSHAKE_SECONDS_MAX, "a client's handshake"),
        limit(
            "nbd_farewell_seconds",
            connection::FAREWELL_SECONDS_MAX,
            "how long a client may take its last replies",
        ),
        limit("nbd_status_extents", known::EXTENTS_MAX as u64, "extents of a block status"),
    ]
}

/// Counts of a server's connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connections {
    /// Connected now.
    pub current: u64,
    /// Accepted since the start.
    pub accepted: u64,
    /// Given to another door at the same address, whose export they named.
    pub passed_on: u64,
    /// Closed because there were too many (the new one, or an older one to make room), or because
    /// no thread could be started.
    pub refused: u64,
    /// Ended because the client broke the protocol.
    pub violations: u64,
    /// What the last of those did.
    pub last_violation: Option<String>,
}

/// State shared by the door and the connections.
#[derive(Debug)]
struct Clients {
    device: Arc<Device>,
    uri: Uri,
    /// What TLS needs, where clients have to encrypt.
    tls: Option<Arc<ServerConfig>>,
    /// Its place among the doors at a shared address.
    member: Option<Arc<Member>>,
    counts: Mutex<Connections>,
    queues: Mutex<Vec<Place>>,
    /// Those that were closed to make room.
    leaving: Mutex<Vec<Queue>>,
    connections_max: AtomicUsize,
}

/// A connection's place.
#[derive(Debug)]
struct Place {
    queue: Queue,
    standing: Arc<Standing>,
    since: Instant,
}

impl Place {
    /// Whether it may be replaced by another client, and how readily: in its handshake first.
    fn yields(&self) -> Option<u8> {
        let is_unused = || self.since.elapsed().as_secs() >= UNUSED_SECONDS_MAX;
        match self.standing.get() {
            Standing::GREETED => Some(0),
            Standing::AGREED if is_unused() => Some(1),
            _ => None,
        }
    }
}

/// A device served over NBD. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    clients: Arc<Clients>,
    door: Option<Queue>,
    _socket_file: Option<SocketFile>,
}

impl Server {
    /// Serves `device` at `uri`, which is no shared address.
    pub fn start(device: &Arc<Device>, uri: &Uri) -> Result<Server> {
        let tls = uri.tls.as_ref().map(tls::configure).transpose()?;
        let (socket, uri, socket_file) = listener::listen(uri)?;
        let clients = Clients::new(device, uri, tls, None);
        let for_door = clients.clone();
        let door = Queue::listen("udm-nbd", socket, move |connection| {
            for_door.welcome(connection, None);
        })?;
        Ok(Server { clients, door: Some(door), _socket_file: socket_file })
    }

    /// The same where `uri` may be an address that doors share whose entries are in `home`.
    pub fn start_at(device: &Arc<Device>, uri: &Uri, home: &Path) -> Result<Server> {
        if uri.name.is_none() || uri.tls.is_some() {
            return Server::start(device, uri).map_err(|error| explain(error, uri, home));
        }
        let joined = shared::join(uri, home)?;
        let member = Some(joined.member.clone());
        let clients = Clients::new(device, joined.uri.clone(), None, member);
        let (for_door, joined): (Arc<Clients>, Joined) = (clients.clone(), joined);
        let door = Queue::run("udm-nbd", move |_| Ok(Gate::new(for_door, joined)))?;
        Ok(Server { clients, door: Some(door), _socket_file: None })
    }

    /// Where it listens, with the actual port.
    pub fn uri(&self) -> &Uri {
        &self.clients.uri
    }

    /// Serves at most `max` connections at a time from now on, and never more than
    /// [`CONNECTIONS_MAX`].
    pub fn set_connections_max(&self, max: usize) {
        self.clients.connections_max.store(max.min(CONNECTIONS_MAX), Ordering::Relaxed);
    }

    /// Counts of its connections.
    pub fn connections(&self) -> Connections {
        let passed_on = self.clients.member.as_ref().map_or(0, |member| member.passed_on());
        Connections { passed_on, ..lock(&self.clients.counts).clone() }
    }

    /// Closes the door, answers the requests in flight, closes the connections.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // The door first, so that no new connection arrives.
        drop(self.door.take());
        let places = std::mem::take(&mut *lock(&self.clients.queues));
        for place in &places {
            place.queue.stop();
        }
        drop(places);
        drop(std::mem::take(&mut *lock(&self.clients.leaving)));
    }
}

impl Door for Server {
    fn uri(&self) -> crate::Uri {
        crate::Uri::Nbd(self.clients.uri.clone())
    }

    fn clients(&self) -> u64 {
        lock(&self.clients.counts).current
    }

    fn facts(&self) -> Vec<Fact> {
        let counts = self.connections();
        let number = |name, count, about| Fact { name, value: FactValue::Number(count), about };
        let last = counts.last_violation.map_or(FactValue::Nothing, FactValue::Text);
        let mut facts = vec![
            number("accepted", counts.accepted, "clients since the door was opened"),
            number("refused", counts.refused, "clients that were turned away: too many"),
            number("violations", counts.violations, "clients that broke the protocol"),
            Fact { name: "last_violation", value: last, about: "what the last of those did" },
        ];
        if self.clients.member.is_some() {
            let about = "clients that named another export there";
            facts.push(number("passed_on", counts.passed_on, about));
        }
        facts
    }

    fn set_clients_max(&self, max: usize) {
        self.set_connections_max(max);
    }

    fn stop(self: Box<Self>) {
        Server::stop(*self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// What an address that is in use could be used for.
fn explain(error: Error, uri: &Uri, home: &Path) -> Error {
    let there = shared::exports_at(&uri.place, home);
    let why = match uri.tls {
        _ if !error.to_string().contains("in use") => return error,
        Some(_) => "an address with TLS has one export, because TLS cannot change servers".into(),
        None if there.is_empty() => return error,
        None => format!(
            "exports with names share it ({}): give this one a name, too, as in \
             nbd://ADDR:PORT/NAME or nbd+unix:///NAME?socket=PATH",
            there.join(", ")
        ),
    };
    Error::new(error.kind(), format!("{error}; {why}"))
}

impl Clients {
    fn new(
        device: &Arc<Device>,
        uri: Uri,
        tls: Option<Arc<ServerConfig>>,
        member: Option<Arc<Member>>,
    ) -> Arc<Clients> {
        Arc::new(Clients {
            device: device.clone(),
            uri,
            tls,
            member,
            counts: Mutex::new(Connections::default()),
            queues: Mutex::new(Vec::new()),
            leaving: Mutex::new(Vec::new()),
            connections_max: AtomicUsize::new(CONNECTIONS_MAX),
        })
    }

    /// Gives a connection its own queue: a fresh one, or one that another door has passed on, with
    /// what was said, and received and not answered.
    fn welcome(self: &Arc<Clients>, connection: OwnedFd, from: Option<(Said, Vec<u8>)>) {
        let mut places = lock(&self.queues);
        places.retain(|place| !place.queue.is_over());
        if places.len() >= self.connections_max.load(Ordering::Relaxed) {
            self.make_room(&mut places);
        }
        match self.serve(connection, from, places.len()) {
            Ok(place) => places.push(place),
            Err(_) => lock(&self.counts).refused += 1,
        }
    }

    /// Closes the connection that is least needed. Does not wait for its end.
    fn make_room(&self, places: &mut Vec<Place>) {
        let mut leaving = lock(&self.leaving);
        leaving.retain(|queue| !queue.is_over());
        // The oldest come first.
        let candidates = places.iter().enumerate().filter(|_| leaving.len() < LEAVING_MAX);
        let chosen = candidates.filter_map(|(at, place)| Some((place.yields()?, at))).min();
        if let Some((_, at)) = chosen {
            let Place { queue, .. } = places.remove(at);
            queue.stop();
            leaving.push(queue);
            lock(&self.counts).refused += 1;
        }
    }

    fn serve(
        self: &Arc<Clients>,
        connection: OwnedFd,
        from: Option<(Said, Vec<u8>)>,
        others: usize,
    ) -> Result<Place> {
        let max = self.connections_max.load(Ordering::Relaxed);
        if others >= max {
            return Err(Error::new(Kind::Busy, format!("{max} clients are connected")));
        }
        listener::tune(&connection, &self.uri);
        let conversation = self.converse(&connection, from)?;
        let number = {
            let mut counts = lock(&self.counts);
            counts.accepted += 1;
            counts.current += 1;
            counts.accepted
        };
        let name = format!("udm-nbd-{number}");
        let standing = conversation.standing();
        let client = Socket { stream: connection, is_watched: self.uri.is_polled };
        let queue = match &self.tls {
            None => Queue::serve(&name, &self.device, client, conversation, {
                let clients = self.clone();
                move |it: Connection| clients.farewell(it.violation().map(|why| why.to_string()))
            }),
            Some(tls) => {
                let secured = Secured::new(conversation, tls.clone());
                Queue::serve(&name, &self.device, client, secured, {
                    let clients = self.clone();
                    move |it: Secured| clients.farewell(it.violation())
                })
            }
        };
        let queue = queue.inspect_err(|_| {
            let mut counts = lock(&self.counts);
            counts.accepted -= 1;
            counts.current -= 1;
        })?;
        Ok(Place { queue, standing, since: Instant::now() })
    }

    /// A client's conversation, from the greeting or from where another door left it.
    fn converse(&self, connection: &OwnedFd, from: Option<(Said, Vec<u8>)>) -> Result<Connection> {
        let limits = self.device.limits();
        let export = Export {
            name: self.uri.name.clone().unwrap_or_else(|| self.device.name()),
            size_bytes: self.device.size_bytes(),
            block_bytes: limits.block_bytes,
            has_discard: limits.has_discard,
            is_read_only: self.uri.is_read_only || self.device.is_read_only(),
            needs_tls: self.tls.is_some(),
        };
        let conversation = match from {
            None => Connection::new(export),
            Some((said, rest)) => Connection::resume(export, said, &rest),
        };
        let conversation = conversation.knowing(self.device.clone());
        let Some(member) = &self.member else { return Ok(conversation) };
        let again = connection.try_clone();
        let again = again.map_err(|error| Error::from_io("duplicating", "a connection", error))?;
        Ok(conversation.beside(member.neighbour(again)))
    }

    /// A client has gone.
    fn farewell(&self, violation: Option<String>) {
        let mut counts = lock(&self.counts);
        counts.current -= 1;
        if violation.is_some() {
            counts.violations += 1;
            counts.last_violation = violation;
        }
    }
}
