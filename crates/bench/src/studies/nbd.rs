//! NBD over a Unix socket, 4 KiB at a time: udm and nbdkit's memory plugin, with the same fio jobs.
//!
//! udm serves four devices, all from this process, with the server of `udm create`: a pcache in
//! memory in front of a real file, which is the usual setup; the same in front of a disk in memory,
//! which separates the export's cost from the cost of write-back to a file; such a disk alone; and
//! the target `zero`, which shows the highest rate that fio and the socket can reach. Both caches
//! are filled three times before a measurement starts, and have the default settings.
//!
//! Processor time is the server's, for each request, until all of it is written back: of the
//! export's threads, and separately of the background. For nbdkit it is the time of its process.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use udm::device::Device;
use udm::disk::Disk;

use crate::cpu;
use crate::fio::{self, JobResult};
use crate::job::{Job, Rw};
use crate::load;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Export, FILLS, Setup, linear_device, need_tools, ram_disk, settle, zero_device};
use crate::stats::{median, ratios};
use crate::unit::Unit;

/// Bytes of every export that is in memory.
const EXPORT_BYTES: u64 = 1 << 30;
/// How long a job lasts: short, so that contenders meet the same neighbours.
const MILLISECONDS: u64 = 600;

/// Depth and direction of each job.
const JOBS: [(u32, &str); 4] = [(1, "write"), (1, "read"), (32, "write"), (32, "read")];

const CONTENDERS: [&str; 5] =
    ["nbdkit memory", "udm pcache", "udm pcache, origin in memory", "udm linear", "udm zero"];
/// Among them: the reference of all comparisons, the usual setup, and the target `zero`.
const NBDKIT: usize = 0;
const PCACHE: usize = 1;
const ZERO: usize = 4;

const PERCENTS: [f64; 3] = [50.0, 99.9, 99.99];

/// nbdkit, ended when dropped.
struct Nbdkit(Child);

impl Nbdkit {
    /// Its processor time, in nanoseconds.
    fn cpu(&self) -> f64 {
        cpu::of_child(self.0.id())
    }

