//! NBD over a Unix socket, 4 KiB at a time: udm beside nbdkit's memory plugin, with the same fio
//! jobs.
//!
//! udm serves two devices, both from this process, with the very server that `udm create` runs:
//! a pcache in memory with a disk in memory behind it, and such a disk alone.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use udm::device::{Device, LoadedTable};
use udm::disk::{Disk, RamDisk};
use udm::queue::Queue;
use udm::simple::{Linear, LinearArgs};
use udm::table::Table as DmTable;
use udm_export::nbd::{Server, Uri};

use crate::fio::{self, JobResult};
use crate::report::{Claim, Promise, Row, Study, Table, median, ratios};
use crate::rig::{Cache, Places, need_tools};

/// Bytes of every export.
const EXPORT_BYTES: u64 = 1 << 30;
/// Bytes of it that the jobs use; the cache holds all of them.
const SPAN: u64 = 192 << 20;
/// How long a job lasts: short, so that contenders meet the same neighbours.
const MILLISECONDS: u64 = 600;

/// Depth and direction of each job.
const JOBS: [(u32, &str); 4] = [(1, "write"), (1, "read"), (32, "write"), (32, "read")];

const CONTENDERS: [&str; 3] = ["nbdkit memory", "udm pcache", "udm linear"];

/// One device of ours, served.
struct Export {
    _server: Server,
    _background: Queue,
    device: Arc<Device>,
}

impl Export {
    fn new(device: Arc<Device>, socket: &Path) -> Result<Export> {
        let uri = Uri::Unix(socket.to_path_buf());
        let background = Queue::background("udm-background", &device)?;
        let server = Server::start(&device, &uri)?;
        Ok(Export { _server: server, _background: background, device })
    }

    /// Waits until nothing is dirty, so that no job pays for the one before.
    fn settle(&self) {
        self.device.set_draining(true);
        let start = Instant::now();
        while self.device.dirty().bytes > 0 && start.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.device.set_draining(false);
    }
}

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

/// A disk in memory behind the target `linear`.
fn linear_device() -> Result<Arc<Device>> {
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(EXPORT_BYTES, 512));
    let table = DmTable::parse(&format!("0 {} linear ram 0", EXPORT_BYTES / 512))?;
    let args = LinearArgs::parse(&table.lines[0].args)?;
    let target = Arc::new(Linear::new(&args, EXPORT_BYTES, disk)?);
    Ok(Device::with_table("linear", LoadedTable::single(target, EXPORT_BYTES))?)
}

/// The whole study.
pub fn run(places: &Places, rounds: usize) -> Result<Study> {
    need_tools(&[("fio", "fio"), ("nbdkit", "nbdkit")])?;
    let sockets: Vec<PathBuf> =
        ["nbdkit", "pcache", "linear"].map(|name| places.memory.path(name)).to_vec();
    let nbdkit = Nbdkit::new(&sockets[0])?;
    let backing = Arc::new(RamDisk::new(EXPORT_BYTES, 512));
    let cache = Cache::new(places, "nbd-cache", backing, "0")?;
    let pcache = Export::new(cache.device.clone(), &sockets[1])?;
    let _linear = Export::new(linear_device()?, &sockets[2])?;
    for socket in &sockets {
        fill(socket)?;
    }
    let mut iops = vec![vec![Vec::new(); CONTENDERS.len()]; JOBS.len()];
    let mut latencies = vec![vec![Vec::new(); CONTENDERS.len()]; JOBS.len()];
    for _ in 0..rounds {
        for (nth, (depth, direction)) in JOBS.into_iter().enumerate() {
            for (contender, socket) in sockets.iter().enumerate() {
                pcache.settle();
                let result = job(socket, depth, direction)?;
                iops[nth][contender].push(result.iops);
                latencies[nth][contender].push(result.p50_micros);
            }
        }
    }
    drop(nbdkit);
    Ok(study(&iops, &latencies, rounds))
}

fn client(socket: &Path) -> Vec<String> {
    vec![
        "--ioengine=nbd".into(),
        format!("--uri=nbd+unix:///?socket={}", socket.display()),
        format!("--size={SPAN}"),
    ]
}

/// Writes the span once, so that all of it has its memory.
fn fill(socket: &Path) -> Result<()> {
    let mut arguments = client(socket);
    arguments.extend(["--rw=write", "--bs=1m", "--iodepth=4"].map(String::from));
    fio::run("write", &arguments).map(drop)
}

fn job(socket: &Path, depth: u32, direction: &str) -> Result<JobResult> {
    let mut arguments = client(socket);
    arguments.extend([
        format!("--rw=rand{direction}"),
        "--bs=4k".into(),
        "--norandommap=1".into(),
        format!("--iodepth={depth}"),
        "--time_based=1".into(),
        format!("--runtime={MILLISECONDS}ms"),
    ]);
    fio::run(direction, &arguments)
}

fn study(iops: &[Vec<Vec<f64>>], latencies: &[Vec<Vec<f64>>], rounds: usize) -> Study {
    let columns = vec!["write 1", "read 1", "write 32", "read 32"];
    let table = |title: &str, numbers: &[Vec<Vec<f64>>], scale: f64| {
        let row = |(contender, name): (usize, &&str)| Row {
            name: (*name).into(),
            values: numbers.iter().map(|job| median(&job[contender]) / scale).collect(),
        };
        let rows = CONTENDERS.iter().enumerate().map(row).collect();
        Table { title: title.into(), columns: columns.clone(), rows }
    };
    let mut claims = Vec::new();
    for (contender, name) in CONTENDERS.iter().enumerate().skip(1) {
        for (nth, (depth, direction)) in JOBS.into_iter().enumerate() {
            let bound = if depth == 1 { 1.0 } else { 1.2 };
            let what = format!("{name} / nbdkit, rand{direction}, depth {depth}");
            let rounds = ratios(&iops[nth][contender], &iops[nth][0]);
            claims.push(Claim::new(what, &rounds, Some(Promise::AtLeast(bound))));
            // Neighbours that take the processor away spoil rates far more than medians.
            let what = "  p50 latency of nbdkit / its own";
            let rounds = ratios(&latencies[nth][0], &latencies[nth][contender]);
            claims.push(Claim::new(what, &rounds, None));
        }
    }
    let tables = vec![
        table(&format!("thousand requests per second ({rounds} rounds)"), iops, 1000.0),
        table("latency, p50, microseconds", latencies, 1.0),
    ];
    let about = "NBD over a Unix socket, fio with random 4 KiB requests at depths 1 and 32, udm \
                 and nbdkit's\nmemory plugin in turns."
        .to_string();
    Study { name: "nbd", about, tables, claims }
}
