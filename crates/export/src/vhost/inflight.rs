//! Which requests of a ring are in flight, in memory that outlives the server: the client keeps the
//! file, and gives it to the next server. The layout is vhost-user's, so that a server of another
//! kind could go on too: here for split rings, and in [`super::inflight_packed`] for packed ones.
//!
//! | bytes of a ring's part | what |
//! |---|---|
//! | 0..8 | features: 0 |
//! | 8..10 | version: 0 before the first use, then 1 |
//! | 10..12 | descriptors that follow |
//! | 12..14 | the last request that was answered; a list begins there |
//! | 14..16 | how far the used ring had come when its requests were crossed out |
//! | 16.. | 16 bytes for each descriptor |
//!
//! | bytes of a descriptor | what |
//! |---|---|
//! | 0 | 1 while the request that begins there is in flight |
//! | 6..8 | the request that was answered before it |
//! | 8..16 | counts requests: the order in which they were taken |
//!
//! 1. A request is noted before it is taken, and crossed out after the driver can see its answer.
//!    So every request that was made available is in one of three places: not taken yet, noted, or
//!    used.
//! 2. A server that dies between an answer and its crossing out leaves a used ring that is ahead of
//!    the note: the last requests of the list were answered, as many as it is ahead.
//! 3. What is noted then is done again, in the order in which it was taken. The same write twice is
//!    the same as once, because its driver writes nothing else there before the answer.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::error::{Error, Result};
use udm::foreign::Foreign;
use udm::sync::Arc;
use udm::sync::statics::atomic::Ordering;

use super::chain::ENTRIES_MAX;
use super::config::QUEUES_MAX;
use super::inflight_packed::{Noted, PackedTracker};
use super::memory::check;
use super::packed::Packed;
use super::proto::{Violation, u16_at, u64_at, wrong};
use super::steps::{self, Mutant, has};

/// Bytes of a part's head, and of each descriptor; twice as many for packed rings.
const UNIT_BYTES: u64 = 16;
const PART_ALIGN: u64 = 64;
pub(super) const VERSION: u16 = 1;
/// Places in a ring's part.
const VERSION_AT: u64 = 8;
const ENTRIES_AT: u64 = 10;
const LAST_AT: u64 = 12;
const USED_AT: u64 = 14;
/// Places in a descriptor's entry. The flag's byte is written together with the next one, which
/// belongs to nobody.
const FLAG_AT: u64 = 0;
const NEXT_AT: u64 = 6;
const COUNTER_AT: u64 = 8;

/// What messages say of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes of the file that count.
    pub bytes: u64,
    /// Where they begin.
    pub offset: u64,
    /// Rings.
    pub rings: u16,
    /// Most entries of a ring.
    pub entries: u16,
    /// The rings are packed.
    pub is_packed: bool,
}

impl Extent {
    /// Reads it. Some clients add bytes up to a multiple of eight.
    pub fn parse(payload: &[u8], is_packed: bool) -> std::result::Result<Extent, Violation> {
        if ![20, 24].contains(&payload.len()) {
            return wrong(format!("requests in flight by {} bytes", payload.len()));
        }
        let (bytes, offset) = (u64_at(payload, 0), u64_at(payload, 8));
        let (rings, entries) = (u16_at(payload, 16), u16_at(payload, 18));
        if !(1..=QUEUES_MAX as u16).contains(&rings) || !(1..=ENTRIES_MAX).contains(&entries) {
            return wrong(format!("requests in flight of {rings} rings of {entries} entries"));
        }
        Ok(Extent { bytes, offset, rings, entries, is_packed })
    }

    fn part_bytes(&self) -> u64 {
        let unit = if self.is_packed { 2 * UNIT_BYTES } else { UNIT_BYTES };
        (unit * (1 + u64::from(self.entries))).next_multiple_of(PART_ALIGN)
    }

    /// The same with as many bytes as are needed, at the beginning of a file.
    pub fn needed(self) -> Extent {
        Extent { bytes: self.part_bytes() * u64::from(self.rings), offset: 0, ..self }
    }

    /// Its bytes in a message.
    pub fn print(&self) -> Vec<u8> {
        let mut bytes = [self.bytes.to_le_bytes(), self.offset.to_le_bytes()].concat();
        bytes.extend(self.rings.to_le_bytes());
        bytes.extend(self.entries.to_le_bytes());
        bytes
    }

    /// A new file of this length, without a note.
    pub fn make(&self) -> Result<OwnedFd> {
        let failed = |errno: rustix::io::Errno| {
            Error::from_io("making memory for", "requests in flight", errno.into())
        };
        let file = memfd_create("udm-in-flight", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&file, self.bytes).map_err(failed)?;
        Ok(file)
    }
}

/// A client's file of requests in flight, mapped.
#[derive(Clone, Debug)]
pub struct Notes {
    foreign: Arc<Foreign>,
    extent: Extent,
}

impl Notes {
    /// Maps `file`.
    pub fn map(file: &OwnedFd, extent: Extent) -> std::result::Result<Notes, Violation> {
        let needed = extent.needed().bytes;
        if extent.bytes < needed || !extent.offset.is_multiple_of(PART_ALIGN) {
            let Extent { bytes, offset, .. } = extent;
            return wrong(format!(
                "{bytes} bytes at {offset} for requests in flight, and {needed} are needed"
            ));
        }
        let foreign = Foreign::map(file, extent.offset, needed).map_err(|error| {
            Violation::new(format!("its file of requests in flight cannot be used: {error}"))
        })?;
        Ok(Notes { foreign: Arc::new(foreign), extent })
    }

