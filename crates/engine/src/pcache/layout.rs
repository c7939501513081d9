//! Every on-media byte of dm-pcache (target version 0.1.0, Linux 6.18 to 7.2). No other file
//! knows an offset.
//!
//! ```text
//! 0        .. 4095     unused by the kernel; holds our label (label.rs)
//! 4096     .. 8191     superblock (24 bytes)
//! 8192     .. 16383    cache_info, two slots of 24 bytes, 4096 apart
//! 16384    .. 20479    key_tail at +0 and +16, dirty_tail at +32 and +48
//! 20480 + i * 16 MiB   physical segment i:
//!     0     .. 8191    segment info, two slots of 16 bytes, 4096 apart
//!     8192  .. 12287   generation, two slots of 16 bytes at +0 and +16
//!     12288 .. end     data: cached bytes, or a stretch of the log
//! ```
//!
//! All structures but the superblock are host-endian on media; we read and write little-endian
//! ones only. The first four bytes of each are its CRC over the rest (`crc.rs`).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::base::crc::pcache_crc;
use crate::units::MIB;

/// Bytes at the front of the device that the kernel never reads or writes.
pub const LABEL_BYTES: u64 = 4096;
/// Place of the superblock.
pub const SUPERBLOCK_AT: u64 = 4096;
/// Address of cache_info's slot 0; slot 1 follows one [`PAGE_STRIDE`] later.
pub const CACHE_INFO_AT: u64 = 8192;
/// Address of key_tail's slot 0; slot 1 follows one [`SMALL_STRIDE`] later.
pub const KEY_TAIL_AT: u64 = 16384;
/// Place of dirty_tail's slot 0.
pub const DIRTY_TAIL_AT: u64 = 16416;
/// First byte after the control block.
pub const CONTROL_END: u64 = 20480;
/// Place of the first segment.
pub const SEGMENTS_AT: u64 = 20480;
/// Bytes of metadata at the front of a segment.
pub const SEGMENT_META_BYTES: u64 = 12288;
/// Place of the generation's slot 0 within a segment.
const GENERATION_IN_SEGMENT: u64 = 8192;
/// Distance of slots that have a page each.
pub const PAGE_STRIDE: u64 = 4096;
/// Distance of slots that share a cache line.
pub const SMALL_STRIDE: u64 = 16;

/// Smallest cache device that the kernel accepts, in bytes.
pub const DEVICE_BYTES_MIN: u64 = 512 * MIB;
/// Most segments a cache may have.
pub const SEGMENTS_MAX: u64 = 1 << 20;
/// No segment is ever reused this often; a larger generation on media is damage, and would
/// overflow.
pub const GENERATION_MAX: u64 = 1 << 62;
/// Keys in a full key set.
pub const KEYS_MAX: usize = 128;
/// Bytes of a key.
pub const KEY_BYTES: usize = 40;
/// Bytes of a key set's header; also of a LAST record and of the terminator.
pub const KSET_HEADER_BYTES: usize = 24;
/// Bytes of a full key set.
pub const KSET_BYTES_MAX: usize = KSET_HEADER_BYTES + KEYS_MAX * KEY_BYTES;
/// The unit of logical sharding: no key crosses a border of this many bytes.
pub const REGION_BYTES: u64 = 4 * MIB;

/// Superblock magic.
pub const SUPERBLOCK_MAGIC: u64 = 0x65B0_5EFA_96C5_96EF;
/// Key set magic.
pub const KSET_MAGIC: u64 = 0x6768_94A6_4E16_4F1A;

/// Superblock flag: formatted on a big-endian host.
pub const SUPERBLOCK_BIG_ENDIAN: u32 = 1;
/// cache_info flag: keys carry a CRC of their data.
pub const INFO_DATA_CRC: u32 = 1;
/// cache_info flag: formatting finished.
pub const INFO_INIT_DONE: u32 = 2;
/// cache_info: first bit of the GC percentage, 7 bits wide.
pub const INFO_GC_SHIFT: u32 = 6;
/// Segment info flag: `next` is meaningful.
pub const SEGMENT_HAS_NEXT: u32 = 1;
/// Segment info: type "cache data" in bits 1..=4.
pub const SEGMENT_TYPE_DATA: u32 = 2;
/// Key flag: in-memory placeholder, never on media.
pub const KEY_EMPTY: u32 = 1;
/// Key flag: the backing device holds the same.
pub const KEY_CLEAN: u32 = 2;
/// Key set flag: `key_num` names the next log segment.
pub const KSET_LAST: u64 = 1;

