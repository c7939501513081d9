//! Free slots: a bit for each, and for each thread a small reserve.
//!
//! A thread takes whole words of the bitmap, so its slots are usually neighbours, and consecutive
//! writes of a thread are next to each other. When no word has a free bit, threads take from each
//! other, so a cache of a single slot also works.

use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

/// The number of threads with a reserve of their own; more threads share these reserves.
const RESERVES: usize = 16;

#[derive(Debug, Default)]
#[repr(align(128))]
struct Reserve(Mutex<Taken>);

/// Bits taken out of word `word` of the bitmap.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    word: u32,
    bits: u64,
}

impl Taken {
    fn pop(&mut self, into: &mut Slots, max: usize) {
        while self.bits != 0 && into.len() < max {
            into.push(self.word * 64 + self.bits.trailing_zeros());
            self.bits &= self.bits - 1;
        }
    }
}

/// Most slots that are taken together.
pub const SLOTS_MAX: usize = 64;

/// A few slots, without memory of their own.
#[derive(Debug)]
pub struct Slots {
    slots: [u32; SLOTS_MAX],
    count: usize,
}

impl Default for Slots {
    fn default() -> Slots {
        Slots { slots: [0; SLOTS_MAX], count: 0 }
    }
}

impl Slots {
    fn push(&mut self, slot: u32) {
        self.slots[self.count] = slot;
        self.count += 1;
    }
}

impl FromIterator<u32> for Slots {
    /// No more than [`SLOTS_MAX`].
    fn from_iter<I: IntoIterator<Item = u32>>(all: I) -> Slots {
        let mut slots = Slots::default();
        all.into_iter().for_each(|slot| slots.push(slot));
        slots
    }
}

impl std::ops::Deref for Slots {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.slots[..self.count]
    }
}

/// The free slots of a cache.
#[derive(Debug)]
pub struct Pool {
    bits: Box<[AtomicU64]>,
    reserves: [Reserve; RESERVES],
    /// Where the next search begins.
    cursor: AtomicU32,
    /// The number of set bits.
    count: AtomicU32,
}

