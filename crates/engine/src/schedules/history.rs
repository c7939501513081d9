//! Operations of clients on single sectors, with their times, and the check that one order explains
//! them.
//!
//! Every write has a tag of its own, so that a register's history can be checked exactly (Gibbons
//! and Korach 1997): the operations on a value span a *zone* from the first end to the last start.
//! If a zone is a stretch of time, the sector held the value throughout, so the zone of another
//! value may neither overlap this stretch nor be within it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// The content of the backing device before any write.
pub const INITIAL: u64 = 1;
/// The tag of zeroes.
pub const ZERO: u64 = 0;

/// An operation on one sector that has not ended.
const UNENDED: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct Action {
    sector: u64,
    tag: u64,
    is_write: bool,
    /// A write that is durable when it ends.
    is_fua: bool,
    start: u64,
    end: u64,
}

/// All operations so far.
#[derive(Clone, Debug, Default)]
pub struct Record {
    clock: u64,
    last_tag: u64,
    actions: Vec<Action>,
    /// Start and end of flushes that ended.
    flushes: Vec<(u64, u64)>,
}

/// The record that threads share. Its lock is never held at a point where another thread may run.
#[derive(Debug, Default)]
pub struct History(Mutex<Record>);

impl History {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.0.lock().unwrap()
    }

    /// The present time; each call advances it.
    pub fn now(&self) -> u64 {
        self.record().now()
    }

    /// A tag that no write had.
    pub fn new_tag(&self) -> u64 {
        let mut record = self.record();
        record.last_tag = record.last_tag.max(INITIAL) + 1;
        record.last_tag
    }

    /// A write of `tag` begins; returns what [`History::wrote`] needs.
    pub fn writes(&self, sector: u64, count: u64, tag: u64, is_fua: bool) -> (usize, usize) {
        let mut record = self.record();
        let (first, start) = (record.actions.len(), record.now());
        record.actions.extend((sector..sector + count).map(|sector| Action {
            sector,
            tag,
            is_write: true,
            is_fua,
            start,
            end: UNENDED,
        }));
        (first, record.actions.len())
    }

    /// A write succeeded. A failed write may have taken effect, and never ends.
    pub fn wrote(&self, actions: (usize, usize)) {
        let mut record = self.record();
        let end = record.now();
        record.actions[actions.0..actions.1].iter_mut().for_each(|action| action.end = end);
    }

    /// A read that began at `start` has ended and found `tags`.
    pub fn found(&self, sector: u64, tags: &[u64], start: u64) {
        let mut record = self.record();
        let end = record.now();
        record.actions.extend((sector..).zip(tags).map(|(sector, &tag)| Action {
            sector,
            tag,
            is_write: false,
            is_fua: false,
            start,
            end,
        }));
    }

    /// A flush that began at `start` has ended.
    pub fn flushed(&self, start: u64) {
        let mut record = self.record();
        let end = record.now();
        record.flushes.push((start, end));
    }

    /// A copy of the present record.
    pub fn record_now(&self) -> Record {
        self.record().clone()
    }

    /// Panics unless one order of the operations on each sector explains what was read.
    pub fn judge(&self) {
        let mut sectors: BTreeMap<u64, BTreeMap<u64, Vec<Action>>> = BTreeMap::new();
        for action in &self.record().actions {
            sectors.entry(action.sector).or_default().entry(action.tag).or_default().push(*action);
        }
        for (sector, values) in sectors {
            judge_sector(sector, &values);
        }
    }
}

impl Record {
    fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Panics if `tag` must not be in the sector after a power cut at the end of this record; or
    /// after the death of the server, which must not lose acknowledged data.
    pub fn judge_after(&self, sector: u64, tag: u64, is_cut: bool) {
        let writes =
            || self.actions.iter().filter(|action| action.is_write && action.sector == sector);
        let end = match writes().find(|action| action.tag == tag) {
            Some(write) => write.end,
            None => {
                assert!(tag == INITIAL, "afterwards sector {sector} has foreign data {tag}");
                0
            }
        };
        let is_durable = |write: &&Action| {
            let covers = |flush: &(u64, u64)| write.end < flush.0;
            let is_kept = !is_cut || write.is_fua || self.flushes.iter().any(covers);
            write.end != UNENDED && is_kept
        };
        let newer = writes().filter(is_durable).find(|write| end < write.start);
        if let Some(newer) = newer {
            panic!("afterwards sector {sector} shows {tag}, but {} was to stay", newer.tag);
        }
    }
}

fn judge_sector(sector: u64, values: &BTreeMap<u64, Vec<Action>>) {
    let mut zones = Vec::new();
    for (&tag, actions) in values {
        let write = actions.iter().find(|action| action.is_write);
        assert!(write.is_some() || tag == INITIAL, "sector {sector} shows foreign data {tag}");
        let written = write.map_or((0, 0), |write| (write.start, write.end));
        let early = actions.iter().find(|action| action.end < written.0);
        assert!(early.is_none(), "sector {sector} shows {tag} before it was written");
        let first_end = actions.iter().map(|action| action.end).min().unwrap_or(0).min(written.1);
        let last_start =
            actions.iter().map(|action| action.start).max().unwrap_or(0).max(written.0);
        zones.push((tag, first_end, last_start));
    }
    for &(tag, end, start) in zones.iter().filter(|(_, end, start)| end < start) {
        for &(other, other_end, other_start) in &zones {
            // Two stretches that overlap, or a point within a stretch: it is the same comparison.
            let is_bad = other_end < start && end < other_start;
            assert!(
                other == tag || !is_bad,
                "sector {sector}: no order explains that {tag} was there from {end} to {start} \
                 and {other} from {other_end} to {other_start}"
            );
        }
    }
}
