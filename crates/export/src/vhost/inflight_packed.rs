//! The in-flight log of packed rings, whose used descriptors overwrite those of requests in flight.
//! Each descriptor is therefore logged as a whole, in a list of slots.
//!
//! | bytes of a ring's part | content |
//! |---|---|
//! | 0..8, 8..10, 10..12 | features: 0; version: 0 or 1; number of descriptors |
//! | 12..14, 14..16 | the first free slot; its value before the current answer |
//! | 16..18, 18..20 | the next used entry; its value before the current answer |
//! | 20, 21 | its lap: 1 if the lap is odd; its value before the current answer |
//! | 32.. | 32 bytes for each slot |
//!
//! | bytes of a slot | content |
//! |---|---|
//! | 0 | 1 while the request that starts there is in flight |
//! | 2..4 | the next slot of the request, or the next free slot; an invalid number ends the list |
//! | 4..6, 6..8 | the last slot of the request, and its number of slots |
//! | 8..16 | the request's number, in the order of taking |
//! | 16..18, 18..20, 20..24, 24..32 | the descriptor: id, flags, length, address |
//!
//! 1. A request is in flight from the moment when the first free slot is the one after it.
//! 2. An answer is complete from the moment when the driver can see it. A server that dies around
//!    that moment leaves two states, before and after. The ring decides between them: the next used
//!    entry is still available, or not.
//! 3. The requests then in flight are carried out again, in the order in which they were taken. The
//!    next entry to take follows from them: all taken entries are either used or in flight.
//!
//! The current and the previous values are stored together, with fewer intermediate states than the
//! specification has; all states of the specification are understood.

use std::fmt;

use udm::pmem::client_memory::ClientMemory;
use udm::sync::Arc;
use udm::sync::statics::atomic::Ordering;

use super::chain::Piece;
use super::memory::check;
use super::packed::{Cursor, Descriptor, Packed};
use super::proto::{Violation, wrong};
use super::steps::{self, Mutant, VERSION, has};

const UNIT_BYTES: u64 = 32;
/// Offsets in a part.
const VERSION_AT: u64 = 8;
const ENTRIES_AT: u64 = 10;
const FREE_AT: u64 = 12;
const USED_AT: u64 = 16;
/// Offsets in a slot.
const LINKS_AT: u64 = 0;
const COUNTER_AT: u64 = 8;
const DESCRIPTOR_AT: u64 = 16;
const ADDRESS_AT: u64 = 24;

/// A request that an earlier server took and did not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Noted {
    /// The driver's id of the request.
    pub id: u16,
    /// Its descriptors.
    pub descriptors: Vec<Descriptor>,
}

/// The first word of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Links {
    is_in_flight: bool,
    next: u16,
    last: u16,
    count: u16,
}

impl Links {
    fn parse(word: u64) -> Links {
        let [next, last, count] = [16, 32, 48].map(|at| (word >> at) as u16);
        Links { is_in_flight: word & 0xff != 0, next, last, count }
    }

    fn print(self) -> u64 {
        let Links { is_in_flight, next, last, count } = self;
        let [next, last, count] = [next, last, count].map(u64::from);
        u64::from(is_in_flight) | next << 16 | last << 32 | count << 48
    }
}

/// The log of one packed ring.
pub struct PackedTracker {
    client_memory: Arc<ClientMemory>,
    /// Offset of its part.
    at: u64,
    /// Private copies of the slots' links: a client that changes the shared ones harms only itself.
    places: Vec<Links>,
    /// The first free slot.
    free: u16,
    /// The next used entry of the ring.
    used: Cursor,
    /// Requests taken so far.
    counter: u64,
    /// The first slot of each request in flight, by its id.
    heads: Vec<u16>,
    /// The answer in progress.
    answered: Option<(u16, Cursor)>,
}

impl fmt::Debug for PackedTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackedTracker").field("free", &self.free).field("used", &self.used).finish()
    }
}

impl PackedTracker {
    /// Starts a new log, or continues the log of a dead server. Also returns the requests to carry
    /// out again.
    pub fn open(
        client_memory: Arc<ClientMemory>,
        at: u64,
        ring: &mut Packed,
    ) -> Result<(PackedTracker, Vec<Noted>), Violation> {
        let entries = ring.entries();
        let mut tracker = PackedTracker {
            client_memory,
            at,
            places: vec![Links::default(); usize::from(entries)],
            free: 0,
            used: ring.used(),
            counter: 0,
            heads: vec![0; usize::from(entries)],
            answered: None,
        };
        let again = match tracker.client_memory.u16_at(at + VERSION_AT).load(Ordering::Acquire) {
            0 => {
                tracker.begin();
                Vec::new()
            }
            VERSION => {
                let again = tracker.take_up(ring)?;
                let counts = again.iter().map(|noted| (noted.id, noted.descriptors.len() as u16));
                if !has(Mutant::BaseBelieved) {
                    ring.go_on(tracker.used, counts);
                }
                again
            }
            other => return wrong(format!("requests in flight of version {other}")),
        };
        check(&tracker.client_memory)?;
        Ok((tracker, again))
    }

