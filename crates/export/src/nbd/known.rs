//! Properties of an export that need no read of its devices: the ranges that read as zeroes, and
//! whether writing zeroes is fast.

use udm::device::Device;
use udm::target::Extent;
use udm::units::{MIB, SECTOR};

use super::proto::{Request, allocation, command_flag};

/// Maximum extents in an answer; clients ask again for the rest.
pub const EXTENTS_MAX: usize = 128;
/// Maximum bytes that one answer covers, which bounds its time.
const COVERED_BYTES_MAX: u64 = 256 * MIB;

/// Maximum queries to the device for one answer: the device may have to ask a file system.
const LOOKS_MAX: usize = 256;

/// A source of this knowledge. Answers immediately, without reading the device.
pub trait Known: Send + Sync + std::fmt::Debug {
    /// Returns the kind and length of the first extent in the range. Whole sectors.
    fn extent(&self, offset: u64, len: u64) -> (u64, Extent);

    /// Whether writing zeroes is much faster than writing data.
    fn has_fast_zeroes(&self) -> bool;
}

impl Known for Device {
    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        Device::extent(self, offset, len)
    }

    fn has_fast_zeroes(&self) -> bool {
        Device::has_fast_zeroes(self)
    }
}

/// Answers a BLOCK_STATUS request within the device: lengths and flags, with equal neighbours
/// merged. The answer covers at least the start of the range.
pub fn extents(known: Option<&dyn Known>, request: &Request) -> Vec<(u32, u32)> {
    let Some(known) = known else { return vec![(request.len, 0)] };
    let end = request.offset + u64::from(request.len).min(COVERED_BYTES_MAX);
    let extents_max = if request.flags & command_flag::REQ_ONE != 0 { 1 } else { EXTENTS_MAX };
    let mut extents: Vec<(u32, u32)> = Vec::new();
    let mut at = request.offset;
    for _ in 0..LOOKS_MAX {
        if at >= end {
            break;
        }
        // The device works in whole sectors; clients may ask for a part of one.
        let start = at / SECTOR * SECTOR;
        let (len, extent) = known.extent(start, end.next_multiple_of(SECTOR) - start);
        let next = (start + len).min(end);
        let flags = match extent {
            Extent::Data => 0,
            Extent::Zeroes => allocation::HOLE | allocation::ZERO,
        };
        let is_full = extents.len() == extents_max;
        match extents.last_mut() {
            Some(last) if last.1 == flags => last.0 += (next - at) as u32,
            _ if is_full => break,
            _ => extents.push(((next - at) as u32, flags)),
        }
        at = next;
    }
    extents
}
