//! Counters: the kernel's statistics, and ours.

use crate::sync::atomic::{AtomicU64, Ordering};

use super::index::{Index, Locked};

/// The kernel's statistics, of one stripe. Changed under its lock.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Stats {
    pub(super) reads: AtomicU64,
    pub(super) read_hits: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) hits_uncommitted: AtomicU64,
    pub(super) hits_committed: AtomicU64,
    pub(super) around: AtomicU64,
    pub(super) allocated: AtomicU64,
}

/// Adds without an atomic addition: the stripe's lock is held.
pub(super) fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

/// All counters.
#[derive(Debug, Default)]
pub(super) struct Counts {
    stats: Box<[Stats]>,
    pub(super) flushes: AtomicU64,
    pub(super) discards: AtomicU64,
    pub(super) commits: AtomicU64,
    pub(super) metadata_writes: AtomicU64,
    pub(super) batches: AtomicU64,
    pub(super) overwrites: AtomicU64,
    pub(super) written_back_bytes: AtomicU64,
    /// Bytes of the blocks that write-back has made clean.
    pub(super) cleaned_bytes: AtomicU64,
    pub(super) writeback_failures: AtomicU64,
    pub(super) failed_requests: AtomicU64,
    /// I/O of write-back and of commits.
    pub(super) ended: AtomicU64,
}

impl Counts {
    pub(super) fn new(stripes: usize) -> Counts {
        Counts { stats: (0..stripes).map(|_| Stats::default()).collect(), ..Counts::default() }
    }

    /// The counters of a stripe.
    #[inline]
    pub(super) fn of(&self, stripe: &Locked<'_>) -> &Stats {
        &self.stats[stripe.stripe()]
    }

    /// The sum of one counter over all stripes.
    pub(super) fn sum(&self, counter: impl Fn(&Stats) -> &AtomicU64) -> u64 {
        self.stats.iter().map(|stats| counter(stats).load(Ordering::Relaxed)).sum()
    }

    /// The message `clear_stats`: the kernel's counters begin at 0 again.
    pub(super) fn clear(&self, index: &Index) {
        for stripe in 0..self.stats.len() {
            let locked = index.lock(stripe);
            let stats = self.of(&locked);
            let counters = [
                &stats.reads,
                &stats.read_hits,
                &stats.writes,
                &stats.hits_uncommitted,
                &stats.hits_committed,
                &stats.around,
                &stats.allocated,
            ];
            counters.iter().for_each(|counter| counter.store(0, Ordering::Relaxed));
        }
        self.flushes.store(0, Ordering::Relaxed);
        self.discards.store(0, Ordering::Relaxed);
    }
}
