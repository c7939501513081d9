//! A sparse set of keys, each with an index from 0 on, so that callers keep the values of the keys
//! in arrays. Memory is proportional to the number of present keys.

use std::hash::{BuildHasher, RandomState};

use super::index::Index;

/// One in this many places more than are taken, and this many.
const SPARE_PART: u32 = 8;
const SPARE: u32 = 16;

/// The keys, which clients choose: with a hash that clients cannot predict.
#[derive(Debug)]
pub(super) struct Keys {
    index: Index,
    /// All are below this.
    end: u64,
    len: u32,
}

impl Keys {
    /// None, all below `end`.
    pub(super) fn new(end: u64) -> Keys {
        Keys { index: Keys::index(0, end), end, len: 0 }
    }

    fn index(len: u32, end: u64) -> Index {
        let places = len + len / SPARE_PART + SPARE;
        Index::with_key(places.into(), end, RandomState::new().hash_one(end))
    }

    /// The place of a key.
    #[inline]
    pub(super) fn find(&self, key: u64) -> Option<usize> {
        self.index.find(key).map(|place| place as usize)
    }

    /// The key in a place that is taken.
    pub(super) fn key(&self, place: usize) -> u64 {
        self.index.block(place as u32).expect("a place that is taken")
    }

    /// Adds a key that is not present, with the next index.
    pub(super) fn push(&mut self, key: u64) {
        if self.len == self.index.count() {
            self.resize();
        }
        self.index.insert(key, self.len);
        self.len += 1;
    }

    /// Removes a key. The key with the last index gets its index.
    pub(super) fn remove(&mut self, key: u64, place: usize) {
        self.index.remove(key, place as u32);
        self.len -= 1;
        if place as u32 != self.len {
            let last = self.key(self.len as usize);
            self.index.remove(last, self.len);
            self.index.insert(last, place as u32);
        }
        if self.is_roomy(self.index.count() as usize) {
            self.resize();
        }
    }

    /// Whether a row with room for this many is much too large.
    pub(super) fn is_roomy(&self, capacity: usize) -> bool {
        capacity as u32 > 4 * SPARE && self.len < capacity as u32 / 4 * 3
    }

    fn resize(&mut self) {
        let mut index = Keys::index(self.len, self.end);
        (0..self.len).for_each(|place| index.insert(self.key(place as usize), place));
        self.index = index;
    }
}

/// Adds what belongs to a key that came.
pub(super) fn push<T>(row: &mut Vec<T>, new: T) {
    if row.len() == row.capacity() {
        row.reserve_exact(row.len() / SPARE_PART as usize + SPARE as usize);
    }
    row.push(new);
}

/// Takes away what belongs to a key that is gone.
pub(super) fn remove<T>(row: &mut Vec<T>, keys: &Keys, place: usize) {
    row.swap_remove(place);
    if keys.is_roomy(row.capacity()) {
        row.shrink_to(row.len() + row.len() / SPARE_PART as usize + SPARE as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    #[test]
    fn keys_come_and_go_with_what_belongs_to_them() {
        let mut prng = Prng::new(9);
        let (mut keys, mut row) = (Keys::new(1 << 34), Vec::new());
        let mut model = std::collections::HashMap::new();
        for step in 0..60_000_u64 {
            // Many come, then most go.
            let (key, comes) = (prng.below(3000) << 22, prng.below(100) < 60 - step / 1500);
            match (keys.find(key), comes) {
                (None, true) => {
                    assert_eq!(model.insert(key, step), None);
                    keys.push(key);
                    push(&mut row, step);
                }
                (Some(place), false) => {
                    assert_eq!(model.remove(&key), Some(row[place]));
                    keys.remove(key, place);
                    remove(&mut row, &keys, place);
                }
                (found, _) => {
                    assert_eq!(found.map(|place| &row[place]), model.get(&key));
                }
            }
            assert_eq!((keys.len as usize, row.len()), (model.len(), model.len()));
            let room = model.len() * 4 / 3 + 5 * SPARE as usize;
            assert!(row.capacity() <= room && keys.index.count() as usize <= room);
        }
        assert!(row.iter().enumerate().all(|(place, step)| model[&keys.key(place)] == *step));
        assert!(!row.is_empty() && row.len() < 1500, "{}", row.len());
    }
}
