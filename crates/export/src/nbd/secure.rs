//! A client's connection under TLS: plain text until STARTTLS is answered, records after that.
//!
//! The [`Connection`] inside does not know TLS; this module decrypts and encrypts its bytes. The
//! order of output: replies from before STARTTLS and the answer to STARTTLS are sent first,
//! unencrypted. A reply's memory is released when its last record was sent, so the connection's own
//! counts of memory and unsent bytes stay correct.
//!
//! Memory: `INPUT_BYTES` of received records, the 16 KiB of one decrypted record, and outgoing
//! records, which the queue takes in pieces of `SEAL_BYTES`. Decrypted bytes that find no free
//! space wait, and no further bytes are received before they are taken.

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

/// Maximum bytes of records received in one call.
const INPUT_BYTES: usize = 64 << 10;
/// Maximum bytes of plain text encrypted in one call.
const SEAL_BYTES: usize = 128 << 10;
/// Overhead of records over their plain text: for every 16 KiB at most 22 bytes (TLS 1.3) or 29
/// (TLS 1.2), plus space for a handshake's flight.
const OVERHEAD_BYTES: usize = 16 << 10;
/// Maximum bytes of free record buffers that are kept.
const POOL_BYTES_MAX: usize = 1 << 20;

/// A client that must encrypt.
#[derive(Debug)]
pub struct Secured {
    inner: Connection,
    config: Arc<ServerConfig>,
    /// Replies from before TLS that are not taken yet.
    plain: VecDeque<Buffer>,
    /// Buffers that were taken to be sent, the oldest first.
    on_way: VecDeque<OnWay>,
    tls: Option<Box<Tls>>,
    /// The error that ended TLS.
    failure: Option<String>,
}

/// A buffer that was taken to be sent.
#[derive(Debug)]
enum OnWay {
    /// The connection's own buffer.
    Plain,
    /// Records, and the reply that is sent with the last of them.
    Records(Option<Buffer>),
}

/// The state of TLS.
#[derive(Debug)]
struct Tls {
    session: ServerConnection,
    /// Received records; those in `taken..filled` are not decrypted yet.
    input: Buffer,
    taken: usize,
    filled: usize,
    /// Decrypted bytes that the connection has not taken yet.
    decrypted: usize,
    /// The client has announced the end of its data.
    is_closed: bool,
    /// The reply being encrypted, and its number of encrypted bytes.
    sealing: Option<(Buffer, usize)>,
    has_said_goodbye: bool,
    /// Buffers for records.
    pool: BufferPool,
}

impl Secured {
    /// A client that gets the output of `inner` only encrypted.
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

    /// Returns the client's violation that ends the connection.
    pub fn violation(&self) -> Option<String> {
        self.failure.clone().or_else(|| Some(self.inner.violation()?.to_string()))
    }

    /// From now on all bytes are encrypted.
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
            // The closing alert is sent last.
            tls.has_said_goodbye = true;
        }
    }

    /// Decrypts received bytes and passes them to the connection, until the connection runs out of
    /// free space.
    fn deliver(&mut self, bios: &mut VecDeque<Bio>, pool: &mut BufferPool) {
        let Secured { inner, tls: Some(tls), .. } = self else { return };
        while !inner.is_deaf() {
            if tls.decrypted > 0 {
                let Some(mut space) = inner.incoming() else { return };
                let end = space.end.min(space.at + tls.decrypted);
                let memory = &mut space.buffer.as_mut_slice()[space.at..end];
                let count = tls.session.reader().read(memory).unwrap_or(0);
                tls.decrypted = if count == 0 { 0 } else { tls.decrypted - count };
                // A count of zero would mean that the client has disconnected.
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
        // The caller limits the bytes encrypted in one call: `SEAL_BYTES`.
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

    /// Decrypts some of the received bytes.
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

    /// Takes the records to send.
    fn records(&mut self) -> Option<Buffer> {
        let mut buffer = self.pool.take(SEAL_BYTES + OVERHEAD_BYTES);
        let mut len = 0;
        while self.session.wants_write() {
            let mut rest = &mut buffer.as_mut_slice()[len..];
            match self.session.write_tls(&mut rest) {
                Ok(count) if count > 0 => len += count,
                // The buffer is full; the next call takes the rest.
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

    /// Encrypts a piece of the reply in `sealing`. Returns the reply after its last piece.
    fn seal(&mut self) -> Option<Buffer> {
        let (reply, at) = self.sealing.take()?;
        let end = reply.len().min(at + SEAL_BYTES);
        // Without a limit, the writer accepts everything.
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

    fn slow(&mut self, now: Nanos) -> Option<Vec<InFlight>> {
        self.inner.slow(now)
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
