//! From table lines to targets: the one place that knows every target's name, and the one through
//! which assembly opens devices.
//!
//! 1. All lines are read and checked before anything is opened.
//! 2. A device that several words of one table name alike is opened once and shared; devices that
//!    two tables name are refused by the lock that opening takes. The two tables of one mapped
//!    device share what simple targets map ([`Claims`]): a linear can grow, a delay slip in.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::attaching::AttachProgress;
use crate::crc::pcache_crc;
use crate::crew;
use crate::device::LoadedTable;
use crate::disk::{Claims, Disk, FileDisk, FileOptions, OpenMode};
use crate::error::{Error, Kind, Result};
use crate::pcache::layout::Geometry;
use crate::pcache::{self, OpenOptions, Pcache, ReplayPace};
use crate::pmem::Pmem;
use crate::pmem::dax::{DaxOptions, DaxPmem};
use crate::queue::prefault;
use crate::shm::{Keeper, boot_text};
use crate::simple::{
    Delay, DelayArgs, ErrorTarget, Flakey, FlakeyArgs, Linear, LinearArgs, Location, Zero,
};
use crate::sync::{Arc, Mutex, lock};
use crate::table::{DeviceWord, Table, TableLine};
use crate::target::Target;
use crate::writecache::{self, Writecache};

mod rescue;

use rescue::Args;
pub use rescue::salvage;

/// The targets there are, with their words, for `udm targets` and for errors.
pub const TARGETS: [(&str, &str); 7] = [
    ("delay", "<device> <offset> <delay> [<device> <offset> <delay> [<device> <offset> <delay>]]"),
    ("error", "[<device> <offset>]"),
    ("flakey", "<device> <offset> <up> <down> [<#words> <features>...]"),
    ("linear", "<device> <offset>"),
    (
        "pcache",
        "<cache device> <backing device> [<#words> [cache_mode writeback] [data_crc true|false]]",
    ),
    ("writecache", "p|s <origin> <cache device> <block size> <#words> [<options>...]"),
    ("zero", ""),
];

/// Finds what device words name. The world, or a test's idea of it.
pub trait Opener {
    /// A slow device, for this process alone.
    fn disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>>;

