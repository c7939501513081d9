//! Stores to memory that outlives the server: rings, and the log of requests in flight.
//!
//! They happen in program order, so a dead server has done a prefix of them. Each store is a step
//! here, and a test ends a server after any of them (`model_tests`). Deliberate bugs prove that the
//! test can find errors.

use udm::pmem::client_memory::ClientMemory;
use udm::sync::statics::atomic::Ordering;

/// The version of the log of requests in flight, in both layouts.
pub(super) const VERSION: u16 = 1;

/// Stores two bytes.
#[inline]
pub(super) fn store_u16(client_memory: &ClientMemory, at: u64, value: u16) {
    if is_alive() {
        client_memory.u16_at(at).store(value, Ordering::Release);
    }
}

/// Stores four bytes.
#[inline]
pub(super) fn store_u32(client_memory: &ClientMemory, at: u64, value: u32) {
    if is_alive() {
        client_memory.u32_at(at).store(value, Ordering::Release);
    }
}

/// Stores eight bytes.
#[inline]
pub(super) fn store_u64(client_memory: &ClientMemory, at: u64, value: u64) {
    if is_alive() {
        client_memory.u64_at(at).store(value, Ordering::Release);
    }
}

/// A deliberate bug in a store, or in the use of stored data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mutant {
    /// Requests are not logged when they are taken.
    NotNoted,
    /// The order in which requests were taken is not logged.
    OrderForgotten,
    /// Requests are cleared before the driver can see their answers.
    CrossedOutEarly,
    /// Answered requests are not added to the list.
    ListForgotten,
    /// The used index is not logged.
    UsedForgotten,
    /// A packed ring's visible answer is given once more.
    RolledBack,
    /// A packed ring's unpublished answer is taken as given.
    Committed,
    /// The slots of a request are freed before its answer is published.
    FreedEarly,
    /// A request that is given back is cleared before its slots are free.
    ForgottenFirst,
    /// The slots of a request are taken before its descriptors are stored.
    NotedLate,
    /// A packed ring continues at the client's position, regardless of requests in flight.
    BaseBelieved,
    /// A packed ring's answer is published before it is complete.
    ShownEarly,
}

#[cfg(not(test))]
#[inline]
const fn is_alive() -> bool {
    true
}

/// Whether this bug is active.
#[cfg(not(test))]
#[inline]
pub(super) const fn has(_mutant: Mutant) -> bool {
    false
}

#[cfg(test)]
pub(super) use life::{has, is_dead, lives_for, set_mutant};

#[cfg(test)]
use life::is_alive;

#[cfg(test)]
impl Mutant {
    /// All mutants, and whether they concern packed rings.
    pub(super) const ALL: [(Mutant, bool); 14] = [
        (Mutant::NotNoted, false),
        (Mutant::OrderForgotten, false),
        (Mutant::CrossedOutEarly, false),
        (Mutant::ListForgotten, false),
        (Mutant::UsedForgotten, false),
        (Mutant::NotNoted, true),
        (Mutant::OrderForgotten, true),
        (Mutant::RolledBack, true),
        (Mutant::Committed, true),
        (Mutant::FreedEarly, true),
        (Mutant::ForgottenFirst, true),
        (Mutant::NotedLate, true),
        (Mutant::BaseBelieved, true),
        (Mutant::ShownEarly, true),
    ];
}

#[cfg(test)]
mod life {
    use std::cell::Cell;

    use super::Mutant;

    thread_local! {
        static STEPS: Cell<u64> = const { Cell::new(u64::MAX) };
        static MUTANT: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Lets this thread's server do this many more visible steps, and then none.
    pub(in super::super) fn lives_for(steps: u64) {
        STEPS.set(steps);
    }

    /// Whether no steps are left.
    pub(in super::super) fn is_dead() -> bool {
        STEPS.get() == 0
    }

    /// Whether the next step is done.
    pub(super) fn is_alive() -> bool {
        let left = STEPS.get();
        STEPS.set(left.saturating_sub(1));
        left > 0
    }

    /// Gives this thread's servers this bug.
    pub(in super::super) fn set_mutant(mutant: Option<Mutant>) {
        MUTANT.set(mutant);
    }

    /// Whether this bug is active.
    pub(in super::super) fn has(mutant: Mutant) -> bool {
        MUTANT.get() == Some(mutant)
    }
}
