//! The stamp of an origin at rest: a record by which the next attach sees whether another program
//! wrote to the origin.
//!
//! When a cache ends in order, it records the [`Stamp`] of its origin on its own medium. If the
//! origin is mounted or restored after that, clean data of the cache is older than the origin's,
//! and dirty data belongs to an older state of the origin.
//!
//! 1. The stamp of a whole file consists of its length, its mtime and its ctime. A write changes
//!    mtime and ctime. A program that sets the mtime back, as restores do, changes the ctime. A
//!    rename also changes the ctime; it counts as a change, because the two look alike.
//! 2. The stamp of a block device, or of a part of a file, consists of checksums of certain areas:
//!    the first and the last MiB, the start of each partition, and samples. A mount changes the
//!    superblock of its file system, which is in the first MiB (ext4, XFS, btrfs, LVM, ZFS) or
//!    after each of the first MiBs (F2FS); partition tables and RAID superblocks are in the first
//!    or the last MiB. A restore changes samples. A program that writes only to other areas is not
//!    noticed.
//! 3. The stamp of a whole file that is known by its place only (FUSE) has one checksum of these
//!    areas, the mount, and the times. Some file systems report the time of the mount, so the times
//!    count only while the mount is the same one; otherwise the areas must suffice. A service with
//!    mounts of its own has another mount at each start, and Linux before 6.8 does not number them.
//! 4. A part of a stamp has 19 to 21 bits, so a change is missed once in 500,000 times at most.
//! 5. A server that dies leaves no stamp, and the kernel writes none: then changes cannot be
//!    detected.

use std::time::{Duration, SystemTime};

use super::{Disk, DiskIo};
use crate::base::crc::crc32c_raw;
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::sync::Arc;
use crate::units::{KIB, MIB, SECTOR};

/// Bit of a stamp: there is one.
const IS_THERE: u64 = 1 << 63;
/// Bit of a stamp: it is made of sums of the content.
const IS_OF_CONTENT: u64 = 1 << 62;
/// Bit of a stamp: it is made of a sum of the content, and of times within a mount.
const IS_OF_MOUNT: u64 = 1 << 61;
/// The part of a stamp for an unknown mount.
const UNKNOWN_MOUNT: u32 = 0;
/// Where the parts of a stamp begin, and their bits.
const PARTS: [(u32, u32); 3] = [(0, 21), (21, 21), (42, 19)];
/// Bytes of the start and of the end that are summed up.
const EDGE_BYTES: u64 = MIB;
/// Samples between them, and the bytes of each.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 4 * KIB;
/// The first MiBs, each of which is sampled.
const FIRST_MIBS: u64 = 8;
/// Bytes of a partition's start: btrfs has its superblock at 64 KiB.
const PARTITION_BYTES: u64 = 128 * KIB;
/// Partitions whose start is summed up.
const PARTITIONS_MAX: usize = 32;
/// The coarsest clock of a file system that is waited for.
const TICK: Duration = Duration::from_millis(20);

/// The evidence of changes to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// No evidence.
    Nothing,
    /// It is a whole file.
    File {
        /// Its length.
        bytes: u64,
        /// Nanoseconds since 1970.
        mtime: i128,
        /// Nanoseconds since 1970.
        ctime: i128,
    },
    /// It is a whole file that is known by its place only: the stored data, and the times within
    /// one mount.
    Mounted {
        /// Another mount has another number. Unknown before Linux 6.8.
        mount: Option<u64>,
        /// Nanoseconds since 1970.
        mtime: i128,
        /// Nanoseconds since 1970.
        ctime: i128,
    },
    /// The stored data.
    Content,
}

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u64);

impl Stamp {
    /// The stamp of a disk at rest, whose first `bytes` count if its content does. The disk is
    /// flushed first. `None` if the disk offers no evidence.
    pub fn at_end(disk: &Arc<dyn Disk>, bytes: u64) -> Option<Stamp> {
        let flushed = disk.carry_out(vec![DiskIo::bare(disk, Op::Flush, 0, 0, 0)]);
        flushed.iter().all(|io| io.result.is_ok()).then(|| Stamp::of(disk, bytes, true))?
    }

