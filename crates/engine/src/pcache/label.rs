//! Our label in the first 4096 bytes of a cache device, which the kernel never touches.
//!
//! The label binds the cache to its backing device. (The kernel's format has no such binding: a
//! cache attached to the wrong device corrupts it.) It names this attach, so that shared memory can
//! be matched to media. It stores from where on the log has flush marks, how far write-back must
//! get until the backing device alone is consistent again, and ranges whose cached dirty data was
//! found damaged. It also records whether a server has the cache, or had it and died: then
//! acknowledged writes may be in memory that is named after this attach (see `shm/store.rs`), which
//! belongs to one boot of the machine.
//!
//! Two slots of 2048 bytes, chosen like every two-slot record. Little-endian. In every version,
//! bytes 0..16 of a slot are the CRC over the rest of it, the sequence number, a byte, the version
//! and the magic: so each udm recognises a label that only newer ones understand, and refuses. A
//! cache that is served has version 2. A cache that was detached in order has version 1, which all
//! versions of udm understand.
//!
//! "Served" and its end are stored into both slots: an older slot that becomes current through
//! damage must not hide existing memory.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::base::crc::pcache_crc;
use crate::disk::{DiskLimits, Match, Stamp};
use crate::error::{Error, Kind, Result, Status};
use crate::pcache::slots::SlotState;

use super::layout::{CacheInfo, Position, Sealed, Slotted};
use super::media::Media;

const MAGIC: u64 = u64::from_le_bytes(*b"udmlabel");
/// The newest version that this udm understands.
const VERSION: u16 = 2;
/// Of a cache without a server.
const VERSION_AT_REST: u16 = 1;
const PLACE_BYTES: usize = 224;
const IDENTITY_BYTES: usize = 200;
const STRIDE: u64 = Label::STRIDE;
/// `torn_segment` and `torn_offset` mean something.
const FLAG_TORN: u32 = 1;
/// `boot` and `place` mean something.
const FLAG_SERVED: u32 = 2;
/// Clean data in the log is older than the backing device.
const FLAG_STALE: u32 = 4;
/// Most quarantined ranges that the label can hold.
pub const QUARANTINE_MAX: usize = 96;

/// A range whose dirty data is damaged: reads fail until it is written again.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct BadRange {
    /// First byte on the cached device.
    pub offset: U64,
    /// Bytes.
    pub len: U64,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct OnMedia {
    crc: U32,
    seq: u8,
    reserved: u8,
    version: U16,
    magic: U64,
    attach_id: U64,
    backing_bytes: U64,
    marks_segment: U32,
    marks_offset: U32,
    info: CacheInfo,
    identity: [u8; IDENTITY_BYTES],
    bad_count: U32,
    flags: U32,
    bad: [BadRange; QUARANTINE_MAX],
    torn_segment: U32,
    torn_offset: U32,
    boot: U64,
    place: [u8; PLACE_BYTES],
}

const _: () = assert!(size_of::<OnMedia>() as u64 == STRIDE);
impl Sealed for OnMedia {
    /// A sealed slot of another program or version counts as damaged: if it counted as newer, it
    /// would hide our stores into the other slot.
    fn is_sealed(&self) -> bool {
        let is_known = (VERSION_AT_REST..=VERSION).contains(&self.version.get());
        let is_ours = self.magic.get() == MAGIC && is_known;
        is_ours && pcache_crc(&self.as_bytes()[4..]) == self.crc.get()
    }
}
impl Slotted for OnMedia {
    fn seq(&self) -> u8 {
        self.seq
    }
}

