//! The transmission phase of one connection: request bytes in, bios out; finished bios in, reply
//! bytes out. No I/O.
//!
//! 1. A request with an invalid range, flag or command ([`rules`]) is answered with an error. Only
//!    bytes after which the stream cannot be parsed any more are a [`Violation`].
//! 2. Requests in flight and their memory are bounded ([`REQUESTS_MAX`], [`BYTES_MAX`]; one request
//!    may exceed the latter). At the bound, no more input is taken from the client until a reply is
//!    sent. All clients share one [budget]: a client that finds it used up waits, and after some
//!    seconds its request fails. A payload gets memory as it arrives, not by its announced length.
//! 3. Replies are sent in the order in which bios finish; the cookie identifies the request.
//! 4. A flush makes durable every write that was answered on any connection. The mapped device
//!    guarantees that, so several connections may share one device.

use std::collections::VecDeque;

use udm::bio::{Bio, Op};
use udm::buffer::{Buffer, BufferPool};
use udm::device::InFlight;
use udm::device::SLOW_SECONDS;
use udm::sync::Arc;
use udm::units::{BIO_BYTES_MAX, Nanos, SECOND};

use super::handshake::Agreement;
use super::known::{self, Known};
use super::proto::{self, REQUEST_BYTES, Request, Violation, command, command_flag, errno};
use super::replies::Replies;
use super::rules::{self, Action, Refusal, Unaligned};
use crate::budget::{self, BUDGET, Share};

/// Maximum requests of one connection in flight.
pub const REQUESTS_MAX: usize = 256;
/// Maximum bytes that one connection's requests and replies hold before it must wait.
pub const BYTES_MAX: usize = 64 << 20;
/// A write's payload of at least this length is received into its own buffer. A shorter payload is
/// collected in the receive buffer, whose capacity must exceed this length plus a header.
pub const DIRECT_BYTES_MIN: usize = 32 << 10;
/// First memory of a payload; whenever it is full, it is doubled.
pub const FIRST_BYTES: usize = 1 << 20;
const _: () = assert!(FIRST_BYTES <= budget::FREE_BYTES, "no client waits for its first bytes");
/// The payload of a refused write is skipped up to this length.
const SKIP_BYTES_MAX: u64 = 2 * BIO_BYTES_MAX;

/// A request that waits for its bio.
#[derive(Clone, Copy, Debug)]
struct Pending {
    request: Request,
    op: Op,
    /// First byte of the range that is not covered by a bio yet.
    next: u64,
    /// Time of the first check for slow requests that found it in flight.
    seen: Option<Nanos>,
    is_slow: bool,
}

const NO_MEMORY: Refusal = (errno::ENOMEM, "the server has no memory for this request");

/// The state of parsing: the meaning of the next bytes.
#[derive(Debug)]
enum Reading {
    Header,
    Payload { request: Request, buffer: Buffer, filled: usize },
    Skip { cookie: u64, refusal: Refusal, left: usize },
}

/// One connection after its handshake.
#[derive(Debug)]
pub struct Session {
    size_bytes: u64,
    agreement: Agreement,
    reading: Reading,
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
    /// Bytes of reads and writes in flight.
    held_bytes: usize,
    replies: Replies,
    share: Share,
    /// The next request, or the rest of this one, waits for memory; the inner value is the start of
    /// the wait, once known.
    starved: Option<Option<Nanos>>,
    /// Whether it has waited long enough.
    gives_up: bool,
    has_slow: bool,
    has_asked: bool,
    is_closing: bool,
    known: Option<Arc<dyn Known>>,
    /// Counts of the export's requests that are not whole blocks, and whether this client has sent
    /// one.
    unaligned: Arc<Unaligned>,
    is_unaligned: bool,
}

impl Session {
    /// Creates a session on a device of `size_bytes`; `replies` may hold bytes of the handshake.
    pub fn new(
        size_bytes: u64,
        agreement: Agreement,
        replies: Replies,
        known: Option<Arc<dyn Known>>,
        unaligned: Arc<Unaligned>,
    ) -> Session {
        Session {
            size_bytes,
            agreement,
            reading: Reading::Header,
            pending: vec![None; REQUESTS_MAX],
            free: (0..REQUESTS_MAX).rev().collect(),
            held_bytes: 0,
            replies,
            share: Share::of(&BUDGET),
            starved: None,
            gives_up: false,
            has_slow: false,
            has_asked: false,
            is_closing: false,
            known,
            unaligned,
            is_unaligned: false,
        }
    }

