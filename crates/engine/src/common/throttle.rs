//! The rate at which writers get space while the origin limits it.
//!
//! Below a mark of dirty data, writers are not limited: a burst has the speed of memory. Above it,
//! writers together get space at about the rate at which write-back makes data clean, so that no
//! writer ever waits for a lump of free space. The exact rate depends on how much dirty data there
//! is: halfway between the mark and the end, it is the rate of write-back; below, it is higher, and
//! above, it is lower. So the amount of dirty data settles in between.
//!
//! If write-back makes no progress, because the origin fails or hangs, writers get a small part of
//! the remaining space in each second, so that they slow down before the cache is full.
//!
//! OpenZFS's write throttle and Linux's `balance_dirty_pages` have the same shape. This is a pure
//! state machine: the engine tells it the time and the amounts.

use super::room::Room;
use crate::units::{KIB, MIB, Nanos, SECOND};

/// A smaller cache is not limited: a lump of its free space is soon there.
const USABLE_MIN: u64 = 16 * MIB;
/// How fast the estimate of write-back's rate follows: the weight of the past halves in about this
/// time.
const ESTIMATE_TIME: Nanos = 300 * MILLISECOND;
/// The rate at the mark and at the end, in percent of write-back's rate, and the least rate.
const FASTEST: u64 = 160;
const SLOWEST: u64 = 40;
const LEAST: u64 = 10;
/// If write-back makes no progress, this part (1 / n) of the remaining space is given out in each
/// second. The first part, before anything is known of write-back's rate, is the whole of it.
const REST_PART: u64 = 10;
/// Bytes in a second that writers get at least, so that they can always use the free space.
const PACE_MIN: u64 = MIB;
/// Space is given out at such intervals, at least and at most, and in between so that each writer
/// can write a block.
const INTERVAL_MIN: Nanos = MILLISECOND / 2;
const INTERVAL_MAX: Nanos = 10 * MILLISECOND;
/// The size of a usual write.
const USUAL_BYTES: u64 = 4 * KIB;
const MILLISECOND: Nanos = SECOND / 1000;

/// The amounts of data at one time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Amounts {
    /// Dirty bytes now.
    pub(crate) dirty: u64,
    /// Bytes that were made clean so far, in all.
    pub(crate) cleaned: u64,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Throttle {
    /// Dirty bytes from which writers are limited.
    mark: u64,
    /// Dirty bytes that are not exceeded by much.
    end: u64,
    /// Bytes that can be dirty.
    usable: u64,
    /// Bytes made clean in a second; `None`: not known.
    rate: Option<u64>,
    /// When `cleaned` changed last, and its value.
    changed: Option<(Nanos, u64)>,
    /// How long it had not changed then.
    took: Nanos,
    /// Since when writers are limited, or when they last got space.
    given_at: Option<Nanos>,
    /// Writers at the last time.
    writers: u64,
    /// Bytes in a second that they get.
    pace: u64,
}

impl Default for Throttle {
    /// Never limits anything.
    fn default() -> Throttle {
        Throttle::new(u64::MAX, u64::MAX)
    }
}

impl Throttle {
    /// For a cache of which `usable` bytes can be dirty, and whose write-back begins when `begins`
    /// bytes are dirty. The mark is three quarters of the usable bytes, or halfway between `begins`
    /// and all of them if that is more.
    pub(crate) fn new(usable: u64, begins: u64) -> Throttle {
        let usable = usable.max(1);
        let mark = match usable < USABLE_MIN {
            true => u64::MAX,
            false => begins.min(usable).midpoint(usable).max(usable / 4 * 3),
        };
        Throttle {
            mark,
            end: mark.saturating_add(usable.saturating_sub(mark) / 4 * 3),
            usable,
            rate: None,
            changed: None,
            took: 0,
            given_at: None,
            writers: 1,
            pace: 0,
        }
    }

    /// Whether writers are limited.
    pub(crate) fn is_on(&self) -> bool {
        self.given_at.is_some()
    }

