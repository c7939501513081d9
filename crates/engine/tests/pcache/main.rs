//! The pcache engine over simulated devices: format, vectors of the kernel, model, crashes.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

#[path = "../golden/mod.rs"]
mod golden;
#[path = "../sectors/mod.rs"]
mod sectors;

mod basics;
mod builder;
mod busy;
mod changed;
mod conformance;
mod cuts;
mod damage;
mod defects;
mod doubt;
mod fixture;
mod hostile;
mod hot;
mod late;
mod left;
mod model;
mod origin;
mod pace;
mod pressure;
mod recovery;
mod refusals;
mod shared;
mod together;
mod vectors;