    /// A slow device for a target that may share it with the active table of its mapped device.
    fn shared_disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.disk(word)
    }

    /// The word with its path, if it is a device's number.
    fn resolve(&self, word: &DeviceWord) -> Result<DeviceWord> {
        Ok(word.clone())
    }

    /// A cache device, for this process alone.
    fn pmem(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>>;

    /// A cache device to read, which others may read, too, and nobody changes.
    fn rest(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        self.pmem(word)
    }

    /// Who keeps memory of a target that survives this process; the cache is at `path`.
    fn keeper(&self, target: &'static str, path: &str) -> Keeper;
}

/// What the user said beside the table.
#[derive(Clone, Debug, Default)]
pub struct BuildOptions {
    /// Format a cache device even if it may hold something else.
    pub force_format: bool,
    /// A fresh random number: names this attach.
    pub attach_id: u64,
    /// Sizes of a pcache's segments other than the kernel's, for simulations.
    pub geometry: Option<Geometry>,
    /// Another pace of replaying a pcache's log than the usual one, for simulations.
    pub replay: Option<ReplayPace>,
    /// Is told how far the opening of a cache has come.
    pub progress: Arc<AttachProgress>,
}

/// A line whose words are understood.
enum Plan {
    Linear(LinearArgs),
    Zero(Zero),
    Error(ErrorTarget),
    Delay(DelayArgs),
    Flakey(FlakeyArgs),
    Pcache { args: pcache::TableArgs, cache: DeviceWord, backing: DeviceWord },
    Writecache { args: writecache::TableArgs, origin: DeviceWord, cache: DeviceWord },
}

/// Whether the words of all lines are right. Opens nothing.
pub fn check(table: &Table) -> Result<()> {
    plan(table).map(drop)
}

/// Makes relative paths of devices absolute, as seen from `directory`: whoever reads them later, in
/// a printed table or an error, is elsewhere. Numbers of devices stay.
pub fn make_absolute(table: &mut Table, directory: &Path) {
    for line in &mut table.lines {
        let places: &[usize] = match line.target.text.as_str() {
            "linear" | "flakey" | "error" => &[0],
            "delay" => &[0, 3, 6],
            "pcache" => &[0, 1],
            "writecache" => &[1, 2],
            _ => &[],
        };
        for place in places {
            let Some(word) = line.args.get_mut(*place) else { continue };
            let Ok(device) = word.device() else { continue };
            if device.number().is_some() || device.path.starts_with('/') {
                continue;
            }
            if let Some(folder) = directory.to_str().filter(|folder| folder.starts_with('/')) {
                let folder = folder.trim_end_matches('/');
                let path = device.path.strip_prefix("./").unwrap_or(&device.path);
                let options = &word.text[device.path.len()..];
                word.text = format!("{folder}/{path}{options}");
            }
        }
    }
}

/// Makes the targets of a table.
pub fn build(table: &Table, opener: &dyn Opener, options: &BuildOptions) -> Result<LoadedTable> {
    let mut builder = Builder::new(opener, options);
    let mut targets: Vec<Arc<dyn Target>> = Vec::new();
    for (plan, line) in plan(table)?.into_iter().zip(&table.lines) {
        // What was opened for lines before is left as it was found.
        let undo = |_: &Error| targets.iter().for_each(|target| target.detach());
        let target = builder.target(plan, line).inspect_err(undo)?;
        targets.push(target);
    }
    Ok(LoadedTable::new(table, targets))
}

fn plan(table: &Table) -> Result<Vec<Plan>> {
    let plans: Vec<Plan> = table.lines.iter().map(plan_line).collect::<Result<_>>()?;
    for (plan, line) in plans.iter().zip(&table.lines) {
        if matches!(plan, Plan::Pcache { .. }) && plans.len() > 1 {
            let message = "must be the only target of its table";
            return Err(line.target.error(Kind::Invalid, message));
        }
    }
    Ok(plans)
}

fn plan_line(line: &TableLine) -> Result<Plan> {
    Ok(match line.target.text.as_str() {
        "linear" => Plan::Linear(with_target(line, LinearArgs::parse(&line.args))?),
        "zero" => Plan::Zero(with_target(line, Zero::parse(&line.args))?),
        "error" => Plan::Error(with_target(line, ErrorTarget::parse(&line.args))?),
        "delay" => Plan::Delay(with_target(line, DelayArgs::parse(&line.args))?),
        "flakey" => Plan::Flakey(with_target(line, FlakeyArgs::parse(&line.args))?),
        "pcache" => plan_pcache(line)?,
        "writecache" => plan_writecache(line)?,
        _ => {
            let names: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
            let message = format!("unknown target type; there are {}", names.join(", "));
            return Err(line.target.error(Kind::Invalid, message));
        }
    })
}

fn plan_pcache(line: &TableLine) -> Result<Plan> {
    let words: Vec<&str> = line.args.iter().map(|word| word.text.as_str()).collect();
    let args =
        pcache::TableArgs::parse(&words).map_err(|wrong| match line.args.get(wrong.word) {
            Some(word) => word.point(wrong.error),
            None => line.args.last().unwrap_or(&line.target).point_behind(wrong.error),
        })?;
    let [cache, backing, ..] = line.args.as_slice() else {
        return Err(line.target.behind("a cache device and a backing device are missing"));
    };
    Ok(Plan::Pcache { args, cache: cache.device()?, backing: backing.device()? })
}

fn plan_writecache(line: &TableLine) -> Result<Plan> {
    let words: Vec<&str> = line.args.iter().map(|word| word.text.as_str()).collect();
    let args =
        writecache::TableArgs::parse(&words).map_err(|wrong| match line.args.get(wrong.word) {
            Some(word) => word.point(wrong.error),
            None => line.args.last().unwrap_or(&line.target).point_behind(wrong.error),
        })?;
    let [_, origin, cache, ..] = line.args.as_slice() else {
        return Err(line.target.behind("an origin and a cache device are missing"));
    };
    Ok(Plan::Writecache { args, origin: origin.device()?, cache: cache.device()? })
}

/// An error about arguments that are not there points behind the target's name.
fn with_target<T>(line: &TableLine, result: Result<T>) -> Result<T> {
    result.map_err(|error| match error.place() {
        None => line.target.point_behind(error),
        Some(_) => error,
    })
}

/// Opens what the lines of one table name.
struct Builder<'a> {
    opener: &'a dyn Opener,
    options: &'a BuildOptions,
    disks: HashMap<String, Arc<dyn Disk>>,
    /// Caches that were opened.
    caches: u64,
}

