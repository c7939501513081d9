//! The chain of segments on the medium: the physical segment of each logical one, and the
//! generation of each. Kernel counterpart: `cache.c`.

use crate::error::{Error, Kind, Result};
use crate::pcache::layout::{
    GENERATION_MAX, Generation, PAGE_STRIDE, SEGMENT_HAS_NEXT, SEGMENT_META_BYTES, SMALL_STRIDE,
    SegmentInfo,
};
use crate::pcache::media::{Media, cut_short};
use crate::pcache::segment::SegmentOnMedia;

/// Follows the chain of segments. The kernel's own errors: EFAULT when it ends early, EIO when a
/// link is damaged or names a segment beyond the device. Ours: EIO when the chain meets itself.
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
            // This segment was cut off, with all that follow it; only a recovery gets here.
            break;
        }
        let info = media.load_slots::<SegmentInfo>(at, PAGE_STRIDE).ok_or_else(|| {
            media.damaged(format_args!(
                "segment {physical}: both copies of its info are damaged (byte {at}){}",
                cut_short(media)
            ))
        })?;
        let at = media.geometry.generation_at(physical);
        let generation = media.load_slots::<Generation>(at, SMALL_STRIDE).ok_or_else(|| {
            media.damaged(format_args!(
                "segment {physical}: both copies of its generation are damaged (byte {at}); \
                 outdated keys cannot be distinguished from current ones"
            ))
        })?;
        let slot = generation.slot;
        let generation = generation.record.generation.get();
        if generation > GENERATION_MAX {
            return Err(media.damaged(format_args!(
                "segment {physical}: generation {generation} is implausibly large (byte {at})"
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
