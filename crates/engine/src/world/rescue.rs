//! Caches that are not to be changed: `?readonly` behind the names of both devices, or a recovery
//! of one that was cut short. See `rescue`.

use super::{BOTH_OR_NONE, Builder, DeviceWord, Opener, Plan, plan, refuse_read_only};
use crate::disk::{Disk, DiskLimits};
use crate::error::{Error, Kind, Result};
use crate::pcache;
use crate::rescue::{Salvage, View};
use crate::sync::Arc;
use crate::table::{Table, TableLine, Word};
use crate::target::Target;
use crate::units::human_pair;
use crate::writecache;

/// The cache of a table line, whose devices may only be read.
pub(super) enum Args {
    Pcache(pcache::TableArgs),
    Writecache(writecache::TableArgs),
}

impl Args {
    fn target(&self) -> &'static str {
        match self {
            Args::Pcache(_) => "pcache",
            Args::Writecache(_) => "writecache",
        }
    }
}

impl Builder<'_> {
    /// What the cache has for an origin.
    fn salvage(&self, args: &Args, cache: &DeviceWord, limits: &DiskLimits) -> Result<Salvage> {
        let cache = self.resolved(cache)?;
        let pmem = self.opener.rest(&cache).map_err(|error| cache.word.point(error))?;
        let keeper = self.opener.keeper(args.target(), &cache.path);
        match args {
            Args::Pcache(args) => {
                let geometry = self.options.geometry.unwrap_or(pcache::layout::Geometry::KERNEL);
                pcache::salvage::salvage(args, pmem, &keeper, geometry, limits)
            }
            Args::Writecache(args) => writecache::salvage::salvage(args, pmem, &keeper, limits),
        }
    }

    /// A cache and its origin, to read.
    pub(super) fn view(
        &mut self,
        line: &TableLine,
        args: &Args,
        cache: &DeviceWord,
        origin: &DeviceWord,
    ) -> Result<Arc<dyn Target>> {
        if !origin.options.is_read_only {
            return Err(origin.error(Kind::Invalid, BOTH_OR_NONE));
        }
        let disk = self.disk(origin)?;
        let limits = disk.limits();
        if line.len_bytes() > limits.size_bytes {
            let (len, size) = human_pair(line.len_bytes(), limits.size_bytes);
            let message = format!("the table is {len} long, but {} has {size}", limits.name);
            return Err(origin.error(Kind::Invalid, &message));
        }
        let salvage = self.salvage(args, cache, limits)?;
        let words: Vec<String> = line.args.iter().map(Word::quoted).collect();
        Ok(Arc::new(View::new(args.target(), words.join(" "), salvage, disk)))
    }
}

/// What the cache of `table`, which has one line, has for its origin, and that origin, to write to.
/// The cache device is opened to read, and stays as it is.
pub fn salvage(table: &Table, opener: &dyn Opener) -> Result<(Salvage, Arc<dyn Disk>)> {
    let options = super::BuildOptions::default();
    let mut builder = Builder::new(opener, &options);
    let (args, cache, origin) = match plan(table)?.pop() {
        Some(Plan::Pcache { args, cache, backing }) => (Args::Pcache(args), cache, backing),
        Some(Plan::Writecache { args, cache, origin }) => (Args::Writecache(args), cache, origin),
        _ => return Err(Error::new(Kind::Invalid, "the table has no cache")),
    };
    refuse_read_only(&origin)?;
    let disk = builder.disk(&origin)?;
    let salvage = builder.salvage(&args, &cache, disk.limits())?;
    Ok((salvage, disk))
}
