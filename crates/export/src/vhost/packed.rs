//! A packed ring: one table of descriptors, through which driver and device cycle independently.
//! The driver makes requests available there, the device marks them used. Each side has a word that
//! controls its notifications.
//!
//! The whole ring is in the guest's memory and may change at any time. An error in a ring ends its
//! use, as with split rings.
//!
//! 1. Two flags of a descriptor encode its owner. Their meaning is inverted with each lap, so each
//!    side counts its laps with one bit.
//! 2. Used descriptors are written at the device's position in the table, in the order of the
//!    answers. They overwrite descriptors of requests in flight, whose memory is therefore kept
//!    here.
//! 3. All descriptors between the used and the next position belong to requests in flight: never
//!    more than the ring has entries.
//! 4. The flags are the last store of an answer. So the driver sees each answer whole or not at
//!    all, and in order; a dead server leaves no half-finished answer.

use udm::sync::statics::atomic::{Ordering, fence};

use super::chain::{
    Chain, DESCRIPTOR_BYTES, ENTRIES_MAX, HAS_NEXT, IS_INDIRECT, IS_WRITABLE, Piece, Shape,
    load_table,
};
use super::memory::{Memory, Place};
use super::proto::{RingAddresses, Violation, feature, u16_at, u32_at, u64_at, wrong};
use super::steps::{self, Mutant, has};

/// Offsets in a descriptor.
const LEN_AT: u64 = 8;
const ID_AT: u64 = 12;
const FLAGS_AT: u64 = 14;
/// Flags of a descriptor: the lap of its owner.
const IS_AVAILABLE: u16 = 1 << 7;
const IS_USED: u16 = 1 << 15;

/// Bytes of an event suppression structure: a position in the ring, and the flags.
const WISH_BYTES: u64 = 4;
/// Its flags: notify always, never, or when a position is passed.
const ALWAYS: u16 = 0;
const NEVER: u16 = 1;
const AT_PLACE: u16 = 2;

/// A position in the ring, and the parity of its lap; the first lap is odd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// The entry.
    pub index: u16,
    /// Whether the lap is odd.
    pub is_odd: bool,
}

impl Cursor {
    /// Decodes the form in messages and in event suppression structures.
    pub fn parse(bits: u16) -> Cursor {
        Cursor { index: bits & 0x7fff, is_odd: bits & 0x8000 != 0 }
    }

    /// Encodes the form in messages and in event suppression structures.
    pub fn print(self) -> u16 {
        self.index | u16::from(self.is_odd) << 15
    }

    /// The position `count` entries further, at most one lap.
    #[inline]
    pub fn after(self, count: u16, entries: u16) -> Cursor {
        let index = u32::from(self.index) + u32::from(count);
        match index.checked_sub(entries.into()) {
            Some(index) => Cursor { index: index as u16, is_odd: !self.is_odd },
            None => Cursor { index: index as u16, ..self },
        }
    }

    /// The position `count` entries back, at most one lap.
    pub fn before(self, count: u16, entries: u16) -> Cursor {
        match self.index.checked_sub(count) {
            Some(index) => Cursor { index, ..self },
            None => Cursor { index: self.index + entries - count, is_odd: !self.is_odd },
        }
    }

    /// How many entries `self` is ahead of `other`, if the distance is less than the laps can tell.
    fn ahead_of(self, other: Cursor, entries: u16) -> i32 {
        let lap = if self.is_odd == other.is_odd { 0 } else { i32::from(entries) };
        lap + i32::from(self.index) - i32::from(other.index)
    }

    /// Flags of a descriptor that the device has used in this lap.
    fn used_flags(self) -> u16 {
        if self.is_odd { IS_AVAILABLE | IS_USED } else { 0 }
    }

    /// Whether these flags belong to a descriptor that the driver has made available in this lap
    /// and the device has not used.
    #[inline]
    pub fn is_available(self, flags: u16) -> bool {
        flags & (IS_AVAILABLE | IS_USED) == if self.is_odd { IS_AVAILABLE } else { IS_USED }
    }
}

/// Encodes a ring's position for messages: the next entry to take, and the next to use.
pub fn base(next: Cursor, used: Cursor) -> u32 {
    u32::from(next.print()) | u32::from(used.print()) << 16
}