impl Pool {
    /// A pool for `slots` slots, none of which is free.
    pub fn new(slots: u32) -> Pool {
        Pool {
            bits: (0..slots.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            reserves: std::array::from_fn(|_| Reserve::default()),
            cursor: AtomicU32::new(0),
            count: AtomicU32::new(0),
        }
    }

    /// Free slots that no thread has reserved for itself.
    pub fn count(&self) -> u32 {
        // Between the two steps of `put`, a slot may be taken that is not counted yet.
        let count = self.count.load(Ordering::Relaxed);
        if count as usize <= self.bits.len() * 64 { count } else { 0 }
    }

    /// All free slots, including those that threads have reserved for themselves.
    pub fn free(&self) -> u32 {
        let reserved = |reserve: &Reserve| lock(&reserve.0).bits.count_ones();
        self.reserves.iter().map(reserved).sum::<u32>() + self.count()
    }

    /// Whether any slot is free, including slots in the reserves of threads: a thread that looks
    /// for a slot finds them there.
    pub fn has_any(&self) -> bool {
        // The reserves are checked first: a thread that takes a word holds the lock of its own
        // reserve until the word is counted.
        let counts_reserves = !mutants::is(Mutant::ReservesIgnored);
        counts_reserves && self.reserves.iter().any(|reserve| lock(&reserve.0).bits != 0)
            || self.count() > 0
    }

    /// Puts a slot back.
    pub fn put(&self, slot: u32) {
        self.bits[slot as usize / 64].fetch_or(1 << (slot % 64), Ordering::AcqRel);
        self.count.fetch_add(1, Ordering::Release);
    }

    /// Puts several slots back.
    pub fn put_all(&self, slots: &[u32]) {
        for of_word in slots.chunk_by(|one, next| one / 64 == next / 64) {
            let bits = of_word.iter().fold(0, |bits, slot| bits | 1 << (slot % 64));
            self.bits[of_word[0] as usize / 64].fetch_or(bits, Ordering::AcqRel);
        }
        self.count.fetch_add(slots.len() as u32, Ordering::Release);
    }

    /// Takes slots for `thread` until `into` has `max` of them or none is free. Returns whether the
    /// bitmap was used: a good moment to check the number of free slots.
    pub fn take(&self, thread: usize, max: usize, into: &mut Slots) -> bool {
        let mut own = lock(&self.reserves[thread % RESERVES].0);
        own.pop(into, max);
        if into.len() == max {
            return false;
        }
        while into.len() < max
            && let Some(taken) = self.take_word()
        {
            *own = taken;
            own.pop(into, max);
        }
        drop(own);
        for other in &self.reserves {
            if into.len() == max {
                break;
            }
            lock(&other.0).pop(into, max);
        }
        true
    }

    /// The free slots, and whether they are counted right. No thread is at work.
    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn audit(&self) -> (Vec<u32>, bool) {
        let in_words = (0..).zip(&self.bits).map(|(word, bits)| {
            let bits = bits.load(Ordering::SeqCst);
            Taken { word, bits }
        });
        let in_words: Vec<Taken> = in_words.collect();
        let counted: u32 = in_words.iter().map(|taken| taken.bits.count_ones()).sum();
        let in_reserves = self.reserves.iter().map(|reserve| *lock(&reserve.0));
        let slots = |taken: Taken| {
            (0..64)
                .filter(move |bit| taken.bits >> bit & 1 == 1)
                .map(move |bit| taken.word * 64 + bit)
        };
        let free = in_words.into_iter().chain(in_reserves).flat_map(slots).collect();
        (free, counted == self.count())
    }

    /// Takes the free slots of one word.
    fn take_word(&self) -> Option<Taken> {
        let words = self.bits.len() as u32;
        let start = self.cursor.load(Ordering::Relaxed);
        for nth in 0..words {
            if self.count.load(Ordering::Acquire) == 0 {
                return None;
            }
            let word = (start + nth) % words;
            let bits = &self.bits[word as usize];
            if bits.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let bits = bits.swap(0, Ordering::AcqRel);
            if bits != 0 {
                self.cursor.store((word + 1) % words, Ordering::Relaxed);
                self.count.fetch_sub(bits.count_ones(), Ordering::AcqRel);
                return Some(Taken { word, bits });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pool: &Pool, thread: usize, max: usize) -> (Vec<u32>, bool) {
        let mut slots = Slots::default();
        let has_looked = pool.take(thread, max, &mut slots);
        (slots.to_vec(), has_looked)
    }

    #[test]
    fn every_slot_is_given_out_once_and_neighbours_together() {
        let pool = Pool::new(200);
        (0..100).for_each(|slot| pool.put(slot));
        pool.put_all(&(100..200).collect::<Vec<u32>>());
        let (mut all, has_looked) = take(&pool, 0, 10);
        assert_eq!((&all, has_looked), (&(0..10).collect(), true));
        assert!(pool.has_any());
        let (more, has_looked) = take(&pool, 0, 2);
        assert_eq!((&more, has_looked), (&vec![10, 11], false));
        all.extend(more);
        let (second, _) = take(&pool, 1, 3);
        assert_eq!(second, [64, 65, 66]);
        all.extend(second);
        // Thread 2 gets all slots that the other threads have reserved.
        for _ in 0..4 {
            all.extend(take(&pool, 2, SLOTS_MAX).0);
        }
        all.sort_unstable();
        assert_eq!(all, (0..200).collect::<Vec<u32>>());
        assert!(pool.count() == 0 && !pool.has_any());
        assert!(take(&pool, 0, 1).0.is_empty());
        // Other threads may take the slots that a thread has reserved.
        pool.put_all(&[8, 9]);
        assert_eq!(take(&pool, 3, 1).0, [8]);
        assert!(pool.count() == 0 && pool.has_any());
        assert_eq!(take(&pool, 4, 1).0, [9]);
        assert!(!pool.has_any());
        pool.put(7);
        assert_eq!(take(&pool, 5, 2).0, [7]);
    }
}
