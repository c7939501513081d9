//! The open descriptors of a file or block device.

use std::os::fd::OwnedFd;

use rustix::fs::{Statx, StatxTimestamp};

use super::errors::Errors;
use super::facts::{MNT_ID_UNIQUE, stat};
use super::flushing::Flushing;
use super::lazy::Lazy;
use super::whole::Whole;
use super::{DiskIo, Evidence};
use crate::bio::Op;
use crate::shm::boot;
use crate::sync::Arc;
use crate::sync::statics::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::units::SECTOR;

/// The open descriptors of one disk, and how to use them.
#[derive(Debug)]
pub(super) struct Files {
    /// Holds the lock. May be shared with other parts of the same file.
    pub _claim: Arc<OwnedFd>,
    /// Where this disk begins on the file.
    pub start: u64,
    /// Through the page cache. This descriptor is not shared: the kernel reports data that it could
    /// not write once for each open file, so a flush by another user of the descriptor could hide
    /// the error.
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
    /// Whether the disk was opened to be only read.
    pub is_read_only: bool,
    /// The file's space is reserved, and remains reserved.
    pub keeps_room: AtomicBool,
    /// Whether the file is complete; shared with the file's other parts.
    pub whole: Arc<Whole>,
    /// Its length and times when it was opened.
    pub opened: Statx,
    /// Whether it is known by its place only. Then its file system may report the mount's times.
    pub is_by_place: bool,
    /// Reads from this byte of the disk on return written data; `u64::MAX`: unknown.
    pub written_from: AtomicU64,
    /// The errors of the disk.
    pub errors: Errors,
    /// Flushes in flight, and the pending errors of failed ones.
    pub flushing: Arc<Flushing>,
}

impl Files {
    /// The evidence of changes to the file, of which `size_bytes` are this disk, by another
    /// program. `is_end`: the file's times are made durable first.
    pub fn evidence(&self, size_bytes: u64, is_end: bool) -> Evidence {
        let found = match is_end {
            // A flush of data alone does not make the times of a file durable.
            true => rustix::fs::fsync(&self.buffered).and_then(|()| stat(&self.buffered)),
            // The opening may have changed the times since.
            false => Ok(self.opened),
        };
        let Ok(found) = found else { return Evidence::Nothing };
        let bytes = found.stx_size;
        // A file that has grown since it was opened is recorded with the length that the next
        // attach finds.
        let opened = self.opened.stx_size / SECTOR * SECTOR;
        let is_all = self.start == 0 && size_bytes == opened;
        if self.is_block_device || !is_all {
            return Evidence::Content;
        }
        let nanos = |time: &StatxTimestamp| {
            i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
        };
        let (mtime, ctime) = (nanos(&found.stx_mtime), nanos(&found.stx_ctime));
        if self.is_by_place {
            let is_known = found.stx_mask & MNT_ID_UNIQUE.bits() != 0;
            let mount = is_known.then(|| mount_number(boot(), found.stx_mnt_id));
            return Evidence::Mounted { mount, bytes, mtime, ctime };
        }
        Evidence::File { bytes, mtime, ctime }
    }

    /// Whether all bytes that `io` needs exist, as far as is known.
    pub fn has(&self, io: &DiskIo) -> bool {
        let end = self.start + io.offset + io.len;
        match io.op {
            Op::Read => end <= self.whole.left_bytes(),
            // Checked after the flush.
            Op::Flush => !self.whole.is_cut(),
            _ => self.whole.glance(&self.buffered, end),
        }
    }

    /// Whether the whole range of `io` was written, so that a hole in it is a loss.
    pub fn was_written(&self, io: &DiskIo) -> bool {
        io.offset >= self.written_from.load(Ordering::Relaxed)
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

    /// Reserves space for `len` bytes from the start on, if it is a file with holes. If the file
    /// system cannot reserve space, the file is used without.
    pub fn keep_room(&self, len: u64) -> rustix::io::Result<()> {
        let stat = rustix::fs::fstat(&self.buffered)?;
        let has_holes = (stat.st_blocks as u64) * SECTOR < stat.st_size as u64;
        if self.is_block_device || self.is_read_only {
            return Ok(());
        }
        self.keeps_room.store(true, Ordering::Relaxed);
        if !has_holes {
            self.whole.reserved(&self.buffered);
            return Ok(());
        }
        let flags = rustix::fs::FallocateFlags::empty();
        loop {
            match rustix::fs::fallocate(&self.buffered, flags, self.start, len) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => return Ok(()),
                done => {
                    self.whole.reserved(&self.buffered);
                    return done;
                }
            }
        }
    }

    /// Whether zeroes must not free its space.
    pub fn keeps_room(&self) -> bool {
        self.keeps_room.load(Ordering::Relaxed)
    }

    /// The whole blocks in a range of the file; a block device cannot discard parts of a block.
    pub fn whole_blocks(&self, offset: u64, len: u64) -> Option<(u64, u64)> {
        let block = if self.is_block_device { self.block_bytes } else { SECTOR };
        let start = offset.next_multiple_of(block);
        let end = (offset + len) / block * block;
        (start < end).then(|| (start, end - start))
    }
}

/// A number that another mount of this boot of the machine, or of another boot, does not have.
fn mount_number(boot: u64, id: u64) -> u64 {
    boot ^ id
}

#[cfg(test)]
mod tests;
