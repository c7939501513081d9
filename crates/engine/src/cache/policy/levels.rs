//! Lists of entries by level, the structure below the kernel's policy: 64 lists, each from its
//! oldest to its newest entry. Entries are numbers; an entry is in one queue at most.

use super::super::bit_array::{BitArray, bits_of, ones};

/// Levels of a queue.
pub(super) const LEVELS: usize = 64;

/// No entry.
const NONE: u32 = u32::MAX;
const LEVEL_BITS: u32 = LEVELS.trailing_zeros();
const MARK_BITS: u32 = 2;

/// All entries, whichever queue they are in. Each is a few bits: from the lowest, a mark, its
/// level, its older and its newer neighbour, plus 1.
#[derive(Debug)]
pub(super) struct Entries {
    packed: BitArray,
    link_bits: u32,
}

impl Entries {
    pub(super) fn new(count: usize) -> Entries {
        let link_bits = bits_of(count as u64);
        assert!(link_bits <= 28, "entries have numbers of 28 bits");
        let packed = BitArray::new(count, MARK_BITS + LEVEL_BITS + 2 * link_bits);
        Entries { packed, link_bits }
    }

    #[inline]
    fn part(&self, entry: u32, at: u32, bits: u32) -> u64 {
        self.packed.get(entry as usize) >> at & ones(bits)
    }

    #[inline]
    fn put_part(&mut self, entry: u32, at: u32, bits: u32, new: u64) {
        self.packed.change(entry as usize, |all| all & !(ones(bits) << at) | new << at);
    }

    pub(super) fn level(&self, entry: u32) -> u8 {
        self.part(entry, MARK_BITS, LEVEL_BITS) as u8
    }

    /// Of an entry that is in no queue.
    pub(super) fn set_level(&mut self, entry: u32, level: u8) {
        self.put_part(entry, MARK_BITS, LEVEL_BITS, level.into());
    }

    /// Two bits that are the owner's: 0 at first.
    pub(super) fn mark(&self, entry: u32) -> u8 {
        self.part(entry, 0, MARK_BITS) as u8
    }

    pub(super) fn set_mark(&mut self, entry: u32, mark: u8) {
        self.put_part(entry, 0, MARK_BITS, mark.into());
    }

    fn older_at(&self) -> u32 {
        MARK_BITS + LEVEL_BITS
    }

    fn newer_at(&self) -> u32 {
        MARK_BITS + LEVEL_BITS + self.link_bits
    }

    /// Its older and its newer neighbour.
    fn neighbours(&self, entry: u32) -> (u32, u32) {
        let all = self.packed.get(entry as usize);
        let link = |at: u32| ((all >> at & ones(self.link_bits)) as u32).wrapping_sub(1);
        (link(self.older_at()), link(self.newer_at()))
    }

    fn put_neighbours(&mut self, entry: u32, older: u32, newer: u32) {
        let link = |link: u32| u64::from(link.wrapping_add(1));
        let both = link(newer) << self.link_bits | link(older);
        self.put_part(entry, self.older_at(), 2 * self.link_bits, both);
    }

    fn put_older(&mut self, entry: u32, older: u32) {
        self.put_part(entry, self.older_at(), self.link_bits, older.wrapping_add(1).into());
    }

    fn put_newer(&mut self, entry: u32, newer: u32) {
        self.put_part(entry, self.newer_at(), self.link_bits, newer.wrapping_add(1).into());
    }
}

#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
    len: usize,
}

/// A queue: the lists of all levels.
#[derive(Debug)]
pub(super) struct Queue {
    lists: [List; LEVELS],
    len: usize,
    /// How many levels at the top share `top_len` entries; the others share the rest.
    top: usize,
    top_len: usize,
}

impl Queue {
    /// All levels are to have equal shares.
    pub(super) fn new() -> Queue {
        Queue::with_top(0, 0)
    }

