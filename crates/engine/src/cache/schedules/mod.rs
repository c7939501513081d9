//! Test cases for the tests of schedules (`crate::schedules` runs them): a few threads on a cache
//! of one to three slots, judged by the data that clients may see and by the final data on the
//! origin.
//!
//! `fixture` is the cache that the test cases need, `cases` has the test cases.

mod cases;
mod fixture;

use super::Cache;
use crate::schedules::Case;

/// All of them.
pub(crate) const CASES: &[Case] = &[
    Case { name: "swap", play: cases::swap, times: 1 },
    Case { name: "evict", play: cases::evict, times: 2 },
    Case { name: "part", play: cases::part, times: 2 },
    Case { name: "bypass", play: cases::bypass, times: 2 },
    Case { name: "copied", play: cases::copied, times: 2 },
    Case { name: "erase", play: cases::erase, times: 1 },
    Case { name: "durable", play: cases::durable, times: 2 },
    Case { name: "still", play: cases::still, times: 2 },
];

impl Cache {
    /// The policy wants to promote a block. Returns whether the block is cached, or has a slot.
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

    /// The errors in the accounts, if there are any. No thread is at work.
    fn audit(&self, count: u64) -> Result<(), String> {
        let blocks = self.blocks();
        if let Some(block) = (0..count).find(|block| !blocks.in_flight.is_quiet(*block)) {
            let mover = blocks.in_flight.mover(block);
            // A commit frees the slot of a dropped block, and no request waits for it.
            if mover != Some(super::in_flight::Mover::Leaving) {
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
