//! The in-flight log of a ring, in memory that outlives the server: the client keeps the file, and
//! gives it to the next server. The layout is vhost-user's, so that another implementation can also
//! continue with it. This file is for split rings, [`super::inflight_packed`] for packed ones.
//!
//! | bytes of a ring's part | content |
//! |---|---|
//! | 0..8 | features: 0 |
//! | 8..10 | version: 0 before the first use, then 1 |
//! | 10..12 | number of descriptors |
//! | 12..14 | the last answered request, the head of a list |
//! | 14..16 | the used index when its requests were cleared |
//! | 16.. | 16 bytes for each descriptor |
//!
//! | bytes of a descriptor | content |
//! |---|---|
//! | 0 | 1 while the request that starts there is in flight |
//! | 6..8 | the previously answered request |
//! | 8..16 | the request's number, in the order of taking |
//!
//! 1. A request is recorded before it is taken, and cleared after the driver can see its answer. So
//!    every available request is in one of three states: not taken yet, recorded, or used.
//! 2. If a server dies between an answer and its clearing, the used index is ahead of the log. Then
//!    the newest requests of the list, as many as the index is ahead, were answered.
//! 3. The remaining recorded requests are carried out again, in the order in which they were taken.
//!    Repeating a write is safe, because its driver does not write to the same range again before
//!    the answer.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::error::{Error, Result};
use udm::pmem::client_memory::ClientMemory;
use udm::sync::Arc;
use udm::sync::statics::atomic::Ordering;

use super::chain::ENTRIES_MAX;
use super::config::QUEUES_MAX;
use super::inflight_packed::{Noted, PackedTracker};
use super::memory::check;
use super::packed::Packed;
use super::proto::{Violation, u16_at, u64_at, wrong};
use super::steps::{self, Mutant, VERSION, has};

/// Bytes of a part's header, and of each descriptor; twice as many for packed rings.
const UNIT_BYTES: u64 = 16;
const PART_ALIGN: u64 = 64;
/// Offsets in a ring's part.
const VERSION_AT: u64 = 8;
const ENTRIES_AT: u64 = 10;
const LAST_AT: u64 = 12;
const USED_AT: u64 = 14;
/// Offsets in a descriptor's entry. The flag's byte is written together with the next byte, which
/// is unused.
const FLAG_AT: u64 = 0;
const NEXT_AT: u64 = 6;
const COUNTER_AT: u64 = 8;

/// The extent of the file in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Used bytes of the file.
    pub bytes: u64,
    /// Offset of the first of them.
    pub offset: u64,
    /// Number of rings.
    pub rings: u16,
    /// Maximum entries of a ring.
    pub entries: u16,
    /// Whether the rings are packed.
    pub is_packed: bool,
}

impl Extent {
    /// Decodes it. Some clients pad it to a multiple of eight bytes.
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

    /// Returns the same with the bytes that are needed, at the start of a file.
    pub fn needed(self) -> Extent {
        Extent { bytes: self.part_bytes() * u64::from(self.rings), offset: 0, ..self }
    }

    /// Encodes it for a message.
    pub fn print(&self) -> Vec<u8> {
        let mut bytes = [self.bytes.to_le_bytes(), self.offset.to_le_bytes()].concat();
        bytes.extend(self.rings.to_le_bytes());
        bytes.extend(self.entries.to_le_bytes());
        bytes
    }

    /// Creates a file of this length, with an empty log.
    pub fn make(&self) -> Result<OwnedFd> {
        let failed = |errno: rustix::io::Errno| {
            Error::from_io("making memory for", "requests in flight", errno.into())
        };
        let file = memfd_create("udm-in-flight", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&file, self.bytes).map_err(failed)?;
        Ok(file)
    }
}

