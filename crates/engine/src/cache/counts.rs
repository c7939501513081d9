//! Counters besides the kernel's.

use crate::sync::atomic::AtomicU64;

/// Counters; nothing depends on them.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) failed_commits: AtomicU64,
    pub(super) failed_batches: AtomicU64,
    pub(super) fallbacks: AtomicU64,
}
