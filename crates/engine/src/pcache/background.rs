//! The background: its work, under its lock; the order of the work, and when to look again.

use crate::disk::DiskIo;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::target::Port;
use crate::units::{Nanos, SECOND};

use super::Pcache;
use super::attach::Replay;
use super::gc::{ROUNDS_MAX, Sweep};
use super::pace::Pace;
use super::writeback::Writeback;

/// An open key set with keys is logged after this long.
const CLOSE_AFTER: Nanos = SECOND;
/// How often the background checks whether the medium is complete.
const LOOK_EVERY: Nanos = SECOND / 10;

/// Why the background works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Occasion {
    /// The time has come, or the background was woken.
    Tick,
    /// A batch is on the backing device: what it freed is collected, and the next one may begin.
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
    is_suspended: AtomicBool,
    /// Whether there is a [`Replay`].
    is_replaying: AtomicBool,
    /// What the attach found, and what was found since.
    notes: Mutex<Vec<String>>,
}

impl Background {
    /// With what the attach has left to do, and what it found.
    pub(super) fn new(
        writeback: Writeback,
        replay: Option<Replay>,
        replay_slice: u64,
        notes: Vec<String>,
    ) -> Background {
        Background {
            is_draining: AtomicBool::new(false),
            is_suspended: AtomicBool::new(false),
            is_replaying: AtomicBool::new(replay.is_some()),
            work: Mutex::new(Work { writeback, replay, replay_slice, ..Work::default() }),
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

    pub(super) fn set_draining(&self, is_draining: bool) {
        self.is_draining.store(is_draining, Ordering::SeqCst);
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
            return None;
        }
        self.look_at_medium(work);
        self.replay_slice(work);
        self.work(work, Occasion::Tick, port);
        self.give_up_if_hopeless(work);
        self.next_look(work)
    }

    /// A write of write-back is complete.
    pub(super) fn written_back(&self, io: DiskIo, port: &mut Port) {
        let work = &mut *self.background.lock();
        self.complete_write(&mut work.writeback, io, port);
        self.plan_retry(work);
    }

    /// A batch's flush is complete.
    pub(super) fn flushed_back(&self, io: DiskIo, port: &mut Port) {
        let work = &mut *self.background.lock();
        if self.complete_flush(&mut work.writeback, &io) {
            self.work(work, Occasion::BatchEnded, port);
        }
        self.plan_retry(work);
    }

    /// Does the work in this order: keys that wait in memory are logged, logged data is written
    /// back, data that was written back is collected, and that makes room for bios that wait.
    fn work(&self, work: &mut Work, occasion: Occasion, port: &mut Port) {
        self.close_old_sets(work, self.is_urgent());
        match occasion {
            Occasion::Tick => {
                self.writeback_if_due(work, port);
                self.collect_enough(work, port);
            }
            Occasion::BatchEnded => self.collect(work),
        }
        self.look_at_collection(work);
        match occasion {
            // Data kept after keys that are not dirty can be given up, once write-back has passed
            // them.
            Occasion::Tick if work.pace.is_pressed() || self.stripes.dirty_bytes() == 0 => {
                self.writeback_if_due(work, port);
            }
            Occasion::Tick => {}
            Occasion::BatchEnded => self.go_on_writing(work, port),
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
        self.writeback_step(work, port);
        if self.log.dirty_tail() != passed {
            // Marks and CLEAN keys alone: no further flush will end and check again, but a bio may
            // wait for this room.
            self.collect(work);
        }
    }

    /// Collects; and if all that could be passed was passed, and much of it was kept, collects
    /// again: each time more is condemned.
    fn collect_enough(&self, work: &mut Work, port: &mut Port) {
        self.collect(work);
        for _ in 0..ROUNDS_MAX {
            let is_over = !self.is_space_short() || self.background.is_suspended();
            if is_over || self.collector.lock().is_futile() {
                break;
            }
            self.close_old_sets(work, true);
            work.pace.press();
            self.writeback_if_due(work, port);
            self.press_collection();
            self.collect(work);
        }
        self.collector.lock().relax();
    }

    fn is_urgent(&self) -> bool {
        self.background.is_draining() || self.is_space_short()
    }

    /// Checks now and then whether the medium is complete. Once it has lost a part, nothing more is
    /// acknowledged.
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
    fn close_old_sets(&self, work: &mut Work, is_urgent: bool) {
        let is_old = work.now >= work.last_close + CLOSE_AFTER;
        let is_due = work.pace.share() > 0 && self.stripes.dirty_bytes() > 0;
        let is_waited_for = (is_urgent || is_due) && self.log.dirty_tail() == self.log.head();
        if is_old || is_waited_for {
            // Without room the keys stay where they are; a failed medium is latched in the log.
            let _ = self.close_each();
            work.last_close = work.now;
        }
    }

    /// When to look again.
    fn next_look(&self, work: &Work) -> Option<Nanos> {
        let now = work.now;
        if work.replay.is_some() {
            self.signals.alarm().keep();
            return Some(now);
        }
        let has_work = self.stripes.has_open_keys() || self.log.dirty_tail() != self.log.head();
        if has_work {
            self.signals.alarm().keep();
            let next = self.writeback_deadline(work).unwrap_or(Nanos::MAX);
            return Some(next.clamp(now, now + CLOSE_AFTER));
        }
        self.signals.alarm().next_look(now, CLOSE_AFTER)
    }
}