/// The GC percentage of a fresh cache.
pub const GC_PERCENT_DEFAULT: u32 = 70;
/// The largest GC percentage.
pub const GC_PERCENT_MAX: u32 = 90;

/// The one size that tests scale down: the distance of segments, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// 16 MiB on every kernel.
    pub segment_bytes: u64,
    /// The smallest device accepted.
    pub device_bytes_min: u64,
}

impl Geometry {
    /// The kernel's.
    pub const KERNEL: Geometry =
        Geometry { segment_bytes: 16 * MIB, device_bytes_min: DEVICE_BYTES_MIN };

    /// Usable bytes of a segment.
    pub fn data_bytes(self) -> u32 {
        (self.segment_bytes - SEGMENT_META_BYTES) as u32
    }

    /// How many segments a device of `device_bytes` holds.
    pub fn segments_on(self, device_bytes: u64) -> u64 {
        device_bytes.saturating_sub(SEGMENTS_AT) / self.segment_bytes
    }

    fn segment_at(self, physical: u32) -> u64 {
        SEGMENTS_AT + u64::from(physical) * self.segment_bytes
    }

    /// Place of slot 0 of a segment's info.
    pub fn segment_info_at(self, physical: u32) -> u64 {
        self.segment_at(physical)
    }

    /// Place of slot 0 of a segment's generation.
    pub fn generation_at(self, physical: u32) -> u64 {
        self.segment_at(physical) + GENERATION_IN_SEGMENT
    }

    /// Place of a segment's data area.
    pub fn data_at(self, physical: u32) -> u64 {
        self.segment_at(physical) + SEGMENT_META_BYTES
    }
}

/// A structure that starts with its own CRC.
pub trait Sealed: IntoBytes + FromBytes + Immutable + KnownLayout + Unaligned + Copy {
    /// Stores the CRC over bytes 4.. into bytes 0..4.
    fn seal(mut self) -> Self {
        let crc = pcache_crc(&self.as_bytes()[4..]).to_le_bytes();
        self.as_mut_bytes()[..4].copy_from_slice(&crc);
        self
    }

    /// Whether the CRC is right. An all-zero structure never is.
    fn is_sealed(&self) -> bool {
        pcache_crc(&self.as_bytes()[4..]).to_le_bytes() == self.as_bytes()[..4]
    }
}

