//! Split rings of hostile drivers, and the guarantees for honest ones.

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)]

use std::os::fd::OwnedFd;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::super::chain::IS_WRITABLE;
use super::super::proto::Region;
use super::*;

const BYTES: u64 = 64 << 10;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const TABLE: u64 = 0x4000;
const DATA: u64 = 0x8000;
const ENTRIES: u16 = 8;
const ALL: u64 = feature::INDIRECT | feature::EVENT_IDX;

/// A ring whose memory starts at 0 for the guest and for its process.
struct Fixture {
    file: OwnedFd,
    memory: Memory,
    ring: Split,
    chain: Chain,
}

impl Fixture {
    fn new(features: u64) -> Fixture {
        let file = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, BYTES).unwrap();
        let mut memory = Memory::default();
        memory.add(Region { guest: 0, len: BYTES, user: 0, offset: 0 }, &file).unwrap();
        let ring = Split::new(shape(features), &memory, 0).unwrap();
        Fixture { file, memory, ring, chain: Chain::default() }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.store(at, bytes).unwrap();
    }

    fn put_u16(&self, at: u64, value: u16) {
        self.put(at, &value.to_ne_bytes());
    }

    fn u16(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.memory.load(at, &mut bytes).unwrap();
        u16::from_ne_bytes(bytes)
    }

    fn descriptor(&self, table: u64, index: u64, guest: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = guest.to_ne_bytes().to_vec();
        bytes.extend(len.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(next.to_ne_bytes());
        self.put(table + index * 16, &bytes);
    }

    /// Makes `head` the next available request.
    fn publish(&self, head: u16) {
        let count = self.u16(AVAILABLE + 2);
        self.put_u16(AVAILABLE + 4 + u64::from(count % ENTRIES) * 2, head);
        self.put_u16(AVAILABLE + 2, count.wrapping_add(1));
    }

    fn peek(&mut self) -> Result<Option<u16>, Violation> {
        self.ring.peek(&self.memory, &mut self.chain)
    }

    /// Returns the error for the chain that starts at descriptor 0.
    fn refusal(&mut self) -> String {
        self.publish(0);
        self.peek().unwrap_err().to_string()
    }
}

fn shape(features: u64) -> Shape {
    let addresses = RingAddresses { descriptors: 0, used: USED, available: AVAILABLE };
    Shape { entries: ENTRIES, addresses, features }
}

fn pieces(pieces: &[Piece]) -> Vec<(u64, u32)> {
    pieces.iter().map(|piece| (piece.guest, piece.len)).collect()
}

#[test]
fn chains_are_followed_within_the_ring_and_into_a_table() {
    let mut fixture = Fixture::new(ALL);
    assert_eq!(fixture.peek(), Ok(None));
    fixture.descriptor(0, 3, DATA, 16, HAS_NEXT, 7);
    fixture.descriptor(0, 7, TABLE, 48, IS_INDIRECT, 0);
    fixture.descriptor(TABLE, 0, DATA + 100, 50, HAS_NEXT, 2);
    fixture.descriptor(TABLE, 2, DATA + 200, 60, HAS_NEXT | IS_WRITABLE, 1);
    fixture.descriptor(TABLE, 1, DATA + 300, 70, IS_WRITABLE, 9);
    fixture.publish(3);
    assert_eq!(fixture.peek(), Ok(Some(3)));
    assert_eq!(pieces(&fixture.chain.readable), [(DATA, 16), (DATA + 100, 50)]);
    assert_eq!(pieces(&fixture.chain.writable), [(DATA + 200, 60), (DATA + 300, 70)]);
    // It is still the next one until it is accepted, and again after it is given back.
    assert_eq!(fixture.peek(), Ok(Some(3)));
    fixture.ring.accept();
    assert_eq!((fixture.ring.next(), fixture.peek()), (1, Ok(None)));
    fixture.ring.give_back();
    assert_eq!(fixture.peek(), Ok(Some(3)));
}

#[test]
fn descriptors_that_go_round_are_refused() {
    let mut fixture = Fixture::new(ALL);
    fixture.descriptor(0, 0, DATA, 1, HAS_NEXT, 1);
    fixture.descriptor(0, 1, DATA, 1, HAS_NEXT, 0);
    assert_eq!(fixture.refusal(), "a cycle of descriptors");
    let mut fixture = Fixture::new(ALL);
    fixture.descriptor(0, 0, TABLE, 32, IS_INDIRECT, 0);
    fixture.descriptor(TABLE, 0, DATA, 1, HAS_NEXT, 0);
    assert_eq!(fixture.refusal(), "a cycle of descriptors");
}

