//! The types of targets: one description for each, like the kernel's `struct target_type`, with the
//! facts that commands need.
//!
//! | file | content |
//! |---|---|
//! | this one | the type of a description, and the list of descriptions |
//! | `simple`, `pcache`, `writecache`, `cache` | the descriptions: how each type is opened |
//! | `opening` | how the lines of one table share open devices |
//! | `setup`, `carve` | from an origin and a fast device to the line of a table |
//! | `consent` | options by which a user allows something once |
//! | `detect` | caches recognised by their medium: their contents and their recovery |
//!
//! To add a target, add a folder with its engine and a description here.

mod cache;
mod carve;
mod consent;
mod detect;
mod opening;
mod pcache;
mod setup;
mod simple;
mod writecache;

use crate::base::limits::Limit;
use crate::disk::{Disk, DiskLimits};
use crate::error::{Kind, Result};
use crate::pmem::Pmem;
use crate::recovery::{Recovery, Survey};
use crate::shm::SharedStore;
use crate::sync::Arc;
use crate::table::{DeviceWord, TableLine, Word};
use crate::target::Target;

pub use consent::{Consent, add_consent, find_consent, without_all_consents, without_consents};
pub use detect::{CacheType, CutCache, Mark, RecoveryRequest, caches, cut_of, inspect, mark_of};
pub use opening::{BuildOptions, Opener};
pub(crate) use opening::{LinePlace, Opening, refuse_read_only};
pub use setup::{CacheMode, Fast, Setup, Wanted, chosen_for, held};

/// A type of target.
#[derive(Debug)]
pub struct TargetType {
    /// Its name in table lines.
    pub name: &'static str,
    /// The version of the kernel's target whose tables it takes.
    pub version: &'static str,
    /// The words after the name, for people.
    pub words: &'static str,
    /// The demands of the type on tables.
    pub features: Features,
    /// The roles of the first words after the name, as far as code outside the target needs them.
    pub roles: &'static [WordRole],
    /// The fields of its status line, in order: name and meaning.
    pub status_fields: &'static [(&'static str, &'static str)],
    /// Its stated maxima.
    pub limits: fn() -> Vec<Limit>,
    /// For a cache: the facts that udm finds from its medium alone.
    pub cache: Option<CacheType>,
    /// Parses the words of a line. Opens no device.
    plan: fn(&[Word]) -> Result<Box<dyn Plan>>,
}

/// The device mapper's own features of target types, as far as udm's targets have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// It must be the only target of its table (`DM_TARGET_SINGLETON`).
    pub is_singleton: bool,
    /// A table with it cannot be replaced by another one (`DM_TARGET_IMMUTABLE`), nor can it
    /// replace one, which goes further than the kernel's feature.
    pub is_immutable: bool,
}

/// The role of a word of a table line, for code outside the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordRole {
    /// It names a device that holds data permanently.
    Origin,
    /// The start of the data on that device.
    Offset,
    /// It names a cache device.
    Cache,
    /// It names a device with the metadata of a cache.
    Metadata,
    /// It names a device that is not used.
    Unused,
    /// Something else.
    Other,
}

/// Every type of target.
pub const TARGETS: [&TargetType; 8] = [
    &cache::CACHE,
    &simple::DELAY,
    &simple::ERROR,
    &simple::FLAKEY,
    &simple::LINEAR,
    &pcache::PCACHE,
    &writecache::WRITECACHE,
    &simple::ZERO,
];

/// The type of this name.
pub fn find(name: &str) -> Option<&'static TargetType> {
    TARGETS.into_iter().find(|known| known.name == name)
}

/// The features of targets of this name; none, if there is no such type.
pub(crate) fn features(name: &str) -> Features {
    find(name).map_or_else(Features::default, |known| known.features)
}

impl TargetType {
    fn begins_anywhere(&self) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.begins_anywhere)
    }

    /// The positions of the words, after the name, that have one of these roles.
    pub fn places(&self, roles: &[WordRole]) -> impl Iterator<Item = usize> {
        let places = self.roles.iter().enumerate().filter(|(_, role)| roles.contains(role));
        places.map(|(place, _)| place)
    }
}

/// A line whose words are parsed.
pub(crate) trait Plan {
    /// Opens the devices and makes the target.
    fn open(&self, line: &TableLine, opening: &mut Opening<'_>) -> Result<Arc<dyn Target>>;

    /// The line as a cache line, if it is one.
    fn cache(&self) -> Option<&dyn CachePlan> {
        None
    }

    /// The data that the line's cache holds for its origin, found by reading alone; for a cache
    /// that is not on one device.
    fn survey(&self, _: &mut Opening<'_>) -> Result<Option<Survey>> {
        Ok(None)
    }

    /// Wipes the line's cache, which no server serves and which must be clean.
    fn wipe(&self, _: &mut Opening<'_>) -> Result<()> {
        Ok(())
    }
}

/// The line of a cache on one device.
pub(crate) trait CachePlan {
    /// The cache device.
    fn cache(&self) -> &DeviceWord;