    /// The stamp of a disk's first `bytes`. `is_end`: of a disk at rest.
    pub(super) fn of(disk: &Arc<dyn Disk>, bytes: u64, is_end: bool) -> Option<Stamp> {
        match disk.evidence(is_end) {
            Evidence::Nothing => None,
            Evidence::File { bytes, mtime, ctime } => {
                if is_end {
                    outwait_clock(mtime.max(ctime));
                }
                let sums = [
                    sum(&bytes.to_le_bytes()),
                    sum(&mtime.to_le_bytes()),
                    sum(&ctime.to_le_bytes()),
                ];
                Some(Stamp::new(IS_THERE, sums))
            }
            Evidence::Mounted { mount, mtime, ctime } => {
                if is_end {
                    outwait_clock(mtime.max(ctime));
                }
                let areas = content_sums(disk, bytes.min(disk.limits().size_bytes))?;
                let areas: Vec<u8> = areas.iter().flat_map(|sum| sum.to_le_bytes()).collect();
                let times = [mtime.to_le_bytes(), ctime.to_le_bytes()].concat();
                let mount = mount.map_or(UNKNOWN_MOUNT, |mount| sum(&mount.to_le_bytes()));
                let sums = [sum(&areas), mount, sum(&times)];
                Some(Stamp::new(IS_THERE | IS_OF_MOUNT, sums))
            }
            Evidence::Content => {
                let bytes = bytes.min(disk.limits().size_bytes);
                Some(Stamp::new(IS_THERE | IS_OF_CONTENT, content_sums(disk, bytes)?))
            }
        }
    }

    fn new(marks: u64, sums: [u32; 3]) -> Stamp {
        let parts = PARTS.iter().zip(sums);
        let fold = |bits: u64, ((at, len), sum): (&(u32, u32), u32)| {
            bits | (u64::from(sum) & ((1 << len) - 1)) << at
        };
        Stamp(parts.fold(marks, fold))
    }

    /// The bits that a medium stores.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The stamp that a medium has, if there is one.
    pub fn from_bits(bits: u64) -> Option<Stamp> {
        (bits & IS_THERE != 0).then_some(Stamp(bits))
    }

    /// Whether both are made of the same kind of evidence.
    pub(super) fn is_like(self, other: Stamp) -> bool {
        (self.0 ^ other.0) & (IS_OF_CONTENT | IS_OF_MOUNT) == 0
    }

    /// The difference between two stamps. `is_moved`: the newer stamp is of a copy, whose ctime is
    /// not comparable.
    pub(super) fn difference(self, now: Stamp, is_moved: bool) -> Option<&'static str> {
        let is_of_content = self.0 & IS_OF_CONTENT != 0;
        let words = match is_of_content {
            false => [
                "its length has changed",
                "it was modified: its mtime differs",
                "its ctime differs: it was renamed, got other permissions, or was modified and its \
                 mtime set back",
            ],
            true => [
                "the first MiB, or the start of a partition, has changed",
                "the last MiB has changed",
                "samples of its content have changed",
            ],
        };
        if !self.is_like(now) {
            return Some(
                "it is of another kind: a file, a device or a part, or a file known by its place",
            );
        }
        let part = |stamp: Stamp, (at, len): (u32, u32)| stamp.0 >> at & ((1 << len) - 1);
        let differs = |place: (u32, u32)| part(self, place) != part(now, place);
        if self.0 & IS_OF_MOUNT != 0 {
            let [areas, mount, times] = PARTS.map(differs);
            let is_known = part(now, PARTS[1]) != u64::from(UNKNOWN_MOUNT);
            return match (areas, mount || is_moved || !is_known, times) {
                (true, ..) => Some("its content has changed"),
                (false, false, true) => Some("it was modified: its times differ"),
                _ => None,
            };
        }
        let compared = if is_moved && !is_of_content { 2 } else { PARTS.len() };
        let mut pairs = PARTS.iter().zip(words).take(compared);
        pairs.find(|(at, _)| differs(**at)).map(|(_, words)| words)
    }
}

