//! How often the block in each slot was used lately: two bits for each slot, raised without a lock.

use crate::sync::atomic::{AtomicU8, Ordering};

/// Uses are counted up to here.
pub(super) const USES_MAX: u8 = 3;
/// Counts in a byte.
const PER_BYTE: u32 = 4;

/// The counts of all slots. Requests raise them, the policy looks at them and takes them down.
/// Counts are hints: of two threads that raise counts of one byte at the same time, one may not
/// count.
#[derive(Debug)]
pub struct Uses(Box<[AtomicU8]>);

impl Uses {
    /// No slot was used.
    pub fn new(slots: u32) -> Uses {
        Uses((0..slots.div_ceil(PER_BYTE)).map(|_| AtomicU8::new(0)).collect())
    }

    /// The byte that a slot's count is in, and where.
    fn place(&self, slot: u32) -> (&AtomicU8, u32) {
        (&self.0[(slot / PER_BYTE) as usize], slot % PER_BYTE * 2)
    }

    /// A request uses the block in a slot. Returns whether it is the first since the policy took
    /// the count down to 0; then the policy wants to know.
    pub fn touch(&self, slot: u32) -> bool {
        let (byte, shift) = self.place(slot);
        let all = byte.load(Ordering::Relaxed);
        let before = all >> shift & USES_MAX;
        if before < USES_MAX {
            byte.store(all + (1 << shift), Ordering::Relaxed);
        }
        before == 0
    }

    pub(super) fn of(&self, slot: u32) -> u8 {
        let (byte, shift) = self.place(slot);
        byte.load(Ordering::Relaxed) >> shift & USES_MAX
    }

    pub(super) fn set(&self, slot: u32, uses: u8) {
        let (byte, shift) = self.place(slot);
        let others = byte.load(Ordering::Relaxed) & !(USES_MAX << shift);
        byte.store(others | uses.min(USES_MAX) << shift, Ordering::Relaxed);
    }

    pub(super) fn clear(&self) {
        self.0.iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_do_not_touch_their_neighbours() {
        let uses = Uses::new(9);
        assert!(uses.touch(3) && !uses.touch(3) && uses.touch(2) && uses.touch(8));
        for _ in 0..10 {
            uses.touch(3);
        }
        let all = |uses: &Uses| (0..9).map(|slot| uses.of(slot)).collect::<Vec<u8>>();
        assert_eq!(all(&uses), [0, 0, 1, 3, 0, 0, 0, 0, 1]);
        uses.set(3, 1);
        uses.set(4, 2);
        assert_eq!(all(&uses), [0, 0, 1, 1, 2, 0, 0, 0, 1]);
        uses.clear();
        assert_eq!(all(&uses), [0; 9]);
    }
}
