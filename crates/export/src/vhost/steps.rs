//! Stores to memory that outlives the server: rings, and notes of requests in flight.
//!
//! They happen in the order of the program, so what a server leaves that dies is a beginning of
//! what it did. Each store is a step here, and a test ends a server after any of them
//! (`model_tests`); so that it is known to find something, there are deliberate bugs for it.

use udm::foreign::Foreign;
use udm::sync::statics::atomic::Ordering;

/// Stores two bytes.
#[inline]
pub(super) fn store_u16(foreign: &Foreign, at: u64, value: u16) {
    if is_alive() {
        foreign.u16_at(at).store(value, Ordering::Release);
    }
}

/// Stores four bytes.
#[inline]
pub(super) fn store_u32(foreign: &Foreign, at: u64, value: u32) {
    if is_alive() {
        foreign.u32_at(at).store(value, Ordering::Release);
    }
}

/// Stores eight bytes.
#[inline]
pub(super) fn store_u64(foreign: &Foreign, at: u64, value: u64) {
    if is_alive() {
        foreign.u64_at(at).store(value, Ordering::Release);
    }
}

/// A deliberate bug of what is stored, or of what is made of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mutant {
    /// Requests are not noted when they are taken.
    NotNoted,
    /// The order in which requests were taken is not noted.
    OrderForgotten,
    /// Answers are crossed out before the driver can see them.
    CrossedOutEarly,
    /// Requests that were answered are not listed.
    ListForgotten,
    /// How far the answers have come is not noted.
    UsedForgotten,
    /// A packed ring's answer that the driver saw is given once more.
    RolledBack,
    /// A packed ring's answer that the driver did not see is taken as given.
    Committed,
    /// The places of a request are free before its answer is given.
    FreedEarly,
    /// A request that is given back is crossed out before its places are free.
    ForgottenFirst,
    /// The places of a request are taken before they say whose they are.
    NotedLate,
    /// A packed ring goes on where the client says, whatever was in flight.
    BaseBelieved,
    /// A packed ring's answer is shown before it is complete.
    ShownEarly,
}

#[cfg(not(test))]
#[inline]
const fn is_alive() -> bool {
    true
}

/// Whether this bug is there.
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
    /// All of them, and whether they are packed rings'.
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

    /// This thread's server does this many steps more, and then none that anybody sees.
    pub(in super::super) fn lives_for(steps: u64) {
        STEPS.set(steps);
    }

    /// Whether none is left.
    pub(in super::super) fn is_dead() -> bool {
        STEPS.get() == 0
    }

    /// Whether the next step is done.
    pub(super) fn is_alive() -> bool {
        let left = STEPS.get();
        STEPS.set(left.saturating_sub(1));
        left > 0
    }

    /// This thread's servers have this bug.
    pub(in super::super) fn set_mutant(mutant: Option<Mutant>) {
        MUTANT.set(mutant);
    }

    /// Whether this bug is there.
    pub(in super::super) fn has(mutant: Mutant) -> bool {
        MUTANT.get() == Some(mutant)
    }
}
