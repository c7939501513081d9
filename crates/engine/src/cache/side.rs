//! A device with data, fast or slow: its I/O, and what of it is not durable yet.

use crate::bio::Op;
use crate::disk::{Disk, DiskIo};
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A device with data.
#[derive(Debug)]
pub(super) struct Side {
    disk: Arc<dyn Disk>,
    /// Writes that are done, and those of them that are known to be durable.
    written: AtomicU64,
    flushed: AtomicU64,
    /// A flush failed, and no client has heard of it.
    is_unheard: AtomicBool,
}

impl Side {
    /// An earlier server may have left writes that are not durable.
    pub(super) fn new(disk: Arc<dyn Disk>) -> Side {
        Side {
            disk,
            written: AtomicU64::new(u64::from(!mutants::is(Mutant::CacheOwedForgotten))),
            flushed: AtomicU64::new(0),
            is_unheard: AtomicBool::new(false),
        }
    }

    pub(super) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// A write is done, or may have been.
    #[inline]
    pub(super) fn count_write(&self) {
        self.written.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether it has writes that may not be durable.
    #[inline]
    pub(super) fn owes_flush(&self) -> bool {
        self.flushed.load(Ordering::SeqCst) < self.written.load(Ordering::SeqCst)
    }

    /// A flush that begins now covers writes up to here.
    pub(super) fn mark(&self) -> u64 {
        self.written.load(Ordering::SeqCst)
    }

    pub(super) fn flush(&self, token: u64) -> DiskIo {
        DiskIo::bare(&self.disk, Op::Flush, 0, 0, token)
    }

    /// A flush is back that began at `mark`.
    pub(super) fn flushed(&self, mark: u64, result: Result<(), Status>) {
        match result {
            Ok(()) => {
                self.flushed.fetch_max(mark, Ordering::SeqCst);
            }
            Err(_) if mutants::is(Mutant::FailedFlushUnsaid) => {}
            Err(_) => self.is_unheard.store(true, Ordering::SeqCst),
        }
    }

    /// Whether a flush failed of which no client has heard. The caller tells one.
    pub(super) fn take_unheard(&self) -> bool {
        self.is_unheard.swap(false, Ordering::SeqCst)
    }
}
