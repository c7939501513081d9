//! Attaching a cache device: checks, the chain of segments, the tails. The log comes after them
//! (survey.rs).
//!
//! The attach does not write. Its result is [`Structures`] and [`Replayed`]; the code that
//! continues to serve the cache does all stores.
//!
//! [`Replayed`]: super::survey::Replayed
//!
//! Rules of replay beyond the kernel's (each mends a defect there):
//! 1. The generation of a key is checked before its other fields. A stale key removes older keys of
//!    its range instead of making them visible again.
//! 2. A CLEAN key fills gaps only: a copy of the backing device's data never hides dirty data.
//! 3. The end of the log is trusted only if dirty_tail was passed on the way.
//! 4. Every number is checked before it is used; data CRCs are checked when data is used.

use crate::error::{Error, Kind, Result};
use crate::pcache::slots::SlotState;
use crate::sync::Arc;

use super::chain::load_chain;
use super::walk::{Step, Walk};
use crate::pcache::keylog::TailOnMedia;
use crate::pcache::label::Label;
use crate::pcache::layout::{
    CACHE_INFO_AT, CacheInfo, DIRTY_TAIL_AT, INFO_DATA_CRC, INFO_INIT_DONE, KEY_TAIL_AT,
    KSET_HEADER_BYTES, PAGE_STRIDE, SEGMENTS_MAX, SMALL_STRIDE, SUPERBLOCK_AT,
    SUPERBLOCK_BIG_ENDIAN, SUPERBLOCK_MAGIC, Sealed, Superblock, Tail,
};
use crate::pcache::media::{Found, Media, cut_short};
use crate::pcache::segment::{SEGMENTS_MIN, Segments};

/// The fixed structures, checked.
#[derive(Debug)]
pub struct Structures {
    /// The superblock.
    pub superblock: Superblock,
    /// cache_info.
    pub info: Found<CacheInfo>,
    /// The segments, all free.
    pub segments: Arc<Segments>,
    /// key_tail.
    pub key_tail: TailOnMedia,
    /// dirty_tail.
    pub dirty_tail: TailOnMedia,
    /// Our label.
    pub label: Option<(Label, SlotState)>,
}

/// Reads and checks everything but the log.
pub fn load_structures(media: &Media) -> Result<Structures> {
    check_size(media)?;
    Label::refuse_newer(media)?;
    let superblock: Superblock = media.load(SUPERBLOCK_AT)?;
    check_superblock(media, &superblock)?;
    let seg_num = superblock.seg_num.get();
    let info = load_info(media)?;
    let n_segs = info.record.n_segs.get();
    if n_segs < SEGMENTS_MIN || n_segs > seg_num {
        return Err(media.damaged(format_args!(
            "cache_info: {n_segs} segments in the chain, but the superblock has {seg_num}; a cache \
             with fewer than {SEGMENTS_MIN} cannot be written"
        )));
    }
    let chain = load_chain(media, info.record.first_segment.get(), n_segs, seg_num)?;
    let key_tail = load_tail(media, "key_tail", KEY_TAIL_AT, n_segs)?;
    let dirty_tail = load_tail(media, "dirty_tail", DIRTY_TAIL_AT, n_segs)?;
    Ok(Structures {
        superblock,
        info,
        segments: Arc::new(Segments::new(media.clone(), &chain)),
        key_tail,
        dirty_tail,
        label: Label::load(media).filter(|(label, _)| !label.is_of_format()),
    })
}

/// A device without space for the fixed structures and a few segments cannot hold a cache.
pub fn check_size(media: &Media) -> Result<()> {
    let len = media.pmem.len_bytes();
    if media.geometry.segments_on(len) >= u64::from(SEGMENTS_MIN) {
        return Ok(());
    }
    let cut = cut_short(media);
    let message = format!("{}: {len} bytes are too few for a cache{cut}", media.name());
    Err(Error::new(Kind::NoSpace, message))
}

fn check_superblock(media: &Media, superblock: &Superblock) -> Result<()> {
    let invalid = |what: String| Error::new(Kind::Invalid, format!("{}: {what}", media.name()));
    if superblock.magic.get() != SUPERBLOCK_MAGIC {
        return Err(invalid(format!(
            "not a pcache: magic {:#018x} at byte {SUPERBLOCK_AT}",
            superblock.magic.get()
        )));
    }
    if !superblock.is_sealed() {
        return Err(invalid(format!("superblock at byte {SUPERBLOCK_AT} has a wrong CRC")));
    }
    if superblock.flags.get() & SUPERBLOCK_BIG_ENDIAN != 0 {
        return Err(invalid("formatted on a big-endian host".to_string()));
    }
    let seg_num = u64::from(superblock.seg_num.get());
    let room = media.geometry.segments_on(media.pmem.len_bytes());
    if seg_num == 0 || seg_num > room || seg_num > SEGMENTS_MAX {
        let cut = cut_short(media);
        return Err(media.damaged(format_args!(
            "superblock says {seg_num} segments, but the device holds {room}{cut}"
        )));
    }
    Ok(())
}

/// cache_info, of a finished format.
pub fn load_info(media: &Media) -> Result<Found<CacheInfo>> {
    let info = media
        .load_slots::<CacheInfo>(CACHE_INFO_AT, PAGE_STRIDE)
        .filter(|info| info.record.flags.get() & INFO_INIT_DONE != 0);
    info.ok_or_else(|| {
        media.damaged(format_args!(
            "cache_info is missing (bytes {CACHE_INFO_AT} and {}): a format was interrupted, or \
             both copies are damaged and the log may hold dirty data; if that may be lost, erase \
             its first 64 KiB, and start over with --force-format",
            CACHE_INFO_AT + PAGE_STRIDE
        ))
    })
}

fn load_tail(media: &Media, name: &str, at: u64, n_segs: u32) -> Result<TailOnMedia> {
    let found = media.load_slots::<Tail>(at, SMALL_STRIDE).ok_or_else(|| {
        media.damaged(format_args!("{name}: both copies are damaged (byte {at})"))
    })?;
    let position = found.record.position();
    let data_bytes = media.geometry.data_bytes();
    // Every position has space for at least a LAST record after it.
    let is_record = position.offset % 8 == 0
        && u64::from(position.offset) + KSET_HEADER_BYTES as u64 <= u64::from(data_bytes);
    if position.segment >= n_segs || !is_record {
        return Err(media.damaged(format_args!(
            "{name} {position} is outside {n_segs} segments of {data_bytes} bytes"
        )));
    }
    Ok(TailOnMedia { position, slot: found.slot })
}

/// Whether keys carry CRCs.
pub fn has_data_crc(info: &CacheInfo) -> bool {
    info.flags.get() & INFO_DATA_CRC != 0
}

/// The first byte after every key of the log: a lower bound of the backing device's size. For
/// inspecting a cache without its backing device, which may have any size.
pub fn extent(media: &Media, found: &Structures) -> Result<u64> {
    let mut walk = Walk::new(media, &found.segments, found.key_tail.position);
    let mut extent = 0;
    let mut keys = Vec::new();
    loop {
        match walk.step(&mut keys)? {
            Step::End => return Ok(extent),
            Step::Last => {}
            Step::Keys(set) => {
                let ends =
                    set.iter().map(|key| key.off.get().saturating_add(u64::from(key.len.get())));
                extent = ends
                    .filter(|end| *end <= crate::pcache::BACKING_BYTES_MAX)
                    .fold(extent, u64::max);
                keys = set;
            }
        }
    }
}
