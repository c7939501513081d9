//! Faults that tests of files inject, and tests that need no file.

use super::*;

impl FileDisk {
    /// Lets this many of the next flushes fail.
    pub(in crate::disk) fn fail_flushes(&self, count: u64) {
        self.files.flushing.faults.store(count, Ordering::Relaxed);
    }

    /// Lets this many of the next write-outs of batches fail; each is followed by a good one.
    pub(in crate::disk) fn fail_write_outs(&self, count: u64) {
        self.files.flushing.write_out_faults.store(count, Ordering::Relaxed);
    }

    /// Lets this many of the next calls that are not flushes find no memory.
    pub(in crate::disk) fn be_short(&self, count: u64) {
        self.files.flushing.shortages.store(count, Ordering::Relaxed);
    }

    /// Pretends that direct I/O needs this alignment.
    pub(in crate::disk) fn coarsen(&mut self, granule: u64) {
        Arc::get_mut(&mut self.files).expect("no I/O has been started").granule = granule;
    }

    /// Pretends that the file is known by its place only.
    pub(in crate::disk) fn doubt(&mut self) {
        Arc::get_mut(&mut self.files).expect("no I/O has been started").is_by_place = true;
    }
}

#[test]
fn flushes_are_not_asked_twice_for_want_of_memory() {
    assert!(Way::Move.may_pass(-libc::ENOMEM) && Way::Zeroes.may_pass(-libc::ENOMEM));
    assert!(Way::Allocate(0).may_pass(-libc::ENOMEM) && !Way::Sync.may_pass(-libc::ENOMEM));
    assert!(!Way::Move.may_pass(-libc::EIO) && !Way::Move.may_pass(libc::ENOMEM));
}

#[test]
fn every_errno_has_a_status() {
    let cases = [
        (libc::ENOSPC, Status::NoSpace),
        (libc::EOPNOTSUPP, Status::Unsupported),
        (libc::EROFS, Status::ReadOnly),
        (libc::ETIMEDOUT, Status::Timeout),
        (libc::EIO, Status::Io),
        (libc::ENXIO, Status::Io),
    ];
    for (errno, status) in cases {
        assert_eq!(status_of(errno), status);
    }
}
