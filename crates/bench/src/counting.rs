//! Cache devices that count what is written to them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use udm::bio::Op;
use udm::disk::{Disk, DiskIo, DiskLimits, Ring};
use udm::error::Status;
use udm::pmem::{Medium, Pmem};

/// Bytes written so far.
#[derive(Debug, Default)]
pub struct Written {
    /// All of them.
    pub bytes: AtomicU64,
    /// Those that began before this byte are metadata.
    pub metadata_end: AtomicU64,
    /// This many times.
    pub metadata_bytes: AtomicU64,
}

impl Written {
    fn add(&self, at: u64, len: u64) {
        self.bytes.fetch_add(len, Relaxed);
        if at < self.metadata_end.load(Relaxed) {
            self.metadata_bytes.fetch_add(len, Relaxed);
        }
    }

    /// All bytes, and those of metadata.
    pub fn now(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.metadata_bytes.load(Relaxed))
    }
}

/// Memory that counts what is stored to it.
#[derive(Debug)]
pub struct CountingPmem<P> {
    /// The destination.
    pub below: P,
    /// The count.
    pub written: Arc<Written>,
}

impl<P: Pmem> Pmem for CountingPmem<P> {
    fn len_bytes(&self) -> u64 {
        self.below.len_bytes()
    }

    fn medium(&self) -> &Medium {
        self.below.medium()
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        self.written.add(at, bytes.len() as u64);
        self.below.store(at, bytes);
    }

    fn zero(&self, at: u64, len: u64) {
        self.written.add(at, len);
        self.below.zero(at, len);
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), Status> {
        self.below.load(at, into)
    }

    fn drain(&self) -> Result<(), Status> {
        self.below.drain()
    }

    fn sync(&self) -> Result<(), Status> {
        self.below.sync()
    }
}

/// A disk that counts what is written to it.
#[derive(Debug)]
pub struct CountingDisk {
    /// The destination.
    pub below: Arc<dyn Disk>,
    /// The count.
    pub written: Arc<Written>,
}

impl Disk for CountingDisk {
    fn limits(&self) -> &DiskLimits {
        self.below.limits()
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        if matches!(io.op, Op::Write | Op::WriteZeroes) {
            self.written.add(io.offset, io.len);
        }
        self.below.start(io, ring);
    }

    fn carry_out(&self, ios: Vec<DiskIo>) -> Vec<DiskIo> {
        self.below.carry_out(ios)
    }
}
