//! The life of a server's process, from start to end.
//!
//! `udm create` starts this program again as `udm serve NAME`, hands it the spec on standard input,
//! and reads its standard output until the server serves or reports an error. From then on the
//! server is independent: it is in a session of its own, writes its output to `NAME.log`, and ends
//! on request (`udm remove`, SIGTERM, SIGINT) or when it is killed. SIGHUP opens the log again.
//!
//! Threads: the main thread waits for the end. Another thread accepts control connections and
//! starts a thread for each. The device's background and each client have queues of their own (see
//! `served.rs`).
//!
//! An orderly end closes the exports, brings the device to rest and leaves dirty data in the cache,
//! as the kernel does. Any panic is logged and aborts the process: no acknowledged data is lost,
//! and the next server continues.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use signal_hook::consts::SIGTERM;
use udm::table::Table;
use udm::units::human_bytes;

use crate::attach_progress::{Shown, Step, watched};
use crate::control::{AFTERLIFE_MAX, Answer, Call, Frames, Peer, is_alive};
use crate::loading::{canonical, current_directory, is_same_device};
use crate::runtime::{DeviceName, KeepLog, NameLock, RuntimeDir};
use crate::server::{CONNECTIONS_MAX, SEND_TIMEOUT, SILENCE_MAX, Server, Stop, set_title};
use crate::spec::Spec;
use crate::upkeep::Control;
use crate::work::Watch;
use crate::{dead, health_log, http, last_end, log, methods, process, signals};

/// Time between two checks of a lock that another process holds.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The error about a name whose server is alive.
pub const NAME_IS_USED: &str = "it exists already; remove it first or choose another name";

/// Runs in the background: the hidden command `serve`.
pub fn serve(name: &DeviceName) -> Result<()> {
    rustix::process::setsid().context("leave the session")?;
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let spec: Spec = serde_json::from_str(&text).context("what to serve, on standard input")?;
    if spec.name != name.as_str() {
        bail!("{name}: standard input names {:?}", spec.name);
    }
    log::lies_at(RuntimeDir::open()?.log(name));
    // Errors are ignored here: the last answer shows whether `create` still listens.
    let tell = |step: &Step| drop(write_step(std::io::stdout(), step));
    let started = watched(&spec.progress, tell, || start(&spec));
    let answer = match &started {
        Ok((_, _, ready)) => Answer::done(ready.clone()),
        Err(error) => Answer::failed(error),
    };
    let heard = tell_parent(&answer);
    let (server, stops, _) = started?;
    if heard.is_err() {
        log::line("the command that created this device is gone: removing the device");
        let _ = server.stop.send(Stop::Signal(SIGTERM));
    }
    run(server, &stops)
}

/// Writes the progress of the opening as one line.
pub fn write_step(mut out: impl Write, step: &Step) -> std::io::Result<()> {
    let text = serde_json::to_string(&Answer::so_far(json!(step)))?;
    writeln!(out, "{text}")?;
    out.flush()
}

/// Answers on standard output, then closes the streams that `create` passed on.
fn tell_parent(answer: &Answer) -> Result<()> {
    let text = serde_json::to_string(answer)?;
    let mut out = std::io::stdout();
    let told = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    let null = std::fs::File::open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
    Ok(told?)
}

/// Runs in the foreground; `ready` is called with the addresses where it serves.
pub fn serve_here(spec: &Spec, ready: impl FnOnce(&Value) -> Result<()>) -> Result<()> {
    let mut shown = Shown::new(&spec.name);
    let started = watched(&spec.progress, |step| shown.show(step), || start(spec));
    drop(shown);
    let (server, stops, facts) = started?;
    ready(&facts)?;
    run(server, &stops)
}

type Started = (Arc<Server>, Receiver<Stop>, Value);

