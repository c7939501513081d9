//! What the studies measure: caches, the disks behind them, and who keeps them going.

use std::cell::OnceCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use udm::device::{Device, LoadedTable, PortSeat};
use udm::disk::{Disk, FileDisk, FileOptions, RamDisk, Ring};
use udm::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use udm::pmem::Pmem;
use udm::pmem::dax::{DaxOptions, DaxPmem};
use udm::prng::Prng;
use udm::queue::Queue;
use udm::shm::SharedWords;
use udm::simple::{Linear, LinearArgs, Zero};
use udm::table::Table as DmTable;
use udm::target::{Port, Wake};
use udm::units::{GIB, MIB};
use udm_export::nbd::{Server, Uri};

use crate::args::{BenchArgs, JobArgs, TargetName};
use crate::calibrate;
use crate::job::Job;
use crate::target::open_disk;

/// Bytes of every cache that is made: the smallest that the kernel's format allows.
pub const CACHE_BYTES: u64 = 512 << 20;

/// What one run measures with.
#[derive(Debug)]
pub struct Setup {
    /// Where files are made.
    pub places: Places,
    /// Less of everything.
    pub is_small: bool,
    /// The target, for studies that measure any.
    pub target: TargetName,
    job: JobArgs,
    may_overwrite: bool,
    repeats: Option<usize>,
    path: Option<PathBuf>,
    cache: Option<PathBuf>,
    trace: Option<PathBuf>,
    cache_blocks: Vec<u64>,
    backing: OnceCell<Backing>,
    /// Files made where the user said; removed in the end.
    made: Vec<MadeFile>,
}

/// A file of ours at a place of the user's choice.
#[derive(Debug)]
struct MadeFile(PathBuf);

impl Drop for MadeFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A slow device to be measured with and without a cache.
#[derive(Debug)]
struct Backing {
    path: PathBuf,
    bytes: u64,
}

impl Setup {
    /// Looks at what was asked for, and makes what is not there.
    pub fn new(args: &BenchArgs) -> Result<Setup> {
        let folder = args.path.clone().filter(|path| path.is_dir());
        let path = args.path.clone().filter(|path| !path.is_dir());
        let mut made = Vec::new();
        for (path, bytes) in [(&path, 0), (&args.cache, CACHE_BYTES)] {
            let Some(path) = path else { continue };
            if !path.exists() {
                let file = File::create(path)
                    .with_context(|| format!("cannot create {}", path.display()))?;
                made.push(MadeFile(path.clone()));
                file.set_len(bytes).with_context(|| path.display().to_string())?;
            }
        }
        let scratch = folder.unwrap_or_else(std::env::temp_dir);
        Ok(Setup {
            places: Places::new(&scratch)?,
            is_small: args.small,
            target: args.target,
            job: args.job.clone(),
            may_overwrite: args.overwrite,
            repeats: args.repeats,
            path,
            cache: args.cache.clone(),
            trace: args.trace.clone(),
            cache_blocks: args.cache_blocks.clone(),
            backing: OnceCell::new(),
            made,
        })
    }

    /// How often to measure: what was asked for, or the study's own choice.
    pub fn repeats(&self, small: usize, usual: usize) -> usize {
        let own = if self.is_small { small } else { usual };
        self.repeats.unwrap_or(own).max(1)
    }

    /// The trace to replay.
    pub fn trace(&self) -> Option<&Path> {
        self.trace.as_deref()
    }

    /// Sizes of caches to replay it with.
    pub fn cache_blocks(&self) -> &[u64] {
        &self.cache_blocks
    }

    /// One of two choices.
    pub fn choose<T>(&self, small: T, usual: T) -> T {
        if self.is_small { small } else { usual }
    }

    /// The study's own load, changed as was asked for.
    pub fn job(&self, job: Job) -> Job {
        self.job.apply(job)
    }

    /// What was asked of the load.
    pub fn asked(&self) -> &JobArgs {
        &self.job
    }

    /// The backing device's path, with all its blocks written.
    pub fn backing_path(&self) -> Result<&Path> {
        Ok(&self.backing()?.path)
    }

    /// The backing device.
    pub fn backing_disk(&self) -> Result<Arc<FileDisk>> {
        let Backing { path, .. } = self.backing()?;
        Ok(Arc::new(open_disk(path)?))
    }

