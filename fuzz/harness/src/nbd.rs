//! NBD clients that send arbitrary bytes: these go into a connection's state machine, cut at any
//! place, with a small device to serve.
//!
//! In addition to the promises of every target:
//! 1. No bio is outside the device or breaks the contract of bios; few small ones are in flight.
//! 2. The places of the cuts make no difference to the answers.
//! 3. Queries for the device's known zeroes are within it, in whole sectors.
//! 4. When the client is gone and all I/O in flight has completed, the connection has ended.

use std::collections::VecDeque;

use udm::bio::{Bio, Op};
use udm::buffer::BufferPool;
use udm::error::Status;
use udm::queue::Conversation;
use udm::sync::Arc;
use udm::target::Extent;
use udm::units::{BIO_BYTES_MAX, KIB, SECOND, SECTOR};
use udm_export::nbd::connection::Connection;
use udm_export::nbd::handshake::ExportInfo;
use udm_export::nbd::known::Known;
use udm_export::nbd::session::{BYTES_MAX, REQUESTS_MAX};

use crate::input::Input;

const STORED_BYTES: u64 = 64 * KIB;
/// The maximum in flight or waiting to be sent: the limit, and the request that reached it.
const HELD_BYTES_MAX: usize = BYTES_MAX + BIO_BYTES_MAX as usize;
const LONG_READS_MAX: usize = 4;
/// A longer buffer to send is the data of one read; this much of it is compared.
const KEPT_BYTES_MAX: usize = 128 << 10;
/// Most bytes of a conversation.
const SPOKEN_BYTES_MAX: usize = 128 << 10;

/// A step of a client.
#[derive(Clone, Debug)]
enum Step {
    Say(Vec<u8>),
    /// The device stops answering, or answers again; with a status it fails from now on.
    Hold(bool, Option<Status>),
    /// The client stops reading, or reads again.
    Deafen(bool),
    Wait(u64),
}

/// A whole conversation of a client, first cut as the input says, then in one piece.
pub fn nbd(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let size_bytes = match input.u8() {
        0..=160 => STORED_BYTES,
        161..=200 => SECTOR,
        201..=220 => 0,
        221..=240 => 1 << 40,
        _ => u64::MAX / SECTOR * SECTOR,
    };
    let cut = match input.u8() {
        short @ 0..=127 => 1 + usize::from(short),
        long => usize::from(long) << 6,
    };
    let steps = steps(&mut input, size_bytes);
    let mut bench = Bench::new(size_bytes);
    let mut whole = Bench::new(size_bytes);
    for step in &steps {
        match step {
            Step::Say(bytes) => {
                bench.feed(bytes, cut);
                whole.feed(bytes, usize::MAX);
            }
            step => {
                bench.change(step);
                whole.change(step);
            }
        }
    }
    bench.leave();
    whole.leave();
    let is_steady = steps.iter().all(|step| matches!(step, Step::Say(_)));
    if is_steady {
        assert_eq!(bench.connection.violation(), whole.connection.violation());
        assert!(bench.sent == whole.sent, "answers depend on how requests are cut");
    }
}

fn steps(input: &mut Input<'_>, size_bytes: u64) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut spoken = 0;
    match input.u8() % 4 {
        0 => {}
        1 => steps.push(Step::Say(vec![0, 0, 0, 3])),
        style => steps.push(Step::Say(usual_handshake(style == 3))),
    }
    // Long reads take long, so there are few.
    let mut long_reads = 0;
    while !input.is_empty() && spoken < SPOKEN_BYTES_MAX && long_reads < LONG_READS_MAX {
        let kind = input.u8();
        let step = match kind {
            0..=99 => Step::Say(request(input, kind, size_bytes)),
            100..=139 => Step::Say(write(input, kind, size_bytes)),
            140..=199 => Step::Say(option(input)),
            200..=229 => {
                let count = usize::from(input.u8());
                Step::Say(input.take(count).to_vec())
            }
            230..=239 => Step::Hold(kind & 1 == 0, None),
            240..=244 => Step::Hold(false, Some(Status::Io)),
            245..=249 => Step::Deafen(kind & 1 == 0),
            _ => Step::Wait(u64::from(input.u8())),
        };
        if let Step::Say(bytes) = &step {
            spoken += bytes.len();
            let len = bytes.last_chunk().map_or(0, |len| u32::from_be_bytes(*len));
            long_reads += usize::from(kind < 100 && u64::from(len) > BIO_BYTES_MAX / 32);
        }
        steps.push(step);
    }
    steps
}

