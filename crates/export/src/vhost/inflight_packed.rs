//! The same for packed rings, whose used descriptors overwrite those of requests in flight: each
//! descriptor is noted as a whole, in a list of places of its own.
//!
//! | bytes of a ring's part | what |
//! |---|---|
//! | 0..8, 8..10, 10..12 | features: 0; version: 0 or 1; descriptors that follow |
//! | 12..14, 14..16 | the first free place; what it was before the answer that is being given |
//! | 16..18, 18..20 | the same of the entry that is used next |
//! | 20, 21 | the same of its lap: 1 if it is odd |
//! | 32.. | 32 bytes for each place |
//!
//! | bytes of a place | what |
//! |---|---|
//! | 0 | 1 while the request that begins there is in flight |
//! | 2..4 | the next place of the request, or the next free one; what is no place ends the list |
//! | 4..6, 6..8 | the last place of the request, and how many it has |
//! | 8..16 | counts requests: the order in which they were taken |
//! | 16..18, 18..20, 20..24, 24..32 | the descriptor: name, flags, length, address |
//!
//! 1. A request is in flight from the moment in which the first free place is the one after it.
//! 2. An answer has been given from the moment in which the driver can see it. A server that dies
//!    around that leaves two states, before and after, and the ring says which one counts: the
//!    entry that was used next is still available, or not.
//! 3. What is in flight then is done again, in the order in which it was taken. The next entry to
//!    take follows from it: no more was taken than what was used and what is in flight.
//!
//! The words of the current state and the one before are stored together, with fewer moments in
//! between than the specification has; all of those are understood.

use std::fmt;

use udm::foreign::Foreign;
use udm::sync::Arc;
use udm::sync::statics::atomic::Ordering;

use super::chain::Piece;
use super::inflight::VERSION;
use super::memory::check;
use super::packed::{Cursor, Descriptor, Packed};
use super::proto::{Violation, wrong};
use super::steps::{self, Mutant, has};

const UNIT_BYTES: u64 = 32;
/// Words of a part.
const VERSION_AT: u64 = 8;
const ENTRIES_AT: u64 = 10;
const FREE_AT: u64 = 12;
const USED_AT: u64 = 16;
/// Words of a place.
const LINKS_AT: u64 = 0;
const COUNTER_AT: u64 = 8;
const DESCRIPTOR_AT: u64 = 16;
const ADDRESS_AT: u64 = 24;

/// A request that an earlier server took and did not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Noted {
    /// The driver's name for it.
    pub id: u16,
    /// Its descriptors.
    pub descriptors: Vec<Descriptor>,
}

/// What the first word of a place says.
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

/// The notes of one packed ring.
pub struct PackedTracker {
    foreign: Arc<Foreign>,
    /// Where its part begins.
    at: u64,
    /// The places, as far as they are not of the client's word: what it changes harms it alone.
    places: Vec<Links>,
    /// The first free place.
    free: u16,
    /// The entry of the ring that is used next.
    used: Cursor,
    /// Requests taken so far.
    counter: u64,
    /// The first place of each request in flight, by its name.
    heads: Vec<u16>,
    /// The answer that is being given.
    answered: Option<(u16, Cursor)>,
}

impl fmt::Debug for PackedTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackedTracker").field("free", &self.free).field("used", &self.used).finish()
    }
}

