//! A split ring, from the driver's side, with a slot of memory for each request.
//!
//! The ring is in memory that the server may change at any time. The client reads only two things
//! from the server: the number of answered requests, and their heads. It checks both against the
//! requests in flight.
//!
//! Consecutive requests are published to the server together: the server reads the available index
//! as often as it can, and each read takes that cache line from this processor.

#![allow(clippy::host_endian_bytes, reason = "both sides run on this machine")]

use udm::pmem::client_memory::ClientMemory;
use udm::sync::Arc;
use udm::sync::statics::atomic::{Ordering, fence};

use super::super::proto::{RingAddresses, Violation, wrong};
use super::BASE;

/// Number of entries and slots.
pub(super) const ENTRIES: u16 = 256;
/// Maximum descriptors of a request.
pub(super) const DESCRIPTORS_MAX: usize = 140;

/// Maximum requests that are published together.
const SHOWN: u16 = 8;

const AVAILABLE: u64 = 4 << 10;
const USED: u64 = 8 << 10;
const SLOTS: u64 = 16 << 10;
/// An odd number of cache lines, so that slots do not all map to the same cache sets.
const SLOT_BYTES: u64 = 37 * 64;
/// Offsets in a slot. A short table and the header share one cache line, which the server reads.
const HEADER_AT: u64 = 48;
const STATUS_AT: u64 = 64;
const RANGE_AT: u64 = 80;
const TABLE_AT: u64 = 128;
/// Bytes of a ring with its slots.
pub(super) const RING_BYTES: u64 = 1 << 20;
const _: () = assert!(SLOTS + SLOT_BYTES * ENTRIES as u64 <= RING_BYTES);
const _: () = assert!(TABLE_AT + 16 * DESCRIPTORS_MAX as u64 <= SLOT_BYTES);

const HAS_NEXT: u16 = 1;
const IS_WRITABLE: u16 = 2;
const IS_INDIRECT: u16 = 4;
const IS_QUIET: u16 = 1;

/// A piece of memory for a descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub at: u64,
    pub len: u32,
    pub is_writable: bool,
}

/// A request without its data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub kind: u32,
    pub sector: u64,
    /// Number of sectors, for requests about a range.
    pub range: Option<u32>,
}

/// The ring.
#[derive(Debug)]
pub(super) struct Ring {
    memory: Arc<ClientMemory>,
    at: u64,
    has_events: bool,
    available: u16,
    /// The newest requests that are not published yet.
    unshown: u16,
    used: u16,
    table: Vec<u8>,
}

impl Ring {
    /// An empty ring at `at`.
    pub fn new(memory: Arc<ClientMemory>, at: u64, has_events: bool) -> Ring {
        let (available, unshown, used) = (0, 0, 0);
        let table = Vec::with_capacity(64);
        let mut ring = Ring { memory, at, has_events, available, unshown, used, table };
        ring.restart();
        ring
    }

    /// Empties the ring, which no server uses any more.
    pub fn restart(&mut self) {
        (self.available, self.unshown, self.used) = (0, 0, 0);
        self.memory.store(self.at, &vec![0; SLOTS as usize]);
        self.refuse_calls();
    }

    pub fn addresses(&self) -> RingAddresses {
        let at = BASE + self.at;
        RingAddresses { descriptors: at, used: at + USED, available: at + AVAILABLE }
    }

    fn slot(&self, head: u16) -> u64 {
        self.at + SLOTS + SLOT_BYTES * u64::from(head)
    }

    /// Adds a request. The server does not see it before [`Ring::show`].
    pub fn offer(&mut self, head: u16, request: Head, data: impl Iterator<Item = Piece>) {
        let slot = self.slot(head);
        let mut table = std::mem::take(&mut self.table);
        table.clear();
        put(&mut table, slot + HEADER_AT, 16, HAS_NEXT);
        if request.range.is_some() {
            put(&mut table, slot + RANGE_AT, 16, HAS_NEXT);
        }
        for piece in data {
            let flags = if piece.is_writable { HAS_NEXT | IS_WRITABLE } else { HAS_NEXT };
            put(&mut table, piece.at, piece.len, flags);
        }
        put(&mut table, slot + STATUS_AT, 1, IS_WRITABLE);
        let bytes = table.len();
        assert!(bytes <= 16 * DESCRIPTORS_MAX, "requests are no longer than their slots");
        let header = header(request.kind, request.sector);
        let table_at = if bytes <= HEADER_AT as usize {
            table.resize(HEADER_AT as usize, 0);
            table.extend(header);
            slot
        } else {
            self.memory.store(slot + HEADER_AT, &header);
            slot + TABLE_AT
        };
        self.memory.store(table_at, &table);
        if let Some(sectors) = request.range {
            let mut range = request.sector.to_ne_bytes().to_vec();
            range.extend([sectors, 0].iter().flat_map(|word| word.to_ne_bytes()));
            self.memory.store(slot + RANGE_AT, &range);
        }
        self.memory.store(slot + STATUS_AT, &[0xff]);
        table.clear();
        put(&mut table, table_at, bytes as u32, IS_INDIRECT);
        self.memory.store(self.at + 16 * u64::from(head), &table);
        self.table = table;
        let entry = self.at + AVAILABLE + 4 + u64::from(self.available % ENTRIES) * 2;
        self.memory.u16_at(entry).store(head, Ordering::Relaxed);
        self.available = self.available.wrapping_add(1);
        self.unshown += 1;
    }

    /// Whether to publish now although more requests may follow, given the number of requests with
    /// the server: it is the only request there, or the batch is large enough.
    #[inline]
    pub fn has_batch(&self, with_server: usize) -> bool {
        self.unshown >= SHOWN || usize::from(self.unshown) >= with_server
    }

