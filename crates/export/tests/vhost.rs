//! vhost-user-blk, as a driver sees it.

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)] // A test that cannot go on ends.

mod common;
#[path = "common/front.rs"]
mod front;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::linear;
use front::{BEGIN, DATA, EVENT_IDX, FLUSH, Front, INDIRECT, PACKED, PROTOCOL, USUAL, VERSION_1};
use udm::device::Device;
use udm::disk::RamDisk;
use udm::queue::Queue;
use udm::sync::Arc;
use udm::target::FactValue;
use udm_export::Export;
use udm_export::vhost::poll::Poll;
use udm_export::vhost::{Server, Uri};

const DISK_BYTES: u64 = 8 << 20;

struct Served {
    _folder: tempfile::TempDir,
    path: PathBuf,
    device: Arc<Device>,
    server: Server,
    _background: Queue,
}

impl Served {
    fn start() -> Served {
        Served::with(linear(Arc::new(RamDisk::new(DISK_BYTES, 512))))
    }

    fn with(device: Arc<Device>) -> Served {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let server = Server::start(&device, &Uri::new(&path, Poll::Never)).unwrap();
        let _background = Queue::background("background", &device).unwrap();
        Served { _folder: folder, path, device, server, _background }
    }

    fn client(&self, features: u64) -> Front {
        let mut front = Front::connect(&self.path);
        front.negotiate(features);
        front
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at * 7 + seed * 13) >> 3) as u8).collect()
}

/// Features that rings differ by.
const KINDS: [u64; 6] = [
    USUAL,
    USUAL & !EVENT_IDX,
    VERSION_1 | PROTOCOL | FLUSH,
    USUAL | PACKED,
    USUAL & !EVENT_IDX | PACKED,
    VERSION_1 | PROTOCOL | FLUSH | PACKED,
];

#[test]
fn what_is_written_is_read_back_over_every_kind_of_ring() {
    for features in KINDS {
        let served = Served::start();
        let mut front = served.client(features);
        let mut ring = front.ring(0, 64);
        for nth in 0..200_u64 {
            let len = 512 * (1 + nth % 40) as usize;
            let data = pattern(nth, len);
            assert_eq!(ring.write(&front, nth * 3, &data), 0);
            assert_eq!(ring.read(&front, nth * 3, len as u32), (0, data));
        }
        assert_eq!(ring.flush(&front), 0);
        assert_eq!(ring.free.len(), 64, "all descriptors came back");
        assert_eq!(front.stop(&ring), ring.available, "the ring ends where it was");
    }
}

#[test]
fn many_requests_are_in_flight_and_each_is_answered_once() {
    for features in KINDS {
        let served = Served::start();
        let mut front = served.client(features);
        let mut ring = front.ring(0, 128);
        let is_indirect = features & INDIRECT != 0;
        let mut written = 0_u64;
        for round in 0..50_u64 {
            let count = 1 + round % 32;
            for slot in 0..count {
                let data = pattern(round + slot, 4096);
                ring.begin(&front, slot, (1, slot * 8), &data, 0, is_indirect);
            }
            ring.kick_for(&front, count as u16);
            (0..count).for_each(|_| assert_eq!(ring.wait(&front).1, 1));
            for slot in 0..count {
                assert_eq!(front.bytes(DATA + (slot << 20) + 16, 1), [0]);
                ring.begin(&front, slot, (0, slot * 8), &[], 4096, is_indirect);
            }
            ring.kick_for(&front, count as u16);
            (0..count).for_each(|_| assert_eq!(ring.wait(&front).1, 4097));
            for slot in 0..count {
                let data = front.bytes(DATA + (slot << 20) + 4096, 4096);
                assert_eq!(data, pattern(round + slot, 4096));
            }
            written += count;
        }
        assert!(ring.kicks <= 2 * written, "batches need few kicks: {}", ring.kicks);
        assert!(ring.pop(&front).is_none() && ring.free.len() == 128);
    }
}

