//! The configuration of a virtio-blk device, as drivers read it: what the device is able to do, and
//! its limits.

use udm::device::Device;
use udm::units::{BIO_BYTES_MAX, KIB, SECTOR};

use super::proto::{Violation, feature, u32_at, wrong};

/// Most bytes of a configuration that a client may ask for.
pub const BYTES_MAX: usize = 256;
/// Bytes before the configuration in a message: place, length, flags.
pub const HEAD_BYTES: usize = 12;
/// Most rings of a client.
pub const QUEUES_MAX: usize = 16;
/// Most pieces of a request's data, and most bytes of each: together no more than a request may
/// have.
const PIECES_MAX: u32 = 126;
const PIECE_BYTES_MAX: u32 = (256 * KIB) as u32;
const _: () = assert!(PIECES_MAX as u64 * PIECE_BYTES_MAX as u64 <= BIO_BYTES_MAX);

/// Bits of the device's features.
pub mod blk {
    /// `size_max` counts.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// `seg_max` counts.
    pub const SEG_MAX: u64 = 1 << 2;
    /// Writes are refused.
    pub const READ_ONLY: u64 = 1 << 5;
    /// `blk_size` counts.
    pub const BLOCK_BYTES: u64 = 1 << 6;
    /// Writes are durable after a flush.
    pub const FLUSH: u64 = 1 << 9;
    /// The topology counts.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver chooses between write-back and write-through.
    pub const WRITE_BACK: u64 = 1 << 11;
    /// Several rings.
    pub const MQ: u64 = 1 << 12;
    /// Discards are taken.
    pub const DISCARD: u64 = 1 << 13;
    /// Zeroes are taken.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Where the driver's choice between write-back (1) and write-through (0) is.
const WRITE_BACK_AT: usize = 32;

/// What `device` is able to do, and what its rings are.
pub fn features(device: &Device) -> u64 {
    let always = feature::VERSION_1
        | feature::PROTOCOL
        | feature::INDIRECT
        | feature::EVENT_IDX
        | feature::RING_PACKED
        | blk::SIZE_MAX
        | blk::SEG_MAX
        | blk::BLOCK_BYTES
        | blk::TOPOLOGY
        | blk::MQ;
    if device.is_read_only() {
        return always | blk::READ_ONLY;
    }
    let discard = if device.limits().has_discard { blk::DISCARD } else { 0 };
    always | blk::FLUSH | blk::WRITE_BACK | blk::WRITE_ZEROES | discard
}

/// The configuration; the driver wants write-back or not.
pub fn space(device: &Device, is_write_back: bool) -> [u8; BYTES_MAX] {
    let limits = device.limits();
    let blocks = limits.block_bytes / SECTOR as u32;
    let sectors_max = (BIO_BYTES_MAX / SECTOR) as u32;
    let mut space = Space([0; BYTES_MAX]);
    space.put(0, &(device.size_bytes() / SECTOR).to_le_bytes());
    space.put(8, &PIECE_BYTES_MAX.to_le_bytes());
    space.put(12, &PIECES_MAX.to_le_bytes());
    space.put(20, &limits.block_bytes.to_le_bytes());
    // Topology: a physical block is a logical one; so is the best unit of I/O.
    space.put(26, &1_u16.to_le_bytes());
    space.put(WRITE_BACK_AT, &[u8::from(is_write_back)]);
    space.put(34, &(QUEUES_MAX as u16).to_le_bytes());
    // Discards: sectors, ranges of a request, alignment in sectors.
    space.put(36, &sectors_max.to_le_bytes());
    space.put(40, &1_u32.to_le_bytes());
    space.put(44, &blocks.to_le_bytes());
    // Zeroes: sectors, ranges of a request, and they may be holes afterwards.
    space.put(48, &sectors_max.to_le_bytes());
    space.put(52, &1_u32.to_le_bytes());
    space.put(56, &[1]);
    space.0
}

struct Space([u8; BYTES_MAX]);

impl Space {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// Which bytes of the configuration a message is about.
pub fn range(payload: &[u8]) -> Result<std::ops::Range<usize>, Violation> {
    if payload.len() < HEAD_BYTES {
        return wrong(format!("a configuration of {} bytes", payload.len()));
    }
    let (at, len) = (u32_at(payload, 0) as usize, u32_at(payload, 4) as usize);
    let end = at.checked_add(len).filter(|end| *end <= BYTES_MAX);
    match end {
        Some(end) if len == payload.len() - HEAD_BYTES => Ok(at..end),
        _ => wrong(format!("{len} bytes of a configuration at {at}")),
    }
}

/// What the driver wants, by a message that writes to the configuration.
pub fn wants_write_back(payload: &[u8]) -> Result<bool, Violation> {
    let range = range(payload)?;
    match payload[HEAD_BYTES..] {
        [0] if range.start == WRITE_BACK_AT => Ok(false),
        [1] if range.start == WRITE_BACK_AT => Ok(true),
        _ => wrong(format!("{} bytes of the configuration at {}", range.len(), range.start)),
    }
}
