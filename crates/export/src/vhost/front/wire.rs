//! The socket to a server: messages with and without an answer.

#![allow(clippy::host_endian_bytes, reason = "vhost-user is spoken within one machine")]

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::time::Timespec;
use udm::error::{Error, Kind, Result};

use crate::socket::connect_within;

use super::super::proto::{HEADER_BYTES, PAYLOAD_BYTES_MAX, Request, u32_at, u64_at};

/// Maximum wait for an answer: a ring stops when its requests end, which may depend on disks.
pub(super) const ANSWER_LONGEST: Duration = Duration::from_secs(30);
/// Flags of a header: version 1, a reply, a request for an acknowledgement.
const VERSION: u32 = 1;
const IS_REPLY: u32 = 1 << 2;
const NEEDS_REPLY: u32 = 1 << 3;

/// The connection.
#[derive(Debug)]
pub(super) struct Wire {
    path: PathBuf,
    stream: UnixStream,
    /// Whether messages without an answer of their own are acknowledged.
    pub has_reply_ack: bool,
}

impl Wire {
    /// Connects to a server whose answers take at most `longest`.
    pub fn connect(path: &Path, longest: Duration) -> Result<Wire> {
        let failed = |source| Error::from_io("connecting to", path.display(), source);
        let stream = connect_within(path, longest).map_err(|errno| failed(errno.into()))?;
        stream.set_read_timeout(Some(longest)).map_err(failed)?;
        stream.set_write_timeout(Some(longest)).map_err(failed)?;
        Ok(Wire { path: path.into(), stream, has_reply_ack: false })
    }

    /// Duplicates the socket, for checks whether the server is connected.
    pub fn watch(&self) -> Result<UnixStream> {
        self.stream.try_clone().map_err(|source| self.failed(source))
    }

    fn failed(&self, source: std::io::Error) -> Error {
        let place = format!("the server at {}", self.path.display());
        Error::new(Kind::Io, format!("{place} does not answer: {source}")).with_source(source)
    }

    /// An error in the server's messages.
    pub fn wrong(&self, what: impl std::fmt::Display) -> Error {
        Error::new(Kind::Io, format!("the server at {}: {what}", self.path.display()))
    }

    /// Sends a message, and waits for its acknowledgement if the server sends one.
    pub fn tell(&mut self, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let flags = if self.has_reply_ack { VERSION | NEEDS_REPLY } else { VERSION };
        self.send(request, flags, payload, fds)?;
        if !self.has_reply_ack {
            return Ok(());
        }
        match self.number_of(request, &self.stream)? {
            0 => Ok(()),
            _ => Err(self.wrong(format_args!("it refuses {request:?}"))),
        }
    }

    /// Asks for a number.
    pub fn number(&mut self, request: Request) -> Result<u64> {
        self.send(request, VERSION, &[], &[])?;
        self.number_of(request, &self.stream)
    }

    fn number_of(&self, request: Request, stream: &UnixStream) -> Result<u64> {
        let payload = self.receive(request, stream)?;
        match payload.len() {
            8 => Ok(u64_at(&payload, 0)),
            bytes => Err(self.wrong(format_args!("{bytes} bytes as an answer to {request:?}"))),
        }
    }

    /// Asks for a payload.
    pub fn ask(&mut self, request: Request, payload: &[u8]) -> Result<Vec<u8>> {
        self.send(request, VERSION, payload, &[])?;
        self.receive(request, &self.stream)
    }

    fn send(
        &self,
        request: Request,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        let words = [request as u32, flags, payload.len() as u32];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend_from_slice(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "one file fits");
        }
        let sent =
            sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        match sent {
            Ok(count) if count == bytes.len() => Ok(()),
            Ok(count) => Err(self.wrong(format_args!("it takes {count} bytes of a message"))),
            Err(errno) => Err(self.failed(errno.into())),
        }
    }

    fn receive(&self, request: Request, mut stream: &UnixStream) -> Result<Vec<u8>> {
        let mut head = [0; HEADER_BYTES];
        stream.read_exact(&mut head).map_err(|source| self.failed(source))?;
        let (number, flags, bytes) = (u32_at(&head, 0), u32_at(&head, 4), u32_at(&head, 8));
        if number != request as u32 || flags & (IS_REPLY | 3) != IS_REPLY | VERSION {
            let what = format_args!("message {number} with flags {flags:#x} instead of an answer");
            return Err(self.wrong(what));
        }
        if bytes as usize > PAYLOAD_BYTES_MAX {
            return Err(self.wrong(format_args!("an answer of {bytes} bytes")));
        }
        let mut payload = vec![0; bytes as usize];
        stream.read_exact(&mut payload).map_err(|source| self.failed(source))?;
        Ok(payload)
    }
}

/// Whether the other end of a socket was closed.
pub(super) fn is_closed(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}
