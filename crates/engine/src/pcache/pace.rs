//! The pace of write-back: when it works, and how hard.
//!
//! Data that is overwritten before it is written back need not be written at all, and clients need
//! the processor and the backing device themselves. So dirty data waits until one of these holds:
//!
//! 1. Space is short and all data left to collect is dirty, or writers are limited, or a drain was
//!    requested: then write-back never rests.
//! 2. Clients have made no request for a moment.
//! 3. Too much of the cache is dirty (`high_watermark`; a quarter of that in a full cache that
//!    keeps hot data), or data has been dirty for too long (`max_age`), or too much hot data is
//!    kept after dirty keys, where its space cannot be freed (pressure.rs). Then write-back takes a
//!    share of the time, and rests between its batches for the sake of clients. The share grows
//!    with the dirty data beyond the mark and with its age. It reaches all of the time halfway from
//!    the mark to a full cache, and at twice the age. So under any load dirty data gets no older
//!    than the backing device allows.

use std::collections::VecDeque;

use crate::units::{BLOCK, MIB, Nanos, SECOND};

use crate::common::throttle::{Amounts, Throttle};

use super::Pcache;
use super::gc::Collector;
use super::segment::{LOG_RESERVE, Segments};
use super::writeback::BATCH_BYTES_MAX;

/// After this long without requests, write-back does not disturb clients.
const IDLE_AFTER: Nanos = SECOND;
/// Data that became dirty within this part (1 / n) of the age counts as of one age.
const AGE_STEPS: u64 = 8;
/// Ages that are recorded separately; there are more only when the backing device cannot keep up.
const AGES_MAX: usize = 32;
/// The least share of the time that write-back takes when it works, in percent.
const SHARE_MIN: u64 = 25;
const SHARE_ALL: u64 = 100;
/// If the data kept after dirty keys is at most this percentage of its maximum, write-back need not
/// hurry.
const KEPT_BEHIND_MARK: u64 = 25;
/// From this percentage on, a full cache lets only a part (1 / n) of the mark wait: data that is
/// read again is worth more than writes that are saved. Measured with the trace cloudPhysicsIO: a
/// cache of 40 % of its blocks answers 38.0 % of the references instead of 35.7 %.
const KEPT_MARK: u64 = 10;
const MARK_SHARE: u64 = 4;
/// Longest rest between two batches.
const REST_MAX: Nanos = SECOND / 4;
/// Bytes of a batch while clients are at work; one batch is one piece of work of the background.
const GENTLE_BYTES: u64 = 8 * MIB;
/// A batch has no more than this part (1 / n) of the cache.
const BATCH_PART: u64 = 32;
/// Segments that the log has usually.
const LOG_SEGMENTS: u32 = 2;

/// Dirty data that came at about the same time.
#[derive(Clone, Copy, Debug)]
struct Age {
    /// When the first of it was seen.
    since: Nanos,
    /// The total of dirty bytes ever stored when the newest of this data was seen.
    came: u64,
}

/// State of time, clients, and the share that write-back takes.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The count of clients' requests at the last check, and the time when it changed last.
    done: u64,
    active_at: Nanos,
    ages: VecDeque<Age>,
    /// Parts of 100 of the time; 0: write-back waits.
    share: u64,
    /// When the present batch, or the last one, began.
    began: Nanos,
    /// A batch ended since the last tick.
    has_ended: bool,
    /// Collection has found all data that it may pass, and space is still short.
    is_pressed: bool,
    rests_until: Nanos,
}

impl Pace {
    /// Whether write-back must not rest.
    pub(super) fn is_full(&self) -> bool {
        self.share == SHARE_ALL
    }

    /// The share of the time that write-back takes, in percent; 0: dirty data waits.
    pub(super) fn share(&self) -> u64 {
        self.share
    }

    /// Whether only write-back can make room.
    pub(super) fn is_pressed(&self) -> bool {
        self.is_pressed
    }

    /// Only write-back can make room.
    pub(super) fn press(&mut self) {
        self.is_pressed = true;
    }

