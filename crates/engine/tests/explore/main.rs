//! The crash-state explorer: every state that a crash can leave is attached with the real code and
//! judged by udm's promises. docs/verification.md describes the strength and the limits of this
//! proof.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

mod background;
mod cases;
mod elsewhere;
mod explore;
mod in_flight;
mod judge;
mod machine;
mod meanwhile;
mod media;
mod model;
mod of_cache;
mod of_pcache;
mod of_writecache;
mod program;
mod program_cache;
mod program_pcache;
mod program_writecache;
mod runs;
mod sectors;
mod serving;
mod sim;
mod ssd;
mod subject;
mod trace;
