//! The cache device as structures instead of bytes: typed loads and stores, two-slot records, and
//! which errors mean that the medium itself failed.

use crate::error::{Error, Kind, Result, Status};
use crate::mutants::{self, Mutant};
use crate::pmem::Pmem;
use crate::shm::SharedWords;
use crate::slots::{SlotState, choose};
use crate::sync::Arc;
use crate::units::MIB;

use super::layout::{Geometry, Sealed, Slotted};
use super::openset::{LogEnd, announce_end, confirm_end, note_failure};

/// A cache device and the size of its segments.
#[derive(Clone, Debug)]
pub struct Media {
    /// The memory.
    pub pmem: Arc<dyn Pmem>,
    /// The kernel's, except in tests.
    pub geometry: Geometry,
    /// Memory that outlives the process: a failure of the medium is noted there.
    pub shared: Option<SharedWords>,
}

/// A two-slot record as found on media.
#[derive(Clone, Copy, Debug)]
pub struct Found<T> {
    /// The current record.
    pub record: T,
    /// Where it stands.
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

    /// Reads a structure; says where when the medium fails.
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

    /// Everything stored so far is durable before anything stored from now on.
    pub fn settle(&self) -> std::result::Result<(), Status> {
        self.pmem.drain()?;
        self.sync()
    }

    /// All drained stores are durable. If it fails, and no later sync tries again, that is noted
    /// for the next attach.
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

    /// Stores all that is there once more, durably. After a failed sync what is read may never
    /// become durable otherwise. Refuses what cannot be read: once the machine has been started
    /// again, all that can be read is durable, and nothing needs to be stored.
    pub fn rewrite(&self) -> Result<()> {
        let mut bytes = vec![0; MIB as usize];
        for at in (0..self.pmem.len_bytes()).step_by(bytes.len()) {
            let bytes = &mut bytes[..(self.pmem.len_bytes() - at).min(MIB) as usize];
            self.pmem.load(at, bytes).map_err(|status| {
                self.damaged(format_args!(
                    "a flush of it has failed since the machine was started, and what it holds \
                     cannot be stored again: cannot read the MiB at byte {at}: {status}"
                ))
            })?;
            self.store(at, bytes);
        }
        self.settle_or_err()
    }

    /// [`Media::settle`] with an error that names the medium.
    pub fn settle_or_err(&self) -> Result<()> {
        self.settle().map_err(|status| self.damaged(format_args!("cannot store: {status}")))
    }
}
