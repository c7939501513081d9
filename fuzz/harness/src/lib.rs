//! What is done with hostile bytes, once for the fuzzer and for `make test`.
//!
//! Each target is a function from bytes to nothing: it panics where a promise is broken, and
//! returns otherwise. The promises, for every target: no panic, no hang, no allocation without
//! bound, nothing written outside the device. `fuzz/fuzz_targets` calls them under libFuzzer,
//! `tests/replay.rs` with the committed seeds and with random changes of them.

// These are checks: they may stop where something is wrong.
#![allow(clippy::unwrap_used)]

mod cache;
mod calls;
mod client;
mod ground;
mod input;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/loading.rs"]
mod loading;
mod log;
mod messages;
mod nbd;
mod pcache;
mod table;
mod vhost;
mod writecache;

// The command is a program and no library; these rooms of it know only each other, and what
// `ground` and `log` put in the place of two more.
#[allow(dead_code)]
#[path = "../../../crates/cli/src/attaching.rs"]
mod attaching;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/control.rs"]
mod control;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/daemon.rs"]
mod daemon;
#[path = "../../../crates/cli/src/directory.rs"]
mod directory;
#[path = "../../../crates/cli/src/flushing.rs"]
mod flushing;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/http.rs"]
mod http;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/journal.rs"]
mod journal;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/methods.rs"]
mod methods;
#[path = "../../../crates/cli/src/metrics.rs"]
mod metrics;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/output.rs"]
mod output;
#[path = "../../../crates/cli/src/process.rs"]
mod process;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/runtime.rs"]
mod runtime;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/served.rs"]
mod served;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/server.rs"]
mod server;
#[path = "../../../crates/cli/src/spec.rs"]
mod spec;
#[path = "../../../crates/cli/src/work.rs"]
mod work;

pub use cache::cache;
pub use calls::calls;
pub use messages::control;
pub use nbd::nbd;
pub use pcache::pcache;
pub use table::table;
pub use vhost::vhost;
pub use writecache::writecache;

/// A target by its name.
pub type Target = (&'static str, fn(&[u8]));

/// Every target; seeds are in `fuzz/seeds/NAME`.
pub const TARGETS: [Target; 8] = [
    ("cache", cache),
    ("calls", calls),
    ("control", control),
    ("nbd", nbd),
    ("pcache", pcache),
    ("table", table),
    ("vhost", vhost),
    ("writecache", writecache),
];

/// An error is one line with words in it.
fn check_error(error: &udm::error::Error) {
    let message = error.to_string();
    assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
}
