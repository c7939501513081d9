//! `io=lazy`: I/O through the page cache, with write-out at a steady rate.
//!
//! By default the page cache lets a writer run ahead by gigabytes, and then makes all writers wait
//! until it has caught up. Here all writers of a device share a budget of bytes that are dirty or
//! in write-out: the state machine in `pacer` decides which writer may continue, and which pages
//! are written out next. This file drives it:
//!
//! 1. A write asks the pacer first. A write that has to wait is taken out of its thread's ring, and
//!    returns to the ring as a cross-thread job when the pacer admits it. Writers do not start a
//!    write-out, and do not wait for one.
//! 2. Each file has a thread for its write-out ([`Background`]). It starts batches with
//!    sync_file_range, waits for the oldest, and lets the page cache drop the written pages,
//!    because there is a cache in front of this disk already. A device that is stuck blocks only
//!    the threads of its own files.
//! 3. cachestat checks the accounting. If the pages of a batch are clean, because the kernel or a
//!    flush has written them out, the pass is done. If more pages are dirty afterwards than
//!    the accounting allows, because the kernel skips pages that are already in write-out, the
//!    batch is written out once more.
//! 4. None of this is a flush: durability comes from fdatasync, as in every other mode. The thread
//!    has its own descriptor: the kernel reports a failed write-out once for each open file, and
//!    flushes must get the report as well.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::flushing::Flushing;
use super::pacer::{Pacer, Run, Step, Usage, Writer};
use super::pagecache;
use super::way::{Way, WayFound};

/// How bytes are read, if not as they are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadMode {
    /// As they are written.
    #[default]
    Same,
    /// Through the page cache, where what was read stays.
    Buffered,
}
use crate::error::{Error, Result};
use crate::mutants::{self, Mutant};
use crate::sync::statics::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, lock};
use crate::units::MIB;

/// The default limit of bytes that are dirty or being written out.
pub const WINDOW_BYTES: u64 = 16 * MIB;

/// A file without writes for about this long is written out.
const IDLE: Duration = Duration::from_millis(100);
/// Closing a file waits this long for a write-out in flight.
const END_MAX: Duration = Duration::from_secs(5);

/// A waiting write: the function that continues it when it is admitted.
pub(super) type Waiter = Box<dyn FnOnce(Reservation) + Send>;

/// The budget that the files of a mapped device share.
#[derive(Clone, Debug, Default)]
pub struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    pacer: Mutex<Pacer<Parked>>,
    /// Wakes the threads of all files; they wait with the pacer's lock.
    bell: Condvar,
    sleepers: AtomicU64,
    /// Copied from the pacer, so that each write reads it without the lock.
    write_bytes_max: AtomicU64,
}

impl Default for Shared {
    fn default() -> Shared {
        let pacer = Pacer::new();
        Shared {
            bell: Condvar::new(),
            sleepers: AtomicU64::new(0),
            write_bytes_max: AtomicU64::new(pacer.write_bytes_max()),
            pacer: Mutex::new(pacer),
        }
    }
}

/// The state of the write-out of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pacing {
    /// Most bytes that may be dirty or under write-out, over all files of the device.
    pub window_bytes: u64,
    /// Dirty, over all files.
    pub dirty_bytes: u64,
    /// Under write-out, over all files.
    pub write_out_bytes: u64,
    /// Writes that have waited for room, over all files.
    pub waited: u64,
    /// Batches of this file whose pages were clean already.
    pub skipped: u64,
    /// Batches of this file that were written out twice, because more was dirty than accounted for.
    pub again: u64,
    /// Batches of this file whose write-out failed. The next flush reports it.
    pub failed: u64,
    /// The method by which this file's pages get to the device, and the reason for it.
    pub way: &'static str,
    /// Whether a write has shown that the kernel does not write pages out by itself.
    pub is_push_refused: bool,
}

/// A waiting write, with the facts for its reservation.
struct Parked {
    lazy: Arc<Lazy>,
    pages: Range<u64>,
    goes_on: Waiter,
}

impl std::fmt::Debug for Parked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Parked({:?})", self.pages)
    }
}

