//! How long a cache takes to open, by the number of keys in its log: cleanly closed, and as a crash
//! leaves it, with everything dirty; on one thread and on all. Requests are served after the
//! opening; the time with the whole log replayed before that is measured too.

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

use crate::background::Background;
use crate::pcache_rig::PcacheRig;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Setup, open_pmem, open_untouched, ram_disk};
use crate::stats::{median, ratios};
use crate::unit::Unit;

/// Bytes of a write: small, so that many keys find room.
const BYTES: u64 = 512;

/// The time of the attach of one log.
#[derive(Clone, Debug, Default)]
struct Attach {
    /// On one thread.
    alone: Vec<f64>,
    /// On all.
    nanos: Vec<f64>,
    first_read: Vec<f64>,
    /// With all of the log replayed, on one thread and on all.
    whole_alone: Vec<f64>,
    whole: Vec<f64>,
}

impl Attach {
    /// The times in which all keys were inserted into the index, on one thread and on all. Dirty
    /// keys are inserted before requests are served.
    fn of_all_keys(&self, is_dirty: bool) -> [&[f64]; 2] {
        if is_dirty { [&self.alone, &self.nanos] } else { [&self.whole_alone, &self.whole] }
    }
}

/// The kinds of logs.
const KINDS: [(&str, bool); 2] = [("after a crash", true), ("written back", false)];

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut study = Study::new(
        "recovery",
        "how long attaching takes, by keys in the log",
        "Random writes of 512 bytes make a log; the cache is closed without writing back, as after \
         a crash, or after all was written back; then it is opened again, by one thread and by as \
         many as there are processors, in turns. An attach ends when requests can be served: the \
         whole log is checked by then, but of a long one only what is dirty is in the index, and \
         the rest is replayed in the background. `all replayed` is an attach that does all of that \
         first; keys per second are of that, or of the attach where all keys are dirty. The first \
         read is timed from the opening of the medium.",
    );
    let repeats = setup.repeats(3, 5);
    study.fact("repeats", repeats.to_string());
    study.fact("threads", threads.to_string());
    let counts: &[u64] = setup.choose(&[10_000, 100_000], &[10_000, 100_000, 300_000, 600_000]);
    let mut table = Table::new(
        "attach",
        &[
            ("one thread", Unit::Nanos),
            ("all threads", Unit::Nanos),
            ("first read", Unit::Nanos),
            ("all replayed", Unit::Nanos),
            ("keys per second, one thread", Unit::PerSecond),
            ("keys per second, all threads", Unit::PerSecond),
        ],
    );
    let mut plot = Plot::lines(
        "Attach time, by keys in the log",
        Axis::log("keys", Unit::Number),
        Axis::log("time", Unit::Nanos),
    );
    let mut found = Vec::new();
    for (name, is_dirty) in KINDS {
        let (mut alone, mut shared) = (Vec::new(), Vec::new());
        for &keys in counts {
            let attach = measure(setup, keys, is_dirty, repeats, threads)?;
            let rate = |nanos: &[f64]| keys as f64 * 1e9 / median(nanos);
            let [rate_alone, rate] = attach.of_all_keys(is_dirty).map(rate);
            let label = format!("{} keys, {name}", Unit::PerSecond.text(keys as f64));
            let (one, all) = (median(&attach.alone), median(&attach.nanos));
            let (first_read, whole) = (median(&attach.first_read), median(&attach.whole));
            table.row(label.clone(), &[one, all, first_read, whole, rate_alone, rate]);
            study.repeats(label, Unit::Nanos, &attach.nanos);
            alone.push((keys as f64, one));
            shared.push((keys as f64, all));
            found.push(attach);
        }
        plot.add(format!("{name}, one thread"), alone);
        plot.add(format!("{name}, {threads} threads"), shared);
    }
    study.tables.push(table);
    study.plots.push(plot);
    claims(&mut study, &found, counts, threads);
    Ok(study)
}

