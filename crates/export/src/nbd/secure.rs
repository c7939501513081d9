//! A client's conversation under TLS: plain until STARTTLS is answered, records after that.
//!
//! The [`Connection`] inside knows nothing of TLS; here its bytes are decrypted and encrypted.
//! Order: replies given before STARTTLS was answered, and that answer, leave unencrypted and
//! first. A reply's memory goes back when the last record made of it was sent, so the connection's
//! own accounts of memory and of what is unsent stay true.
//!
//! Memory: `INPUT_BYTES` of records received, the 16 KiB of one record decrypted, and records on
//! their way, which the queue takes in pieces of `SEAL_BYTES`. What was decrypted and finds no
//! room waits, and nothing more is received before.

use std::collections::VecDeque;
use std::io::{Read, Write};

use rustls::{ServerConfig, ServerConnection};
use udm::bio::Bio;
use udm::buffer::{Buffer, BufferPool};
use udm::device::InFlight;
use udm::queue::{Conversation, Space};
use udm::sync::Arc;
use udm::units::Nanos;

use super::connection::Connection;

/// Bytes of records that are received in one go.
const INPUT_BYTES: usize = 64 << 10;
/// Bytes of plain text that become records in one go.
const SEAL_BYTES: usize = 128 << 10;
/// What records take beyond their plain text: for every 16 KiB at most 22 bytes (TLS 1.3) or 29
/// (TLS 1.2), and room for a handshake's flight.
const OVERHEAD_BYTES: usize = 16 << 10;
/// Free buffers for records that are kept.
const POOL_BYTES_MAX: usize = 1 << 20;

/// A client that has to encrypt.
#[derive(Debug)]
pub struct Secured {
    inner: Connection,
    config: Arc<ServerConfig>,
    /// Replies from before TLS that have not been given out.
    plain: VecDeque<Buffer>,
    /// What was given out to be sent, the oldest first.
    on_way: VecDeque<OnWay>,
    tls: Option<Box<Tls>>,
    /// Why TLS ended, if that is what happened.
    failure: Option<String>,
}

/// A buffer that was given out.
#[derive(Debug)]
enum OnWay {
    /// The connection's own.
    Plain,
    /// Records; and the reply that is sent when they are.
    Records(Option<Buffer>),
}

/// The state of TLS.
#[derive(Debug)]
struct Tls {
    session: ServerConnection,
    /// Received records; those in `taken..filled` have not been decrypted.
    input: Buffer,
    taken: usize,
    filled: usize,
    /// Bytes that are decrypted and not handed on.
    decrypted: usize,
    /// The client has said that it sends no more.
    is_closed: bool,
    /// The reply that becomes records, and how much of it has.
    sealing: Option<(Buffer, usize)>,
    has_said_goodbye: bool,
    /// For records.
    pool: BufferPool,
}

impl Secured {
    /// A client that gets what `inner` says only encrypted.
    pub fn new(inner: Connection, config: Arc<ServerConfig>) -> Secured {
        Secured {
            inner,
            config,
            plain: VecDeque::new(),
            on_way: VecDeque::new(),
            tls: None,
            failure: None,
        }
    }

    /// What the client did wrong, if that is why the conversation ends.
    pub fn violation(&self) -> Option<String> {
        self.failure.clone().or_else(|| Some(self.inner.violation()?.to_string()))
    }

