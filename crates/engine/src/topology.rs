//! The limits of a device for its clients: each export reports the same ones. The limits of all
//! disks of a table are stacked here, as the kernel stacks the limits of block devices.
//!
//! All units are powers of two. So the largest of several units is a multiple of each of them.

use crate::units::{MIB, SECTOR};

/// The largest unit that is reported: larger ones are of no use to a client.
const UNIT_MAX: u64 = 16 * MIB;

/// The units in which a disk works best, in bytes. 0: the disk reports none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// The physical block: the disk writes less only after it has read the rest of the block.
    pub physical_bytes: u32,
    /// The smallest efficient I/O.
    pub minimum_bytes: u32,
    /// The optimal I/O, such as a stripe of a RAID.
    pub optimal_bytes: u32,
    /// The unit of discards: a discard of less frees no space.
    pub discard_bytes: u32,
}

impl Topology {
    /// A unit that a disk reports: the largest power of two that divides it.
    pub fn unit(bytes: u64) -> u32 {
        if bytes == 0 { 0 } else { (1 << bytes.trailing_zeros()).min(UNIT_MAX) as u32 }
    }

    /// The topology of the part of the disk from byte `start`.
    pub fn from(self, start: u64) -> Topology {
        let kept = |unit: u32| if unit > 0 && start.is_multiple_of(unit.into()) { unit } else { 0 };
        Topology {
            physical_bytes: kept(self.physical_bytes),
            minimum_bytes: kept(self.minimum_bytes),
            optimal_bytes: kept(self.optimal_bytes),
            discard_bytes: kept(self.discard_bytes),
        }
    }
}

/// The limits of a target or device that its clients should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetLimits {
    /// Smallest unit of a request, in bytes: 512 or the disk's logical block.
    pub block_bytes: u32,
    /// The physical block, in bytes: at least the block.
    pub physical_bytes: u32,
    /// The smallest efficient I/O, in bytes: at least the physical block.
    pub minimum_bytes: u32,
    /// The optimal I/O, in bytes: at least the smallest efficient I/O.
    pub optimal_bytes: u32,
    /// The unit of discards, in bytes, if they are worth sending: at least the block.
    pub discard_bytes: u32,
    /// Whether discards are worth sending.
    pub has_discard: bool,
}

impl TargetLimits {
    /// The limits of a target that works equally well in all multiples of its block.
    pub const fn new(block_bytes: u32, has_discard: bool) -> TargetLimits {
        TargetLimits {
            block_bytes,
            physical_bytes: block_bytes,
            minimum_bytes: block_bytes,
            optimal_bytes: block_bytes,
            discard_bytes: block_bytes,
            has_discard,
        }
    }

    /// The limits of a target on one disk.
    pub fn on(topology: Topology, block_bytes: u32, has_discard: bool) -> TargetLimits {
        let physical_bytes = topology.physical_bytes.max(block_bytes);
        let minimum_bytes = topology.minimum_bytes.max(physical_bytes);
        TargetLimits {
            block_bytes,
            physical_bytes,
            minimum_bytes,
            optimal_bytes: topology.optimal_bytes.max(minimum_bytes),
            discard_bytes: topology.discard_bytes.max(block_bytes),
            has_discard,
        }
    }

    fn topology(&self) -> Topology {
        let TargetLimits { physical_bytes, minimum_bytes, optimal_bytes, discard_bytes, .. } =
            *self;
        Topology { physical_bytes, minimum_bytes, optimal_bytes, discard_bytes }
    }

    /// The limits if the smallest unit of a request is `block_bytes`.
    pub fn in_blocks_of(self, block_bytes: u32) -> TargetLimits {
        TargetLimits::on(self.topology(), block_bytes, self.has_discard)
    }

    /// The limits if the first byte is at byte `start` of the disk or device: units that do not
    /// divide `start` do not apply.
    pub fn from(self, start: u64) -> TargetLimits {
        TargetLimits::on(self.topology().from(start), self.block_bytes, self.has_discard)
    }

    /// The limits of both together: a request that suits them suits each of both.
    pub fn and(self, other: TargetLimits) -> TargetLimits {
        let discard = |it: TargetLimits| if it.has_discard { it.discard_bytes } else { 0 };
        let topology = Topology {
            physical_bytes: self.physical_bytes.max(other.physical_bytes),
            minimum_bytes: self.minimum_bytes.max(other.minimum_bytes),
            optimal_bytes: self.optimal_bytes.max(other.optimal_bytes),
            discard_bytes: discard(self).max(discard(other)),
        };
        let block_bytes = self.block_bytes.max(other.block_bytes);
        TargetLimits::on(topology, block_bytes, self.has_discard || other.has_discard)
    }
}

impl Default for TargetLimits {
    /// The limits without any disk.
    fn default() -> TargetLimits {
        TargetLimits::new(SECTOR as u32, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(block_bytes: u32, units: [u32; 4], has_discard: bool) -> TargetLimits {
        let [physical_bytes, minimum_bytes, optimal_bytes, discard_bytes] = units;
        let topology = Topology { physical_bytes, minimum_bytes, optimal_bytes, discard_bytes };
        TargetLimits::on(topology, block_bytes, has_discard)
    }

    fn units(limits: TargetLimits) -> [u32; 5] {
        let TargetLimits { block_bytes, physical_bytes, minimum_bytes, optimal_bytes, .. } = limits;
        [block_bytes, physical_bytes, minimum_bytes, optimal_bytes, limits.discard_bytes]
    }

    #[test]
    fn each_unit_is_at_least_the_smaller_one() {
        assert_eq!(units(on(4096, [512, 0, 0, 0], true)), [4096; 5]);
        let raid = on(512, [4096, 65536, 1 << 20, 32768], true);
        assert_eq!(units(raid), [512, 4096, 65536, 1 << 20, 32768]);
        assert_eq!(units(raid.in_blocks_of(65536)), [65536, 65536, 65536, 1 << 20, 65536]);
        let unit = [0, 512, 384 << 10, 1 << 40].map(Topology::unit);
        assert_eq!(unit, [0, 512, 128 << 10, 16 << 20]);
    }

    #[test]
    fn the_limits_of_two_disks_suit_both() {
        let (ssd, raid) = (on(4096, [0; 4], false), on(512, [4096, 65536, 1 << 20, 32768], true));
        let both = ssd.and(raid);
        assert_eq!((units(both), both.has_discard), ([4096, 4096, 65536, 1 << 20, 32768], true));
        assert_eq!(both, raid.and(ssd));
        // The unit of discards of a disk without them does not matter.
        let fine = on(512, [0; 4], true).and(on(512, [0, 0, 0, 65536], false));
        assert_eq!(units(fine)[4], 512);
    }

    #[test]
    fn a_unit_that_the_start_breaks_is_not_reported() {
        let raid = on(512, [4096, 65536, 1 << 20, 32768], true);
        assert_eq!(units(raid.from(3 << 20)), units(raid));
        assert_eq!(units(raid.from(65536)), [512, 4096, 65536, 65536, 32768]);
        assert_eq!(units(raid.from(4096)), [512, 4096, 4096, 4096, 512]);
        assert_eq!(units(raid.from(512)), [512; 5]);
    }
}
