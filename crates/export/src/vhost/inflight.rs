//! Which requests of a ring are in flight, in memory that outlives the server: the client keeps the
//! file, and gives it to the next server. The layout is vhost-user's, for split rings, so that a
//! server of another kind could go on too.
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

use super::config::QUEUES_MAX;
use super::memory::check;
use super::proto::{Violation, u16_at, u64_at, wrong};
use super::split::ENTRIES_MAX;

const HEAD_BYTES: u64 = 16;
const ENTRY_BYTES: u64 = 16;
const PART_ALIGN: u64 = 64;
const VERSION: u16 = 1;
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
}

impl Extent {
    /// Reads it. Some clients add bytes up to a multiple of eight.
    pub fn parse(payload: &[u8]) -> std::result::Result<Extent, Violation> {
        if ![20, 24].contains(&payload.len()) {
            return wrong(format!("requests in flight by {} bytes", payload.len()));
        }
        let (bytes, offset) = (u64_at(payload, 0), u64_at(payload, 8));
        let extent =
            Extent { bytes, offset, rings: u16_at(payload, 16), entries: u16_at(payload, 18) };
        let Extent { rings, entries, .. } = extent;
        if !(1..=QUEUES_MAX as u16).contains(&rings) || !(1..=ENTRIES_MAX).contains(&entries) {
            return wrong(format!("requests in flight of {rings} rings of {entries} entries"));
        }
        Ok(extent)
    }