    /// Publishes the new requests. Returns whether the server wants a kick.
    #[inline]
    pub fn show(&mut self) -> bool {
        self.unshown > 0 && self.publish()
    }

    fn publish(&mut self) -> bool {
        let count = std::mem::take(&mut self.unshown);
        self.memory.u16_at(self.at + AVAILABLE + 2).store(self.available, Ordering::Release);
        // The server's event index is read after the store above: otherwise both sides could wait
        // for each other.
        fence(Ordering::SeqCst);
        let used = self.at + USED;
        if !self.has_events {
            return self.memory.u16_at(used).load(Ordering::Relaxed) & IS_QUIET == 0;
        }
        let event = self.memory.u16_at(used + 4 + u64::from(ENTRIES) * 8).load(Ordering::Relaxed);
        // The event index is a request's number: is it one of these?
        self.available.wrapping_sub(event).wrapping_sub(1) < count
    }

    /// Number of answered requests that are not taken yet.
    #[inline]
    pub fn answered(&self) -> u16 {
        let used = self.memory.u16_at(self.at + USED + 2).load(Ordering::Acquire);
        used.wrapping_sub(self.used)
    }

    /// Takes the next answered request out of `in_flight` many: its head, and the answer.
    pub fn pop(&mut self, in_flight: usize) -> Result<Option<(u16, u8)>, Violation> {
        let count = self.answered();
        if count == 0 {
            return Ok(None);
        }
        if usize::from(count) > in_flight {
            return wrong(format!("{count} requests answered of {in_flight}"));
        }
        let at = self.at + USED + 4 + u64::from(self.used % ENTRIES) * 8;
        let head = self.memory.u32_at(at).load(Ordering::Relaxed);
        let Some(head) = u16::try_from(head).ok().filter(|head| *head < ENTRIES) else {
            return wrong(format!("request {head} answered in a ring of {ENTRIES}"));
        };
        self.used = self.used.wrapping_add(1);
        let mut status = [0];
        self.memory.load(self.slot(head) + STATUS_AT, &mut status);
        Ok(Some((head, status[0])))
    }

    /// Asks for a notification at the next answer. Returns whether the client may sleep: no request
    /// is answered already.
    pub fn may_sleep(&self) -> bool {
        let list = self.at + AVAILABLE;
        if self.has_events {
            let at = list + 4 + u64::from(ENTRIES) * 2;
            self.memory.u16_at(at).store(self.used, Ordering::Relaxed);
        } else {
            self.memory.u16_at(list).store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.answered() == 0
    }

    /// Turns notifications off. With event indices, the event is in the past.
    pub fn refuse_calls(&self) {
        if !self.has_events {
            self.memory.u16_at(self.at + AVAILABLE).store(IS_QUIET, Ordering::Relaxed);
        }
    }
}

fn put(table: &mut Vec<u8>, at: u64, len: u32, flags: u16) {
    let next = (table.len() / 16 + 1) as u16;
    let next = if flags & HAS_NEXT == 0 { 0 } else { next };
    table.extend((BASE + at).to_ne_bytes());
    table.extend(len.to_ne_bytes());
    table.extend(flags.to_ne_bytes());
    table.extend(next.to_ne_bytes());
}

fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_ne_bytes());
    bytes[8..].copy_from_slice(&sector.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    const FLUSH: Head = Head { kind: 4, sector: 0, range: None };

    fn ring(has_events: bool) -> Ring {
        let file = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, RING_BYTES).unwrap();
        Ring::new(Arc::new(ClientMemory::map(&file, 0, RING_BYTES).unwrap()), 0, has_events)
    }

    fn shown(ring: &Ring) -> u16 {
        ring.memory.u16_at(AVAILABLE + 2).load(Ordering::Acquire)
    }

    #[test]
    fn requests_that_follow_others_are_shown_together() {
        let mut ring = ring(true);
        let mut shows = Vec::new();
        for with_server in 1..=2 + usize::from(SHOWN) {
            ring.offer(with_server as u16, FLUSH, std::iter::empty());
            if ring.has_batch(with_server) {
                ring.show();
            }
            shows.push(shown(&ring));
        }
        // The first request, because the server is idle; then none until the batch is large enough.
        assert_eq!(shows, [1, 1, 1, 1, 1, 1, 1, 1, 9, 9]);
        ring.show();
        assert_eq!(shown(&ring), 10);
        assert!(!ring.show(), "all requests are published");
    }

    #[test]
    fn the_server_is_kicked_if_it_waits_for_one_of_those_that_are_shown() {
        for lap in [0, u16::MAX - 2] {
            for event in 0..6_u16 {
                let mut ring = ring(true);
                ring.available = lap;
                let at = USED + 4 + u64::from(ENTRIES) * 8;
                ring.memory.u16_at(at).store(lap.wrapping_add(event), Ordering::Relaxed);
                (0..4).for_each(|head| ring.offer(head, FLUSH, std::iter::empty()));
                assert_eq!(ring.show(), event < 4, "{event} after {lap}");
                ring.offer(5, FLUSH, std::iter::empty());
                assert_eq!(ring.show(), event == 4, "{event} after {lap}");
            }
        }
        let mut ring = ring(false);
        for (flags, is_kicked) in [(0, true), (IS_QUIET, false)] {
            ring.memory.u16_at(USED).store(flags, Ordering::Relaxed);
            ring.offer(0, FLUSH, std::iter::empty());
            assert_eq!(ring.show(), is_kicked);
        }
    }
}
