//! Checks of hostile bytes, shared by the fuzzer and `make test`.
//!
//! Each target is a function of bytes: it panics if a promise is broken, and
//! returns otherwise. The promises, for every target: no panic, no hang, bounded
//! allocations, no write outside the device. `fuzz/fuzz_targets` calls them under libFuzzer,
//! `tests/replay.rs` with the committed seeds and with random changes of them.

// These are checks: they may panic where a promise is broken.
#![allow(clippy::unwrap_used)]

mod cache;
mod calls;
mod client;
mod input;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/loading.rs"]
mod loading;
mod log;
mod messages;
mod nbd;
mod pcache;
mod platform;
mod table;
mod vhost;
mod writecache;

// The command is a program, not a library: these of its modules know only each other, and the
// replacements `platform` and `log`.
#[allow(dead_code)]
#[path = "../../../crates/cli/src/attach_progress.rs"]
mod attach_progress;
#[path = "../../../crates/cli/src/changes.rs"]
mod changes;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/control.rs"]
mod control;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/daemon.rs"]
mod daemon;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/dead.rs"]
mod dead;
#[path = "../../../crates/cli/src/directory.rs"]
mod directory;
#[path = "../../../crates/cli/src/ending.rs"]
mod ending;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/exports.rs"]
mod exports;
#[path = "../../../crates/cli/src/flushing.rs"]
mod flushing;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/health_log.rs"]
mod health_log;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/http.rs"]
mod http;
#[path = "../../../crates/cli/src/known.rs"]
mod known;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/last_end.rs"]
mod last_end;
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
#[path = "../../../crates/cli/src/rlimits.rs"]
mod rlimits;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/runtime.rs"]
mod runtime;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/samples.rs"]
mod samples;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/served.rs"]
mod served;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/server.rs"]
mod server;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/signals.rs"]
mod signals;
#[path = "../../../crates/cli/src/spec.rs"]
mod spec;
#[path = "../../../crates/cli/src/stalls.rs"]
mod stalls;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/troubles.rs"]
mod troubles;
#[allow(dead_code)]
#[path = "../../../crates/cli/src/upkeep.rs"]
mod upkeep;
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
