//! The cache device while requests are served: what it is, what an attach found on it, and whether
//! it can still be trusted.

use std::collections::HashMap;

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{DiskErrors, DiskIo};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::units::SECTOR;

use super::Writecache;
use super::layout::{Entry, Geometry, Label};
use super::media::Medium;

/// The cache device. Everything but its failure stays as it was opened.
#[derive(Debug)]
pub(super) struct CacheDevice {
    pub(super) medium: Medium,
    pub(super) geometry: Geometry,
    pub(super) label: Label,
    /// Entries that must stay as they are.
    pub(super) aside: HashMap<u32, Entry>,
    /// What is wrong with them, in words.
    pub(super) damage: Vec<String>,
    /// What else an attach found.
    pub(super) notes: Vec<String>,
    /// It failed an operation that must succeed.
    has_failed: AtomicBool,
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
        CacheDevice { medium, geometry, label, aside, damage, notes, has_failed }
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
        let Medium::Disk(disk) = &self.medium else { unreachable!("mode s is over a disk") };
        DiskIo::new(disk, op, offset, buffer, token)
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

    /// The cache device refused a commit: what was acknowledged since the last one may be lost. If
    /// the device was cut short, that is not noted: the rest of it can be trusted.
    pub(super) fn fail(&self) {
        if self.device.medium.failure().is_none() {
            self.lists.memory().note_failure();
        }
        self.stop();
    }

    /// The cache device must not be trusted any more.
    pub(super) fn stop(&self) {
        self.device.has_failed.store(true, Ordering::SeqCst);
        self.events.room();
    }
}
