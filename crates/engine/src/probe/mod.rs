//! Finds foreign content on a device: file systems, RAID members, partition tables, caches. Both
//! devices are probed before a format.
//!
//! 1. Two probes are used: the system's libblkid, where it is installed and the device has a path,
//!    and a table of our own, which also knows formats and places that libblkid does not know
//!    (dm-cache, dm-pcache, the end of a device).
//! 2. A probe never writes. Unreadable bytes count as bytes without a signature.
//! 3. A device without findings is not necessarily empty: a format also checks that the bytes that
//!    it will write are zero, and searches for data beyond them (`behind`).

use std::collections::BTreeMap;

mod behind;
mod beside;
mod blkid;
mod signatures;

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::pmem::Pmem;
use crate::sync::Arc;
use crate::units::{KIB, SECTOR};

/// A signature that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The name of the format, as in libblkid if libblkid knows the format: `ext4`, `LVM2_member`,
    /// `gpt`.
    pub name: String,
    /// The first byte of the signature.
    pub at: u64,
    /// Whether it is a cache's own, so that the device is a cache device.
    pub is_cache: bool,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (byte {})", self.name, self.at)
    }
}

/// The findings on a persistent memory that is to be formatted from byte `start` on, and around it.
pub fn pmem(pmem: &dyn Pmem, start: u64) -> Vec<Finding> {
    let load = |at: u64, into: &mut [u8]| pmem.load(at, into).is_ok();
    let place = pmem.open_as().map(|path| (path, pmem.begins_at()));
    with_beside(pmem.len_bytes(), start, place, &load)
}

/// The same of a disk.
pub fn cache_disk(disk: &Arc<dyn Disk>, start: u64) -> Vec<Finding> {
    let load = |at: u64, into: &mut [u8]| load_disk(disk, at, into);
    let place = disk.open_as().map(|path| (path, disk.begins_at()));
    with_beside(disk.limits().size_bytes, start, place, &load)
}

fn with_beside(
    size: u64,
    start: u64,
    place: Option<(String, u64)>,
    load: Load<'_>,
) -> Vec<Finding> {
    let mut found = look(size, start, place.clone(), load);
    for finding in beside::within(size, load) {
        if finding.at >= start && found.iter().all(|known| known.at.abs_diff(finding.at) > 8192) {
            found.push(finding);
        }
    }
    found.extend(place.iter().flat_map(|(path, at)| beside::around(path, *at, size)));
    found
}

/// The findings on a disk from byte `start` on.
pub fn disk(disk: &Arc<dyn Disk>, start: u64) -> Vec<Finding> {
    let load = |at: u64, into: &mut [u8]| load_disk(disk, at, into);
    let place = disk.open_as().map(|path| (path, disk.begins_at()));
    look(disk.limits().size_bytes, start, place, &load)
}

/// Data on a persistent memory that is to be formatted from byte `start` on, where neither a known
/// signature nor a place that the format writes shows it.
pub fn data_on_pmem(pmem: &dyn Pmem, start: u64) -> Option<u64> {
    let load = |at: u64, into: &mut [u8]| pmem.load(at, into).is_ok();
    let place = pmem.open_as().map(|path| (path, pmem.begins_at()));
    behind::find(place, (start, pmem.len_bytes()), &load, &|_, _| false)
}

/// The same for a disk. `is_known`: whether a block of 4 KiB, with its number, may be overwritten.
pub fn data_on_disk(
    disk: &Arc<dyn Disk>,
    start: u64,
    is_known: &dyn Fn(u64, &[u8]) -> bool,
) -> Option<u64> {
    let load = |at: u64, into: &mut [u8]| load_disk(disk, at, into);
    let place = disk.open_as().map(|path| (path, disk.begins_at()));
    behind::find(place, (start, disk.limits().size_bytes), &load, is_known)
}

/// The refusal to format over such data.
pub fn data_found(at: u64) -> String {
    format!("it holds data (byte {at}): --force-format overwrites it")
}

/// The sentence about `found`, with the first few of them.
pub fn listed(found: &[Finding]) -> String {
    const SHOWN: usize = 3;
    let shown: Vec<String> = found.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = if found.len() > SHOWN { " and more" } else { "" };
    format!("{}{more}", shown.join(", "))
}

