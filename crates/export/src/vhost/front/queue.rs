//! The requests of one thread: each has a slot of the ring until it is answered.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::time::Timespec;
use udm::bio::Op;
use udm::error::{Error, Kind, Result, Status};
use udm::pmem::client_memory::ClientMemory;
use udm::queue::now;
use udm::sync::Arc;
use udm::units::{Nanos, SECOND, SECTOR};

use super::arena::{Arena, Block};
use super::outage::{ALIVE_NS, Outage};
use super::ring::{ENTRIES, Head, Piece, RING_BYTES, Ring};
use super::wire::is_closed;
use super::{DATA_BYTES, Front, PART_BYTES};
use crate::vhost::poll::{GLANCES, Poller, glance};
use crate::vhost::proto::feature;

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Operation.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
    /// Whether it is answered only when durable.
    pub fua: bool,
    /// Returned with the answer.
    pub token: u64,
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The request's token.
    pub token: u64,
    /// The request's result.
    pub result: std::result::Result<(), Status>,
}

/// A request's data in shared memory, read or written in order.
#[derive(Debug)]
pub struct Bytes<'a> {
    memory: &'a ClientMemory,
    at: u64,
    end: u64,
}

impl Bytes<'_> {
    /// Stores the next bytes.
    pub fn put(&mut self, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= self.end - self.at, "a request has its length");
        self.memory.store(self.at, bytes);
        self.at += bytes.len() as u64;
    }

    /// Copies the next bytes.
    pub fn get(&mut self, into: &mut [u8]) {
        assert!(into.len() as u64 <= self.end - self.at, "a request has its length");
        self.memory.load(self.at, into);
        self.at += into.len() as u64;
    }
}

/// A request that the server has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    ask: Ask,
    block: Option<Block>,
    /// Number of the request.
    pub(super) nth: u64,
}

/// A queue. Dropping it waits until the server does not use it any more.
#[derive(Debug)]
pub struct Queue {
    pub(super) front: Arc<Front>,
    pub(super) index: usize,
    pub(super) ring: Ring,
    arena: Arena,
    pub(super) sent: Vec<Option<Sent>>,
    count: u64,
    free: Vec<u16>,
    /// Requests that were answered without the server.
    done: VecDeque<Answer>,
    poller: Poller,
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
    /// The connection on which the ring was started.
    pub(super) link: u64,
    pub(super) socket: UnixStream,
    /// Set while the server is gone and the queue waits for the next one.
    pub(super) outage: Option<Outage>,
    /// For a program's own loop.
    pub(super) bell: Option<OwnedFd>,
    /// The reason why the server is gone.
    failure: Option<String>,
    pub(super) alive_at: Nanos,
}