    /// The time has come to look at the amounts, for any reason.
    pub(crate) fn look(&mut self, now: Nanos, amounts: Amounts) {
        if amounts.dirty < self.mark {
            // The rate is kept for the next time. The time until then does not count.
            (self.given_at, self.changed) = (None, None);
            return;
        }
        self.given_at.get_or_insert(now);
        self.learn(now, amounts.cleaned);
        self.pace = self.pace_for(now, amounts.dirty);
    }

    fn learn(&mut self, now: Nanos, cleaned: u64) {
        let Some((at, before)) = self.changed else {
            self.changed = Some((now, cleaned));
            return;
        };
        if cleaned == before || now <= at {
            return;
        }
        self.changed = Some((now, cleaned));
        // A counter may start again from zero.
        let Some(cleaned) = cleaned.checked_sub(before) else { return };
        let took = now - at;
        let sample = per_second(cleaned, took);
        let rate = self.rate.unwrap_or(sample);
        let part = |rate: u64, time: Nanos| u128::from(rate) * u128::from(time);
        let all = part(rate, ESTIMATE_TIME) + part(sample, took);
        self.rate = Some((all / u128::from(ESTIMATE_TIME + took)) as u64);
        self.took = took;
    }

    /// Bytes in a second that writers get.
    fn pace_for(&self, now: Nanos, dirty: u64) -> u64 {
        let rest = self.usable.saturating_sub(dirty);
        let Some(rate) = self.rate else { return rest.max(PACE_MIN) };
        let percent = match dirty.checked_sub(self.mark) {
            None => FASTEST,
            Some(beyond) => {
                let part = (FASTEST - SLOWEST) * beyond / (self.end - self.mark).max(1);
                FASTEST.saturating_sub(part).max(LEAST)
            }
        };
        // Write-back that has not advanced for long has become slower.
        let silent = self.changed.map_or(0, |(at, _)| now.saturating_sub(at));
        let usual = (4 * ESTIMATE_TIME).max(3 * self.took);
        let rate = if silent > usual { rate / (silent / usual + 1) } else { rate };
        (rate / 100 * percent).max(rest / REST_PART).max(PACE_MIN)
    }

    /// Bytes that `writers` writers, those that asked lately, may take from now on, in addition to
    /// earlier ones; `None`: it is too early.
    pub(crate) fn give(&mut self, now: Nanos, writers: u64) -> Option<u64> {
        self.writers = writers.max(1);
        let since = self.given_at?;
        if now < self.next(since) {
            return None;
        }
        self.given_at = Some(now);
        let elapsed = now.saturating_sub(since).min(2 * INTERVAL_MAX);
        Some((u128::from(self.pace) * u128::from(elapsed) / u128::from(SECOND)) as u64)
    }

    /// Gives out what is due now.
    pub(crate) fn apply(&mut self, now: Nanos, room: &Room) {
        if !self.is_on() {
            room.unlimit();
        } else if let Some(bytes) = self.give(now, room.askers()) {
            room.share(bytes);
        } else if !room.is_shared() {
            room.share(0);
        }
    }

    /// When to call [`Throttle::give`] next, if writers are limited.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.given_at.map(|since| self.next(since))
    }

    fn next(&self, since: Nanos) -> Nanos {
        let all = u128::from(self.writers * USUAL_BYTES) * u128::from(SECOND);
        let interval = (all / u128::from(self.pace.max(1))) as u64;
        since + interval.clamp(INTERVAL_MIN, INTERVAL_MAX)
    }
}

