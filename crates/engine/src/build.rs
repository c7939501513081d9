//! Builds targets from table lines, and opens their devices.
//!
//! 1. All lines are parsed and checked before any device is opened.
//! 2. If one table names a device several times with the same words, it is opened once and shared.
//!    If two tables name the same device, the lock that opening takes refuses the second one. The
//!    two tables of one mapped device share the claims of simple targets and of a `cache` that
//!    replaces another ([`TableClaims`]): so a linear can grow, a delay can be added, and a cache
//!    can shrink.
//! 3. Parts of one device (`?offset=`, `?size=`) belong to one table, which may name several parts
//!    that do not overlap. The lock covers the whole device.

mod doubts;
mod left_out;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::base::attaching::AttachProgress;
use crate::base::crc::pcache_crc;
use crate::base::limits::{Limit, limit};
use crate::buffer::{CLIENT_POOL_BYTES_MAX, POOL_BYTES_MAX};
use crate::device::{LoadedTable, NAME_BYTES_MAX, PORTS_MAX, SLOW_SECONDS};
use crate::disk::{Claims, Disk, FileDisk, FileOptions, OpenMode, TableClaims};
use crate::error::{Error, Kind, Result};
use crate::pcache::layout::{SUPERBLOCK_AT, SUPERBLOCK_MAGIC};
use crate::pmem::dax::{DaxOptions, DaxPmem};
use crate::pmem::{MAPPINGS_MAX, Pmem, copies};
use crate::queue::prefault;
use crate::recovery::{Recovery, Survey};
use crate::shm::{SharedStore, boot_text};
use crate::sync::{Arc, Mutex, lock};
use crate::table::{
    DeviceOptions, DeviceWord, LINE_WORDS_MAX, TABLE_BYTES_MAX, TABLE_LINES_MAX,
    TARGET_NAME_BYTES_MAX, Table,
};
use crate::target::Target;
use crate::targets::{self, Opening, Planned, WordRole, refuse_read_only};
use crate::units::BIO_BYTES_MAX;

pub use crate::targets::{BuildOptions, Opener};
pub use doubts::doubts;
pub use left_out::left_out;

/// Whether the arguments of all lines are valid. Opens no device.
pub fn check(table: &Table) -> Result<()> {
    plan(table).map(drop)
}

/// Makes relative paths of devices absolute, relative to `directory`: a printed table or an error
/// is read elsewhere. Device numbers stay. An empty `directory` does not exist any more: then only
/// absolute paths work.
pub fn make_absolute(table: &mut Table, directory: &Path) -> Result<()> {
    const NAMES_A_DEVICE: [WordRole; 4] =
        [WordRole::Origin, WordRole::Cache, WordRole::Metadata, WordRole::Unused];
    for line in &mut table.lines {
        let Some(kind) = targets::find(&line.target.text) else { continue };
        for place in kind.places(&NAMES_A_DEVICE) {
            let Some(word) = line.args.get_mut(place) else { continue };
            let Ok(device) = word.device() else { continue };
            if device.number().is_some() || device.path.starts_with('/') {
                continue;
            }
            if directory.as_os_str().is_empty() {
                let message = "the current directory was deleted: give absolute paths";
                return Err(word.error(Kind::NotFound, message));
            }
            if let Some(folder) = directory.to_str().filter(|folder| folder.starts_with('/')) {
                let folder = folder.trim_end_matches('/');
                let path = device.path.strip_prefix("./").unwrap_or(&device.path);
                let options = &word.text[device.path.len()..];
                word.text = format!("{folder}/{path}{options}");
            }
        }
    }
    Ok(())
}

/// Makes the targets of a table.
pub fn build(table: &Table, opener: &dyn Opener, options: &BuildOptions) -> Result<LoadedTable> {
    let mut opening = Opening::new(opener, options);
    let mut targets: Vec<Arc<dyn Target>> = Vec::new();
    for planned in plan(table)? {
        // What earlier lines opened is left as it was found.
        let undo = |_: &Error| targets.iter().for_each(|target| target.detach());
        let target = planned.open(&mut opening).inspect_err(undo)?;
        targets.push(target);
    }
    let loaded = LoadedTable::new(table, targets);
    loaded.check_blocks(table).inspect_err(|_| loaded.detach())?;
    Ok(loaded)
}

/// The dirty data of the cache of `table`, which has one line, and the origin, opened for writing.
/// The cache device is opened read-only, and is not changed.
pub fn recover(table: &Table, opener: &dyn Opener) -> Result<(Recovery, Arc<dyn Disk>)> {
    // No cache is attached.
    let options = BuildOptions::named(0);
    let mut opening = Opening::new(opener, &options);
    let planned = plan(table)?.pop();
    let Some((name, cache)) = planned.as_ref().and_then(Planned::cache) else {
        return Err(Error::new(Kind::Invalid, "the table has no cache"));
    };
    refuse_read_only(cache.origin())?;
    let disk = opening.disk(cache.origin())?;
    let recovery = opening.recover(name, cache, &disk)?;
    Ok((recovery, disk))
}