    /// The notes of split ring `index`, which has `entries` and whose used ring has come to `used`;
    /// and the heads of the requests that are to be done again, in order.
    pub fn open(
        &self,
        index: usize,
        entries: u16,
        used: u16,
    ) -> std::result::Result<(Tracker, Vec<u16>), Violation> {
        let at = self.part(index, entries, false)?;
        let mut tracker = Tracker {
            foreign: self.foreign.clone(),
            at,
            entries,
            counter: 0,
            batch: Vec::with_capacity(usize::from(entries)),
        };
        let again = tracker.take_up(used)?;
        Ok((tracker, again))
    }

    /// Where the part of ring `index` begins, if it is one for such rings.
    fn part(
        &self,
        index: usize,
        entries: u16,
        is_packed: bool,
    ) -> std::result::Result<u64, Violation> {
        let Extent { rings, entries: most, .. } = self.extent;
        if index >= usize::from(rings) || entries > most || is_packed != self.extent.is_packed {
            let kind = |is_packed| if is_packed { "packed" } else { "split" };
            let (this, noted) = (kind(is_packed), kind(self.extent.is_packed));
            return wrong(format!(
                "{this} ring {index} with {entries} entries: requests in flight are noted of \
                 {rings} {noted} rings of {most} entries"
            ));
        }
        Ok(self.extent.part_bytes() * index as u64)
    }

    /// The notes of packed ring `index`; and the requests that are to be done again, in order.
    /// `ring` goes on where they say.
    pub fn open_packed(
        &self,
        index: usize,
        ring: &mut Packed,
    ) -> std::result::Result<(PackedTracker, Vec<Noted>), Violation> {
        let at = self.part(index, ring.entries(), true)?;
        PackedTracker::open(self.foreign.clone(), at, ring)
    }
}

/// The notes of one ring.
#[derive(Debug)]
pub struct Tracker {
    foreign: Arc<Foreign>,
    /// Where its part begins.
    at: u64,
    entries: u16,
    /// Requests taken so far.
    counter: u64,
    /// Requests whose answers the driver cannot see yet.
    batch: Vec<u16>,
}

impl Tracker {
    fn entry(&self, head: u16) -> u64 {
        self.at + UNIT_BYTES * (1 + u64::from(head))
    }

    fn load(&self, at: u64) -> u16 {
        self.foreign.u16_at(at).load(Ordering::Acquire)
    }

    fn store(&self, at: u64, value: u16) {
        steps::store_u16(&self.foreign, at, value);
    }

    fn is_noted(&self, head: u16) -> bool {
        self.load(self.entry(head) + FLAG_AT) & 0xff != 0
    }

    /// Begins, or goes on where a server has died.
    fn take_up(&mut self, used: u16) -> std::result::Result<Vec<u16>, Violation> {
        match self.load(self.at + VERSION_AT) {
            0 => {
                (0..self.entries).for_each(|head| self.cross_out(head));
                self.store(self.at + USED_AT, used);
                self.store(self.at + ENTRIES_AT, self.entries);
                self.store(self.at + VERSION_AT, VERSION);
            }
            VERSION => self.cross_out_answered(used)?,
            other => return wrong(format!("requests in flight of version {other}")),
        }
        let counter =
            |head: u16| self.foreign.u64_at(self.entry(head) + COUNTER_AT).load(Ordering::Acquire);
        let noted = (0..self.entries).filter(|head| self.is_noted(*head));
        let mut again: Vec<(u64, u16)> = noted.map(|head| (counter(head), head)).collect();
        again.sort_unstable();
        self.counter = again.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        check(&self.foreign)?;
        Ok(again.into_iter().map(|(_, head)| head).collect())
    }

    /// The last requests of the list were answered, as many as the used ring is ahead.
    fn cross_out_answered(&self, used: u16) -> std::result::Result<(), Violation> {
        let ahead = used.wrapping_sub(self.load(self.at + USED_AT));
        if ahead > self.entries {
            let entries = self.entries;
            return wrong(format!("{ahead} requests answered at a time in a ring of {entries}"));
        }
        let mut head = self.load(self.at + LAST_AT);
        for _ in 0..ahead {
            if head >= self.entries {
                let entries = self.entries;
                return wrong(format!("request {head} answered in a ring of {entries}"));
            }
            self.cross_out(head);
            head = self.load(self.entry(head) + NEXT_AT);
        }
        self.store(self.at + USED_AT, used);
        Ok(())
    }

    /// The request is taken.
    #[inline]
    pub fn note(&mut self, head: u16) {
        let entry = self.entry(head);
        steps::store_u64(&self.foreign, entry + COUNTER_AT, self.counter);
        self.counter = self.counter.wrapping_add(u64::from(!has(Mutant::OrderForgotten)));
        if !has(Mutant::NotNoted) {
            self.store(entry + FLAG_AT, 1);
        }
    }

    /// The request is not in flight.
    #[inline]
    pub fn cross_out(&self, head: u16) {
        self.store(self.entry(head) + FLAG_AT, 0);
    }

    /// The request has its answer, and the driver will see it with the next
    /// [`Tracker::published`].
    #[inline]
    pub fn answered(&mut self, head: u16) {
        self.store(self.entry(head) + NEXT_AT, self.load(self.at + LAST_AT));
        if !has(Mutant::ListForgotten) {
            self.store(self.at + LAST_AT, head);
        }
        self.batch.push(head);
    }

    /// The driver can see all answers so far; the used ring has come to `used`.
    #[inline]
    pub fn published(&mut self, used: u16) -> std::result::Result<(), Violation> {
        for nth in 0..self.batch.len() {
            self.cross_out(self.batch[nth]);
        }
        self.batch.clear();
        if !has(Mutant::UsedForgotten) {
            self.store(self.at + USED_AT, used);
        }
        check(&self.foreign)
    }
}

#[cfg(test)]
#[path = "inflight_tests.rs"]
mod tests;
