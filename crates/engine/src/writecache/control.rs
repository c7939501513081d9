//! Status, table line, messages; suspend and the orderly end.

use crate::disk::Stamp;
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::table::Word;
use crate::units::SECTOR;

use super::drain::Awaited;
use super::{Writecache, memory};

/// After this many rounds without new writes, all blocks are committed and marked.
const SUSPEND_ROUNDS_MAX: u32 = 4;

/// The user's orders for an open cache.
#[derive(Debug)]
pub(super) struct Orders {
    is_cleaner: AtomicBool,
    is_draining: AtomicBool,
    /// The slots that a drain waits for.
    pub(super) awaited: Awaited,
    /// The message `flush`: write everything back once.
    is_flushing: AtomicBool,
    flushes_on_suspend: AtomicBool,
    is_suspended: AtomicBool,
}

impl Orders {
    /// `is_cleaner`: as the table says.
    pub(super) fn new(is_cleaner: bool) -> Orders {
        Orders {
            is_cleaner: AtomicBool::new(is_cleaner),
            is_draining: AtomicBool::new(false),
            awaited: Awaited::default(),
            is_flushing: AtomicBool::new(false),
            flushes_on_suspend: AtomicBool::new(is_cleaner),
            is_suspended: AtomicBool::new(false),
        }
    }

    /// Whether no new blocks are admitted.
    #[inline]
    pub(super) fn is_cleaner(&self) -> bool {
        self.is_cleaner.load(Ordering::Relaxed)
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::SeqCst)
    }

    /// Whether everything is to be written back once.
    pub(super) fn is_flushing(&self) -> bool {
        self.is_flushing.load(Ordering::SeqCst)
    }

    pub(super) fn set_draining(&self, is_draining: bool) {
        self.is_draining.store(is_draining, Ordering::SeqCst);
    }

    /// Whether a drain is under way.
    pub(super) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::SeqCst)
    }

    /// Write-back has written everything.
    pub(super) fn end_flush(&self) {
        self.is_flushing.store(false, Ordering::SeqCst);
    }

    /// Whether everything is to be written back.
    pub(super) fn cleans_all(&self) -> bool {
        [&self.is_draining, &self.is_flushing, &self.is_cleaner]
            .iter()
            .any(|order| order.load(Ordering::Relaxed))
    }
}

impl Writecache {
    /// No bio is in flight: all writes become durable, and with `flush_on_suspend` all dirty blocks
    /// are written to the origin; the background runs until that is done.
    pub(super) fn begin_suspend(&self) -> Result<()> {
        let cleans = self.orders.flushes_on_suspend.swap(false, Ordering::SeqCst);
        if cleans || self.orders.is_cleaner() {
            let _background = self.background.lock();
            self.orders.is_flushing.store(true, Ordering::SeqCst);
        }
        if mutants::is(Mutant::WcDetachedSaidEarly) {
            let _ = memory::say_at_rest(&self.device);
        }
        self.origin.hope();
        self.orders.is_suspended.store(true, Ordering::SeqCst);
        if self.plan.is_pmem() {
            let mut rounds = 0;
            while rounds < SUSPEND_ROUNDS_MAX && (self.has_open() || self.marks.waiting() > 0) {
                self.commit_until(self.rounds.next());
                rounds += 1;
            }
        }
        self.events.work();
        if self.has_failed() && self.index.dirty() > 0 {
            let what = "the last writes cannot be committed";
            return Err(self.device.medium.error(Kind::Io, what));
        }
        Ok(())
    }

    /// Whether, after a suspend, no I/O is in flight and no work is left. A failing origin does not
    /// delay a suspend: dirty data stays dirty.
    pub(super) fn is_at_rest(&self) -> bool {
        let background = self.background.lock();
        let writeback = background.writeback();
        let is_failing = self.is_hindered(writeback) || self.has_failed();
        let is_cleaning = self.orders.is_flushing() && self.index.dirty() > 0;
        if !writeback.is_idle() || is_cleaning && !is_failing || self.origin.is_unsettled() {
            return false;
        }
        let is_settled = || !self.has_open() && self.marks.waiting() == 0;
        self.commits.is_idle() && (is_settled() || self.has_failed())
    }

    /// See [`Target::is_durable`](crate::target::Target::is_durable). The failure of a cache device
    /// matters only for data that the origin lacks.
    pub(super) fn is_all_durable(&self) -> bool {
        let is_committed = !self.has_open() && !self.has_failed();
        !self.origin.owes_flush() && (self.index.dirty() == 0 || is_committed)
    }

