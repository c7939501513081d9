//! `io=lazy`: through the page cache, with write-out at a steady pace.
//!
//! Left alone, the page cache lets a writer run ahead by gigabytes and then makes everybody wait
//! while it catches up. Here what is dirty or being written out stays below [`WINDOW_BYTES`]:
//!
//! 1. A write first reserves its pages in the window. Bytes leave the window when a *sweep*, a
//!    sync_file_range of the whole file that began after they were written, has ended. (The kernel
//!    finds the dirty pages by their tags; a sweep costs what there is to write, not the size.)
//! 2. A sweep begins behind the write that makes [`SWEEP_BYTES`] wait for one; nobody waits for
//!    it. One of these runs at a time: what comes meanwhile is merged into the next. Behind
//!    it the file's clean pages are dropped: a cache is in front already.
//! 3. A write that finds no room waits for a sweep of its own: it cannot wait for ever for one that
//!    another thread began and may be slow to see the end of.
//! 4. Nothing of this is a flush: durability is what fdatasync says, as in every other mode.

use std::os::fd::OwnedFd;

use super::{DiskIo, Ring, Work};
use crate::buffer::Buffer;
use crate::ring::{Call, Job, Memory};
use crate::sync::{Arc, Mutex, lock};
use crate::units::MIB;

/// Most bytes that are dirty or being written out.
pub const WINDOW_BYTES: u64 = 16 * MIB;
/// Bytes that are worth a sweep.
const SWEEP_BYTES: u64 = WINDOW_BYTES / 4;
/// Most bytes of one call, so that a long write does not fill the window alone.
pub(super) const WRITE_BYTES_MAX: u64 = MIB;
/// What the page cache counts in.
const PAGE: u64 = 4096;

/// The write-out of one file.
#[derive(Debug)]
pub(super) struct Lazy {
    /// The file, opened once more. The kernel tells each open file of a failed write-out once: a
    /// sweep that shared the flush's one could hear of it first, and the flush would succeed.
    file: Arc<OwnedFd>,
    window: Mutex<Window>,
}

/// Bytes since the file was opened, in whole pages.
#[derive(Debug, Default)]
struct Window {
    written: u64,
    /// Of `written`, what sweeps have covered.
    swept: u64,
    /// Reserved by writes that have not ended.
    under_way: u64,
    is_sweeping: bool,
}

impl Window {
    /// Bytes that may be dirty or under write-out.
    fn unclean(&self) -> u64 {
        self.written - self.swept + self.under_way
    }
}

/// A write's place in the window. Given up when the write has ended, whatever became of it.
#[derive(Debug)]
pub(super) struct Reservation {
    lazy: Arc<Lazy>,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut window = lock(&self.lazy.window);
        window.under_way -= self.bytes;
        window.written += self.bytes;
    }
}

/// A write-out under way, and what it will have covered.
#[derive(Debug)]
struct Sweep {
    lazy: Arc<Lazy>,
    /// All that was `written` when it began.
    until: u64,
}

impl Drop for Sweep {
    fn drop(&mut self) {
        lock(&self.lazy.window).is_sweeping = false;
    }
}

/// What a write that found no room does before it asks again: a sweep of its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pause {
    until: u64,
}

impl Lazy {
    /// For an open file that nobody flushes.
    pub fn new(file: OwnedFd) -> Arc<Lazy> {
        Arc::new(Lazy { file: Arc::new(file), window: Mutex::new(Window::default()) })
    }

    /// The file for the calls of sweeps and pauses.
    pub fn file(&self) -> Arc<OwnedFd> {
        self.file.clone()
    }

    /// Room for a write of `len` bytes at `offset`. A clean window has room for any.
    pub fn reserve(self: &Arc<Lazy>, offset: u64, len: u64) -> Result<Reservation, Pause> {
        let bytes = (offset + len).next_multiple_of(PAGE) - offset / PAGE * PAGE;
        let mut window = lock(&self.window);
        if window.unclean() > 0 && window.unclean() + bytes > WINDOW_BYTES {
            return Err(Pause { until: window.written });
        }
        window.under_way += bytes;
        Ok(Reservation { lazy: self.clone(), bytes })
    }

    /// A pause is over. Whether its call succeeded does not matter here: pages that could not be
    /// written out are dirty no more, and it is the flush that says so.
    pub fn end_pause(&self, pause: Pause) {
        self.cover(pause.until);
    }

    fn cover(&self, until: u64) {
        let mut window = lock(&self.window);
        window.swept = window.swept.max(until);
    }

    /// Begins a sweep if one is due.
    pub fn sweep(self: &Arc<Lazy>) -> Option<Work> {
        let mut window = lock(&self.window);
        if window.is_sweeping || window.written - window.swept < SWEEP_BYTES {
            return None;
        }
        window.is_sweeping = true;
        let sweep = Sweep { lazy: self.clone(), until: window.written };
        Some(Box::new(sweep).work(Call::WriteOut))
    }
}

impl Sweep {
    fn work(self: Box<Self>, call: Call) -> Work {
        let (file, memory) = (self.lazy.file(), Memory::One(Buffer::empty()));
        Work { file, call, memory, owner: self, is_awaited: false }
    }
}

impl Job<DiskIo> for Sweep {
    /// Goes on, however the call did.
    fn ended(
        self: Box<Self>,
        call: Call,
        _memory: Memory,
        _result: i32,
        _ring: &mut Ring,
    ) -> Option<Work> {
        if call == Call::WriteOut {
            self.lazy.cover(self.until);
            return Some(self.work(Call::Forget));
        }
        let lazy = self.lazy.clone();
        drop(self);
        lazy.sweep()
    }
}
