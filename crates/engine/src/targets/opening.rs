//! How the lines of one table open their devices.
//!
//! A device that several words of one table name alike is opened once and shared.

use std::collections::{HashMap, HashSet};

use super::{CachePlan, detect};
use crate::base::attaching::AttachProgress;
use crate::disk::{Claims, Disk, DiskLimits};
use crate::error::{Kind, Result};
use crate::pcache::ReplayPace;
use crate::pcache::layout::Geometry;
use crate::pmem::Pmem;
use crate::probe;
use crate::recovery::{Recovery, View};
use crate::shm::SharedStore;
use crate::sync::Arc;
use crate::table::{DeviceWord, TableLine, Word};
use crate::target::Target;
use crate::units::{SECTOR, human_pair};

/// Finds the devices that words name: real devices, or a test's.
pub trait Opener {
    /// A slow device, for this process alone.
    fn disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>>;

    /// A slow device for a target that may share it with the active table of its mapped device.
    fn shared_disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.disk(word)
    }

    /// A slow device that may be a part of a device of which other words of the same table name
    /// other parts: those are in `parts`.
    fn part(&self, word: &DeviceWord, _parts: &Claims) -> Result<Arc<dyn Disk>> {
        self.disk(word)
    }

    /// The same, for a target that replaces one in the active table of its mapped device, which has
    /// the disk open.
    fn shared_part(&self, word: &DeviceWord, parts: &Claims) -> Result<Arc<dyn Disk>> {
        self.part(word, parts)
    }

    /// The word with its path, if it is a device's number.
    fn resolve(&self, word: &DeviceWord) -> Result<DeviceWord> {
        Ok(word.clone())
    }

    /// A cache device, for this process alone.
    fn pmem(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>>;

    /// A cache device to read. Other processes may also read it, and none may change it.
    fn rest(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        self.pmem(word)
    }

    /// The store of a target's shared memory that survives this process; the cache is at `path`.
    fn shared_store(&self, target: &'static str, path: &str) -> Result<SharedStore>;
}

/// Options in addition to the table, without a default: each attach needs a unique name, or the
/// memory of one attach would be taken for another's.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// Format a cache device even if it may hold something else.
    pub force_format: bool,
    /// Another table of the mapped device is active: it serves and changes the media until this one
    /// takes effect.
    pub is_live: bool,
    /// A fresh random number: names this attach.
    pub attach_id: u64,
    /// Sizes of a pcache's segments other than the kernel's, for simulations.
    pub geometry: Option<Geometry>,
    /// A pace of replaying a pcache's log other than the usual one, for simulations.
    pub replay: Option<ReplayPace>,
    /// Receives the progress of opening a cache.
    pub progress: Arc<AttachProgress>,
}

impl BuildOptions {
    /// Only the attach's name, which must be unique.
    pub fn named(attach_id: u64) -> BuildOptions {
        BuildOptions {
            force_format: false,
            is_live: false,
            attach_id,
            geometry: None,
            replay: None,
            progress: Arc::default(),
        }
    }
}

/// A function that opens a slow device; other parts of the device that the table names are in the
/// claims.
type OpenDisk = fn(&dyn Opener, &DeviceWord, &Claims) -> Result<Arc<dyn Disk>>;

/// Opens what the lines of one table name.
pub(crate) struct Opening<'a> {
    /// Finds devices.
    pub opener: &'a dyn Opener,
    /// Options besides the table.
    pub options: &'a BuildOptions,
    disks: HashMap<String, Arc<dyn Disk>>,
    /// The open parts of devices, by the kernel's identity of a device.
    parts: Claims,
    /// Words of `disks` that name the cache device of a line.
    taken: HashSet<String>,
    /// Caches that were opened.
    caches: u64,
    /// The line whose target is being made.
    place: Option<LinePlace>,
}

/// The position of a line, and the parts of devices that it uses. All of them must be whole blocks
/// of those devices. Otherwise a cache could acknowledge a client's write and never be able to
/// write it back.
#[derive(Clone, Debug)]
pub(crate) struct LinePlace {
    /// Its first sector.
    pub start: u64,
    /// Its sectors.
    pub len: u64,
    /// The words of the devices that clients' requests reach, and the first sector there.
    pub devices: Vec<(String, u64)>,
}

impl LinePlace {
    /// An error if the line is not aligned to the blocks of the device that `word` names.
    fn check(&self, word: &DeviceWord, limits: &DiskLimits) -> Result<()> {
        let unit = u64::from(limits.block_bytes) / SECTOR;
        for (_, offset) in self.devices.iter().filter(|(text, _)| *text == word.word.text) {
            let all = [("start", self.start), ("length", self.len), ("offset there", *offset)];
            let Some((what, sectors)) = all.iter().find(|(_, at)| !at.is_multiple_of(unit)) else {
                continue;
            };
            let block_bytes = limits.block_bytes;
            let message = format!(
                "not aligned to h/w logical block size {block_bytes}: the line's {what}, {sectors} \
                 sectors, is not a multiple of {unit}"
            );
            return Err(word.error(Kind::Invalid, &message));
        }
        Ok(())
    }
}

