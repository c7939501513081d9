//! How fast dirty data reaches the backing device, compared with what fio writes there.
//!
//! Each writes the same number of random 4 KiB blocks: udm from a full cache, in any order and with
//! any merging it chooses, and fio at depth 32; both past the page cache where that works, and both
//! until a final fdatasync has returned. Clients that flush often give ordered write-back little to
//! merge: that is measured too.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::device::Device;
use udm::disk::Ring;
use udm::local::Local;
use udm::prng::Prng;
use udm::units::MIB;

use crate::args::TargetName;
use crate::background::Background;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{CACHE_BYTES, Setup, need_tools};
use crate::stats::{median, percentile, ratios, sorted};
use crate::targets::memory_in_words;
use crate::unit::Unit;
use crate::{fio, flame};

const BLOCK: u64 = 4096;
/// The clients' load: a name, and the number of writes per flush; 0: they never flush.
const CLIENTS: [(&str, u64); 5] = [
    ("never", 0),
    ("every 64", 64),
    ("every 8", 8),
    ("every write", 1),
    ("every write, backlog", 1),
];
/// Of those, the one whose dirty data is a third of a small cache: there the order `adaptive`
/// merges across flushes.
const BACKLOG: usize = 4;
const BACKLOG_BYTES: u64 = 40 * MIB;
const SMALL_CACHE_BYTES: u64 = 120 * MIB;
/// A pcache's orders of write-back, with the table's words for each.
const ORDERS: [(&str, &str); 3] = [
    ("ordered", "0"),
    ("fast", "0 writeback_order fast"),
    ("adaptive", "0 writeback_order adaptive"),
];

/// A writecache has one: its oldest blocks first, with their neighbours, across flushes.
const WRITECACHE_ORDER: [(&str, &str); 1] = [("oldest first", "0")];
/// The clients' load there; more flushes do not change the results.
const WRITECACHE_CLIENTS: usize = 3;
/// Blocks in flight while they are made dirty.
const DEPTH: usize = 32;

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    need_tools(&[("fio", "fio")])?;
    let rounds = setup.repeats(3, 5);
    let dirty_bytes = setup.choose(64 * MIB, 256 * MIB).min(setup.backing_bytes()? / 2);
    let flushed_bytes = setup.choose(MIB, 16 * MIB);
    let is_pcache = setup.target == TargetName::Pcache;
    let (clients, orders) = match is_pcache {
        true => (&CLIENTS[..], &ORDERS[..]),
        false => (&CLIENTS[..WRITECACHE_CLIENTS], &WRITECACHE_ORDER[..]),
    };
    let about = about(dirty_bytes, flushed_bytes, is_pcache);
    let mut study = Study::new("writeback", "write-back, compared with the backing device", &about);
    study.fact("target", setup.target.name());
    let maker = Maker::new(setup)?;
    let mut fios = Vec::new();
    // By order, by how often clients flush, by round.
    let mut rates = vec![vec![Vec::new(); clients.len()]; orders.len()];
    for round in 0..rounds {
        fios.push(fio_rate(setup, round, dirty_bytes)?);
        for (order, (_, words)) in orders.iter().enumerate() {
            for (nth, (_, every)) in clients.iter().enumerate() {
                let bytes = match (nth, every) {
                    (BACKLOG, _) => BACKLOG_BYTES,
                    (_, 0) => dirty_bytes,
                    _ => flushed_bytes,
                };
                let (device, cache) = maker.fresh(nth == BACKLOG, words)?;
                if round + order + nth == 0 {
                    setup.describe_as(&mut study, cache)?;
                }
                let case = format!("{}, clients flush {}", orders[order].0, clients[nth].0);
                let _case = flame::case(case);
                rates[order][nth].push(udm_rate(setup, &device, round, bytes, *every)?);
            }
        }
    }
    study.fact("rounds", rounds.to_string());
    fill(&mut study, clients, orders, &fios, &rates);
    Ok(study)
}

