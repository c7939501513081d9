//! The dirty data that a cache without a server holds for its origin, by its metadata, and whether
//! its cache device can be read. Does not write.

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::{Kind, Result};
use crate::recovery::{Survey, sample};
use crate::sync::Arc;
use crate::target::OnlyCached;
use crate::units::SECTOR;

use super::metadata::load;

/// Reads the metadata, and a sample of the dirty blocks. `cache` may be a device that cannot be
/// opened.
pub(crate) fn survey(
    metadata: &Arc<dyn Disk>,
    cache: Result<Arc<dyn Disk>>,
    block_bytes: u64,
) -> Result<Survey> {
    let loaded = load(metadata)?;
    let contents = loaded.contents.opened(&loaded.superblock);
    let slot_of = |slot| Some((contents.block(slot)?, slot));
    let dirty: Vec<(u64, u64)> = contents.dirty.iter().filter_map(slot_of).collect();
    let samples = sample(&dirty);
    let unread = match cache {
        Err(error) if error.kind() == Kind::Busy => return Err(error),
        Err(_) => samples.len(),
        Ok(cache) => {
            let size_bytes = cache.limits().size_bytes;
            let places = samples.iter().map(|(_, slot)| slot * block_bytes);
            let (there, cut): (Vec<u64>, Vec<u64>) =
                places.partition(|at| at + block_bytes <= size_bytes);
            let read = |at| DiskIo::new(&cache, Op::Read, at, Buffer::zeroed(SECTOR as usize), 0);
            let done = cache.carry_out(there.into_iter().map(read).collect());
            cut.len() + done.iter().filter(|io| io.result.is_err()).count()
        }
    };
    let mut survey = Survey {
        dirty_bytes: dirty.len() as u64 * block_bytes,
        sampled: samples.len(),
        unread,
        ..Survey::default()
    };
    survey.is_exact = unread == 0 || survey.is_all_unread();
    if unread > 0 {
        let ranges = dirty.iter().map(|(block, _)| (block * block_bytes, block_bytes));
        survey.ranges = OnlyCached::of(ranges.collect(), true).ranges;
    }
    if !loaded.superblock.is_clean() && unread > 0 {
        survey.is_exact = false;
        survey.notes.push("its server died, so every block in it counts as dirty".into());
    }
    Ok(survey)
}
