//! The background of a cache: its work, under its lock; the order of the work, and the time of the
//! next check.

use crate::common::cycle::Served;
use crate::common::throttle::Throttle;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::target::Port;
use crate::units::{Nanos, SECOND};

use super::Pcache;
use super::attach::Replay;
use super::gc::{ROUNDS_MAX, Sweep};
use super::layout::REGION_BYTES;
use super::pace::Pace;
use super::writeback::Writeback;

/// An open key set with keys is logged after this long.
const CLOSE_AFTER: Nanos = SECOND;
/// A drain has begun, and not all that is dirty is logged.
const NOT_LOGGED: u64 = u64::MAX;
/// How often the background checks whether the medium is complete.
const LOOK_EVERY: Nanos = SECOND / 10;

/// Why the background works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Occasion {
    /// The time has come, or the background was woken.
    Tick,
    /// A batch is on the backing device: the space that it freed is collected, and the next one may
    /// begin.
    BatchEnded,
}

/// State of the background's work. Its lock is the outermost one.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) now: Nanos,
    /// When the medium is checked next.
    look_at: Nanos,
    last_close: Nanos,
    pub(super) pace: Pace,
    pub(super) throttle: Throttle,
    pub(super) writeback: Writeback,
    pub(super) sweep: Sweep,
    pub(super) replay: Option<Replay>,
    /// Keys, or regions of the index, of a replay that a tick passes.
    pub(super) replay_slice: u64,
}

/// The background of a cache, and its state that other threads use.
#[derive(Debug)]
pub(super) struct Background {
    work: Mutex<Work>,
    is_draining: AtomicBool,
    /// A drain ends when this many bytes, of all dirty bytes ever stored, are written back.
    drains_to: AtomicU64,
    is_suspended: AtomicBool,
    /// The end left no record of the origin's state.
    pub(super) is_unmarked: AtomicBool,
    /// Whether a miss was served during a pause of write-back.
    pub(super) served: Served,
    /// Whether there is a [`Replay`].
    is_replaying: AtomicBool,
    /// Findings of the attach, and later ones.
    notes: Mutex<Vec<String>>,
}

impl Background {
    /// Starts with the remaining work and the findings of the attach.
    pub(super) fn new(
        writeback: Writeback,
        throttle: Throttle,
        replay: Option<Replay>,
        replay_slice: u64,
        notes: Vec<String>,
    ) -> Background {
        Background {
            is_draining: AtomicBool::new(false),
            is_unmarked: AtomicBool::new(false),
            served: Served::default(),
            drains_to: AtomicU64::new(NOT_LOGGED),
            is_suspended: AtomicBool::new(false),
            is_replaying: AtomicBool::new(replay.is_some()),
            work: Mutex::new(Work { writeback, throttle, replay, replay_slice, ..Work::default() }),
            notes: Mutex::new(notes),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Work> {
        lock(&self.work)
    }

    /// Whether everything is to be written back.
    pub(super) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::SeqCst)
    }

    pub(super) fn set_suspended(&self, is_suspended: bool) {
        self.is_suspended.store(is_suspended, Ordering::SeqCst);
    }

    /// Whether a part of the log is still to be replayed.
    pub(super) fn is_replaying(&self) -> bool {
        self.is_replaying.load(Ordering::Acquire)
    }

    /// All of the log is replayed, or the rest never will be.
    pub(super) fn note_replayed(&self) {
        self.is_replaying.store(false, Ordering::Release);
    }

    /// Adds a note for the user.
    pub(super) fn note(&self, what: String) {
        lock(&self.notes).push(what);
    }

    pub(super) fn notes(&self) -> Vec<String> {
        lock(&self.notes).clone()
    }
}

impl Pcache {
    /// Does the background's work. Returns when to look again.
    pub(super) fn tick_at(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        let was_suspended =
            mutants::is(Mutant::SuspendSeenEarly).then(|| self.background.is_suspended());
        let work = &mut *self.background.lock();
        work.now = now;
        if was_suspended.unwrap_or_else(|| self.background.is_suspended()) {
            return self.signals.room().plan(None);
        }
        if self.background.served.take() {
            work.writeback.end_early();
        }
        self.look_at_medium(work);
        self.replay_slice(work);
        self.mark_drain();
        self.work(work, Occasion::Tick, port);
        self.limit_writers(&mut work.throttle, now);
        self.give_up_if_hopeless(work);
        self.next_look(work)
    }

    /// A write of write-back is complete.
    pub(super) fn written_back(&self, io: DiskIo, port: &mut Port) {
        let work = &mut *self.background.lock();
        self.counters.writeback_ios.fetch_add(1, Ordering::Relaxed);
        self.complete_write(&mut work.writeback, io, port);
        self.plan_retry(&mut work.writeback, work.now);
    }

