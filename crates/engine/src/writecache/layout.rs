//! Every on-media byte of dm-writecache (version 1.6.0, Linux 7.2). No other file knows an offset.
//!
//! ```text
//! start_sector * 512 (all offsets count from here)
//! 0        superblock, 64 bytes: magic, version, block size, 0, blocks, counter, 32 reserved
//! 64       blocks * 16 bytes: entry i names the block of the origin that data block i holds
//!          a tail without meaning, up to the next multiple of the block size
//! D        blocks * block size: data
//! ```
//!
//! All numbers are little-endian. Both modes share the format. An entry whose sequence number is
//! below the commit counter is live; all ones is free; anything else was never committed.
//!
//! The reserved bytes, which the kernel writes as zeroes when it formats, preserves afterwards and
//! never reads, hold our [`Label`], or while we format [`FORMAT_MARK`]. If the tail, or the space
//! left after the data, has space for a whole unit of writing, it holds a `Place` (label.rs) while
//! udm serves the cache.

use std::fmt;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::base::crc::{crc64, pcache_crc};
use crate::disk::{Identity, Match, Stamp};
use crate::error::{Error, Kind};
use crate::mutants::{self, Mutant};
use crate::recovery::CUT_ADVICE;
use crate::units::SECTOR;

/// Superblock magic.
pub const MAGIC: u32 = 0x2348_9321;
/// Superblock version.
pub const VERSION: u32 = 1;
/// The sequence number of a free entry.
pub const FREE: u64 = u64::MAX;
/// Bytes of the superblock.
pub const SUPERBLOCK_BYTES: u64 = 64;
/// Bytes of an entry.
pub const ENTRY_BYTES: u64 = 16;
/// Place of an entry's sequence number within it.
pub const ENTRY_SEQ_AT: u64 = 8;
/// Place of the commit counter.
pub const SEQ_COUNT_AT: u64 = 24;
/// Place of the label.
pub const LABEL_AT: u64 = 32;
/// Bytes of the magic.
pub const MAGIC_BYTES: usize = 4;
/// Stored at the label's address from the first store of a format of ours until the format is done.
/// Eight bytes, which no crash tears, and not a valid label.
pub const FORMAT_MARK: [u8; 8] = *b"udm fmt1";
/// Smallest and largest block size: the largest is that of kernels with 64 KiB pages.
pub const BLOCK_BYTES_MIN: u32 = 512;
/// See [`BLOCK_BYTES_MIN`].
pub const BLOCK_BYTES_MAX: u32 = 65536;
/// Most blocks of a cache: all numbers of 32 bits except the highest, which stands for no block.
pub const BLOCKS_MAX: u64 = u32::MAX as u64;

/// The first 64 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Superblock {
    /// [`MAGIC`], or 0 while the device is being formatted.
    pub magic: U32,
    /// [`VERSION`].
    pub version: U32,
    /// Bytes of a block.
    pub block_bytes: U32,
    reserved: U32,
    /// Blocks, N.
    pub blocks: U64,
    /// The commit counter, S.
    pub seq_count: U64,
    /// Ours.
    pub label: Label,
}

/// The origin of this cache, the attach that has it, and whether a server serves it, or did and
/// died. The label protects users who confuse devices. A cache without one is a kernel's, and is
/// accepted.
///
/// A label that says "served" has a mark in the bits of `origin_sectors` that no origin needs. A
/// udm that does not know the mark sees another origin, and refuses a cache with dirty blocks. The
/// attach is a number of 40 bits, the boot of the machine 12, the memory's directory 12 bits of a
/// hash. So a change of the attach changes one word, and "served" another one.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Label {
    /// CRC of the fields about the origin: all but the attach, so that an attach changes one word
    /// of eight bytes, which no crash can tear.
    check: U32,
    magic: U32,
    /// A CRC of the origin's identity: enough to tell devices apart, but not against forgery.
    pub origin: U64,
    origin_sectors: U64,
    /// Drawn at each attach.
    attach: U64,
}

/// The entry of a data block: names the origin block that it holds.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Entry {
    /// First sector of the origin's block.
    pub original_sector: U64,
    /// [`FREE`], or the batch that made it.
    pub seq_count: U64,
}

