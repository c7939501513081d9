//! Wiping: taking a clean cache off its device, so that the device is not recognised as a cache
//! again.
//!
//! The cache is checked once more by reading the same data as an attach. The order of the stores is
//! the order of a format: first the mark, which replaces the label; then the magic is cleared, then
//! the entries, the mark last. So a crash leaves either the clean cache or a format that was cut
//! off, which the next `create` does again.

use crate::base::attaching::AttachProgress;
use crate::disk::{DiskLimits, Match};
use crate::error::{Kind, Result};
use crate::shm::SharedStore;
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
    shared_store: &SharedStore,
    limits: &DiskLimits,
    progress: &AttachProgress,
) -> Result<()> {
    let geometry = check(medium, start, shared_store, limits)?;
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
        // A chunk ends at the end of a disk's block, so that no block is written twice.
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

/// The addresses of all areas; an error unless it is this origin's cache, and the origin has all of
/// its data.
fn check(
    medium: &Medium,
    start: u64,
    shared_store: &SharedStore,
    limits: &DiskLimits,
) -> Result<Geometry> {
    let refuse = |what: &str| Err(medium.error(Kind::Refused, format_args!("not wiped: {what}")));
    let report = inspect(medium, start, Some(limits.size_bytes))?;
    let (superblock, geometry) = load_geometry(medium, start, None)?;
    let census = &report.census;
    if report.served(medium, shared_store).is_some() {
        return refuse("its server was killed, and may have left writes in shared memory");
    }
    if census.live + census.damaged > 0 {
        let blocks = census.live + census.damaged;
        return refuse(&format!("it has {blocks} dirty or damaged blocks"));
    }
    let label = &superblock.label;
    if !label.is_valid() {
        return refuse("its label does not name its origin");
    }
    if label.compare(&limits.identity, limits.size_bytes) == Match::Other {
        return refuse(&format!("it belongs to another origin than {}", limits.name));
    }
    Ok(geometry)
}
