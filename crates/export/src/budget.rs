//! Memory shared by all clients. Each client has a small amount of its own, so that other clients
//! cannot lock it out. Memory beyond that amount comes from one shared budget.

use udm::sync::statics::atomic::{AtomicUsize, Ordering};

/// Bytes that each client may hold outside the budget.
pub const FREE_BYTES: usize = 1 << 20;
/// Budget of this process, in bytes, for memory beyond the clients' own amounts.
pub const BUDGET_BYTES: usize = 512 << 20;
/// A request that finds no memory for this long is refused.
pub const STARVED_SECONDS_MAX: u64 = 5;

/// An amount of memory that clients share.
#[derive(Debug)]
pub struct Budget {
    max: usize,
    used: AtomicUsize,
}

/// The budget of this process.
pub static BUDGET: Budget = Budget::new(BUDGET_BYTES);

impl Budget {
    /// A budget of `max` bytes, all unused.
    pub const fn new(max: usize) -> Budget {
        Budget { max, used: AtomicUsize::new(0) }
    }

    /// Takes `bytes`, if that many are left. Returns whether it did.
    fn take(&self, bytes: usize) -> bool {
        let more = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.max);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn give(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes in use.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

/// One client's part of the budget.
#[derive(Debug)]
pub struct Share {
    budget: &'static Budget,
    taken: usize,
}

impl Share {
    /// A share that holds no memory.
    pub fn of(budget: &'static Budget) -> Share {
        Share { budget, taken: 0 }
    }

    /// Raises the client's memory to `bytes`. Returns whether the budget allows that; if not, the
    /// share is unchanged.
    pub fn grow(&mut self, bytes: usize) -> bool {
        let wanted = bytes.saturating_sub(FREE_BYTES);
        let more = wanted.saturating_sub(self.taken);
        if more > 0 && !self.budget.take(more) {
            return false;
        }
        self.taken += more;
        true
    }

    /// Lowers the client's memory to at most `bytes`.
    pub fn shrink(&mut self, bytes: usize) {
        let less = self.taken.saturating_sub(bytes.saturating_sub(FREE_BYTES));
        if less > 0 {
            self.budget.give(less);
            self.taken -= less;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.give(self.taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_little_is_for_nothing_and_the_rest_is_shared() {
        static SMALL: Budget = Budget::new(100);
        let (mut one, mut two) = (Share::of(&SMALL), Share::of(&SMALL));
        assert!(one.grow(FREE_BYTES) && two.grow(FREE_BYTES));
        assert_eq!(SMALL.used(), 0);
        assert!(one.grow(FREE_BYTES + 60) && !two.grow(FREE_BYTES + 41));
        assert!(two.grow(FREE_BYTES + 40) && SMALL.used() == 100);
        one.shrink(FREE_BYTES + 10);
        assert_eq!(SMALL.used(), 50);
        one.shrink(FREE_BYTES + 10);
        assert!(two.grow(FREE_BYTES + 90));
        drop(two);
        assert_eq!(SMALL.used(), 10);
        drop(one);
        assert_eq!(SMALL.used(), 0);
    }
}