#[test]
fn several_rings_are_served_at_the_same_time() {
    let served = Served::start();
    let mut front = served.client(USUAL | 1 << 12);
    assert_eq!(front.number(17), 16);
    let mut rings: Vec<_> = (0..4).map(|index| front.ring(index, 32)).collect();
    for round in 0..50_u64 {
        for ring in &mut rings {
            let slot = u64::from(ring.index);
            let data = pattern(round + slot, 8192);
            ring.begin(&front, slot, (1, slot * 1000), &data, 0, false);
            ring.kick_for(&front, 1);
        }
        rings.iter_mut().for_each(|ring| assert_eq!(ring.wait(&front).1, 1));
        for ring in &mut rings {
            let slot = u64::from(ring.index);
            assert_eq!(ring.read(&front, slot * 1000, 8192), (0, pattern(round + slot, 8192)));
        }
    }
    // One that is taken back does not concern the others.
    assert_eq!(front.stop(&rings[1]), rings[1].available);
    assert_eq!(rings[2].flush(&front), 0);
}

#[test]
fn the_configuration_tells_the_devices_limits() {
    let served = Served::start();
    let mut front = served.client(USUAL);
    let config = front.config();
    let word = |at: usize| u32::from_ne_bytes(config[at..at + 4].try_into().unwrap());
    assert_eq!(u64::from(word(0)), DISK_BYTES / 512);
    assert_eq!((word(8), word(12), word(20)), (256 << 10, 126, 512));
    assert_eq!((config[32], config[34], config[35]), (1, 16, 0));
    assert_eq!([36, 40, 44, 48, 52].map(word), [65536, 1, 1, 65536, 1]);
}

/// The message of a server whose device has changed: its number, a version, no payload.
const HAS_CHANGED: [u32; 3] = [2, 1, 0];

fn heard(channel: &mut std::os::unix::net::UnixStream) -> [u32; 3] {
    let mut bytes = [0; 12];
    channel.read_exact(&mut bytes).unwrap();
    [0, 4, 8].map(|at| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap()))
}

#[test]
fn a_client_hears_that_the_device_has_another_size() {
    let served = Served::start();
    let grow = |bytes: u64| {
        served.device.begin_suspend().unwrap();
        while !served.device.finish_suspend().unwrap() {}
        let disk = Arc::new(RamDisk::new(bytes, 512));
        served.device.load(common::linear_table(disk)).unwrap();
        served.device.resume().unwrap();
        served.server.device_has_changed().unwrap();
    };
    let mut front = served.client(USUAL);
    let mut deaf = served.client(USUAL);
    assert_eq!(front.sectors(), DISK_BYTES / 512);
    let mut channel = front.hear();
    let mut ring = front.ring(0, 16);
    assert_eq!(ring.write(&front, DISK_BYTES / 512, &[5; 512]), 1, "beyond the end");
    grow(2 * DISK_BYTES);
    assert_eq!(heard(&mut channel), HAS_CHANGED);
    assert_eq!(front.sectors(), 2 * DISK_BYTES / 512);
    assert_eq!(ring.write(&front, DISK_BYTES / 512, &[5; 512]), 0);
    assert_eq!(ring.read(&front, DISK_BYTES / 512, 512), (0, vec![5; 512]));
    // The same size is not reported again, except to a client that has not read it yet.
    grow(2 * DISK_BYTES);
    grow(3 * DISK_BYTES);
    assert_eq!(heard(&mut channel), HAS_CHANGED);
    channel.set_nonblocking(true).unwrap();
    assert!(channel.read(&mut [0]).is_err(), "only once");
    assert_eq!(heard(&mut deaf.hear()), HAS_CHANGED);
    // One whose channel is full, or none at all, is not waited for.
    let file = front::new_eventfd();
    deaf.tell_and_wait(21, &[], &[file.as_fd()]);
    let (full, reader) = std::os::unix::net::UnixStream::pair().unwrap();
    full.set_nonblocking(true).unwrap();
    while (&full).write(&[0; 4096]).is_ok() {}
    full.set_nonblocking(false).unwrap();
    front.tell_and_wait(21, &[], &[full.as_fd()]);
    grow(DISK_BYTES);
    for client in [&mut front, &mut deaf] {
        assert_eq!(client.sectors(), DISK_BYTES / 512);
    }
    drop(reader);
    assert_eq!(ring.flush(&front), 0);
    assert_eq!(served.server.clients().violations, 0);
}

