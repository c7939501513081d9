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
//! 4. A disk may offer other evidence than when its stamp was made: another kernel knows more about
//!    its file, or the file was used as a whole and is now used in part. Then the disk gets a stamp
//!    of the old kind. The contents can always be compared. If a file is now known by its place
//!    only, its times may be the mount's: if they differ, it is unknown whether the file was
//!    changed.
//! 5. A part of a stamp has 19 to 21 bits, so a change is missed once in 500,000 times at most.
//! 6. A server that dies leaves no stamp, and the kernel writes none: then changes cannot be
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
/// The coarsest clock of a kernel that stamps files.
const TICK: Duration = Duration::from_millis(20);
/// The step of times that a file system stores in whole seconds: FAT has two.
const COARSE_TICK: Duration = Duration::from_secs(2);

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
        /// Its length.
        bytes: u64,
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

/// The result of comparing a stamp with a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compared {
    /// No difference.
    Alike,
    /// The disk was changed: the difference in a few words.
    Differs(&'static str),
    /// The disk does not have enough evidence.
    Unknown,
}

impl Stamp {
    /// The stamp of a disk at rest, whose first `bytes` count if its content does. The disk is
    /// flushed first. `None` if the disk offers no evidence.
    pub fn at_end(disk: &Arc<dyn Disk>, bytes: u64) -> Option<Stamp> {
        let flushed = disk.carry_out(vec![DiskIo::bare(disk, Op::Flush, 0, 0, 0)]);
        let is_flushed = flushed.iter().all(|io| io.result.is_ok());
        is_flushed.then(|| Stamp::of(disk, disk.evidence(true), bytes, true))?
    }

    /// The stamp that this evidence gives for a disk's first `bytes`. `is_end`: of a disk at rest.
    fn of(disk: &Arc<dyn Disk>, evidence: Evidence, bytes: u64, is_end: bool) -> Option<Stamp> {
        match evidence {
            Evidence::Nothing => None,
            Evidence::File { bytes, mtime, ctime } => {
                if is_end {
                    outwait_clock(mtime, ctime);
                }
                let sums = [
                    sum(&bytes.to_le_bytes()),
                    sum(&mtime.to_le_bytes()),
                    sum(&ctime.to_le_bytes()),
                ];
                Some(Stamp::new(IS_THERE, sums))
            }
            Evidence::Mounted { mount, mtime, ctime, .. } => {
                if is_end {
                    outwait_clock(mtime, ctime);
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

    /// Compares it with the first `bytes` of `disk`. `is_moved`: the disk is a copy, whose ctime is
    /// not comparable.
    pub(super) fn compare(self, disk: &Arc<dyn Disk>, bytes: u64, is_moved: bool) -> Compared {
        let evidence = disk.evidence(false);
        let like = match (self.0 & (IS_OF_CONTENT | IS_OF_MOUNT), evidence) {
            (_, Evidence::Nothing) => return Compared::Unknown,
            (IS_OF_CONTENT, _) => Evidence::Content,
            (IS_OF_MOUNT, Evidence::File { bytes, mtime, ctime }) => {
                Evidence::Mounted { mount: None, bytes, mtime, ctime }
            }
            // Without times, and without a mount in which they would count.
            (IS_OF_MOUNT, Evidence::Content) => {
                Evidence::Mounted { mount: None, bytes: 0, mtime: 0, ctime: 0 }
            }
            (IS_OF_MOUNT, mounted) => mounted,
            (_, Evidence::Mounted { bytes, mtime, ctime, .. }) => {
                Evidence::File { bytes, mtime, ctime }
            }
            // It is longer than the used part.
            (_, Evidence::Content) => {
                return Compared::Differs("it is of another kind: a device, or a part of a file");
            }
            (_, file) => file,
        };
        let Some(now) = Stamp::of(disk, like, bytes, false) else { return Compared::Unknown };
        let are_mounts = matches!(evidence, Evidence::Mounted { .. });
        match self.difference(now, is_moved) {
            None => Compared::Alike,
            Some(_) if are_mounts && self.is_of_times() && self.part(0) == now.part(0) => {
                Compared::Unknown
            }
            Some(why) => Compared::Differs(why),
        }
    }

    /// Whether it consists of the length and the times of a file.
    fn is_of_times(self) -> bool {
        self.0 & (IS_OF_CONTENT | IS_OF_MOUNT) == 0
    }

    fn part(self, nth: usize) -> u64 {
        let (at, len) = PARTS[nth];
        self.0 >> at & ((1 << len) - 1)
    }

    /// The difference between two stamps of one kind.
    fn difference(self, now: Stamp, is_moved: bool) -> Option<&'static str> {
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
        let differs = [0, 1, 2].map(|nth| self.part(nth) != now.part(nth));
        if self.0 & IS_OF_MOUNT != 0 {
            let [areas, mount, times] = differs;
            let is_known = now.part(1) != u64::from(UNKNOWN_MOUNT);
            return match (areas, mount || is_moved || !is_known, times) {
                (true, ..) => Some("its content has changed"),
                (false, false, true) => Some("it was modified: its times differ"),
                _ => None,
            };
        }
        let compared = if is_moved && !is_of_content { 2 } else { PARTS.len() };
        let mut pairs = differs.into_iter().zip(words).take(compared);
        pairs.find(|(differs, _)| *differs).map(|(_, words)| words)
    }
}

fn sum(bytes: &[u8]) -> u32 {
    !crc32c_raw(u32::MAX, bytes)
}

/// A later change gets a later time, even by a clock that ticks slowly, or in whole seconds.
fn outwait_clock(mtime: i128, ctime: i128) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let left = clock_wait(mtime, ctime, now.as_nanos() as i128);
    if !left.is_zero() {
        std::thread::sleep(left);
    }
}

/// How long to wait at `now` for that.
fn clock_wait(mtime: i128, ctime: i128, now: i128) -> Duration {
    let is_coarse = [mtime, ctime].iter().all(|time| time % 1_000_000_000 == 0);
    let tick = if is_coarse { COARSE_TICK } else { TICK };
    // Before the last change: the clock of a server of files is ahead.
    let age = (now - mtime.max(ctime)).max(0);
    let age = Duration::from_nanos(u64::try_from(age).unwrap_or(u64::MAX));
    tick.saturating_sub(age)
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
