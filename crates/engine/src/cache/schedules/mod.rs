//! Stories for the tests of schedules (`crate::schedules` plays them): a few threads on a cache of
//! one to three slots, judged by what clients may see and by what the origin has in the end.
//!
//! `world` is the cache that stories need, `stories` has the stories.

mod stories;
mod world;

use super::Cache;
use crate::schedules::Story;

/// All of them.
pub(crate) const STORIES: &[Story] = &[
    Story { name: "swap", play: stories::swap, times: 1 },
    Story { name: "evict", play: stories::evict, times: 2 },
    Story { name: "part", play: stories::part, times: 2 },
    Story { name: "bypass", play: stories::bypass, times: 2 },
    Story { name: "copied", play: stories::copied, times: 2 },
    Story { name: "erase", play: stories::erase, times: 1 },
    Story { name: "durable", play: stories::durable, times: 2 },
    Story { name: "still", play: stories::still, times: 2 },
];

impl Cache {
    /// The policy wants to have a block. Whether that is there, or has a slot.
    fn wish(&self, block: u64) -> bool {
        let mut blocks = self.blocks();
        let (is_quiet, is_there) = (blocks.is_free(block), blocks.slots.find(block).is_some());
        let has_slot = is_there
            || blocks.slots.partials.slot(block).is_some()
            || is_quiet && blocks.begin_in_part(block).is_some();
        if blocks.slots.partials.slot(block).is_some() {
            blocks.slots.partials.wish(block, 0..u32::MAX);
        }
        drop(blocks);
        self.events.work();
        has_slot
    }

    /// What is wrong with the accounts, if anything. Nobody is at work.
    fn audit(&self, count: u64) -> Result<(), String> {
        let blocks = self.blocks();
        if let Some(block) = (0..count).find(|block| !blocks.traffic.is_quiet(*block)) {
            let mover = blocks.traffic.mover(block);
            // Who leaves is let go by a commit, for which nobody waits.
            if mover != Some(super::traffic::Mover::Leaving) {
                return Err(format!("block {block} is moved by {mover:?}"));
            }
        }
        let slots = &blocks.slots;
        let all = 0..slots.count();
        for slot in all.clone() {
            let found = slots.block(slot).and_then(|block| slots.find(block));
            if slots.block(slot).is_some() && found != Some(slot) {
                return Err(format!("slot {slot} has {:?}, and {found:?}", slots.block(slot)));
            }
        }
        let mapped = all.filter(|slot| slots.block(*slot).is_some()).count() as u32;
        let leaving = blocks.changes.leaving.len() as u32;
        let parts = slots.partials.count() as u32;
        if mapped + slots.free() + leaving + parts != slots.count() {
            let what = format!("{mapped} slots in use, {parts} in part, {leaving} leave");
            return Err(format!("{what}, {} free", slots.free()));
        }
        match slots.dirty().ones() == u64::from(slots.dirty_count()) {
            true => Ok(()),
            false => Err(format!("{} dirty slots are counted", slots.dirty_count())),
        }
    }
}