/// The content of the label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// Drawn at each attach.
    pub attach_id: u64,
    /// Size of the backing device.
    pub backing_bytes: u64,
    /// The identity of the backing device, in words; see `DiskLimits::identity`.
    pub identity: String,
    /// From here on, the log has key sets without keys wherever a client's flush or FUA write
    /// ended.
    pub marks_from: Position,
    /// cache_info at our last store: if the medium has another one, a kernel attached since.
    pub info: [u8; 24],
    /// Ranges of damaged dirty data.
    pub bad: Vec<BadRange>,
    /// Write-back that merges across flushes is in progress up to this position. As long as
    /// dirty_tail is before it, the state of the backing device alone may not match any flush.
    pub torn_until: Option<Position>,
    /// A server has the cache, or had it and died.
    pub served: Option<Serving>,
    /// What an orderly end noted of the backing device.
    pub stamp: Option<Stamp>,
    /// Clean data in the log is older than the backing device, which another program changed. This
    /// remains true until the cache is formatted.
    pub is_stale: bool,
}

/// The information about a server that the next server needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Serving {
    /// The run of the machine.
    pub boot: u64,
    /// The directory where the memory of this attach lies; empty if that does not outlive its
    /// server.
    pub place: String,
}

impl Serving {
    /// Whether the server's memory outlives it.
    pub fn has_memory(&self) -> bool {
        !self.place.is_empty()
    }
}

impl Label {
    /// Distance of the two slots.
    pub const STRIDE: u64 = 2048;

    /// Whether labels existed, but no slot tells whether or where the cache was served.
    pub fn is_lost(media: &Media) -> bool {
        Label::load(media).is_none()
            && (0..2).all(|nth| match media.load::<OnMedia>(nth * STRIDE) {
                Ok(slot) => slot.magic.get() == MAGIC,
                Err(_) => true,
            })
    }

    /// Refuses a medium with the label of a newer udm, whose binding and list of damage this
    /// version cannot read.
    pub fn refuse_newer(media: &Media) -> Result<()> {
        let read = |nth| media.load::<OnMedia>(nth * STRIDE).ok();
        let is_newer = |slot: &OnMedia| {
            let is_whole = pcache_crc(&slot.as_bytes()[4..]) == slot.crc.get();
            slot.magic.get() == MAGIC && slot.version.get() > VERSION && is_whole
        };
        let newer = (0..2).filter_map(read).filter(is_newer).map(|slot| slot.version.get()).max();
        newer.map_or(Ok(()), |version| {
            Err(Error::new(
                Kind::Unsupported,
                format!(
                    "{}: a newer udm labelled it (label version {version}, this udm supports up to \
                     {VERSION}): use that udm, or erase its first 64 KiB if its data may be lost",
                    media.name()
                ),
            ))
        })
    }

    /// Reads the label, if there is a valid one.
    pub fn load(media: &Media) -> Option<(Label, SlotState)> {
        let found = media.load_slots::<OnMedia>(0, STRIDE)?;
        let label = &found.record;
        let bad_count = (label.bad_count.get() as usize).min(QUARANTINE_MAX);
        let mut info = [0; 24];
        info.copy_from_slice(label.info.as_bytes());
        let loaded = Label {
            attach_id: label.attach_id.get(),
            backing_bytes: label.backing_bytes.get(),
            identity: text_of(&label.identity),
            marks_from: Position {
                segment: label.marks_segment.get(),
                offset: label.marks_offset.get(),
            },
            info,
            bad: label.bad[..bad_count].to_vec(),
            torn_until: (label.flags.get() & FLAG_TORN != 0).then(|| Position {
                segment: label.torn_segment.get(),
                offset: label.torn_offset.get(),
            }),
            served: (label.flags.get() & FLAG_SERVED != 0)
                .then(|| Serving { boot: label.boot.get(), place: text_of(&label.place) }),
            stamp: Stamp::from_bits(label.boot.get())
                .filter(|_| label.flags.get() & FLAG_SERVED == 0),
            is_stale: label.flags.get() & FLAG_STALE != 0,
        };
        Some((loaded, found.slot))
    }

    /// Stores the label into the spare slot, durably.
    pub fn store(&self, media: &Media, slot: &mut SlotState) -> std::result::Result<(), Status> {
        let next = slot.next();
        media.store_slot(0, STRIDE, next, &self.record(next.seq))?;
        *slot = next;
        Ok(())
    }

