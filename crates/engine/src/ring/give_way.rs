//! Lets the threads of clients preempt a thread that does background work.
//!
//! The scheduler lets a thread that wakes up preempt the running one immediately if the running one
//! asked for a longer time slice (Linux 6.12: `sched_runtime` of `SCHED_OTHER`, see sched(7)). A
//! lower priority would do the same, but then a thread that holds a lock might not run again for a
//! long time while other threads keep the processors busy. With a long slice it gets the same share
//! of time as before, and needs no privilege.

#![allow(unsafe_code)]

use std::mem::size_of;

use libc::{SYS_sched_getattr, SYS_sched_setattr, sched_attr, syscall};

/// Longer than the usual slice, which is at most 3 ms, but short enough that this thread does not
/// wait for long when all processors are busy.
const SLICE_NS: u64 = 10_000_000;

/// Asks for a long time slice for this thread. Returns whether the kernel knows such requests;
/// an older one ignores them, and this thread keeps its processor for the usual slice.
pub(crate) fn give_way() -> bool {
    let Some(mut attributes) = attributes() else { return false };
    attributes.sched_runtime = SLICE_NS;
    // SAFETY: the kernel reads a structure of the given size, which lives during the call; 0 is the
    // calling thread.
    let result = unsafe { syscall(SYS_sched_setattr, 0, &raw const attributes, 0) };
    result == 0 && self::attributes().is_some_and(|now| now.sched_runtime == SLICE_NS)
}

/// This thread's attributes, if it has the ordinary policy.
fn attributes() -> Option<sched_attr> {
    let size = size_of::<sched_attr>();
    let mut attributes = sched_attr {
        size: size as u32,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel writes at most `size` bytes into a structure of that size, which lives
    // during the call; all bytes that it may write are valid integers.
    let result = unsafe { syscall(SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    let is_ordinary = attributes.sched_policy == libc::SCHED_OTHER as u32;
    (result == 0 && is_ordinary).then_some(attributes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_a_long_slice_where_the_kernel_knows_them() {
        let thread = std::thread::spawn(|| {
            let before = attributes().expect("test threads have the ordinary policy");
            let knows = give_way();
            let after = attributes().unwrap();
            assert_eq!(after.sched_nice, before.sched_nice);
            assert_eq!(after.sched_runtime == SLICE_NS, knows);
            // Older kernels report no slice of their own.
            assert!(knows || before.sched_runtime == 0, "{}", before.sched_runtime);
        });
        thread.join().unwrap();
    }
}
