//! Free slots: a bit for each, and for each thread a few that are its own for the moment.
//!
//! A thread takes whole words of the bitmap, so its slots are mostly neighbours: what it writes one
//! after the other lands side by side. When no word has a free bit, threads take from each other,
//! so a cache of a single slot works too.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

/// Threads with slots of their own; more share.
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
    fn pop(&mut self, into: &mut Vec<u32>, max: usize) {
        while self.bits != 0 && into.len() < max {
            into.push(self.word * 64 + self.bits.trailing_zeros());
            self.bits &= self.bits - 1;
        }
    }
}

/// The free slots of a cache.
#[derive(Debug)]
pub struct Pool {
    bits: Box<[AtomicU64]>,
    reserves: [Reserve; RESERVES],
    /// Where the next search begins.
    cursor: AtomicU32,
    /// Bits set.
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

    /// Free slots that no thread has taken for itself.
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Puts a slot back.
    pub fn put(&self, slot: u32) {
        self.bits[slot as usize / 64].fetch_or(1 << (slot % 64), Ordering::AcqRel);
        self.count.fetch_add(1, Ordering::Release);
    }

    /// Takes slots for `thread` until `into` has `max` of them or none is free. Says whether the
    /// bitmap was looked at: a good moment to see how much is left.
    pub fn take(&self, thread: usize, max: usize, into: &mut Vec<u32>) -> bool {
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

    #[test]
    fn every_slot_is_given_out_once_and_neighbours_together() {
        let pool = Pool::new(200);
        (0..200).for_each(|slot| pool.put(slot));
        let mut first = Vec::new();
        assert!(pool.take(0, 10, &mut first));
        assert_eq!(first, (0..10).collect::<Vec<u32>>());
        assert!(!pool.take(0, 12, &mut first));
        let mut second = Vec::new();
        pool.take(1, 3, &mut second);
        assert_eq!(second, [64, 65, 66]);
        // Thread 2 gets all that the others have taken for themselves.
        let mut rest = Vec::new();
        pool.take(2, 1000, &mut rest);
        let mut all = [first, second, rest].concat();
        all.sort_unstable();
        assert_eq!(all, (0..200).collect::<Vec<u32>>());
        assert_eq!(pool.count(), 0);
        let mut none = Vec::new();
        pool.take(0, 1, &mut none);
        assert!(none.is_empty());
        pool.put(7);
        pool.take(5, 2, &mut none);
        assert_eq!(none, [7]);
    }
}
