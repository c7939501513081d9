//! What the studies measure: caches in memory, the disks behind them, and who keeps them going.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use udm::device::{Device, LoadedTable, PortSeat};
use udm::disk::{Disk, Ring};
use udm::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use udm::pmem::dax::{DaxOptions, DaxPmem};
use udm::shm::SharedWords;
use udm::target::{Port, Wake};

/// Bytes of every cache: the smallest that the kernel's format allows.
pub const CACHE_BYTES: u64 = 512 << 20;

/// A folder that vanishes with its content.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// A new folder below `parent`.
    pub fn new(parent: &Path) -> Result<Folder> {
        let path = parent.join(format!("udm-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Folder(path))
    }

    /// Where a file of this name is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A file of `bytes` bytes, all holes.
    pub fn file(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        let path = self.path(name);
        let file =
            File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        file.set_len(bytes).with_context(|| format!("cannot size {}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Folders of one run.
#[derive(Debug)]
pub struct Places {
    /// In memory.
    pub memory: Folder,
    /// On a disk.
    pub disk: Folder,
}

impl Places {
    /// `scratch` is a folder on a disk.
    pub fn new(scratch: &Path) -> Result<Places> {
        let memory = Folder::new(Path::new("/dev/shm"))?;
        Ok(Places { memory, disk: Folder::new(scratch)? })
    }
}

/// Fails, saying what to install, unless every program is there.
pub fn need_tools(tools: &[(&str, &str)]) -> Result<()> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |tool: &str| std::env::split_paths(&paths).any(|dir| dir.join(tool).is_file());
    let missing: Vec<_> = tools.iter().filter(|(tool, _)| !is_there(tool)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let tools: Vec<_> = missing.iter().map(|(tool, _)| *tool).collect();
    let packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
    bail!(
        "missing: {}. Install it, for instance with: sudo apt-get install {} (or run \
         scripts/install-tools.sh)",
        tools.join(", "),
        packages.join(" ")
    )
}

/// An open cache and the device that serves it.
#[derive(Debug)]
pub struct Cache {
    /// The engine itself.
    pub pcache: Arc<Pcache>,
    /// The mapped device.
    pub device: Arc<Device>,
}

impl Cache {
    /// A fresh cache named `name` in memory, in front of `backing`.
    pub fn new(places: &Places, name: &str, backing: Arc<dyn Disk>, words: &str) -> Result<Cache> {
        let file = places.memory.file(name, CACHE_BYTES)?;
        let pmem = DaxPmem::open(&file, DaxOptions::default())?;
        let text = format!("{} {} {words}", file.display(), backing.limits().name);
        let words: Vec<&str> = text.split_whitespace().collect();
        let args = TableArgs::parse(&words).map_err(|error| error.error)?;
        let options = OpenOptions::new(1);
        let shared_file = places.memory.path(&format!("{name}.open-keys"));
        let shared = SharedWords::open(&shared_file, shared_words(options.stripes))?;
        let bytes = backing.limits().size_bytes;
        let pcache = Pcache::open(args, bytes, Arc::new(pmem), backing, shared, &options)?;
        let pcache = Arc::new(pcache);
        let device = Device::with_table(name, LoadedTable::single(pcache.clone(), bytes))?;
        Ok(Cache { pcache, device })
    }
}

/// Memory like a cache's, without a cache.
pub fn bare_memory(places: &Places, name: &str) -> Result<DaxPmem> {
    let file = places.memory.file(name, CACHE_BYTES)?;
    Ok(DaxPmem::open(&file, DaxOptions::default())?)
}

/// Does a device's background work on the thread that calls it.
#[derive(Debug)]
pub struct Keeper {
    port: Port,
    ring: Ring,
    started: Instant,
    /// Ahead of real time, so that nobody waits for pauses.
    skipped: Duration,
    alarm: Arc<Alarm>,
    // Dropped last: a port is given up when nothing of it is left.
    seat: PortSeat,
}

impl Keeper {
    /// A keeper of `device`, with an io_uring if its disks need one.
    pub fn new(device: &Arc<Device>, ring: Ring) -> Result<Keeper> {
        let alarm = Arc::new(Alarm::new());
        let seat = device.attach_port(alarm.clone())?;
        device.events().set_background(Some(alarm.clone()));
        let port = seat.port();
        let (started, skipped) = (Instant::now(), Duration::ZERO);
        Ok(Keeper { port, ring, started, skipped, alarm, seat })
    }

    /// Ticks once and moves I/O; says how long nothing will be due.
    pub fn turn(&mut self) -> Duration {
        let now = (self.started.elapsed() + self.skipped).as_nanos() as u64;
        let device = self.seat.device();
        let next = device.tick(now, &mut self.port);
        loop {
            while let Some(io) = self.port.ios.pop_front() {
                io.disk.clone().start(io, &mut self.ring);
            }
            self.ring.submit();
            let Some(io) = self.ring.pop_completed() else { break };
            device.complete(io, &mut self.port);
        }
        if self.ring.in_flight() > 0 {
            self.ring.submit_and_wait(Some(Duration::from_millis(10)));
            return Duration::ZERO;
        }
        next.map_or(Duration::from_millis(100), |next| {
            Duration::from_nanos(next.saturating_sub(now)).min(Duration::from_millis(100))
        })
    }

    /// Writes everything back, and lets collection make room.
    pub fn drain(&mut self) {
        let device = self.seat.device().clone();
        device.set_draining(true);
        while device.dirty().bytes > 0 || self.ring.in_flight() > 0 {
            if self.turn() > Duration::ZERO {
                self.skipped += Duration::from_millis(200);
            }
        }
        self.turn();
        device.set_draining(false);
    }

    /// Goes on until `is_over`.
    fn run(&mut self, is_over: &AtomicBool) {
        while !is_over.load(Ordering::Relaxed) {
            let pause = self.turn();
            if !self.alarm.has_rung.swap(false, Ordering::SeqCst) {
                std::thread::park_timeout(pause);
            }
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.seat.device().events().set_background(None);
        while self.ring.in_flight() > 0 {
            self.turn();
        }
    }
}

/// Wakes the thread that made it.
#[derive(Debug)]
struct Alarm {
    thread: Thread,
    has_rung: AtomicBool,
}

impl Alarm {
    fn new() -> Alarm {
        Alarm { thread: std::thread::current(), has_rung: AtomicBool::new(false) }
    }
}

impl Wake for Alarm {
    fn wake(&self) {
        if !self.has_rung.swap(true, Ordering::SeqCst) {
            self.thread.unpark();
        }
    }
}

/// A thread that does a device's background work until this is dropped.
#[derive(Debug)]
pub struct BackgroundThread {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundThread {
    /// Starts it.
    pub fn new(device: &Arc<Device>) -> BackgroundThread {
        let is_over = Arc::new(AtomicBool::new(false));
        let (device, over) = (device.clone(), is_over.clone());
        let thread = std::thread::spawn(move || {
            let keeper = Keeper::new(&device, Ring::without_kernel());
            keeper.expect("the device has room for a port").run(&over);
        });
        BackgroundThread { is_over, thread: Some(thread) }
    }
}

impl Drop for BackgroundThread {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