const _: () = assert!(size_of::<Superblock>() as u64 == SUPERBLOCK_BYTES);
const _: () = assert!(size_of::<Label>() as u64 == SUPERBLOCK_BYTES - LABEL_AT);
const _: () = assert!(size_of::<Entry>() as u64 == ENTRY_BYTES);
const _: () = assert!(std::mem::offset_of!(Superblock, seq_count) as u64 == SEQ_COUNT_AT);
const _: () = assert!(std::mem::offset_of!(Superblock, label) as u64 == LABEL_AT);
const _: () = assert!(std::mem::offset_of!(Entry, seq_count) as u64 == ENTRY_SEQ_AT);

const ATTACH_AT: usize = Label::ATTACH_AT;
const _: () = assert!((LABEL_AT as usize + ATTACH_AT).is_multiple_of(8));
const _: () = assert!(std::mem::offset_of!(Label, origin_sectors).is_multiple_of(8));
/// In `origin_sectors`: a server has the cache, or had it and died.
const SERVED: u64 = 1 << 60;
/// In `origin_sectors`: no server has the cache, and `attach` is the stamp of its origin.
const STAMPED: u64 = 1 << 61;
/// In `origin_sectors`: the sectors. In a label with a stamp, [`SEQ_BITS`] bits of a checksum of
/// the commit counter follow: a kernel that uses the cache changes the counter.
const SECTORS_BITS: u32 = 40;
const SEQ_BITS: u32 = 16;
const _: () = assert!(super::ORIGIN_BYTES_MAX / SECTOR < 1 << SECTORS_BITS);
const ATTACH_BITS: u32 = 40;
const BOOT_BITS: u32 = 12;

const LABEL_MAGIC: u32 = 0x4357_6475; // "udWC"
const _: () = assert!((LABEL_AT as usize).is_multiple_of(FORMAT_MARK.len()));

impl Superblock {
    /// That of an empty cache.
    pub fn fresh(geometry: &Geometry) -> Superblock {
        let mut superblock = Superblock::new_zeroed();
        superblock.magic.set(MAGIC);
        superblock.version.set(VERSION);
        superblock.block_bytes.set(geometry.block_bytes);
        superblock.blocks.set(geometry.blocks);
        superblock
    }

    /// Whether a format of ours began here and did not finish: all later bytes belong to that
    /// format. The kernel formats such a device again, or refuses it once the version is stored; it
    /// never takes it for a cache.
    pub fn is_of_cut_format(&self) -> bool {
        self.magic.get() == 0
            && self.version.get() <= VERSION
            && self.label.as_bytes().starts_with(&FORMAT_MARK)
    }
}

impl Label {
    /// Binds a cache to an origin and an attach.
    pub fn new(origin_identity: &str, origin_bytes: u64, attach_id: u64) -> Label {
        let mut label = Label {
            check: U32::ZERO,
            magic: U32::new(LABEL_MAGIC),
            origin: U64::new(crc64(origin_identity.as_bytes())),
            origin_sectors: U64::new(origin_bytes / SECTOR),
            attach: U64::new(attach_id & Label::ATTACH_MAX),
        };
        label.check.set(label.sum());
        label
    }

    /// Place of the first field after `check` and `magic`.
    pub const ORIGIN_AT: usize = std::mem::offset_of!(Label, origin);
    /// Place of the attach within the label.
    pub const ATTACH_AT: usize = std::mem::offset_of!(Label, attach);
    /// The largest number of an attach.
    pub const ATTACH_MAX: u64 = (1 << ATTACH_BITS) - 1;

    /// The label of the same cache while it is served, in this boot of the machine, with its memory
    /// in this directory.
    pub fn served(mut self, boot: u64, directory: &str) -> Label {
        let place = u64::from(pcache_crc(directory.as_bytes()));
        let of_server = few(boot, BOOT_BITS) << ATTACH_BITS
            | few(place, BOOT_BITS) << (ATTACH_BITS + BOOT_BITS);
        self.attach.set(self.attach.get() & Label::ATTACH_MAX | of_server);
        self.origin_sectors.set(self.origin_sectors.get() | SERVED);
        self.check.set(self.sum());
        self
    }

    /// The label of the same cache while a server has it whose memory does not outlive it.
    pub fn served_alone(mut self, boot: u64) -> Label {
        self.attach.set(0);
        self.served(boot, "")
    }

