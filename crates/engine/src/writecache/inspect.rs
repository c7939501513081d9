//! Inspecting a cache device without changing it.

use crate::base::attaching::AttachProgress;
use crate::error::Result;
use crate::shm::{Served, SharedStore};

use super::layout::{Geometry, Label, MAGIC, SECTORS_MAX, SUPERBLOCK_BYTES, Superblock};
use super::media::Medium;
use super::memory::served;
use super::walk::{Census, Lookup, walk};

/// The contents of a cache device.
#[derive(Clone, Debug)]
pub struct Report {
    /// Where everything is.
    pub geometry: Geometry,
    /// The commit counter.
    pub seq_count: u64,
    /// The counts of the entries.
    pub census: Census,
    /// Bytes that the origin lacks, without damaged entries.
    pub dirty_bytes: u64,
    /// The origin has at least this many bytes.
    pub origin_bytes_min: u64,
    /// Blocks whose entries contradict each other.
    pub contradictions: Vec<u64>,
    /// Our label, if there is one: sectors of the origin, number of the last attach.
    pub label: Option<LabelReport>,
    raw_label: Label,
}

impl Report {
    /// The server that has the cache, or had it and died, according to the label. `shared_store`
    /// finds the memory with the writes that it has acknowledged and not flushed.
    pub fn served(&self, medium: &Medium, shared_store: &SharedStore) -> Option<Served> {
        served(medium, &self.geometry, &self.raw_label, shared_store)
    }
}

/// What our label says.
#[derive(Clone, Copy, Debug)]
pub struct LabelReport {
    /// Size of the origin when last attached.
    pub origin_bytes: u64,
    /// The last attach.
    pub attach_id: u64,
}

/// Whether a writecache's superblock stands at byte `start`.
pub fn is_writecache(medium: &Medium, start: u64) -> bool {
    let fits = start.checked_add(SUPERBLOCK_BYTES).is_some_and(|end| end <= medium.size_bytes());
    fits && medium.superblock(start).is_ok_and(|superblock| superblock.magic.get() == MAGIC)
}

/// Reads the superblock at byte `start`. Returns it with the addresses of all areas.
pub fn load_geometry(
    medium: &Medium,
    start: u64,
    block_bytes: Option<u32>,
) -> Result<(Superblock, Geometry)> {
    let superblock = medium.superblock(start)?;
    let raw = medium.size_bytes().saturating_sub(start);
    let geometry = Geometry::of_superblock(&superblock, start, raw, block_bytes)
        .map_err(|error| medium.error(error.kind(), error))?;
    Ok((superblock, geometry))
}

/// Reads the same data as an attach; never writes. `start`: first byte of the cache on its device.
/// Without `origin_bytes`, the label's number counts as the origin's size.
pub fn inspect(medium: &Medium, start: u64, origin_bytes: Option<u64>) -> Result<Report> {
    let (superblock, geometry) = load_geometry(medium, start, None)?;
    let label = superblock.label;
    let label = label.is_valid().then(|| LabelReport {
        origin_bytes: label.origin_sectors().min(SECTORS_MAX) * crate::units::SECTOR,
        attach_id: label.attach_id(),
    });
    let origin_bytes = origin_bytes.or(label.map(|label| label.origin_bytes));
    let seq_count = superblock.seq_count.get();
    let mut found = [Lookup::default()];
    let census =
        walk(medium, &geometry, seq_count, origin_bytes, &mut found, &AttachProgress::default())?;
    let [found] = found;
    let block_bytes = u64::from(geometry.block_bytes);
    let last = found.blocks.keys().max().map_or(0, |block| (block + 1) * block_bytes);
    let damaged = found.duplicates.len() as u64;
    Ok(Report {
        geometry,
        seq_count,
        dirty_bytes: (found.blocks.len() as u64 - damaged) * block_bytes,
        census,
        origin_bytes_min: last,
        contradictions: found.duplicates,
        label,
        raw_label: superblock.label,
    })
}
