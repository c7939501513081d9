//! What the control protocol's methods mean: each is a few lines between JSON and the device.
//!
//! Long work (`Drain`, `Remove` with `drain`) answers again and again if the caller wants more
//! than one answer; when the caller goes away, the next answer cannot be sent and the work stops
//! there, with everything safe.

use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use udm::limits::Limit;
use udm::units::human_bytes;

use crate::control::{Answer, Call, INTERFACE};
use crate::runtime::DeviceName;
use crate::server::{Server, Stop, limits};
use crate::{log, metrics};

/// The interface, in Varlink's own language.
const DESCRIPTION: &str = include_str!("udm.Device.varlink");

/// Time between two answers about progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// How long a client that has hung up may still count as connected: its program has ended, and
/// the next command may well be `remove`.
const GOODBYE_MAX: Duration = Duration::from_secs(1);
/// Time between two looks at whether it is gone.
const GOODBYE_EVERY: Duration = Duration::from_millis(10);

/// Sends an answer; fails when nobody hears it.
type Send<'a> = dyn FnMut(Answer) -> Result<()> + 'a;

/// Carries out one call and sends its answers. An error means: the connection is of no use any
/// more. What goes wrong with the call itself is an answer.
pub fn answer(server: &Server, call: &Call, send: &mut Send<'_>) -> Result<()> {
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
    let mut progress = Progress { more: call.more, send: &mut *send, lost: None };
    let result = carry_out(server, method, &call.parameters, &mut progress);
    if let Some(lost) = progress.lost {
        return Err(lost);
    }
    match result {
        Ok(Done::Value(value)) => send(Answer::done(value)),
        Ok(Done::Removed(removed)) => {
            let answer = match removed.recv()? {
                Ok(value) => Answer::done(value),
                Err(error) => Answer::failed(&error),
            };
            // The main thread goes on to end the process when `removed` is dropped.
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

/// What a method came to.
enum Done {
    Value(Value),
    /// The end has begun; its result comes from the main thread.
    Removed(std::sync::mpsc::Receiver<Result<Value>>),
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

/// Answers in between.
struct Progress<'a, 'b> {
    more: bool,
    send: &'a mut Send<'b>,
    lost: Option<anyhow::Error>,
}

impl Progress<'_, '_> {
    fn report(&mut self, value: Value) -> Result<()> {
        if self.more
            && let Err(error) = (self.send)(Answer::so_far(value))
        {
            self.lost = Some(error);
            bail!("the caller is gone");
        }
        Ok(())
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveParameters {
    #[serde(default)]
    drain: bool,
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
        "Info" => {
            Nothing::deserialize(parameters)?;
            info(server)
        }
        "Limits" => {
            Nothing::deserialize(parameters)?;
            stated_limits(server)
        }
        "Message" => {
            let message = MessageParameters::deserialize(parameters)?;
            json!({ "text": served.message(message.sector, &message.words)? })
        }
        "Suspend" | "Resume" | "Flush" => {
            Nothing::deserialize(parameters)?;
            match method {
                "Suspend" => served.suspend()?,
                "Resume" => served.resume()?,
                _ => served.flush()?,
            }
            json!({})
        }
        "Load" => {
            let load = LoadParameters::deserialize(parameters)?;
            served.load(&load.table, &load.directory)?;
            json!({})
        }
        "Rename" => {
            let to = RenameParameters::deserialize(parameters)?.to;
            let to: DeviceName = to.parse().map_err(Failure::BadParameters)?;
            server.rename(&to)?;
            json!({})
        }
        "Export" => {
            let export = ExportParameters::deserialize(parameters)?;
            json!({ "door": served.add_export(&export.uri)? })
        }
        "Unexport" => {
            let export = ExportParameters::deserialize(parameters)?;
            served.remove_export(&export.uri, export.force)?;
            json!({})
        }
        "Drain" => {
            Nothing::deserialize(parameters)?;
            drain(server, progress)?;
            json!({ "dirty_bytes": served.dirty().bytes })
        }
        "Remove" => {
            let remove = RemoveParameters::deserialize(parameters)?;
            return Ok(remove_device(server, &remove, progress)?);
        }
        _ => return Err(Failure::NoSuchMethod),
    };
    if matches!(method, "Message" | "Suspend" | "Resume" | "Load" | "Export" | "Unexport") {
        log::line(&format!("{}: {} {}", server.name(), method.to_lowercase(), shown(given)));
    }
    Ok(Done::Value(value))
}

/// Parameters as a log line shows them: short.
fn shown(parameters: &Value) -> String {
    if parameters.as_object().is_none_or(serde_json::Map::is_empty) {
        return String::new();
    }
    let text = parameters.to_string();
    if text.len() <= 200 { text } else { text.chars().take(200).chain("...".chars()).collect() }
}

/// Writes everything back, and tells how it goes on.
fn drain(server: &Server, progress: &mut Progress<'_, '_>) -> Result<()> {
    let _draining = server.served.start_draining();
    loop {
        let dirty = server.served.dirty();
        progress.report(json!({ "dirty_bytes": dirty.bytes, "is_failing": dirty.is_failing }))?;
        if let Some(why) = server.served.why_not_drained() {
            bail!(why);
        }
        if dirty.bytes == 0 {
            return Ok(());
        }
        if server.is_stopping.load(Ordering::SeqCst) {
            bail!("the device is being removed");
        }
        // Nothing is written back meanwhile.
        server.served.refuse_suspended()?;
        thread::sleep(PROGRESS_EVERY);
    }
}

/// Begins the end, unless clients are connected.
fn remove_device(
    server: &Server,
    remove: &RemoveParameters,
    progress: &mut Progress<'_, '_>,
) -> Result<Done> {
    let refuse_clients = || match clients_that_stay(server, remove.force) {
        0 => Ok(()),
        1 => Err(anyhow!("1 client is connected; disconnect it first, or use --force")),
        n => Err(anyhow!("{n} clients are connected; disconnect them first, or use --force")),
    };
    refuse_clients()?;
    if remove.drain {
        drain(server, progress)?;
        refuse_clients()?;
    }
    if !remove.force && server.served.would_lose_data() {
        bail!(
            "the cache device was deleted, and {} of dirty data end with this server: \
             use --drain to write them back first, or --force to lose them",
            human_bytes(server.served.dirty().bytes)
        );
    }
    if !remove.force && server.served.would_lose_origin() {
        let why = server.served.why_not_drained();
        bail!("{}, or use --force to lose it", why.unwrap_or_else(|| "it was deleted".into()));
    }
    if server.is_stopping.swap(true, Ordering::SeqCst) {
        bail!("the device is being removed already");
    }
    let (asked, removed) = sync_channel(0);
    server.stop.send(Stop::Removed(asked)).map_err(|_| anyhow!("the server is ending"))?;
    Ok(Done::Removed(removed))
}

/// Clients that are connected and have not just hung up; with `force`, they do not count.
fn clients_that_stay(server: &Server, force: bool) -> u64 {
    if force {
        return 0;
    }
    let deadline = Instant::now() + GOODBYE_MAX;
    loop {
        let clients = server.served.clients();
        if clients == 0 || Instant::now() >= deadline {
            return clients;
        }
        thread::sleep(GOODBYE_EVERY);
    }
}

/// All that is known, as `info` and metrics want it.
fn info(server: &Server) -> Value {
    let served = &server.served;
    let name = server.name();
    json!({
        "name": name.as_str(),
        "state": if served.is_suspended() { "suspended" } else { "active" },
        "pid": std::process::id(),
        "version": env!("CARGO_PKG_VERSION"),
        "started": log::timestamp(server.started),
        "size_bytes": served.size_bytes(),
        "has_inactive_table": served.has_inactive_table(),
        "clients": served.clients(),
        "exports": served.exports(),
        "metrics": server.metrics.map(|address| format!("http://{address}/metrics")),
        "dirty_bytes": served.dirty().bytes,
        "is_writeback_failing": served.dirty().is_failing,
        "notes": served.troubles(),
        "lines": served.lines(),
        "log": server.log(),
        "control": server.runtime.control(&name).display().to_string(),
    })
}

/// Every maximum that holds here.
fn stated_limits(server: &Server) -> Value {
    let limit =
        |limit: Limit| json!({ "name": limit.name, "value": limit.value, "about": limit.about });
    let limits: Vec<Value> = limits().into_iter().map(limit).collect();
    json!({ "name": server.name().as_str(), "limits": limits })
}

/// What a scrape over HTTP answers.
pub fn metrics_text(server: &Server) -> String {
    metrics::text(&[info(server)])
}

/// Varlink's questions about the service itself.
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
