//! A flush that fails under several connections of all kinds: NBD connections, rings of one and of
//! several virtual machines, callers in the process. The flush of one covers the acknowledged
//! writes of all (NBD: CAN_MULTI_CONN). So each connection that was open gets one error, whichever
//! of them wrote.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/front.rs"]
mod front;

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use front::{FLUSH, Front, PACKED, Ring, USUAL};
use udm::bio::Op;
use udm::build::{self, BuildOptions, NamedDevices};
use udm::device::Device;
use udm::disk::{Effect, Fault, SimDisk};
use udm::error::Status;
use udm::local::Local;
use udm::queue::Queue;
use udm::sync::Arc;
use udm::table::Table;
use udm_export::nbd::Server;
use udm_export::vhost;
use udm_export::vhost::poll::Poll;

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

struct Served {
    server: Option<Server>,
    machines: Option<vhost::Server>,
    _background: Queue,
    device: Arc<Device>,
    origin: Arc<SimDisk>,
    folder: tempfile::TempDir,
}

impl Served {
    fn start(table: &str) -> Served {
        let mut devices = NamedDevices::new();
        let disk = |bytes: u64| {
            let disk = Arc::new(SimDisk::new(bytes, 512));
            disk.say_to_all();
            disk
        };
        let origin = disk(32 * MIB);
        devices.add_disk("/origin", origin.clone());
        devices.add_disk("/cache", disk(4 * MIB));
        devices.add_disk("/metadata", disk(MIB));
        let table = Table::parse(table).unwrap();
        let table = build::build(&table, &devices, &BuildOptions::named(1)).unwrap();
        let device = Device::with_table("flushed", table).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let uri = format!("nbd+unix://{}/socket", folder.path().display()).parse().unwrap();
        let server = Some(Server::start(&device, &uri).unwrap());
        let uri = vhost::Uri::new(folder.path().join("machines"), Poll::Never);
        let uri = vhost::Uri { is_shared: true, ..uri };
        let machines = Some(vhost::Server::start(&device, &uri).unwrap());
        let _background = Queue::background("background", &device).unwrap();
        Served { server, machines, _background, device, origin, folder }
    }

    fn nbd(&self) -> Client {
        let mut stream = UnixStream::connect(self.folder.path().join("socket")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&common::usual_handshake(false)).unwrap();
        stream.read_exact(&mut [0; common::USUAL_ANSWER_BYTES]).unwrap();
        Client::Nbd(common::Client { stream })
    }

    /// A virtual machine with two rings.
    fn machine(&self, features: u64) -> [Client; 2] {
        let mut front = Front::connect(&self.folder.path().join("machines"));
        front.negotiate(features);
        let rings = [0, 1].map(|index| front.ring(index, 32));
        let front = Rc::new(RefCell::new(front));
        rings.map(|ring| Client::Ring(front.clone(), ring))
    }

    /// Clients of all kinds.
    fn clients(&self) -> Vec<Client> {
        let mut clients = vec![self.nbd(), self.nbd()];
        clients.push(Client::Local(Box::new(Local::new(&self.device).unwrap())));
        for features in [USUAL, USUAL | PACKED, USUAL & !FLUSH] {
            clients.extend(self.machine(features));
        }
        clients
    }

    fn next_flush_fails(&self) {
        self.origin.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop();
        }
        drop(self.machines.take());
    }
}

/// A sector in a block that was not written before. A block that was written often would be moved
/// into the cache, whose commits fail, and durable writes with them, if the origin fails meanwhile.
fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    64 * (32 + NEXT.fetch_add(1, Ordering::Relaxed) % 960)
}

/// A connection.
enum Client {
    Nbd(common::Client),
    Local(Box<Local>),
    /// A ring of a virtual machine. If the driver does not know flushes, all writes are durable.
    Ring(Rc<RefCell<Front>>, Ring),
}

