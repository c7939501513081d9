//! Formatting a cache device, and deciding whether that is allowed.
//!
//! The kernel formats any device with zeroes for magic and version. udm does so only if the device
//! holds no other data: the whole front of the device must be zero, or the user accepts the loss of
//! its content. A format first stores a mark, so that a format of ours that was cut short is
//! recognised and simply repeated. A kernel's format that was cut short leaves magic 0 and version
//! 1, and no trace of its origin. udm and the kernel both refuse such a device, unless told to
//! start over.

use zerocopy::IntoBytes;

use crate::common::contents::NOT_BY_FORCE;
use crate::disk::Disk;
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::probe::{self, Finding};
use crate::sync::Arc;
use crate::units::{KIB, MIB};

use super::inspect::inspect;
use super::layout::{
    ENTRY_BYTES, Entry, FORMAT_MARK, Geometry, GeometryError, LABEL_AT, MAGIC, MAGIC_BYTES,
    SUPERBLOCK_BYTES, Superblock,
};
use super::media::Medium;

/// A device counts as empty when this many bytes from its start on are zero, and all later bytes
/// that a format writes.
pub(super) const EMPTY_BYTES: u64 = 64 * KIB;
/// The fields by which the kernel recognises a cache; eight bytes, which no crash tears.
pub(super) const MAGIC_AND_VERSION_BYTES: usize = 8;
/// Entries are written this many bytes at a time.
const CHUNK_BYTES: u64 = 16 * MIB;

/// Ensures that the device holds a writecache from byte `start` on: formats it if that can do no
/// harm. Returns whether it formatted the device.
pub fn prepare(
    medium: &Medium,
    start: u64,
    block_bytes: u32,
    is_forced: bool,
    origin: &Arc<dyn Disk>,
) -> Result<bool> {
    let raw = medium.size_bytes().saturating_sub(start);
    if raw < SUPERBLOCK_BYTES {
        return Err(cannot_format(medium, GeometryError::TooSmall, raw));
    }
    let superblock = medium.superblock(start)?;
    if is_forced {
        refuse_dirty(medium, start, &superblock)?;
        return format(medium, start, block_bytes).map(|()| true);
    }
    if superblock.is_of_cut_format() {
        return format(medium, start, block_bytes).map(|()| true);
    }
    if superblock.magic.get() != 0 || superblock.version.get() != 0 {
        // The checks of a superblock report its defects; for other content, the probe reports what
        // it recognises.
        let found = if superblock.magic.get() == MAGIC { vec![] } else { medium.probe(start) };
        return match found.is_empty() {
            true => Ok(false),
            false => refuse(medium, &found, false, origin, "Invalid magic in the superblock")
                .map(|()| false),
        };
    }
    let geometry = Geometry::of_size(start, raw, block_bytes)
        .map_err(|error| cannot_format(medium, error, raw))?;
    let end = (start + EMPTY_BYTES.min(raw)).max(geometry.entry_at(geometry.blocks));
    let is_blank = is_zero(medium, start, end)?;
    let words = "it is not a writecache";
    refuse(medium, &medium.probe(start), is_blank, origin, words)?;
    if let Some(at) = medium.data_behind(start) {
        let why = probe::data_found(at);
        return Err(medium.error(Kind::Refused, format_args!("{words}: {why}")));
    }
    format(medium, start, block_bytes).map(|()| true)
}

/// Refuses to format over the content of a device that is not a writecache, unless asked to.
fn refuse(
    medium: &Medium,
    found: &[Finding],
    is_blank: bool,
    origin: &Arc<dyn Disk>,
    words: &str,
) -> Result<()> {
    let names = (&*origin.limits().name, "writecache MODE ORIGIN CACHE-DEVICE");
    let objection = probe::objection(found, is_blank, &probe::disk(origin, 0), names);
    let refusal = |why| medium.error(Kind::Refused, format_args!("{words}: {why}"));
    objection.map_or(Ok(()), |why| Err(refusal(why)))
}

