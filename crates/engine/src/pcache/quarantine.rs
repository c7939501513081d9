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

/// The ranges with one more, which is joined with those that it touches or overlaps; `None`: it is
/// covered already.
fn with(ranges: &[(u64, u64)], (at, end): (u64, u64)) -> Option<Vec<(u64, u64)>> {
    if ranges.iter().any(|&(start, bad_end)| start <= at && end <= bad_end) {
        return None;
    }
    let (mut joined, mut apart) = ((at, end), Vec::with_capacity(ranges.len() + 1));
    for &(start, bad_end) in ranges {
        if start <= end && at <= bad_end {
            joined = (joined.0.min(start), joined.1.max(bad_end));
        } else {
            apart.push((start, bad_end));
        }
    }
    apart.push(joined);
    Some(apart)
}

impl Pcache {
    /// Adds a range, durably. [`Status::NoSpace`]: the list is full of ranges that have good data
    /// between them.
    pub(super) fn quarantine(&self, at: u64, len: u64) -> Result<(), Status> {
        let mut ranges = lock(&self.bad.ranges);
        let Some(joined) = with(&ranges, (at, at + len)) else { return Ok(()) };
        if joined.len() > QUARANTINE_MAX {
            return Err(Status::NoSpace);
        }
        // Until it is stored, it is not on the list: a second attempt stores it again.
        self.store_bad(&joined)?;
        *ranges = joined;
        self.bad.is_any.store(true, Ordering::SeqCst);
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::with;

    const LIST: [(u64, u64); 3] = [(10, 20), (40, 50), (30, 35)];

    #[test]
    fn a_covered_range_changes_nothing() {
        for range in [(10, 20), (12, 15), (30, 31), (49, 50)] {
            assert_eq!(with(&LIST, range), None, "{range:?}");
        }
    }

    #[test]
    fn ranges_that_touch_or_overlap_become_one() {
        let cases = [
            ((20, 25), vec![(40, 50), (30, 35), (10, 25)]),
            ((5, 10), vec![(40, 50), (30, 35), (5, 20)]),
            ((15, 45), vec![(10, 50)]),
            ((0, 100), vec![(0, 100)]),
            ((35, 40), vec![(10, 20), (30, 50)]),
        ];
        for (range, joined) in cases {
            assert_eq!(with(&LIST, range), Some(joined), "{range:?}");
        }
    }

    #[test]
    fn ranges_with_good_data_between_them_stay_apart() {
        assert_eq!(with(&LIST, (21, 29)), Some(vec![(10, 20), (40, 50), (30, 35), (21, 29)]));
        assert_eq!(with(&[], (0, 1)), Some(vec![(0, 1)]));
    }
}
