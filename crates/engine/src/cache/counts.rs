//! Counters in addition to the kernel's.

use crate::sync::atomic::AtomicU64;

/// Counters; no decision depends on them.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) failed_commits: AtomicU64,
    pub(super) failed_batches: AtomicU64,
    pub(super) failed_copies: AtomicU64,
    pub(super) fallbacks: AtomicU64,
    pub(super) passed_by: AtomicU64,
    /// I/O of the background and of commits.
    pub(super) ended: AtomicU64,
}
