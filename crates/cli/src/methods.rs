//! The methods of the control protocol: each is a few lines between JSON and the device.
//!
//! Long work sends several answers if the caller wants them: `Drain`, and `Remove` with `drain` or
//! `wipe`, send their progress, and the others send beats (`work.rs`). When the caller is gone, the
//! next answer cannot be sent, and the work stops at that point without a loss.

use std::time::Duration;

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};
use udm::base::limits::{Limit, limit};
use udm::device::SlowRequest;
use udm::target::{OnlyCached, TargetLimits};

use crate::control::{Answer, Call, INTERFACE, MESSAGE_BYTES_MAX};
use crate::ending::Removal;
use crate::runtime::{DeviceName, GONE_LOGS_MAX};
use crate::served::REST_MAX;
use crate::server::{CONNECTIONS_MAX, SEND_TIMEOUT, SILENCE_MAX, Server};
use crate::stalls::Stall;
use crate::work::{Ending, Progress, Say, WORK_SILENCE_MAX, Watch};
use crate::{ending, log, metrics};

/// The interface, in Varlink's own language.
const DESCRIPTION: &str = include_str!("udm.Device.varlink");

/// The same for a message, which may wait for the write-back of large pieces to a slow device.
const MESSAGE_SILENCE_MAX: Duration = Duration::from_secs(300);

/// Every stated maximum of a server.
pub fn limits() -> Vec<Limit> {
    let mut all = udm::build::limits();
    all.extend(udm_export::limits());
    all.extend([
        limit("control_connections", CONNECTIONS_MAX as u64, "commands at work at a time"),
        limit("control_message_bytes", MESSAGE_BYTES_MAX as u64, "a call or an answer"),
        limit("control_silence_seconds", SILENCE_MAX.as_secs(), "between two calls of a command"),
        limit("control_send_seconds", SEND_TIMEOUT.as_secs(), "to send an answer to a command"),
        limit("log_bytes", log::LOG_BYTES_MAX, "a log; the previous log may be as long"),
        limit("gone_logs", GONE_LOGS_MAX as u64, "logs of devices that are gone"),
        limit(
            "work_silence_seconds",
            WORK_SILENCE_MAX.as_secs(),
            "a change that reports no progress",
        ),
        limit("rest_seconds", REST_MAX.as_secs(), "a removal's wait for requests in flight"),
    ]);
    all
}

/// Carries out one call and sends its answers; `is_gone`: whether the caller has hung up. An error
/// means that the connection cannot be used any more. Errors of the call itself are answers.
pub fn answer(
    server: &Server,
    call: &Call,
    send: &mut Say<'_>,
    is_gone: &(dyn Fn() -> bool + Sync),
) -> Result<()> {
    // The call may find a change, such as a file that was cut short, which the log must have too.
    udm::queue::note_work();
    let Some((interface, method)) = call.method.rsplit_once('.') else {
        let parameters = json!({ "interface": call.method });
        return send(Answer::protocol("InterfaceNotFound", parameters));
    };
    match interface {
        INTERFACE => {}
        "org.varlink.service" => return send(introspect(method, &call.parameters)),
        _ => {
            let parameters = json!({ "interface": interface });
            return send(Answer::protocol("InterfaceNotFound", parameters));
        }
    }
    let mut progress = Progress { more: call.more, send: &mut *send, is_gone, lost: None };
    let result = carry_out(server, method, &call.parameters, &mut progress);
    if let Some(lost) = progress.lost {
        return Err(lost);
    }
    match result {
        Ok(Done::Value(value)) => send(Answer::done(value)),
        Ok(Done::Removed(ending)) => {
            let answer = match ending.wait(call.more, is_gone, WORK_SILENCE_MAX, send)? {
                Ok(value) => Answer::done(value),
                Err(error) => Answer::failed(&error),
            };
            // The main thread ends the process when `ending` is dropped.
            send(answer)
        }
        Err(Failure::BadParameters(why)) => {
            let parameters = json!({ "parameter": why });
            send(Answer::protocol("InvalidParameter", parameters))
        }
        Err(Failure::NoSuchMethod) => {
            send(Answer::protocol("MethodNotFound", json!({ "method": call.method })))
        }
        Err(Failure::Refused(error)) => send(Answer::failed(&error)),
    }
}

/// The result of a method.
enum Done {
    Value(Value),
    /// The end has begun.
    Removed(Ending),
}

