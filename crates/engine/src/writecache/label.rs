//! The directory of a server's memory, which does not fit into the label (layout.rs).

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::base::crc::pcache_crc;
use crate::units::SECTOR;

/// The directory with the memory of the server that has the cache, for people. It is a separate
/// sector, written if the device has space for one. No code depends on it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Place {
    check: U32,
    reserved: U32,
    magic: U64,
    attach: U64,
    path: [u8; 488],
}

const _: () = assert!(size_of::<Place>() as u64 == SECTOR);
const PLACE_MAGIC: u64 = u64::from_le_bytes(*b"udmplace");

impl Place {
    /// The directory of this attach's memory.
    pub fn new(attach: u64, directory: &str) -> Place {
        let mut place = Place::new_zeroed();
        place.magic.set(PLACE_MAGIC);
        place.attach.set(attach);
        let bytes = directory.as_bytes();
        let len = bytes.len().min(place.path.len());
        place.path[..len].copy_from_slice(&bytes[..len]);
        place.check.set(pcache_crc(&place.as_bytes()[4..]));
        place
    }

    /// The directory, if this record belongs to this attach.
    pub fn directory(&self, attach: u64) -> Option<String> {
        let is_its = self.magic.get() == PLACE_MAGIC
            && self.attach.get() == attach
            && self.check.get() == pcache_crc(&self.as_bytes()[4..]);
        let text = self.path.split(|&byte| byte == 0).next().unwrap_or_default();
        is_its.then(|| String::from_utf8_lossy(text).into_owned())
    }
}
