//! Notes of packed rings: the layout, deaths between the parts of an answer, and notes that cannot
//! be.

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)]

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::super::chain::{Chain, Shape};
use super::super::inflight::{Extent, Notes};
use super::super::memory::Memory;
use super::super::packed::base;
use super::super::proto::{Region, RingAddresses, feature};
use super::*;

const BYTES: u64 = 16 << 10;
const ENTRIES: u16 = 5;
const START: Cursor = Cursor { index: 0, is_odd: true };
/// Where the second ring's part begins: a head and eight places.
const PART: u64 = 320;

/// A ring, its driver, and the file of its notes.
struct World {
    memory: Memory,
    notes: Notes,
    file: Foreign,
    available: Cursor,
}

/// A server of it.
struct Server {
    ring: Packed,
    tracker: PackedTracker,
}

impl World {
    fn new() -> World {
        let ring = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&ring, BYTES).unwrap();
        let mut memory = Memory::default();
        memory.add(Region { guest: 0, len: BYTES, user: 0, offset: 0 }, &ring).unwrap();
        let extent = Extent { bytes: 0, offset: 0, rings: 2, entries: 8, is_packed: true }.needed();
        assert_eq!(extent.bytes, 2 * PART);
        let file = extent.make().unwrap();
        let notes = Notes::map(&file, extent).unwrap();
        let file = Foreign::map(&file, 0, extent.bytes).unwrap();
        World { memory, notes, file, available: START }
    }

    /// A server, which hears what QEMU says: where the ring began.
    fn serve(&self) -> Result<(Server, Vec<Noted>), Violation> {
        let addresses = RingAddresses { descriptors: 0, used: 0x1000, available: 0x1100 };
        let features = feature::INDIRECT | feature::RING_PACKED;
        let shape = Shape { entries: ENTRIES, addresses, features };
        let mut ring = Packed::new(shape, &self.memory, base(START, START)).unwrap();
        let (tracker, again) = self.notes.open_packed(1, &mut ring)?;
        Ok((Server { ring, tracker }, again))
    }

    /// The next server's requests to do again, and where its ring is.
    fn again(&self) -> (Vec<u16>, Cursor, Cursor) {
        let (server, again) = self.serve().unwrap();
        let ids = again.iter().map(|noted| noted.id).collect();
        (ids, server.ring.used(), server.ring.next())
    }

    /// The driver makes a request of `count` descriptors available, and the server takes it.
    fn take(&mut self, server: &mut Server, id: u16, count: u16) {
        for nth in 0..count {
            let next = u16::from(nth + 1 < count);
            let owner: u16 = if self.available.is_odd { 1 << 7 } else { 1 << 15 };
            let mut bytes = (0x2000 + u64::from(nth)).to_ne_bytes().to_vec();
            bytes.extend(u32::from(8 + id).to_ne_bytes());
            bytes.extend(id.to_ne_bytes());
            bytes.extend((owner | next).to_ne_bytes());
            self.memory.store(u64::from(self.available.index) * 16, &bytes).unwrap();
            self.available = self.available.after(1, ENTRIES);
        }
        let mut chain = Chain::default();
        assert_eq!(server.ring.peek(&self.memory, &mut chain), Ok(Some(id)));
        server.tracker.note(id, server.ring.peeked());
        server.ring.accept(id);
    }
}

impl Server {
    /// Answers a request, as far as `parts` of three parts.
    fn answer(&mut self, id: u16, parts: u32) {
        self.tracker.answered(id, self.ring.used_after(id));
        if parts >= 2 {
            self.ring.push(id, 1);
        }
        if parts >= 3 {
            self.tracker.published();
        }
    }
}

fn place(index: u16) -> Cursor {
    START.after(index, ENTRIES)
}