    /// A batch's flush is complete.
    pub(super) fn flushed_back(&self, io: DiskIo, port: &mut Port) {
        let work = &mut *self.background.lock();
        self.counters.writeback_ios.fetch_add(1, Ordering::Relaxed);
        if self.complete_flush(&mut work.writeback, &io) {
            self.work(work, Occasion::BatchEnded, port);
        }
        self.plan_retry(&mut work.writeback, work.now);
    }

    /// Does the work in this order: keys in memory are logged, logged data is written back, and
    /// data that was written back is collected, which frees space for waiting bios.
    fn work(&self, work: &mut Work, occasion: Occasion, port: &mut Port) {
        let has_closed = self.close_old_sets(work, self.is_urgent());
        match occasion {
            Occasion::Tick => {
                self.writeback_if_due(work, port);
                self.collect_enough(work, port);
            }
            Occasion::BatchEnded => self.collection_step(work),
        }
        self.look_at_collection(&mut work.pace);
        match occasion {
            // Data kept after keys that are not dirty can be given up, once write-back has passed
            // them.
            Occasion::Tick if work.pace.is_pressed() || self.stripes.dirty_bytes() == 0 => {
                self.writeback_if_due(work, port);
            }
            Occasion::Tick => {}
            Occasion::BatchEnded => self.go_on_writing(work, port),
        }
        if !has_closed && self.is_urgent() && self.is_all_in_open_sets(work) {
            // All logged data was passed without I/O, whose end would be an event.
            self.signals.work();
        }
    }

    /// A batch has ended well: the next one begins if write-back does not rest.
    fn go_on_writing(&self, work: &mut Work, port: &mut Port) {
        if mutants::is(Mutant::QuarantineLate) {
            self.set_aside_late(&work.writeback);
        }
        work.pace.batch_ended();
        if !work.pace.is_full() && !work.pace.is_pressed() {
            // The next tick knows the time.
            return self.signals.work();
        }
        let passed = self.log.dirty_tail();
        self.begin_batch(work, port);
        if self.log.dirty_tail() != passed {
            // Only marks and CLEAN keys: no further flush will end and check again, but a bio may
            // wait for this space.
            self.collection_step(work);
        }
    }

    /// Collects. If all that could be passed was passed and much of it was kept, collects again:
    /// each time more is condemned.
    fn collect_enough(&self, work: &mut Work, port: &mut Port) {
        self.collection_step(work);
        for _ in 0..ROUNDS_MAX {
            let is_over = !self.is_space_short() || self.background.is_suspended();
            if is_over || self.collector.lock().is_futile() {
                break;
            }
            self.close_old_sets(work, true);
            work.pace.press();
            self.writeback_if_due(work, port);
            self.press_collection();
            self.collection_step(work);
        }
        self.collector.lock().relax();
    }

    /// Collects, unless a part of the log is still to be replayed: the replay needs the log, and
    /// the data that it names, in the state that the attach found. And data written since must stay
    /// in the index, where it keeps older keys out. A suspended cache does not collect, because
    /// that adds keys to the open sets.
    fn collection_step(&self, work: &mut Work) {
        if self.has_stopped() {
            return;
        }
        if work.replay.is_none() || mutants::is(Mutant::CollectedBeforeReplayed) {
            self.collect(&mut work.sweep);
        }
    }

    /// Whether collection has to stop, because the cache is suspended.
    pub(super) fn has_stopped(&self) -> bool {
        self.background.is_suspended() && !mutants::is(Mutant::SuspendSeenEarly)
    }

    /// Starts write-back if it is time.
    fn writeback_if_due(&self, work: &mut Work, port: &mut Port) {
        self.take_pace(&mut work.pace, work.now);
        if work.pace.is_due(work.now) && self.log.dirty_tail() != self.log.head() {
            let is_new = work.writeback.is_idle();
            self.begin_batch(work, port);
            if is_new {
                work.pace.batch_begins(work.now);
            }
        }
    }

    fn begin_batch(&self, work: &mut Work, port: &mut Port) {
        let bytes = self.batch_bytes(&work.pace);
        self.writeback_step(&mut work.writeback, bytes, work.now, port);
    }

    /// The time when write-back will have work, if no event comes before.
    fn writeback_deadline(&self, work: &Work) -> Option<Nanos> {
        let Work { writeback, pace, .. } = work;
        let is_waiting = writeback.is_idle() && !writeback.is_stuck();
        let has_work = is_waiting && self.log.dirty_tail() != self.log.head();
        let due = || pace.deadline(self.max_age()).filter(|_| has_work);
        writeback.deadline().or_else(due)
    }

    /// Whether a part of the log is still to be replayed.
    pub fn is_replaying(&self) -> bool {
        self.background.is_replaying()
    }

