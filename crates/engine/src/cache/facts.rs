//! Facts of a cache beyond the kernel's status line, and its maxima.

use crate::limits::{Limit, limit};
use crate::sync::atomic::Ordering;
use crate::target::{
    Fact, Health, OnlyCached, count, flag, number, origin_facts, refused_push, text,
};

use super::metadata::counts::BLOCKS_MAX;
use super::{Cache, SLOTS_MAX, background, commit, copy, fill, partial, parts};

/// Every stated maximum.
pub fn limits() -> [Limit; 11] {
    [
        limit("cache_blocks", SLOTS_MAX, "blocks of a cache"),
        limit("cache_metadata_blocks", BLOCKS_MAX, "blocks of a metadata device that are used"),
        limit("cache_metadata_writes", commit::DEPTH_MAX as u64, "writes of a commit in flight"),
        limit("cache_batch_bytes", background::BATCH_BYTES_MAX, "a write-back batch"),
        limit("cache_copies_bytes", background::HURRY_BYTES_MAX, "write-back in flight"),
        limit("cache_copy_bytes", copy::PIECE_BYTES, "one I/O of a copy"),
        limit("cache_promotions", fill::PROMOTIONS_MAX as u64, "blocks that come as a whole"),
        limit("cache_partials", partial::PARTIALS_MAX as u64, "blocks in their slots in part"),
        limit("cache_fill_bytes", fill::FILLS_BYTES_MAX, "data of requests on its way to slots"),
        limit("cache_parts", parts::PARTS_MAX as u64, "blocks known to be dirty in part"),
        limit("cache_room", background::ROOM_MAX.into(), "slots that are made free together"),
    ]
}

impl Cache {
    pub(super) fn all_facts(&self) -> Vec<Fact> {
        let (used, space) = self.commits.lock().writer.space();
        let blocks = self.blocks();
        let (slots, free) = (blocks.slots.count(), blocks.slots.free());
        let (dirty, trouble) = (blocks.slots.dirty_count(), blocks.trouble);
        drop(blocks);
        let block = self.plan.block_bytes;
        let mut facts = vec![
            text("metadata_device", &self.metadata.limits().name, "where the mappings are"),
            text("cache_device", &self.cache.disk().limits().name, "where cached data is"),
            text("mode", self.plan.args.features.mode.word(), "what becomes of writes"),
            number("block_bytes", block, "a block"),
            number("cached_bytes", u64::from(slots - free) * block, "slots in use"),
            number("dirty_bytes", u64::from(dirty) * block, "blocks that only the cache has"),
            number("metadata_blocks_used", used, "metadata blocks in use"),
            number("metadata_blocks", space, "metadata blocks that can be"),
            flag("metadata_is_failing", trouble.is_stuck, "commits fail, and are tried again"),
            flag("medium_has_failed", trouble.has_lost, "a flush of the cache device failed"),
            // Blocks go to the origin in no order of their writes.
            flag(
                "origin_is_consistent",
                dirty == 0 && !trouble.has_lost,
                "the origin alone is a state that a power cut could have left",
            ),
        ];
        facts.extend(origin_facts(&**self.origin.disk(), "origin"));
        let counts = &self.counts;
        facts.push(count("failed_commits_total", &counts.failed_commits, "commits that failed"));
        let about = "batches of write-back that failed";
        facts.push(count("failed_batches_total", &counts.failed_batches, about));
        let about = "reads of clean blocks that the cache device failed, and the origin served";
        facts.push(count("fallbacks_total", &counts.fallbacks, about));
        facts
    }

    pub(super) fn state_of_health(&self) -> Health {
        let trouble = self.blocks().trouble;
        let is_failing = self.background.lock().is_failing();
        let failure = if trouble.has_lost {
            Some("it refused a flush: what was written to it may be lost".to_owned())
        } else if trouble.is_stuck {
            Some("its metadata cannot be written".to_owned())
        } else {
            None
        };
        Health {
            origin: self.origin.disk().errors(),
            paced_by: refused_push(&**self.origin.disk()),
            medium: self.cache.disk().errors(),
            is_failing,
            failed_batches: self.counts.failed_batches.load(Ordering::Relaxed),
            medium_failure: failure,
            waited: 0,
        }
    }

    /// The blocks that only the cache has.
    pub(super) fn dirty_ranges(&self) -> OnlyCached {
        let blocks = self.blocks();
        let dirty = blocks.slots.dirty().iter();
        let dirty = dirty.filter_map(|slot| blocks.slots.block(slot as u32));
        let block_bytes = self.plan.block_bytes;
        OnlyCached::of(dirty.map(|block| (block * block_bytes, block_bytes)).collect(), true)
    }
}
