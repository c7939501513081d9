//! The role of a queue that serves a client: one conversation over a stream socket.
//!
//! While the client has no request in flight, only the client can cause work. Then the thread sends
//! and receives with plain calls and sleeps in the socket. A thread that wakes another one through
//! a socket tells the scheduler that it will sleep itself next, so a client that waits for each
//! answer and its server take turns on one core. The ring has no such hint, and an idle core takes
//! longer to wake than a request takes to serve.
//!
//! As soon as a request waits for a disk, or for free space, all calls go through the ring. Sending
//! the answers of a turn, asking for the next bytes, starting disk I/O and waiting for the first
//! completion are then one system call.
//!
//! A thread that sleeps in the socket cannot be woken through its queue. This is not needed: it has
//! no waiting bios, and [`Queue::stop`](super::Queue::stop) ends its sleep by shutting the socket's
//! receiving side.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

use super::watch::{self, Watch};
use super::{Core, Queue, Role, STOP_SECONDS_MAX, Turn, note_work, now};
use crate::bio::Bio;
use crate::buffer::{Buffer, BufferPool, CLIENT_POOL_BYTES_MAX};
use crate::device::{Device, Driver, InFlight};
use crate::disk::{DiskIo, Ring};
use crate::error::Result;
use crate::ring::Event;
use crate::sync::Arc;
use crate::units::{Nanos, SECOND};

/// Requests of a client's queue to the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    Receive,
    Send,
}

type SubmissionQueue = crate::ring::SubmissionQueue<Asks, DiskIo>;

/// Most buffers that are sent with one call; the rest follows.
const SEND_BUFFERS_MAX: usize = 64;
/// How long a stopping queue waits for bios that are parked.
const PARKED_SECONDS_MAX: u64 = 2;

/// Where received bytes go: `buffer[at..end]`.
#[derive(Debug)]
pub struct Space {
    /// The memory.
    pub buffer: Buffer,
    /// First byte to fill.
    pub at: usize,
    /// One past the last byte to fill.
    pub end: usize,
}

/// The dialogue with one client over a stream socket, as a pure state machine.
///
/// 1. The space given out by `incoming` is returned through `received` before the next one is asked
///    for, and each buffer of `outgoing` is returned through `sent`, unless the socket broke.
/// 2. Each bio handed out is returned through `finished`, unless the queue had to stop.
pub trait Conversation: Send {
    /// Where the next bytes go; `None` while none are wanted.
    fn incoming(&mut self) -> Option<Space>;

    /// `count` bytes arrived in `space`; 0 means that the client sends no more.
    fn received(
        &mut self,
        space: Space,
        count: usize,
        bios: &mut VecDeque<Bio>,
        pool: &mut BufferPool,
    );

    /// A bio came back.
    fn finished(&mut self, bio: Bio, bios: &mut VecDeque<Bio>, pool: &mut BufferPool);

    /// The next bytes to send: a whole buffer; `None` while there are none.
    fn outgoing(&mut self) -> Option<Buffer>;

    /// All bytes of `buffer` were sent.
    fn sent(&mut self, buffer: Buffer, bios: &mut VecDeque<Bio>, pool: &mut BufferPool);

    /// Slow requests, those in flight for more than [`SLOW_SECONDS`](crate::device::SLOW_SECONDS),
    /// when it is time to look for them; an empty list when none is slow any more.
    fn slow(&mut self, _now: Nanos) -> Option<Vec<InFlight>> {
        None
    }

    /// Continues work that waited for a change that causes no event. Called once in a turn.
    fn go_on(&mut self, _now: Nanos, _bios: &mut VecDeque<Bio>, _pool: &mut BufferPool) {}

    /// Notes the time; returns when to call again.
    fn tick(&mut self, now: Nanos) -> Option<Nanos>;

    /// Takes no more requests; those in flight are answered.
    fn close(&mut self);

    /// The socket failed: bytes can no longer be sent or received.
    fn broken(&mut self);

    /// Whether no request is in flight and no more bytes will be sent, so the socket may be closed.
    fn is_over(&self) -> bool;

    /// Whether another thread continues with the socket, so that only this side's part is closed.
    fn is_handed_over(&self) -> bool {
        false
    }
}

