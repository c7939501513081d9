//! One client's whole connection: handshake, then transmission, with the buffer that bytes are
//! received into. Pure; driven by a queue of the engine.

use std::collections::VecDeque;

use udm::bio::Bio;
use udm::buffer::{Buffer, BufferPool};
use udm::device::InFlight;
use udm::queue::{Conversation, Space};
use udm::sync::Arc;
use udm::sync::atomic::{AtomicU8, Ordering};
use udm::units::{Nanos, SECOND};

use super::handshake::{ExportInfo, Handshake, Neighbours, Progress, Said};
use super::known::Known;
use super::proto::{OPTION_BYTES_MAX, OPTION_HEADER_BYTES, REQUEST_BYTES, Violation};
use super::replies::Replies;
use super::rules::Unaligned;
use super::session::{DIRECT_BYTES_MIN, Session};

/// Bytes of the receive buffer: enough for a batch of short requests, but small enough that little
/// of a long payload must be copied out of it.
const INPUT_BYTES: usize = 128 << 10;
const _: () = assert!(INPUT_BYTES >= 2 * (DIRECT_BYTES_MIN + REQUEST_BYTES));
const _: () = assert!(INPUT_BYTES >= 2 * (OPTION_BYTES_MAX as usize + OPTION_HEADER_BYTES));

/// A client that has not finished its handshake after this long is disconnected.
pub const HANDSHAKE_SECONDS_MAX: u64 = 30;
/// A client that has not received its last replies this long after its last request is
/// disconnected.
pub const FAREWELL_SECONDS_MAX: u64 = 10;

/// Time between two checks for slow requests, while any is in flight.
const LOOK_NS: Nanos = SECOND;
/// Time between two attempts to get memory that other clients hold.
const STARVED_LOOK_NS: Nanos = SECOND / 200;

#[derive(Debug)]
enum Phase {
    Handshake { handshake: Box<Handshake>, replies: Replies },
    Transmission(Box<Session>),
}

/// A client, from the first byte to the last.
#[derive(Debug)]
pub struct Connection {
    size_bytes: u64,
    phase: Phase,
    /// Received bytes; those in `taken..filled` are not parsed yet.
    input: Buffer,
    taken: usize,
    filled: usize,
    /// When the handshake, or the sending of the last replies, must end.
    deadline: Option<Nanos>,
    deadline_is_farewell: bool,
    violation: Option<Violation>,
    /// Input is not read any more.
    is_deaf: bool,
    /// Output is not sent any more.
    is_mute: bool,
    /// The buffer in use by the caller is a payload's, not `input`.
    payload_is_out: bool,
    /// `input` holds unparsed bytes: whole requests that wait until the session has free space, or
    /// bytes that another export has received, until the first turn.
    is_stalled: bool,
    /// An option names another export at this address: the connection is handed over once all
    /// replies are sent.
    is_leaving: bool,
    /// The connection was handed over.
    is_handed_over: bool,
    /// STARTTLS was answered; parsing waits until the input is decrypted.
    awaits_tls: bool,
    known: Option<Arc<dyn Known>>,
    unaligned: Arc<Unaligned>,
    standing: Arc<Standing>,
    /// The client has made a request, and `standing` records it.
    is_used: bool,
    /// Time of the next check for slow requests; `None` while none is in flight.
    look_at: Option<Nanos>,
}

/// A client's progress, by which the client to replace is chosen.
#[derive(Debug, Default)]
pub struct Standing(AtomicU8);

impl Standing {
    /// In the handshake.
    pub const GREETED: u8 = 0;
    /// After the handshake, without a request so far.
    pub const AGREED: u8 = 1;
    /// The client has made a request.
    pub const USED: u8 = 2;
    /// The client has disconnected; requests of it may still be in flight.
    pub const LEFT: u8 = 3;

    pub(super) fn set(&self, standing: u8) {
        if self.get() != Standing::LEFT {
            self.0.store(standing, Ordering::Relaxed);
        }
    }

