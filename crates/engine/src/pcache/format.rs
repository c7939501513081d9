//! Formatting a cache device, and deciding whether that is allowed.
//!
//! The bytes equal the kernel's. The order of the stores differs: the superblock is last, so that
//! an interrupted format is not a cache yet. Until then our label records that a format is in
//! progress, and the next attach may repeat it.

use zerocopy::IntoBytes;

use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::pcache::slots::SlotState;

use super::label::Label;
use super::layout::{
    CACHE_INFO_AT, CONTROL_END, CacheInfo, DIRTY_TAIL_AT, GC_PERCENT_DEFAULT, Generation,
    KEY_TAIL_AT, KSET_HEADER_BYTES, LABEL_BYTES, PAGE_STRIDE, Position, SEGMENT_META_BYTES,
    SEGMENTS_MAX, SMALL_STRIDE, SUPERBLOCK_AT, SUPERBLOCK_MAGIC, Sealed, SegmentInfo, Superblock,
    Tail, info_flags,
};
use super::media::Media;
use super::segment::SEGMENTS_MIN;

/// The attach id in the label of a device that is being formatted.
const FORMATTING: u64 = u64::MAX;
/// A device counts as empty when this many bytes at its front are zero, and all later bytes that a
/// format writes.
pub(super) const EMPTY_BYTES: u64 = 64 << 10;
/// The superblock without its padding, which the kernel keeps as found.
pub(super) const SUPERBLOCK_FIELDS_BYTES: u64 = 20;

/// Whether the device holds a pcache, the remains of an interrupted format, or something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The superblock's magic is ours.
    Pcache,
    /// A format of ours that was interrupted.
    CutFormat,
    /// Any other data, or none.
    Other,
}

/// The content of the device, by its superblock and our label.
pub fn content(media: &Media) -> Result<Content> {
    let superblock: Superblock = media.load(SUPERBLOCK_AT)?;
    let has_magic = superblock.magic.get() == SUPERBLOCK_MAGIC;
    if is_formatting(media, has_magic && superblock.is_sealed()) {
        return Ok(Content::CutFormat);
    }
    Ok(if has_magic { Content::Pcache } else { Content::Other })
}

