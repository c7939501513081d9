//! How long each kind of request takes, from the usual one to the rare slow one: in process and
//! over NBD.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::device::Device;
use udm::disk::Disk;
use udm::local::Local;
use udm::prng::Prng;
use udm::queue::Queue;
use udm::units::MIB;

use crate::fio::{self, JobResult};
use crate::job::{Job, Rw};
use crate::load::{fill, refill, time};
use crate::results::{Plot, Study, Table};
use crate::rig::{Export, FILLS, Setup, has_fio_nbd, settle};
use crate::stats::{Histogram, median};
use crate::unit::Unit;

const BLOCK: u64 = 4096;
/// Requests of one kind in one repeat, at most.
const COUNT_MAX: u64 = 40_000;
/// The last one is the longest request.
const PERCENTS: [f64; 10] = [1.0, 10.0, 50.0, 75.0, 90.0, 99.0, 99.9, 99.99, 99.999, 100.0];
const COLUMNS: [(&str, f64); 6] = [
    ("p50", 50.0),
    ("p90", 90.0),
    ("p99", 99.0),
    ("p99.9", 99.9),
    ("p99.99", 99.99),
    ("worst", 100.0),
];

/// The kinds, and how often each may be done before the cache would have to make room.
const KINDS: [&str; 5] = ["write", "write, FUA", "write and flush", "read hit", "read miss"];

/// Times of one kind: percentiles, repeat by repeat.
#[derive(Clone, Debug, Default)]
struct Kind {
    all: Histogram,
    p50: Vec<f64>,
    curves: Vec<Vec<f64>>,
}

impl Kind {
    fn add(&mut self, times: &Histogram) {
        self.all.merge(times);
        self.p50.push(times.percentile(50.0));
    }

    fn add_fio(&mut self, percentiles: &[f64]) {
        self.curves.push(percentiles.to_vec());
        self.p50.push(percentiles[2]);
    }

    /// Percentiles of all repeats together, or their medians if only those are known.
    fn at(&self, nth: usize) -> f64 {
        if self.curves.is_empty() {
            if PERCENTS[nth] == 100.0 {
                return self.all.worst();
            }
            let counts = self.all.count() as f64 * (1.0 - PERCENTS[nth] / 100.0);
            // A percentile with fewer than two requests above it is not significant.
            return if counts < 2.0 { f64::NAN } else { self.all.percentile(PERCENTS[nth]) };
        }
        median(&self.curves.iter().map(|curve| curve[nth]).collect::<Vec<_>>())
    }
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let repeats = setup.repeats(2, 5);
    let runtime = setup
        .asked()
        .runtime
        .unwrap_or(setup.choose(Duration::from_millis(400), Duration::from_secs(1)));
    let mut study = Study::new(
        "latency",
        "how long each kind of request takes",
        "4 KiB, one request at a time, in process and with fio over NBD, on a cache that was \
         filled three times, during write-back and collection. Flush: a write and the \
         flush behind it; a read miss goes to the backing device and is cached. Looking at the \
         clock is in each time in process.",
    );
    let disk: Arc<dyn Disk> = setup.backing_disk()?;
    let span = span(setup)?;
    let misses = Misses { from: span, blocks: (setup.backing_bytes()? - span) / BLOCK, repeats };
    // In the order `ordered` all the flushes would have to be repeated on the backing device before
    // the study could go on.
    let words = "0 writeback_order fast";
    let device = setup.target(&mut study, disk, words)?;
    study.fact("repeats", repeats.to_string());
    let mut inside = vec![Kind::default(); KINDS.len()];
    {
        let _background = Queue::background("udm-background", &device)?;
        // Only what is written later too: the rest of the device must not be in the cache.
        for _ in 0..(FILLS * setup.cache_bytes()).div_ceil(span) {
            refill(&device, span)?;
        }
        for repeat in 0..repeats {
            in_process(setup, &device, runtime, repeat, &misses, &mut inside)?;
        }
    }
    show(&mut study, "in process", &KINDS, &inside);
    if has_fio_nbd() {
        let socket = setup.places.memory.path("latency.sock");
        let export = Export::new(&device, &socket)?;
        let kinds = ["write", "flush", "read hit", "read miss"];
        let mut outside = vec![Kind::default(); kinds.len()];
        for repeat in 0..repeats {
            let job = Job { runtime, size: span, randseed: repeat as u64 + 1, ..Job::default() };
            let job = Job { io_size: COUNT_MAX * BLOCK, ..job };
            let miss = misses.over_nbd(repeat);
            let results = over_nbd(setup, &device, &socket, &job, miss)?;
            for (kind, percentiles) in outside.iter_mut().zip(results) {
                kind.add_fio(&percentiles);
            }
        }
        drop(export);
        show(&mut study, "fio over NBD", &kinds, &outside);
        study.notes.push("fio's NBD engine sends no FUA writes.".into());
    } else {
        study.notes.push("fio with its NBD engine is not installed: NBD was not measured.".into());
    }
    Ok(study)
}

/// The part of the device that is only read, each block once: misses are cached.
struct Misses {
    from: u64,
    blocks: u64,
    repeats: usize,
}

impl Misses {
    /// Blocks of one repeat, in process or over NBD.
    fn count(&self) -> u64 {
        (self.blocks / (2 * self.repeats as u64)).clamp(1, COUNT_MAX)
    }

