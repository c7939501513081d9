//! The targets that studies measure: the one place where each is made, by what `--target` says.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use udm::device::{Device, LoadedTable};
use udm::disk::{Disk, FileDisk, FileOptions};
use udm::pmem::Pmem;
use udm::shm::SharedWords;
use udm::units::{MIB, human_bytes};
use udm::writecache::{OpenOptions, TableArgs, Writecache, shared_words};

use crate::args::TargetName;
use crate::machine::file_system;
use crate::results::Study;
use crate::rig::{CACHE_BYTES, Setup, open_pmem, write_out};

/// What a writecache stands on, and with that its mode.
#[derive(Debug)]
pub enum Ground {
    /// Mode `p`.
    Memory(Arc<dyn Pmem>),
    /// Mode `s`.
    Disk(Arc<dyn Disk>),
}

/// A fresh writecache in front of `origin`; `words` are those of the table behind the devices.
pub fn writecache(words: &str, origin: Arc<dyn Disk>, ground: Ground) -> Result<Arc<Device>> {
    let mode = if matches!(ground, Ground::Memory(_)) { 'p' } else { 's' };
    let text = format!("{mode} origin cache {words}");
    let words: Vec<&str> = text.split_whitespace().collect();
    let args = TableArgs::parse(&words).map_err(|error| error.error)?;
    let bytes = origin.limits().size_bytes;
    let options = OpenOptions { force_format: true, ..OpenOptions::new(1) };
    let shared = SharedWords::private(shared_words(options.stripes));
    let cache = match ground {
        Ground::Memory(pmem) => Writecache::open_pmem(args, bytes, origin, pmem, shared, &options),
        Ground::Disk(disk) => Writecache::open_disk(args, bytes, origin, disk, shared, &options),
    };
    Ok(Device::with_table("writecache", LoadedTable::single(Arc::new(cache?), bytes))?)
}

/// What others left on a disk must not be taken for a cache.
pub fn forget(path: &Path) -> Result<()> {
    let file = File::options().write(true).open(path).context("cannot open the cache device")?;
    file.write_all_at(&[0; 4096], 0)?;
    Ok(file.sync_data()?)
}

impl Setup {
    /// A fresh cache of the target that was asked for in front of `backing`, described in `study`.
    /// `pcache_words` are those of a pcache's table; a writecache has the kernel's settings.
    pub fn target(
        &self,
        study: &mut Study,
        backing: Arc<dyn Disk>,
        pcache_words: &str,
    ) -> Result<Arc<Device>> {
        let name = study.name.clone();
        study.fact("target", self.target.name());
        match self.target {
            TargetName::Pcache => {
                let cache = self.cache(&name, backing, pcache_words)?;
                self.describe(study, cache.pmem.as_ref())?;
                Ok(cache.device)
            }
            TargetName::WritecacheP => {
                let path = self.cache_path(&self.places.memory, &name, CACHE_BYTES)?;
                let pmem = open_pmem(&path)?;
                pmem.zero(0, 4096);
                pmem.drain().and_then(|()| pmem.sync()).ok().context("the cache device failed")?;
                self.describe(study, &pmem)?;
                writecache("4096 0", backing, Ground::Memory(Arc::new(pmem)))
            }
            TargetName::WritecacheS => {
                let bytes = self.choose(192 * MIB, CACHE_BYTES);
                let path = self.cache_path(&self.places.disk, &name, bytes)?;
                if self.named_cache().is_none() {
                    write_out(&path, bytes)?;
                }
                forget(&path)?;
                let disk = FileDisk::open(&path, &FileOptions::default())?;
                let how = if disk.is_direct() { "direct I/O" } else { "through the page cache" };
                let bytes = human_bytes(disk.limits().size_bytes);
                let (shown, place) = (path.display(), file_system(&path));
                self.describe_as(study, format!("{shown}, {bytes}, {how}, {place}"))?;
                writecache("4096 0", backing, Ground::Disk(Arc::new(disk)))
            }
        }
    }

    /// Says in `study` which devices were measured.
    pub fn describe(&self, study: &mut Study, cache: &dyn Pmem) -> Result<()> {
        let (medium, bytes) = (cache.medium(), human_bytes(cache.len_bytes()));
        self.describe_as(study, format!("{}, {bytes}, {}", medium.name, medium.description))
    }

    /// The same for a cache device that is told of as `cache`.
    fn describe_as(&self, study: &mut Study, cache: String) -> Result<()> {
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
