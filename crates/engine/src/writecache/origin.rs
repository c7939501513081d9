//! The origin: writes to it past the cache, which need a flush; and whether it is consistent by
//! itself.

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::index::Index;

/// The slow device.
#[derive(Debug)]
pub(super) struct Origin {
    disk: Arc<dyn Disk>,
    /// Writes that passed by: done, and known to be durable.
    bypassed: AtomicU64,
    bypasses_flushed: AtomicU64,
    /// For a suspend: whether it is being flushed, and whether it refused.
    is_flushing: AtomicBool,
    has_refused_flush: AtomicBool,
    /// Flushes, other than those of write-back, that failed: written data may be lost.
    flush_failures: AtomicU64,
    /// Alone it is not consistent: it has newer data than some dirty data of the cache.
    is_torn: AtomicBool,
}

impl Origin {
    /// `owes_flush`: it may have writes of an earlier server that are not durable.
    pub(super) fn new(disk: Arc<dyn Disk>, owes_flush: bool, is_torn: bool) -> Origin {
        Origin {
            disk,
            bypassed: AtomicU64::new(u64::from(owes_flush)),
            bypasses_flushed: AtomicU64::new(0),
            is_flushing: AtomicBool::new(false),
            has_refused_flush: AtomicBool::new(false),
            flush_failures: AtomicU64::new(0),
            is_torn: AtomicBool::new(is_torn),
        }
    }

    pub(super) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    pub(super) fn io(&self, op: Op, offset: u64, len: u64, buffer: Buffer, token: u64) -> DiskIo {
        DiskIo { len, buffer, ..DiskIo::bare(&self.disk, op, offset, 0, token) }
    }

    /// A flush. It covers what has passed by until now.
    pub(super) fn flush(&self, token: u64) -> DiskIo {
        self.io(Op::Flush, 0, 0, Buffer::empty(), token)
    }

    /// How many writes have passed by.
    #[inline]
    pub(super) fn bypassed(&self) -> u64 {
        self.bypassed.load(Ordering::SeqCst)
    }

    /// A write has passed by: it is done.
    pub(super) fn count_bypass(&self) {
        self.bypassed.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether it has writes that may not be durable.
    #[inline]
    pub(super) fn owes_flush(&self) -> bool {
        self.bypasses_flushed.load(Ordering::SeqCst) < self.bypassed()
    }

    /// Whether a client's flush has to get to the disk: it may have to hear there of one that
    /// failed, also if another's has succeeded since.
    #[inline]
    pub(super) fn owes_clients(&self) -> bool {
        self.owes_flush() || self.disk.is_owing()
    }

    /// A flush is back that began when `bypassed` writes had passed by.
    pub(super) fn end_flush(&self, bypassed: u64, result: Result<(), Status>) {
        if result.is_err() {
            return self.count_flush_failure();
        }
        let covered = match mutants::is(Mutant::BypassesAsOfEnd) {
            true => self.bypassed(),
            false => bypassed,
        };
        self.bypasses_flushed.fetch_max(covered, Ordering::SeqCst);
    }

    /// How many flushes, other than those of write-back, have failed.
    pub(super) fn flush_failures(&self) -> u64 {
        self.flush_failures.load(Ordering::SeqCst)
    }

    pub(super) fn count_flush_failure(&self) {
        self.flush_failures.fetch_add(1, Ordering::SeqCst);
    }

    /// A suspend begins, and tries again.
    pub(super) fn hope(&self) {
        self.has_refused_flush.store(false, Ordering::SeqCst);
    }

    /// Whether a suspend has to flush it, and it is not known to refuse.
    fn wants_flush(&self) -> bool {
        self.owes_flush() && !self.has_refused_flush.load(Ordering::SeqCst)
    }

    /// Whether a suspend must begin a flush now; it counts as begun.
    pub(super) fn begin_own_flush(&self) -> bool {
        self.wants_flush() && !self.is_flushing.swap(true, Ordering::SeqCst)
    }

    /// The flush of a suspend is back.
    pub(super) fn end_own_flush(&self, result: Result<(), Status>) {
        self.has_refused_flush.store(result.is_err(), Ordering::SeqCst);
        self.is_flushing.store(false, Ordering::SeqCst);
    }

    /// Whether a suspend has to wait for it.
    pub(super) fn is_unsettled(&self) -> bool {
        self.is_flushing.load(Ordering::SeqCst) || self.wants_flush()
    }

    pub(super) fn is_torn(&self) -> bool {
        self.is_torn.load(Ordering::SeqCst)
    }

    /// A write is about to pass by. If the cache has dirty data, the origin alone becomes
    /// inconsistent.
    pub(super) fn tear_if_dirty(&self, index: &Index) {
        if index.dirty() > 0 && !mutants::is(Mutant::PassedUnsaid) {
            self.tear();
        }
    }

    /// Data is about to be written to it before dirty data of the cache.
    pub(super) fn tear(&self) {
        self.is_torn.store(true, Ordering::SeqCst);
    }

    /// Nothing was dirty, so it alone was consistent. If data has become dirty since, it may have
    /// been torn since, and that is assumed.
    pub(super) fn mend(&self, index: &Index) {
        self.is_torn.store(false, Ordering::SeqCst);
        if index.dirty() > 0 {
            self.is_torn.store(true, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Effect, Fault, Ring, SimDisk};

    /// Carries out what must succeed or fail.
    fn run(io: DiskIo, ring: &mut Ring) -> Result<(), Status> {
        io.disk.clone().start(io, ring);
        ring.pop_completed().unwrap().result
    }

    #[test]
    fn a_good_flush_of_one_client_does_not_keep_anothers_from_the_disk() {
        let sim = Arc::new(SimDisk::new(1 << 20, 512));
        sim.say_to_all();
        let disk: Arc<dyn Disk> = sim.clone();
        let it = Origin::new(disk.clone(), false, false);
        let [mut first, mut second, mut third] = [(); 3].map(|()| Ring::without_kernel());
        let write = DiskIo::new(&disk, Op::Write, 0, Buffer::zeroed(512), 0);
        run(write, &mut first).unwrap();
        it.count_bypass();
        sim.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
        run(it.flush(0), &mut second).unwrap_err();
        assert!(it.owes_flush());
        run(it.flush(0), &mut third).unwrap();
        it.end_flush(1, Ok(()));
        assert!(!it.owes_flush() && it.owes_clients());
        assert_eq!(run(it.flush(0), &mut first), Err(Status::Io));
        assert!(!it.owes_clients());
    }
}
