//! A split ring: descriptors, the driver's available ring, and the device's used ring.
//!
//! All of it is in the guest's memory and may change at any time. An error in a ring ends its use,
//! because the driver's intended requests cannot be known.

use udm::sync::statics::atomic::{Ordering, fence};

use super::chain::{
    Chain, DESCRIPTOR_BYTES, ENTRIES_MAX, HAS_NEXT, IS_INDIRECT, Piece, Shape, load_table,
};
use super::memory::{Memory, Place, check};
use super::proto::{RingAddresses, Violation, feature, u16_at, u32_at, u64_at, wrong};
use super::steps;

const USED_BYTES: u64 = 8;
/// Flag of the used ring: do not kick. Of the available ring: do not call.
const IS_QUIET: u16 = 1;

/// A copied descriptor.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    piece: Piece,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn parse(bytes: &[u8]) -> Descriptor {
        let piece = Piece { guest: u64_at(bytes, 0), len: u32_at(bytes, 8) };
        Descriptor { piece, flags: u16_at(bytes, 12), next: u16_at(bytes, 14) }
    }
}

/// The three parts, in memory.
#[derive(Clone, Debug)]
struct Parts {
    descriptors: Place,
    available: Place,
    used: Place,
}

impl Parts {
    fn find(shape: &Shape, memory: &Memory) -> Result<Parts, Violation> {
        let entries = u64::from(shape.entries);
        // With event indices, both lists have one more word at the end.
        let event = if shape.has(feature::EVENT_IDX) { 2 } else { 0 };
        let RingAddresses { descriptors, used, available } = shape.addresses;
        Ok(Parts {
            descriptors: memory.place(descriptors, entries * DESCRIPTOR_BYTES as u64, 16)?,
            available: memory.place(available, 4 + entries * 2 + event, 2)?,
            used: memory.place(used, 4 + entries * USED_BYTES + event, 4)?,
        })
    }
}

/// A split ring, from the device's side.
#[derive(Debug)]
pub struct Split {
    shape: Shape,
    parts: Parts,
    /// The next entry to take; wraps around.
    next: u16,
    /// The driver has made the entries before this one available. The driver's index is read again
    /// only when all of them were taken, because each request writes to its cache line.
    known: u16,
    /// The next entry to fill; wraps around.
    used: u16,
    /// The value of `used` at the last check whether the driver wants a call.
    called_at: u16,
    /// A copied table of descriptors.
    table: Vec<u8>,
}

impl Split {
    /// Opens the ring with `shape`, whose next request has the number `next`.
    pub fn new(shape: Shape, memory: &Memory, next: u16) -> Result<Split, Violation> {
        if !shape.entries.is_power_of_two() || shape.entries > ENTRIES_MAX {
            let entries = shape.entries;
            return wrong(format!(
                "a ring of {entries} entries: a power of two up to {ENTRIES_MAX} is taken"
            ));
        }
        let parts = Parts::find(&shape, memory)?;
        let used = parts.used.client_memory.u16_at(parts.used.at + 2).load(Ordering::Acquire);
        parts.used.check()?;
        let table = Vec::new();
        Ok(Split { shape, parts, next, known: next, used, called_at: used, table })
    }

    /// Switches to new memory.
    pub fn moved(&mut self, memory: &Memory) -> Result<(), Violation> {
        self.parts = Parts::find(&self.shape, memory)?;
        Ok(())
    }

    /// Number of entries.
    pub fn entries(&self) -> u16 {
        self.shape.entries
    }

    /// The used index.
    pub fn used(&self) -> u16 {
        self.used
    }

    /// Moves the ring: the next request follows the used ones and `in_flight` more.
    pub fn go_on_after(&mut self, in_flight: usize) {
        self.next = self.used.wrapping_add(in_flight as u16);
        self.known = self.next;
    }

    /// The number of the next request.
    pub fn next(&self) -> u16 {
        self.next
    }

    /// Whether the driver has made a request available.
    #[inline]
    pub fn has_request(&self) -> Result<bool, Violation> {
        Ok(self.known != self.next || self.available()? > 0)
    }

    /// Number of available requests.
    fn available(&self) -> Result<u16, Violation> {
        let Place { client_memory, at } = &self.parts.available;
        let count = client_memory.u16_at(at + 2).load(Ordering::Acquire).wrapping_sub(self.next);
        check(client_memory)?;
        if count > self.shape.entries {
            let entries = self.shape.entries;
            return wrong(format!("{count} requests available in a ring of {entries}"));
        }
        Ok(count)
    }

    /// Reads the next request into `chain`, and returns its head; `None` if there is none. It is
    /// still the next one until [`Split::accept`].
    pub fn peek(&mut self, memory: &Memory, chain: &mut Chain) -> Result<Option<u16>, Violation> {
        if self.known == self.next {
            self.known = self.next.wrapping_add(self.available()?);
        }
        if self.known == self.next {
            return Ok(None);
        }
        let Place { client_memory, at } = &self.parts.available;
        let entry = u64::from(self.next % self.shape.entries);
        let head = client_memory.u16_at(at + 4 + entry * 2).load(Ordering::Relaxed);
        self.parts.available.check()?;
        self.walk(head, memory, chain)?;
        Ok(Some(head))
    }

