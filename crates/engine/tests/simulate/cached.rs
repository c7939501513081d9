//! Cases of the target cache: their devices, their tables, and a cache device that tables
//! make shorter and longer.

use std::sync::Arc;

use udm::disk::{Disk, DiskIo, DiskLimits, Extent, Ring, SimDisk};
use udm::pmem::Persistence;
use udm::prng::Prng;
use udm::units::SECTOR;

use crate::plan::{Engine, Setup, Trouble, cuts, device_bytes};

/// Sectors of a block: the fewest that the format has.
pub const BLOCK_SECTORS: u64 = 64;
/// Bytes of the metadata device.
pub const METADATA_BYTES: u64 = 128 * 4096;

pub fn setup(seed: u64) -> Setup {
    let mut prng = Prng::new(seed ^ 0x00CA_C4E5);
    let trouble = match prng.below(6) {
        0 | 1 => Trouble::Nothing,
        2..4 => Trouble::Origin,
        _ => Trouble::Medium,
    };
    let spread = if prng.one_in(3) { 60 } else { 10 };
    let slots = 2 + prng.below(spread);
    let version = if prng.one_in(2) { " metadata2" } else { "" };
    Setup {
        seed,
        engine: Engine::Cache { slots },
        cuts: cuts(seed),
        backing_bytes: device_bytes(),
        persistence: Persistence::Cpu,
        clients: 1 + prng.below(4) as usize,
        words: version.into(),
        is_ordered: false,
        trouble,
    }
}

/// The line of a cache: one of many, or the one that takes whatever an earlier one has left.
pub fn line(setup: &Setup, slots: u64, prng: Option<&mut Prng>) -> String {
    let (from, to) = setup.cuts;
    let Some(prng) = prng else {
        let words = format!("{}{} writeback smq 0", 1 + count(&setup.words), setup.words);
        return format!("{from} {} cache M C B {BLOCK_SECTORS} {words}", to - from);
    };
    let mode = match prng.below(8) {
        0 => " passthrough",
        1 | 2 => " writethrough",
        3..6 => " writeback",
        _ => "",
    };
    let passdown = if prng.one_in(4) { " no_discard_passdown" } else { "" };
    let policy = match prng.below(6) {
        0 => "mq 0",
        1 => "cleaner 0",
        2 => "smq 2 migration_threshold 64",
        3 => "probation 0",
        _ => "smq 0",
    };
    let part = match prng.below(3) {
        0 => format!("?size={}", (1 + prng.below(slots)) * BLOCK_SECTORS),
        _ => String::new(),
    };
    let words = format!("{}{mode}{passdown}", setup.words);
    let len = to - from;
    format!("{from} {len} cache M C{part} B {BLOCK_SECTORS} {}{words} {policy}", count(&words))
}

fn count(words: &str) -> usize {
    words.split_whitespace().count()
}

/// The reasons for refusing a table: it would cut off or bypass dirty data, or lose the list of
/// the origin's losses.
pub fn is_refusal(error: &str) -> bool {
    error.contains("write it back first")
        || error.contains("its origin failed a flush")
        || error.contains("passthrough mode needs a cache without dirty blocks")
}

/// The beginning of a disk.
#[derive(Debug)]
pub struct Beginning {
    disk: Arc<SimDisk>,
    limits: DiskLimits,
}

impl Beginning {
    pub fn new(disk: Arc<SimDisk>, sectors: u64) -> Beginning {
        let limits = DiskLimits { size_bytes: sectors * SECTOR, ..disk.limits().clone() };
        Beginning { disk, limits }
    }
}

impl Disk for Beginning {
    fn limits(&self) -> &DiskLimits {
        &self.limits
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        assert!(io.offset + io.len <= self.limits.size_bytes, "beyond the end of the table's part");
        self.disk.start(io, ring);
    }

    fn carry_out(&self, ios: Vec<DiskIo>) -> Vec<DiskIo> {
        self.disk.carry_out(ios)
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        self.disk.extent(offset, len)
    }
}
