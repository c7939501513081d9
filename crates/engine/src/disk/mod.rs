//! Slow devices: the `Disk` half of the boundary between engines and the outside world.
//!
//! A disk is shared by all threads. An I/O is started on the thread that emits it, into that
//! thread's [`Ring`], and completes on the same thread. While an I/O is in flight, the ring or
//! simulated disk that holds it owns its buffer.
//!
//! Contract, checked by one conformance suite for every implementation:
//! 1. Offsets and lengths are multiples of 512 and within the size; any other I/O completes with
//!    [`Status::Invalid`]. Multiples of `limits().block_bytes` are faster.
//! 2. A completed write is visible to every later read. It is durable only after a flush that was
//!    started later completes with success. Each sector of 512 bytes is written whole or not at
//!    all.
//! 3. After a failed flush, all data written since the last good flush may be lost. With files and
//!    block devices, every flush that was requested before the failure fails, and so does the next
//!    flush of every ring that has written since the last good one. Other disks may fail one flush
//!    only, and targets must cope with that.
//! 4. Every started I/O completes exactly once. I/Os in flight at the same time are not ordered.
//! 5. If a part of the disk existed when the disk was opened and is gone now, I/O to it always
//!    fails; a disk that lost a part takes no more writes and flushes. The same holds for a file
//!    that was cut and extended to its old length, where udm can detect that.
//! 6. A zeroed range reads as zeroes. A discarded range reads as arbitrary data until it is
//!    written.

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::error::{Result, Status};
use crate::sync::Arc;
use crate::topology::{TargetLimits, Topology};
use crate::units::SECTOR;

mod byte_locks;
pub(crate) mod claim;
mod claims;
mod errors;
mod facts;
mod fault;
mod file;
mod files;
mod flushes;
mod flushing;
pub(crate) mod holders;
mod holes;
mod identity;
mod ioctls;
mod lazy;
mod loops;
mod mode;
mod open;
mod pacer;
mod pagecache;
mod pending_errors;
mod ram;
mod recent;
mod same;
mod sim;
mod stamp;
#[cfg(test)]
mod tests;
mod way;
pub(crate) mod whole;

pub use claim::is_in_use;
pub use claims::{Claims, TableClaims};
pub use errors::DiskErrors;
pub use fault::{Effect, Fault};
pub use file::FileDisk;
pub use identity::{Identity, Match};
pub use lazy::{Budget, Pacing, ReadMode, WINDOW_BYTES as LAZY_WINDOW_BYTES};
pub use mode::OpenMode;
pub(crate) use open::window_of;
pub use open::{FileOptions, IoMode, doubt_of, end_of};
pub use pagecache::Cached;
pub use ram::{DiskCounts, RamDisk};
pub use same::{Recorded, Refused, Same};
pub use sim::SimDisk;
pub use stamp::{Evidence, Stamp};
pub use whole::Absence;

/// The state of a range of a disk or a mapped device, found without reading the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Any data.
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
    pub fn finish(&mut self, mut io: DiskIo, result: std::result::Result<(), Status>) {
        io.result = result;
        self.complete(io);
    }
}

/// The size, limits and abilities of a disk.
#[derive(Clone, Debug)]
pub struct DiskLimits {
    /// The user's name for the disk, for messages.
    pub name: String,
    /// Size in bytes, a multiple of 512.
    pub size_bytes: u64,
    /// The smallest write the device takes without read-modify-write: its logical block size.
    pub block_bytes: u32,
    /// A write of this many bytes, aligned to this many, is stored whole or not at all if the power
    /// fails; 0: unknown.
    pub atomic_bytes: u32,
    /// Whether a discard has an effect.
    pub has_discard: bool,
    /// The units in which the disk works best.
    pub topology: Topology,
    /// Stays the same for this device over restarts and differs from all other devices, as far as
    /// its doubt does not say otherwise.
    pub identity: Identity,
    /// `major:minor` for device nodes, as the kernel would print it in a table; then the mode of
    /// I/O if one was asked for.
    pub kernel_name: String,
}

impl DiskLimits {
    /// The limits of a target on this disk.
    pub fn of_target(&self) -> TargetLimits {
        TargetLimits::on(self.topology, self.block_bytes.max(SECTOR as u32), self.has_discard)
    }
}

/// An I/O to a disk, with its buffer. The completion is the same value.
#[derive(Debug)]
pub struct DiskIo {
    /// The disk of the I/O.
    pub disk: Arc<dyn Disk>,
    /// The operation. `Flush` ignores the range.
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
    pub result: std::result::Result<(), Status>,
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
    /// The disk's size and abilities.
    fn limits(&self) -> &DiskLimits;

    /// Starts `io`; `ring` returns it when it is complete, with `result` set.
    fn start(&self, io: DiskIo, ring: &mut Ring);

