//! The binding of the devices to each other: a mark in the superblock's uuid, which the kernel
//! neither reads nor changes.
//!
//! | bytes | content |
//! |---|---|
//! | 0..4 | `udm2`: the mark and its version |
//! | 4..15 | 11 digits of base64: CRC-32C of the cache device's identity, then of the origin's |
//! | 15 | zero |
//!
//! The mark is text that ends with a zero, because Debian's `cache_dump` prints the uuid unescaped.
//!
//! Metadata without a mark is accepted for any devices, and gets a mark when it is served. A uuid
//! that is not a mark is not changed.

use super::metadata::Superblock;
use crate::base::crc::crc32c_raw;
use crate::disk::{Disk, Match, Recorded, Refused, Same};
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;

const MAGIC: [u8; 4] = *b"udm2";
/// The digits of base64, each for six bits.
pub(super) const DIGITS: &[u8; 64] =
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
/// Digits of a mark, the highest bits first.
const MARK_DIGITS: usize = 11;

/// The devices of a cache.
#[derive(Clone, Debug)]
pub struct Devices {
    /// The metadata device.
    pub metadata: Arc<dyn Disk>,
    /// The cache device.
    pub cache: Arc<dyn Disk>,
    /// The origin.
    pub origin: Arc<dyn Disk>,
}

/// Names the devices in the superblock, if it has a place for that. Returns whether it named them
/// already, or cannot.
pub(super) fn put_mark(devices: &Devices, superblock: &mut Superblock) -> bool {
    let mark = mark_of(devices);
    let uuid = &mut superblock.fields.uuid;
    if *uuid == mark || !is_markable(uuid) {
        return true;
    }
    *uuid = mark;
    false
}

/// The same for metadata that has a mark.
pub(super) fn renew_mark(devices: &Devices, superblock: &mut Superblock) -> bool {
    sums_of(&superblock.fields.uuid).is_none() || put_mark(devices, superblock)
}

/// The mark of metadata whose cache device and origin these are.
pub(super) fn mark_of(devices: &Devices) -> [u8; 16] {
    let sums = u64::from(sum(&*devices.cache)) << 32 | u64::from(sum(&*devices.origin));
    let mut mark = [0; 16];
    mark[..4].copy_from_slice(&MAGIC);
    for (nth, digit) in mark[4..4 + MARK_DIGITS].iter_mut().enumerate() {
        let shift = 6 * (MARK_DIGITS - 1 - nth);
        *digit = DIGITS[(sums >> shift & 63) as usize];
    }
    mark
}

/// The sums of the cache device's identity and of the origin's, if this uuid is a mark.
fn sums_of(uuid: &[u8; 16]) -> Option<[u32; 2]> {
    let digits = uuid.strip_prefix(&MAGIC)?.strip_suffix(&[0])?;
    let values = digits.iter().map(|digit| DIGITS.iter().position(|known| known == digit));
    let sums =
        values.into_iter().try_fold(0_u128, |sums, value| Some(sums << 6 | value? as u128))?;
    let sums = u64::try_from(sums).ok()?;
    Some([(sums >> 32) as u32, sums as u32])
}

fn sum(disk: &dyn Disk) -> u32 {
    sum_of(disk.limits().identity.words())
}

fn sum_of(words: &str) -> u32 {
    !crc32c_raw(u32::MAX, words.as_bytes())
}

/// Whether metadata with this uuid is to be marked, or marked again.
pub(super) fn is_markable(uuid: &[u8; 16]) -> bool {
    *uuid == [0; 16] || sums_of(uuid).is_some()
}

/// Compares the cache device and the origin with the mark, if there is a mark. An origin that is
/// smaller than at the orderly end of its cache is another one; the mark does not record the size.
pub(super) fn compare(devices: &Devices, superblock: &Superblock) -> [Match; 2] {
    let of = |disk: &dyn Disk, recorded| {
        disk.limits().identity.compare(|words| sum_of(words) == recorded)
    };
    let [cache, origin] = match sums_of(&superblock.fields.uuid) {
        Some([cache, origin]) => [of(&*devices.cache, cache), of(&*devices.origin, origin)],
        None => [Match::Possible; 2],
    };
    let known_bytes = superblock.note.map_or(0, |note| note.bytes);
    let is_smaller = devices.origin.limits().size_bytes < known_bytes;
    [cache, if is_smaller { Match::Other } else { origin }]
}

/// An error if the metadata belongs to other devices. `remedy`: the option that accepts it
/// nevertheless.
pub fn check(devices: &Devices, superblock: &Superblock, remedy: &str) -> Result<()> {
    let [cache, origin] = compare(devices, superblock);
    let known_bytes = superblock.note.map(|note| note.bytes);
    let disks = [
        (&devices.cache, "cache device", cache, None),
        (&devices.origin, "origin", origin, known_bytes),
    ];
    let mut refusals: Vec<String> = Vec::new();
    for (disk, role, identity, known_bytes) in disks {
        let recorded = Recorded { identity, stamp: None, bytes: 0 };
        let refused = Refused {
            cache: &devices.metadata.limits().name,
            disk: disk.limits(),
            role,
            known: "",
            known_bytes,
            dirty: "",
            remedy,
        };
        refusals.extend(Same::of(disk, &recorded).refusal(&refused));
    }
    if refusals.is_empty() {
        return Ok(());
    }
    Err(Error::new(Kind::Refused, refusals.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::origin::note_of;
    use crate::disk::RamDisk;

    #[test]
    fn a_mark_is_text_and_names_both_devices() {
        let disk = || -> Arc<dyn Disk> { Arc::new(RamDisk::new(4096, 512)) };
        let devices = Devices { metadata: disk(), cache: disk(), origin: disk() };
        let mark = mark_of(&devices);
        let text = mark.iter().position(|byte| *byte == 0).map(|end| &mark[..end]).unwrap();
        assert!(text.len() == 15 && text.iter().all(u8::is_ascii_graphic), "{mark:?}");
        let sums = [sum(&*devices.cache), sum(&*devices.origin)];
        assert_eq!(sums_of(&mark), Some(sums));
        for wrong in [*b"udm2::::::::::: ", *b"udm2//////////\n\0", *b"udm2///////////\0"] {
            assert_eq!(sums_of(&wrong), None);
        }
    }

    #[test]
    fn an_origin_that_became_smaller_is_another_one() {
        let disk = |bytes| -> Arc<dyn Disk> { Arc::new(RamDisk::new(bytes, 512).with_evidence()) };
        let with = |bytes| Devices { metadata: disk(512), cache: disk(512), origin: disk(bytes) };
        let mut superblock = Superblock::fresh(2, 64);
        superblock.fields.uuid = mark_of(&with(8192));
        superblock.note = note_of(&with(8192).origin);
        for (bytes, origin) in
            [(8192, Match::Exact), (16384, Match::Exact), (8192 - 512, Match::Other)]
        {
            assert_eq!(compare(&with(bytes), &superblock), [Match::Exact, origin], "{bytes}");
            let checked = check(&with(bytes), &superblock, "say so");
            assert_eq!(checked.is_err(), origin == Match::Other, "{checked:?}");
        }
        superblock.fields.uuid = [0; 16];
        assert_eq!(compare(&with(512), &superblock), [Match::Possible, Match::Other]);
        // The server was killed.
        superblock.note = None;
        assert_eq!(compare(&with(512), &superblock), [Match::Possible; 2]);
    }
}