    fn part_bytes(&self) -> u64 {
        (HEAD_BYTES + ENTRY_BYTES * u64::from(self.entries)).next_multiple_of(PART_ALIGN)
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

    /// The notes of ring `index`, which has `entries` and whose used ring has come to `used`; and
    /// the heads of the requests that are to be done again, in order.
    pub fn open(
        &self,
        index: usize,
        entries: u16,
        used: u16,
    ) -> std::result::Result<(Tracker, Vec<u16>), Violation> {
        if index >= usize::from(self.extent.rings) || entries > self.extent.entries {
            let Extent { rings, entries: most, .. } = self.extent;
            return wrong(format!(
                "ring {index} with {entries} entries: requests in flight are noted of {rings} \
                 rings of {most} entries"
            ));
        }
        let at = self.extent.part_bytes() * index as u64;
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
        self.at + HEAD_BYTES + ENTRY_BYTES * u64::from(head)
    }

    fn load(&self, at: u64) -> u16 {
        self.foreign.u16_at(at).load(Ordering::Acquire)
    }

    /// In the order of the program: what a dead server has left is a beginning of what it did.
    fn store(&self, at: u64, value: u16) {
        self.foreign.u16_at(at).store(value, Ordering::Release);
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
        self.foreign.u64_at(entry + COUNTER_AT).store(self.counter, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
        self.store(entry + FLAG_AT, 1);
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
        self.store(self.at + LAST_AT, head);
        self.batch.push(head);
    }

    /// The driver can see all answers so far; the used ring has come to `used`.
    #[inline]
    pub fn published(&mut self, used: u16) -> std::result::Result<(), Violation> {
        for nth in 0..self.batch.len() {
            self.cross_out(self.batch[nth]);
        }
        self.batch.clear();
        self.store(self.at + USED_AT, used);
        check(&self.foreign)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ENTRIES: u16 = 16;

    fn notes() -> Notes {
        let extent = Extent { bytes: 0, offset: 0, rings: 2, entries: 32 }.needed();
        Notes::map(&extent.make().unwrap(), extent).unwrap()
    }

    /// What a new server finds.
    fn again(notes: &Notes, used: u16) -> Vec<u16> {
        notes.open(1, ENTRIES, used).unwrap().1
    }

    #[test]
    fn the_layout_is_that_of_the_specification() {
        let notes = notes();
        assert_eq!(notes.extent.bytes, 2 * 576);
        let (mut tracker, _) = notes.open(1, ENTRIES, 9).unwrap();
        [3, 5].iter().for_each(|head| tracker.note(*head));
        tracker.answered(3);
        tracker.answered(5);
        let mut bytes = [0; 112];
        notes.foreign.load(576, &mut bytes);
        assert_eq!(bytes[..16], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 16, 0, 5, 0, 9, 0]);
        assert_eq!(bytes[64..80], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[96..112], [1, 0, 0, 0, 0, 0, 3, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        tracker.published(11).unwrap();
        notes.foreign.load(576, &mut bytes);
        assert_eq!((bytes[14], bytes[64], bytes[96]), (11, 0, 0));
    }

    #[test]
    fn requests_are_done_again_in_the_order_they_were_taken() {
        let notes = notes();
        let (mut tracker, first) = notes.open(1, ENTRIES, 100).unwrap();
        assert_eq!(first, []);
        [7, 0, 12, 3].iter().for_each(|head| tracker.note(*head));
        tracker.answered(12);
        tracker.published(101).unwrap();
        assert_eq!(again(&notes, 101), [7, 0, 3]);
        // The next server's requests come after those.
        let (mut tracker, _) = notes.open(1, ENTRIES, 101).unwrap();
        tracker.note(1);
        assert_eq!(again(&notes, 101), [7, 0, 3, 1]);
        assert_eq!(notes.open(0, ENTRIES, 0).unwrap().1, [], "the other ring has nothing");
    }

    /// SPDK's issue 3766: the first request of all is lost if none had completed, because the end
    /// of the empty list is a request's number too.
    #[test]
    fn request_0_is_not_lost_if_none_had_completed() {
        let notes = notes();
        let (mut tracker, _) = notes.open(1, ENTRIES, 0).unwrap();
        tracker.note(0);
        assert_eq!(again(&notes, 0), [0]);
        // Also if its answer was prepared, but not shown.
        tracker.answered(0);
        assert_eq!(again(&notes, 0), [0]);
    }

    #[test]
    fn a_file_that_is_new_to_a_ring_that_is_not_has_nothing_in_flight() {
        let notes = notes();
        assert_eq!(again(&notes, 40_000), []);
        assert_eq!(again(&notes, 40_000), []);
    }

    /// Each moment between the answer that the driver sees and the last crossing out.
    #[test]
    fn a_death_after_the_answer_does_nothing_again() {
        for crossed_out in 0..=3 {
            for used in [0, u16::MAX - 1] {
                let notes = notes();
                let (mut tracker, _) = notes.open(1, ENTRIES, used).unwrap();
                [0, 4, 9, 2, 6].iter().for_each(|head| tracker.note(*head));
                tracker.answered(4);
                tracker.published(used.wrapping_add(1)).unwrap();
                [9, 0, 6].iter().for_each(|head| tracker.answered(*head));
                [9, 0, 6].iter().take(crossed_out).for_each(|head| tracker.cross_out(*head));
                // The used ring shows all four.
                assert_eq!(again(&notes, used.wrapping_add(4)), [2]);
                assert_eq!(again(&notes, used.wrapping_add(4)), [2], "and once more");
            }
        }
    }

    /// Before that, everything that was not shown is done again.
    #[test]
    fn a_death_before_the_answer_loses_nothing() {
        for answered in 0..=3 {
            let notes = notes();
            let (mut tracker, _) = notes.open(1, ENTRIES, 5).unwrap();
            [0, 4, 9].iter().for_each(|head| tracker.note(*head));
            [9, 0, 4].iter().take(answered).for_each(|head| tracker.answered(*head));
            assert_eq!(again(&notes, 5), [0, 4, 9]);
        }
    }

    #[test]
    fn notes_that_cannot_be_are_refused() {
        let part = |change: fn(&Foreign)| {
            let notes = notes();
            let (mut tracker, _) = notes.open(1, ENTRIES, 5).unwrap();
            tracker.note(0);
            change(&notes.foreign);
            notes.open(1, ENTRIES, 6).unwrap_err().to_string()
        };
        let said = part(|foreign| foreign.u16_at(576 + 8).store(2, Ordering::Relaxed));
        assert_eq!(said, "requests in flight of version 2");
        let said = part(|foreign| foreign.u16_at(576 + 14).store(900, Ordering::Relaxed));
        assert!(said.contains("requests answered at a time in a ring of 16"), "{said}");
        let said = part(|foreign| foreign.u16_at(576 + 12).store(16, Ordering::Relaxed));
        assert_eq!(said, "request 16 answered in a ring of 16");
        let notes = notes();
        assert!(notes.open(2, ENTRIES, 0).is_err() && notes.open(0, 64, 0).is_err());
        let extent = notes.extent;
        let file = extent.make().unwrap();
        for wrong in [
            Extent { bytes: extent.bytes - 1, ..extent },
            Extent { offset: 1, ..extent },
            Extent { offset: 1 << 40, ..extent },
            Extent { offset: u64::MAX - 63, ..extent },
        ] {
            assert!(Notes::map(&file, wrong).is_err(), "{wrong:?}");
        }
        for payload in [vec![], vec![0; 20], vec![0xff; 24], vec![1; 22]] {
            assert!(Extent::parse(&payload).is_err());
        }
        let padded = [extent.print(), vec![0; 4]].concat();
        assert_eq!(
            (Extent::parse(&padded), Extent::parse(&extent.print())),
            (Ok(extent), Ok(extent))
        );
    }
}
