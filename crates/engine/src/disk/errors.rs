//! Errors of a disk's I/O, for people: how many there were, and the last one. Requests carry a
//! [`Status`](crate::error::Status), which says how to react; an errno says what happened.

use std::fmt;

use crate::bio::Op;
use crate::sync::statics::atomic::{AtomicU64, Ordering};

/// What went wrong at a disk so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskErrors {
    /// Calls that failed.
    pub count: u64,
    /// The operation of the last one, and its errno.
    pub last: Option<(Op, i32)>,
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

/// Counts them, from any thread.
#[derive(Debug, Default)]
pub(super) struct Errors {
    count: AtomicU64,
    /// The operation's number above its errno.
    last: AtomicU64,
}

const OPS: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];

impl Errors {
    pub fn note(&self, op: Op, errno: i32) {
        let nth = OPS.iter().position(|other| *other == op).unwrap_or(0) as u64;
        self.last.store(nth << 32 | u64::from(errno.unsigned_abs()), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Release);
    }

    pub fn look(&self) -> DiskErrors {
        let count = self.count.load(Ordering::Acquire);
        let last = self.last.load(Ordering::Relaxed);
        let op = OPS[(last >> 32) as usize % OPS.len()];
        DiskErrors { count, last: (count > 0).then_some((op, last as u32 as i32)) }
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
}
