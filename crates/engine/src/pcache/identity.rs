//! The records that identify a cache on its medium while it is served: the label, cache_info, and
//! values of the superblock.

use zerocopy::IntoBytes;

use crate::disk::Stamp;
use crate::error::{Result, Status};
use crate::mutants::{self, Mutant};
use crate::pcache::slots::SlotState;
use crate::shm::SharedWords;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Mutex, lock};

use super::attach::Structures;
use super::label::{BadRange, Label, Serving};
use super::layout::{
    CACHE_INFO_AT, CacheInfo, INFO_GC_SHIFT, PAGE_STRIDE, Position, gc_percent_of,
};
use super::media::{Found, Media};
use super::openset::OpenSets;

/// The records that are stored again while the cache is in use.
#[derive(Debug)]
pub(super) struct Identity {
    media: Media,
    label: Mutex<(Label, SlotState)>,
    info: Mutex<Found<CacheInfo>>,
    /// cache_info's flags, to be read without the lock.
    flags: AtomicU32,
    superblock_flags: u32,
    seg_num: u32,
}

impl Identity {
    /// The identity of a cache with this label, in the state that was found.
    pub(super) fn new(media: &Media, found: &Structures, label: (Label, SlotState)) -> Identity {
        Identity {
            media: media.clone(),
            label: Mutex::new(label),
            info: Mutex::new(found.info),
            flags: AtomicU32::new(found.info.record.flags.get()),
            superblock_flags: found.superblock.flags.get(),
            seg_num: found.superblock.seg_num.get(),
        }
    }

    /// cache_info's flags.
    pub(super) fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    /// The percentage of segments in use at which collection begins.
    pub(super) fn gc_percent(&self) -> u32 {
        gc_percent_of(self.flags())
    }

    /// Flags and segments, as the superblock has them.
    pub(super) fn superblock(&self) -> (u32, u32) {
        (self.superblock_flags, self.seg_num)
    }

    /// Changes the label and stores it.
    fn store_label(&self, change: impl FnOnce(&mut Label)) -> std::result::Result<(), Status> {
        let (label, slot) = &mut *lock(&self.label);
        change(label);
        label.store(&self.media, slot)
    }

    /// The same in both slots.
    fn store_label_twice(
        &self,
        change: impl FnOnce(&mut Label),
    ) -> std::result::Result<(), Status> {
        let (label, slot) = &mut *lock(&self.label);
        change(label);
        label.store_twice(&self.media, slot)
    }

    /// For a mutant: the label that an attach stores before the first request.
    pub(super) fn say_served(&self) {
        let boot = self.media.shared.as_ref().map_or(0, SharedWords::boot);
        let serving = Serving { boot, place: "unknown".into() };
        let _ = self.store_label_twice(|label| label.served = Some(serving));
    }

    /// Records that the server of the cache ended, with the stamp of its backing device. Returns
    /// whether that succeeded.
    pub(super) fn say_at_rest(&self, stamp: Option<Stamp>) -> bool {
        let rests = |label: &mut Label| (label.served, label.stamp) = (None, stamp);
        self.store_label_twice(rests).is_ok()
    }

    /// Bytes of the backing device when it was attached.
    pub(super) fn backing_bytes(&self) -> u64 {
        lock(&self.label).0.backing_bytes
    }

    /// Write-back that crosses flush marks is in progress up to this position.
    pub(super) fn store_torn(&self, until: Option<Position>) -> std::result::Result<(), Status> {
        if mutants::is(Mutant::TornOriginUnlabelled) {
            lock(&self.label).0.torn_until = until;
            return Ok(());
        }
        self.store_label(|label| label.torn_until = until)
    }

    /// Write-back has passed this position. The next store of the label, for any reason, also drops
    /// it there.
    pub(super) fn forget_torn(&self) {
        lock(&self.label).0.torn_until = None;
    }

    /// Stores these ranges as bad.
    pub(super) fn store_bad(&self, bad: Vec<BadRange>) -> std::result::Result<(), Status> {
        self.store_label(|label| label.bad = bad)
    }

    /// Stores the percentage of segments in use at which collection begins. The record must be in
    /// the memory of the open sets, and in the label, before it can be found on media.
    pub(super) fn set_gc_percent(&self, percent: u32, open: &OpenSets) -> Result<()> {
        let mut info = lock(&self.info);
        let next = info.slot.next();
        let flags = info.record.flags.get() & !(0x7F << INFO_GC_SHIFT) | percent << INFO_GC_SHIFT;
        let record = CacheInfo::new(
            next.seq,
            info.record.first_segment.get(),
            info.record.n_segs.get(),
            flags,
        );
        let failed =
            |status: Status| self.media.damaged(format_args!("cannot store cache_info: {status}"));
        open.announce_info(&record);
        self.media.store_slot(CACHE_INFO_AT, PAGE_STRIDE, next, &record).map_err(failed)?;
        open.confirm_info(&record);
        info.record = record;
        info.slot = next;
        self.flags.store(flags, Ordering::Relaxed);
        self.store_label(|label| label.info.copy_from_slice(record.as_bytes())).map_err(failed)
    }
}
