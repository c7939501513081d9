//! Asking servers: of the devices that were named, or of all, in parallel and by one deadline, so
//! that a server that hangs delays no answer but its own.
//!
//! A device without an answer is one of three: `dead` (its server ended without clearing up),
//! `hung` (it is there and does not answer), `failed` (something else is wrong with its socket).
//! All commands use these words.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Error, Result, anyhow};
use serde_json::Value;

use crate::control::{Client, Hung, QUESTION_TIMEOUT, no_answer};
use crate::output::{Reported, print_error};
use crate::runtime::{DeviceName, RuntimeDir};

/// At most this many servers are asked at a time.
const ASKED_MAX: usize = 256;

/// The result of asking a device.
#[derive(Debug)]
pub enum Heard {
    /// Its server's answer.
    Answer(Value),
    /// No answer: the state of the device in one word, and why.
    Lost(&'static str, Error),
    /// There is no such device.
    NoDevice(Error),
}

/// Asks the servers of all `names`; `patience`: how long all of this takes at most.
pub fn ask_all(
    runtime: &RuntimeDir,
    names: &[DeviceName],
    method: &str,
    parameters: &Value,
    patience: Duration,
) -> Vec<Heard> {
    let deadline = Instant::now() + patience;
    let next = AtomicUsize::new(0);
    let heard: Vec<Mutex<Option<Heard>>> = names.iter().map(|_| Mutex::default()).collect();
    let ask = || {
        while let Some((at, name)) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            names.get(at).map(|name| (at, name))
        } {
            let answer = ask_one(runtime, name, method, parameters, deadline);
            if let Ok(mut slot) = heard[at].lock() {
                *slot = Some(answer);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..names.len().min(ASKED_MAX) {
            scope.spawn(ask);
        }
        ask();
    });
    let taken = heard.into_iter().map(|slot| slot.into_inner().ok().flatten());
    taken.map(|heard| heard.unwrap_or_else(|| Heard::Lost("failed", anyhow!("?")))).collect()
}

fn ask_one(
    runtime: &RuntimeDir,
    name: &DeviceName,
    method: &str,
    parameters: &Value,
    deadline: Instant,
) -> Heard {
    let left = || deadline.saturating_duration_since(Instant::now());
    let asked = match Client::find_within(runtime, name, left()) {
        Ok(Ok(mut client)) => client.ask_within(method, parameters.clone(), left()),
        Ok(Err(absent)) => {
            let why = no_answer(runtime, name, absent);
            return match absent {
                crate::control::Absent::NoDevice => Heard::NoDevice(why),
                crate::control::Absent::Died => Heard::Lost("dead", why),
            };
        }
        Err(error) => Err(error),
    };
    match asked {
        Ok(value) => Heard::Answer(value),
        Err(error) if error.is::<Hung>() => Heard::Lost("hung", error),
        Err(error) => Heard::Lost("failed", error),
    }
}

/// Asks the servers of `names`, or of all devices if there are none, and passes on each answer; for
/// a device without an answer, its state. The reason is printed, and makes the command fail in the
/// end. If only one device was named, that reason is the error returned.
pub fn ask_each(
    what: &str,
    names: &[DeviceName],
    method: &str,
    parameters: &Value,
    hear: &mut dyn FnMut(&DeviceName, Result<Value, &'static str>),
) -> Result<()> {
    let runtime = RuntimeDir::open()?;
    let is_all = names.is_empty();
    let listed = if is_all { runtime.names()? } else { names.to_vec() };
    let mut failed = None;
    let all_heard = ask_all(&runtime, &listed, method, parameters, QUESTION_TIMEOUT);
    for (name, heard) in listed.iter().zip(all_heard) {
        let error = match heard {
            Heard::Answer(value) => {
                hear(name, Ok(value));
                continue;
            }
            // It was removed since the directory was read.
            Heard::NoDevice(_) if is_all => continue,
            Heard::NoDevice(error) => error,
            Heard::Lost(_, error) if names.len() == 1 => error,
            Heard::Lost(state, error) => {
                hear(name, Err(state));
                error
            }
        };
        if names.len() == 1 {
            return Err(error);
        }
        print_error(what, &error);
        failed = Some(Reported);
    }
    failed.map_or(Ok(()), |reported| Err(reported.into()))
}
