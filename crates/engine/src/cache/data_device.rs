//! A device with data, fast or slow: its I/O, and which of its writes are not durable yet.

use crate::bio::Op;
use crate::disk::{Disk, DiskIo};
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, lock};

/// A device with data.
#[derive(Debug)]
pub(super) struct DataDevice {
    disk: Arc<dyn Disk>,
    /// Writes that are done, and those of them that are known to be durable.
    written: AtomicU64,
    flushed: AtomicU64,
    /// A flush failed, and no client got the error yet.
    is_unheard: AtomicBool,
    losses: Mutex<Losses>,
}

/// How often the disk may have lost what it had taken.
#[derive(Debug, Default)]
struct Losses {
    /// As the disk counts them.
    seen: u64,
    /// Those that clients learn of.
    counted: u64,
}

impl DataDevice {
    /// An earlier server may have left writes that are not durable.
    pub(super) fn new(disk: Arc<dyn Disk>) -> DataDevice {
        DataDevice {
            disk,
            written: AtomicU64::new(u64::from(!mutants::is(Mutant::CacheOwedForgotten))),
            flushed: AtomicU64::new(0),
            is_unheard: AtomicBool::new(false),
            losses: Mutex::default(),
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

    /// Whether a client's flush has to reach the disk: the disk may owe the client an error of a
    /// failed flush, even if another client's flush has succeeded since.
    #[inline]
    pub(super) fn owes_clients(&self) -> bool {
        self.owes_flush() || self.disk.is_owing()
    }

    /// How often what it had taken may have been lost while `is_needed` said that clients need it.
    pub(super) fn losses(&self, is_needed: impl FnOnce() -> bool) -> u64 {
        let now = self.disk.losses();
        if now == 0 {
            return 0;
        }
        // The lock is held until the loss is counted: another thread must not take it for an old
        // one.
        let mut losses = lock(&self.losses);
        if now > losses.seen {
            if is_needed() {
                losses.counted += now - losses.seen;
            }
            losses.seen = now;
        }
        losses.counted
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

    /// Whether a flush failed and no client got the error yet. The caller returns the error to a
    /// client.
    pub(super) fn take_unheard(&self) -> bool {
        self.is_unheard.swap(false, Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Buffer;
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
        let it = DataDevice::new(disk.clone());
        let [mut first, mut second, mut third] = [(); 3].map(|()| Ring::without_kernel());
        let write = DiskIo::new(&disk, Op::Write, 0, Buffer::zeroed(512), 0);
        run(write, &mut first).unwrap();
        it.count_write();
        sim.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
        run(it.flush(0), &mut second).unwrap_err();
        assert!(it.owes_flush());
        run(it.flush(0), &mut third).unwrap();
        it.flushed(2, Ok(()));
        assert!(!it.owes_flush() && it.owes_clients());
        assert_eq!(run(it.flush(0), &mut first), Err(Status::Io));
        assert!(!it.owes_clients());
    }
}