/// A write's part of the budget. It is dropped when the write has ended, with or without success.
#[derive(Debug)]
pub(super) struct Reservation {
    lazy: Arc<Lazy>,
    ring: u64,
    pages: Range<u64>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Lazy { number, shared, .. } = &*self.lazy;
        let mut pacer = lock(&shared.pacer);
        pacer.written(Writer { file: *number, ring: self.ring }, self.pages.clone());
        shared.leave(pacer);
    }
}

/// One file with a steady write-out.
#[derive(Debug)]
pub(super) struct Lazy {
    number: u32,
    shared: Arc<Shared>,
    inner: Arc<Inner>,
}

/// The state of a file's write-out thread.
#[derive(Debug)]
struct Inner {
    file: OwnedFd,
    way: WayFound,
    reads: ReadMode,
    skipped: AtomicU64,
    again: AtomicU64,
    failed: AtomicU64,
    thread: Mutex<Option<ThreadId>>,
    ended: Condvar,
    flushing: Arc<Flushing>,
}

impl Lazy {
    /// The write-out of an open file, which is never flushed through this descriptor.
    pub(super) fn new(
        file: OwnedFd,
        name: &str,
        (window, reads): (u64, ReadMode),
        budget: &Budget,
        flushing: &Arc<Flushing>,
    ) -> Result<Arc<Lazy>> {
        let shared = budget.0.clone();
        let inner = Arc::new(Inner {
            file,
            way: WayFound::default(),
            reads,
            skipped: AtomicU64::new(0),
            again: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            thread: Mutex::new(None),
            ended: Condvar::new(),
            flushing: flushing.clone(),
        });
        let mut pacer = lock(&shared.pacer);
        let number = pacer.open(window);
        shared.note(&pacer);
        drop(pacer);
        let lazy = Arc::new(Lazy { number, shared: shared.clone(), inner: inner.clone() });
        let background = Background { number, shared, inner: inner.clone() };
        // The lock is held until the thread's number is stored: the thread clears it when it ends.
        let mut thread = lock(&inner.thread);
        let started = std::thread::Builder::new()
            .name("udm-write-out".into())
            .spawn(move || background.run())
            .map_err(|source| Error::from_io("starting a thread for", name, source));
        match started {
            Ok(started) => *thread = Some(started.thread().id()),
            Err(error) => {
                drop(thread);
                return Err(error);
            }
        }
        drop(thread);
        Ok(lazy)
    }

    /// Most bytes of one write.
    pub(super) fn write_bytes_max(&self) -> u64 {
        self.shared.write_bytes_max.load(Ordering::Relaxed)
    }

    /// The flags for a write now.
    pub(super) fn flags(&self) -> i32 {
        self.inner.way.flags()
    }

    /// A write with these flags was refused. Returns whether the write should be tried without
    /// these flags.
    pub(super) fn refused(&self, flags: i32) -> bool {
        self.inner.way.refused(flags)
    }

    /// A write with these flags has succeeded.
    pub(super) fn wrote(&self, flags: i32, offset: u64, len: u64) {
        self.inner.way.wrote(flags, || pagecache::look(&self.inner.file, offset, len));
    }

    /// Budget for a write by the thread of `ring`. If there is none, the write must [`Lazy::wait`].
    pub(super) fn reserve(self: &Arc<Lazy>, ring: u64, range: Range<u64>) -> Option<Reservation> {
        let pages = Pacer::<Parked>::pages(range);
        let writer = Writer { file: self.number, ring };
        let has_room = lock(&self.shared.pacer).try_hold(writer, pages.clone());
        has_room.then(|| Reservation { lazy: self.clone(), ring, pages })
    }

    /// A write waits for budget; then `goes_on` is called, on any thread.
    pub(super) fn wait(self: &Arc<Lazy>, ring: u64, range: Range<u64>, goes_on: Waiter) {
        let pages = Pacer::<Parked>::pages(range);
        let writer = Writer { file: self.number, ring };
        let parked = Parked { lazy: self.clone(), pages: pages.clone(), goes_on };
        let mut pacer = lock(&self.shared.pacer);
        pacer.wait(writer, pages, parked);
        self.shared.leave(pacer);
    }

