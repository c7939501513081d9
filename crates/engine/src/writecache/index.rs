//! The index: the block of each slot, and the state of all slots, in 24 bytes each.
//!
//! A *slot* is a data block of the cache with its entry. Blocks of the origin belong to stripes by
//! region; a stripe has a lock, chains of slots by block (newest version first), and its slots by
//! age (the age list). Free slots in the pool belong to no stripe.
//!
//! 1. Links and states of slots in a chain change under their stripe's lock only.
//! 2. A slot holds its block from the moment it is linked until it is retired; in mode `p` its
//!    content does not change either. Retiring gives the slot another generation, so a thread that
//!    copied from it without a lock sees afterwards whether the copy is valid.
//! 3. A chain has, from its head on, for each block: at most one uncommitted slot of each list, at
//!    most one of `Live`, overwritten, `Cleaning`, `Cleaned` (or damaged ones), then `Outdated` and
//!    `Dropped`.

use super::regions::Regions;
use crate::base::prefetch::prefetch;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};

pub use super::regions::REGION_BYTES;
pub use super::word::{EPOCHS, State, Word};

/// No slot.
pub const NONE: u32 = u32::MAX;

/// Chains that share a line of memory.
const GROUP: u64 = 16;

/// This many neighbouring slots are usually in the same lines of memory.
const NEAR_STEP: usize = 4;

/// A place in the cache, as a lookup found it.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// The slot.
    pub slot: u32,
    /// The state word at the time of the lookup.
    pub word: Word,
}

#[derive(Debug)]
#[repr(align(128))]
struct Stripe {
    state: Mutex<Ends>,
    /// The first slot of each chain. Changes under the lock.
    buckets: Box<[AtomicU32]>,
    /// The number of slots in chains. Changed under the lock, read without it.
    linked: AtomicU32,
    /// Slots in chains that are dirty: neither dropped nor being marked.
    dirty: AtomicU32,
}

#[derive(Debug)]
struct Ends {
    oldest: u32,
    newest: u32,
}

/// A slot's neighbours; they share a line of memory.
#[derive(Debug)]
struct Links {
    /// The next one in its chain.
    chain: AtomicU32,
    /// Age list: the older and the newer neighbour. A slot that is in no list is its own newer
    /// neighbour.
    older: AtomicU32,
    newer: AtomicU32,
}

/// All slots and chains.
#[derive(Debug)]
pub struct Index {
    stripes: Box<[Stripe]>,
    words: Box<[AtomicU64]>,
    links: Box<[Links]>,
    /// The regions that may have slots in chains.
    regions: Regions,
}

fn none() -> AtomicU32 {
    AtomicU32::new(NONE)
}

impl Index {
    /// An index of `slots` free slots of `block_bytes` each, for an origin of `origin_bytes`.
    pub fn new(slots: u32, block_bytes: u32, stripes: usize, origin_bytes: u64) -> Index {
        let count = slots as usize;
        // Seven buckets for eight slots keep all of it within 24 bytes a slot.
        let groups = (count * 7 / 8 / stripes / GROUP as usize).max(1);
        let stripe = |_| Stripe {
            state: Mutex::new(Ends { oldest: NONE, newest: NONE }),
            buckets: (0..groups * GROUP as usize).map(|_| none()).collect(),
            linked: AtomicU32::new(0),
            dirty: AtomicU32::new(0),
        };
        Index {
            stripes: (0..stripes).map(stripe).collect(),
            words: (0..count).map(|_| AtomicU64::new(0)).collect(),
            links: (0..slots)
                .map(|slot| Links { chain: none(), older: none(), newer: AtomicU32::new(slot) })
                .collect(),
            regions: Regions::new(origin_bytes, block_bytes),
        }
    }

    /// Bytes of memory that the index takes.
    pub fn memory_bytes(&self) -> u64 {
        let buckets = |stripe: &Stripe| stripe.buckets.len() as u64 * 4;
        let slots = self.words.len() as u64 * 20;
        slots + self.stripes.iter().map(buckets).sum::<u64>() + self.regions.memory_bytes()
    }

    /// How many slots there are.
    pub fn slots(&self) -> u32 {
        self.words.len() as u32
    }