fn about(dirty_bytes: u64, flushed_bytes: u64, is_pcache: bool) -> String {
    let text = |bytes: u64| Unit::Bytes.text(bytes as f64);
    let (often, then) = match is_pcache {
        true => (
            "64, 8 or 1",
            format!(
                "ordered write-back keeps the backing device consistent at each of those flushes. \
                 Last, such a client has left {} in a cache of {}: the order adaptive then merges \
                 across flushes.",
                text(BACKLOG_BYTES),
                text(SMALL_CACHE_BYTES)
            ),
        ),
        false => ("64 or 8", "a writecache merges across flushes.".to_owned()),
    };
    format!(
        "{} of dirty random 4 KiB blocks written back to the backing device, and fio writing as \
         much to it at depth 32, in turns, each until durable. Then the same for clients that \
         flush behind every {often} writes (with {}): {then}",
        text(dirty_bytes),
        text(flushed_bytes)
    )
}

/// Makes caches of the target that was asked for, one after the other.
struct Maker<'a> {
    setup: &'a Setup,
    /// The writecache's.
    path: Option<PathBuf>,
}

impl Maker<'_> {
    fn new(setup: &Setup) -> Result<Maker<'_>> {
        let bytes = setup.choose(192 * MIB, CACHE_BYTES);
        let path = match setup.target {
            TargetName::Pcache => None,
            _ => Some(setup.writecache_path("writeback-cache", bytes)?),
        };
        Ok(Maker { setup, path })
    }

    /// A fresh one, and its cache device in words.
    fn fresh(&self, is_small: bool, words: &str) -> Result<(Arc<Device>, String)> {
        let disk = self.setup.backing_disk()?;
        if let Some(path) = &self.path {
            return self.setup.fresh_writecache(path, disk);
        }
        let cache = match is_small {
            true => self.setup.pcache_of("writeback-small", SMALL_CACHE_BYTES, disk, words),
            false => self.setup.roomy_pcache("writeback-cache", disk, words),
        }?;
        Ok((cache.device, memory_in_words(cache.pmem.as_ref())))
    }
}

fn fill(
    study: &mut Study,
    clients: &[(&str, u64)],
    orders: &[(&str, &str)],
    fios: &[f64],
    rates: &[Vec<Vec<f64>>],
) {
    let columns = ["median", "low round", "high round"].map(|name| (name, Unit::MbPerSecond));
    let mut table = Table::new("MB/s until durable", &columns);
    let mut row = |name: String, rates: &[f64]| {
        let sorted = sorted(rates);
        let values = [median(rates), percentile(&sorted, 0.0), percentile(&sorted, 100.0)];
        table.row(name.clone(), &values);
        study.repeats(name, Unit::MbPerSecond, rates);
    };
    row("fio, depth 32".into(), fios);
    let groups: Vec<&str> = clients.iter().map(|(name, _)| *name).collect();
    let axis = Axis::log("MB/s until durable", Unit::Number);
    let mut bars = Plot::bars("Write-back, by how often clients flush", &groups, axis);
    bars.add("fio, depth 32, no flushes", vec![(0.0, median(fios))]);
    for ((order, _), rates) in orders.iter().zip(rates) {
        for (every, rates) in groups.iter().zip(rates) {
            row(format!("udm {order}, clients flush {every}"), rates);
        }
        let points = rates.iter().enumerate().map(|(nth, rates)| (nth as f64, median(rates)));
        bars.add(format!("udm {order}"), points.collect());
    }
    study.tables.push(table);
    study.plots.push(bars);
    let promise = Some(Promise::AtLeast(0.9));
    study.claims.push(Claim::new("write-back / fio", &ratios(&rates[0][0], fios), promise));
    if let [ordered, fast, adaptive] = rates {
        claim_orders(study, fios, ordered, fast, adaptive);
    }
}