    /// Returns the progress.
    pub fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Connection {
    /// Starts with the greeting to a client of `export`.
    pub fn new(export: ExportInfo) -> Connection {
        let size_bytes = export.size_bytes;
        let mut greeting = Vec::new();
        let handshake = Handshake::start(export, &mut greeting);
        let mut replies = Replies::default();
        replies.put(&greeting, &mut BufferPool::new());
        Connection::with(size_bytes, handshake, replies)
    }

    /// Continues with a client that another export has greeted; `rest` holds received bytes without
    /// an answer.
    pub fn resume(export: ExportInfo, said: Said, rest: &[u8]) -> Connection {
        let size_bytes = export.size_bytes;
        let handshake = Handshake::resume(export, said);
        let mut connection = Connection::with(size_bytes, handshake, Replies::default());
        connection.input.as_mut_slice()[..rest.len()].copy_from_slice(rest);
        connection.filled = rest.len();
        connection.is_stalled = true;
        connection
    }

    /// Adds the other exports at the same address.
    pub fn beside(mut self, neighbours: Box<dyn Neighbours>) -> Connection {
        if let Phase::Handshake { handshake, .. } = &mut self.phase {
            handshake.beside(neighbours);
        }
        self
    }

    fn with(size_bytes: u64, handshake: Handshake, replies: Replies) -> Connection {
        Connection {
            size_bytes,
            phase: Phase::Handshake { handshake: Box::new(handshake), replies },
            input: Buffer::zeroed(INPUT_BYTES),
            taken: 0,
            filled: 0,
            deadline: None,
            deadline_is_farewell: false,
            violation: None,
            is_deaf: false,
            is_mute: false,
            payload_is_out: false,
            is_stalled: false,
            is_leaving: false,
            is_handed_over: false,
            awaits_tls: false,
            known: None,
            unaligned: Arc::default(),
            standing: Arc::default(),
            is_used: false,
            look_at: None,
        }
    }

    /// Returns its progress, which other threads may read.
    pub fn standing(&self) -> Arc<Standing> {
        self.standing.clone()
    }

    /// Lets clients query `known`.
    pub fn knowing(mut self, known: Arc<dyn Known>) -> Connection {
        self.known = Some(known);
        self
    }

    /// Counts requests that are not whole blocks in `unaligned`.
    pub fn counting(mut self, unaligned: Arc<Unaligned>) -> Connection {
        self.unaligned = unaligned;
        self
    }

    /// Returns the protocol violation that ends the connection.
    pub fn violation(&self) -> Option<Violation> {
        self.violation
    }

    /// Whether STARTTLS was answered: after the queued replies, everything received and sent must
    /// be the plain text inside TLS.
    pub fn awaits_tls(&self) -> bool {
        self.awaits_tls && !self.is_deaf
    }

    /// From now on all bytes are inside TLS.
    pub fn tls_begins(&mut self) {
        self.awaits_tls = false;
    }

    /// Whether input is not read any more.
    pub fn is_deaf(&self) -> bool {
        self.is_deaf
    }

    /// Whether output is not sent any more.
    pub fn is_mute(&self) -> bool {
        self.is_mute
    }

    /// The client sends no more bytes.
    pub fn hung_up(&mut self) {
        if !self.is_deaf {
            self.hang_up();
        }
    }

    fn replies(&mut self) -> &mut Replies {
        match &mut self.phase {
            Phase::Handshake { replies, .. } => replies,
            Phase::Transmission(session) => session.replies(),
        }
    }

    /// Parses all complete messages of the input.
    fn advance(&mut self, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        while !self.is_deaf && !self.awaits_tls && !self.is_leaving && self.taken < self.filled {
            let input = &self.input.as_slice()[self.taken..self.filled];
            let result = match &mut self.phase {
                Phase::Handshake { .. } => self.handshake(pool),
                Phase::Transmission(session) => session.advance(input, bios, pool),
            };
            match result {
                Ok(0) if !self.is_leaving => break,
                Ok(count) => self.taken += count,
                Err(violation) => self.give_up(violation),
            }
            self.leave();
        }
        if self.awaits_tls && self.taken < self.filled {
            self.give_up(Violation::Unencrypted);
        }
        if let Phase::Transmission(session) = &self.phase {
            self.is_deaf |= session.is_closing();
            if self.is_deaf {
                self.standing.set(Standing::LEFT);
            }
            let must_wait = !session.has_room() || session.is_starved();
            self.is_stalled = self.taken < self.filled && must_wait;
            if session.has_asked() && !self.is_used {
                self.is_used = true;
                self.standing.set(Standing::USED);
            }
        }
    }

    /// Hands the connection over to the export that the client has named, once all replies are
    /// sent. If that fails, this export answers the option.
    fn leave(&mut self) {
        let Phase::Handshake { handshake, replies } = &mut self.phase else { return };
        if !self.is_leaving || self.is_deaf || replies.unsent_bytes() > 0 {
            return;
        }
        self.is_leaving = false;
        if handshake.pass_on(&self.input.as_slice()[self.taken..self.filled]) {
            self.is_handed_over = true;
            self.taken = self.filled;
            (self.is_deaf, self.is_mute) = (true, true);
        }
    }

    /// Parses input that was left for lack of free space.
    fn go_on_if_stalled(&mut self, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        if self.is_stalled {
            self.advance(bios, pool);
        }
    }

    fn handshake(&mut self, pool: &mut BufferPool) -> Result<usize, Violation> {
        let Phase::Handshake { handshake, replies } = &mut self.phase else { return Ok(0) };
        let input = &self.input.as_slice()[self.taken..self.filled];
        let mut out = Vec::new();
        let result = handshake.advance(input, &mut out);
        for part in out.chunks(INPUT_BYTES / 2) {
            replies.put(part, pool);
        }
        let (count, progress) = result?;
        match progress {
            Progress::Waiting => {}
            Progress::Over => self.is_deaf = true,
            Progress::Elsewhere => self.is_leaving = true,
            Progress::Secure => self.awaits_tls = true,
            Progress::Agreed(agreement) => {
                let replies = std::mem::take(replies);
                let known = self.known.clone();
                let unaligned = self.unaligned.clone();
                let session = Session::new(self.size_bytes, agreement, replies, known, unaligned);
                self.phase = Phase::Transmission(Box::new(session));
                self.standing.set(Standing::AGREED);
            }
        }
        Ok(count)
    }

    fn give_up(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
        self.close();
    }

    fn hang_up(&mut self) {
        let is_inside = match &self.phase {
            Phase::Handshake { .. } => self.taken < self.filled,
            Phase::Transmission(session) => {
                session.is_inside_request() || (self.taken < self.filled && session.has_room())
            }
        };
        if is_inside {
            self.violation.get_or_insert(Violation::Truncated);
        }
        self.close();
    }
}

impl Conversation for Connection {
    fn incoming(&mut self) -> Option<Space> {
        if self.is_deaf || self.is_leaving {
            return None;
        }
        if let Phase::Transmission(session) = &mut self.phase {
            if session.is_starved() {
                return None;
            }
            if let Some((buffer, at)) = session.take_payload() {
                self.payload_is_out = true;
                let end = buffer.len();
                return Some(Space { buffer, at, end });
            }
            if self.is_stalled || (!session.is_inside_request() && !session.has_room()) {
                return None;
            }
        }
        if self.taken == self.filled {
            (self.taken, self.filled) = (0, 0);
        } else if self.filled > INPUT_BYTES / 2 {
            // The rest is the start of one message, and less than half of the buffer.
            self.input.as_mut_slice().copy_within(self.taken..self.filled, 0);
            (self.taken, self.filled) = (0, self.filled - self.taken);
        }
        let buffer = std::mem::replace(&mut self.input, Buffer::empty());
        Some(Space { buffer, at: self.filled, end: INPUT_BYTES })
    }