/// A copied descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Its memory.
    pub piece: Piece,
    /// The driver's id of the request.
    pub id: u16,
    /// Its flags.
    pub flags: u16,
}

impl Descriptor {
    /// Decodes it.
    pub fn parse(bytes: &[u8]) -> Descriptor {
        let piece = Piece { guest: u64_at(bytes, 0), len: u32_at(bytes, LEN_AT as usize) };
        let (id, flags) = (u16_at(bytes, ID_AT as usize), u16_at(bytes, FLAGS_AT as usize));
        Descriptor { piece, id, flags }
    }
}

/// The three parts, in memory.
#[derive(Clone, Debug)]
struct Parts {
    descriptors: Place,
    /// The driver's event suppression: when to call it.
    driver: Place,
    /// The device's event suppression: when to kick it.
    device: Place,
}

impl Parts {
    fn find(shape: &Shape, memory: &Memory) -> Result<Parts, Violation> {
        let bytes = u64::from(shape.entries) * DESCRIPTOR_BYTES as u64;
        let RingAddresses { descriptors, used, available } = shape.addresses;
        Ok(Parts {
            descriptors: memory.place(descriptors, bytes, 16)?,
            driver: memory.place(available, WISH_BYTES, 4)?,
            device: memory.place(used, WISH_BYTES, 4)?,
        })
    }
}

/// A packed ring, from the device's side.
#[derive(Debug)]
pub struct Packed {
    shape: Shape,
    parts: Parts,
    /// The next entry to take.
    next: Cursor,
    /// The next entry to fill.
    used: Cursor,
    /// Descriptors between the two.
    in_flight: u16,
    /// Number of descriptors of each request in flight, by its id.
    counts: Vec<u16>,
    /// Descriptors used since the last check whether the driver wants a call.
    unheard: u32,
    /// The last stored value of the device's event suppression.
    told: Option<u32>,
    /// The descriptors of the last read request.
    peeked: Vec<Descriptor>,
    /// A copied table of descriptors.
    table: Vec<u8>,
}

impl Packed {
    /// Opens the ring with `shape` at the position `base`.
    pub fn new(shape: Shape, memory: &Memory, base: u32) -> Result<Packed, Violation> {
        let entries = shape.entries;
        if entries == 0 || entries > ENTRIES_MAX {
            return wrong(format!(
                "a packed ring of {entries} entries: up to {ENTRIES_MAX} is taken"
            ));
        }
        let (next, mut used) = (Cursor::parse(base as u16), Cursor::parse((base >> 16) as u16));
        // Some clients send only the position of the next entry.
        if base >> 16 == 0 && next.is_odd {
            used = next;
        }
        let in_flight = next.ahead_of(used, entries);
        let is_inside = next.index < entries && used.index < entries;
        if !is_inside || !(0..=i32::from(entries)).contains(&in_flight) {
            return wrong(format!("a packed ring of {entries} entries that is at {base:#x}"));
        }
        let parts = Parts::find(&shape, memory)?;
        Ok(Packed {
            shape,
            parts,
            next,
            used,
            in_flight: in_flight as u16,
            counts: vec![0; usize::from(entries)],
            unheard: 0,
            told: None,
            peeked: Vec::new(),
            table: Vec::new(),
        })
    }

    /// Switches to new memory.
    pub fn moved(&mut self, memory: &Memory) -> Result<(), Violation> {
        self.parts = Parts::find(&self.shape, memory)?;
        self.told = None;
        Ok(())
    }

    /// Number of entries.
    pub fn entries(&self) -> u16 {
        self.shape.entries
    }

    /// The next entry to take.
    pub fn next(&self) -> Cursor {
        self.next
    }

    /// The next entry to fill.
    pub fn used(&self) -> Cursor {
        self.used
    }

    /// Returns the flags of the entry at `cursor`.
    pub fn flags_at(&self, cursor: Cursor) -> Result<u16, Violation> {
        let place = &self.parts.descriptors;
        let at = place.at + u64::from(cursor.index) * DESCRIPTOR_BYTES as u64 + FLAGS_AT;
        let flags = place.client_memory.u16_at(at).load(Ordering::Acquire);
        place.check()?;
        Ok(flags)
    }

