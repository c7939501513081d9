//! The chain of segments, as the medium has it: which physical segment is which logical one, and
//! the generation of each. Kernel counterpart: `cache.c`.

use crate::error::{Error, Kind, Result};
use crate::slots::SlotState;

use crate::pcache::layout::{
    GENERATION_MAX, Generation, PAGE_STRIDE, SEGMENT_HAS_NEXT, SEGMENT_META_BYTES, SMALL_STRIDE,
    SegmentInfo,
};
use crate::pcache::media::Media;

/// A segment as the attach found it.
#[derive(Clone, Copy, Debug)]
pub struct SegmentOnMedia {
    /// Physical number.
    pub physical: u32,
    /// Current generation.
    pub generation: u64,
    /// Where its record stands.
    pub slot: SlotState,
}

/// Follows the chain of segments. The kernel's own errors: EFAULT when it ends early, EIO when a
/// link is damaged or names a segment beyond the device; ours: EIO when it meets itself.
pub fn load_chain(
    media: &Media,
    first: u32,
    count: u32,
    seg_num: u32,
) -> Result<Vec<SegmentOnMedia>> {
    let mut chain = Vec::with_capacity(count as usize);
    let mut seen = vec![false; seg_num as usize];
    let mut physical = first;
    for logical in 0..count {
        if physical >= seg_num {
            return Err(media.damaged(format_args!(
                "segment chain: logical segment {logical} is physical segment {physical}, but \
                 the cache has {seg_num}"
            )));
        }
        if std::mem::replace(&mut seen[physical as usize], true) {
            return Err(media.damaged(format_args!(
                "segment chain: physical segment {physical} appears twice"
            )));
        }
        let at = media.geometry.segment_info_at(physical);
        if at + SEGMENT_META_BYTES > media.pmem.left_bytes() {
            // Cut off, with all that it leads to; only a salvage gets here.
            break;
        }
        let info = media.load_slots::<SegmentInfo>(at, PAGE_STRIDE).ok_or_else(|| {
            media.damaged(format_args!(
                "segment {physical}: both copies of its info are damaged (byte {at})"
            ))
        })?;
        let at = media.geometry.generation_at(physical);
        let generation = media.load_slots::<Generation>(at, SMALL_STRIDE).ok_or_else(|| {
            media.damaged(format_args!(
                "segment {physical}: both copies of its generation are damaged (byte {at}); \
                 outdated keys could not be told from current ones"
            ))
        })?;
        let slot = generation.slot;
        let generation = generation.record.generation.get();
        if generation > GENERATION_MAX {
            return Err(media.damaged(format_args!(
                "segment {physical}: generation {generation} is beyond any real use (byte {at})"
            )));
        }
        chain.push(SegmentOnMedia { physical, generation, slot });
        if logical + 1 < count {
            if info.record.flags.get() & SEGMENT_HAS_NEXT == 0 {
                return Err(Error::new(
                    Kind::Fault,
                    format!(
                        "{}: segment chain ends after {} of {count} segments",
                        media.name(),
                        logical + 1
                    ),
                ));
            }
            physical = info.record.next.get();
        }
    }
    Ok(chain)
}
