//! The signals that a process of udm gets. docs/operations.md lists them for users.
//!
//! The default action of most signals ends a process without a word, and with a server all its
//! clients lose the device. So a server takes every signal that can mean something else:
//!
//! 1. SIGXFSZ is without effect in every process of udm: a write beyond the limit of file sizes
//!    then fails with EFBIG, and is handled like any other error of that file.
//! 2. SIGTERM, SIGINT and, without a log, SIGHUP end the server in order. With a log, SIGHUP opens
//!    it again.
//! 3. SIGXCPU, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF and SIGIO are logged once and ignored.
//!    Rust's runtime ignores SIGPIPE.
//! 4. SIGQUIT ends the process immediately, and is recorded for the next server (`last_end.rs`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;
use std::thread;

use anyhow::{Context, Result};
use signal_hook::consts::{
    SIGALRM, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM,
    SIGXCPU, SIGXFSZ,
};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};

use crate::server::Stop;
use crate::{last_end, log};

/// Signals without a meaning for a server.
const IGNORED: [i32; 7] = [SIGXCPU, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO];

/// From now on, a write beyond the limit of file sizes fails, and does not end the process.
pub fn survive_file_size_limit() -> Result<()> {
    // The flag is not read: the error of the write shows what happened.
    let flag = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGXFSZ, flag).context("take signals").map(drop)
}

/// Takes the signals of a server: those that mean "end" become a message to the main thread.
pub fn take(stop: Sender<Stop>) -> Result<()> {
    let taken = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];
    let mut signals = Signals::new(taken.iter().chain(&IGNORED)).context("take signals")?;
    let mut ignored = BTreeSet::new();
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            match signal {
                SIGHUP if reopens_log() => {}
                SIGQUIT => end_at_once(signal),
                _ if IGNORED.contains(&signal) => {
                    let is_first = ignored.insert(signal);
                    if is_first {
                        log::line(&format!("{}: ignored, as later ones will be", named(signal)));
                    }
                }
                _ if stop.send(Stop::Signal(signal)).is_err() => return,
                _ => {}
            }
        }
    })?;
    Ok(())
}

/// Opens the log again. Returns whether there is a log.
fn reopens_log() -> bool {
    match log::reopen() {
        Ok(true) => log::line("SIGHUP: the log was reopened"),
        Ok(false) => return false,
        Err(error) => log::line(&format!("SIGHUP: the log cannot be reopened: {error}")),
    }
    true
}

fn end_at_once(signal: i32) {
    let named = named(signal);
    log::line(&format!("this server ends immediately on {named}"));
    last_end::record(&format!("by {named}"));
    // It does not return, since the default action ends the process.
    let _ = emulate_default_handler(signal);
}

/// `signal 15 (SIGTERM)`.
pub fn named(signal: i32) -> String {
    match signal_name(signal) {
        Some(name) => format!("signal {signal} ({name})"),
        None => format!("signal {signal}"),
    }
}
