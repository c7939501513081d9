//! Caches at rest: vectors of the kernel.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

#[path = "../golden/mod.rs"]
mod golden;

mod vectors;
