//! Tests for reordered memory accesses, which `schedules` cannot see. `loom` tries every execution
//! of small models that the memory model of C11 allows.

use crate::mutants::{self, Mutant};
use crate::pcache::orderings::MODELS;
use crate::sync::Arc;
use crate::sync::statics::atomic::{AtomicU64, Ordering};

/// Tries all executions of a model. Returns their number, or the failure of one.
fn explore(model: fn(), mutant: Option<Mutant>) -> Result<u64, String> {
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    let on_thread = move || {
        mutants::set(mutant);
        let mut builder = loom::model::Builder::new();
        // An array of the index has 1024 slots, and a model passes it several times.
        builder.max_branches = 50_000;
        builder.check(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            model();
        });
    };
    // On a thread of its own: after a failure loom's state there cannot be used.
    let result = std::thread::scope(|scope| scope.spawn(on_thread).join());
    result.map(|()| count.load(Ordering::Relaxed)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        text.or(panic.downcast_ref().cloned()).expect("a panic with a text")
    })
}

#[test]
fn every_execution_is_ordered() {
    for (name, model) in MODELS {
        match explore(model, None) {
            Ok(count) => println!("{name}: {count} executions, that is all"),
            Err(what) => panic!("{name}: {what}"),
        }
    }
}

#[test]
fn every_missing_order_is_found() {
    let mut survivors = Vec::new();
    for &mutant in Mutant::PCACHE_ORDERINGS {
        let mut tried = MODELS.iter().map(|(name, model)| (name, explore(*model, Some(mutant))));
        match tried.find_map(|(name, result)| result.err().map(|what| (name, what))) {
            Some((name, what)) => println!("{mutant:?}: killed by {name}: {what}"),
            None => survivors.push(mutant),
        }
    }
    assert!(survivors.is_empty(), "mutants survive: {survivors:?}");
}
