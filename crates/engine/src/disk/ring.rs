//! One thread's window to the kernel: I/O of disks, and bytes of sockets, on one io_uring.
//!
//! Disks put their I/O in (files and block devices through [`uring`](super::uring), RAM disks
//! straight into the queue of completed ones); the loop that owns the ring takes completed
//! [`DiskIo`]s and [`Event`]s out. Callers need no `unsafe`: whatever they put in is owned by the
//! ring until it comes out.
//!
//! 1. What is put in comes out exactly once, unless the ring is dropped first.
//! 2. A ring with a kernel is used by the thread that made it; the kernel refuses others, and the
//!    ring panics then.
//! 3. At most [`Ring::disk_ios_max`] I/Os of disks are with the kernel; more wait here in order.
//!    How many can wait is bounded by who puts them in. Sockets do not wait behind disks. The one
//!    sweep of a lazy file comes on top.
//! 4. Sends are whole: a short send goes on until all is sent or the socket fails. A caller has
//!    at most one send and one receive per socket under way, or their bytes mix. Sockets are
//!    blocking ones (without O_NONBLOCK): with it, the kernel says EAGAIN instead of waiting.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::file::FileJob;
use super::lazy::Sweep;
use super::uring::{Call, Kernel, Memory, Message, WAYS, Work, accepted};
use super::{DiskIo, Status};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::sync::Arc;
use crate::sync::statics::atomic::{AtomicU64, Ordering};

/// The most buffers in one [`Ring::send_many`].
pub const SEND_BUFFERS_MAX: usize = 1024;

/// How something that was asked of a [`Ring`] with a tag ended.
#[derive(Debug)]
pub struct Event {
    /// The asker's mark.
    pub tag: u64,
    /// Bytes received or sent; for polls, the poll bits; for accepts, 0. ECANCELED after
    /// [`Ring::cancel`].
    pub result: io::Result<u32>,
    /// The buffer that was handed in, or empty.
    pub buffer: Buffer,
    /// The buffers of a [`Ring::send_many`].
    pub buffers: Vec<Buffer>,
    /// The new connection of an [`Ring::accept`].
    pub connection: Option<OwnedFd>,
}

/// Who wants to hear of the end of work in flight.
#[derive(Debug)]
pub(super) enum Owner {
    /// A disk's I/O.
    Disk(FileJob),
    /// A disk that writes out what is dirty; nobody waits for it.
    Sweep(Sweep),
    /// The owner of the ring.
    Tag {
        /// The asker's mark.
        tag: u64,
        /// Bytes moved so far.
        done: usize,
        /// Whether to go on until the whole range is moved.
        is_whole: bool,
    },
}

/// One thread's window to the kernel.
#[derive(Debug)]
pub struct Ring {
    /// No other ring of this process has or had it.
    id: u64,
    completed: VecDeque<DiskIo>,
    events: VecDeque<Event>,
    waiting: VecDeque<Work>,
    disk_ios: usize,
    /// Headers of sends that are over, for the next ones.
    #[expect(clippy::vec_box, reason = "the kernel knows a header by its address")]
    messages: Vec<Box<Message>>,
    kernel: Option<Kernel>,
}

impl Ring {
    /// A ring with room for `entries` (a power of two) submissions at a time. To be called on the
    /// thread that will use it.
    pub fn new(entries: u32) -> Result<Ring> {
        let kernel = Kernel::new(entries, &WAYS).map_err(|source| {
            Error::from_io("setting up", "io_uring (Linux 5.11 or later, and permitted)", source)
        })?;
        Ok(Ring { kernel: Some(kernel), ..Ring::without_kernel() })
    }

    /// As [`Ring::new`] does it on an older kernel.
    #[cfg(test)]
    pub(super) fn in_way(entries: u32, way: super::uring::Way) -> Ring {
        let kernel = Kernel::new(entries, &[way]).unwrap();
        Ring { kernel: Some(kernel), ..Ring::without_kernel() }
    }

