//! Facts of a cache beyond the kernel's status line, and its maxima.

use crate::base::limits::{Limit, limit};
use crate::base::retry::{GIVE_UP_AFTER, PAUSE_MAX};
use crate::target::{Fact, OnlyCached, count, flag, number, origin_facts, text};
use crate::units::{Nanos, SECOND, SECTOR};

use super::args::{HIGH_WATERMARK, MAX_AGE_MS};
use super::label::QUARANTINE_MAX;
use super::layout::{KEYS_MAX, REGION_BYTES, SEGMENTS_MAX};
use super::segment::HEADS_MAX;
use super::stripes::STRIPES_MAX;
use super::writeback::{
    BATCH_BYTES_MAX, BATCH_KEYS_MAX, DEPTH_MAX, WRITE_BYTES_MAX, ZEROES_BYTES_MAX,
};
use super::zero::KNOWN_ZEROES_MAX;
use super::{BACKING_BYTES_MAX, Pcache};

/// Every stated maximum.
pub fn limits() -> [Limit; 16] {
    let seconds = |nanos: Nanos| nanos / SECOND;
    [
        limit("pcache_backing_bytes", BACKING_BYTES_MAX, "a backing device"),
        limit("pcache_segments", SEGMENTS_MAX, "segments of 16 MiB of a cache device"),
        limit("pcache_open_sets", STRIPES_MAX as u64, "key sets that are open at a time"),
        limit("pcache_set_keys", KEYS_MAX as u64, "keys of a key set"),
        limit("pcache_data_heads", HEADS_MAX as u64, "segments that are being filled"),
        limit(
            "pcache_batch_bytes",
            BATCH_BYTES_MAX,
            "a write-back batch, or one key set; 16 bytes of known zeroes count as one",
        ),
        limit("pcache_batch_keys", BATCH_KEYS_MAX as u64, "keys of a write-back batch"),
        limit("pcache_write_bytes", WRITE_BYTES_MAX, "one write of data to the backing device"),
        limit(
            "pcache_zeroes_bytes",
            ZEROES_BYTES_MAX,
            "writes of zeroes to the backing device in flight",
        ),
        limit("pcache_writes", DEPTH_MAX as u64, "writes to the backing device in flight"),
        limit(
            "pcache_age_milliseconds",
            u64::from(MAX_AGE_MS),
            "how long dirty data waits, unless `max_age` is set",
        ),
        limit(
            "pcache_dirty_percent",
            u64::from(HIGH_WATERMARK),
            "of the cache's space that may be dirty before write-back begins, unless \
             `high_watermark` is set",
        ),
        limit("pcache_pause_seconds", seconds(PAUSE_MAX), "the pause after a failed write-back"),
        limit(
            "pcache_give_up_seconds",
            seconds(GIVE_UP_AFTER),
            "how long writes wait for a full cache whose backing device fails",
        ),
        limit("pcache_bad_ranges", QUARANTINE_MAX as u64, "ranges of damaged dirty data"),
        limit(
            "pcache_zero_extents",
            KNOWN_ZEROES_MAX as u64,
            "zero extents that are kept in memory",
        ),
    ]
}

impl Pcache {
    /// The data that the backing device may lack: all cached data, while any of it is dirty. Only
    /// the log, on the cache device, tells which data is dirty.
    pub(super) fn at_most_dirty(&self) -> OnlyCached {
        if self.stripes.dirty_bytes() == 0 {
            return OnlyCached { is_exact: true, ..OnlyCached::default() };
        }
        let mut ranges = Vec::new();
        for region in (0..self.index.regions()).filter(|region| self.index.is_used(*region)) {
            let (mut at, end) = (region * REGION_BYTES, (region + 1) * REGION_BYTES);
            while at < end {
                let piece = self.index.lookup(at, end, |place| self.is_live(place));
                if piece.place.is_some() {
                    ranges.push((at, piece.len));
                }
                at += piece.len.max(SECTOR);
            }
        }
        OnlyCached::of(ranges, false)
    }

    pub(super) fn all_facts(&self) -> Vec<Fact> {
        let mut facts = self.medium_facts();
        facts.extend(self.data_facts());
        facts.extend(origin_facts(&*self.backing, "backing device"));
        facts.extend(self.progress_facts());
        facts.extend(self.totals());
        facts.extend(self.background.notes().iter().map(|note| {
            text(
                "attach_note",
                note,
                "found when udm opened the cache: tolerable damage, or a loss",
            )
        }));
        facts
    }

    fn medium_facts(&self) -> Vec<Fact> {
        let medium = self.media.pmem.medium();
        let failure = self.media.pmem.failure();
        let mut facts = vec![
            text("cache_device", &medium.name, "where cached data is"),
            text("medium", &medium.description, "what makes stores durable there"),
            flag("medium_is_volatile", medium.is_volatile, "a power cut loses the cache"),
            flag(
                "medium_is_deleted",
                self.media.pmem.is_deleted(),
                "the cache device was deleted: its data is lost when this server ends",
            ),
            flag(
                "medium_has_failed",
                self.log.has_failed() || failure.is_some(),
                "the cache device refused a store, or lost a part",
            ),
        ];
        let copies = self.media.pmem.copies();
        let how = "instructions that store data there, by its size in bytes";
        facts.extend(copies.map(|copies| text("medium_copies", &copies, how)));
        let failure = failure.as_deref();
        facts.extend(failure.map(|failure| text("medium_failure", failure, "what is wrong there")));
        facts
    }

