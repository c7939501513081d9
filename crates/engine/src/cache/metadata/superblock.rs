//! Block 0: the roots of everything, and what the cache is.
//!
//! The fields stand in the first 512 bytes on purpose. The rest of the block stays as it is, so a
//! disk that writes whole sectors writes all of the superblock or nothing of it, although the
//! checksum covers all 4096 bytes. What is not known here stays as it was found.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::block::{BLOCK_BYTES, Block, BlockKind, damaged};
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

/// The fields.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Fields {
    checksum: U32,
    /// [`CLEAN_SHUTDOWN`], [`NEEDS_CHECK`], and what is not known.
    pub flags: U32,
    own_address: U64,
    /// Nobody uses it.
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
    /// What is known of it.
    pub fields: Fields,
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
        Superblock { fields, rest: Box::new([0; BLOCK_BYTES - FIELDS_BYTES]) }
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
            let what = format!("no cache metadata: magic {found:#x}, expected {MAGIC:#x}");
            return Err(damaged(0, what).into());
        }
        BlockKind::Superblock.check(block, 0)?;
        superblock.check()?;
        Ok(Some(superblock))
    }

    /// The fields of `block`, whatever they are.
    pub fn unchecked(block: &Block) -> Superblock {
        let (mut fields, rest) =
            Fields::read_from_prefix(block).expect("a block has room for them");
        // What is computed when it is written.
        (fields.checksum, fields.own_address) = (U32::ZERO, U64::ZERO);
        let mut superblock = Superblock { fields, rest: Box::new([0; BLOCK_BYTES - FIELDS_BYTES]) };
        superblock.rest.copy_from_slice(rest);
        superblock
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
                "metadata block 0: version {version} of the metadata is not known; 1 and 2 are"
            ));
        }
        let sectors = fields.metadata_sectors.get();
        if sectors != BLOCK_SECTORS {
            return unsupported(format!(
                "metadata block 0: metadata blocks of {sectors} sectors, expected {BLOCK_SECTORS}"
            ));
        }
        if fields.data_sectors.get() == 0 {
            return Err(damaged(0, "the cache's blocks have no size").into());
        }
        let unknown = fields.incompat.get();
        if unknown != 0 {
            return unsupported(format!(
                "metadata block 0: it has features that are not known here ({unknown:#x})"
            ));
        }
        Ok(())
    }

    /// Whether it may be written by who knows only what is known here, and makes a cache that the
    /// kernel takes.
    pub fn check_writable(&self) -> Result<()> {
        let unknown = self.fields.compat_ro.get();
        if unknown != 0 {
            let message = format!(
                "metadata block 0: it has features that only allow reading here ({unknown:#x})"
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

    /// Version 1 or 2.
    pub fn version(&self) -> u32 {
        self.fields.version.get()
    }

    /// Blocks of the cache device.
    pub fn slots(&self) -> u64 {
        self.fields.slots.get().into()
    }

    /// The policy's name, as far as it is text.
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
        "blocks of {sectors} sectors: a multiple of {DATA_SECTORS_MIN} from {DATA_SECTORS_MIN} to \
         {DATA_SECTORS_MAX} works"
    );
    Err(Error::new(Kind::Invalid, message))
}
