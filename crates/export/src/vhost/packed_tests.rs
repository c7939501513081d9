//! Packed rings of hostile drivers, and the guarantees for honest ones.

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)]

use std::os::fd::OwnedFd;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::super::proto::Region;
use super::*;

const BYTES: u64 = 64 << 10;
const DRIVER: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const TABLE: u64 = 0x4000;
const DATA: u64 = 0x8000;
/// Not a power of two.
const ENTRIES: u16 = 6;
const ALL: u64 = feature::INDIRECT | feature::EVENT_IDX;
/// The start of every ring.
const START: Cursor = Cursor { index: 0, is_odd: true };

/// A descriptor's address, length and flags.
type Words = (u64, u32, u16);

/// A ring whose memory starts at 0 for the guest and for its process, and its driver.
struct Fixture {
    file: OwnedFd,
    memory: Memory,
    ring: Packed,
    chain: Chain,
    /// The driver's position for the next request.
    available: Cursor,
}

impl Fixture {
    fn new(features: u64) -> Fixture {
        let file = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, BYTES).unwrap();
        let mut memory = Memory::default();
        memory.add(Region { guest: 0, len: BYTES, user: 0, offset: 0 }, &file).unwrap();
        let ring = Packed::new(shape(features), &memory, base(START, START)).unwrap();
        Fixture { file, memory, ring, chain: Chain::default(), available: START }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.store(at, bytes).unwrap();
    }

    fn u16(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.memory.load(at, &mut bytes).unwrap();
        u16::from_ne_bytes(bytes)
    }

    fn descriptor(&self, at: u64, guest: u64, len: u32, id: u16, flags: u16) {
        let mut bytes = guest.to_ne_bytes().to_vec();
        bytes.extend(len.to_ne_bytes());
        bytes.extend(id.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        self.put(at, &bytes);
    }

    /// Makes a request available: addresses, lengths and flags.
    fn offer(&mut self, id: u16, pieces: &[Words]) {
        for (guest, len, flags) in pieces {
            let at = u64::from(self.available.index) * 16;
            let owner = if self.available.is_odd { IS_AVAILABLE } else { IS_USED };
            self.descriptor(at, *guest, *len, id, flags | owner);
            self.available = self.available.after(1, ENTRIES);
        }
    }

    fn peek(&mut self) -> Result<Option<u16>, Violation> {
        self.ring.peek(&self.memory, &mut self.chain)
    }

    /// Takes the next request.
    fn take(&mut self) -> u16 {
        let id = self.peek().unwrap().expect("a request");
        self.ring.accept(id);
        id
    }

    /// Returns the error for one request.
    fn refusal(features: u64, pieces: &[Words]) -> String {
        let mut fixture = Fixture::new(features);
        fixture.offer(0, pieces);
        fixture.peek().unwrap_err().to_string()
    }

    /// The entry at `index`: length, id, flags.
    fn entry(&self, index: u64) -> (u16, u16, u16) {
        let at = index * 16;
        (self.u16(at + LEN_AT), self.u16(at + ID_AT), self.u16(at + FLAGS_AT))
    }
}

fn shape(features: u64) -> Shape {
    let addresses = RingAddresses { descriptors: 0, used: DEVICE, available: DRIVER };
    Shape { entries: ENTRIES, addresses, features: features | feature::RING_PACKED }
}

fn pieces(pieces: &[Piece]) -> Vec<(u64, u32)> {
    pieces.iter().map(|piece| (piece.guest, piece.len)).collect()
}

