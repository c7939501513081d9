//! The role of a queue that listens to one client: it takes messages from the socket, one after the
//! other, lets the session do what they ask for, and answers.
//!
//! Files come with the first byte of a message. So each receive asks for no more than what the
//! message still lacks, and a message's files are those that came with its bytes.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recvmsg, sendmsg,
};
use udm::queue::{Core, Role, Turn};
use udm::ring::Event;
use udm::sync::Arc;
use udm::sync::atomic::{AtomicBool, Ordering};

use super::counts::Counts;
use super::proto::{FDS_MAX, HEADER_BYTES, Header, Message, Reply, Violation, wrong};
use super::session::Session;

/// Messages that are taken in one turn.
const MESSAGES_MAX: usize = 64;

/// One client.
pub struct Connection {
    socket: Arc<OwnedFd>,
    session: Session,
    counts: Arc<Counts>,
    signs: Arc<Signs>,
    incoming: Incoming,
    is_awaited: bool,
    violation: Option<Violation>,
}

/// What a client and its server let each other know.
#[derive(Debug, Default)]
pub struct Signs {
    /// The client uses the device: others do not take its place then.
    pub is_serving: AtomicBool,
    /// The device has another table.
    pub has_changed: AtomicBool,
}

/// A message in parts.
#[derive(Debug, Default)]
struct Incoming {
    bytes: Vec<u8>,
    header: Option<Header>,
    fds: Vec<OwnedFd>,
}

/// What a look at the socket brings.
enum Heard {
    Message(Message),
    /// No more for now.
    Nothing,
    /// The client has gone.
    End,
}

impl Connection {
    /// Listens to the client at `socket`.
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
            violation: None,
        }
    }

    /// Takes what has come. Returns whether the client is still there.
    fn listen(&mut self) -> Result<bool, Violation> {
        for _ in 0..MESSAGES_MAX {
            match self.incoming.hear(&self.socket)? {
                Heard::Message(message) => {
                    if let Some(reply) = self.session.take(message)? {
                        send(&self.socket, &reply)?;
                    }
                    self.signs.is_serving.store(self.session.is_serving(), Ordering::Relaxed);
                }
                Heard::Nothing => return Ok(true),
                Heard::End => return Ok(false),
            }
        }
        Ok(true)
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
                    Some(0) => return wrong("it went in the middle of a message"),
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

    /// Receives up to `due` bytes in all. Returns how many came, 0 at the end, or `None` if there
    /// are none yet.
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
                wrong("more files than a message may have")
            }
            Ok(_) if self.fds.len() > FDS_MAX => wrong("more files than a message may have"),
            Ok(_) => Ok(Some(count)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            // The client is gone; what it has broken off does not matter.
            Err(_) => {
                self.bytes.clear();
                Ok(Some(0))
            }
        }
    }
}

/// Sends an answer. It is short: a client that has no room for it does not read its answers.
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
        Ok(_) | Err(Errno::AGAIN) => wrong("it does not read its answers"),
        // It is gone: the next look at the socket finds that.
        Err(_) => Ok(()),
    }
}

impl Role for Connection {
    /// It makes one kind of request only: wait for bytes.
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
        if self.is_awaited {
            return Turn::Idle(None);
        }
        match self.listen() {
            Ok(true) => {}
            Ok(false) => return Turn::Over,
            Err(violation) => {
                self.violation = Some(violation);
                return Turn::Over;
            }
        }
        core.desk().poll_readable(&self.socket, ());
        self.is_awaited = true;
        Turn::Idle(None)
    }

    fn leave(mut self, _core: &mut Core<()>) {
        // Rings first: when the client hears of the end, nothing of it is used any more.
        self.session.end();
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        self.counts.has_gone(self.violation.as_ref());
    }
}
