//! The control protocol: the messages of commands and servers over `NAME.ctl`.
//!
//! It is Varlink: JSON objects, each ended by a NUL byte, answered in order. A call is
//! `{"method": ..., "parameters": {...}}`; the answer `{"parameters": {...}}` or
//! `{"error": ..., "parameters": {...}}`. A call with `"more": true` may be answered several
//! times, all but the last answer carrying `"continues": true`. The interface is described in
//! `udm.Device.varlink`, which the server also hands out, so `varlinkctl` can be used.
//!
//! The peer may send anything: messages have a maximum length, and an invalid message ends the
//! connection. This file defines frames and errors; `methods.rs` carries out methods, and
//! `commands/` calls them.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::output::Pointed;
use crate::process;
use crate::runtime::{DeviceName, RuntimeDir};

/// The longest message, either way.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// How long a server may take over a question that touches no disk, and how long it may be silent
/// during longer work.
pub const QUESTION_TIMEOUT: Duration = Duration::from_secs(10);

/// The shortest timeout: a timeout of 0 would mean none.
const SILENCE_MIN: Duration = Duration::from_millis(1);

/// Time between two tries at a socket whose queue is full.
const CONNECT_EVERY: Duration = Duration::from_millis(20);

/// How long a living server may take to restore a removed socket.
const UPKEEP_MAX: Duration = Duration::from_secs(3);

/// How long a process may take to end after it said that it will.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a killed server, or the I/O it had in flight, may hold its devices.
pub const AFTERLIFE_MAX: Duration = Duration::from_secs(5);

/// The interface's name, in front of each method.
pub const INTERFACE: &str = "udm.Device";

/// The error that carries a sentence for the user.
pub const FAILED: &str = "udm.Device.Failed";

/// A call.
#[derive(Debug, Deserialize, Serialize)]
pub struct Call {
    /// Interface and method.
    pub method: String,
    /// An object.
    #[serde(default)]
    pub parameters: Value,
    /// Whether the caller accepts several answers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
}

/// An answer.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Answer {
    /// The error's name, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// An object.
    #[serde(default)]
    pub parameters: Value,
    /// Whether more answers follow.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub continues: bool,
}

impl Answer {
    /// A good answer, the last one.
    pub fn done(parameters: Value) -> Answer {
        Answer { parameters, ..Answer::default() }
    }

    /// A good answer that others follow.
    pub fn so_far(parameters: Value) -> Answer {
        Answer { parameters, continues: true, ..Answer::default() }
    }

    /// An error, as a sentence.
    pub fn failed(error: &anyhow::Error) -> Answer {
        let mut parameters = json!({ "message": format!("{error:#}") });
        if let Some(pointed) = error.downcast_ref::<Pointed>() {
            parameters["pointer"] = json!(pointed.pointer);
        }
        Answer { error: Some(FAILED.into()), parameters, continues: false }
    }

    /// One of Varlink's own errors, about the call rather than the device.
    pub fn protocol(error: &str, parameters: Value) -> Answer {
        Answer { error: Some(format!("org.varlink.service.{error}")), parameters, continues: false }
    }

    /// The parameters, or the error as a sentence.
    pub fn into_result(self) -> Result<Value> {
        let Some(name) = self.error else { return Ok(self.parameters) };
        let text = |key| self.parameters.get(key).and_then(Value::as_str).map(str::to_owned);
        Err(match (text("message"), text("pointer")) {
            (Some(message), Some(pointer)) => Pointed { message, pointer }.into(),
            (Some(message), None) => anyhow!(message),
            (None, _) => anyhow!("the server answered {name} {}", self.parameters),
        })
    }
}

/// The other end of a connection.
pub trait Peer: Read + Write + Send {
    /// Whether the other end has hung up, so that no answer can arrive.
    fn has_hung_up(&self) -> bool;
}

impl Peer for UnixStream {
    fn has_hung_up(&self) -> bool {
        let mut polled = [PollFd::new(self, PollFlags::empty())];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once)).is_ok()
            && polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }
}

/// One end of a connection: reads messages from a byte stream and writes them to it.
#[derive(Debug)]
pub struct Frames<S> {
    stream: S,
    received: Vec<u8>,
}

impl<S: Read + Write> Frames<S> {
    /// Frames over `stream`.
    pub fn new(stream: S) -> Frames<S> {
        Frames { stream, received: Vec::new() }
    }

    /// The stream below.
    pub fn stream(&self) -> &S {
        &self.stream
    }

    /// The next message; `None` when the other end closed the connection between two messages.
    pub fn receive<T: for<'a> Deserialize<'a>>(&mut self) -> Result<Option<T>> {
        let mut searched = 0;
        loop {
            let end = self.received[searched..].iter().position(|&byte| byte == 0);
            if let Some(end) = end.map(|end| searched + end) {
                let message = serde_json::from_slice(&self.received[..end]);
                self.received.drain(..=end);
                return Ok(Some(message.context("not a message of this protocol")?));
            }
            searched = self.received.len();
            if searched > MESSAGE_BYTES_MAX {
                bail!("a message longer than {MESSAGE_BYTES_MAX} bytes");
            }
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) if self.received.is_empty() => return Ok(None),
                Ok(0) => bail!("the connection ended inside a message"),
                Ok(count) => self.received.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends one message.
    pub fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut bytes = serde_json::to_vec(message)?;
        if bytes.len() > MESSAGE_BYTES_MAX {
            bail!("a message longer than {MESSAGE_BYTES_MAX} bytes");
        }
        bytes.push(0);
        self.stream.write_all(&bytes)?;
        Ok(())
    }
}

