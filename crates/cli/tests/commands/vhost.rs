//! kill -9 of a server with a virtual machine: the next server continues the requests in flight.
//! Each is answered once and without an error, and each read returns the written data.

use std::io::Read;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::common::{Udm, pattern};
use crate::front::{BEGIN, DATA, Front, PACKED, Ring, USUAL};
use udm::prng::Prng;

const MIB: u64 = 1 << 20;
/// Requests that the driver keeps in flight on each ring.
const SLOTS: u64 = 12;
const RINGS: u32 = 2;
const KILLS: u32 = 12;
const BLOCK: usize = 4096;

/// The steps of a slot of a ring: it writes its own block, reads it back, and writes it again.
#[derive(Clone, Debug, Default)]
struct Slot {
    version: u64,
    is_reading: bool,
}

struct Driver {
    ring: Ring,
    slots: Vec<Slot>,
    /// The slot of each request in flight, by its head.
    by_head: Vec<Option<u64>>,
    done: u64,
}

impl Driver {
    fn new(ring: Ring) -> Driver {
        let by_head = vec![None; usize::from(ring.entries)];
        Driver { ring, slots: vec![Slot::default(); SLOTS as usize], by_head, done: 0 }
    }

    /// The slot's memory in the front end, in MiB after the first data.
    fn place(&self, slot: u64) -> u64 {
        u64::from(self.ring.index) * SLOTS + slot
    }

    fn data(&self, slot: u64) -> Vec<u8> {
        pattern(self.place(slot) << 32 | self.slots[slot as usize].version, BLOCK)
    }

    /// Makes the slot's next request available.
    fn offer(&mut self, front: &Front, slot: u64) {
        let (place, sector) = (self.place(slot), self.place(slot) * 8);
        let Slot { is_reading, .. } = self.slots[slot as usize];
        let head = if is_reading {
            front.memory.store(DATA + place * MIB + 4096, &[0xdd; BLOCK]);
            self.ring.begin(front, place, (0, sector), &[], BLOCK as u32, slot.is_multiple_of(2))
        } else {
            self.slots[slot as usize].version += 1;
            let data = self.data(slot);
            self.ring.begin(front, place, (1, sector), &data, 0, slot.is_multiple_of(2))
        };
        self.by_head[usize::from(head)] = Some(slot);
    }

    /// Takes an answer, if there is one, and makes the next request available.
    fn step(&mut self, front: &Front) -> bool {
        let Some((head, len)) = self.ring.pop(front) else { return false };
        let slot = self.by_head[usize::from(head)].take().unwrap();
        let at = DATA + self.place(slot) * MIB;
        assert_eq!(front.bytes(at + 16, 1), [0], "request {head}: an error");
        let was_reading = self.slots[slot as usize].is_reading;
        if was_reading {
            assert_eq!(len as usize, BLOCK + 1);
            assert!(front.bytes(at + 4096, BLOCK) == self.data(slot), "slot {slot}: other data");
        }
        self.slots[slot as usize].is_reading = !was_reading;
        self.done += 1;
        self.offer(front, slot);
        self.ring.kick_for(front, 1);
        true
    }
}

struct Fixture {
    udm: Udm,
    table: String,
    socket: PathBuf,
}

impl Fixture {
    fn new() -> Fixture {
        let udm = Udm::new();
        let (slow, socket) = (udm.file("slow.img", 64 * MIB), udm.path("vol.vhost"));
        let fast = udm.file("fast.img", 16 * MIB);
        let table = format!("0 131072 writecache p {} {} 4096 0", slow.display(), fast.display());
        Fixture { udm, table, socket }
    }

    fn serve(&self) {
        let uri = format!("vhost-user://{}", self.socket.display());
        self.udm.ok(&["create", "vol", "--table", &self.table, "--export", &uri]);
    }
}

#[test]
fn a_server_that_is_killed_is_followed_by_one_that_goes_on_with_what_was_in_flight() {
    servers_are_killed(USUAL);
}

#[test]
fn a_server_of_packed_rings_is_followed_by_one_that_goes_on_with_what_was_in_flight() {
    servers_are_killed(USUAL | PACKED);
}