    /// Whether the driver has made a request available.
    #[inline]
    pub fn has_request(&self) -> Result<bool, Violation> {
        Ok(self.next.is_available(self.flags_at(self.next)?))
    }

    /// Reads the next request into `chain`, and returns its id; `None` if there is none. It is
    /// still the next one until [`Packed::accept`].
    pub fn peek(&mut self, memory: &Memory, chain: &mut Chain) -> Result<Option<u16>, Violation> {
        if !self.has_request()? {
            return Ok(None);
        }
        self.peeked.clear();
        let entries = self.shape.entries;
        let mut cursor = self.next;
        loop {
            // The other descriptors belong to requests in flight, so this one would, as well.
            if usize::from(self.in_flight) + self.peeked.len() >= usize::from(entries) {
                return wrong(format!("more descriptors available than a ring of {entries} has"));
            }
            let descriptor = self.descriptor(cursor)?;
            self.peeked.push(descriptor);
            if descriptor.flags & HAS_NEXT == 0 || descriptor.flags & IS_INDIRECT != 0 {
                break;
            }
            cursor = cursor.after(1, entries);
        }
        let peeked = std::mem::take(&mut self.peeked);
        let read = self.walk(&peeked, memory, chain);
        self.peeked = peeked;
        read.map(Some)
    }

    /// The descriptors of the last read request.
    pub fn peeked(&self) -> &[Descriptor] {
        &self.peeked
    }

    /// Takes the last read request.
    #[inline]
    pub fn accept(&mut self, id: u16) {
        let count = self.peeked.len() as u16;
        self.next = self.next.after(count, self.shape.entries);
        self.hold(id, count);
    }

    fn hold(&mut self, id: u16, count: u16) {
        self.counts[usize::from(id)] = count;
        self.in_flight += count;
    }

    /// Whether the request `id`, which started at `start`, is the last one that was accepted.
    pub fn is_newest(&self, id: u16, start: Cursor) -> bool {
        start.after(self.counts[usize::from(id)], self.shape.entries) == self.next
    }

    /// Gives the last accepted request back, as if it had not been taken.
    pub fn give_back(&mut self, id: u16) {
        let count = std::mem::take(&mut self.counts[usize::from(id)]);
        self.in_flight -= count;
        self.next = self.next.before(count, self.shape.entries);
    }

    /// Moves the ring to the position `used`, with these requests in flight: their ids, and their
    /// numbers of descriptors.
    pub fn go_on(&mut self, used: Cursor, in_flight: impl Iterator<Item = (u16, u16)>) {
        self.in_flight = 0;
        in_flight.for_each(|(id, count)| self.hold(id, count));
        self.used = used;
        self.next = used.after(self.in_flight, self.shape.entries);
    }

    /// Reads the request with these descriptors into `chain`. Returns its id.
    pub fn walk(
        &mut self,
        descriptors: &[Descriptor],
        memory: &Memory,
        chain: &mut Chain,
    ) -> Result<u16, Violation> {
        chain.clear();
        for descriptor in descriptors {
            if descriptor.flags & IS_INDIRECT == 0 {
                chain.add(descriptor.piece, descriptor.flags, memory)?;
                continue;
            }
            // An indirect table must be the only descriptor of its request.
            if descriptors.len() > 1 {
                return wrong("an unexpected table of descriptors");
            }
            self.walk_table(*descriptor, memory, chain)?;
        }
        let id = descriptors.last().map_or(u16::MAX, |descriptor| descriptor.id);
        if id >= self.shape.entries {
            return wrong(format!("request {id} in a ring of {}", self.shape.entries));
        }
        Ok(id)
    }

    fn descriptor(&self, cursor: Cursor) -> Result<Descriptor, Violation> {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        let place = &self.parts.descriptors;
        let at = place.at + u64::from(cursor.index) * DESCRIPTOR_BYTES as u64;
        place.client_memory.load(at, &mut bytes);
        place.check()?;
        Ok(Descriptor::parse(&bytes))
    }

