//! Retention policies: which clean data is kept when space is short. Pure decisions; gc.rs carries
//! them out.
//!
//! A policy knows three facts about a block: how often it was used since it was cached, the kind of
//! its segment, and, when it is cached again, how long ago it was dropped. Segments are of two
//! kinds: the *window*, where all data is first cached and most is dropped again, and the *main*
//! part, for blocks that were used again. The log names both. When collection passes a key of the
//! main part, the key is logged again and the data is kept in its place, until its segment is
//! *condemned* because the main part has grown too large: then used data is moved, and the rest is
//! dropped.

use std::fmt::Debug;

/// Uses of a block are counted up to here.
pub const USES_MAX: u8 = 3;

/// Which policy a table asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum RetentionKind {
    /// What came first goes first, as in the kernel.
    Fifo,
    /// Blocks that were used again are kept.
    #[default]
    Hot,
}

impl RetentionKind {
    /// The policy, for a cache of this many blocks.
    pub fn policy(self, blocks: u64) -> Box<dyn Retention> {
        match self {
            RetentionKind::Fifo => Box::new(Fifo),
            RetentionKind::Hot => Box::new(Hot::new(blocks)),
        }
    }
}

/// The use of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// For what comes in.
    Window,
    /// For what was used again.
    Main,
    /// It was in the main part, and is to be emptied: the main part has grown too large.
    Condemned,
    /// It was in the main part, and is to be emptied: little of its data is current.
    Sparse,
}

/// The history of a block that is being cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// No history.
    Never,
    /// It was dropped; this many blocks were dropped since.
    Dropped(u64),
    /// It is there, in a segment of this class.
    Cached(Class),
}

/// What happens to clean data when collection passes its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its key is logged again, the data stays where it is.
    Keep,
    /// It is copied into the main part, with this count of uses.
    Move(u8),
    /// It is dropped, and forgotten.
    Forget,
    /// It is dropped, and that is remembered.
    Remember,
}

/// A policy.
pub trait Retention: Debug + Send + Sync {
    /// Its name in a table.
    fn name(&self) -> &'static str;

    /// Whether collection waits until space is short, so that no data is dropped before.
    fn fills_cache(&self) -> bool;

    /// The kind of segment for a block that comes into the cache.
    fn admit(&self, seen: Seen) -> Class;

    /// Whether the dropping of a block is still remembered, when this many blocks were dropped
    /// since.
    fn remembers(&self, ago: u64) -> bool;

    /// The verdict on a block that was used `uses` times since it was cached.
    fn judge(&self, class: Class, uses: u8) -> Verdict;

    /// The verdict on a block when writes would wait for space, and data kept in its place could
    /// not be dropped before the dirty data before its key is written back.
    fn judge_pressed(&self, class: Class, uses: u8) -> Verdict;

    /// If a segment of the main part has a smaller percentage of current data, the data is moved.
    fn dense_percent(&self) -> u32;

    /// Most segments of the main part, of `usable` for data.
    fn main_max(&self, usable: u32) -> u32;

    /// While the window has no more segments than this, condemned or sparse segments are collected
    /// first.
    fn window_min(&self, usable: u32) -> u32;
}

/// The kernel's policy: no history; data is dropped in the order in which it was cached.
#[derive(Debug)]
pub struct Fifo;

impl Retention for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn fills_cache(&self) -> bool {
        false
    }

    fn admit(&self, _: Seen) -> Class {
        Class::Window
    }

    fn remembers(&self, _: u64) -> bool {
        false
    }

    fn judge(&self, _: Class, _: u8) -> Verdict {
        Verdict::Forget
    }

    fn judge_pressed(&self, _: Class, _: u8) -> Verdict {
        Verdict::Forget
    }

    fn dense_percent(&self) -> u32 {
        0
    }

    fn main_max(&self, _: u32) -> u32 {
        0
    }

    fn window_min(&self, _: u32) -> u32 {
        0
    }
}

/// S3-FIFO on segments of a log: a block is kept if it was used twice while it passed the window,
/// or if it is cached again soon after it was dropped. A scan therefore replaces the window only.
#[derive(Debug)]
pub struct Hot {
    /// A block is remembered until this many others were dropped after it.
    memory_blocks: u64,
}

/// The share of the window, in percent of the usable segments. Segments of the main part that are
/// being emptied take some of it.
const WINDOW_PERCENT: u32 = 18;
/// No data of the window is dropped while it is smaller and other segments are being emptied.
const WINDOW_MIN_PERCENT: u32 = 10;
/// Uses in the window that earn a block its place in the main part.
const USES_TO_STAY: u8 = 2;
/// The number of later drops for which a dropped block is remembered, in percent of the cache's
/// blocks.
const MEMORY_PERCENT: u64 = 130;
/// Current data of a segment of the main part is kept in its place if it is at least this
/// percentage of the segment.
const DENSE_PERCENT: u32 = 90;

