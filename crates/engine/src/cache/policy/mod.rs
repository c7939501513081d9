//! Which blocks of the origin the cache has. Pure decisions: the engine asks, acts, and says what
//! it has done. A policy knows no data, no disks and no clock of its own.
//!
//! A block enters a *slot* of the fast device, and leaves it. In between it is *partial* (the slot
//! has some of its sectors, and only memory knows which) or *whole* (it can be named on the
//! medium). A policy may let a block enter with the bytes of one request, and ask for the rest when
//! the block has proved itself: what is moved for blocks that are used once costs more than it
//! gives, and with blocks of 1 MiB it costs two hundred times more.
//!
//! | policy | what it does |
//! |---|---|
//! | [`Smq`] | the kernel's: blocks climb levels, and come as a whole; hints are on the medium |
//! | [`Probation`] | ours: blocks enter in part, and stay if they are used again |

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

/// How much of a block is brought into its slot, besides what a request brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Nothing.
    Asked,
    /// This many bytes after the request, or as many of them as the block has.
    Ahead(u32),
    /// All that is missing.
    Whole,
}

/// What becomes of a block that has no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The request passes the cache by.
    Pass,
    /// The block is to have a slot.
    Enter(Fill),
}

/// What is to be done so that slots become free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The block in this slot leaves. What is dirty of it goes to the origin first.
    Leave(u32),
    /// The block in this slot stays, and is brought in whole. No slot becomes free.
    Complete(u32),
    /// What is dirty in this slot goes to the origin. No slot becomes free.
    Clean(u32),
}

/// A policy. All calls come under one lock, but for hits: those are counted in [`Uses`], which the
/// policy looks at.
pub trait Policy: Debug + Send {
    /// Its name in tables, and on the medium beside its hints.
    fn name(&self) -> &'static str;

    /// Whether blocks may stay in their slots in part. Else all of one is brought, and the policy
    /// hears of it when it is there.
    fn takes_parts(&self) -> bool;

    /// Its version on the medium. Hints of another major version (the first number) are dropped.
    fn version(&self) -> [u32; 3];

    /// When a cache is opened: a slot has a whole block, with the hint that was on the medium, if
    /// that is to be believed.
    fn load(&mut self, slot: u32, hint: Option<u32>, is_dirty: bool);

    /// What the medium is to remember of the block in a slot.
    fn hint(&self, slot: u32) -> u32;

    /// A request found its block in a slot, and [`Uses::touch`] said that it was the first.
    fn hit(&mut self, slot: u32);

    /// A request found no slot with its block.
    fn miss(&mut self, miss: &Miss) -> Admission;

    /// A request found its block in a slot that has `filled` bytes of it, and not all of those that
    /// it wants.
    fn gap(&mut self, slot: u32, miss: &Miss, filled: u32) -> Fill;

    /// A block that was admitted is in a slot now.
    fn enter(&mut self, slot: u32, block: u64);

    /// A slot got its first dirty byte, or has none any more.
    fn set_dirty(&mut self, slot: u32, is_dirty: bool);

    /// The block in a slot is gone: it left, was discarded, or never came.
    fn leave(&mut self, slot: u32, block: u64);

    /// A block that was to leave cannot, because a request uses it or its data did not reach the
    /// origin.
    fn stay(&mut self, slot: u32);

    /// What is to be done so that a slot becomes free. What was said once is not said again while
    /// it is being done. `None`: there is nothing.
    fn next(&mut self) -> Option<Next>;

    /// Some time has passed: it is `now`, in nanoseconds.
    fn tick(&mut self, now: u64);
}