    fn data_facts(&self) -> Vec<Fact> {
        let segment_bytes = self.media.geometry.segment_bytes;
        let dirty_bytes = self.stripes.dirty_bytes();
        let cached_bytes = self.index.cached_bytes(|place| self.is_live(place));
        let used_bytes = u64::from(self.segments.used()) * segment_bytes;
        vec![
            text("backing_device", &self.backing.limits().name, "the slow device"),
            number("cache_bytes", self.media.pmem.len_bytes(), "size of the cache device"),
            number("used_bytes", used_bytes, "segments in use"),
            number("free_segments", u64::from(self.segments.free()), "segments free for reuse"),
            number("cached_bytes", cached_bytes, "of the device, readable from the cache"),
            number("dirty_bytes", dirty_bytes, "data that only the cache has"),
            number("quarantined_bytes", self.bad.bytes(), "damaged dirty data; reads of it fail"),
            number("index_bytes", self.index.memory_bytes(), "memory of the index"),
            text(
                "retention",
                self.collector.retention().name(),
                "which data is kept when space is short",
            ),
            number(
                "protected_segments",
                self.segments.main_count(),
                "segments of data that is kept",
            ),
        ]
    }

    fn progress_facts(&self) -> Vec<Fact> {
        let work = self.background.lock();
        let writeback = &work.writeback;
        let since = writeback.inconsistent_since();
        let torn_for = since.map_or(0, |since| work.now.saturating_sub(since) / SECOND);
        let mut facts = vec![
            flag(
                "origin_is_consistent",
                writeback.is_origin_consistent(),
                "the backing device alone is in a state that a power cut could have left",
            ),
            number("origin_inconsistent_s", torn_for, "for how long it has not been, in seconds"),
            number(
                "writeback_age_ms",
                u64::from(self.args.max_age_ms),
                "udm writes dirty data back that is older, in milliseconds",
            ),
            number(
                "writeback_mark_bytes",
                self.dirty_mark(),
                "write-back begins with more dirty data than this",
            ),
            number(
                "writeback_share_percent",
                work.pace.share(),
                "share of the time that write-back uses now; 0: dirty data waits",
            ),
            flag(
                "is_draining",
                self.background.is_draining(),
                "writes all dirty data back without a pause",
            ),
            flag(
                "writeback_is_failing",
                writeback.retry().is_failing(),
                "the backing device refuses writes; udm retries with growing pauses",
            ),
            number(
                "writeback_pause_ms",
                writeback.retry().pause() / (SECOND / 1000),
                "the pause after the last failure; 0 without a failure",
            ),
            flag("writeback_is_stuck", writeback.is_stuck(), "the log is damaged"),
            flag("collection_is_stuck", self.collector.lock().is_stuck(), "the log is damaged"),
        ];
        let what = "keys of the log that are not replayed yet: their data is clean, and is read \
                    from the backing device until then";
        let left = work.replay.as_ref().map(|replay| replay.keys_left());
        facts.extend(left.map(|left| number("replay_left_keys", left, what)));
        facts
    }

    fn totals(&self) -> [Fact; 16] {
        let counters = &self.counters;
        let batches_failed = &counters.writeback_failures;
        [
            number(
                "read_hits_total",
                counters.read_hits.sum(),
                "reads served from the cache alone",
            ),
            number(
                "read_misses_total",
                counters.read_misses.sum(),
                "reads that used the backing device",
            ),
            number("filled_bytes_total", counters.filled_bytes.sum(), "cached after a miss"),
            count("damaged_reads_total", &counters.damaged_reads, "cached data failed its CRC"),
            count("damaged_runs_total", &counters.damaged_runs, "dirty data set aside as damaged"),
            count(
                "parked_total",
                &self.signals.room().waited,
                "requests that waited for free space",
            ),
            count("writeback_batches_total", &counters.batches, "batches written back"),
            count("written_back_bytes_total", &counters.written_back_bytes, "written back"),
            count("writeback_failures_total", batches_failed, "batches that failed"),
            count("collected_keys_total", &counters.collected_keys, "keys processed by collection"),
            count("recycled_segments_total", &counters.recycled_segments, "segments reused"),
            count(
                "kept_bytes_total",
                &counters.kept_bytes,
                "hot data kept by logging its keys again",
            ),
            count("moved_bytes_total", &counters.moved_bytes, "hot data kept by copying it"),
            count("dropped_bytes_total", &counters.dropped_bytes, "data that was evicted"),
            count(
                "reclaimed_clean_bytes_total",
                &counters.yielded_bytes,
                "clean data evicted immediately, because writes would have waited",
            ),
            count(
                "inline_reclaims_total",
                &counters.helped,
                "steps of collection that writes carried out",
            ),
        ]
    }
}
