//! Where each block of the origin is: a table of slots, open to all places. A place has the number
//! of a slot, and the slot's mapping says which block it is of: four bytes for each place.

use super::metadata::contents::block_of;

/// No slot.
const EMPTY: u32 = u32::MAX;

/// The slots in use, by their blocks.
#[derive(Debug)]
pub(super) struct Index {
    places: Box<[u32]>,
    shift: u32,
}

impl Index {
    /// For at most `slots` slots.
    pub(super) fn new(slots: u64) -> Index {
        // At most three quarters are taken.
        let places = (slots * 4 / 3 + 2).next_power_of_two();
        Index {
            places: vec![EMPTY; places as usize].into_boxed_slice(),
            shift: 64 - places.trailing_zeros(),
        }
    }

    /// The first place that a block could have.
    fn home(&self, block: u64) -> usize {
        (block.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }

    fn next(&self, place: usize) -> usize {
        (place + 1) & (self.places.len() - 1)
    }

    fn block_at(&self, place: usize, mappings: &[u64]) -> Option<u64> {
        let slot = self.places[place];
        (slot != EMPTY).then(|| block_of(mappings[slot as usize]).expect("it is in use"))
    }

    fn place_of(&self, block: u64, mappings: &[u64]) -> Option<usize> {
        let mut place = self.home(block);
        loop {
            match self.block_at(place, mappings) {
                None => return None,
                Some(found) if found == block => return Some(place),
                Some(_) => place = self.next(place),
            }
        }
    }

    /// The slot that holds `block`.
    #[inline]
    pub(super) fn find(&self, block: u64, mappings: &[u64]) -> Option<u32> {
        self.place_of(block, mappings).map(|place| self.places[place])
    }

    /// A slot, whose mapping is there, holds `block`, which no other slot does.
    pub(super) fn insert(&mut self, block: u64, slot: u32) {
        let mut place = self.home(block);
        while self.places[place] != EMPTY {
            place = self.next(place);
        }
        self.places[place] = slot;
    }

    /// No slot holds `block` any more. Its mapping is still there.
    pub(super) fn remove(&mut self, block: u64, mappings: &[u64]) {
        let mut gap = self.place_of(block, mappings).expect("a block that is there");
        let mut place = gap;
        loop {
            place = self.next(place);
            let Some(found) = self.block_at(place, mappings) else { break };
            // A block moves into the gap, unless it would stand before its home then.
            let mask = self.places.len() - 1;
            let home = self.home(found);
            if place.wrapping_sub(home) & mask >= place.wrapping_sub(gap) & mask {
                self.places[gap] = self.places[place];
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
    use crate::cache::metadata::contents::mapping;
    use crate::prng::Prng;

    #[test]
    fn blocks_are_found_after_any_changes() {
        let mut prng = Prng::new(5);
        for slots in [1_u32, 2, 7, 100] {
            let mut index = Index::new(slots.into());
            let mut mappings = vec![0; slots as usize];
            let mut model: HashMap<u64, u32> = HashMap::new();
            for _ in 0..5000 {
                let slot = prng.below(slots.into()) as u32;
                let block = prng.below(u64::from(slots) * 2) * 0x1_0001;
                if let Some((&old, _)) = model.iter().find(|(_, at)| **at == slot) {
                    index.remove(old, &mappings);
                    mappings[slot as usize] = 0;
                    model.remove(&old);
                } else if let Entry::Vacant(place) = model.entry(block) {
                    mappings[slot as usize] = mapping(Some(block));
                    index.insert(block, slot);
                    place.insert(slot);
                }
                let asked = prng.below(u64::from(slots) * 2) * 0x1_0001;
                assert_eq!(index.find(asked, &mappings), model.get(&asked).copied());
            }
        }
    }
}