/// Builds everything, up to the point where clients and commands can connect.
fn start(spec: &Spec) -> Result<Started> {
    log::abort_on_panic();
    let (stop, stops) = channel();
    signals::take(stop.clone())?;
    let runtime = Arc::new(RuntimeDir::open()?);
    let name: DeviceName = spec.name.parse().map_err(|why: String| anyhow!(why))?;
    set_title(&name);
    let is_fresh_log = log::length() == 0;
    let lock = take_lock(&runtime, &name)?;
    let last = lock.last_record().to_owned();
    let has_died = lock.is_inherited() && runtime.control(&name).exists();
    if has_died {
        refuse_another_table(spec, &runtime, &name).inspect_err(|_| {
            last_end::restore(lock.file(), &last);
            last_end::give_up();
        })?;
        let told = last_end::told(&last);
        log::line(&format!("{name}: the previous server died: {told}; continuing"));
    }
    runtime.forget_logs();
    match open_all(spec, &runtime, lock, stop) {
        Ok(server) => {
            server.note_table();
            if let Err(error) = health_log::keep(&server) {
                log::line(&format!(
                    "{name}: cannot start the thread that logs changes of the device: {error}"
                ));
            }
            let ready = server.ready();
            let exports = server.served.exports();
            let uris: Vec<&str> = exports.iter().map(|export| export.uri.as_str()).collect();
            let size = human_bytes(server.served.size_bytes());
            let uris = if uris.is_empty() { "no export".into() } else { uris.join(", ") };
            log::line(&format!("{name}: process {} serves {size} at {uris}", std::process::id()));
            for note in server.served.notes() {
                log::line(&format!("{name}: note: {note}"));
            }
            Ok((server, stops, ready))
        }
        Err(error) => {
            log::line(&format!("{name}: not created: {error:#}"));
            last_end::give_up();
            match runtime.try_lock(&name)? {
                // The files of a dead server are kept for the next attempt.
                Some(lock) if has_died => last_end::restore(lock.file(), &last),
                Some(lock) => {
                    let keep_log = if is_fresh_log { KeepLog::No } else { KeepLog::Yes };
                    runtime.clear(&lock, keep_log);
                }
                None => {}
            }
            Err(error)
        }
    }
}

/// Opens the device and its exports, after a comparison with the media of dead servers.
fn open_all(
    spec: &Spec,
    runtime: &Arc<RuntimeDir>,
    lock: NameLock,
    stop: Sender<Stop>,
) -> Result<Arc<Server>> {
    let directory = current_directory();
    let table = canonical(&spec.table, &directory).and_then(|text| Table::parse(&text).ok());
    let Some(table) = table else { return listen(spec, Arc::clone(runtime), lock, stop) };
    let before = dead::before(&table, runtime)?;
    before.iter().for_each(|dead| dead.expect_end(runtime, &table));
    let listened = listen(spec, Arc::clone(runtime), lock, stop);
    // The caches were opened even if serving them failed.
    before.iter().for_each(|dead| dead.remember_again(runtime, &table));
    listened
}

/// The name still belongs to a device whose server died: another device must not take it silently.
fn refuse_another_table(spec: &Spec, runtime: &RuntimeDir, name: &DeviceName) -> Result<()> {
    let directory = current_directory();
    let wanted = canonical(&spec.table, &directory);
    let had = std::fs::read_to_string(runtime.table(name));
    let (Some(wanted), Ok(had)) = (wanted, had) else { return Ok(()) };
    // A server of an older version left it empty if it died too early.
    if !had.is_empty() && !is_same_device(&wanted, &had) {
        bail!(
            "{name}: its server died, and it had another table ({}): create the device with that \
             table to continue, or free the name with `udm remove --force {name}`",
            had.trim_end().replace('\n', ", ")
        );
    }
    Ok(())
}

