//! Requests of virtio-blk: from a chain of descriptors to a bio, and from the finished bio to the
//! driver's answer.
//!
//! The header is copied before it is checked. A write's data is copied once: to the cache medium if
//! the copy is all that the write needs, else to a private buffer before anything else. If the
//! guest changes the data at the same time, it harms only itself. An invalid request is answered
//! with an error; only a request without memory for an answer is a violation.

use udm::bio::{Bio, Op};
use udm::buffer::{Buffer, BufferPool};
use udm::device::FastPath;
use udm::error::Status;
use udm::units::{BIO_BYTES_MAX, Nanos, SECTOR};

use super::chain::{Chain, Piece, bytes_of};
use super::memory::{Memory, check};
use super::proto::{Violation, u32_at, u64_at, wrong};

/// Bytes of a request's header.
pub const HEADER_BYTES: u64 = 16;
/// Bytes of a device's id, as drivers read it.
pub const ID_BYTES: usize = 20;
/// Bytes of the range of a discard or write-zeroes request.
const RANGE_BYTES: usize = 16;

/// Types of requests.
const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// Answers.
const OK: u8 = 0;
const FAILED: u8 = 1;
const UNSUPPORTED: u8 = 2;

/// The device's properties that requests depend on.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Its name, truncated or padded with zeroes.
    pub id: [u8; ID_BYTES],
    /// Whether writes are durable when they end: the driver sends no flushes.
    pub is_write_through: bool,
}

/// One request.
#[derive(Debug, Default)]
pub struct Request {
    /// Its memory.
    pub chain: Chain,
    /// Its position in the ring, unless an earlier server has taken it.
    pub place: Option<u16>,
    /// Its state.
    pub phase: Phase,
    /// Bytes of memory that it holds.
    pub held_bytes: u64,
    /// Operation, offset and length, for the list of slow requests.
    pub what: Option<(Op, u64, u64)>,
    /// Time of the first check that found it in flight.
    pub seen: Option<Nanos>,
    /// Whether it was reported as slow.
    pub is_slow: bool,
}

/// The state of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// The driver has it.
    #[default]
    Away,
    /// The device works on it.
    InFlight,
}

/// The result of starting a request.
#[derive(Debug)]
pub enum Begun {
    /// The device needs this bio.
    Bio(Bio),
    /// It is answered, with this number of bytes written.
    Done(u32),
}

/// Maximum bytes of memory that the request holds in flight.
pub fn held_bytes(chain: &Chain) -> u64 {
    bytes_of(&chain.readable).max(bytes_of(&chain.writable))
}

impl Request {
    /// Creates its bio with `token`, or answers it.
    pub fn begin(
        &mut self,
        memory: &Memory,
        facts: &Facts,
        intake: &mut FastPath<'_>,
        token: u64,
    ) -> Result<Begun, Violation> {
        let (readable, writable) = (bytes_of(&self.chain.readable), bytes_of(&self.chain.writable));
        if readable < HEADER_BYTES || writable == 0 {
            return wrong(format!(
                "a request of {readable} bytes with room for an answer of {writable}"
            ));
        }
        let mut header = [0; HEADER_BYTES as usize];
        gather(&self.chain.readable, 0, &mut header, memory)?;
        let (kind, sector) = (u32_at(&header, 0), u64_at(&header, 8));
        let bio = match kind {
            READ => {
                if let Some(len) = self.read_in_place(sector, writable - 1, memory, intake)? {
                    return self.answer(OK, len, memory).map(Begun::Done);
                }
                self.read(sector, writable - 1, intake.pool, token)
            }
            WRITE => {
                let len = readable - HEADER_BYTES;
                if self.write_in_place(sector, len, memory, facts, intake)? {
                    return self.answer(OK, 0, memory).map(Begun::Done);
                }
                self.write(sector, len, memory, facts, intake.pool, token)?
            }
            FLUSH => Ok(Bio::flush(token)),
            DISCARD => self.range(Op::Discard, memory, facts, token)?,
            WRITE_ZEROES => self.range(Op::WriteZeroes, memory, facts, token)?,
            GET_ID => {
                let len = (writable - 1).min(ID_BYTES as u64) as usize;
                scatter(&self.chain.writable, &facts.id[..len], memory)?;
                return self.answer(OK, len as u32, memory).map(Begun::Done);
            }
            _ => Err(UNSUPPORTED),
        };
        match bio {
            Ok(bio) => {
                self.what = Some((bio.op, bio.offset, bio.len));
                Ok(Begun::Bio(bio))
            }
            Err(status) => self.answer(status, 0, memory).map(Begun::Done),
        }
    }

    /// Reads cached data straight into the guest's memory, if that is contiguous. Returns the
    /// number of bytes.
    fn read_in_place(
        &self,
        sector: u64,
        len: u64,
        memory: &Memory,
        intake: &FastPath<'_>,
    ) -> Result<Option<u32>, Violation> {
        let Some(first) = self.chain.writable.first().filter(|first| u64::from(first.len) >= len)
        else {
            return Ok(None);
        };
        let Ok(offset) = offset_of(sector, len) else { return Ok(None) };
        let Some((client_memory, into)) = memory.shared(first.guest, len as usize) else {
            return Ok(None);
        };
        let is_read = intake.read_into(offset, into.into());
        check(client_memory)?;
        Ok(is_read.then_some(len as u32))
    }

    fn read(&self, sector: u64, len: u64, pool: &mut BufferPool, token: u64) -> Result<Bio, u8> {
        let offset = offset_of(sector, len)?;
        let buffer = pool.try_take(len as usize).ok_or(FAILED)?;
        Ok(Bio::read(offset, buffer, token))
    }

