//! The background, suspend and resume; status, table line, messages.

use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::lock;
use crate::table::Word;
use crate::target::Port;
use crate::units::{Nanos, SECOND};

use super::args::Mode;
use super::index::State;
use super::round::Phase;
use super::{Background, Stats, Writecache};

/// Parts of `max_age` that blocks are told apart by.
pub(super) const AGE_EPOCHS: u64 = 16;
/// `autocommit_time` where it is not given, in milliseconds.
const AUTOCOMMIT_TIME: u32 = 1000;
/// `pause_writeback` of mode `s` where it is not given, in milliseconds.
const PAUSE_WRITEBACK: u32 = 3000;

/// After so many rounds without new writes, everything is committed and marked.
const SUSPEND_ROUNDS_MAX: u32 = 4;
/// So often the background looks whether the medium is all there.
const LOOK_EVERY: Nanos = SECOND / 10;

fn millis(value: u32) -> Nanos {
    Nanos::from(value) * (SECOND / 1000)
}

impl Writecache {
    fn autocommit_time(&self) -> Nanos {
        millis(self.args.options.autocommit_time.unwrap_or(AUTOCOMMIT_TIME))
    }

    pub(super) fn pause_writeback(&self) -> Nanos {
        match self.args.mode {
            Mode::Pmem => 0,
            Mode::Ssd => millis(self.args.options.pause_writeback.unwrap_or(PAUSE_WRITEBACK)),
        }
    }

    /// How long an epoch is; `None`: blocks do not age.
    fn epoch_nanos(&self) -> Option<Nanos> {
        self.args.options.max_age.map(|age| (millis(age) / AGE_EPOCHS).max(1))
    }

    /// Whether blocks are too old as soon as they are there.
    pub(super) fn ages_at_once(&self) -> bool {
        self.args.options.max_age == Some(0)
    }

    /// A thread has looked for slots: is it time for the background to make some?
    pub(super) fn look_at_space(&self, port: &mut Port) {
        if self.available() <= self.watermarks.0 {
            self.events.work();
        }
        if self.are_marks_due() {
            self.ask_for_commit(port);
        }
    }

    /// A tick. Says when to come again.
    pub(super) fn work(&self, background: &mut Background, port: &mut Port) -> Option<Nanos> {
        let now = background.now;
        if let Some(epoch) = self.epoch_nanos() {
            self.epoch.store(now / epoch, Ordering::Relaxed);
        }
        self.look_at_medium(background);
        self.commit_if_due(background, port);
        self.writeback_step(background, port);
        if self.index.dirty() == 0 && background.writeback.is_idle() {
            self.mend(background);
            self.is_flushing.store(false, Ordering::SeqCst);
        }
        let owes_flush = self.is_suspended() && self.owes_flush() && !self.is_origin_refusing();
        if owes_flush && !self.is_flushing_origin.swap(true, Ordering::SeqCst) {
            self.flush_origin(port);
        }
        self.serve_waiting(background, port);
        self.give_up_if_hopeless(background);
        self.next_look(background)
    }

    /// Looks now and then whether the medium is all there. Once it has lost a part, nothing more is
    /// acknowledged.
    fn look_at_medium(&self, background: &mut Background) {
        if background.now < background.look_at || self.has_failed() {
            return;
        }
        background.look_at = background.now + LOOK_EVERY;
        if self.medium.failure().is_some() {
            self.stop();
        }
    }

    fn is_origin_refusing(&self) -> bool {
        self.is_origin_flush_refused.load(Ordering::SeqCst)
    }

    /// Rounds by the clock: for a batch that is open, and for marks that are not durable.
    fn commit_if_due(&self, background: &mut Background, port: &mut Port) {
        let now = background.now;
        let is_asked = self.is_commit_asked.swap(false, Ordering::SeqCst);
        if self.has_failed() || !self.has_open() && self.marks_waiting() == 0 {
            background.commit_at = None;
            return;
        }
        let at = *background.commit_at.get_or_insert(now + self.autocommit_time());
        if now >= at || is_asked || self.is_suspended() || self.are_marks_due() {
            background.commit_at = None;
            self.commit_soon(port);
            // A round may leave marks to the next one.
            if self.has_open() || self.marks_waiting() > 0 {
                let rest = if self.is_suspended() { SECOND / 10 } else { self.autocommit_time() };
                background.commit_at = Some(now + rest);
            }
        }
    }

