//! Caches that are recognised by their medium: what a cache device holds, and the table that
//! attaches it once more to bring its origin up to date.

use super::{Setup, TARGETS, TargetType, WordRole};
use crate::contents::{Contents, Shape};
use crate::error::Result;
use crate::pmem::Pmem;
use crate::rescue::Cut;
use crate::shm::Keeper;
use crate::sync::Arc;
use crate::table::Word;
use crate::units::SECTOR;

/// How caches of one type are recognised and read by their medium.
#[derive(Debug)]
pub struct CacheType {
    /// The version of the format.
    pub format_version: u32,
    /// Whether a cache can begin elsewhere than at the device's first byte.
    pub begins_anywhere: bool,
    /// Whether what is dirty is found by a log, which can end early.
    pub has_log: bool,
    /// Whether its mapping is on a device of its own, which is the one that is looked at.
    pub has_metadata_device: bool,
    /// Table words that accept the loss of a damaged part of what is dirty.
    pub words_to_accept_damage: &'static str,
    /// How such a cache is set up in one step.
    pub setup: Setup,
    /// What the cache at the device's first byte is like; none if that cannot be read.
    pub(super) shape_of: fn(&Arc<dyn Pmem>) -> Option<Shape>,
    /// Whether such a cache begins at this byte.
    pub(super) is_at: fn(&Arc<dyn Pmem>, u64) -> bool,
    /// What such a cache holds, by reading alone.
    pub(super) inspect: fn(&Arc<dyn Pmem>, u64, &Keeper) -> Result<Contents>,
    /// Such a cache, if it is longer than its device.
    pub(super) cut_of: fn(&Arc<dyn Pmem>, u64) -> Option<CutCache>,
}

/// A cache whose device was cut short.
#[derive(Debug)]
pub struct CutCache {
    /// How much is missing.
    pub cut: Cut,
    /// The table words for it.
    pub shape: Shape,
}

/// What a user asks of a recovery.
#[derive(Clone, Debug)]
pub struct Recovery<'a> {
    /// The cache device.
    pub cache: &'a str,
    /// The origin.
    pub origin: &'a str,
    /// Damage is accepted that hides a part of what is dirty.
    pub accepts_damage: bool,
    /// The origin may be another one than the cache says.
    pub rebinds: bool,
    /// The loss of a server's memory is accepted.
    pub accepts_loss: bool,
}

/// Every type of cache.
pub fn caches() -> impl DoubleEndedIterator<Item = (&'static TargetType, &'static CacheType)> {
    TARGETS.into_iter().filter_map(|kind| Some((kind, kind.cache.as_ref()?)))
}

/// Those that can begin at byte `start`.
fn caches_at(
    start: u64,
) -> impl DoubleEndedIterator<Item = (&'static TargetType, &'static CacheType)> {
    caches().filter(move |(_, cache)| start == 0 || cache.begins_anywhere)
}

/// What the cache holds that begins at sector `start_sector` of `pmem`, and its type. `keeper`
/// knows where memory of a type's servers is.
///
/// If the device holds no cache, the first type that could be there says what is missing.
pub fn inspect(
    pmem: &Arc<dyn Pmem>,
    start_sector: u64,
    keeper: &dyn Fn(&'static str) -> Result<Keeper>,
) -> Result<(&'static TargetType, Contents)> {
    let start = start_sector.saturating_mul(SECTOR);
    // A writecache has its superblock before that of a pcache, so it is looked for first.
    let found = caches_at(start).rev().find(|(_, cache)| (cache.is_at)(pmem, start));
    let (kind, cache) = found
        .or_else(|| caches_at(start).find(|(_, cache)| !cache.has_metadata_device))
        .expect("one may begin anywhere");
    Ok((kind, (cache.inspect)(pmem, start, &keeper(kind.name)?)?))
}

/// The cache that begins at sector `start_sector` of `pmem`, and its type, if the device was cut
/// short.
pub fn cut_of(pmem: &Arc<dyn Pmem>, start_sector: u64) -> Option<(&'static TargetType, CutCache)> {
    let start = start_sector.saturating_mul(SECTOR);
    caches_at(start).rev().find_map(|(kind, cache)| Some((kind, (cache.cut_of)(pmem, start)?)))
}

impl TargetType {
    /// The table that attaches a cache of this `shape` for its recovery. Its device is as short as
    /// possible: write-back does not depend on how much of the origin clients could see.
    pub fn recovery_table(&self, shape: &Shape, asked: &Recovery<'_>) -> String {
        let mut words = shape.words.iter();
        let mut table = format!("0 {} {}", shape.sectors, self.name);
        for role in self.roles {
            let word = match role {
                WordRole::Cache => Word::new(asked.cache).quoted(),
                WordRole::Origin => Word::new(asked.origin).quoted(),
                _ => words.next().cloned().unwrap_or_default(),
            };
            table += &format!(" {word}");
        }
        words.for_each(|word| table += &format!(" {word}"));
        let options = [
            (asked.accepts_damage, self.cache.as_ref().map(|cache| cache.words_to_accept_damage)),
            (asked.rebinds, Some("rebind true")),
            (asked.accepts_loss, Some("lost_memory accept")),
        ];
        for (_, option) in options.iter().filter(|(is_asked, _)| *is_asked) {
            option.iter().for_each(|option| table += &format!(" {option}"));
        }
        table
    }
}
