//! Drives the flushes of a file: see `flushes`.

use super::flushes::{Ended, Flushes};
use super::{DiskIo, Work};
use crate::error::Status;
use crate::ring::{RemoteJob, Ring, number_of_the_next};
use crate::sync::statics::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, lock};

/// The job of a flush request.
pub(super) trait FlushJob: std::fmt::Debug + Send {
    /// This job makes the flush.
    fn take_lead(&mut self, lead: Lead);

    /// The call of the flush.
    fn sync(self: Box<Self>) -> Work;

    /// The request has ended with this result.
    fn end(self: Box<Self>, result: Result<(), Status>) -> DiskIo;
}

/// A flush that another ring makes, or that waits for the next one.
#[derive(Debug)]
struct Follower {
    job: Box<dyn FlushJob>,
    remote: RemoteJob<DiskIo>,
}

/// The flushes of one disk.
#[derive(Debug, Default)]
pub(super) struct Flushing {
    flushes: Mutex<Flushes<Follower>>,
    /// Whether a ring has a pending error.
    is_owing: AtomicBool,
    /// The number of failures that may have lost a write.
    losses: AtomicU64,
    /// This many of the next flushes fail.
    #[cfg(test)]
    pub(super) faults: AtomicU64,
    /// This many of the next calls that are not flushes find no memory.
    #[cfg(test)]
    pub(super) shortages: AtomicU64,
    /// This many of the next write-outs of batches fail, and are followed by another.
    #[cfg(test)]
    pub(super) write_out_faults: AtomicU64,
}

/// Held by the job that makes a flush. If it is dropped before the end is known, the flush failed.
#[derive(Debug)]
pub(super) struct Lead {
    flushing: Arc<Flushing>,
    is_over: bool,
}

impl Lead {
    /// The flush has ended. Returns its result for the job that made it.
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
    /// A thread begins a write, discard or the like. Pass the result to
    /// [`Flushing::end_write`].
    pub(super) fn begin_write(&self, ring: &Ring<DiskIo>) -> u64 {
        lock(&self.flushes).pending_errors.begin_write(ring.id(), || ring.life())
    }

    /// The change that had `begun` then has ended, successfully or not.
    pub(super) fn end_write(&self, ring: u64, begun: u64) {
        let mut flushes = lock(&self.flushes);
        if flushes.pending_errors.end_write(ring, begun) {
            self.note(&flushes);
        }
    }

    /// Whether a ring has a pending error.
    pub(super) fn is_owing(&self) -> bool {
        self.is_owing.load(Ordering::SeqCst)
    }

    /// The number of failures that may have lost a write.
    pub(super) fn losses(&self) -> u64 {
        self.losses.load(Ordering::SeqCst)
    }

    /// A write-out has failed.
    pub(super) fn write_out_failed(&self) {
        let mut flushes = lock(&self.flushes);
        flushes.write_out_failed(number_of_the_next());
        self.note(&flushes);
    }

    /// A flush is requested. Returns the job if it is to make the flush. Otherwise the job waits,
    /// and is completed through its ring when another job has made the flush.
    pub(super) fn ask<J: FlushJob + 'static>(
        self: &Arc<Flushing>,
        mut job: Box<J>,
        ring: &mut Ring<DiskIo>,
    ) -> Option<Box<J>> {
        let mut flushes = lock(&self.flushes);
        let leads = flushes.try_lead(ring.id());
        if leads {
            self.note(&flushes);
            job.take_lead(self.lead());
            return Some(job);
        }
        match ring.remote_job() {
            Ok(remote) => {
                flushes.wait(ring.id(), Follower { job, remote });
                self.note(&flushes);
            }
            Err(_) => ring.complete(job.end(Err(Status::Io))),
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

    /// Whether a test wants a write-out to fail.
    #[cfg(test)]
    pub(super) fn spoils_write_out(&self) -> bool {
        let take = |left: u64| left.checked_sub(1);
        self.write_out_faults.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    fn lead(self: &Arc<Flushing>) -> Lead {
        Lead { flushing: Arc::clone(self), is_over: false }
    }

    fn note(&self, flushes: &MutexGuard<'_, Flushes<Follower>>) {
        self.is_owing.store(flushes.pending_errors.has_any(), Ordering::SeqCst);
        self.losses.store(flushes.pending_errors.losses(), Ordering::SeqCst);
    }

    /// A flush has ended. The other requests that it covers end as well, and a waiting one makes
    /// the next flush. Returns the result for the job that made this one.
    fn ended(self: &Arc<Flushing>, result: Result<(), Status>) -> Result<(), Status> {
        let mut flushes = lock(&self.flushes);
        let Ended { own, others, leader } = flushes.ended(result, number_of_the_next());
        self.note(&flushes);
        drop(flushes);
        // The next flush is started first, so that the device is busy meanwhile.
        if let Some(Follower { mut job, remote }) = leader {
            job.take_lead(self.lead());
            remote.resume(job.sync());
        }
        for (Follower { job, remote }, result) in others {
            remote.end(job.end(result));
        }
        own
    }
}
