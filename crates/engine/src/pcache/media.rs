//! The cache device as structures instead of bytes: typed loads and stores, two-slot records, and
//! the errors that mean that the medium itself failed.

use crate::error::{Error, Kind, Result, Status};
use crate::mutants::{self, Mutant};
use crate::pcache::slots::{SlotState, choose};
use crate::pmem::Pmem;
use crate::recovery::{CUT_ADVICE, Cut};
use crate::shm::SharedWords;
use crate::sync::Arc;
use crate::units::{MIB, SECTOR};

use super::layout::{
    Geometry, SEGMENTS_MAX, SUPERBLOCK_AT, SUPERBLOCK_MAGIC, Sealed, Slotted, Superblock,
};
use super::openset::{LogEnd, announce_end, confirm_end, note_failure};

/// A cache device and the size of its segments.
#[derive(Clone, Debug)]
pub struct Media {
    /// The memory.
    pub pmem: Arc<dyn Pmem>,
    /// The kernel's, except in tests.
    pub geometry: Geometry,
    /// Memory that outlives the process, in which a failure of the medium is recorded.
    pub shared: Option<SharedWords>,
}

/// A two-slot record as found on media.
#[derive(Clone, Copy, Debug)]
pub struct Found<T> {
    /// The current record.
    pub record: T,
    /// The current slot.
    pub slot: SlotState,
}

impl Media {
    /// The name for messages.
    pub fn name(&self) -> &str {
        &self.pmem.medium().name
    }

    /// An error about a place on this medium.
    pub fn damaged(&self, what: impl std::fmt::Display) -> Error {
        Error::new(Kind::Io, format!("{}: {what}", self.name()))
    }

    /// Reads a structure; the error names its address if the medium fails.
    pub fn load<T: Sealed>(&self, at: u64) -> Result<T> {
        let mut value = T::new_zeroed();
        self.pmem
            .load(at, value.as_mut_bytes())
            .map_err(|status| self.damaged(format_args!("cannot read byte {at}: {status}")))?;
        Ok(value)
    }

    /// Reads both slots of a record and chooses the current one. A slot that cannot be read is
    /// like one with a wrong CRC: the other may be good.
    pub fn load_slots<T: Slotted>(&self, at: u64, stride: u64) -> Option<Found<T>> {
        let read = |nth: u64| self.load::<T>(at + nth * stride).ok().filter(T::is_sealed);
        let slots = [read(0), read(1)];
        let current = choose(slots[0].map(|slot| slot.seq()), slots[1].map(|slot| slot.seq()))?;
        let record = slots[current].expect("only a valid slot is chosen");
        Some(Found { record, slot: SlotState { current, seq: record.seq() } })
    }

    /// Stores bytes that this thread's next [`Media::settle`] makes durable.
    pub fn store(&self, at: u64, bytes: &[u8]) {
        self.pmem.store(at, bytes);
    }

    /// Stores a record into the slot that `slot` names, durably.
    pub fn store_slot<T: Slotted>(
        &self,
        at: u64,
        stride: u64,
        slot: SlotState,
        record: &T,
    ) -> std::result::Result<(), Status> {
        debug_assert_eq!(record.seq(), slot.seq);
        let is_between = mutants::is(Mutant::UpdateBetweenSlots);
        let stride = if is_between { size_of::<T>() as u64 } else { stride };
        self.pmem.store(at + slot.current as u64 * stride, record.as_bytes());
        self.settle()
    }

    /// Makes all earlier stores durable before any later store.
    pub fn settle(&self) -> std::result::Result<(), Status> {
        self.pmem.drain()?;
        self.sync()
    }

    /// Makes all drained stores durable. If it fails, and no later sync tries again, that is
    /// recorded for the next attach.
    pub fn sync(&self) -> std::result::Result<(), Status> {
        self.pmem.sync().inspect_err(|_| {
            if let Some(shared) = self.shared.as_ref().filter(|_| self.pmem.has_given_up()) {
                note_failure(shared);
            }
        })
    }