/// Whether all bytes that a format would write are zero, as on a new device, or are the first bytes
/// of a format of ours.
pub fn is_blank(media: &Media) -> Result<bool> {
    let mut front = vec![0; EMPTY_BYTES.min(media.pmem.len_bytes()) as usize];
    media
        .pmem
        .load(0, &mut front)
        .map_err(|status| media.damaged(format_args!("cannot read its first 64 KiB: {status}")))?;
    // The format's own label may have been torn.
    let label = formatting_label().first_bytes();
    let page = front.split_at(label.len().min(front.len()));
    let is_whole_or_zero = |(found, ours): (&[u8], &[u8])| found == ours || found == [0; 8];
    let is_empty = page.0.chunks(8).zip(label.chunks(8)).all(is_whole_or_zero)
        && page.1.iter().all(|&byte| byte == 0);
    if !is_empty {
        return Ok(false);
    }
    let count = media.geometry.segments_on(media.pmem.len_bytes()).min(SEGMENTS_MAX);
    let mut meta = vec![0; SEGMENT_META_BYTES as usize + KSET_HEADER_BYTES];
    for segment in 0..count as u32 {
        let at = media.geometry.segment_info_at(segment);
        media.pmem.load(at, &mut meta).map_err(|status| {
            media.damaged(format_args!("cannot read {} bytes at {at}: {status}", meta.len()))
        })?;
        if meta.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a format was cut short. The magic is checked second: the format may have left half a
/// superblock, or not have touched it yet. The format is complete, and the cache may hold data,
/// only if the superblock is whole and cache_info has changed since the format began.
fn is_formatting(media: &Media, has_superblock: bool) -> bool {
    let Some((label, _)) = Label::load(media).filter(|(label, _)| label.is_of_format()) else {
        return false;
    };
    let info = media.load_slots::<CacheInfo>(CACHE_INFO_AT, PAGE_STRIDE);
    !has_superblock || info.is_some_and(|info| *info.record.as_bytes() == label.info)
}

/// The label that says: being formatted.
fn formatting_label() -> Label {
    Label {
        attach_id: FORMATTING,
        backing_bytes: 0,
        identity: String::new(),
        marks_from: Position::default(),
        info: [0; 24],
        bad: Vec::new(),
        torn_until: None,
        served: None,
        stamp: None,
        is_stale: false,
    }
}

/// Writes an empty cache.
pub fn format(media: &Media, has_data_crc: bool) -> Result<()> {
    let count = media.geometry.segments_on(media.pmem.len_bytes());
    if count < u64::from(SEGMENTS_MIN) || count > SEGMENTS_MAX {
        return Err(Error::new(
            Kind::Io,
            format!(
                "{}: {count} segments, but a cache has {SEGMENTS_MIN} to {SEGMENTS_MAX}",
                media.name()
            ),
        ));
    }
    let count = count as u32;
    media.pmem.reserve()?;
    let old: Superblock = media.load(SUPERBLOCK_AT)?;
    announce(media)?;
    // No old superblock may outlive the first change: it would make a mixture look like a cache.
    media.pmem.zero(SUPERBLOCK_AT, SUPERBLOCK_FIELDS_BYTES);
    media.settle_or_err()?;
    if mutants::is(Mutant::SuperblockFirst) {
        media.store(SUPERBLOCK_AT, Superblock::new(count, old.padding.get()).as_bytes());
        media.settle_or_err()?;
    }
    media.pmem.zero(CACHE_INFO_AT, CONTROL_END - CACHE_INFO_AT);
    for segment in 0..count {
        let at = media.geometry.segment_info_at(segment);
        media.pmem.zero(at, SEGMENT_META_BYTES + KSET_HEADER_BYTES as u64);
        media.store(at + PAGE_STRIDE, SegmentInfo::new(1, None).as_bytes());
        if segment + 1 < count {
            media.store(at, SegmentInfo::new(2, Some(segment + 1)).as_bytes());
        }
        let at = media.geometry.generation_at(segment) + SMALL_STRIDE;
        media.store(at, Generation::new(1, 0).as_bytes());
    }
    media.store(DIRTY_TAIL_AT, Tail::new(1, Position::default()).as_bytes());
    media.store(KEY_TAIL_AT, Tail::new(1, Position::default()).as_bytes());
    let flags = info_flags(GC_PERCENT_DEFAULT, has_data_crc);
    media.store(CACHE_INFO_AT + PAGE_STRIDE, CacheInfo::new(1, 0, count, flags).as_bytes());
    media.settle_or_err()?;
    media.store(SUPERBLOCK_AT, Superblock::new(count, old.padding.get()).as_bytes());
    media.settle_or_err()
}

/// Stores a label of a device being formatted. An existing label keeps binding the cache to its
/// backing device until the new one is whole.
pub(super) fn announce(media: &Media) -> Result<()> {
    let info = media.load_slots::<CacheInfo>(CACHE_INFO_AT, PAGE_STRIDE);
    let mut slot = match Label::load(media) {
        // It is left from an interrupted format.
        Some((label, _)) if label.is_of_format() => return Ok(()),
        Some((_, slot)) => slot,
        None => {
            media.pmem.zero(0, LABEL_BYTES);
            media.settle_or_err()?;
            SlotState::unwritten(0)
        }
    };
    let mut label = formatting_label();
    if let Some(info) = info {
        label.info.copy_from_slice(info.record.as_bytes());
    }
    label
        .store(media, &mut slot)
        .map_err(|status| media.damaged(format_args!("cannot store the label: {status}")))
}

impl Label {
    /// Whether a format stored the label, and no attach has followed.
    pub fn is_of_format(&self) -> bool {
        self.attach_id == FORMATTING
    }
}