    /// Bios that wait for a slot: lets them try if one is there, else does what may give one. A
    /// version that was written back may wait for the commit of the one that replaces it.
    fn serve_waiting(&self, background: &Background, port: &mut Port) {
        if !self.room.is_wanted() {
            return;
        }
        let helps = self.marks_waiting() > 0 || self.has_open() && background.writeback.is_idle();
        // In mode `p` who waits commits himself.
        if self.pool.has_any() || self.is_pmem() && helps {
            return self.signal_room();
        }
        if helps {
            self.commit_soon(port);
        }
    }

    /// When nobody can make room any more, waiting for ever helps nobody.
    fn give_up_if_hopeless(&self, background: &Background) {
        let has_failed_long = background.writeback.retry().is_hopeless(background.now);
        if self.room.is_wanted() && (has_failed_long || self.has_no_slots()) {
            self.room.give_up();
        }
    }

    /// Whether no slot will ever be free, because damaged entries keep all that there are. Any
    /// other slot comes round, also one that is in no list because a write is filling it.
    fn has_no_slots(&self) -> bool {
        if mutants::is(Mutant::SlotsInHandForgotten) {
            let is_free = |slot| self.index.word(slot).state() == State::Free;
            return (0..self.index.slots()).all(is_free) && !self.pool.has_any();
        }
        let is_kept = |slot| matches!(self.index.word(slot).state(), State::Aside | State::Damaged);
        self.aside.len() == self.index.slots() as usize && (0..self.index.slots()).all(is_kept)
    }

    /// When to look again.
    fn next_look(&self, background: &Background) -> Option<Nanos> {
        let now = background.now;
        if self.has_failed() {
            return None;
        }
        let ages = self.epoch_nanos().filter(|_| self.index.dirty() > 0);
        let moments = [
            background.commit_at,
            background.writeback.deadline(now).filter(|_| self.index.dirty() > 0),
            ages.map(|epoch| now + epoch.max(SECOND / 1000)),
        ];
        let next = moments.into_iter().flatten().min();
        if next.is_some() {
            self.alarm.keep();
            return next.map(|next| next.max(now + 1));
        }
        self.alarm.next_look(now, SECOND)
    }

    /// No bio is in flight: everything becomes durable, and with `flush_on_suspend` goes to the
    /// origin; the background goes on until that is so.
    pub(super) fn begin_suspend(&self) -> Result<()> {
        let cleans = self.flushes_on_suspend.swap(false, Ordering::SeqCst);
        if cleans || self.is_cleaner.load(Ordering::SeqCst) {
            let _background = lock(&self.background);
            self.is_flushing.store(true, Ordering::SeqCst);
        }
        if mutants::is(Mutant::WcDetachedSaidEarly) {
            let _ = super::memory::say_at_rest(&self.medium, &self.geometry, &self.label);
        }
        self.is_origin_flush_refused.store(false, Ordering::SeqCst);
        self.is_suspended.store(true, Ordering::SeqCst);
        if self.is_pmem() {
            let mut rounds = 0;
            while rounds < SUSPEND_ROUNDS_MAX && (self.has_open() || self.marks_waiting() > 0) {
                self.commit_until(self.begun.load(Ordering::SeqCst) + 1);
                rounds += 1;
            }
        }
        self.events.work();
        if self.has_failed() {
            let what = "what was written last cannot be committed";
            return Err(self.medium.error(Kind::Io, what));
        }
        Ok(())
    }

    /// Whether, after a suspend, nothing is in flight and nothing is left to do. A failing origin
    /// does not keep a suspend waiting: what is dirty stays dirty.
    pub(super) fn is_at_rest(&self) -> bool {
        let background = lock(&self.background);
        let is_failing = background.writeback.retry().is_failing() || self.has_failed();
        let is_cleaning = self.is_flushing.load(Ordering::SeqCst) && self.index.dirty() > 0;
        if !background.writeback.is_idle() || is_cleaning && !is_failing {
            return false;
        }
        let is_flushing_origin = self.is_flushing_origin.load(Ordering::SeqCst);
        if is_flushing_origin || self.owes_flush() && !self.is_origin_refusing() {
            return false;
        }
        let commit = lock(&self.commit);
        let is_settled = !self.has_open() && self.marks_waiting() == 0;
        commit.phase == Phase::Idle && (is_settled || self.has_failed())
    }

