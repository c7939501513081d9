//! The last write of each byte of a batch, sorted.

use std::collections::BTreeMap;

use crate::mutants::{self, Mutant};

use super::index::Place;
use super::layout::Key;

/// A run of the device that the batch writes, with its place in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) place: Place,
}

/// Keys of a batch, in the order of the log. Kept from batch to batch for its memory.
#[derive(Debug, Default)]
pub(super) struct Latest {
    runs: Vec<(Run, u32)>,
}

impl Latest {
    /// A new batch begins.
    pub(super) fn begin(&mut self) {
        self.runs.clear();
    }

    /// The next key in the order of the log.
    pub(super) fn put(&mut self, key: &Key) {
        let place = Place::new(key.segment.get(), key.segment_off.get(), key.generation.get());
        let run = Run { offset: key.off.get(), len: u64::from(key.len.get()), place };
        self.runs.push((run, self.runs.len() as u32));
    }

    /// The runs to be written, by offset; no two overlap.
    pub(super) fn take_runs(&mut self, into: &mut Vec<Run>) {
        into.clear();
        self.runs.sort_unstable_by_key(|(run, nth)| (run.offset, *nth));
        for (run, _) in &self.runs {
            match into.last_mut() {
                Some(last) if last.offset == run.offset && last.len == run.len => {
                    if !mutants::is(Mutant::OldestWins) {
                        *last = *run;
                    }
                }
                Some(last) if run.offset < last.offset + last.len => return self.cut_runs(into),
                _ => into.push(*run),
            }
        }
    }

    /// The same for keys that overlap in part, which are rare.
    fn cut_runs(&mut self, into: &mut Vec<Run>) {
        into.clear();
        self.runs.sort_unstable_by_key(|(_, nth)| *nth);
        let mut overlay = BTreeMap::new();
        for (run, _) in &self.runs {
            if mutants::is(Mutant::OldestWins) && overlay.contains_key(&run.offset) {
                continue;
            }
            lay_over(&mut overlay, *run);
        }
        into.extend(overlay.into_values());
    }
}

fn lay_over(overlay: &mut BTreeMap<u64, Run>, run: Run) {
    let end = run.offset + run.len;
    while let Some((&start, &older)) = overlay.range(..end).next_back() {
        let older_end = older.offset + older.len;
        if older_end <= run.offset {
            break;
        }
        overlay.remove(&start);
        if older_end > end {
            let place = older.place.plus(end - older.offset);
            overlay.insert(end, Run { offset: end, len: older_end - end, place });
        }
        if start < run.offset {
            overlay.insert(start, Run { len: run.offset - start, ..older });
        }
    }
    overlay.insert(run.offset, run);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;
    use zerocopy::FromZeros;

    const SECTORS: u64 = 64;

    fn key(first: u64, sectors: u64, place: u32) -> Key {
        Key {
            off: (first * 512).into(),
            len: (sectors as u32 * 512).into(),
            segment_off: (place * 512).into(),
            ..Key::new_zeroed()
        }
    }

    /// What each sector is written with, if it is.
    fn sectors(runs: &[Run]) -> Vec<Option<u32>> {
        let mut sectors = vec![None; SECTORS as usize];
        for run in runs {
            for nth in 0..run.len / 512 {
                let sector = &mut sectors[(run.offset / 512 + nth) as usize];
                assert!(sector.is_none(), "{runs:?} overlap");
                *sector = Some(run.place.plus(nth * 512).offset / 512);
            }
        }
        assert!(runs.is_sorted_by_key(|run| run.offset));
        sectors
    }

    #[test]
    fn the_last_write_of_each_sector_is_taken() {
        let mut prng = Prng::new(1);
        let mut latest = Latest::default();
        let mut runs = Vec::new();
        for round in 0..2000 {
            latest.begin();
            let mut expected = vec![None; SECTORS as usize];
            // Usually whole blocks, as clients write them; sometimes any range.
            let unit = if round % 2 == 0 { 8 } else { 1 };
            for nth in 0..prng.below(24) as u32 {
                let first = prng.below(SECTORS / unit) * unit;
                let longest = if unit == 8 { 1 + prng.below(8) / 7 } else { 12 };
                let count = (unit * (1 + prng.below(longest))).min(SECTORS - first);
                latest.put(&key(first, count, nth * 100));
                for sector in 0..count {
                    expected[(first + sector) as usize] = Some(nth * 100 + sector as u32);
                }
            }
            latest.take_runs(&mut runs);
            assert_eq!(sectors(&runs), expected, "round {round}");
        }
    }
}