    /// The same into both slots, one after the other.
    pub fn store_twice(
        &self,
        media: &Media,
        slot: &mut SlotState,
    ) -> std::result::Result<(), Status> {
        self.store(media, slot)?;
        self.store(media, slot)
    }

    /// The bytes that the first store puts at the front of a blank device.
    pub fn first_bytes(&self) -> [u8; STRIDE as usize] {
        <[u8; STRIDE as usize]>::read_from_bytes(self.record(1).as_bytes())
            .expect("a record fills its slot")
    }

    fn record(&self, seq: u8) -> OnMedia {
        let mut bad = [BadRange { offset: U64::ZERO, len: U64::ZERO }; QUARANTINE_MAX];
        bad[..self.bad.len()].copy_from_slice(&self.bad);
        let torn = self.torn_until.unwrap_or_default();
        let served = self.served.as_ref();
        let torn_flag = if self.torn_until.is_some() { FLAG_TORN } else { 0 };
        let served_flag = if served.is_some() { FLAG_SERVED } else { 0 };
        let stale_flag = if self.is_stale { FLAG_STALE } else { 0 };
        let stamp = self.stamp.map_or(0, Stamp::bits);
        let version = if served.is_some() { VERSION } else { VERSION_AT_REST };
        OnMedia {
            crc: U32::ZERO,
            seq,
            reserved: 0,
            version: U16::new(version),
            magic: U64::new(MAGIC),
            attach_id: U64::new(self.attach_id),
            backing_bytes: U64::new(self.backing_bytes),
            marks_segment: U32::new(self.marks_from.segment),
            marks_offset: U32::new(self.marks_from.offset),
            info: zerocopy::transmute!(self.info),
            identity: bytes_of(&self.identity),
            bad_count: U32::new(self.bad.len() as u32),
            flags: U32::new(torn_flag | served_flag | stale_flag),
            bad,
            torn_segment: U32::new(torn.segment),
            torn_offset: U32::new(torn.offset),
            boot: U64::new(served.map_or(stamp, |served| served.boot)),
            place: bytes_of(served.map_or("", |served| &served.place)),
        }
        .seal()
    }

    /// Compares this label's backing device with the one described, which may have grown.
    pub fn compare(&self, backing: &DiskLimits) -> Match {
        if self.backing_bytes > backing.size_bytes {
            return Match::Other;
        }
        let is_recorded = |words: &str| self.identity.as_bytes() == prefix(words, IDENTITY_BYTES);
        backing.identity.compare(is_recorded)
    }
}

/// As much of a text as fits.
fn prefix(text: &str, bytes_max: usize) -> &[u8] {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text.as_bytes()[..end]
}

fn bytes_of<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let prefix = prefix(text, N);
    bytes[..prefix.len()].copy_from_slice(prefix);
    bytes
}

fn text_of(bytes: &[u8]) -> String {
    let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Disk, RamDisk};

    #[test]
    fn a_backing_device_may_grow_and_must_not_shrink() {
        let label = Label {
            attach_id: 1,
            backing_bytes: 8192,
            identity: "file 7".into(),
            marks_from: Position::default(),
            info: [0; 24],
            bad: Vec::new(),
            torn_until: None,
            served: None,
            stamp: None,
            is_stale: false,
        };
        let compare =
            |name: &str, bytes| label.compare(RamDisk::new(bytes, 512).named(name).limits());
        assert_eq!(compare("file 7", 8192), Match::Exact);
        assert_eq!(compare("file 7", 16384), Match::Exact);
        assert_eq!(compare("file 7", 8192 - 512), Match::Other);
        assert_eq!(compare("file 8", 8192), Match::Other);
        assert_eq!(compare("file", 8192), Match::Other);
        assert_eq!(compare("file 77", 8192), Match::Other);
    }
}
