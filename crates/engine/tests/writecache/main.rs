//! The writecache engine over simulated devices, in both modes: vectors of the kernel, model,
//! crashes, and the kernel's own defects.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

#[path = "../golden/mod.rs"]
mod golden;
#[path = "../sectors/mod.rs"]
mod sectors;

mod basics;
mod busy;
mod crafted;
mod dead;
mod defects;
mod doubt;
mod errors;
mod fixture;
mod model;
mod options;
mod overwrite;
mod recovery;
mod refusals;
mod vectors;
mod waiting;
