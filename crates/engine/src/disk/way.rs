//! The method that writes pages of a lazy file to the device: RWF_DONTCACHE, if the kernel then
//! writes such pages out by itself and in the background, else sync_file_range.
//!
//! The method is found by trying. The first writes carry the flag. If a file system refuses the
//! flag, it is not used again. If the kernel has written the pages out, or started to, when the
//! write returns, it has done so in the writer's context (Linux 6.14 to 7.1). A steady write-out
//! must avoid this, so it counts as a refusal as well. If the pages are still dirty then, the
//! kernel writes them out later by itself.

use super::pagecache::Cached;
use crate::sync::statics::atomic::{AtomicU8, Ordering};

/// RWF_DONTCACHE.
pub(super) const DONTCACHE: i32 = 0x80;

/// The method by which pages get to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Way {
    /// Not known yet: writes carry the flag.
    Trying = 0,
    /// The kernel writes the pages out: writes carry the flag.
    Pushed,
    /// By sync_file_range, because the flag is refused.
    Refused,
    /// By sync_file_range, because the kernel would make the writer do it.
    InWriter,
}

/// The method, once it is found; it does not change after that.
#[derive(Debug, Default)]
pub(super) struct WayFound(AtomicU8);

impl WayFound {
    pub(super) fn found(&self) -> Way {
        match self.0.load(Ordering::Relaxed) {
            0 => Way::Trying,
            1 => Way::Pushed,
            2 => Way::Refused,
            _ => Way::InWriter,
        }
    }

    /// Flags for a write.
    pub(super) fn flags(&self) -> i32 {
        match self.found() {
            Way::Trying | Way::Pushed => DONTCACHE,
            Way::Refused | Way::InWriter => 0,
        }
    }

    /// A write with these flags was refused. Returns whether it should be tried without them.
    pub(super) fn refused(&self, flags: i32) -> bool {
        if flags & DONTCACHE == 0 {
            return false;
        }
        self.0.store(Way::Refused as u8, Ordering::Relaxed);
        true
    }

    /// A write with these flags has succeeded; `look` returns the page cache's state of its range.
    pub(super) fn wrote(&self, flags: i32, look: impl FnOnce() -> Option<Cached>) {
        if flags & DONTCACHE == 0 || self.found() != Way::Trying {
            return;
        }
        // A kernel that knows the flag has cachestat.
        let is_dirty = look().is_some_and(|there| there.dirty_bytes > 0);
        let found = if is_dirty { Way::Pushed } else { Way::InWriter };
        let (from, to) = (Way::Trying as u8, found as u8);
        let _ = self.0.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// In words.
    pub(super) fn words(&self) -> &'static str {
        match self.found() {
            Way::Trying => "unknown before the first write",
            Way::Pushed => "RWF_DONTCACHE: the kernel writes pages out itself",
            Way::Refused => "sync_file_range: the kernel refuses RWF_DONTCACHE",
            Way::InWriter => {
                "sync_file_range: with RWF_DONTCACHE, this kernel would block the writer"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cached(dirty_bytes: u64) -> Option<Cached> {
        Some(Cached { cached_bytes: 4096, unclean_bytes: 4096, dirty_bytes })
    }

    #[test]
    fn the_first_write_decides_and_the_first_refusal_is_for_good() {
        let way = WayFound::default();
        assert_eq!(way.flags(), DONTCACHE);
        assert!(way.refused(DONTCACHE));
        assert_eq!((way.found(), way.flags()), (Way::Refused, 0));
        assert!(!way.refused(0), "all flags were tried");
        // A write that was in flight meanwhile does not count.
        way.wrote(DONTCACHE, || cached(4096));
        assert_eq!(way.found(), Way::Refused);
    }

    #[test]
    fn what_is_dirty_after_the_write_is_pushed_by_the_kernel() {
        for (dirty, expected) in [(4096, Way::Pushed), (0, Way::InWriter)] {
            let way = WayFound::default();
            way.wrote(DONTCACHE, || cached(dirty));
            assert_eq!(way.found(), expected);
            assert_eq!(way.flags() == DONTCACHE, expected == Way::Pushed);
            way.wrote(DONTCACHE, || panic!("only the first is looked at"));
        }
        // Writes without the flag do not count.
        let way = WayFound::default();
        way.wrote(0, || panic!("not looked at"));
        assert_eq!(way.found(), Way::Trying);
    }
}
