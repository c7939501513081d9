//! Facts of a cache beyond the kernel's status line, and its maxima.

use crate::base::limits::{Limit, limit};
use crate::target::{Fact, count, flag, number, origin_facts, text};
use crate::units::SECOND;

use super::media::Medium;
use super::{Writecache, layout, openlist, round, walk, writeback};

/// Bad blocks that a message names.
const NAMED_MAX: usize = 8;

/// All documented maxima.
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
            text("damaged_entry", damage, "a damaged entry, which udm leaves unchanged")
        }));
        facts.extend(self.device.notes.iter().map(|note| {
            text(
                "attach_note",
                note,
                "found when udm opened the cache: tolerable damage, or a loss",
            )
        }));
        facts
    }

    /// The reason why no more blocks can be written back, if it is the cache device.
    pub(super) fn cache_failure(&self) -> Option<String> {
        let name = self.device.medium.name();
        let failed = |what: String| Some(format!("cache device {name} failed: {what}"));
        if let Some(failure) = self.device.medium.failure() {
            return Some(failure);
        }
        let errors = self.device.errors();
        let last = errors.last.map_or(String::new(), |_| format!(" ({errors})"));
        if self.has_failed() {
            return failed(format!("a write or a flush failed{last}"));
        }
        let left = match self.orders.is_draining() {
            true => self.orders.awaited.count(),
            false => self.index.dirty(),
        };
        let background = self.background.lock();
        let unread = background.writeback().unread();
        let bad: Vec<u64> = unread.bad().collect();
        if left == 0 || !unread.is_dead() && bad.len() < left as usize {
            return None;
        }
        failed(format!("dirty data cannot be read from it{last}{}", self.named(bad)))
    }

    /// The positions of blocks on the device that clients see.
    fn named(&self, mut blocks: Vec<u64>) -> String {
        blocks.sort_unstable();
        let bytes = self.block_bytes();
        let named = blocks.iter().take(NAMED_MAX);
        let named: Vec<String> =
            named.map(|block| format!("{bytes} bytes at byte {}", block * bytes)).collect();
        let more = blocks.len() - named.len();
        match (named.is_empty(), more) {
            (true, _) => String::new(),
            (_, 0) => format!(": {}", named.join(", ")),
            _ => format!(": {}, and {more} more", named.join(", ")),
        }
    }

    /// Dirty blocks that write-back tried to read several times.
    fn unread_blocks(&self) -> u64 {
        self.background.lock().writeback().unread().bad().count() as u64
    }

    /// The operations that the cache device refuses, although it has not failed for good.
    fn refusal(&self) -> Option<String> {
        let name = self.device.medium.name();
        let refuses = self.device.refuses_writes() && !self.has_failed();
        refuses.then(|| format!("cache device {name} refuses writes ({})", self.device.errors()))
    }

    fn medium_facts(&self) -> Vec<Fact> {
        let (failure, unread_blocks) = (self.cache_failure(), self.unread_blocks());
        let about = "the cache device was deleted: its data is lost when this server ends";
        let mut facts = vec![
            flag("medium_is_deleted", self.device.medium.is_deleted(), about),
            text("cache_device", self.device.medium.name(), "where cached data is"),
            text("mode", self.plan.args.mode.word(), "p: persistent memory, s: a disk"),
            flag(
                "medium_has_failed",
                failure.is_some() || unread_blocks > 0,
                "the cache device failed a commit or an overwrite, lost a part, or cannot return \
                 dirty data",
            ),
            number(
                "unreadable_bytes",
                unread_blocks * self.block_bytes(),
                "dirty data that cannot be read from the cache device",
            ),
        ];
        let about = "the error of the cache device";
        facts.extend(failure.map(|why| text("medium_failure", &why, about)));
        let about = "operations that the cache device refuses";
        facts.extend(self.refusal().map(|what| text("medium_refusal", &what, about)));
        if let Medium::Disk(_) = &self.device.medium {
            let about = "committed blocks are overwritten in place";
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
            number("cache_bytes", self.device.geometry.blocks * block_bytes, "space for data"),
            number("block_bytes", block_bytes, "a block"),
            number("used_bytes", linked_bytes, "slots in use, including older versions"),
            number("dirty_bytes", dirty_bytes, "data that only the cache has"),
            number(
                "quarantined_bytes",
                aside_bytes,
                "blocks of damaged entries, which are kept but not used",
            ),
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
                "the origin alone is in a state that a power cut could have left",
            ),
            number("origin_inconsistent_s", torn_for, "for how long it has not been, in seconds"),
            flag(
                "is_draining",
                self.orders.cleans_all(),
                "writes all dirty data back without a pause",
            ),
            flag("is_cleaner", self.orders.is_cleaner(), "takes no new blocks"),
            flag(
                "writeback_is_failing",
                writeback.retry().is_failing(),
                "write-back meets errors of the origin; udm retries with growing pauses",
            ),
            number(
                "writeback_pause_ms",
                writeback.retry().pause() / (SECOND / 1000),
                "the pause after the last failure; 0 without a failure",
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
                "blocks overwritten in place (mode s)",
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
