//! NBD over a Unix socket, 4 KiB at a time: udm beside nbdkit's memory plugin, with the same fio
//! jobs.
//!
//! udm serves three devices, all from this process, with the very server that `udm create` runs:
//! a pcache in memory with a disk in memory behind it, such a disk alone, and the target `zero`,
//! which does nothing: nobody's rate can be above what fio and the socket reach with that.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::fio::{self, JobResult};
use crate::job::{Job, Rw};
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Export, Setup, linear_device, need_tools, ram_disk, settle, zero_device};
use crate::stats::{median, ratios};
use crate::unit::Unit;

/// Bytes of every export.
const EXPORT_BYTES: u64 = 1 << 30;
/// Bytes of it that the jobs use; the cache holds all of them.
const SPAN: u64 = 192 << 20;
/// How long a job lasts: short, so that contenders meet the same neighbours.
const MILLISECONDS: u64 = 600;

/// Depth and direction of each job.
const JOBS: [(u32, &str); 4] = [(1, "write"), (1, "read"), (32, "write"), (32, "read")];

const CONTENDERS: [&str; 4] = ["nbdkit memory", "udm pcache", "udm linear", "udm zero"];

/// nbdkit, ended when dropped.
struct Nbdkit(Child);

impl Nbdkit {
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

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    need_tools(&[("fio", "fio"), ("nbdkit", "nbdkit")])?;
    let rounds = setup.repeats(5, 9);
    let sockets: Vec<PathBuf> =
        ["nbdkit", "pcache", "linear", "zero"].map(|name| setup.places.memory.path(name)).to_vec();
    let nbdkit = Nbdkit::new(&sockets[0])?;
    let cache = setup.cache("nbd-cache", ram_disk(EXPORT_BYTES), "0")?;
    let linear = linear_device(ram_disk(EXPORT_BYTES))?;
    let zero = zero_device(EXPORT_BYTES)?;
    let devices = [&cache.device, &linear, &zero].into_iter().zip(&sockets[1..]);
    let exports: Vec<Export> =
        devices.map(|(device, socket)| Export::new(device, socket)).collect::<Result<_>>()?;
    for socket in &sockets {
        // All of the span gets its memory.
        let job = Job { rw: Rw::Write, bs: 1 << 20, iodepth: 4, io_size: SPAN, ..job(setup) };
        fio::nbd(socket, &Job { runtime: Duration::from_secs(60), ..job }, &[50.0])?;
    }
    let mut iops = vec![vec![Vec::new(); CONTENDERS.len()]; JOBS.len()];
    let mut latencies = vec![vec![Vec::new(); CONTENDERS.len()]; JOBS.len()];
    for _ in 0..rounds {
        for (nth, (depth, direction)) in JOBS.into_iter().enumerate() {
            for (contender, socket) in sockets.iter().enumerate() {
                settle(&cache.device)?;
                let result = measure(setup, socket, depth, direction)?;
                iops[nth][contender].push(result.iops);
                latencies[nth][contender].push(result.percentiles[0]);
            }
        }
    }
    drop((nbdkit, exports));
    Ok(study(&iops, &latencies, rounds))
}

fn job(setup: &Setup) -> Job {
    let runtime = setup.asked().runtime.unwrap_or(Duration::from_millis(MILLISECONDS));
    Job { size: SPAN, io_size: 1 << 40, runtime, ..Job::default() }
}

fn measure(setup: &Setup, socket: &Path, iodepth: u32, direction: &str) -> Result<JobResult> {
    let rw = if direction == "read" { Rw::Randread } else { Rw::Randwrite };
    fio::nbd(socket, &Job { rw, iodepth, ..job(setup) }, &[50.0])
}

fn study(iops: &[Vec<Vec<f64>>], latencies: &[Vec<Vec<f64>>], rounds: usize) -> Study {
    let mut study = Study::new(
        "nbd",
        "4 KiB over a Unix socket, beside nbdkit's memory plugin",
        "fio with random 4 KiB requests at depths 1 and 32, udm and nbdkit's memory plugin in \
         turns; udm serves a pcache in memory, a disk in memory without a cache, and its target \
         zero, which does nothing: the most that fio and the socket allow.",
    );
    let names = ["write 1", "read 1", "write 32", "read 32"];
    let table = |title: String, numbers: &[Vec<Vec<f64>>], unit: Unit| {
        let mut table = Table::new(title, &names.map(|name| (name, unit)));
        for (contender, name) in CONTENDERS.iter().enumerate() {
            let values: Vec<f64> = numbers.iter().map(|job| median(&job[contender])).collect();
            table.row(*name, &values);
        }
        table
    };
    let axis = Axis::linear("requests per second", Unit::PerSecond);
    let mut bars = Plot::bars("4 KiB over NBD, by depth", &names, axis);
    for (contender, name) in CONTENDERS.iter().enumerate() {
        let points = iops.iter().enumerate();
        bars.add(*name, points.map(|(nth, job)| (nth as f64, median(&job[contender]))).collect());
    }
    for (contender, name) in CONTENDERS.iter().enumerate() {
        for (nth, job) in names.iter().enumerate() {
            study.repeats(format!("{name}, {job}"), Unit::PerSecond, &iops[nth][contender]);
        }
    }
    for (contender, name) in CONTENDERS.iter().enumerate().skip(1) {
        for (nth, (depth, direction)) in JOBS.into_iter().enumerate() {
            let bound = if depth == 1 { 1.0 } else { 1.5 };
            let what = format!("{name} / nbdkit, rand{direction}, depth {depth}");
            let rounds = ratios(&iops[nth][contender], &iops[nth][0]);
            let is_ceiling = *name == CONTENDERS[3];
            let promise = (!is_ceiling).then_some(Promise::AtLeast(bound));
            study.claims.push(Claim::new(what, &rounds, promise));
            // Neighbours that take the processor away spoil rates far more than medians.
            let what = "  p50 latency of nbdkit / its own";
            let rounds = ratios(&latencies[nth][0], &latencies[nth][contender]);
            study.claims.push(Claim::new(what, &rounds, None));
        }
    }
    study.tables = vec![
        table(format!("requests per second ({rounds} rounds)"), iops, Unit::PerSecond),
        table("latency, p50".into(), latencies, Unit::Nanos),
    ];
    study.plots.push(bars);
    study
}
