//! Lists of entries by level, the structure below the kernel's policy: 64 lists, each from its
//! oldest to its newest entry. Entries are numbers; an entry is in one queue at most.

/// Levels of a queue.
pub(super) const LEVELS: usize = 64;

const NONE: u32 = u32::MAX;

/// The links of all entries, whichever queue they are in.
#[derive(Debug)]
pub(super) struct Entries {
    older: Vec<u32>,
    newer: Vec<u32>,
    level: Vec<u8>,
}

impl Entries {
    pub(super) fn new(count: usize) -> Entries {
        Entries { older: vec![NONE; count], newer: vec![NONE; count], level: vec![0; count] }
    }

    pub(super) fn level(&self, entry: u32) -> u8 {
        self.level[entry as usize]
    }

    /// Of an entry that is in no queue.
    pub(super) fn set_level(&mut self, entry: u32, level: u8) {
        self.level[entry as usize] = level;
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
        (entries.older[entry as usize], entries.newer[entry as usize]) = (older, newer);
        match older {
            NONE => list.oldest = entry,
            older => entries.newer[older as usize] = entry,
        }
        match newer {
            NONE => list.newest = entry,
            newer => entries.older[newer as usize] = entry,
        }
        list.len += 1;
        self.len += 1;
    }

    /// Takes an entry of this queue out of it.
    pub(super) fn remove(&mut self, entries: &mut Entries, entry: u32) {
        let list = &mut self.lists[usize::from(entries.level(entry))];
        let (older, newer) = (entries.older[entry as usize], entries.newer[entry as usize]);
        match older {
            NONE => list.oldest = newer,
            older => entries.newer[older as usize] = newer,
        }
        match newer {
            NONE => list.newest = older,
            newer => entries.older[newer as usize] = older,
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

    /// Gives each level its share of the entries again. The order of entries stays.
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
                assert_eq!(entries.older[at as usize], before);
                assert_eq!(usize::from(entries.level(at)), level);
                found.push(at);
                (before, at) = (at, entries.newer[at as usize]);
            }
            assert_eq!((list.newest, list.len), (before, found.len()));
            found
        };
        queue.lists.iter().enumerate().map(|(level, list)| walk(list, level)).collect()
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