#[test]
fn discards_zeroes_and_the_devices_name() {
    let served = Served::start();
    let mut front = served.client(USUAL | 1 << 14);
    let mut ring = front.ring(0, 16);
    assert_eq!(ring.write(&front, 0, &[7; 8192]), 0);
    let range = |sector: u64, sectors: u32, flags: u32| {
        [&sector.to_ne_bytes()[..], &sectors.to_ne_bytes(), &flags.to_ne_bytes()].concat()
    };
    assert_eq!(ring.request(&front, (13, 0), &range(2, 3, 1), 0).0, 0);
    let expected = [vec![7; 1024], vec![0; 1536], vec![7; 5632]].concat();
    assert_eq!(ring.read(&front, 0, 8192), (0, expected));
    let (status, name) = ring.request(&front, (8, 0), &[], 20);
    assert_eq!((status, &name[..7]), (0, &b"memory\0"[..]));
    // Features that were not offered, and invalid messages, are answered with an error.
    for (kind, data, status) in [
        (13, range(0, 1, 2), 2),
        (13, range(u64::MAX, 1, 0), 1),
        (13, range(u64::MAX / 512, u32::MAX, 0), 1),
        (13, range(0, 0, 0), 1),
        (13, [range(0, 1, 0), range(8, 1, 0)].concat(), 2),
        (11, range(0, 1, 1), 2),
        (99, vec![], 2),
        (1, vec![1; 513], 1),
        (1, vec![], 1),
    ] {
        assert_eq!(ring.request(&front, (kind, 0), &data, 0).0, status, "{kind} {data:?}");
    }
    let end = DISK_BYTES / 512;
    for (sector, len) in [(end, 512), (end - 1, 1024), (u64::MAX, 512), (1 << 55, 512), (0, 100)] {
        assert_eq!(ring.read(&front, sector, len).0, 1, "{len} bytes at sector {sector}");
    }
    assert_eq!(ring.read(&front, end - 1, 512).0, 0);
    assert_eq!(served.server.clients().failed_rings, 0);
}

#[test]
fn headers_and_data_may_be_cut_anywhere() {
    let served = Served::start();
    let mut front = served.client(USUAL);
    let mut ring = front.ring(0, 64);
    let data = pattern(5, 2048);
    front::Ring::header(&front, DATA, 1, 4);
    front.memory.store(DATA + 16, &data);
    // The header in two, data with the rest of the header, the answer in a piece of its own.
    let pieces = [
        (DATA, 7, false),
        (DATA + 7, 100, false),
        (DATA + 107, 1957, false),
        (DATA + 5000, 1, true),
    ];
    ring.offer(&front, &pieces, true);
    ring.kick();
    assert_eq!(ring.wait(&front).1, 1);
    front::Ring::header(&front, DATA, 0, 4);
    let pieces = [(DATA, 16, false), (DATA + 4096, 1000, true), (DATA + 8192, 1049, true)];
    ring.offer(&front, &pieces, false);
    ring.kick();
    assert_eq!(ring.wait(&front).1, 2049);
    assert_eq!(front.bytes(DATA + 4096, 1000), data[..1000]);
    assert_eq!(front.bytes(DATA + 8192, 1048), data[1000..]);
    assert_eq!(front.bytes(DATA + 8192 + 1048, 1), [0]);
}