/// Takes the lock of `name`, unless its server is alive. Waits for a server that is dying, ending
/// or starting.
fn take_lock(runtime: &RuntimeDir, name: &DeviceName) -> Result<NameLock> {
    let deadline = Instant::now() + AFTERLIFE_MAX;
    loop {
        if let Some(lock) = runtime.try_lock(name)? {
            last_end::begin(lock.file());
            return Ok(lock);
        }
        if is_alive(runtime, name) {
            bail!("{name}: {NAME_IS_USED}");
        }
        if Instant::now() >= deadline {
            let what = runtime.holder(name).map_or_else(|| "try again".into(), process::doing);
            bail!("{name}: its server is starting, ending or hanging, and does not answer: {what}");
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// All steps that can fail because of the user's options. The control socket is opened last, so
/// that a command that can connect finds a device. Clients are admitted after all other steps have
/// succeeded.
fn listen(
    spec: &Spec,
    runtime: Arc<RuntimeDir>,
    lock: NameLock,
    stop: Sender<Stop>,
) -> Result<Arc<Server>> {
    let metrics = spec.metrics.map(http::listen).transpose()?;
    let name = lock.name().clone();
    let mut server = Server::build(spec, runtime, lock, stop)?;
    server.metrics = metrics.as_ref().map(|(_, address)| *address);
    let control = Control::open(&server.runtime, &name);
    let control = control.and_then(|control| server.served.let_in().map(|()| control));
    let control = control.inspect_err(|_| server.served.undo())?;
    let server = Arc::new(server);
    if let Some((listener, _)) = metrics {
        let shared = Arc::clone(&server);
        let answer = move || Ok(methods::metrics_text(&shared));
        thread::Builder::new()
            .name("metrics".into())
            .spawn(move || http::answer_all(&listener, &answer))?;
    }
    let shared = Arc::clone(&server);
    thread::Builder::new().name("control".into()).spawn(move || accept_all(&shared, control))?;
    Ok(server)
}

/// Waits for the end, and carries it out.
pub fn run(server: Arc<Server>, stops: &Receiver<Stop>) -> Result<()> {
    match stops.recv().context("no thread is left that could end this server")? {
        Stop::Signal(signal) => {
            server.served.end_for_good();
            let signal = signals::named(signal);
            log::line(&format!("{}: ending on {signal}", server.name()));
            last_end::record(&format!("during the orderly end that {signal} began"));
            let rested = server.served.rest_durably(&Watch::default());
            let trouble = rested.as_ref().err().map(|error| format!("{error:#}"));
            server.close(trouble.as_deref());
            rested
        }
        Stop::Removed { asked, trouble, wipe } => {
            last_end::record("during its removal");
            // The connection's thread needs a moment to hand the answer on; the process must not
            // end under it. It drops its receiver when that is done.
            let mut left = server.close(trouble.as_deref());
            if let Some(progress) = wipe
                && left["dirty_bytes"] == 0
                && trouble.is_none()
            {
                server.wipe(&mut left, &progress);
            }
            let _ = asked.send(Ok(left));
            while asked.send(Ok(Value::Null)).is_ok() {}
            Ok(())
        }
    }
}

/// Accepts control connections indefinitely, and looks after the files of the server.
fn accept_all(server: &Arc<Server>, mut control: Control) {
    loop {
        let Ok(stream) = control.next(server) else {
            // The process is probably out of descriptors: other threads get time to close theirs.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        let shared = Arc::clone(server);
        let spawned =
            thread::Builder::new().name("command".into()).spawn(move || converse(&shared, stream));
        if let Err(error) = spawned {
            log::line(&format!("cannot start a thread for a control connection: {error}"));
        }
    }
}

/// Answers the calls of one connection, in order.
fn converse(server: &Server, stream: UnixStream) {
    let others = server.connections.fetch_add(1, Ordering::SeqCst);
    let result = (|| -> Result<()> {
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        stream.set_write_timeout(Some(SEND_TIMEOUT))?;
        let mut frames = Frames::new(stream);
        if others >= CONNECTIONS_MAX {
            let busy = anyhow!("{CONNECTIONS_MAX} commands are already running; try again");
            return frames.send(&Answer::failed(&busy));
        }
        answer_all(server, &mut frames)
    })();
    server.connections.fetch_sub(1, Ordering::SeqCst);
    if let Err(error) = result {
        log::line(&format!("control connection closed: {error:#}"));
    }
}

/// Answers calls until there are no more, or until an invalid one. If this process was stopped, the
/// socket may contain old calls whose senders are gone: they are dropped.
pub fn answer_all<S: Peer>(server: &Server, frames: &mut Frames<S>) -> Result<()> {
    while let Some(call) = frames.receive::<Call>()? {
        if frames.stream().has_hung_up() {
            bail!("{} was not carried out: the caller has disconnected", call.method);
        }
        let shared = Mutex::new(&mut *frames);
        let frames = || shared.lock().unwrap_or_else(PoisonError::into_inner);
        let is_gone = || frames().stream().has_hung_up();
        let answered =
            methods::answer(server, &call, &mut |answer| frames().send(&answer), &is_gone);
        udm::queue::note_work();
        answered?;
    }
    Ok(())
}
