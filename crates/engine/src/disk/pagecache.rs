//! What the page cache holds of a file: cachestat, Linux 6.5.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};

/// Bytes of a file in the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cached {
    /// All of them.
    pub cached_bytes: u64,
    /// Those that must still be written out, or are being written out.
    pub unclean_bytes: u64,
}

/// The call has the same number on all architectures but alpha and mips.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range`: length 0 means up to the file's end.
#[repr(C)]
struct Range {
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

/// Asks the kernel; `None` where it does not know the call, or not for this file.
pub(super) fn look(file: &OwnedFd) -> Option<Cached> {
    let mut pages = Pages::default();
    let range = Range { offset: 0, len: 0 };
    // SAFETY: the call reads one range and writes one answer, both of the kernel's layout, and
    // both live here until it returns.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut pages, 0u32)
    };
    let page = rustix::param::page_size() as u64;
    (result == 0).then(|| Cached {
        cached_bytes: pages.cached * page,
        unclean_bytes: (pages.dirty + pages.under_write_out) * page,
    })
}
