//! The configuration of a virtio-blk device, as drivers read it: features and limits.

use udm::device::Device;
use udm::units::{BIO_BYTES_MAX, KIB, SECTOR};

use super::proto::{Violation, feature, u32_at, wrong};

/// Maximum bytes of a configuration that a client may ask for.
pub const BYTES_MAX: usize = 256;
/// Bytes before the configuration in a message: offset, length, flags.
pub const HEAD_BYTES: usize = 12;
/// Maximum rings of a client.
pub const QUEUES_MAX: usize = 16;
/// Maximum pieces of a request's data, and maximum bytes of each: together at most the maximum
/// request.
const PIECES_MAX: u32 = 126;
const PIECE_BYTES_MAX: u32 = (256 * KIB) as u32;
const _: () = assert!(PIECES_MAX as u64 * PIECE_BYTES_MAX as u64 <= BIO_BYTES_MAX);

/// Feature bits of the device.
pub mod blk {
    /// `size_max` is valid.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// `seg_max` is valid.
    pub const SEG_MAX: u64 = 1 << 2;
    /// Writes are refused.
    pub const READ_ONLY: u64 = 1 << 5;
    /// `blk_size` is valid.
    pub const BLOCK_BYTES: u64 = 1 << 6;
    /// Writes are durable after a flush.
    pub const FLUSH: u64 = 1 << 9;
    /// The topology is valid.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// Several rings.
    pub const MQ: u64 = 1 << 12;
    /// Discards are supported.
    pub const DISCARD: u64 = 1 << 13;
    /// Write-zeroes requests are supported.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// The features of `device` and of its rings.
///
/// `VIRTIO_BLK_F_CONFIG_WCE` is not offered: with it, a driver that has chosen write-through sends
/// no flushes, and never repeats its choice to the next server, which would not know it.
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
    always | blk::FLUSH | blk::WRITE_ZEROES | discard
}

/// Encodes the configuration.
pub fn space(device: &Device) -> [u8; BYTES_MAX] {
    let limits = device.limits();
    let sectors_max = (BIO_BYTES_MAX / SECTOR) as u32;
    let mut space = Space([0; BYTES_MAX]);
    space.put(0, &(device.size_bytes() / SECTOR).to_le_bytes());
    space.put(8, &PIECE_BYTES_MAX.to_le_bytes());
    space.put(12, &PIECES_MAX.to_le_bytes());
    space.put(20, &limits.block_bytes.to_le_bytes());
    // Topology: the physical block as a power of two; the smallest efficient and the optimal I/O.
    space.put(24, &[limits.physical_bytes.ilog2() as u8 - limits.block_bytes.ilog2() as u8]);
    space.put(26, &((limits.minimum_bytes / limits.block_bytes) as u16).to_le_bytes());
    space.put(28, &(limits.optimal_bytes / limits.block_bytes).to_le_bytes());
    // Writes are durable after a flush.
    space.put(32, &[1]);
    space.put(34, &(QUEUES_MAX as u16).to_le_bytes());
    // Discards: sectors, ranges of a request, alignment in sectors.
    space.put(36, &sectors_max.to_le_bytes());
    space.put(40, &1_u32.to_le_bytes());
    space.put(44, &(limits.discard_bytes / SECTOR as u32).to_le_bytes());
    // Zeroes: sectors, ranges of a request, and permission to leave holes.
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

/// Returns the bytes of the configuration that a message reads.
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