    /// Reads the table at `at`: all of it, in order.
    fn walk_table(
        &mut self,
        at: Descriptor,
        memory: &Memory,
        chain: &mut Chain,
    ) -> Result<(), Violation> {
        load_table(at.piece, at.flags, &self.shape, memory, &mut self.table)?;
        for bytes in self.table.chunks_exact(DESCRIPTOR_BYTES) {
            let descriptor = Descriptor::parse(bytes);
            if descriptor.flags & IS_INDIRECT != 0 {
                return wrong("a table of descriptors within another");
            }
            chain.add(descriptor.piece, descriptor.flags & IS_WRITABLE, memory)?;
        }
        Ok(())
    }

    /// The used position after an answer to `id`.
    pub fn used_after(&self, id: u16) -> Cursor {
        self.used.after(self.counts[usize::from(id)], self.shape.entries)
    }

    /// Publishes the answer to request `id`, with the number of bytes written for it.
    #[inline]
    pub fn push(&mut self, id: u16, written: u32) {
        let Place { client_memory, at } = &self.parts.descriptors;
        let at = at + u64::from(self.used.index) * DESCRIPTOR_BYTES as u64;
        let flags = self.used.used_flags() | if written > 0 { IS_WRITABLE } else { 0 };
        if has(Mutant::ShownEarly) {
            steps::store_u16(client_memory, at + FLAGS_AT, flags);
        }
        steps::store_u32(client_memory, at + LEN_AT, written);
        steps::store_u16(client_memory, at + ID_AT, id);
        steps::store_u16(client_memory, at + FLAGS_AT, flags);
        let count = std::mem::take(&mut self.counts[usize::from(id)]);
        self.used = self.used.after(count, self.shape.entries);
        self.in_flight -= count;
        self.unheard = self.unheard.saturating_add(count.into());
    }

    /// Returns an error if a part of the ring was truncated.
    #[inline]
    pub fn check(&self) -> Result<(), Violation> {
        self.parts.descriptors.check()
    }

    /// Whether the driver wants a call for the descriptors used since the last check.
    pub fn needs_call(&mut self) -> bool {
        let unheard = std::mem::take(&mut self.unheard);
        if unheard == 0 {
            return false;
        }
        // The driver's word is read after the flags were stored: otherwise both sides could wait
        // for each other.
        fence(Ordering::SeqCst);
        let Place { client_memory, at } = &self.parts.driver;
        let wish = client_memory.u32_at(*at).load(Ordering::Relaxed);
        match (wish >> 16) as u16 {
            NEVER => false,
            AT_PLACE if self.shape.has(feature::EVENT_IDX) => {
                let place = Cursor::parse(wish as u16);
                let passed = self.used.ahead_of(place, self.shape.entries);
                let is_known = unheard <= self.shape.entries.into();
                !is_known || (1..=unheard as i32).contains(&passed)
            }
            _ => true,
        }
    }

    /// Asks the driver to kick at the next request. Returns whether the device may sleep until
    /// then: no request is available already.
    pub fn may_sleep(&mut self) -> Result<bool, Violation> {
        self.ask_and_look(|| ())
    }

    /// The driver stores its flags, then reads the device's word. So the device stores its word
    /// first, and then checks for requests: at least one side sees the other's store. `between` is
    /// the action of a test's driver between the two steps.
    fn ask_and_look(&mut self, between: impl FnOnce()) -> Result<bool, Violation> {
        let has_places = self.shape.has(feature::EVENT_IDX);
        self.tell(if has_places { AT_PLACE } else { ALWAYS });
        fence(Ordering::SeqCst);
        between();
        Ok(!self.has_request()?)
    }

    /// Asks the driver not to kick.
    pub fn refuse_kicks(&mut self) {
        self.tell(NEVER);
    }

    /// Both halves are one store: a position never appears with the flags of another store.
    fn tell(&mut self, wish: u16) {
        let place = if wish == AT_PLACE { self.next.print() } else { 0 };
        let wish = u32::from(place) | u32::from(wish) << 16;
        if self.told.replace(wish) != Some(wish) {
            let Place { client_memory, at } = &self.parts.device;
            client_memory.u32_at(*at).store(wish, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[path = "packed_tests.rs"]
mod tests;