#[test]
fn requests_go_round_and_their_answers_after_them() {
    let mut fixture = Fixture::new(ALL);
    assert_eq!(fixture.peek(), Ok(None));
    for lap in 0..20_u16 {
        fixture.offer(3, &[(DATA, 16, HAS_NEXT), (DATA + 50, 7, HAS_NEXT | IS_WRITABLE)]);
        // The request is incomplete without its end. Its head is available, so the following
        // descriptors are read.
        fixture.offer(3, &[(DATA + 60, 1, IS_WRITABLE)]);
        fixture.offer(5, &[(DATA, 9, 0)]);
        let begin = fixture.ring.next();
        assert_eq!(fixture.peek(), Ok(Some(3)));
        assert_eq!(pieces(&fixture.chain.readable), [(DATA, 16)]);
        assert_eq!(pieces(&fixture.chain.writable), [(DATA + 50, 7), (DATA + 60, 1)]);
        // It is still the next one until it is accepted, and again after it is given back.
        assert_eq!(fixture.take(), 3);
        assert!(fixture.ring.is_newest(3, begin));
        fixture.ring.give_back(3);
        assert_eq!((fixture.ring.next(), fixture.take(), fixture.take()), (begin, 3, 5));
        assert!(
            !fixture.ring.is_newest(3, begin) && fixture.ring.is_newest(5, begin.after(3, ENTRIES))
        );
        assert_eq!(fixture.peek(), Ok(None));
        // The second request is answered first, at the position where the first one started.
        let owner = begin.used_flags();
        fixture.ring.push(5, 0);
        assert_eq!(fixture.entry(begin.index.into()), (0, 5, owner));
        fixture.ring.push(3, 8);
        let second = begin.after(1, ENTRIES);
        let owner = second.used_flags() | IS_WRITABLE;
        assert_eq!(fixture.entry(second.index.into()), (8, 3, owner));
        assert_eq!(
            (fixture.ring.used(), fixture.ring.next()),
            (fixture.available, fixture.available)
        );
        assert_eq!(fixture.ring.in_flight, 0, "lap {lap}");
    }
}

#[test]
fn a_table_is_read_whole_and_in_order() {
    let mut fixture = Fixture::new(ALL);
    // The next-flag of a split ring's table is ignored here.
    fixture.descriptor(TABLE, DATA, 16, 9, HAS_NEXT);
    fixture.descriptor(TABLE + 16, DATA + 16, 20, 9, 0);
    fixture.descriptor(TABLE + 32, DATA + 40, 1, 9, IS_WRITABLE | IS_AVAILABLE);
    fixture.offer(2, &[(TABLE, 48, IS_INDIRECT)]);
    assert_eq!(fixture.take(), 2);
    assert_eq!(pieces(&fixture.chain.readable), [(DATA, 16), (DATA + 16, 20)]);
    assert_eq!(pieces(&fixture.chain.writable), [(DATA + 40, 1)]);
    assert_eq!(fixture.ring.next(), START.after(1, ENTRIES));
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let circle: Vec<_> = (0..ENTRIES).map(|_| (DATA, 1, HAS_NEXT)).collect();
    let cases: [(u64, &[Words], &str); 14] = [
        (ALL, &circle, "more descriptors available than a ring of 6 has"),
        (ALL, &[(TABLE, 16, IS_INDIRECT | HAS_NEXT)], "an unexpected table"),
        (feature::EVENT_IDX, &[(TABLE, 16, IS_INDIRECT)], "an unexpected table"),
        (ALL, &[(DATA, 1, HAS_NEXT), (TABLE, 16, IS_INDIRECT)], "an unexpected table"),
        (ALL, &[(TABLE, 0, IS_INDIRECT)], "of 0 bytes"),
        (ALL, &[(TABLE, 17, IS_INDIRECT)], "of 17 bytes"),
        (ALL, &[(TABLE, u32::MAX - 15, IS_INDIRECT)], "of 4294967280 bytes"),
        (ALL, &[(BYTES - 8, 16, IS_INDIRECT)], "are not in its memory"),
        (ALL, &[(TABLE, 16, IS_INDIRECT)], "a descriptor of no bytes"),
        (ALL, &[(DATA, 0, 0)], "a descriptor of no bytes"),
        (ALL, &[(BYTES - 1, 2, 0)], "not in its memory"),
        (ALL, &[(u64::MAX, u32::MAX, IS_WRITABLE)], "not in its memory"),
        (ALL, &[(DATA, u32::MAX, 0)], "not in its memory"),
        (ALL, &[(DATA, 1, IS_WRITABLE | HAS_NEXT), (DATA, 1, 0)], "something to read after"),
    ];
    for (features, request, words) in cases {
        let refusal = Fixture::refusal(features, request);
        assert!(refusal.contains(words), "{refusal}");
    }
    let mut fixture = Fixture::new(ALL);
    fixture.descriptor(TABLE, TABLE, 16, 0, IS_INDIRECT);
    fixture.offer(0, &[(TABLE, 16, IS_INDIRECT)]);
    assert_eq!(fixture.peek().unwrap_err().to_string(), "a table of descriptors within another");
    for id in [ENTRIES, u16::MAX] {
        let mut fixture = Fixture::new(ALL);
        fixture.offer(id, &[(DATA, 1, 0)]);
        let refusal = fixture.peek().unwrap_err().to_string();
        assert_eq!(refusal, format!("request {id} in a ring of 6"));
    }
}

