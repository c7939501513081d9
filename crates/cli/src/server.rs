//! The server of one device, from its first breath to its last.
//!
//! `udm create` starts this program again as `udm serve NAME`, hands it what to serve on standard
//! input, and waits on its standard output until it serves or says why not. From then on nobody
//! holds it: it leaves the session, its output goes to `NAME.log`, and it ends when it is told to
//! (`udm remove`, SIGTERM, SIGINT) or killed. SIGHUP opens the log anew.
//!
//! Threads: this one waits for the end; one accepts control connections and gives each a thread;
//! the device's background and each client have queues of their own (see `served.rs`).
//!
//! An orderly end closes the exports, brings the device to rest and leaves dirty data in the
//! cache, as the kernel does. Any panic is logged and aborts the process: nothing is lost by
//! that, the next server goes on.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use udm::attaching::AttachProgress;
use udm::limits::{Limit, limit};
use udm::units::human_bytes;

use crate::attaching::{Shown, Step, watched};
use crate::control::{AFTERLIFE_MAX, Answer, Call, Frames, MESSAGE_BYTES_MAX, Peer, is_alive};
use crate::loading::{canonical, is_same_device};
use crate::methods::WORK_SILENCE_MAX;
use crate::runtime::{DeviceName, GONE_LOGS_MAX, KeepLog, NameLock, RuntimeDir};
use crate::served::{REST_MAX, Served};
use crate::work::Watch;
use crate::{http, journal, log, methods, process};

/// Control connections at one time; commands are short, so more is somebody's mistake.
const CONNECTIONS_MAX: usize = 64;

/// How long a control connection may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// How long a command may take to read its answer.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between two looks at a lock that somebody else holds.
const LOOK_EVERY: Duration = Duration::from_millis(20);

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

/// What to serve: written by `create`, read by the server.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Spec {
    /// The device's name.
    pub name: String,
    /// The table's text.
    pub table: String,
    /// Ways in for clients.
    pub exports: Vec<String>,
    /// Connections served at most, if limited.
    pub queues: Option<u16>,
    /// Whether media that may hold something may be formatted.
    pub force_format: bool,
    /// Where metrics are answered.
    pub metrics: Option<SocketAddr>,
    /// How far the opening of the device has come.
    #[serde(skip)]
    pub progress: Arc<AttachProgress>,
}

/// Why the server ends.
#[derive(Debug)]
pub enum Stop {
    /// A signal asked for it.
    Signal(i32),
    /// `remove` asked for it and waits for the answer. The device is at rest, or it was to be
    /// forced, and there was trouble.
    Removed { asked: SyncSender<Result<Value>>, trouble: Option<String> },
}

/// A running server, as its threads share it.
#[derive(Debug)]
pub struct Server {
    /// The runtime directory.
    pub runtime: Arc<RuntimeDir>,
    /// The device and its ways in.
    pub served: Served,
    /// Where metrics are answered.
    pub metrics: Option<SocketAddr>,
    /// When it began to serve, in seconds since 1970.
    pub started: u64,
    /// Tells the main thread to end.
    pub stop: Sender<Stop>,
    /// Set when the end has begun: whoever waits for something gives up.
    pub is_stopping: AtomicBool,
    lock: Mutex<NameLock>,
    connections: AtomicUsize,
}

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
    // Whether anybody hears it is seen at its end.
    let tell = |step: &Step| drop(write_step(std::io::stdout(), step));
    let started = watched(&spec.progress, tell, || start(&spec));
    let answer = match &started {
        Ok((_, _, ready)) => Answer::done(ready.clone()),
        Err(error) => Answer::failed(error),
    };
    let heard = tell_parent(&answer);
    let (server, stops, _) = started?;
    if heard.is_err() {
        log::line("whoever created this device is gone: removing it again");
        let _ = server.stop.send(Stop::Signal(SIGTERM));
    }
    run(server, &stops)
}

/// Says on a line how far the opening is.
pub fn write_step(mut out: impl Write, step: &Step) -> std::io::Result<()> {
    let text = serde_json::to_string(&Answer::so_far(json!(step)))?;
    writeln!(out, "{text}")?;
    out.flush()
}