impl Queue {
    pub(super) fn new(front: Arc<Front>, index: usize, at: u64, poller: Poller) -> Result<Queue> {
        let failed = |errno: rustix::io::Errno| {
            Error::from_io("making", "an eventfd for a server", errno.into())
        };
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed);
        let (kick, call) = (event()?, event()?);
        let (link, socket) = front.link()?;
        let has_events = front.features & feature::EVENT_IDX != 0;
        let ring = Ring::new(front.memory.clone(), at, has_events);
        let started = front.start(index, link, ring.addresses(), [kick.as_fd(), call.as_fd()]);
        // If the server is gone, the first request waits for the next one.
        started.or_else(|error| match front.patience > 0 && is_closed(&socket) {
            true => Ok(()),
            false => Err(error),
        })?;
        Ok(Queue {
            front,
            index,
            ring,
            arena: Arena::new(at + RING_BYTES, at + PART_BYTES),
            sent: vec![None; ENTRIES.into()],
            count: 0,
            free: (0..ENTRIES).rev().collect(),
            done: VecDeque::new(),
            poller,
            kick,
            call,
            link,
            socket,
            outage: None,
            bell: None,
            failure: None,
            alive_at: 0,
        })
    }

    /// Number of requests that were started and not answered.
    pub fn in_flight(&self) -> usize {
        self.with_server() + self.done.len()
    }

    fn with_server(&self) -> usize {
        usize::from(ENTRIES) - self.free.len()
    }

    /// Returns the reason why the server is gone.
    pub fn failure(&self) -> Option<Error> {
        self.failure.as_ref().map(|failure| Error::new(Kind::Io, failure.clone()))
    }

    /// Starts a request; `fill` stores its data if it is a write. Returns whether there was free
    /// space for it. If not, there is after other requests are answered.
    ///
    /// While the server has other requests, it sees new ones in batches, and the last of them at
    /// the next [`Queue::poll`] or [`Queue::wait`].
    pub fn start(&mut self, ask: Ask, fill: impl FnOnce(&mut Bytes<'_>)) -> Result<bool> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        if let Some(result) = self.judge(&ask) {
            self.done.push_back(Answer { token: ask.token, result });
            self.ring_bell();
            return Ok(true);
        }
        let has_data = matches!(ask.op, Op::Read | Op::Write);
        let Some(head) = self.free.pop() else { return Ok(false) };
        let block = if has_data { self.arena.take(ask.len) } else { None };
        if has_data && block.is_none() {
            self.free.push(head);
            return Ok(false);
        }
        // Before the data: loading these values after the store would wait until all of the data
        // has left this processor's store buffer.
        self.count += 1;
        let sent = Sent { ask, block, nth: self.count };
        self.sent[usize::from(head)] = Some(sent);
        if let (Op::Write, Some(block)) = (ask.op, block) {
            fill(&mut bytes(&self.front.memory, block, ask.len));
        }
        self.send(head, sent);
        // A program's loop may not run again before there is an answer.
        if self.bell.is_some() || self.ring.has_batch(self.with_server()) {
            self.show();
        }
        Ok(true)
    }

    /// Returns the answer to a request that does not need the server.
    fn judge(&self, ask: &Ask) -> Option<std::result::Result<(), Status>> {
        let facts = &self.front.facts;
        let Ask { op, offset, len, .. } = *ask;
        if op == Op::Flush {
            return (!facts.has_flush).then_some(Ok(()));
        }
        let most = match op {
            Op::Discard => facts.discard_bytes_max,
            Op::WriteZeroes => facts.zeroes_bytes_max,
            _ => facts.request_bytes_max,
        };
        let is_whole = (offset | len).is_multiple_of(facts.block_bytes.into());
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= facts.size_bytes);
        let wrong = match () {
            () if most == 0 => Status::Unsupported,
            () if op != Op::Read && facts.is_read_only => Status::ReadOnly,
            () if len == 0 || len > most || !is_whole => Status::Invalid,
            () if !is_inside && op == Op::Write => Status::NoSpace,
            () if !is_inside => Status::Invalid,
            () => return None,
        };
        Some(Err(wrong))
    }

    pub(super) fn send(&mut self, head: u16, sent: Sent) {
        let Ask { op, offset, len, .. } = sent.ask;
        let sector = offset / SECTOR;
        let (kind, range) = match op {
            Op::Read => (0, None),
            Op::Write => (1, None),
            Op::Flush => (4, None),
            Op::Discard => (11, Some((len / SECTOR) as u32)),
            Op::WriteZeroes => (13, Some((len / SECTOR) as u32)),
        };
        let sector = if op == Op::Flush { 0 } else { sector };
        let most = u64::from(self.front.facts.piece_bytes_max);
        let at = sent.block.map_or(0, |block| block.at);
        let has_data = matches!(op, Op::Read | Op::Write);
        let data_bytes = if has_data { len } else { 0 };
        let pieces = (0..data_bytes.div_ceil(most)).map(|nth| Piece {
            at: at + nth * most,
            len: (data_bytes - nth * most).min(most) as u32,
            is_writable: op == Op::Read,
        });
        self.ring.offer(head, Head { kind, sector, range }, pieces);
    }

    /// Makes all requests so far visible to the server.
    #[inline]
    pub(super) fn show(&mut self) {
        if self.ring.show() {
            let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
        }
    }

    /// Returns the next answer, if there is one. `take` gets the data of a read.
    pub fn poll(&mut self, take: impl FnOnce(u64, &mut Bytes<'_>)) -> Option<Answer> {
        loop {
            self.show();
            if let Some(answer) = self.done.pop_front() {
                return Some(answer);
            }
            if self.with_server() == 0 {
                // For the requests that follow.
                self.rearm();
                return None;
            }
            match self.ring.pop(self.with_server()) {
                Ok(Some((head, status))) => {
                    self.poller.found(now);
                    let Some(sent) = self.sent[usize::from(head)].take() else {
                        self.fail(&format!("an answer to request {head}, which was not sent"));
                        continue;
                    };
                    if let Some(result) = self.finish(head, sent, status) {
                        return Some(self.hand_back(head, sent, result, take));
                    }
                }
                Ok(None) if self.is_news_awaited() => return None,
                Ok(None) => {}
                Err(violation) => self.fail(&violation.to_string()),
            }
        }
    }

    /// Handles the case without an answer. Returns whether the program will be notified of the next
    /// one.
    fn is_news_awaited(&mut self) -> bool {
        let time = now();
        if time >= self.alive_at {
            self.alive_at = time + ALIVE_NS;
            // A failed attempt may have left an open connection.
            if self.outage.is_some() || is_closed(&self.socket) {
                // Answers from before the server's end are valid.
                if self.ring.answered() > 0 {
                    return false;
                }
                self.go_on();
                // Until there is a server, or the wait has ended.
                return self.outage.is_some();
            }
        }
        self.rearm()
    }

    /// Asks for the next notification, if a program's loop waits for one. Returns whether there is
    /// no answer now.
    fn rearm(&mut self) -> bool {
        if self.bell.is_none() {
            return true;
        }
        self.answer_call();
        self.ring.may_sleep()
    }

    /// Returns the result of a request; `None` if the request continues.
    fn finish(
        &mut self,
        head: u16,
        sent: Sent,
        status: u8,
    ) -> Option<std::result::Result<(), Status>> {
        match status {
            0 if sent.ask.fua && self.front.facts.has_flush => {
                // A virtio-blk write is durable only after a flush.
                let ask = Ask { op: Op::Flush, fua: false, ..sent.ask };
                let flush = Sent { ask, ..sent };
                self.sent[usize::from(head)] = Some(flush);
                self.send(head, flush);
                None
            }
            0 => Some(Ok(())),
            2 => Some(Err(Status::Unsupported)),
            _ => Some(Err(Status::Io)),
        }
    }

    fn hand_back(
        &mut self,
        head: u16,
        sent: Sent,
        result: std::result::Result<(), Status>,
        take: impl FnOnce(u64, &mut Bytes<'_>),
    ) -> Answer {
        let Sent { ask, block, .. } = sent;
        if let Some(block) = block {
            if ask.op == Op::Read && result.is_ok() {
                take(ask.token, &mut bytes(&self.front.memory, block, ask.len));
            }
            self.arena.put(block);
        }
        self.free.push(head);
        Answer { token: ask.token, result }
    }

    /// Ends the use of the server; all requests end with an error.
    pub(super) fn fail(&mut self, what: &str) {
        self.outage = None;
        let path = self.front.path.display();
        self.failure.get_or_insert_with(|| format!("the server at {path}: {what}"));
        let left = self.sent.iter_mut().filter_map(Option::take);
        self.done
            .extend(left.map(|sent| Answer { token: sent.ask.token, result: Err(Status::Io) }));
        self.free = (0..ENTRIES).rev().collect();
        self.ring_bell();
    }

    /// Waits until there is an answer, until `deadline`, or for a moment.
    pub fn wait(&mut self, deadline: Option<Nanos>) {
        self.show();
        if self.outage.is_some() {
            return self.sit_out(deadline);
        }
        while self.done.is_empty() && self.with_server() > 0 && self.ring.answered() == 0 {
            if deadline.is_some_and(|deadline| now() >= deadline) {
                return;
            }
            if self.poller.goes_on(now) {
                glance(GLANCES, || self.ring.answered() > 0);
                if now() >= self.alive_at {
                    return;
                }
            } else if self.ring.may_sleep() {
                return self.sleep(deadline);
            }
        }
    }

    fn sleep(&mut self, deadline: Option<Nanos>) {
        let left = deadline.map(|deadline| deadline.saturating_sub(now()));
        let left = left.map(|left| Timespec {
            tv_sec: (left / SECOND) as i64,
            tv_nsec: (left % SECOND) as i64,
        });
        let mut fds =
            [PollFd::new(&self.call, PollFlags::IN), PollFd::new(&self.socket, PollFlags::empty())];
        let _ = poll(&mut fds, left.as_ref());
        if !fds[1].revents().is_empty() {
            self.alive_at = 0;
        }
        self.answer_call();
        if self.bell.is_none() {
            self.ring.refuse_calls();
        }
    }

    fn answer_call(&self) {
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
    }

    /// Makes the file for a program's loop readable.
    fn ring_bell(&self) {
        if self.bell.is_some() {
            let _ = rustix::io::write(&self.call, &1_u64.to_ne_bytes());
        }
    }

    /// Returns a file that is readable while [`Queue::poll`] may return an answer, and until it has
    /// returned `None`.
    pub fn fd(&mut self) -> Result<BorrowedFd<'_>> {
        if self.bell.is_none() {
            let failed = |errno: rustix::io::Errno| {
                Error::from_io("making", "a file for a program's loop", errno.into())
            };
            let bell = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
            let data = epoll::EventData::new_u64(0);
            epoll::add(&bell, &self.call, data, epoll::EventFlags::IN).map_err(failed)?;
            match &mut self.outage {
                Some(outage) => outage.tick(&bell),
                None => {
                    let none = epoll::EventFlags::empty();
                    epoll::add(&bell, &self.socket, data, none).map_err(failed)?;
                }
            }
            self.bell = Some(bell);
            self.show();
            if !self.ring.may_sleep() || !self.done.is_empty() {
                self.ring_bell();
            }
        }
        Ok(self.bell.as_ref().expect("it was just made").as_fd())
    }
}

fn bytes(memory: &ClientMemory, block: Block, len: u64) -> Bytes<'_> {
    Bytes { memory, at: block.at, end: block.at + len }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.failure.is_some() {
            // The server's use of the ring is unknown, so the slot is not given to another queue.
            return;
        }
        self.show();
        self.front.stop(self.index, self.link);
        // Returns its memory to the system.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let at = PART_BYTES * self.index as u64 + RING_BYTES;
        let _ = fallocate(&self.front.file, flags, at, DATA_BYTES);
    }
}