/// A client's socket.
#[derive(Debug)]
pub struct Socket {
    /// It.
    pub stream: OwnedFd,
    /// Whether the thread may poll the socket for a moment before it sleeps in it, if that pays.
    pub is_watched: bool,
}

impl Queue {
    /// Serves one client of `device` over `socket`. `farewell` is called on the queue's thread when
    /// the conversation has ended, with its final state.
    pub fn serve<C: Conversation + 'static>(
        name: &str,
        device: &Arc<Device>,
        socket: Socket,
        conversation: C,
        farewell: impl FnOnce(C) + Send + 'static,
    ) -> Result<Queue> {
        let device = device.clone();
        let watch = socket.is_watched.then(Watch::default);
        let socket = Arc::new(socket.stream);
        let slept_in = Arc::downgrade(&socket);
        let queue = Queue::run(name, move |core| {
            Ok(Client::new(socket, watch, conversation, core.driver(&device)?, farewell))
        })?;
        Ok(queue.interrupted_by(move || {
            if let Some(socket) = slept_in.upgrade() {
                // This fails only if the peer has left the socket: then no thread sleeps there.
                let _ = rustix::net::shutdown(&socket, Shutdown::Read);
            }
        }))
    }
}

/// One client.
struct Client<C, F> {
    socket: Arc<OwnedFd>,
    conversation: C,
    driver: Driver,
    farewell: F,
    /// Where the bytes go that the ring receives.
    receiving: Option<(usize, usize)>,
    /// How many bytes the ring sends.
    sending: Option<usize>,
    stopping_since: Option<Nanos>,
    watch: Option<Watch>,
}

impl<C: Conversation, F> Client<C, F> {
    fn new(
        socket: Arc<OwnedFd>,
        watch: Option<Watch>,
        conversation: C,
        mut driver: Driver,
        farewell: F,
    ) -> Client<C, F> {
        driver.pool().keep_at_most(CLIENT_POOL_BYTES_MAX);
        Client {
            socket,
            conversation,
            driver,
            farewell,
            receiving: None,
            sending: None,
            stopping_since: None,
            watch,
        }
    }

    /// Whether only the client can cause work. Disk I/O also causes work, even when a target does
    /// it for other clients as well.
    fn is_alone(&self, ring: &Ring) -> bool {
        let is_at_rest = self.driver.is_quiet() && ring.awaited() == 0;
        is_at_rest && self.sending.is_none() && self.receiving.is_none()
    }

    /// Waits in the socket until bytes arrive, and takes them. False if no bytes are expected.
    fn receive_alone(&mut self, core: &Core<Asks>) -> bool {
        let Some(mut space) = self.conversation.incoming() else { return false };
        let memory = &mut space.buffer.as_mut_slice()[space.at..space.end];
        note_work();
        let result = match &mut self.watch {
            Some(watch) => watch.receive(&self.socket, memory),
            None => watch::sleep(&self.socket, memory),
        };
        let result = result.map_err(std::io::Error::from);
        self.has_received(space, result, core);
        true
    }

    fn has_received(&mut self, space: Space, result: std::io::Result<usize>, core: &Core<Asks>) {
        let (bios, pool) = self.driver.bios_and_pool();
        match result {
            // Cancelled, or the end of a stream that this side has shut down.
            Ok(0) | Err(_) if core.is_stopping() => {}
            Ok(count) => self.conversation.received(space, count, bios, pool),
            Err(_) => self.conversation.broken(),
        }
    }

    /// Sends the waiting bytes, as many as the socket takes without blocking; the ring sends the
    /// rest.
    fn send_alone(&mut self, submissions: &mut SubmissionQueue) {
        while let Some(buffer) = self.conversation.outgoing() {
            let len = buffer.len();
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let count = match rustix::net::send(&self.socket, buffer.as_slice(), flags) {
                Ok(count) => count,
                Err(Errno::AGAIN | Errno::INTR) => 0,
                Err(_) => return self.conversation.broken(),
            };
            if count < len {
                self.sending = Some(len - count);
                return submissions.send(&self.socket, buffer, count, len - count, Asks::Send);
            }
            let (bios, pool) = self.driver.bios_and_pool();
            self.conversation.sent(buffer, bios, pool);
        }
    }