/// The gain of a pcache's other orders.
fn claim_orders(
    study: &mut Study,
    fios: &[f64],
    ordered: &[Vec<f64>],
    fast: &[Vec<f64>],
    adaptive: &[Vec<f64>],
) {
    study.claims.extend([
        Claim::new("write-back, order fast / fio", &ratios(&fast[0], fios), None),
        Claim::new(
            "flush behind every write: fast / ordered",
            &ratios(&fast[3], &ordered[3]),
            None,
        ),
        Claim::new(
            "flush behind every write, backlog: adaptive / ordered",
            &ratios(&adaptive[BACKLOG], &ordered[BACKLOG]),
            None,
        ),
    ]);
    study.notes.push(
        "Adaptive is ordered until dirty data passes a mark, and merges across flushes above it: \
         `udm status` says which."
            .into(),
    );
}

fn megabytes_per_second(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / 1e6 / seconds
}

fn fio_rate(setup: &Setup, round: usize, dirty_bytes: u64) -> Result<f64> {
    let path = setup.backing_path()?;
    let arguments = [
        format!("--filename={}", path.display()),
        "--rw=randwrite".into(),
        "--bs=4k".into(),
        "--iodepth=32".into(),
        format!("--direct={}", u8::from(setup.backing_disk()?.is_direct())),
        "--ioengine=io_uring".into(),
        format!("--randseed={}", round + 1),
        format!("--size={}", setup.backing_bytes()?),
        format!("--io_size={dirty_bytes}"),
    ];
    let job = fio::write(&arguments)?;
    Ok(megabytes_per_second(dirty_bytes, job.seconds + sync(path)?))
}

/// Seconds that an fdatasync takes.
fn sync(path: &Path) -> Result<f64> {
    let file = File::options().write(true).open(path).context("cannot open the backing device")?;
    let start = Instant::now();
    file.sync_data().context("cannot sync the backing device")?;
    Ok(start.elapsed().as_secs_f64())
}

fn udm_rate(
    setup: &Setup,
    device: &Arc<Device>,
    round: usize,
    dirty_bytes: u64,
    flush_every: u64,
) -> Result<f64> {
    let bytes = device.size_bytes().min(setup.backing_bytes()?);
    make_dirty(device, round, bytes, dirty_bytes, flush_every)?;
    ensure!(device.dirty().bytes > 0, "the device has no dirty data");
    let mut background = Background::new(device, Ring::new(64)?)?;
    let start = Instant::now();
    background.drain();
    let rate = megabytes_per_second(dirty_bytes, start.elapsed().as_secs_f64());
    ensure!(device.dirty().bytes == 0, "drained, but still dirty");
    Ok(rate)
}

/// Writes distinct random blocks, in random order, with a flush after each run of this many.
pub(super) fn make_dirty(
    device: &Arc<Device>,
    round: usize,
    backing_bytes: u64,
    dirty_bytes: u64,
    flush_every: u64,
) -> Result<()> {
    let mut prng = Prng::new(100 + round as u64);
    let mut blocks: Vec<u64> = (0..backing_bytes / BLOCK).collect();
    let mut local = Local::new(device)?;
    let mut buffer = Buffer::zeroed(BLOCK as usize);
    prng.fill(buffer.as_mut_slice());
    let mut spare: Vec<Buffer> =
        (0..DEPTH).map(|_| Buffer::from_bytes(buffer.as_slice())).collect();
    for nth in 0..(dirty_bytes / BLOCK) as usize {
        let other = nth + prng.below((blocks.len() - nth) as u64) as usize;
        blocks.swap(nth, other);
        if spare.is_empty() {
            spare.push(finished(&mut local)?);
        }
        let buffer = spare.pop().context("a buffer got lost")?;
        local.submit(Bio::write(blocks[nth] * BLOCK, buffer, false, 0));
        if flush_every > 0 && (nth as u64 + 1).is_multiple_of(flush_every) {
            while local.in_flight() > 0 {
                spare.push(finished(&mut local)?);
            }
            local.flush().ok().context("the flush failed")?;
        }
    }
    while local.in_flight() > 0 {
        finished(&mut local)?;
    }
    local.flush().ok().context("the flush failed")
}

/// The buffer of a write that is done.
fn finished(local: &mut Local) -> Result<Buffer> {
    let done = local.wait().context("a write got lost")?;
    ensure!(done.status.is_ok(), "a write failed");
    Ok(done.buffer)
}