impl<'a> Opening<'a> {
    pub fn new(opener: &'a dyn Opener, options: &'a BuildOptions) -> Opening<'a> {
        let (parts, taken) = (Claims::apart(), HashSet::new());
        Opening { opener, options, disks: HashMap::new(), parts, taken, caches: 0, place: None }
    }

    /// The devices that are opened next are those of this line.
    pub fn begin_line(&mut self, place: LinePlace) {
        self.place = Some(place);
    }

    /// The name of one more cache's attach: every cache of a table has a different one.
    pub fn attach_id(&mut self) -> u64 {
        self.caches += 1;
        self.options.attach_id ^ (self.caches - 1)
    }

    pub fn resolved(&self, word: &DeviceWord) -> Result<DeviceWord> {
        self.opener.resolve(word).map_err(|error| word.word.point(error))
    }

    /// Opens a cache device. `lookup_failed`: the kernel's words, if it has any.
    pub fn pmem_as(&self, word: &DeviceWord, lookup_failed: Option<&str>) -> Result<Arc<dyn Pmem>> {
        if word.options.io.is_some() {
            let message = "io is for slow devices; a cache device takes persist";
            return Err(word.error(Kind::Invalid, message));
        }
        refuse_read_only(word)?;
        word.refuse_seek()?;
        self.opener.pmem(word).map_err(|error| match lookup_failed {
            None => word.word.point(error),
            Some(words) => word.word.point(error.at(words)),
        })
    }

    pub fn disk(&mut self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.disk_as(word, "Device lookup failed")
    }

    /// Opens the disk of a target that keeps no state on it or about it, so that the active table
    /// may also have it open until this table replaces it.
    pub fn shared(&mut self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.opened(word, "Device lookup failed", |opener, word, _| opener.shared_disk(word))
    }

    /// Opens a disk, or finds it open. `lookup_failed`: the kernel's words, in front of the reason,
    /// which the kernel does not print.
    pub fn disk_as(&mut self, word: &DeviceWord, lookup_failed: &str) -> Result<Arc<dyn Disk>> {
        word.refuse_seek()?;
        self.opened(word, lookup_failed, |opener, word, parts| opener.part(word, parts))
    }

    /// Opens the disk with a cache's data, which no other word of the table may name.
    pub fn cache_disk(&mut self, word: &DeviceWord, lookup_failed: &str) -> Result<Arc<dyn Disk>> {
        self.cache_disk_by(word, lookup_failed, |opener, word, parts| opener.part(word, parts))
    }

    /// The same, for a cache that replaces one of the active table.
    pub fn taken_cache_disk(
        &mut self,
        word: &DeviceWord,
        lookup_failed: &str,
    ) -> Result<Arc<dyn Disk>> {
        let open: OpenDisk = |opener, word, parts| opener.shared_part(word, parts);
        self.cache_disk_by(word, lookup_failed, open)
    }

    /// The origin of such a cache.
    pub fn taken_disk(&mut self, word: &DeviceWord, lookup_failed: &str) -> Result<Arc<dyn Disk>> {
        word.refuse_seek()?;
        self.opened(word, lookup_failed, |opener, word, parts| opener.shared_part(word, parts))
    }

    fn cache_disk_by(
        &mut self,
        word: &DeviceWord,
        lookup_failed: &str,
        open: OpenDisk,
    ) -> Result<Arc<dyn Disk>> {
        word.refuse_seek()?;
        if self.disks.contains_key(&word.word.text) {
            let what = "a cache needs its device for itself, but the table also uses it in another \
                place";
            return Err(word.error(Kind::Invalid, what));
        }
        let disk = self.opened(word, lookup_failed, open)?;
        self.taken.insert(word.word.text.clone());
        Ok(disk)
    }

    fn opened(
        &mut self,
        word: &DeviceWord,
        lookup_failed: &str,
        open: OpenDisk,
    ) -> Result<Arc<dyn Disk>> {
        if word.options.persist.is_some() {
            let message = "persist is for cache devices; a slow device takes io";
            return Err(word.error(Kind::Invalid, message));
        }
        if self.taken.contains(&word.word.text) {
            let what = "it is the cache device of another line of the table";
            return Err(word.error(Kind::Invalid, what));
        }
        if let Some(disk) = self.disks.get(&word.word.text) {
            self.check_place(word, disk.limits())?;
            return Ok(disk.clone());
        }
        let (opener, parts) = (self.opener, &self.parts);
        let opened = opener.resolve(word).and_then(|word| open(opener, &word, parts));
        let disk = opened.map_err(|error| word.word.point(error.at(lookup_failed)))?;
        self.check_place(word, disk.limits())?;
        self.disks.insert(word.word.text.clone(), disk.clone());
        Ok(disk)
    }

    /// Even by force, udm does not overwrite a cache of another type that has, or may have, dirty
    /// data. `own`: the type that is to be formatted, from sector `start` of a device on.
    pub fn refuse_other_caches(
        &self,
        own: &'static str,
        words: &[&DeviceWord],
        start: u64,
    ) -> Result<()> {
        if !self.options.force_format {
            return Ok(());
        }
        for word in words {
            refuse_read_only(word)?;
            let mut word = self.resolved(word)?;
            // A cache there may be longer than this part.
            word.options.area = word.options.area.and_beyond();
            let pmem = match self.opener.rest(&word) {
                Ok(pmem) => pmem,
                // Opening the device itself reports this.
                Err(error) if error.kind() == Kind::NotFound => continue,
                Err(error) => return Err(word.word.point(error)),
            };
            let shared_store = |target| self.opener.shared_store(target, &word.path);
            let Some(kind) = detect::kind_at(&pmem, start) else { continue };
            if kind.name == own {
                // Formatting its own type makes this check itself, and the blocks of a `cache` may
                // hold any data.
                return Ok(());
            }
            detect::refuse_dirty(kind, &pmem, start, &shared_store)
                .map_err(|error| word.word.point(error))?;
        }
        Ok(())
    }

    fn check_place(&self, word: &DeviceWord, limits: &DiskLimits) -> Result<()> {
        self.place.as_ref().map_or(Ok(()), |place| place.check(word, limits))
    }

    /// The dirty data that the cache of `plan`, of a target called `name`, has for its origin.
    pub fn recover(
        &self,
        name: &'static str,
        plan: &dyn CachePlan,
        origin: &Arc<dyn Disk>,
    ) -> Result<Recovery> {
        let cache = self.resolved(plan.cache())?;
        let pmem = self.opener.rest(&cache).map_err(|error| cache.word.point(error))?;
        let shared_store = self.opener.shared_store(name, &cache.path)?;
        plan.recover(pmem, &shared_store, self.options, origin)
    }

    /// Wipes the cache of `plan`, of a target called `name`. Its origin stays locked meanwhile.
    pub fn wipe(&mut self, name: &'static str, plan: &dyn CachePlan) -> Result<()> {
        refuse_read_only(plan.cache())?;
        refuse_read_only(plan.origin())?;
        let limits = self.disk(plan.origin())?.limits().clone();
        let shared_store = self.opener.shared_store(name, &self.resolved(plan.cache())?.path)?;
        plan.wipe(self, &shared_store, &limits)
    }

    /// Blanks a device whose cache was wiped, from byte `start` on, so that the next format does
    /// not find the data that the cache held.
    pub fn blank(&mut self, word: &DeviceWord, start: u64) -> Result<()> {
        let word = self.resolved(word)?;
        let pmem = match self.disks.get(&word.word.text) {
            Some(disk) => return probe::blank_disk(disk, start),
            None => match self.opener.disk(&word) {
                Ok(disk) if is_taken(&disk) => return Ok(()),
                Ok(disk) => return probe::blank_disk(&disk, start),
                // A DAX device cannot be opened as a disk.
                Err(_) => self.opener.pmem(&word)?,
            },
        };
        probe::blank_pmem(&*pmem, start)
    }

    /// Opens a cache and its origin read-only: `?readonly` after the names of both. See `recovery`.
    pub fn view(
        &mut self,
        name: &'static str,
        line: &TableLine,
        plan: &dyn CachePlan,
    ) -> Result<Arc<dyn Target>> {
        let origin = plan.origin();
        if !origin.options.is_read_only {
            return Err(origin.error(Kind::Invalid, BOTH_OR_NONE));
        }
        let disk = self.disk(origin)?;
        let limits = disk.limits();
        if line.len_bytes() > limits.size_bytes {
            let (len, size) = human_pair(line.len_bytes(), limits.size_bytes);
            let message = format!("the table is {len} long, but {} has {size}", limits.name);
            return Err(origin.error(Kind::Invalid, &message));
        }
        let recovery = self.recover(name, plan, &disk)?;
        let words: Vec<String> = line.args.iter().map(Word::quoted).collect();
        Ok(Arc::new(View::new(name, words.join(" "), recovery, disk)))
    }
}

const BOTH_OR_NONE: &str = "a cache writes to both of its devices, or to none if both names have \
                            ?readonly";

/// Whether another process has made a cache of a disk in the moment when the disk was not locked.
fn is_taken(disk: &Arc<dyn Disk>) -> bool {
    probe::disk(disk, 0).iter().any(|finding| finding.is_cache)
}

/// An error about a read-only device: a cache writes to both of its devices.
pub(crate) fn refuse_read_only(word: &DeviceWord) -> Result<()> {
    if !word.options.is_read_only {
        return Ok(());
    }
    Err(word.error(Kind::Invalid, BOTH_OR_NONE))
}