fn usual_handshake(is_structured: bool) -> Vec<u8> {
    let mut bytes = vec![0, 0, 0, 3];
    if is_structured {
        bytes.extend(option_bytes(8, &[]));
        bytes.extend(option_bytes(10, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation"));
    }
    bytes.extend(option_bytes(7, &[0; 6]));
    bytes
}

fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// An option, usually with data of the stated length.
fn option(input: &mut Input<'_>) -> Vec<u8> {
    let option = u32::from(input.u8() % 16);
    let style = input.u8();
    let len = usize::from(input.u8());
    let mut data = match style % 8 {
        // A name, a count, and the counted names.
        0..=3 => {
            let name = if style & 8 == 0 { &b"disk"[..] } else { b"" };
            let mut data = (name.len() as u32).to_be_bytes().to_vec();
            data.extend_from_slice(name);
            data.extend_from_slice(input.take(len));
            data
        }
        4 => vec![b'x'; usize::from(input.u16())],
        _ => input.take(len).to_vec(),
    };
    let claimed = match style >> 4 {
        15 => input.near(data.len() as u64) as u32,
        _ => data.len() as u32,
    };
    let mut bytes = option_bytes(option, &[]);
    bytes[12..16].copy_from_slice(&claimed.to_be_bytes());
    bytes.append(&mut data);
    bytes
}

fn header(flags: u16, command: u16, cookie: u8, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&u64::from(cookie).to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes
}

/// A request without payload; a write uses the following bytes as its payload.
fn request(input: &mut Input<'_>, kind: u8, size_bytes: u64) -> Vec<u8> {
    let command = u16::from(kind % 10);
    let flags = match input.u8() {
        plain @ 0..=31 => u16::from(plain),
        32..=200 => 0,
        _ => input.u16(),
    };
    let (offset, len) = range(input, size_bytes);
    header(flags, command, kind, offset, len)
}

fn range(input: &mut Input<'_>, size_bytes: u64) -> (u64, u32) {
    let offset = match input.u8() {
        0..=200 => input.below(STORED_BYTES / SECTOR) * SECTOR,
        _ => input.near(size_bytes),
    };
    let len = match input.u8() {
        few @ 0..=127 => u32::from(few) * SECTOR as u32,
        128..=200 => (size_bytes.saturating_sub(offset) as u32).min(64 << 10),
        201..=250 => input.near(size_bytes) as u32,
        _ => input.near(BIO_BYTES_MAX) as u32,
    };
    (offset, len)
}

/// A write with its payload.
fn write(input: &mut Input<'_>, kind: u8, size_bytes: u64) -> Vec<u8> {
    let (offset, len) = range(input, size_bytes);
    let payload = (len as usize).min(SPOKEN_BYTES_MAX / 2);
    let mut bytes = header(u16::from(kind & 1), 1, kind, offset, len);
    bytes.resize(bytes.len() + payload, kind);
    bytes
}

/// Zeroes and data in turns on a device of this many bytes, always the same.
#[derive(Debug)]
struct Stripes(u64);

const STRIPE_BYTES: u64 = 24 << 10;

impl Known for Stripes {
    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        let end = offset.checked_add(len).unwrap();
        assert!(len > 0 && (offset | len).is_multiple_of(SECTOR) && end <= self.0);
        let (nth, rest) = (offset / STRIPE_BYTES, STRIPE_BYTES - offset % STRIPE_BYTES);
        // Some stripes are alike: their extents become one.
        let extent = if nth % 5 < 2 { Extent::Zeroes } else { Extent::Data };
        (len.min(rest), extent)
    }

    fn has_fast_zeroes(&self) -> bool {
        true
    }
}

/// One connection with its device and its client.
struct Bench {
    connection: Connection,
    size_bytes: u64,
    pool: BufferPool,
    bios: VecDeque<Bio>,
    device: Vec<u8>,
    sent: Vec<u8>,
    /// The number of bios at the last check.
    checked: usize,
    now: u64,
    is_held: bool,
    is_unread: bool,
    status: Option<Status>,
}

impl Bench {
    fn new(size_bytes: u64) -> Bench {
        let export = ExportInfo {
            name: "disk".into(),
            size_bytes,
            block_bytes: 512,
            minimum_bytes: 512,
            has_discard: true,
            is_read_only: false,
            needs_tls: false,
        };
        Bench {
            connection: Connection::new(export).knowing(Arc::new(Stripes(size_bytes))),
            size_bytes,
            pool: BufferPool::new(),
            bios: VecDeque::new(),
            device: vec![0; STORED_BYTES as usize],
            sent: Vec::new(),
            checked: 0,
            now: 0,
            is_held: false,
            is_unread: false,
            status: None,
        }
    }

    fn change(&mut self, step: &Step) {
        match step {
            Step::Say(_) => {}
            Step::Hold(is_held, status) => (self.is_held, self.status) = (*is_held, *status),
            Step::Deafen(is_unread) => self.is_unread = *is_unread,
            Step::Wait(seconds) => {
                self.now += seconds * SECOND;
                self.connection.tick(self.now);
            }
        }
        self.work();
    }

    /// A mapped device accepts every bio.
    fn check(&mut self) {
        if std::mem::replace(&mut self.checked, self.bios.len()) == self.bios.len() {
            return;
        }
        assert!(self.bios.len() <= REQUESTS_MAX);
        let held: usize = self.bios.iter().map(|bio| bio.buffer.len()).sum();
        assert!(held <= HELD_BYTES_MAX, "{held} bytes in flight");
        let Some(bio) = self.bios.back() else { return };
        let end = bio.offset.checked_add(bio.len);
        assert!(end.is_some_and(|end| end <= self.size_bytes), "{bio:?}");
        assert!(bio.allows_parts && bio.len <= BIO_BYTES_MAX);
        let is_flush = bio.op == Op::Flush;
        assert!(is_flush == (bio.len == 0) && bio.progress == 0, "{bio:?}");
        let has_data = matches!(bio.op, Op::Read | Op::Write);
        assert_eq!(bio.buffer.len() as u64, if has_data { bio.len } else { 0 });
        assert!(!bio.fua || has_data || matches!(bio.op, Op::Discard | Op::WriteZeroes));
    }

    fn serve(&mut self, mut bio: Bio) -> Bio {
        if let Some(status) = self.status {
            return bio.finished(Err(status));
        }
        if bio.end() > STORED_BYTES {
            // The data of a read is arbitrary, but it must be the same in both benches.
            bio.buffer.as_mut_slice().fill(0);
            return bio;
        }
        let range = bio.offset as usize..bio.end() as usize;
        match bio.op {
            Op::Read => bio.buffer.as_mut_slice().copy_from_slice(&self.device[range]),
            Op::Write => self.device[range].copy_from_slice(bio.buffer.as_slice()),
            Op::Discard | Op::WriteZeroes => self.device[range].fill(0),
            Op::Flush => {}
        }
        bio
    }

    /// Does all possible work except receiving.
    fn work(&mut self) {
        loop {
            self.check();
            if !self.is_held
                && let Some(bio) = self.bios.pop_front()
            {
                let bio = self.serve(bio);
                self.connection.finished(bio, &mut self.bios, &mut self.pool);
            } else if !self.is_unread
                && let Some(buffer) = self.connection.outgoing()
            {
                assert!(!buffer.is_empty() && buffer.len() <= HELD_BYTES_MAX);
                // Long answers to reads far beyond the stored data are all alike.
                let kept = buffer.len().min(KEPT_BYTES_MAX);
                self.sent.extend_from_slice(&buffer.as_slice()[..kept]);
                self.connection.sent(buffer, &mut self.bios, &mut self.pool);
            } else {
                return;
            }
        }
    }

    /// Lets the server receive `bytes`, at most `cut` at a time, as long as it wants them.
    fn feed(&mut self, bytes: &[u8], cut: usize) {
        let mut rest = bytes;
        self.work();
        while !rest.is_empty() {
            let Some(mut space) = self.connection.incoming() else { return };
            let count = (space.end - space.at).min(cut).min(rest.len());
            assert!(count > 0, "a space without room looks like a client that hung up");
            let (now, later) = rest.split_at(count);
            space.buffer.as_mut_slice()[space.at..][..count].copy_from_slice(now);
            rest = later;
            self.connection.received(space, count, &mut self.bios, &mut self.pool);
            self.work();
        }
    }

    /// The client disconnects, and all I/O in flight completes.
    fn leave(&mut self) {
        if let Some(space) = self.connection.incoming() {
            self.connection.received(space, 0, &mut self.bios, &mut self.pool);
        } else {
            self.connection.close();
        }
        (self.is_held, self.is_unread) = (false, false);
        self.work();
        assert!(self.connection.is_over(), "a connection without a client goes on");
        assert!(self.connection.incoming().is_none() && self.bios.is_empty());
    }
}
