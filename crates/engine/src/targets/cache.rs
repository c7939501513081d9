//! The target type cache.

use super::WordRole::{Cache as CacheWord, Metadata, Origin};
use super::{
    CacheType, Features, Opening, Plan, Setup, TargetType, boxed, carve, refuse_read_only,
};
use crate::cache::drain::Devices;
use crate::cache::{Cache, Coming, OpenOptions, TableArgs, WORDS, inspect, limits, wipe};
use crate::error::{Kind, Result};
use crate::sync::Arc;
use crate::table::{DeviceWord, TableLine, Word};
use crate::target::Target;

pub(super) const CACHE: TargetType = TargetType {
    name: "cache",
    version: "2.4.0",
    words: WORDS,
    features: Features { is_singleton: false, is_immutable: false },
    roles: &[Metadata, CacheWord, Origin],
    status_fields: &[
        ("metadata_block_sectors", "sectors of a metadata block"),
        ("metadata_blocks", "metadata blocks in use, and all"),
        ("block_sectors", "sectors of a block"),
        ("blocks", "blocks of the cache in use, and all"),
        ("read_hits", "reads of blocks in the cache"),
        ("read_misses", "other reads"),
        ("write_hits", "writes of blocks in the cache"),
        ("write_misses", "other writes"),
        ("demotions", "blocks that left the cache"),
        ("promotions", "blocks that came into it"),
        ("dirty", "blocks that are newer than the origin"),
    ],
    limits: || limits().into(),
    cache: Some(CacheType {
        format_version: 2,
        begins_anywhere: false,
        has_log: false,
        has_metadata_device: true,
        words_to_accept_damage: "",
        setup: Setup { is_for: None, words: carve::words },
        shape_of: carve::shape_of,
        is_at: |pmem, _| inspect::is_cache(pmem),
        inspect: |pmem, _, _| inspect::contents(pmem),
        cut_of: |_, _| None,
    }),
    plan: |words| boxed(CachePlan::parse(words)),
};

struct CachePlan {
    args: TableArgs,
    metadata: DeviceWord,
    cache: DeviceWord,
    origin: DeviceWord,
}

impl CachePlan {
    fn parse(words: &[Word]) -> Result<CachePlan> {
        let args = TableArgs::parse(words)?;
        let (metadata, cache) = (args.metadata.device()?, args.cache.device()?);
        let origin = args.origin.device()?;
        Ok(CachePlan { args, metadata, cache, origin })
    }

    fn devices(&self, opening: &mut Opening<'_>) -> Result<Devices> {
        let words = [&self.metadata, &self.cache, &self.origin];
        let mut resolved = Vec::with_capacity(words.len());
        for word in words {
            refuse_read_only(word)?;
            let word = opening.resolved(word)?;
            let is_same = |other: &DeviceWord| {
                other.path == word.path && other.options.area == word.options.area
            };
            if resolved.iter().any(is_same) {
                return Err(word.error(Kind::Invalid, "it has another role in the same line"));
            }
            resolved.push(word);
        }
        Ok(Devices {
            metadata: opening.taken_cache_disk(&resolved[0], "Error opening metadata device")?,
            cache: opening.taken_cache_disk(&resolved[1], "Error opening cache device")?,
            origin: opening.taken_disk(&resolved[2], "Error opening origin device")?,
        })
    }
}

impl Plan for CachePlan {
    fn open(&self, line: &TableLine, opening: &mut Opening<'_>) -> Result<Arc<dyn Target>> {
        let devices = self.devices(opening)?;
        let options = OpenOptions { force_format: opening.options.force_format };
        let (args, len_bytes) = (self.args.clone(), line.len_bytes());
        match opening.options.is_live {
            false => Ok(Arc::new(Cache::open(args, len_bytes, devices, options)?)),
            true => Ok(Arc::new(Coming::new(args, len_bytes, devices, options)?)),
        }
    }

    fn wipe(&self, opening: &mut Opening<'_>) -> Result<()> {
        wipe::wipe(&self.devices(opening)?)
    }
}
