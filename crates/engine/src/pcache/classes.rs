//! Classes of data segments: the window, the main part, or to be emptied. The allocation of heads,
//! the attach and collection set them, as retention decides.

use crate::sync::atomic::Ordering;

use super::retention::Class;
use super::segment::{Segment, Segments};

impl Segments {
    /// The class of a segment's data.
    pub fn class(&self, segment: u32) -> Class {
        match self.segments[segment as usize].class.load(Ordering::Relaxed) {
            main if main == Class::Main as u8 => Class::Main,
            condemned if condemned == Class::Condemned as u8 => Class::Condemned,
            sparse if sparse == Class::Sparse as u8 => Class::Sparse,
            _ => Class::Window,
        }
    }

    pub(super) fn set_class(&self, segment: u32, class: Class) {
        let info = &self.segments[segment as usize];
        info.turn.store(self.turns.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        info.class.store(class as u8, Ordering::Relaxed);
    }

    /// Sets whether two keys may name the same place of a segment.
    pub(super) fn set_shared(&self, segment: u32, is_shared: bool) {
        self.segments[segment as usize].is_shared.store(is_shared, Ordering::Relaxed);
    }

    /// Whether two keys may name the same place of a segment.
    pub(super) fn is_shared(&self, segment: u32) -> bool {
        self.segments[segment as usize].is_shared.load(Ordering::Relaxed)
    }

    /// How many segments got a class so far.
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Marks for emptying the segments of the main part that are older than `before` and have less
    /// than `bytes_min` of `current` data.
    pub fn find_sparse(&self, current: &[u32], before: u64, bytes_min: u32) {
        for (segment, &bytes) in (0..self.count()).zip(current) {
            let turn = self.segments[segment as usize].turn.load(Ordering::Relaxed);
            if self.class(segment) == Class::Main && turn < before && bytes < bytes_min {
                self.set_class(segment, Class::Sparse);
            }
        }
    }

    /// Segments of the main part.
    pub fn main_count(&self) -> u64 {
        (0..self.count()).filter(|&segment| self.class(segment) == Class::Main).count() as u64
    }

    /// The segments of the window with data, and the segments that are to be emptied.
    pub fn window_and_emptying(&self) -> (u32, u32) {
        let (mut window, mut emptying) = (0, 0);
        for segment in (0..self.count()).filter(|segment| self.references(*segment) > 0) {
            match self.class(segment) {
                Class::Window => window += 1,
                Class::Condemned | Class::Sparse => emptying += 1,
                Class::Main => {}
            }
        }
        (window, emptying)
    }

    /// Data of a segment is kept in its place, when this many keys had been `logged`. Returns the
    /// earlier number.
    pub fn note_kept(&self, segment: u32, logged: u64) -> u64 {
        self.segments[segment as usize].kept_at.swap(logged, Ordering::Relaxed)
    }

    /// Segments with data that was kept when at least this many keys had been logged.
    pub fn kept_since(&self, logged: u64) -> u32 {
        let is_since = |info: &&Segment| info.kept_at.load(Ordering::Relaxed) > logged;
        self.segments.iter().filter(is_since).count() as u32
    }

    /// Condemns the oldest segments of the main part, until it has at most `max`. Returns how many
    /// there were.
    pub fn condemn(&self, max: u32) -> u32 {
        let mut main: Vec<(u64, u32)> = (0..self.count())
            .filter(|&segment| self.class(segment) == Class::Main)
            .map(|segment| (self.segments[segment as usize].turn.load(Ordering::Relaxed), segment))
            .collect();
        let found = main.len();
        let surplus = found.saturating_sub(max as usize);
        if surplus > 0 {
            main.sort_unstable();
        }
        for &(_, segment) in &main[..surplus] {
            self.set_class(segment, Class::Condemned);
        }
        found as u32
    }
}
