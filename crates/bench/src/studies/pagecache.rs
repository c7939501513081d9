//! The effect of the page cache: direct and buffered I/O, on a block device and on a file
//! (`paths`); and writes in each of udm's four modes: their rate, its evenness, the largest amount
//! of unwritten data, and the pages that stay cached.

mod paths;
mod places;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use udm::disk::{Cached, FileDisk, IoMode, LAZY_WINDOW_BYTES};
use udm::error::Kind;
use udm::local::Local;
use udm::units::{KIB, MIB};

use crate::job::{Job, Rw};
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Setup, linear_device, open_disk_in};
use crate::stats::{Histogram, median};
use crate::unit::Unit;
use crate::{flame, load};
use udm_export::check::file_system;

const MODES: [(&str, IoMode); 4] = [
    ("direct", IoMode::Direct),
    ("buffered", IoMode::Buffered),
    ("dontcache", IoMode::DontCache),
    ("lazy", IoMode::Lazy),
];
const PERCENTS: [f64; 7] = [1.0, 50.0, 75.0, 90.0, 99.0, 99.9, 99.99];
/// The watcher looks at the page cache this often.
const LOOKS_EVERY: Duration = Duration::from_micros(500);
/// With fewer samples than this, zero unwritten bytes are not significant.
const LOOKS_MIN: u64 = 20;
/// Writes under way may lie on top of a lazy file's window.
const SLACK_BYTES: u64 = MIB;