/// Whether all bytes of the range are zero.
fn is_zero(medium: &Medium, start: u64, end: u64) -> Result<bool> {
    let mut at = start;
    let mut bytes = vec![0; medium.chunk_bytes().min(end - start) as usize];
    while at < end {
        let bytes = &mut bytes[..medium.chunk_bytes().min(end - at) as usize];
        medium.load(at, bytes)?;
        if bytes.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
        at += bytes.len() as u64;
    }
    Ok(true)
}

/// Even by force, dirty blocks that only this cache has are not discarded.
fn refuse_dirty(medium: &Medium, start: u64, superblock: &Superblock) -> Result<()> {
    if superblock.magic.get() != MAGIC {
        return Ok(());
    }
    let report = inspect(medium, start, None).map_err(|error| {
        let what = "it is damaged, and may hold dirty data";
        Error::new(error.kind(), format!("{error}; {what}; {NOT_BY_FORCE}"))
    })?;
    let dirty_blocks = report.census.live + report.census.damaged;
    if dirty_blocks == 0 {
        return Ok(());
    }
    let what = format_args!(
        "it holds {dirty_blocks} dirty blocks, which only the cache has; {NOT_BY_FORCE}"
    );
    Err(medium.error(Kind::Refused, what))
}

fn cannot_format(medium: &Medium, error: GeometryError, raw: u64) -> Error {
    let what = match error {
        GeometryError::TooSmall => "it is too small for a block",
        GeometryError::TooLarge => "it has space for more blocks than a cache can have",
    };
    let kind = match error {
        GeometryError::TooSmall => Kind::NoSpace,
        GeometryError::TooLarge => Kind::Invalid,
    };
    medium.error(kind, format_args!("Unable to initialize device: {what} into {raw} bytes"))
}

