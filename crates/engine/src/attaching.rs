//! Progress of opening a cache, or of wiping one: one thread does it, another one shows how far it
//! is.

use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Counts what an attach has read so far, or what a wipe has overwritten.
#[derive(Debug, Default)]
pub struct AttachProgress {
    what: OnceLock<&'static str>,
    done: AtomicU64,
    total: AtomicU64,
}

/// What [`AttachProgress`] says at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachStep {
    /// What is counted.
    pub what: &'static str,
    /// How many were read.
    pub done: u64,
    /// How many there are, if that is known before the end.
    pub total: Option<u64>,
}

impl AttachProgress {
    /// `total` of `what` are to be read, from the first one on; 0: the number is unknown.
    pub fn begin(&self, what: &'static str, total: u64) {
        let _ = self.what.set(what);
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    /// This many have been read so far.
    pub fn has_come_to(&self, done: u64) {
        self.done.store(done, Ordering::Relaxed);
    }

    /// `count` more are done.
    pub fn advance(&self, count: u64) {
        self.done.fetch_add(count, Ordering::Relaxed);
    }

    /// How many are left, if their number is known.
    pub fn left(&self) -> Option<u64> {
        let AttachStep { done, total, .. } = self.look()?;
        Some(total?.saturating_sub(done))
    }

    /// The progress; `None`: nothing is read yet.
    pub fn look(&self) -> Option<AttachStep> {
        let total = self.total.load(Ordering::Relaxed);
        let done = self.done.load(Ordering::Relaxed);
        let what = self.what.get()?;
        Some(AttachStep { what, done, total: (total > 0).then_some(total) })
    }
}
