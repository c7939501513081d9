//! The open descriptors of a file or block device.

use std::os::fd::OwnedFd;

use super::DiskIo;
use super::errors::Errors;
use super::flushing::Flushing;
use super::lazy::Lazy;
use super::whole::Whole;
use crate::bio::Op;
use crate::sync::Arc;
use crate::units::SECTOR;

/// The open descriptors of one disk, and how to use them.
#[derive(Debug)]
pub(super) struct Files {
    /// Holds the lock. May be shared with other parts of the same file.
    pub _claim: Arc<OwnedFd>,
    /// Where this disk begins on the file.
    pub start: u64,
    /// Through the page cache. Nobody else's: the kernel tells each open file once of data that it
    /// could not write, and who shared one could take another's flush for a good one.
    pub buffered: Arc<OwnedFd>,
    /// Past the page cache.
    pub direct: Option<Arc<OwnedFd>>,
    /// Offset and length of a direct request must be multiples of this.
    pub granule: u64,
    /// Flags of buffered reads and writes.
    pub flags: i32,
    /// Write-out at a steady pace.
    pub lazy: Option<Arc<Lazy>>,
    /// Whether this is a block device.
    pub is_block_device: bool,
    /// The smallest unit of a block device's fallocate.
    pub block_bytes: u64,
    /// Whether it was opened to be read only.
    pub is_read_only: bool,
    /// Whether the file is all there; shared with its other parts.
    pub whole: Arc<Whole>,
    /// What went wrong.
    pub errors: Errors,
    /// Flushes under way, and who must hear of one that failed.
    pub flushing: Arc<Flushing>,
}

impl Files {
    /// Whether all bytes that `io` needs are there, as far as is known.
    pub fn has(&self, io: &DiskIo) -> bool {
        let end = self.start + io.offset + io.len;
        match io.op {
            Op::Read => end <= self.whole.left_bytes(),
            // Checked after the flush.
            Op::Flush => !self.whole.is_cut(),
            _ => self.whole.glance(&self.buffered, end),
        }
    }

    /// The descriptor for an operation on a range of the file, and its flags.
    pub fn pick(&self, op: Op, offset: u64, len: u64, is_buffered: bool) -> (Arc<OwnedFd>, i32) {
        let fits = offset.is_multiple_of(self.granule) && len.is_multiple_of(self.granule);
        match (&self.direct, &self.lazy) {
            (Some(direct), _) if fits && !is_buffered => (direct.clone(), 0),
            (_, Some(lazy)) if op != Op::Read => (self.buffered.clone(), lazy.flags()),
            _ => (self.buffered.clone(), self.flags),
        }
    }

    /// The whole blocks in a range of the file; a block device discards nothing less.
    pub fn whole_blocks(&self, offset: u64, len: u64) -> Option<(u64, u64)> {
        let block = if self.is_block_device { self.block_bytes } else { SECTOR };
        let start = offset.next_multiple_of(block);
        let end = (offset + len) / block * block;
        (start < end).then(|| (start, end - start))
    }
}