impl Client {
    /// Whether a write at sector `at` is answered with success.
    fn writes(&mut self, is_durable: bool, at: u64) -> bool {
        let data = [7; 4096];
        match self {
            Client::Nbd(client) => {
                let flags = if is_durable { common::FUA } else { 0 };
                client.send(&common::write(flags, 1, at * 512, &data));
                client.reply(0).error == 0
            }
            Client::Local(local) => local.write_at(&data, at * 512, is_durable).is_ok(),
            Client::Ring(front, ring) => {
                let front = front.borrow();
                let has_written = ring.write(&front, at, &data) == 0;
                has_written && (!is_durable || !Client::can_flush(ring) || ring.flush(&front) == 0)
            }
        }
    }

    fn flushes(&mut self) -> bool {
        match self {
            Client::Nbd(client) => {
                client.send(&common::request(0, 3, 3, 0, 0));
                client.reply(0).error == 0
            }
            Client::Local(local) => local.flush().is_ok(),
            Client::Ring(_, ring) if !Client::can_flush(ring) => self.writes(true, fresh()),
            Client::Ring(front, ring) => ring.flush(&front.borrow()) == 0,
        }
    }

    fn can_flush(ring: &Ring) -> bool {
        ring.features & FLUSH != 0
    }

    /// Pauses a virtual machine's ring while `paused` runs.
    fn pause(&mut self, paused: impl FnOnce()) {
        let Client::Ring(front, ring) = self else { panic!("only rings pause") };
        let base = front.borrow_mut().stop_at(ring);
        paused();
        front.borrow_mut().start(ring, base);
    }
}

const TABLES: [&str; 4] = [
    "0 65536 linear /origin 0",
    "0 65536 cache /metadata /cache /origin 64 1 writethrough smq 0",
    "0 65536 cache /metadata /cache /origin 64 1 writeback smq 0",
    "0 65536 cache /metadata /cache /origin 64 1 writeback probation 0",
];

#[test]
fn each_connection_that_was_open_gets_one_error_of_a_failed_flush() {
    for table in TABLES {
        let served = Served::start(table);
        let mut clients = served.clients();
        for asker in 0..clients.len() {
            let case = format!("{table}, asked by client {asker}");
            for client in &mut clients {
                assert!(client.flushes(), "{case}: before anything failed");
            }
            // Writes of the last two are durable, so a flush that fails loses none of them.
            let writer = (asker + 3) % (clients.len() - 2);
            // Each time another block: a block that was written often would be cached, and a flush
            // of the origin not be needed.
            let at = 128 * (1 + asker as u64);
            assert!(clients[writer].writes(false, at), "{case}");
            served.next_flush_fails();
            assert!(!clients[asker].flushes(), "{case}: its own flush failed");
            for (nth, client) in clients.iter_mut().enumerate().filter(|(nth, _)| *nth != asker) {
                assert!(!client.flushes(), "{case}: client {nth}'s flush covers the lost write");
            }
            for (nth, client) in clients.iter_mut().enumerate() {
                assert!(client.flushes(), "{case}: client {nth} got its error");
                assert!(client.writes(true, fresh()), "{case}: client {nth} got its error");
            }
            assert!(served.nbd().flushes(), "{case}: it came when all had got their errors");
        }
    }
}

/// A machine that is paused and continued stops its rings and starts them again.
#[test]
fn a_paused_machine_gets_its_error_when_it_continues() {
    for table in TABLES {
        let served = Served::start(table);
        let (mut asker, [mut ring, mut other]) = (served.nbd(), served.machine(USUAL));
        for client in [&mut asker, &mut ring, &mut other] {
            assert!(client.flushes(), "{table}: before anything failed");
        }
        // The flush fails before the pause, and during it.
        assert!(ring.writes(false, 8), "{table}");
        served.next_flush_fails();
        assert!(!asker.flushes(), "{table}");
        ring.pause(|| {});
        assert!(!ring.flushes() && ring.flushes(), "{table}: one error");
        assert!(ring.writes(false, 8), "{table}");
        ring.pause(|| {
            served.next_flush_fails();
            assert!(!asker.flushes(), "{table}");
            assert!(asker.flushes(), "{table}");
        });
        assert!(!ring.flushes() && ring.flushes(), "{table}: one error");
        assert!(!other.flushes() && other.flushes(), "{table}: its other ring");
        ring.pause(|| {});
        assert!(ring.flushes(), "{table}: it got its error");
    }
}