    /// Where the `nth` block of a repeat in process is: never next to the one before.
    fn at(&self, repeat: usize, nth: u64) -> u64 {
        // A prime number that is larger than the count: each block once.
        const STRIDE: u64 = 1_000_003;
        let block = repeat as u64 * self.count() + nth * STRIDE % self.count();
        self.from + block * BLOCK
    }

    /// First byte and bytes of a repeat over NBD.
    fn over_nbd(&self, repeat: usize) -> (u64, u64) {
        let first = (self.repeats + repeat) as u64 * self.count();
        (self.from + first * BLOCK, self.count() * BLOCK)
    }
}

/// Bytes that are written; the bytes after them are only read.
fn span(setup: &Setup) -> Result<u64> {
    Ok(setup.backing_bytes()?.min(256 * MIB) / 2)
}

/// Has `span` bytes in the cache, dirty only if the target would let go of them otherwise.
fn make_hits(setup: &Setup, device: &Arc<Device>, span: u64) -> Result<()> {
    if setup.keeps_clean_data() { refill(device, span) } else { fill(device, span) }
}

/// One repeat of all kinds. Written is below `span`, missed is above.
fn in_process(
    setup: &Setup,
    device: &Arc<Device>,
    runtime: Duration,
    repeat: usize,
    misses: &Misses,
    kinds: &mut [Kind],
) -> Result<()> {
    let span = span(setup)?;
    let mut local = Local::new(device)?;
    let mut prng = Prng::new(repeat as u64);
    let mut spare = Some(Buffer::zeroed(BLOCK as usize));
    let mut carry_out = |local: &mut Local, make: &dyn Fn(Buffer) -> Bio| -> Result<()> {
        let buffer = spare.take().ok_or_else(|| anyhow!("a buffer got lost"))?;
        local.submit(make(buffer));
        let done = local.wait().ok_or_else(|| anyhow!("a request got lost"))?;
        done.status.map_err(|status| anyhow!("a request failed: {status:?}"))?;
        spare = Some(done.buffer);
        Ok(())
    };
    let mut below = move |span: u64| prng.below(span / BLOCK) * BLOCK;
    for (nth, kind) in kinds.iter_mut().enumerate() {
        if nth == 3 {
            make_hits(setup, device, span)?;
        }
        let count_max = if nth == 4 { misses.count() } else { COUNT_MAX };
        let times = time(runtime, count_max, |turn| {
            let at = below(span);
            match nth {
                0 | 1 => carry_out(&mut local, &|buffer| Bio::write(at, buffer, nth == 1, 0)),
                2 => {
                    carry_out(&mut local, &|buffer| Bio::write(at, buffer, false, 0))?;
                    local.flush().map_err(|status| anyhow!("a flush failed: {status:?}"))
                }
                3 => carry_out(&mut local, &|buffer| Bio::read(at, buffer, 0)),
                _ => {
                    let at = misses.at(repeat, turn);
                    carry_out(&mut local, &|buffer| Bio::read(at, buffer, 0))
                }
            }
        })?;
        kind.add(&times);
        settle(device)?;
    }
    Ok(())
}

/// Percentiles of writes, flushes, hits and misses with fio.
fn over_nbd(
    setup: &Setup,
    device: &Arc<Device>,
    socket: &Path,
    job: &Job,
    (miss_at, miss_bytes): (u64, u64),
) -> Result<Vec<Vec<f64>>> {
    let run = |job: Job| -> Result<JobResult> {
        let result = fio::nbd(socket, &job, &PERCENTS)?;
        settle(device)?;
        Ok(result)
    };
    let write = run(job.clone())?;
    let flush = run(Job { fsync: 1, ..job.clone() })?;
    make_hits(setup, device, job.size)?;
    let hit = run(Job { rw: Rw::Randread, ..job.clone() })?;
    let io_size = miss_bytes;
    let job = Job { rw: Rw::Randread, offset: miss_at, size: miss_bytes, io_size, ..job.clone() };
    let miss = run(job)?;
    let flushes = flush.sync_percentiles;
    ensure!(flushes.len() == PERCENTS.len(), "fio had no time for a flush: raise --runtime");
    Ok(vec![write.percentiles, flushes, hit.percentiles, miss.percentiles])
}

fn show(study: &mut Study, way: &str, names: &[&str], kinds: &[Kind]) {
    let columns = COLUMNS.map(|(name, _)| (name, Unit::Nanos));
    let mut table = Table::new(way, &columns);
    let mut plot = Plot::percentiles(&format!("Time of a 4 KiB request, {way}"));
    for (name, kind) in names.iter().zip(kinds) {
        let points = PERCENTS.iter().enumerate().map(|(nth, percent)| (*percent, kind.at(nth)));
        plot.add(*name, points.clone().filter(|(percent, _)| *percent < 100.0).collect());
        let at = |wanted: f64| {
            let found = points.clone().find(|(percent, _)| *percent == wanted);
            found.map_or(f64::NAN, |(_, nanos)| nanos)
        };
        table.row(*name, &COLUMNS.map(|(_, percent)| at(percent)));
        study.repeats(format!("{way}, {name}, p50"), Unit::Nanos, &kind.p50);
    }
    study.tables.push(table);
    study.plots.push(plot);
}
