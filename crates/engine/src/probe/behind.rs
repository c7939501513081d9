//! Data beyond the places that a format looks at. Blocks of a new cache would overwrite it.
//!
//! 1. udm reads all allocated ranges of a file, up to [`READ_BYTES_MAX`].
//! 2. udm reads samples of the rest, and of other devices: [`SAMPLE_BYTES`] at each whole MiB of
//!    the first [`DENSE_BYTES`], and at [`SPREAD`] to twice as many places across the device.
//! 3. The positions of samples count from the front of the whole device, so that a part of the
//!    device has the same samples. A wipe clears all data that this search would find.
//!
//! Devices without a path, which only tests use, are not searched.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};

use super::Load;
use crate::bio::Op;
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Result};
use crate::pmem::Pmem;
use crate::sync::Arc;
use crate::units::{GIB, MIB};

/// The most bytes of a file that are read.
const READ_BYTES_MAX: u64 = GIB;
/// Bytes of a sample, and of a block that is checked as a whole.
const SAMPLE_BYTES: u64 = 4096;
/// The front of a device, with more samples.
const DENSE_BYTES: u64 = 256 * MIB;
/// Samples across the device, at least, if it has as many MiB.
const SPREAD: u64 = 1024;
/// Bytes of one read of a file.
const PIECE_BYTES: u64 = MIB;

/// A part of a device, opened once more.
struct Part {
    file: File,
    is_file: bool,
    /// Bytes of the whole device.
    whole_bytes: u64,
    /// Its first byte on the device, and the one after its last.
    first: u64,
    end: u64,
}

impl Part {
    fn open((path, begins_at): (String, u64), start: u64, size: u64) -> Option<Part> {
        let file = File::open(path).ok()?;
        let is_file = file.metadata().is_ok_and(|meta| meta.is_file());
        let end = begins_at.checked_add(size)?;
        let whole_bytes = seek(&file, SeekFrom::End(0)).unwrap_or(0).max(end);
        Some(Part { file, is_file, whole_bytes, first: begins_at + start, end })
    }

    /// Places on the device where samples begin.
    fn samples(&self) -> Vec<u64> {
        let step = (self.whole_bytes / SPREAD / 2).next_power_of_two().max(MIB);
        let dense = (0..DENSE_BYTES).step_by(MIB as usize);
        let spread = (0..self.whole_bytes).step_by(step as usize);
        let mut places: Vec<u64> = dense.chain(spread).collect();
        places.sort_unstable();
        places.dedup();
        places.retain(|at| (self.first..self.end).contains(at) && at + SAMPLE_BYTES <= self.end);
        places
    }

    /// First byte and length of the allocated ranges of a file.
    fn extents(&self) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        let mut at = self.first;
        while at < self.end {
            let Ok(data) = seek(&self.file, SeekFrom::Data(at)) else { break };
            let hole = seek(&self.file, SeekFrom::Hole(data)).unwrap_or(self.end);
            let until = hole.min(self.end);
            if data >= until {
                break;
            }
            found.push((data, until - data));
            at = until;
        }
        found
    }
}

/// The first byte of data that is found from byte `start` of a part of `size` bytes on; none
/// without data or without a path. `is_known`: whether a block of 4 KiB, with its number, may be
/// overwritten.
pub(super) fn find(
    place: Option<(String, u64)>,
    (start, size): (u64, u64),
    load: Load<'_>,
    is_known: &dyn Fn(u64, &[u8]) -> bool,
) -> Option<u64> {
    let part = Part::open(place?, start, size)?;
    let begins_at = part.first - start;
    let read = |at: u64, into: &mut [u8]| {
        part.file.read_exact_at(into, at).is_ok() || load(at - begins_at, into)
    };
    let mut bytes = Vec::new();
    let mut judge = |at: u64, len: u64| {
        bytes.resize(len as usize, 0);
        // Unreadable data does not count as data.
        let is_read = read(at, &mut bytes);
        let mut blocks = bytes.chunks(SAMPLE_BYTES as usize).zip(0_u64..).filter(|_| is_read);
        let is_data = |(block, nth): &(&[u8], u64)| {
            let number = (at - begins_at) / SAMPLE_BYTES + nth;
            has_data(block) && !is_known(number, block)
        };
        blocks.find(is_data).map(|(_, nth)| at - begins_at + nth * SAMPLE_BYTES)
    };
    let mut samples = part.samples();
    if part.is_file {
        let extents = part.extents();
        let mut left = READ_BYTES_MAX;
        for &(at, len) in &extents {
            // Blocks are aligned to the start of the part.
            let end = at + len;
            let mut at = begins_at + (at - begins_at) / SAMPLE_BYTES * SAMPLE_BYTES;
            while at < end && left > 0 {
                let len = PIECE_BYTES.min(part.end - at);
                if let Some(found) = judge(at, len) {
                    return Some(found);
                }
                at += len;
                left = left.saturating_sub(len);
            }
        }
        if left > 0 {
            return None;
        }
        samples.retain(|at| extents.iter().any(|(from, len)| (*from..from + len).contains(at)));
    }
    samples.into_iter().find_map(|at| judge(at, SAMPLE_BYTES))
}

/// Whether there is a byte other than zero. The compiler can vectorize its steps.
fn has_data(block: &[u8]) -> bool {
    block.chunks(64).any(|part| part.iter().fold(0, |all, byte| all | byte) != 0)
}

