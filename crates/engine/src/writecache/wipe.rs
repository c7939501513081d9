//! Taking a clean cache off its device, so that nothing takes the device for a cache again.
//!
//! It is checked once more by reading what an attach would read. The order of the stores is that of
//! a format: first the mark, which takes the place of the label; then the magic goes, then the
//! entries, the mark last. So whatever a crash leaves is the cache, clean as it was, or a format
//! that was cut off, which the next `create` does again.

use crate::attaching::AttachProgress;
use crate::disk::DiskLimits;
use crate::error::{Kind, Result};
use crate::shm::Keeper;
use crate::units::SECTOR;

use super::format::{EMPTY_BYTES, MAGIC_AND_VERSION_BYTES};
use super::inspect::{inspect, load_geometry};
use super::layout::{FORMAT_MARK, Geometry, LABEL_AT, SUPERBLOCK_BYTES};
use super::media::Medium;

/// Wipes the cache that begins at byte `start` and belongs to the origin that `limits` describes.
/// `progress` counts bytes.
pub fn wipe(
    medium: &Medium,
    start: u64,
    keeper: &Keeper,
    limits: &DiskLimits,
    progress: &AttachProgress,
) -> Result<()> {
    let geometry = check(medium, start, keeper, limits)?;
    medium.store(start + LABEL_AT, &FORMAT_MARK)?;
    medium.settle()?;
    medium.store(start, &[0; MAGIC_AND_VERSION_BYTES])?;
    medium.settle()?;
    let raw = medium.size_bytes() - start;
    let end = (start + EMPTY_BYTES.min(raw)).max(geometry.entry_at(geometry.blocks));
    let mut at = start + SUPERBLOCK_BYTES;
    progress.begin("bytes", end - at);
    let zeroes = vec![0; medium.chunk_bytes().min(end - at) as usize];
    while at < end {
        // A chunk ends at the end of a disk's block, so that none is written twice.
        let until =
            end.min((at + zeroes.len() as u64) / EMPTY_BYTES * EMPTY_BYTES).max(at + SECTOR);
        let until = until.min(end);
        medium.store(at, &zeroes[..(until - at) as usize])?;
        progress.advance(until - at);
        at = until;
    }
    let unit = u64::from(medium.unit_bytes()).max(SECTOR);
    if let Some(place) = geometry.place_at(raw, unit) {
        medium.store(place, &vec![0; SECTOR as usize])?;
    }
    medium.settle()?;
    medium.store(start, &[0; SUPERBLOCK_BYTES as usize])?;
    medium.settle()
}

/// Where everything is; an error unless it is this origin's cache, and that has all of it.
fn check(medium: &Medium, start: u64, keeper: &Keeper, limits: &DiskLimits) -> Result<Geometry> {
    let refuse = |what: &str| Err(medium.error(Kind::Refused, format_args!("not wiped: {what}")));
    let report = inspect(medium, start, Some(limits.size_bytes))?;
    let (superblock, geometry) = load_geometry(medium, start, None)?;
    let census = &report.census;
    if report.served(medium, keeper).is_some() {
        return refuse("its server did not end in order, and may have left writes");
    }
    if census.live + census.damaged > 0 {
        let blocks = census.live + census.damaged;
        return refuse(&format!("{blocks} blocks of it are dirty or damaged"));
    }
    let label = &superblock.label;
    if !label.is_valid() {
        return refuse("it has no label that says whose it is");
    }
    if !label.is_bound_to(&limits.identity, limits.size_bytes) {
        return refuse("it caches another origin");
    }
    Ok(geometry)
}
