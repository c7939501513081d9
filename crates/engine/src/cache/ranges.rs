//! Sectors of a block, as a few ranges of them.
//!
//! However a client writes, a set has a bounded number of ranges. One of dirty sectors that would
//! have more closes its narrowest gap ([`Ranges::cover`]): it never lacks a sector that was added.
//! One of valid sectors loses its shortest range ([`Ranges::add`], [`Ranges::remove`]): it never
//! has a sector that was not.

use std::ops::Range;

use crate::mutants::{self, Mutant};

/// Most ranges of a block.
pub(super) const RANGES_MAX: usize = 16;

/// A set of sectors: ranges in order, with gaps between them. Most sets have one range or none,
/// which needs no memory elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ranges {
    /// This one, unless it is empty.
    One(Range<u32>),
    /// Two or more.
    Many(Box<[Range<u32>]>),
}

impl Default for Ranges {
    fn default() -> Ranges {
        Ranges::One(0..0)
    }
}

impl Ranges {
    /// These sectors.
    pub(super) fn of(sectors: Range<u32>) -> Ranges {
        Ranges::One(sectors)
    }

    fn as_slice(&self) -> &[Range<u32>] {
        match self {
            Ranges::One(range) if range.is_empty() => &[],
            Ranges::One(range) => std::slice::from_ref(range),
            Ranges::Many(ranges) => ranges,
        }
    }

