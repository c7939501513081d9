//! The crash test finds each deliberate bug of cache.

use std::panic::{AssertUnwindSafe, catch_unwind};

use udm::mutants::{Mutant, set};

use crate::crashes::explore;

/// Histories for each bug, at most.
const SEEDS: u64 = 120;

#[test]
fn every_mutant_is_found() {
    let mut missed = Vec::new();
    for &mutant in Mutant::CACHE {
        set(Some(mutant));
        // What asserts is found, too.
        let found = catch_unwind(AssertUnwindSafe(|| explore(0..SEEDS, 12)));
        set(None);
        match found {
            Ok(None) => missed.push(mutant),
            Ok(Some(what)) => println!("{mutant:?}: {what}"),
            Err(_) => println!("{mutant:?}: an assertion"),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
