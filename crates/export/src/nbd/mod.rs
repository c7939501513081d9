//! NBD, fixed newstyle: mapped devices for clients on this machine and others.
//!
//! | file | job |
//! |---|---|
//! | [`proto`] | the wire format |
//! | [`handshake`] | the negotiation before transmission |
//! | [`known`] | properties of the device that need no read |
//! | [`session`], [`replies`] | requests to bios, finished bios to replies |
//! | [`rules`] | which requests are valid |
//! | [`connection`] | a client's whole connection, with one receive buffer |
//! | [`secure`], [`tls`], `der` | the same under TLS; certificates and keys |
//! | [`uri`], [`listener`] | the address; the listening socket |
//! | [`shared`], `gate` | one address for several exports |
//! | this one | a server: its listener, its connections, its shutdown |
//!
//! All code between the sockets and the device is a pure state machine; the engine's queues drive
//! it, with one thread per connection. A client that breaks the protocol is disconnected, without
//! effect on other clients.

pub mod connection;
mod der;
mod gate;
pub mod handshake;
pub mod known;
pub mod listener;
pub mod proto;
pub mod replies;
pub mod rules;
pub mod secure;
pub mod session;
pub mod shared;
pub mod tls;
pub mod uri;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use udm::base::limits::{Limit, limit};
use udm::device::Device;
use udm::error::{Error, Kind, Result};
use udm::queue::{Queue, Socket};
use udm::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use udm::sync::{Arc, Mutex, lock};
use udm::target::{Fact, FactValue};
use udm::units::BIO_BYTES_MAX;

use crate::budget;
use crate::export::Export;
use crate::socket::SocketFile;

use connection::{Connection, Standing};
use gate::Gate;
use handshake::{ExportInfo, Said};
use rules::Unaligned;
use secure::Secured;
use shared::{Joined, Member};
use tls::Certificates;
pub use uri::Uri;

/// Maximum connections to one server. At the limit, a new connection replaces the oldest one in its
/// handshake. If there is none, it replaces the oldest one without a request [`UNUSED_SECONDS_MAX`]
/// after it connected. If there is none either, the new connection is closed immediately.
pub const CONNECTIONS_MAX: usize = 64;
/// A client without a request this long after it connected may be replaced by a new one.
pub const UNUSED_SECONDS_MAX: u64 = 10;
/// Maximum connections that were closed for a new one and have not ended yet.
const LEAVING_MAX: usize = 64;