    /// Replays a slice of the remaining keys.
    fn replay_slice(&self, work: &mut Work) {
        let Some(replay) = &mut work.replay else { return };
        let slice = work.replay_slice;
        let hidden_until = match replay.read(&self.media, &self.segments, self.crcs.as_ref(), slice)
        {
            Ok(true) => return,
            Ok(false) => {
                let regions = self.backing.limits().size_bytes.div_ceil(REGION_BYTES);
                if replay.join(&self.index, &self.stripes, regions, slice) {
                    return;
                }
                replay.hidden_until()
            }
            Err(status) => {
                let (at, until) = replay.range_left();
                self.background.note(format!(
                    "the log could not be read a second time ({status} at {at}): clean data is \
                     read from the backing device"
                ));
                // The hidden CLEAN keys are unknown, so no CLEAN key may outlive the others.
                Some(until)
            }
        };
        work.replay = None;
        self.collector.lock().pass_together(hidden_until);
        self.background.note_replayed();
    }

    /// When no room can be made any more, waiting is useless.
    fn give_up_if_hopeless(&self, work: &Work) {
        let has_failed_long = work.writeback.retry().is_hopeless(work.now);
        let is_stuck = work.writeback.is_stuck() || self.collector.lock().is_stuck();
        if has_failed_long || is_stuck || self.log.has_failed() {
            self.signals.room().give_up(Status::NoSpace);
        }
    }

    fn is_urgent(&self) -> bool {
        self.background.is_draining() || self.is_space_short()
    }

    /// See [`Target::set_draining`](crate::target::Target::set_draining).
    pub(super) fn order_drain(&self, is_draining: bool) {
        self.background.drains_to.store(NOT_LOGGED, Ordering::SeqCst);
        self.background.is_draining.store(is_draining, Ordering::SeqCst);
        self.mark_drain();
        if is_draining {
            self.background.served.force();
        }
        self.signals.work();
    }

    /// Determines the end of a drain, if it is not known yet. Open keys are logged first. Then all
    /// keys up to now precede all later keys in the log, and write-back follows the log.
    fn mark_drain(&self) {
        let background = &self.background;
        let is_known = background.drains_to.load(Ordering::SeqCst) != NOT_LOGGED;
        if !background.is_draining() || is_known || self.close_all(false).is_err() {
            return;
        }
        background.drains_to.store(self.stripes.came_bytes(), Ordering::SeqCst);
    }

    /// See [`Target::left_to_drain`](crate::target::Target::left_to_drain).
    pub(super) fn bytes_to_drain(&self) -> u64 {
        match self.background.drains_to.load(Ordering::SeqCst) {
            NOT_LOGGED => self.stripes.dirty_bytes(),
            until => until.saturating_sub(self.stripes.cleaned_bytes()),
        }
    }

    /// Checks at intervals whether the medium is complete. Once it has lost a part, no write is
    /// acknowledged any more.
    fn look_at_medium(&self, work: &mut Work) {
        if work.now < work.look_at || self.log.has_failed() {
            return;
        }
        work.look_at = work.now + LOOK_EVERY;
        if self.media.pmem.failure().is_some() {
            self.log.fail();
        }
    }

    /// Logs open sets that are old, or that write-back and collection wait for.
    /// Returns whether it tried.
    fn close_old_sets(&self, work: &mut Work, is_urgent: bool) -> bool {
        let is_old = work.now >= work.last_close + CLOSE_AFTER;
        let is_due = work.pace.share() > 0 && self.stripes.dirty_bytes() > 0;
        let is_waited_for = (is_urgent || is_due) && self.log.dirty_tail() == self.log.head();
        if is_old || is_waited_for {
            // Without space the keys stay in the open sets; the log remembers the failure of a
            // medium.
            let _ = self.close_each();
            work.last_close = work.now;
        }
        is_old || is_waited_for
    }

    /// Whether only the open sets have keys that write-back can pass.
    fn is_all_in_open_sets(&self, work: &Work) -> bool {
        work.writeback.is_idle()
            && !work.writeback.is_stuck()
            && self.log.dirty_tail() == self.log.head()
            && self.stripes.has_open_keys()
    }

    /// When to look again.
    fn next_look(&self, work: &Work) -> Option<Nanos> {
        let now = work.now;
        if work.replay.is_some() {
            self.signals.wakeup().keep();
            return Some(now);
        }
        let share = self.signals.room().plan(work.throttle.deadline());
        let has_work = self.stripes.has_open_keys() || self.log.dirty_tail() != self.log.head();
        if has_work || share.is_some() {
            self.signals.wakeup().keep();
            // Work that was due and is still left needs I/O first, which wakes the background.
            let moments = [self.writeback_deadline(work), share];
            let next = moments.into_iter().flatten().filter(|at| *at > now).min();
            return Some(next.unwrap_or(Nanos::MAX).min(now + CLOSE_AFTER));
        }
        self.signals.wakeup().next_look(now, CLOSE_AFTER)
    }
}
