//! The equipment of the studies: files, disks, memory, and exports in front of a device. It knows
//! no cache: `pcache_rig` and `targets` make those.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use udm::build;
use udm::device::{Device, LoadedTable};
use udm::disk::{Disk, FileDisk, FileOptions, IoMode, RamDisk};
use udm::error::Kind;
use udm::pmem::Pmem;
use udm::pmem::dax::{DaxOptions, DaxPmem};
use udm::prng::Prng;
use udm::queue::Queue;
use udm::simple::{Linear, LinearArgs, Zero};
use udm::table::Table as DmTable;
use udm::units::{GIB, MIB};
use udm_export::nbd::{Server, Uri};

use crate::args::{BenchArgs, IoName, JobArgs, TargetName};
use crate::cleanup::Afterwards;
use crate::dirty_ratio::DirtyRatio;
use crate::job::Job;

/// Default bytes of a new cache: the smallest that the kernel's format allows.
pub const CACHE_BYTES: u64 = 512 << 20;
/// How often a cache is filled before its state counts as steady.
pub const FILLS: u64 = 3;

/// A ring that was dropped has ended after this long.
const RING_ENDS_WITHIN: Duration = Duration::from_secs(5);

/// The setup of one run.
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
    cache_bytes: u64,
    traces: Vec<PathBuf>,
    cache_blocks: Vec<u64>,
    blocks: Vec<u64>,
    device: Option<PathBuf>,
    may_destroy: bool,
    may_remember: bool,
    io: Vec<IoName>,
    backing: OnceLock<Backing>,
    _dirty_ratio: Option<DirtyRatio>,
    /// Files made where the user said; removed in the end.
    made: Vec<MadeFile>,
}

/// A file of ours at a place of the user's choice.
#[derive(Debug)]
struct MadeFile {
    path: PathBuf,
    /// The file is removed even if this process is killed.
    _afterwards: Afterwards,
}

impl MadeFile {
    fn new(path: &Path, bytes: u64) -> Result<MadeFile> {
        let fail = || format!("cannot create {}", path.display());
        let file = File::create_new(path).with_context(fail)?;
        let whole = path.canonicalize().with_context(fail)?;
        let made = MadeFile { path: path.to_owned(), _afterwards: Afterwards::remove(&[whole])? };
        file.set_len(bytes).with_context(|| path.display().to_string())?;
        Ok(made)
    }
}

impl Drop for MadeFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
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
        let cache_bytes = args.cache_size.unwrap_or(CACHE_BYTES);
        for (path, bytes) in [(&path, 0), (&args.cache, cache_bytes)] {
            let Some(path) = path else { continue };
            if !path.exists() {
                made.push(MadeFile::new(path, bytes)?);
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
            cache_bytes,
            traces: args.trace.clone(),
            cache_blocks: args.cache_blocks.clone(),
            blocks: args.blocks.clone(),
            device: args.device.clone(),
            may_destroy: args.destroy,
            may_remember: args.remember,
            io: args.io.clone(),
            backing: OnceLock::new(),
            _dirty_ratio: args.dirty_ratio.map(DirtyRatio::set).transpose()?,
            made,
        })
    }

    /// The number of repeats: as requested, or the study's own choice.
    pub fn repeats(&self, small: usize, usual: usize) -> usize {
        let own = if self.is_small { small } else { usual };
        self.repeats.unwrap_or(own).max(1)
    }

    /// The traces to replay.
    pub fn traces(&self) -> &[PathBuf] {
        &self.traces
    }

    /// Sizes of caches to replay them with.
    pub fn cache_blocks(&self) -> &[u64] {
        &self.cache_blocks
    }

    /// Sizes of the blocks of a `cache`, in bytes.
    pub fn blocks(&self) -> &[u64] {
        &self.blocks
    }

    /// One of two choices.
    pub fn choose<T>(&self, small: T, usual: T) -> T {
        if self.is_small { small } else { usual }
    }

    /// The study's own load, changed as was asked for.
    pub fn job(&self, job: Job) -> Job {
        self.job.apply(job)
    }

    /// The requested load.
    pub fn asked(&self) -> &JobArgs {
        &self.job
    }

    /// The ways to a file that were asked for.
    pub fn io(&self) -> Vec<(&'static str, IoMode)> {
        IoName::expand(&self.io)
    }

    /// The block device that the user named.
    pub fn device(&self) -> Option<&Path> {
        self.device.as_deref()
    }

    /// Whether what is on it may be lost.
    pub fn may_destroy(&self) -> bool {
        self.may_destroy
    }

    /// Whether later servers may use what was measured.
    pub fn may_remember(&self) -> bool {
        self.may_remember
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

    /// Existing data is overwritten only if the user allows it.
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
        self.made.iter().any(|made| made.path == path)
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

    /// Bytes of the caches that are made.
    pub fn cache_bytes(&self) -> u64 {
        self.cache_bytes
    }
}