/// Returns every stated maximum.
pub fn limits() -> [Limit; 12] {
    [
        limit("nbd_connections", CONNECTIONS_MAX as u64, "clients of an export"),
        limit("nbd_exports", shared::EXPORTS_MAX as u64, "exports with names at an address"),
        limit("nbd_requests", session::REQUESTS_MAX as u64, "requests of a client in flight"),
        limit(
            "nbd_held_bytes",
            session::BYTES_MAX as u64 + BIO_BYTES_MAX,
            "a client's requests and replies, without free buffers (client_pool_bytes)",
        ),
        limit(
            "nbd_budget_bytes",
            budget::BUDGET_BYTES as u64,
            "requests and replies of all clients together, beyond nbd_free_bytes for each",
        ),
        limit(
            "nbd_free_bytes",
            budget::FREE_BYTES as u64,
            "bytes that a client may hold outside nbd_budget_bytes",
        ),
        limit(
            "nbd_starved_seconds",
            budget::STARVED_SECONDS_MAX,
            "how long a request waits for memory before it fails",
        ),
        limit(
            "nbd_unused_seconds",
            UNUSED_SECONDS_MAX,
            "how long a client without requests keeps its connection when there are too many",
        ),
        limit("nbd_option_bytes", proto::OPTION_BYTES_MAX.into(), "an option of the handshake"),
        limit("nbd_handshake_seconds", connection::HANDSHAKE_SECONDS_MAX, "a client's handshake"),
        limit(
            "nbd_farewell_seconds",
            connection::FAREWELL_SECONDS_MAX,
            "how long a client may take to receive its last replies",
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
    /// Handed over to another export at the same address, which the client named.
    pub handed_over: u64,
    /// Closed because there were too many (the new one, or an older one in its place), or because
    /// no thread could be started.
    pub refused: u64,
    /// Ended because the client broke the protocol.
    pub violations: u64,
    /// The last of these violations.
    pub last_violation: Option<String>,
}

/// State shared by the listener's thread and the connections.
#[derive(Debug)]
struct Clients {
    device: Arc<Device>,
    uri: Uri,
    /// Certificates, if clients must encrypt.
    tls: Option<Certificates>,
    /// Its membership among the exports at a shared address.
    member: Option<Arc<Member>>,
    counts: Mutex<Connections>,
    unaligned: Arc<Unaligned>,
    queues: Mutex<Vec<Place>>,
    /// Connections that were closed for a new one.
    leaving: Mutex<Vec<Queue>>,
    connections_max: AtomicUsize,
    /// Whether the gate of a shared address lets clients in.
    is_open: AtomicBool,
}

/// A connection's entry.
#[derive(Debug)]
struct Place {
    queue: Queue,
    standing: Arc<Standing>,
    since: Instant,
}

impl Place {
    /// Whether another client may replace it, and its rank: connections in their handshake first.
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
    /// Accepts clients; at a shared address, it also answers other exports.
    export: Option<Queue>,
    /// The listening socket, until clients may connect.
    closed: Option<Arc<OwnedFd>>,
    _socket_file: Option<SocketFile>,
}

impl Server {
    /// Serves `device` at `uri`, which must not be a shared address.
    pub fn start(device: &Arc<Device>, uri: &Uri) -> Result<Server> {
        let mut server = Server::open(device, uri)?;
        server.let_in()?;
        Ok(server)
    }

    /// Like [`Server::start`], but exports may share `uri`; their entries are in `home`.
    pub fn start_at(device: &Arc<Device>, uri: &Uri, home: &Path) -> Result<Server> {
        let mut server = Server::open_at(device, uri, home)?;
        server.let_in()?;
        Ok(server)
    }

    /// Binds the address without letting clients in.
    fn open(device: &Arc<Device>, uri: &Uri) -> Result<Server> {
        let tls = uri.tls.as_ref().map(Certificates::open).transpose()?;
        let (socket, uri, socket_file) = listener::bind(uri)?;
        let clients = Clients::new(device, uri, tls, None);
        let closed = Some(Arc::new(socket));
        Ok(Server { clients, export: None, closed, _socket_file: socket_file })
    }

    /// Like [`Server::open`], but the address may be shared.
    pub(crate) fn open_at(device: &Arc<Device>, uri: &Uri, home: &Path) -> Result<Server> {
        if uri.name.is_none() || uri.tls.is_some() {
            return Server::open(device, uri).map_err(|error| explain(error, uri, home));
        }
        let joined = shared::join(uri, home)?;
        let member = Some(joined.member.clone());
        let clients = Clients::new(device, joined.uri.clone(), None, member);
        let closed = Some(joined.listener.clone());
        let (for_export, joined): (Arc<Clients>, Joined) = (clients.clone(), joined);
        // Other exports may ask it for the listener immediately.
        let export = Queue::run("udm-nbd", move |_| Ok(Gate::new(for_export, joined)))?;
        Ok(Server { clients, export: Some(export), closed, _socket_file: None })
    }

    fn let_in(&mut self) -> Result<()> {
        let Some(socket) = self.closed.take() else { return Ok(()) };
        listener::begin(&socket, &self.clients.uri)?;
        if let Some(gate) = &self.export {
            self.clients.is_open.store(true, Ordering::Release);
            gate.wake();
            return Ok(());
        }
        let clients = self.clients.clone();
        self.export = Some(Queue::listen("udm-nbd", socket, move |connection| {
            clients.welcome(connection, None);
        })?);
        Ok(())
    }

    /// Returns the address, with the actual port.
    pub fn uri(&self) -> &Uri {
        &self.clients.uri
    }

    /// Limits the connections at a time to `max` from now on, and never more than
    /// [`CONNECTIONS_MAX`].
    pub fn set_connections_max(&self, max: usize) {
        self.clients.connections_max.store(max.min(CONNECTIONS_MAX), Ordering::Relaxed);
    }

    /// Returns counts of its connections.
    pub fn connections(&self) -> Connections {
        let handed_over = self.clients.member.as_ref().map_or(0, |member| member.handed_over());
        Connections { handed_over, ..lock(&self.clients.counts).clone() }
    }

    /// Stops accepting clients, answers the requests in flight, and closes the connections.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // The listener's thread first, so that no new connection arrives.
        drop(self.export.take());
        let places = std::mem::take(&mut *lock(&self.clients.queues));
        for place in &places {
            place.queue.stop();
        }
        drop(places);
        drop(std::mem::take(&mut *lock(&self.clients.leaving)));
    }
}

impl Export for Server {
    fn uri(&self) -> crate::Uri {
        crate::Uri::Nbd(self.clients.uri.clone())
    }

    /// Disconnected clients do not count, even if requests of them are in flight.
    fn clients(&self) -> u64 {
        let places = lock(&self.clients.queues);
        places.iter().filter(|place| place.standing.get() != Standing::LEFT).count() as u64
    }

    fn facts(&self) -> Vec<Fact> {
        let counts = self.connections();
        let number = |name, count, about| Fact { name, value: FactValue::Number(count), about };
        let last = counts.last_violation.map_or(FactValue::Nothing, FactValue::Text);
        let mut facts = vec![
            number("accepted", counts.accepted, "clients since the export was opened"),
            number(
                "refused",
                counts.refused,
                "clients that were refused because there were too many",
            ),
            number("violations", counts.violations, "clients that violated the protocol"),
            Fact {
                name: "last_violation",
                value: last,
                about: "the last violation of the protocol",
            },
            number(
                "unaligned_clients",
                self.clients.unaligned.clients(),
                "clients with requests that are not whole blocks: they never asked for block sizes",
            ),
            number(
                "unaligned_requests",
                self.clients.unaligned.requests(),
                "requests that are not whole blocks: the blocks around them are read and written",
            ),
        ];
        if let Some(tls) = &self.clients.tls {
            let value = tls.problem().map_or(FactValue::Nothing, FactValue::Text);
            let about = "why newer certificates are not used";
            facts.push(Fact { name: "certificates_problem", value, about });
        }
        if self.clients.member.is_some() {
            let about = "clients that asked this address for another export";
            facts.push(number("handed_over", counts.handed_over, about));
        }
        facts
    }

    fn set_clients_max(&self, max: usize) {
        self.set_connections_max(max);
    }

    fn begin(&mut self) -> Result<()> {
        self.let_in()
    }

    fn notes(&self) -> Vec<String> {
        self.clients.tls.as_ref().map_or_else(Vec::new, Certificates::notes)
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

/// Adds to the error how else the address could be used.
fn explain(error: Error, uri: &Uri, home: &Path) -> Error {
    let there = shared::exports_at(&uri.place, home);
    let why = match uri.tls {
        _ if !error.to_string().contains("in use") => return error,
        Some(_) => "an address with TLS has one export, because TLS cannot change servers".into(),
        None if there.is_empty() => return error,
        None => format!(
            "exports with names share it ({}): also give this one a name, as in \
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
        tls: Option<Certificates>,
        member: Option<Arc<Member>>,
    ) -> Arc<Clients> {
        Arc::new(Clients {
            device: device.clone(),
            uri,
            tls,
            member,
            counts: Mutex::new(Connections::default()),
            unaligned: Arc::default(),
            queues: Mutex::new(Vec::new()),
            leaving: Mutex::new(Vec::new()),
            connections_max: AtomicUsize::new(CONNECTIONS_MAX),
            is_open: AtomicBool::new(false),
        })
    }

    /// Gives a connection its own queue. The connection is new, or another export has handed it
    /// over with its handshake's state and the received bytes without an answer.
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

    /// Closes the connection that is needed least. Does not wait for its end.
    fn make_room(&self, places: &mut Vec<Place>) {
        let mut leaving = lock(&self.leaving);
        leaving.retain(|queue| !queue.is_over());
        // The oldest are first.
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
        let its_standing = standing.clone();
        let client = Socket { stream: connection, is_watched: self.uri.is_polled };
        let queue = match &self.tls {
            None => Queue::serve(&name, &self.device, client, conversation, {
                let clients = self.clone();
                move |it: Connection| {
                    clients.farewell(&its_standing, it.violation().map(|why| why.to_string()));
                }
            }),
            Some(tls) => {
                let secured = Secured::new(conversation, tls.current());
                Queue::serve(&name, &self.device, client, secured, {
                    let clients = self.clone();
                    move |it: Secured| clients.farewell(&its_standing, it.violation())
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

    /// Creates a client's connection, from the greeting or from the state that another export
    /// handed over.
    fn converse(&self, connection: &OwnedFd, from: Option<(Said, Vec<u8>)>) -> Result<Connection> {
        let limits = self.device.limits();
        let export = ExportInfo {
            name: self.uri.name.clone().unwrap_or_else(|| self.device.name()),
            size_bytes: self.device.size_bytes(),
            block_bytes: limits.block_bytes,
            minimum_bytes: limits.minimum_bytes,
            has_discard: limits.has_discard,
            is_read_only: self.uri.is_read_only || self.device.is_read_only(),
            needs_tls: self.tls.is_some(),
        };
        let conversation = match from {
            None => Connection::new(export),
            Some((said, rest)) => Connection::resume(export, said, &rest),
        };
        let conversation =
            conversation.knowing(self.device.clone()).counting(self.unaligned.clone());
        let Some(member) = &self.member else { return Ok(conversation) };
        let again = connection.try_clone();
        let again = again.map_err(|error| Error::from_io("duplicating", "a connection", error))?;
        Ok(conversation.beside(member.neighbour(again)))
    }

    /// Records that a client has disconnected.
    fn farewell(&self, standing: &Standing, violation: Option<String>) {
        standing.set(Standing::LEFT);
        let mut counts = lock(&self.counts);
        counts.current -= 1;
        if violation.is_some() {
            counts.violations += 1;
            counts.last_violation = violation;
        }
    }
}