    fn backing(&self) -> Result<&Backing> {
        if let Some(backing) = self.backing.get() {
            return Ok(backing);
        }
        let own = self.choose(GIB / 2, GIB);
        let wanted = self.job.size.map_or(own, |size| size.next_multiple_of(MIB).max(64 * MIB));
        let backing = match &self.path {
            Some(path) if self.is_made(path) => {
                write_out(path, wanted)?;
                Backing { path: path.clone(), bytes: wanted }
            }
            Some(path) => {
                self.check_overwrite(path)?;
                let bytes = FileDisk::open(path, &FileOptions::default())?.limits().size_bytes;
                ensure!(bytes >= 64 * MIB, "{} is smaller than 64 MiB", path.display());
                Backing { path: path.clone(), bytes: bytes / MIB * MIB }
            }
            None => {
                let path = self.places.disk.file("backing", wanted)?;
                write_out(&path, wanted)?;
                Backing { path, bytes: wanted }
            }
        };
        Ok(self.backing.get_or_init(|| backing))
    }

    /// What was there before is overwritten only if the user says so.
    fn check_overwrite(&self, path: &Path) -> Result<()> {
        if self.may_overwrite || self.is_made(path) {
            return Ok(());
        }
        bail!(
            "{} exists, and measuring would overwrite it: name a file that does not exist yet, or \
             say --overwrite if nothing in it is needed",
            path.display()
        )
    }

    fn is_made(&self, path: &Path) -> bool {
        self.made.iter().any(|made| made.0 == path)
    }

    /// Bytes of the backing device.
    pub fn backing_bytes(&self) -> Result<u64> {
        Ok(self.backing()?.bytes)
    }

    /// The path of the cache device that the user named, or of a new file in `folder`.
    pub fn cache_path(&self, folder: &Folder, name: &str, bytes: u64) -> Result<PathBuf> {
        match &self.cache {
            Some(path) => {
                self.check_overwrite(path)?;
                Ok(path.clone())
            }
            None => folder.file(name, bytes),
        }
    }

    /// The cache device that the user named, to measure copies to; its content stays.
    pub fn named_cache(&self) -> Option<&Path> {
        self.cache.as_deref()
    }

    /// A fresh cache in front of `backing`; `words` are those of the table behind the devices.
    pub fn cache(&self, name: &str, backing: Arc<dyn Disk>, words: &str) -> Result<Cache> {
        let path = self.cache_path(&self.places.memory, name, CACHE_BYTES)?;
        self.cache_on(&path, name, backing, words)
    }

    /// As [`Setup::cache`], but in memory and with so many bytes, whatever the user named.
    pub fn small_cache(
        &self,
        name: &str,
        bytes: u64,
        backing: Arc<dyn Disk>,
        words: &str,
    ) -> Result<Cache> {
        self.cache_on(&self.places.memory.file(name, bytes)?, name, backing, words)
    }

    fn cache_on(
        &self,
        path: &Path,
        name: &str,
        backing: Arc<dyn Disk>,
        words: &str,
    ) -> Result<Cache> {
        let pmem = open_pmem(path)?;
        let shared = self.places.memory.path(&format!("{name}.open-keys"));
        let _ = std::fs::remove_file(&shared);
        let shared = SharedWords::open(&shared, shared_words(OpenOptions::new(1).stripes))?;
        Cache::open(name, Arc::new(pmem), backing, words, shared, true)
    }
}

/// A cache device with all its pages, as some time after `udm create`.
pub fn open_pmem(path: &Path) -> Result<DaxPmem> {
    let pmem = open_untouched(path)?;
    pmem.prefault(0, pmem.len_bytes());
    Ok(pmem)
}

/// A cache device with copies as `udm create` would make them, as it is at first.
pub fn open_untouched(path: &Path) -> Result<DaxPmem> {
    let mut pmem = DaxPmem::open(path, DaxOptions::default())?;
    calibrate::tune(&mut pmem);
    Ok(pmem)
}

/// Gives a file all its blocks, so that nobody pays for their allocation later.
pub fn write_out(path: &Path, len_bytes: u64) -> Result<()> {
    let file = File::options().write(true).open(path).context("cannot open the backing file")?;
    let mut bytes = vec![0; 4 << 20];
    Prng::new(3).fill(&mut bytes);
    for at in (0..len_bytes).step_by(bytes.len()) {
        let part = bytes.len().min((len_bytes - at) as usize);
        file.write_all_at(&bytes[..part], at)
            .with_context(|| format!("cannot fill {}: is the disk full?", path.display()))?;
    }
    file.sync_all().with_context(|| format!("cannot sync {}", path.display()))
}

