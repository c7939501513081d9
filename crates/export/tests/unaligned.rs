//! Clients of NBD that never ask for the block sizes, on devices whose blocks are 4096 bytes: their
//! requests may be any bytes, and do not undo the writes of other clients.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/front.rs"]
mod front;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use common::{Client, FUA};
use front::{Front, USUAL};
use udm::bio::Op;
use udm::build::{self, BuildOptions, NamedDevices};
use udm::device::Device;
use udm::disk::{Disk, Effect, Fault, RamDisk, SimDisk};
use udm::error::Status;
use udm::local::Local;
use udm::pcache::layout::Geometry;
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::prng::Prng;
use udm::queue::Queue;
use udm::sync::Arc;
use udm::table::Table;
use udm::target::FactValue;
use udm_export::Export;
use udm_export::nbd::Server;
use udm_export::vhost;
use udm_export::vhost::poll::Poll;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// Bytes of each device.
const SIZE: usize = 1 << 20;
const READ: u16 = 0;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const ZERO: u16 = 6;
const EINVAL: u32 = 22;

const TABLES: [&str; 5] = [
    "0 2048 linear /origin 0",
    "0 2048 writecache s /origin /cache 4096 0",
    "0 2048 writecache p /origin /pmem 4096 0",
    "0 2048 pcache /pmem /origin",
    "0 2048 cache /metadata /cache /origin 64 1 writeback smq 0",
];

struct Served {
    // In the order in which they must end.
    server: Option<Server>,
    machines: Option<vhost::Server>,
    _background: Queue,
    device: Arc<Device>,
    folder: tempfile::TempDir,
}

impl Served {
    fn start(table: &str, origin: Arc<dyn Disk>) -> Served {
        let mut devices = NamedDevices::new();
        devices.add_disk("/origin", origin);
        devices.add_disk("/cache", Arc::new(RamDisk::new(4 * MIB, 4096)));
        devices.add_disk("/metadata", Arc::new(RamDisk::new(4 * MIB, 4096)));
        devices.add_pmem("/pmem", Arc::new(SimPmem::new(16 << 20, Persistence::Cpu)));
        let geometry = Some(Geometry { segment_bytes: 256 << 10, device_bytes_min: 0 });
        let options = BuildOptions { geometry, ..BuildOptions::named(1) };
        let table = build::build(&Table::parse(table).unwrap(), &devices, &options).unwrap();
        let device = Device::with_table("blocks", table).unwrap();
        assert_eq!(device.limits().block_bytes as usize, BLOCK);
        let folder = tempfile::tempdir().unwrap();
        let uri = format!("nbd+unix://{}/socket", folder.path().display()).parse().unwrap();
        let server = Some(Server::start(&device, &uri).unwrap());
        let uri = vhost::Uri::new(folder.path().join("machines"), Poll::Never);
        let machines = Some(vhost::Server::start(&device, &uri).unwrap());
        let _background = Queue::background("background", &device).unwrap();
        Served { server, machines, _background, device, folder }
    }