    /// The file was flushed: its dirty pages are clean now.
    pub(super) fn flushed(&self) {
        let mut pacer = lock(&self.shared.pacer);
        pacer.idle(self.number);
        self.shared.leave(pacer);
    }

    /// The state of the write-out.
    pub(super) fn pacing(&self) -> Pacing {
        let Usage { budget, dirty, under_write_out, waited, .. } = lock(&self.shared.pacer).usage();
        Pacing {
            window_bytes: budget,
            dirty_bytes: dirty,
            write_out_bytes: under_write_out,
            waited,
            skipped: self.inner.skipped.load(Ordering::Relaxed),
            again: self.inner.again.load(Ordering::Relaxed),
            failed: self.inner.failed.load(Ordering::Relaxed),
            way: self.inner.way.words(),
            is_push_refused: matches!(self.inner.way.found(), Way::Refused | Way::InWriter),
        }
    }
}

impl Drop for Lazy {
    /// Ends the thread. If the thread is in a call on a device that never answers, it ends later.
    fn drop(&mut self) {
        let Ok(mut pacer) = self.shared.pacer.lock() else { return };
        pacer.close(self.number);
        self.shared.note(&pacer);
        self.shared.bell.notify_all();
        self.shared.leave(pacer);
        let thread = lock(&self.inner.thread);
        if thread.is_some_and(|thread| thread != std::thread::current().id()) {
            drop(self.inner.ended.wait_timeout(thread, END_MAX));
        }
    }
}

impl Shared {
    /// The budget may have changed.
    fn note(&self, pacer: &Pacer<Parked>) {
        self.write_bytes_max.store(pacer.write_bytes_max(), Ordering::Relaxed);
    }

    /// Releases the lock. Admits writes that may start now, and wakes threads that have work.
    fn leave(&self, mut pacer: MutexGuard<'_, Pacer<Parked>>) {
        if self.sleepers.load(Ordering::Relaxed) > 0 && pacer.is_any_due() {
            self.bell.notify_all();
        }
        let admitted = if pacer.has_admitted() { pacer.take_admitted() } else { Vec::new() };
        drop(pacer);
        for (writer, Parked { lazy, pages, goes_on }) in admitted {
            goes_on(Reservation { lazy, ring: writer.ring, pages });
        }
    }
}

/// The thread that writes a file out.
struct Background {
    number: u32,
    shared: Arc<Shared>,
    inner: Arc<Inner>,
}

impl Background {
    fn run(self) {
        let mut under_way: Vec<(u64, Vec<Run>)> = Vec::new();
        let mut pacer = lock(&self.shared.pacer);
        while let Some(step) = pacer.step(self.number) {
            match step {
                Step::Start { batch, runs } => {
                    drop(pacer);
                    if self.start(&runs) {
                        under_way.push((batch, runs));
                    } else {
                        self.end(batch);
                    }
                    pacer = lock(&self.shared.pacer);
                }
                Step::Wait { batch } => {
                    drop(pacer);
                    let place = under_way.iter().position(|(other, _)| *other == batch);
                    if let Some(place) = place {
                        self.wait(&under_way.remove(place).1);
                    }
                    self.end(batch);
                    pacer = lock(&self.shared.pacer);
                }
                Step::Rest { is_dirty } => pacer = self.rest(pacer, is_dirty),
            }
        }
        drop(pacer);
        *lock(&self.inner.thread) = None;
        self.inner.ended.notify_all();
    }

    /// Starts the write-out of a batch; false if its pages are clean.
    fn start(&self, runs: &[Run]) -> bool {
        let Range { start, end } = span(runs);
        let there = pagecache::look(&self.inner.file, start, end - start);
        if there.is_some_and(|there| there.unclean_bytes == 0) {
            self.inner.skipped.fetch_add(1, Ordering::Relaxed);
            self.forget(runs);
            return false;
        }
        if self.inner.way.found() != Way::Pushed {
            pagecache::start_write_out(&self.inner.file, start, end - start);
        }
        true
    }

