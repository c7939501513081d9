//! Policies: which blocks of the origin are cached. Pure decisions: the engine asks, acts, and
//! reports its actions. A policy cannot access data or disks, or read a clock.
//!
//! A block enters a *slot* of the fast device, and leaves it. In between it is *partial* (the slot
//! has some of its sectors, and only memory knows which) or *whole* (it can be named on the
//! medium). A policy may let a block enter with the bytes of one request, and ask for the rest when
//! the block has proved itself: promoting whole blocks that are used once costs more than it gains,
//! and with blocks of 1 MiB it costs two hundred times more.
//!
//! | policy | method |
//! |---|---|
//! | [`Smq`] | the kernel's: blocks climb levels, and are promoted whole; hints are on the medium |
//! | [`Probation`] | ours: blocks are admitted in part, and kept if they are used again |

mod ghosts;
mod levels;
mod probation;
mod smq;
mod streams;
mod uses;

use std::fmt::Debug;
use std::ops::Range;

use crate::units::SECTOR;

pub use probation::Probation;
pub use smq::{Rules, Smq};
pub use uses::Uses;

/// The cache that a policy is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Slots of the fast device; fewer than 2^28.
    pub slots: u32,
    /// Bytes of a slot: a multiple of 32 KiB.
    pub block_bytes: u32,
    /// Blocks of the origin, whole ones.
    pub origin_blocks: u64,
}

/// A request for a part of one block, which the cache does not have, or not all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Number of the block on the origin.
    pub block: u64,
    /// Where the request begins in the block, in bytes.
    pub offset: u32,
    /// Bytes of the request in this block, at least 1.
    pub len: u32,
    /// Whether it writes.
    pub is_write: bool,
}

impl Miss {
    /// The sectors of the block that it is for.
    #[inline]
    pub(super) fn sectors(&self) -> Range<u32> {
        let sector = SECTOR as u32;
        self.offset / sector..(self.offset + self.len).div_ceil(sector)
    }
}

/// How much of a block is read into its slot, in addition to the data of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// No more.
    Asked,
    /// This many bytes after the request, or as many of them as the block has.
    Ahead(u32),
    /// All that is missing.
    Whole,
}

/// The decision on a block without a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The request passes the cache by.
    Pass,
    /// The block is to have a slot.
    Enter(Fill),
}

/// The next action to free slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The block in this slot is to be dropped. Its dirty data is written back first.
    Leave(u32),
    /// The block in this slot is kept, and read in whole. No slot becomes free.
    Complete(u32),
    /// The dirty data of this slot is to be written back. No slot becomes free.
    Clean(u32),
}

/// A policy. All calls come under one lock, except for hits: those are counted in [`Uses`], which
/// the policy reads.
pub trait Policy: Debug + Send {
    /// Its name in tables, and on the medium beside its hints.
    fn name(&self) -> &'static str;

    /// Whether blocks may be partially cached. Otherwise the engine reads all of a block, and
    /// reports it to the policy when it is complete.
    fn takes_parts(&self) -> bool;

    /// Its version on the medium. Hints of another major version (the first number) are dropped.
    fn version(&self) -> [u32; 3];

    /// When a cache is opened: a slot has a whole block, with its hint from the medium, if that can
    /// be trusted.
    fn load(&mut self, slot: u32, hint: Option<u32>, is_dirty: bool);

    /// The hint for the block in a slot, to be stored on the medium.
    fn hint(&self, slot: u32) -> u32;

    /// A request found its block in a slot, and [`Uses::touch`] returned that it was the first.
    fn hit(&mut self, slot: u32);

    /// A request found no slot with its block.
    fn miss(&mut self, miss: &Miss) -> Admission;

    /// A request found its block in a slot that has `filled` bytes of it, and not all of the
    /// requested ones.
    fn gap(&mut self, slot: u32, miss: &Miss, filled: u32) -> Fill;

    /// A block that was admitted is in a slot now.
    fn enter(&mut self, slot: u32, block: u64);

    /// A slot got its first dirty byte, or has none any more.
    fn set_dirty(&mut self, slot: u32, is_dirty: bool);

    /// The block in a slot is gone: it was dropped or discarded, or its promotion failed.
    fn leave(&mut self, slot: u32, block: u64);

    /// A block that was to be dropped cannot be, because a request uses it or its data did not
    /// reach the origin.
    fn stay(&mut self, slot: u32);

    /// The next action to free a slot. An action is not returned again while it is in progress.
    /// `None`: there is none.
    fn next(&mut self) -> Option<Next>;

    /// Some time has passed: it is `now`, in nanoseconds.
    fn tick(&mut self, now: u64);
}
