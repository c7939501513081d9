//! Block 0, the superblock: the roots of all trees, and the properties of the cache.
//!
//! All fields are in the first 512 bytes. The rest of the block never changes, so a disk that
//! writes whole sectors writes all of the superblock or none of it, although the checksum covers
//! all 4096 bytes. Unknown fields keep their values.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::block::{BLOCK_BYTES, Block, BlockKind, damaged};
use super::doubt::{DOUBT_AT, DOUBT_BYTES, Doubt};
use crate::base::crc::crc32c_raw;
use crate::disk::Stamp;
use crate::error::{Error, Kind, Result};

/// The magic number: octal 06142003.
pub const MAGIC: u64 = 0x18_C403;
/// The newest version.
pub const VERSION_MAX: u32 = 2;
/// Sectors of a metadata block.
pub const BLOCK_SECTORS: u32 = 8;
/// Bit of [`Fields::flags`]: dirty bits, hints and discards are valid.
pub const CLEAN_SHUTDOWN: u32 = 1;
/// Bit of [`Fields::flags`]: the metadata is to be checked before it is used.
pub const NEEDS_CHECK: u32 = 2;
/// The block sizes that the kernel takes, in sectors, are multiples of this.
pub const DATA_SECTORS_MIN: u32 = 64;
/// The largest of them.
pub const DATA_SECTORS_MAX: u32 = 2_097_152;
/// Bytes of the fields.
const FIELDS_BYTES: usize = 292;

/// Where the mark of an untrusted cache is: in the first sector, which changes as a whole. The
/// kernel keeps what is there. The mark counts as long as the fields are those with which it was
/// written: a kernel that serves the cache changes them.
const UNTRUSTED_AT: usize = 480;
const UNTRUSTED_BYTES: usize = 8;
const UNTRUSTED_MAGIC: [u8; 4] = *b"udmt";

fn untrusted_mark(fields: &Fields) -> [u8; UNTRUSTED_BYTES] {
    let sum = !fields.sum();
    let mut mark = [0; UNTRUSTED_BYTES];
    mark[..4].copy_from_slice(&UNTRUSTED_MAGIC);
    mark[4..].copy_from_slice(&sum.to_le_bytes());
    mark
}

/// Where the note of the origin is: at the end of the first sector, which changes as a whole. The
/// kernel keeps what is there.
const NOTE_AT: usize = 488;
const NOTE_MAGIC: [u8; 4] = *b"udmo";

/// The note of the origin at the orderly end of its cache. It counts as long as the fields are
/// those with which it was written: a kernel that serves the cache changes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OriginNote {
    /// The origin's stamp.
    pub stamp: Stamp,
    /// The length of the origin.
    pub bytes: u64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct NoteOnMedia {
    magic: [u8; 4],
    check: U32,
    stamp: U64,
    bytes: U64,
}

const _: () = assert!(NOTE_AT + size_of::<NoteOnMedia>() == 512);
const NOTE: std::ops::Range<usize> =
    NOTE_AT - FIELDS_BYTES..NOTE_AT - FIELDS_BYTES + size_of::<NoteOnMedia>();

impl NoteOnMedia {
    /// The checksum of the fields, except computed ones, and of the note.
    fn sum(&self, fields: &Fields) -> u32 {
        let note = NoteOnMedia { check: U32::ZERO, ..*self };
        !crc32c_raw(fields.sum(), note.as_bytes())
    }
}

