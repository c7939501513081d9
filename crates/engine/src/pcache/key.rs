//! Keys read from a log: whether they belong to this cache, and their meaning.
//!
//! The generation of a key is checked before its other fields. A stale key removes older keys of
//! its range instead of making them visible again, and a CLEAN key fills gaps only.

use crate::mutants::{self, Mutant};
use crate::units::SECTOR;

use super::datacrc::DataCrcs;
use super::index::{Index, Place};
use super::layout::{KEY_CLEAN, Key, REGION_BYTES};
use super::media::Media;
use super::segment::Segments;

/// Checks what does not depend on generations.
pub fn check_key(
    media: &Media,
    segments: &Segments,
    backing_bytes: u64,
    key: &Key,
) -> Result<(), String> {
    let (off, len) = (key.off.get(), u64::from(key.len.get()));
    let (segment, at) = (key.segment.get(), u64::from(key.segment_off.get()));
    if key.flags.get() & !KEY_CLEAN != 0 {
        return Err(format!("unknown flags {:#x}", key.flags.get()));
    }
    if len == 0 || len % SECTOR != 0 || off % SECTOR != 0 || at % SECTOR != 0 {
        return Err(format!("{len} bytes at {off}, cached at {at}: not whole sectors"));
    }
    if off.checked_add(len).is_none_or(|end| end > backing_bytes) {
        return Err(format!(
            "{len} bytes at {off}, but the backing device has {backing_bytes} bytes"
        ));
    }
    if off / REGION_BYTES != (off + len - 1) / REGION_BYTES {
        return Err(format!("{len} bytes at {off} cross a border of 4 MiB"));
    }
    if segment >= segments.count() {
        return Err(format!("data in segment {segment} of {}", segments.count()));
    }
    if at + len > u64::from(media.geometry.data_bytes()) {
        return Err(format!("data at {at} + {len} leaves segment {segment}"));
    }
    Ok(())
}

/// Keeps the checksum of a checked key's data, if the data still exists.
pub(super) fn keep_crc(segments: &Segments, crcs: &DataCrcs, key: &Key) {
    if !is_stale(segments, key) {
        let (segment, offset) = (key.segment.get(), key.segment_off.get());
        crcs.insert(segment, offset, key.len.get(), key.data_crc.get());
    }
}

/// Whether the segment of a checked key was reused since.
pub(super) fn is_stale(segments: &Segments, key: &Key) -> bool {
    key.generation.get() < segments.generation(key.segment.get())
        && !mutants::is(Mutant::StaleKeyBelieved)
}

/// Puts a checked key into an index; returns whether it is CLEAN and other keys hide some of it.
pub(super) fn put(index: &Index, segments: &Segments, key: &Key) -> bool {
    let (off, len) = (key.off.get(), u64::from(key.len.get()));
    if is_stale(segments, key) {
        if !mutants::is(Mutant::StaleKeySkipped) {
            index.set(off, len, None);
        }
        return false;
    }
    let segment = key.segment.get();
    let place = Place::new(segment, key.segment_off.get(), segments.generation(segment));
    if key.flags.get() & KEY_CLEAN != 0 && !mutants::is(Mutant::CleanHidesDirty) {
        return fill_gaps(index, off, off + len, place);
    }
    index.set(off, len, Some(place));
    false
}

/// Returns whether the range had anything but gaps.
fn fill_gaps(index: &Index, offset: u64, end: u64, place: Place) -> bool {
    let mut has_met = false;
    let mut at = offset;
    while at < end {
        let piece = index.lookup(at, end, |_| true);
        let place = place.plus(at - offset);
        if piece.place.is_none() {
            index.set(at, piece.len, Some(place));
        } else if piece.place != Some(place) {
            // Not the key of data that was kept in its place, which is logged again.
            has_met = true;
        }
        at += piece.len;
    }
    has_met
}
