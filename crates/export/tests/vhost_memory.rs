//! vhost-user-blk: a client's memory changes under rings that are served.

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)] // A test that cannot go on ends.

mod common;
#[path = "common/front.rs"]
mod front;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::linear;
use front::{DATA, Front, GUEST, MEMORY_BYTES, PACKED, Ring, USER, USUAL, pair, words};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::device::Device;
use udm::disk::RamDisk;
use udm::pmem::client_memory::ClientMemory;
use udm::prng::Prng;
use udm::queue::Queue;
use udm::sync::Arc;
use udm_export::vhost::poll::Poll;
use udm_export::vhost::{Clients, Server, Uri};

/// Requests of virtio-blk.
const READ: u32 = 0;
const WRITE: u32 = 1;
/// Messages.
const SET_MEM_TABLE: u32 = 5;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;
/// Bytes of memory in addition to the client's usual one.
const EXTRA_BYTES: u64 = 1 << 20;

struct Served {
    _folder: tempfile::TempDir,
    path: PathBuf,
    device: Arc<Device>,
    server: Server,
    _background: Queue,
}

impl Served {
    fn start() -> Served {
        let device = linear(Arc::new(RamDisk::new(64 << 20, 512)));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let uri = Uri { is_shared: true, ..Uri::new(&path, Poll::Never) };
        let server = Server::start(&device, &uri).unwrap();
        let _background = Queue::background("background", &device).unwrap();
        Served { _folder: folder, path, device, server, _background }
    }

    fn client(&self, features: u64) -> (Front, Ring) {
        let mut front = Front::connect(&self.path);
        front.negotiate(features);
        let ring = front.ring(0, 256);
        (front, ring)
    }

    fn suspend(&self) {
        self.device.begin_suspend().unwrap();
        while !self.device.finish_suspend().unwrap() {}
    }

    fn failed_rings(&self) -> u64 {
        self.server.clients().failed_rings
    }

    fn wait_for_broken_ring(&self) {
        self.wait_until(|clients| clients.failed_rings == 1);
    }