    fn entries(&self) -> u16 {
        self.places.len() as u16
    }

    fn place(&self, place: u16) -> u64 {
        self.at + UNIT_BYTES * (1 + u64::from(place))
    }

    fn load(&self, at: u64) -> u64 {
        self.client_memory.u64_at(at).load(Ordering::Acquire)
    }

    /// Starts an empty log: all slots are free.
    fn begin(&mut self) {
        for place in 0..self.entries() {
            self.set(place, Links { next: place + 1, ..Links::default() });
        }
        self.store_free(0, 0);
        self.store_used(self.used, self.used);
        steps::store_u16(&self.client_memory, self.at + ENTRIES_AT, self.entries());
        steps::store_u16(&self.client_memory, self.at + VERSION_AT, VERSION);
    }

    fn set(&mut self, place: u16, links: Links) {
        self.places[usize::from(place)] = links;
        steps::store_u64(&self.client_memory, self.place(place) + LINKS_AT, links.print());
    }

    /// Stores the first free slot, now and before.
    fn store_free(&self, now: u16, before: u16) {
        let word = u32::from(now) | u32::from(before) << 16;
        steps::store_u32(&self.client_memory, self.at + FREE_AT, word);
    }

    /// Stores the next used entry, now and before.
    fn store_used(&self, now: Cursor, before: Cursor) {
        let indices = u64::from(now.index) | u64::from(before.index) << 16;
        let laps = u64::from(now.is_odd) | u64::from(before.is_odd) << 8;
        steps::store_u64(&self.client_memory, self.at + USED_AT, indices | laps << 32);
    }

    /// Continues the log of a dead server.
    fn take_up(&mut self, ring: &Packed) -> Result<Vec<Noted>, Violation> {
        let entries = self.entries();
        let noted = self.client_memory.u16_at(self.at + ENTRIES_AT).load(Ordering::Acquire);
        if noted != entries {
            return wrong(format!(
                "requests in flight of a ring of {noted} entries, not {entries}"
            ));
        }
        let free = self.client_memory.u32_at(self.at + FREE_AT).load(Ordering::Acquire);
        let word = self.load(self.at + USED_AT);
        let cursor = |index: u32, lap: u32| Cursor {
            index: (word >> index) as u16,
            is_odd: word >> lap & 0xff != 0,
        };
        let ((used, used_before), free_before) = ((cursor(0, 32), cursor(16, 40)), free >> 16);
        if used.index >= entries || used_before.index >= entries {
            let Cursor { index, .. } = used;
            return wrong(format!("entry {index} used in a ring of {entries}"));
        }
        let is_given =
            used != used_before && !used_before.is_available(ring.flags_at(used_before)?);
        let is_given = (is_given || has(Mutant::Committed)) && !has(Mutant::RolledBack);
        (self.free, self.used) =
            if is_given { (free as u16, used) } else { (free_before as u16, used_before) };
        self.read_places()?;
        self.store_free(self.free, self.free);
        self.store_used(self.used, self.used);
        self.in_flight()
    }

    /// Reads all slots. Free slots belong to no request, and their other fields are ignored.
    fn read_places(&mut self) -> Result<(), Violation> {
        let entries = self.entries();
        for place in 0..entries {
            let links = Links::parse(self.load(self.place(place) + LINKS_AT));
            self.places[usize::from(place)] = links;
        }
        let (mut place, mut steps) = (self.free, 0);
        while place < entries {
            let links = self.places[usize::from(place)];
            self.set(place, Links { is_in_flight: false, count: 0, ..links });
            (place, steps) = (links.next, steps + 1);
            if steps > entries {
                return wrong("a cycle in the free list of requests in flight");
            }
        }
        Ok(())
    }

    /// Returns the requests in flight, in the order in which they were taken.
    fn in_flight(&mut self) -> Result<Vec<Noted>, Violation> {
        let mut is_seen = vec![false; self.places.len()];
        let mut place = self.free;
        while let Some(seen) = is_seen.get_mut(usize::from(place)) {
            *seen = true;
            place = self.places[usize::from(place)].next;
        }
        let mut again = Vec::new();
        let mut has_name = vec![false; self.places.len()];
        for head in 0..self.entries() {
            if self.places[usize::from(head)].is_in_flight {
                let noted = self.read(head, &mut is_seen)?;
                match has_name.get_mut(usize::from(noted.id)) {
                    Some(has_name) if !*has_name => *has_name = true,
                    _ => return wrong(format!("request {} is in flight twice", noted.id)),
                }
                self.heads[usize::from(noted.id)] = head;
                again.push((self.load(self.place(head) + COUNTER_AT), noted));
            }
        }
        if !is_seen.iter().all(|is_seen| *is_seen) {
            return wrong("lost slots of requests in flight");
        }
        again.sort_unstable_by_key(|(counter, noted)| (*counter, noted.id));
        self.counter = again.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(again.into_iter().map(|(_, noted)| noted).collect())
    }

