//! Calls about a file's pages in the page cache: counting them (cachestat, Linux 6.5), writing out
//! ranges (sync_file_range), and dropping clean pages.

#![allow(unsafe_code)]

use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

/// Bytes of a file in the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cached {
    /// All cached bytes.
    pub cached_bytes: u64,
    /// Bytes that must still be written out, or are being written out.
    pub unclean_bytes: u64,
    /// Bytes that must still be written out.
    pub dirty_bytes: u64,
}

/// The call has the same number on all architectures but alpha and mips.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range`: length 0 means up to the file's end.
#[repr(C)]
struct StatRange {
    offset: u64,
    len: u64,
}

/// `struct cachestat`, in pages.
#[repr(C)]
#[derive(Default)]
struct Pages {
    cached: u64,
    dirty: u64,
    under_write_out: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Queries the kernel about `len` bytes (0: up to the end); `None` if the kernel does not have the
/// call, or does not support it for this file.
pub(super) fn look(file: &OwnedFd, offset: u64, len: u64) -> Option<Cached> {
    let mut pages = Pages::default();
    let range = StatRange { offset, len };
    // SAFETY: the call reads one range and writes one answer, both of the kernel's layout, and
    // both live here until it returns.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut pages, 0u32)
    };
    let page = rustix::param::page_size() as u64;
    (result == 0).then(|| Cached {
        cached_bytes: pages.cached * page,
        unclean_bytes: (pages.dirty + pages.under_write_out) * page,
        dirty_bytes: pages.dirty * page,
    })
}

/// Starts the write-out of dirty pages, without waiting for it.
pub(super) fn start_write_out(file: &OwnedFd, offset: u64, len: u64) {
    sync_file_range(file, offset, len, libc::SYNC_FILE_RANGE_WRITE);
}

/// Waits until no page of the range is in write-out. Returns whether all write-outs succeeded.
pub(super) fn await_write_out(file: &OwnedFd, offset: u64, len: u64) -> bool {
    sync_file_range(file, offset, len, libc::SYNC_FILE_RANGE_WAIT_BEFORE)
}

/// Waits until no page of the range is dirty or in write-out. Returns whether all write-outs
/// succeeded.
pub(super) fn finish_write_out(file: &OwnedFd, offset: u64, len: u64) -> bool {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    sync_file_range(file, offset, len, flags)
}

fn sync_file_range(file: &OwnedFd, offset: u64, len: u64, flags: u32) -> bool {
    // SAFETY: the call takes numbers only.
    let result = unsafe {
        libc::sync_file_range(file.as_raw_fd(), offset.cast_signed(), len.cast_signed(), flags)
    };
    result == 0
}

/// Lets the page cache drop the clean pages of a range. Only a hint.
pub(super) fn forget(file: &OwnedFd, range: Range<u64>) {
    let Some(len) = NonZeroU64::new(range.end.saturating_sub(range.start)) else { return };
    let _ = rustix::fs::fadvise(file, range.start, Some(len), rustix::fs::Advice::DontNeed);
}
