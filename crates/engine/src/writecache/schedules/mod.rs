//! Test cases for the tests of schedules (`crate::schedules` runs them): a few threads on a cache
//! of a few slots, in both modes, judged by the data that clients may see and by the accounts of
//! all slots.
//!
//! `fixture` is the cache that the test cases need. `whole` has test cases of a whole cache with
//! its device and in-process callers, `parts` has short ones with one topic each.

mod fixture;
mod parts;
mod whole;

use super::Writecache;
use super::index::State;
use crate::schedules::Case;

/// All test cases.
pub(crate) const CASES: &[Case] = &[
    Case { name: "pool", play: parts::pool, times: 2 },
    Case { name: "blocks", play: whole::blocks, times: 1 },
    Case { name: "recycle", play: whole::recycle, times: 1 },
    Case { name: "wipe", play: whole::wipe, times: 1 },
    Case { name: "flushes", play: parts::flushes, times: 1 },
    Case { name: "reread", play: parts::reread, times: 2 },
    Case { name: "single", play: parts::single, times: 1 },
    Case { name: "free", play: parts::free, times: 2 },
    Case { name: "zeroed", play: parts::zeroed, times: 1 },
    Case { name: "awaited", play: parts::awaited, times: 4 },
    Case { name: "overtaken", play: parts::overtaken, times: 2 },
    Case { name: "crowded", play: whole::crowded, times: 4 },
    Case { name: "group", play: whole::group, times: 1 },
    Case { name: "handover", play: whole::handover, times: 1 },
    Case { name: "park", play: whole::park, times: 1 },
    Case { name: "pause", play: whole::pause, times: 1 },
    Case { name: "talk", play: whole::talk, times: 1 },
    Case { name: "loss", play: whole::loss, times: 2 },
    Case { name: "death", play: whole::death, times: 2 },
];

impl Writecache {
    /// Checks the accounts, while no thread is at work. Returns their errors.
    fn audit(&self) -> Result<(), String> {
        let mut places = vec![0; self.index.slots() as usize];
        let (free, is_counted) = self.pool.audit();
        if !is_counted {
            return Err(format!("{} slots count as free", self.pool.count()));
        }
        let (mut superseded, dropped) = self.marks.audit();
        superseded.extend(self.commits.audit().1);
        if self.marks.waiting() != superseded.len() + dropped.len() {
            return Err(format!("{} marks are counted", self.marks.waiting()));
        }
        let mut chained = 0;
        let mut dirty = 0;
        for stripe in 0..self.index.stripes() {
            let (slots, aged) = self.index.lock(stripe).audit();
            let filling = self.lists.filling_of(stripe);
            let is_filled = self.lists.filled_stripes() >> stripe & 1 == 1;
            if is_filled != (self.lists.memory().len(stripe, filling) > 0) {
                return Err(format!("stripe {stripe} counts as filled: {is_filled}"));
            }
            chained += slots.len();
            for &slot in &slots {
                places[slot as usize] += 1;
                let state = self.index.word(slot).state();
                self.audit_chained(stripe, slot, dropped.contains(&slot))?;
                let is_aged = matches!(state, State::OpenA | State::OpenB | State::Live)
                    || state.is_overwritten();
                if aged.contains(&slot) != is_aged {
                    return Err(format!("slot {slot} is {state:?}, in the age list: {}", !is_aged));
                }
                dirty += u32::from(is_aged || state == State::Cleaning);
            }
        }
        if (self.index.linked() as usize, self.index.dirty()) != (chained, dirty) {
            return Err(format!("{} dirty slots are counted, {dirty} are", self.index.dirty()));
        }
        for (slots, state) in [(&free, State::Free), (&superseded, State::Marking)] {
            for &slot in slots {
                places[slot as usize] += 1;
                if self.index.word(slot).state() != state {
                    let found = self.index.word(slot).state();
                    return Err(format!("slot {slot} is {found:?}, not {state:?}"));
                }
            }
        }
        if let Some(slot) = places.iter().position(|count| *count != 1) {
            return Err(format!("slot {slot} is in {} places", places[slot]));
        }
        self.audit_rest()
    }

    /// A slot in a chain: it belongs to its stripe, and to a list if its state requires one.
    fn audit_chained(&self, stripe: usize, slot: u32, is_dropped: bool) -> Result<(), String> {
        let word = self.index.word(slot);
        let (block, state) = (word.block(), word.state());
        if self.index.stripe_of(block) != stripe {
            return Err(format!("slot {slot} is in another stripe's chain"));
        }
        if is_dropped != (state == State::Dropped) {
            return Err(format!("slot {slot} is {state:?}, to be marked: {is_dropped}"));
        }
        let is_held =
            |list: usize| self.lists.memory().all(stripe, list).any(|held| held == (block, slot));
        for list in 0..2 {
            let listed = [State::open_in(list), State::overwritten_in(list)];
            if listed.contains(&state) && !is_held(list) {
                return Err(format!("slot {slot} is {state:?}, but not in the list"));
            }
        }
        let current = |state: State| {
            state.is_overwritten()
                || matches!(state, State::Live | State::Cleaning | State::Cleaned)
        };
        let versions: Vec<State> =
            self.index.lock(stripe).versions(block).map(|found| found.word.state()).collect();
        let is_ordered = versions.is_sorted_by_key(|state| match state {
            state if state.is_uncommitted() => 0,
            state if current(*state) => 1,
            _ => 2,
        });
        if !is_ordered || versions.iter().filter(|state| current(**state)).count() > 1 {
            return Err(format!("block {block} has {versions:?}"));
        }
        Ok(())
    }

    /// No promise is open, and no work is in progress.
    fn audit_rest(&self) -> Result<(), String> {
        let jobs = &self.jobs;
        let waiting = [
            jobs.reads.count(),
            jobs.writes.count(),
            jobs.zeroes.count(),
            jobs.flushes.count(),
            jobs.zeroing.ranges().len(),
            self.lists.promised(),
        ];
        if waiting != [0; 6] {
            return Err(format!("reads, writes, zeroes, flushes, ranges, promises: {waiting:?}"));
        }
        if !self.commits.audit().0 {
            return Err("a round is under way".to_string());
        }
        Ok(())
    }

    /// Whether the newest version of a block is durable, in this cache or on the origin.
    fn is_committed(&self, block: u64) -> bool {
        let newest = self.index.lock_of(block).newest(block);
        newest.is_none_or(|found| !found.word.state().is_unflushed())
    }

    /// Whether no slot waits for a commit or for a mark.
    fn is_settled(&self) -> bool {
        !self.has_open() && self.marks.waiting() == 0
    }
}