    /// The label of the same cache without a server, without a stamp.
    pub fn at_rest(mut self) -> Label {
        self.origin_sectors.set(self.origin_sectors());
        self.check.set(self.sum());
        self
    }

    /// The label of the same cache at rest, whose commit counter is `seq`, with the stamp of its
    /// origin.
    pub fn stamped(self, stamp: Stamp, seq: u64) -> Label {
        let mut label = self.at_rest();
        label.attach.set(stamp.bits());
        let sectors = label.origin_sectors.get() | STAMPED | seq_sum(seq) << SECTORS_BITS;
        label.origin_sectors.set(sectors);
        label.check.set(label.sum());
        label
    }

    /// The stamp of the origin, if only udm has used the cache since: the commit counter is still
    /// `seq`.
    pub fn stamp(&self, seq: u64) -> Option<Stamp> {
        let marks = self.origin_sectors.get() & !((1 << SECTORS_BITS) - 1);
        let is_stamped = self.is_valid() && marks == STAMPED | seq_sum(seq) << SECTORS_BITS;
        Stamp::from_bits(self.attach.get()).filter(|_| is_stamped)
    }

    /// Whether it has a stamp, of whatever counter.
    pub fn has_stamp(&self) -> bool {
        self.is_valid() && self.origin_sectors.get() & STAMPED != 0
    }

    /// The checksum of all fields but the attach, and the checksum of the counter, which belongs to
    /// the stamp.
    fn sum(&self) -> u32 {
        let mut label = *self;
        let marks = self.origin_sectors.get() & (SERVED | STAMPED);
        label.origin_sectors.set(self.origin_sectors() | marks);
        pcache_crc(&label.as_bytes()[4..ATTACH_AT])
    }

    /// Whether this is a valid label. Between the words of "served" and its check, that one mark is
    /// the only part that a crash could tear.
    pub fn is_valid(&self) -> bool {
        let without = |mark: u64| {
            let mut other = *self;
            other.origin_sectors.set(self.origin_sectors.get() ^ mark);
            other.sum()
        };
        let sums = [0, SERVED, STAMPED].map(without);
        self.magic.get() == LABEL_MAGIC && sums.contains(&self.check.get())
    }

    /// Whether there was a label, which is not valid. Its first eight bytes are stored last, and no
    /// crash tears them.
    pub fn is_damaged(&self) -> bool {
        let first = &self.as_bytes()[..FORMAT_MARK.len()];
        !self.is_valid() && first != FORMAT_MARK && first.iter().any(|byte| *byte != 0)
    }

    /// Whether the label records that a server has the cache, or had it and died.
    pub fn is_served(&self) -> bool {
        self.is_valid() && self.origin_sectors.get() & SERVED != 0
    }

    /// Whether the memory of that server did not outlive it: no attach has the number 0.
    pub fn is_served_alone(&self) -> bool {
        self.is_served() && self.attach.get() & Label::ATTACH_MAX == 0
    }

    /// Whether that was in this run of the machine.
    pub fn is_of_boot(&self, boot: u64) -> bool {
        few(self.attach.get() >> ATTACH_BITS, BOOT_BITS) == few(boot, BOOT_BITS)
    }

    /// Whether the memory is in this directory, as far as a short hash can tell.
    pub fn is_of_place(&self, directory: &str) -> bool {
        let place = u64::from(pcache_crc(directory.as_bytes()));
        self.attach.get() >> (ATTACH_BITS + BOOT_BITS) == few(place, BOOT_BITS)
    }

    /// The attach. A label that does not say "served" may be the label of an older udm: all of its
    /// bits count. A label with a stamp names no attach.
    pub fn attach_id(&self) -> u64 {
        if self.has_stamp() {
            return 0;
        }
        match self.is_served() {
            true => self.attach.get() & Label::ATTACH_MAX,
            false => self.attach.get(),
        }
    }

    /// Sectors of the origin when it was attached.
    pub fn origin_sectors(&self) -> u64 {
        self.origin_sectors.get() & ((1 << SECTORS_BITS) - 1)
    }

    /// Compares its origin with this one, which may have grown.
    pub fn compare(&self, origin: &Identity, origin_bytes: u64) -> Match {
        if self.origin_sectors() > origin_bytes / SECTOR {
            return Match::Other;
        }
        origin.compare(|words| self.origin.get() == crc64(words.as_bytes()))
    }
}