/// A disk as a device, without a cache.
pub fn linear_device(disk: Arc<dyn Disk>) -> Result<Arc<Device>> {
    let bytes = disk.limits().size_bytes;
    let table = DmTable::parse(&format!("0 {} linear disk 0", bytes / 512))?;
    let args = LinearArgs::parse(&table.lines[0].args)?;
    let target = Arc::new(Linear::new(&args, bytes, disk)?);
    Ok(Device::with_table("linear", LoadedTable::single(target, bytes))?)
}

/// A device that does nothing with what it is given: what is left is the way to it.
pub fn zero_device(bytes: u64) -> Result<Arc<Device>> {
    let target = Arc::new(Zero::parse(&[])?);
    Ok(Device::with_table("zero", LoadedTable::single(target, bytes))?)
}

/// A disk in memory.
pub fn ram_disk(bytes: u64) -> Arc<dyn Disk> {
    Arc::new(RamDisk::new(bytes, 512))
}

/// Waits until nothing of `device` is dirty, so that no measure pays for the one before. Somebody
/// else does its background work.
pub fn settle(device: &Device) -> Result<()> {
    device.set_draining(true);
    let start = Instant::now();
    while device.dirty().bytes > 0 {
        ensure!(start.elapsed() < Duration::from_secs(120), "dirty data does not get written back");
        std::thread::sleep(Duration::from_millis(2));
    }
    device.set_draining(false);
    Ok(())
}

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
    /// The cache device.
    pub pmem: Arc<dyn Pmem>,
}

impl Cache {
    /// Opens `pmem` as the cache of `backing`, formatting it first if `is_fresh`.
    pub fn open(
        name: &str,
        pmem: Arc<dyn Pmem>,
        backing: Arc<dyn Disk>,
        words: &str,
        shared: SharedWords,
        is_fresh: bool,
    ) -> Result<Cache> {
        if is_fresh {
            // Dirty data of an earlier measure must not keep the cache from being formatted.
            pmem.zero(0, 64 << 10);
            pmem.drain().and_then(|()| pmem.sync()).ok().context("the cache device failed")?;
        }
        let mut options = OpenOptions::new(1);
        // Studies also ask what happens in caches that are soon full.
        options.geometry.device_bytes_min = 0;
        options.force_format = is_fresh;
        Cache::open_with(name, pmem, backing, words, shared, &options)
    }

    /// Opens `pmem` as the cache of `backing`.
    pub fn open_with(
        name: &str,
        pmem: Arc<dyn Pmem>,
        backing: Arc<dyn Disk>,
        words: &str,
        shared: SharedWords,
        options: &OpenOptions,
    ) -> Result<Cache> {
        // The names in a table are for people: a path with blanks would be two words.
        let text = format!("cache backing {words}");
        let words: Vec<&str> = text.split_whitespace().collect();
        let args = TableArgs::parse(&words).map_err(|error| error.error)?;
        let bytes = backing.limits().size_bytes;
        let pcache = Pcache::open(args, bytes, pmem.clone(), backing, shared, options)?;
        let pcache = Arc::new(pcache);
        let device = Device::with_table(name, LoadedTable::single(pcache.clone(), bytes))?;
        Ok(Cache { pcache, device, pmem })
    }
}

/// Memory like a cache's, without a cache.
pub fn bare_memory(setup: &Setup, name: &str) -> Result<DaxPmem> {
    open_pmem(&setup.places.memory.file(name, CACHE_BYTES)?)
}

/// A device served over NBD from this process, with its background work done.
#[derive(Debug)]
pub struct Export {
    // Ended before the background, which moves what it waits for.
    _server: Server,
    _background: Queue,
}

impl Export {
    /// Serves `device` at a Unix socket.
    pub fn new(device: &Arc<Device>, socket: &Path) -> Result<Export> {
        let background = Queue::background("udm-background", device)?;
        let server = Server::start(device, &Uri::Unix(socket.to_path_buf()))?;
        Ok(Export { _server: server, _background: background })
    }
}

/// Whether fio is here, and knows NBD.
pub fn has_fio_nbd() -> bool {
    let output = std::process::Command::new("fio").arg("--enghelp").output();
    output.is_ok_and(|output| {
        String::from_utf8_lossy(&output.stdout).split_whitespace().any(|word| word == "nbd")
    })
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
