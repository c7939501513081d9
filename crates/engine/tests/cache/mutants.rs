//! The crash test, or a case, finds each deliberate bug of cache.

use std::panic::{AssertUnwindSafe, catch_unwind};

use udm::mutants::{Mutant, set};

use crate::crashes::explore;
use crate::promises::CASES;

/// Histories for each bug, at most.
const SEEDS: u64 = 120;

/// The bugs that `find` does not find. A failed assertion also counts as found.
fn missed(mutants: &[Mutant], find: impl Fn() -> Option<String>) -> Vec<Mutant> {
    let is_missed = |mutant: &Mutant| {
        set(Some(*mutant));
        let found = catch_unwind(AssertUnwindSafe(&find));
        set(None);
        match found {
            Ok(None) => return true,
            Ok(Some(what)) => println!("{mutant:?}: {what}"),
            Err(_) => println!("{mutant:?}: an assertion"),
        }
        false
    };
    mutants.iter().copied().filter(is_missed).collect()
}

#[test]
fn every_mutant_is_found() {
    let missed = missed(Mutant::CACHE, || explore(0..SEEDS, 12, true));
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn every_mutant_is_found_by_a_case() {
    let missed = missed(Mutant::CACHE_CASES, || {
        CASES.iter().for_each(|case| case());
        None
    });
    assert!(missed.is_empty(), "not found: {missed:?}");
}