#[test]
fn the_layout_is_that_of_the_specification() {
    let mut world = World::new();
    let (mut server, _) = world.serve().unwrap();
    world.take(&mut server, 4, 2);
    world.take(&mut server, 1, 1);
    server.answer(4, 1);
    let mut bytes = [0; 192];
    world.file.load(PART, &mut bytes);
    // Version, entries, free and before, used and before, laps.
    let head = [
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 5, 0, 0, 0, 3, 0],
        [2, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ];
    assert_eq!(bytes[..32], head.concat());
    // In flight, next, last, count; counter; name, flags, length, address.
    assert_eq!(bytes[32..48], [1, 0, 1, 0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[48..64], [4, 0, 129, 0, 12, 0, 0, 0, 0, 32, 0, 0, 0, 0, 0, 0]);
    // The end of the request leads to what was free.
    assert_eq!(bytes[64..72], [0, 0, 3, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[80..96], [4, 0, 128, 0, 12, 0, 0, 0, 1, 32, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[96..112], [1, 0, 3, 0, 2, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[128..132], [0, 0, 4, 0]);
    assert_eq!(bytes[160..164], [0, 0, 5, 0], "no place: the list ends");
    server.ring.push(4, 1);
    server.tracker.published();
    world.file.load(PART, &mut bytes);
    assert_eq!(bytes[12..22], [0, 0, 0, 0, 2, 0, 2, 0, 1, 1]);
    assert_eq!((bytes[32], bytes[96]), (0, 1));
}

#[test]
fn requests_are_done_again_in_the_order_they_were_taken() {
    let mut world = World::new();
    let (mut server, first) = world.serve().unwrap();
    assert_eq!(first, []);
    world.take(&mut server, 3, 1);
    world.take(&mut server, 0, 2);
    world.take(&mut server, 2, 1);
    server.answer(3, 3);
    world.take(&mut server, 1, 2);
    // The second's descriptors were overwritten by the first one's answer, and this one's.
    server.answer(2, 3);
    let (server, again) = world.serve().unwrap();
    assert_eq!(again.iter().map(|noted| noted.id).collect::<Vec<_>>(), [0, 1]);
    let flags = |nth: usize| again[nth].descriptors.iter().map(|d| d.flags & 1).collect::<Vec<_>>();
    assert_eq!((flags(0), flags(1)), (vec![1, 0], vec![1, 0]));
    let lens: Vec<u32> = again.iter().map(|noted| noted.descriptors[0].piece.len).collect();
    assert_eq!(lens, [8, 9]);
    assert_eq!((server.ring.used(), server.ring.next()), (place(2), place(2).after(4, ENTRIES)));
    // The next server's requests come after those.
    let mut server = server;
    server.answer(0, 3);
    world.take(&mut server, 4, 1);
    assert_eq!(world.again().0, [1, 4]);
}

/// SPDK's issues 3766 and 3070: the first request of all is lost if none had completed; and the
/// recovery of packed rings takes what is in flight for new.
#[test]
fn request_0_is_not_lost_if_none_had_completed() {
    let mut world = World::new();
    let (mut server, _) = world.serve().unwrap();
    world.take(&mut server, 0, 1);
    assert_eq!(world.again(), (vec![0], START, place(1)));
    // Also if its answer was prepared, but not shown; the next server's notes are as before.
    let (mut server, _) = world.serve().unwrap();
    server.answer(0, 1);
    assert_eq!(world.again(), (vec![0], START, place(1)));
    let (mut server, _) = world.serve().unwrap();
    server.answer(0, 3);
    assert_eq!(world.again(), (vec![], place(1), place(1)));
}

/// Each part of an answer, for each place in the ring, while another request is in flight.
#[test]
fn an_answer_is_given_from_the_moment_in_which_it_is_seen() {
    for lap in 0..2 * ENTRIES {
        for count in 1..ENTRIES {
            for parts in 1..=3 {
                let mut world = World::new();
                let (mut server, _) = world.serve().unwrap();
                for _ in 0..lap {
                    world.take(&mut server, 2, 1);
                    server.answer(2, 3);
                }
                let begin = server.ring.used();
                world.take(&mut server, 4, 1);
                world.take(&mut server, 1, count);
                server.answer(1, parts);
                let used = begin.after(if parts == 1 { 0 } else { count }, ENTRIES);
                let in_flight = if parts == 1 { vec![4, 1] } else { vec![4] };
                let next = begin.after(count + 1, ENTRIES);
                assert_eq!(world.again(), (in_flight.clone(), used, next), "{lap} {count} {parts}");
                assert_eq!(world.again(), (in_flight, used, next), "and once more");
            }
        }
    }
}

/// The specification has more moments: its used entry and its lap are two stores.
#[test]
fn what_another_server_has_left_in_the_middle_is_understood() {
    let mut world = World::new();
    let (mut server, _) = world.serve().unwrap();
    (0..4).for_each(|_| {
        world.take(&mut server, 2, 1);
        server.answer(2, 3);
    });
    world.take(&mut server, 1, 1);
    server.answer(1, 2);
    assert_eq!(server.ring.used(), place(5));
    // It has stored the entry of the state before, and not its lap.
    world.file.u16_at(PART + 18).store(0, Ordering::Relaxed);
    world.file.u16_at(PART + 14).store(0, Ordering::Relaxed);
    assert_eq!(world.again(), (vec![], place(5), place(5)));
}

#[test]
fn a_request_that_is_given_back_is_in_flight_no_more() {
    let mut world = World::new();
    let (mut server, _) = world.serve().unwrap();
    world.take(&mut server, 0, 2);
    world.take(&mut server, 3, 2);
    server.ring.give_back(3);
    server.tracker.cross_out(3);
    assert_eq!(world.again(), (vec![0], START, place(2)));
    let mut chain = Chain::default();
    assert_eq!(server.ring.peek(&world.memory, &mut chain), Ok(Some(3)), "it is still there");
}

#[test]
fn notes_that_cannot_be_are_refused() {
    let said = |change: fn(&Foreign)| {
        let mut world = World::new();
        let (mut server, _) = world.serve().unwrap();
        world.take(&mut server, 0, 2);
        world.take(&mut server, 1, 1);
        change(&world.file);
        world.serve().map(|_| ()).unwrap_err().to_string()
    };
    macro_rules! with {
        ($($at:expr => $value:expr),*) => {
            said(|file| { $(file.u16_at(PART + $at).store($value, Ordering::Relaxed);)* })
        };
    }
    assert_eq!(with!(8 => 2), "requests in flight of version 2");
    assert_eq!(with!(10 => 8), "requests in flight of a ring of 8 entries, not 5");
    assert!(with!(16 => 5).contains("used in a ring of 5"));
    assert!(with!(18 => 900).contains("used in a ring of 5"));
    // Free places: 3, 4. Of requests: 0 and 1, and 2.
    assert!(with!(32 + 4 * 32 + 2 => 3).contains("lead back to themselves"));
    assert!(with!(14 => 5).contains("that are lost"), "no place is free");
    assert!(with!(32 + 3 * 32 + 2 => 900).contains("that are lost"));
    assert!(with!(32 + 2 * 32 => 0).contains("that are lost"));
    assert!(with!(32 + 2 => 2, 32 + 4 => 2).contains("of two"), "one leads into the other");
    assert!(with!(32 + 2 => 0).contains("of two"), "the first leads to itself");
    assert!(with!(32 + 2 => 900).contains("place 900 for requests in flight is of two"));
    assert!(with!(32 + 6 => 0).contains("a request in flight of 0 places"));
    assert!(with!(32 + 6 => 1).contains("a request in flight of 1 places up to 1"));
    assert!(with!(32 + 6 => 60000).contains("is of two"));
    assert!(with!(32 + 4 => 7).contains("of 2 places up to 7"));
    assert!(with!(32 + 32 + 16 => 1).contains("request 1 is in flight twice"));
    assert!(with!(32 + 32 + 16 => 5).contains("request 5 is in flight twice"));
    // Notes of the other kind, and of fewer entries.
    let world = World::new();
    assert!(world.notes.open(1, ENTRIES, 0).unwrap_err().to_string().contains("2 packed rings"));
    let extent = Extent { bytes: 0, offset: 0, rings: 2, entries: 4, is_packed: true }.needed();
    let small = Notes::map(&extent.make().unwrap(), extent).unwrap();
    let world = World { notes: small, ..world };
    assert!(world.serve().map(|_| ()).unwrap_err().to_string().contains("rings of 4 entries"));
}