    /// How many stripes there are.
    pub fn stripes(&self) -> usize {
        self.stripes.len()
    }

    /// The stripe of a block.
    pub fn stripe_of(&self, block: u64) -> usize {
        // Origins of 64 TiB have 2^26 regions: a short division, which takes half the time.
        (self.regions.of(block) as u32 % self.stripes.len() as u32) as usize
    }

    /// The first block after the region of `block`.
    pub fn region_end(&self, block: u64) -> u64 {
        self.regions.end(block)
    }

    /// See [`Regions::next_used`].
    pub fn next_used(&self, block: u64, end: u64) -> u64 {
        self.regions.next_used(block, end)
    }

    /// Takes a stripe's lock. Hold it only briefly.
    pub fn lock(&self, stripe: usize) -> Locked<'_> {
        Locked { index: self, stripe, ends: lock(&self.stripes[stripe].state) }
    }

    /// Takes the lock of a block's stripe.
    pub fn lock_of(&self, block: u64) -> Locked<'_> {
        self.lock(self.stripe_of(block))
    }

    /// Prefetches the memory that a write of the blocks from `first` on to `slots` will change,
    /// while its data is copied: its own slots, and the heads of its chains.
    pub fn touch(&self, first: u64, slots: &[u32]) {
        let buckets = &self.stripes[self.stripe_of(first)].buckets;
        for (nth, &slot) in slots.iter().enumerate().step_by(NEAR_STEP) {
            prefetch(&buckets[bucket(buckets, first + nth as u64)]);
            self.bring_slot_near(slot);
        }
    }

    /// Prefetches the older versions of `count` blocks while the copy is waited for. The chains
    /// should be in the CPU's cache: a load that has to wait holds up every store after it.
    pub fn prefetch_older(&self, first: u64, count: usize) {
        let buckets = &self.stripes[self.stripe_of(first)].buckets;
        let mut last = NONE;
        for block in first..first + count as u64 {
            let older = get(&buckets[bucket(buckets, block)]);
            // Neighbours share lines of memory.
            if older != NONE
                && (last == NONE || older / NEAR_STEP as u32 != last / NEAR_STEP as u32)
            {
                self.bring_slot_near(older);
                last = older;
            }
        }
    }

    fn bring_slot_near(&self, slot: u32) {
        prefetch(&self.words[slot as usize]);
        prefetch(&self.links[slot as usize]);
    }

    /// The present state word of a slot.
    pub fn word(&self, slot: u32) -> Word {
        Word(self.words[slot as usize].load(Ordering::Acquire))
    }

    /// Whether a slot still has the content that it had when it was found. Called after copying.
    pub fn is_still(&self, found: Found) -> bool {
        crate::sync::atomic::fence(Ordering::Acquire);
        self.word(found.slot).is_same_content(found.word)
    }

    /// Sets aside a slot whose entry cannot be trusted.
    pub fn set_aside(&self, slot: u32) {
        self.set_word(slot, self.word(slot).with_state(State::Aside));
    }

    /// Marks a slot in no chain, whose entry must be marked free before the slot is used.
    pub fn set_marking(&self, slot: u32) {
        self.set_word(slot, self.word(slot).with_state(State::Marking));
    }

    /// The same, for a slot that has never been in a chain: its entry names `block`.
    pub fn set_marking_of(&self, slot: u32, block: u64) {
        let word = self.word(slot);
        self.set_word(slot, Word::new(block, word.generation(), State::Marking, word.epoch()));
    }

    /// Frees a slot that is in no chain: copies of it made before are not valid any more.
    pub fn retire(&self, slot: u32) {
        let word = self.word(slot);
        self.set_word(slot, Word::new(0, word.generation() + 1, State::Free, 0));
    }

    /// Slots in chains.
    pub fn linked(&self) -> u32 {
        self.stripes.iter().map(|stripe| stripe.linked.load(Ordering::Relaxed)).sum()
    }

    /// Slots with data that the origin lacks, including older versions.
    pub fn dirty(&self) -> u32 {
        self.stripes.iter().map(|stripe| stripe.dirty.load(Ordering::Relaxed)).sum()
    }

    /// The block of a slot with data that the origin lacks.
    pub fn dirty_block(&self, slot: u32) -> Option<u64> {
        let word = self.word(slot);
        let is_linked = !matches!(word.state(), State::Free | State::Aside);
        (is_linked && is_dirty(word.state())).then(|| word.block())
    }

    /// The first version of a block in a chain, from `slot` on.
    fn find(&self, mut slot: u32, block: u64) -> Option<Found> {
        while slot != NONE {
            let word = self.word(slot);
            if word.block() == block {
                return Some(Found { slot, word });
            }
            slot = get(&self.links(slot).chain);
        }
        None
    }

    fn links(&self, slot: u32) -> &Links {
        &self.links[slot as usize]
    }

    fn set_word(&self, slot: u32, word: Word) {
        self.words[slot as usize].store(word.0, Ordering::Release);
    }
}

