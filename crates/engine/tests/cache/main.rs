//! Caches at rest: vectors of the kernel, power cuts, thin-provisioning-tools.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

#[path = "../golden/mod.rs"]
mod golden;

mod drain;
mod tools;
mod vectors;