macro_rules! on_media {
    (
        $(#[$doc:meta])* $name:ident, $size:expr,
        { $($(#[$fdoc:meta])* $field:ident: $ty:ty = $at:expr,)* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty,)* }
        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(core::mem::offset_of!($name, $field) == $at);)*
        };
        impl Sealed for $name {}
    };
}

on_media!(
    /// The superblock: single copy, little-endian on every host.
    Superblock, 24, {
        /// CRC over bytes 4..24.
        crc: U32 = 0,
        /// Bit 0: big-endian host.
        flags: U32 = 4,
        /// [`SUPERBLOCK_MAGIC`].
        magic: U64 = 8,
        /// Segments on the device.
        seg_num: U32 = 16,
        /// The bytes on the medium before formatting; covered by the CRC.
        padding: U32 = 20,
    }
);

on_media!(
    /// The head of every two-slot structure.
    Header, 8, {
        /// CRC over the rest of the containing structure.
        crc: U32 = 0,
        /// Update counter, wraps.
        seq: u8 = 4,
        /// Written as 0, may hold anything.
        version: u8 = 5,
        /// Written as 0, may hold anything.
        res: U16 = 6,
    }
);

impl Header {
    fn new(seq: u8) -> Header {
        Header { crc: U32::ZERO, seq, version: 0, res: U16::ZERO }
    }
}

/// A structure with two slots.
pub trait Slotted: Sealed {
    /// Its sequence number.
    fn seq(&self) -> u8;
}

on_media!(
    /// The properties of the whole cache.
    CacheInfo, 24, {
        /// See [`Header`].
        header: Header = 0,
        /// Physical number of logical segment 0.
        first_segment: U32 = 8,
        /// Length of the chain of segments.
        n_segs: U32 = 12,
        /// DATA_CRC, INIT_DONE, cache mode, GC percentage.
        flags: U32 = 16,
        /// 0.
        reserved: U32 = 20,
    }
);

on_media!(
    /// A position in the log: key_tail or dirty_tail.
    Tail, 16, {
        /// See [`Header`].
        header: Header = 0,
        /// Logical segment.
        segment: U32 = 8,
        /// Byte in its data area.
        offset: U32 = 12,
    }
);

on_media!(
    /// A link of the chain of segments.
    SegmentInfo, 16, {
        /// See [`Header`].
        header: Header = 0,
        /// HAS_NEXT and the type.
        flags: U32 = 8,
        /// Physical number of the next segment.
        next: U32 = 12,
    }
);

on_media!(
    /// How often a segment was reused.
    Generation, 16, {
        /// See [`Header`].
        header: Header = 0,
        /// Rises before each reuse.
        generation: U64 = 8,
    }
);

on_media!(
    /// The head of a key set, or a whole LAST record.
    KsetHeader, 24, {
        /// CRC over the rest of the header and all keys.
        crc: U32 = 0,
        /// Number of keys; in a LAST record the next log segment.
        key_num: U32 = 4,
        /// [`KSET_MAGIC`].
        magic: U64 = 8,
        /// Bit 0: LAST.
        flags: U64 = 16,
    }
);

on_media!(
    /// One cached extent.
    Key, 40, {
        /// First byte on the cached device.
        off: U64 = 0,
        /// Bytes.
        len: U32 = 8,
        /// [`KEY_CLEAN`] or 0.
        flags: U32 = 12,
        /// Logical segment that holds the data.
        segment: U32 = 16,
        /// Where in that segment's data area.
        segment_off: U32 = 20,
        /// That segment's generation when the space was taken.
        generation: U64 = 24,
        /// CRC of the data, with DATA_CRC; else 0.
        data_crc: U32 = 32,
        /// 0.
        reserved: U32 = 36,
    }
);

impl Slotted for CacheInfo {
    fn seq(&self) -> u8 {
        self.header.seq
    }
}
impl Slotted for Tail {
    fn seq(&self) -> u8 {
        self.header.seq
    }
}
impl Slotted for SegmentInfo {
    fn seq(&self) -> u8 {
        self.header.seq
    }
}
impl Slotted for Generation {
    fn seq(&self) -> u8 {
        self.header.seq
    }
}

impl Superblock {
    /// A sealed superblock. `padding` is the earlier content of the medium, which the kernel keeps,
    /// and so does udm.
    pub fn new(seg_num: u32, padding: u32) -> Superblock {
        Superblock {
            crc: U32::ZERO,
            flags: U32::ZERO,
            magic: U64::new(SUPERBLOCK_MAGIC),
            seg_num: U32::new(seg_num),
            padding: U32::new(padding),
        }
        .seal()
    }
}

impl CacheInfo {
    /// A sealed record.
    pub fn new(seq: u8, first_segment: u32, n_segs: u32, flags: u32) -> CacheInfo {
        CacheInfo {
            header: Header::new(seq),
            first_segment: U32::new(first_segment),
            n_segs: U32::new(n_segs),
            flags: U32::new(flags),
            reserved: U32::ZERO,
        }
        .seal()
    }
}

/// The flags word of cache_info for a finished write-back cache.
pub fn info_flags(gc_percent: u32, has_data_crc: bool) -> u32 {
    gc_percent << INFO_GC_SHIFT | INFO_INIT_DONE | if has_data_crc { INFO_DATA_CRC } else { 0 }
}

/// The GC percentage in a flags word. Not range-checked on media.
pub fn gc_percent_of(flags: u32) -> u32 {
    flags >> INFO_GC_SHIFT & 0x7F
}

impl Tail {
    /// A sealed record.
    pub fn new(seq: u8, position: Position) -> Tail {
        Tail {
            header: Header::new(seq),
            segment: U32::new(position.segment),
            offset: U32::new(position.offset),
        }
        .seal()
    }

    /// Where it points.
    pub fn position(&self) -> Position {
        Position { segment: self.segment.get(), offset: self.offset.get() }
    }
}

impl SegmentInfo {
    /// A sealed record; `next` is the physical number of the following segment.
    pub fn new(seq: u8, next: Option<u32>) -> SegmentInfo {
        let has_next = if next.is_some() { SEGMENT_HAS_NEXT } else { 0 };
        SegmentInfo {
            header: Header::new(seq),
            flags: U32::new(SEGMENT_TYPE_DATA | has_next),
            next: U32::new(next.unwrap_or(0)),
        }
        .seal()
    }
}

impl Generation {
    /// A sealed record.
    pub fn new(seq: u8, generation: u64) -> Generation {
        Generation { header: Header::new(seq), generation: U64::new(generation) }.seal()
    }
}

impl KsetHeader {
    /// A sealed LAST record: the log continues at the start of logical segment `next`.
    pub fn last(next: u32) -> KsetHeader {
        KsetHeader {
            crc: U32::ZERO,
            key_num: U32::new(next),
            magic: U64::new(KSET_MAGIC),
            flags: U64::new(KSET_LAST),
        }
        .seal()
    }
}

/// Bytes of a key set of `keys` keys.
pub const fn kset_bytes(keys: usize) -> usize {
    KSET_HEADER_BYTES + keys * KEY_BYTES
}

/// Writes the header and CRC of a key set whose `keys` keys are already in `set[24..]`.
pub fn seal_kset(set: &mut [u8], keys: usize) {
    let header = KsetHeader {
        crc: U32::ZERO,
        key_num: U32::new(keys as u32),
        magic: U64::new(KSET_MAGIC),
        flags: U64::ZERO,
    };
    set[..KSET_HEADER_BYTES].copy_from_slice(header.as_bytes());
    let crc = pcache_crc(&set[4..kset_bytes(keys)]);
    set[..4].copy_from_slice(&crc.to_le_bytes());
}

/// A position in the log: a logical segment and a byte of its data area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Position {
    /// Logical segment.
    pub segment: u32,
    /// Byte in its data area.
    pub offset: u32,
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.segment, self.offset)
    }
}

