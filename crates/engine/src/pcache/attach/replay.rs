//! The part of the log that an attach need not read before it serves: replayed in the background, a
//! slice with each tick, into an index of its own, which then joins the one that readers see.
//!
//! The survey (survey.rs) has walked the whole log and checked every key, knows which segments the
//! log needs, and has put into the live index the keys that only the cache has: those at or after
//! dirty_tail that are not CLEAN. Data whose keys are missing there is on the backing device, so a
//! miss is correct, only slow. That later additions are correct as well rests on this:
//!
//! 1. The replay ends with the same index as a replay before the first request would have: it reads
//!    the same records in the same order, and its index is not used before it has read all. So an
//!    older version of a block is never visible on the way, nor a CLEAN key before all older keys
//!    are known that may have to hide it.
//! 2. It fills gaps only. A place in the live index is either from the log's dirty part, and then
//!    the replay ends with the same place, or it was written since, and is newer.
//! 3. Nothing leaves the live index meanwhile: nothing is collected, so no segment is reused, no
//!    place dies, and key_tail, before which a log may be reused, stays where it is. A range whose
//!    damaged copy is dropped is remembered and stays a gap.
//! 4. Read misses are not cached meanwhile: their CLEAN keys would stand in the log after older
//!    keys of the same blocks, as a kernel's defect leaves them.
//! 5. Nothing on the medium depends on it: after a crash the next attach does the same again.
//!
//! If the log cannot be read a second time, the replay is given up, and its index is never used:
//! the backing device has the same data.

use crate::error::Status;
use crate::mutants::{self, Mutant};

use crate::pcache::Pcache;
use crate::pcache::background::Work;
use crate::pcache::datacrc::DataCrcs;
use crate::pcache::index::Index;
use crate::pcache::key::{keep_crc, put};
use crate::pcache::keylog::{LogReader, after};
use crate::pcache::layout::{Position, REGION_BYTES, Record};
use crate::pcache::media::Media;
use crate::pcache::segment::Segments;

/// How the part of the log that can wait is replayed.
#[derive(Clone, Copy, Debug)]
pub struct ReplayPace {
    /// A log of at most this many keys is replayed before the first request.
    pub at_once_max: u64,
    /// Keys, or regions of the index, that a tick passes.
    pub slice: u64,
}

impl Default for ReplayPace {
    /// What takes some milliseconds in one go; the rest in slices of about one.
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
    /// The last place in the log after a CLEAN key that other keys hide: it may be older than they
    /// are (a kernel whose append failed wrote it), and must not outlive them.
    hidden_until: Option<Position>,
    /// Regions before this one have joined the live index.
    joined: u64,
    /// Ranges dropped from the live index meanwhile.
    dropped: Vec<(u64, u64)>,
}

impl Replay {
    /// A replay of the `total` keys that stand in the log from `at` to `until`.
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

    /// The index, and the place before which hidden keys must not outlive others, of a replay that
    /// has read all.
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
}

impl Pcache {
    /// Whether a part of the log is still to be replayed.
    pub fn is_replaying(&self) -> bool {
        self.background.is_replaying()
    }

    /// Replays a slice of what is left.
    pub(in crate::pcache) fn replay_slice(&self, work: &mut Work) {
        let Some(replay) = &mut work.replay else { return };
        let slice = work.replay_slice;
        match replay.read(&self.media, &self.segments, self.crcs.as_ref(), slice) {
            Ok(true) => return,
            Ok(false) => {}
            Err(status) => {
                let at = replay.at;
                self.background.note(format!(
                    "the log could not be read a second time ({status} at {at}): clean data is \
                     read from the backing device"
                ));
                // It is unknown which CLEAN keys are hidden: none may outlive the others.
                let until = replay.until;
                return self.end_replay(work, Some(until));
            }
        }
        if self.join_regions(replay, slice) {
            return;
        }
        let hidden_until = replay.hidden_until;
        self.end_replay(work, hidden_until);
    }

    fn end_replay(&self, work: &mut Work, hidden_until: Option<Position>) {
        work.replay = None;
        self.collector.lock().pass_together(hidden_until);
        self.background.note_replayed();
    }

    /// Joins some regions to the live index. `false`: all are joined.
    fn join_regions(&self, replay: &mut Replay, slice: u64) -> bool {
        let regions = self.backing.limits().size_bytes.div_ceil(REGION_BYTES);
        let end = replay.joined.saturating_add(slice).min(regions);
        for region in replay.joined..end {
            let offset = region * REGION_BYTES;
            let stripe = self.stripes.of(offset);
            let _lock = (!mutants::is(Mutant::JoinedUnlocked)).then(|| self.stripes.lock(stripe));
            for &(at, len) in replay.dropped.iter().filter(|(at, _)| at / REGION_BYTES == region) {
                replay.index.set(at, len, None);
            }
            self.index.join(&mut replay.index, region as usize);
        }
        replay.joined = end;
        end < regions
    }
}
