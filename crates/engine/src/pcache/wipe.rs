//! Wiping: taking a clean cache off its device, so that the device is not recognised as a cache
//! again.
//!
//! The cache is checked once more by reading the same data as an attach. The order of the stores is
//! the order of a format: first a label that says "being formatted", then the superblock is
//! cleared, then the rest, the label last. So a crash leaves either the clean cache or a format
//! that was cut off, which the next `create` does again.

use crate::base::attaching::AttachProgress;
use crate::disk::DiskLimits;
use crate::error::{Error, Kind, Result};
use crate::pmem::Pmem;
use crate::shm::SharedStore;
use crate::sync::Arc;
use crate::units::human_bytes;

use super::format::{EMPTY_BYTES, SUPERBLOCK_FIELDS_BYTES, announce};
use super::inspect::inspect;
use super::layout::{
    Geometry, KSET_HEADER_BYTES, LABEL_BYTES, SEGMENT_META_BYTES, SEGMENTS_MAX, SUPERBLOCK_AT,
};
use super::media::Media;

/// Wipes the cache on `pmem`, which belongs to the backing device that `limits` describes.
/// `progress` counts bytes.
pub fn wipe(
    pmem: Arc<dyn Pmem>,
    shared_store: &SharedStore,
    geometry: Geometry,
    limits: &DiskLimits,
    progress: &AttachProgress,
) -> Result<()> {
    let media = Media { pmem, geometry, shared: None };
    check(&media, shared_store, limits)?;
    announce(&media)?;
    media.pmem.zero(SUPERBLOCK_AT, SUPERBLOCK_FIELDS_BYTES);
    media.settle_or_err()?;
    let len = media.pmem.len_bytes();
    media.pmem.zero(SUPERBLOCK_AT, EMPTY_BYTES.min(len) - SUPERBLOCK_AT);
    let count = geometry.segments_on(len).min(SEGMENTS_MAX);
    let segment_bytes = SEGMENT_META_BYTES + KSET_HEADER_BYTES as u64;
    progress.begin("bytes", count * segment_bytes);
    for segment in 0..count as u32 {
        media.pmem.zero(geometry.segment_info_at(segment), segment_bytes);
        progress.advance(segment_bytes);
    }
    media.settle_or_err()?;
    media.pmem.zero(0, LABEL_BYTES);
    media.settle_or_err()
}

/// An error unless it is this backing device's cache, and the backing device has all of its data.
fn check(media: &Media, shared_store: &SharedStore, limits: &DiskLimits) -> Result<()> {
    let refuse = |what: String| {
        Err(Error::new(Kind::Refused, format!("pcache: {}: not wiped: {what}", media.name())))
    };
    let report = inspect(media.pmem.clone(), media.geometry)?;
    if report.served(shared_store).is_some() {
        return refuse("its server was killed, and may have left writes in shared memory".into());
    }
    if report.dirty_bytes > 0 {
        return refuse(format!("it has {} of dirty data", human_bytes(report.dirty_bytes)));
    }
    match &report.label {
        Some(label) if !report.is_bound_to(limits) => refuse(format!(
            "it belongs to another backing device ({}) than {}",
            label.identity, limits.name
        )),
        Some(label) if !label.bad_ranges.is_empty() => {
            refuse("it has a record of damaged data, which the backing device does not have".into())
        }
        None => refuse("its label does not name its origin".into()),
        Some(_) => Ok(()),
    }
}
