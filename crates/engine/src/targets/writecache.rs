//! The target type writecache.

use super::WordRole::{Cache, Origin, Other};
use super::setup::invalid;
use super::{
    BuildOptions, CacheMode, CachePlan, CacheType, CutCache, Fast, Features, Opening, Plan, Setup,
    TargetType, Wanted, boxed, refuse_read_only,
};
use crate::base::parallel;
use crate::disk::{Disk, DiskLimits};
use crate::error::{Kind, Result};
use crate::pmem::Pmem;
use crate::recovery::Recovery;
use crate::shm::SharedStore;
use crate::sync::Arc;
use crate::table::{DeviceWord, TableLine, Word};
use crate::target::Target;
use crate::units::SECTOR;
use crate::writecache::layout::is_block_size;
use crate::writecache::media::Medium;
use crate::writecache::{
    Mode, OpenOptions, TableArgs, WORDS, Writecache, contents, inspect::is_writecache, limits,
    recovery, wipe,
};

pub(super) const WRITECACHE: TargetType = TargetType {
    name: "writecache",
    version: "1.6.0",
    words: WORDS,
    features: Features { is_singleton: false, is_immutable: false },
    roles: &[Other, Origin, Cache],
    status_fields: &[
        ("error", "1 while write-back or the cache device fails"),
        ("blocks", "blocks of the cache"),
        ("free_blocks", "blocks that are free, or are being marked free"),
        ("writeback_blocks", "blocks under write-back"),
        ("reads", "blocks read"),
        ("read_hits", "blocks read from the cache"),
        ("writes", "blocks written"),
        ("write_hits_uncommitted", "blocks written that were cached and not committed"),
        ("write_hits_committed", "blocks written that were cached and committed"),
        ("writes_around", "blocks written past the cache"),
        ("writes_allocated", "blocks written that were not cached"),
        ("writes_blocked", "writes that waited for a free block"),
        ("flushes", "flush requests"),
        ("discards", "blocks discarded or zeroed"),
    ],
    limits: || limits().into(),
    cache: Some(CacheType {
        format_version: 1,
        begins_anywhere: true,
        has_log: false,
        has_metadata_device: false,
        words_to_accept_damage: "lost_entries accept",
        consents: &["rebind", "lost_memory", "lost_entries"],
        consents_are_counted_at: None,
        setup: Setup {
            is_for: Some((Fast::Disk, CacheMode::Writeback)),
            writes_blocks: true,
            words: setup_words,
        },
        shape_of: contents::shape_of,
        is_at: |pmem, start| is_writecache(&Medium::Pmem(pmem.clone()), start),
        attach_of: contents::attach_of,
        inspect: contents::contents,
        cut_of: |pmem, start| {
            let (cut, block_bytes) = recovery::cut_of(pmem, start)?;
            Some(CutCache { cut, shape: contents::shape(&**pmem, start, block_bytes) })
        },
    }),
    plan: |words| boxed(WritecachePlan::parse(words)),
};

/// The kernel's usual block size, and that of file systems.
const USUAL_BLOCK_BYTES: u64 = 4096;

/// The arguments of the line for this request.
fn setup_words(wanted: &Wanted<'_>) -> Result<String> {
    wanted.only_writes_back()?;
    let found = wanted.found.as_ref().and_then(|shape| shape.words.get(1)?.parse().ok());
    if let Some(given) = wanted.block_bytes.filter(|bytes| !is_block_size(*bytes)) {
        let what = format!("--block-size {given} is not a power of two from 512 to 65536 bytes");
        return invalid(&what);
    }
    let block = wanted.choose_block(found, USUAL_BLOCK_BYTES)?;
    let mode = match wanted.nature {
        Fast::Memory => Mode::Pmem,
        Fast::Disk => Mode::Ssd,
    };
    let (origin, fast) = wanted.quoted();
    Ok(format!("{} {origin} {fast} {block} 0", mode.word()))
}

struct WritecachePlan {
    args: TableArgs,
    origin: DeviceWord,
    cache: DeviceWord,
}

impl WritecachePlan {
    fn parse(words: &[Word]) -> Result<WritecachePlan> {
        let args = TableArgs::parse(words)?;
        let (origin, cache) = (args.origin.device()?, args.cache.device()?);
        Ok(WritecachePlan { args, origin, cache })
    }
}

impl Plan for WritecachePlan {
    /// The one place where a table's writecache is made.
    fn open(&self, line: &TableLine, opening: &mut Opening<'_>) -> Result<Arc<dyn Target>> {
        let (origin, cache) = (&opening.resolved(&self.origin)?, &opening.resolved(&self.cache)?);
        if cache.path == origin.path && cache.options.area == origin.options.area {
            return Err(cache.error(Kind::Invalid, "the cache device and the origin are the same"));
        }
        refuse_read_only(origin)?;
        refuse_read_only(cache)?;
        let start = self.args.options.start_sector.unwrap_or(0);
        opening.refuse_other_caches(WRITECACHE.name, &[cache], start)?;
        let origin_disk = opening.disk_as(origin, "Origin data device lookup failed")?;
        let cache_words = "Cache data device lookup failed";
        let mut options = OpenOptions::new(opening.attach_id());
        options.force_format = opening.options.force_format;
        options.progress = Arc::clone(&opening.options.progress);
        options.threads = parallel::processors();
        let shared_store = opening.opener.shared_store(WRITECACHE.name, &cache.path)?;
        let (args, len) = (self.args.clone(), line.len_bytes());
        Ok(Arc::new(match args.mode {
            Mode::Pmem => {
                let pmem = opening.pmem_as(cache, Some(cache_words))?;
                Writecache::open_pmem(args, len, origin_disk, pmem, shared_store, &options)?
            }
            Mode::Ssd => {
                let disk = opening.cache_disk(cache, cache_words)?;
                Writecache::open_disk(args, len, origin_disk, disk, shared_store, &options)?
            }
        }))
    }

    fn cache(&self) -> Option<&dyn CachePlan> {
        Some(self)
    }
}

impl CachePlan for WritecachePlan {
    fn cache(&self) -> &DeviceWord {
        &self.cache
    }

    fn origin(&self) -> &DeviceWord {
        &self.origin
    }

    fn wipe(
        &self,
        opening: &mut Opening<'_>,
        shared_store: &SharedStore,
        limits: &DiskLimits,
    ) -> Result<()> {
        let cache = &opening.resolved(&self.cache)?;
        let medium = match self.args.mode {
            Mode::Pmem => Medium::Pmem(opening.pmem_as(cache, None)?),
            Mode::Ssd => Medium::Disk(opening.cache_disk(cache, "Device lookup failed")?),
        };
        let start = self.args.options.start_sector.unwrap_or(0) * SECTOR;
        wipe::wipe(&medium, start, shared_store, limits, &opening.options.progress)
    }

    fn recover(
        &self,
        pmem: Arc<dyn Pmem>,
        shared_store: &SharedStore,
        _: &BuildOptions,
        origin: &Arc<dyn Disk>,
    ) -> Result<Recovery> {
        recovery::recover(&self.args, pmem, shared_store, origin)
    }
}