/// A client's mapped in-flight log.
#[derive(Clone, Debug)]
pub struct Notes {
    client_memory: Arc<ClientMemory>,
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
        let client_memory = ClientMemory::map(file, extent.offset, needed).map_err(|error| {
            Violation::new(format!("its file of requests in flight cannot be used: {error}"))
        })?;
        Ok(Notes { client_memory: Arc::new(client_memory), extent })
    }

    /// Opens the log of split ring `index`, with its number of `entries` and its `used` index. Also
    /// returns the heads of the requests to carry out again, in order.
    pub fn open(
        &self,
        index: usize,
        entries: u16,
        used: u16,
    ) -> std::result::Result<(Tracker, Vec<u16>), Violation> {
        let at = self.part(index, entries, false)?;
        let mut tracker = Tracker {
            client_memory: self.client_memory.clone(),
            at,
            entries,
            counter: 0,
            batch: Vec::with_capacity(usize::from(entries)),
        };
        let again = tracker.take_up(used)?;
        Ok((tracker, again))
    }

    /// Returns the offset of the part of ring `index`, if the log is for such rings.
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
                "{this} ring {index} with {entries} entries: the record of requests in flight has \
                 {rings} {noted} rings of {most} entries"
            ));
        }
        Ok(self.extent.part_bytes() * index as u64)
    }

    /// Opens the log of packed ring `index`. Also returns the requests to carry out again, in
    /// order, and moves `ring` to the logged position.
    pub fn open_packed(
        &self,
        index: usize,
        ring: &mut Packed,
    ) -> std::result::Result<(PackedTracker, Vec<Noted>), Violation> {
        let at = self.part(index, ring.entries(), true)?;
        PackedTracker::open(self.client_memory.clone(), at, ring)
    }
}

/// The log of one ring.
#[derive(Debug)]
pub struct Tracker {
    client_memory: Arc<ClientMemory>,
    /// Offset of its part.
    at: u64,
    entries: u16,
    /// Requests taken so far.
    counter: u64,
    /// Answered requests whose answers the driver cannot see yet.
    batch: Vec<u16>,
}

impl Tracker {
    fn entry(&self, head: u16) -> u64 {
        self.at + UNIT_BYTES * (1 + u64::from(head))
    }

    fn load(&self, at: u64) -> u16 {
        self.client_memory.u16_at(at).load(Ordering::Acquire)
    }

    fn store(&self, at: u64, value: u16) {
        steps::store_u16(&self.client_memory, at, value);
    }

    fn is_noted(&self, head: u16) -> bool {
        self.load(self.entry(head) + FLAG_AT) & 0xff != 0
    }

    /// Starts a new log, or continues the log of a dead server.
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
        let counter = |head: u16| {
            self.client_memory.u64_at(self.entry(head) + COUNTER_AT).load(Ordering::Acquire)
        };
        let noted = (0..self.entries).filter(|head| self.is_noted(*head));
        let mut again: Vec<(u64, u16)> = noted.map(|head| (counter(head), head)).collect();
        again.sort_unstable();
        self.counter = again.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        check(&self.client_memory)?;
        Ok(again.into_iter().map(|(_, head)| head).collect())
    }

    /// Clears the answered requests of the list: as many as the used index is ahead.
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

    /// Records a request before it is taken.
    #[inline]
    pub fn note(&mut self, head: u16) {
        let entry = self.entry(head);
        steps::store_u64(&self.client_memory, entry + COUNTER_AT, self.counter);
        self.counter = self.counter.wrapping_add(u64::from(!has(Mutant::OrderForgotten)));
        if !has(Mutant::NotNoted) {
            self.store(entry + FLAG_AT, 1);
        }
    }

    /// Clears a request that is not in flight any more.
    #[inline]
    pub fn cross_out(&self, head: u16) {
        self.store(self.entry(head) + FLAG_AT, 0);
    }

    /// Records an answer. The driver will see it with the next [`Tracker::published`].
    #[inline]
    pub fn answered(&mut self, head: u16) {
        self.store(self.entry(head) + NEXT_AT, self.load(self.at + LAST_AT));
        if !has(Mutant::ListForgotten) {
            self.store(self.at + LAST_AT, head);
        }
        self.batch.push(head);
    }

    /// Records that the driver can see all answers so far, up to the index `used`.
    #[inline]
    pub fn published(&mut self, used: u16) -> std::result::Result<(), Violation> {
        for nth in 0..self.batch.len() {
            self.cross_out(self.batch[nth]);
        }
        self.batch.clear();
        if !has(Mutant::UsedForgotten) {
            self.store(self.at + USED_AT, used);
        }
        check(&self.client_memory)
    }
}

#[cfg(test)]
#[path = "inflight_tests.rs"]
mod tests;
