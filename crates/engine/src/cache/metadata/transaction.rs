//! The blocks of one transaction, for the caller to write.
//!
//! The order is: the blocks, all of them complete; a flush; the superblock; a flush. In any other
//! order a crash may leave metadata with broken references.

use super::block::{BLOCK_BYTES, Block};
use super::counts::Counts;
use super::superblock::Superblock;
use super::survey::Places;
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;

/// Blocks written together by the synchronous path.
const BATCH: usize = 128;

/// The new state of a writer when a transaction is durable.
#[derive(Debug)]
pub struct After {
    pub(super) superblock: Superblock,
    pub(super) places: Places,
    pub(super) counts: Counts,
    pub(super) cursor: u64,
}

/// How far a transaction came that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// Its superblock was not sent.
    Blocks,
    /// Its superblock was sent, so it may be on the device.
    Superblock,
}

/// The blocks of one transaction.
#[derive(Debug)]
pub struct Transaction {
    blocks: Vec<(u64, Buffer)>,
    superblock: Buffer,
    after: After,
    number: u64,
}

impl Transaction {
    pub(super) fn new(
        blocks: Vec<(u64, Buffer)>,
        superblock: &Block,
        after: After,
        number: u64,
    ) -> Transaction {
        Transaction { blocks, superblock: Buffer::from_bytes(superblock), after, number }
    }

    pub(super) fn into_after(self) -> (After, u64) {
        (self.after, self.number)
    }

    pub(super) fn put_blocks(&mut self, mut blocks: Vec<(u64, Buffer)>) {
        blocks.sort_unstable_by_key(|(address, _)| *address);
        self.blocks = blocks;
    }

    pub(super) fn after_superblock(&self) -> &Superblock {
        &self.after.superblock
    }

    /// The blocks with their addresses, in order. They are written in any order, before the rest.
    pub fn blocks(&self) -> &[(u64, Buffer)] {
        &self.blocks
    }

    /// The same, to move them into I/O.
    pub fn take_blocks(&mut self) -> Vec<(u64, Buffer)> {
        std::mem::take(&mut self.blocks)
    }

    /// The new block 0, written after one flush and before another one.
    pub fn superblock(&self) -> &Buffer {
        &self.superblock
    }

    /// Writes its blocks alone, and waits until they are durable.
    pub(super) fn carry_out_blocks(&mut self, disk: &Arc<dyn Disk>) -> Result<()> {
        write(disk, self.take_blocks())
    }

    /// Carries the transaction out, and waits. For a cache that no server serves.
    pub fn carry_out(&mut self, disk: &Arc<dyn Disk>) -> std::result::Result<(), (Error, Reached)> {
        write(disk, self.take_blocks()).map_err(|error| (error, Reached::Blocks))?;
        let superblock = Buffer::from_bytes(self.superblock.as_slice());
        write(disk, vec![(0, superblock)]).map_err(|error| (error, Reached::Superblock))
    }
}

/// Makes the device blank, durably.
pub fn erase_superblock(disk: &Arc<dyn Disk>) -> Result<()> {
    write(disk, vec![(0, Buffer::zeroed(BLOCK_BYTES))])
}

/// Writes blocks, and makes them durable.
fn write(disk: &Arc<dyn Disk>, blocks: Vec<(u64, Buffer)>) -> Result<()> {
    if blocks.is_empty() {
        return Ok(());
    }
    let mut blocks = blocks.into_iter().peekable();
    while blocks.peek().is_some() {
        let io = |(address, buffer): (u64, Buffer)| {
            DiskIo::new(disk, Op::Write, address * BLOCK_BYTES as u64, buffer, 0)
        };
        carry_out(disk, blocks.by_ref().take(BATCH).map(io).collect())?;
    }
    carry_out(disk, vec![DiskIo::bare(disk, Op::Flush, 0, 0, 0)])
}

fn carry_out(disk: &Arc<dyn Disk>, ios: Vec<DiskIo>) -> Result<()> {
    disk.carry_out(ios).iter().try_for_each(|io| io.result).map_err(|status| {
        Error::new(Kind::Io, format!("{}: writing metadata: {status}", disk.limits().name))
    })
}
