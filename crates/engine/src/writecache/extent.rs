//! The extents of a range: cached blocks are data, even over a hole of the origin; for the rest the
//! origin reports its holes.
//!
//! The index is read before the origin: a block that is dropped from the cache meanwhile is on the
//! origin by then, so no written block is ever reported as a hole.

use crate::target::Extent;

use super::Writecache;

/// Most blocks that are looked up for one extent.
const EXTENT_BLOCKS_MAX: u64 = 16 << 10;

impl Writecache {
    /// See [`Target::extent`](crate::target::Target::extent).
    pub(super) fn extent_at(&self, offset: u64, len: u64) -> (u64, Extent) {
        if self.has_failed() {
            return (len, Extent::Data);
        }
        let first = self.block_at(offset);
        let end = self.block_at(offset + len - 1) + 1;
        let is_cached = self.index.lock_of(first).newest(first).is_some();
        let mut block = first + 1;
        let mut looked_up = 0;
        'run: while block < end && looked_up < EXTENT_BLOCKS_MAX {
            if !is_cached {
                let used = self.index.next_used(block, end);
                if used > block {
                    block = used;
                    continue;
                }
            }
            let region_end = self.index.region_end(block).min(end);
            let locked = self.index.lock_of(block);
            while block < region_end {
                if locked.newest(block).is_some() != is_cached {
                    break 'run;
                }
                block += 1;
                looked_up += 1;
            }
        }
        let run = (block * self.block_bytes() - offset).min(len);
        if is_cached { (run, Extent::Data) } else { self.origin.disk().extent(offset, run) }
    }
}