impl Hot {
    /// For a cache of this many blocks.
    pub fn new(blocks: u64) -> Hot {
        Hot { memory_blocks: blocks * MEMORY_PERCENT / 100 }
    }
}

impl Retention for Hot {
    fn name(&self) -> &'static str {
        "hot"
    }

    fn fills_cache(&self) -> bool {
        true
    }

    fn admit(&self, seen: Seen) -> Class {
        match seen {
            Seen::Dropped(ago) if self.remembers(ago) => Class::Main,
            Seen::Cached(class) if class != Class::Window => Class::Main,
            _ => Class::Window,
        }
    }

    fn remembers(&self, ago: u64) -> bool {
        ago < self.memory_blocks
    }

    fn judge(&self, class: Class, uses: u8) -> Verdict {
        match class {
            Class::Main => Verdict::Keep,
            Class::Sparse => Verdict::Move(uses),
            Class::Window if uses >= USES_TO_STAY => Verdict::Move(0),
            Class::Window => Verdict::Remember,
            // Each pass costs a use, so unused data is dropped in the end.
            Class::Condemned if uses > 0 => Verdict::Move(uses - 1),
            Class::Condemned => Verdict::Forget,
        }
    }

    fn judge_pressed(&self, class: Class, uses: u8) -> Verdict {
        match class {
            _ if uses < USES_TO_STAY => Verdict::Forget,
            Class::Window => Verdict::Move(0),
            // As in a condemned segment: unused data is dropped in the end.
            Class::Main | Class::Condemned | Class::Sparse => Verdict::Move(uses - 1),
        }
    }

    fn dense_percent(&self) -> u32 {
        DENSE_PERCENT
    }

    fn main_max(&self, usable: u32) -> u32 {
        usable - usable * WINDOW_PERCENT / 100
    }

    fn window_min(&self, usable: u32) -> u32 {
        usable * WINDOW_MIN_PERCENT / 100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_passes_the_window_only() {
        let hot = Hot::new(1000);
        assert_eq!(hot.admit(Seen::Never), Class::Window);
        assert_eq!(hot.judge(Class::Window, 0), Verdict::Remember);
        assert_eq!(hot.judge(Class::Window, USES_TO_STAY), Verdict::Move(0));
        assert_eq!(hot.judge(Class::Main, 0), Verdict::Keep);
    }

    #[test]
    fn what_comes_again_soon_stays() {
        let hot = Hot::new(1000);
        assert_eq!(hot.admit(Seen::Dropped(1299)), Class::Main);
        assert_eq!(hot.admit(Seen::Dropped(1300)), Class::Window);
        assert!(hot.remembers(1299) && !hot.remembers(1300));
        assert_eq!(hot.admit(Seen::Cached(Class::Window)), Class::Window);
        assert_eq!(hot.admit(Seen::Cached(Class::Condemned)), Class::Main);
    }

    #[test]
    fn what_is_condemned_goes_after_as_many_rounds_as_uses_count() {
        let hot = Hot::new(1000);
        let mut uses = USES_MAX;
        let mut rounds = 0;
        while let Verdict::Move(left) = hot.judge(Class::Condemned, uses) {
            (uses, rounds) = (left, rounds + 1);
        }
        assert_eq!(rounds, USES_MAX);
        assert_eq!(hot.judge(Class::Condemned, uses), Verdict::Forget);
        // Moved to free space, not for its uses: it loses no use.
        assert_eq!(hot.judge(Class::Sparse, 0), Verdict::Move(0));
    }

    #[test]
    fn the_window_keeps_a_part_of_its_share() {
        let hot = Hot::new(1000);
        for usable in [1, 4, 100, 1015] {
            let window = usable - hot.main_max(usable);
            assert!(hot.window_min(usable) <= window && window <= usable, "{usable}");
        }
        assert_eq!((hot.main_max(1000), hot.window_min(1000)), (820, 100));
    }

    #[test]
    fn the_kernels_policy_keeps_nothing() {
        let fifo = RetentionKind::Fifo.policy(1000);
        for class in [Class::Window, Class::Main, Class::Condemned, Class::Sparse] {
            assert_eq!(fifo.judge(class, USES_MAX), Verdict::Forget);
            assert_eq!(fifo.admit(Seen::Cached(class)), Class::Window);
        }
        assert!(!fifo.fills_cache() && fifo.main_max(100) == 0 && fifo.window_min(100) == 0);
    }
}