    /// Whether write-back may begin a batch now.
    pub(super) fn is_due(&self, now: Nanos) -> bool {
        self.is_full() || self.share > 0 && now >= self.rests_until
    }

    /// A batch begins.
    pub(super) fn batch_begins(&mut self, now: Nanos) {
        self.began = now;
    }

    /// A batch ended. Ticks know the time.
    pub(super) fn batch_ended(&mut self) {
        self.has_ended = true;
    }

    /// When something is due, as far as that is known.
    pub(super) fn deadline(&self, max_age: Nanos) -> Option<Nanos> {
        match self.share {
            0 => self.ages.front().map(|age| age.since.saturating_add(max_age)),
            _ => Some(self.rests_until),
        }
    }

    fn look_at_clients(&mut self, now: Nanos, done: u64) {
        if self.done != done {
            self.done = done;
            self.active_at = now;
        }
    }

    /// `came` dirty bytes were stored in all, and `went` of them are written back.
    fn look_at_ages(&mut self, now: Nanos, came: u64, went: u64, max_age: Nanos) {
        while self.ages.front().is_some_and(|age| age.came <= went) {
            self.ages.pop_front();
        }
        let is_full = self.ages.len() == AGES_MAX;
        match self.ages.back_mut() {
            Some(last) if is_full || now < last.since + max_age / AGE_STEPS => {
                last.came = last.came.max(came);
            }
            last => {
                if came > last.map_or(went, |last| last.came) {
                    self.ages.push_back(Age { since: now, came });
                }
            }
        }
    }

    /// The share that the age of the oldest dirty data asks for.
    fn share_of_age(&self, now: Nanos, max_age: Nanos) -> u64 {
        let age = self.ages.front().map(|age| now.saturating_sub(age.since));
        match age.and_then(|age| age.checked_sub(max_age)) {
            None => 0,
            Some(late) => grown(late, max_age),
        }
    }
}

/// The share that grows with `beyond`, up to all at `all`.
fn grown(beyond: u64, all: u64) -> u64 {
    let grown = u128::from(beyond) * u128::from(SHARE_ALL - SHARE_MIN) / u128::from(all.max(1));
    SHARE_ALL.min(SHARE_MIN + grown.min(u128::from(SHARE_ALL)) as u64)
}

/// Bytes of data that can be dirty. The log, the heads of all threads and the reserves have the
/// rest.
pub(super) fn usable_bytes(segments: &Segments, collector: &Collector) -> u64 {
    let count = segments.count();
    let others = LOG_SEGMENTS + LOG_RESERVE + collector.write_reserve() + segments.heads();
    let usable = count.saturating_sub(others).max(count / 4).max(1);
    u64::from(usable) * segments.blocks() * BLOCK / u64::from(count)
}

impl Pcache {
    /// Dirty data that may wait, in bytes.
    pub(super) fn dirty_mark(&self) -> u64 {
        self.room_bytes() / 100 * u64::from(self.args.high_watermark)
    }

    /// From this many dirty bytes on, write-back takes all of the time.
    pub(super) fn dirty_mark_full(&self) -> u64 {
        self.dirty_mark().midpoint(self.room_bytes())
    }

    /// Bytes that a batch may write now: batches are small parts of a small cache, so that space
    /// comes in small pieces.
    pub(super) fn batch_bytes(&self, pace: &Pace) -> u64 {
        let part = (self.room_bytes() / BATCH_PART).max(MIB);
        part.min(if pace.is_full() { BATCH_BYTES_MAX } else { GENTLE_BYTES })
    }

    /// Limits writers to the rate of write-back while much data is dirty.
    pub(super) fn limit_writers(&self, throttle: &mut Throttle, now: Nanos) {
        let cleaned = self.stripes.cleaned_bytes();
        throttle.look(now, Amounts { dirty: self.stripes.stored_bytes(), cleaned });
        throttle.apply(now, self.signals.room());
    }

    /// Room for data in all.
    fn room_bytes(&self) -> u64 {
        u64::from(self.segments.count()) * u64::from(self.media.geometry.data_bytes())
    }