    /// A ring for disks that complete without the kernel: RAM and simulated ones. Files, block
    /// devices and sockets cannot be used through it; trying panics.
    pub fn without_kernel() -> Ring {
        static RINGS: AtomicU64 = AtomicU64::new(0);
        Ring {
            id: RINGS.fetch_add(1, Ordering::Relaxed),
            completed: VecDeque::new(),
            events: VecDeque::new(),
            waiting: VecDeque::new(),
            disk_ios: 0,
            messages: Vec::new(),
            kernel: None,
        }
    }

    /// Completes `io`: for disks that carried it out themselves.
    pub fn finish(&mut self, mut io: DiskIo, result: std::result::Result<(), Status>) {
        io.result = result;
        self.completed.push_back(io);
    }

    /// The next completed I/O.
    pub fn pop_completed(&mut self) -> Option<DiskIo> {
        self.completed.pop_front()
    }

    /// The next event.
    pub fn pop_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether [`Ring::pop_completed`] or [`Ring::pop_event`] has something.
    pub fn has_ended(&self) -> bool {
        !self.completed.is_empty() || !self.events.is_empty()
    }

    /// What was put in and has not ended: I/Os of files and block devices, polls, receives...
    pub fn in_flight(&self) -> usize {
        self.waiting.len() + self.kernel.as_ref().map_or(0, Kernel::in_flight)
    }

    /// The part of [`Ring::in_flight`] that is I/O of disks.
    pub fn disk_ios_in_flight(&self) -> usize {
        self.waiting.len() + self.disk_ios
    }

    /// I/Os of disks that are with the kernel at most.
    pub fn disk_ios_max(&self) -> usize {
        self.kernel.as_ref().map_or(0, |kernel| kernel.depth() / 2)
    }

    /// Receives what there is into `buffer[offset..offset + len]`, at least one byte; 0 bytes
    /// mean that the peer has closed.
    pub fn recv(
        &mut self,
        socket: &Arc<OwnedFd>,
        buffer: Buffer,
        offset: usize,
        len: usize,
        tag: u64,
    ) {
        let call = Call::Recv { from: offset, len };
        self.start_tagged(socket, call, Memory::One(buffer), tag, false);
    }

    /// Sends all of `buffer[offset..offset + len]`.
    pub fn send(
        &mut self,
        socket: &Arc<OwnedFd>,
        buffer: Buffer,
        offset: usize,
        len: usize,
        tag: u64,
    ) {
        let call = Call::Send { from: offset, len };
        self.start_tagged(socket, call, Memory::One(buffer), tag, true);
    }

    /// Sends all of `buffers`, one behind the other, mostly with one call. At most
    /// [`SEND_BUFFERS_MAX`] of them.
    pub fn send_many(&mut self, socket: &Arc<OwnedFd>, buffers: Vec<Buffer>, tag: u64) {
        assert!(buffers.len() <= SEND_BUFFERS_MAX, "too many buffers for one send");
        let mut message = self.messages.pop().unwrap_or_else(Message::empty);
        message.buffers = buffers;
        let memory = Memory::Many(message);
        self.start_tagged(socket, Call::SendMany { skip: 0 }, memory, tag, true);
    }

    /// Waits, once, until `file` (an eventfd, a listener, a socket) can be read.
    pub fn poll_readable(&mut self, file: &Arc<OwnedFd>, tag: u64) {
        self.start_tagged(file, Call::Poll, Memory::One(Buffer::empty()), tag, false);
    }

    /// Accepts one connection.
    pub fn accept(&mut self, listener: &Arc<OwnedFd>, tag: u64) {
        self.start_tagged(listener, Call::Accept, Memory::One(Buffer::empty()), tag, false);
    }