#[test]
fn a_suspended_device_keeps_requests_and_a_ring_that_is_taken_back_forgets_none() {
    let served = Served::start();
    let mut front = served.client(USUAL);
    let mut ring = front.ring(0, 16);
    assert_eq!(ring.write(&front, 0, &[1; 512]), 0);
    served.device.begin_suspend().unwrap();
    for slot in 0..3 {
        ring.begin(&front, slot, (1, slot), &[9; 512], 0, false);
    }
    ring.kick();
    assert!(!ring.sleep(300) || ring.pop(&front).is_none());
    // Three are with the server, which gives them back.
    assert_eq!(front.stop(&ring), ring.available - 3);
    served.device.resume().unwrap();
    front.start(&ring, u32::from(ring.available) - 3);
    (0..3).for_each(|_| assert_eq!(ring.wait(&front).1, 1));
    assert_eq!(ring.read(&front, 0, 1536), (0, vec![9; 1536]));
}

#[test]
fn a_packed_ring_that_is_taken_back_forgets_none_with_and_without_notes() {
    for has_notes in [false, true] {
        let served = Served::start();
        let mut front = served.client(USUAL | PACKED);
        if has_notes {
            let notes = front.get_in_flight(1, 9);
            front.set_in_flight(&notes);
        }
        // It goes round in the middle of requests.
        let mut ring = front.ring(0, 9);
        let mut base = BEGIN;
        for round in 0..2_u8 {
            assert_eq!(ring.write(&front, 0, &[round; 512]), 0);
            served.device.begin_suspend().unwrap();
            for slot in 0..3 {
                let data = [round + slot as u8; 512];
                ring.begin(&front, slot, (1, slot), &data, 0, slot == 1);
            }
            ring.kick();
            assert!(!ring.sleep(100) || ring.pop(&front).is_none());
            let before = base;
            base = front.stop_at(&ring);
            assert_ne!(base, before);
            assert_eq!(base as u16, (base >> 16) as u16, "all three are to be taken again");
            assert_eq!(ring.after(base as u16, 3 + 1 + 3), ring.available, "and no other");
            served.device.resume().unwrap();
            front.start(&ring, base);
            (0..3).for_each(|_| assert_eq!(ring.wait(&front).1, 1));
            let expected = [[round; 512], [round + 1; 512], [round + 2; 512]].concat();
            assert_eq!(ring.read(&front, 0, 1536), (0, expected));
        }
        assert_eq!(ring.free.len(), 9);
        assert_eq!(served.server.clients().failed_rings, 0);
    }
}

#[test]
fn memory_comes_and_goes_region_by_region_while_a_ring_is_served() {
    use std::os::fd::AsFd;
    let served = Served::start();
    let mut front = served.client(USUAL);
    assert_eq!(front.number(36), 32);
    front.share(16 << 20);
    let mut ring = front.ring(0, 16);
    let far = 20 << 20;
    let region =
        |at: u64, len: u64| front::words(&[0, front::GUEST + at, len, front::USER + at, at]);
    let file = rustix::io::dup(&front.file).unwrap();
    front.tell_and_wait(37, &region(16 << 20, 16 << 20), &[file.as_fd()]);
    front.memory.store(far, &[0; 16]);
    // A request that lies in both.
    let edge = (16 << 20) - 1000;
    ring.offer(&front, &[(far, 16, false), (edge, 2048, true), (far + 16, 1, true)], false);
    ring.kick();
    assert_eq!(ring.wait(&front).1, 2049);
    front.tell_and_wait(38, &region(16 << 20, 16 << 20), &[]);
    assert_eq!(ring.write(&front, 0, &[3; 512]), 0);
    ring.offer(&front, &[(far, 16, false), (far + 16, 1, true)], false);
    ring.kick();
    wait_until("the ring is broken", || served.server.clients().failed_rings == 1);
}