/// A sum of the commit counter.
fn seq_sum(seq: u64) -> u64 {
    few(pcache_crc(&seq.to_le_bytes()).into(), SEQ_BITS)
}

/// The lowest bits.
fn few(word: u64, bits: u32) -> u64 {
    word & ((1 << bits) - 1)
}

impl Entry {
    /// As a format writes it.
    pub const FRESH: Entry = Entry { original_sector: U64::MAX_VALUE, seq_count: U64::MAX_VALUE };

    /// An entry for a block that starts at `sector`.
    pub fn new(sector: u64, seq: u64) -> Entry {
        Entry { original_sector: U64::new(sector), seq_count: U64::new(seq) }
    }
}

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryState {
    /// No block.
    Free,
    /// An entry that was never committed: free, but without a free mark.
    Uncommitted,
    /// The data block holds this block of the origin.
    Live {
        /// Number of the origin's block.
        block: u64,
    },
    /// Live, but not at the start of any block: no writecache wrote this entry.
    Misaligned,
    /// Live, but wholly beyond the origin's end.
    BeyondOrigin,
}

/// Where everything is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// First byte of the superblock.
    pub start: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Blocks.
    pub blocks: u64,
    /// First byte of the data, and size of the metadata; counted from `start`.
    pub data_at: u64,
}

/// Why a device of some size holds no cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeometryError {
    /// Not even one block fits (the kernel's ENOSPC).
    TooSmall,
    /// More blocks than 32 bits can name (the kernel's EFBIG, from 2^47 blocks on).
    TooLarge,
}

impl Geometry {
    /// The geometry of a new cache in `raw` bytes from `start` on.
    pub fn of_size(
        start: u64,
        raw: u64,
        block_bytes: u32,
    ) -> std::result::Result<Geometry, GeometryError> {
        let block = u64::from(block_bytes);
        let mut blocks = raw / (block + ENTRY_BYTES);
        loop {
            if blocks == 0 {
                return Err(GeometryError::TooSmall);
            }
            if blocks > BLOCKS_MAX {
                return Err(GeometryError::TooLarge);
            }
            let data_at = (SUPERBLOCK_BYTES + ENTRY_BYTES * blocks).next_multiple_of(block);
            if data_at + blocks * block <= raw {
                return Ok(Geometry { start, block_bytes, blocks, data_at });
            }
            blocks -= 1;
        }
    }

