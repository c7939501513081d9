//! Lists of entries by level, the structure below the kernel's policy: 64 lists, each from its
//! oldest to its newest entry. Entries are numbers; an entry is in one queue at most.

/// Levels of a queue.
pub(super) const LEVELS: usize = 64;

/// Entries have numbers of 28 bits; this one is of none.
const NONE: u32 = (1 << LINK_BITS) - 1;
const LINK_BITS: u32 = 28;

/// Eight bytes for an entry: its older and its newer neighbour, and four bits above each. Those of
/// the older one are the level's lower bits; above the newer one are a mark and the level's upper
/// two.
#[derive(Clone, Copy, Debug)]
struct Entry {
    older: u32,
    newer: u32,
}

/// All entries, whichever queue they are in.
#[derive(Debug)]
pub(super) struct Entries(Box<[Entry]>);

impl Entries {
    pub(super) fn new(count: usize) -> Entries {
        assert!(count <= NONE as usize, "entries have numbers of 28 bits");
        Entries(vec![Entry { older: NONE, newer: NONE }; count].into_boxed_slice())
    }

    pub(super) fn level(&self, entry: u32) -> u8 {
        let Entry { older, newer } = self.0[entry as usize];
        (older >> LINK_BITS | (newer >> LINK_BITS & 3) << 4) as u8
    }

    /// Of an entry that is in no queue.
    pub(super) fn set_level(&mut self, entry: u32, level: u8) {
        let level = u32::from(level);
        let Entry { older, newer } = &mut self.0[entry as usize];
        *older = *older & NONE | (level & 15) << LINK_BITS;
        *newer = *newer & !(3 << LINK_BITS) | (level >> 4) << LINK_BITS;
    }

    /// Two bits that are the owner's: 0 at first.
    pub(super) fn mark(&self, entry: u32) -> u8 {
        (self.0[entry as usize].newer >> (LINK_BITS + 2)) as u8
    }

    pub(super) fn set_mark(&mut self, entry: u32, mark: u8) {
        let newer = &mut self.0[entry as usize].newer;
        *newer = *newer & !(3 << (LINK_BITS + 2)) | u32::from(mark) << (LINK_BITS + 2);
    }

    fn older(&self, entry: u32) -> u32 {
        self.0[entry as usize].older & NONE
    }

    fn newer(&self, entry: u32) -> u32 {
        self.0[entry as usize].newer & NONE
    }

    fn put_older(&mut self, entry: u32, older: u32) {
        let link = &mut self.0[entry as usize].older;
        *link = *link & !NONE | older;
    }

    fn put_newer(&mut self, entry: u32, newer: u32) {
        let link = &mut self.0[entry as usize].newer;
        *link = *link & !NONE | newer;
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
        entries.put_older(entry, older);
        entries.put_newer(entry, newer);
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
        let (older, newer) = (entries.older(entry), entries.newer(entry));
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
                assert_eq!(entries.older(at), before);
                assert_eq!(usize::from(entries.level(at)), level);
                found.push(at);
                (before, at) = (at, entries.newer(at));
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
            assert_eq!((entries.older(1), entries.newer(1)), (NONE, NONE));
            entries.put_older(1, 0);
            entries.put_newer(1, NONE - 1);
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