/// The record at a position of the log.
#[derive(Debug)]
pub enum Record<'a> {
    /// A key set; its bytes are `24 + 40 * keys.len()`.
    Keys(&'a [Key]),
    /// The log continues at the start of this logical segment.
    Last(u32),
}

/// The content of the header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heading {
    /// A key set of this many keys, if its CRC is right.
    Keys(usize),
    /// The log continues at the start of this logical segment.
    Last(u32),
}

/// Reads the header at the start of `bytes`. `None`: not valid.
pub fn parse_heading(bytes: &[u8]) -> Option<Heading> {
    let (header, _) = KsetHeader::ref_from_prefix(bytes).ok()?;
    if header.magic.get() != KSET_MAGIC {
        return None;
    }
    if header.flags.get() & KSET_LAST != 0 {
        return header.is_sealed().then(|| Heading::Last(header.key_num.get()));
    }
    let count = header.key_num.get() as usize;
    (count <= KEYS_MAX).then_some(Heading::Keys(count))
}

/// Reads the record at the start of `bytes` (everything from the position to the segment's end, or
/// [`KSET_BYTES_MAX`] of it). `None`: not valid, so the log ends here or is damaged here.
pub fn parse_record(bytes: &[u8]) -> Option<Record<'_>> {
    let count = match parse_heading(bytes)? {
        Heading::Last(next) => return Some(Record::Last(next)),
        Heading::Keys(count) => count,
    };
    let (header, keys) = KsetHeader::ref_from_prefix(bytes).ok()?;
    let (keys, _) = <[Key]>::ref_from_prefix_with_elems(keys, count).ok()?;
    let covered = &bytes[4..kset_bytes(count)];
    (pcache_crc(covered) == header.crc.get()).then_some(Record::Keys(keys))
}
