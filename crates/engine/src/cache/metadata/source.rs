//! The source of blocks: a disk, memory, or bytes.
//!
//! Reading waits. It is for code that opens a cache or looks at one.

use super::block::{BLOCK_BYTES, Block, Finding, damaged};
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::Status;
use crate::pmem::Pmem;
use crate::sync::Arc;

/// Blocks read together.
pub const BATCH: usize = 128;

/// A block, or why it cannot be read.
pub type Read = Result<Box<Block>, Finding>;

/// Blocks to read.
pub trait Source {
    /// How many there are.
    fn blocks(&self) -> u64;

    /// The blocks at `addresses`, in their order. An address may be anything.
    fn read(&self, addresses: &[u64]) -> Vec<Read>;
}

/// The block at `address` of `source`.
pub fn read_one(source: &dyn Source, address: u64) -> Read {
    source.read(&[address]).pop().unwrap_or_else(|| Err(beyond(address, source.blocks())))
}

/// Reads `addresses`, a batch at a time; `visit` gets the place in the list, and the block.
pub fn read_each(source: &dyn Source, addresses: &[u64], mut visit: impl FnMut(usize, Read)) {
    for (nth, batch) in addresses.chunks(BATCH).enumerate() {
        for (within, block) in source.read(batch).into_iter().enumerate() {
            visit(nth * BATCH + within, block);
        }
    }
}

/// An error about an address that a device of `blocks` blocks does not have.
pub fn beyond(address: u64, blocks: u64) -> Finding {
    damaged(address, format!("it is beyond the end: there are {blocks} blocks"))
}

fn copy_of(bytes: &[u8]) -> Box<Block> {
    let mut block = Box::new([0; BLOCK_BYTES]);
    block.copy_from_slice(bytes);
    block
}

impl Source for Vec<u8> {
    fn blocks(&self) -> u64 {
        (self.len() / BLOCK_BYTES) as u64
    }

    fn read(&self, addresses: &[u64]) -> Vec<Read> {
        let read = |&address: &u64| match address < self.blocks() {
            true => {
                let at = address as usize * BLOCK_BYTES;
                Ok(copy_of(&self[at..at + BLOCK_BYTES]))
            }
            false => Err(beyond(address, self.blocks())),
        };
        addresses.iter().map(read).collect()
    }
}

impl Source for Arc<dyn Pmem> {
    fn blocks(&self) -> u64 {
        self.left_bytes() / BLOCK_BYTES as u64
    }

    fn read(&self, addresses: &[u64]) -> Vec<Read> {
        let read = |&address: &u64| {
            if address >= self.blocks() {
                return Err(beyond(address, self.blocks()));
            }
            let mut block = Box::new([0; BLOCK_BYTES]);
            self.load(address * BLOCK_BYTES as u64, &mut block[..])
                .map_err(|status| failed(address, status))?;
            Ok(block)
        };
        addresses.iter().map(read).collect()
    }
}

impl Source for Arc<dyn Disk> {
    fn blocks(&self) -> u64 {
        self.limits().size_bytes / BLOCK_BYTES as u64
    }

    fn read(&self, addresses: &[u64]) -> Vec<Read> {
        let (mut ios, mut read) = (Vec::new(), Vec::new());
        for (nth, &address) in addresses.iter().enumerate() {
            read.push(Err(beyond(address, self.blocks())));
            if address < self.blocks() {
                let buffer = Buffer::zeroed(BLOCK_BYTES);
                let offset = address * BLOCK_BYTES as u64;
                ios.push(DiskIo::new(self, Op::Read, offset, buffer, nth as u64));
            }
        }
        for io in self.carry_out(ios) {
            let address = io.offset / BLOCK_BYTES as u64;
            read[io.token as usize] = match io.result {
                Ok(()) => Ok(copy_of(io.buffer.as_slice())),
                Err(status) => Err(failed(address, status)),
            };
        }
        read
    }
}

fn failed(address: u64, status: Status) -> Finding {
    damaged(address, format!("it cannot be read: {status}"))
}