#[test]
fn requests_over_those_in_flight_are_refused() {
    let mut fixture = Fixture::new(ALL);
    for id in 0..ENTRIES {
        fixture.offer(id, &[(DATA, 1, 0)]);
    }
    (0..ENTRIES).for_each(|id| assert_eq!(fixture.take(), id));
    assert_eq!(fixture.peek(), Ok(None));
    // The next lap, although no descriptor was used.
    fixture.offer(0, &[(DATA, 1, 0)]);
    let refusal = fixture.peek().unwrap_err().to_string();
    assert_eq!(refusal, "more descriptors available than a ring of 6 has");
    fixture.ring.push(4, 1);
    fixture.available = fixture.ring.next();
    fixture.offer(0, &[(DATA, 1, HAS_NEXT), (DATA, 1, 0)]);
    let refusal = fixture.peek().unwrap_err().to_string();
    assert_eq!(refusal, "more descriptors available than a ring of 6 has", "room for one only");
}

#[test]
fn rings_that_cannot_be_are_refused() {
    let fixture = Fixture::new(ALL);
    let open = |shape, base| Packed::new(shape, &fixture.memory, base);
    for entries in [0, 1025, u16::MAX] {
        let refusal = open(Shape { entries, ..shape(ALL) }, 0x8000_8000).unwrap_err();
        assert!(refusal.to_string().contains("up to 1024"), "{refusal}");
    }
    let usual = shape(ALL).addresses;
    for wrong in [
        RingAddresses { descriptors: 8, ..usual },
        RingAddresses { descriptors: BYTES - 80, ..usual },
        RingAddresses { used: DEVICE + 2, ..usual },
        RingAddresses { available: DRIVER + 1, ..usual },
        RingAddresses { used: u64::MAX - 3, ..usual },
        RingAddresses { available: BYTES, ..usual },
    ] {
        assert!(open(Shape { addresses: wrong, ..shape(ALL) }, 0x8000_8000).is_err(), "{wrong:?}");
    }
    // Both positions are in the ring, and the next one follows the used one by at most one lap.
    for base in [0x8000_8006, 0x8006_8000, 0x8003_8002, 0x0003_8004, 0x7fff_ffff, 0xffff_0000] {
        let refusal = open(shape(ALL), base).unwrap_err().to_string();
        assert_eq!(refusal, format!("a packed ring of 6 entries that is at {base:#x}"));
    }
    for (base, next, in_flight) in [
        (0x8000_8000, START, 0),
        (0x8000_8004, START.after(4, ENTRIES), 4),
        (0x8005_0000, START.after(6, ENTRIES), 1),
        (0x8005_0005, Cursor { index: 5, is_odd: false }, 6),
        (0x0000_8003, START.after(3, ENTRIES), 0),
        (0x0001_0001, Cursor { index: 1, is_odd: false }, 0),
    ] {
        let ring = open(shape(ALL), base).unwrap();
        assert_eq!((ring.next(), ring.in_flight), (next, in_flight), "{base:#x}");
    }
}

