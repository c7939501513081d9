//! Fills: ranges that are being read from the backing device to be cached. Each stripe has its own
//! list, under its lock, so that a write cancels the fills that it overlaps.

use crate::mutants::{self, Mutant};

/// A range that a read asked the backing device for, and the read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// The port of the read, and its place in that port's table.
    pub(super) port: usize,
    pub(super) place: u32,
}

#[derive(Clone, Copy, Debug)]
struct Fill {
    gap: Gap,
    is_cancelled: bool,
}

/// The fills of a stripe.
#[derive(Debug, Default)]
pub(super) struct Fills(Vec<Fill>);

impl Fills {
    pub(super) fn add(&mut self, gap: Gap) {
        self.0.push(Fill { gap, is_cancelled: false });
    }

    /// Cancels the fills that a write of this range overtakes.
    pub(super) fn cancel(&mut self, at: u64, len: u64) {
        if !self.0.is_empty() && !mutants::is(Mutant::FillNotCancelled) {
            for Fill { gap, is_cancelled } in &mut self.0 {
                *is_cancelled |= gap.offset < at + len && at < gap.offset + gap.len;
            }
        }
    }

    /// Whether the data may be cached: no write has overlapped the gap meanwhile.
    pub(super) fn is_wanted(&self, gap: Gap) -> bool {
        self.0.iter().any(|fill| fill.gap == gap && !fill.is_cancelled)
    }

    /// The fill has ended.
    pub(super) fn remove(&mut self, gap: Gap) {
        self.0.retain(|fill| fill.gap != gap);
    }
}
