//! Reads the entries of a cache into its index.

use std::collections::HashMap;

use crate::error::Result;

use super::Found;
use crate::writecache::OpenOptions;
use crate::writecache::index::{Index, State};
use crate::writecache::layout::{Entry, Geometry};
use crate::writecache::media::Medium;
use crate::writecache::walk::{Census, Finder, walk};

/// From this many entries on, threads share them.
const SHARED_BLOCKS_MIN: u64 = 64 << 10;

/// The findings of one of several threads, for its part of the stripes.
pub(super) struct Part<'a> {
    index: &'a Index,
    /// The number of this part, and the number of parts.
    share: (usize, usize),
    aside: HashMap<u32, Entry>,
    pub(super) stale: Vec<u32>,
    uncommitted: Vec<u32>,
}

impl Part<'_> {
    pub(super) fn of(index: &Index, nth: usize, count: usize) -> Part<'_> {
        let (aside, stale, uncommitted) = (HashMap::new(), Vec::new(), Vec::new());
        Part { index, share: (nth, count), aside, stale, uncommitted }
    }
}

impl Finder for Part<'_> {
    fn is_mine(&self, block: u64) -> bool {
        let (nth, count) = self.share;
        count == 1 || self.index.stripe_of(block) % count == nth
    }

    fn soon(&self, block: u64, index: u64) {
        self.index.touch(block, &[index as u32]);
    }

    fn sooner(&self, block: u64) {
        self.index.prefetch_older(block, 1);
    }

    fn known(&self, block: u64) -> Option<u64> {
        self.index.lock_of(block).newest(block).map(|found| u64::from(found.slot))
    }

    fn live(&mut self, block: u64, index: u64) {
        let mut locked = self.index.lock_of(block);
        let older: Vec<u32> = locked.versions(block).map(|found| found.slot).collect();
        for slot in older {
            locked.unlink(slot);
            self.index.set_marking(slot);
            self.stale.push(slot);
        }
        locked.link(index as u32, block, State::Live, 0);
        locked.push_newest(index as u32);
    }

    fn superseded(&mut self, block: u64, index: u64) {
        self.index.set_marking_of(index as u32, block);
        self.stale.push(index as u32);
    }

    fn uncommitted(&mut self, index: u64) {
        self.index.set_marking(index as u32);
        self.stale.push(index as u32);
        self.uncommitted.push(index as u32);
    }

    fn damaged(&mut self, index: u64, entry: &Entry) {
        self.index.set_aside(index as u32);
        self.aside.insert(index as u32, *entry);
    }

    fn duplicate(&mut self, block: u64, index: u64, entry: &Entry) {
        let mut locked = self.index.lock_of(block);
        let duplicates: Vec<u32> = locked.versions(block).map(|found| found.slot).collect();
        for slot in duplicates {
            locked.remove_age(slot);
            locked.set_state(slot, State::Damaged);
            self.aside.insert(slot, *entry);
        }
        locked.link(index as u32, block, State::Damaged, 0);
        self.aside.insert(index as u32, *entry);
    }
}

/// Reads all entries, on several threads if there are many.
pub(in crate::writecache) fn look(
    medium: &Medium,
    geometry: &Geometry,
    seq: u64,
    origin_bytes: u64,
    found: &mut Found,
    options: &OpenOptions,
) -> Result<Census> {
    let is_much = geometry.blocks >= SHARED_BLOCKS_MIN;
    let threads = if is_much { options.threads.clamp(1, options.stripes) } else { 1 };
    let mut parts: Vec<Part<'_>> =
        (0..threads).map(|nth| Part::of(&found.index, nth, threads)).collect();
    let census = walk(medium, geometry, seq, Some(origin_bytes), &mut parts, &options.progress)?;
    let parts = parts.into_iter().map(|part| (part.aside, part.stale, part.uncommitted));
    for (aside, stale, uncommitted) in parts.collect::<Vec<_>>() {
        found.aside.extend(aside);
        found.stale.extend(stale);
        found.uncommitted.extend(uncommitted);
    }
    Ok(census)
}