#[test]
fn tables_where_none_may_be_are_refused() {
    let cases: [(u64, u64, u32, u16, &str); 8] = [
        (ALL, TABLE, 16, IS_INDIRECT | HAS_NEXT, "an unexpected table"),
        (feature::EVENT_IDX, TABLE, 16, IS_INDIRECT, "an unexpected table"),
        (ALL, TABLE, 0, IS_INDIRECT, "of 0 bytes"),
        (ALL, TABLE, 17, IS_INDIRECT, "of 17 bytes"),
        (ALL, TABLE, u32::MAX - 15, IS_INDIRECT, "of 4294967280 bytes"),
        (ALL, TABLE, 16 * 1025, IS_INDIRECT, "of 16400 bytes"),
        (ALL, BYTES - 8, 16, IS_INDIRECT, "are not in its memory"),
        (ALL, u64::MAX - 8, 16, IS_INDIRECT, "are not in its memory"),
    ];
    for (features, guest, len, flags, words) in cases {
        let mut fixture = Fixture::new(features);
        fixture.descriptor(TABLE, 0, DATA, 1, 0, 0);
        fixture.descriptor(0, 0, guest, len, flags, 1);
        let refusal = fixture.refusal();
        assert!(refusal.contains(words), "{refusal}");
    }
    let mut fixture = Fixture::new(ALL);
    fixture.descriptor(0, 0, TABLE, 16, IS_INDIRECT, 0);
    fixture.descriptor(TABLE, 0, TABLE, 16, IS_INDIRECT, 0);
    assert_eq!(fixture.refusal(), "a table of descriptors within another");
}

#[test]
fn descriptors_of_nothing_and_of_what_is_not_there_are_refused() {
    let cases: [(u64, u32, u16, u16, &str); 7] = [
        (DATA, 0, 0, 0, "a descriptor of no bytes"),
        (BYTES - 1, 2, 0, 0, "not in its memory"),
        (BYTES, 1, IS_WRITABLE, 0, "not in its memory"),
        (u64::MAX, u32::MAX, IS_WRITABLE, 0, "not in its memory"),
        (DATA, u32::MAX, 0, 0, "not in its memory"),
        (DATA, 1, HAS_NEXT, 8, "descriptor 8 in a ring of 8"),
        (DATA, 1, HAS_NEXT, u16::MAX, "descriptor 65535 in a ring"),
    ];
    for (guest, len, flags, next, words) in cases {
        let mut fixture = Fixture::new(ALL);
        fixture.descriptor(0, 0, guest, len, flags, next);
        let refusal = fixture.refusal();
        assert!(refusal.contains(words), "{refusal}");
    }
    let mut fixture = Fixture::new(ALL);
    fixture.descriptor(0, 0, DATA, 1, IS_WRITABLE | HAS_NEXT, 1);
    fixture.descriptor(0, 1, DATA, 1, 0, 0);
    assert!(fixture.refusal().contains("something to read after"));
    let mut fixture = Fixture::new(ALL);
    fixture.descriptor(0, 0, TABLE, 32, IS_INDIRECT, 0);
    fixture.descriptor(TABLE, 0, DATA, 1, HAS_NEXT, 2);
    assert_eq!(fixture.refusal(), "descriptor 2 in a table of 2");
}

#[test]
fn more_requests_than_there_are_entries_are_refused() {
    let mut fixture = Fixture::new(ALL);
    fixture.put_u16(AVAILABLE + 2, 9);
    assert_eq!(fixture.peek().unwrap_err().to_string(), "9 requests available in a ring of 8");
    fixture.put_u16(AVAILABLE + 2, u16::MAX);
    assert!(fixture.peek().unwrap_err().to_string().contains("65535 requests available"));
    let mut fixture = Fixture::new(ALL);
    fixture.publish(8);
    assert_eq!(fixture.peek().unwrap_err().to_string(), "descriptor 8 in a ring of 8");
}

#[test]
fn rings_that_cannot_be_are_refused() {
    let fixture = Fixture::new(ALL);
    for entries in [0, 3, 2048, u16::MAX] {
        let violation =
            Split::new(Shape { entries, ..shape(ALL) }, &fixture.memory, 0).unwrap_err();
        assert!(violation.to_string().contains("a power of two up to 1024"), "{violation}");
    }
    // The last byte that event indices need is missing; without them the ring fits.
    let end = RingAddresses { descriptors: 0, used: BYTES - 68, available: BYTES - 20 };
    let is_taken = |addresses, features| {
        Split::new(Shape { entries: ENTRIES, addresses, features }, &fixture.memory, 0).is_ok()
    };
    assert!(is_taken(end, 0) && !is_taken(end, ALL));
    let usual = shape(ALL).addresses;
    for wrong in [
        RingAddresses { descriptors: 8, ..usual },
        RingAddresses { used: USED + 2, ..usual },
        RingAddresses { available: AVAILABLE + 1, ..usual },
        RingAddresses { used: u64::MAX - 3, ..usual },
        RingAddresses { descriptors: BYTES, ..usual },
    ] {
        assert!(!is_taken(wrong, 0), "{wrong:?}");
    }
}