    /// How old dirty data gets before it is written back.
    pub(super) fn max_age(&self) -> Nanos {
        u64::from(self.args.max_age_ms) * (SECOND / 1000)
    }

    /// Collection has done all it can.
    pub(super) fn look_at_collection(&self, pace: &mut Pace) {
        pace.is_pressed = self.is_space_short();
    }

    /// Determines the share of the time that write-back takes from now on.
    pub(super) fn take_pace(&self, pace: &mut Pace, now: Nanos) {
        let max_age = self.max_age();
        let (came, went) = (self.stripes.came_bytes(), self.stripes.cleaned_bytes());
        let misses = self.counters.read_misses.sum();
        pace.look_at_clients(now, came + misses + self.counters.read_hits.sum());
        pace.look_at_ages(now, came, went, max_age);
        let is_idle = now >= pace.active_at + IDLE_AFTER;
        let is_limiting = self.signals.room().is_shared();
        let is_urgent = pace.is_pressed || is_limiting || self.background.is_draining();
        // Clean data is passed at no cost.
        pace.share = match is_urgent || is_idle || came <= went {
            true => SHARE_ALL,
            false => {
                // Collection cannot pass dirty data, so dirty data takes space from hot data.
                let makes_room_for_hot = self.is_space_short() && self.kept_behind() >= KEPT_MARK;
                let mark = self.dirty_mark() / if makes_room_for_hot { MARK_SHARE } else { 1 };
                let of_fill = match self.stripes.dirty_bytes().checked_sub(mark) {
                    None | Some(0) => 0,
                    Some(beyond) => grown(beyond, self.dirty_mark_full() - mark),
                };
                // The data kept after dirty keys must not become so large that it has to yield.
                let of_kept = match self.kept_behind().checked_sub(KEPT_BEHIND_MARK) {
                    Some(beyond) if self.is_space_short() => grown(beyond, KEPT_BEHIND_MARK),
                    _ => 0,
                };
                of_fill.max(of_kept).max(pace.share_of_age(now, max_age))
            }
        };
        if std::mem::take(&mut pace.has_ended) && pace.share > 0 {
            let took = now.saturating_sub(pace.began);
            let rest = took.saturating_mul(SHARE_ALL - pace.share) / pace.share;
            pace.rests_until = now + rest.min(REST_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGE: Nanos = 10 * SECOND;

    #[test]
    fn ages_are_those_of_the_oldest_dirty_data() {
        let mut pace = Pace::default();
        // A hundred bytes are stored each second, and none are written back.
        for second in 1..=9 {
            pace.look_at_ages(second * SECOND, second * 100, 0, AGE);
        }
        assert_eq!(pace.share_of_age(10 * SECOND, AGE), 0);
        assert_eq!(pace.share_of_age(11 * SECOND, AGE), SHARE_MIN, "the first are old");
        assert_eq!(pace.share_of_age(21 * SECOND, AGE), SHARE_ALL);
        // The first five hundred are written back: the oldest is of the sixth second, or just
        // before.
        pace.look_at_ages(11 * SECOND, 1100, 500, AGE);
        assert_eq!(pace.share_of_age(14 * SECOND, AGE), 0);
        assert!(pace.share_of_age(17 * SECOND, AGE) >= SHARE_MIN);
        pace.look_at_ages(18 * SECOND, 1100, 1100, AGE);
        assert_eq!(pace.share_of_age(100 * SECOND, AGE), 0, "all data is clean");
    }

    #[test]
    fn ages_are_bounded_in_number() {
        let mut pace = Pace::default();
        for second in 1..=1000 {
            pace.look_at_ages(second * SECOND, second, 0, AGE);
        }
        assert!(pace.ages.len() <= AGES_MAX);
        assert_eq!(pace.ages.back().unwrap().came, 1000, "what came last counts with the rest");
    }

    #[test]
    fn shares_grow_to_all() {
        assert_eq!([grown(0, 100), grown(50, 100), grown(100, 100)], [25, 62, 100]);
        assert_eq!([grown(1 << 60, 1), grown(u64::MAX, 0)], [100, 100]);
    }
}