    fn received(
        &mut self,
        space: Space,
        count: usize,
        bios: &mut VecDeque<Bio>,
        pool: &mut BufferPool,
    ) {
        if std::mem::take(&mut self.payload_is_out) {
            if let Phase::Transmission(session) = &mut self.phase {
                session.put_payload(space.buffer, count, bios, pool);
            }
        } else {
            self.input = space.buffer;
            self.filled += count;
        }
        if count == 0 {
            self.hang_up();
        }
        self.advance(bios, pool);
    }

    fn finished(&mut self, bio: Bio, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        let Phase::Transmission(session) = &mut self.phase else {
            unreachable!("bios are submitted in transmission only");
        };
        session.finished(bio, bios, pool);
        self.go_on_if_stalled(bios, pool);
    }

    fn outgoing(&mut self) -> Option<Buffer> {
        if self.is_mute { None } else { self.replies().take_next() }
    }

    fn sent(&mut self, buffer: Buffer, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        self.replies().sent(buffer, pool);
        if let Phase::Transmission(session) = &mut self.phase {
            session.settle();
        }
        if self.is_leaving {
            self.leave();
            self.advance(bios, pool);
        }
        self.go_on_if_stalled(bios, pool);
    }

    fn slow(&mut self, now: Nanos) -> Option<Vec<InFlight>> {
        let Phase::Transmission(session) = &mut self.phase else { return None };
        if session.in_flight() == 0 && !session.has_slow() {
            self.look_at = None;
            return None;
        }
        let look_at = *self.look_at.get_or_insert(now + LOOK_NS);
        if now < look_at && session.in_flight() > 0 {
            return None;
        }
        self.look_at = Some(now + LOOK_NS);
        session.slow(now)
    }

