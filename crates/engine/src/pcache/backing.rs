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

use crate::disk::{Disk, Standing};
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;
use crate::units::human_bytes;

use super::args::TableArgs;
use super::attach::{Replayed, Structures};

/// What an attach makes of its backing device.
#[derive(Clone, Debug)]
pub(super) struct Backing {
    name: String,
    standing: Standing,
    /// Clean data in the log does not count.
    pub(super) drops_clean: bool,
}

impl Backing {
    /// Compares `disk` with the label of the cache.
    pub(super) fn of(disk: &Arc<dyn Disk>, found: &Structures) -> Backing {
        let limits = disk.limits();
        let name = limits.name.clone();
        let Some((label, _)) = &found.label else {
            return Backing { name, standing: Standing::Unknown, drops_clean: false };
        };
        let is_moved = !label.is_bound_to(&limits.identity, limits.size_bytes);
        let stamp = label.stamp.filter(|_| label.info == *found.info.record.as_bytes());
        let standing = Standing::of(disk, stamp, label.backing_bytes, is_moved);
        let is_same = match standing {
            Standing::Same => true,
            Standing::Changed(_) => false,
            Standing::Unknown => !is_moved,
        };
        Backing { name, standing, drops_clean: label.is_stale || !is_same }
    }

    /// An error if the device was changed, and the cache has `dirty` bytes or less for it.
    pub(super) fn check(&self, args: &TableArgs, dirty: u64) -> Result<()> {
        let remedy = "add `rebind true` to the table";
        let dirty = format!("up to {}", human_bytes(dirty));
        match self.standing.refusal(&self.name, &dirty, remedy) {
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
        let has_more = label.is_some_and(|label| !label.bad.is_empty() || label.served.is_some());
        let dirty = replayed.counts.dirty_bytes;
        let note = match self.standing {
            Standing::Changed(_) => self.standing.dropped(&self.name),
            _ => format!(
                "the clean data in the cache does not belong to {}, and is dropped",
                self.name
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