fn per_second(bytes: u64, took: Nanos) -> u64 {
    (u128::from(bytes) * u128::from(SECOND) / u128::from(took.max(1))) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Arc;
    use crate::units::GIB;

    const BLOCK: u64 = 4 * KIB;
    /// Time passes in such steps.
    const STEP: Nanos = MILLISECOND / 10;
    /// Blocks that all writers together can store in a step: the speed of memory.
    const STEP_BLOCKS: u64 = 60;

    /// A cache, writers that always have one more block, and an origin that takes batches.
    struct Model {
        room: Room,
        throttle: Throttle,
        now: Nanos,
        usable: u64,
        came: u64,
        cleaned: u64,
        /// Bytes in a second.
        origin: u64,
        /// The batch that is under way, and how much of it is done.
        batch: Option<(u64, u64)>,
        taken: Vec<u64>,
        /// Blocks of each step.
        steps: Vec<u64>,
        dirty_max: u64,
    }

    impl Model {
        fn new(usable: u64, origin: u64, writers: usize) -> Model {
            Model {
                room: Room::new(&Arc::default()),
                throttle: Throttle::new(usable, usable / 5 * 2),
                now: SECOND,
                usable,
                came: 0,
                cleaned: 0,
                origin,
                batch: None,
                taken: vec![0; writers],
                steps: Vec::new(),
                dirty_max: 0,
            }
        }

        fn dirty(&self) -> u64 {
            self.came - self.cleaned
        }

        /// A batch is a 32nd of the cache; it is clean when its flush has ended, after 5 ms.
        fn write_back(&mut self) {
            let part = self.usable / 32;
            let dirty = self.dirty();
            if self.batch.is_none() && dirty > self.usable / 5 * 2 {
                self.batch = Some((part, 0));
            }
            if let Some((bytes, done)) = &mut self.batch {
                *done += per_step(self.origin);
                if *done >= *bytes + self.origin / 200 {
                    self.cleaned += *bytes;
                    self.batch = None;
                }
            }
        }

        fn step(&mut self) {
            self.now += STEP;
            self.write_back();
            let amounts = Amounts { dirty: self.dirty(), cleaned: self.cleaned };
            self.throttle.look(self.now, amounts);
            self.throttle.apply(self.now, &self.room);
            let mut left = STEP_BLOCKS;
            let mut has_any = true;
            while has_any && left > 0 {
                has_any = false;
                // Each step begins with another writer.
                for nth in 0..self.taken.len() {
                    let port = (nth + self.steps.len()) % self.taken.len();
                    if left == 0 || self.dirty() + BLOCK > self.usable {
                        break;
                    }
                    if self.room.may_take(port) {
                        self.room.took(port, BLOCK);
                        self.came += BLOCK;
                        self.taken[port] += 1;
                        (left, has_any) = (left - 1, true);
                    }
                }
            }
            for port in 0..self.taken.len() {
                self.room.wants(port);
            }
            self.steps.push(STEP_BLOCKS - left);
            self.dirty_max = self.dirty_max.max(self.dirty());
        }

        fn run(&mut self, time: Nanos) {
            (0..time / STEP).for_each(|_| self.step());
        }

        /// The least and the highest rate over windows of this time since a step, as parts of the
        /// mean.
        fn extremes(&self, since: usize, time: Nanos) -> (f64, f64) {
            let steps = &self.steps[since..];
            let mean = steps.iter().sum::<u64>() as f64 / steps.len() as f64;
            let len = (time / STEP) as usize;
            let rate = |part: &[u64]| part.iter().sum::<u64>() as f64 / len as f64 / mean;
            let rates = steps.windows(len).map(rate);
            rates.fold((f64::MAX, 0.0), |(low, high), rate| (rate.min(low), rate.max(high)))
        }
    }

    /// Bytes in a second that batches with flushes make clean.
    fn with_flushes(usable: u64, origin: u64) -> u64 {
        let part = usable / 32;
        part * origin / (part + origin / 200)
    }

    fn per_step(rate: u64) -> u64 {
        rate / (SECOND / STEP)
    }

    /// Caches of several sizes before origins of several rates, with few and many writers.
    const CASES: [(u64, u64, usize); 8] = [
        (64 * MIB, 20 * MIB, 1),
        (384 * MIB, 80 * MIB, 1),
        (384 * MIB, 80 * MIB, 8),
        (384 * MIB, 80 * MIB, 64),
        (384 * MIB, 800 * MIB, 8),
        (384 * MIB, 10 * MIB, 8),
        (4 * GIB, 400 * MIB, 8),
        (16 * MIB, 200 * MIB, 4),
    ];

    #[test]
    fn writers_get_space_evenly_at_the_rate_of_the_origin() {
        for (usable, origin, writers) in CASES {
            let case = format!("{usable} bytes, {origin} bytes/s, {writers} writers");
            let mut model = Model::new(usable, origin, writers);
            // Long enough to fill the cache and to settle.
            let fill = usable / (STEP_BLOCKS * BLOCK) * STEP;
            model.run(fill + 4 * SECOND + usable / origin / 2 * SECOND);
            let (since, before) = (model.steps.len(), model.taken.clone());
            model.run(4 * SECOND);
            assert!(model.dirty_max < model.usable, "{case}: full");
            let (low, _) = model.extremes(since, 20 * MILLISECOND);
            assert!(low >= 0.4, "{case}: {low} of the mean rate over 20 ms");
            let (low, high) = model.extremes(since, 100 * MILLISECOND);
            assert!(low >= 0.7 && high <= 1.3, "{case}: {low} to {high} over 100 ms");
            let taken: Vec<u64> =
                model.taken.iter().zip(&before).map(|(now, before)| now - before).collect();
            let (least, most) = (taken.iter().min().unwrap(), taken.iter().max().unwrap());
            assert!(least * 10 >= most * 9, "{case}: {least} to {most} blocks of a writer");
            let bytes = taken.iter().sum::<u64>() * BLOCK;
            assert!(bytes >= 4 * with_flushes(usable, origin) / 10 * 9, "{case}: {bytes} in 4 s");
        }
    }

    #[test]
    fn a_burst_below_the_mark_is_not_limited() {
        let mut model = Model::new(GIB, 80 * MIB, 2);
        let blocks = GIB / 10 * 7 / BLOCK;
        model.run(blocks / STEP_BLOCKS * STEP);
        assert!(model.steps.iter().all(|blocks| *blocks == STEP_BLOCKS));
    }

    #[test]
    fn writers_slow_down_when_the_origin_is_stuck_and_recover_with_it() {
        for writers in [1, 8] {
            let mut model = Model::new(384 * MIB, 80 * MIB, writers);
            model.run(6 * SECOND);
            let origin = std::mem::take(&mut model.origin);
            let at = model.steps.len();
            model.run(5 * SECOND);
            assert!(model.dirty_max < model.usable, "not full, even after five seconds");
            let stuck: u64 = model.steps[at..].iter().sum();
            assert!(stuck > 0, "writers slow down, but do not stop");
            let last: u64 = model.steps[model.steps.len() - 10_000..].iter().sum();
            assert!(last > 0, "nor later");
            model.origin = origin;
            model.run(2 * SECOND);
            let since = model.steps.len();
            model.run(2 * SECOND);
            let (low, high) = model.extremes(since, 100 * MILLISECOND);
            assert!(low >= 0.7 && high <= 1.3, "{low} to {high} of the mean rate again");
            let bytes = model.steps[since..].iter().sum::<u64>() * BLOCK;
            assert!(bytes >= 2 * with_flushes(384 * MIB, origin) / 10 * 9, "{bytes} in 2 s");
        }
    }

    #[test]
    fn a_cache_that_is_to_be_filled_before_it_is_written_back_is_not_limited_before() {
        let throttle = |begins| Throttle::new(1000 * MIB, begins * MIB);
        assert_eq!((throttle(400).mark, throttle(400).end), (750 * MIB, 937 * MIB + MIB / 2));
        assert_eq!(throttle(900).mark, 950 * MIB);
        assert_eq!(throttle(1000).mark, 1000 * MIB);
        let mut full = throttle(1000);
        full.look(1, Amounts { dirty: 999 * MIB, cleaned: 0 });
        assert!(!full.is_on());
        let mut small = Throttle::new(USABLE_MIN - 1, 0);
        small.look(1, Amounts { dirty: USABLE_MIN, cleaned: 0 });
        assert!(!small.is_on());
    }

    #[test]
    fn counters_that_start_again_are_no_progress() {
        let mut throttle = Throttle::new(USABLE_MIN, 0);
        let at = |cleaned| Amounts { dirty: USABLE_MIN / 10 * 9, cleaned };
        throttle.look(SECOND, at(5000));
        throttle.look(2 * SECOND, at(10));
        assert_eq!(throttle.rate, None);
        throttle.look(3 * SECOND, at(110));
        assert_eq!(throttle.rate, Some(100));
    }
}
