//! The role of a queue that serves one client's socket: it receives messages in order, passes them
//! to the session, and sends the answers.
//!
//! File descriptors arrive with the first byte of a message. Each receive therefore asks only for
//! the missing bytes of one message, so that a message gets exactly the descriptors that arrived
//! with its bytes.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recvmsg, sendmsg,
};
use udm::queue::{Core, Role, Turn, now};
use udm::ring::Event;
use udm::sync::Arc;
use udm::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use udm::units::{Nanos, SECOND};

use super::counts::Counts;
use super::proto::{FDS_MAX, HEADER_BYTES, Header, Message, Reply, Violation, wrong};
use super::session::Session;

/// Maximum messages received in one turn.
const MESSAGES_MAX: usize = 64;
/// Maximum time that a started ring may lack something, such as memory. QEMU 7.2 connects like this
/// if its machine was reset while the server was dead, and then waits for the disk indefinitely.
/// When the server disconnects, QEMU connects again and sends everything.
const INCOMPLETE_MAX: Nanos = 2 * SECOND;
/// Maximum time that a client may stay connected without any message. After such a disconnection,
/// QEMU 7.2 may believe that it is connected already, and not negotiate; when the server
/// disconnects once more, QEMU negotiates.
const SILENT_MAX: Nanos = 5 * SECOND;

/// One client.
pub struct Connection {
    socket: Arc<OwnedFd>,
    session: Session,
    counts: Arc<Counts>,
    signs: Arc<Signs>,
    incoming: Incoming,
    is_awaited: bool,
    /// Whether a message has arrived.
    has_spoken: bool,
    /// Start of the client's silence, or of the time in which a started ring lacks something.
    incomplete_since: Option<Nanos>,
    violation: Option<Violation>,
}

/// State that a client's thread and its server share.
#[derive(Debug)]
pub struct Signs {
    /// Number of served rings. While it is not zero, other clients do not replace this one.
    pub rings: AtomicU64,
    /// Time since which there are none.
    pub idle_since: AtomicU64,
    /// Whether the device has a new table.
    pub has_changed: AtomicBool,
}

impl Signs {
    /// The state of a client that has just connected.
    pub fn of_newcomer() -> Signs {
        Signs {
            rings: AtomicU64::new(0),
            idle_since: AtomicU64::new(now()),
            has_changed: AtomicBool::new(false),
        }
    }

    /// The time since the last ring was served; `None` if one is served.
    pub fn idle(&self) -> Option<Nanos> {
        let since = self.idle_since.load(Ordering::Relaxed);
        (self.rings.load(Ordering::Relaxed) == 0).then(|| now().saturating_sub(since))
    }

    fn set_rings(&self, rings: u64) {
        if self.rings.swap(rings, Ordering::Relaxed) > 0 && rings == 0 {
            self.idle_since.store(now(), Ordering::Relaxed);
        }
    }
}

/// A partly received message.
#[derive(Debug, Default)]
struct Incoming {
    bytes: Vec<u8>,
    header: Option<Header>,
    fds: Vec<OwnedFd>,
}

/// The result of one receive.
enum Heard {
    Message(Message),
    /// No message for now.
    Nothing,
    /// The client has disconnected.
    End,
}

impl Connection {
    /// Serves the client at `socket`.
    pub fn new(
        socket: OwnedFd,
        session: Session,
        counts: Arc<Counts>,
        signs: Arc<Signs>,
    ) -> Connection {
        Connection {
            socket: Arc::new(socket),
            session,
            counts,
            signs,
            incoming: Incoming::default(),
            is_awaited: false,
            has_spoken: false,
            incomplete_since: None,
            violation: None,
        }
    }