#[test]
fn a_ring_whose_memory_is_cut_off_is_broken() {
    let mut fixture = Fixture::new(ALL);
    fixture.descriptor(0, 0, DATA, 1, 0, 0);
    fixture.publish(0);
    assert_eq!(fixture.peek(), Ok(Some(0)));
    ftruncate(&fixture.file, 0x1000).unwrap();
    assert_eq!(fixture.peek().unwrap_err().to_string(), "a part of its memory was truncated");
    assert!(fixture.ring.publish().is_err());
    fixture.ring.push(0, 1);
}

#[test]
fn the_driver_is_called_when_it_wants_that() {
    let mut fixture = Fixture::new(ALL);
    let event = AVAILABLE + 4 + u64::from(ENTRIES) * 2;
    assert!(!fixture.ring.needs_call(), "no descriptor was used");
    let use_one = |fixture: &mut Fixture, wish: u16| {
        fixture.put_u16(event, wish);
        fixture.ring.push(2, 77);
        fixture.ring.publish().unwrap();
        fixture.ring.needs_call()
    };
    assert!(use_one(&mut fixture, 0), "the first is the awaited position");
    assert!(!use_one(&mut fixture, 0) && !use_one(&mut fixture, 4));
    assert!(!use_one(&mut fixture, 4) && use_one(&mut fixture, 4));
    assert_eq!(
        (fixture.u16(USED + 2), fixture.u16(USED + 4 + 32), fixture.u16(USED + 4 + 36)),
        (5, 2, 77)
    );
    // Without event indices, the driver uses a flag.
    let mut fixture = Fixture::new(0);
    for (flag, wants) in [(0, true), (1, false)] {
        fixture.put_u16(AVAILABLE, flag);
        fixture.ring.push(0, 0);
        fixture.ring.publish().unwrap();
        assert_eq!(fixture.ring.needs_call(), wants);
    }
    fixture.ring.refuse_kicks();
    assert_eq!(fixture.u16(USED), 1);
    assert_eq!(fixture.ring.may_sleep(), Ok(true));
    assert_eq!(fixture.u16(USED), 0);
}

/// The driver publishes and reads the event index before the device's two steps, between them, or
/// after them. Either it kicks, or the device does not sleep.
#[test]
fn nobody_sleeps_while_work_waits() {
    for features in [ALL, 0] {
        for (published, read) in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)] {
            let fixture = Fixture::new(features);
            let mut ring = Split::new(shape(features), &fixture.memory, 0).unwrap();
            ring.refuse_kicks();
            let kicks = std::cell::Cell::new(false);
            let step = |now: u32| {
                if published == now {
                    fixture.publish(0);
                }
                if read == now {
                    let wish = fixture.u16(if features == 0 { USED } else { USED + 4 + 64 });
                    kicks.set(if features == 0 { wish & IS_QUIET == 0 } else { wish == 0 });
                }
            };
            // Left from earlier: the event is in the past.
            fixture.put_u16(USED + 4 + 64, u16::MAX);
            step(0);
            let may_sleep = ring.ask_and_look(|| step(1)).unwrap();
            step(2);
            assert!(kicks.get() || !may_sleep, "{features:#x} {published} {read}");
        }
    }
}

#[test]
fn events_are_passed_across_the_end_of_the_count() {
    for (event, before, now, is_passed) in [
        (5, 5, 6, true),
        (6, 5, 6, false),
        (4, 5, 6, false),
        (65535, 65534, 0, true),
        (0, 65534, 0, false),
        (65534, 65534, 3, true),
        (5, 5, 5, false),
    ] {
        assert_eq!(passes(event, before, now), is_passed, "{event} {before} {now}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Any bytes in the ring give an error, or a request whose pieces are all in memory.
    #[test]
    fn any_bytes_are_a_request_or_a_refusal(
        bytes in proptest::collection::vec((0..0x4400_u64, any::<u8>()), 0..200),
        descriptors in proptest::collection::vec(
            (0..24_u64, 0..BYTES + 9, 0..100_u32, 0..8_u16, 0..10_u16), 0..24),
        heads in proptest::collection::vec(0..9_u16, 0..9),
    ) {
        let mut fixture = Fixture::new(ALL);
        for (index, guest, len, flags, next) in descriptors {
            let table = if index < 8 { 0 } else { TABLE };
            fixture.descriptor(table, index % 8, guest, len, flags, next);
        }
        heads.iter().for_each(|head| fixture.publish(*head));
        bytes.iter().for_each(|(at, byte)| fixture.put(*at, &[*byte]));
        for _ in 0..heads.len() {
            match fixture.peek() {
                Ok(Some(head)) => {
                    prop_assert!(head < ENTRIES);
                    let all = fixture.chain.readable.iter().chain(&fixture.chain.writable);
                    for piece in all {
                        prop_assert!(piece.len > 0 && piece.guest + u64::from(piece.len) <= BYTES);
                    }
                    fixture.ring.accept();
                    fixture.ring.push(head, 0);
                    fixture.ring.publish().unwrap();
                    fixture.ring.needs_call();
                }
                Ok(None) | Err(_) => break,
            }
        }
    }
}
