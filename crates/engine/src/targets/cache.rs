//! The target type cache.

use super::WordRole::{Cache as CacheWord, Metadata, Origin};
use super::{CacheMode, CacheType, Fast, Features, Opening, Plan, Setup, TargetType, boxed, carve};
use crate::cache::Devices;
use crate::cache::survey;
use crate::cache::{Cache, Incoming, OpenOptions, TableArgs, View, WORDS, inspect, limits, wipe};
use crate::disk::Disk;
use crate::error::{Error, Kind, Result};
use crate::recovery::Survey;
use crate::sync::Arc;
use crate::table::{DeviceOptions, DeviceWord, TableLine, Word};
use crate::target::Target;
use crate::units::SECTOR;

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
        ("demotions", "blocks that were demoted from the cache"),
        ("promotions", "blocks that were promoted into the cache"),
        ("dirty", "blocks that are newer than the origin"),
    ],
    limits: || limits().into(),
    cache: Some(CacheType {
        format_version: 2,
        begins_anywhere: false,
        has_log: false,
        has_metadata_device: true,
        words_to_accept_damage: "",
        consents: &["rebind"],
        consents_are_counted_at: None,
        setup: Setup {
            is_for: Some((Fast::Disk, CacheMode::Writethrough)),
            writes_blocks: true,
            words: carve::words,
        },
        shape_of: carve::shape_of,
        is_at: |pmem, _| inspect::is_cache(pmem),
        attach_of: |pmem, _, _| Some((inspect::binding_of(pmem)?, None)),
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

    fn words(&self) -> [&DeviceWord; 3] {
        [&self.metadata, &self.cache, &self.origin]
    }

    /// Whether the table asks for read-only devices; an error if it does so for some of the devices
    /// only.
    fn is_read_only(&self) -> Result<bool> {
        let is_read_only = |word: &&DeviceWord| word.options.is_read_only;
        match self.words().iter().filter(|word| is_read_only(word)).count() {
            0 => Ok(false),
            3 => Ok(true),
            _ => Err(self.refusal_to_read_only()),
        }
    }

    fn refusal_to_read_only(&self) -> Error {
        let words = self.words();
        let word = words.iter().find(|word| word.options.is_read_only).expect("one is read-only");
        word.error(Kind::Invalid, ALL_OR_NONE)
    }

    /// The words of the devices in the form in which they are opened: metadata, cache, origin.
    fn resolved(&self, opening: &Opening<'_>) -> Result<Vec<DeviceWord>> {
        let mut resolved = Vec::with_capacity(3);
        for word in self.words() {
            let word = opening.resolved(word)?;
            let is_same = |other: &DeviceWord| {
                other.path == word.path && other.options.area == word.options.area
            };
            if resolved.iter().any(is_same) {
                return Err(word.error(Kind::Invalid, "it has another role in the same line"));
            }
            resolved.push(word);
        }
        Ok(resolved)
    }

    /// The devices, to write to.
    fn devices(&self, opening: &mut Opening<'_>) -> Result<Devices> {
        if self.is_read_only()? {
            return Err(self.refusal_to_read_only());
        }
        let resolved = self.resolved(opening)?;
        Ok(Devices {
            metadata: opening.taken_cache_disk(&resolved[0], NO_METADATA)?,
            cache: opening.taken_cache_disk(&resolved[1], NO_CACHE)?,
            origin: opening.taken_disk(&resolved[2], NO_ORIGIN)?,
        })
    }

    /// Opens the devices read-only, and reads the metadata.
    fn view(&self, line: &TableLine, opening: &mut Opening<'_>) -> Result<View> {
        let resolved = self.resolved(opening)?;
        let mut open = |nth: usize, failed: &str| -> Result<Arc<dyn Disk>> {
            opening.disk_as(&resolved[nth], failed)
        };
        let devices = Devices {
            metadata: open(0, NO_METADATA)?,
            cache: open(1, NO_CACHE)?,
            origin: open(2, NO_ORIGIN)?,
        };
        let words: Vec<String> = line.args.iter().map(Word::quoted).collect();
        View::open(&self.args, words.join(" "), line.len_bytes(), devices)
    }
}

/// The same device, only to be read.
fn to_read(word: &DeviceWord) -> DeviceWord {
    let options = DeviceOptions { is_read_only: true, ..word.options };
    DeviceWord { options, ..word.clone() }
}

const NO_METADATA: &str = "Error opening metadata device";
const NO_CACHE: &str = "Error opening cache device";
const NO_ORIGIN: &str = "Error opening origin device";
const ALL_OR_NONE: &str = "a cache writes to all of its devices, or to none if each of the three \
                           names has ?readonly";

impl Plan for CachePlan {
    fn open(&self, line: &TableLine, opening: &mut Opening<'_>) -> Result<Arc<dyn Target>> {
        if self.is_read_only()? {
            return Ok(Arc::new(self.view(line, opening)?));
        }
        opening.refuse_other_caches(CACHE.name, &[&self.metadata, &self.cache], 0)?;
        let devices = self.devices(opening)?;
        for disk in [&devices.metadata, &devices.cache] {
            disk.keep_room().map_err(|error| error.at("cache"))?;
        }
        let asked = opening.options;
        let progress = Arc::clone(&asked.progress);
        let options = OpenOptions { force_format: asked.force_format, progress };
        let (args, len_bytes) = (self.args.clone(), line.len_bytes());
        match opening.options.is_live {
            false => Ok(Arc::new(Cache::open(args, len_bytes, devices, options)?)),
            true => Ok(Arc::new(Incoming::new(args, len_bytes, devices, options)?)),
        }
    }

    fn survey(&self, opening: &mut Opening<'_>) -> Result<Option<Survey>> {
        let resolved = self.resolved(opening)?;
        let metadata = opening.disk_as(&to_read(&resolved[0]), NO_METADATA)?;
        let cache = opening.disk_as(&to_read(&resolved[1]), NO_CACHE);
        let block_bytes = u64::from(self.args.block_sectors) * SECTOR;
        survey::survey(&metadata, cache, block_bytes).map(Some)
    }

    fn wipe(&self, opening: &mut Opening<'_>) -> Result<()> {
        let devices = self.devices(opening)?;
        wipe::wipe(&devices, &opening.options.progress)
    }
}
