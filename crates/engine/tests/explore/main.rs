//! The crash-state explorer: every state that a crash can leave is attached with the real code
//! and judged by what udm promises. docs/verification.md says what this proves and what not.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

mod elsewhere;
mod explore;
mod judge;
mod machine;
mod model;
mod program;
mod runs;
mod trace;
mod twin;
