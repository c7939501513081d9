//! `io=lazy`: through the page cache, with write-out at a steady pace.
//!
//! Left alone, the page cache lets a writer run ahead by gigabytes and then makes all writers wait
//! while it catches up. Here the bytes that are dirty or being written out stay below
//! [`WINDOW_BYTES`]:
//!
//! 1. A write first reserves its pages in the window. Bytes leave the window when a *sweep*, a
//!    sync_file_range of the whole file that began after they were written, has ended. (The kernel
//!    finds the dirty pages by their tags; a sweep costs what there is to write, not the size.)
//! 2. A write that makes [`SWEEP_BYTES`] wait for a sweep starts one when it ends. No request waits
//!    for it. One of these runs at a time: what is written in the meantime goes into the next.
//!    After a sweep the file's clean pages are dropped: there is a cache in front already.
//! 3. A write that finds no room runs a sweep of its own and waits for that: it must not wait for
//!    ever for one that another thread began and may be slow to complete.
//! 4. None of this is a flush: durability comes from fdatasync, as in every other mode.

use std::os::fd::OwnedFd;

use super::{DiskIo, Ring, Work};
use crate::buffer::Buffer;
use crate::ring::{Call, Job, Memory};
use crate::sync::{Arc, Mutex, lock};
use crate::units::MIB;

/// Most bytes that are dirty or being written out.
pub const WINDOW_BYTES: u64 = 16 * MIB;
/// A sweep begins when this many bytes wait for it.
const SWEEP_BYTES: u64 = WINDOW_BYTES / 4;
/// Most bytes of one call, so that a long write does not fill the window alone.
pub(super) const WRITE_BYTES_MAX: u64 = MIB;
/// The unit of the page cache.
const PAGE: u64 = 4096;

/// The write-out of one file.
#[derive(Debug)]
pub(super) struct Lazy {
    /// The file, opened once more. The kernel reports a failed write-out to each open file once: if
    /// the sweep shared the flush's descriptor, it could get the error first, and the flush would
    /// succeed.
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

/// A write's room in the window. Released when the write has ended, with or without success.
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

/// A write-out in flight, and what it will have covered.
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

/// A write that found no room runs a sweep of its own before it tries again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pause {
    until: u64,
}

impl Lazy {
    /// For an open file that is never flushed through this descriptor.
    pub fn new(file: OwnedFd) -> Arc<Lazy> {
        Arc::new(Lazy { file: Arc::new(file), window: Mutex::new(Window::default()) })
    }

    /// The file for the calls of sweeps and pauses.
    pub fn file(&self) -> Arc<OwnedFd> {
        self.file.clone()
    }

    /// Room for a write of `len` bytes at `offset`. A clean window has room for any write.
    pub fn reserve(self: &Arc<Lazy>, offset: u64, len: u64) -> Result<Reservation, Pause> {
        let bytes = (offset + len).next_multiple_of(PAGE) - offset / PAGE * PAGE;
        let mut window = lock(&self.window);
        if window.unclean() > 0 && window.unclean() + bytes > WINDOW_BYTES {
            return Err(Pause { until: window.written });
        }
        window.under_way += bytes;
        Ok(Reservation { lazy: self.clone(), bytes })
    }

    /// A pause is over. Its result does not matter here: pages that could not be written out are
    /// not dirty any more, and the flush reports the error.
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
    /// Continues whether the call succeeded or not.
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