impl PackedTracker {
    /// Begins, or goes on where a server has died: with the requests that are to be done again.
    pub fn open(
        foreign: Arc<Foreign>,
        at: u64,
        ring: &mut Packed,
    ) -> Result<(PackedTracker, Vec<Noted>), Violation> {
        let entries = ring.entries();
        let mut tracker = PackedTracker {
            foreign,
            at,
            places: vec![Links::default(); usize::from(entries)],
            free: 0,
            used: ring.used(),
            counter: 0,
            heads: vec![0; usize::from(entries)],
            answered: None,
        };
        let again = match tracker.foreign.u16_at(at + VERSION_AT).load(Ordering::Acquire) {
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
        check(&tracker.foreign)?;
        Ok((tracker, again))
    }

    fn entries(&self) -> u16 {
        self.places.len() as u16
    }

    fn place(&self, place: u16) -> u64 {
        self.at + UNIT_BYTES * (1 + u64::from(place))
    }

    fn load(&self, at: u64) -> u64 {
        self.foreign.u64_at(at).load(Ordering::Acquire)
    }

    /// Nothing is in flight: all places are free.
    fn begin(&mut self) {
        for place in 0..self.entries() {
            self.set(place, Links { next: place + 1, ..Links::default() });
        }
        self.store_free(0, 0);
        self.store_used(self.used, self.used);
        steps::store_u16(&self.foreign, self.at + ENTRIES_AT, self.entries());
        steps::store_u16(&self.foreign, self.at + VERSION_AT, VERSION);
    }

    fn set(&mut self, place: u16, links: Links) {
        self.places[usize::from(place)] = links;
        steps::store_u64(&self.foreign, self.place(place) + LINKS_AT, links.print());
    }

    /// The first free place, and before.
    fn store_free(&self, now: u16, before: u16) {
        let word = u32::from(now) | u32::from(before) << 16;
        steps::store_u32(&self.foreign, self.at + FREE_AT, word);
    }

    /// The entry that is used next, and before.
    fn store_used(&self, now: Cursor, before: Cursor) {
        let indices = u64::from(now.index) | u64::from(before.index) << 16;
        let laps = u64::from(now.is_odd) | u64::from(before.is_odd) << 8;
        steps::store_u64(&self.foreign, self.at + USED_AT, indices | laps << 32);
    }

    /// Goes on where a server has died.
    fn take_up(&mut self, ring: &Packed) -> Result<Vec<Noted>, Violation> {
        let entries = self.entries();
        let noted = self.foreign.u16_at(self.at + ENTRIES_AT).load(Ordering::Acquire);
        if noted != entries {
            return wrong(format!(
                "requests in flight of a ring of {noted} entries, not {entries}"
            ));
        }
        let free = self.foreign.u32_at(self.at + FREE_AT).load(Ordering::Acquire);
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

    /// Reads all places. Those that are free are of no request, whatever else they say.
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
                return wrong("free places for requests in flight that lead back to themselves");
            }
        }
        Ok(())
    }

    /// The requests in flight, in the order in which they were taken.
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
            return wrong("places for requests in flight that are lost");
        }
        again.sort_unstable_by_key(|(counter, noted)| (*counter, noted.id));
        self.counter = again.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(again.into_iter().map(|(_, noted)| noted).collect())
    }

    /// The request that begins at `head`, whose places are nobody else's.
    fn read(&self, head: u16, is_seen: &mut [bool]) -> Result<Noted, Violation> {
        let Links { last, count, .. } = self.places[usize::from(head)];
        let mut noted = Noted { id: 0, descriptors: Vec::with_capacity(usize::from(count)) };
        let (mut place, mut end) = (head, head);
        for _ in 0..count {
            match is_seen.get_mut(usize::from(place)) {
                Some(seen) if !*seen => *seen = true,
                _ => return wrong(format!("place {place} for requests in flight is of two")),
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
            return wrong(format!("a request in flight of {count} places up to {last}"));
        }
        Ok(noted)
    }

    /// The request is taken: it has these descriptors.
    pub fn note(&mut self, id: u16, descriptors: &[Descriptor]) {
        if has(Mutant::NotNoted) {
            return;
        }
        let head = self.free;
        let (mut next, mut last) = (head, head);
        for Descriptor { piece, id, flags } in descriptors {
            let at = self.place(next);
            let word = u64::from(*id) | u64::from(*flags) << 16 | u64::from(piece.len) << 32;
            steps::store_u64(&self.foreign, at + DESCRIPTOR_AT, word);
            steps::store_u64(&self.foreign, at + ADDRESS_AT, piece.guest);
            (last, next) = (next, self.places[usize::from(next)].next);
        }
        steps::store_u64(&self.foreign, self.place(head) + COUNTER_AT, self.counter);
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

    /// The request's places are the first free ones now, for this state and not for the one before.
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

    /// The request that begins at `head` is not in flight, in no state. What is free is of no
    /// request, so the list comes first: otherwise it would be in neither for a moment.
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

    /// The request is not in flight, and has no answer.
    pub fn cross_out(&mut self, id: u16) {
        let head = self.free(id);
        self.forget(head);
    }

    /// The request has its answer; the driver sees it next, and `used` is the entry after it.
    #[inline]
    pub fn answered(&mut self, id: u16, used: Cursor) {
        let head = self.free(id);
        self.store_used(used, self.used);
        self.answered = Some((head, used));
    }

    /// The driver can see the answer.
    #[inline]
    pub fn published(&mut self) {
        if let Some((head, used)) = self.answered.take() {
            self.forget(head);
            self.used = used;
            self.store_used(used, used);
        }
    }

    /// An error if some of the notes was cut off.
    #[inline]
    pub fn check(&self) -> Result<(), Violation> {
        check(&self.foreign)
    }
}

#[cfg(test)]
#[path = "inflight_packed_tests.rs"]
mod tests;