    fn new(socket: &Path) -> Result<Nbdkit> {
        let child = Command::new("nbdkit")
            .args(["-f", "-U"])
            .arg(socket)
            .arg("memory")
            .arg(EXPORT_BYTES.to_string())
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start nbdkit")?;
        let nbdkit = Nbdkit(child);
        let start = Instant::now();
        while !socket.exists() {
            if start.elapsed() > Duration::from_secs(10) {
                bail!("nbdkit does not listen at {}", socket.display());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(nbdkit)
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server that fio talks to.
struct Contender {
    socket: PathBuf,
    /// The name of its background's thread.
    background: String,
    device: Option<Arc<Device>>,
}

/// One job: what fio saw, and the server's processor time for each request.
struct Measure {
    result: JobResult,
    export: f64,
    background: f64,
}

/// Its columns in a table.
type Number = fn(&Measure) -> f64;

/// By contender, by round.
type Measures = Vec<Vec<Measure>>;

/// Writes at depth 32 that fill the cache three times.
#[derive(Default)]
struct Long {
    rates: Vec<Vec<(f64, f64)>>,
    iops: Vec<f64>,
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    need_tools(&[("fio", "fio"), ("nbdkit", "nbdkit")])?;
    let rounds = setup.repeats(3, 9);
    let names = ["nbdkit", "pcache", "pcache-ram", "linear", "zero"];
    let socket = |name: &str| setup.places.memory.path(name);
    let nbdkit = Nbdkit::new(&socket(names[NBDKIT]))?;
    let file: Arc<dyn Disk> = setup.backing_disk()?;
    let cache = setup.pcache("nbd-cache", file, "0")?;
    let in_memory = setup.pcache_of("nbd-ram", setup.cache_bytes(), ram_disk(EXPORT_BYTES), "0")?;
    let devices = [
        None,
        Some(cache.device.clone()),
        Some(in_memory.device.clone()),
        Some(linear_device(ram_disk(EXPORT_BYTES))?),
        Some(zero_device(EXPORT_BYTES)?),
    ];
    let mut contenders = Vec::new();
    let mut exports = Vec::new();
    for (name, device) in names.into_iter().zip(devices) {
        let (socket, background) = (socket(name), format!("bg-{name}"));
        if let Some(device) = &device {
            exports.push(Export::with_background(device, &socket, &background)?);
        }
        contenders.push(Contender { socket, background, device });
    }
    for device in [&cache.device, &in_memory.device] {
        load::fill_often(device, FILLS * setup.cache_bytes())?;
    }
    for contender in &contenders {
        // All of the span gets its memory.
        let span = span(setup)?;
        let job = Job { rw: Rw::Write, bs: 1 << 20, iodepth: 4, io_size: span, ..job(setup)? };
        let job = Job { runtime: Duration::from_secs(60), ..job };
        fio::nbd(&contender.socket, &job, &[50.0])?;
    }
    let mut measures: Vec<Measures> = JOBS.iter().map(|_| Vec::new()).collect();
    for of_job in &mut measures {
        of_job.extend(CONTENDERS.iter().map(|_| Vec::new()));
    }
    for _ in 0..rounds {
        for (nth, (depth, direction)) in JOBS.into_iter().enumerate() {
            for (who, contender) in contenders.iter().enumerate() {
                let measure = measure(setup, &nbdkit, contender, depth, direction)?;
                measures[nth][who].push(measure);
            }
        }
    }
    let mut longs = [Long::default(), Long::default()];
    for _ in 0..setup.repeats(2, 5).min(rounds) {
        for (long, who) in longs.iter_mut().zip([NBDKIT, PCACHE]) {
            long.add(setup, &contenders[who])?;
        }
    }
    drop((nbdkit, exports));
    let mut study = study(&measures, &longs, rounds);
    setup.describe(&mut study, cache.pmem.as_ref())?;
    Ok(study)
}

/// Bytes of each export that the jobs use; the cache holds all of them.
fn span(setup: &Setup) -> Result<u64> {
    Ok((setup.cache_bytes() / 8 * 3).min(setup.backing_bytes()?))
}

fn job(setup: &Setup) -> Result<Job> {
    let runtime = setup.asked().runtime.unwrap_or(Duration::from_millis(MILLISECONDS));
    Ok(Job { size: span(setup)?, io_size: 1 << 40, runtime, ..Job::default() })
}

fn measure(
    setup: &Setup,
    nbdkit: &Nbdkit,
    contender: &Contender,
    iodepth: u32,
    direction: &str,
) -> Result<Measure> {
    let rw = if direction == "read" { Rw::Randread } else { Rw::Randwrite };
    let job = Job { rw, iodepth, ..job(setup)? };
    let now = || match contender.device {
        None => (nbdkit.cpu(), 0.0),
        Some(_) => (cpu::of_process(), cpu::of_threads(&contender.background)),
    };
    let (all, background) = now();
    let result = fio::nbd(&contender.socket, &job, &PERCENTS)?;
    if let Some(device) = &contender.device {
        settle(device)?;
    }
    let (all_then, background_then) = now();
    let background = background_then - background;
    let each = |nanos: f64| nanos.max(0.0) / (result.iops * result.seconds).max(1.0);
    let (export, background) = (each(all_then - all - background), each(background));
    Ok(Measure { result, export, background })
}

impl Long {
    fn add(&mut self, setup: &Setup, contender: &Contender) -> Result<()> {
        let own = setup.choose(Duration::from_secs(4), Duration::from_secs(10));
        let runtime = setup.asked().runtime.unwrap_or(own);
        let job = Job { rw: Rw::Randwrite, iodepth: 32, runtime, ..job(setup)? };
        let scratch = setup.places.memory.path("nbd-rates");
        let (result, rates) = fio::nbd_over_time(&contender.socket, &job, &PERCENTS, &scratch)?;
        if let Some(device) = &contender.device {
            settle(device)?;
        }
        // A job that was over before the first slice has its mean.
        let mean = vec![(result.seconds, result.iops)];
        self.rates.push(if rates.is_empty() { mean } else { rates });
        self.iops.push(result.iops);
        Ok(())
    }
}

const JOB_NAMES: [&str; 4] = ["write 1", "read 1", "write 32", "read 32"];

fn of(measures: &[Measure], number: impl Fn(&Measure) -> f64) -> Vec<f64> {
    measures.iter().map(number).collect()
}

fn study(measures: &[Measures], longs: &[Long; 2], rounds: usize) -> Study {
    let mut study = Study::new(
        "nbd",
        "4 KiB over a Unix socket, compared with nbdkit's memory plugin",
        "fio with random 4 KiB requests at depths 1 and 32, udm and nbdkit's memory plugin in \
         turns; udm serves a pcache in front of a real file, full and with its default settings, \
         the same in front of a disk in memory, which shows what the export takes without a disk's \
         part, such a disk without a cache, and its target zero, which does nothing: the most \
         that fio and the socket allow. CPU is the server's for each request, in all until \
         everything is written back.",
    );
    let tables: [(String, Unit, Number); 7] = [
        (format!("requests per second ({rounds} rounds)"), Unit::PerSecond, |one| one.result.iops),
        ("latency, p50".into(), Unit::Nanos, |one| one.result.percentiles[0]),
        ("latency, p99.9".into(), Unit::Nanos, |one| one.result.percentiles[1]),
        ("latency, p99.99".into(), Unit::Nanos, |one| one.result.percentiles[2]),
        ("the longest request".into(), Unit::Nanos, |one| one.result.worst_nanos),
        ("CPU of the server for a request, in all".into(), Unit::Nanos, |one| {
            one.export + one.background
        }),
        ("of it the background".into(), Unit::Nanos, |one| one.background),
    ];
    for (title, unit, number) in tables {
        let mut table = Table::new(title, &JOB_NAMES.map(|name| (name, unit)));
        for (who, name) in CONTENDERS.iter().enumerate() {
            let values: Vec<f64> =
                measures.iter().map(|job| median(&of(&job[who], number))).collect();
            table.row(*name, &values);
        }
        study.tables.push(table);
    }
    let iops = |one: &Measure| one.result.iops;
    let axis = Axis::linear("requests per second", Unit::PerSecond);
    let mut bars = Plot::bars("4 KiB over NBD, by depth", &JOB_NAMES, axis);
    for (who, name) in CONTENDERS.iter().enumerate() {
        let points = measures.iter().enumerate();
        let points = points.map(|(nth, job)| (nth as f64, median(&of(&job[who], iops))));
        bars.add(*name, points.collect());
        for (nth, job) in JOB_NAMES.iter().enumerate() {
            let values = of(&measures[nth][who], iops);
            study.repeats(format!("{name}, {job}"), Unit::PerSecond, &values);
        }
    }
    study.plots.push(bars);
    over_time(&mut study, longs);
    claims(&mut study, measures, longs);
    study
}

fn over_time(study: &mut Study, longs: &[Long; 2]) {
    let mut plot = Plot::lines(
        "Writes per second at depth 32, over time",
        Axis::linear("seconds", Unit::Number),
        Axis::log("requests per second", Unit::PerSecond),
    );
    for (long, who) in longs.iter().zip([NBDKIT, PCACHE]) {
        for (nth, rates) in long.rates.iter().enumerate() {
            plot.add(format!("{}, repeat {}", CONTENDERS[who], nth + 1), rates.clone());
        }
    }
    study.plots.push(plot);
}

/// The target of a pcache over a real file is nbdkit's rate at any depth. The exports alone have no
/// such target at depth 32: there fio is busier than the servers, and a server that takes half the
/// time has the same rate. Their targets are about the server's own part: its processor time, and
/// its rate compared with the target `zero`.
fn claims(study: &mut Study, measures: &[Measures], longs: &[Long; 2]) {
    let long = ratios(&longs[1].iops, &longs[0].iops);
    let what = "udm pcache / nbdkit, randwrite, depth 32, without pause";
    study.claims.push(Claim::new(what, &long, Some(Promise::AtLeast(1.0))));
    for (who, name) in CONTENDERS.iter().enumerate().skip(1) {
        for (nth, (depth, direction)) in JOBS.into_iter().enumerate() {
            let number = |who: usize, number: Number| of(&measures[nth][who], number);
            let mut claim = |what: String, rounds: &[f64], promise: Option<Promise>| {
                study.claims.push(Claim::new(what, rounds, promise));
            };
            let iops = |who| number(who, |one| one.result.iops);
            let promise =
                (who == PCACHE || who != ZERO && depth == 1).then_some(Promise::AtLeast(1.0));
            let what = format!("{name} / nbdkit, rand{direction}, depth {depth}");
            claim(what, &ratios(&iops(who), &iops(NBDKIT)), promise);
            // Neighbours that take the processor away spoil rates far more than medians.
            let p50 = |who| number(who, |one| one.result.percentiles[0]);
            let what = "  p50 latency of nbdkit / its own".into();
            claim(what, &ratios(&p50(NBDKIT), &p50(who)), None);
            // A cache in front of a real file pays for writing back, nbdkit's memory does not.
            let is_door_alone = who != ZERO && who != PCACHE && depth > 1;
            let time = |who| number(who, |one| one.export + one.background);
            let promise = is_door_alone.then_some(Promise::AtMost(0.6));
            let what = "  CPU of the server for a request / nbdkit's".into();
            // The kernel counts other processes' time in ticks; a short job may have none.
            if time(NBDKIT).iter().all(|nanos| *nanos > 0.0) {
                claim(what, &ratios(&time(who), &time(NBDKIT)), promise);
            }
            if who != ZERO {
                let promise = is_door_alone.then_some(Promise::AtLeast(0.95));
                let what = "  requests per second / target zero's".into();
                claim(what, &ratios(&iops(who), &iops(ZERO)), promise);
            }
            if who == PCACHE {
                let micros: Vec<f64> = time(who).iter().map(|nanos| nanos / 1000.0).collect();
                claim("  CPU of the server for a request, microseconds".into(), &micros, None);
            }
        }
    }
}