    /// The geometry of the cache that `superblock` describes, checked in the kernel's order and
    /// with its words. `expected`: the block size in the table.
    pub fn of_superblock(
        superblock: &Superblock,
        start: u64,
        raw: u64,
        expected: Option<u32>,
    ) -> std::result::Result<Geometry, Error> {
        let invalid = |words: &str, details: fmt::Arguments<'_>| {
            Err(Error::new(Kind::Invalid, format!("{words}: {details}")))
        };
        let (magic, version) = (superblock.magic.get(), superblock.version.get());
        if magic != MAGIC {
            let half =
                if magic == 0 && version == VERSION { ": a format was cut short" } else { "" };
            let at = format_args!("{magic:#010x} at byte {start}, expected {MAGIC:#010x}{half}");
            return invalid("Invalid magic in the superblock", at);
        }
        if version != VERSION {
            let at = format_args!("{version} at byte {}, expected {VERSION}", start + 4);
            return invalid("Invalid version in the superblock", at);
        }
        let block_bytes = superblock.block_bytes.get();
        if expected.is_some_and(|expected| expected != block_bytes) {
            let expected = expected.unwrap_or_default();
            let at = format_args!("{block_bytes} at byte {}, expected {expected}", start + 8);
            return invalid("Block size does not match superblock", at);
        }
        if !is_block_size(u64::from(block_bytes)) {
            let at = format_args!("{block_bytes} at byte {}", start + 8);
            return invalid("Invalid block size", at);
        }
        let blocks = superblock.blocks.get();
        let at = start + 16;
        let Some((data_at, end)) = extent(blocks, block_bytes) else {
            let at = format_args!("{blocks} blocks at byte {at}");
            return invalid("Overflow in size calculation", at);
        };
        if end > raw {
            let at = format_args!(
                "{blocks} blocks at byte {at} take {end} bytes, but {raw} are there: it was cut \
                 short; {CUT_ADVICE}"
            );
            return invalid("Memory area is too small", at);
        }
        if blocks == 0 || blocks > BLOCKS_MAX {
            let words = format!("Cannot allocate memory: {blocks} blocks at byte {at}");
            return Err(Error::new(
                Kind::Invalid,
                format!("{words}; 1 to {BLOCKS_MAX} are possible"),
            ));
        }
        Ok(Geometry { start, block_bytes, blocks, data_at })
    }

    /// First byte of entry `index`, on the device.
    pub fn entry_at(&self, index: u64) -> u64 {
        self.start + SUPERBLOCK_BYTES + ENTRY_BYTES * index
    }

    /// First byte of data block `index`, on the device.
    pub fn block_at(&self, index: u64) -> u64 {
        self.start + self.data_at + u64::from(self.block_bytes) * index
    }

    /// The address for a `Place`, on a device of `raw` bytes from the start on, that writes units
    /// of `unit` bytes: after the entries or after the data, in units without other content.
    pub fn place_at(&self, raw: u64, unit: u64) -> Option<u64> {
        let end = self.data_end();
        let room = |from: u64, to: u64| {
            let at = (self.start + from).next_multiple_of(unit) - self.start;
            at.checked_add(unit).filter(|behind| *behind <= to).map(|_| self.start + at)
        };
        room(self.table_bytes(), self.data_at).or_else(|| room(end, raw))
    }

    /// Where the data ends, counted from the start.
    pub fn data_end(&self) -> u64 {
        self.data_at + self.blocks * u64::from(self.block_bytes)
    }

    /// Bytes of superblock and entries.
    pub fn table_bytes(&self) -> u64 {
        SUPERBLOCK_BYTES + ENTRY_BYTES * self.blocks
    }

    /// The metadata sector (of 512 bytes, from `start`) that has entry `index`.
    pub fn sector_of(&self, index: u64) -> u64 {
        (SUPERBLOCK_BYTES + ENTRY_BYTES * index) / SECTOR
    }

    /// The entries in a metadata sector.
    pub fn entries_in(&self, sector: u64) -> std::ops::Range<u64> {
        let before = |byte: u64| byte.saturating_sub(SUPERBLOCK_BYTES) / ENTRY_BYTES;
        before(sector * SECTOR)..before((sector + 1) * SECTOR).min(self.blocks)
    }

    /// Sectors of a block.
    pub fn block_sectors(&self) -> u64 {
        u64::from(self.block_bytes) / SECTOR
    }

    /// The meaning of `entry` with a commit counter of `seq_count` and an origin of `origin_bytes`,
    /// if that is known.
    pub fn state_of(&self, entry: &Entry, seq_count: u64, origin_bytes: Option<u64>) -> EntryState {
        let (sector, seq) = (entry.original_sector.get(), entry.seq_count.get());
        if seq == FREE {
            return EntryState::Free;
        }
        if seq >= seq_count && !mutants::is(Mutant::UncommittedBelieved) {
            return EntryState::Uncommitted;
        }
        if origin_bytes.is_some_and(|bytes| sector >= bytes / SECTOR) || sector > SECTORS_MAX {
            return EntryState::BeyondOrigin;
        }
        if !sector.is_multiple_of(self.block_sectors()) {
            return EntryState::Misaligned;
        }
        EntryState::Live { block: sector / self.block_sectors() }
    }
}

/// No origin has more sectors (64 TiB, as with the other caches).
pub const SECTORS_MAX: u64 = (64 << 40) / SECTOR;

/// Data offset and end of a cache; `None` if they overflow.
fn extent(blocks: u64, block_bytes: u32) -> Option<(u64, u64)> {
    let block = u64::from(block_bytes);
    let table = blocks.checked_mul(ENTRY_BYTES)?.checked_add(SUPERBLOCK_BYTES)?;
    let data_at = table.checked_next_multiple_of(block)?;
    Some((data_at, data_at.checked_add(blocks.checked_mul(block)?)?))
}

/// Whether blocks can have this many bytes.
pub fn is_block_size(bytes: u64) -> bool {
    let (min, max) = (u64::from(BLOCK_BYTES_MIN), u64::from(BLOCK_BYTES_MAX));
    bytes.is_power_of_two() && (min..=max).contains(&bytes)
}

#[cfg(test)]
mod tests;