    /// Handles the messages that have arrived. Returns whether the client is still connected.
    fn listen(&mut self) -> Result<bool, Violation> {
        for _ in 0..MESSAGES_MAX {
            match self.incoming.hear(&self.socket)? {
                Heard::Message(message) => {
                    if !std::mem::replace(&mut self.has_spoken, true) {
                        self.incomplete_since = None;
                    }
                    if let Some(reply) = self.session.take(message)? {
                        send(&self.socket, &reply)?;
                    }
                    self.signs.set_rings(self.session.served());
                }
                Heard::Nothing => return Ok(true),
                Heard::End => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Returns the time by which the client must be complete, if it is not; an error if that time
    /// has passed.
    fn must_be_complete(&mut self) -> Result<Option<Nanos>, Violation> {
        let (forgotten, max) = match self.session.forgotten() {
            _ if !self.has_spoken => (Violation::new("it sent no message"), SILENT_MAX),
            Some(forgotten) => (forgotten, INCOMPLETE_MAX),
            None => {
                self.incomplete_since = None;
                return Ok(None);
            }
        };
        let now = now();
        let end = *self.incomplete_since.get_or_insert(now) + max;
        if now < end { Ok(Some(end)) } else { Err(forgotten) }
    }

    /// Handles the messages that have arrived, if there are any. Returns whether the client is
    /// still connected, and how long to wait for its next message if it must be complete by then.
    fn go_on(&mut self) -> Result<(bool, Option<Nanos>), Violation> {
        let is_there = self.is_awaited || self.listen()?;
        Ok((is_there, self.must_be_complete()?))
    }
}

impl Incoming {
    /// Receives until a message is complete.
    fn hear(&mut self, socket: &OwnedFd) -> Result<Heard, Violation> {
        loop {
            let due = HEADER_BYTES + self.header.map_or(0, |header| header.payload_bytes);
            if self.bytes.len() < due {
                match self.receive(socket, due)? {
                    Some(0) if self.bytes.is_empty() => return Ok(Heard::End),
                    Some(0) => return wrong("it disconnected in the middle of a message"),
                    Some(_) => continue,
                    None => return Ok(Heard::Nothing),
                }
            }
            let Some(Header { request, needs_reply, .. }) = self.header else {
                let header = self.bytes.first_chunk().expect("a header is complete");
                self.header = Some(Header::parse(header)?);
                continue;
            };
            let payload = self.bytes.split_off(HEADER_BYTES);
            let fds = std::mem::take(&mut self.fds);
            *self = Incoming::default();
            return Ok(Heard::Message(Message { request, needs_reply, payload, fds }));
        }
    }

    /// Receives up to `due` bytes in all. Returns the number of bytes received, 0 at the end, or
    /// `None` if there are none yet.
    fn receive(&mut self, socket: &OwnedFd, due: usize) -> Result<Option<usize>, Violation> {
        let at = self.bytes.len();
        self.bytes.resize(due, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let vectors = &mut [IoSliceMut::new(&mut self.bytes[at..])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let result = recvmsg(socket, vectors, &mut control, flags);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        let count = result.as_ref().map_or(0, |received| received.bytes);
        self.bytes.truncate(at + count);
        match result {
            Ok(received) if received.flags.contains(ReturnFlags::CTRUNC) => {
                wrong("more file descriptors than a message may have")
            }
            Ok(_) if self.fds.len() > FDS_MAX => {
                wrong("more file descriptors than a message may have")
            }
            Ok(_) => Ok(Some(count)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            // The client has disconnected; its incomplete message does not matter.
            Err(_) => {
                self.bytes.clear();
                Ok(Some(0))
            }
        }
    }
}

/// Sends an answer. Answers are short: if the socket is full, the client does not read its answers.
fn send(socket: &OwnedFd, reply: &Reply) -> Result<(), Violation> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = reply.fd.as_ref().map(|fd| [fd.as_fd()]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match sendmsg(socket, &[IoSlice::new(&reply.bytes)], &mut control, flags) {
        Ok(count) if count == reply.bytes.len() => Ok(()),
        Ok(_) | Err(Errno::AGAIN) => wrong("it does not read replies"),
        // The client has disconnected: the next receive finds that.
        Err(_) => Ok(()),
    }
}

impl Role for Connection {
    /// The only kind of request: wait for bytes.
    type Tag = ();

    fn event(&mut self, _event: Event<()>, _core: &mut Core<()>) {
        self.is_awaited = false;
    }

    fn turn(&mut self, core: &mut Core<()>, is_stopping: bool) -> Turn {
        if is_stopping {
            return Turn::Over;
        }
        if self.signs.has_changed.swap(false, Ordering::SeqCst) {
            self.session.device_has_changed();
        }
        match self.go_on() {
            Ok((true, deadline)) => {
                if !std::mem::replace(&mut self.is_awaited, true) {
                    core.submissions().poll_readable(&self.socket, ());
                }
                Turn::Idle(deadline)
            }
            Ok((false, _)) => Turn::Over,
            Err(violation) => {
                self.violation = Some(violation);
                Turn::Over
            }
        }
    }

    fn leave(mut self, _core: &mut Core<()>) {
        // The client does not count while its last requests end, which may take seconds.
        self.counts.has_gone(self.violation.as_ref());
        // Rings first: when the client sees the end, none of its memory is used any more.
        self.session.end();
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}