fn sum(bytes: &[u8]) -> u32 {
    !crc32c_raw(u32::MAX, bytes)
}

/// A later change gets a later time, even by a clock that ticks slowly.
fn outwait_clock(last: i128) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let age = now.as_nanos() as i128 - last;
    let left = TICK.as_nanos() as i128 - age;
    if age >= 0 && left > 0 {
        std::thread::sleep(Duration::from_nanos(left as u64));
    }
}

/// The checksums of the first `bytes` of a disk; `None` if an area cannot be read.
fn content_sums(disk: &Arc<dyn Disk>, bytes: u64) -> Option<[u32; 3]> {
    let bytes = bytes / SECTOR * SECTOR;
    let head = read(disk, &[(0, EDGE_BYTES.min(bytes))])?;
    let of_partitions: Vec<(u64, u64)> = partition_starts(&head)
        .into_iter()
        .filter(|start| *start < bytes)
        .map(|start| (start, PARTITION_BYTES.min(bytes - start)))
        .collect();
    let partitions = read(disk, &of_partitions)?;
    let tail = bytes.saturating_sub(EDGE_BYTES);
    let tail = read(disk, &[(tail, bytes - tail)])?;
    let step = bytes / (SAMPLES + 1) / SAMPLE_BYTES * SAMPLE_BYTES;
    let spread = (1..=SAMPLES).map(|nth| nth * step);
    let places = (1..=FIRST_MIBS).map(|nth| nth * MIB).chain(spread);
    let samples: Vec<(u64, u64)> =
        places.filter(|at| at + SAMPLE_BYTES <= bytes).map(|at| (at, SAMPLE_BYTES)).collect();
    let samples = read(disk, &samples)?;
    let head = crc32c_raw(crc32c_raw(u32::MAX, &head), &partitions);
    Some([!head, !crc32c_raw(u32::MAX, &tail), !crc32c_raw(u32::MAX, &samples)])
}

/// The data stored at these places, one after the other.
fn read(disk: &Arc<dyn Disk>, places: &[(u64, u64)]) -> Option<Vec<u8>> {
    let ios = places.iter().enumerate().map(|(nth, (at, len))| {
        DiskIo::new(disk, Op::Read, *at, Buffer::zeroed(*len as usize), nth as u64)
    });
    let mut done = disk.carry_out(ios.collect());
    done.sort_unstable_by_key(|io| io.token);
    let is_read = done.iter().all(|io| io.result.is_ok());
    is_read.then(|| done.iter().flat_map(|io| io.buffer.as_slice()).copied().collect())
}

/// The starts of partitions, by the table in the first MiB of a disk. The table is untrusted: a
/// wrong table only costs reads of wrong areas.
fn partition_starts(head: &[u8]) -> Vec<u64> {
    let word = |at: usize| {
        head.get(at..at + 4)
            .map(|bytes| u64::from(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])))
    };
    let long = |at: usize| Some(word(at)? | word(at + 4)? << 32);
    for block in [SECTOR, 4 * KIB] {
        let header = block as usize;
        if !head.get(header..).is_some_and(|head| head.starts_with(b"EFI PART")) {
            continue;
        }
        let entries = long(header + 72).and_then(|at| usize::try_from(at.checked_mul(block)?).ok());
        let (Some(at), Some(step)) = (entries, word(header + 84)) else { continue };
        let starts = (0..128).filter_map(|nth| long(at.checked_add(nth * step as usize + 32)?));
        let starts = starts.filter(|start| *start > 0).take(PARTITIONS_MAX);
        return starts.filter_map(|start| start.checked_mul(block)).map(whole).collect();
    }
    if head.get(510..512) != Some(&[0x55, 0xAA]) {
        return Vec::new();
    }
    let starts = (0..4).filter_map(|nth| word(446 + 16 * nth + 8));
    starts.filter(|start| *start > 0).map(|start| whole(start * SECTOR)).collect()
}

/// A place at a boundary that every device can read from.
fn whole(at: u64) -> u64 {
    at / SAMPLE_BYTES * SAMPLE_BYTES
}

#[cfg(test)]
mod tests;
