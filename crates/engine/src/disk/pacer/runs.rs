//! Dirty pages of one file: runs of bytes, each owned by the writer that made it dirty first.

use std::collections::BTreeMap;
use std::ops::Range;

/// Neighbouring dirty bytes of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First byte.
    pub start: u64,
    /// Where it ends.
    pub end: u64,
    /// The ring that wrote it.
    pub owner: u64,
}

/// Runs without overlaps, in order.
#[derive(Debug, Default)]
pub(super) struct Runs {
    /// By where they start: where they end, and the owner.
    runs: BTreeMap<u64, (u64, u64)>,
    bytes: u64,
}

impl Runs {
    /// Bytes of all runs.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a range. What of it is there already stays its first owner's. Returns how many bytes
    /// are new.
    pub(super) fn add(&mut self, range: Range<u64>, owner: u64) -> u64 {
        let before = self.bytes;
        for gap in self.gaps(range) {
            self.insert(gap.start, gap.end, owner);
        }
        self.bytes - before
    }

    /// The parts of a range that are in no run.
    pub(super) fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let (mut gaps, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let next = self.from(at).filter(|run| run.start < range.end);
            let gap_end = next.map_or(range.end, |run| run.start);
            if gap_end > at {
                gaps.push(at..gap_end);
            }
            at = next.map_or(range.end, |run| run.end);
        }
        gaps
    }

    /// Takes at most `bytes` in at most `count` runs out, in order, from the start.
    pub(super) fn take(&mut self, bytes: u64, count: usize) -> Vec<Run> {
        let (mut taken, mut at, mut left) = (Vec::new(), 0, bytes);
        while left > 0 && taken.len() < count {
            let Some(run) = self.from(at) else { break };
            let piece = Run { end: run.end.min(run.start.saturating_add(left)), ..run };
            self.cut(piece);
            left -= piece.end - piece.start;
            at = piece.end;
            taken.push(piece);
        }
        taken
    }

    /// The first run, or rest of a run, at `at` or above.
    fn from(&self, at: u64) -> Option<Run> {
        let around = self.runs.range(..at).next_back().filter(|(_, (end, _))| *end > at);
        if let Some((_, (end, owner))) = around {
            return Some(Run { start: at, end: *end, owner: *owner });
        }
        let (start, (end, owner)) = self.runs.range(at..).next()?;
        Some(Run { start: *start, end: *end, owner: *owner })
    }

    /// Adds a run where none is, joined with its neighbours of the same owner.
    fn insert(&mut self, mut start: u64, mut end: u64, owner: u64) {
        self.bytes += end - start;
        if let Some((before, (its_end, its_owner))) = self.runs.range(..start).next_back()
            && (*its_end, *its_owner) == (start, owner)
        {
            start = *before;
        }
        if let Some((its_end, its_owner)) = self.runs.get(&end)
            && *its_owner == owner
        {
            let joined = end;
            end = *its_end;
            self.runs.remove(&joined);
        }
        self.runs.insert(start, (end, owner));
    }

    /// Takes a piece out of the run that holds it.
    fn cut(&mut self, piece: Run) {
        let Some((start, (end, owner))) = self.runs.range(..=piece.start).next_back() else {
            return;
        };
        let (start, end, owner) = (*start, *end, *owner);
        self.runs.remove(&start);
        if start < piece.start {
            self.runs.insert(start, (piece.start, owner));
        }
        if piece.end < end {
            self.runs.insert(piece.end, (end, owner));
        }
        self.bytes -= piece.end - piece.start;
    }
}
