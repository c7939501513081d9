//! The log of packed rings: its layout, deaths between the steps of an answer, and invalid logs.

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
/// Offset of the second ring's part: a header and eight slots.
const PART: u64 = 320;

/// A ring, its driver, and the file of its log.
struct Fixture {
    memory: Memory,
    notes: Notes,
    file: ClientMemory,
    available: Cursor,
}

/// A server of the ring.
struct Server {
    ring: Packed,
    tracker: PackedTracker,
}

impl Fixture {
    fn new() -> Fixture {
        let ring = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&ring, BYTES).unwrap();
        let mut memory = Memory::default();
        memory.add(Region { guest: 0, len: BYTES, user: 0, offset: 0 }, &ring).unwrap();
        let extent = Extent { bytes: 0, offset: 0, rings: 2, entries: 8, is_packed: true }.needed();
        assert_eq!(extent.bytes, 2 * PART);
        let file = extent.make().unwrap();
        let notes = Notes::map(&file, extent).unwrap();
        let file = ClientMemory::map(&file, 0, extent.bytes).unwrap();
        Fixture { memory, notes, file, available: START }
    }

    /// Starts a server with the base that QEMU sends: the ring's start.
    fn serve(&self) -> Result<(Server, Vec<Noted>), Violation> {
        let addresses = RingAddresses { descriptors: 0, used: 0x1000, available: 0x1100 };
        let features = feature::INDIRECT | feature::RING_PACKED;
        let shape = Shape { entries: ENTRIES, addresses, features };
        let mut ring = Packed::new(shape, &self.memory, base(START, START)).unwrap();
        let (tracker, again) = self.notes.open_packed(1, &mut ring)?;
        Ok((Server { ring, tracker }, again))
    }

    /// Returns the requests that the next server repeats, and the positions of its ring.
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
    /// Runs the first `parts` of an answer's three steps.
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
    let mut fixture = Fixture::new();
    let (mut server, _) = fixture.serve().unwrap();
    fixture.take(&mut server, 4, 2);
    fixture.take(&mut server, 1, 1);
    server.answer(4, 1);
    let mut bytes = [0; 192];
    fixture.file.load(PART, &mut bytes);
    // Version, entries, free and before, used and before, laps.
    let head = [
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 5, 0, 0, 0, 3, 0],
        [2, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ];
    assert_eq!(bytes[..32], head.concat());
    // In flight, next, last, count; counter; id, flags, length, address.
    assert_eq!(bytes[32..48], [1, 0, 1, 0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[48..64], [4, 0, 129, 0, 12, 0, 0, 0, 0, 32, 0, 0, 0, 0, 0, 0]);
    // The end of the request links to the former free slot.
    assert_eq!(bytes[64..72], [0, 0, 3, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[80..96], [4, 0, 128, 0, 12, 0, 0, 0, 1, 32, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[96..112], [1, 0, 3, 0, 2, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[128..132], [0, 0, 4, 0]);
    assert_eq!(bytes[160..164], [0, 0, 5, 0], "no place: the list ends");
    server.ring.push(4, 1);
    server.tracker.published();
    fixture.file.load(PART, &mut bytes);
    assert_eq!(bytes[12..22], [0, 0, 0, 0, 2, 0, 2, 0, 1, 1]);
    assert_eq!((bytes[32], bytes[96]), (0, 1));
}

#[test]
fn requests_are_done_again_in_the_order_they_were_taken() {
    let mut fixture = Fixture::new();
    let (mut server, first) = fixture.serve().unwrap();
    assert_eq!(first, []);
    fixture.take(&mut server, 3, 1);
    fixture.take(&mut server, 0, 2);
    fixture.take(&mut server, 2, 1);
    server.answer(3, 3);
    fixture.take(&mut server, 1, 2);
    // The answer of the first request has overwritten the descriptors of the second, and so has
    // this one.
    server.answer(2, 3);
    let (server, again) = fixture.serve().unwrap();
    assert_eq!(again.iter().map(|noted| noted.id).collect::<Vec<_>>(), [0, 1]);
    let flags = |nth: usize| again[nth].descriptors.iter().map(|d| d.flags & 1).collect::<Vec<_>>();
    assert_eq!((flags(0), flags(1)), (vec![1, 0], vec![1, 0]));
    let lens: Vec<u32> = again.iter().map(|noted| noted.descriptors[0].piece.len).collect();
    assert_eq!(lens, [8, 9]);
    assert_eq!((server.ring.used(), server.ring.next()), (place(2), place(2).after(4, ENTRIES)));
    // The next server's requests follow them.
    let mut server = server;
    server.answer(0, 3);
    fixture.take(&mut server, 4, 1);
    assert_eq!(fixture.again().0, [1, 4]);
}

/// SPDK's issues 3766 and 3070: the very first request is lost if no request had completed, and the
/// recovery of packed rings treats requests in flight as new.
#[test]
fn request_0_is_not_lost_if_none_had_completed() {
    let mut fixture = Fixture::new();
    let (mut server, _) = fixture.serve().unwrap();
    fixture.take(&mut server, 0, 1);
    assert_eq!(fixture.again(), (vec![0], START, place(1)));
    // The same with an answer that was prepared, but not published; the next server's log is
    // unchanged.
    let (mut server, _) = fixture.serve().unwrap();
    server.answer(0, 1);
    assert_eq!(fixture.again(), (vec![0], START, place(1)));
    let (mut server, _) = fixture.serve().unwrap();
    server.answer(0, 3);
    assert_eq!(fixture.again(), (vec![], place(1), place(1)));
}

/// Each step of an answer, at each position in the ring, while another request is in flight.
#[test]
fn an_answer_is_given_from_the_moment_in_which_it_is_seen() {
    for lap in 0..2 * ENTRIES {
        for count in 1..ENTRIES {
            for parts in 1..=3 {
                let mut fixture = Fixture::new();
                let (mut server, _) = fixture.serve().unwrap();
                for _ in 0..lap {
                    fixture.take(&mut server, 2, 1);
                    server.answer(2, 3);
                }
                let begin = server.ring.used();
                fixture.take(&mut server, 4, 1);
                fixture.take(&mut server, 1, count);
                server.answer(1, parts);
                let used = begin.after(if parts == 1 { 0 } else { count }, ENTRIES);
                let in_flight = if parts == 1 { vec![4, 1] } else { vec![4] };
                let next = begin.after(count + 1, ENTRIES);
                assert_eq!(
                    fixture.again(),
                    (in_flight.clone(), used, next),
                    "{lap} {count} {parts}"
                );
                assert_eq!(fixture.again(), (in_flight, used, next), "and once more");
            }
        }
    }
}

/// The specification has more intermediate states: its used entry and its lap are two stores.
#[test]
fn what_another_server_has_left_in_the_middle_is_understood() {
    let mut fixture = Fixture::new();
    let (mut server, _) = fixture.serve().unwrap();
    (0..4).for_each(|_| {
        fixture.take(&mut server, 2, 1);
        server.answer(2, 3);
    });
    fixture.take(&mut server, 1, 1);
    server.answer(1, 2);
    assert_eq!(server.ring.used(), place(5));
    // The entry of the previous state is stored, its lap is not.
    fixture.file.u16_at(PART + 18).store(0, Ordering::Relaxed);
    fixture.file.u16_at(PART + 14).store(0, Ordering::Relaxed);
    assert_eq!(fixture.again(), (vec![], place(5), place(5)));
}

#[test]
fn a_request_that_is_given_back_is_in_flight_no_more() {
    let mut fixture = Fixture::new();
    let (mut server, _) = fixture.serve().unwrap();
    fixture.take(&mut server, 0, 2);
    fixture.take(&mut server, 3, 2);
    server.ring.give_back(3);
    server.tracker.cross_out(3);
    assert_eq!(fixture.again(), (vec![0], START, place(2)));
    let mut chain = Chain::default();
    assert_eq!(server.ring.peek(&fixture.memory, &mut chain), Ok(Some(3)), "it is still there");
}

#[test]
fn notes_that_cannot_be_are_refused() {
    let said = |change: fn(&ClientMemory)| {
        let mut fixture = Fixture::new();
        let (mut server, _) = fixture.serve().unwrap();
        fixture.take(&mut server, 0, 2);
        fixture.take(&mut server, 1, 1);
        change(&fixture.file);
        fixture.serve().map(|_| ()).unwrap_err().to_string()
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
    // Free slots: 3, 4. Slots of requests: 0 and 1, and 2.
    assert!(with!(32 + 4 * 32 + 2 => 3).contains("a cycle in the free list"));
    assert!(with!(14 => 5).contains("lost slots"), "no place is free");
    assert!(with!(32 + 3 * 32 + 2 => 900).contains("lost slots"));
    assert!(with!(32 + 2 * 32 => 0).contains("lost slots"));
    assert!(with!(32 + 2 => 2, 32 + 4 => 2).contains("in two lists"), "one leads into the other");
    assert!(with!(32 + 2 => 0).contains("in two lists"), "the first leads to itself");
    assert!(with!(32 + 2 => 900).contains("slot 900 of requests in flight is in two lists"));
    assert!(with!(32 + 6 => 0).contains("a request in flight of 0 slots"));
    assert!(with!(32 + 6 => 1).contains("a request in flight of 1 slots up to 1"));
    assert!(with!(32 + 6 => 60000).contains("is in two lists"));
    assert!(with!(32 + 4 => 7).contains("of 2 slots up to 7"));
    assert!(with!(32 + 32 + 16 => 1).contains("request 1 is in flight twice"));
    assert!(with!(32 + 32 + 16 => 5).contains("request 5 is in flight twice"));
    // Logs of the other kind of ring, and of fewer entries.
    let fixture = Fixture::new();
    assert!(fixture.notes.open(1, ENTRIES, 0).unwrap_err().to_string().contains("2 packed rings"));
    let extent = Extent { bytes: 0, offset: 0, rings: 2, entries: 4, is_packed: true }.needed();
    let small = Notes::map(&extent.make().unwrap(), extent).unwrap();
    let fixture = Fixture { notes: small, ..fixture };
    assert!(fixture.serve().map(|_| ()).unwrap_err().to_string().contains("rings of 4 entries"));
}
