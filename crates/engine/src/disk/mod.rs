//! Slow devices: the `Disk` half of the seam to the world.
//!
//! A disk is shared by all threads. An I/O is started on the thread that emits it, into that
//! thread's [`Ring`], and its completion comes back on the same thread. While an I/O is in flight,
//! the ring or simulated disk that holds it owns its buffer.
//!
//! Contract, checked by one conformance suite for every implementation:
//! 1. Offsets and lengths are multiples of 512 and within the size; anything else completes with
//!    [`Status::Invalid`]. Multiples of `limits().block_bytes` are faster.
//! 2. A completed write is visible to every later read. It is durable only after a flush that was
//!    started later completes with success. Each sector of 512 bytes is written whole or not at
//!    all.
//! 3. A failed flush means: anything written since the last good flush may be lost for ever. Files
//!    and block devices say so to all who must know: the flushes that were asked for before it
//!    failed fail too, and so does the next flush of every ring that has written since the last
//!    good one. Other disks may say it to one flush only, and targets must cope with that.
//! 4. Every started I/O completes exactly once. I/Os in flight at the same time have no order.
//! 5. A part that was there when the disk was opened and is gone now fails for ever; a disk that
//!    lost a part takes no more writes and flushes.
//! 6. A zeroed range reads as zeroes. A discarded one reads as anything until it is written.

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::error::Status;
use crate::sync::Arc;
use crate::units::SECTOR;

mod claims;
mod debts;
mod errors;
mod fault;
mod file;
mod files;
mod flushes;
mod flushing;
mod holes;
mod identity;
mod lazy;
mod open;
mod pacer;
mod pagecache;
mod ram;
mod recent;
mod sim;
#[cfg(test)]
mod tests;
mod way;
pub(crate) mod whole;

pub use claims::{Claims, TableClaims};
pub use errors::DiskErrors;
pub use fault::{Effect, Fault};
pub use file::FileDisk;
pub use lazy::{Budget, Pacing, WINDOW_BYTES as LAZY_WINDOW_BYTES};
pub(crate) use open::window_of;
pub use open::{FileOptions, IoMode, OpenMode, ReadMode};
pub use pagecache::Cached;
pub use ram::{DiskCounts, RamDisk};
pub use sim::SimDisk;
pub use whole::Absence;

/// What a range of a disk or a mapped device holds, as far as that is known without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Anything.
    Data,
    /// Zeroes that take no space.
    Zeroes,
}

/// The ring that disks use: I/O comes out of it.
pub type Ring = crate::ring::Ring<DiskIo>;

/// A call of a file or block device to the ring.
type Work = crate::ring::Work<DiskIo>;

impl Ring {
    /// Completes `io`: for disks that carried it out themselves.
    pub fn finish(&mut self, mut io: DiskIo, result: Result<(), Status>) {
        io.result = result;
        self.complete(io);
    }
}

/// What a disk is and can do.
#[derive(Clone, Debug)]
pub struct DiskLimits {
    /// As the user named it, for messages.
    pub name: String,
    /// Size in bytes, a multiple of 512.
    pub size_bytes: u64,
    /// The smallest write the device takes without read-modify-write: its logical block size.
    pub block_bytes: u32,
    /// A write of this many bytes, aligned to this many, is there whole or not at all after a power
    /// cut; 0: unknown.
    pub atomic_bytes: u32,
    /// Whether discard does something.
    pub has_discard: bool,
    /// Stays the same for this device over restarts and tells it from others; see `pcache`'s label.
    /// Human-readable, at most 200 bytes.
    pub identity: String,
    /// `major:minor` for device nodes, as the kernel would print it in a table; then the mode of
    /// I/O if one was asked for.
    pub kernel_name: String,
}

/// An I/O to a disk, with its buffer, on its way there and back.
#[derive(Debug)]
pub struct DiskIo {
    /// Where it goes.
    pub disk: Arc<dyn Disk>,
    /// The operation. `Flush` has no range.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Bytes; equals the buffer's length for reads and writes.
    pub len: u64,
    /// The data, or empty.
    pub buffer: Buffer,
    /// The target's own tag.
    pub token: u64,
    /// The table line whose target emitted this; filled in by the device.
    pub line: u32,
    /// The result; meaningful once completed.
    pub result: Result<(), Status>,
}

impl DiskIo {
    /// A read into `buffer` or a write out of it, of all its bytes.
    pub fn new(disk: &Arc<dyn Disk>, op: Op, offset: u64, buffer: Buffer, token: u64) -> DiskIo {
        let len = buffer.len() as u64;
        DiskIo { len, buffer, ..DiskIo::bare(disk, op, offset, 0, token) }
    }

