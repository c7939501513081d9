//! Caches at rest and served: vectors of the kernel, crashes, thin-provisioning-tools.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

#[path = "../golden/mod.rs"]
mod golden;

mod basics;
mod bitmaps;
mod changes;
mod crashes;
mod doubt;
mod drain;
mod failing;
mod fixture;
mod in_part;
#[cfg(feature = "mutants")]
mod mutants;
mod oracle;
mod origin;
mod parts;
mod promises;
mod promotion;
mod readonly;
mod through;
mod tools;
mod vectors;