enum Failure {
    NoSuchMethod,
    BadParameters(String),
    Refused(anyhow::Error),
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Failure {
        Failure::Refused(error)
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Failure {
        Failure::BadParameters(error.to_string())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TableParameters {
    #[serde(default)]
    inactive: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OnlyCachedParameters {
    #[serde(default)]
    sample: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageParameters {
    sector: u64,
    words: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadParameters {
    table: String,
    directory: std::path::PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RenameParameters {
    to: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportParameters {
    uri: String,
    #[serde(default)]
    force: bool,
}

fn carry_out(
    server: &Server,
    method: &str,
    parameters: &Value,
    progress: &mut Progress<'_, '_>,
) -> Result<Done, Failure> {
    let given = parameters;
    let parameters = if parameters.is_null() { json!({}) } else { parameters.clone() };
    let served = &server.served;
    let value = match method {
        "Status" => {
            Nothing::deserialize(parameters)?;
            json!({ "lines": served.status(), "notes": served.troubles() })
        }
        "Table" => {
            let wanted = TableParameters::deserialize(parameters)?;
            json!({ "lines": served.table(wanted.inactive) })
        }
        "Configuration" | "Info" | "Limits" => {
            Nothing::deserialize(parameters)?;
            match method {
                "Configuration" => configuration(server)?,
                "Info" => info(server),
                _ => stated_limits(server),
            }
        }
        "OnlyCached" => {
            let wanted = OnlyCachedParameters::deserialize(parameters)?;
            let moved = || 0;
            let (samples, unread) = match wanted.sample {
                true => {
                    let sample = |watch: &Watch| served.sample_only_cached(watch);
                    progress.watched(method, WORK_SILENCE_MAX, &moved, sample)?
                }
                false => (0, 0),
            };
            let look = |_: &Watch| Ok(served.only_cached());
            let lines = progress.watched(method, MESSAGE_SILENCE_MAX, &moved, look)?;
            let line = |(start, only): &(u64, OnlyCached)| {
                let OnlyCached { ranges, is_exact } = only;
                json!({ "start": start, "ranges": ranges, "is_exact": is_exact })
            };
            let lines: Vec<Value> = lines.iter().map(line).collect();
            json!({ "lines": lines, "samples": samples, "unread": unread })
        }
        "Message" | "Suspend" | "Resume" | "Flush" | "Load" | "Export" | "Unexport" => {
            change(server, method, parameters, progress)?
        }
        "Rename" => {
            let to = RenameParameters::deserialize(parameters)?.to;
            let to: DeviceName = to.parse().map_err(Failure::BadParameters)?;
            server.rename(&to)?;
            json!({})
        }
        "Drain" => {
            Nothing::deserialize(parameters)?;
            ending::drain(server, progress)?;
            json!({ "dirty_bytes": served.dirty().bytes })
        }
        "Remove" => {
            let remove = Removal::deserialize(parameters)?;
            return Ok(Done::Removed(ending::remove(server, &remove, progress)?));
        }
        _ => return Err(Failure::NoSuchMethod),
    };
    if matches!(method, "Message" | "Suspend" | "Resume" | "Load" | "Export" | "Unexport") {
        log::line(&format!("{}: {} {}", server.name(), method.to_lowercase(), shown(given)));
    }
    Ok(Done::Value(value))
}

/// Carries out a change that may wait for a device or another thread. If the caller goes away, udm
/// undoes an incomplete suspend, a loaded table and a new export. It cannot undo a message or a
/// flush that the devices already have, a resume, or the closing of an export.
fn change(
    server: &Server,
    method: &str,
    parameters: Value,
    progress: &mut Progress<'_, '_>,
) -> Result<Value, Failure> {
    let served = &server.served;
    let still = || 0;
    Ok(match method {
        "Message" => {
            let message = MessageParameters::deserialize(parameters)?;
            let moved = || served.dirty().bytes;
            let carry_out = |watch: &_| served.message(message.sector, &message.words, watch);
            let text = progress.watched(method, MESSAGE_SILENCE_MAX, &moved, carry_out)?;
            json!({ "text": text })
        }
        "Load" => {
            let load = LoadParameters::deserialize(parameters)?;
            let how = served.how();
            let moved = || how.progress.look().map_or(0, |step| step.done + 1);
            let carry_out = |watch: &_| served.load(&load.table, &load.directory, &how, watch);
            json!({ "notes": progress.watched(method, WORK_SILENCE_MAX, &moved, carry_out)? })
        }
        "Export" => {
            let export = ExportParameters::deserialize(parameters)?;
            let open = |watch: &Watch| {
                let export = served.add_export(&export.uri)?;
                watch.check().inspect_err(|_| drop(served.close_export(&export.uri, true)))?;
                Ok(export)
            };
            json!({ "export": progress.watched(method, WORK_SILENCE_MAX, &still, open)?.json() })
        }
        "Unexport" => {
            let export = ExportParameters::deserialize(parameters)?;
            let close = |_: &_| served.remove_export(&export.uri, export.force);
            progress.watched(method, WORK_SILENCE_MAX, &still, close)?;
            json!({})
        }
        _ => {
            Nothing::deserialize(parameters)?;
            let carry_out = |watch: &_| match method {
                "Suspend" => served.suspend(watch),
                "Resume" => served.resume(watch).map(|_change| server.note_table()),
                _ => served.flush(),
            };
            progress.watched(method, WORK_SILENCE_MAX, &still, carry_out)?;
            json!({})
        }
    })
}

/// Parameters in a short form for a log line.
fn shown(parameters: &Value) -> String {
    if parameters.as_object().is_none_or(serde_json::Map::is_empty) {
        return String::new();
    }
    let text = parameters.to_string();
    if text.len() <= 200 { text } else { text.chars().take(200).chain("...".chars()).collect() }
}

/// All facts, for `info` and metrics.
fn info(server: &Server) -> Value {
    let served = &server.served;
    let (slow, slow_total) = served.slow_requests();
    let slow_value = |slow: &SlowRequest| {
        json!({
            "request": slow.what(),
            "seconds": slow.seconds(),
            "waits_for": slow.waits_for,
        })
    };
    let stall_value = |stall: &Stall| {
        json!({
            "start": stall.start,
            "waits_for": stall.device,
            "seconds": stall.seconds,
        })
    };
    let name = server.name();
    let watched = udm::queue::watched();
    json!({
        "name": name.as_str(),
        "state": if served.is_suspended() { "suspended" } else { "active" },
        "pid": std::process::id(),
        "version": env!("CARGO_PKG_VERSION"),
        "started": log::timestamp(server.started),
        "size_bytes": served.size_bytes(),
        "limits": limits_json(served.limits()),
        "is_read_only": served.is_read_only(),
        "has_inactive_table": served.has_inactive_table(),
        "clients": served.clients(),
        "exports": served.exports_json(),
        "watch": {
            "nanoseconds": watched.nanos,
            "caught": watched.caught,
            "missed": watched.missed,
        },
        "metrics": server.metrics.map(|address| format!("http://{address}/metrics")),
        "dirty_bytes": served.dirty().bytes,
        "is_writeback_failing": served.dirty().is_failing,
        "slow_requests": slow.iter().map(slow_value).collect::<Vec<Value>>(),
        "slow_requests_total": slow_total,
        "stalls": served.stalls().iter().map(stall_value).collect::<Vec<Value>>(),
        "notes": served.troubles(),
        "lines": served.lines(),
        "log": server.log(),
        "control": server.runtime.control(&name).display().to_string(),
    })
}

/// The words that create the device again.
fn configuration(server: &Server) -> Result<Value> {
    let served = &server.served;
    served.refuse_ending()?;
    let exports: Vec<_> = served.exports().into_iter().map(|export| export.uri).collect();
    // An end that began meanwhile has closed some of them.
    served.refuse_ending()?;
    Ok(json!({
        "table": served.given_table(),
        "exports": exports,
        "queues": served.queues,
        "metrics": server.metrics,
    }))
}

/// All maxima of this server.
fn stated_limits(server: &Server) -> Value {
    let limit =
        |limit: Limit| json!({ "name": limit.name, "value": limit.value, "about": limit.about });
    let limits: Vec<Value> = limits().into_iter().map(limit).collect();
    json!({ "name": server.name().as_str(), "limits": limits })
}

/// The answer to a scrape over HTTP.
pub fn metrics_text(server: &Server) -> String {
    udm::queue::note_work();
    metrics::text(&[info(server)], &[])
}

/// Varlink's calls about the service itself.
fn introspect(method: &str, parameters: &Value) -> Answer {
    match method {
        "GetInfo" => Answer::done(json!({
            "vendor": "udm",
            "product": "udm",
            "version": env!("CARGO_PKG_VERSION"),
            "url": "",
            "interfaces": ["org.varlink.service", INTERFACE],
        })),
        "GetInterfaceDescription" => match parameters.get("interface").and_then(Value::as_str) {
            Some(INTERFACE) => Answer::done(json!({ "description": DESCRIPTION })),
            other => Answer::protocol("InterfaceNotFound", json!({ "interface": other })),
        },
        _ => Answer::protocol("MethodNotFound", json!({ "method": method })),
    }
}

fn limits_json(limits: TargetLimits) -> Value {
    json!({
        "block_bytes": limits.block_bytes,
        "physical_block_bytes": limits.physical_bytes,
        "minimum_io_bytes": limits.minimum_bytes,
        "optimal_io_bytes": limits.optimal_bytes,
        "discard_bytes": limits.has_discard.then_some(limits.discard_bytes),
    })
}
