//! The modes of I/O for a cache: pcache and writecache over a file, in each mode. The rate of
//! write-back, the latency of clients, and the memory that each mode takes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use udm::device::Device;
use udm::disk::{FileDisk, IoMode, Ring};
use udm::pmem::Pmem;
use udm::queue::Queue;
use udm::units::{KIB, MIB};

use super::pagecache::is_unsupported;
use super::writeback::make_dirty;
use crate::background::Background;
use crate::job::{Job, Rw};
use crate::results::{Axis, Claim, Plot, Study, Table};
use crate::rig::{CACHE_BYTES, Setup, open_disk_in, open_pmem, settle};
use crate::stats::{Histogram, median, ratios};
use crate::targets::{Ground, writecache};
use crate::unit::Unit;
use crate::{flame, load};

const TARGETS: [&str; 2] = ["pcache", "writecache"];
const LOOKS_EVERY: Duration = Duration::from_micros(500);

/// The results of a target over a file in one mode, repeat by repeat.
#[derive(Debug, Default)]
struct Found {
    drain: Vec<f64>,
    iops: Vec<f64>,
    reads: Histogram,
    writes: Histogram,
    cached: Vec<f64>,
    unclean: Vec<f64>,
    left: Vec<f64>,
}

/// Clients that read and write while all is written back.
pub fn writeback(setup: &Setup) -> Result<Study> {
    let study = Study::new(
        "writeback-io",
        "write-back to a file, by the way it is reached",
        "Dirty random 4 KiB blocks are written back to a file, first alone (drain), then while a \
         client reads and writes random blocks through the cache. Clients never flush. Page cache \
         and unwritten: what the kernel kept of the file at most, by cachestat; left: at the end.",
    );
    run(setup, study, Rw::Randrw)
}

/// Clients that write.
pub fn randwrite(setup: &Setup) -> Result<Study> {
    let study = Study::new(
        "randwrite-io",
        "random writes through a cache, by the way to the file below",
        "A client writes random 4 KiB blocks through a cache that is writing back to a file; and \
         how fast the same number of dirty blocks is written back alone (drain). Page cache and \
         unwritten: what the kernel kept of the file at most, by cachestat; left: at the end.",
    );
    run(setup, study, Rw::Randwrite)
}

fn run(setup: &Setup, mut study: Study, rw: Rw) -> Result<Study> {
    let modes = setup.io();
    let path = setup.backing_path()?.to_owned();
    let size = setup.backing_bytes()?;
    let dirty_bytes = setup.choose(48 * MIB, 256 * MIB).min(size / 2);
    let runtime = setup.choose(Duration::from_millis(300), Duration::from_secs(2));
    let own = Job { rw, bs: 4 * KIB, size, runtime, io_size: 1 << 40, ..Job::default() };
    let job = Job { size, ..setup.job(own) };
    study.fact("file", format!("{} on {}", path.display(), udm_export::check::file_system(&path)));
    study.fact("dirty", Unit::Bytes.text(dirty_bytes as f64));
    study.fact("load", job.text());
    let repeats = setup.repeats(2, 10);
    study.fact("repeats", repeats.to_string());
    let cache = setup.places.memory.file("modes", CACHE_BYTES)?;
    let mut found: Vec<Vec<Found>> =
        TARGETS.iter().map(|_| modes.iter().map(|_| Found::default()).collect()).collect();
    for repeat in 0..repeats {
        for (target, found) in TARGETS.iter().zip(&mut found) {
            for ((name, io), found) in modes.iter().zip(found) {
                let job = Job { randseed: repeat as u64 + 1, ..job.clone() };
                let fixture = Fixture { setup, path: &path, cache: &cache, dirty_bytes, job };
                match fixture.once(target, name, *io, found) {
                    Err(error) if is_unsupported(&error) => {
                        let note = format!("{name} was not measured: {error:#}");
                        if !study.notes.contains(&note) {
                            study.notes.push(note);
                        }
                    }
                    done => done?,
                }
            }
        }
    }
    let names: Vec<&str> = modes.iter().map(|(name, _)| *name).collect();
    show(&mut study, &names, &found);
    Ok(study)
}

/// What each measure is made with.
struct Fixture<'a> {
    setup: &'a Setup,
    path: &'a PathBuf,
    cache: &'a PathBuf,
    dirty_bytes: u64,
    job: Job,
}