/// The reason why a device's server cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absent {
    /// There is no such device.
    NoDevice,
    /// A server existed, and ended without cleaning up.
    Died,
}

/// Called with each answer about the progress of work; an error stops listening, and with it the
/// work.
pub type Hear<'a> = dyn FnMut(&Value) -> Result<()> + 'a;

/// A command's connection to a device's server.
#[derive(Debug)]
pub struct Client {
    name: DeviceName,
    frames: Frames<UnixStream>,
}

impl Client {
    /// Connects to the server of `name`; an absent one is an error with advice.
    pub fn connect(runtime: &RuntimeDir, name: &DeviceName) -> Result<Client> {
        Client::find(runtime, name)?.map_err(|absent| no_answer(runtime, name, absent))
    }

    /// Connects to the server of `name`, or returns the reason why it cannot.
    pub fn find(runtime: &RuntimeDir, name: &DeviceName) -> Result<Result<Client, Absent>> {
        Client::find_within(runtime, name, QUESTION_TIMEOUT)
    }

    /// The same, with an answer within `patience`.
    pub fn find_within(
        runtime: &RuntimeDir,
        name: &DeviceName,
        patience: Duration,
    ) -> Result<Result<Client, Absent>> {
        let mut connected = connect(&runtime.control_address(name), patience);
        let deadline = Instant::now() + patience.min(UPKEEP_MAX);
        // Its server lives, and restores its socket, or is starting.
        while is_missing(&connected) && runtime.is_guarded(name) && Instant::now() < deadline {
            thread::sleep(CONNECT_EVERY);
            connected = connect(&runtime.control_address(name), patience);
        }
        match connected {
            Ok(stream) => {
                stream.set_write_timeout(Some(patience))?;
                Ok(Ok(Client { name: name.clone(), frames: Frames::new(stream) }))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Err(Absent::NoDevice)),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(Err(Absent::Died)),
            // The queue of connections is full.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                Err(hung(name, patience, runtime.holder(name)))
            }
            Err(error) => Err(error)
                .with_context(|| format!("{name}: connect to {}", runtime.control(name).display())),
        }
    }

    /// Asks a question that is answered immediately.
    pub fn ask(&mut self, method: &str, parameters: Value) -> Result<Value> {
        self.ask_within(method, parameters, QUESTION_TIMEOUT)
    }

    /// Asks a question that is answered within `patience`.
    pub fn ask_within(
        &mut self,
        method: &str,
        parameters: Value,
        patience: Duration,
    ) -> Result<Value> {
        self.exchange(method, parameters, patience, None)
    }

    /// Orders work, however long it takes: the server reports regularly that it is still at work.
    pub fn order(&mut self, method: &str, parameters: Value) -> Result<Value> {
        self.follow(method, parameters, &mut |_| Ok(()))
    }

    /// Orders work; `hear` gets its progress, and may stop it by an error.
    pub fn follow(
        &mut self,
        method: &str,
        parameters: Value,
        hear: &mut Hear<'_>,
    ) -> Result<Value> {
        self.exchange(method, parameters, QUESTION_TIMEOUT, Some(hear))
    }

    /// Waits at most `silence_max` for each answer.
    fn exchange(
        &mut self,
        method: &str,
        parameters: Value,
        silence_max: Duration,
        mut hear: Option<&mut Hear<'_>>,
    ) -> Result<Value> {
        let more = hear.is_some();
        let call = Call { method: format!("{INTERFACE}.{method}"), parameters, more };
        self.frames.stream.set_read_timeout(Some(silence_max.max(SILENCE_MIN)))?;
        self.frames.send(&call).map_err(|error| self.broken(error, silence_max))?;
        loop {
            let answer: Option<Answer> =
                self.frames.receive().map_err(|error| self.broken(error, silence_max))?;
            let Some(answer) = answer else {
                bail!("{}: its server ended before it answered; see its log", self.name);
            };
            if !answer.continues {
                return answer.into_result().map_err(|error| self.named(error));
            }
            if let Some(hear) = hear.as_mut() {
                hear(&answer.parameters)?;
            }
        }
    }

    /// The server's error with the device's name in front, unless it names it itself.
    fn named(&self, error: anyhow::Error) -> anyhow::Error {
        if error.to_string().starts_with(&format!("{}: ", self.name)) {
            return error;
        }
        error.context(self.name.to_string())
    }

    /// The error for the user after a failure of the connection.
    fn broken(&self, error: anyhow::Error, silence_max: Duration) -> anyhow::Error {
        let cause = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        match cause {
            Some(ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                hung(&self.name, silence_max, self.server_pid())
            }
            Some(ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                anyhow!("{}: its server ended before it answered; see its log", self.name)
            }
            _ => error.context(format!("{}: control connection", self.name)),
        }
    }

    /// The server's process.
    pub fn server_pid(&self) -> Option<i32> {
        let peer = rustix::net::sockopt::socket_peercred(self.frames.stream()).ok()?;
        Some(peer.pid.as_raw_nonzero().get())
    }

    /// A handle on the server's process, for `wait_for_exit`.
    pub fn server_process(&self) -> Option<OwnedFd> {
        let peer = rustix::net::sockopt::socket_peercred(self.frames.stream()).ok()?;
        rustix::process::pidfd_open(peer.pid, rustix::process::PidfdFlags::empty()).ok()
    }
}

