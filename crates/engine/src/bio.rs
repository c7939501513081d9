//! A bio: one request to a mapped device, with its buffer.

use crate::buffer::Buffer;
use crate::error::Status;

/// The kind of request of a bio or a disk I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Fill the buffer.
    Read,
    /// Store the buffer.
    Write,
    /// Make every write that completed before durable.
    Flush,
    /// The range is no longer needed. On a mapped device of udm it reads as zeroes afterwards.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes,
}

/// The role of a bio in a request that is not whole blocks; see `device::parts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// It has no such role.
    None,
    /// The request. Its pieces are served one after the other.
    Request,
    /// A piece, which is whole blocks.
    Piece,
}

/// One request. `offset` and `len` are bytes, multiples of 512, within the device.
#[derive(Debug)]
pub struct Bio {
    /// The kind of request.
    pub op: Op,
    /// Complete only when durable (writes, discards, zeroes).
    pub fua: bool,
    /// The client marked this data as metadata of its file system.
    pub is_metadata: bool,
    /// `offset` and `len` may be any bytes: the client does not know the block size of the device.
    /// The device then reads and writes the whole blocks around them.
    pub allows_parts: bool,
    /// For the device that serves it: its role in a request that is not whole blocks.
    pub(crate) part: Part,
    /// For the device that serves it: the epoch of the locks of blocks that it was admitted in.
    pub(crate) epoch: u16,
    /// First byte on the mapped device.
    pub offset: u64,
    /// Bytes. 0 for a flush; equals the buffer's length for reads and writes.
    pub len: u64,
    /// The data; empty for flush, discard and zeroes. The finished bio returns it. A read may
    /// return other memory than it was submitted with.
    pub buffer: Buffer,
    /// The submitter's own mark; comes back untouched.
    pub token: u64,
    /// Bytes already served: an engine that parks a bio halfway continues from here.
    pub progress: u64,
    /// A note of the module that serves or has parked the bio, for its own later use (0: no note).
    /// Other modules do not read it.
    pub(crate) note: u64,
    /// How it ended; meaningful once the bio is done.
    pub status: Result<(), Status>,
}

impl Bio {
    /// A read of `buffer.len()` bytes at `offset`.
    pub fn read(offset: u64, buffer: Buffer, token: u64) -> Bio {
        Bio::with_buffer(Op::Read, offset, buffer, false, token)
    }

    /// A write of the whole buffer at `offset`.
    pub fn write(offset: u64, buffer: Buffer, fua: bool, token: u64) -> Bio {
        Bio::with_buffer(Op::Write, offset, buffer, fua, token)
    }

    /// A flush.
    pub fn flush(token: u64) -> Bio {
        Bio::bare(Op::Flush, 0, 0, false, token)
    }

    /// A discard or write-zeroes of `len` bytes.
    pub fn bare(op: Op, offset: u64, len: u64, fua: bool, token: u64) -> Bio {
        Bio { len, ..Bio::with_buffer(op, offset, Buffer::empty(), fua, token) }
    }

    fn with_buffer(op: Op, offset: u64, buffer: Buffer, fua: bool, token: u64) -> Bio {
        let len = buffer.len() as u64;
        Bio {
            op,
            fua,
            is_metadata: false,
            allows_parts: false,
            part: Part::None,
            epoch: 0,
            offset,
            len,
            buffer,
            token,
            progress: 0,
            note: 0,
            status: Ok(()),
        }
    }

    /// Whether it changes the content of its range.
    pub fn is_change(&self) -> bool {
        matches!(self.op, Op::Write | Op::Discard | Op::WriteZeroes)
    }

    /// The first byte after the range.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }

    /// The same bio, ended with `status`.
    pub fn finished(mut self, status: Result<(), Status>) -> Bio {
        self.status = status;
        self
    }
}