/// Answers on standard output, then lets go of what `create` gave.
fn tell_parent(answer: &Answer) -> Result<()> {
    let text = serde_json::to_string(answer)?;
    let mut out = std::io::stdout();
    let told = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    let null = std::fs::File::open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
    Ok(told?)
}

/// What the server of `name` is called among processes.
pub fn title(name: &DeviceName) -> String {
    format!("udm: {name}")
}

/// Calls this process by the device's name. The kernel keeps 15 bytes of it; what it was started
/// with stays in its command line.
fn set_title(name: &DeviceName) {
    // Where there is no /proc, it keeps the program's name.
    let _ = std::fs::write("/proc/self/comm", title(name));
}

/// Runs in the foreground; `ready` hears where it serves.
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
    take_signals(stop.clone())?;
    let runtime = Arc::new(RuntimeDir::open()?);
    let name: DeviceName = spec.name.parse().map_err(|why: String| anyhow!(why))?;
    set_title(&name);
    let is_fresh_log = log::length() == 0;
    let lock = take_lock(&runtime, &name)?;
    let has_died = lock.is_inherited() && runtime.control(&name).exists();
    if has_died {
        refuse_another_table(spec, &runtime, &name)?;
        log::line(&format!("{name}: the server before this one died; going on"));
    }
    runtime.forget_logs();
    match Server::listen(spec, Arc::clone(&runtime), lock, stop) {
        Ok(server) => {
            server.note_table();
            if let Err(error) = journal::keep(&server) {
                log::line(&format!("{name}: nobody watches the device for this log: {error}"));
            }
            let ready = server.ready();
            let doors = server.served.exports();
            let uris: Vec<&str> = doors.iter().map(|door| door.uri.as_str()).collect();
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
            // What a dead server left stays for the next try.
            if !has_died && let Some(lock) = runtime.try_lock(&name)? {
                let keep_log = if is_fresh_log { KeepLog::No } else { KeepLog::Yes };
                runtime.clear(&lock, keep_log);
            }
            Err(error)
        }
    }
}

/// A device whose server died is there still: another one does not take its name in silence.
fn refuse_another_table(spec: &Spec, runtime: &RuntimeDir, name: &DeviceName) -> Result<()> {
    let directory = std::env::current_dir().context("the current directory")?;
    let wanted = canonical(&spec.table, &directory);
    let had = std::fs::read_to_string(runtime.table(name));
    let (Some(wanted), Ok(had)) = (wanted, had) else { return Ok(()) };
    // A server of an older version left it empty when it died too early.
    if !had.is_empty() && !is_same_device(&wanted, &had) {
        bail!(
            "{name}: its server died, and it had another table ({}): that one goes on where it \
             was; `udm remove --force {name}` forgets the device, and then the name is free",
            had.trim_end().replace('\n', ", ")
        );
    }
    Ok(())
}

/// Nobody was told of the device: it goes again, and leaves nothing, neither on its media nor in
/// memory.
fn undo(served: &Served) {
    if served.rest(&Watch::default()).is_ok() {
        served.end();
    }
}

