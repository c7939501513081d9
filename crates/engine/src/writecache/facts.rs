//! What a cache tells of itself beyond the kernel's status line: its facts, and its maxima.

use crate::limits::{Limit, limit};
use crate::sync::atomic::Ordering;
use crate::sync::lock;
use crate::target::{Fact, count, flag, number, origin_facts, text};
use crate::units::SECOND;

use super::media::Medium;
use super::{Writecache, layout, openlist, round, walk, writeback};

/// Every stated maximum.
pub fn limits() -> [Limit; 10] {
    let list = (openlist::LIST_MAX * 2) as u64;
    [
        limit("writecache_origin_bytes", super::ORIGIN_BYTES_MAX, "an origin"),
        limit("writecache_blocks", layout::BLOCKS_MAX, "blocks of a cache"),
        limit("writecache_block_bytes", u64::from(layout::BLOCK_BYTES_MAX), "a block"),
        limit("writecache_stripes", openlist::STRIPES_MAX as u64, "parts with a lock of their own"),
        limit("writecache_open_blocks", list, "uncommitted blocks of a stripe"),
        limit(
            "writecache_metadata_writes",
            round::DEPTH_MAX as u64,
            "writes of a commit in flight",
        ),
        limit("writecache_batch_bytes", writeback::BATCH_BYTES_MAX, "a write-back batch"),
        limit("writecache_write_bytes", writeback::WRITE_BYTES_MAX, "one write to the origin"),
        limit("writecache_writes", writeback::DEPTH_MAX as u64, "writes to the origin in flight"),
        limit("writecache_damage_named", walk::PLACES_MAX as u64, "damaged entries that are named"),
    ]
}

impl Writecache {
    pub(super) fn all_facts(&self) -> Vec<Fact> {
        let mut facts = self.medium_facts();
        facts.extend(self.data_facts());
        facts.extend(origin_facts(&*self.origin, "origin"));
        facts.extend(self.progress_facts());
        facts.extend(self.totals());
        facts.extend(self.damage.iter().map(|damage| {
            text("damaged_entry", damage, "an entry that cannot be believed, and stays as it is")
        }));
        facts.extend(self.notes.iter().map(|note| {
            text("attach_note", note, "found at attach: damage that could be lived with, or a loss")
        }));
        facts
    }

    fn medium_facts(&self) -> Vec<Fact> {
        let failure = self.medium.failure();
        let about = "the cache device has no name any more: its data ends with this server";
        let mut facts = vec![
            flag("medium_is_deleted", self.medium.is_deleted(), about),
            text("cache_device", self.medium.name(), "where cached data is"),
            text("mode", self.args.mode.word(), "p: persistent memory, s: a disk"),
            flag(
                "medium_has_failed",
                self.has_failed() || failure.is_some(),
                "the cache device refused a commit or an overwrite, or lost a part: no more writes",
            ),
        ];
        let about = "what is wrong there";
        facts.extend(failure.map(|why| text("medium_failure", &why, about)));
        if let Medium::Disk(_) = &self.medium {
            let about = "committed blocks are overwritten where they are";
            facts.push(flag("overwrites_blocks", self.overwrites, about));
        }
        if let Medium::Pmem(pmem) = &self.medium {
            let medium = pmem.medium();
            facts.push(text("medium", &medium.description, "what makes stores durable there"));
            facts.push(flag(
                "medium_is_volatile",
                medium.is_volatile,
                "a power cut loses the cache",
            ));
        }
        facts
    }

    fn data_facts(&self) -> Vec<Fact> {
        let block_bytes = self.block_bytes();
        let dirty_bytes = u64::from(self.index.dirty()) * block_bytes;
        let aside_bytes = self.aside.len() as u64 * block_bytes;
        let linked_bytes = u64::from(self.index.linked()) * block_bytes;
        vec![
            text("origin_device", &self.origin.limits().name, "the slow device"),
            number("cache_bytes", self.geometry.blocks * block_bytes, "room for data"),
            number("block_bytes", block_bytes, "a block"),
            number("used_bytes", linked_bytes, "slots in use, those of older versions too"),
            number("dirty_bytes", dirty_bytes, "data that only the cache has"),
            number("quarantined_bytes", aside_bytes, "blocks of damaged entries: kept, not used"),
            number("index_bytes", self.index.memory_bytes(), "memory of the index"),
            number("seq_count", lock(&self.commit).seq, "the commit counter"),
            number("marks_waiting", self.marks_waiting() as u64, "slots not durably free yet"),
        ]
    }

    fn progress_facts(&self) -> Vec<Fact> {
        let background = lock(&self.background);
        let writeback = &background.writeback;
        let since = background.torn_since;
        let torn_for = since.map_or(0, |since| background.now.saturating_sub(since) / SECOND);
        vec![
            flag(
                "origin_is_consistent",
                self.is_origin_consistent(),
                "the origin alone is a state that a power cut could have left",
            ),
            number("origin_inconsistent_s", torn_for, "for how long it is not, in seconds"),
            flag("is_draining", self.cleans_all(), "writes back all it can"),
            flag("is_cleaner", self.is_cleaner.load(Ordering::Relaxed), "admits nothing new"),
            flag(
                "writeback_is_failing",
                writeback.retry().is_failing(),
                "write-back meets errors; it is retried with growing pauses",
            ),
            number(
                "writeback_pause_ms",
                writeback.retry().pause() / (SECOND / 1000),
                "the pause after the last failure; 0 when all is well",
            ),
        ]
    }

    fn totals(&self) -> [Fact; 7] {
        let counters = &self.counters;
        [
            count("commits_total", &counters.commits, "batches committed"),
            count("metadata_writes_total", &counters.metadata_writes, "writes of entries (mode s)"),
            count(
                "overwritten_blocks_total",
                &counters.overwrites,
                "blocks overwritten where they are (mode s)",
            ),
            count("writeback_batches_total", &counters.batches, "batches written back"),
            count("written_back_bytes_total", &counters.written_back_bytes, "written back"),
            count("writeback_failures_total", &counters.writeback_failures, "batches that failed"),
            count(
                "failed_requests_total",
                &counters.failed_requests,
                "refused by the cache device",
            ),
        ]
    }
}