/// The data that the cache of `table`, which no server serves, holds for its origin, and how much
/// of it is readable. Does not write to the devices.
pub fn survey(table: &Table, opener: &dyn Opener) -> Result<Survey> {
    let options = BuildOptions::named(0);
    let mut opening = Opening::new(opener, &options);
    let planned = plan(table)?.pop();
    let no_cache = || Error::new(Kind::Invalid, "the table has no cache");
    planned.as_ref().ok_or_else(no_cache)?.survey(&mut opening)?.ok_or_else(no_cache)
}

/// Wipes the caches of `table`, which no server serves: their origins are complete, and their cache
/// devices are not recognised as caches afterwards. Refused unless each cache is clean and belongs
/// to its origin. `progress` counts bytes, one line after the other.
pub fn wipe(table: &Table, opener: &dyn Opener, progress: &Arc<AttachProgress>) -> Result<()> {
    // No cache is attached.
    let options = BuildOptions { progress: progress.clone(), ..BuildOptions::named(0) };
    let mut opening = Opening::new(opener, &options);
    plan(table)?.iter().try_for_each(|planned| planned.wipe(&mut opening))
}

fn plan(table: &Table) -> Result<Vec<Planned<'_>>> {
    let lines: Vec<Planned<'_>> = table.lines.iter().map(Planned::of).collect::<Result<_>>()?;
    lines.iter().try_for_each(|line| line.check_alone(lines.len()))?;
    Ok(lines)
}

/// The engine's stated maxima, including the targets' maxima: `udm info NAME --limits` prints them.
pub fn limits() -> Vec<Limit> {
    let mut all = vec![
        limit("table_bytes", TABLE_BYTES_MAX as u64, "a table's text"),
        limit("table_lines", TABLE_LINES_MAX as u64, "lines of a table"),
        limit("table_line_words", LINE_WORDS_MAX as u64, "words of a line"),
        limit("target_name_bytes", TARGET_NAME_BYTES_MAX as u64, "a target's name"),
        limit("device_name_bytes", NAME_BYTES_MAX as u64, "a device's name within the engine"),
        limit("device_ports", PORTS_MAX as u64, "threads that use a device at a time"),
        limit("request_bytes", BIO_BYTES_MAX, "one request to a target"),
        limit("pool_bytes", POOL_BYTES_MAX as u64, "free buffers that a thread keeps for reuse"),
        limit(
            "client_pool_bytes",
            CLIENT_POOL_BYTES_MAX as u64,
            "free buffers that a thread which serves a client keeps for reuse",
        ),
        limit("slow_seconds", SLOW_SECONDS, "a request in flight for longer is reported"),
        limit("cache_devices", MAPPINGS_MAX as u64, "cache devices that a process maps"),
    ];
    all.extend(targets::TARGETS.iter().flat_map(|kind| (kind.limits)()));
    all
}

/// The file of a cache's shared memory as servers before 0.2 named it: by the path of the cache
/// device and the boot of the machine.
fn old_shared_name(target: &str, cache: &str) -> String {
    let path = std::fs::canonicalize(cache).unwrap_or_else(|_| PathBuf::from(cache));
    let path = path.to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let last: String = path.rsplit('/').next().unwrap_or_default().chars().map(plain).collect();
    let last: String = last.chars().take(64).collect();
    format!("{target}-{last}-{:08x}-{}.shm", pcache_crc(path.as_bytes()), boot_text())
}

impl BuildOptions {
    /// For an attach whose name is drawn at random.
    pub fn fresh() -> Result<BuildOptions> {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| Error::from_io("drawing", "a random number", errno.into()))?;
        Ok(BuildOptions::named(u64::from_le_bytes(bytes)))
    }
}

/// Chooses the fastest copy instructions for `pmem`, as [`copies`] remembers or measures them. A
/// device other than a file is measured only if it is a pcache already: measuring stores to it.
pub fn tune(pmem: &mut DaxPmem) {
    copies::tune(pmem, |pmem| {
        let mut superblock = [0; 16];
        let is_read = pmem.load(SUPERBLOCK_AT, &mut superblock).is_ok();
        is_read && superblock.windows(8).any(|word| word == SUPERBLOCK_MAGIC.to_le_bytes())
    });
}

