//! The backing device, compared with the stamp on the label (see `disk/stamp`).
//!
//! 1. An attach stores a label without a stamp before the first request. So a server that dies
//!    leaves no stamp, and a stamp counts only if no kernel has used the cache since, which would
//!    change cache_info.
//! 2. If the backing device was changed, and the cache is clean, the cache is formatted.
//! 3. If the cache is dirty, the attach is refused, unless the user declares that the dirty data
//!    counts. Then key_tail passes all keys that were written back, and the label records that
//!    CLEAN keys after it are stale: each attach ignores clean data, until one finds the cache
//!    clean and formats it.

use zerocopy::IntoBytes;

use crate::disk::{Disk, DiskLimits, Recorded, Refused, Same};
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;
use crate::units::human_bytes;

use super::args::TableArgs;
use super::attach::{Replayed, Structures, has_data_crc};
use super::label::{Label, Serving};
use super::media::Media;

/// The option that accepts another backing device, or a changed one.
const REMEDY: &str = "add `rebind true` to the table";

/// What an attach makes of its backing device.
#[derive(Clone, Debug)]
pub(super) struct Backing {
    limits: DiskLimits,
    /// Whether it is the device, as the label says.
    same: Same,
    /// Clean data in the log does not count.
    pub(super) drops_clean: bool,
}

impl Backing {
    /// Compares `disk` with the label of the cache.
    pub(super) fn of(disk: &Arc<dyn Disk>, found: &Structures) -> Backing {
        let limits = disk.limits().clone();
        let Some((label, _)) = &found.label else {
            return Backing { limits, same: Same::CannotTell, drops_clean: false };
        };
        let recorded = Recorded {
            identity: label.compare(&limits),
            stamp: label.stamp.filter(|_| label.info == *found.info.record.as_bytes()),
            bytes: label.backing_bytes,
        };
        let same = Same::of(disk, &recorded);
        Backing { limits, same, drops_clean: label.is_stale || !same.has_its_data() }
    }

    /// Checks that table, cache and backing device belong together.
    pub(super) fn check_binding(
        &self,
        media: &Media,
        found: &Structures,
        args: &TableArgs,
    ) -> Result<()> {
        let stored = has_data_crc(&found.info.record);
        if args.has_data_crc != stored {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "pcache: {}: invalid option for data_crc: the cache was formatted with \
                     data_crc {stored}, the table says {}",
                    media.name(),
                    args.has_data_crc
                ),
            ));
        }
        let Some((label, _)) = &found.label else { return Ok(()) };
        if !matches!(self.same, Same::Another { .. }) {
            return Ok(());
        }
        let refused = self.refused(media.name(), &label.identity, Some(label.backing_bytes), "");
        self.refuse(args, &refused)
    }

    /// An error if the device was changed, and the cache has `dirty` bytes or less for it.
    pub(super) fn check(&self, args: &TableArgs, dirty: u64) -> Result<()> {
        let dirty = format!("up to {}", human_bytes(dirty));
        self.refuse(args, &self.refused("the cache", "", None, &dirty))
    }

    fn refused<'a>(
        &'a self,
        cache: &'a str,
        known: &'a str,
        known_bytes: Option<u64>,
        dirty: &'a str,
    ) -> Refused<'a> {
        let (disk, role) = (&self.limits, "backing device");
        Refused { cache, disk, role, known, known_bytes, dirty, remedy: REMEDY }
    }

    fn refuse(&self, args: &TableArgs, refused: &Refused<'_>) -> Result<()> {
        match self.same.refusal(refused) {
            Some(what) if !args.rebinds => {
                Err(Error::new(Kind::Refused, format!("pcache: {what}")))
            }
            _ => Ok(()),
        }
    }

    /// After the survey of the log: an error if dirty data must not be written to this device; a
    /// note if the cache holds no data that counts, and is to be formatted.
    pub(super) fn judge(
        &self,
        args: &TableArgs,
        found: &Structures,
        replayed: &mut Replayed,
    ) -> Result<Option<String>> {
        if !self.drops_clean {
            return Ok(None);
        }
        // A server that died may have left dirty data in memory.
        let label = found.label.as_ref().map(|(label, _)| label);
        let is_served = |label: &Label| label.served.as_ref().is_some_and(Serving::has_memory);
        let has_more = label.is_some_and(|label| !label.bad.is_empty() || is_served(label));
        let dirty = replayed.counts.dirty_bytes;
        let note = match self.same {
            Same::Changed(_) => self.same.dropped(&self.limits.name),
            _ => format!(
                "the clean data in the cache does not belong to {}, and is dropped",
                self.limits.name
            ),
        };
        if dirty == 0 && !has_more {
            let is_empty = found.key_tail.position == replayed.head;
            return Ok((!is_empty).then_some(note));
        }
        self.check(args, dirty)?;
        replayed.notes.push(note);
        Ok(None)
    }
}
