//! The background: one tick decides the next work, and a completion of write-back asks for a tick.

use crate::common::cycle::Served;
use crate::common::throttle::{Amounts, Throttle};
use crate::common::wakeup::Wakeup;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, lock};
use crate::target::{Events, Port};
use crate::units::{Nanos, SECOND};

use super::Writecache;
use super::index::State;
use super::writeback::Writeback;

/// How often the background checks whether the medium is complete.
const LOOK_EVERY: Nanos = SECOND / 10;

/// The background, and the part of it that other threads use without its lock.
#[derive(Debug)]
pub(super) struct Background {
    agenda: Mutex<Agenda>,
    wakeup: Wakeup,
    /// The end left no record of the origin's state.
    pub(super) is_unmarked: AtomicBool,
    /// Whether the origin has served a client during a pause of write-back.
    pub(super) served: Served,
    /// The present epoch: new blocks get it, so that their ages are known.
    epoch: AtomicU64,
}

/// State of the background.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    now: Nanos,
    /// The time of the next check of the medium.
    look_at: Nanos,
    /// The latest time for the commit of the open batch.
    commit_at: Option<Nanos>,
    writeback: Writeback,
    throttle: Throttle,
}

impl Agenda {
    /// Write-back, as it was at the last tick.
    pub(super) fn writeback(&self) -> &Writeback {
        &self.writeback
    }

    /// Write-back tries failed and unreadable blocks again immediately.
    pub(super) fn end_pause(&mut self) {
        self.writeback.cycle_mut().end_pause();
        self.writeback.unread_mut().end_pause();
    }

    /// The time of the last tick.
    pub(super) fn now(&self) -> Nanos {
        self.now
    }
}

impl Background {
    pub(super) fn new(events: &Arc<Events>, throttle: Throttle) -> Background {
        let wakeup = Wakeup::new(events);
        let agenda = Mutex::new(Agenda { throttle, ..Agenda::default() });
        let (served, is_unmarked) = (Served::default(), AtomicBool::new(false));
        Background { agenda, wakeup, is_unmarked, served, epoch: AtomicU64::new(0) }
    }

    /// Locks the background out.
    pub(super) fn lock(&self) -> MutexGuard<'_, Agenda> {
        lock(&self.agenda)
    }

    /// Whether write-back gets errors.
    pub(super) fn is_failing(&self) -> bool {
        self.lock().writeback.retry().is_failing()
    }

    #[inline]
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Makes sure that the background runs a tick.
    #[inline]
    pub(super) fn arm(&self) {
        self.wakeup.arm(false);
    }
}

impl Writecache {
    /// A thread has looked for slots: wakes the background if it is time to free some.
    pub(super) fn look_at_space(&self, port: &mut Port) {
        if self.available() <= self.plan.high_watermark {
            self.events.work();
        }
        if self.are_marks_due() {
            self.ask_for_commit(port);
        }
    }

    /// Blocks have become ready to be committed or written back, or a slot free: wakes the
    /// background if a bio waits for a slot. It may sleep until a later time, at which it would
    /// look again.
    pub(super) fn tell_of_progress(&self) {
        if self.room.is_short() {
            self.events.work();
        }
    }

    /// See [`Target::tick`](crate::target::Target::tick).
    pub(super) fn take_tick(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        let mut background = self.background.lock();
        background.now = now;
        if self.background.served.take() {
            background.writeback.cycle_mut().end_early();
        }
        self.work(&mut background, port);
        self.limit_writers(&mut background.throttle, now);
        self.next_look(&background)
    }

    /// An I/O of write-back is back.
    pub(super) fn writeback_is_back(&self, io: DiskIo, port: &mut Port) {
        let mut background = self.background.lock();
        let now = background.now;
        if self.complete_writeback(&mut background.writeback, now, io, port) {
            self.work(&mut background, port);
            // The tick sets the time of the next one.
            self.events.work();
        }
    }

    /// All of the background's work, in this order.
    fn work(&self, background: &mut Agenda, port: &mut Port) {
        let now = background.now;
        if let Some(epoch) = self.plan.epoch_nanos() {
            self.background.epoch.store(now / epoch, Ordering::Relaxed);
        }
        self.look_at_medium(background);
        self.commit_if_due(background, port);
        if self.index.dirty() == 0 && background.writeback.is_idle() {
            self.mend(&mut background.writeback);
            self.orders.end_flush();
        }
        self.writeback_step(&mut background.writeback, now, port);
        if self.orders.is_suspended() && self.origin.begin_own_flush() {
            self.flush_origin(port);
        }
        self.serve_waiting(background, port);
        self.give_up_if_hopeless(background);
    }

