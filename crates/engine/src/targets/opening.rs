//! How the lines of one table open their devices.
//!
//! A device that several words of one table name alike is opened once and shared.

use std::collections::{HashMap, HashSet};

use super::CachePlan;
use crate::attaching::AttachProgress;
use crate::disk::{Claims, Disk, DiskLimits};
use crate::error::{Kind, Result};
use crate::pcache::ReplayPace;
use crate::pcache::layout::Geometry;
use crate::pmem::Pmem;
use crate::rescue::{Salvage, View};
use crate::shm::Keeper;
use crate::sync::Arc;
use crate::table::{DeviceWord, TableLine, Word};
use crate::target::Target;
use crate::units::human_pair;

/// Finds what device words name: in the real world, or in a test's.
pub trait Opener {
    /// A slow device, for this process alone.
    fn disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>>;

    /// A slow device for a target that may share it with the active table of its mapped device.
    fn shared_disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.disk(word)
    }

    /// A slow device that may be a part of one which other words of the same table name parts of,
    /// too: those are in `parts`.
    fn part(&self, word: &DeviceWord, _parts: &Claims) -> Result<Arc<dyn Disk>> {
        self.disk(word)
    }

    /// The same, for a target that takes over from one of the active table of its mapped device,
    /// which has it open.
    fn shared_part(&self, word: &DeviceWord, parts: &Claims) -> Result<Arc<dyn Disk>> {
        self.part(word, parts)
    }

    /// The word with its path, if it is a device's number.
    fn resolve(&self, word: &DeviceWord) -> Result<DeviceWord> {
        Ok(word.clone())
    }

    /// A cache device, for this process alone.
    fn pmem(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>>;

    /// A cache device to read, which others may also read, and nothing changes.
    fn rest(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        self.pmem(word)
    }

    /// The keeper of memory of a target that survives this process; the cache is at `path`.
    fn keeper(&self, target: &'static str, path: &str) -> Result<Keeper>;
}

/// Options besides the table. There is no default: each attach needs a name of its own, or the
/// memory of one attach is taken for another's.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// Format a cache device even if it may hold something else.
    pub force_format: bool,
    /// Another table of the mapped device is active: what it serves changes until this one takes
    /// effect.
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
    /// Nothing but the attach's name, which must be unique.
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

/// A way of opening a slow device; other parts of it that the table names are in the claims.
type OpenDisk = fn(&dyn Opener, &DeviceWord, &Claims) -> Result<Arc<dyn Disk>>;

/// Opens what the lines of one table name.
pub(crate) struct Opening<'a> {
    /// Finds devices.
    pub opener: &'a dyn Opener,
    /// Options besides the table.
    pub options: &'a BuildOptions,
    disks: HashMap<String, Arc<dyn Disk>>,
    /// What is open of them, by the kernel's idea of what is the same.
    parts: Claims,
    /// Words of `disks` that name the cache device of a line.
    taken: HashSet<String>,
    /// Caches that were opened.
    caches: u64,
}

impl<'a> Opening<'a> {
    pub fn new(opener: &'a dyn Opener, options: &'a BuildOptions) -> Opening<'a> {
        let (parts, taken) = (Claims::apart(), HashSet::new());
        Opening { opener, options, disks: HashMap::new(), parts, taken, caches: 0 }
    }

    /// The name of one more cache's attach: all caches of a table have different ones.
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
    /// may have it open, too, until this one replaces it.
    pub fn shared(&mut self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        self.opened(word, "Device lookup failed", |opener, word, _| opener.shared_disk(word))
    }

    /// Opens a disk, or finds it open. `lookup_failed`: the kernel's words, in front of the reason,
    /// which the kernel does not print.
    pub fn disk_as(&mut self, word: &DeviceWord, lookup_failed: &str) -> Result<Arc<dyn Disk>> {
        word.refuse_seek()?;
        self.opened(word, lookup_failed, |opener, word, parts| opener.part(word, parts))
    }

    /// Opens the disk that a cache keeps its data on, which no other word of the table may name.
    pub fn cache_disk(&mut self, word: &DeviceWord, lookup_failed: &str) -> Result<Arc<dyn Disk>> {
        self.cache_disk_by(word, lookup_failed, |opener, word, parts| opener.part(word, parts))
    }

    /// The same, of a cache that takes over from one of the active table.
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
            let what = "a cache has its device alone, and another word of the table names it, too";
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
            return Ok(disk.clone());
        }
        let (opener, parts) = (self.opener, &self.parts);
        let opened = opener.resolve(word).and_then(|word| open(opener, &word, parts));
        let disk = opened.map_err(|error| word.word.point(error.at(lookup_failed)))?;
        self.disks.insert(word.word.text.clone(), disk.clone());
        Ok(disk)
    }

    /// What the cache of `plan`, of a target called `name`, has for an origin.
    pub fn salvage(
        &self,
        name: &'static str,
        plan: &dyn CachePlan,
        limits: &DiskLimits,
    ) -> Result<Salvage> {
        let cache = self.resolved(plan.cache())?;
        let pmem = self.opener.rest(&cache).map_err(|error| cache.word.point(error))?;
        let keeper = self.opener.keeper(name, &cache.path)?;
        plan.salvage(pmem, &keeper, self.options, limits)
    }

    /// Wipes the cache of `plan`, of a target called `name`. Its origin is held meanwhile.
    pub fn wipe(&mut self, name: &'static str, plan: &dyn CachePlan) -> Result<()> {
        refuse_read_only(plan.cache())?;
        refuse_read_only(plan.origin())?;
        let limits = self.disk(plan.origin())?.limits().clone();
        let keeper = self.opener.keeper(name, &self.resolved(plan.cache())?.path)?;
        plan.wipe(self, &keeper, &limits)
    }

    /// A cache and its origin, to read: `?readonly` after the names of both. See `rescue`.
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
        let salvage = self.salvage(name, plan, limits)?;
        let words: Vec<String> = line.args.iter().map(Word::quoted).collect();
        Ok(Arc::new(View::new(name, words.join(" "), salvage, disk)))
    }
}

const BOTH_OR_NONE: &str = "a cache writes to both of its devices, or with ?readonly after both \
                            names to none";

/// An error about a read-only device: a cache writes to both of its devices.
pub(crate) fn refuse_read_only(word: &DeviceWord) -> Result<()> {
    if !word.options.is_read_only {
        return Ok(());
    }
    Err(word.error(Kind::Invalid, BOTH_OR_NONE))
}
