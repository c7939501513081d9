//! The note of the origin in the metadata: the stamp that a cache stores at its end, and the checks
//! of the next attach (see `disk/stamp`).
//!
//! 1. Before a cache is served, or written back at rest, the note is removed, durably. So a server
//!    that dies leaves none.
//! 2. The note is written when the cache has come to rest and the origin is flushed.
//! 3. If the origin was changed meanwhile, clean blocks are dropped before the first request, and
//!    an attach with dirty blocks is refused, unless the user declares that they count.

use super::Cache;
use super::binding;
use super::binding::Devices;
use super::metadata::superblock::OriginNote;
use super::metadata::{Change, Contents, Superblock};
use crate::disk::{Disk, Recorded, Refused, Same, Stamp};
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;
use crate::units::{SECTOR, human_bytes};

/// The answer for the origin, by the note and the mark of the metadata.
pub(super) fn same(devices: &Devices, superblock: &Superblock) -> Same {
    let [_, identity] = binding::compare(devices, superblock);
    let note = superblock.note;
    let (stamp, bytes) = (note.map(|note| note.stamp), note.map_or(0, |note| note.bytes));
    Same::of(&devices.origin, &Recorded { identity, stamp, bytes })
}

/// An error if the origin was changed and some of `contents` is dirty. `remedy`: the option that
/// writes it back nevertheless.
pub(super) fn check(
    same: Same,
    devices: &Devices,
    superblock: &Superblock,
    contents: &Contents,
    remedy: &str,
) -> Result<()> {
    let block_bytes = u64::from(superblock.fields.data_sectors.get()) * SECTOR;
    let dirty = contents.dirty.ones();
    if dirty == 0 {
        return Ok(());
    }
    let dirty = human_bytes(dirty * block_bytes);
    let refused = Refused {
        cache: &devices.metadata.limits().name,
        disk: devices.origin.limits(),
        role: "origin",
        known: "",
        known_bytes: superblock.note.map(|note| note.bytes),
        dirty: &dirty,
        remedy,
    };
    let refusal = same.refusal(&refused);
    refusal.map_or(Ok(()), |what| Err(Error::new(Kind::Refused, format!("cache: {what}"))))
}

/// Drops the clean blocks of a cache whose origin has changed. Returns whether there were any.
pub(super) fn drop_clean(contents: &mut Contents) -> bool {
    let mut has_dropped = false;
    for slot in 0..contents.slots() {
        if contents.block(slot).is_some() && !contents.dirty.is_set(slot) {
            contents.mappings[slot as usize] = 0;
            has_dropped = true;
        }
    }
    has_dropped
}

/// The note of an origin at rest.
pub(super) fn note_of(origin: &Arc<dyn Disk>) -> Option<OriginNote> {
    let bytes = origin.limits().size_bytes;
    Stamp::at_end(origin, bytes).map(|stamp| OriginNote { stamp, bytes })
}

impl Cache {
    /// The server ends: the metadata gets the note of the origin, if the cache is at rest and the
    /// medium has its exact state. If that fails, the metadata gets no note. Returns whether they
    /// have one.
    pub(super) fn end(&self) -> bool {
        let trouble = self.blocks().trouble;
        let is_in_trouble = trouble.has_lost || trouble.is_stuck || trouble.doubts > 0;
        let mut state = self.commits.lock();
        let is_at_rest = state.is_idle() && state.has_rested;
        if self.orders.has_handed_over() {
            return true;
        }
        if is_in_trouble || !is_at_rest {
            return false;
        }
        let Some(note) = note_of(self.origin.disk()) else { return false };
        let mut superblock = state.writer.superblock().clone();
        superblock.note = Some(note);
        let prepared = state.writer.prepare(&Change::of_superblock(superblock));
        let Ok(mut transaction) = prepared else { return false };
        let carried_out = transaction.carry_out(&self.metadata);
        let is_stored = carried_out.is_ok();
        match carried_out {
            Ok(()) => state.writer.committed(transaction),
            Err((_, reached)) => state.writer.abandoned(transaction, reached),
        }
        is_stored
    }
}
