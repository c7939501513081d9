//! Checksums of cached data, with `data_crc`: the extent of each key and the CRC of its data. They
//! are stored by segment, because a key's extent lies in one segment and lives as long as the
//! segment.

use crate::base::crc::{PCACHE_SEED, crc32c_raw, pcache_crc};
use crate::error::Status;
use crate::sync::{Mutex, lock};
use crate::units::BLOCK;

use super::index::Place;
use super::segment::Segments;

#[derive(Clone, Copy, Debug)]
struct Extent {
    offset: u32,
    len: u32,
    crc: u32,
}

/// The checksums of every cached key.
#[derive(Debug)]
pub struct DataCrcs {
    segments: Box<[Mutex<Vec<Extent>>]>,
}

impl DataCrcs {
    /// For `count` segments, empty.
    pub fn new(count: u32) -> DataCrcs {
        DataCrcs { segments: (0..count).map(|_| Mutex::default()).collect() }
    }

    /// A key has its data at `[offset, offset + len)` of the segment.
    ///
    /// Keys may share the beginning of an extent (zeroes): the longest counts for all.
    pub fn insert(&self, segment: u32, offset: u32, len: u32, crc: u32) {
        let mut extents = lock(&self.segments[segment as usize]);
        let at = extents.partition_point(|extent| extent.offset < offset);
        if let Some(same) = extents.get(at).copied().filter(|extent| extent.offset == offset) {
            let is_free = extents.get(at + 1).is_none_or(|next| next.offset >= offset + len);
            if len > same.len && is_free {
                extents[at] = Extent { offset, len, crc };
            }
            return;
        }
        let overlaps_next = extents.get(at).is_some_and(|next| next.offset < offset + len);
        let overlaps_previous =
            at.checked_sub(1).is_some_and(|at| extents[at].offset + extents[at].len > offset);
        if !overlaps_next && !overlaps_previous {
            extents.insert(at, Extent { offset, len, crc });
        }
    }

    /// The checksum of the extent that begins there, if it is known.
    #[cfg(all(test, feature = "shuttle"))]
    pub fn crc_at(&self, segment: u32, offset: u32) -> Option<u32> {
        let extents = lock(&self.segments[segment as usize]);
        extents.iter().find(|extent| extent.offset == offset).map(|extent| extent.crc)
    }

    /// The segment is about to be reused.
    pub fn forget(&self, segment: u32) {
        lock(&self.segments[segment as usize]).clear();
    }

    /// Checks the data of every key that covers the place of `data`, which was loaded from there.
    /// If `data` holds all bytes of a key, they are checked directly; the data of other keys is
    /// loaded once more. Allocates no memory.
    ///
    /// [`Status::Corrupt`]: some of the data differs from the data that was written. The caller
    /// must check afterwards that the segment still has the place's generation; otherwise the
    /// result is void.
    pub fn verify(&self, segments: &Segments, place: Place, data: &[u8]) -> Result<(), Status> {
        let end = place.offset + data.len() as u32;
        let mut at = place.offset;
        while at < end {
            let extent = {
                let extents = lock(&self.segments[place.segment as usize]);
                let nth = extents.partition_point(|extent| extent.offset + extent.len <= at);
                extents.get(nth).copied()
            };
            let Some(extent) = extent.filter(|extent| extent.offset < end) else {
                return Ok(());
            };
            let extent_end = extent.offset + extent.len;
            let crc = match extent.offset.checked_sub(place.offset) {
                Some(from) if extent_end <= end => {
                    pcache_crc(&data[from as usize..][..extent.len as usize])
                }
                _ => crc_on_media(segments, place.segment, extent)?,
            };
            if crc != extent.crc {
                return Err(Status::Corrupt);
            }
            at = extent_end;
        }
        Ok(())
    }
}

/// The checksum of the data on the medium.
fn crc_on_media(segments: &Segments, segment: u32, extent: Extent) -> Result<u32, Status> {
    let mut register = PCACHE_SEED;
    let mut chunk = [0; BLOCK as usize];
    let mut done = 0;
    while done < extent.len {
        let chunk = &mut chunk[..(extent.len - done).min(BLOCK as u32) as usize];
        segments.load(segment, extent.offset + done, chunk)?;
        register = crc32c_raw(register, chunk);
        done += chunk.len() as u32;
    }
    Ok(register)
}
