//! Inspecting a cache device without changing it.

use crate::base::attaching::AttachProgress;
use crate::disk::{DiskLimits, Match};
use crate::error::Result;
use crate::pmem::Pmem;
use crate::shm::{Served, SharedStore};
use crate::sync::Arc;

use super::args::LogDamage;
use super::attach::{Reading, Sharing, extent, has_data_crc, load_structures, survey};
use super::index::Index;
use super::label::Label;
use super::layout::{
    Geometry, Position, SUPERBLOCK_AT, SUPERBLOCK_MAGIC, Superblock, gc_percent_of,
};
use super::media::Media;
use super::memory::served;

/// The contents of a cache device.
#[derive(Clone, Debug)]
pub struct Report {
    /// Segments on the device and in the chain.
    pub segments: u32,
    /// Segments in use by log and data.
    pub used_segments: u32,
    /// Collection begins when this many percent are in use.
    pub gc_percent: u32,
    /// Whether keys carry CRCs of their data.
    pub has_data_crc: bool,
    /// The three positions: log head, dirty_tail, key_tail.
    pub head: Position,
    /// Where write-back continues.
    pub dirty_tail: Position,
    /// Where collection continues.
    pub key_tail: Position,
    /// Keys in the log.
    pub keys: u64,
    /// Keys of reused segments.
    pub stale_keys: u64,
    /// Bytes that the backing device does not have yet, at most.
    pub dirty_bytes: u64,
    /// Our label: backing device's identity and size, and ranges of damaged dirty data.
    pub label: Option<LabelReport>,
    /// Damage that was tolerated.
    pub notes: Vec<String>,
    raw_label: Option<Label>,
}

impl Report {
    /// The server that has the cache, or had it and died, according to the label. `shared_store`
    /// finds the memory with the writes that the server has acknowledged and not flushed.
    pub fn served(&self, shared_store: &SharedStore) -> Option<Served> {
        self.raw_label.as_ref().and_then(|label| served(label, shared_store))
    }

    /// Whether our label names the backing device that `limits` describes, or may do so.
    pub fn is_bound_to(&self, limits: &DiskLimits) -> bool {
        let label = self.raw_label.as_ref();
        label.is_some_and(|label| label.compare(limits) != Match::Other)
    }
}

/// What our label says.
#[derive(Clone, Debug)]
pub struct LabelReport {
    /// Which backing device.
    pub identity: String,
    /// Its size when last attached.
    pub backing_bytes: u64,
    /// Ranges of damaged dirty data: offset and length in bytes.
    pub bad_ranges: Vec<(u64, u64)>,
}

/// Whether a pcache's superblock is there.
pub fn is_pcache(pmem: &Arc<dyn Pmem>, geometry: Geometry) -> bool {
    let media = Media { pmem: Arc::clone(pmem), geometry, shared: None };
    let end = SUPERBLOCK_AT + size_of::<Superblock>() as u64;
    let has_room = end <= media.pmem.len_bytes();
    let superblock: Option<Superblock> = has_room.then(|| media.load(SUPERBLOCK_AT).ok()).flatten();
    superblock.is_some_and(|superblock| superblock.magic.get() == SUPERBLOCK_MAGIC)
}

/// Reads everything that an attach would read; never writes.
pub fn inspect(cache: Arc<dyn Pmem>, geometry: Geometry) -> Result<Report> {
    let media = Media { pmem: cache, geometry, shared: None };
    let found = load_structures(&media)?;
    let backing_bytes = match &found.label {
        Some((label, _)) => label.backing_bytes.min(super::BACKING_BYTES_MAX),
        None => extent(&media, &found)?,
    };
    // There will be no reads. And the medium alone claims the size of the device, so an index could
    // take any amount of memory that a medium asks for.
    let reading = Reading {
        backing_bytes,
        log_damage: LogDamage::Truncate,
        at_once_max: 0,
        drops_clean: false,
        sharing: Sharing::among(1),
        new_index: &|| Index::new(0),
        progress: &AttachProgress::default(),
    };
    let replayed = survey(&media, &found, &reading)?;
    let flags = found.info.record.flags.get();
    Ok(Report {
        segments: found.superblock.seg_num.get(),
        used_segments: found.segments.used(),
        gc_percent: gc_percent_of(flags),
        has_data_crc: has_data_crc(&found.info.record),
        head: replayed.head,
        dirty_tail: replayed.dirty_tail,
        key_tail: replayed.key_tail,
        keys: replayed.counts.keys,
        stale_keys: replayed.counts.stale_keys,
        dirty_bytes: replayed.counts.dirty_bytes,
        raw_label: found.label.as_ref().map(|(label, _)| label.clone()),
        label: found.label.map(|(label, _)| LabelReport {
            identity: label.identity,
            backing_bytes: label.backing_bytes,
            bad_ranges: label.bad.iter().map(|bad| (bad.offset.get(), bad.len.get())).collect(),
        }),
        notes: replayed.notes,
    })
}
