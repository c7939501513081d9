//! Every on-media byte of dm-writecache (version 1.6.0, Linux 7.2). No other file knows an offset.
//!
//! ```text
//! start_sector * 512 (all offsets count from here)
//! 0        superblock, 64 bytes: magic, version, block size, 0, blocks, counter, 32 reserved
//! 64       blocks * 16 bytes: entry i says which block of the origin data block i holds
//!          a tail without meaning, up to the next multiple of the block size
//! D        blocks * block size: data
//! ```
//!
//! All numbers are little-endian. Both modes share the format. An entry whose sequence number is
//! below the commit counter is live; all ones is free; anything else was never committed.
//!
//! The reserved bytes, which the kernel writes as zeroes when it formats, preserves afterwards and
//! never reads, hold our [`Label`], or while we format [`FORMAT_MARK`]. If the tail, or the space
//! left after the data, has room for a whole unit of writing, a `Place` (label.rs) stands there
//! while udm serves the cache.

use std::fmt;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::crc::pcache_crc;
use crate::error::{Error, Kind};
use crate::mutants::{self, Mutant};
use crate::rescue::CUT_ADVICE;
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
/// Stands at the label's place from the first store of a format of ours until it is done. Eight
/// bytes, which no crash tears, and no label.
pub const FORMAT_MARK: [u8; 8] = *b"udm fmt1";
/// Smallest and largest block size: the largest is that of kernels with 64 KiB pages.
pub const BLOCK_BYTES_MIN: u32 = 512;
/// See [`BLOCK_BYTES_MIN`].
pub const BLOCK_BYTES_MAX: u32 = 65536;
/// Most blocks of a cache: what 32 bits name, without the highest number, which names none.
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

/// Which origin this cache belongs to, which attach has it, and whether a server does, or did and
/// died. A belt for the braces of those who name their devices right; a cache without one is a
/// kernel's, and is taken as it is.
///
/// A label that says "served" has a mark in the bits of `origin_sectors` that no origin needs. A
/// udm that does not know it takes the origin for another one, and refuses a cache with dirty
/// blocks.
/// Its attach is a number of 40 bits, the run of the machine 12, the memory's directory 12 bits of
/// a hash. So a change of the attach is one of one word, and "served" another one.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Label {
    /// CRC of what says which origin: all but the attach, so that an attach changes one word of
    /// eight bytes, which no crash can tear.
    check: U32,
    magic: U32,
    /// A hash of the origin's identity.
    pub origin: U64,
    origin_sectors: U64,
    /// Drawn at each attach.
    attach: U64,
}

/// Says where an origin block is cached; stands at the place that belongs to a data block.
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

    /// Whether a format of ours began here and did not finish: whatever follows is that format's.
    /// The kernel formats such a device again, or refuses it once the version is there; it never
    /// takes it for a cache.
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
            origin: U64::new(identity_hash(origin_identity)),
            origin_sectors: U64::new(origin_bytes / SECTOR),
            attach: U64::new(attach_id & Label::ATTACH_MAX),
        };
        label.check.set(label.sum());
        label
    }

    /// Place of the attach within the label.
    pub const ATTACH_AT: usize = std::mem::offset_of!(Label, attach);
    /// The largest number of an attach.
    pub const ATTACH_MAX: u64 = (1 << ATTACH_BITS) - 1;

    /// The same of a cache that is served, in this run of the machine, with memory there.
    pub fn served(mut self, boot: u64, directory: &str) -> Label {
        let place = u64::from(pcache_crc(directory.as_bytes()));
        let of_server = few(boot, BOOT_BITS) << ATTACH_BITS
            | few(place, BOOT_BITS) << (ATTACH_BITS + BOOT_BITS);
        self.attach.set(self.attach.get() & Label::ATTACH_MAX | of_server);
        self.origin_sectors.set(self.origin_sectors.get() | SERVED);
        self.check.set(self.sum());
        self
    }

    /// The same of a cache that nobody serves any more.
    pub fn at_rest(mut self) -> Label {
        self.origin_sectors.set(self.origin_sectors.get() & !SERVED);
        self.check.set(self.sum());
        self
    }

    fn sum(&self) -> u32 {
        pcache_crc(&self.as_bytes()[4..ATTACH_AT])
    }

    /// Whether it is a label at all. Between the words of "served" and its check stands nothing
    /// that a crash could tear but that one mark.
    pub fn is_valid(&self) -> bool {
        let mut other = *self;
        other.origin_sectors.set(self.origin_sectors.get() ^ SERVED);
        self.magic.get() == LABEL_MAGIC && [self.sum(), other.sum()].contains(&self.check.get())
    }

    /// Whether it says that a server has the cache, or had it and died.
    pub fn is_served(&self) -> bool {
        self.is_valid() && self.origin_sectors.get() & SERVED != 0
    }

    /// Whether that was in this run of the machine.
    pub fn is_of_boot(&self, boot: u64) -> bool {
        few(self.attach.get() >> ATTACH_BITS, BOOT_BITS) == few(boot, BOOT_BITS)
    }

    /// Whether the memory is in this directory, as far as a hash of few bits tells.
    pub fn is_of_place(&self, directory: &str) -> bool {
        let place = u64::from(pcache_crc(directory.as_bytes()));
        self.attach.get() >> (ATTACH_BITS + BOOT_BITS) == few(place, BOOT_BITS)
    }

    /// The attach. A label that does not say "served" may be that of an older udm: all of its bits
    /// count.
    pub fn attach_id(&self) -> u64 {
        match self.is_served() {
            true => self.attach.get() & Label::ATTACH_MAX,
            false => self.attach.get(),
        }
    }

    /// Sectors of the origin when it was attached.
    pub fn origin_sectors(&self) -> u64 {
        self.origin_sectors.get() & !SERVED
    }

    /// Whether it names this origin, which may have grown.
    pub fn is_bound_to(&self, origin_identity: &str, origin_bytes: u64) -> bool {
        self.origin.get() == identity_hash(origin_identity)
            && self.origin_sectors() <= origin_bytes / SECTOR
    }
}

