//! The target type pcache.

use super::WordRole::{Cache, Origin};
use super::setup::invalid;
use super::{
    BuildOptions, CacheMode, CachePlan, CacheType, CutCache, Fast, Features, Opening, Plan, Setup,
    TargetType, Wanted, boxed, refuse_read_only,
};
use crate::crew;
use crate::disk::DiskLimits;
use crate::error::Result;
use crate::pcache::layout::Geometry;
use crate::pcache::{
    OpenOptions, Pcache, TableArgs, WORDS, contents, inspect::is_pcache, limits, salvage, wipe,
};
use crate::pmem::Pmem;
use crate::rescue::Salvage;
use crate::shm::Keeper;
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
        ("gc_percent", "collection begins when this many percent are in use"),
        ("cache_flags", "flags of the cache, hexadecimal; gc_percent and data_crc are among them"),
        ("key_head", "segment and offset where the log of keys ends"),
        ("dirty_tail", "where write-back goes on; equal to key_head when nothing is dirty"),
        ("key_tail", "where collection goes on"),
    ],
    limits: || limits().into(),
    cache: Some(CacheType {
        format_version: 1,
        begins_anywhere: false,
        has_log: true,
        has_metadata_device: false,
        words_to_accept_damage: "log_damage truncate",
        setup: Setup { is_for: Some((Fast::Memory, CacheMode::Writeback)), words: setup_words },
        shape_of: |pmem| contents::shape_of(pmem, Geometry::KERNEL),
        is_at: |pmem, _| is_pcache(pmem, Geometry::KERNEL),
        inspect: |pmem, _, keeper| contents::contents(pmem.clone(), Geometry::KERNEL, keeper),
        cut_of: |pmem, _| {
            let (cut, has_data_crc) = salvage::cut_of(pmem, Geometry::KERNEL)?;
            Some(CutCache { cut, shape: contents::shape(has_data_crc) })
        },
    }),
    plan: |words| boxed(PcachePlan::parse(words)),
};

/// The words of a line for what is wanted.
fn setup_words(wanted: &Wanted<'_>) -> Result<String> {
    wanted.only_writes_back()?;
    if wanted.block_bytes.is_some() {
        return invalid("it has no blocks of one size; leave --block-size out");
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
        let pmem = opening.pmem_as(cache, None)?;
        let disk = opening.disk(&self.backing)?;
        let mut options = OpenOptions::new(opening.attach_id());
        let asked = opening.options;
        options.force_format = asked.force_format;
        options.progress = Arc::clone(&asked.progress);
        options.geometry = asked.geometry.unwrap_or(options.geometry);
        options.replay = asked.replay.unwrap_or(options.replay);
        options.threads = crew::processors();
        let keeper = opening.opener.keeper(PCACHE.name, &cache.path)?;
        let args = self.args.clone();
        Ok(Arc::new(Pcache::open(args, line.len_bytes(), pmem, disk, keeper, &options)?))
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

    fn wipe(&self, opening: &mut Opening<'_>, keeper: &Keeper, limits: &DiskLimits) -> Result<()> {
        let pmem = opening.pmem_as(&opening.resolved(&self.cache)?, None)?;
        let geometry = opening.options.geometry.unwrap_or(Geometry::KERNEL);
        wipe::wipe(pmem, keeper, geometry, limits, &opening.options.progress)
    }

    fn salvage(
        &self,
        pmem: Arc<dyn Pmem>,
        keeper: &Keeper,
        options: &BuildOptions,
        limits: &DiskLimits,
    ) -> Result<Salvage> {
        let geometry = options.geometry.unwrap_or(Geometry::KERNEL);
        salvage::salvage(&self.args, pmem, keeper, geometry, limits)
    }
}