fn servers_are_killed(features: u64) {
    let fixture = Fixture::new();
    let mut random = Prng::new(7);
    fixture.serve();
    let mut front = Front::connect(&fixture.socket);
    front.negotiate(features);
    let notes = front.get_in_flight(RINGS as u16, 64);
    front.set_in_flight(&notes);
    let mut drivers: Vec<Driver> =
        (0..RINGS).map(|index| Driver::new(front.ring(index, 64))).collect();
    for driver in &mut drivers {
        (0..SLOTS).for_each(|slot| driver.offer(&front, slot));
        driver.ring.kick();
    }
    for _ in 0..KILLS {
        run(&mut drivers, &front, 200 + random.below(2000));
        // The server dies while the driver runs; the work done until then counts.
        let pid = fixture.udm.pid("vol");
        let kill = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            crate::common::signal(pid, "KILL");
        });
        let deadline = Instant::now() + Duration::from_millis(40);
        while Instant::now() < deadline {
            drivers.iter_mut().for_each(|driver| while driver.step(&front) {});
        }
        kill.join().unwrap();
        crate::common::wait_until("the server is gone", || crate::common::is_gone(pid));
        fixture.serve();
        front = front.reconnect(&fixture.socket);
        front.negotiate(features);
        front.set_in_flight(&notes);
        for driver in &drivers {
            // As QEMU does it: from the index of the used ring, which does not show the requests in
            // flight; and a packed ring from the client's first position.
            let used = driver.ring.used.into();
            front.start(&driver.ring, if driver.ring.is_packed { BEGIN } else { used });
        }
    }
    run(&mut drivers, &front, 1000);
    for driver in &drivers {
        assert!(driver.slots.iter().all(|slot| slot.version > 1), "every slot went on");
    }
    let exports = fixture.udm.json(&["info", "vol"]).to_string();
    assert!(exports.contains("\"failed_rings\":0"), "{exports}");
}

#[test]
fn a_client_hears_that_a_resume_has_made_the_device_larger() {
    let udm = Udm::new();
    let (disk, socket) = (udm.file("disk.img", 4 * MIB), udm.path("vol.vhost"));
    let table = |sectors: u64| format!("0 {sectors} linear {} 0", disk.display());
    let uri = format!("vhost-user://{}", socket.display());
    udm.ok(&["create", "vol", "--table", &table(2048), "--export", &uri]);
    let mut front = Front::connect(&socket);
    front.negotiate(USUAL | PACKED);
    assert_eq!(front.sectors(), 2048);
    let mut channel = front.hear();
    let mut ring = front.ring(0, 16);
    assert_eq!((front.sectors(), ring.write(&front, 2048, &[1; 512])), (2048, 1));
    udm.ok(&["suspend", "vol"]);
    udm.ok(&["load", "vol", "--table", &table(8192)]);
    assert_eq!(front.sectors(), 2048, "it is not live yet");
    udm.ok(&["resume", "vol"]);
    let mut message = [0; 12];
    channel.read_exact(&mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!((front.sectors(), ring.write(&front, 8191, &[1; 512])), (8192, 0));
}

#[test]
fn a_client_that_died_with_a_parked_request_does_not_keep_the_device() {
    let udm = Udm::new();
    let (disk, socket) = (udm.file("disk.img", MIB), udm.path("vol.vhost"));
    let table = format!("0 2048 linear {} 0", disk.display());
    let uri = format!("vhost-user://{}", socket.display());
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    let mut front = Front::connect(&socket);
    front.negotiate(USUAL);
    let mut ring = front.ring(0, 16);
    assert_eq!(ring.write(&front, 8, &[1; 512]), 0);
    udm.ok(&["suspend", "vol"]);
    ring.begin(&front, 0, (1, 8), &[2; 512], 0, false);
    ring.kick();
    assert_eq!(udm.json(&["info", "vol"])["clients"], 1);
    drop(front);
    udm.ok(&["remove", "vol"]);
}

/// Goes on until each ring has answered this many requests more.
fn run(drivers: &mut [Driver], front: &Front, count: u64) {
    let goals: Vec<u64> = drivers.iter().map(|driver| driver.done + count).collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    while drivers.iter().zip(&goals).any(|(driver, goal)| driver.done < *goal) {
        assert!(Instant::now() < deadline, "requests are not answered any more");
        let mut has_any = false;
        for driver in &mut *drivers {
            has_any |= driver.step(front);
        }
        if !has_any {
            drivers.iter().for_each(|driver| driver.ring.want_call(front));
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
