//! The cache device while requests are served: its properties, the findings of the attach, and
//! whether it can still be trusted.

use std::collections::HashMap;

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{DiskErrors, DiskIo};
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::units::SECTOR;

use super::Writecache;
use super::layout::{Entry, Geometry, Label};
use super::media::Medium;

/// The cache device. Only its failure changes after it was opened.
#[derive(Debug)]
pub(super) struct CacheDevice {
    pub(super) medium: Medium,
    pub(super) geometry: Geometry,
    pub(super) label: Label,
    /// Entries that udm must not change.
    pub(super) aside: HashMap<u32, Entry>,
    /// The damage of its entries, in words.
    pub(super) damage: Vec<String>,
    /// Other findings of the attach.
    pub(super) notes: Vec<String>,
    /// The device failed an operation that must succeed.
    has_failed: AtomicBool,
    /// The number of writes of data that the device refused since the last good one.
    refused: AtomicU32,
}

impl CacheDevice {
    pub(super) fn new(
        medium: Medium,
        geometry: Geometry,
        label: Label,
        aside: HashMap<u32, Entry>,
        damage: Vec<String>,
        notes: Vec<String>,
    ) -> CacheDevice {
        let has_failed = AtomicBool::new(false);
        let refused = AtomicU32::new(0);
        CacheDevice { medium, geometry, label, aside, damage, notes, has_failed, refused }
    }

    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }

    /// Where the data of a slot is.
    #[inline]
    pub(super) fn slot_at(&self, slot: u32) -> u64 {
        self.geometry.block_at(u64::from(slot))
    }

    /// The smallest unit in which its metadata is written.
    pub(super) fn unit_bytes(&self) -> u64 {
        u64::from(self.medium.unit_bytes()).max(SECTOR)
    }

    /// Mode `s`: an I/O.
    pub(super) fn io(&self, op: Op, offset: u64, buffer: Buffer, token: u64) -> DiskIo {
        let Medium::Disk(disk) = &self.medium else { unreachable!("mode s uses a disk") };
        DiskIo::new(disk, op, offset, buffer, token)
    }

    /// A write of data has ended.
    #[inline]
    pub(super) fn note_write(&self, status: Result<(), Status>) {
        match status {
            Ok(()) if self.refused.load(Ordering::Relaxed) == 0 => {}
            Ok(()) => self.refused.store(0, Ordering::Relaxed),
            Err(_) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Whether the device refused the last write of data.
    pub(super) fn refuses_writes(&self) -> bool {
        self.refused.load(Ordering::Relaxed) > 0
    }

    /// Its I/O errors.
    pub(super) fn errors(&self) -> DiskErrors {
        match &self.medium {
            Medium::Disk(disk) => disk.errors(),
            Medium::Pmem(_) => DiskErrors::default(),
        }
    }
}

impl Writecache {
    pub(super) fn has_failed(&self) -> bool {
        self.device.has_failed()
    }

    /// The cache device refused a commit: writes acknowledged since the last one may be lost. If
    /// the device was cut short, no failure is recorded in memory: the rest of it can be trusted,
    /// unless a sync has failed.
    pub(super) fn fail(&self) {
        let medium = &self.device.medium;
        let is_cut = medium.failure().is_some() && !medium.has_given_up();
        let is_forgotten = mutants::is(Mutant::FailedSyncForgotten) && medium.failure().is_some();
        if !is_cut && !is_forgotten {
            self.lists.memory().note_failure();
            self.lists.memory().end_flush();
        }
        self.stop();
    }

    /// The cache device must not be trusted any more.
    pub(super) fn stop(&self) {
        self.device.has_failed.store(true, Ordering::SeqCst);
        self.events.room();
    }
}