    /// The slow device.
    fn origin(&self) -> &DeviceWord;

    /// Wipes the cache, which is closed, clean, and belongs to the origin that `limits` describes;
    /// refuses otherwise. Afterwards its device is not recognised as a cache and is free for other
    /// uses.
    fn wipe(
        &self,
        opening: &mut Opening<'_>,
        shared_store: &SharedStore,
        limits: &DiskLimits,
    ) -> Result<()>;

    /// The dirty data that the cache on `pmem` has for `origin`, by reading alone.
    fn recover(
        &self,
        pmem: Arc<dyn Pmem>,
        shared_store: &SharedStore,
        options: &BuildOptions,
        origin: &Arc<dyn Disk>,
    ) -> Result<Recovery>;
}

/// A line, its type, and its parsed words.
pub(crate) struct Planned<'a> {
    kind: &'static TargetType,
    line: &'a TableLine,
    plan: Box<dyn Plan>,
}

impl<'a> Planned<'a> {
    /// Parses `line`.
    pub fn of(line: &'a TableLine) -> Result<Planned<'a>> {
        let Some(kind) = find(&line.target.text) else {
            let message = format!("unknown target type; there are {}", names().join(", "));
            return Err(line.target.error(Kind::Invalid, message));
        };
        // An error about missing words points after the target's name.
        let plan = (kind.plan)(&line.args).map_err(|error| match error.place() {
            None => line.target.point_behind(error),
            Some(_) => error,
        })?;
        Ok(Planned { kind, line, plan })
    }

    /// An error if this must be the only line, and is one of `lines`.
    pub fn check_alone(&self, lines: usize) -> Result<()> {
        if self.kind.features.is_singleton && lines > 1 {
            let message = "must be the only target of its table";
            return Err(self.line.target.error(Kind::Invalid, message));
        }
        Ok(())
    }

    /// Opens the line's devices and makes its target; for a cache that may only be read, a view.
    pub fn open(&self, opening: &mut Opening<'_>) -> Result<Arc<dyn Target>> {
        opening.begin_line(self.place());
        match self.plan.cache() {
            Some(cache) if cache.cache().options.is_read_only => {
                opening.view(self.kind.name, self.line, cache)
            }
            _ => self.plan.open(self.line, opening),
        }
    }

    /// Where the line is, and where on its devices its data is.
    fn place(&self) -> LinePlace {
        let TableLine { start, len, args, .. } = self.line;
        let offset = |nth: usize| {
            let follows = self.kind.roles.get(nth + 1) == Some(&WordRole::Offset);
            args.get(nth + 1).filter(|_| follows).and_then(|word| word.text.parse().ok())
        };
        let devices = self
            .kind
            .places(&[WordRole::Origin, WordRole::Cache])
            .filter_map(|nth| Some((args.get(nth)?.text.clone(), offset(nth).unwrap_or(0))));
        LinePlace { start: *start, len: *len, devices: devices.collect() }
    }

    /// Wipes the line's cache, if it has one.
    pub fn wipe(&self, opening: &mut Opening<'_>) -> Result<()> {
        match self.plan.cache() {
            Some(cache) => opening.wipe(self.kind.name, cache)?,
            None => self.plan.wipe(opening)?,
        }
        // The rest of the device still holds clients' data, and must not be mistaken for another
        // client's data.
        let media = [WordRole::Cache, WordRole::Metadata];
        let start = if self.kind.begins_anywhere() { detect::start_of(self.line) } else { 0 };
        let words = self.kind.places(&media).filter_map(|place| self.line.args.get(place));
        words.map(Word::device).try_for_each(|word| opening.blank(&word?, start))
    }

    /// The dirty data that the line's cache holds for its origin; `None` without a cache.
    pub fn survey(&self, opening: &mut Opening<'_>) -> Result<Option<Survey>> {
        let Some(cache) = self.plan.cache() else { return self.plan.survey(opening) };
        let origin = opening.disk(cache.origin())?;
        Ok(Some(opening.recover(self.kind.name, cache, &origin)?.survey()))
    }

    /// The line as a cache line and its target's name, if it is one.
    pub fn cache(&self) -> Option<(&'static str, &dyn CachePlan)> {
        self.plan.cache().map(|cache| (self.kind.name, cache))
    }
}

fn names() -> Vec<&'static str> {
    TARGETS.iter().map(|known| known.name).collect()
}

/// Boxes the parsed words of a line.
fn boxed<P: Plan + 'static>(plan: Result<P>) -> Result<Box<dyn Plan>> {
    Ok(Box::new(plan?))
}