fn wait_until(what: &str, is_true: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_true() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_client_that_goes_in_the_middle_leaves_nothing_and_the_next_one_goes_on() {
    let served = Served::start();
    for round in 0..20_u64 {
        let mut front = served.client(USUAL);
        let mut ring = front.ring(0, 64);
        for slot in 0..16 {
            ring.begin(&front, slot, (1, slot * 8), &pattern(round, 4096), 0, slot % 2 == 0);
        }
        ring.kick();
        drop(front);
    }
    wait_until("all have gone", || served.server.clients().current == 0);
    let clients = served.server.clients();
    assert_eq!((clients.accepted, clients.violations, clients.failed_rings), (20, 0, 0));
    wait_until("only the background has a port", || served.device.info().ports == 1);
    let mut front = served.client(USUAL);
    assert_eq!(front.ring(0, 8).flush(&front), 0);
}

#[test]
fn a_client_that_hung_up_does_not_count_while_its_requests_are_in_flight() {
    let served = Served::start();
    let mut front = served.client(USUAL);
    let mut ring = front.ring(0, 16);
    assert_eq!(ring.write(&front, 0, &[1; 512]), 0);
    served.device.begin_suspend().unwrap();
    ring.begin(&front, 0, (1, 0), &[9; 512], 0, false);
    ring.kick();
    assert!(!ring.sleep(300) || ring.pop(&front).is_none());
    assert_eq!(served.server.clients().current, 1);
    drop(front);
    wait_until("it does not count", || served.server.clients().current == 0);
    let ports = || served.device.info().ports;
    assert_eq!(ports(), 2, "the background's port, and one with a request in flight");
    wait_until("its request was dropped", || ports() == 1);
}

#[test]
fn features_that_the_address_withholds_are_neither_offered_nor_taken() {
    let device = linear(Arc::new(RamDisk::new(DISK_BYTES, 512)));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let text = format!("vhost-user://{}?packed=off&event_idx=off", path.display());
    let server = Server::start(&device, &text.parse().unwrap()).unwrap();
    let mut front = Front::connect(&path);
    assert_eq!(front.number(1) & (PACKED | EVENT_IDX), 0);
    front.negotiate(USUAL & !EVENT_IDX);
    drop(front);
    let mut front = Front::connect(&path);
    front.tell_with(2, 1, &(USUAL | PACKED).to_ne_bytes(), &[]);
    assert!(front.is_closed());
    wait_until("it is a violation", || server.clients().violations == 1);
}

#[test]
fn a_choice_that_the_next_server_would_not_know_is_not_offered() {
    let served = Served::start();
    let mut front = served.client(USUAL);
    assert_eq!(front.number(1) & 1 << 11, 0, "VIRTIO_BLK_F_CONFIG_WCE");
    assert_eq!(front.config()[32], 1, "write-back");
    // A driver that chooses nevertheless is not left in the belief that it did.
    let head = [32_u32, 1, 0].iter().flat_map(|word| word.to_ne_bytes());
    front.tell_with(25, 1 | 8, &head.chain([0]).collect::<Vec<u8>>(), &[]);
    assert!(front.is_closed());
    wait_until("it is a violation", || served.server.clients().violations == 1);
    let said = served.server.clients().last_violation.unwrap();
    assert_eq!(said, "it writes to the configuration, which is read-only");
}

#[test]
fn requests_that_hold_too_much_memory_wait_for_each_other() {
    let served = Served::start();
    let mut front = served.client(USUAL);
    let mut ring = front.ring(0, 64);
    // Each reads 6 MiB to the same place; 16 MiB may be in flight.
    for slot in 0..16 {
        let at = DATA + slot * 4096;
        front::Ring::header(&front, at, 0, 0);
        ring.offer(&front, &[(at, 16, false), (8 << 20, 6 << 20, true), (at + 16, 1, true)], false);
    }
    ring.kick();
    (0..16).for_each(|_| assert_eq!(ring.wait(&front).1, (6 << 20) + 1));
    // And one that is longer than any request may be is refused.
    front::Ring::header(&front, DATA, 0, 0);
    let room = [(DATA, 16, false), (8 << 20, 40 << 20, true), (DATA + 16, 1, true)];
    ring.offer(&front, &room, false);
    ring.kick();
    assert_eq!((ring.wait(&front).1, front.bytes(DATA + 16, 1)), (1, vec![1]));
    assert_eq!(front.memory.u16_at(0x5000 + 2).load(Ordering::Relaxed), 17);
}

#[test]
fn two_clients_have_rings_at_a_time_only_where_the_address_says_so() {
    let served = Served::start();
    let mut first = served.client(USUAL);
    let mut ring = first.ring(0, 16);
    // Another one may connect and ask; its ring is refused, and the first one's goes on.
    let mut second = served.client(USUAL);
    assert!(second.sectors() > 0);
    second.tell(8, &front::pair(0, 16), &[]);
    second.tell(
        9,
        &front::words(&[0, front::USER, front::USER + 0x4000, front::USER + 0x5000, 0]),
        &[],
    );
    second.tell(18, &front::pair(0, 1), &[]);
    let kick = front::new_eventfd();
    second.tell(12, &front::words(&[0]), &[kick.as_fd()]);
    assert!(second.is_closed());
    let clients = || served.server.clients();
    wait_until("it is refused", || (clients().violations, clients().current) == (1, 1));
    let said = clients().last_violation.unwrap();
    assert!(said.contains("another client is connected; ?shared"), "{said}");
    assert_eq!(ring.write(&first, 0, &[1; 512]), 0);
    // A client that gave its rings back, or has gone, leaves the disk to others.
    first.stop(&ring);
    let mut second = served.client(USUAL);
    let mut other = second.ring(0, 16);
    assert_eq!(other.read(&second, 0, 512), (0, vec![1; 512]));
    drop(second);
    first.start(&ring, ring.available.into());
    assert_eq!(ring.read(&first, 0, 512), (0, vec![1; 512]));
    drop(first);
    let mut third = served.client(USUAL);
    assert_eq!(third.ring(0, 16).read(&third, 0, 512), (0, vec![1; 512]));
    // With the word, both are served.
    let path = served._folder.path().join("shared");
    let uri = Uri { is_shared: true, ..Uri::new(&path, Poll::Never) };
    let _server = Server::start(&served.device, &uri).unwrap();
    let mut both = [Front::connect(&path), Front::connect(&path)];
    for front in &mut both {
        front.negotiate(USUAL);
        assert_eq!(front.ring(0, 16).read(front, 0, 512), (0, vec![1; 512]));
    }
}

#[test]
fn an_export_tells_how_many_rings_are_served_and_who_has_none() {
    let served = Served::start();
    let fact = |name: &str| {
        let facts = served.server.facts();
        facts.into_iter().find(|fact| fact.name == name).unwrap().value
    };
    let number = |name| match fact(name) {
        FactValue::Number(number) => Some(number),
        _ => None,
    };
    assert_eq!((number("rings"), number("without_rings_seconds")), (Some(0), None));
    let mut front = served.client(USUAL);
    wait_until("a second has passed", || number("without_rings_seconds") >= Some(1));
    let mut rings = [front.ring(0, 16), front.ring(1, 16)];
    rings.iter_mut().for_each(|ring| assert_eq!(ring.flush(&front), 0));
    wait_until("both get a call", || number("rings") == Some(2));
    assert_eq!(number("without_rings_seconds"), None);
    front.stop(&rings[0]);
    wait_until("one is left", || number("rings") == Some(1));
    front.stop(&rings[1]);
    wait_until("it has none", || number("without_rings_seconds") == Some(0));
}