/// The fields.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Fields {
    checksum: U32,
    /// [`CLEAN_SHUTDOWN`], [`NEEDS_CHECK`], and unknown flags.
    pub flags: U32,
    own_address: U64,
    /// Unused by the kernel.
    pub uuid: [u8; 16],
    magic: U64,
    /// 1 or 2.
    pub version: U32,
    /// Name of the policy, with zeroes after it.
    pub policy_name: [u8; 16],
    /// Bytes of a hint: 0 or 4.
    pub hint_bytes: U32,
    /// Root of the space map.
    pub map: MapRoot,
    map_rest: [u8; 96],
    /// Root of the mappings.
    pub mapping_root: U64,
    /// Root of the hints; 0: there are none.
    pub hint_root: U64,
    /// Root of the discards.
    pub discard_root: U64,
    /// Sectors of a discard block.
    pub discard_sectors: U64,
    /// Discard blocks.
    pub discard_blocks: U64,
    /// Sectors of a block of the cache.
    pub data_sectors: U32,
    /// Sectors of a metadata block.
    pub metadata_sectors: U32,
    /// Blocks of the cache device.
    pub slots: U32,
    /// Features that may be unknown.
    pub compat: U32,
    /// Features that a writer must know.
    pub compat_ro: U32,
    /// Features that a reader must know.
    pub incompat: U32,
    /// Blocks read that were cached.
    pub read_hits: U32,
    /// Blocks read that were not.
    pub read_misses: U32,
    /// Blocks written that were cached.
    pub write_hits: U32,
    /// Blocks written that were not.
    pub write_misses: U32,
    /// Version of the policy.
    pub policy_version: [U32; 3],
    /// Root of the dirty bits; 0 in version 1.
    pub dirty_root: U64,
}

impl Fields {
    /// The state of a CRC-32C after the fields, except those that each write computes.
    fn sum(&self) -> u32 {
        let fields = Fields { checksum: U32::ZERO, own_address: U64::ZERO, ..*self };
        crc32c_raw(u32::MAX, fields.as_bytes())
    }
}

/// Root of the space map.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct MapRoot {
    /// Blocks that have a count.
    pub managed: U64,
    /// Blocks whose count is not 0.
    pub allocated: U64,
    /// Address of the index.
    pub index: U64,
    /// Root of the counts above 2.
    pub overflow: U64,
}

const _: () = assert!(size_of::<Fields>() == FIELDS_BYTES);
const _: () = assert!(std::mem::offset_of!(Fields, map) == 64);
const _: () = assert!(std::mem::offset_of!(Fields, mapping_root) == 192);
const _: () = assert!(std::mem::offset_of!(Fields, incompat) == 252);
const _: () = assert!(std::mem::offset_of!(Fields, dirty_root) == 284);

/// The superblock.
#[derive(Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Its known fields.
    pub fields: Fields,
    /// The origin has all data, and the cache device may have older data: no mapping must be
    /// trusted.
    pub is_untrusted: bool,
    /// The devices that failed a flush since the machine started.
    pub doubt: Doubt,
    /// The note of the origin.
    pub note: Option<OriginNote>,
    rest: Box<[u8; BLOCK_BYTES - FIELDS_BYTES]>,
}

impl std::fmt::Debug for Superblock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.fields.fmt(f)
    }
}

impl Superblock {
    /// That of a device that is being formatted, without roots.
    pub fn fresh(version: u32, data_sectors: u32) -> Superblock {
        let mut fields = Fields::new_zeroed();
        fields.magic.set(MAGIC);
        fields.version.set(version);
        fields.data_sectors.set(data_sectors);
        fields.metadata_sectors.set(BLOCK_SECTORS);
        let rest = Box::new([0; BLOCK_BYTES - FIELDS_BYTES]);
        Superblock { fields, is_untrusted: false, doubt: Doubt::default(), note: None, rest }
    }

