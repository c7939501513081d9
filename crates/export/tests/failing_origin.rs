//! An origin that begins to fail under a served pcache, and heals: no data is lost, the pauses
//! between tries grow, reads of cached data go on, and in the end the origin has everything.
//!
//! All of it over NBD and with the real background queue; only the devices are simulated.

#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use udm::bio::Op;
use udm::build::{self, BuildOptions, NamedDevices};
use udm::device::Device;
use udm::disk::{Disk, DiskIo, DiskLimits, RamDisk, Ring};
use udm::error::Status;
use udm::pcache::layout::Geometry;
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::queue::Queue;
use udm::sync::Arc;
use udm::table::Table;
use udm::target::FactValue;
use udm_export::nbd::Server;

const MIB: usize = 1 << 20;
const DEVICE: usize = 4 * MIB;
/// Never written and never read before everything fails.
const UNCACHED: u64 = 3 * MIB as u64;
const SEGMENT: u64 = 256 << 10;
const PATIENCE: Duration = Duration::from_secs(60);
/// The first pause after a failure, as pcache has it.
const PAUSE_MIN: Duration = Duration::from_millis(100);

/// A RAM disk that refuses some operations on request.
#[derive(Debug)]
struct Origin {
    ram: RamDisk,
    refused: Mutex<Vec<Op>>,
    /// How often it refused something.
    refusals: Mutex<u64>,
    /// The last operation that it carried out.
    last: Mutex<Option<Op>>,
}

impl Disk for Origin {
    fn limits(&self) -> &DiskLimits {
        self.ram.limits()
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        if self.refused.lock().unwrap().contains(&io.op) {
            *self.refusals.lock().unwrap() += 1;
            return ring.finish(io, Err(Status::Io));
        }
        if io.op != Op::Read {
            *self.last.lock().unwrap() = Some(io.op);
        }
        self.ram.start(io, ring);
    }
}

/// A served pcache over such an origin.
struct Cached {
    // In the order in which they must end.
    server: Option<Server>,
    _background: Queue,
    device: Arc<Device>,
    origin: Arc<Origin>,
    folder: tempfile::TempDir,
}

impl Cached {
    fn start() -> Cached {
        let ram = RamDisk::new(DEVICE as u64, 512);
        ram.poke(UNCACHED, &[0xEE; MIB]);
        let (refused, refusals, last) = Default::default();
        let origin = Arc::new(Origin { ram, refused, refusals, last });
        let mut devices = NamedDevices::new();
        devices.add_disk("/origin", origin.clone());
        devices.add_pmem("/cache", Arc::new(SimPmem::new(16 << 20, Persistence::Cpu)));
        let table = Table::parse(&format!("0 {} pcache /cache /origin", DEVICE / 512)).unwrap();
        let geometry = Some(Geometry { segment_bytes: SEGMENT, device_bytes_min: 0 });
        let options = BuildOptions { geometry, ..BuildOptions::named(1) };
        let table = build::build(&table, &devices, &options).unwrap();
        let device = Device::with_table("cached", table).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let uri = format!("nbd+unix://{}/socket", folder.path().display()).parse().unwrap();
        let server = Some(Server::start(&device, &uri).unwrap());
        let background = Queue::background("background", &device).unwrap();
        Cached { server, _background: background, device, origin, folder }
    }

    fn client(&self) -> common::Client {
        let mut stream = UnixStream::connect(self.folder.path().join("socket")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&common::usual_handshake(false)).unwrap();
        stream.read_exact(&mut [0; common::USUAL_ANSWER_BYTES]).unwrap();
        common::Client { stream }
    }

    fn fact(&self, name: &str) -> u64 {
        let facts = self.device.facts();
        let fact = facts[0].facts.iter().find(|fact| fact.name == name).unwrap();
        match &fact.value {
            FactValue::Number(number) => *number,
            FactValue::Flag(flag) => u64::from(*flag),
            other => panic!("{name} is not a number: {other:?}"),
        }
    }

    fn refuse(&self, ops: &[Op]) {
        *self.origin.refused.lock().unwrap() = ops.to_vec();
    }
}

