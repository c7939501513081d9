//! Facts of a cache beyond the kernel's status line, and its maxima.

use crate::limits::{Limit, limit};
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
        facts.extend(origin_facts(&**self.origin.disk(), "origin"));
        facts.extend(self.progress_facts());
        facts.extend(self.totals());
        facts.extend(self.device.damage.iter().map(|damage| {
            text("damaged_entry", damage, "an entry that cannot be believed, and stays as it is")
        }));
        facts.extend(self.device.notes.iter().map(|note| {
            text("attach_note", note, "found at attach: damage that could be lived with, or a loss")
        }));
        facts
    }

    fn medium_facts(&self) -> Vec<Fact> {
        let failure = self.device.medium.failure();
        let about = "the cache device has no name any more: its data ends with this server";
        let mut facts = vec![
            flag("medium_is_deleted", self.device.medium.is_deleted(), about),
            text("cache_device", self.device.medium.name(), "where cached data is"),
            text("mode", self.plan.args.mode.word(), "p: persistent memory, s: a disk"),
            flag(
                "medium_has_failed",
                self.has_failed() || failure.is_some(),
                "the cache device refused a commit or an overwrite, or lost a part: no more writes",
            ),
        ];
        let about = "what is wrong there";
        facts.extend(failure.map(|why| text("medium_failure", &why, about)));
        if let Medium::Disk(_) = &self.device.medium {
            let about = "committed blocks are overwritten where they are";
            facts.push(flag("overwrites_blocks", self.plan.overwrites, about));
        }
        if let Medium::Pmem(pmem) = &self.device.medium {
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
        let aside_bytes = self.device.aside.len() as u64 * block_bytes;
        let linked_bytes = u64::from(self.index.linked()) * block_bytes;
        vec![
            text("origin_device", &self.origin.disk().limits().name, "the slow device"),
            number("cache_bytes", self.device.geometry.blocks * block_bytes, "room for data"),
            number("block_bytes", block_bytes, "a block"),
            number("used_bytes", linked_bytes, "slots in use, those of older versions too"),
            number("dirty_bytes", dirty_bytes, "data that only the cache has"),
            number("quarantined_bytes", aside_bytes, "blocks of damaged entries: kept, not used"),
            number("index_bytes", self.index.memory_bytes(), "memory of the index"),
            number("seq_count", self.commits.seq(), "the commit counter"),
            number("marks_waiting", self.marks.waiting() as u64, "slots not durably free yet"),
        ]
    }

    fn progress_facts(&self) -> Vec<Fact> {
        let background = self.background.lock();
        let writeback = background.writeback();
        let torn_for = writeback.torn_for(background.now()) / SECOND;
        vec![
            flag(
                "origin_is_consistent",
                self.is_origin_consistent(),
                "the origin alone is a state that a power cut could have left",
            ),
            number("origin_inconsistent_s", torn_for, "for how long it is not, in seconds"),
            flag("is_draining", self.orders.cleans_all(), "writes back all it can"),
            flag("is_cleaner", self.orders.is_cleaner(), "admits nothing new"),
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
        let counters = &self.counts;
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