    /// Takes the last read request.
    #[inline]
    pub fn accept(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Whether request `number` is the last one that was accepted.
    pub fn is_newest(&self, number: u16) -> bool {
        number == self.next.wrapping_sub(1)
    }

    /// Gives the last accepted request back, as if it had not been taken.
    pub fn give_back(&mut self) {
        self.next = self.next.wrapping_sub(1);
    }

    /// Reads the request that starts with descriptor `head` into `chain`.
    pub fn walk(&mut self, head: u16, memory: &Memory, chain: &mut Chain) -> Result<(), Violation> {
        chain.clear();
        let entries = usize::from(self.shape.entries);
        if usize::from(head) >= entries {
            return wrong(format!("descriptor {head} in a ring of {entries}"));
        }
        let mut index = usize::from(head);
        // A chain that is longer than the number of descriptors has a loop.
        for _ in 0..entries {
            let descriptor = self.descriptor(index)?;
            if descriptor.flags & IS_INDIRECT != 0 {
                return self.walk_table(descriptor, memory, chain);
            }
            chain.add(descriptor.piece, descriptor.flags, memory)?;
            if descriptor.flags & HAS_NEXT == 0 {
                return Ok(());
            }
            index = usize::from(descriptor.next);
            if index >= entries {
                return wrong(format!("descriptor {index} in a ring of {entries}"));
            }
        }
        wrong("a cycle of descriptors")
    }

    fn descriptor(&self, index: usize) -> Result<Descriptor, Violation> {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        let place = &self.parts.descriptors;
        place.client_memory.load(place.at + (index * DESCRIPTOR_BYTES) as u64, &mut bytes);
        place.check()?;
        Ok(Descriptor::parse(&bytes))
    }

    /// Reads the table at `at`.
    fn walk_table(
        &mut self,
        at: Descriptor,
        memory: &Memory,
        chain: &mut Chain,
    ) -> Result<(), Violation> {
        let entries = load_table(at.piece, at.flags, &self.shape, memory, &mut self.table)?;
        let mut index = 0;
        for _ in 0..entries {
            let descriptor = Descriptor::parse(&self.table[index * DESCRIPTOR_BYTES..]);
            if descriptor.flags & IS_INDIRECT != 0 {
                return wrong("a table of descriptors within another");
            }
            chain.add(descriptor.piece, descriptor.flags, memory)?;
            if descriptor.flags & HAS_NEXT == 0 {
                return Ok(());
            }
            index = usize::from(descriptor.next);
            if index >= entries {
                return wrong(format!("descriptor {index} in a table of {entries}"));
            }
        }
        wrong("a cycle of descriptors")
    }

    /// Records the answer to the request with `head`, and the number of bytes written for it. The
    /// driver sees it after [`Split::publish`].
    #[inline]
    pub fn push(&mut self, head: u16, written: u32) {
        let Place { client_memory, at } = &self.parts.used;
        let at = at + 4 + u64::from(self.used % self.shape.entries) * USED_BYTES;
        steps::store_u32(client_memory, at, head.into());
        steps::store_u32(client_memory, at + 4, written);
        self.used = self.used.wrapping_add(1);
    }

    /// Publishes the recorded answers.
    #[inline]
    pub fn publish(&mut self) -> Result<(), Violation> {
        let Place { client_memory, at } = &self.parts.used;
        steps::store_u16(client_memory, at + 2, self.used);
        self.parts.used.check()
    }

    /// Whether the driver wants a call for the answers published since the last check.
    pub fn needs_call(&mut self) -> bool {
        let before = std::mem::replace(&mut self.called_at, self.used);
        if before == self.used {
            return false;
        }
        // The driver's event index is read after `used` was stored: otherwise both sides could wait
        // for each other.
        fence(Ordering::SeqCst);
        let Place { client_memory, at } = &self.parts.available;
        if !self.shape.has(feature::EVENT_IDX) {
            return client_memory.u16_at(*at).load(Ordering::Relaxed) & IS_QUIET == 0;
        }
        let at = at + 4 + u64::from(self.shape.entries) * 2;
        let event = client_memory.u16_at(at).load(Ordering::Relaxed);
        passes(event, before, self.used)
    }

    /// Asks the driver to kick at the next request. Returns whether the device may sleep until
    /// then: no request is available already.
    pub fn may_sleep(&mut self) -> Result<bool, Violation> {
        self.ask_and_look(|| ())
    }

    /// The driver publishes, then reads the device's event index. So the device stores its index
    /// first, and then checks for requests: at least one side sees the other's store. `between` is
    /// the action of a test's driver between the two steps.
    fn ask_and_look(&mut self, between: impl FnOnce()) -> Result<bool, Violation> {
        self.tell(self.next, 0);
        fence(Ordering::SeqCst);
        between();
        Ok(!self.has_request()?)
    }

    /// Asks the driver not to kick.
    pub fn refuse_kicks(&mut self) {
        // With event indices, the driver kicks when it passes the event index, which is in the
        // past.
        if !self.shape.has(feature::EVENT_IDX) {
            self.tell(0, IS_QUIET);
        }
    }

    fn tell(&self, event: u16, flags: u16) {
        let Place { client_memory, at } = &self.parts.used;
        if !self.shape.has(feature::EVENT_IDX) {
            client_memory.u16_at(*at).store(flags, Ordering::Relaxed);
        } else {
            let at = at + 4 + u64::from(self.shape.entries) * USED_BYTES;
            client_memory.u16_at(at).store(event, Ordering::Relaxed);
        }
    }
}

/// Whether a counter that moves from `before` to `now` passes `event`.
fn passes(event: u16, before: u16, now: u16) -> bool {
    now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before)
}

#[cfg(test)]
#[path = "split_tests.rs"]
mod tests;
