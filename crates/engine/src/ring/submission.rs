//! Calls of the loop that owns a ring: on sockets, connections, commands.
//!
//! Each request carries a tag of the caller's own type, and its completion is an [`Event`] with
//! that tag. Only the submission queue makes such requests, and disks see only its ring, so no
//! event reaches a user that did not make the request.
//!
//! Sends are whole: a short send is continued until all is sent or the socket fails. A caller has
//! at most one send and one receive per socket in flight, or their bytes mix. Sockets are blocking
//! ones (without O_NONBLOCK): with it, the kernel returns EAGAIN instead of waiting.

use std::io;
use std::os::fd::OwnedFd;

use super::kernel::{Call, Memory, Message, Work};
use super::{Command, Owner, Ring};
use crate::base::pending::Pending;
use crate::buffer::Buffer;
use crate::sync::Arc;

/// The most buffers in one [`SubmissionQueue::send_many`].
pub const SEND_BUFFERS_MAX: usize = 1024;

/// The end of a request of a [`SubmissionQueue`].
#[derive(Debug)]
pub struct Event<T> {
    /// The caller's tag.
    pub tag: T,
    /// Bytes received or sent; for polls, the poll bits; for accepts, 0; for commands, the driver's
    /// result. ECANCELED after [`SubmissionQueue::cancel`].
    pub result: io::Result<u32>,
    /// The buffer that was handed in, or empty.
    pub buffer: Buffer,
    /// The buffers of a [`SubmissionQueue::send_many`].
    pub buffers: Vec<Buffer>,
    /// The new connection of a [`SubmissionQueue::accept`].
    pub connection: Option<OwnedFd>,
}

/// A request that the kernel has.
#[derive(Debug)]
pub(super) struct Asked {
    /// The place of its tag.
    place: u32,
    /// Bytes moved so far.
    done: usize,
    /// Whether to go on until the whole range is moved.
    is_whole: bool,
}

/// A ring, and its owner's requests.
#[derive(Debug)]
pub struct SubmissionQueue<T, D> {
    ring: Ring<D>,
    tags: Pending<T>,
}

impl<T: Copy + PartialEq, D> SubmissionQueue<T, D> {
    /// The submission queue of `ring`.
    pub fn new(ring: Ring<D>) -> SubmissionQueue<T, D> {
        SubmissionQueue { ring, tags: Pending::default() }
    }

    /// The ring.
    pub fn ring(&self) -> &Ring<D> {
        &self.ring
    }

    /// The ring, for disks and to wait in.
    pub fn ring_mut(&mut self) -> &mut Ring<D> {
        &mut self.ring
    }

    /// The next event.
    pub fn pop_event(&mut self) -> Option<Event<T>> {
        let Event { tag, result, buffer, buffers, connection } = self.ring.events.pop_front()?;
        Some(Event { tag: self.tags.remove(tag), result, buffer, buffers, connection })
    }

    /// Receives the available bytes into `buffer[offset..offset + len]`, at least one; 0 bytes mean
    /// that the peer has closed.
    pub fn recv(
        &mut self,
        socket: &Arc<OwnedFd>,
        buffer: Buffer,
        offset: usize,
        len: usize,
        tag: T,
    ) {
        let call = Call::Recv { from: offset, len };
        self.ask(socket, call, Memory::One(buffer), tag, false);
    }

    /// Sends all of `buffer[offset..offset + len]`.
    pub fn send(
        &mut self,
        socket: &Arc<OwnedFd>,
        buffer: Buffer,
        offset: usize,
        len: usize,
        tag: T,
    ) {
        let call = Call::Send { from: offset, len };
        self.ask(socket, call, Memory::One(buffer), tag, true);
    }

    /// Sends all of `buffers`, one after the other, mostly with one call. At most
    /// [`SEND_BUFFERS_MAX`] of them.
    pub fn send_many(&mut self, socket: &Arc<OwnedFd>, buffers: Vec<Buffer>, tag: T) {
        assert!(buffers.len() <= SEND_BUFFERS_MAX, "too many buffers for one send");
        let mut message = self.ring.messages.pop().unwrap_or_else(Message::empty);
        message.buffers = buffers;
        self.ask(socket, Call::SendMany { skip: 0 }, Memory::Many(message), tag, true);
    }