impl Fixture<'_> {
    /// A fresh cache over the file in this mode.
    fn device(&self, target: &str, disk: &Arc<FileDisk>) -> Result<Arc<Device>> {
        if target == TARGETS[0] {
            let cache = self.setup.pcache_of("modes-pcache", CACHE_BYTES, disk.clone(), "0")?;
            return Ok(cache.device);
        }
        let pmem = Arc::new(open_pmem(self.cache)?);
        // The measure before left a cache there that looks as if it were in use.
        pmem.zero(0, 4096);
        pmem.drain().and_then(|()| pmem.sync()).ok().context("the cache device failed")?;
        writecache("4096 0", disk.clone(), Ground::Memory(pmem))
    }

    fn once(&self, target: &str, name: &str, io: IoMode, found: &mut Found) -> Result<()> {
        let disk = Arc::new(open_disk_in(self.path, io)?);
        disk.forget_cached();
        let device = self.device(target, &disk)?;
        let is_over = AtomicBool::new(false);
        let (done, peak) = std::thread::scope(|scope| {
            let watcher = scope.spawn(|| watch(&disk, &is_over));
            let done = self.measure(&device, &format!("{target} over {name}"), found);
            is_over.store(true, Ordering::Relaxed);
            (done, watcher.join().expect("looking does not panic"))
        });
        done?;
        if let Some((cached, unclean)) = peak {
            found.cached.push(cached as f64);
            found.unclean.push(unclean as f64);
        }
        if let Some(there) = disk.cached() {
            found.left.push(there.cached_bytes as f64);
        }
        Ok(())
    }

    fn measure(&self, device: &Arc<Device>, name: &str, found: &mut Found) -> Result<()> {
        let round = self.job.randseed as usize;
        let size = device.size_bytes().min(self.job.size);
        make_dirty(device, round, size, self.dirty_bytes, 0)?;
        ensure!(device.dirty().bytes > 0, "the device has no dirty data");
        let mut background = Background::new(device, Ring::new(64)?)?;
        let case = flame::case(format!("{name}: write-back alone"));
        let begun = Instant::now();
        background.drain();
        let seconds = begun.elapsed().as_secs_f64();
        drop((case, background));
        found.drain.push(self.dirty_bytes as f64 / 1e6 / seconds.max(1e-9));

        make_dirty(device, round + 1000, size, self.dirty_bytes, 0)?;
        let background = Queue::background("udm-background", device)?;
        let _case = flame::case(format!("{name}: clients during write-back"));
        device.set_draining(true);
        let reached = load::run(device, &self.job)?;
        settle(device)?;
        drop(background);
        found.iops.push(reached.iops());
        found.reads.merge(&reached.reads);
        found.writes.merge(&reached.writes);
        Ok(())
    }
}

/// The most that was cached, and unwritten; `None` where the kernel does not say.
fn watch(disk: &FileDisk, is_over: &AtomicBool) -> Option<(u64, u64)> {
    let (mut cached, mut unclean) = (0, 0);
    loop {
        let is_last = is_over.load(Ordering::Relaxed);
        let there = disk.cached()?;
        cached = there.cached_bytes.max(cached);
        unclean = there.unclean_bytes.max(unclean);
        if is_last {
            return Some((cached, unclean));
        }
        std::thread::sleep(LOOKS_EVERY);
    }
}

fn show(study: &mut Study, modes: &[&str], found: &[Vec<Found>]) {
    let columns = [
        ("drain MB/s", Unit::MbPerSecond),
        ("clients' IOPS", Unit::PerSecond),
        ("write p50", Unit::Nanos),
        ("write p99.9", Unit::Nanos),
        ("read p50", Unit::Nanos),
        ("read p99.9", Unit::Nanos),
        ("page cache", Unit::Bytes),
        ("unwritten", Unit::Bytes),
        ("left", Unit::Bytes),
    ];
    let mut table = Table::new("A cache over a file, by the way to the file", &columns);
    let mut drain = Plot::bars("Write-back alone", modes, Axis::linear("MB/s", Unit::Number));
    let title = "p99.9 of clients' writes during write-back";
    let mut slow = Plot::bars(title, modes, Axis::log("time", Unit::Nanos));
    for (target, found) in TARGETS.iter().zip(found) {
        let mut points = (Vec::new(), Vec::new());
        for (nth, (mode, found)) in modes.iter().zip(found).enumerate() {
            if found.drain.is_empty() {
                continue;
            }
            let read = |percent| match found.reads.count() {
                0 => f64::NAN,
                _ => found.reads.percentile(percent),
            };
            let p999 = found.writes.percentile(99.9);
            let row = [
                median(&found.drain),
                median(&found.iops),
                found.writes.percentile(50.0),
                p999,
                read(50.0),
                read(99.9),
                median(&found.cached),
                median(&found.unclean),
                median(&found.left),
            ];
            table.row(format!("{target}, {mode}"), &row);
            points.0.push((nth as f64, row[0]));
            points.1.push((nth as f64, p999));
            let what = format!("{target} over {mode}: drain");
            study.repeats(what, Unit::MbPerSecond, &found.drain);
            study.repeats(format!("{target} over {mode}: IOPS"), Unit::PerSecond, &found.iops);
        }
        if !points.0.is_empty() {
            drain.add(*target, points.0);
            slow.add(*target, points.1);
        }
        // Compared with the default of a file: direct I/O, where it works.
        let Some(direct) = modes.iter().position(|mode| *mode == "direct") else { continue };
        for (mode, other) in modes.iter().zip(found).filter(|(mode, _)| **mode != "direct") {
            if other.drain.is_empty() || found[direct].drain.is_empty() {
                continue;
            }
            let what = |measure: &str| format!("{target}: {measure}, {mode} / direct");
            let drains = ratios(&other.drain, &found[direct].drain);
            study.claims.push(Claim::new(what("drain"), &drains, None));
            let iops = ratios(&other.iops, &found[direct].iops);
            study.claims.push(Claim::new(what("clients' IOPS"), &iops, None));
        }
    }
    study.tables.push(table);
    study.plots.extend([drain, slow]);
}
