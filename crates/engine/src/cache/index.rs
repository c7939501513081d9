//! Where each block is: a table of slots, or of other numbers, open to all places. A place has a
//! number in its lower 28 bits, and the owner of the table knows which block that is of. Four bits
//! of the block's hash stand above it: fifteen of sixteen other blocks that stand in the way are
//! passed without asking. Four bytes for each place, four places for three numbers.

/// No number.
const EMPTY: u32 = u32::MAX;
/// The numbers that a place has room for, but for the last one.
const NUMBERS: u32 = (1 << 28) - 1;

/// Numbers, by their blocks.
#[derive(Debug)]
pub(super) struct Index {
    places: Box<[u32]>,
}

/// The upper bits depend on all bits of the block.
fn hash(block: u64) -> u64 {
    block.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// What stands in a place of `block` beside its number.
fn tag(hash: u64) -> u32 {
    (hash >> 4) as u32 & !NUMBERS
}

impl Index {
    /// For at most `count` numbers, each below `count`.
    pub(super) fn new(count: u64) -> Index {
        assert!(count <= u64::from(NUMBERS), "numbers have 28 bits");
        Index { places: vec![EMPTY; (count * 4 / 3 + 2) as usize].into_boxed_slice() }
    }

    /// The first place that a block could have.
    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.places.len() as u128) >> 64) as usize
    }

    fn next(&self, place: usize) -> usize {
        if place + 1 == self.places.len() { 0 } else { place + 1 }
    }

    /// How far `place` comes after `before`.
    fn distance(&self, before: usize, place: usize) -> usize {
        match place.checked_sub(before) {
            Some(distance) => distance,
            None => place + self.places.len() - before,
        }
    }

    #[inline]
    fn place_of(&self, block: u64, block_of: impl Fn(u32) -> u64) -> Option<usize> {
        let hash = hash(block);
        let tag = tag(hash);
        let mut place = self.home(hash);
        loop {
            let found = self.places[place];
            if found == EMPTY {
                return None;
            }
            if found & !NUMBERS == tag && block_of(found & NUMBERS) == block {
                return Some(place);
            }
            place = self.next(place);
        }
    }

    /// The number that has `block`. `block_of` says which block a number has.
    #[inline]
    pub(super) fn find(&self, block: u64, block_of: impl Fn(u32) -> u64) -> Option<u32> {
        self.place_of(block, block_of).map(|place| self.places[place] & NUMBERS)
    }

    /// `number` has `block` from now on, which no other number has.
    pub(super) fn insert(&mut self, block: u64, number: u32) {
        let hash = hash(block);
        let mut place = self.home(hash);
        while self.places[place] != EMPTY {
            place = self.next(place);
        }
        self.places[place] = number | tag(hash);
    }

    /// No number has `block` any more. `block_of` still says which one had it.
    pub(super) fn remove(&mut self, block: u64, block_of: impl Fn(u32) -> u64) {
        let mut gap = self.place_of(block, &block_of).expect("a block that is there");
        let mut place = gap;
        loop {
            place = self.next(place);
            let found = self.places[place];
            if found == EMPTY {
                break;
            }
            // A block moves into the gap, unless it would stand before its home then.
            let home = self.home(hash(block_of(found & NUMBERS)));
            if self.distance(home, place) >= self.distance(gap, place) {
                self.places[gap] = found;
                gap = place;
            }
        }
        self.places[gap] = EMPTY;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::collections::hash_map::Entry;

    use super::Index;
    use crate::prng::Prng;

    #[test]
    fn blocks_are_found_after_any_changes() {
        let mut prng = Prng::new(5);
        for slots in [1_u32, 2, 7, 100, 1000] {
            let mut index = Index::new(slots.into());
            let mut blocks = vec![0; slots as usize];
            let mut model: HashMap<u64, u32> = HashMap::new();
            for _ in 0..5000 {
                let slot = prng.below(slots.into()) as u32;
                let block = prng.below(u64::from(slots) * 2) * 0x1_0001;
                if let Some((&old, _)) = model.iter().find(|(_, at)| **at == slot) {
                    index.remove(old, |slot| blocks[slot as usize]);
                    model.remove(&old);
                } else if let Entry::Vacant(place) = model.entry(block) {
                    blocks[slot as usize] = block;
                    index.insert(block, slot);
                    place.insert(slot);
                }
                let asked = prng.below(u64::from(slots) * 2) * 0x1_0001;
                let found = index.find(asked, |slot| blocks[slot as usize]);
                assert_eq!(found, model.get(&asked).copied());
            }
        }
    }
}
