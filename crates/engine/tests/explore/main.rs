//! The crash-state explorer: every state that a crash can leave is attached with the real code
//! and judged by what udm promises. docs/verification.md says what this proves and what not.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

mod elsewhere;
mod explore;
mod in_flight;
mod judge;
mod machine;
mod meanwhile;
mod media;
mod model;
mod of_pcache;
mod of_writecache;
mod program;
mod program_pcache;
mod program_writecache;
mod runs;
mod sectors;
mod serving;
mod ssd;
mod stories;
mod subject;
mod trace;
mod twin;
