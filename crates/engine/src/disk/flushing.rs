//! Drives the flushes of a file: see `flushes`.

use super::DiskIo;
use super::file::FileJob;
use super::flushes::{Ended, Flushes};
use crate::buffer::Buffer;
use crate::error::Status;
use crate::ring::{Errand, Ring, number_of_the_next};
#[cfg(test)]
use crate::sync::statics::atomic::AtomicU64;
use crate::sync::statics::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, lock};

/// A flush that another ring makes, or that waits for the next one.
#[derive(Debug)]
struct Follower {
    job: Box<FileJob>,
    errand: Errand<DiskIo>,
}

/// The flushes of one disk.
#[derive(Debug, Default)]
pub(super) struct Flushing {
    flushes: Mutex<Flushes<Follower>>,
    /// Whether a ring has not heard of a failure.
    is_owing: AtomicBool,
    /// This many of the next flushes fail.
    #[cfg(test)]
    pub(super) faults: AtomicU64,
    /// This many of the next calls that are no flush find no memory.
    #[cfg(test)]
    pub(super) shortages: AtomicU64,
}

/// Held by the job that makes a flush. If it is dropped before the end is known, the flush failed.
#[derive(Debug)]
pub(super) struct Lead {
    flushing: Arc<Flushing>,
    is_over: bool,
}

impl Lead {
    /// The flush has ended. Returns what it means for who made it.
    pub(super) fn end(mut self, result: Result<(), Status>) -> Result<(), Status> {
        self.is_over = true;
        self.flushing.ended(result)
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        if !self.is_over {
            let _ = self.flushing.ended(Err(Status::Io));
        }
    }
}

impl Flushing {
    /// A thread begins a change.
    pub(super) fn begin_write(&self, ring: &Ring<DiskIo>) {
        lock(&self.flushes).debts.begin_write(ring.id(), || ring.life());
    }

    /// It has ended, well or not.
    pub(super) fn end_write(&self, ring: u64) {
        lock(&self.flushes).debts.end_write(ring);
    }

    /// Whether a ring has not heard of a failure.
    pub(super) fn is_owing(&self) -> bool {
        self.is_owing.load(Ordering::SeqCst)
    }

    /// A write-out has failed.
    pub(super) fn write_out_failed(&self) {
        let mut flushes = lock(&self.flushes);
        flushes.write_out_failed(number_of_the_next());
        self.note(&flushes);
    }

    /// A flush is asked for. Returns the job if it is to make it. Otherwise it waits, and comes out
    /// of its ring when another has made it.
    pub(super) fn ask(
        self: &Arc<Flushing>,
        mut job: Box<FileJob>,
        ring: &mut Ring<DiskIo>,
    ) -> Option<Box<FileJob>> {
        let mut flushes = lock(&self.flushes);
        let leads = flushes.try_lead(ring.id());
        if leads {
            self.note(&flushes);
            job.lead = Some(self.lead());
            return Some(job);
        }
        match ring.errand() {
            Ok(errand) => {
                flushes.wait(ring.id(), Follower { job, errand });
                self.note(&flushes);
            }
            Err(_) => ring.complete(job.end(Buffer::empty(), Err(Status::Io))),
        }
        None
    }

    /// The result of a call, unless a test wants it to fail.
    #[cfg(test)]
    pub(super) fn spoilt(&self, is_flush: bool, result: i32) -> i32 {
        let (left, errno) =
            if is_flush { (&self.faults, libc::EIO) } else { (&self.shortages, libc::ENOMEM) };
        let take = |left: u64| left.checked_sub(1);
        let is_spoilt = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        if is_spoilt { -errno } else { result }
    }

    fn lead(self: &Arc<Flushing>) -> Lead {
        Lead { flushing: Arc::clone(self), is_over: false }
    }

    fn note(&self, flushes: &MutexGuard<'_, Flushes<Follower>>) {
        self.is_owing.store(flushes.debts.has_any(), Ordering::SeqCst);
    }

    /// A flush has ended. Others that it was made for end with it, and one that waited makes the
    /// next. Returns what it means for who made it.
    fn ended(self: &Arc<Flushing>, result: Result<(), Status>) -> Result<(), Status> {
        let mut flushes = lock(&self.flushes);
        let Ended { own, others, leader } = flushes.ended(result, number_of_the_next());
        self.note(&flushes);
        drop(flushes);
        // First, so that the device has something to do meanwhile.
        if let Some(Follower { mut job, errand }) = leader {
            job.lead = Some(self.lead());
            errand.go_on(job.sync());
        }
        for (Follower { job, errand }, result) in others {
            errand.end(job.end(Buffer::empty(), result));
        }
        own
    }
}