    /// Carries out `ios` of this disk and waits for all of them; they are returned in any order.
    /// Only for opening and inspecting devices: code that serves requests must not wait like this.
    fn carry_out(&self, ios: Vec<DiskIo>) -> Vec<DiskIo> {
        carry_out_with(self, ios, Ring::without_kernel(), |_| {})
    }

    /// The state of the first bytes of `[offset, offset + len)`, and how many bytes have this
    /// state, without reading them. `len` and the answer are more than 0, and whole sectors within
    /// the disk.
    fn extent(&self, _offset: u64, len: u64) -> (u64, Extent) {
        (len, Extent::Data)
    }

    /// From now on the disk's user reads only ranges that it has written, from byte `from` on. So a
    /// hole of a file is a loss there, and its read fails: see `whole`. Zeroes that are written
    /// there are data, which take space.
    fn expect_data(&self, _from: u64) {}

    /// The I/O errors so far.
    fn errors(&self) -> DiskErrors {
        DiskErrors::default()
    }

    /// How often a flush or a write-out has failed while there were writes that no good flush had
    /// covered. Every client whose write was acknowledged must get an error.
    fn losses(&self) -> u64 {
        0
    }

    /// Whether some ring still has a pending error of a failed flush: then every client's flush
    /// must reach this disk.
    fn is_owing(&self) -> bool {
        false
    }

    /// The state of the disk's write-out, if it is paced.
    fn pacing(&self) -> Option<Pacing> {
        None
    }

    /// Reserves space for the whole disk, if it is a file with holes, so that no write finds its
    /// file system full. From then on, zeroes do not free space.
    fn keep_room(&self) -> Result<()> {
        Ok(())
    }

    /// Whether the disk may only be read.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Checks whether a part is lost. Returns the loss in words that follow the disk's name: `was
    /// cut short, ...`. From then on the loss counts for all I/O.
    fn loss(&self) -> Option<String> {
        None
    }

    /// The change of the disk's name since the disk was opened, if there was one.
    fn absence(&self) -> Option<Absence> {
        None
    }

    /// The evidence of changes by another program. `is_end`: all writes and the file's times are
    /// made durable first.
    fn evidence(&self, _is_end: bool) -> Evidence {
        Evidence::Nothing
    }

    /// A path by which this process can still open the file, to copy a deleted file.
    fn open_as(&self) -> Option<String> {
        None
    }

    /// The byte where the disk begins on that file, if it is a part of the file.
    fn begins_at(&self) -> u64 {
        0
    }
}

/// Troubles of a slow device other than failed I/O, as sentences: a part that was lost, or a name
/// that now leads to another file, with the path of the data.
pub fn troubles(disk: &dyn Disk, role: &str) -> Troubles {
    let name = &disk.limits().name;
    let absence = disk.absence();
    let place = disk.open_as().unwrap_or_default();
    let place = match disk.begins_at() {
        0 => place,
        start => format!("{place}, from byte {start} on,"),
    };
    let errors = disk.errors();
    let is_failing = errors.count > 0 && !errors.has_worked;
    let gone = absence.map(|absence| {
        let what = absence.words();
        match absence {
            Absence::Replaced if is_failing => format!(
                "{role} {name}: the path leads to another file than the one that is open, which \
                 fails: `udm remove`, then the same `udm create`, go on with the file at \
                 the path"
            ),
            Absence::Deleted => format!(
                "{role} {name} {what}: its data is lost when this server ends; copy it from \
                 {place} first"
            ),
            Absence::Moved | Absence::Replaced => format!(
                "{role} {name} {what}: this server continues with the old one, which is {place} \
                 until the server ends"
            ),
        }
    });
    let is_deleted = absence == Some(Absence::Deleted);
    let lost = disk
        .loss()
        .map(|loss| format!("{role} {name} failed: it {loss}; udm no longer writes to it"));
    Troubles { lost, gone, is_deleted }
}

/// See [`troubles`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Troubles {
    /// The sentence about a lost part.
    pub lost: Option<String>,
    /// The sentence about a name that leads elsewhere.
    pub gone: Option<String>,
    /// The file was deleted, and its data ends with the server.
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
        let Some(io) = ring.pop_completed() else { panic!("a disk does not complete an I/O") };
        done.push(io);
        started -= 1;
    }
    done
}

/// Whether `io` keeps the contract: whole sectors, within the disk, as long as its buffer.
fn check(limits: &DiskLimits, io: &DiskIo) -> std::result::Result<(), Status> {
    let end = io.offset.checked_add(io.len).ok_or(Status::Invalid)?;
    let is_sized = match io.op {
        Op::Read | Op::Write => io.len == io.buffer.len() as u64,
        Op::Flush => io.len == 0,
        Op::Discard | Op::WriteZeroes => true,
    };
    let is_whole = io.offset.is_multiple_of(SECTOR) && io.len.is_multiple_of(SECTOR);
    if is_sized && is_whole && end <= limits.size_bytes { Ok(()) } else { Err(Status::Invalid) }
}