    /// The log is about to end there.
    pub fn announce_end(&self, end: LogEnd) {
        if let Some(shared) = &self.shared {
            announce_end(shared, end);
        }
    }

    /// The log ends there.
    pub fn confirm_end(&self, end: LogEnd) {
        if let Some(shared) = &self.shared {
            confirm_end(shared, end);
        }
    }

    /// Stores all data once more, durably. After a failed sync, data that can be read might
    /// otherwise never become durable. Refuses, with the `reason` of the call, if some data cannot
    /// be read: after a restart of the machine, all readable data is durable, and this is not
    /// needed.
    pub fn rewrite(&self, reason: &str) -> Result<()> {
        let mut bytes = vec![0; MIB as usize];
        for at in (0..self.pmem.len_bytes()).step_by(bytes.len()) {
            let bytes = &mut bytes[..(self.pmem.len_bytes() - at).min(MIB) as usize];
            self.pmem.load(at, bytes).map_err(|status| {
                self.damaged(format_args!(
                    "{reason}, and its data cannot be stored again: cannot read the MiB at byte \
                     {at}: {status}"
                ))
            })?;
            self.store_outside_holes(at, bytes);
        }
        self.settle_or_err()
    }

    /// Stores the sectors of a range that were no hole: zeroes in a hole would hide that data is
    /// missing, and may find the file system full.
    fn store_outside_holes(&self, at: u64, bytes: &[u8]) {
        if !self.pmem.was_hole(at, bytes.len() as u64) {
            return self.store(at, bytes);
        }
        let sectors = (at..).step_by(SECTOR as usize).zip(bytes.chunks(SECTOR as usize));
        let was_hole = |at: u64, sector: &[u8]| self.pmem.was_hole(at, sector.len() as u64);
        sectors
            .filter(|(at, sector)| !was_hole(*at, sector))
            .for_each(|(at, sector)| self.store(at, sector));
    }

    /// The first MiB of which some data cannot be read. The search does not fail the medium.
    pub fn first_unreadable(&self) -> Option<u64> {
        let mut bytes = vec![0; MIB as usize];
        (0..self.pmem.len_bytes()).step_by(bytes.len()).find(|at| {
            let len = (self.pmem.len_bytes() - at).min(MIB) as usize;
            self.pmem.probe(*at, &mut bytes[..len]).is_err()
        })
    }

    /// [`Media::settle`] with an error that names the medium.
    pub fn settle_or_err(&self) -> Result<()> {
        self.settle().map_err(|status| self.damaged(format_args!("cannot store: {status}")))
    }
}

/// How much of the device is missing.
pub fn missing(media: &Media) -> Option<Cut> {
    let len = media.pmem.len_bytes();
    let has_superblock = len >= SUPERBLOCK_AT + size_of::<Superblock>() as u64;
    let superblock: Superblock = has_superblock.then(|| media.load(SUPERBLOCK_AT).ok())??;
    let is_ours = superblock.magic.get() == SUPERBLOCK_MAGIC && superblock.is_sealed();
    let segments = superblock.seg_num.get();
    let is_sane = is_ours && u64::from(segments) <= SEGMENTS_MAX;
    let wanted = is_sane.then(|| media.geometry.segment_info_at(segments))?;
    // No cache was made on less than the smallest device, whatever its segments take.
    Cut::of(left_bytes(media, segments), wanted.max(media.geometry.device_bytes_min))
}

/// Bytes from the start that exist. The format writes to each segment, so a file whose last segment
/// is all hole was cut and extended to its old length.
fn left_bytes(media: &Media, segments: u32) -> u64 {
    let left = media.pmem.left_bytes();
    let last = segments.checked_sub(1).map(|last| media.geometry.segment_info_at(last));
    let hole = media.pmem.hole_at_end().filter(|hole| last.is_some_and(|last| *hole <= last));
    hole.map_or(left, |hole| hole.min(left))
}

/// Added to an error about a small device: if it is a cache that was cut short, how much is
/// missing, and the remedy.
pub fn cut_short(media: &Media) -> String {
    missing(media).map_or_else(String::new, |cut| format!("; {cut}: {CUT_ADVICE}"))
}
