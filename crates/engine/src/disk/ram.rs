//! A disk in memory: for tests, for measurements without a slow device, and for experiments.
//!
//! Memory is allocated in chunks when they are first written. Chunks that were never written, or
//! were discarded whole, take no memory and read as zeroes. I/O is carried out and completed within
//! `start`, so a caller never sees half of another thread's write to a chunk.

use super::{Disk, DiskIo, DiskLimits, Evidence, Extent, Ring, check};
use crate::bio::Op;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::sync::{Mutex, lock};

use crate::topology::Topology;
use crate::units::{MIB, SECTOR};

/// Bytes of memory taken at a time.
const CHUNK: u64 = MIB;

/// A disk in memory.
pub struct RamDisk {
    limits: DiskLimits,
    chunks: Vec<Mutex<Option<Box<[u8]>>>>,
    counters: Counters,
    has_evidence: bool,
    has_holes: bool,
}

/// Counts of operations.
#[derive(Debug, Default)]
pub(super) struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
}

/// Counts of a disk's operations since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounts {
    /// Reads.
    pub reads: u64,
    /// Writes; discards and write-zeroes count too.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written, discarded or zeroed.
    pub bytes_written: u64,
}

impl Counters {
    pub(super) fn count(&self, op: Op, len: u64) {
        let (count, bytes) = match op {
            Op::Read => (&self.reads, &self.bytes_read),
            Op::Write | Op::Discard | Op::WriteZeroes => (&self.writes, &self.bytes_written),
            Op::Flush => (&self.flushes, &self.bytes_written),
        };
        count.fetch_add(1, Relaxed);
        bytes.fetch_add(len, Relaxed);
    }

    pub(super) fn counts(&self) -> DiskCounts {
        DiskCounts {
            reads: self.reads.load(Relaxed),
            writes: self.writes.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            bytes_read: self.bytes_read.load(Relaxed),
            bytes_written: self.bytes_written.load(Relaxed),
        }
    }
}

impl RamDisk {
    /// A disk of `size_bytes` zeroes, rounded down to whole sectors.
    pub fn new(size_bytes: u64, block_bytes: u32) -> RamDisk {
        let size_bytes = size_bytes / SECTOR * SECTOR;
        let limits = DiskLimits {
            name: "ram".into(),
            size_bytes,
            block_bytes,
            atomic_bytes: block_bytes,
            has_discard: true,
            topology: Topology::default(),
            identity: "ram".into(),
            kernel_name: "ram".into(),
        };
        let chunks = (0..size_bytes.div_ceil(CHUNK)).map(|_| Mutex::new(None)).collect();
        let counters = Counters::default();
        RamDisk { limits, chunks, counters, has_evidence: false, has_holes: false }
    }

    /// The same disk under another name, which is also its identity.
    pub fn named(mut self, name: &str) -> RamDisk {
        self.limits.name = name.into();
        self.limits.identity = name.into();
        self.limits.kernel_name = name.into();
        self
    }

    /// The same disk, whose content caches record when they end.
    pub fn with_evidence(mut self) -> RamDisk {
        self.has_evidence = true;
        self
    }

    /// The same disk, which reports as holes what takes no memory.
    pub fn with_holes(mut self) -> RamDisk {
        self.has_holes = true;
        self
    }

    /// The operations so far.
    pub fn counts(&self) -> DiskCounts {
        self.counters.counts()
    }

    /// Copies content out.
    pub fn peek(&self, offset: u64, bytes: &mut [u8]) {
        self.each_chunk(offset, bytes.len() as u64, |chunk, within, range| {
            let part = &mut bytes[range];
            match chunk {
                Some(chunk) => part.copy_from_slice(&chunk[within..within + part.len()]),
                None => part.fill(0),
            }
        });
    }

    /// Changes content from outside, as a stray program would.
    pub fn poke(&self, offset: u64, bytes: &[u8]) {
        self.each_chunk(offset, bytes.len() as u64, |chunk, within, range| {
            let part = &bytes[range];
            if chunk.is_none() && part.iter().all(|byte| *byte == 0) {
                return;
            }
            let chunk = chunk.get_or_insert_with(|| vec![0; CHUNK as usize].into_boxed_slice());
            chunk[within..within + part.len()].copy_from_slice(part);
        });
    }

    /// All content.
    pub fn image(&self) -> Vec<u8> {
        let mut image = vec![0; self.limits.size_bytes as usize];
        self.peek(0, &mut image);
        image
    }

    /// Replaces all content by `image`, and zeroes after it.
    pub fn load_image(&self, image: &[u8]) {
        self.zero(0, self.limits.size_bytes);
        self.poke(0, image);
    }

    fn zero(&self, offset: u64, len: u64) {
        self.each_chunk(offset, len, |chunk, within, range| {
            if range.len() as u64 == CHUNK {
                *chunk = None;
            } else if let Some(chunk) = chunk {
                chunk[within..within + range.len()].fill(0);
            }
        });
    }

    /// Calls `visit` with each chunk that the range touches, the start of the part within the
    /// chunk, and the part of the range.
    fn each_chunk(
        &self,
        offset: u64,
        len: u64,
        mut visit: impl FnMut(&mut Option<Box<[u8]>>, usize, std::ops::Range<usize>),
    ) {
        let mut done = 0;
        while done < len {
            let position = offset + done;
            let within = position % CHUNK;
            let part = (CHUNK - within).min(len - done);
            let mut chunk = lock(&self.chunks[(position / CHUNK) as usize]);
            visit(&mut chunk, within as usize, done as usize..(done + part) as usize);
            done += part;
        }
    }
}

impl Disk for RamDisk {
    fn limits(&self) -> &DiskLimits {
        &self.limits
    }

    fn evidence(&self, _is_end: bool) -> Evidence {
        if self.has_evidence { Evidence::Content } else { Evidence::Nothing }
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        if !self.has_holes {
            return (len, Extent::Data);
        }
        let chunk = lock(&self.chunks[(offset / CHUNK) as usize]);
        let kind = if chunk.is_some() { Extent::Data } else { Extent::Zeroes };
        (len.min(CHUNK - offset % CHUNK), kind)
    }

    fn start(&self, mut io: DiskIo, ring: &mut Ring) {
        if let Err(status) = check(&self.limits, &io) {
            return ring.finish(io, Err(status));
        }
        self.counters.count(io.op, io.len);
        match io.op {
            Op::Read => self.peek(io.offset, io.buffer.as_mut_slice()),
            Op::Write => self.poke(io.offset, io.buffer.as_slice()),
            Op::Flush => {}
            Op::Discard | Op::WriteZeroes => self.zero(io.offset, io.len),
        }
        ring.finish(io, Ok(()));
    }
}

impl std::fmt::Debug for RamDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RamDisk({} bytes)", self.limits.size_bytes)
    }
}