    /// The superblock in `block`, checked in the kernel's order; none if that is blank.
    pub fn parse(block: &Block) -> Result<Option<Superblock>> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let superblock = Superblock::unchecked(block);
        let fields = &superblock.fields;
        if fields.magic.get() != MAGIC {
            let found = fields.magic.get();
            let what = format!("not cache metadata: magic {found:#x}, expected {MAGIC:#x}");
            return Err(damaged(0, what).into());
        }
        BlockKind::Superblock.check(block, 0)?;
        superblock.check()?;
        Ok(Some(superblock))
    }

    /// The fields of `block`, unchecked.
    pub fn unchecked(block: &Block) -> Superblock {
        let (mut fields, rest) =
            Fields::read_from_prefix(block).expect("a block has room for them");
        // Fields that are computed when it is written.
        (fields.checksum, fields.own_address) = (U32::ZERO, U64::ZERO);
        let rest_of = Box::new([0; BLOCK_BYTES - FIELDS_BYTES]);
        let doubt = Doubt::default();
        let mut superblock =
            Superblock { fields, is_untrusted: false, doubt, note: None, rest: rest_of };
        superblock.rest.copy_from_slice(rest);
        superblock.take_doubt();
        superblock.take_untrusted_mark();
        superblock.take_note();
        superblock
    }

    /// Finds the mark of devices that failed a flush.
    fn take_doubt(&mut self) {
        let at = DOUBT_AT - FIELDS_BYTES;
        let place = &mut self.rest[at..at + DOUBT_BYTES];
        if let Some(doubt) = Doubt::parse(place) {
            self.doubt = doubt;
            place.fill(0);
        }
    }

    /// Finds the mark in the bytes after the fields. One that does not count goes with the next
    /// superblock that is written.
    fn take_untrusted_mark(&mut self) {
        let mark = untrusted_mark(&self.fields);
        let at = UNTRUSTED_AT - FIELDS_BYTES;
        let place = &mut self.rest[at..at + UNTRUSTED_BYTES];
        self.is_untrusted = *place == mark;
        if place.starts_with(&UNTRUSTED_MAGIC) {
            place.fill(0);
        }
    }

    /// Finds the note in the bytes after the fields. One that does not count goes with the next
    /// superblock that is written.
    fn take_note(&mut self) {
        let place = &mut self.rest[NOTE];
        let Ok(note) = NoteOnMedia::read_from_bytes(place) else { return };
        if note.magic != NOTE_MAGIC {
            return;
        }
        place.fill(0);
        let is_of_fields = note.check.get() == note.sum(&self.fields);
        let stamp = Stamp::from_bits(note.stamp.get()).filter(|_| is_of_fields);
        self.note = stamp.map(|stamp| OriginNote { stamp, bytes: note.bytes.get() });
    }

    /// Stores the note, unless another program uses these bytes.
    fn put_note(&self, block: &mut Block) {
        let place = &mut block[NOTE_AT..NOTE_AT + size_of::<NoteOnMedia>()];
        let Some(note) = self.note.filter(|_| place.iter().all(|byte| *byte == 0)) else { return };
        let mut on_media = NoteOnMedia {
            magic: NOTE_MAGIC,
            check: U32::ZERO,
            stamp: U64::new(note.stamp.bits()),
            bytes: U64::new(note.bytes),
        };
        on_media.check.set(on_media.sum(&self.fields));
        place.copy_from_slice(on_media.as_bytes());
    }

    /// Whether the magic number is there.
    pub fn has_magic(&self) -> bool {
        self.fields.magic.get() == MAGIC
    }

    /// Whether the fields are those of metadata that can be read here.
    pub fn check(&self) -> Result<()> {
        let fields = &self.fields;
        let unsupported = |message: String| Err(Error::new(Kind::Unsupported, message));
        let version = fields.version.get();
        if !(1..=VERSION_MAX).contains(&version) {
            return unsupported(format!(
                "metadata block 0: unknown version {version} of the metadata; versions 1 and 2 are \
                supported"
            ));
        }
        let sectors = fields.metadata_sectors.get();
        if sectors != BLOCK_SECTORS {
            return unsupported(format!(
                "metadata block 0: metadata blocks of {sectors} sectors, expected {BLOCK_SECTORS}"
            ));
        }
        if fields.data_sectors.get() == 0 {
            return Err(damaged(0, "the cache's block size is 0").into());
        }
        let unknown = fields.incompat.get();
        if unknown != 0 {
            return unsupported(format!(
                "metadata block 0: it has unknown features ({unknown:#x})"
            ));
        }
        Ok(())
    }

    /// Whether a writer that knows only these fields may write it, and the kernel accepts the
    /// result.
    pub fn check_writable(&self) -> Result<()> {
        let unknown = self.fields.compat_ro.get();
        if unknown != 0 {
            let message = format!(
                "metadata block 0: it has unknown features that only allow reading ({unknown:#x})"
            );
            return Err(Error::new(Kind::Unsupported, message));
        }
        check_data_sectors(self.fields.data_sectors.get())
    }

    /// The block, ready to be written.
    pub fn build(&self) -> Block {
        let mut block = [0; BLOCK_BYTES];
        block[..FIELDS_BYTES].copy_from_slice(self.fields.as_bytes());
        block[FIELDS_BYTES..].copy_from_slice(&self.rest[..]);
        self.doubt.put(&mut block[DOUBT_AT..DOUBT_AT + DOUBT_BYTES]);
        if self.is_untrusted {
            let place = UNTRUSTED_AT..UNTRUSTED_AT + UNTRUSTED_BYTES;
            block[place].copy_from_slice(&untrusted_mark(&self.fields));
        }
        self.put_note(&mut block);
        BlockKind::Superblock.seal(&mut block, 0);
        block
    }

    /// Whether dirty bits, hints and discards are valid.
    pub fn is_clean(&self) -> bool {
        self.fields.flags.get() & CLEAN_SHUTDOWN != 0
    }

    /// Whether it is to be checked before it is used.
    pub fn needs_check(&self) -> bool {
        self.fields.flags.get() & NEEDS_CHECK != 0
    }

    /// Changes one flag.
    pub fn put_flag(&mut self, flag: u32, is_set: bool) {
        let flags = self.fields.flags.get();
        self.fields.flags.set(if is_set { flags | flag } else { flags & !flag });
    }

    /// Its properties that XML cannot express, in words: unknown flags and features, and the mark
    /// of devices that failed a flush.
    pub fn beyond_xml(&self) -> Option<String> {
        let fields = &self.fields;
        let flags = fields.flags.get() & !(CLEAN_SHUTDOWN | NEEDS_CHECK);
        let all = [
            ("unknown flags", flags),
            ("unknown compatible features", fields.compat.get()),
            ("unknown features that only allow reading", fields.compat_ro.get()),
        ];
        let found = all.iter().filter(|(_, bits)| *bits != 0);
        let mut found: Vec<String> =
            found.map(|(what, bits)| format!("{what} {bits:#x}")).collect();
        if self.doubt != Doubt::default() {
            found.push("the mark of a device that failed a flush".to_owned());
        }
        (!found.is_empty()).then(|| found.join(", "))
    }

    /// Version 1 or 2.
    pub fn version(&self) -> u32 {
        self.fields.version.get()
    }

    /// Blocks of the cache device.
    pub fn slots(&self) -> u64 {
        self.fields.slots.get().into()
    }

    /// The policy's name, up to the first byte that is not text.
    pub fn policy(&self) -> String {
        let name = self.fields.policy_name;
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        String::from_utf8_lossy(&name[..end]).into_owned()
    }

    /// Sets the policy's name, of which 15 bytes have room.
    pub fn set_policy(&mut self, name: &str) -> Result<()> {
        let mut bytes = [0; 16];
        if name.len() > 15 || name.contains('\0') {
            let message = format!("policy {name:?}: its name has more than 15 bytes");
            return Err(Error::new(Kind::Invalid, message));
        }
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        self.fields.policy_name = bytes;
        Ok(())
    }
}

/// Whether the kernel takes a cache with blocks of this many sectors.
pub fn check_data_sectors(sectors: u32) -> Result<()> {
    let is_good = (DATA_SECTORS_MIN..=DATA_SECTORS_MAX).contains(&sectors)
        && sectors.is_multiple_of(DATA_SECTORS_MIN);
    if is_good {
        return Ok(());
    }
    let message = format!(
        "blocks of {sectors} sectors: the size must be a multiple of {DATA_SECTORS_MIN} from \
         {DATA_SECTORS_MIN} to {DATA_SECTORS_MAX}"
    );
    Err(Error::new(Kind::Invalid, message))
}
