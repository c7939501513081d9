//! Samples of the code that this process executes, from the kernel: one perf event for each
//! processor. The calling thread and all threads that it starts from now on share the events, and
//! the ring in memory to which the kernel writes samples. `flame` interprets the samples.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// From linux/perf_event.h.
const PERF_TYPE_SOFTWARE: u32 = 1;
const PERF_COUNT_SW_CPU_CLOCK: u64 = 0;
const SAMPLE_IP: u64 = 1;
const SAMPLE_TID: u64 = 1 << 1;
const SAMPLE_CALLCHAIN: u64 = 1 << 5;
const SAMPLE_REGS_USER: u64 = 1 << 12;
const SAMPLE_STACK_USER: u64 = 1 << 13;
const INHERIT: u64 = 1 << 1;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HV: u64 = 1 << 6;
const FREQ: u64 = 1 << 10;
const EXCLUDE_CALLCHAIN_USER: u64 = 1 << 22;
/// Threads, not other programs that are started.
const INHERIT_THREAD: u64 = 1 << 35;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;
/// Where the page before a ring has the place that the kernel has written up to, and the one that
/// was read up to.
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;

/// Samples per second and processor: no divisor of what programs do every millisecond.
pub const HERTZ: u64 = 997;
/// Bytes of a sample's copy of the stack.
const STACK_BYTES: u32 = 8192;
/// Pages of a ring. With the page before it, this is the amount that any user may lock in memory
/// for each processor.
const RING_PAGES: usize = 128;

/// The registers of a sample, in the kernel's order, from which the stack is unwound.
#[cfg(target_arch = "x86_64")]
const USER_REGS: u64 = 1 << 6 | 1 << 7 | 1 << 8;
#[cfg(target_arch = "aarch64")]
const USER_REGS: u64 = 1 << 29 | 1 << 30 | 1 << 31 | 1 << 32;

/// `struct perf_event_attr`, as long as it was in Linux 4.1.
#[repr(C)]
#[derive(Default)]
struct Attr {
    kind: u32,
    size: u32,
    config: u64,
    sample_freq: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    config1: u64,
    config2: u64,
    branch_sample_type: u64,
    sample_regs_user: u64,
    sample_stack_user: u32,
    clockid: i32,
    sample_regs_intr: u64,
    aux_watermark: u32,
    sample_max_stack: u16,
    reserved: u16,
}

/// The samples of one processor.
#[derive(Debug)]
pub struct Ring {
    // Closed last: the mapping is of it.
    _event: File,
    base: NonNull<u8>,
    page: usize,
    len: usize,
}

// SAFETY: the mapping belongs to the ring alone, and does not depend on a thread.
unsafe impl Send for Ring {}

impl Ring {
    /// Samples of this thread, and of those that it starts, on one processor.
    pub fn open(processor: u32, with_kernel: bool) -> Result<Ring> {
        let without = if with_kernel { 0 } else { EXCLUDE_KERNEL };
        let mut attr = Attr {
            kind: PERF_TYPE_SOFTWARE,
            size: size_of::<Attr>() as u32,
            config: PERF_COUNT_SW_CPU_CLOCK,
            sample_freq: HERTZ,
            sample_type: SAMPLE_IP
                | SAMPLE_TID
                | SAMPLE_CALLCHAIN
                | SAMPLE_REGS_USER
                | SAMPLE_STACK_USER,
            flags: INHERIT | FREQ | EXCLUDE_HV | EXCLUDE_CALLCHAIN_USER | INHERIT_THREAD | without,
            sample_regs_user: USER_REGS,
            sample_stack_user: STACK_BYTES,
            ..Attr::default()
        };
        // SAFETY: the kernel reads a whole perf_event_attr, which this is, and keeps none of it.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                std::ptr::from_mut(&mut attr),
                0 as libc::pid_t,
                processor as libc::c_int,
                -1 as libc::c_int,
                PERF_FLAG_FD_CLOEXEC,
            )
        };
        if fd < 0 {
            return Err(Error::last_os_error());
        }
        // SAFETY: the kernel has just returned this descriptor, and no other code owns it.
        let event = unsafe { File::from_raw_fd(fd as i32) };
        Ring::map(event)
    }

    fn map(event: File) -> Result<Ring> {
        let page = rustix::param::page_size();
        let len = (RING_PAGES + 1) * page;
        // SAFETY: a new mapping, wherever the kernel likes.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                event.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => {
                Ok(Ring { _event: event, base, page, len })
            }
            _ => Err(Error::last_os_error()),
        }
    }

    /// A counter of the page before the ring.
    fn counter(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: both counters are in the first page, 8-aligned, and live as long as the mapping;
        // the kernel also accesses them as whole words.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Takes what the kernel has written since the last time: whole records.
    pub fn take(&mut self, into: &mut Vec<u8>) {
        let head = self.counter(DATA_HEAD).load(Ordering::Acquire);
        let tail = self.counter(DATA_TAIL).load(Ordering::Relaxed);
        let room = self.len - self.page;
        let count = (head.wrapping_sub(tail) as usize).min(room);
        let start = tail as usize % room;
        let first = count.min(room - start);
        for (from, count) in [(start, first), (0, count - first)] {
            // SAFETY: `from + count` is at most `room`, the bytes after the first page of the
            // mapping. The kernel does not write to these until the tail has moved past them.
            let part = unsafe {
                std::slice::from_raw_parts(self.base.as_ptr().add(self.page + from), count)
            };
            into.extend_from_slice(part);
        }
        self.counter(DATA_TAIL).store(head, Ordering::Release);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference into it exists any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