    pub(super) fn with_top(top: usize, top_len: usize) -> Queue {
        let list = List { oldest: NONE, newest: NONE, len: 0 };
        Queue { lists: [list; LEVELS], len: 0, top, top_len }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// As the newest of its level.
    pub(super) fn push(&mut self, entries: &mut Entries, entry: u32) {
        let newest = self.lists[usize::from(entries.level(entry))].newest;
        self.insert(entries, entry, newest, NONE);
    }

    /// As the oldest of its level.
    pub(super) fn push_oldest(&mut self, entries: &mut Entries, entry: u32) {
        let oldest = self.lists[usize::from(entries.level(entry))].oldest;
        self.insert(entries, entry, NONE, oldest);
    }

    /// Between two neighbours of its level.
    fn insert(&mut self, entries: &mut Entries, entry: u32, older: u32, newer: u32) {
        let list = &mut self.lists[usize::from(entries.level(entry))];
        entries.put_neighbours(entry, older, newer);
        match older {
            NONE => list.oldest = entry,
            older => entries.put_newer(older, entry),
        }
        match newer {
            NONE => list.newest = entry,
            newer => entries.put_older(newer, entry),
        }
        list.len += 1;
        self.len += 1;
    }

    /// Takes an entry of this queue out of it.
    pub(super) fn remove(&mut self, entries: &mut Entries, entry: u32) {
        let list = &mut self.lists[usize::from(entries.level(entry))];
        let (older, newer) = entries.neighbours(entry);
        match older {
            NONE => list.oldest = newer,
            older => entries.put_newer(older, newer),
        }
        match newer {
            NONE => list.newest = older,
            newer => entries.put_older(newer, older),
        }
        list.len -= 1;
        self.len -= 1;
    }

    /// The oldest entry of the lowest level below `below` that has any.
    pub(super) fn oldest(&self, below: usize) -> Option<u32> {
        self.lists[..below].iter().map(|list| list.oldest).find(|&oldest| oldest != NONE)
    }

    /// A use of an entry: it climbs by `jump` levels, and the oldest entry up there comes down in
    /// its place. With no jump it becomes the newest of its level.
    pub(super) fn requeue(&mut self, entries: &mut Entries, entry: u32, jump: u8) {
        let old = entries.level(entry);
        let new = (old + jump).min(LEVELS as u8 - 1);
        self.remove(entries, entry);
        let displaced = self.lists[usize::from(new)].oldest;
        if new != old && displaced != NONE {
            self.remove(entries, displaced);
            entries.set_level(displaced, old);
            self.push(entries, displaced);
        }
        entries.set_level(entry, new);
        self.push(entries, entry);
    }

    /// Gives each level its share of the entries again. The order of entries does not change.
    pub(super) fn redistribute(&mut self, entries: &mut Entries) {
        for level in 0..LEVELS - 1 {
            let share = self.share(level);
            while self.lists[level].len < share {
                let above = &self.lists[level + 1..];
                let Some(list) = above.iter().find(|list| list.len > 0) else { break };
                self.relevel(entries, list.oldest, level as u8);
            }
            while self.lists[level].len > share {
                self.relevel(entries, self.lists[level].newest, level as u8 + 1);
            }
        }
    }

    fn relevel(&mut self, entries: &mut Entries, entry: u32, level: u8) {
        self.remove(entries, entry);
        entries.set_level(entry, level);
        self.push(entries, entry);
    }

    fn share(&self, level: usize) -> usize {
        let bottom = LEVELS - self.top;
        let top_len = match self.top {
            0 => 0,
            _ => self.top_len.min(self.len),
        };
        let (total, levels, nth) = match level < bottom {
            true => (self.len - top_len, bottom, level),
            false => (top_len, self.top, level - bottom),
        };
        total / levels + usize::from(nth < total % levels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    /// The lists of a queue, checked both ways.
    fn content(queue: &Queue, entries: &Entries) -> Vec<Vec<u32>> {
        let walk = |list: &List, level: usize| {
            let (mut found, mut at, mut before) = (Vec::new(), list.oldest, NONE);
            while at != NONE {
                assert_eq!(entries.neighbours(at).0, before);
                assert_eq!(usize::from(entries.level(at)), level);
                found.push(at);
                (before, at) = (at, entries.neighbours(at).1);
            }
            assert_eq!((list.newest, list.len), (before, found.len()));
            found
        };
        queue.lists.iter().enumerate().map(|(level, list)| walk(list, level)).collect()
    }

    #[test]
    fn an_entry_keeps_its_level_and_its_mark_apart() {
        let mut entries = Entries::new(2);
        assert_eq!((entries.level(1) as usize, entries.mark(1)), (0, 0));
        for (level, mark) in [(63, 0), (0, 3), (37, 1), (26, 2)] {
            entries.set_mark(1, mark);
            entries.set_level(1, level);
            assert_eq!((entries.level(1), entries.mark(1)), (level, mark));
            assert_eq!(entries.neighbours(1), (NONE, NONE));
            entries.put_older(1, 0);
            entries.put_newer(1, 1);
            assert_eq!(entries.neighbours(1), (0, 1));
            assert_eq!((entries.level(1), entries.mark(1)), (level, mark));
            entries.put_older(1, NONE);
            entries.put_newer(1, NONE);
        }
        assert_eq!((entries.level(0), entries.mark(0)), (0, 0));
    }

    #[test]
    fn a_queue_is_what_plain_lists_would_be() {
        let mut prng = Prng::new(7);
        let (mut entries, mut queue) = (Entries::new(50), Queue::new());
        let mut model: Vec<Vec<u32>> = vec![Vec::new(); LEVELS];
        let place =
            |model: &Vec<Vec<u32>>, entry: u32| model.iter().position(|list| list.contains(&entry));
        for _ in 0..20_000 {
            let entry = prng.below(50) as u32;
            match place(&model, entry) {
                None => {
                    let level = prng.below(64) as u8;
                    entries.set_level(entry, level);
                    if prng.one_in(2) {
                        queue.push(&mut entries, entry);
                        model[usize::from(level)].push(entry);
                    } else {
                        queue.push_oldest(&mut entries, entry);
                        model[usize::from(level)].insert(0, entry);
                    }
                }
                Some(level) if prng.one_in(3) => {
                    queue.remove(&mut entries, entry);
                    model[level].retain(|other| *other != entry);
                }
                Some(level) => {
                    let jump = prng.below(5) as u8;
                    queue.requeue(&mut entries, entry, jump);
                    let new = (level + usize::from(jump)).min(LEVELS - 1);
                    model[level].retain(|other| *other != entry);
                    if new != level && !model[new].is_empty() {
                        let displaced = model[new].remove(0);
                        model[level].push(displaced);
                    }
                    model[new].push(entry);
                }
            }
            assert_eq!(content(&queue, &entries), model);
            assert_eq!(queue.oldest(LEVELS), model.iter().flatten().next().copied());
        }
    }

    #[test]
    fn levels_get_equal_shares_and_entries_keep_their_order() {
        let (mut entries, mut queue) = (Entries::new(1000), Queue::new());
        for entry in 0..1000 {
            entries.set_level(entry, 63);
            queue.push(&mut entries, entry);
        }
        queue.redistribute(&mut entries);
        let lists = content(&queue, &entries);
        assert!(lists.iter().all(|list| list.len() == 15 || list.len() == 16));
        assert_eq!(lists.concat(), (0..1000).collect::<Vec<_>>(), "the oldest are lowest");
        let mut top = Queue::with_top(8, 80);
        for entry in 0..1000 {
            queue.remove(&mut entries, entry);
            entries.set_level(entry, 0);
            top.push(&mut entries, entry);
        }
        top.redistribute(&mut entries);
        let lists = content(&top, &entries);
        assert!(lists[56..].iter().all(|list| list.len() == 10));
        assert!(lists[..56].iter().all(|list| list.len() == 16 || list.len() == 17));
    }
}
