//! Devices that failed a flush, over the end of the server that met the error.
//!
//! A device that fails a flush may return data that it does not have durably, until the machine
//! restarts. The server that met the error knows it from memory. For the servers after it, the
//! superblock records it ([`metadata::doubt`](super::metadata::doubt)), in each commit, or in one
//! of its own if no other comes. What follows from the record:
//!
//! 1. The origin: each block that enters the cache is dirty, because the origin may lose the block
//!    in a power failure.
//! 2. The cache device: when it is opened, clean slots are dropped, and dirty data is written to it
//!    again. When all of that is durable, the record ends. If it cannot be made durable, the cache
//!    is not opened: a slot could become clean, and show older data after a power failure.
//! 3. At rest (`drain`), slots that were written back are dropped.
//!
//! The record counts only until the machine restarts, so it does not matter whether the metadata
//! device has it durably.

use super::blocks::Trouble;
use super::metadata::{Contents, Doubt};
use super::{Cache, Devices};
use crate::base::attaching::AttachProgress;
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::sync::Arc;
use crate::target::Port;
use crate::units::{MIB, Nanos};

/// Bytes of one I/O, and slots that are written together.
const PIECE_BYTES: u64 = MIB;
const SLOTS_MAX: usize = 16;

impl Trouble {
    /// The devices that failed a flush, under this server or an earlier one.
    pub(super) fn doubt(&self) -> Doubt {
        Doubt { cache: self.has_lost, origin: self.doubts > 0 }
    }

    /// The record for the medium.
    pub(super) fn record(&self) -> Doubt {
        if mutants::is(Mutant::DoubtUntold) { self.told } else { self.doubt() }
    }

    /// Whether the medium does not record it.
    pub(super) fn is_untold(&self) -> bool {
        self.record() != self.told
    }
}

impl Cache {
    /// Records devices that failed a flush, unless the medium does so. Returns whether a commit is
    /// under way that must end first, or that does this.
    pub(super) fn tell_doubt(&self, now: Nanos, port: &mut Port) -> bool {
        let trouble = self.blocks().trouble;
        trouble.is_untold() && self.begin_telling(trouble.record(), now, port)
    }
}

/// Writes the dirty data of a cache device that failed a flush to the device again, durably.
/// Returns the number of bytes. `contents` must not have clean slots.
pub(super) fn write_again(
    contents: &Contents,
    devices: &Devices,
    block_bytes: u64,
    progress: &AttachProgress,
) -> Result<u64> {
    let (cache, dirty) = (&devices.cache, contents.dirty.ones());
    if dirty == 0 {
        return Ok(0);
    }
    progress.begin("dirty blocks", dirty);
    let mut slots = contents.dirty.iter().peekable();
    while slots.peek().is_some() {
        let slots: Vec<u64> = slots.by_ref().take(SLOTS_MAX).collect();
        for at in (0..block_bytes).step_by(PIECE_BYTES as usize) {
            let len = PIECE_BYTES.min(block_bytes - at);
            let read = |slot: &u64| {
                let buffer = Buffer::zeroed(len as usize);
                DiskIo::new(cache, Op::Read, slot * block_bytes + at, buffer, 0)
            };
            let read = carry_out(cache, slots.iter().map(read).collect())?;
            let write = |io: DiskIo| DiskIo::new(cache, Op::Write, io.offset, io.buffer, 0);
            carry_out(cache, read.into_iter().map(write).collect())?;
        }
        progress.advance(slots.len() as u64);
    }
    carry_out(cache, vec![DiskIo::bare(cache, Op::Flush, 0, 0, 0)])?;
    Ok(dirty * block_bytes)
}

fn carry_out(cache: &Arc<dyn Disk>, ios: Vec<DiskIo>) -> Result<Vec<DiskIo>> {
    let done = cache.carry_out(ios);
    let failed = done.iter().find_map(|io| Some((io.op, io.offset, io.result.err()?)));
    let Some((op, at, status)) = failed else { return Ok(done) };
    let op = match op {
        Op::Read => "read",
        Op::Write => "write",
        _ => "flush",
    };
    let what = format!(
        "cache: {} failed a flush since the machine started, so a power failure can lose data that \
         it still returns; its dirty data could not be made durable ({op} at byte {at}: {status}): \
         `udm recover` writes the readable part back to the origin, and `udm detach --accept-loss` \
         gives up the rest",
        cache.limits().name
    );
    Err(Error::new(Kind::Io, what))
}
