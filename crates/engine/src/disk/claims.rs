//! A registry of the files and devices that are already open and may be opened again at the same
//! time.
//!
//! The first descriptor locks a file, or claims a block device; code that knows the registry may
//! open more. It has three users. The tables of one mapped device share the disks of simple
//! targets, whose ranges may overlap. They also share the disks of a cache that replaces another
//! cache. And the words of one table may name different *parts* of a device, which must not
//! overlap.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, OFlags};

use super::lazy::Budget;
use super::whole::Whole;
use crate::error::{Error, Kind, Result};
use crate::sync::{Arc, Mutex, Weak, lock};

/// The open disks of one user, which this user may open again at the same time. An entry ends with
/// the last disk that was opened by it.
#[derive(Debug, Default)]
pub struct Claims {
    held: Mutex<Vec<Held>>,
    are_apart: bool,
    budget: Budget,
}

/// The open disks of the tables of one mapped device: two of its tables may name the same disk.
#[derive(Debug, Default)]
pub struct TableClaims {
    /// Disks of simple targets, which store no state of their own there.
    pub simple: Claims,
    /// Disks of targets that replace a target of the other table.
    pub caches: Claims,
}

/// A part of an open file or device.
#[derive(Debug)]
struct Held {
    claim: Weak<OwnedFd>,
    whole: Weak<Whole>,
    part: Range<u64>,
    name: String,
}

impl Claims {
    /// An empty registry of disks that must not overlap.
    pub fn apart() -> Claims {
        Claims { are_apart: true, ..Claims::default() }
    }

    /// The budget that the lazily written disks share.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The descriptor that holds the claim on the file or device at `path`, if it was opened in the
    /// same mode.
    pub(super) fn find(&self, path: &Path, is_read_only: bool) -> Option<Arc<OwnedFd>> {
        let there = rustix::fs::stat(path).ok()?;
        let mut held = lock(&self.held);
        held.retain(|held| held.claim.strong_count() > 0);
        held.iter().filter_map(|held| held.claim.upgrade()).find(|claim| {
            let place = |stat: &rustix::fs::Stat| match FileType::from_raw_mode(stat.st_mode) {
                FileType::BlockDevice => (0, 0, stat.st_rdev),
                _ => (stat.st_dev, stat.st_ino, 0),
            };
            let access = rustix::fs::fcntl_getfl(claim).map(|flags| flags & OFlags::RWMODE);
            let is_alike = access.is_ok_and(|access| (access == OFlags::RDONLY) == is_read_only);
            is_alike && rustix::fs::fstat(claim).is_ok_and(|ours| place(&ours) == place(&there))
        })
    }

    /// The known length of the file or device of `claim`, if it still has its length. All of
    /// its parts are checked together: a write to one part can hide a cut from the others.
    pub(super) fn whole(&self, claim: &Arc<OwnedFd>, device_bytes: u64) -> Option<Arc<Whole>> {
        let held = lock(&self.held);
        let mut same = held.iter().filter(|held| held.is_of(claim));
        same.find_map(|held| {
            held.whole.upgrade().filter(|whole| whole.opened_bytes() == device_bytes)
        })
    }

    /// Registers a part, called `name`. An error if it overlaps another part that must not overlap.
    pub(super) fn keep(
        &self,
        claim: &Arc<OwnedFd>,
        whole: &Arc<Whole>,
        part: Range<u64>,
        name: &str,
    ) -> Result<()> {
        let mut held = lock(&self.held);
        let overlaps = |held: &&Held| {
            held.is_of(claim) && held.part.start < part.end && part.start < held.part.end
        };
        if let Some(other) = held.iter().find(overlaps).filter(|_| self.are_apart) {
            let message = format!("{name} overlaps {}, which is also in the table", other.name);
            return Err(Error::new(Kind::Invalid, message));
        }
        let (claim, whole) = (Arc::downgrade(claim), Arc::downgrade(whole));
        held.push(Held { claim, whole, part, name: name.to_owned() });
        Ok(())
    }
}

impl Held {
    fn is_of(&self, claim: &Arc<OwnedFd>) -> bool {
        std::ptr::eq(self.claim.as_ptr(), Arc::as_ptr(claim)) && self.claim.strong_count() > 0
    }
}