/// The error about an absent server of `name`, with advice.
pub fn no_answer(runtime: &RuntimeDir, name: &DeviceName, absent: Absent) -> anyhow::Error {
    match absent {
        Absent::NoDevice => {
            anyhow!("{name}: no such device; `udm ls` lists the devices there are")
        }
        Absent::Died => anyhow!(
            "{name}: its server died (log: {}); run the same `udm create` again to continue \
             without loss of completed writes",
            runtime.log(name).display()
        ),
    }
}

/// The error of a server that exists and does not answer.
#[derive(Debug)]
pub struct Hung(String);

impl fmt::Display for Hung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Hung {}

/// The error about a server that does not answer, with the reason if it is known.
fn hung(name: &DeviceName, silence: Duration, pid: Option<i32>) -> anyhow::Error {
    let seconds = silence.as_secs_f64().round();
    let what = pid.map_or_else(|| "its process is not known; see its log".into(), process::doing);
    Hung(format!("{name}: its server has not answered for {seconds} s: {what}")).into()
}

fn is_missing(connected: &std::io::Result<UnixStream>) -> bool {
    connected.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Connects to the socket at `address`. If its queue is full, tries again for `patience`.
fn connect(address: &Path, patience: Duration) -> std::io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let deadline = Instant::now() + patience;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(address)?;
    while let Err(errno) = rustix::net::connect(&socket, &address) {
        if errno != rustix::io::Errno::AGAIN || Instant::now() >= deadline {
            return Err(errno.into());
        }
        thread::sleep(CONNECT_EVERY);
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Whether the server of `name` exists and answers. A process that was killed may hold its sockets,
/// locks and devices for some moments, but does not answer any more.
pub fn is_alive(runtime: &RuntimeDir, name: &DeviceName) -> bool {
    let found = Client::find_within(runtime, name, AFTERLIFE_MAX);
    let Ok(Ok(mut client)) = found else { return false };
    client.ask_within("Status", Value::Null, AFTERLIFE_MAX).is_ok()
}

/// Whether some server died, so that a device in use may be free in a moment.
pub fn has_anyone_died(runtime: &RuntimeDir) -> bool {
    let names = runtime.names().unwrap_or_default();
    names.iter().any(|name| runtime.control(name).exists() && !is_alive(runtime, name))
}

/// Waits until the process of `handle` has closed all its files, so that the next server finds its
/// devices free. Returns false if it has not within [`EXIT_TIMEOUT`].
pub fn wait_for_exit(handle: Option<OwnedFd>) -> bool {
    let Some(handle) = handle else { return true };
    let timeout = Timespec { tv_sec: EXIT_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&timeout)) != Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(bytes: &[u8]) -> Frames<std::io::Cursor<Vec<u8>>> {
        Frames::new(std::io::Cursor::new(bytes.to_vec()))
    }

    #[test]
    fn several_messages_in_one_read_come_one_by_one() {
        let mut frames = frames(b"{\"method\":\"a.b\"}\0{\"method\":\"c.d\",\"more\":true}\0");
        let first: Call = frames.receive().unwrap().unwrap();
        assert_eq!((first.method.as_str(), first.more), ("a.b", false));
        let second: Call = frames.receive().unwrap().unwrap();
        assert_eq!((second.method.as_str(), second.more), ("c.d", true));
        assert!(frames.receive::<Call>().unwrap().is_none());
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let deep = [b"{\"method\":\"a\",\"parameters\":".as_slice(), &[b'['; 100_000], b"\0"];
        let long = vec![b' '; MESSAGE_BYTES_MAX + 8192];
        let bad: [&[u8]; 6] =
            [b"\0", b"{}\0", b"[1]\0", b"{\"method\":\"a\"", &deep.concat(), &long];
        for bytes in bad {
            assert!(frames(bytes).receive::<Call>().is_err());
        }
    }

    #[test]
    fn answers_say_what_went_wrong() {
        let failed = Answer::failed(&anyhow!("why").context("where"));
        assert_eq!(failed.into_result().unwrap_err().to_string(), "where: why");
        let unknown = Answer::protocol("MethodNotFound", json!({ "method": "x" }));
        assert!(unknown.into_result().unwrap_err().to_string().contains("MethodNotFound"));
    }
}
