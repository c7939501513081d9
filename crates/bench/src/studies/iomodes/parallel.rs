//! Parallel clients that write and read at the same time, each with its own file and I/O mode. It
//! also measures how many bytes of their files the page cache has meanwhile.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use udm::disk::{Budget, Cached, FileDisk, FileOptions, IoMode};
use udm::local::Local;

use crate::cpu;
use crate::job::{Job, Rw};
use crate::load::{self, Reached};
use crate::rig::linear_device;

/// How often the page cache is looked at, at most.
const LOOKS_EVERY: Duration = Duration::from_micros(500);
/// Of this many parts of a processor, one may be spent on that. A look walks over the pages that
/// are cached: without a bound, it took a third of a processor from a writer of scattered pages
/// that were few, and more from one that had many.
const LOOK_PARTS: f64 = 20.0;
/// Looks that make one point of a picture: the largest of them.
const LOOKS_A_POINT: usize = 40;

/// One client.
#[derive(Clone, Debug)]
pub struct Client {
    pub path: PathBuf,
    pub io: IoMode,
    /// Most bytes unwritten, for `lazy`.
    pub window: Option<u64>,
    pub job: Job,
}

/// After this many samples of zero, the value is zero.
const LOOKS_MIN: usize = 20;

/// The result of a client.
#[derive(Clone, Debug)]
pub struct Played {
    pub reached: Reached,
    pub is_writer: bool,
    /// Millions of bytes per second, until all was durable.
    pub rate: f64,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub clients: Vec<Played>,
    /// Bytes cached and not written out, over time in seconds.
    pub cached: Vec<(f64, f64)>,
    pub unclean: Vec<(f64, f64)>,
    /// NaN if unknown: the kernel does not report it, or too few samples were all zero.
    pub peak_cached: f64,
    /// The same.
    pub peak_unclean: f64,
    /// Cached at the end.
    pub left: f64,
    /// Processor time of the process, in nanoseconds.
    pub cpu_nanos: f64,
    /// Average bytes of a write request to the disk of the first file, which shows how much the
    /// page cache merged. NaN if the file system is not on a disk.
    pub disk_write_bytes: f64,
}

impl Outcome {
    /// Rates of the writers, or of the readers, together.
    pub fn rate(&self, is_writer: bool) -> f64 {
        let these = self.clients.iter().filter(|client| client.is_writer == is_writer);
        these.map(|client| client.rate).sum()
    }
}

/// Opens every client's file. An error of kind Unsupported: a mode that is not to be had here.
fn open(clients: &[Client]) -> Result<Vec<Arc<FileDisk>>> {
    let budget = Budget::default();
    let one = |client: &Client| {
        let options =
            FileOptions { io: client.io, window: client.window, ..FileOptions::default() };
        crate::rig::open_when_free(|| FileDisk::open_within(&client.path, &options, &[], &budget))
    };
    clients.iter().map(|client| Ok(Arc::new(one(client)?))).collect()
}

/// Runs the clients, with files that are not cached at its start.
pub fn play(clients: &[Client]) -> Result<Outcome> {
    let disks = open(clients)?;
    disks.iter().for_each(|disk| disk.forget_cached());
    let is_over = AtomicBool::new(false);
    let disk = clients.first().and_then(|client| Writes::of_disk(&client.path));
    let cpu_before = cpu::of_process();
    let (played, looks) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&disks, &is_over));
        let pairs = clients.iter().zip(&disks);
        let threads: Vec<_> =
            pairs.map(|(client, disk)| scope.spawn(move || one(client, disk))).collect();
        let played: Vec<Result<Played>> =
            threads.into_iter().map(|thread| thread.join().expect("no client panics")).collect();
        is_over.store(true, Ordering::Relaxed);
        (played, watcher.join().expect("looking does not panic"))
    });
    let peak = |part: fn(&Cached) -> u64| {
        let most = looks.iter().map(|(_, there)| part(there)).max().unwrap_or(0);
        if most > 0 || looks.len() >= LOOKS_MIN { most as f64 } else { f64::NAN }
    };
    let points = |part: fn(&Cached) -> u64| {
        let point = |some: &[(f64, Cached)]| {
            (some[0].0, some.iter().map(|(_, there)| part(there)).max().unwrap_or(0) as f64)
        };
        looks.chunks(LOOKS_A_POINT).map(point).collect()
    };
    Ok(Outcome {
        clients: played.into_iter().collect::<Result<_>>()?,
        cached: points(|there| there.cached_bytes),
        unclean: points(|there| there.unclean_bytes),
        peak_cached: peak(|there| there.cached_bytes),
        peak_unclean: peak(|there| there.unclean_bytes),
        left: sum(&disks).map_or(f64::NAN, |there| there.cached_bytes as f64),
        cpu_nanos: cpu::of_process() - cpu_before,
        disk_write_bytes: disk.map_or(f64::NAN, |before| before.each_since(&clients[0].path)),
    })
}

/// Writes that a disk was asked for until now (Linux, Documentation/block/stat.rst).
struct Writes {
    count: u64,
    bytes: u64,
}

impl Writes {
    /// Of the disk that a file's file system lies on.
    fn of_disk(file: &Path) -> Option<Writes> {
        let number = file.metadata().ok()?.dev();
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let stat = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok()?;
        let words: Vec<u64> = stat.split_whitespace().flat_map(str::parse).collect();
        Some(Writes { count: *words.get(4)?, bytes: words.get(6)? * udm::units::SECTOR })
    }

    /// Bytes of one since then.
    fn each_since(self, file: &Path) -> f64 {
        let Some(now) = Writes::of_disk(file) else { return f64::NAN };
        (now.bytes - self.bytes) as f64 / (now.count - self.count) as f64
    }
}

fn one(client: &Client, disk: &Arc<FileDisk>) -> Result<Played> {
    let device = linear_device(disk.clone())?;
    let begun = Instant::now();
    let reached = load::run(&device, &client.job)?;
    let is_writer = matches!(client.job.rw, Rw::Write | Rw::Randwrite);
    let mut seconds = reached.seconds;
    if is_writer {
        let flush = Local::new(&device)?.flush();
        flush.map_err(|status| anyhow!("the flush failed: {status:?}"))?;
        seconds = begun.elapsed().as_secs_f64();
    }
    let bytes = reached.count() as f64 * client.job.bs as f64;
    Ok(Played { reached, is_writer, rate: bytes / 1e6 / seconds.max(1e-9) })
}

/// The cached bytes of all files; `None` if the kernel does not report them.
fn sum(disks: &[Arc<FileDisk>]) -> Option<Cached> {
    disks.iter().try_fold(Cached::default(), |sum, disk| {
        let one = disk.cached()?;
        Some(Cached {
            cached_bytes: sum.cached_bytes + one.cached_bytes,
            unclean_bytes: sum.unclean_bytes + one.unclean_bytes,
            dirty_bytes: sum.dirty_bytes + one.dirty_bytes,
        })
    })
}

fn watch(disks: &[Arc<FileDisk>], is_over: &AtomicBool) -> Vec<(f64, Cached)> {
    let begun = Instant::now();
    let mut looks = Vec::new();
    loop {
        let before = cpu::of_thread();
        let Some(there) = sum(disks) else { break };
        looks.push((begun.elapsed().as_secs_f64(), there));
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        // Not the time that it took: others may have had the processor meanwhile.
        let spent = Duration::from_nanos((cpu::of_thread() - before) as u64);
        std::thread::sleep(LOOKS_EVERY.max(spent.mul_f64(LOOK_PARTS)));
    }
    looks
}
