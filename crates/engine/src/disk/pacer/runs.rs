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
        let (before, mut at) = (self.bytes, range.start);
        while at < range.end {
            let around = self.runs.range(..=at).next_back().map(|(start, run)| (*start, *run));
            if let Some((_, (end, _))) = around
                && end > at
            {
                at = end;
                continue;
            }
            let next = self.runs.range(at..=range.end).next().map(|(start, run)| (*start, *run));
            let mut end = next.map_or(range.end, |(start, _)| start);
            self.bytes += end - at;
            // Joined with its neighbours of the same owner.
            let joins = |(_, (its_end, its_owner)): &(u64, (u64, u64))| {
                (*its_end, *its_owner) == (at, owner)
            };
            let start = around.filter(joins).map_or(at, |(start, _)| start);
            at = end;
            if let Some((its_start, (its_end, its_owner))) = next
                && its_owner == owner
            {
                self.runs.remove(&its_start);
                (at, end) = (its_end, its_end);
            }
            self.runs.insert(start, (end, owner));
        }
        self.bytes - before
    }

    /// The first part of the range that is in no run.
    pub(super) fn gap(&self, range: Range<u64>) -> Option<Range<u64>> {
        let around = self.runs.range(..=range.start).next_back();
        let mut at = around.map_or(range.start, |(_, (end, _))| range.start.max(*end));
        if at >= range.end {
            return None;
        }
        for (start, (end, _)) in self.runs.range(at..range.end) {
            if *start > at {
                return Some(at..*start);
            }
            at = *end;
        }
        (at < range.end).then_some(at..range.end)
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