/// Opens real devices.
#[derive(Clone, Debug)]
pub struct SystemOpener {
    /// The folder of the shared-memory files that survive this process. Without a folder the memory
    /// is private, and an unflushed write does not survive the death of the process.
    pub memory: Option<PathBuf>,
    /// Claims of the mapped device, for targets that may share them.
    pub claims: Arc<TableClaims>,
    /// Whether each cache device in memory gets the fastest [plan](DaxPmem::set_plan) of copies:
    /// see [`tune`].
    pub tunes: bool,
}

impl SystemOpener {
    /// Memory that survives this process has its files in `folder`.
    pub fn with_memory_in(folder: impl Into<PathBuf>) -> SystemOpener {
        SystemOpener { memory: Some(folder.into()), ..SystemOpener::without_memory() }
    }

    /// All memory is private: an unflushed write does not survive the death of the process.
    pub fn without_memory() -> SystemOpener {
        SystemOpener { memory: None, claims: Arc::default(), tunes: false }
    }
}

impl SystemOpener {
    fn open(&self, word: &DeviceWord, claims: &[&Claims]) -> Result<Arc<dyn Disk>> {
        let options = options_of(word);
        let budget = self.claims.simple.budget();
        Ok(Arc::new(FileDisk::open_within(&word.path, &options, claims, budget)?))
    }
}

impl Opener for SystemOpener {
    fn disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.open(word, &[])
    }

    fn part(&self, word: &DeviceWord, parts: &Claims) -> Result<Arc<dyn Disk>> {
        self.open(word, &[parts])
    }

    fn shared_part(&self, word: &DeviceWord, parts: &Claims) -> Result<Arc<dyn Disk>> {
        self.open(word, &[parts, &self.claims.caches])
    }

    fn shared_disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.open(word, &[&self.claims.simple])
    }

    fn resolve(&self, word: &DeviceWord) -> Result<DeviceWord> {
        let Some((major, minor)) = word.number() else { return Ok(word.clone()) };
        let path = node_of(major, minor).ok_or_else(|| {
            let message = format!(
                "{major}:{minor}: no node in /dev has this device number; give the device's path"
            );
            Error::new(Kind::NotFound, message)
        })?;
        Ok(DeviceWord { path, ..word.clone() })
    }

    fn pmem(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        let mut pmem = DaxPmem::open(Path::new(&word.path), dax_options_of(word))?;
        if self.tunes {
            tune(&mut pmem);
        }
        let pmem = Arc::new(pmem);
        prefault(&pmem);
        Ok(pmem)
    }

    fn rest(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        Ok(Arc::new(DaxPmem::open_shared(Path::new(&word.path), dax_options_of(word))?))
    }

    fn shared_store(&self, target: &'static str, path: &str) -> Result<SharedStore> {
        match &self.memory {
            Some(dir) => {
                SharedStore::folder(dir, target, Some(dir.join(old_shared_name(target, path))))
            }
            None => SharedStore::nowhere(),
        }
    }
}

fn options_of(word: &DeviceWord) -> FileOptions {
    let mode = match word.options.is_read_only {
        true => OpenMode::Shared,
        false => OpenMode::Exclusive,
    };
    let DeviceOptions { io, reads, window, area, .. } = word.options;
    FileOptions { mode, io: io.unwrap_or_default(), reads, window, area }
}

fn dax_options_of(word: &DeviceWord) -> DaxOptions {
    DaxOptions { persistence: word.options.persist, area: word.options.area }
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

/// Devices by name, for tests and simulations: paths are the names under which they were added.
#[derive(Debug, Default)]
pub struct NamedDevices {
    disks: HashMap<String, Arc<dyn Disk>>,
    pmems: HashMap<String, Arc<dyn Pmem>>,
    shared_stores: Mutex<HashMap<String, SharedStore>>,
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
        lock(&self.shared_stores).clear();
    }

    fn refuse_part(word: &DeviceWord) -> Result<()> {
        match word.options.area.is_whole() {
            true => Ok(()),
            false => Err(Error::new(
                Kind::Unsupported,
                "offset= and size= do not work with a device in memory",
            )),
        }
    }

    fn absent(word: &DeviceWord) -> Error {
        Error::new(Kind::NotFound, format!("{}: no such device", word.path))
    }
}

impl Opener for NamedDevices {
    fn disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        NamedDevices::refuse_part(word)?;
        self.disks.get(&word.path).cloned().ok_or_else(|| NamedDevices::absent(word))
    }

    fn pmem(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        NamedDevices::refuse_part(word)?;
        self.pmems.get(&word.path).cloned().ok_or_else(|| NamedDevices::absent(word))
    }

    fn shared_store(&self, target: &'static str, path: &str) -> Result<SharedStore> {
        let mut shared_stores = lock(&self.shared_stores);
        let name = format!("{target} {path}");
        Ok(shared_stores.entry(name).or_insert_with(|| SharedStore::one(self.boot)).clone())
    }
}

#[cfg(test)]
mod tests;