    fn connect(&self, handshake: &[u8], answer_bytes: usize) -> Client {
        let mut stream = UnixStream::connect(self.folder.path().join("socket")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(handshake).unwrap();
        stream.read_exact(&mut vec![0; answer_bytes]).unwrap();
        Client { stream }
    }

    /// A client that has asked for the block sizes.
    fn bound(&self) -> Client {
        self.connect(&common::usual_handshake(false), common::USUAL_ANSWER_BYTES)
    }

    /// A client that has not: it uses GO without a question, as nbd-client does, or EXPORT_NAME.
    fn free(&self, is_old: bool) -> Client {
        let flags = common::client_flags(3);
        if is_old {
            return self.connect(&[flags, common::option(1, b"")].concat(), 18 + 10);
        }
        // INFO asks, but does not bind.
        let info = common::option(6, &common::go("", &[3]));
        let go = common::option(7, &common::go("", &[]));
        let answer_bytes = 2 * common::USUAL_ANSWER_BYTES - 18;
        self.connect(&[flags, info, go].concat(), answer_bytes)
    }

    fn machines(&self) -> PathBuf {
        self.folder.path().join("machines")
    }

    /// The counts of clients and of their requests.
    fn unaligned(&self) -> [u64; 2] {
        let facts = self.server.as_ref().unwrap().facts();
        ["unaligned_clients", "unaligned_requests"].map(|name| {
            let fact = facts.iter().find(|fact| fact.name == name).unwrap();
            let FactValue::Number(count) = fact.value else { panic!("{name} is not a number") };
            count
        })
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

fn ram() -> Arc<dyn Disk> {
    Arc::new(RamDisk::new(MIB, BLOCK as u32))
}

/// Sends a request, and returns the error and the data of its reply.
fn ask(client: &mut Client, flags: u16, command: u16, at: usize, len: usize) -> (u32, Vec<u8>) {
    client.send(&common::request(flags, command, 1, at as u64, len as u32));
    let reply = client.reply(if command == READ { len } else { 0 });
    (reply.error, reply.data)
}

fn write(client: &mut Client, flags: u16, at: usize, data: &[u8]) -> u32 {
    client.send(&common::write(flags, 1, at as u64, data));
    client.reply(0).error
}

fn read(client: &mut Client, at: usize, len: usize) -> Vec<u8> {
    let (error, data) = ask(client, 0, READ, at, len);
    assert_eq!(error, 0, "read of {len} bytes at {at}");
    data
}

#[test]
fn any_bytes_are_served_as_a_model_has_them() {
    let seeds = (7..11).flat_map(|seed| TABLES.map(|table| (table, seed)));
    for (nth, (table, seed)) in seeds.enumerate() {
        let mut prng = Prng::new(seed);
        let mut model = vec![0; SIZE];
        prng.fill(&mut model);
        let origin = RamDisk::new(MIB, BLOCK as u32);
        origin.poke(0, &model);
        let served = Served::start(table, Arc::new(origin));
        let mut client = served.free(nth % 2 == 0);
        let mut unaligned = 0;
        for round in 0..600 {
            // Sectors, as Linux sends them, or any bytes; within a block, or over several.
            let unit = if prng.one_in(2) { 512 } else { 1 };
            let at = prng.below(SIZE as u64) as usize / unit * unit;
            let most = if prng.one_in(4) { 100_000 } else { 3000 };
            let len = (1 + prng.below(most) as usize).next_multiple_of(unit).min(SIZE - at);
            let flags = if prng.one_in(8) { FUA } else { 0 };
            let what = format!("{table}, request {round}: {len} bytes at {at}");
            unaligned += u64::from(!(at | len).is_multiple_of(BLOCK));
            match prng.below(8) {
                0..=3 => {
                    let data: Vec<u8> = (0..len).map(|byte| (byte + round) as u8).collect();
                    assert_eq!(write(&mut client, flags, at, &data), 0, "{what}");
                    model[at..at + len].copy_from_slice(&data);
                }
                4 => {
                    assert_eq!(ask(&mut client, flags, ZERO, at, len).0, 0, "{what}");
                    model[at..at + len].fill(0);
                }
                5 => {
                    // Rounded inwards, to whole blocks.
                    assert_eq!(ask(&mut client, flags, TRIM, at, len).0, 0, "{what}");
                    let (start, end) = (at.next_multiple_of(BLOCK), (at + len) / BLOCK * BLOCK);
                    model[start..end.max(start)].fill(0);
                }
                _ => assert!(read(&mut client, at, len) == model[at..at + len], "{what}"),
            }
        }
        assert_eq!(ask(&mut client, 0, FLUSH, 0, 0).0, 0);
        assert!(read(&mut client, 0, SIZE) == model, "{table}: at the end");
        assert_eq!(served.unaligned(), [1, unaligned], "{table}");
    }
}

/// No part of these reads is in the cache. Their whole blocks need less memory than the request.
#[test]
fn reads_around_whole_blocks_are_served_by_the_origin() {
    for table in TABLES {
        let served = Served::start(table, ram());
        let mut client = served.free(true);
        for (at, len) in [(512, 7680), (20 * BLOCK + 1, 2 * BLOCK), (40 * BLOCK - 1, BLOCK + 2)] {
            assert!(read(&mut client, at, len) == vec![0; len], "{table}: {len} bytes at {at}");
        }
    }
}

/// Blocks that clients of parts write alone.
const SHARED: usize = 4;
/// Clients of parts, each with its bytes in each block, and the bytes of each of them.
const PARTS: usize = 4;
const PART: usize = 700;
/// Clients of whole blocks, each with a block in which the clients of parts also write.
const WHOLES: usize = 3;
/// The requests of each client.
const ROUNDS: usize = 300;

/// Writes its part of any block. In the shared blocks other clients write only other bytes.
fn write_parts(client: &mut Client, nth: usize) {
    let mut prng = Prng::new(nth as u64);
    for round in 0..ROUNDS {
        let block = prng.below((SHARED + WHOLES) as u64) as usize;
        let at = block * BLOCK + nth * PART;
        if prng.one_in(5) {
            assert_eq!(ask(client, 0, ZERO, at, PART).0, 0);
            assert!(block >= SHARED || read(client, at, PART) == [0; PART], "{nth}: {round}");
        } else {
            let data = [(1 + round % 255) as u8; PART];
            assert_eq!(write(client, 0, at, &data), 0);
            assert!(block >= SHARED || read(client, at, PART) == data, "{nth}: {round}");
        }
    }
}

/// Writes its whole block. Only this client writes the last bytes of the block.
fn write_blocks(nth: usize, mut write: impl FnMut(usize, &[u8]), read: impl Fn(usize) -> Vec<u8>) {
    let at = (SHARED + nth) * BLOCK;
    for round in 0..ROUNDS {
        let data = [(1 + round % 255) as u8; BLOCK];
        write(at, &data);
        let end = PARTS * PART;
        assert!(read(at)[end..] == data[end..], "client {nth}, round {round}: it was undone");
    }
}

#[test]
fn clients_of_parts_undo_no_write_of_a_neighbour_or_of_another_export() {
    for table in TABLES {
        let served = Served::start(table, ram());
        std::thread::scope(|scope| {
            for nth in 0..PARTS {
                let mut client = served.free(nth % 2 == 0);
                scope.spawn(move || write_parts(&mut client, nth));
            }
            let (one, other) = (served.bound(), served.bound());
            scope.spawn(move || {
                let (one, other) = (std::cell::RefCell::new(one), std::cell::RefCell::new(other));
                let put = |at: usize, data: &[u8]| {
                    assert_eq!(write(&mut one.borrow_mut(), 0, at, data), 0);
                };
                write_blocks(0, put, |at| read(&mut other.borrow_mut(), at, BLOCK));
            });
            let path = served.machines();
            scope.spawn(move || {
                let mut front = Front::connect(&path);
                front.negotiate(USUAL);
                let ring = std::cell::RefCell::new(front.ring(0, 16));
                let put = |at: usize, data: &[u8]| {
                    assert_eq!(ring.borrow_mut().write(&front, at as u64 / 512, data), 0);
                };
                write_blocks(1, put, |at| {
                    ring.borrow_mut().read(&front, at as u64 / 512, BLOCK as u32).1
                });
            });
            let device = served.device.clone();
            scope.spawn(move || {
                let local = std::cell::RefCell::new(Local::new(&device).unwrap());
                let put = |at: usize, data: &[u8]| {
                    local.borrow_mut().write_at(data, at as u64, false).unwrap();
                };
                write_blocks(2, put, |at| {
                    let mut bytes = vec![0; BLOCK];
                    local.borrow_mut().read_at(&mut bytes, at as u64).unwrap();
                    bytes
                });
            });
        });
        assert_eq!(served.unaligned()[0], PARTS as u64, "{table}");
    }
}

#[test]
fn a_client_that_asked_for_block_sizes_must_keep_to_them() {
    for table in TABLES {
        let served = Served::start(table, ram());
        let mut client = served.bound();
        for (at, len) in [(0, 512), (512, BLOCK), (1, 1), (BLOCK, BLOCK + 512)] {
            for command in [READ, TRIM, ZERO] {
                assert_eq!(ask(&mut client, 0, command, at, len).0, EINVAL, "{table}: {command}");
            }
            assert_eq!(write(&mut client, 0, at, &vec![7; len]), EINVAL, "{table}");
        }
        assert_eq!(write(&mut client, 0, BLOCK, &[7; BLOCK]), 0);
        assert_eq!(read(&mut client, BLOCK, BLOCK), [7; BLOCK]);
        assert_eq!(served.unaligned(), [0, 0]);
    }
}

#[test]
fn zeroes_of_parts_are_not_fast() {
    let served = Served::start("0 2048 writecache s /origin /cache 4096 0", ram());
    let mut client = served.free(false);
    const FAST: u16 = 16;
    assert_eq!(ask(&mut client, FAST, ZERO, 0, 512).0, 95);
    assert_eq!(ask(&mut client, 0, ZERO, 0, 512).0, 0);
}

#[test]
fn parts_are_durable_after_fua_or_a_flush_and_fail_with_the_error_of_the_disk() {
    let disk = Arc::new(SimDisk::new(MIB, BLOCK as u32));
    disk.poke(0, &[1; SIZE]);
    let served = Served::start("0 2048 linear /origin 0", disk.clone());
    let mut client = served.free(false);
    let mut expected = vec![1; SIZE];
    // Within a block, over the bound of two, and around whole blocks.
    for (at, len) in [(100, 512), (2 * BLOCK - 10, 20), (5 * BLOCK + 512, 3 * BLOCK)] {
        for (flags, value) in [(FUA, 7), (0, 8)] {
            assert_eq!(write(&mut client, flags, at, &vec![value; len]), 0);
            if flags == 0 {
                assert!(disk.durable_image() == expected, "the disk has a volatile cache");
                assert_eq!(ask(&mut client, 0, FLUSH, 0, 0).0, 0);
            }
            expected[at..at + len].fill(value);
            assert!(disk.durable_image() == expected, "{len} bytes at {at}, flags {flags}");
        }
        assert_eq!(ask(&mut client, FUA, ZERO, at, len).0, 0);
        expected[at..at + len].fill(0);
        assert!(disk.durable_image() == expected, "{len} zeroes at {at}");
    }
    // The block cannot be read, so its part cannot be written.
    let fault = Fault::new(Effect::Fail(Status::Io)).of(Op::Read);
    disk.inject(fault.within(0..BLOCK as u64).times(1));
    assert_eq!(write(&mut client, 0, 100, &[9; 512]), 5);
    assert_eq!(write(&mut client, FUA, 100, &[9; 512]), 0);
    expected[100..612].fill(9);
    assert!(disk.durable_image() == expected);
}