impl<'a> Builder<'a> {
    fn new(opener: &'a dyn Opener, options: &'a BuildOptions) -> Builder<'a> {
        Builder { opener, options, disks: HashMap::new(), caches: 0 }
    }

    /// The attach of one more cache: no two of a table have the same.
    fn attach_id(&mut self) -> u64 {
        self.caches += 1;
        self.options.attach_id ^ (self.caches - 1)
    }

    fn target(&mut self, plan: Plan, line: &TableLine) -> Result<Arc<dyn Target>> {
        let len = line.len_bytes();
        Ok(match plan {
            Plan::Linear(args) => {
                let disk = self.shared(&args.location.device)?;
                Arc::new(Linear::new(&args, len, disk)?)
            }
            Plan::Zero(zero) => Arc::new(zero),
            Plan::Error(error) => Arc::new(error),
            Plan::Delay(args) => {
                let mut open = |location: &Location| self.shared(&location.device);
                Arc::new(Delay::new(&args, len, &mut open)?)
            }
            Plan::Flakey(args) => {
                let disk = self.shared(&args.location.device)?;
                Arc::new(Flakey::new(&args, len, disk)?)
            }
            Plan::Pcache { args, cache, backing } if cache.options.is_read_only => {
                self.view(line, &Args::Pcache(args), &cache, &backing)?
            }
            Plan::Writecache { args, origin, cache } if cache.options.is_read_only => {
                self.view(line, &Args::Writecache(args), &cache, &origin)?
            }
            Plan::Pcache { args, cache, backing } => self.pcache(line, args, &cache, &backing)?,
            Plan::Writecache { args, origin, cache } => {
                self.writecache(line, args, &origin, &cache)?
            }
        })
    }

    /// The one place where a pcache is made.
    fn pcache(
        &mut self,
        line: &TableLine,
        args: pcache::TableArgs,
        cache: &DeviceWord,
        backing: &DeviceWord,
    ) -> Result<Arc<dyn Target>> {
        refuse_read_only(backing)?;
        let cache = &self.resolved(cache)?;
        let pmem = self.pmem_as(cache, None)?;
        let disk = self.disk(backing)?;
        let mut options = OpenOptions::new(self.attach_id());
        options.force_format = self.options.force_format;
        options.progress = Arc::clone(&self.options.progress);
        options.geometry = self.options.geometry.unwrap_or(options.geometry);
        options.replay = self.options.replay.unwrap_or(options.replay);
        options.threads = crew::processors();
        let keeper = self.opener.keeper("pcache", &cache.path);
        let len = line.len_bytes();
        Ok(Arc::new(Pcache::open(args, len, pmem, disk, keeper, &options)?))
    }

    /// The one place where a writecache is made.
    fn writecache(
        &mut self,
        line: &TableLine,
        args: writecache::TableArgs,
        origin: &DeviceWord,
        cache: &DeviceWord,
    ) -> Result<Arc<dyn Target>> {
        let (origin, cache) = (&self.resolved(origin)?, &self.resolved(cache)?);
        if cache.path == origin.path {
            return Err(cache.error(Kind::Invalid, "the cache device and the origin are the same"));
        }
        refuse_read_only(origin)?;
        refuse_read_only(cache)?;
        let origin_disk = self.disk_as(origin, "Origin data device lookup failed")?;
        let cache_words = "Cache data device lookup failed";
        let mut options = writecache::OpenOptions::new(self.attach_id());
        options.force_format = self.options.force_format;
        options.progress = Arc::clone(&self.options.progress);
        options.threads = crew::processors();
        let keeper = self.opener.keeper("writecache", &cache.path);
        let len = line.len_bytes();
        Ok(Arc::new(match args.mode {
            writecache::Mode::Pmem => {
                let pmem = self.pmem_as(cache, Some(cache_words))?;
                Writecache::open_pmem(args, len, origin_disk, pmem, keeper, &options)?
            }
            writecache::Mode::Ssd => {
                let disk = self.disk_as(cache, cache_words)?;
                Writecache::open_disk(args, len, origin_disk, disk, keeper, &options)?
            }
        }))
    }

    fn resolved(&self, word: &DeviceWord) -> Result<DeviceWord> {
        self.opener.resolve(word).map_err(|error| word.word.point(error))
    }

    /// Opens a cache device. `lookup_failed`: the kernel's words, if it has any.
    fn pmem_as(&self, word: &DeviceWord, lookup_failed: Option<&str>) -> Result<Arc<dyn Pmem>> {
        if word.options.io.is_some() {
            let message = "io is for slow devices; a cache device takes persist";
            return Err(word.error(Kind::Invalid, message));
        }
        refuse_read_only(word)?;
        self.opener.pmem(word).map_err(|error| match lookup_failed {
            None => word.word.point(error),
            Some(words) => word.word.point(error.at(words)),
        })
    }

    fn disk(&mut self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.disk_as(word, "Device lookup failed")
    }

    /// Opens the disk of a target that keeps nothing on it or about it, so that the active table
    /// may have it open, too, until this one takes its place.
    fn shared(&mut self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.opened(word, "Device lookup failed", |opener, word| opener.shared_disk(word))
    }

    /// Opens a disk, or finds it open. `lookup_failed`: the kernel's words, in front of what it
    /// keeps to itself.
    fn disk_as(&mut self, word: &DeviceWord, lookup_failed: &str) -> Result<Arc<dyn Disk>> {
        self.opened(word, lookup_failed, |opener, word| opener.disk(word))
    }

    fn opened(
        &mut self,
        word: &DeviceWord,
        lookup_failed: &str,
        open: fn(&dyn Opener, &DeviceWord) -> Result<Arc<dyn Disk>>,
    ) -> Result<Arc<dyn Disk>> {
        if word.options.persist.is_some() {
            let message = "persist is for cache devices; a slow device takes io";
            return Err(word.error(Kind::Invalid, message));
        }
        if let Some(disk) = self.disks.get(&word.word.text) {
            return Ok(disk.clone());
        }
        let opened = self.opener.resolve(word).and_then(|word| open(self.opener, &word));
        let disk = opened.map_err(|error| word.word.point(error.at(lookup_failed)))?;
        self.disks.insert(word.word.text.clone(), disk.clone());
        Ok(disk)
    }
}

