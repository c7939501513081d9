//! Progress of opening or wiping a cache: one thread does the work, and another thread shows the
//! progress.

use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts the items that an attach has read so far, or that a wipe has overwritten.
#[derive(Debug, Default)]
pub struct AttachProgress {
    what: OnceLock<&'static str>,
    done: AtomicU64,
    total: AtomicU64,
    has_formatted: AtomicBool,
}

/// What [`AttachProgress`] says at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachStep {
    /// The counted items.
    pub what: &'static str,
    /// How many were read.
    pub done: u64,
    /// How many there are, if that is known before the end.
    pub total: Option<u64>,
}

impl AttachProgress {
    /// Starts a count: `total` of `what` are to be read (0: the number is unknown).
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

    /// A cache device is about to be formatted.
    pub fn note_format(&self) {
        self.has_formatted.store(true, Ordering::Relaxed);
    }

    /// Whether a cache device was formatted.
    pub fn has_formatted(&self) -> bool {
        self.has_formatted.load(Ordering::Relaxed)
    }

    /// The progress, or `None` before the first read.
    pub fn look(&self) -> Option<AttachStep> {
        let total = self.total.load(Ordering::Relaxed);
        let done = self.done.load(Ordering::Relaxed);
        let what = self.what.get()?;
        Some(AttachStep { what, done, total: (total > 0).then_some(total) })
    }
}
