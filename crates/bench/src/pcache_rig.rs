//! A pcache to measure: the engine, its device and its memory.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use udm::device::{Device, LoadedTable};
use udm::disk::Disk;
use udm::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use udm::pmem::Pmem;
use udm::shm::SharedWords;
use udm::table::Word;

use crate::rig::{CACHE_BYTES, Setup, open_pmem};

/// An open pcache and the device that serves it.
#[derive(Debug)]
pub struct PcacheRig {
    /// The engine itself.
    pub pcache: Arc<Pcache>,
    /// The mapped device.
    pub device: Arc<Device>,
    /// The cache device.
    pub pmem: Arc<dyn Pmem>,
}

impl PcacheRig {
    /// Opens `pmem` as the cache of `backing`, formatting it first if `is_fresh`.
    pub fn open(
        name: &str,
        pmem: Arc<dyn Pmem>,
        backing: Arc<dyn Disk>,
        words: &str,
        shared: SharedWords,
        is_fresh: bool,
    ) -> Result<PcacheRig> {
        if is_fresh {
            // Dirty data of an earlier measure must not keep the cache from being formatted.
            pmem.zero(0, 64 << 10);
            pmem.drain().and_then(|()| pmem.sync()).ok().context("the cache device failed")?;
        }
        let mut options = OpenOptions::new(1);
        // Studies also ask what happens in caches that are soon full.
        options.geometry.device_bytes_min = 0;
        options.force_format = is_fresh;
        PcacheRig::open_with(name, pmem, backing, words, shared, &options)
    }

    /// Opens `pmem` as the cache of `backing`.
    pub fn open_with(
        name: &str,
        pmem: Arc<dyn Pmem>,
        backing: Arc<dyn Disk>,
        words: &str,
        shared: SharedWords,
        options: &OpenOptions,
    ) -> Result<PcacheRig> {
        // The names in a table are for people: a path with blanks would be two words.
        let text = format!("cache backing {words}");
        let args = TableArgs::parse(&Word::list(&text))?;
        let bytes = backing.limits().size_bytes;
        let pcache = Pcache::open(args, bytes, pmem.clone(), backing, shared, options)?;
        let pcache = Arc::new(pcache);
        let device = Device::with_table(name, LoadedTable::single(pcache.clone(), bytes))?;
        Ok(PcacheRig { pcache, device, pmem })
    }
}

impl Setup {
    /// A fresh pcache in front of `backing`; `words` are the arguments of the table after the
    /// devices.
    pub fn pcache(&self, name: &str, backing: Arc<dyn Disk>, words: &str) -> Result<PcacheRig> {
        let path = self.cache_path(&self.places.memory, name, self.cache_bytes())?;
        self.pcache_on(&path, name, backing, words)
    }

    /// As [`Setup::pcache`], but not smaller than usual: for studies without background work that
    /// frees space.
    pub fn roomy_pcache(
        &self,
        name: &str,
        backing: Arc<dyn Disk>,
        words: &str,
    ) -> Result<PcacheRig> {
        let bytes = self.cache_bytes().max(CACHE_BYTES);
        let path = self.cache_path(&self.places.memory, name, bytes)?;
        self.pcache_on(&path, name, backing, words)
    }

    /// As [`Setup::pcache`], but always in memory and with `bytes` bytes.
    pub fn pcache_of(
        &self,
        name: &str,
        bytes: u64,
        backing: Arc<dyn Disk>,
        words: &str,
    ) -> Result<PcacheRig> {
        self.pcache_on(&self.places.memory.file(name, bytes)?, name, backing, words)
    }

    fn pcache_on(
        &self,
        path: &Path,
        name: &str,
        backing: Arc<dyn Disk>,
        words: &str,
    ) -> Result<PcacheRig> {
        let pmem = open_pmem(path)?;
        let shared = self.places.memory.path(&format!("{name}.open-keys"));
        let _ = std::fs::remove_file(&shared);
        let shared = SharedWords::open(&shared, shared_words(OpenOptions::new(1).stripes))?;
        PcacheRig::open(name, Arc::new(pmem), backing, words, shared, true)
    }
}