/// Opens a file that may have been another's until just now: the kernel ends a ring, and with it
/// the hold on its files, after its user has gone on.
pub fn open_disk(path: &Path) -> Result<FileDisk> {
    open_disk_in(path, IoMode::default())
}

/// As [`open_disk`], with I/O in this way.
pub fn open_disk_in(path: &Path, io: IoMode) -> Result<FileDisk> {
    let options = FileOptions { io, ..FileOptions::default() };
    open_when_free(|| FileDisk::open(path, &options))
}

/// As [`open_disk`], opened by `open`.
pub fn open_when_free(open: impl Fn() -> udm::Result<FileDisk>) -> Result<FileDisk> {
    let deadline = Instant::now() + RING_ENDS_WITHIN;
    loop {
        match open() {
            Err(error) if error.kind() == Kind::Busy && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1));
            }
            opened => return Ok(opened?),
        }
    }
}

/// A cache device with all its pages, as some time after `udm create`.
pub fn open_pmem(path: &Path) -> Result<DaxPmem> {
    let pmem = open_untouched(path)?;
    pmem.prefault(0, pmem.len_bytes());
    Ok(pmem)
}

/// A cache device in its initial state, with copies as `udm create` makes them.
pub fn open_untouched(path: &Path) -> Result<DaxPmem> {
    let mut pmem = DaxPmem::open(path, DaxOptions::default())?;
    build::tune(&mut pmem);
    Ok(pmem)
}

/// Allocates all blocks of a file, so that no measurement includes their allocation.
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

/// A device that ignores its requests, so that only the path to it is measured.
pub fn zero_device(bytes: u64) -> Result<Arc<Device>> {
    let target = Arc::new(Zero::parse(&[])?);
    Ok(Device::with_table("zero", LoadedTable::single(target, bytes))?)
}

/// A disk in memory.
pub fn ram_disk(bytes: u64) -> Arc<dyn Disk> {
    Arc::new(RamDisk::new(bytes, 512))
}

/// Waits until `device` is clean, so that no measurement pays for an earlier one. Another
/// thread does the device's background work.
pub fn settle(device: &Device) -> Result<()> {
    device.set_draining(true);
    let start = Instant::now();
    while device.dirty().bytes > 0 {
        ensure!(start.elapsed() < Duration::from_secs(120), "dirty data does not get written back");
        thread::sleep(Duration::from_millis(2));
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
    /// The files are removed even if this process is killed.
    _afterwards: Afterwards,
}

impl Places {
    /// `scratch` is a folder on a disk.
    pub fn new(scratch: &Path) -> Result<Places> {
        let memory = Folder::new(Path::new("/dev/shm"))?;
        // By its whole name: a study may change its folder.
        let scratch = scratch.canonicalize().unwrap_or_else(|_| scratch.to_owned());
        let disk = Folder::new(&scratch)?;
        let afterwards = Afterwards::remove(&[&memory.0, &disk.0])?;
        Ok(Places { memory, disk, _afterwards: afterwards })
    }
}

/// Whether a program is there.
pub fn is_installed(tool: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|dir| dir.join(tool).is_file())
}

/// Fails, saying what to install, unless every program is there.
pub fn need_tools(tools: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<_> = tools.iter().filter(|(tool, _)| !is_installed(tool)).collect();
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

/// Memory like a cache's, without a cache.
pub fn bare_memory(setup: &Setup, name: &str) -> Result<DaxPmem> {
    open_pmem(&setup.places.memory.file(name, setup.cache_bytes())?)
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
        Export::with_background(device, socket, "udm-background")
    }

    /// The same, with a name for the thread of the background, by which its processor time is
    /// found.
    pub fn with_background(device: &Arc<Device>, socket: &Path, name: &str) -> Result<Export> {
        let background = Queue::background(name, device)?;
        let server = Server::start(device, &Uri::unix(socket))?;
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
