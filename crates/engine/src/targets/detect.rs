//! Caches recognised by their medium: the contents of a cache device, and the table that attaches
//! it again to bring its origin up to date.

use super::{Setup, TARGETS, TargetType, WordRole};
use crate::common::contents::{Contents, NOT_BY_FORCE, Shape, has_more};
use crate::error::{Error, Kind as ErrorKind, Result};
use crate::pmem::Pmem;
use crate::recovery::Cut;
use crate::shm::{Served, SharedStore};
use crate::sync::Arc;
use crate::table::{DeviceWord, TableLine, Word};
use crate::units::{SECTOR, human_bytes};

/// Reads the last attach of the cache at a byte of a medium, and its server if that died.
type AttachOf = fn(&Arc<dyn Pmem>, u64, &SharedStore) -> Option<(u64, Option<Served>)>;

/// How caches of one type are recognised and read by their medium.
#[derive(Debug)]
pub struct CacheType {
    /// The version of the format.
    pub format_version: u32,
    /// Whether a cache can begin elsewhere than at the device's first byte.
    pub begins_anywhere: bool,
    /// Whether dirty data is found by a log, which can end early.
    pub has_log: bool,
    /// Whether its mapping is on a separate device, which is then the device to inspect.
    pub has_metadata_device: bool,
    /// Table arguments that accept the loss of a damaged part of the dirty data.
    pub words_to_accept_damage: &'static str,
    /// The options by which a user allows something for one attach. Each has one value.
    pub consents: &'static [&'static str],
    /// The position, after the target's name, of the number of optional words, if these options may
    /// be among the counted ones.
    pub consents_are_counted_at: Option<usize>,
    /// How such a cache is set up in one step.
    pub setup: Setup,
    /// The shape of the cache at the device's first byte; `None` if it cannot be read.
    pub(super) shape_of: fn(&Arc<dyn Pmem>) -> Option<Shape>,
    /// Whether such a cache begins at this byte.
    pub(super) is_at: fn(&Arc<dyn Pmem>, u64) -> bool,
    /// The last attach of such a cache: a number that tells it from other caches, and the server,
    /// if that server did not end in order.
    pub(super) attach_of: AttachOf,
    /// The contents of such a cache, by reading alone.
    pub(super) inspect: fn(&Arc<dyn Pmem>, u64, &SharedStore) -> Result<Contents>,
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

/// The marks that tell the medium of a cache from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The record of its last attach; `None` if the medium is damaged there.
    pub attach: Option<u64>,
    /// The server that had it, if that did not end in order.
    pub served: Option<Served>,
}

/// The device by which a line's cache is recognised, opened with `open`, and its mark. No mark: the
/// device holds no cache of this type. `None`: a line without a cache.
pub fn mark_of(
    line: &TableLine,
    open: &dyn Fn(&DeviceWord) -> Result<Arc<dyn Pmem>>,
    shared_store: &dyn Fn(&'static str) -> Result<SharedStore>,
) -> Option<(DeviceWord, Result<Option<Mark>>)> {
    let kind = super::find(&line.target.text)?;
    let cache = kind.cache.as_ref()?;
    let role = if cache.has_metadata_device { WordRole::Metadata } else { WordRole::Cache };
    let device = line.args.get(kind.places(&[role]).next()?)?.device().ok()?;
    let start = if cache.begins_anywhere { start_of(line) } else { 0 };
    let mark = || {
        let (pmem, shared_store) = (open(&device)?, shared_store(kind.name)?);
        if !(cache.is_at)(&pmem, start) {
            return Ok(None);
        }
        let (attach, served) = (cache.attach_of)(&pmem, start, &shared_store).unzip();
        Ok(Some(Mark { attach, served: served.flatten() }))
    };
    let mark = mark();
    Some((device, mark))
}

/// The byte at which the cache of a line begins.
pub(super) fn start_of(line: &TableLine) -> u64 {
    let mut words = line.args.iter().skip_while(|word| word.text != "start_sector");
    let sector = words.nth(1).and_then(|word| word.text.parse::<u64>().ok());
    sector.unwrap_or(0).saturating_mul(SECTOR)
}

/// A user's options for a recovery.
#[derive(Clone, Debug)]
pub struct RecoveryRequest<'a> {
    /// The cache device.
    pub cache: &'a str,
    /// The origin.
    pub origin: &'a str,
    /// Whether the user accepts damage that hides a part of the dirty data.
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

/// The contents and the type of the cache that begins at sector `start_sector` of `pmem`. `keeper`
/// finds the shared memory of the type's servers.
///
/// If the device holds no cache, the error names the missing part of the first type that could be
/// there.
pub fn inspect(
    pmem: &Arc<dyn Pmem>,
    start_sector: u64,
    shared_store: &dyn Fn(&'static str) -> Result<SharedStore>,
) -> Result<(&'static TargetType, Contents)> {
    let start = start_sector.saturating_mul(SECTOR);
    let found = kind_at(pmem, start_sector).and_then(|kind| Some((kind, kind.cache.as_ref()?)));
    let (kind, cache) = found
        .or_else(|| caches_at(start).find(|(_, cache)| !cache.has_metadata_device))
        .expect("one may begin anywhere");
    Ok((kind, (cache.inspect)(pmem, start, &shared_store(kind.name)?)?))
}

/// The type of the cache that begins at sector `start_sector` of `pmem`.
pub(super) fn kind_at(pmem: &Arc<dyn Pmem>, start_sector: u64) -> Option<&'static TargetType> {
    let start = start_sector.saturating_mul(SECTOR);
    // A writecache has its superblock before a pcache's superblock, so it is looked for first.
    let found = caches_at(start).rev().find(|(_, cache)| (cache.is_at)(pmem, start));
    found.map(|(kind, _)| kind)
}

/// An error unless the cache of type `kind` on `pmem` is known to be clean.
pub(super) fn refuse_dirty(
    kind: &'static TargetType,
    pmem: &Arc<dyn Pmem>,
    start_sector: u64,
    shared_store: &dyn Fn(&'static str) -> Result<SharedStore>,
) -> Result<()> {
    let refused = |what: &str| {
        let what = format!("it holds a {}, {what}; {NOT_BY_FORCE}", kind.name);
        Err(Error::new(ErrorKind::Refused, what))
    };
    let contents = match inspect(pmem, start_sector, shared_store) {
        Ok((_, contents)) => contents,
        Err(error) => return refused(&format!("which is damaged ({error})")),
    };
    if has_more(contents.served.as_ref()) {
        return refused("whose server was killed: some writes may be only in shared memory");
    }
    match contents.dirty_bytes() {
        Some(0) => Ok(()),
        Some(dirty) => {
            refused(&format!("with {} of dirty data, which only the cache has", human_bytes(dirty)))
        }
        None => refused("which is damaged, and may have dirty data"),
    }
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
    pub fn recovery_table(&self, shape: &Shape, asked: &RecoveryRequest<'_>) -> String {
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