    fn wait_until(&self, is_true: impl Fn(&Clients) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_true(&self.server.clients()) {
            assert!(Instant::now() < deadline, "{:?}", self.server.clients());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn memfd(bytes: u64) -> (OwnedFd, ClientMemory) {
    let file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    let memory = ClientMemory::map(&file, 0, bytes).unwrap();
    (file, memory)
}

fn contents(memory: &ClientMemory, bytes: u64) -> Vec<u8> {
    let mut all = vec![0; bytes as usize];
    memory.load(0, &mut all);
    all
}

/// Additional memory, as the region with number `nth`.
struct Extra {
    nth: u64,
    file: OwnedFd,
    memory: ClientMemory,
}

impl Extra {
    fn new(nth: u64) -> Extra {
        let (file, memory) = memfd(EXTRA_BYTES);
        Extra { nth, file, memory }
    }

    /// Where the guest sees it, from the usual memory's begin on.
    fn at(&self) -> u64 {
        (1 << 40) + (self.nth << 24)
    }

    fn region(&self) -> [u64; 4] {
        [GUEST + self.at(), EXTRA_BYTES, USER + self.at(), 0]
    }

    fn message(&self) -> Vec<u8> {
        words(&[&[0], &self.region()[..]].concat())
    }

    fn add(&self, front: &mut Front) {
        front.tell_and_wait(ADD_MEM_REG, &self.message(), &[self.file.as_fd()]);
    }

    fn remove(&self, front: &mut Front) {
        front.tell_and_wait(REM_MEM_REG, &self.message(), &[]);
    }
}

/// Makes `extras` and the usual memory all that there is.
fn set_table(front: &mut Front, extras: &[Extra]) {
    let mut table = [pair(1 + extras.len() as u32, 0), words(&[GUEST, MEMORY_BYTES, USER, 0])];
    extras.iter().for_each(|extra| table[1].extend(words(&extra.region())));
    let file = rustix::io::dup(&front.file).unwrap();
    let files = [&file].into_iter().chain(extras.iter().map(|extra| &extra.file));
    let files: Vec<_> = files.map(AsFd::as_fd).collect();
    front.tell_and_wait(SET_MEM_TABLE, &table.concat(), &files);
}

/// Offers a request whose header and answer are slot `slot`'s, and whose data is at `at`.
fn offer(front: &Front, ring: &mut Ring, slot: u64, kind: u32, sector: u64, at: u64) {
    let head = DATA + (slot << 12);
    Ring::header(front, head, kind, sector);
    front.memory.store(head + 16, &[0xee]);
    let data = (at, 4096, kind == READ);
    ring.offer(front, &[(head, 16, false), data, (head + 16, 1, true)], slot.is_multiple_of(2));
}

fn status(front: &Front, slot: u64) -> u8 {
    front.bytes(DATA + (slot << 12) + 16, 1)[0]
}

/// A ring that is busy: 30 requests of 256 KiB.
fn make_busy(front: &Front, ring: &mut Ring) {
    for slot in 1..=30 {
        ring.begin(front, slot, (WRITE, slot * 512), &vec![7; 256 << 10], 0, false);
    }
    ring.kick();
}

#[test]
fn memory_is_known_to_a_busy_ring_as_soon_as_it_was_acknowledged() {
    for (features, is_table) in
        [(USUAL, false), (USUAL, true), (USUAL | PACKED, false), (USUAL | PACKED, true)]
    {
        let served = Served::start();
        let (mut front, mut ring) = served.client(features);
        for round in 0..40 {
            let extras = [Extra::new(round)];
            make_busy(&front, &mut ring);
            if is_table {
                set_table(&mut front, &extras);
            } else {
                extras[0].add(&mut front);
            }
            offer(&front, &mut ring, 0, WRITE, 0, extras[0].at());
            ring.kick();
            (0..31).for_each(|_| assert_eq!(ring.wait(&front).1, 1));
            assert_eq!(status(&front, 0), 0);
            if is_table {
                set_table(&mut front, &[]);
            } else {
                extras[0].remove(&mut front);
            }
        }
        assert_eq!(served.failed_rings(), 0);
    }
}

#[test]
fn memory_that_is_used_before_the_message_that_adds_it_arrives_is_waited_for() {
    let served = Served::start();
    let (mut front, mut ring) = served.client(USUAL);
    let extra = Extra::new(0);
    offer(&front, &mut ring, 1, WRITE, 0, extra.at());
    ring.kick();
    assert!(!ring.sleep(20) || ring.pop(&front).is_none());
    front.tell(ADD_MEM_REG, &extra.message(), &[extra.file.as_fd()]);
    assert_eq!((ring.wait(&front).1, status(&front, 1)), (1, 0));
    // The wait ends for one that never comes.
    extra.remove(&mut front);
    offer(&front, &mut ring, 1, WRITE, 0, extra.at());
    ring.kick();
    served.wait_for_broken_ring();
}

/// Gives the client other memory with the same contents. Returns the memory before.
fn replace(front: &mut Front) -> ClientMemory {
    let (file, memory) = memfd(MEMORY_BYTES);
    memory.store(0, &contents(&front.memory, MEMORY_BYTES));
    front.file = file;
    let before = std::mem::replace(&mut front.memory, memory);
    set_table(front, &[]);
    before
}

#[test]
fn a_ring_moves_with_the_table_and_leaves_earlier_memory_alone() {
    for features in [USUAL, USUAL | PACKED] {
        let served = Served::start();
        let (mut front, mut ring) = served.client(features);
        for round in 0..4 {
            assert_eq!(ring.write(&front, 0, &[round; 512]), 0);
            // A request in flight, and one that is answered afterwards from its beginning.
            served.suspend();
            offer(&front, &mut ring, 1, READ, 0, DATA + (1 << 20));
            ring.kick();
            assert!(!ring.sleep(50) || ring.pop(&front).is_none());
            let before = replace(&mut front);
            let was = contents(&before, MEMORY_BYTES);
            served.device.resume().unwrap();
            assert_eq!((ring.wait(&front).1, status(&front, 1)), (4097, 0));
            assert_eq!(front.bytes(DATA + (1 << 20), 512), [round; 512]);
            assert_eq!(ring.write(&front, 8, &[round + 1; 512]), 0);
            assert_eq!(ring.read(&front, 8, 512), (0, vec![round + 1; 512]));
            assert!(contents(&before, MEMORY_BYTES) == was, "earlier memory was written to");
        }
        assert_eq!(served.failed_rings(), 0);
    }
}

/// A write and a read of each ring, each with its own sectors.
fn use_all(front: &Front, rings: &mut [Ring], byte: u8) {
    for ring in rings {
        let (sector, since) = (u64::from(ring.index) * 8, Instant::now());
        assert_eq!(ring.write(front, sector, &[byte; 512]), 0);
        assert_eq!(ring.read(front, sector, 512), (0, vec![byte; 512]));
        // The front end finds an answer without a call after a minute.
        assert!(since.elapsed() < Duration::from_secs(50), "ring {} gets no call", ring.index);
    }
}

#[test]
fn all_rings_move_with_the_table_even_if_they_sleep_or_are_stopped() {
    for features in [USUAL, USUAL | PACKED] {
        let served = Served::start();
        let (mut front, ring) = served.client(features);
        let mut rings = vec![ring, front.ring(1, 256), front.ring(2, 256)];
        for round in 0..3 {
            use_all(&front, &mut rings, 1 + round);
            let base = front.stop_at(&rings[2]);
            let before = replace(&mut front);
            let was = contents(&before, MEMORY_BYTES);
            front.start(&rings[2], base);
            use_all(&front, &mut rings, 101 + round);
            assert!(contents(&before, MEMORY_BYTES) == was, "earlier memory was written to");
        }
        assert_eq!(served.failed_rings(), 0);
    }
}

/// From the acknowledgement on, a busy ring writes only to the new memory, even if it has the same
/// addresses.
#[test]
fn a_busy_ring_leaves_replaced_memory_alone() {
    const LEN: u64 = 256 << 10;
    for features in [USUAL, USUAL | PACKED] {
        let served = Served::start();
        let (mut front, mut ring) = served.client(features);
        for nth in 1..=16 {
            ring.begin(&front, nth, (WRITE, nth * 512), &vec![nth as u8; LEN as usize], 0, false);
            ring.kick();
            assert_eq!(ring.wait(&front).1, 1);
        }
        let mut extra = Extra::new(0);
        set_table(&mut front, std::slice::from_ref(&extra));
        for _ in 0..60 {
            for nth in 1..=16 {
                let head = DATA + (nth << 12);
                Ring::header(&front, head, READ, nth * 512);
                let data = (extra.at() + nth % 4 * LEN, LEN as u32, true);
                ring.offer(&front, &[(head, 16, false), data, (head + 16, 1, true)], false);
            }
            ring.kick();
            let before = std::mem::replace(&mut extra, Extra::new(0));
            set_table(&mut front, std::slice::from_ref(&extra));
            let was = contents(&before.memory, EXTRA_BYTES);
            (0..16).for_each(|_| assert_eq!(ring.wait(&front).1, LEN as u32 + 1));
            assert!(contents(&before.memory, EXTRA_BYTES) == was, "earlier memory was written to");
        }
        assert_eq!(served.failed_rings(), 0);
    }
}

#[test]
fn a_request_whose_memory_was_removed_breaks_its_ring_and_writes_nowhere() {
    for is_table in [false, true] {
        let served = Served::start();
        let (mut front, mut ring) = served.client(USUAL);
        let extra = Extra::new(0);
        extra.add(&mut front);
        assert_eq!(ring.write(&front, 0, &[5; 4096]), 0);
        served.suspend();
        offer(&front, &mut ring, 1, READ, 0, extra.at());
        ring.kick();
        assert!(!ring.sleep(50) || ring.pop(&front).is_none());
        if is_table {
            set_table(&mut front, &[]);
        } else {
            extra.remove(&mut front);
        }
        served.device.resume().unwrap();
        served.wait_for_broken_ring();
        assert_eq!(contents(&extra.memory, EXTRA_BYTES), vec![0; EXTRA_BYTES as usize]);
        assert_eq!(served.server.clients().current, 1, "the client stays");
    }
}

/// A request that was offered: its slot, whether it reads, which block, and which memory.
type Pending = (u64, bool, u64, usize);

/// A client that changes its memory all the time, and the conditions for its requests.
struct Changing {
    front: Front,
    ring: Ring,
    live: Vec<Extra>,
    /// Memory that was removed, with its contents then.
    removed: Vec<(Extra, Vec<u8>)>,
    pending: Vec<Pending>,
    /// The byte that each block is full of.
    blocks: [u8; 8],
    numbers: Prng,
}

impl Changing {
    fn begin(&mut self, slot: u64, nth: u64) {
        let block = self.numbers.below(8);
        let is_taken = |pending: &Pending| pending.0 == slot || pending.2 == block;
        if self.live.is_empty() || self.pending.iter().any(is_taken) {
            return;
        }
        let region = self.numbers.below(self.live.len() as u64) as usize;
        let (is_read, extra) = (self.numbers.below(2) == 0, &self.live[region]);
        let at = slot << 12;
        let byte = if is_read { 0xdd } else { nth as u8 };
        extra.memory.store(at, &[byte; 4096]);
        if !is_read {
            self.blocks[block as usize] = byte;
        }
        let kind = if is_read { READ } else { WRITE };
        offer(&self.front, &mut self.ring, slot, kind, block * 8, extra.at() + at);
        self.pending.push((slot, is_read, block, region));
    }

    /// Waits for all requests, and checks what came.
    fn settle(&mut self) {
        for _ in 0..self.pending.len() {
            self.ring.wait(&self.front);
        }
        for (slot, is_read, block, region) in self.pending.drain(..) {
            assert_eq!(status(&self.front, slot), 0);
            let mut data = [0; 4096];
            self.live[region].memory.load(slot << 12, &mut data);
            assert!(!is_read || data == [self.blocks[block as usize]; 4096]);
        }
    }

    fn remove(&mut self, is_table: bool) {
        self.settle();
        let at = self.numbers.below(self.live.len() as u64) as usize;
        let extra = self.live.remove(at);
        if is_table {
            set_table(&mut self.front, &self.live);
        } else {
            extra.remove(&mut self.front);
        }
        let contents = contents(&extra.memory, EXTRA_BYTES);
        self.removed.push((extra, contents));
    }

    fn step(&mut self, nth: u64) {
        match self.numbers.below(8) {
            0 if self.live.len() < 6 => {
                let extra = Extra::new(nth);
                extra.add(&mut self.front);
                self.live.push(extra);
            }
            1 if self.live.len() < 6 => {
                self.live.push(Extra::new(nth));
                set_table(&mut self.front, &self.live);
            }
            // The same addresses are other memory then.
            2 if !self.live.is_empty() => {
                self.remove(true);
                let nth = self.removed.last().unwrap().0.nth;
                let extra = Extra::new(nth);
                extra.add(&mut self.front);
                self.live.push(extra);
            }
            3 if !self.live.is_empty() => self.remove(false),
            4 => self.settle(),
            _ => {
                (0..8).for_each(|slot| self.begin(slot, nth));
                self.ring.kick();
            }
        }
    }
}

#[test]
fn requests_use_the_memory_of_their_table_whatever_changes_around_them() {
    for (seed, features) in [(1, USUAL), (2, USUAL | PACKED), (3, USUAL), (4, USUAL | PACKED)] {
        let served = Served::start();
        let (front, ring) = served.client(features);
        let mut client = Changing {
            front,
            ring,
            live: Vec::new(),
            removed: Vec::new(),
            pending: Vec::new(),
            blocks: [0; 8],
            numbers: Prng::new(seed),
        };
        (0..400).for_each(|nth| client.step(nth));
        client.settle();
        std::thread::sleep(Duration::from_millis(10));
        for (extra, contents_then) in &client.removed {
            assert!(contents(&extra.memory, EXTRA_BYTES) == *contents_then, "{}", extra.nth);
        }
        assert!(client.removed.len() > 50 && served.failed_rings() == 0);
        assert_eq!(served.server.clients().violations, 0);
    }
}

#[test]
fn a_client_that_starts_a_ring_without_memory_is_cut_off_after_a_moment() {
    let served = Served::start();
    let forget = |front: &mut Front| front.tell_and_wait(SET_MEM_TABLE, &pair(0, 0), &[]);
    // This one shares its memory late, but in time.
    let (mut late, mut late_ring) = served.client(USUAL);
    late.stop(&late_ring);
    forget(&mut late);
    late.start(&late_ring, 0);
    // This one has a second ring that is not started.
    let (mut idle, _ring) = served.client(USUAL);
    idle.tell(12, &words(&[1]), &[front::new_eventfd().as_fd()]);
    let since = Instant::now();
    let (mut front, ring) = served.client(USUAL);
    front.stop(&ring);
    forget(&mut front);
    front.start(&ring, 0);
    std::thread::sleep(Duration::from_millis(200));
    set_table(&mut late, &[]);
    assert!(front.is_closed());
    assert!(since.elapsed() > Duration::from_millis(1900), "{:?}", since.elapsed());
    served.wait_until(|clients| (clients.violations, clients.current) == (1, 2));
    let clients = served.server.clients();
    assert_eq!(clients.last_violation.unwrap(), "it started ring 0 without memory");
    // A front end connects again then, as QEMU does.
    let mut front = front.reconnect(&served.path);
    front.negotiate(USUAL);
    assert_eq!(front.ring(0, 256).write(&front, 0, &[1; 512]), 0);
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(late_ring.write(&late, 0, &[1; 512]), 0);
    assert!(idle.number(1) > 0);
    assert_eq!(served.server.clients().current, 3);
}

#[test]
fn a_client_that_says_nothing_is_cut_off_and_one_that_says_little_is_not() {
    let served = Served::start();
    let mut little = Front::connect(&served.path);
    little.tell(3, &[], &[]);
    let since = Instant::now();
    assert!(Front::connect(&served.path).is_closed());
    assert!(since.elapsed() > Duration::from_millis(4900), "{:?}", since.elapsed());
    served.wait_until(|clients| (clients.violations, clients.current) == (1, 1));
    assert_eq!(served.server.clients().last_violation.unwrap(), "it sent no message");
    assert!(little.number(1) > 0);
}