    /// Parses `input`, which continues after the bytes that the last call took. Returns the number
    /// of bytes taken, and appends bios to submit to `bios`.
    pub fn advance(
        &mut self,
        input: &[u8],
        bios: &mut VecDeque<Bio>,
        pool: &mut BufferPool,
    ) -> Result<usize, Violation> {
        let mut taken = 0;
        while !self.is_closing {
            let rest = &input[taken..];
            let step = match self.reading {
                Reading::Header => self.header(rest, bios, pool)?,
                Reading::Payload { .. } => self.payload(rest, bios, pool),
                Reading::Skip { .. } => self.skip(rest, pool),
            };
            taken += step;
            if step == 0 {
                return Ok(taken);
            }
        }
        Ok(input.len())
    }

    /// Takes the buffer of a long payload, to be filled from the returned offset on. Call this when
    /// all bytes received before are parsed. Return the buffer through [`Session::put_payload`].
    pub fn take_payload(&mut self) -> Option<(Buffer, usize)> {
        match &mut self.reading {
            Reading::Payload { buffer, filled, .. } if *filled < buffer.len() => {
                Some((std::mem::replace(buffer, Buffer::empty()), *filled))
            }
            _ => None,
        }
    }

    /// Records that `count` more bytes of the payload arrived.
    pub fn put_payload(
        &mut self,
        payload: Buffer,
        count: usize,
        bios: &mut VecDeque<Bio>,
        pool: &mut BufferPool,
    ) {
        let Reading::Payload { buffer, filled, .. } = &mut self.reading else {
            unreachable!("a payload's buffer is out only while the payload is being read");
        };
        *buffer = payload;
        *filled += count;
        self.grow_or_submit(bios, pool);
    }

    /// Records a finished bio: answers its request, or submits the next piece of its range.
    pub fn finished(&mut self, bio: Bio, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        let slot = bio.token as usize;
        let pending = self.pending[slot].as_mut().expect("a bio's token names its pending slot");
        let end = pending.request.offset + u64::from(pending.request.len);
        if bio.status.is_ok() && pending.op != Op::Flush && pending.next < end {
            bios.push_back(next_piece(pending, self.agreement.block_bytes, slot, bio.buffer));
            return;
        }
        let Pending { request, op, .. } = *pending;
        self.pending[slot] = None;
        self.free.push(slot);
        if matches!(op, Op::Read | Op::Write) {
            self.held_bytes -= bio.buffer.len();
        }
        if op == Op::Write || bio.status.is_err() {
            self.settle();
        }
        match bio.status {
            Ok(()) if op == Op::Read => self.reply_data(&request, bio.buffer, pool),
            Ok(()) => {
                pool.put(bio.buffer);
                self.replies.put(&proto::encode_simple_reply(0, request.cookie), pool);
            }
            Err(status) => {
                pool.put(bio.buffer);
                self.refuse(request.cookie, rules::refusal_of(status), pool);
            }
        }
    }

    /// Returns the replies to send.
    pub fn replies(&mut self) -> &mut Replies {
        &mut self.replies
    }

    /// Bytes of replies that are not sent in full.
    pub fn unsent_bytes(&self) -> usize {
        self.replies.unsent_bytes()
    }