fn get(link: &AtomicU32) -> u32 {
    link.load(Ordering::Relaxed)
}

fn set(link: &AtomicU32, to: u32) {
    link.store(to, Ordering::Relaxed);
}

/// The chain of a block. Neighbouring blocks have neighbouring chains, which share a line of
/// memory.
fn bucket(buckets: &[AtomicU32], block: u64) -> usize {
    let groups = buckets.len() as u64 / GROUP;
    let mixed = (block / GROUP).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    (((mixed * groups) >> 32) * GROUP + block % GROUP) as usize
}

/// A stripe whose lock is held.
#[derive(Debug)]
pub struct Locked<'a> {
    index: &'a Index,
    stripe: usize,
    ends: MutexGuard<'a, Ends>,
}

fn is_dirty(state: State) -> bool {
    use State::{Cleaning, Live, OpenA, OpenB};
    state.is_overwritten() || matches!(state, OpenA | OpenB | Live | Cleaning)
}

impl<'a> Locked<'a> {
    /// Which stripe it is.
    pub fn stripe(&self) -> usize {
        self.stripe
    }

    fn buckets(&self) -> &'a [AtomicU32] {
        &self.index.stripes[self.stripe].buckets
    }

    /// The versions of a block, newest first.
    pub fn versions(&self, block: u64) -> impl Iterator<Item = Found> + use<'a> {
        let index = self.index;
        let buckets = self.buckets();
        let mut next = get(&buckets[bucket(buckets, block)]);
        std::iter::from_fn(move || {
            let found = index.find(next, block)?;
            next = get(&index.links(found.slot).chain);
            Some(found)
        })
    }

    /// The newest version of a block.
    pub fn newest(&self, block: u64) -> Option<Found> {
        self.versions(block).next()
    }

    /// The next version of a block after `slot` in its chain, and the slot before that one.
    pub fn next_older(&self, block: u64, slot: u32) -> Option<(u32, Found)> {
        let mut before = slot;
        loop {
            let slot = get(&self.index.links(before).chain);
            if slot == NONE {
                return None;
            }
            let word = self.index.word(slot);
            if word.block() == block {
                return Some((before, Found { slot, word }));
            }
            before = slot;
        }
    }

    /// The slots in chains, and those in the age list.
    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn audit(&self) -> (Vec<u32>, Vec<u32>) {
        let some = |slot: u32| (slot != NONE).then_some(slot);
        let next = |slot: &u32| some(get(&self.index.links(*slot).chain));
        let follow = |head: u32| std::iter::successors(some(head), next);
        let heads = self.buckets().iter().map(|head| head.load(Ordering::SeqCst));
        let aged = std::iter::successors(self.oldest(), |slot| self.next_newer(*slot)).collect();
        (heads.flat_map(follow).collect(), aged)
    }

    /// Makes a slot that is in no chain the newest version of `block`.
    pub fn link(&mut self, slot: u32, block: u64, state: State, epoch: u64) {
        let buckets = self.buckets();
        self.lead(&buckets[bucket(buckets, block)], slot, block, state, epoch);
        self.index.regions.note(block);
        self.count(1, i32::from(is_dirty(state)));
    }

    /// Makes `slots`, which are in no chain, the newest versions of the blocks from `first` on, and
    /// the newest slots in the age list. `meet` gets the previous newest version of each block.
    pub fn link_run(
        &mut self,
        first: u64,
        slots: &[u32],
        (state, epoch): (State, u64),
        mut meet: impl FnMut(&mut Self, Found),
    ) {
        let buckets = self.buckets();
        self.index.regions.note(first);
        for (block, &slot) in (first..).zip(slots) {
            let head = &buckets[bucket(buckets, block)];
            if let Some(older) = self.index.find(get(head), block) {
                meet(self, older);
            }
            self.lead(head, slot, block, state, epoch);
            self.push_newest(slot);
        }
        let count = slots.len() as i32;
        self.count(count, if is_dirty(state) { count } else { 0 });
    }

    /// The region of a block, which belongs to this stripe, is free of slots.
    pub fn forget_region(&self, block: u64) {
        self.index.regions.forget(block);
    }

    fn lead(&self, head: &AtomicU32, slot: u32, block: u64, state: State, epoch: u64) {
        let index = self.index;
        let generation = index.word(slot).generation();
        index.set_word(slot, Word::new(block, generation, state, epoch));
        set(&index.links(slot).chain, get(head));
        set(head, slot);
    }

    /// Prefetches what taking a slot out of the age list changes.
    pub fn bring_age_near(&self, slot: u32) {
        let links = self.index.links(slot);
        for neighbour in [get(&links.older), get(&links.newer)] {
            if neighbour != NONE {
                prefetch(self.index.links(neighbour));
            }
        }
    }

    /// Takes a slot out of its chain, and out of the age list.
    pub fn unlink(&mut self, slot: u32) {
        let index = self.index;
        let buckets = self.buckets();
        let word = index.word(slot);
        let mut link = &buckets[bucket(buckets, word.block())];
        while get(link) != slot {
            assert!(get(link) != NONE, "a slot is in the chain of its block");
            link = &index.links(get(link)).chain;
        }
        self.cut(link, Found { slot, word });
    }

    /// The same, if the previous slot in the chain is known; its entry must be marked free then.
    pub fn supersede_behind(&mut self, before: u32, found: Found) {
        let link = &self.index.links(before).chain;
        assert!(get(link) == found.slot, "they are neighbours in a chain");
        self.cut(link, found);
        self.index.set_word(found.slot, found.word.with_state(State::Marking));
    }

    /// Takes out the slot that `link` leads to.
    fn cut(&mut self, link: &AtomicU32, Found { slot, word }: Found) {
        self.remove_age(slot);
        let chain = &self.index.links(slot).chain;
        set(link, get(chain));
        set(chain, NONE);
        self.count(-1, -i32::from(is_dirty(word.state())));
    }

    /// Makes a slot that holds `block` in `state`, not committed or not flushed, live. Returns
    /// whether it was in this state.
    pub fn make_live(&mut self, slot: u32, block: u64, state: State) -> bool {
        let word = self.index.word(slot);
        let is_it = word.is_of(block, state);
        if is_it {
            // It stays dirty.
            self.index.set_word(slot, word.with_state(State::Live));
        }
        is_it
    }

    /// A slot whose content is about to be overwritten becomes the newest in the age list.
    pub fn begin_overwrite(&mut self, slot: u32, epoch: u64) {
        let word = self.index.word(slot);
        self.remove_age(slot);
        self.push_newest(slot);
        // It stays dirty.
        let word = Word::new(word.block(), word.generation(), State::Overwriting, epoch);
        self.index.set_word(slot, word);
    }

    /// Sets the state of a slot in a chain.
    pub fn set_state(&mut self, slot: u32, state: State) {
        let word = self.index.word(slot);
        let change = i32::from(is_dirty(state)) - i32::from(is_dirty(word.state()));
        self.count(0, change);
        self.index.set_word(slot, word.with_state(state));
    }

    /// The lock is held, so this needs no atomic addition.
    fn count(&self, linked: i32, dirty: i32) {
        let stripe = &self.index.stripes[self.stripe];
        for (counter, change) in [(&stripe.linked, linked), (&stripe.dirty, dirty)] {
            if change != 0 {
                let now = counter.load(Ordering::Relaxed).wrapping_add_signed(change);
                counter.store(now, Ordering::Release);
            }
        }
    }

    /// The oldest slot in the age list.
    pub fn oldest(&self) -> Option<u32> {
        (self.ends.oldest != NONE).then_some(self.ends.oldest)
    }

    /// The slot that follows `slot` in the age list.
    pub fn next_newer(&self, slot: u32) -> Option<u32> {
        let newer = get(&self.index.links(slot).newer);
        (newer != NONE && newer != slot).then_some(newer)
    }

    /// Puts a slot at the new end of the age list.
    pub fn push_newest(&mut self, slot: u32) {
        let index = self.index;
        let before = self.ends.newest;
        let own = index.links(slot);
        set(&own.older, before);
        set(&own.newer, NONE);
        match before {
            NONE => self.ends.oldest = slot,
            _ => set(&index.links(before).newer, slot),
        }
        self.ends.newest = slot;
    }

    /// Puts a slot at the old end of the age list.
    pub fn push_oldest(&mut self, slot: u32) {
        let index = self.index;
        let behind = self.ends.oldest;
        set(&index.links(slot).older, NONE);
        set(&index.links(slot).newer, behind);
        match behind {
            NONE => self.ends.newest = slot,
            _ => set(&index.links(behind).older, slot),
        }
        self.ends.oldest = slot;
    }

    /// Takes a slot out of the age list, if it is in it.
    pub fn remove_age(&mut self, slot: u32) {
        let index = self.index;
        let links = index.links(slot);
        let (older, newer) = (get(&links.older), get(&links.newer));
        if newer == slot {
            return;
        }
        match older {
            NONE => self.ends.oldest = newer,
            _ => set(&index.links(older).newer, newer),
        }
        match newer {
            NONE => self.ends.newest = older,
            _ => set(&index.links(newer).older, older),
        }
        set(&links.newer, slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;
    use std::collections::HashMap;

    #[test]
    fn a_slot_takes_at_most_24_bytes_with_its_bit_in_the_pool() {
        for slots in [1 << 16, 100_000, (1 << 17) + 1] {
            let index = Index::new(slots, 4096, 8, 1 << 24);
            assert!(index.memory_bytes() + u64::from(slots).div_ceil(8) <= u64::from(slots) * 24);
        }
    }

    #[test]
    fn random_links_against_a_map() {
        let index = Index::new(64, 512, 3, 1 << 24);
        let mut prng = Prng::new(7);
        let mut model: HashMap<u64, Vec<u32>> = HashMap::new();
        let mut age: Vec<Vec<u32>> = vec![Vec::new(); 3];
        let mut free: Vec<u32> = (0..64).collect();
        for _ in 0..20_000 {
            let block = prng.below(3) * 2048 + prng.below(6);
            let stripe = index.stripe_of(block);
            let mut locked = index.lock_of(block);
            if prng.one_in(2) {
                let Some(slot) = free.pop() else { continue };
                locked.link(slot, block, State::Live, 0);
                let is_newest = prng.one_in(2);
                if is_newest {
                    locked.push_newest(slot);
                    age[stripe].push(slot);
                } else {
                    locked.push_oldest(slot);
                    age[stripe].insert(0, slot);
                }
                model.entry(block).or_default().insert(0, slot);
                drop(locked);
            } else if let Some(slots) = model.get_mut(&block).filter(|slots| !slots.is_empty()) {
                let slot = slots.remove(prng.below(slots.len() as u64) as usize);
                if prng.one_in(2) {
                    locked.remove_age(slot);
                }
                locked.unlink(slot);
                drop(locked);
                index.retire(slot);
                free.push(slot);
                age[stripe].retain(|other| *other != slot);
            } else {
                drop(locked);
            }
            let locked = index.lock_of(block);
            let found: Vec<u32> = locked.versions(block).map(|found| found.slot).collect();
            assert_eq!(found, model.get(&block).cloned().unwrap_or_default());
            let oldest = std::iter::successors(locked.oldest(), |slot| locked.next_newer(*slot));
            assert_eq!(oldest.collect::<Vec<u32>>(), age[stripe]);
            drop(locked);
            assert_eq!(index.linked() as usize, 64 - free.len());
            assert_eq!(index.dirty(), index.linked());
        }
    }
}
