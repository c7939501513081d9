//! The device that the background waits for.

use crate::disk::Disk;
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::target::Waiting;

use super::Cache;

/// The devices of a cache, as messages name them.
pub(super) const METADATA: &str = "the metadata device";
pub(super) const CACHE: &str = "the cache device";
pub(super) const ORIGIN: &str = "the origin";
/// Some I/O of both is in flight: one that hangs may keep I/O of the other in a queue.
pub(super) const EITHER: &str = "the cache device or the origin";

impl Cache {
    /// See [`Target::waits_for`](crate::target::Target::waits_for). Copies come first, because
    /// requests and not write-back cause most commits.
    pub(super) fn awaited_device(&self) -> Option<Waiting> {
        let of_background = self.background.lock().waits_for();
        let device = of_background.or_else(|| self.commits.lock().waits_for())?;
        Some(Waiting { device, ended: self.counts.ended.load(Ordering::Relaxed) })
    }

    /// See [`Target::role_of`](crate::target::Target::role_of).
    pub(super) fn role_of_disk(&self, disk: &Arc<dyn Disk>) -> &'static str {
        if Arc::ptr_eq(disk, self.origin.disk()) {
            ORIGIN
        } else if Arc::ptr_eq(disk, self.cache.disk()) {
            CACHE
        } else {
            METADATA
        }
    }

    /// An I/O of the background, or of a commit, has ended.
    pub(super) fn note_ended(&self) {
        self.counts.ended.fetch_add(1, Ordering::Relaxed);
    }
}
