//! Errors of a disk's I/O, for people: their number, and the last one. Requests carry a
//! [`Status`](crate::error::Status), which decides the reaction; an errno describes the event.

use std::fmt;

use crate::bio::Op;
use crate::sync::statics::atomic::{AtomicBool, AtomicU64, Ordering};

/// The errors of a disk so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskErrors {
    /// Calls that failed.
    pub count: u64,
    /// The operation of the last failed call, and its errno.
    pub last: Option<(Op, i32)>,
    /// Whether an operation of that kind has worked since.
    pub has_worked: bool,
}

impl fmt::Display for DiskErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((op, errno)) = self.last else { return f.write_str("no error") };
        let what = match op {
            Op::Read => "read",
            Op::Write => "write",
            Op::Flush => "flush",
            Op::Discard => "discard",
            Op::WriteZeroes => "write of zeroes",
        };
        let text = std::io::Error::from_raw_os_error(errno).to_string();
        write!(f, "{what}: {}", text.replace("os error", "errno"))
    }
}

/// Counts errors, from any thread.
#[derive(Debug, Default)]
pub(super) struct Errors {
    count: AtomicU64,
    /// The operation's number above its errno.
    last: AtomicU64,
    /// The last operation of the kind that failed last has failed.
    is_failing: AtomicBool,
}

const OPS: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];

impl Errors {
    pub fn note(&self, op: Op, errno: i32) {
        let nth = OPS.iter().position(|other| *other == op).unwrap_or(0) as u64;
        self.last.store(nth << 32 | u64::from(errno.unsigned_abs()), Ordering::Relaxed);
        self.is_failing.store(true, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Release);
    }

    /// An operation has worked.
    #[inline]
    pub fn worked(&self, op: Op) {
        if self.is_failing.load(Ordering::Relaxed) && self.last_op() == op {
            self.is_failing.store(false, Ordering::Relaxed);
        }
    }

    fn last_op(&self) -> Op {
        OPS[(self.last.load(Ordering::Relaxed) >> 32) as usize % OPS.len()]
    }

    pub fn look(&self) -> DiskErrors {
        let count = self.count.load(Ordering::Acquire);
        let last = self.last.load(Ordering::Relaxed);
        let has_worked = !self.is_failing.load(Ordering::Relaxed);
        let last = (count > 0).then_some((self.last_op(), last as u32 as i32));
        DiskErrors { count, last, has_worked }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_is_said_in_words() {
        let errors = Errors::default();
        assert_eq!(errors.look().to_string(), "no error");
        errors.note(Op::Write, 28);
        errors.note(Op::Flush, 5);
        assert_eq!(errors.look().to_string(), "flush: Input/output error (errno 5)");
        assert_eq!(errors.look().count, 2);
    }

    #[test]
    fn only_an_operation_like_the_one_that_failed_shows_that_the_disk_works() {
        let errors = Errors::default();
        errors.note(Op::Write, 5);
        errors.worked(Op::Read);
        assert!(!errors.look().has_worked);
        errors.worked(Op::Write);
        assert!(errors.look().has_worked);
        errors.note(Op::Write, 5);
        assert!(!errors.look().has_worked);
    }
}