    /// Asks the ring for the next bytes.
    fn receive(&mut self, submissions: &mut SubmissionQueue) {
        if self.receiving.is_none()
            && let Some(Space { buffer, at, end }) = self.conversation.incoming()
        {
            self.receiving = Some((at, end));
            submissions.recv(&self.socket, buffer, at, end - at, Asks::Receive);
        }
    }

    /// Gives the ring what waits to be sent.
    fn send(&mut self, submissions: &mut SubmissionQueue) {
        if self.sending.is_some() {
            return;
        }
        let Some(first) = self.conversation.outgoing() else { return };
        let Some(second) = self.conversation.outgoing() else {
            let len = first.len();
            self.sending = Some(len);
            return submissions.send(&self.socket, first, 0, len, Asks::Send);
        };
        let mut buffers = vec![first, second];
        while buffers.len() < SEND_BUFFERS_MAX
            && let Some(buffer) = self.conversation.outgoing()
        {
            buffers.push(buffer);
        }
        self.sending = Some(buffers.iter().map(Buffer::len).sum());
        submissions.send_many(&self.socket, buffers, Asks::Send);
    }

    fn has_sent(&mut self, event: Event<Asks>) {
        let due = self.sending.take().expect("one send is under way");
        if !matches!(event.result, Ok(count) if count as usize == due) {
            return self.conversation.broken();
        }
        let (bios, pool) = self.driver.bios_and_pool();
        for buffer in std::iter::once(event.buffer).chain(event.buffers) {
            if !buffer.is_empty() {
                self.conversation.sent(buffer, bios, pool);
            }
        }
    }

    /// Takes no more requests.
    fn close(&mut self, submissions: &mut SubmissionQueue) {
        self.conversation.close();
        self.stopping_since = Some(now());
        if self.receiving.is_some() {
            submissions.cancel(Asks::Receive);
        }
    }

    /// The time when a stop must have ended: soon, if all remaining requests wait for free space or
    /// for a resume.
    fn stop_deadline(&self) -> Option<Nanos> {
        let seconds =
            if self.driver.is_all_parked() { PARKED_SECONDS_MAX } else { STOP_SECONDS_MAX };
        self.stopping_since.map(|since| since + seconds * SECOND)
    }
}

impl<C: Conversation, F: FnOnce(C)> Role for Client<C, F> {
    type Tag = Asks;

    fn event(&mut self, event: Event<Asks>, core: &mut Core<Asks>) {
        match event.tag {
            Asks::Receive => {
                let (at, end) = self.receiving.take().expect("one receive is under way");
                let space = Space { buffer: event.buffer, at, end };
                self.has_received(space, event.result.map(|count| count as usize), core);
            }
            Asks::Send => self.has_sent(event),
        }
    }

    fn turn(&mut self, core: &mut Core<Asks>, is_stopping: bool) -> Turn {
        if is_stopping && self.stopping_since.is_none() {
            self.close(core.submissions());
        }
        let conversation = &mut self.conversation;
        let finish = |bio, bios: &mut _, pool: &mut _| conversation.finished(bio, bios, pool);
        self.driver.pump(core.ring_mut(), finish);
        let now = now();
        let (bios, pool) = self.driver.bios_and_pool();
        self.conversation.go_on(now, bios, pool);
        if self.is_alone(core.ring()) {
            self.send_alone(core.submissions());
        } else {
            self.send(core.submissions());
        }
        if self.conversation.is_over() {
            return Turn::Over;
        }
        if let Some(slow) = self.conversation.slow(now) {
            self.driver.report_slow(&slow, core.ring());
        }
        let deadlines = [self.conversation.tick(now), self.stop_deadline()];
        if deadlines[1].is_some_and(|deadline| now >= deadline) {
            return Turn::Over;
        }
        let deadline = deadlines.into_iter().flatten().min();
        let has_received =
            self.is_alone(core.ring()) && deadline.is_none() && self.receive_alone(core);
        if has_received || !self.driver.bios.is_empty() {
            return Turn::Again;
        }
        self.receive(core.submissions());
        Turn::Idle(deadline)
    }

    /// Closes the socket and gives up the driver.
    fn leave(self, core: &mut Core<Asks>) {
        // The ring may hold the socket a little longer; the client need not wait for that.
        if !self.conversation.is_handed_over() {
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        }
        self.driver.report_slow(&[], core.ring());
        core.leave(self.driver);
        (self.farewell)(self.conversation);
    }
}