/// `found`: by kind, then by count.
fn claims(study: &mut Study, found: &[Attach], counts: &[u64], threads: usize) {
    let most = counts[counts.len() - 1] as f64;
    let rates = |nanos: &[f64]| nanos.iter().map(|nanos| most * 1000.0 / nanos).collect::<Vec<_>>();
    let (crashed, clean) = (&found[counts.len() - 1], &found[2 * counts.len() - 1]);
    let mut claim = |what: &str, rounds: &[f64], promise| {
        study.claims.push(Claim::new(what, rounds, promise));
    };
    let at_least = Some(Promise::AtLeast(5.0));
    claim("million keys per second, one thread, largest log", &rates(&crashed.alone), at_least);
    claim("million keys per second, all threads, largest log", &rates(&crashed.nanos), None);
    for (name, attach, is_dirty) in
        [("largest log", crashed, true), ("largest clean log", clean, false)]
    {
        let [alone, shared] = attach.of_all_keys(is_dirty);
        let what = format!("one thread / {threads} threads, {name}");
        claim(&what, &ratios(alone, shared), None);
    }
    let first_reads = &found[counts.len()].first_read;
    let millis: Vec<f64> = first_reads.iter().map(|nanos| nanos / 1e6).collect();
    let what = "milliseconds until the first read, small clean cache";
    claim(what, &millis, Some(Promise::AtMost(50.0)));
    let shares: Vec<f64> =
        ratios(&clean.nanos, &clean.whole).iter().map(|ratio| 100.0 * ratio).collect();
    let what = "percent of a whole replay until requests are served, largest clean log";
    claim(what, &shares, None);
}

fn measure(
    setup: &Setup,
    keys: u64,
    is_dirty: bool,
    repeats: usize,
    threads: usize,
) -> Result<Attach> {
    let disk = ram_disk(GIB);
    let path = setup.places.memory.file("recovery", crate::rig::CACHE_BYTES)?;
    let shared = setup.places.memory.path("recovery.open-keys");
    let _ = std::fs::remove_file(&shared);
    make_log(&path, &shared, &disk, keys, is_dirty)?;
    let mut attach = Attach::default();
    let open = |threads, is_whole| open(&path, &shared, &disk, is_dirty, threads, is_whole);
    for _ in 0..repeats {
        attach.alone.push(open(1, false)?.0);
        let (nanos, first_read) = open(threads, false)?;
        attach.nanos.push(nanos);
        attach.first_read.push(first_read);
        attach.whole_alone.push(open(1, true)?.0);
        attach.whole.push(open(threads, true)?.0);
    }
    Ok(attach)
}

/// How long an attach takes, and how long it is until the first read is done. `is_whole`: it
/// replays the whole log before it serves.
fn open(
    path: &Path,
    shared: &Path,
    disk: &Arc<dyn Disk>,
    is_dirty: bool,
    threads: usize,
    is_whole: bool,
) -> Result<(f64, f64)> {
    let start = Instant::now();
    let pmem: Arc<dyn Pmem> = Arc::new(open_untouched(path)?);
    let words = shared_words_of(shared)?;
    let mut options = OpenOptions { threads, ..OpenOptions::new(1) };
    options.geometry.device_bytes_min = 0;
    if is_whole {
        options.replay.at_once_max = u64::MAX;
    }
    // Mapping the memory is the business of the opener, not of the attach.
    let opened = Instant::now();
    let cache = PcacheRig::open_with("recovery", pmem, disk.clone(), "0", words, &options)?;
    let attach = opened.elapsed().as_nanos() as f64;
    let mut local = Local::without_kernel(&cache.device)?;
    local.submit(Bio::read(0, Buffer::zeroed(BYTES as usize), 0));
    let done = local.wait().context("the first read got lost")?;
    let first_read = start.elapsed().as_nanos() as f64;
    ensure!(done.status.is_ok(), "the first read failed");
    ensure!((cache.device.dirty().bytes > 0) == is_dirty, "it is not as it was left");
    Ok((attach, first_read))
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
    let cache = PcacheRig::open("recovery", pmem, disk.clone(), "0", words, true)?;
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
        Background::new(&cache.device, Ring::without_kernel())?.drain();
    }
    Ok(())
}