#[test]
fn a_ring_goes_on_where_it_was() {
    let mut fixture = Fixture::new(ALL);
    for round in 0..30_u16 {
        let (one, other) = (round % 3, 3 + round % 2);
        fixture.offer(one, &[(DATA, 1, HAS_NEXT), (DATA, 1, 0)]);
        fixture.offer(other, &[(DATA, 1, 0)]);
        assert_eq!((fixture.take(), fixture.take()), (one, other));
        fixture.ring.push(other, 1);
        let is_newest = fixture.ring.is_newest(one, fixture.ring.next().before(2, ENTRIES));
        assert!(is_newest, "by its place");
        fixture.ring.push(one, 1);
        let at = base(fixture.ring.next(), fixture.ring.used());
        fixture.ring = Packed::new(shape(ALL), &fixture.memory, at).unwrap();
    }
}

#[test]
fn a_ring_whose_memory_is_cut_off_is_broken() {
    let mut fixture = Fixture::new(ALL);
    fixture.offer(0, &[(DATA, 1, 0)]);
    assert_eq!(fixture.take(), 0);
    ftruncate(&fixture.file, 0x1000).unwrap();
    assert!(fixture.peek().is_ok(), "the rest is there");
    ftruncate(&fixture.file, 0).unwrap();
    assert_eq!(fixture.peek().unwrap_err().to_string(), "a part of its memory was truncated");
    fixture.ring.push(0, 1);
    assert!(fixture.ring.check().is_err());
}

#[test]
fn the_driver_is_called_when_it_wants_that() {
    let mut fixture = Fixture::new(ALL);
    assert!(!fixture.ring.needs_call(), "no descriptor was used");
    let use_one = |fixture: &mut Fixture, (place, wish): (Cursor, u16)| {
        fixture.put(DRIVER, &[place.print().to_ne_bytes(), wish.to_ne_bytes()].concat());
        fixture.offer(1, &[(DATA, 1, 0)]);
        fixture.take();
        fixture.ring.push(1, 77);
        fixture.ring.needs_call()
    };
    for lap in 0..4 {
        for nth in 0..ENTRIES {
            let here = fixture.ring.used();
            assert!(use_one(&mut fixture, (here, AT_PLACE)), "{lap}.{nth}: the awaited position");
            let (here, later) = (fixture.ring.used(), fixture.ring.used().after(2, ENTRIES));
            assert!(!use_one(&mut fixture, (later, AT_PLACE)), "{lap}.{nth}: not yet");
            assert!(!use_one(&mut fixture, (here, AT_PLACE)), "{lap}.{nth}: a past position");
            assert!(use_one(&mut fixture, (later, AT_PLACE)), "{lap}.{nth}: now");
            assert!(
                !use_one(&mut fixture, (here, NEVER)) && use_one(&mut fixture, (later, ALWAYS))
            );
        }
    }
    // Several answers together pass it; without event indices, positions are unknown.
    for (features, behind, wants) in [(ALL, 0, true), (ALL, 2, true), (ALL, 3, false), (0, 3, true)]
    {
        let mut fixture = Fixture::new(features);
        let place = START.after(behind, ENTRIES);
        fixture.put(DRIVER, &[place.print().to_ne_bytes(), AT_PLACE.to_ne_bytes()].concat());
        for id in 0..3 {
            fixture.offer(id, &[(DATA, 1, 0)]);
            fixture.take();
            fixture.ring.push(id, 1);
        }
        assert_eq!(fixture.ring.needs_call(), wants, "{behind}");
    }
}