/// Writes an empty cache; its magic last, when all other bytes are durable.
pub fn format(medium: &Medium, start: u64, block_bytes: u32) -> Result<()> {
    let raw = medium.size_bytes().saturating_sub(start);
    let geometry = Geometry::of_size(start, raw, block_bytes)
        .map_err(|error| cannot_format(medium, error, raw))?;
    let superblock = Superblock::fresh(&geometry);
    medium.reserve()?;
    // The mark is stored first. It destroys only the label of an old cache.
    if !mutants::is(Mutant::FormatUnmarked) {
        medium.store(start + LABEL_AT, &FORMAT_MARK)?;
        medium.settle()?;
    }
    // The old magic must be gone before any other byte changes.
    let mut headless = superblock;
    headless.magic.set(0);
    medium.store(start, &headless.as_bytes()[..MAGIC_AND_VERSION_BYTES])?;
    medium.settle()?;
    medium.store(start, &headless.as_bytes()[..LABEL_AT as usize])?;
    let behind_mark = LABEL_AT as usize + FORMAT_MARK.len();
    medium.store(start + behind_mark as u64, &headless.as_bytes()[behind_mark..])?;
    let table_end = geometry.entry_at(geometry.blocks);
    let chunk = Entry::FRESH.as_bytes().repeat((CHUNK_BYTES / ENTRY_BYTES) as usize);
    let mut at = geometry.entry_at(0);
    while at < table_end {
        // A chunk ends at the end of a disk's block, so that no block is written twice.
        let until =
            table_end.min((at + CHUNK_BYTES) / (64 * KIB) * (64 * KIB)).max(at + ENTRY_BYTES);
        medium.store(at, &chunk[..(until - at) as usize])?;
        at = until;
    }
    medium.settle()?;
    medium.store(start, &superblock.as_bytes()[..MAGIC_BYTES])?;
    medium.settle()?;
    // While the magic is not durable, only the mark shows that this is our format.
    medium.store(start + LABEL_AT, &[0; FORMAT_MARK.len()])?;
    medium.settle()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RamDisk;
    use crate::pmem::Persistence;
    use crate::pmem::sim::SimPmem;

    fn media(bytes: u64) -> [Medium; 2] {
        [
            Medium::Pmem(Arc::new(SimPmem::new(bytes, Persistence::Cpu))),
            Medium::Disk(Arc::new(RamDisk::new(bytes, 512))),
        ]
    }

    fn prepare(medium: &Medium, start: u64, block_bytes: u32, is_forced: bool) -> Result<()> {
        let origin: Arc<dyn Disk> = Arc::new(RamDisk::new(1 << 20, 512));
        super::prepare(medium, start, block_bytes, is_forced, &origin).map(drop)
    }

    fn front(medium: &Medium, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        medium.load(0, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_fresh_cache_has_the_specifications_bytes() {
        for medium in media(64 << 20) {
            prepare(&medium, 0, 4096, false).unwrap();
            let found = front(&medium, 262_144);
            let mut wanted = vec![0; 64];
            wanted[..16]
                .copy_from_slice(&[0x21, 0x93, 0x48, 0x23, 1, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0]);
            wanted[16..18].copy_from_slice(&[0xc0, 0x3f]);
            wanted.resize(261_184, 0xFF);
            assert!(found[..261_184] == wanted[..]);
            let report = inspect(&medium, 0, None).unwrap();
            assert_eq!((report.geometry.blocks, report.census.free), (16_320, 16_320));
            assert_eq!((report.seq_count, report.dirty_bytes), (0, 0));
            prepare(&medium, 0, 4096, false).unwrap();
        }
    }

    #[test]
    fn what_may_hold_data_is_not_formatted() {
        for medium in media(1 << 20) {
            medium.store(100, b"data").unwrap();
            let error = prepare(&medium, 0, 4096, false).unwrap_err();
            assert_eq!(error.kind(), Kind::Refused, "{error}");
            prepare(&medium, 0, 4096, true).unwrap();
            // A kernel's format that was cut short.
            medium.store(0, &[0; 4]).unwrap();
            prepare(&medium, 0, 4096, false).unwrap();
            let error = super::super::inspect::load_geometry(&medium, 0, Some(4096)).unwrap_err();
            assert!(error.to_string().contains("Invalid magic"), "{error}");
            prepare(&medium, 0, 4096, true).unwrap();
            // A live block.
            medium.store(24, &1_u64.to_le_bytes()).unwrap();
            medium.store(64, Entry::new(8, 0).as_bytes()).unwrap();
            let error = prepare(&medium, 0, 4096, true).unwrap_err();
            assert!(error.to_string().contains("1 dirty blocks"), "{error}");
        }
    }

    #[test]
    fn a_cut_format_of_ours_is_repeated_and_nobody_elses() {
        for medium in media(1 << 20) {
            medium.store(LABEL_AT, &FORMAT_MARK).unwrap();
            medium.store(100_000, &[0xFF; 512]).unwrap();
            prepare(&medium, 0, 4096, false).unwrap();
            assert_eq!(inspect(&medium, 0, None).unwrap().census.free, 254);
            assert_eq!(front(&medium, 40)[32..], [0; 8], "the mark goes with the end");
            // A complete cache, of whose format only the end is missing: udm does not change it.
            medium.store(24, &1_u64.to_le_bytes()).unwrap();
            medium.store(64, Entry::new(8, 0).as_bytes()).unwrap();
            medium.store(LABEL_AT, &FORMAT_MARK).unwrap();
            prepare(&medium, 0, 4096, false).unwrap();
            assert_eq!(inspect(&medium, 0, None).unwrap().census.live, 1);
            // Bytes of another program with a mark in them.
            medium.store(0, b"else").unwrap();
            prepare(&medium, 0, 4096, false).unwrap();
            assert_eq!(&front(&medium, 4), b"else");
        }
    }

    #[test]
    fn a_device_too_small_is_refused() {
        for medium in media(7 << 10) {
            let error = prepare(&medium, 0, 8192, false).unwrap_err();
            assert_eq!(error.kind(), Kind::NoSpace);
            let error = prepare(&medium, 1 << 20, 512, false).unwrap_err();
            assert!(error.to_string().contains("Unable to initialize device"), "{error}");
        }
    }
}
