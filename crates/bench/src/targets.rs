//! The targets that studies measure, chosen by `--target`. A pcache is made in `pcache_rig`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use udm::device::{Device, LoadedTable};
use udm::disk::{Disk, FileDisk, FileOptions};
use udm::pmem::Pmem;
use udm::shm::SharedWords;
use udm::table::Word;
use udm::units::{MIB, human_bytes};
use udm::writecache::{OpenOptions, TableArgs, Writecache, shared_words};

use crate::args::TargetName;
use crate::results::Study;
use crate::rig::{Setup, open_disk, open_pmem, write_out};
use udm_export::check::file_system;

/// The cache device of a writecache, and with that its mode.
#[derive(Debug)]
pub enum Ground {
    /// Mode `p`.
    Memory(Arc<dyn Pmem>),
    /// Mode `s`.
    Disk(Arc<dyn Disk>),
}

/// A fresh writecache in front of `origin`; `words` are the arguments of the table after the
/// devices.
pub fn writecache(words: &str, origin: Arc<dyn Disk>, ground: Ground) -> Result<Arc<Device>> {
    let options = OpenOptions { force_format: true, ..OpenOptions::new(1) };
    open_writecache(words, origin, ground, writecache_memory(), &options)
}

/// Memory for uncommitted blocks, which a server shares with its successor.
pub fn writecache_memory() -> SharedWords {
    SharedWords::private(shared_words(OpenOptions::new(1).stripes))
}

/// The writecache that `options` describe in front of `origin`.
pub fn open_writecache(
    words: &str,
    origin: Arc<dyn Disk>,
    ground: Ground,
    shared: SharedWords,
    options: &OpenOptions,
) -> Result<Arc<Device>> {
    let mode = if matches!(ground, Ground::Memory(_)) { 'p' } else { 's' };
    let text = format!("{mode} origin cache {words}");
    let args = TableArgs::parse(&Word::list(&text))?;
    let bytes = origin.limits().size_bytes;
    let cache = match ground {
        Ground::Memory(pmem) => Writecache::open_pmem(args, bytes, origin, pmem, shared, options),
        Ground::Disk(disk) => Writecache::open_disk(args, bytes, origin, disk, shared, options),
    };
    Ok(Device::with_table("writecache", LoadedTable::single(Arc::new(cache?), bytes))?)
}

/// Remains on a disk must not be taken for a cache.
pub fn forget(path: &Path) -> Result<()> {
    let file = File::options().write(true).open(path).context("cannot open the cache device")?;
    file.write_all_at(&[0; 4096], 0)?;
    Ok(file.sync_data()?)
}

impl Setup {
    /// A fresh cache of the chosen target in front of `backing`, described in `study`.
    /// `pcache_words` are the arguments of a pcache's table; a writecache has the kernel's
    /// settings.
    pub fn target(
        &self,
        study: &mut Study,
        backing: Arc<dyn Disk>,
        pcache_words: &str,
    ) -> Result<Arc<Device>> {
        let name = study.name.clone();
        let (device, cache) = self.fresh_target(&name, backing, pcache_words)?;
        study.fact("target", self.target.name());
        self.describe_as(study, cache)?;
        Ok(device)
    }

    /// The same, with the kind of its cache device in words.
    pub fn fresh_target(
        &self,
        name: &str,
        backing: Arc<dyn Disk>,
        pcache_words: &str,
    ) -> Result<(Arc<Device>, String)> {
        match self.target {
            TargetName::Pcache => {
                let cache = self.pcache(name, backing, pcache_words)?;
                Ok((cache.device, memory_in_words(cache.pmem.as_ref())))
            }
            TargetName::WritecacheP | TargetName::WritecacheS => {
                let bytes = self.cache_bytes();
                let bytes = self.choose(bytes.min(192 * MIB), bytes);
                let path = self.writecache_path(name, bytes)?;
                self.fresh_writecache(&path, backing)
            }
        }
    }

    /// A cache device for a writecache in the chosen mode. On a disk it has `bytes` bytes, all
    /// written.
    pub fn writecache_path(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        if self.target == TargetName::WritecacheP {
            return self.cache_path(&self.places.memory, name, self.cache_bytes());
        }
        let path = self.cache_path(&self.places.disk, name, bytes)?;
        if self.named_cache().is_none() {
            write_out(&path, bytes)?;
        }
        Ok(path)
    }

    /// A fresh writecache there, with the kernel's settings, and the kind of its cache device in
    /// words.
    pub fn fresh_writecache(
        &self,
        path: &Path,
        backing: Arc<dyn Disk>,
    ) -> Result<(Arc<Device>, String)> {
        if self.target == TargetName::WritecacheP {
            let pmem = open_pmem(path)?;
            pmem.zero(0, 4096);
            pmem.drain().and_then(|()| pmem.sync()).ok().context("the cache device failed")?;
            let cache = memory_in_words(&pmem);
            return Ok((writecache("4096 0", backing, Ground::Memory(Arc::new(pmem)))?, cache));
        }
        forget(path)?;
        let disk = open_disk(path)?;
        let cache = disk_in_words(path, &disk);
        Ok((writecache("4096 0", backing, Ground::Disk(Arc::new(disk)))?, cache))
    }

    /// Says in `study` which devices were measured.
    pub fn describe(&self, study: &mut Study, cache: &dyn Pmem) -> Result<()> {
        self.describe_as(study, memory_in_words(cache))
    }

    /// The same for a cache device that reports call `cache`.
    pub fn describe_as(&self, study: &mut Study, cache: String) -> Result<()> {
        let (path, bytes) = (self.backing_path()?, human_bytes(self.backing_bytes()?));
        let is_direct = FileDisk::open(path, &FileOptions::default()).map(|disk| disk.is_direct());
        let how = match is_direct {
            Ok(false) => "through the page cache",
            // In use by the study itself: it was opened in the same way.
            _ => "direct I/O",
        };
        let name = path.display();
        study.fact("backing", format!("{name}, {bytes}, {how}, {}", file_system(path)));
        study.fact("cache", cache);
        Ok(())
    }

    /// Whether data stays in the cache of that target when it was written back.
    pub fn keeps_clean_data(&self) -> bool {
        self.target == TargetName::Pcache
    }
}

/// A cache device in memory, for a study's facts.
pub fn memory_in_words(pmem: &dyn Pmem) -> String {
    let medium = pmem.medium();
    format!("{}, {}, {}", medium.name, human_bytes(pmem.len_bytes()), medium.description)
}

/// The same on a disk.
pub fn disk_in_words(path: &Path, disk: &FileDisk) -> String {
    let how = if disk.is_direct() { "direct I/O" } else { "through the page cache" };
    let (bytes, place) = (human_bytes(disk.limits().size_bytes), file_system(path));
    format!("{}, {bytes}, {how}, {place}", path.display())
}
