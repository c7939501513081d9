//! What the control protocol's methods mean: each is a few lines between JSON and the device.
//!
//! Long work sends several answers if the caller wants them: `Drain`, and `Remove` with `drain` or
//! `wipe`, send their progress, the others that they are still at work (`work.rs`). When the caller
//! is gone, the next answer cannot be sent and the work stops there, with everything safe.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use udm::device::LateRequest;
use udm::limits::{Limit, limit};
use udm::target::OnlyCached;
use udm::units::human_bytes;

use crate::control::{Answer, Call, INTERFACE, MESSAGE_BYTES_MAX};
use crate::runtime::{DeviceName, GONE_LOGS_MAX};
use crate::served::REST_MAX;
use crate::server::{CONNECTIONS_MAX, SEND_TIMEOUT, SILENCE_MAX, Server, Stop};
use crate::work::{self, Ending, Say, Watch, Work};
use crate::{log, metrics};

/// The interface, in Varlink's own language.
const DESCRIPTION: &str = include_str!("udm.Device.varlink");

/// Time between two progress answers.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// How long a change of a device may take without any progress.
pub const WORK_SILENCE_MAX: Duration = Duration::from_secs(60);

/// The same for a message, which may wait for the write-back of large pieces to a slow device.
const MESSAGE_SILENCE_MAX: Duration = Duration::from_secs(300);

/// How long a client that has hung up may still count as connected: its program has ended, and the
/// next command may well be `remove`.
const GOODBYE_MAX: Duration = Duration::from_secs(1);
/// Time between two checks whether it is gone.
const GOODBYE_EVERY: Duration = Duration::from_millis(10);

/// Every stated maximum of a server.
pub fn limits() -> Vec<Limit> {
    let mut all = udm::world::limits();
    all.extend(udm_export::limits());
    all.extend([
        limit("control_connections", CONNECTIONS_MAX as u64, "commands at work at a time"),
        limit("control_message_bytes", MESSAGE_BYTES_MAX as u64, "a call or an answer"),
        limit("control_silence_seconds", SILENCE_MAX.as_secs(), "between two calls of a command"),
        limit("control_send_seconds", SEND_TIMEOUT.as_secs(), "until a command takes an answer"),
        limit("log_bytes", log::LOG_BYTES_MAX, "a log, and the one before it as many"),
        limit("gone_logs", GONE_LOGS_MAX as u64, "logs of devices that are gone"),
        limit("work_silence_seconds", WORK_SILENCE_MAX.as_secs(), "a change without a sign of it"),
        limit("rest_seconds", REST_MAX.as_secs(), "a removal's wait for requests in flight"),
    ]);
    all
}