/// The driver publishes and reads the device's word before the device's two steps, between them, or
/// after them. Either it kicks, or the device does not sleep.
#[test]
fn nobody_sleeps_while_work_waits() {
    for features in [ALL, 0] {
        for (published, read) in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)] {
            let fixture = std::cell::RefCell::new(Fixture::new(features));
            let mut ring =
                Packed::new(shape(features), &fixture.borrow().memory, 0x8000_8000).unwrap();
            ring.refuse_kicks();
            let kicks = std::cell::Cell::new(false);
            let step = |now: u32| {
                if published == now {
                    fixture.borrow_mut().offer(0, &[(DATA, 1, 0)]);
                }
                if read == now {
                    let wish = (fixture.borrow().u16(DEVICE), fixture.borrow().u16(DEVICE + 2));
                    let always = features == 0 && wish == (0, ALWAYS);
                    kicks.set(always || wish == (START.print(), AT_PLACE));
                }
            };
            step(0);
            let may_sleep = ring.ask_and_look(|| step(1)).unwrap();
            step(2);
            assert!(kicks.get() || !may_sleep, "{features:#x} {published} {read}");
        }
    }
}

#[test]
fn the_driver_is_asked_not_to_kick_and_asked_again() {
    let mut fixture = Fixture::new(ALL);
    let wish = |fixture: &Fixture| (fixture.u16(DEVICE), fixture.u16(DEVICE + 2));
    assert_eq!((fixture.ring.may_sleep(), wish(&fixture)), (Ok(true), (0x8000, AT_PLACE)));
    fixture.offer(0, &[(DATA, 1, 0)]);
    fixture.take();
    fixture.ring.refuse_kicks();
    assert_eq!(wish(&fixture), (0, NEVER));
    assert_eq!((fixture.ring.may_sleep(), wish(&fixture)), (Ok(true), (0x8001, AT_PLACE)));
    // The driver has not seen the word in memory that was replaced.
    fixture.put(DEVICE, &[0; 4]);
    fixture.ring.moved(&fixture.memory).unwrap();
    assert_eq!((fixture.ring.may_sleep(), wish(&fixture)), (Ok(true), (0x8001, AT_PLACE)));
    fixture.offer(0, &[(DATA, 1, 0)]);
    assert_eq!(fixture.ring.may_sleep(), Ok(false));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Any bytes in the ring give an error, or a request whose pieces are all in memory.
    #[test]
    fn any_bytes_are_a_request_or_a_refusal(
        bytes in proptest::collection::vec((0..0x4400_u64, any::<u8>()), 0..100),
        table in proptest::collection::vec(
            (0..BYTES + 9, 0..100_u32, 0..8_u16), 0..8),
        steps in proptest::collection::vec(
            (0..BYTES + 9, 0..100_u32, 0..8_u16, 0..7_u16, any::<u8>()), 1..40),
    ) {
        let mut fixture = Fixture::new(ALL);
        for (index, (guest, len, flags)) in table.iter().enumerate() {
            fixture.descriptor(TABLE + index as u64 * 16, *guest, *len, 0, *flags);
        }
        bytes.iter().for_each(|(at, byte)| fixture.put(*at, &[*byte]));
        let mut in_flight = Vec::new();
        for (guest, len, flags, id, what) in steps {
            let guest = if flags & IS_INDIRECT == 0 { guest } else { TABLE };
            fixture.offer(id, &[(guest, len, flags)]);
            match fixture.peek() {
                Ok(Some(id)) => {
                    prop_assert!(id < ENTRIES);
                    for piece in fixture.chain.readable.iter().chain(&fixture.chain.writable) {
                        prop_assert!(piece.len > 0 && piece.guest + u64::from(piece.len) <= BYTES);
                    }
                    if in_flight.contains(&id) {
                        break;
                    }
                    fixture.ring.accept(id);
                    in_flight.push(id);
                }
                Ok(None) => {}
                Err(_) => break,
            }
            if what & 1 == 0 && !in_flight.is_empty() {
                let id = in_flight.remove(usize::from(what) % in_flight.len());
                fixture.ring.push(id, what.into());
                fixture.ring.needs_call();
            }
            prop_assert!(fixture.ring.in_flight <= ENTRIES);
            let distance = fixture.ring.next.ahead_of(fixture.ring.used, ENTRIES);
            prop_assert_eq!(distance, i32::from(fixture.ring.in_flight));
        }
    }
}
