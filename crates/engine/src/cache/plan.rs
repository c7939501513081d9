//! What never changes while a cache is open.

use crate::mutants::{self, Mutant};
use crate::units::SECTOR;

use super::args::TableArgs;

/// How a cache works.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) args: TableArgs,
    /// Bytes of a block.
    pub(super) block_bytes: u64,
    /// Whole blocks of the origin. Sectors after them are never cached.
    pub(super) origin_blocks: u64,
    /// The discard words of the status line.
    pub(super) passes_down: bool,
}

impl Plan {
    /// What `args` say of an origin of which `len_bytes` are used.
    pub(super) fn new(args: TableArgs, len_bytes: u64, has_discard: bool) -> Plan {
        let block_bytes = u64::from(args.block_sectors) * SECTOR;
        Plan {
            block_bytes,
            origin_blocks: match mutants::is(Mutant::TailRoundedUp) {
                true => len_bytes.div_ceil(block_bytes),
                false => len_bytes / block_bytes,
            },
            passes_down: has_discard && !args.features.has_no_passdown,
            args,
        }
    }
}
