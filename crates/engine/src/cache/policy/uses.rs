//! How often the block in each slot was used lately: one byte for each slot, raised without a lock.

use crate::sync::atomic::{AtomicU8, Ordering};

/// Uses are counted up to here.
pub(super) const USES_MAX: u8 = 3;

/// The counts of all slots. Requests raise them, the policy looks at them and takes them down.
/// Counts are hints: two threads that raise one at the same time may count as one.
#[derive(Debug)]
pub struct Uses(Box<[AtomicU8]>);

impl Uses {
    /// No slot was used.
    pub fn new(slots: u32) -> Uses {
        Uses((0..slots).map(|_| AtomicU8::new(0)).collect())
    }

    /// A request uses the block in a slot. Returns whether it is the first since the policy took
    /// the count down to 0; then the policy wants to know.
    pub fn touch(&self, slot: u32) -> bool {
        let count = &self.0[slot as usize];
        let before = count.load(Ordering::Relaxed);
        if before < USES_MAX {
            count.store(before + 1, Ordering::Relaxed);
        }
        before == 0
    }

    pub(super) fn of(&self, slot: u32) -> u8 {
        self.0[slot as usize].load(Ordering::Relaxed)
    }

    pub(super) fn set(&self, slot: u32, uses: u8) {
        self.0[slot as usize].store(uses, Ordering::Relaxed);
    }

    pub(super) fn clear(&self) {
        self.0.iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }
}
