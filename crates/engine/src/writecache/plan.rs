//! The meaning of a table line, with the defaults of missing arguments.

use crate::common::throttle::Throttle;
use crate::units::{Nanos, SECOND};

use super::args::{Mode, TableArgs};
use super::device::CacheDevice;
use super::layout::Geometry;
use super::media::Medium;
use super::overwrite;

/// `autocommit_blocks` where it is not given, in modes `p` and `s`.
const AUTOCOMMIT_BLOCKS: [u64; 2] = [64, 65_536];
/// `autocommit_time` where it is not given, in milliseconds.
const AUTOCOMMIT_TIME: u32 = 1000;
/// `pause_writeback` of mode `s` where it is not given, in milliseconds.
const PAUSE_WRITEBACK: u32 = 3000;
/// `max_age` is divided into this many parts, which are the resolution of blocks' ages.
pub(super) const AGE_EPOCHS: u64 = 16;

/// How a cache works. Never changes while the cache is open.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) args: TableArgs,
    /// Whether committed blocks are overwritten in their place.
    pub(super) overwrites: bool,
    /// Write-back begins when at most this many slots are free.
    pub(super) high_watermark: u64,
    /// Write-back ends when more slots than this are free.
    pub(super) low_watermark: u64,
}

fn millis(value: u32) -> Nanos {
    Nanos::from(value) * (SECOND / 1000)
}

impl Plan {
    /// The meaning of `args` for a cache of this shape.
    pub(super) fn new(args: TableArgs, medium: &Medium, geometry: &Geometry) -> Plan {
        let (high, low) = args.watermarks();
        let free = |percent: u32| (geometry.blocks * u64::from(100 - percent) + 50) / 100;
        Plan {
            overwrites: overwrite::is_wanted(&args, medium, geometry),
            high_watermark: free(high),
            low_watermark: free(low),
            args,
        }
    }

    /// Slots that can hold dirty blocks: all but those whose entries are damaged.
    pub(super) fn usable(&self, device: &CacheDevice) -> u64 {
        device.geometry.blocks.saturating_sub(device.aside.len() as u64)
    }

    /// Limits writers when few slots are free.
    pub(super) fn throttle(&self, device: &CacheDevice) -> Throttle {
        let block_bytes = u64::from(device.geometry.block_bytes);
        let (usable, blocks) = (self.usable(device), device.geometry.blocks);
        let begins = blocks.saturating_sub(self.high_watermark);
        Throttle::new(usable * block_bytes, begins.min(usable) * block_bytes)
    }

    #[inline]
    pub(super) fn is_pmem(&self) -> bool {
        self.args.mode == Mode::Pmem
    }

    /// A batch of this many blocks is committed immediately.
    #[inline]
    pub(super) fn autocommit_blocks(&self) -> u64 {
        let default = AUTOCOMMIT_BLOCKS[usize::from(!self.is_pmem())];
        self.args.options.autocommit_blocks.map_or(default, u64::from)
    }

    /// How long a batch may be open.
    pub(super) fn autocommit_time(&self) -> Nanos {
        millis(self.args.options.autocommit_time.unwrap_or(AUTOCOMMIT_TIME))
    }

    /// How long write-back rests after a write that bypassed the cache.
    pub(super) fn pause_writeback(&self) -> Nanos {
        match self.args.mode {
            Mode::Pmem => 0,
            Mode::Ssd => millis(self.args.options.pause_writeback.unwrap_or(PAUSE_WRITEBACK)),
        }
    }

    /// Whether write-back takes all blocks that are old enough, however many.
    pub(super) fn has_max_age(&self) -> bool {
        self.args.options.max_age.is_some()
    }

    /// How long an epoch is; `None`: blocks do not age.
    pub(super) fn epoch_nanos(&self) -> Option<Nanos> {
        self.args.options.max_age.map(|age| (millis(age) / AGE_EPOCHS).max(1))
    }

    /// Whether blocks are too old immediately.
    pub(super) fn ages_at_once(&self) -> bool {
        self.args.options.max_age == Some(0)
    }
}