/// The lowest bits.
fn few(word: u64, bits: u32) -> u64 {
    word & ((1 << bits) - 1)
}

/// Two CRCs from different starts: it tells devices apart, it does not resist anybody.
fn identity_hash(identity: &str) -> u64 {
    let low = pcache_crc(identity.as_bytes());
    let high = pcache_crc(format!("{identity}.").as_bytes());
    u64::from(high) << 32 | u64::from(low)
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
    /// Nothing.
    Free,
    /// Something that was never committed: free, but its mark says otherwise.
    Uncommitted,
    /// The data block holds this block of the origin.
    Live {
        /// Number of the origin's block.
        block: u64,
    },
    /// Live, but not at the start of any block: no writecache wrote that.
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
    /// More blocks than can be named (the kernel's EFBIG, from 2^47 blocks on).
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
    /// with its words. `expected`: the block size that the table says.
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
            return Err(Error::new(Kind::Invalid, format!("{words}; 1 to {BLOCKS_MAX} work")));
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

    /// Where a `Place` may stand, on a device of `raw` bytes from the start on, that writes units
    /// of `unit` bytes: after the entries or after the data, in units that hold nothing else.
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

    /// Which metadata sector (of 512 bytes, from `start`) entry `index` is in.
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

    /// What `entry` says to a commit counter of `seq_count`, in front of an origin of
    /// `origin_bytes`, if that is known.
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
mod tests {
    use super::*;
    use crate::prng::Prng;

    fn of(raw: u64, block_bytes: u32) -> (u64, u64) {
        let geometry = Geometry::of_size(0, raw, block_bytes).unwrap();
        (geometry.blocks, geometry.data_at)
    }

    #[test]
    fn geometry_is_the_specifications() {
        assert_eq!(of(64 << 20, 4096), (16_320, 262_144));
        assert_eq!(of(64 << 20, 512), (127_100, 2_033_664));
        assert_eq!(of(64 << 20, 1024), (64_527, 1_033_216));
        assert_eq!(of(64 << 20, 2048), (32_513, 522_240));
        assert_eq!(of((64 << 20) - 4096, 4096), (16_319, 262_144));
        assert_eq!(of(1 << 30, 4096), (261_123, 4_182_016));
        assert_eq!(of(1 << 40, 4096), (267_390_960, 4_278_255_616));
        assert_eq!(of(8192, 4096), (1, 4096));
        assert_eq!(Geometry::of_size(0, 8191, 4096), Err(GeometryError::TooSmall));
        assert_eq!(Geometry::of_size(0, 1 << 62, 512), Err(GeometryError::TooLarge));
    }

    #[test]
    fn random_sizes_are_filled_and_not_overfilled() {
        let mut prng = Prng::new(1);
        for _ in 0..2000 {
            let block_bytes = 512 << prng.below(8);
            let raw = 512 * prng.below(200_000);
            let fits = |n: u64| {
                let block = u64::from(block_bytes);
                (64 + 16 * n).div_ceil(block) * block + n * block <= raw
            };
            match Geometry::of_size(0, raw, block_bytes) {
                Ok(geometry) => {
                    assert!(fits(geometry.blocks), "{raw} {block_bytes}");
                    assert!(!fits(geometry.blocks + 1), "{raw} {block_bytes}");
                }
                Err(_) => assert!(!fits(1), "{raw} {block_bytes}"),
            }
        }
    }

    #[test]
    fn the_superblock_is_checked_in_the_kernels_order() {
        let fresh = Superblock::fresh(&Geometry::of_size(0, 8192, 4096).unwrap());
        let check = |superblock: &Superblock, raw| {
            Geometry::of_superblock(superblock, 512, raw, Some(4096)).map_err(|e| e.to_string())
        };
        assert_eq!(check(&fresh, 8192).unwrap().blocks, 1);
        let refused = |change: fn(&mut Superblock), words: &str| {
            let mut superblock = fresh;
            change(&mut superblock);
            let error = check(&superblock, 8192).unwrap_err();
            assert!(error.starts_with(words), "{error}");
        };
        refused(|s| s.magic.set(0), "Invalid magic in the superblock: 0x00000000 at byte 512");
        refused(|s| (s.magic.set(1), s.version.set(2)).0, "Invalid magic in the superblock");
        refused(|s| s.version.set(2), "Invalid version in the superblock: 2 at byte 516");
        refused(|s| s.block_bytes.set(512), "Block size does not match superblock: 512");
        refused(|s| s.blocks.set(1 << 61), "Overflow in size calculation");
        refused(|s| s.blocks.set(2), "Memory area is too small: 2 blocks at byte 528");
        refused(|s| s.blocks.set(0), "Cannot allocate memory");
        // A grown device keeps its old number of blocks.
        assert_eq!(check(&fresh, 1 << 30).unwrap().blocks, 1);
    }

    #[test]
    fn entries_are_found_in_their_sectors() {
        let geometry = Geometry::of_size(0, 1 << 20, 512).unwrap();
        assert_eq!(geometry.entries_in(0), 0..28);
        assert_eq!(geometry.entries_in(1), 28..60);
        for index in 0..geometry.blocks {
            assert!(geometry.entries_in(geometry.sector_of(index)).contains(&index));
        }
        let last = geometry.sector_of(geometry.blocks - 1);
        assert_eq!(geometry.entries_in(last).end, geometry.blocks);
    }

    #[test]
    fn entries_say_what_the_specification_says() {
        let geometry = Geometry::of_size(0, 1 << 20, 4096).unwrap();
        let state = |sector, seq| geometry.state_of(&Entry::new(sector, seq), 9, Some(1 << 20));
        assert_eq!(state(8, 8), EntryState::Live { block: 1 });
        assert_eq!(state(8, 9), EntryState::Uncommitted);
        assert_eq!(state(8, FREE - 1), EntryState::Uncommitted);
        assert_eq!(state(8, FREE), EntryState::Free);
        assert_eq!(state(9, 8), EntryState::Misaligned);
        assert_eq!(state(2048, 8), EntryState::BeyondOrigin);
        assert_eq!(state(FREE, 8), EntryState::BeyondOrigin);
    }

    #[test]
    fn a_label_binds() {
        let label = Label::new("file 7", 1 << 20, 5);
        assert!(label.is_valid() && !Label::new_zeroed().is_valid());
        assert!(label.is_bound_to("file 7", 1 << 20) && label.is_bound_to("file 7", 2 << 20));
        assert!(!label.is_bound_to("file 8", 1 << 20) && !label.is_bound_to("file 7", 1 << 19));
        let mut next = label;
        next.attach.set(6);
        assert!(next.is_valid(), "an attach changes nothing that is checked");
        let served = label.served(0x123_4567, "/run/udm");
        assert!(served.is_valid() && served.is_served() && !served.at_rest().is_served());
        assert!(served.is_of_boot(0x123_4567) && !served.is_of_boot(0x123_4568));
        assert!(served.is_of_place("/run/udm") && !served.is_of_place("/run/udm2"));
        assert_eq!((served.attach_id(), served.origin_sectors()), (5, 2048));
        assert!(served.is_bound_to("file 7", 1 << 20));
        let mut between = served.at_rest();
        between.check = served.check;
        assert!(between.is_valid(), "torn between the two words");
        let mut torn = label;
        torn.origin_sectors.set(6);
        assert!(!torn.is_valid());
    }
}
