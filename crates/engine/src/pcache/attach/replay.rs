//! The part of the log that an attach need not read before it serves. It is replayed in the
//! background, a slice with each tick, into a separate index, which then joins the live one.
//!
//! The survey (survey.rs) has walked the whole log and checked every key, knows which segments the
//! log needs, and has put into the live index the keys whose data only the cache has: keys at or
//! after dirty_tail that are not CLEAN. If a key is missing there, its data is on the backing
//! device, so a miss is correct, only slow. Later additions are correct as well, for these reasons:
//!
//! 1. The replay produces the same index as a replay before the first request would: it reads the
//!    same records in the same order, and its index is not used before it has read all of them. So
//!    an older version of a block is never visible on the way, and no CLEAN key is visible before
//!    all older keys are known that may have to hide it.
//! 2. The replay only fills gaps. A place in the live index either comes from the log's dirty part,
//!    and then the replay produces the same place, or it was written since, and is newer.
//! 3. No place is removed from the live index meanwhile: collection does not run, so no segment is
//!    reused, no place dies, and key_tail, before which a log may be reused, does not move. A range
//!    whose damaged copy is dropped is remembered and stays a gap.
//! 4. Read misses are not cached meanwhile: their CLEAN keys would follow older keys of the same
//!    blocks in the log, a state that a defect of the kernel also produces.
//! 5. The replay changes no data on the medium: after a crash the next attach does the same again.
//!
//! If the log cannot be read a second time, the replay is given up, and its index is never used:
//! the backing device has the same data.

use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pcache::datacrc::DataCrcs;
use crate::pcache::index::Index;
use crate::pcache::key::{keep_crc, put};
use crate::pcache::keylog::{LogReader, after};
use crate::pcache::layout::{Position, REGION_BYTES, Record};
use crate::pcache::media::Media;
use crate::pcache::segment::Segments;
use crate::pcache::stripes::Stripes;

/// How the part of the log that can wait is replayed.
#[derive(Clone, Copy, Debug)]
pub struct ReplayPace {
    /// A log of at most this many keys is replayed before the first request.
    pub at_once_max: u64,
    /// Keys, or regions of the index, that a tick passes.
    pub slice: u64,
}

impl Default for ReplayPace {
    /// Some milliseconds of work in one step; the rest in slices of about one millisecond.
    fn default() -> ReplayPace {
        ReplayPace { at_once_max: 64 << 10, slice: 8 << 10 }
    }
}

/// A replay under way.
#[derive(Debug)]
pub(in crate::pcache) struct Replay {
    reader: LogReader,
    at: Position,
    until: Position,
    index: Index,
    /// Keys read, and their total.
    keys: u64,
    total: u64,
    /// Whether a CLEAN key of the present set met other keys.
    has_hidden: bool,
    /// The last position in the log after a CLEAN key that other keys hide: the CLEAN key may be
    /// older than these (a kernel whose append failed wrote it), and must not outlive them.
    hidden_until: Option<Position>,
    /// Regions before this one have joined the live index.
    joined: u64,
    /// Ranges dropped from the live index meanwhile.
    dropped: Vec<(u64, u64)>,
}

impl Replay {
    /// A replay of the `total` keys in the log from `at` to `until`.
    pub(in crate::pcache) fn new(
        at: Position,
        until: Position,
        total: u64,
        index: Index,
    ) -> Replay {
        Replay {
            reader: LogReader::default(),
            at,
            until,
            index,
            keys: 0,
            total,
            has_hidden: false,
            hidden_until: None,
            joined: 0,
            dropped: Vec::new(),
        }
    }

    /// Keys that are still to be read.
    pub(in crate::pcache) fn keys_left(&self) -> u64 {
        self.total.saturating_sub(self.keys)
    }

    /// The index, and the position before which hidden keys must not outlive others, of a replay
    /// that has read all keys.
    pub(in crate::pcache) fn into_parts(self) -> (Index, Option<Position>) {
        (self.index, self.hidden_until)
    }

    /// Reads `count` more keys, in whole key sets. `false`: all are read.
    pub(in crate::pcache) fn read(
        &mut self,
        media: &Media,
        segments: &Segments,
        crcs: Option<&DataCrcs>,
        count: u64,
    ) -> Result<bool, Status> {
        let enough = self.keys.saturating_add(count);
        while self.at != self.until && self.keys < enough {
            let record = self.reader.read(media, segments, self.at, Some(self.until))?;
            let record = record.ok_or(Status::Corrupt)?;
            let next = after(self.at, &record);
            if let Record::Keys(set) = record {
                // All cache misses in parallel, not one after the other.
                set.iter().for_each(|key| self.index.touch(key.off.get()));
                set.iter().for_each(|key| self.index.touch_row(key.off.get()));
                for key in set {
                    if key.generation.get() > segments.generation(key.segment.get()) {
                        return Err(Status::Corrupt);
                    }
                    crcs.into_iter().for_each(|crcs| keep_crc(segments, crcs, key));
                    self.has_hidden |= put(&self.index, segments, key);
                }
                self.keys += set.len() as u64;
            }
            if std::mem::take(&mut self.has_hidden) {
                self.hidden_until = Some(next);
            }
            self.at = next;
        }
        Ok(self.at != self.until)
    }

    /// This range was dropped from the live index.
    pub(in crate::pcache) fn note_dropped(&mut self, offset: u64, len: u64) {
        self.dropped.push((offset, len));
    }

    /// Where a replay that cannot read the log stopped, and the end of its part of the log.
    pub(in crate::pcache) fn range_left(&self) -> (Position, Position) {
        (self.at, self.until)
    }

    /// The position before which hidden keys must not outlive others.
    pub(in crate::pcache) fn hidden_until(&self) -> Option<Position> {
        self.hidden_until
    }

    /// Joins up to `count` of all `regions` to the live index. Returns false after the last one.
    pub(in crate::pcache) fn join(
        &mut self,
        index: &Index,
        stripes: &Stripes,
        regions: u64,
        count: u64,
    ) -> bool {
        let end = self.joined.saturating_add(count).min(regions);
        for region in self.joined..end {
            let stripe = stripes.of(region * REGION_BYTES);
            let _lock = (!mutants::is(Mutant::JoinedUnlocked)).then(|| stripes.lock(stripe));
            for &(at, len) in self.dropped.iter().filter(|(at, _)| at / REGION_BYTES == region) {
                self.index.set(at, len, None);
            }
            index.join(&mut self.index, region as usize);
        }
        self.joined = end;
        end < regions
    }
}
