//! Counters of a cache's work, shown as facts. Otherwise only decisions that may be a little wrong
//! depend on them.

use crate::sync::atomic::{AtomicU64, Ordering};

/// A counter that all threads raise often: one part for each port, so that they do not share a
/// cache line.
#[derive(Debug, Default)]
pub(super) struct BusyCounter([Line; 8]);

#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicU64);

impl BusyCounter {
    pub(super) fn raise(&self, port: usize) {
        self.add(port, 1);
    }

    pub(super) fn add(&self, port: usize, count: u64) {
        self.0[port % self.0.len()].0.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn sum(&self) -> u64 {
        self.0.iter().map(|line| line.0.load(Ordering::Relaxed)).sum()
    }
}

/// The work of a cache since its attach.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) read_hits: BusyCounter,
    pub(super) read_misses: BusyCounter,
    pub(super) filled_bytes: BusyCounter,
    pub(super) damaged_reads: AtomicU64,
    pub(super) damaged_runs: AtomicU64,
    pub(super) batches: AtomicU64,
    pub(super) written_back_bytes: AtomicU64,
    pub(super) writeback_failures: AtomicU64,
    /// I/O of write-back that has ended.
    pub(super) writeback_ios: AtomicU64,
    pub(super) collected_keys: AtomicU64,
    pub(super) recycled_segments: AtomicU64,
    pub(super) kept_bytes: AtomicU64,
    pub(super) moved_bytes: AtomicU64,
    pub(super) dropped_bytes: AtomicU64,
    pub(super) yielded_bytes: AtomicU64,
    pub(super) helped: AtomicU64,
}
