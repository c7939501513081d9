//! What all blocks of the metadata have in common: a checksum in front, and their own address.
//!
//! The checksum is the CRC-32C of all bytes after it, from a register of ones and without the last
//! inversion, with a constant for each type of block: one type is never taken for another.

use crate::base::crc::crc32c_raw;
use crate::error::{Error, Kind};

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 4096;

/// A block.
pub type Block = [u8; BLOCK_BYTES];

/// The types of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// Block 0.
    Superblock,
    /// A node of a tree.
    Node,
    /// The space map's list of bitmaps.
    Index,
    /// Reference counts of 16,320 blocks.
    Bitmap,
    /// Elements of an array.
    Array,
}

impl BlockKind {
    /// Every type.
    pub const ALL: [BlockKind; 5] = [
        BlockKind::Superblock,
        BlockKind::Node,
        BlockKind::Index,
        BlockKind::Bitmap,
        BlockKind::Array,
    ];

    fn constant(self) -> u32 {
        match self {
            BlockKind::Superblock => 0x0089_D129,
            BlockKind::Node => 0x0001_D913,
            BlockKind::Index => 0x0002_72DE,
            BlockKind::Bitmap => 0x0003_AC8B,
            BlockKind::Array => 0x2383_E64F,
        }
    }

    /// Where such a block has its own address.
    fn address_at(self) -> usize {
        if self == BlockKind::Array { 16 } else { 8 }
    }

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            BlockKind::Superblock => "superblock",
            BlockKind::Node => "tree node",
            BlockKind::Index => "space map's index",
            BlockKind::Bitmap => "space map's bitmap",
            BlockKind::Array => "block of an array",
        }
    }

    fn sum(self, block: &Block) -> u32 {
        crc32c_raw(u32::MAX, &block[4..]) ^ self.constant()
    }

    /// Puts the address and the checksum into `block`: the last thing before it is written.
    pub fn seal(self, block: &mut Block, address: u64) {
        put_u64(block, self.address_at(), address);
        let sum = self.sum(block);
        put_u32(block, 0, sum);
    }

    /// Whether the checksum is right.
    pub fn is_sealed(self, block: &Block) -> bool {
        self.sum(block) == u32_at(block, 0)
    }

    /// Whether `block`, at `address`, is such a block.
    pub fn check(self, block: &Block, address: u64) -> Result<(), Finding> {
        let (found, expected) = (u32_at(block, 0), self.sum(block));
        if found != expected {
            let other = BlockKind::ALL.into_iter().find(|kind| kind.is_sealed(block));
            let what = match other {
                Some(kind) => format!("it has a {}, expected a {}", kind.words(), self.words()),
                None => format!(
                    "not a valid {}: its checksum is {found:#010x}, expected {expected:#010x}",
                    self.words()
                ),
            };
            return Err(damaged(address, what));
        }
        let own = u64_at(block, self.address_at());
        if own != address {
            let what = format!("the {} there is labelled block {own}", self.words());
            return Err(damaged(address, what));
        }
        Ok(())
    }
}

/// A defect of a block or of its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The block.
    pub block: u64,
    /// The defect.
    pub what: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "metadata block {}: {}", self.block, self.what)
    }
}

impl From<Finding> for Error {
    fn from(finding: Finding) -> Error {
        Error::new(Kind::Io, finding.to_string())
    }
}

/// `what` is wrong with the block at `address`.
pub fn damaged(address: u64, what: impl Into<String>) -> Finding {
    Finding { block: address, what: what.into() }
}

/// The number at byte `at`.
pub fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*block[at..].first_chunk().expect("a place within the block"))
}

/// See [`u32_at`].
pub fn u64_at(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*block[at..].first_chunk().expect("a place within the block"))
}

/// Puts a number at byte `at`.
pub fn put_u32(block: &mut [u8], at: usize, value: u32) {
    block[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// See [`put_u32`].
pub fn put_u64(block: &mut [u8], at: usize, value: u64) {
    block[at..at + 8].copy_from_slice(&value.to_le_bytes());
}
