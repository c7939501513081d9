//! One client's whole conversation, from greeting to good-bye: handshake, then transmission, with
//! the buffer that bytes are received into. Pure; driven by a queue of the engine.

use std::collections::VecDeque;

use udm::bio::Bio;
use udm::buffer::{Buffer, BufferPool};
use udm::device::InFlight;
use udm::queue::{Conversation, Space};
use udm::sync::Arc;
use udm::sync::atomic::{AtomicU8, Ordering};
use udm::units::{Nanos, SECOND};

use super::handshake::{Export, Handshake, Neighbours, Progress, Said};
use super::known::Known;
use super::proto::{OPTION_BYTES_MAX, OPTION_HEADER_BYTES, REQUEST_BYTES, Violation};
use super::replies::Replies;
use super::session::{DIRECT_BYTES_MIN, Session};

/// Bytes of the receive buffer: enough for a batch of short requests, little enough that not much
/// of a long payload is copied out of it.
const INPUT_BYTES: usize = 128 << 10;
const _: () = assert!(INPUT_BYTES >= 2 * (DIRECT_BYTES_MIN + REQUEST_BYTES));
const _: () = assert!(INPUT_BYTES >= 2 * (OPTION_BYTES_MAX as usize + OPTION_HEADER_BYTES));

/// A client that has not finished its handshake after this long is disconnected.
pub const HANDSHAKE_SECONDS_MAX: u64 = 30;
/// A client that has not taken its last replies this long after the last request is cut off.
pub const FAREWELL_SECONDS_MAX: u64 = 10;

/// Time between two checks for late requests, while any is in flight.
const LOOK_NS: Nanos = SECOND;
/// Time between two checks for memory that other clients hold.
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
    /// When the handshake, or the sending of the last replies, must be over.
    deadline: Option<Nanos>,
    deadline_is_farewell: bool,
    violation: Option<Violation>,
    /// Nothing more is read.
    is_deaf: bool,
    /// Nothing more is sent.
    is_mute: bool,
    /// The space given out belongs to a payload, not to `input`.
    payload_is_out: bool,
    /// Whole requests wait in `input` until the session has room; or what another door has
    /// received, until the first turn.
    is_stalled: bool,
    /// An option names another door's export: the connection goes there when all replies are sent.
    is_leaving: bool,
    /// It has gone there.
    is_passed_on: bool,
    /// STARTTLS was answered; nothing is parsed until what comes is decrypted.
    awaits_tls: bool,
    known: Option<Arc<dyn Known>>,
    standing: Arc<Standing>,
    /// It has made a request; the standing says so.
    is_used: bool,
    /// When to check for late requests; `None` while none is in flight.
    look_at: Option<Nanos>,
}

/// How far a client has come, to choose which one to replace.
#[derive(Debug, Default)]
pub struct Standing(AtomicU8);

impl Standing {
    /// In the handshake.
    pub const GREETED: u8 = 0;
    /// The handshake is over, and there was no request yet.
    pub const AGREED: u8 = 1;
    /// It has made a request.
    pub const USED: u8 = 2;

    fn set(&self, standing: u8) {
        self.0.store(standing, Ordering::Relaxed);
    }

    /// Which of them.
    pub fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Connection {
    /// Begins with the greeting to a client of `export`.
    pub fn new(export: Export) -> Connection {
        let size_bytes = export.size_bytes;
        let mut greeting = Vec::new();
        let handshake = Handshake::start(export, &mut greeting);
        let mut replies = Replies::default();
        replies.put(&greeting, &mut BufferPool::new());
        Connection::with(size_bytes, handshake, replies)
    }

    /// Goes on with a client that another door has greeted; `rest` was received from it and not
    /// answered.
    pub fn resume(export: Export, said: Said, rest: &[u8]) -> Connection {
        let size_bytes = export.size_bytes;
        let handshake = Handshake::resume(export, said);
        let mut connection = Connection::with(size_bytes, handshake, Replies::default());
        connection.input.as_mut_slice()[..rest.len()].copy_from_slice(rest);
        connection.filled = rest.len();
        connection.is_stalled = true;
        connection
    }

    /// The address has other doors, too.
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
            is_passed_on: false,
            awaits_tls: false,
            known: None,
            standing: Arc::default(),
            is_used: false,
            look_at: None,
        }
    }

    /// Its standing, to be read by other threads.
    pub fn standing(&self) -> Arc<Standing> {
        self.standing.clone()
    }

    /// Lets clients ask for what `known` knows.
    pub fn knowing(mut self, known: Arc<dyn Known>) -> Connection {
        self.known = Some(known);
        self
    }

    /// What the client did wrong, if that is why the connection ends.
    pub fn violation(&self) -> Option<Violation> {
        self.violation
    }

    /// Whether the client asked for TLS and was answered: what is received and sent from now on,
    /// after the replies that wait, has to be plain text that TLS carries.
    pub fn awaits_tls(&self) -> bool {
        self.awaits_tls && !self.is_deaf
    }

    /// TLS carries everything from now on.
    pub fn tls_begins(&mut self) {
        self.awaits_tls = false;
    }

    /// Whether nothing more is taken from the client.
    pub fn is_deaf(&self) -> bool {
        self.is_deaf
    }

    /// Whether nothing more is sent.
    pub fn is_mute(&self) -> bool {
        self.is_mute
    }

    /// The client sends no more.
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

    /// Parses as much of the input as is complete.
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
            let must_wait = !session.has_room() || session.is_starved();
            self.is_stalled = self.taken < self.filled && must_wait;
            if session.has_asked() && !self.is_used {
                self.is_used = true;
                self.standing.set(Standing::USED);
            }
        }
    }

    /// Gives the connection to the door whose export the client has named, once all replies are
    /// sent. If it stays here, that option is answered here.
    fn leave(&mut self) {
        let Phase::Handshake { handshake, replies } = &mut self.phase else { return };
        if !self.is_leaving || self.is_deaf || replies.unsent_bytes() > 0 {
            return;
        }
        self.is_leaving = false;
        if handshake.pass_on(&self.input.as_slice()[self.taken..self.filled]) {
            self.is_passed_on = true;
            self.taken = self.filled;
            (self.is_deaf, self.is_mute) = (true, true);
        }
    }

    /// Continues with bytes that were received but not taken for want of room.
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
                let session = Session::new(self.size_bytes, agreement, replies, known);
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
            // What is left is the beginning of one message, and less than half of the buffer.
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

    fn late(&mut self, now: Nanos) -> Option<Vec<InFlight>> {
        let Phase::Transmission(session) = &mut self.phase else { return None };
        if session.in_flight() == 0 && !session.has_late() {
            self.look_at = None;
            return None;
        }
        let look_at = *self.look_at.get_or_insert(now + LOOK_NS);
        if now < look_at && session.in_flight() > 0 {
            return None;
        }
        self.look_at = Some(now + LOOK_NS);
        session.late(now)
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
        if let Phase::Transmission(session) = &mut self.phase {
            session.close();
        }
    }

    fn broken(&mut self) {
        self.close();
        self.is_mute = true;
    }

    fn is_passed_on(&self) -> bool {
        self.is_passed_on
    }

    fn is_over(&self) -> bool {
        let (unsent_bytes, in_flight) = match &self.phase {
            Phase::Handshake { replies, .. } => (replies.unsent_bytes(), 0),
            Phase::Transmission(session) => (session.unsent_bytes(), session.in_flight()),
        };
        self.is_deaf && in_flight == 0 && (self.is_mute || unsent_bytes == 0)
    }
}
