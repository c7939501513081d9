//! Facts of a cache beyond the kernel's status line, and its maxima.

use crate::base::limits::{Limit, limit};
use crate::sync::atomic::Ordering;
use crate::target::{
    Fact, Health, OnlyCached, count, flag, number, origin_facts, refused_push, text,
};

use super::blocks::Blocks;
use super::metadata::counts::BLOCKS_MAX;
use super::{Cache, SLOTS_MAX, background, commit, copy, dirty_sectors, fill, partial};

/// Bad blocks that a message names.
const NAMED_MAX: usize = 8;

/// Every stated maximum.
pub fn limits() -> [Limit; 11] {
    [
        limit("cache_blocks", SLOTS_MAX, "blocks of a cache"),
        limit("cache_metadata_blocks", BLOCKS_MAX, "blocks of a metadata device that are used"),
        limit("cache_metadata_writes", commit::DEPTH_MAX as u64, "writes of a commit in flight"),
        limit("cache_batch_bytes", background::BATCH_BYTES_MAX, "a write-back batch"),
        limit("cache_copies_bytes", background::HURRY_BYTES_MAX, "write-back in flight"),
        limit("cache_copy_bytes", copy::PIECE_BYTES, "one I/O of a copy"),
        limit(
            "cache_promotions",
            fill::PROMOTIONS_MAX as u64,
            "blocks that are being promoted as a whole",
        ),
        limit("cache_partials", partial::PARTIALS_MAX as u64, "partially cached blocks"),
        limit(
            "cache_fill_bytes",
            fill::FILLS_BYTES_MAX,
            "data of requests that is being copied to the cache",
        ),
        limit(
            "cache_parts",
            dirty_sectors::PARTS_MAX as u64,
            "blocks with dirty and clean sectors",
        ),
        limit("cache_room", background::ROOM_MAX.into(), "slots that are freed together"),
    ]
}

const HAS_FAILED: &str =
    "the cache device failed a flush, lost a part, or cannot return dirty data";

impl Cache {
    pub(super) fn all_facts(&self) -> Vec<Fact> {
        let state = self.commits.lock();
        let (used, space) = state.writer.space();
        let metadata_failure = self.metadata_failure(&state);
        let has_lost_metadata = state.witness.loss().is_some();
        drop(state);
        let blocks = self.blocks();
        let (slots, free) = (blocks.slots.count(), blocks.slots.free());
        let (dirty, trouble) = (blocks.slots.dirty_count(), blocks.trouble);
        let bad = [&blocks.slots.aside.unread, &blocks.slots.aside.untaken]
            .map(|of| of.bad().count() as u64);
        let failure = self.cache_failure(&blocks);
        let refusal = self.origin_refusal(&blocks);
        let has_failed = failure.is_some() || has_lost_metadata || blocks.cannot_give_back();
        drop(blocks);
        let block = self.plan.block_bytes;
        let medium = self.cache.disk().errors();
        let mut facts = vec![
            text("metadata_device", &self.metadata.limits().name, "where the mappings are"),
            text("cache_device", &self.cache.disk().limits().name, "where cached data is"),
            text(
                "mode",
                self.plan.args.features.mode.word(),
                "when a write is complete: in the cache, or at the origin",
            ),
            number("block_bytes", block, "a block"),
            number("cached_bytes", u64::from(slots - free) * block, "slots in use"),
            number("dirty_bytes", u64::from(dirty) * block, "blocks that only the cache has"),
            number("metadata_blocks_used", used, "metadata blocks in use"),
            number("metadata_blocks", space, "metadata blocks that can be used"),
            flag("metadata_is_failing", trouble.is_stuck, "commits fail, and udm retries them"),
            flag("medium_has_failed", has_failed, HAS_FAILED),
            number("medium_errors_total", medium.count, "I/O of the cache device that failed"),
            number(
                "metadata_errors_total",
                self.metadata.errors().count,
                "I/O of the metadata device that failed",
            ),
            number(
                "quarantined_bytes",
                bad[0] * block,
                "dirty blocks that cannot be read from the cache device; reads of them may fail",
            ),
            number("refused_bytes", bad[1] * block, "dirty blocks that the origin refuses"),
            // Blocks go to the origin in no order of their writes.
            flag(
                "origin_is_consistent",
                dirty == 0 && !trouble.has_lost,
                "the origin alone is in a state that a power cut could have left",
            ),
        ];
        let about = "the error of the metadata device";
        facts.extend(metadata_failure.map(|why| text("metadata_failure", &why, about)));
        let about = "why the cache device stops write-back";
        facts.extend(failure.map(|failure| text("medium_failure", &failure, about)));
        let mut of_origin = origin_facts(&**self.origin.disk(), "origin");
        if !of_origin.iter().any(|fact| fact.name == "origin_failure") {
            let about = "blocks that the slow device refuses, if it accepts all others";
            of_origin.extend(refusal.map(|refusal| text("origin_failure", &refusal, about)));
        }
        facts.extend(of_origin);
        facts.extend(self.counted());
        let notes = self.notes.iter();
        facts.extend(notes.map(|note| {
            text("attach_note", note, "damage or losses that udm found when it opened the cache")
        }));
        facts
    }

