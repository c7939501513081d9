//! The quarantine: ranges whose dirty data was found damaged. They are not written back, and reads
//! of them fail. A write heals the ranges that it covers: reads find its data in the cache, and
//! once the data is durable on the backing device, the range is removed from the list. It is not
//! removed earlier, because a power failure may undo the write, and then the range is still bad.
//! The list is on the label, so that a restart cannot turn damage into silent reads of outdated
//! data.

use crate::error::Status;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, lock};

use super::Pcache;
use super::label::{BadRange, QUARANTINE_MAX};

/// The list, with a flag so that checks are free while it is empty.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    is_any: AtomicBool,
    ranges: Mutex<Vec<(u64, u64)>>,
}

impl Quarantine {
    /// The label's ranges, as far as they are within a backing device of `backing_bytes`.
    pub(super) fn new(bad: &[BadRange], backing_bytes: u64) -> Quarantine {
        let ranges: Vec<_> = bad
            .iter()
            .map(|bad| (bad.offset.get(), bad.offset.get().saturating_add(bad.len.get())))
            .map(|(start, end)| (start, end.min(backing_bytes)))
            .filter(|(start, end)| start < end)
            .collect();
        Quarantine { is_any: AtomicBool::new(!ranges.is_empty()), ranges: Mutex::new(ranges) }
    }

    pub(super) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    pub(super) fn overlaps(&self, at: u64, len: u64) -> bool {
        self.is_any() && lock(&self.ranges).iter().any(|&(start, end)| start < at + len && at < end)
    }

    pub(super) fn bytes(&self) -> u64 {
        // The label is not trusted.
        lock(&self.ranges).iter().fold(0, |sum: u64, (start, end)| sum.saturating_add(end - start))
    }
}

impl Pcache {
    /// Adds a range, durably. [`Status::NoSpace`]: the list is full.
    pub(super) fn quarantine(&self, at: u64, len: u64) -> Result<(), Status> {
        let mut ranges = lock(&self.bad.ranges);
        if ranges.contains(&(at, at + len)) {
            return Ok(());
        }
        if ranges.len() == QUARANTINE_MAX {
            return Err(Status::NoSpace);
        }
        ranges.push((at, at + len));
        self.bad.is_any.store(true, Ordering::SeqCst);
        self.store_bad(&ranges)
    }

    /// The backing device has newer data for the range, durably: it is good again.
    pub(super) fn forget_bad(&self, at: u64, len: u64) -> Result<(), Status> {
        let mut ranges = lock(&self.bad.ranges);
        let end = at + len;
        if !ranges.iter().any(|&(start, bad_end)| start < end && at < bad_end) {
            return Ok(());
        }
        let mut rest = Vec::with_capacity(ranges.len() + 1);
        for &(start, bad_end) in ranges.iter() {
            if start < at {
                rest.push((start, bad_end.min(at)));
            }
            if bad_end > end {
                rest.push((start.max(end), bad_end));
            }
        }
        if rest.len() > QUARANTINE_MAX {
            // Splitting a range found no slot: keep the whole range bad rather than forget a part.
            return Ok(());
        }
        *ranges = rest;
        self.bad.is_any.store(!ranges.is_empty(), Ordering::SeqCst);
        self.store_bad(&ranges)
    }

    fn store_bad(&self, ranges: &[(u64, u64)]) -> Result<(), Status> {
        let bad = ranges
            .iter()
            .map(|&(start, end)| BadRange { offset: start.into(), len: (end - start).into() });
        self.identity.store_bad(bad.collect())
    }
}
