//! The in-flight map: requests and moves of each block of the origin. Blocks without I/O in flight
//! take no memory.
//!
//! 1. A block has one mover at a time.
//! 2. The caller parks a request that cannot continue; the end of the operation that it waits for
//!    returns that a request waits ([`InFlight::end_request`], [`InFlight::end_move`]).

use std::collections::HashMap;

use crate::mutants::{self, Mutant};

use super::numbers::ByNumber;

/// The operation that moves a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mover {
    /// A write of the whole block is sent to its future slot. Other writes wait.
    Overwrite,
    /// Its slot is copied to the origin. A write to the slot may continue; then the slot stays
    /// dirty.
    Cleaning {
        /// A write came, or was under way when the copy began.
        is_rewritten: bool,
    },
    /// Its mapping is gone, and may still be on the medium. Writes wait.
    Leaving,
    /// The origin is zeroed below its slot. Everything waits.
    Zeroing,
    /// That is done, and the block is leaving. Everything waits.
    Zeroed,
}

/// The I/O in flight in one block.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    readers: u32,
    writers: u32,
    mover: Option<Mover>,
    /// A request waits for the end of something.
    is_awaited: bool,
}

/// The I/O in flight, by block.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    uses: HashMap<u64, Use, ByNumber>,
}

impl InFlight {
    /// The operation that moves the block.
    #[inline]
    pub(super) fn mover(&self, block: u64) -> Option<Mover> {
        self.uses.get(&block).and_then(|of| of.mover)
    }

    /// Whether a request writes to it.
    pub(super) fn has_writers(&self, block: u64) -> bool {
        self.uses.get(&block).is_some_and(|of| of.writers > 0)
    }

    /// Whether no I/O is in flight in the block.
    pub(super) fn is_quiet(&self, block: u64) -> bool {
        self.uses.get(&block).is_none_or(|of| of.readers + of.writers == 0 && of.mover.is_none())
    }

    /// The blocks to which requests write.
    pub(super) fn written(&self) -> impl Iterator<Item = u64> {
        self.uses.iter().filter(|(_, of)| of.writers > 0).map(|(block, _)| *block)
    }

    /// A request begins.
    #[inline]
    pub(super) fn begin_request(&mut self, block: u64, is_write: bool) {
        let of = self.uses.entry(block).or_default();
        let count = if is_write { &mut of.writers } else { &mut of.readers };
        *count += 1;
    }

    /// A request ends. Whether others wait for that.
    #[inline]
    pub(super) fn end_request(&mut self, block: u64, is_write: bool) -> bool {
        let of = self.uses.get_mut(&block).expect("its request is under way");
        let count = if is_write { &mut of.writers } else { &mut of.readers };
        *count = count.checked_sub(1).expect("its request is under way");
        self.look(block)
    }

    /// Something begins to move it.
    pub(super) fn begin_move(&mut self, block: u64, mover: Mover) {
        let of = self.uses.entry(block).or_default();
        assert!(of.mover.replace(mover).is_none(), "block {block} has one mover at a time");
    }

    /// The mover changes.
    pub(super) fn change_move(&mut self, block: u64, mover: Mover) {
        let of = self.uses.get_mut(&block).expect("it is being moved");
        assert!(of.mover.replace(mover).is_some(), "block {block} is being moved");
    }

    /// The move ends. Returns its kind, and whether requests wait for its end.
    pub(super) fn end_move(&mut self, block: u64) -> (Mover, bool) {
        let of = self.uses.get_mut(&block).expect("it is being moved");
        let mover = of.mover.take().expect("it is being moved");
        (mover, self.look(block))
    }

    /// A request waits for I/O in flight in the block.
    pub(super) fn wait(&mut self, block: u64) {
        let is_noted = !mutants::is(Mutant::WaitUnnoted);
        self.uses.get_mut(&block).expect("something is under way").is_awaited = is_noted;
    }

    /// An operation has ended in the block. Returns whether a request waits for that.
    fn look(&mut self, block: u64) -> bool {
        let of = self.uses.get_mut(&block).expect("something was under way");
        let is_awaited = std::mem::take(&mut of.is_awaited);
        if of.readers + of.writers == 0 && of.mover.is_none() {
            self.uses.remove(&block);
        }
        is_awaited
    }
}