/// The reason to refuse to format a device, if there is one. `found`: the findings on it.
/// `is_blank`: all bytes that the format would write are zero. `origin`: the findings on the slow
/// device. `order`: the devices in the order of the table's words.
pub fn objection(
    found: &[Finding],
    is_blank: bool,
    origin: &[Finding],
    (origin_name, order): (&str, &str),
) -> Option<String> {
    let cache = origin.iter().find(|finding| finding.is_cache);
    let swapped = |why: &str| {
        format!("{origin_name} {why}: the two devices may be swapped (the order is {order})")
    };
    let holds = match (found, is_blank) {
        ([], true) => {
            let cache = cache?;
            let what = swapped(&format!("holds {cache}"));
            return Some(format!("it is empty, and {what}; --force-format formats it anyway"));
        }
        ([], false) => "it is not empty where the format would write".to_owned(),
        (found, _) => format!("it holds {}", listed(found)),
    };
    let has_contents = found.iter().any(|finding| !finding.is_cache);
    let hint = match cache {
        Some(cache) => format!("; {}", swapped(&format!("holds {cache}"))),
        None if has_contents && origin.is_empty() => {
            format!("; {}", swapped("holds no known format"))
        }
        None => String::new(),
    };
    Some(format!("{holds}: it may hold data; --force-format overwrites it{hint}"))
}

/// Reads from a device; false if that fails.
type Load<'a> = &'a dyn Fn(u64, &mut [u8]) -> bool;

/// Pieces of a device, read once.
struct Window<'a> {
    size: u64,
    load: Load<'a>,
    pieces: BTreeMap<u64, Option<Vec<u8>>>,
}

/// Bytes of a piece.
const PIECE: u64 = 128 * KIB;

impl Window<'_> {
    /// The bytes at `at`; none if the device ends before, or they cannot be read.
    fn bytes(&mut self, at: u64, len: usize) -> Option<Vec<u8>> {
        let end = at.checked_add(len as u64).filter(|end| *end <= self.size)?;
        let mut bytes = Vec::with_capacity(len);
        let mut at = at;
        while at < end {
            let first = at / PIECE * PIECE;
            let piece = self.piece(first)?;
            let to = (end - first).min(piece.len() as u64);
            bytes.extend_from_slice(&piece[(at - first) as usize..to as usize]);
            at = first + to;
        }
        Some(bytes)
    }

    fn piece(&mut self, first: u64) -> Option<&Vec<u8>> {
        let (size, load) = (self.size, self.load);
        let piece = self.pieces.entry(first).or_insert_with(|| {
            let mut bytes = vec![0; PIECE.min(size - first) as usize];
            load(first, &mut bytes).then_some(bytes)
        });
        piece.as_ref()
    }
}

/// `place`: the path where a library can open the device itself, and the byte where the part begins
/// on it.
fn look(size: u64, start: u64, place: Option<(String, u64)>, load: Load<'_>) -> Vec<Finding> {
    let mut window = Window { size, load, pieces: BTreeMap::new() };
    let mut found = signatures::look(&mut window);
    // The names of the system's library replace udm's own names for the same finding.
    let others = place.and_then(|(path, begins_at)| blkid::look(&path, begins_at, size));
    for finding in others.into_iter().flatten() {
        match found.iter().position(|known| known.at == finding.at) {
            Some(nth) if found[nth].name.starts_with(&finding.name) => {}
            Some(nth) => found[nth].name = finding.name,
            None if found.iter().any(|known| known.name == finding.name) => {}
            None => found.push(finding),
        }
    }
    found.retain(|finding| finding.at >= start);
    found.sort_by_key(|finding| finding.at);
    found
}

/// Reads the whole blocks around the wanted bytes.
fn load_disk(disk: &Arc<dyn Disk>, at: u64, into: &mut [u8]) -> bool {
    let unit = u64::from(disk.limits().block_bytes).max(SECTOR);
    let first = at / unit * unit;
    let end = (at + into.len() as u64).next_multiple_of(unit).min(disk.limits().size_bytes);
    let buffer = Buffer::zeroed((end - first) as usize);
    let io = DiskIo::new(disk, Op::Read, first, buffer, 0);
    let from = (at - first) as usize;
    disk.carry_out(vec![io]).iter().all(|io| {
        let is_good = io.result.is_ok() && io.buffer.len() >= from + into.len();
        if is_good {
            into.copy_from_slice(&io.buffer.as_slice()[from..from + into.len()]);
        }
        is_good
    })
}

pub use behind::{blank_disk, blank_pmem};

#[cfg(test)]
mod tests;