/// Takes the lock of `name`, unless its server is alive. A dying one, or one that is ending or
/// starting, is waited for.
fn take_lock(runtime: &RuntimeDir, name: &DeviceName) -> Result<NameLock> {
    let deadline = Instant::now() + AFTERLIFE_MAX;
    loop {
        if let Some(lock) = runtime.try_lock(name)? {
            return Ok(lock);
        }
        if is_alive(runtime, name) {
            bail!("{name}: it exists already; remove it first or take another name");
        }
        if Instant::now() >= deadline {
            let what = runtime.holder(name).map_or_else(|| "try again".into(), process::doing);
            bail!("{name}: its server is starting, ending or hanging, and does not answer: {what}");
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Turns the signals that mean "end" into the server's own message. SIGHUP means a new log where
/// there is one, and an end elsewhere: the terminal is gone.
fn take_signals(stop: Sender<Stop>) -> Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("take signals")?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if signal == SIGHUP {
                match log::reopen() {
                    Ok(true) => {
                        log::line("SIGHUP: the log was opened anew");
                        continue;
                    }
                    Ok(false) => {}
                    Err(error) => {
                        log::line(&format!("SIGHUP: the log cannot be opened anew: {error}"));
                        continue;
                    }
                }
            }
            if stop.send(Stop::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

impl Server {
    /// The device and its exports, without a thread that answers commands.
    pub fn build(
        spec: &Spec,
        runtime: Arc<RuntimeDir>,
        lock: NameLock,
        stop: Sender<Stop>,
    ) -> Result<Server> {
        let served = Served::build(spec, Arc::clone(&runtime), &lock)?;
        let opened = spec.exports.iter().try_for_each(|uri| served.add_export(uri).map(drop));
        if let Err(error) = opened {
            // A refused device leaves nothing, neither on its media nor in memory.
            undo(&served);
            return Err(error);
        }
        Ok(Server {
            runtime,
            served,
            metrics: None,
            started: log::now_seconds(),
            stop,
            is_stopping: AtomicBool::new(false),
            lock: Mutex::new(lock),
            connections: AtomicUsize::new(0),
        })
    }

    /// Everything that can fail for reasons of the user's; the control socket comes last, so
    /// that whoever can connect finds a device.
    fn listen(
        spec: &Spec,
        runtime: Arc<RuntimeDir>,
        lock: NameLock,
        stop: Sender<Stop>,
    ) -> Result<Arc<Server>> {
        let metrics = spec.metrics.map(http::listen).transpose()?;
        let place = runtime.control(lock.name()).display().to_string();
        let address = runtime.control_address(lock.name());
        let mut server = Server::build(spec, runtime, lock, stop)?;
        server.metrics = metrics.as_ref().map(|(_, address)| *address);
        // Whatever lies at the socket's path is left from a dead server: the lock is ours.
        match std::fs::remove_file(&place) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("control socket {place}"));
            }
            _ => {}
        }
        let listener = UnixListener::bind(address).inspect_err(|_| undo(&server.served));
        let listener = listener.with_context(|| format!("control socket {place}"))?;
        let server = Arc::new(server);
        if let Some((listener, _)) = metrics {
            let shared = Arc::clone(&server);
            let answer = move || methods::metrics_text(&shared);
            thread::Builder::new()
                .name("metrics".into())
                .spawn(move || http::answer_all(&listener, &answer))?;
        }
        let shared = Arc::clone(&server);
        thread::Builder::new()
            .name("control".into())
            .spawn(move || accept_all(&shared, &listener))?;
        Ok(server)
    }

    /// The device's name, which `rename` changes.
    pub fn name(&self) -> DeviceName {
        lock(&self.lock).name().clone()
    }

    /// Where it logs, unless that is a terminal or somebody else's file.
    pub fn log(&self) -> Option<String> {
        let path = self.runtime.log(&self.name());
        path.exists().then(|| path.display().to_string())
    }

    /// What `create` tells its user.
    fn ready(&self) -> Value {
        let name = self.name();
        let mut ready = json!({
            "name": name.as_str(),
            "pid": std::process::id(),
            "size_bytes": self.served.size_bytes(),
            "exports": self.served.exports_json(),
            "notes": self.served.notes(),
            "log": self.log(),
        });
        if let Some(address) = self.metrics {
            ready["metrics"] = json!(format!("http://{address}/metrics"));
        }
        ready
    }

    /// Writes down what is served, for whoever finds this server dead.
    pub fn note_table(&self) {
        let path = self.runtime.table(&self.name());
        let new = self.runtime.new_table(&self.name());
        // Without it, the next server asks nobody. A server that dies here leaves a whole one.
        let _ = std::fs::remove_file(&new);
        let is_written = std::fs::write(&new, self.served.given_table());
        let _ = is_written.and_then(|()| std::fs::rename(&new, &path));
    }

    /// Moves the device to another name, if that is free.
    pub fn rename(&self, to: &DeviceName) -> Result<()> {
        let mut own = lock(&self.lock);
        let from = own.name().clone();
        if from == *to {
            return Ok(());
        }
        let Some(new) = self.runtime.try_lock(to)? else {
            bail!("a device {to} exists already");
        };
        if let Err(error) = self.move_files(&from, to) {
            self.runtime.give_up(&new);
            return Err(error);
        }
        let old = std::mem::replace(&mut *own, new);
        self.runtime.clear(&old, KeepLog::Yes);
        log::moves_to(&self.runtime.log(to));
        drop(own);
        self.note_table();
        set_title(to);
        log::line(&format!("{from}: renamed to {to}"));
        Ok(())
    }

    fn move_files(&self, from: &DeviceName, to: &DeviceName) -> Result<()> {
        if self.runtime.control(to).exists() {
            bail!(
                "the server of a device {to} died; create it again, or `udm remove --force {to}`"
            );
        }
        let place = |path: &Path| format!("rename {}", path.display());
        let (log_from, log_to) = (self.runtime.log(from), self.runtime.log(to));
        if log_from.exists() {
            // One of a device that is gone.
            let _ = std::fs::rename(&log_to, log::before(&log_to));
            std::fs::rename(&log_from, &log_to).with_context(|| place(&log_from))?;
        }
        let control = self.runtime.control(from);
        std::fs::rename(&control, self.runtime.control(to)).with_context(|| place(&control))?;
        self.served.rename(to.as_str())
    }

    /// Ends the service of a device at rest, or in `trouble`: files of the name are gone behind
    /// this. Tells what stays in the cache.
    fn close(&self, trouble: Option<&str>) -> Value {
        let left = self.served.end();
        let name = self.name();
        let fate = if left.is_lost {
            "are lost with the deleted cache device"
        } else {
            "stay in the cache"
        };
        let bytes = human_bytes(left.dirty_bytes);
        let errors = trouble.map_or(String::new(), |why| format!("; with errors: {why}"));
        log::line(&format!("{name}: removed; {bytes} of dirty data {fate}{errors}"));
        self.runtime.clear(&lock(&self.lock), KeepLog::Yes);
        json!({
            "dirty_bytes": left.dirty_bytes,
            "cache": left.cache,
            "is_lost": left.is_lost,
            "notes": left.troubles,
            "trouble": trouble,
        })
    }
}

/// Waits for the end, and carries it out.
pub fn run(server: Arc<Server>, stops: &Receiver<Stop>) -> Result<()> {
    match stops.recv().context("no thread is left that could end this server")? {
        Stop::Signal(signal) => {
            log::line(&format!("{}: ending on signal {signal}", server.name()));
            server.is_stopping.store(true, Ordering::SeqCst);
            let rested = server.served.rest(&Watch::default());
            let trouble = rested.as_ref().err().map(|error| format!("{error:#}"));
            server.close(trouble.as_deref());
            rested
        }
        Stop::Removed { asked, trouble } => {
            // The connection's thread needs a moment to hand the answer on; the process must not
            // end under it. It drops its receiver when that is done.
            let _ = asked.send(Ok(server.close(trouble.as_deref())));
            while asked.send(Ok(Value::Null)).is_ok() {}
            Ok(())
        }
    }
}

/// Accepts control connections for ever.
fn accept_all(server: &Arc<Server>, listener: &UnixListener) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // Out of descriptors, most likely: give others time to close theirs.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        let shared = Arc::clone(server);
        let spawned =
            thread::Builder::new().name("command".into()).spawn(move || converse(&shared, stream));
        if let Err(error) = spawned {
            log::line(&format!("a control connection got no thread: {error}"));
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
            let busy = anyhow!("{CONNECTIONS_MAX} commands are running already; try again");
            return frames.send(&Answer::failed(&busy));
        }
        answer_all(server, &mut frames)
    })();
    server.connections.fetch_sub(1, Ordering::SeqCst);
    if let Err(error) = result {
        log::line(&format!("control connection closed: {error:#}"));
    }
}

/// Answers calls until no more come, or one that is none. Calls of somebody who is gone already may
/// lie in the socket for long, if this process was stopped: they are dropped.
pub fn answer_all<S: Peer>(server: &Server, frames: &mut Frames<S>) -> Result<()> {
    while let Some(call) = frames.receive::<Call>()? {
        if frames.stream().has_hung_up() {
            bail!("{} was not carried out: whoever called is gone", call.method);
        }
        methods::answer(server, &call, &mut |answer| frames.send(&answer))?;
    }
    Ok(())
}

/// Takes a lock; a thread that panicked in it has ended the process already.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
