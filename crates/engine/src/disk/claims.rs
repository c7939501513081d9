//! Files and devices that are open already, and may be opened again at the same time.
//!
//! A file is locked, and a block device claimed, by the first descriptor; code that knows that one
//! may open more. There are three users: the tables of one mapped device share what simple targets
//! map, where ranges may overlap; they share what a cache has that one takes over from the other;
//! and the words of one table may name different *parts* of a device, where they may not.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, OFlags};

use super::lazy::Budget;
use super::whole::Whole;
use crate::error::{Error, Kind, Result};
use crate::sync::{Arc, Mutex, Weak, lock};

/// What one user of disks has open, and may open again at the same time. An entry ends with the
/// last disk that was opened by it.
#[derive(Debug, Default)]
pub struct Claims {
    held: Mutex<Vec<Held>>,
    are_apart: bool,
    budget: Budget,
}

/// What the tables of one mapped device have open: each of two tables may name it.
#[derive(Debug, Default)]
pub struct TableClaims {
    /// By simple targets, which keep nothing there.
    pub simple: Claims,
    /// By targets that take over what the other table's target has left.
    pub caches: Claims,
}

/// A part of something that is open.
#[derive(Debug)]
struct Held {
    claim: Weak<OwnedFd>,
    whole: Weak<Whole>,
    part: Range<u64>,
    name: String,
}

impl Claims {
    /// For disks that must not overlap.
    pub fn apart() -> Claims {
        Claims { are_apart: true, ..Claims::default() }
    }

    /// The budget that all of them share that are written lazily.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The descriptor that holds the claim on what `path` leads to, if it was opened for the same.
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

    /// What is known of the length of what `claim` holds, if it is as long as it was. All of its
    /// parts look together: a write to one of them can hide a cut from the others.
    pub(super) fn whole(&self, claim: &Arc<OwnedFd>, device_bytes: u64) -> Option<Arc<Whole>> {
        let held = lock(&self.held);
        let mut same = held.iter().filter(|held| held.is_of(claim));
        same.find_map(|held| {
            held.whole.upgrade().filter(|whole| whole.opened_bytes() == device_bytes)
        })
    }

    /// Remembers a part, called `name`. An error if it overlaps another that must be apart.
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
            let message = format!("{name} overlaps {}, which the table names, too", other.name);
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