    /// Clients submit bios again.
    pub(super) fn end_suspend(&self) {
        self.orders.is_suspended.store(false, Ordering::SeqCst);
        self.events.work();
    }

    /// The server detaches. The label records this if all acknowledged writes are committed;
    /// otherwise the label is not changed, and the next server takes the cache up. Returns whether
    /// it has the origin's state.
    pub(super) fn end(&self) -> bool {
        let is_all_committed = !self.has_open() && !self.has_failed() && !self.origin.owes_flush();
        if is_all_committed
            && self.device.label.is_served()
            && memory::say_at_rest(&self.device).is_ok()
        {
            self.lists.memory().end();
            return self.note_origin();
        }
        !self.device.label.is_served()
    }

    /// Records the stamp of the origin. If that fails, the next attach cannot detect changes.
    fn note_origin(&self) -> bool {
        let origin = self.origin.disk();
        let bytes = self.device.label.origin_sectors() * SECTOR;
        let stamp = Stamp::at_end(origin, bytes);
        let store = |stamp| memory::store_stamp(&self.device, stamp, self.commits.seq());
        stamp.is_some_and(|stamp| store(stamp).is_ok())
    }

    /// The kernel's 14 numbers.
    pub(super) fn status_line(&self) -> String {
        let (moving, is_failing) = {
            let background = self.background.lock();
            let writeback = background.writeback();
            (writeback.blocks(), writeback.retry().is_failing() || !writeback.unread().is_empty())
        };
        let has_error = is_failing || self.has_failed();
        let counter = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        format!(
            "{} {} {} {} {} {} {} {} {} {} {} {} {} {}",
            u8::from(has_error),
            self.device.geometry.blocks,
            self.available(),
            moving,
            self.counts.sum(|stats| &stats.reads),
            self.counts.sum(|stats| &stats.read_hits),
            self.counts.sum(|stats| &stats.writes),
            self.counts.sum(|stats| &stats.hits_uncommitted),
            self.counts.sum(|stats| &stats.hits_committed),
            self.counts.sum(|stats| &stats.around),
            self.counts.sum(|stats| &stats.allocated),
            counter(&self.room.waited),
            counter(&self.counts.flushes),
            counter(&self.counts.discards),
        )
    }

    /// The kernel's table words.
    pub(super) fn table_words(&self) -> String {
        format!(
            "{} {} {} {}",
            self.plan.args.mode.word(),
            Word::new(self.origin.disk().limits().kernel_name.as_str()).quoted(),
            Word::new(self.device.medium.kernel_name()).quoted(),
            self.plan.args.words()
        )
    }

    /// `flush`, `flush_on_suspend`, `cleaner`, `clear_stats`.
    pub(super) fn take_message(&self, words: &[String]) -> Result<String> {
        let invalid = |what: String| Err(Error::new(Kind::Invalid, format!("writecache: {what}")));
        let name = match words {
            [name] => name.to_ascii_lowercase(),
            [] => return invalid("a message is one word".into()),
            [name, ..] => return invalid(format!("message {name} takes no words")),
        };
        match name.as_str() {
            "flush" => self.take_flush()?,
            "flush_on_suspend" => {
                self.orders.flushes_on_suspend.store(true, Ordering::SeqCst);
            }
            "cleaner" => {
                self.orders.is_cleaner.store(true, Ordering::SeqCst);
                self.orders.flushes_on_suspend.store(true, Ordering::SeqCst);
                self.events.work();
            }
            "clear_stats" => {
                self.counts.clear(&self.index);
                self.room.waited.store(0, Ordering::Relaxed);
            }
            _ => return invalid(format!("unrecognised message received: {}", words[0])),
        }
        Ok(String::new())
    }

    /// Begins to write all dirty blocks back. It does not wait: the sender may watch the dirty
    /// bytes, and a failing origin cannot block it.
    fn take_flush(&self) -> Result<()> {
        if self.orders.is_suspended() {
            return Err(self
                .device
                .medium
                .error(Kind::Busy, "message flush: the device is suspended"));
        }
        if self.has_failed() {
            return Err(self
                .device
                .medium
                .error(Kind::Io, "message flush: the cache device has failed"));
        }
        // A tick that found no dirty block before must not count the message as carried out.
        let _background = (!mutants::is(Mutant::FlushForgotten)).then(|| self.background.lock());
        if self.index.dirty() > 0 {
            self.orders.is_flushing.store(true, Ordering::SeqCst);
            self.events.work();
        }
        Ok(())
    }
}