const BOTH_OR_NONE: &str = "a cache writes to both of its devices, or with ?readonly behind both \
                            names to none";

/// A cache writes to both of its devices.
fn refuse_read_only(word: &DeviceWord) -> Result<()> {
    if !word.options.is_read_only {
        return Ok(());
    }
    Err(word.error(Kind::Invalid, BOTH_OR_NONE))
}

/// The file of a cache's shared memory as servers before 0.2 named it: by where the cache device
/// is, in a run of the machine.
fn old_shared_name(target: &str, cache: &str) -> String {
    let path = std::fs::canonicalize(cache).unwrap_or_else(|_| PathBuf::from(cache));
    let path = path.to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let last: String = path.rsplit('/').next().unwrap_or_default().chars().map(plain).collect();
    let last: String = last.chars().take(64).collect();
    format!("{target}-{last}-{:08x}-{}.shm", pcache_crc(path.as_bytes()), boot_text())
}

/// Opens real devices.
#[derive(Clone, Debug, Default)]
pub struct SystemOpener {
    /// Where memory that survives this process has its files; without one it is private, and an
    /// unflushed write does not survive the death of the process.
    pub runtime_dir: Option<PathBuf>,
    /// What the mapped device has open for targets that may share it.
    pub claims: Arc<Claims>,
    /// Is shown every cache device that was opened, to choose its [plan](DaxPmem::set_plan) of
    /// copies.
    pub tune: Option<fn(&mut DaxPmem)>,
}