    /// Waits, once, until `file` (an eventfd, a listener, a socket) can be read.
    pub fn poll_readable(&mut self, file: &Arc<OwnedFd>, tag: T) {
        self.ask(file, Call::Poll, Memory::One(Buffer::empty()), tag, false);
    }

    /// Adds `buffer`, a number of eight bytes, to an eventfd of another process. As the file may be
    /// anything, the request may take as long as that process likes, but this thread does not wait.
    pub fn signal(&mut self, eventfd: &Arc<OwnedFd>, buffer: Buffer, tag: T) {
        // At the file's own position, which an eventfd has not.
        let call = Call::Write { offset: u64::MAX, from: 0, len: buffer.len(), flags: 0 };
        self.ask(eventfd, call, Memory::One(buffer), tag, false);
    }

    /// Accepts one connection.
    pub fn accept(&mut self, listener: &Arc<OwnedFd>, tag: T) {
        self.ask(listener, Call::Accept, Memory::One(Buffer::empty()), tag, false);
    }

    /// Sends `command` to the driver of `file`, with the buffer that it may name. The ring was made
    /// by [`Ring::with_commands`].
    pub fn command(&mut self, file: &Arc<OwnedFd>, command: Command, buffer: Buffer, tag: T) {
        self.ask(file, Call::Command(command), Memory::One(buffer), tag, false);
    }

    /// Cancels all requests in flight with `tag`. Each still completes with an event, with
    /// ECANCELED or with its own result.
    pub fn cancel(&mut self, tag: T) {
        let tags = &mut self.tags;
        let is_meant = |owner: &Owner<D>| match owner {
            Owner::Submission(asked) => *tags.value(asked.place) == tag,
            Owner::Job(_) | Owner::Mailbox => false,
        };
        self.ring.kernel().cancel(is_meant).expect("the ring is used on its own thread");
    }

    fn ask(&mut self, file: &Arc<OwnedFd>, call: Call, memory: Memory, tag: T, is_whole: bool) {
        let owner = Asked { place: self.tags.insert(tag), done: 0, is_whole };
        let work = Work { file: file.clone(), call, memory, owner, is_awaited: false };
        match call {
            // A call for zero bytes needs no kernel, which would wait for the peer first.
            Call::Recv { len: 0, .. } | Call::Send { len: 0, .. } => {
                self.ring.end_asked(work, 0, None);
            }
            _ => self.ring.start_asked(work),
        }
    }
}

impl<D> Ring<D> {
    fn start_asked(&mut self, work: Work<Asked>) {
        self.kernel().start(work.owned_by(Owner::Submission));
    }

    /// A request has ended; reports that, or continues the request.
    pub(super) fn end_asked(
        &mut self,
        mut work: Work<Asked>,
        result: i32,
        connection: Option<OwnedFd>,
    ) {
        let moved = usize::try_from(result).unwrap_or(0);
        let rest = match &mut work.call {
            Call::Send { from, len } => {
                *from += moved;
                *len -= moved;
                *len
            }
            Call::SendMany { skip } => {
                *skip += moved;
                match &work.memory {
                    Memory::Many(message) => message.len() - *skip,
                    Memory::One(_) => 0,
                }
            }
            _ => 0,
        };
        work.owner.done += moved;
        // Newer kernels wait until all bytes are sent; older ones, and signals, end the call early.
        if (work.owner.is_whole && moved > 0 && rest > 0) || result == -libc::EINTR {
            return self.start_asked(work);
        }
        let result = match (&connection, result) {
            (Some(_), _) => Ok(0),
            (None, 0..) => Ok(work.owner.done as u32),
            (None, _) => Err(io::Error::from_raw_os_error(-result)),
        };
        let (buffer, buffers) = match work.memory {
            Memory::One(buffer) => (buffer, Vec::new()),
            Memory::Many(mut message) => {
                let buffers = std::mem::take(&mut message.buffers);
                self.messages.push(message);
                (Buffer::empty(), buffers)
            }
        };
        let tag = work.owner.place;
        self.events.push_back(Event { tag, result, buffer, buffers, connection });
    }
}