/// Carries out one call and sends its answers. An error means that the connection cannot be used
/// any more. Errors of the call itself are answers.
pub fn answer(server: &Server, call: &Call, send: &mut Say<'_>) -> Result<()> {
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
        Ok(Done::Removed(ending)) => {
            let answer = match ending.wait(call.more, WORK_SILENCE_MAX, send)? {
                Ok(value) => Answer::done(value),
                Err(error) => Answer::failed(&error),
            };
            // The main thread goes on to end the process when `ending` is dropped.
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

/// Sends the answers before the last one.
struct Progress<'a, 'b> {
    more: bool,
    send: &'a mut Say<'b>,
    lost: Option<anyhow::Error>,
}

impl Progress<'_, '_> {
    /// Does `work` with beats in between.
    fn watched<T>(
        &mut self,
        what: &str,
        silence_max: Duration,
        moved: &(dyn Fn() -> u64 + Sync),
        carry_out: impl FnOnce(&Watch) -> Result<T>,
    ) -> Result<T> {
        let work = Work { what, silence_max, moved, tell: &|| json!({}), more: self.more };
        match work::watched(&work, self.send, carry_out) {
            Ok(result) => result,
            Err(lost) => {
                self.lost = Some(lost);
                bail!("the caller is gone")
            }
        }
    }

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
    #[serde(default)]
    wipe: bool,
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
        "OnlyCached" => {
            Nothing::deserialize(parameters)?;
            let moved = || 0;
            let look = |_: &Watch| Ok(served.only_cached());
            let lines = progress.watched(method, MESSAGE_SILENCE_MAX, &moved, look)?;
            let line = |(start, only): &(u64, OnlyCached)| {
                let OnlyCached { ranges, is_exact } = only;
                json!({ "start": start, "ranges": ranges, "is_exact": is_exact })
            };
            json!({ "lines": lines.iter().map(line).collect::<Vec<_>>() })
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

/// Carries out what may wait for a device or another thread. If the caller goes, these are undone:
/// a suspend that is not complete, a loaded table, a new door. These cannot be: a message and a
/// flush that the devices have, a resume, a door that is closed.
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
            progress.watched(method, WORK_SILENCE_MAX, &moved, carry_out)?;
            json!({})
        }
        "Export" => {
            let export = ExportParameters::deserialize(parameters)?;
            let open = |watch: &Watch| {
                let door = served.add_export(&export.uri)?;
                watch.check().inspect_err(|_| drop(served.remove_export(&door.uri, true)))?;
                Ok(door)
            };
            json!({ "door": progress.watched(method, WORK_SILENCE_MAX, &still, open)?.json() })
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
                "Resume" => served.resume(watch),
                _ => served.flush(),
            };
            progress.watched(method, WORK_SILENCE_MAX, &still, carry_out)?;
            if method == "Resume" {
                server.note_table();
            }
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

/// Writes everything back, with progress answers.
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
    if remove.wipe {
        refuse_wipe(server, remove)?;
    }
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
    let rested = rest(server, remove.force, progress);
    if rested.is_err() {
        server.is_stopping.store(false, Ordering::SeqCst);
    }
    let trouble = rested?;
    if remove.wipe && server.served.dirty().bytes > 0 {
        // Written between the last look and the rest.
        server.is_stopping.store(false, Ordering::SeqCst);
        server.served.go_on(false)?;
        bail!("not removed: a client wrote once more; the device goes on, give the command again");
    }
    let (asked, result) = sync_channel(0);
    let ending = Ending { result, wipe: Arc::default() };
    let wipe = remove.wipe.then(|| Arc::clone(&ending.wipe));
    let stop = Stop::Removed { asked, trouble, wipe };
    server.stop.send(stop).map_err(|_| anyhow!("the server is ending"))?;
    Ok(Done::Removed(ending))
}

/// An error if what the device has cannot be wiped, however clean it is.
fn refuse_wipe(server: &Server, remove: &RemoveParameters) -> Result<()> {
    let served = &server.served;
    if !remove.drain || remove.force {
        bail!("a cache is wiped only after it was drained, and never by force");
    }
    if served.cache().is_none() {
        bail!("there is no cache that could be wiped");
    }
    if served.is_read_only() {
        bail!("its devices are only read, so nothing is wiped");
    }
    match served.quarantined_bytes() {
        0 => Ok(()),
        bytes => bail!(
            "{} of its dirty data were damaged in the cache, and the origin has older data there: \
             wiped, nobody would know where; `udm inspect` lists it",
            human_bytes(bytes)
        ),
    }
}

/// Brings the device to rest for its end. If that fails, or the caller is gone, the service goes on
/// as it was, so that a removal that failed has removed nothing; with `force`, the end comes
/// anyway, and the answer says what was wrong.
fn rest(server: &Server, force: bool, progress: &mut Progress<'_, '_>) -> Result<Option<String>> {
    let served = &server.served;
    let was_suspended = served.is_suspended();
    let carry_out = |watch: &Watch| {
        let rested = served.rest(watch);
        let is_wanted = watch.check();
        match (rested, is_wanted) {
            (Ok(()), Ok(())) => Ok(None),
            (Err(error), Ok(())) if force => Ok(Some(format!("{error:#}"))),
            (rested, is_wanted) => {
                let why = rested.and(is_wanted).map_or_else(|error| error, |()| anyhow!("?"));
                match served.go_on(was_suspended) {
                    Ok(()) => Err(why),
                    Err(error) => Err(anyhow!("{why:#}; and {error:#}")),
                }
            }
        }
    };
    let rested = progress.watched("Remove", WORK_SILENCE_MAX, &|| 0, carry_out);
    rested.map_err(|error| {
        let name = server.name();
        log::line(&format!("{name}: not removed: {error:#}"));
        anyhow!("not removed: {error:#}; the device goes on, `udm remove --force {name}` ends it")
    })
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

/// All facts, for `info` and metrics.
fn info(server: &Server) -> Value {
    let served = &server.served;
    let (late, late_total) = served.late_requests();
    let late_value = |late: &LateRequest| {
        json!({
            "request": late.what(),
            "seconds": late.seconds(),
            "waits_for": late.waits_for,
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
        "late_requests": late.iter().map(late_value).collect::<Vec<Value>>(),
        "late_requests_total": late_total,
        "notes": served.troubles(),
        "lines": served.lines(),
        "log": server.log(),
        "control": server.runtime.control(&name).display().to_string(),
    })
}

/// All maxima of this server.
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