impl Drop for Cached {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop();
        }
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "timeout while waiting until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Writes over NBD what `model` then has at `[at, at + len)`.
fn write(client: &mut common::Client, model: &mut [u8], at: usize, len: usize, seed: u8) {
    for place in (at..at + len).step_by(64 << 10) {
        let end = (at + len).min(place + (64 << 10));
        for (nth, byte) in model[place..end].iter_mut().enumerate() {
            *byte = (nth / 512) as u8 ^ (place >> 16) as u8 ^ seed;
        }
        client.send(&common::write(0, 1, place as u64, &model[place..end]));
        assert_eq!(client.reply(0).error, 0);
    }
}

fn read(client: &mut common::Client, at: u64, len: usize) -> Result<Vec<u8>, u32> {
    client.send(&common::request(0, 0, 2, at, len as u32));
    let reply = client.reply(len);
    if reply.error == 0 { Ok(reply.data) } else { Err(reply.error) }
}

fn flush(client: &mut common::Client) {
    client.send(&common::request(0, 3, 3, 0, 0));
    assert_eq!(client.reply(0).error, 0);
}

fn an_origin_that_refuses(ops: &[Op]) {
    let cached = Cached::start();
    let mut client = cached.client();
    let mut model = cached.origin.ram.image();
    write(&mut client, &mut model, 0, 2 * MIB, 1);
    flush(&mut client);
    wait_until("the first data is on the origin", || cached.device.dirty().bytes == 0);
    assert_eq!((cached.fact("writeback_is_failing"), cached.fact("writeback_pause_ms")), (0, 0));

    let begun = Instant::now();
    cached.refuse(ops);
    write(&mut client, &mut model, MIB, MIB / 2, 2);
    flush(&mut client);
    // The pauses before the next failure, one after the other; a slow machine only adds to them.
    let mut pauses = Duration::ZERO;
    for nth in 1..=5 {
        wait_until("write-back fails again", || cached.fact("writeback_failures_total") >= nth);
        let passed = begun.elapsed();
        assert!(passed >= pauses * 9 / 10, "failure {nth}: {passed:?} instead of {pauses:?}");
        pauses += PAUSE_MIN * 2_u32.pow(nth as u32 - 1);
    }
    assert!(*cached.origin.refusals.lock().unwrap() >= 5);
    assert!(cached.device.dirty().is_failing);
    assert_eq!(cached.device.dirty().bytes, MIB as u64 / 2, "dirty data stays");
    assert_eq!(cached.fact("writeback_is_failing"), 1);
    assert!(cached.fact("writeback_pause_ms") >= 800);
    assert!(cached.fact("writeback_failures_total") >= 5);

    // Clients are not affected: reads of cached data, writes and flushes continue.
    assert!(read(&mut client, 0, 2 * MIB).unwrap() == model[..2 * MIB]);
    write(&mut client, &mut model, MIB / 4, MIB, 3);
    flush(&mut client);
    assert!(read(&mut client, 0, 2 * MIB).unwrap() == model[..2 * MIB]);
    let is_readable = !ops.contains(&Op::Read);
    let uncached = read(&mut client, UNCACHED, 4096);
    assert_eq!(uncached, if is_readable { Ok(vec![0xEE; 4096]) } else { Err(5) });

    cached.refuse(&[]);
    wait_until("everything is on the origin", || cached.device.dirty().bytes == 0);
    assert!(!cached.device.dirty().is_failing);
    assert_eq!((cached.fact("writeback_is_failing"), cached.fact("writeback_pause_ms")), (0, 0));
    assert!(cached.origin.ram.image() == model, "the origin has every write, the last one");
    assert_eq!(*cached.origin.last.lock().unwrap(), Some(Op::Flush), "and got a flush");
    assert_eq!(read(&mut client, UNCACHED, 4096), Ok(vec![0xEE; 4096]));
}

#[test]
fn refused_writes_are_tried_again_until_it_heals() {
    an_origin_that_refuses(&[Op::Write, Op::WriteZeroes]);
}

#[test]
fn after_a_refused_flush_all_is_written_again() {
    an_origin_that_refuses(&[Op::Flush]);
}

#[test]
fn an_origin_that_is_gone_for_a_while_costs_only_what_is_not_cached() {
    an_origin_that_refuses(&[Op::Read, Op::Write, Op::WriteZeroes, Op::Discard, Op::Flush]);
}
