//! vhost-user-blk in front of a cache: reads that hit go straight to the guest's memory, writes
//! that find free space are stored straight from there, without any visible difference, whatever
//! the guest does meanwhile.

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)] // A test that cannot go on ends.

mod common;
#[path = "common/front.rs"]
mod front;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use front::{DATA, EVENT_IDX, Front, MEMORY_BYTES, PACKED, Ring, USUAL};
use rustix::fs::ftruncate;
use udm::build::{self, BuildOptions, NamedDevices};
use udm::device::{Device, Driver};
use udm::disk::RamDisk;
use udm::pcache::layout::Geometry;
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::prng::Prng;
use udm::queue::Queue;
use udm::sync::Arc;
use udm::table::Table;
use udm::target::{FactValue, Wake};
use udm_export::vhost::chain::{Chain, Piece};
use udm_export::vhost::memory::Memory;
use udm_export::vhost::poll::Poll;
use udm_export::vhost::proto::Region;
use udm_export::vhost::request::{Begun, Facts, ID_BYTES, Request};
use udm_export::vhost::{Server, Uri};

const DISK_BYTES: u64 = 8 << 20;

struct Cached {
    // In the order in which they must end.
    server: Server,
    _background: Queue,
    device: Arc<Device>,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Cached {
    fn start(options: &str) -> Cached {
        let disk = RamDisk::new(DISK_BYTES, 512);
        disk.poke(0, &[0xEE; DISK_BYTES as usize]);
        let mut devices = NamedDevices::new();
        devices.add_disk("/origin", Arc::new(disk));
        devices.add_pmem("/cache", Arc::new(SimPmem::new(4 << 20, Persistence::Cpu)));
        let table = format!("0 {} pcache /cache /origin {options}", DISK_BYTES / 512);
        let geometry = Some(Geometry { segment_bytes: 64 << 10, device_bytes_min: 0 });
        let build = BuildOptions { geometry, ..BuildOptions::named(1) };
        let table = build::build(&Table::parse(&table).unwrap(), &devices, &build).unwrap();
        let device = Device::with_table("cached", table).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let uri = Uri { is_shared: true, ..Uri::new(&path, Poll::Never) };
        let server = Server::start(&device, &uri).unwrap();
        let _background = Queue::background("background", &device).unwrap();
        Cached { server, _background, device, path, _folder: folder }
    }

    fn client(&self, features: u64) -> (Front, Ring) {
        let mut front = Front::connect(&self.path);
        front.negotiate(features);
        let ring = front.ring(0, 64);
        (front, ring)
    }

    fn hits(&self) -> u64 {
        let facts = self.device.facts();
        let hits = facts[0].facts.iter().find(|fact| fact.name == "read_hits_total").unwrap();
        let FactValue::Number(hits) = hits.value else { panic!("{hits:?} is not a number") };
        hits
    }
}

/// Reads `len` bytes at `sector` into `pieces` pieces of the guest's memory.
fn read_in_pieces(front: &Front, ring: &mut Ring, sector: u64, len: u32, pieces: u32) -> Vec<u8> {
    Ring::header(front, DATA, 0, sector);
    front.memory.store(DATA + 16, &[0xee]);
    let piece = len / pieces;
    let places: Vec<u64> = (0..pieces).map(|nth| DATA + (1 << 20) * u64::from(nth + 1)).collect();
    let mut chain = vec![(DATA, 16, false)];
    chain.extend(places.iter().map(|at| (*at, piece, true)));
    chain.push((DATA + 16, 1, true));
    ring.offer(front, &chain, true);
    ring.kick_for(front, 1);
    assert_eq!((ring.wait(front).1, front.bytes(DATA + 16, 1)[0]), (len + 1, 0));
    places.iter().flat_map(|at| front.bytes(*at, piece as usize)).collect()
}

#[test]
fn hits_misses_and_both_together_read_what_was_written() {
    for (features, options) in
        [(USUAL, "0"), (USUAL & !EVENT_IDX, "0"), (USUAL | PACKED, "0"), (USUAL, "2 data_crc true")]
    {
        let cached = Cached::start(options);
        let (front, mut ring) = cached.client(features);
        let mut model = vec![0xEE; DISK_BYTES as usize];
        let mut prng = Prng::new(features);
        for nth in 0..1500_u64 {
            let len = 512 * (1 + prng.below(16));
            let at = prng.below((1 << 20) / 512) * 512;
            let part = &mut model[at as usize..(at + len) as usize];
            if prng.one_in(2) {
                part.fill(nth as u8);
                assert_eq!(ring.write(&front, at / 512, part), 0);
            } else if len.is_multiple_of(1024) {
                let read = read_in_pieces(&front, &mut ring, at / 512, len as u32, 2);
                assert!(read == *part, "request {nth}");
            } else {
                let (status, read) = ring.read(&front, at / 512, len as u32);
                assert!(status == 0 && read == *part, "request {nth}");
            }
        }
        assert!(cached.hits() > 100, "{}", cached.hits());
        assert_eq!(ring.free.len(), 64, "all descriptors came back");
    }
}

#[test]
fn memory_that_is_cut_off_under_a_hit_costs_its_guest_the_ring() {
    let cached = Cached::start("0");
    let (other, mut its_ring) = cached.client(USUAL);
    assert_eq!(its_ring.write(&other, 0, &[7; 4096]), 0);
    let (front, mut ring) = cached.client(USUAL);
    let hits = cached.hits();
    assert_eq!(ring.read(&front, 0, 4096), (0, vec![7; 4096]));
    assert_eq!(cached.hits(), hits + 1);
    Ring::header(&front, DATA, 0, 0);
    ring.offer(&front, &[(DATA, 16, false), (60 << 20, 4096, true), (DATA, 1, true)], true);
    ftruncate(&front.file, 40 << 20).unwrap();
    ring.kick();
    let deadline = Instant::now() + Duration::from_secs(60);
    while cached.server.clients().failed_rings == 0 {
        assert!(Instant::now() < deadline, "{:?}", cached.server.clients());
        std::thread::sleep(Duration::from_millis(2));
    }
    let last = cached.server.clients().last_violation.unwrap();
    assert!(last.contains("a part of its memory was truncated"), "{last}");
    assert_eq!(its_ring.read(&other, 0, 4096), (0, vec![7; 4096]), "another client goes on");
}

/// A write whose data was cut off is not answered, and none of its data is stored.
#[test]
fn memory_that_is_cut_off_under_a_write_costs_its_guest_the_ring() {
    let cached = Cached::start("0");
    let (other, mut its_ring) = cached.client(USUAL);
    assert_eq!(its_ring.write(&other, 0, &[7; 8192]), 0);
    let (front, mut ring) = cached.client(USUAL);
    front.memory.store(60 << 20, &[9; 8192]);
    Ring::header(&front, DATA, 1, 0);
    front.memory.store(DATA + 16, &[0xee]);
    ring.offer(&front, &[(DATA, 16, false), (60 << 20, 8192, false), (DATA + 16, 1, true)], true);
    // Cut in the middle of its data: the first part is not stored either.
    ftruncate(&front.file, (60 << 20) + 4096).unwrap();
    ring.kick();
    let deadline = Instant::now() + Duration::from_secs(60);
    while cached.server.clients().failed_rings == 0 {
        assert!(Instant::now() < deadline, "{:?}", cached.server.clients());
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(front.bytes(DATA + 16, 1), [0xee], "it is not answered");
    assert_eq!(its_ring.read(&other, 0, 8192), (0, vec![7; 8192]), "another client goes on");
}

struct Nobody;

impl Wake for Nobody {
    fn wake(&self) {}
}

#[test]
fn a_hit_is_done_without_a_bio() {
    let cached = Cached::start("0");
    let (front, mut ring) = cached.client(USUAL);
    assert_eq!(ring.write(&front, 8, &[7; 4096]), 0);
    let mut memory = Memory::default();
    memory.add(Region { guest: 0, len: MEMORY_BYTES, user: 0, offset: 0 }, &front.file).unwrap();
    let mut driver = Driver::new(&cached.device, Arc::new(Nobody)).unwrap();
    let facts = Facts { id: [0; ID_BYTES], is_write_through: false };
    let mut begin = |sector: u64, pieces: &[(u64, u32)]| {
        Ring::header(&front, DATA, 0, sector);
        let writable = pieces.iter().map(|&(guest, len)| Piece { guest, len }).collect();
        let chain = Chain { readable: vec![Piece { guest: DATA, len: 16 }], writable };
        let mut request = Request { chain, ..Request::default() };
        request.begin(&memory, &facts, &mut driver.intake(), 0).unwrap()
    };
    for pieces in [&[(DATA + 4096, 4096), (DATA + 16, 1)][..], &[(DATA + 4096, 4097)]] {
        front.memory.store(DATA + 4096, &[0; 4096]);
        assert!(matches!(begin(8, pieces), Begun::Done(4097)), "{pieces:?}");
        assert_eq!(front.bytes(DATA + 4096, 4096), [7; 4096]);
    }
    let answer = (DATA + 16, 1);
    let cut = [(DATA + 4096, 2048), (DATA + 8192, 2048), answer];
    let whole = [(DATA + 4096, 4096), answer];
    assert!(matches!(begin(8, &cut), Begun::Bio(_)), "two pieces");
    assert!(matches!(begin(16, &whole), Begun::Bio(_)), "a miss");
}

#[test]
fn a_write_with_room_is_done_without_a_bio() {
    for options in ["0", "2 data_crc true"] {
        let cached = Cached::start(options);
        let (front, mut ring) = cached.client(USUAL);
        let mut memory = Memory::default();
        let region = Region { guest: 0, len: MEMORY_BYTES, user: 0, offset: 0 };
        memory.add(region, &front.file).unwrap();
        let mut driver = Driver::new(&cached.device, Arc::new(Nobody)).unwrap();
        let facts = Facts { id: [0; ID_BYTES], is_write_through: true };
        let mut begin = |sector: u64, pieces: &[(u64, u32)]| {
            Ring::header(&front, DATA, 1, sector);
            let readable = pieces.iter().map(|&(guest, len)| Piece { guest, len }).collect();
            let chain = Chain { readable, writable: vec![Piece { guest: 64, len: 1 }] };
            let mut request = Request { chain, ..Request::default() };
            request.begin(&memory, &facts, &mut driver.intake(), 0).unwrap()
        };
        let is_copied = options == "0";
        let header = (DATA, 16);
        // Data in a piece of its own, and in one with the header.
        for (nth, pieces) in
            [&[header, (DATA + 16, 4096)][..], &[(DATA, 16 + 4096)]].iter().enumerate()
        {
            let byte = 8 + nth as u8;
            front.memory.store(64, &[0xee]);
            front.memory.store(DATA + 16, &[byte; 4096]);
            let begun = begin(8, pieces);
            assert_eq!(matches!(begun, Begun::Done(1)), is_copied, "{pieces:?}");
            assert_eq!(matches!(begun, Begun::Bio(_)), !is_copied, "{pieces:?}");
            if is_copied {
                assert_eq!(front.bytes(64, 1), [0]);
                assert_eq!(ring.read(&front, 8, 4096), (0, vec![byte; 4096]));
            }
        }
        let cut = [header, (DATA + 4096, 2048), (DATA + 8192, 2048)];
        assert!(matches!(begin(8, &cut), Begun::Bio(_)), "two pieces");
        let crossing = [(DATA, 8), (DATA + 8, 4096 + 8)];
        assert!(matches!(begin(8, &crossing), Begun::Done(1)) == is_copied, "a header in pieces");
        let odd = [header, (DATA + 4096, 100)];
        assert!(matches!(begin(8, &odd), Begun::Done(1)), "refused");
        assert_eq!(front.bytes(64, 1), [1]);
    }
}