impl Opener for SystemOpener {
    fn disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        Ok(Arc::new(FileDisk::open(&word.path, &options_of(word))?))
    }

    fn shared_disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        Ok(Arc::new(FileDisk::open_shared(&word.path, &options_of(word), &self.claims)?))
    }

    fn resolve(&self, word: &DeviceWord) -> Result<DeviceWord> {
        let Some((major, minor)) = word.number() else { return Ok(word.clone()) };
        let path = node_of(major, minor).ok_or_else(|| {
            let message = format!(
                "{major}:{minor}: no device of this number has a node in /dev; give its path"
            );
            Error::new(Kind::NotFound, message)
        })?;
        Ok(DeviceWord { path, ..word.clone() })
    }

    fn pmem(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        let options = DaxOptions { persistence: word.options.persist };
        let mut pmem = DaxPmem::open(Path::new(&word.path), options)?;
        if let Some(tune) = self.tune {
            tune(&mut pmem);
        }
        let pmem = Arc::new(pmem);
        prefault(&pmem);
        Ok(pmem)
    }

    fn rest(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        let options = DaxOptions { persistence: word.options.persist };
        Ok(Arc::new(DaxPmem::open_shared(Path::new(&word.path), options)?))
    }

    fn keeper(&self, target: &'static str, path: &str) -> Keeper {
        match &self.runtime_dir {
            Some(dir) => Keeper::folder(dir, target, Some(dir.join(old_shared_name(target, path)))),
            None => Keeper::nowhere(),
        }
    }
}

fn options_of(word: &DeviceWord) -> FileOptions {
    let mode = match word.options.is_read_only {
        true => OpenMode::Shared,
        false => OpenMode::Exclusive,
    };
    FileOptions { mode, io: word.options.io.unwrap_or_default() }
}

/// The node of the block or character device with this number.
fn node_of(major: u32, minor: u32) -> Option<String> {
    let number = format!("{major}:{minor}");
    let of_kind = |kind: &str| {
        let link = std::fs::canonicalize(format!("/dev/{kind}/{number}")).ok();
        let told = std::fs::read_to_string(format!("/sys/dev/{kind}/{number}/uevent")).ok();
        let name = told.iter().flat_map(|told| told.lines());
        let name = name.filter_map(|line| line.strip_prefix("DEVNAME=")).next();
        [link, name.map(|name| Path::new("/dev").join(name))].into_iter().flatten().find(|path| {
            rustix::fs::stat(path).is_ok_and(|stat| {
                (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)) == (major, minor)
            })
        })
    };
    of_kind("block").or_else(|| of_kind("char"))?.to_str().map(str::to_owned)
}

/// Devices by name, for tests and simulations: paths name what was put in before.
#[derive(Debug, Default)]
pub struct NamedDevices {
    disks: HashMap<String, Arc<dyn Disk>>,
    pmems: HashMap<String, Arc<dyn Pmem>>,
    keepers: Mutex<HashMap<String, Keeper>>,
    boot: u64,
}

impl NamedDevices {
    /// No devices.
    pub fn new() -> NamedDevices {
        NamedDevices::default()
    }

    /// Adds a slow device, or replaces it.
    pub fn add_disk(&mut self, name: &str, disk: Arc<dyn Disk>) {
        self.disks.insert(name.into(), disk);
    }

    /// Adds a cache device, or replaces it.
    pub fn add_pmem(&mut self, name: &str, pmem: Arc<dyn Pmem>) {
        self.pmems.insert(name.into(), pmem);
    }

    /// Forgets all shared memory, as a reboot does.
    pub fn forget_shared_words(&mut self) {
        self.boot += 1;
        lock(&self.keepers).clear();
    }

    fn absent(word: &DeviceWord) -> Error {
        Error::new(Kind::NotFound, format!("{}: no such device", word.path))
    }
}

impl Opener for NamedDevices {
    fn disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.disks.get(&word.path).cloned().ok_or_else(|| NamedDevices::absent(word))
    }

    fn pmem(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        self.pmems.get(&word.path).cloned().ok_or_else(|| NamedDevices::absent(word))
    }

    fn keeper(&self, target: &'static str, path: &str) -> Keeper {
        let mut keepers = lock(&self.keepers);
        let name = format!("{target} {path}");
        keepers.entry(name).or_insert_with(|| Keeper::one(self.boot)).clone()
    }
}

#[cfg(test)]
mod tests;