    /// Checks at intervals whether the medium is complete. Once it has lost a part, no write is
    /// acknowledged any more.
    fn look_at_medium(&self, background: &mut Agenda) {
        if background.now < background.look_at || self.has_failed() {
            return;
        }
        background.look_at = background.now + LOOK_EVERY;
        if self.device.medium.failure().is_some() {
            self.stop();
        }
    }

    /// Commits by the clock: for a batch that is open, and for marks that are not durable.
    fn commit_if_due(&self, background: &mut Agenda, port: &mut Port) {
        let now = background.now;
        let is_asked = self.commits.take_request();
        if self.has_failed() || !self.has_open() && self.marks.waiting() == 0 {
            background.commit_at = None;
            return;
        }
        let at = *background.commit_at.get_or_insert(now + self.plan.autocommit_time());
        if now >= at || is_asked || self.orders.is_suspended() || self.are_marks_due() {
            background.commit_at = None;
            self.commit_soon(port);
            // A round may leave marks to the next one.
            if self.has_open() || self.marks.waiting() > 0 {
                // A round may be stuck, and the time of the table may be 0.
                let rest = match self.orders.is_suspended() {
                    true => SECOND / 10,
                    false => self.plan.autocommit_time().max(SECOND / 10),
                };
                background.commit_at = Some(now + rest);
            }
        }
    }

    /// Bios that wait for a slot: retries them if there is a free one, else does work that may free
    /// one. A version that was written back may wait for the commit of the version that replaces
    /// it.
    fn serve_waiting(&self, background: &Agenda, port: &mut Port) {
        if !self.room.is_wanted() {
            return;
        }
        let helps = self.marks.waiting() > 0 || self.has_open() && background.writeback.is_idle();
        // In mode `p` a thread that waits commits by itself.
        if self.pool.has_any() || self.plan.is_pmem() && helps {
            return self.signal_room();
        }
        if helps {
            self.commit_soon(port);
        }
    }

    /// If no slot can be freed any more, waiting bios get an error. Dirty data that cannot be read
    /// keeps its slots until the cache device works.
    fn give_up_if_hopeless(&self, background: &Agenda) {
        if !self.room.is_wanted() {
            return;
        }
        let (writeback, now) = (&background.writeback, background.now);
        if writeback.unread().is_all(self.index.dirty()) {
            self.room.give_up(Status::Io);
        } else if writeback.retry().is_hopeless(now) || self.has_no_slots() {
            self.room.give_up(Status::NoSpace);
        }
    }

    /// Whether no slot will ever be free, because damaged entries occupy all of them. Any other
    /// slot becomes free again, even one that is in no list because a write is filling it.
    fn has_no_slots(&self) -> bool {
        if mutants::is(Mutant::SlotsInHandForgotten) {
            let is_free = |slot| self.index.word(slot).state() == State::Free;
            return (0..self.index.slots()).all(is_free) && !self.pool.has_any();
        }
        let is_kept = |slot| matches!(self.index.word(slot).state(), State::Aside | State::Damaged);
        self.device.aside.len() == self.index.slots() as usize
            && (0..self.index.slots()).all(is_kept)
    }

    /// Limits writers to the rate of write-back while few slots are free.
    fn limit_writers(&self, throttle: &mut Throttle, now: Nanos) {
        let taken = self.plan.usable(&self.device).saturating_sub(u64::from(self.pool.free()));
        let cleaned = self.counts.cleaned_bytes.load(Ordering::Relaxed);
        throttle.look(now, Amounts { dirty: taken * self.block_bytes(), cleaned });
        throttle.apply(now, &self.room);
    }

    /// The time of the next tick.
    fn next_look(&self, background: &Agenda) -> Option<Nanos> {
        let now = background.now;
        if self.has_failed() {
            return self.room.plan(None);
        }
        let share = self.room.plan(background.throttle.deadline());
        let ages = self.plan.epoch_nanos().filter(|_| self.index.dirty() > 0);
        let moments = [
            background.commit_at,
            background.writeback.deadline(now).filter(|_| self.index.dirty() > 0),
            ages.map(|epoch| now + epoch.max(SECOND / 1000)),
            share,
        ];
        // Work that was due and is still left needs I/O first, which wakes the background.
        let next = moments.into_iter().flatten().filter(|at| *at > now).min();
        if next.is_some() {
            self.background.wakeup.keep();
            return next;
        }
        self.background.wakeup.next_look(now, SECOND)
    }
}
