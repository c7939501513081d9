//! The origin: writes that bypass the cache, which need a flush; and whether the origin is
//! consistent by itself.

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, lock};

use super::index::Index;

/// The slow device.
#[derive(Debug)]
pub(super) struct Origin {
    disk: Arc<dyn Disk>,
    /// Writes that bypassed the cache: the number of completed ones, and of durable ones.
    bypassed: AtomicU64,
    bypasses_flushed: AtomicU64,
    /// For a suspend: whether a flush of the origin is in flight, and whether the origin refused
    /// one.
    is_flushing: AtomicBool,
    has_refused_flush: AtomicBool,
    /// Flushes, except write-back's own, that failed: written data may be lost.
    flush_failures: AtomicU64,
    /// How often writes that bypassed the cache may have been lost.
    losses: AtomicU64,
    /// The number of the disk's losses that were already examined.
    seen: Mutex<u64>,
    /// The origin alone is not consistent: it has data that is newer than some dirty data of the
    /// cache.
    is_torn: AtomicBool,
}

impl Origin {
    /// `owes_flush`: the origin may have writes of an earlier server that are not durable.
    pub(super) fn new(disk: Arc<dyn Disk>, owes_flush: bool, is_torn: bool) -> Origin {
        Origin {
            disk,
            bypassed: AtomicU64::new(u64::from(owes_flush)),
            bypasses_flushed: AtomicU64::new(0),
            is_flushing: AtomicBool::new(false),
            has_refused_flush: AtomicBool::new(false),
            flush_failures: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            seen: Mutex::new(0),
            is_torn: AtomicBool::new(is_torn),
        }
    }

    pub(super) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    pub(super) fn io(&self, op: Op, offset: u64, len: u64, buffer: Buffer, token: u64) -> DiskIo {
        DiskIo { len, buffer, ..DiskIo::bare(&self.disk, op, offset, 0, token) }
    }

    /// A flush. It covers the writes that have bypassed the cache until now.
    pub(super) fn flush(&self, token: u64) -> DiskIo {
        self.io(Op::Flush, 0, 0, Buffer::empty(), token)
    }

    /// The number of writes that have bypassed the cache.
    #[inline]
    pub(super) fn bypassed(&self) -> u64 {
        self.bypassed.load(Ordering::SeqCst)
    }

    /// Counts a completed write that bypassed the cache.
    pub(super) fn count_bypass(&self) {
        self.bypassed.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether the origin has writes that may not be durable.
    #[inline]
    pub(super) fn owes_flush(&self) -> bool {
        self.bypasses_flushed.load(Ordering::SeqCst) < self.bypassed()
    }

    /// Whether a client's flush has to reach the disk: the disk may owe the client an error of a
    /// failed flush, even if another client's flush has succeeded since.
    #[inline]
    pub(super) fn owes_clients(&self) -> bool {
        self.owes_flush() || self.disk.is_owing()
    }

    /// A flush is complete that began after `bypassed` bypassing writes.
    pub(super) fn end_flush(&self, bypassed: u64, result: Result<(), Status>) {
        self.losses();
        if result.is_err() {
            return self.count_flush_failure();
        }
        let covered = match mutants::is(Mutant::BypassesAsOfEnd) {
            true => self.bypassed(),
            false => bypassed,
        };
        self.bypasses_flushed.fetch_max(covered, Ordering::SeqCst);
    }

    /// How often bypassing writes may have been lost. Blocks of a write-back that the disk loses
    /// are still in the cache.
    pub(super) fn losses(&self) -> u64 {
        let now = self.disk.losses();
        if now > 0 {
            // The lock is held until the loss is counted: another thread must not take the loss for
            // an old one.
            let mut seen = lock(&self.seen);
            if now > *seen && self.owes_flush() {
                self.losses.fetch_add(1, Ordering::SeqCst);
            }
            *seen = now.max(*seen);
        }
        self.losses.load(Ordering::SeqCst)
    }

    /// How many flushes, except write-back's own, have failed.
    pub(super) fn flush_failures(&self) -> u64 {
        self.flush_failures.load(Ordering::SeqCst)
    }

    pub(super) fn count_flush_failure(&self) {
        self.flush_failures.fetch_add(1, Ordering::SeqCst);
    }

    /// A suspend begins, and may try to flush again.
    pub(super) fn hope(&self) {
        self.has_refused_flush.store(false, Ordering::SeqCst);
    }

    /// Whether a suspend has to flush the origin, and the origin has not refused a flush.
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

    /// Whether a suspend has to wait for the origin.
    pub(super) fn is_unsettled(&self) -> bool {
        self.is_flushing.load(Ordering::SeqCst) || self.wants_flush()
    }

    pub(super) fn is_torn(&self) -> bool {
        self.is_torn.load(Ordering::SeqCst)
    }

    /// A write is about to bypass the cache. If the cache has dirty data, the origin alone becomes
    /// inconsistent.
    pub(super) fn tear_if_dirty(&self, index: &Index) {
        if index.dirty() > 0 && !mutants::is(Mutant::PassedUnsaid) {
            self.tear();
        }
    }

    /// Data is about to be written to the origin before older dirty data of the cache.
    pub(super) fn tear(&self) {
        self.is_torn.store(true, Ordering::SeqCst);
    }

    /// No data was dirty, so the origin alone was consistent. If data has become dirty since, the
    /// origin may have been torn since, and that is assumed.
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

    /// Carries out one I/O, and returns its result.
    fn run(io: DiskIo, ring: &mut Ring) -> Result<(), Status> {
        io.disk.clone().start(io, ring);
        ring.pop_completed().unwrap().result
    }

    #[test]
    fn only_what_passed_by_is_lost_with_the_origin() {
        let sim = Arc::new(SimDisk::new(1 << 20, 512));
        sim.say_to_all();
        let disk: Arc<dyn Disk> = sim.clone();
        let it = Origin::new(disk.clone(), false, false);
        let mut ring = Ring::without_kernel();
        let mut fail = |passes_by: bool| {
            run(DiskIo::new(&disk, Op::Write, 0, Buffer::zeroed(512), 0), &mut ring).unwrap();
            if passes_by {
                it.count_bypass();
            }
            sim.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
            run(it.flush(0), &mut ring).unwrap_err();
        };
        fail(false);
        assert_eq!(it.losses(), 0, "write-back has it still");
        fail(true);
        // The flush of another client succeeds before any thread checks for losses.
        it.end_flush(it.bypassed(), Ok(()));
        assert_eq!((it.losses(), it.losses()), (1, 1));
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