    /// Gives up on everything under way with `tag`. Each still comes out as an event, with
    /// ECANCELED or as it would have anyway.
    pub fn cancel(&mut self, tag: u64) {
        let is_meant = |work: &Work| matches!(work.owner, Owner::Tag { tag: of, .. } if of == tag);
        self.kernel().cancel(is_meant).expect("the ring is used on its own thread");
    }

    /// Lets the kernel start what was put in, and takes out what has ended, without waiting.
    pub fn submit(&mut self) {
        if let Some(kernel) = &mut self.kernel {
            kernel.submit();
            self.take_ended();
        }
    }

    /// As [`Ring::submit`], and if nothing has ended, waits until something does, `timeout` is
    /// over, or a signal came. May return early; returns at once if nothing is in flight and
    /// there is no timeout, or if there is no kernel.
    pub fn submit_and_wait(&mut self, timeout: Option<Duration>) {
        let Some(kernel) = &mut self.kernel else { return };
        kernel.harvest();
        self.take_ended();
        let is_pointless = timeout.is_none() && self.in_flight() == 0;
        if self.has_ended() || is_pointless || timeout == Some(Duration::ZERO) {
            return self.submit();
        }
        self.kernel().submit_and_wait(timeout);
        self.take_ended();
    }

    /// What tells this ring from all others, for disks that hold I/O.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Starts the I/O of a file or block device, or lets it wait for its turn.
    pub(super) fn start_disk(&mut self, work: Work) {
        if self.disk_ios < self.disk_ios_max() {
            self.disk_ios += 1;
            self.kernel().start(work);
        } else {
            self.kernel();
            self.waiting.push_back(work);
        }
    }

    fn kernel(&mut self) -> &mut Kernel {
        self.kernel.as_mut().expect("files and sockets are used through a ring with a kernel")
    }

    fn start_tagged(
        &mut self,
        file: &Arc<OwnedFd>,
        call: Call,
        memory: Memory,
        tag: u64,
        is_whole: bool,
    ) {
        let owner = Owner::Tag { tag, done: 0, is_whole };
        let work = Work { file: file.clone(), call, memory, owner };
        match call {
            // Nothing to move; a socket would wait for its peer first.
            Call::Recv { len: 0, .. } | Call::Send { len: 0, .. } => self.end_tagged(work, 0),
            _ => self.kernel().start(work),
        }
    }

    /// Hands what the kernel has ended to its owners.
    fn take_ended(&mut self) {
        while let Some((work, result)) = self.kernel().next_ended() {
            match work.owner {
                Owner::Disk(_) => self.end_disk(work, result),
                Owner::Sweep(sweep) => {
                    if let Some(work) = sweep.advance(work.call) {
                        self.kernel().start(work);
                    }
                }
                Owner::Tag { .. } => self.end_tagged(work, result),
            }
        }
    }

    fn end_disk(&mut self, work: Work, result: i32) {
        let lazy = match &work.owner {
            Owner::Disk(job) => job.lazy(),
            _ => None,
        };
        match FileJob::advance(work, result) {
            Ok(work) => self.kernel().start(work),
            Err(io) => {
                self.completed.push_back(io);
                match self.waiting.pop_front() {
                    Some(work) => self.kernel().start(work),
                    None => self.disk_ios -= 1,
                }
            }
        }
        if let Some(sweep) = lazy.and_then(|lazy| lazy.sweep()) {
            self.kernel().start(sweep);
        }
    }

    fn end_tagged(&mut self, mut work: Work, result: i32) {
        let connection = accepted(&work, result);
        let Owner::Tag { tag, done, is_whole } = &mut work.owner else { return };
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
        *done += moved;
        // The kernel mostly waits for the whole itself; older ones, and signals, end it early.
        if (*is_whole && moved > 0 && rest > 0) || result == -libc::EINTR {
            return self.kernel().start(work);
        }
        let result = match (&connection, result) {
            (Some(_), _) => Ok(0),
            (None, 0..) => Ok(*done as u32),
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
        self.events.push_back(Event { tag: *tag, result, buffer, buffers, connection });
    }
}
