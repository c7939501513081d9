//! Descriptors, and the memory of a request: the common part of split and packed rings.
//!
//! A descriptor is copied, then checked, then used. An indirect table is copied whole.

use super::memory::Memory;
use super::proto::{RingAddresses, Violation, feature, wrong};

/// Maximum entries of a ring.
pub const ENTRIES_MAX: u16 = 1024;
/// Maximum descriptors of a request, in the ring and in tables together.
pub const CHAIN_MAX: usize = 1024;

/// Size in bytes of a descriptor, in a ring and in a table.
pub(super) const DESCRIPTOR_BYTES: usize = 16;
/// Flags of a descriptor.
pub(super) const HAS_NEXT: u16 = 1;
pub(super) const IS_WRITABLE: u16 = 2;
pub(super) const IS_INDIRECT: u16 = 4;

/// The parameters of a ring.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Entries, at most [`ENTRIES_MAX`].
    pub entries: u16,
    /// Addresses of its parts.
    pub addresses: RingAddresses,
    /// Negotiated features.
    pub features: u64,
}

impl Shape {
    pub(super) fn has(&self, bit: u64) -> bool {
        self.features & bit != 0
    }
}

/// A piece of a request's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The guest's address.
    pub guest: u64,
    /// Length in bytes, at least one.
    pub len: u32,
}

/// The memory of a request: the part that the device reads, then the part that it writes.
#[derive(Debug, Default)]
pub struct Chain {
    /// Memory that the device reads.
    pub readable: Vec<Piece>,
    /// Memory that the device writes.
    pub writable: Vec<Piece>,
}

/// Sum of the pieces' lengths.
pub fn bytes_of(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len)).sum()
}

impl Chain {
    pub(super) fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
    }

    /// Adds a descriptor of memory.
    pub(super) fn add(
        &mut self,
        piece: Piece,
        flags: u16,
        memory: &Memory,
    ) -> Result<(), Violation> {
        let Piece { guest, len } = piece;
        if len == 0 {
            return wrong("a descriptor of no bytes");
        }
        if self.readable.len() + self.writable.len() >= CHAIN_MAX {
            return wrong(format!("a request of more than {CHAIN_MAX} descriptors"));
        }
        if flags & IS_WRITABLE == 0 {
            if !self.writable.is_empty() {
                return wrong("a request with something to read after what is to be written");
            }
            self.readable.push(piece);
        } else {
            self.writable.push(piece);
        }
        if !memory.has(guest, len.into()) {
            return wrong(format!("{len} bytes at {guest:#x} are not in its memory"));
        }
        Ok(())
    }
}

/// Copies the indirect table at `at`, whose descriptor has these `flags`. Returns its number of
/// descriptors.
pub(super) fn load_table(
    at: Piece,
    flags: u16,
    shape: &Shape,
    memory: &Memory,
    table: &mut Vec<u8>,
) -> Result<usize, Violation> {
    let bytes = at.len as usize;
    if !shape.has(feature::INDIRECT) || flags & HAS_NEXT != 0 {
        return wrong("an unexpected table of descriptors");
    }
    let entries = bytes / DESCRIPTOR_BYTES;
    if entries == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) || entries > CHAIN_MAX {
        return wrong(format!("a table of descriptors of {bytes} bytes"));
    }
    table.resize(bytes, 0);
    memory.load(at.guest, table)?;
    Ok(entries)
}