    /// All of them, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Range<u32>> {
        self.as_slice().iter().cloned()
    }

    /// Puts ranges in the place of some.
    fn splice(&mut self, old: Range<usize>, new: impl IntoIterator<Item = Range<u32>>) {
        let mut ranges = match std::mem::take(self) {
            Ranges::Many(ranges) => ranges.into_vec(),
            Ranges::One(range) if range.is_empty() => Vec::new(),
            Ranges::One(range) => vec![range],
        };
        if old.is_empty() {
            ranges.reserve_exact(1);
        }
        ranges.splice(old, new);
        *self = match ranges[..] {
            [] | [_] => Ranges::One(ranges.pop().unwrap_or_default()),
            _ => Ranges::Many(ranges.into_boxed_slice()),
        };
    }

    /// Adds sectors, and more of them where the set would have too many ranges.
    #[inline]
    pub(super) fn cover(&mut self, new: Range<u32>) {
        let all = self.as_slice();
        let first = all.partition_point(|old| old.end < new.start);
        match all.get(first) {
            Some(old) if old.start <= new.start && new.end <= old.end => {}
            _ => {
                self.join(first, new);
                self.close_narrowest_gap();
            }
        }
    }

    /// Adds sectors that touch no range before the one at `first`.
    fn join(&mut self, first: usize, mut new: Range<u32>) {
        let all = self.as_slice();
        let touched = all[first..].partition_point(|old| old.start <= new.end);
        if let [old, ..] = &all[first..first + touched] {
            new.start = new.start.min(old.start);
        }
        if let [.., old] = &all[first..first + touched] {
            new.end = new.end.max(old.end);
        }
        match all.len() == touched {
            true => *self = Ranges::One(new),
            false => self.splice(first..first + touched, [new]),
        }
    }

    /// How many sectors it has.
    pub(super) fn len(&self) -> u32 {
        self.as_slice().iter().map(|range| range.end - range.start).sum()
    }

    /// Whether it has all of `wanted`.
    #[inline]
    pub(super) fn contains(&self, wanted: &Range<u32>) -> bool {
        let all = self.as_slice();
        let first = all.partition_point(|old| old.end < wanted.end);
        all.get(first).is_some_and(|old| old.start <= wanted.start)
    }

    /// Adds sectors; where it would have too many ranges, it loses the shortest one.
    pub(super) fn add(&mut self, new: Range<u32>) {
        let first = self.as_slice().partition_point(|old| old.end < new.start);
        self.join(first, new);
        self.lose_shortest();
    }

    /// Takes sectors away, and more where it would have too many ranges.
    pub(super) fn remove(&mut self, gone: &Range<u32>) {
        let all = self.as_slice();
        let first = all.partition_point(|old| old.end <= gone.start);
        let touched = all[first..].partition_point(|old| old.start < gone.end);
        let ([head, ..], [.., tail]) = (&all[first..first + touched], &all[first..first + touched])
        else {
            return;
        };
        let left = [head.start..gone.start, gone.end..tail.end];
        let left = left.into_iter().filter(|range| !range.is_empty());
        self.splice(first..first + touched, left);
        self.lose_shortest();
    }

    fn lose_shortest(&mut self) {
        let all = self.as_slice();
        if all.len() > RANGES_MAX {
            let len = |nth: &usize| all[*nth].end - all[*nth].start;
            let shortest = (0..all.len()).min_by_key(len).expect("it has ranges");
            self.splice(shortest..shortest + 1, []);
        }
    }

    fn close_narrowest_gap(&mut self) {
        let all = self.as_slice();
        if all.len() > RANGES_MAX {
            let gap = |nth: &usize| all[nth + 1].start - all[*nth].end;
            let narrowest = (0..all.len() - 1).min_by_key(gap).expect("it has two ranges at least");
            let (before, after) = (all[narrowest].clone(), all[narrowest + 1].clone());
            let is_cut = mutants::is(Mutant::PartsCutShort);
            let joined = before.start..if is_cut { before.end } else { after.end };
            self.splice(narrowest..narrowest + 2, [joined]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    /// The sectors of a set, one by one.
    fn sectors(set: &Ranges, count: u32) -> Vec<bool> {
        (0..count).map(|sector| set.iter().any(|range| range.contains(&sector))).collect()
    }

    #[test]
    fn a_set_has_what_was_added_in_few_ranges() {
        let mut prng = Prng::new(7);
        for round in 0..400_u64 {
            let count = [8, 64, 512, 4096][round as usize % 4];
            let mut model = vec![false; count as usize];
            let mut set = Ranges::default();
            let mut is_exact = true;
            for _ in 0..60 {
                let start = prng.below(count.into()) as u32;
                let end = (start + 1 + prng.below(9) as u32).min(count);
                set.cover(start..end);
                model[start as usize..end as usize].fill(true);
                let runs = model.windows(2).filter(|pair| pair[0] && !pair[1]).count();
                is_exact &= runs < RANGES_MAX;
                let found = sectors(&set, count);
                assert!(model.iter().zip(&found).all(|(wanted, found)| !wanted || *found));
                assert!(!is_exact || found == model, "{set:?}");
                assert!(
                    set.as_slice().len() <= RANGES_MAX && set.iter().all(|range| !range.is_empty())
                );
                assert!(
                    set.as_slice().windows(2).all(|pair| pair[0].end < pair[1].start),
                    "{set:?}"
                );
            }
        }
    }

    #[test]
    fn a_set_that_may_lose_has_nothing_that_was_not_added() {
        let mut prng = Prng::new(8);
        for round in 0..400_u64 {
            let count = [8, 64, 512, 4096][round as usize % 4];
            let mut model = vec![false; count as usize];
            let mut set = Ranges::default();
            let mut is_exact = true;
            for _ in 0..80 {
                let start = prng.below(count.into()) as u32;
                let end = (start + 1 + prng.below(9) as u32).min(count);
                let is_added = !prng.one_in(3);
                match is_added {
                    true => set.add(start..end),
                    false => set.remove(&(start..end)),
                }
                model[start as usize..end as usize].fill(is_added);
                let runs = model.windows(2).filter(|pair| pair[0] && !pair[1]).count();
                is_exact &= runs < RANGES_MAX;
                let found = sectors(&set, count);
                assert!(model.iter().zip(&found).all(|(may, found)| *may || !found), "{set:?}");
                assert!(!is_exact || found == model, "{set:?}");
                assert!(
                    set.as_slice().len() <= RANGES_MAX && set.iter().all(|range| !range.is_empty())
                );
                assert!(
                    set.as_slice().windows(2).all(|pair| pair[0].end < pair[1].start),
                    "{set:?}"
                );
                let all = found[start as usize..end as usize].iter().all(|found| *found);
                assert_eq!(set.contains(&(start..end)), all);
                assert_eq!(set.len(), found.iter().filter(|found| **found).count() as u32);
            }
        }
    }

    #[test]
    fn a_set_of_one_range_takes_16_bytes() {
        assert_eq!(size_of::<Ranges>(), 16);
    }

    #[test]
    fn the_narrowest_gap_is_closed() {
        let mut set = Ranges::default();
        (0..16).for_each(|nth| set.cover(nth * 100..nth * 100 + 1));
        set.cover(1550..1551);
        assert_eq!(set.as_slice().len(), RANGES_MAX);
        assert_eq!(set.as_slice().last(), Some(&(1500..1551)));
        set.cover(0..u32::MAX);
        assert_eq!(set, Ranges::of(0..u32::MAX));
    }
}