    /// Waits for the write-out of a batch. The kernel drops the dirty mark of pages that it could
    /// not write, so all flushes that cover them have to fail.
    fn wait(&self, runs: &[Run]) {
        let Range { start, end } = span(runs);
        let (file, len) = (&self.inner.file, end - start);
        let is_good = match self.inner.way.found() {
            Way::Pushed => pagecache::finish_write_out(file, start, len),
            _ => pagecache::await_write_out(file, start, len),
        };
        let dirty = pagecache::look(file, start, len).map(|there| there.dirty_bytes);
        let is_more = |dirty| dirty > lock(&self.shared.pacer).dirty_at_most(self.number);
        // Without cachestat the number of dirty pages is unknown.
        let needs_more = dirty.is_none_or(is_more);
        #[cfg(test)]
        let (is_good, needs_more) = match self.inner.flushing.spoils_write_out() {
            true => (false, true),
            false => (is_good, needs_more),
        };
        let again = needs_more.then(|| {
            self.inner.again.fetch_add(1, Ordering::Relaxed);
            pagecache::finish_write_out(file, start, len)
        });
        if !is_out(is_good, again) {
            self.inner.failed.fetch_add(1, Ordering::Relaxed);
            self.inner.flushing.write_out_failed();
        }
        self.forget(runs);
    }

    /// Lets the page cache drop the written pages.
    fn forget(&self, runs: &[Run]) {
        if self.inner.way.found() == Way::Pushed {
            return;
        }
        match self.inner.reads {
            // Pages that were read in between are dropped as well.
            ReadMode::Same => pagecache::forget(&self.inner.file, span(runs)),
            ReadMode::Buffered => {
                runs.iter().for_each(|run| pagecache::forget(&self.inner.file, run.start..run.end));
            }
        }
    }

    fn end(&self, batch: u64) {
        let mut pacer = lock(&self.shared.pacer);
        pacer.ended(self.number, batch);
        self.shared.leave(pacer);
    }

    /// Sleeps until a step is due, or until the file had no step for [`IDLE`]. Wake-ups for other
    /// files do not make this longer.
    fn rest<'a>(
        &'a self,
        mut pacer: MutexGuard<'a, Pacer<Parked>>,
        is_dirty: bool,
    ) -> MutexGuard<'a, Pacer<Parked>> {
        let until = Instant::now() + IDLE;
        self.shared.sleepers.fetch_add(1, Ordering::Relaxed);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let (back, waited) = self
                .shared
                .bell
                .wait_timeout(pacer, left)
                .expect("a thread panicked while it held this lock");
            pacer = back;
            if pacer.is_due(self.number) {
                break;
            }
            if waited.timed_out() {
                if is_dirty {
                    pacer.idle(self.number);
                }
                break;
            }
        }
        self.shared.sleepers.fetch_sub(1, Ordering::Relaxed);
        pacer
    }
}

/// Whether a batch was written out. The kernel reports an error once, so a successful second
/// write-out does not make up for a failed first one.
fn is_out(first: bool, again: Option<bool>) -> bool {
    match again {
        Some(again) if mutants::is(Mutant::SecondWriteOutCounts) => again,
        Some(again) => first && again,
        None => first,
    }
}

/// From the first to the last byte of a batch.
fn span(runs: &[Run]) -> Range<u64> {
    let start = runs.first().map_or(0, |run| run.start);
    start..runs.last().map_or(start, |run| run.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_write_out_does_not_make_up_for_the_first() {
        assert!(is_out(true, None) && is_out(true, Some(true)));
        assert!(!is_out(false, None) && !is_out(true, Some(false)) && !is_out(false, Some(false)));
        assert!(!is_out(false, Some(true)));
    }

    #[cfg(feature = "mutants")]
    #[test]
    fn a_second_write_out_that_counts_is_found() {
        mutants::set(Some(Mutant::SecondWriteOutCounts));
        let is_found = is_out(false, Some(true));
        mutants::set(None);
        assert!(is_found);
    }
}