    /// Whether another request would be taken now.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty() && self.held_bytes + self.replies.unsent_bytes() < BYTES_MAX
    }

    /// Bytes of requests and replies.
    fn held(&self) -> usize {
        self.held_bytes + self.replies.unsent_bytes()
    }

    /// Returns unused memory to the budget.
    pub fn settle(&mut self) {
        self.share.shrink(self.held());
    }

    /// Takes `bytes` more of the clients' budget. If that fails, the request waits until they are
    /// free.
    fn reserve(&mut self, bytes: usize) -> bool {
        if self.share.grow(self.held() + bytes) {
            self.starved = None;
            return true;
        }
        self.starved.get_or_insert(None);
        false
    }

    /// Whether it waits for memory that other clients hold.
    pub fn is_starved(&self) -> bool {
        self.starved.is_some()
    }

    /// Checks the time: a request does not wait for memory indefinitely.
    pub fn look_at_time(&mut self, now: Nanos) {
        if let Some(since) = &mut self.starved {
            let since = *since.get_or_insert(now);
            self.gives_up = now >= since + budget::STARVED_SECONDS_MAX * SECOND;
        }
    }

    /// Continues with a payload that had to wait.
    pub fn go_on(&mut self, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        if matches!(&self.reading, Reading::Payload { buffer, .. } if !buffer.is_empty()) {
            self.grow_or_submit(bios, pool);
        }
    }

    /// Returns the slow requests; an empty list if there were some before and are none now.
    pub fn slow(&mut self, now: Nanos) -> Option<Vec<InFlight>> {
        let mut slow = Vec::new();
        for (token, slot) in self.pending.iter_mut().enumerate() {
            let Some(pending) = slot else { continue };
            let age = now - *pending.seen.get_or_insert(now);
            if age >= SLOW_SECONDS * SECOND {
                let Request { offset, len, .. } = pending.request;
                let is_new = !std::mem::replace(&mut pending.is_slow, true);
                let (token, op, len) = (token as u64, pending.op, len.into());
                slow.push(InFlight { token, op, offset, len, age, is_new });
            }
        }
        let had_slow = std::mem::replace(&mut self.has_slow, !slow.is_empty());
        (had_slow || self.has_slow).then_some(slow)
    }

    /// Whether a request was slow at the last check.
    pub fn has_slow(&self) -> bool {
        self.has_slow
    }

    /// Whether a part of a request has arrived.
    pub fn is_inside_request(&self) -> bool {
        !matches!(self.reading, Reading::Header)
    }

    /// Stops taking requests; those in flight are answered.
    pub fn close(&mut self) {
        self.is_closing = true;
    }

    /// Whether the client has made a request.
    pub fn has_asked(&self) -> bool {
        self.has_asked
    }

    /// Whether the client has ended the session or [`Session::close`] was called.
    pub fn is_closing(&self) -> bool {
        self.is_closing
    }

    /// Number of requests with unfinished bios.
    pub fn in_flight(&self) -> usize {
        REQUESTS_MAX - self.free.len()
    }

    fn header(
        &mut self,
        input: &[u8],
        bios: &mut VecDeque<Bio>,
        pool: &mut BufferPool,
    ) -> Result<usize, Violation> {
        if !self.has_room() {
            return Ok(0);
        }
        let Some(request) = Request::decode(input)? else { return Ok(0) };
        self.has_asked = true;
        let known = self.known.as_deref();
        let checked = rules::check(&request, self.size_bytes, &self.agreement, known);
        if request.command == command::WRITE {
            return match checked {
                Ok(_) => Ok(self.begin_write(request, &input[REQUEST_BYTES..], bios, pool)),
                Err(_) if u64::from(request.len) > SKIP_BYTES_MAX => {
                    Err(Violation::WriteLength(request.len))
                }
                Err(refusal) => {
                    self.skip_payload(&request, refusal, pool);
                    Ok(REQUEST_BYTES)
                }
            };
        }
        match checked {
            Ok(Action::Serve(op)) => {
                let len = if op == Op::Read { request.len as usize } else { 0 };
                if len > 0 && !self.reserve(len) && !self.gives_up {
                    return Ok(0);
                }
                match self.allocate(len, pool) {
                    Some(buffer) => self.submit(request, op, buffer, bios),
                    None => {
                        self.settle();
                        self.refuse(request.cookie, NO_MEMORY, pool);
                    }
                }
            }
            Ok(Action::Status) => {
                let id = proto::BASE_ALLOCATION_ID;
                let extents = known::extents(self.known.as_deref(), &request);
                let chunk = proto::encode_block_status(request.cookie, id, &extents);
                self.replies.put(&chunk, pool);
            }
            Ok(Action::Nothing) => {
                self.replies.put(&proto::encode_simple_reply(0, request.cookie), pool);
            }
            Ok(Action::Disconnect) => self.is_closing = true,
            Err(refusal) => self.refuse(request.cookie, refusal, pool),
        }
        Ok(REQUEST_BYTES)
    }

    /// Takes a write's header and the bytes of its payload that have arrived.
    fn begin_write(
        &mut self,
        request: Request,
        input: &[u8],
        bios: &mut VecDeque<Bio>,
        pool: &mut BufferPool,
    ) -> usize {
        let len = request.len as usize;
        let count = len.min(input.len());
        if count < len && len < DIRECT_BYTES_MIN {
            return 0;
        }
        let first = len.min(FIRST_BYTES);
        if !self.reserve(first) && !self.gives_up {
            return 0;
        }
        let Some(mut buffer) = self.allocate(first, pool) else {
            self.settle();
            self.skip_payload(&request, NO_MEMORY, pool);
            return REQUEST_BYTES;
        };
        let count = count.min(first);
        buffer.as_mut_slice()[..count].copy_from_slice(&input[..count]);
        self.held_bytes += first;
        self.reading = Reading::Payload { request, buffer, filled: count };
        self.grow_or_submit(bios, pool);
        REQUEST_BYTES + count
    }

    /// Allocates memory for the current request; `None` without memory, or after a long wait.
    fn allocate(&mut self, len: usize, pool: &mut BufferPool) -> Option<Buffer> {
        let has_waited = self.starved.take().is_some();
        if std::mem::take(&mut self.gives_up) && has_waited {
            return None;
        }
        pool.try_take(len)
    }

    fn payload(&mut self, input: &[u8], bios: &mut VecDeque<Bio>, pool: &mut BufferPool) -> usize {
        let Reading::Payload { buffer, filled, .. } = &mut self.reading else { return 0 };
        if buffer.is_empty() {
            // The buffer is with the caller, to be filled directly.
            return 0;
        }
        let missing = &mut buffer.as_mut_slice()[*filled..];
        let count = missing.len().min(input.len());
        missing[..count].copy_from_slice(&input[..count]);
        *filled += count;
        self.grow_or_submit(bios, pool);
        count
    }

    /// Submits a complete payload. If its memory is full, it gets more, waits for more, or fails.
    fn grow_or_submit(&mut self, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        let Reading::Payload { request, buffer, filled } = &self.reading else { return };
        if *filled < buffer.len() {
            return;
        }
        let (request, filled) = (*request, *filled);
        let left = request.len as usize - filled;
        if left == 0 {
            return self.submit_payload(bios);
        }
        let len = (2 * filled).min(request.len as usize);
        if !self.reserve(len - filled) && !self.gives_up {
            return;
        }
        let grown = self.allocate(len, pool);
        let Reading::Payload { buffer, .. } = &mut self.reading else { return };
        if let Some(mut grown) = grown {
            grown.as_mut_slice()[..filled].copy_from_slice(buffer.as_slice());
            pool.put(std::mem::replace(buffer, grown));
            self.held_bytes += len - filled;
            return;
        }
        // Not kept for reuse: memory is short.
        *buffer = Buffer::empty();
        self.held_bytes -= filled;
        self.settle();
        self.reading = Reading::Skip { cookie: request.cookie, refusal: NO_MEMORY, left };
    }

    fn submit_payload(&mut self, bios: &mut VecDeque<Bio>) {
        let reading = std::mem::replace(&mut self.reading, Reading::Header);
        if let Reading::Payload { request, buffer, .. } = reading {
            // `submit` counts the bytes again.
            self.held_bytes -= buffer.len();
            self.submit(request, Op::Write, buffer, bios);
        }
    }

    fn submit(&mut self, request: Request, op: Op, buffer: Buffer, bios: &mut VecDeque<Bio>) {
        let slot = self.free.pop().expect("a header is only taken while a slot is free");
        self.held_bytes += buffer.len();
        if !rules::is_whole(&request, self.agreement.block_bytes) {
            let is_first = !std::mem::replace(&mut self.is_unaligned, true);
            self.unaligned.count(is_first);
        }
        let (next, seen, is_slow) = (request.offset, None, false);
        let pending = self.pending[slot].insert(Pending { request, op, next, seen, is_slow });
        bios.push_back(next_piece(pending, self.agreement.block_bytes, slot, buffer));
    }

    fn skip_payload(&mut self, request: &Request, refusal: Refusal, pool: &mut BufferPool) {
        let left = request.len as usize;
        if left == 0 {
            self.refuse(request.cookie, refusal, pool);
        } else {
            self.reading = Reading::Skip { cookie: request.cookie, refusal, left };
        }
    }

    fn skip(&mut self, input: &[u8], pool: &mut BufferPool) -> usize {
        let Reading::Skip { cookie, refusal, left } = &mut self.reading else { return 0 };
        let count = input.len().min(*left);
        *left -= count;
        if *left == 0 {
            let (cookie, refusal) = (*cookie, *refusal);
            self.reading = Reading::Header;
            self.refuse(cookie, refusal, pool);
        }
        count
    }

    fn reply_data(&mut self, request: &Request, data: Buffer, pool: &mut BufferPool) {
        let Request { cookie, offset, len, .. } = *request;
        if self.agreement.is_structured {
            let header = proto::encode_offset_data(cookie, offset, len);
            self.replies.put_data(&header, data, pool);
        } else {
            let header = proto::encode_simple_reply(0, cookie);
            self.replies.put_data(&header, data, pool);
        }
    }

    fn refuse(&mut self, cookie: u64, (error, words): Refusal, pool: &mut BufferPool) {
        if self.agreement.is_structured {
            self.replies.put(&proto::encode_error_chunk(cookie, error, words), pool);
        } else {
            self.replies.put(&proto::encode_simple_reply(error, cookie), pool);
        }
    }
}

/// Creates the bio for the next part of the request's range: all of a read or write. Trims and
/// zeroes, which may be up to 4 GiB long, are split into pieces, at the bounds of blocks.
fn next_piece(pending: &mut Pending, block_bytes: u32, slot: usize, buffer: Buffer) -> Bio {
    let Pending { request, op, next, .. } = pending;
    let end = request.offset + u64::from(request.len);
    let mut len = end - *next;
    if len > BIO_BYTES_MAX {
        let block_bytes = u64::from(block_bytes);
        len = (*next + BIO_BYTES_MAX) / block_bytes * block_bytes - *next;
    }
    let fua = request.flags & command_flag::FUA != 0 && !matches!(op, Op::Read | Op::Flush);
    let mut bio = Bio::bare(*op, *next, len, fua, slot as u64);
    bio.buffer = buffer;
    // Even for a client that knows the block size: another table may have larger blocks.
    bio.allows_parts = true;
    *next += len;
    bio
}
