//! writecache under exploration, over memory and over a disk.

use std::sync::Arc;

use udm::table::Word;
use udm::writecache::layout::{Geometry, SUPERBLOCK_BYTES};
use udm::writecache::{OpenOptions, TableArgs, Writecache, shared_words_for};

use crate::elsewhere::What;
use crate::media;
use crate::model::{Model, ORIGIN_BYTES};
use crate::sim::SimMedium;
use crate::subject::{Devices, Ground, Kind, PassesBy, Subject, Who};

const STRIPES: usize = 2;
/// Uncommitted blocks of a stripe, in a cache of a few blocks and of many.
const LIST_MAX: [usize; 2] = [14, 90];

impl Subject for Writecache {
    fn is_origin_consistent(&self) -> bool {
        self.is_origin_consistent()
    }

    fn is_complete(&self) -> bool {
        true
    }
}

/// The devices and options of a history.
#[derive(Clone, Debug)]
pub struct WritecacheKind {
    ground: Ground,
    blocks: u64,
    start: u64,
    block: u64,
    args: TableArgs,
}

impl WritecacheKind {
    pub fn new(ground: Ground, block_bytes: u64, blocks: u64, options: &str) -> WritecacheKind {
        let mode = if ground == Ground::Disk { 's' } else { 'p' };
        let table = format!("{mode} O C {block_bytes} {options}");
        let args = TableArgs::parse(&Word::list(&table)).unwrap();
        let start = args.options.start_sector.unwrap_or(0) * 512;
        WritecacheKind { ground, blocks, start, block: block_bytes, args }
    }
}

impl Kind for WritecacheKind {
    fn device_bytes(&self) -> usize {
        let table = (SUPERBLOCK_BYTES + 16 * self.blocks).next_multiple_of(self.block);
        let raw = table + self.blocks * self.block;
        debug_assert!(Geometry::of_size(0, raw, self.block as u32).unwrap().blocks == self.blocks);
        (self.start + raw) as usize
    }

    fn ground(&self) -> Ground {
        self.ground
    }

    fn block_slots(&self) -> usize {
        self.block as usize / 512
    }

    fn passes_by(&self) -> PassesBy {
        PassesBy::Sometimes
    }

    fn shared_words(&self) -> usize {
        shared_words_for(STRIPES, LIST_MAX[usize::from(self.blocks > 64)])
    }

    fn owner_words(&self) -> [u32; 2] {
        [2, 7]
    }

    fn open(&self, devices: Devices, attaches: u64, who: Who) -> Result<Box<dyn Subject>, String> {
        let options = OpenOptions {
            force_format: who == Who::Formatter,
            stripes: STRIPES,
            ..OpenOptions::new(attaches.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 1)
        };
        let shared_store = devices.shared_store();
        let Devices { sim, ssds, origin, .. } = devices;
        let args = self.args.clone();
        let target = match self.ground {
            Ground::Memory(_) => {
                Writecache::open_pmem(args, ORIGIN_BYTES, origin, sim, shared_store, &options)
            }
            Ground::Disk => {
                let ssd = ssds.data;
                Writecache::open_disk(args, ORIGIN_BYTES, origin, ssd, shared_store, &options)
            }
        };
        target.map(|target| Box::new(target) as _).map_err(|error| error.to_string())
    }

    fn binds_empty(&self) -> bool {
        false
    }

    /// The table of entries.
    fn is_telling(&self, at: u32) -> bool {
        (self.start..self.start + 64 + 16 * self.blocks).contains(&u64::from(at))
    }

    fn look(&self, sim: &Arc<SimMedium>, model: &Model, _: bool) -> Result<(), String> {
        media::kernel_reads(sim, self.start, self.block, model)
    }

    fn check(&self, subject: &dyn Subject, _: &Model) -> Result<(), String> {
        let status = subject.status();
        if status.starts_with("0 ") { Ok(()) } else { Err(format!("an error state: {status}")) }
    }

    fn elsewhere(
        &self,
        sim: &SimMedium,
        what: What,
        model: &mut Model,
        _: &[u64],
    ) -> Vec<(usize, u64)> {
        media::change(sim, self.start, self.block, what, model)
    }
}