    fn go_on(&mut self, now: Nanos, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        let Phase::Transmission(session) = &mut self.phase else {
            if std::mem::take(&mut self.is_stalled) {
                self.advance(bios, pool);
            }
            return;
        };
        if session.is_starved() && !self.is_deaf {
            session.look_at_time(now);
            session.go_on(bios, pool);
            self.advance(bios, pool);
        }
    }

    fn tick(&mut self, now: Nanos) -> Option<Nanos> {
        let is_greeting = match &self.phase {
            Phase::Handshake { .. } => true,
            Phase::Transmission(session) if !self.is_deaf && session.is_starved() => {
                return Some(now + STARVED_LOOK_NS);
            }
            Phase::Transmission(session) if !self.is_deaf || session.in_flight() > 0 => {
                return self.look_at.filter(|_| session.in_flight() > 0);
            }
            Phase::Transmission(_) => false,
        };
        if is_greeting == self.deadline_is_farewell {
            self.deadline = None;
            self.deadline_is_farewell = !is_greeting;
        }
        let seconds = if is_greeting { HANDSHAKE_SECONDS_MAX } else { FAREWELL_SECONDS_MAX };
        let deadline = *self.deadline.get_or_insert(now + seconds * SECOND);
        if now >= deadline {
            if is_greeting {
                self.give_up(Violation::TooSlow(HANDSHAKE_SECONDS_MAX));
            }
            self.is_mute = true;
        }
        Some(deadline)
    }

    fn close(&mut self) {
        self.is_deaf = true;
        self.standing.set(Standing::LEFT);
        if let Phase::Transmission(session) = &mut self.phase {
            session.close();
        }
    }

    fn broken(&mut self) {
        self.close();
        self.is_mute = true;
    }

    fn is_handed_over(&self) -> bool {
        self.is_handed_over
    }

    fn is_over(&self) -> bool {
        let (unsent_bytes, in_flight) = match &self.phase {
            Phase::Handshake { replies, .. } => (replies.unsent_bytes(), 0),
            Phase::Transmission(session) => (session.unsent_bytes(), session.in_flight()),
        };
        self.is_deaf && in_flight == 0 && (self.is_mute || unsent_bytes == 0)
    }
}
