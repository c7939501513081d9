//! Counts of rounds: how many have begun, and how many have ended.

use crate::sync::atomic::{AtomicU64, Ordering};

/// Counts of rounds.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Rounds {
    #[inline]
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }

    #[inline]
    pub(super) fn ended(&self) -> u64 {
        self.ended.load(Ordering::SeqCst)
    }

    /// The number of the next round.
    #[inline]
    pub(super) fn next(&self) -> u64 {
        self.begun() + 1
    }

    /// A round begins.
    #[inline]
    pub(super) fn begin(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether a round has begun and not ended.
    #[inline]
    pub(super) fn is_any_under_way(&self) -> bool {
        self.ended() < self.begun()
    }

    /// All rounds that have begun have ended.
    #[inline]
    pub(super) fn end(&self) {
        self.ended.store(self.begun(), Ordering::SeqCst);
    }
}