/// The results of one mode, repeat by repeat.
#[derive(Debug, Default)]
struct Found {
    rates: Vec<f64>,
    times: Histogram,
    flushes: Vec<f64>,
    most_unclean: Vec<f64>,
    left: Vec<f64>,
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let repeats = setup.repeats(2, 5);
    let mut study = Study::new(
        "pagecache",
        "the effect of the page cache on I/O to a block device and to a file",
        "First: direct and buffered, on a block device and on a file, cold (nothing of it cached, \
         fio's invalidate=1) and warm (all of it cached, and clean), while /proc/meminfo is read \
         every 5 ms. Then: writes to the backing file in each mode. No cache in front; the flush \
         at the end counts. Unwritten: what was dirty or on its way to the device at the worst \
         moment, by cachestat. Left: what the page cache still holds afterwards.",
    );
    paths::run(setup, &mut study)?;
    let path = setup.backing_path()?;
    study.fact("file", format!("{} on {}", path.display(), file_system(path)));
    study.fact("repeats", repeats.to_string());
    for (title, job) in jobs(setup)? {
        study.fact(title, job.text());
        let mut found: Vec<Found> = MODES.iter().map(|_| Found::default()).collect();
        for repeat in 0..repeats {
            for (nth, (name, mode)) in MODES.into_iter().enumerate() {
                let job = Job { randseed: repeat as u64 + 1, ..job.clone() };
                let _case = flame::case(format!("{title}: {name}"));
                match once(path, mode, &job, &mut found[nth]) {
                    Ok(()) => {}
                    Err(error) if is_unsupported(&error) => {
                        let note = format!("{name} was not measured: {error:#}");
                        if !study.notes.contains(&note) {
                            study.notes.push(note);
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        show(&mut study, title, &found);
    }
    Ok(study)
}

fn jobs(setup: &Setup) -> Result<[(&'static str, Job); 2]> {
    let size = setup.backing_bytes()?;
    let runtime = setup.choose(Duration::from_secs(1), Duration::from_secs(10));
    let sequential = Job {
        rw: Rw::Write,
        bs: MIB,
        iodepth: 4,
        size,
        io_size: setup.choose(192 * MIB, 1024 * MIB),
        runtime,
        ..Job::default()
    };
    let random = Job {
        rw: Rw::Randwrite,
        bs: 4 * KIB,
        iodepth: 32,
        io_size: setup.choose(32 * MIB, 256 * MIB),
        ..sequential.clone()
    };
    Ok([("sequential 1 MiB", setup.job(sequential)), ("random 4 KiB", setup.job(random))])
}

pub(super) fn is_unsupported(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<udm::error::Error>().map(udm::error::Error::kind);
    kind == Some(Kind::Unsupported)
}

/// One repeat of one mode, with a file that is not cached at its start.
fn once(path: &Path, mode: IoMode, job: &Job, found: &mut Found) -> Result<()> {
    let disk = Arc::new(open_disk_in(path, mode)?);
    disk.forget_cached();
    let device = linear_device(disk.clone())?;
    let is_over = AtomicBool::new(false);
    let (reached, most) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&disk, &is_over));
        let reached = load::run(&device, job);
        is_over.store(true, Ordering::Relaxed);
        let most = watcher.join().expect("looking does not panic");
        reached.map(|reached| (reached, most))
    })?;
    // The watcher sleeps at times, and a short job may end before it gets to run.
    let at_end = disk.cached().map(|cached| cached.unclean_bytes);
    let most = most.zip(at_end).and_then(|((most, looks), at_end)| {
        let most = most.max(at_end);
        let is_known = most > 0 || looks >= LOOKS_MIN || mode == IoMode::Direct;
        is_known.then_some(most)
    });
    let flush_seconds = flush(&device)?;
    let bytes = reached.writes.count() as f64 * job.bs as f64;
    found.rates.push(bytes / 1e6 / (reached.seconds + flush_seconds).max(1e-9));
    found.times.merge(&reached.writes);
    found.flushes.push(flush_seconds * 1e9);
    if let Some(most) = most {
        found.most_unclean.push(most as f64);
    }
    if let Some(Cached { cached_bytes, .. }) = disk.cached() {
        found.left.push(cached_bytes as f64);
    }
    Ok(())
}

/// How long a flush takes.
fn flush(device: &Arc<udm::device::Device>) -> Result<f64> {
    let mut local = Local::new(device)?;
    let begun = Instant::now();
    local.flush().map_err(|status| anyhow!("the flush failed: {status:?}"))?;
    Ok(begun.elapsed().as_secs_f64())
}

/// The most that was unwritten, and after how many looks; `None` where the kernel does not say.
fn watch(disk: &FileDisk, is_over: &AtomicBool) -> Option<(u64, u64)> {
    let (mut most, mut looks) = (0, 0);
    while !is_over.load(Ordering::Relaxed) {
        most = disk.cached()?.unclean_bytes.max(most);
        looks += 1;
        std::thread::sleep(LOOKS_EVERY);
    }
    Some((most, looks))
}

fn show(study: &mut Study, title: &str, found: &[Found]) {
    let columns = [
        ("MB/s, durable", Unit::MbPerSecond),
        ("p50", Unit::Nanos),
        ("p99", Unit::Nanos),
        ("p99.9", Unit::Nanos),
        ("last flush", Unit::Nanos),
        ("unwritten", Unit::Bytes),
        ("left", Unit::Bytes),
    ];
    let mut table = Table::new(title, &columns);
    let mut plot = Plot::percentiles(&format!("Time of a write, {title}"));
    let names = MODES.map(|(name, _)| name);
    let mut unwritten = Plot::bars(
        &format!("Unwritten at the worst moment, {title}"),
        &names,
        Axis::linear("bytes", Unit::Bytes),
    );
    let mut bars = Vec::new();
    for (nth, ((name, _), found)) in MODES.iter().zip(found).enumerate() {
        if found.rates.is_empty() {
            continue;
        }
        let at = |percent: f64| found.times.percentile(percent);
        let most = found.most_unclean.iter().copied().fold(f64::NAN, f64::max);
        let left = median(&found.left);
        let row = [
            median(&found.rates),
            at(50.0),
            at(99.0),
            at(99.9),
            median(&found.flushes),
            most,
            left,
        ];
        table.row(*name, &row);
        plot.add(*name, PERCENTS.iter().map(|percent| (*percent, at(*percent))).collect());
        bars.push((nth as f64, most));
        study.repeats(format!("{title}, {name}"), Unit::MbPerSecond, &found.rates);
    }
    unwritten.add("unwritten", bars);
    study.tables.push(table);
    study.plots.extend([plot, unwritten]);
    let lazy = &found[MODES.len() - 1];
    if lazy.most_unclean.is_empty() && !lazy.rates.is_empty() {
        let why = "the kernel does not say, or there were too few looks";
        study.notes.push(format!("lazy, {title}: the amount of unwritten data is unknown: {why}."));
    } else if !lazy.most_unclean.is_empty() {
        let window = (LAZY_WINDOW_BYTES + SLACK_BYTES) as f64;
        let parts: Vec<f64> = lazy.most_unclean.iter().map(|most| most / window).collect();
        let what = format!("lazy, {title}: unwritten / (window + 1 MiB)");
        study.claims.push(Claim::new(what, &parts, Some(Promise::AtMost(1.0))));
    }
}