    /// Reads the request that starts at `head`. Its slots must not belong to another request.
    fn read(&self, head: u16, is_seen: &mut [bool]) -> Result<Noted, Violation> {
        let Links { last, count, .. } = self.places[usize::from(head)];
        let mut noted = Noted { id: 0, descriptors: Vec::with_capacity(usize::from(count)) };
        let (mut place, mut end) = (head, head);
        for _ in 0..count {
            match is_seen.get_mut(usize::from(place)) {
                Some(seen) if !*seen => *seen = true,
                _ => return wrong(format!("slot {place} of requests in flight is in two lists")),
            }
            let at = self.place(place);
            let (word, guest) = (self.load(at + DESCRIPTOR_AT), self.load(at + ADDRESS_AT));
            let [id, flags] = [0, 16].map(|at| (word >> at) as u16);
            let piece = Piece { guest, len: (word >> 32) as u32 };
            noted.descriptors.push(Descriptor { piece, id, flags });
            noted.id = id;
            (end, place) = (place, self.places[usize::from(place)].next);
        }
        if count == 0 || end != last {
            return wrong(format!("a request in flight of {count} slots up to {last}"));
        }
        Ok(noted)
    }

    /// Records a request with these descriptors before it is taken.
    pub fn note(&mut self, id: u16, descriptors: &[Descriptor]) {
        if has(Mutant::NotNoted) {
            return;
        }
        let head = self.free;
        let (mut next, mut last) = (head, head);
        for Descriptor { piece, id, flags } in descriptors {
            let at = self.place(next);
            let word = u64::from(*id) | u64::from(*flags) << 16 | u64::from(piece.len) << 32;
            steps::store_u64(&self.client_memory, at + DESCRIPTOR_AT, word);
            steps::store_u64(&self.client_memory, at + ADDRESS_AT, piece.guest);
            (last, next) = (next, self.places[usize::from(next)].next);
        }
        steps::store_u64(&self.client_memory, self.place(head) + COUNTER_AT, self.counter);
        self.counter = self.counter.wrapping_add(u64::from(!has(Mutant::OrderForgotten)));
        if has(Mutant::NotedLate) {
            self.store_free(next, next);
        }
        let links = self.places[usize::from(head)];
        let count = descriptors.len() as u16;
        self.set(head, Links { is_in_flight: true, last, count, ..links });
        self.free = next;
        self.store_free(next, next);
        self.heads[usize::from(id)] = head;
    }

    /// Frees the request's slots for the current state, but not for the previous one.
    fn free(&mut self, id: u16) -> u16 {
        let head = self.heads[usize::from(id)];
        let before = self.free;
        let last = self.places[usize::from(head)].last;
        let links = self.places[usize::from(last)];
        self.set(last, Links { next: before, ..links });
        self.free = head;
        self.store_free(head, if has(Mutant::FreedEarly) { head } else { before });
        head
    }

    /// Removes the request that starts at `head` from both states. The free list comes first:
    /// otherwise, for a moment, the slots would be neither free nor in flight.
    fn forget(&mut self, head: u16) {
        if !has(Mutant::ForgottenFirst) {
            self.store_free(head, head);
        }
        let links = self.places[usize::from(head)];
        self.set(head, Links { is_in_flight: false, ..links });
        if has(Mutant::ForgottenFirst) {
            self.store_free(head, head);
        }
    }

    /// Clears a request without an answer.
    pub fn cross_out(&mut self, id: u16) {
        let head = self.free(id);
        self.forget(head);
    }

    /// Records an answer, which the driver sees next; `used` is the entry after it.
    #[inline]
    pub fn answered(&mut self, id: u16, used: Cursor) {
        let head = self.free(id);
        self.store_used(used, self.used);
        self.answered = Some((head, used));
    }

    /// Records that the driver can see the answer.
    #[inline]
    pub fn published(&mut self) {
        if let Some((head, used)) = self.answered.take() {
            self.forget(head);
            self.used = used;
            self.store_used(used, used);
        }
    }

    /// Returns an error if a part of the log was truncated.
    #[inline]
    pub fn check(&self) -> Result<(), Violation> {
        check(&self.client_memory)
    }
}

#[cfg(test)]
#[path = "inflight_packed_tests.rs"]
mod tests;