    /// Counters since the cache was opened.
    fn counted(&self) -> Vec<Fact> {
        let mut facts = Vec::new();
        let counts = &self.counts;
        facts.push(count("failed_commits_total", &counts.failed_commits, "commits that failed"));
        let about = "batches of write-back that failed";
        facts.push(count("failed_batches_total", &counts.failed_batches, about));
        let about = "copies of dirty blocks that failed";
        facts.push(count("failed_copies_total", &counts.failed_copies, about));
        let about = "reads of clean blocks that the cache device failed, and the origin served";
        facts.push(count("fallbacks_total", &counts.fallbacks, about));
        let about = "writes that the cache device failed, and the origin stored";
        facts.push(count("passed_by_total", &counts.passed_by, about));
        facts
    }

    pub(super) fn state_of_health(&self) -> Health {
        let is_failing = self.background.lock().is_failing();
        let metadata_failure = self.metadata_failure(&self.commits.lock());
        let blocks = self.blocks();
        let failure = if blocks.trouble.has_lost {
            Some("a flush failed: data that was written to it may be lost".to_owned())
        } else if blocks.cannot_give_back() {
            Some("dirty blocks cannot be read from it".to_owned())
        } else {
            None
        };
        drop(blocks);
        Health {
            origin: self.origin.disk().errors(),
            paced_by: refused_push(&**self.origin.disk()),
            medium: self.cache.disk().errors(),
            metadata: self.metadata.errors(),
            is_failing,
            failed_batches: self.counts.failed_batches.load(Ordering::Relaxed),
            medium_failure: failure,
            metadata_failure,
            waited: 0,
        }
    }

    /// Why no more dirty data can be written back, if the cache device is the reason.
    fn cache_failure(&self, blocks: &Blocks) -> Option<String> {
        let disk = self.cache.disk();
        let name = &disk.limits().name;
        if let Some(loss) = disk.loss() {
            return Some(format!("cache device {name} failed: it {loss}"));
        }
        if blocks.trouble.has_lost {
            return Some(format!(
                "cache device {name} failed: a flush failed, and data that was written to it since \
                 the last flush may be lost"
            ));
        }
        let (unread, dirty) = (&blocks.slots.aside.unread, blocks.slots.to_drain());
        if unread.is_dead() && dirty > 0 {
            return Some(format!("cache device {name} failed: {}", disk.errors()));
        }
        let is_over = blocks.slots.has_only_bad() && blocks.cannot_give_back();
        is_over.then(|| {
            let named = self.named(blocks, unread.bad());
            format!(
                "cache device {name} failed: dirty blocks cannot be read from it ({}): {named}",
                disk.errors()
            )
        })
    }

    /// The dirty blocks that the origin does not accept, if no other block is left to write back.
    fn origin_refusal(&self, blocks: &Blocks) -> Option<String> {
        let untaken = &blocks.slots.aside.untaken;
        let is_over = untaken.has_bad_blocks() && blocks.slots.has_only_bad();
        is_over.then(|| {
            let disk = self.origin.disk();
            let (name, errors) = (&disk.limits().name, disk.errors());
            let named = self.named(blocks, untaken.bad());
            format!(
                "origin {name} refuses some blocks, and all others are written back \
                ({errors}): {named}"
            )
        })
    }

    /// Where these slots' blocks are on the device that clients see.
    fn named(&self, blocks: &Blocks, slots: impl Iterator<Item = u32>) -> String {
        let bytes = self.plan.block_bytes;
        let mut held: Vec<u64> = slots.filter_map(|slot| blocks.slots.block(slot)).collect();
        held.sort_unstable();
        let named = held.iter().take(NAMED_MAX);
        let named: Vec<String> =
            named.map(|block| format!("{bytes} bytes at byte {}", block * bytes)).collect();
        let more = held.len().saturating_sub(NAMED_MAX);
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        format!("{}{more}", named.join(", "))
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
