//! The contenders of the study of writes, and how they are timed: one operation at a time, and in
//! batches.

use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::local::Local;
use udm::pmem::Pmem;
use udm::pmem::dax::DaxPmem;
use udm::prng::Prng;
use udm::target::{Port, Target};

use crate::pcache_rig::PcacheRig;
use crate::stats::{mean, median, percentile, sorted};
use crate::unit::Unit;

pub const BLOCK: usize = 4096;
const SEGMENT: u64 = 16 << 20;
/// Operations of one contender in one round.
pub const OPS: usize = 4096;
/// Operations between two looks at the clock, when timed in batches.
const BATCH: usize = 16;
/// Buffers that the workload sends from and reads into.
pub const BUFFERS: usize = 64;

/// One contender's times, in nanoseconds.
#[derive(Debug, Default)]
pub struct Times {
    /// Every operation, timed on its own, less the clock.
    pub single: Vec<f64>,
    /// Each round's median of operations timed on their own.
    pub round_single: Vec<f64>,
    /// How many of that the slowest in a thousand take.
    pub round_tail: Vec<f64>,
    /// Each round's median of batches, for one operation.
    pub round_batch: Vec<f64>,
}

impl Times {
    /// Runs `operation` [`OPS`] times one by one, and as often in batches.
    pub fn round(&mut self, clock: f64, mut operation: impl FnMut(usize)) {
        let mut singles = Vec::with_capacity(OPS);
        for nth in 0..OPS {
            let start = Instant::now();
            operation(nth);
            // A store fence orders stores without waiting for them, and the clock does not wait
            // either: the operation after the clock would pay for stores that are still in
            // progress.
            fence(Ordering::SeqCst);
            singles.push((nanos(start) - clock).max(0.0));
        }
        let median_single = median(&singles);
        self.round_single.push(median_single);
        self.round_tail.push(percentile(&sorted(&singles), 99.9) / median_single);
        self.single.extend(singles);
        let mut batches = Vec::with_capacity(OPS / BATCH);
        for first in (0..OPS).step_by(BATCH) {
            let start = Instant::now();
            for nth in first..first + BATCH {
                operation(nth);
            }
            batches.push((nanos(start) - clock) / BATCH as f64);
        }
        self.round_batch.push(median(&batches));
    }

    /// The numbers of its row.
    pub fn row(&self) -> [f64; COLUMNS.len()] {
        let single = sorted(&self.single);
        let batch = sorted(&self.round_batch);
        [
            percentile(&single, 50.0),
            percentile(&batch, 50.0),
            batch.first().copied().unwrap_or_default(),
            batch.last().copied().unwrap_or_default(),
            mean(&single),
            percentile(&single, 99.0),
            percentile(&single, 99.9),
            percentile(&single, 99.99),
            percentile(&single, 100.0),
        ]
    }
}

/// The numbers reported for each contender.
pub const COLUMNS: [(&str, Unit); 9] = [
    ("p50", Unit::Nanos),
    ("p50/batch", Unit::Nanos),
    ("low round", Unit::Nanos),
    ("high round", Unit::Nanos),
    ("mean", Unit::Nanos),
    ("p99", Unit::Nanos),
    ("p99.9", Unit::Nanos),
    ("p99.99", Unit::Nanos),
    ("worst", Unit::Nanos),
];

/// Nanoseconds since then.
pub fn nanos(since: Instant) -> f64 {
    since.elapsed().as_nanos() as f64
}

/// The cost of timing one operation: a fence without pending stores, and the clock.
pub fn clock_nanos() -> f64 {
    let cost = |_| {
        let start = Instant::now();
        fence(Ordering::SeqCst);
        nanos(start)
    };
    median(&(0..20_000).map(cost).collect::<Vec<f64>>())
}

/// Random blocks, and buffers with random bytes.
pub struct Workload {
    /// Where places come from.
    pub prng: Prng,
    /// Bytes of the device that are used.
    span: u64,
    /// The blocks of this round.
    pub offsets: Vec<u64>,
    /// The buffer for writes and reads.
    pub buffers: Vec<Buffer>,
}

impl Workload {
    /// Requests within the first `span` bytes.
    pub fn new(seed: u64, span: u64) -> Workload {
        let mut prng = Prng::new(seed);
        let fresh = |_| {
            let mut buffer = Buffer::zeroed(BLOCK);
            prng.fill(buffer.as_mut_slice());
            buffer
        };
        let buffers = (0..BUFFERS).map(fresh).collect();
        let mut workload = Workload { prng, span, offsets: Vec::new(), buffers };
        workload.shuffle();
        workload
    }

    /// Chooses the blocks of the next round.
    pub fn shuffle(&mut self) {
        let blocks = self.span / BLOCK as u64;
        self.offsets = (0..OPS).map(|_| self.prng.below(blocks) * BLOCK as u64).collect();
    }

    fn take(&mut self, nth: usize) -> Buffer {
        std::mem::replace(&mut self.buffers[nth % BUFFERS], Buffer::empty())
    }

    fn put(&mut self, nth: usize, buffer: Buffer) {
        self.buffers[nth % BUFFERS] = buffer;
    }
}

/// Memory that is filled as a cache fills its own: block by block within random segments.
pub struct BareCopy {
    pub pmem: DaxPmem,
    pub at: u64,
}

impl BareCopy {
    /// One block, durable.
    pub fn store(&mut self, prng: &mut Prng, bytes: &[u8]) {
        if self.at.is_multiple_of(SEGMENT) {
            self.at = prng.below((self.pmem.len_bytes() / SEGMENT).max(1)) * SEGMENT;
        }
        self.pmem.store(self.at, bytes);
        self.pmem.drain().expect("memory does not fail");
        self.at += BLOCK as u64;
    }
}

/// A write through the device.
pub fn write_through(local: &mut Local, work: &mut Workload, nth: usize, fua: bool) {
    let bio = Bio::write(work.offsets[nth], work.take(nth), fua, nth as u64);
    local.submit(bio);
    let done = local.wait().expect("a bio was submitted");
    assert!(done.status.is_ok(), "a write failed");
    work.put(nth, done.buffer);
}

/// A read through the device.
pub fn read_through(local: &mut Local, work: &mut Workload, nth: usize) {
    local.submit(Bio::read(work.offsets[nth], work.take(nth), nth as u64));
    let done = local.wait().expect("a bio was submitted");
    assert!(done.status.is_ok(), "a read failed");
    work.put(nth, done.buffer);
}

/// A write past the device, to the engine itself.
pub fn write_engine(cache: &PcacheRig, port: &mut Port, work: &mut Workload, nth: usize) {
    let bio = Bio::write(work.offsets[nth], work.take(nth), false, nth as u64);
    cache.pcache.submit(bio, port);
    let done = loop {
        // Usually it is there already; a write that found no room tries again.
        if let Some(done) = port.done.pop_front() {
            break done;
        }
        if let Some(parked) = port.parked.pop_front() {
            cache.pcache.submit(parked, port);
        }
    };
    assert!(done.status.is_ok(), "a write failed");
    work.put(nth, done.buffer);
}