    /// Writes straight from the guest's memory, if the data is contiguous there and the write needs
    /// only a copy.
    fn write_in_place(
        &self,
        sector: u64,
        len: u64,
        memory: &Memory,
        facts: &Facts,
        intake: &FastPath<'_>,
    ) -> Result<bool, Violation> {
        let Some(guest) = self.data_at(len) else { return Ok(false) };
        let Ok(offset) = offset_of(sector, len) else { return Ok(false) };
        let Some(from) = memory.source(guest, len as usize) else { return Ok(false) };
        let is_written = intake.write_from(offset, from, facts.is_write_through);
        check(from.memory())?;
        Ok(is_written)
    }

    /// Returns the address of the `len` bytes after the header, if they are contiguous.
    fn data_at(&self, len: u64) -> Option<u64> {
        let mut skip = HEADER_BYTES;
        for piece in &self.chain.readable {
            let bytes = u64::from(piece.len);
            if skip < bytes {
                return (len <= bytes - skip).then(|| piece.guest.checked_add(skip))?;
            }
            skip -= bytes;
        }
        None
    }

    fn write(
        &self,
        sector: u64,
        len: u64,
        memory: &Memory,
        facts: &Facts,
        pool: &mut BufferPool,
        token: u64,
    ) -> Result<Result<Bio, u8>, Violation> {
        let taken = offset_of(sector, len)
            .and_then(|offset| Ok((offset, pool.try_take(len as usize).ok_or(FAILED)?)));
        let (offset, mut buffer) = match taken {
            Ok(taken) => taken,
            Err(status) => return Ok(Err(status)),
        };
        gather(&self.chain.readable, HEADER_BYTES, buffer.as_mut_slice(), memory)?;
        Ok(Ok(Bio::write(offset, buffer, facts.is_write_through, token)))
    }

    /// Creates the bio of a discard or write-zeroes request.
    fn range(
        &self,
        op: Op,
        memory: &Memory,
        facts: &Facts,
        token: u64,
    ) -> Result<Result<Bio, u8>, Violation> {
        if bytes_of(&self.chain.readable) != HEADER_BYTES + RANGE_BYTES as u64 {
            // udm offers only one range per request.
            return Ok(Err(UNSUPPORTED));
        }
        let mut range = [0; RANGE_BYTES];
        gather(&self.chain.readable, HEADER_BYTES, &mut range, memory)?;
        let (sector, sectors, flags) = (u64_at(&range, 0), u32_at(&range, 8), u32_at(&range, 12));
        // The only known flag: zeroes may be deallocated.
        let known = if op == Op::WriteZeroes { 1 } else { 0 };
        if flags & !known != 0 {
            return Ok(Err(UNSUPPORTED));
        }
        let len = u64::from(sectors) * SECTOR;
        let bio = |offset| Bio::bare(op, offset, len, facts.is_write_through, token);
        Ok(offset_of(sector, len).map(bio))
    }

    /// Gives the driver the data and the answer of a finished bio. Returns the bytes written.
    pub fn finish(&self, bio: &Bio, memory: &Memory) -> Result<u32, Violation> {
        let (status, mut len) = match bio.status {
            Ok(()) => (OK, bio.buffer.len()),
            Err(Status::Unsupported) => (UNSUPPORTED, 0),
            Err(_) => (FAILED, 0),
        };
        if bio.op == Op::Read && status == OK {
            scatter(&self.chain.writable, bio.buffer.as_slice(), memory)?;
        } else {
            len = 0;
        }
        self.answer(status, len as u32, memory)
    }

    fn answer(&self, status: u8, data: u32, memory: &Memory) -> Result<u32, Violation> {
        let Some(Piece { guest, len }) = self.chain.writable.last() else {
            return wrong("a request without room for an answer");
        };
        memory.store(guest + u64::from(*len) - 1, &[status])?;
        Ok(data + 1)
    }
}

/// Returns the offset of `len` bytes at `sector`, if the range is valid.
fn offset_of(sector: u64, len: u64) -> Result<u64, u8> {
    let offset = sector.checked_mul(SECTOR).ok_or(FAILED)?;
    let is_sound = len > 0 && len.is_multiple_of(SECTOR) && len <= BIO_BYTES_MAX;
    if !is_sound || offset.checked_add(len).is_none() {
        return Err(FAILED);
    }
    Ok(offset)
}

/// Copies `into.len()` bytes of `pieces` after the first `skip`; the pieces are long enough.
fn gather(pieces: &[Piece], skip: u64, into: &mut [u8], memory: &Memory) -> Result<(), Violation> {
    let (mut skip, mut done) = (skip, 0);
    for piece in pieces {
        let len = u64::from(piece.len);
        let skipped = skip.min(len);
        skip -= skipped;
        let count = (len - skipped).min((into.len() - done) as u64) as usize;
        if count > 0 {
            memory.load(piece.guest + skipped, &mut into[done..done + count])?;
            done += count;
        }
    }
    Ok(())
}

/// Copies `bytes` to `pieces`, which are long enough.
fn scatter(pieces: &[Piece], bytes: &[u8], memory: &Memory) -> Result<(), Violation> {
    let mut rest = bytes;
    for piece in pieces {
        let (now, later) = rest.split_at(rest.len().min(piece.len as usize));
        if !now.is_empty() {
            memory.store(piece.guest, now)?;
        }
        rest = later;
    }
    Ok(())
}

/// Takes the buffer of a finished bio, for the next one.
pub fn take_buffer(bio: &mut Bio) -> Buffer {
    std::mem::replace(&mut bio.buffer, Buffer::empty())
}