    /// An operation without data.
    pub fn bare(disk: &Arc<dyn Disk>, op: Op, offset: u64, len: u64, token: u64) -> DiskIo {
        let (disk, buffer) = (Arc::clone(disk), Buffer::empty());
        DiskIo { disk, op, offset, len, buffer, token, line: 0, result: Ok(()) }
    }
}

/// A slow device.
pub trait Disk: Send + Sync + std::fmt::Debug {
    /// Its size and abilities.
    fn limits(&self) -> &DiskLimits;

    /// Starts `io`; it comes out of `ring` when it is complete, with `result` set.
    fn start(&self, io: DiskIo, ring: &mut Ring);

    /// Carries out `ios` of this disk and waits for all of them; they come back in any order. For
    /// opening and inspecting devices only: nothing that serves requests may wait like this.
    fn carry_out(&self, ios: Vec<DiskIo>) -> Vec<DiskIo> {
        carry_out_with(self, ios, Ring::without_kernel(), |_| {})
    }

    /// What `[offset, offset + len)` starts with, and for how many bytes, without reading it. `len`
    /// and the answer are more than 0, and whole sectors within the disk.
    fn extent(&self, _offset: u64, len: u64) -> (u64, Extent) {
        (len, Extent::Data)
    }

    /// The I/O errors so far.
    fn errors(&self) -> DiskErrors {
        DiskErrors::default()
    }

    /// Whether a flush has failed of which not all rings have heard that must: then every client's
    /// flush must get here.
    fn is_owing(&self) -> bool {
        false
    }

    /// How the write-out of what was written to it is doing, if it is paced.
    fn pacing(&self) -> Option<Pacing> {
        None
    }

    /// Whether it may only be read.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Checks whether a part is lost, and says so in words that follow its name: `was cut short,
    /// ...`. A loss that is seen here counts for all I/O from then on.
    fn loss(&self) -> Option<String> {
        None
    }

    /// What happened to its name since it was opened.
    fn absence(&self) -> Option<Absence> {
        None
    }

    /// Path by which it can still be opened in this process, to copy what has no name any more.
    fn open_as(&self) -> Option<String> {
        None
    }

    /// Where on that it begins, if it is a part of something.
    fn begins_at(&self) -> u64 {
        0
    }
}

/// Troubles of a slow device besides failing I/O, as sentences: a part that was lost, and a name
/// that leads elsewhere, with where its data still is.
pub fn troubles(disk: &dyn Disk, role: &str) -> Troubles {
    let name = &disk.limits().name;
    let absence = disk.absence();
    let place = disk.open_as().unwrap_or_default();
    let place = match disk.begins_at() {
        0 => place,
        start => format!("{place}, from byte {start} on,"),
    };
    let gone = absence.map(|absence| {
        let what = absence.words();
        match absence {
            Absence::Deleted => format!(
                "{role} {name} {what}: its data ends with this server, which still has it open; \
                 copy it from {place} before that"
            ),
            Absence::Moved | Absence::Replaced => format!(
                "{role} {name} {what}: this server goes on with what was there, which is \
                 {place} as long as it lives"
            ),
        }
    });
    let is_deleted = absence == Some(Absence::Deleted);
    let lost = disk
        .loss()
        .map(|loss| format!("{role} {name} failed: it {loss}; nothing is written to it any more"));
    Troubles { lost, gone, is_deleted }
}

/// See [`troubles`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Troubles {
    /// It lost a part.
    pub lost: Option<String>,
    /// Its name does not lead to it any more.
    pub gone: Option<String>,
    /// It has no name at all, and its data ends with the server.
    pub is_deleted: bool,
}

/// Carries out `ios` through `ring`; `wait` lets the ring make progress.
fn carry_out_with<D: Disk + ?Sized>(
    disk: &D,
    ios: Vec<DiskIo>,
    mut ring: Ring,
    wait: impl Fn(&mut Ring),
) -> Vec<DiskIo> {
    let mut started = ios.len();
    let mut done = Vec::with_capacity(started);
    ios.into_iter().for_each(|io| disk.start(io, &mut ring));
    while started > 0 {
        wait(&mut ring);
        let Some(io) = ring.pop_completed() else { panic!("a disk keeps an I/O for ever") };
        done.push(io);
        started -= 1;
    }
    done
}

/// Whether `io` keeps the contract: whole sectors, within the disk, as long as its buffer.
fn check(limits: &DiskLimits, io: &DiskIo) -> Result<(), Status> {
    let end = io.offset.checked_add(io.len).ok_or(Status::Invalid)?;
    let is_sized = match io.op {
        Op::Read | Op::Write => io.len == io.buffer.len() as u64,
        Op::Flush => io.len == 0,
        Op::Discard | Op::WriteZeroes => true,
    };
    let is_whole = io.offset.is_multiple_of(SECTOR) && io.len.is_multiple_of(SECTOR);
    if is_sized && is_whole && end <= limits.size_bytes { Ok(()) } else { Err(Status::Invalid) }
}
