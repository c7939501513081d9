//! The target type pcache.

use super::WordRole::{Cache, Origin};
use super::setup::invalid;
use super::{
    BuildOptions, CacheMode, CachePlan, CacheType, CutCache, Fast, Features, Opening, Plan, Setup,
    TargetType, Wanted, boxed, refuse_read_only,
};
use crate::base::parallel;
use crate::disk::{Disk, DiskLimits};
use crate::error::Result;
use crate::pcache::layout::Geometry;
use crate::pcache::{
    OpenOptions, Pcache, TableArgs, WORDS, contents, inspect::is_pcache, limits, recovery, wipe,
};
use crate::pmem::Pmem;
use crate::recovery::Recovery;
use crate::shm::SharedStore;
use crate::sync::Arc;
use crate::table::{DeviceWord, TableLine, Word};
use crate::target::Target;

pub(super) const PCACHE: TargetType = TargetType {
    name: "pcache",
    version: "0.1.0",
    words: WORDS,
    features: Features { is_singleton: true, is_immutable: true },
    roles: &[Cache, Origin],
    status_fields: &[
        ("sb_flags", "flags of the superblock, hexadecimal"),
        ("seg_total", "segments of the cache device"),
        ("cache_segs", "segments of the cache"),
        ("segs_used", "segments in use"),
        ("gc_percent", "collection begins when this percentage of segments is in use"),
        ("cache_flags", "flags of the cache, hexadecimal; gc_percent and data_crc are among them"),
        ("key_head", "segment and offset where the log of keys ends"),
        ("dirty_tail", "where write-back continues; equal to key_head if all data is clean"),
        ("key_tail", "where collection continues"),
    ],
    limits: || limits().into(),
    cache: Some(CacheType {
        format_version: 1,
        begins_anywhere: false,
        has_log: true,
        has_metadata_device: false,
        words_to_accept_damage: "log_damage truncate",
        consents: &["rebind", "lost_memory"],
        consents_are_counted_at: Some(2),
        setup: Setup {
            is_for: Some((Fast::Memory, CacheMode::Writeback)),
            writes_blocks: false,
            words: setup_words,
        },
        shape_of: |pmem| contents::shape_of(pmem, Geometry::KERNEL),
        is_at: |pmem, _| is_pcache(pmem, Geometry::KERNEL),
        attach_of: |pmem, _, shared_store| {
            contents::attach_of(pmem, Geometry::KERNEL, shared_store)
        },
        inspect: |pmem, _, shared_store| {
            contents::contents(pmem.clone(), Geometry::KERNEL, shared_store)
        },
        cut_of: |pmem, _| {
            let (cut, has_data_crc) = recovery::cut_of(pmem, Geometry::KERNEL)?;
            Some(CutCache { cut, shape: contents::shape(has_data_crc) })
        },
    }),
    plan: |words| boxed(PcachePlan::parse(words)),
};

/// The arguments of the line for this request.
fn setup_words(wanted: &Wanted<'_>) -> Result<String> {
    wanted.only_writes_back()?;
    if wanted.block_bytes.is_some() {
        return invalid("its block size is not fixed: omit --block-size");
    }
    let has_crc =
        wanted.found.as_ref().is_some_and(|shape| shape.words.iter().any(|w| w == "true"));
    let (origin, fast) = wanted.quoted();
    Ok(format!("{fast} {origin} 4 cache_mode writeback data_crc {has_crc}"))
}

struct PcachePlan {
    args: TableArgs,
    cache: DeviceWord,
    backing: DeviceWord,
}

impl PcachePlan {
    fn parse(words: &[Word]) -> Result<PcachePlan> {
        let args = TableArgs::parse(words)?;
        let (cache, backing) = (args.cache.device()?, args.backing.device()?);
        Ok(PcachePlan { args, cache, backing })
    }
}

impl Plan for PcachePlan {
    /// The one place where a table's pcache is made.
    fn open(&self, line: &TableLine, opening: &mut Opening<'_>) -> Result<Arc<dyn Target>> {
        refuse_read_only(&self.backing)?;
        let cache = &opening.resolved(&self.cache)?;
        opening.refuse_other_caches(PCACHE.name, &[cache], 0)?;
        let pmem = opening.pmem_as(cache, None)?;
        let disk = opening.disk(&self.backing)?;
        let mut options = OpenOptions::new(opening.attach_id());
        let asked = opening.options;
        options.force_format = asked.force_format;
        options.progress = Arc::clone(&asked.progress);
        options.geometry = asked.geometry.unwrap_or(options.geometry);
        options.replay = asked.replay.unwrap_or(options.replay);
        options.threads = parallel::processors();
        let shared_store = opening.opener.shared_store(PCACHE.name, &cache.path)?;
        let args = self.args.clone();
        Ok(Arc::new(Pcache::open(args, line.len_bytes(), pmem, disk, shared_store, &options)?))
    }

    fn cache(&self) -> Option<&dyn CachePlan> {
        Some(self)
    }
}

impl CachePlan for PcachePlan {
    fn cache(&self) -> &DeviceWord {
        &self.cache
    }

    fn origin(&self) -> &DeviceWord {
        &self.backing
    }

    fn wipe(
        &self,
        opening: &mut Opening<'_>,
        shared_store: &SharedStore,
        limits: &DiskLimits,
    ) -> Result<()> {
        let pmem = opening.pmem_as(&opening.resolved(&self.cache)?, None)?;
        let geometry = opening.options.geometry.unwrap_or(Geometry::KERNEL);
        wipe::wipe(pmem, shared_store, geometry, limits, &opening.options.progress)
    }

    fn recover(
        &self,
        pmem: Arc<dyn Pmem>,
        shared_store: &SharedStore,
        options: &BuildOptions,
        origin: &Arc<dyn Disk>,
    ) -> Result<Recovery> {
        let geometry = options.geometry.unwrap_or(Geometry::KERNEL);
        recovery::recover(&self.args, pmem, shared_store, geometry, origin)
    }
}