    fn sum(&self, counter: impl Fn(&Stats) -> &AtomicU64) -> u64 {
        self.stats.iter().map(|stats| counter(stats).load(Ordering::Relaxed)).sum()
    }

    /// The kernel's 14 numbers.
    pub(super) fn status_line(&self) -> String {
        let (moving, is_failing) = {
            let background = lock(&self.background);
            (background.writeback.blocks(), background.writeback.retry().is_failing())
        };
        let has_error = is_failing || self.has_failed();
        let counter = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        format!(
            "{} {} {} {} {} {} {} {} {} {} {} {} {} {}",
            u8::from(has_error),
            self.geometry.blocks,
            self.available(),
            moving,
            self.sum(|stats| &stats.reads),
            self.sum(|stats| &stats.read_hits),
            self.sum(|stats| &stats.writes),
            self.sum(|stats| &stats.hits_uncommitted),
            self.sum(|stats| &stats.hits_committed),
            self.sum(|stats| &stats.around),
            self.sum(|stats| &stats.allocated),
            counter(&self.room.waited),
            counter(&self.counters.flushes),
            counter(&self.counters.discards),
        )
    }

    /// The kernel's table words.
    pub(super) fn table_words(&self) -> String {
        format!(
            "{} {} {} {}",
            self.args.mode.word(),
            Word::new(self.origin.limits().kernel_name.as_str()).quoted(),
            Word::new(self.medium.kernel_name()).quoted(),
            self.args.words()
        )
    }

    /// `flush`, `flush_on_suspend`, `cleaner`, `clear_stats`.
    pub(super) fn take_message(&self, words: &[String]) -> Result<String> {
        let invalid = |what: String| Err(Error::new(Kind::Invalid, format!("writecache: {what}")));
        let name = match words {
            [name] => name.to_ascii_lowercase(),
            [] => return invalid("a message has one word".into()),
            [name, ..] => return invalid(format!("message {name} takes no words")),
        };
        match name.as_str() {
            "flush" => self.take_flush()?,
            "flush_on_suspend" => self.flushes_on_suspend.store(true, Ordering::SeqCst),
            "cleaner" => {
                self.is_cleaner.store(true, Ordering::SeqCst);
                self.flushes_on_suspend.store(true, Ordering::SeqCst);
                self.events.work();
            }
            "clear_stats" => self.clear_stats(),
            _ => return invalid(format!("unrecognised message received: {}", words[0])),
        }
        Ok(String::new())
    }

    /// Begins to write everything back. It does not wait: whoever sent it may watch the dirty
    /// bytes, and no failing origin can hold him up.
    fn take_flush(&self) -> Result<()> {
        if self.is_suspended() {
            return Err(self.medium.error(Kind::Busy, "message flush: the device is suspended"));
        }
        if self.has_failed() {
            return Err(self.medium.error(Kind::Io, "message flush: the cache device has failed"));
        }
        // A tick that has seen nothing dirty must not take it for carried out.
        let _background = (!mutants::is(Mutant::FlushForgotten)).then(|| lock(&self.background));
        if self.index.dirty() > 0 {
            self.is_flushing.store(true, Ordering::SeqCst);
            self.events.work();
        }
        Ok(())
    }

    fn clear_stats(&self) {
        for stripe in 0..self.stats.len() {
            let locked = self.index.lock(stripe);
            let stats = &self.stats[stripe];
            let counters = [
                &stats.reads,
                &stats.read_hits,
                &stats.writes,
                &stats.hits_uncommitted,
                &stats.hits_committed,
                &stats.around,
                &stats.allocated,
            ];
            counters.iter().for_each(|counter| counter.store(0, Ordering::Relaxed));
            drop(locked);
        }
        let counters = &self.counters;
        for counter in [&self.room.waited, &counters.flushes, &counters.discards] {
            counter.store(0, Ordering::Relaxed);
        }
    }
}