/// Clears the data of a wiped disk that `find` would find: from byte `start` on, it restores the
/// holes of a file, and zeroes the samples of a device.
pub fn blank_disk(disk: &Arc<dyn Disk>, start: u64) -> Result<()> {
    let size = disk.limits().size_bytes;
    let place = disk.open_as().map(|path| (path, disk.begins_at()));
    let Some(part) = place.and_then(|place| Part::open(place, start, size)) else { return Ok(()) };
    let begins_at = part.first - start;
    let ranges = match part.is_file {
        true => part.extents(),
        false => part.samples().into_iter().map(|at| (at, SAMPLE_BYTES)).collect(),
    };
    let unit = u64::from(disk.limits().block_bytes);
    let mut ios = Vec::new();
    for (at, len) in ranges {
        let (from, to) = (at - begins_at, at - begins_at + len);
        let (from, to) = (from.next_multiple_of(unit), to / unit * unit);
        for at in (from..to).step_by(GIB as usize) {
            ios.push(DiskIo::bare(disk, Op::WriteZeroes, at, GIB.min(to - at), 0));
        }
    }
    let flush = vec![DiskIo::bare(disk, Op::Flush, 0, 0, 0)];
    let mut done = disk.carry_out(ios).into_iter().chain(disk.carry_out(flush));
    done.try_for_each(|io| io.result).map_err(|status| {
        Error::new(Kind::Io, format!("{}: wiping a cache: {status}", disk.limits().name))
    })
}

/// The same for memory that cannot be opened as a disk.
pub fn blank_pmem(pmem: &dyn Pmem, start: u64) -> Result<()> {
    let size = pmem.len_bytes();
    let place = pmem.open_as().map(|path| (path, pmem.begins_at()));
    let Some(part) = place.and_then(|place| Part::open(place, start, size)) else { return Ok(()) };
    let begins_at = part.first - start;
    part.samples().into_iter().for_each(|at| pmem.zero(at - begins_at, SAMPLE_BYTES));
    pmem.drain().and_then(|()| pmem.sync()).map_err(|status| {
        Error::new(Kind::Io, format!("{}: wiping a cache: {status}", pmem.medium().name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::KIB;

    /// A sparse file of `size` bytes, and its path.
    fn file(size: u64) -> (tempfile::NamedTempFile, String) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(size).unwrap();
        let path = file.path().to_str().unwrap().to_owned();
        (file, path)
    }

    fn found(path: &str, begins_at: u64, start: u64, size: u64) -> Option<u64> {
        let place = Some((path.to_owned(), begins_at));
        find(place, (start, size), &|_, _| false, &|_, _| false)
    }

    #[test]
    fn data_in_a_file_is_found_wherever_it_is() {
        const SIZE: u64 = 64 * MIB;
        for at in [0, 5000, 20 * MIB + 12_345, SIZE - 1] {
            let (file, path) = file(SIZE);
            assert_eq!(found(&path, 0, 0, SIZE), None);
            // Allocated zeroes do not count as data.
            file.as_file().write_all_at(&[0; 100_000], 9 * MIB).unwrap();
            assert_eq!(found(&path, 0, 0, SIZE), None);
            file.as_file().write_all_at(&[7], at).unwrap();
            assert_eq!(found(&path, 0, 0, SIZE), Some(at / SAMPLE_BYTES * SAMPLE_BYTES));
            // In a part, the search begins at the part's front and ends at its end.
            let (front, part) = (4 * MIB, 32 * MIB);
            let is_within = (front..front + part).contains(&at);
            let expected = is_within.then(|| (at - front) / SAMPLE_BYTES * SAMPLE_BYTES);
            assert_eq!(found(&path, front, 0, part), expected);
            let is_after = at >= MIB;
            assert_eq!(found(&path, 0, MIB, SIZE).is_some(), is_after, "from byte 1 MiB on");
        }
    }

    #[test]
    fn what_is_known_may_be_overwritten() {
        let (file, path) = file(MIB);
        file.as_file().write_all_at(&[7; 4096], 64 * KIB).unwrap();
        let place = || Some((path.clone(), 0));
        let is_known = |number: u64, block: &[u8]| number == 16 && *block == [7; 4096];
        assert_eq!(find(place(), (0, MIB), &|_, _| false, &is_known), None);
        file.as_file().write_all_at(&[7; 4096], 68 * KIB).unwrap();
        assert_eq!(find(place(), (0, MIB), &|_, _| false, &is_known), Some(68 * KIB));
        assert_eq!(find(None, (0, MIB), &|_, _| false, &is_known), None);
    }

    #[test]
    fn a_part_has_the_samples_of_the_whole_device() {
        let (_file, path) = file(8 * GIB);
        let part = |begins_at: u64, size: u64| {
            Part::open((path.clone(), begins_at), 0, size).unwrap().samples()
        };
        let whole = part(0, 8 * GIB);
        assert!((SPREAD..=2 * SPREAD + 256).contains(&(whole.len() as u64)), "{}", whole.len());
        let (begins_at, size) = (5 * MIB, 3 * GIB);
        let range = begins_at..begins_at + size;
        let expected: Vec<u64> = whole.iter().copied().filter(|at| range.contains(at)).collect();
        assert_eq!(part(begins_at, size), expected);
        assert!(whole.windows(2).all(|pair| pair[0] < pair[1]));
        assert!((0..256).all(|nth| whole.contains(&(nth * MIB))));
    }
}