    /// From here on everything is encrypted.
    fn begin(&mut self) {
        self.plain.extend(std::iter::from_fn(|| self.inner.outgoing()));
        self.inner.tls_begins();
        match Tls::new(self.config.clone()) {
            Ok(tls) => self.tls = Some(Box::new(tls)),
            Err(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &rustls::Error) {
        self.failure.get_or_insert_with(|| format!("TLS: {error}"));
        self.inner.close();
        if let Some(tls) = &mut self.tls {
            // The alert that says so is what is sent last.
            tls.has_said_goodbye = true;
        }
    }

    /// Decrypts what was received and hands it to the connection, until that has no room.
    fn deliver(&mut self, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        let Secured { inner, tls: Some(tls), .. } = self else { return };
        while !inner.is_deaf() {
            if tls.decrypted > 0 {
                let Some(mut space) = inner.incoming() else { return };
                let end = space.end.min(space.at + tls.decrypted);
                let memory = &mut space.buffer.as_mut_slice()[space.at..end];
                let count = tls.session.reader().read(memory).unwrap_or(0);
                tls.decrypted = if count == 0 { 0 } else { tls.decrypted - count };
                // No bytes would mean that the client has gone.
                inner.received(space, count, bios, pool);
            } else if tls.is_closed {
                inner.hung_up();
            } else if tls.taken == tls.filled {
                return;
            } else if let Err(error) = tls.decrypt() {
                return self.fail(&error);
            }
        }
        tls.taken = tls.filled;
    }
}

impl Tls {
    fn new(config: Arc<ServerConfig>) -> Result<Tls, rustls::Error> {
        let mut session = ServerConnection::new(config)?;
        // What is encrypted in one go is limited by who does it: `SEAL_BYTES`.
        session.set_buffer_limit(None);
        let mut pool = BufferPool::new();
        pool.keep_at_most(POOL_BYTES_MAX);
        Ok(Tls {
            session,
            input: Buffer::zeroed(INPUT_BYTES),
            taken: 0,
            filled: 0,
            decrypted: 0,
            is_closed: false,
            sealing: None,
            has_said_goodbye: false,
            pool,
        })
    }

    /// Decrypts some of what was received.
    fn decrypt(&mut self) -> Result<(), rustls::Error> {
        let mut rest = &self.input.as_slice()[self.taken..self.filled];
        let count = self
            .session
            .read_tls(&mut rest)
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        if count == 0 {
            return Err(rustls::Error::General("takes no more records".into()));
        }
        self.taken += count;
        let state = self.session.process_new_packets()?;
        self.decrypted = state.plaintext_bytes_to_read();
        self.is_closed = state.peer_has_closed();
        Ok(())
    }

    /// The records that wait to be sent.
    fn records(&mut self) -> Option<Buffer> {
        let mut buffer = self.pool.take(SEAL_BYTES + OVERHEAD_BYTES);
        let mut len = 0;
        while self.session.wants_write() {
            let mut rest = &mut buffer.as_mut_slice()[len..];
            match self.session.write_tls(&mut rest) {
                Ok(count) if count > 0 => len += count,
                // It is full; the rest is asked for again.
                _ => break,
            }
        }
        buffer.set_len(len);
        if len > 0 {
            return Some(buffer);
        }
        self.pool.put(buffer);
        None
    }

    /// Encrypts a piece of the reply in `sealing`; returns the reply with its last piece.
    fn seal(&mut self) -> Option<Buffer> {
        let (reply, at) = self.sealing.take()?;
        let end = reply.len().min(at + SEAL_BYTES);
        // Without a limit it takes everything.
        let taken = self.session.writer().write(&reply.as_slice()[at..end]);
        debug_assert!(matches!(taken, Ok(count) if count == end - at));
        if end == reply.len() {
            return Some(reply);
        }
        self.sealing = Some((reply, end));
        None
    }
}

impl Conversation for Secured {
    fn incoming(&mut self) -> Option<Space> {
        let Some(tls) = &mut self.tls else { return self.inner.incoming() };
        if self.inner.is_deaf() || tls.decrypted > 0 || tls.taken < tls.filled {
            return None;
        }
        let buffer = std::mem::replace(&mut tls.input, Buffer::empty());
        Some(Space { buffer, at: 0, end: INPUT_BYTES })
    }

    fn received(
        &mut self,
        space: Space,
        count: usize,
        bios: &mut VecDeque<Bio>,
        pool: &mut BufferPool,
    ) {
        let Some(tls) = &mut self.tls else {
            self.inner.received(space, count, bios, pool);
            if self.inner.awaits_tls() {
                self.begin();
            }
            return;
        };
        tls.input = space.buffer;
        (tls.taken, tls.filled) = (0, count);
        tls.is_closed |= count == 0;
        self.deliver(bios, pool);
    }

    fn finished(&mut self, bio: Bio, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        self.inner.finished(bio, bios, pool);
        self.deliver(bios, pool);
    }

    fn outgoing(&mut self) -> Option<Buffer> {
        if self.inner.is_mute() {
            return None;
        }
        if let Some(buffer) = self.plain.pop_front() {
            self.on_way.push_back(OnWay::Plain);
            return Some(buffer);
        }
        let Some(tls) = &mut self.tls else {
            let buffer = self.inner.outgoing()?;
            self.on_way.push_back(OnWay::Plain);
            return Some(buffer);
        };
        let mut whole = None;
        if !tls.session.wants_write() && !tls.session.is_handshaking() {
            if tls.sealing.is_none() {
                tls.sealing = self.inner.outgoing().map(|reply| (reply, 0));
            }
            if tls.sealing.is_some() {
                whole = tls.seal();
            } else if self.inner.is_over() && !tls.has_said_goodbye {
                tls.has_said_goodbye = true;
                tls.session.send_close_notify();
            }
        }
        let records = tls.records()?;
        self.on_way.push_back(OnWay::Records(whole));
        Some(records)
    }

    fn sent(&mut self, buffer: Buffer, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        match (self.on_way.pop_front(), &mut self.tls) {
            (Some(OnWay::Records(reply)), Some(tls)) => {
                tls.pool.put(buffer);
                if let Some(reply) = reply {
                    self.inner.sent(reply, bios, pool);
                }
            }
            _ => self.inner.sent(buffer, bios, pool),
        }
        self.deliver(bios, pool);
    }

    fn late(&mut self, now: Nanos) -> Option<Vec<InFlight>> {
        self.inner.late(now)
    }

    fn go_on(&mut self, now: Nanos, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        self.inner.go_on(now, bios, pool);
        self.deliver(bios, pool);
    }

    fn tick(&mut self, now: Nanos) -> Option<Nanos> {
        self.inner.tick(now)
    }

    fn close(&mut self) {
        self.inner.close();
    }

    fn broken(&mut self) {
        self.inner.broken();
    }

    fn is_over(&self) -> bool {
        if !self.inner.is_over() || self.inner.is_mute() {
            return self.inner.is_over();
        }
        let has_said_all = self.tls.as_ref().is_none_or(|tls| {
            let never_began = tls.session.is_handshaking();
            !tls.session.wants_write() && (tls.has_said_goodbye || never_began)
        });
        has_said_all && self.plain.is_empty() && self.on_way.is_empty()
    }
}
