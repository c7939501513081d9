//! `wait`: until a device serves, is clean, or is gone.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use udm::units::human_bytes;

use super::print_result;
use crate::args::{Until, WaitArgs};
use crate::control::{Absent, Client, Hung, QUESTION_TIMEOUT};
use crate::runtime::RuntimeDir;

/// The time that a server has for an answer, even after the timeout has expired.
const ANSWER_MIN: Duration = Duration::from_millis(500);

/// Time between two checks.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// `udm wait`.
pub fn wait(args: &WaitArgs) -> Result<()> {
    let time = args.timeout.as_ref().and_then(|timeout| timeout.time);
    // A moment that cannot be expressed is never reached.
    let deadline = time.and_then(|time| Instant::now().checked_add(time));
    loop {
        // A server that does not answer at all takes no longer than the timeout either.
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let patience =
            left.map_or(QUESTION_TIMEOUT, |left| left.clamp(ANSWER_MIN, QUESTION_TIMEOUT));
        let Some(why) = what_is_missing(args, patience)? else {
            return print_result(args.json, "", &json!({ "name": args.name.as_str() }));
        };
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if let (Some(Duration::ZERO), Some(timeout)) = (left, &args.timeout) {
            bail!("{}: {why} after {} s", args.name, timeout.given);
        }
        thread::sleep(left.map_or(LOOK_EVERY, |left| left.min(LOOK_EVERY)));
    }
}

/// The condition that is still missing for the awaited state.
fn what_is_missing(args: &WaitArgs, patience: Duration) -> Result<Option<String>> {
    let runtime = RuntimeDir::open()?;
    let info = match Client::find_within(&runtime, &args.name, patience)? {
        Ok(mut client) => match client.ask_within("Info", json!({}), patience) {
            Ok(info) => info,
            Err(error) if error.is::<Hung>() => return Err(error),
            // The server ended during the question; the next check determines how.
            Err(_) => return Ok(Some("its server does not answer".into())),
        },
        Err(absent) => {
            return match (args.until, absent) {
                (Until::Removed, Absent::NoDevice) => Ok(None),
                (Until::Serving, Absent::NoDevice) => Ok(Some("there is no such device".into())),
                (Until::Serving | Until::Removed, Absent::Died) => {
                    Ok(Some("its server died and was not started again".into()))
                }
                (Until::Clean, _) => Client::connect(&runtime, &args.name).map(|_| None),
            };
        }
    };
    Ok(match args.until {
        Until::Serving if info["state"] == "active" => None,
        Until::Serving => Some("it is suspended".into()),
        Until::Removed => Some("it still exists".into()),
        Until::Clean => match info["dirty_bytes"].as_u64() {
            Some(0) => None,
            dirty => Some(format!("{} are still dirty", human_bytes(dirty.unwrap_or(0)))),
        },
    }
    .filter(|_| !matches!(info, Value::Null)))
}
