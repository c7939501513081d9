//! How long a cache takes to open, by the number of keys in its log: cleanly closed, and as a
//! crash leaves it, with everything dirty. Beside the opening, after which requests are served,
//! the same with the whole log replayed before.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::disk::{Disk, Ring};
use udm::local::Local;
use udm::pcache::{OpenOptions, shared_words};
use udm::pmem::Pmem;
use udm::prng::Prng;
use udm::shm::SharedWords;
use udm::units::GIB;

use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Cache, Keeper, Setup, open_pmem, open_untouched, ram_disk};
use crate::stats::median;
use crate::unit::Unit;

/// Bytes of a write: small, so that many keys find room.
const BYTES: u64 = 512;

/// What the attach of one log took.
#[derive(Clone, Debug, Default)]
struct Attach {
    nanos: Vec<f64>,
    first_read: Vec<f64>,
    /// With all of the log replayed.
    whole: Vec<f64>,
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let mut study = Study::new(
        "recovery",
        "how long attaching takes, by keys in the log",
        "Random writes of 512 bytes make a log; the cache is closed without writing back, as after \
         a crash, or after all was written back; then it is opened again on one core's time. \
         `attach` ends when requests can be served: the whole log is checked by then, but of a \
         long one only what is dirty is in the index, and the rest is replayed in the background. \
         `all replayed` is an attach that does all of that first; keys per second are of \
         that, or of the attach where all keys are dirty. The first read is timed from the \
         opening of the medium.",
    );
    let repeats = setup.repeats(3, 5);
    study.fact("repeats", repeats.to_string());
    let counts: &[u64] = setup.choose(&[10_000, 100_000], &[10_000, 100_000, 300_000, 600_000]);
    let mut table = Table::new(
        "attach",
        &[
            ("attach", Unit::Nanos),
            ("first read", Unit::Nanos),
            ("all replayed", Unit::Nanos),
            ("keys per second", Unit::PerSecond),
        ],
    );
    let mut plot = Plot::lines(
        "Attach time, by keys in the log",
        Axis::log("keys", Unit::Number),
        Axis::log("time", Unit::Nanos),
    );
    let mut rates = Vec::new();
    let mut first_reads = Vec::new();
    let mut shares = Vec::new();
    for (name, is_dirty) in [("after a crash", true), ("written back", false)] {
        let mut points = Vec::new();
        for &keys in counts {
            let attach = measure(setup, keys, is_dirty, repeats)?;
            let nanos = median(&attach.nanos);
            let whole = median(&attach.whole);
            // What is dirty is in the index when requests are served.
            let rate = keys as f64 * 1e9 / if is_dirty { nanos } else { whole };
            let label = format!("{} keys, {name}", Unit::PerSecond.text(keys as f64));
            table.row(label.clone(), &[nanos, median(&attach.first_read), whole, rate]);
            study.repeats(label, Unit::Nanos, &attach.nanos);
            points.push((keys as f64, nanos));
            if is_dirty && Some(&keys) == counts.last() {
                rates = attach.nanos.iter().map(|nanos| keys as f64 * 1000.0 / nanos).collect();
            }
            if !is_dirty && Some(&keys) == counts.last() {
                let pairs = attach.nanos.iter().zip(&attach.whole);
                shares = pairs.map(|(served, whole)| 100.0 * served / whole).collect();
            }
            if !is_dirty && Some(&keys) == counts.first() {
                first_reads = attach.first_read.iter().map(|nanos| nanos / 1e6).collect();
            }
        }
        plot.add(name, points);
    }
    study.tables.push(table);
    study.plots.push(plot);
    let at_least = Some(Promise::AtLeast(5.0));
    study.claims.push(Claim::new("million keys per second, largest log", &rates, at_least));
    let what = "milliseconds until the first read, small clean cache";
    study.claims.push(Claim::new(what, &first_reads, Some(Promise::AtMost(50.0))));
    let what = "percent of a whole replay until requests are served, largest clean log";
    study.claims.push(Claim::new(what, &shares, None));
    Ok(study)
}

fn measure(setup: &Setup, keys: u64, is_dirty: bool, repeats: usize) -> Result<Attach> {
    let disk = ram_disk(GIB);
    let path = setup.places.memory.file("recovery", crate::rig::CACHE_BYTES)?;
    let shared = setup.places.memory.path("recovery.open-keys");
    let _ = std::fs::remove_file(&shared);
    make_log(&path, &shared, &disk, keys, is_dirty)?;
    let mut attach = Attach::default();
    for _ in 0..repeats {
        let start = Instant::now();
        let pmem: Arc<dyn Pmem> = Arc::new(open_untouched(&path)?);
        let words = shared_words_of(&shared)?;
        // Mapping the memory is the business of the opener, not of the attach.
        let opened = Instant::now();
        let cache = Cache::open("recovery", pmem, disk.clone(), "0", words, false)?;
        attach.nanos.push(opened.elapsed().as_nanos() as f64);
        let mut local = Local::without_kernel(&cache.device)?;
        local.submit(Bio::read(0, Buffer::zeroed(BYTES as usize), 0));
        let done = local.wait().context("the first read got lost")?;
        attach.first_read.push(start.elapsed().as_nanos() as f64);
        ensure!(done.status.is_ok(), "the first read failed");
        ensure!((cache.device.dirty().bytes > 0) == is_dirty, "it is not as it was left");
        drop((local, cache));
        attach.whole.push(open_whole(&path, &shared, &disk)?);
    }
    Ok(attach)
}

/// How long an attach takes that replays the whole log before it serves.
fn open_whole(path: &Path, shared: &Path, disk: &Arc<dyn Disk>) -> Result<f64> {
    let pmem: Arc<dyn Pmem> = Arc::new(open_untouched(path)?);
    let words = shared_words_of(shared)?;
    let mut options = OpenOptions::new(1);
    options.geometry.device_bytes_min = 0;
    options.replay.at_once_max = u64::MAX;
    let opened = Instant::now();
    Cache::open_with("recovery", pmem, disk.clone(), "0", words, &options)?;
    Ok(opened.elapsed().as_nanos() as f64)
}

fn shared_words_of(path: &Path) -> Result<SharedWords> {
    Ok(SharedWords::open(path, shared_words(OpenOptions::new(1).stripes))?)
}

fn make_log(
    path: &Path,
    shared: &Path,
    disk: &Arc<dyn Disk>,
    keys: u64,
    is_dirty: bool,
) -> Result<()> {
    let pmem: Arc<dyn Pmem> = Arc::new(open_pmem(path)?);
    let words = shared_words_of(shared)?;
    let cache = Cache::open("recovery", pmem, disk.clone(), "0", words, true)?;
    let mut local = Local::without_kernel(&cache.device)?;
    let mut prng = Prng::new(keys);
    let mut buffer = Buffer::zeroed(BYTES as usize);
    for _ in 0..keys {
        let offset = prng.below(GIB / BYTES) * BYTES;
        local.submit(Bio::write(offset, buffer, false, 0));
        let done = local.poll().context("the cache is full too early")?;
        ensure!(done.status.is_ok(), "a write failed");
        buffer = done.buffer;
    }
    local.flush().ok().context("the flush failed")?;
    drop(local);
    if !is_dirty {
        Keeper::new(&cache.device, Ring::without_kernel())?.drain();
    }
    Ok(())
}
