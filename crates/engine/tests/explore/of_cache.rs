//! cache under exploration: its data and its metadata are on two disks.

use std::sync::Arc;

use udm::cache::Devices as Disks;
use udm::cache::metadata::survey;
use udm::cache::{Cache, OpenOptions, TableArgs};
use udm::disk::Disk;
use udm::table::Word;
use udm::target::Target;

use crate::elsewhere::What;
use crate::model::{Model, ORIGIN_BYTES};
use crate::sim::SimMedium;
use crate::ssd::Ssds;
use crate::subject::{Devices, Ground, Kind, PassesBy, Subject, Who};

/// Bytes of a block: the fewest that the format allows. The explorer's sectors are in two blocks,
/// and in the rest of the origin after them, which is never cached.
pub const BLOCK_BYTES: u64 = 32 << 10;
/// The blocks with the explorer's sectors.
pub const BLOCKS: [u64; 2] = [0, 127];
const METADATA_BYTES: usize = 48 * 4096;

impl Subject for Cache {
    fn is_origin_consistent(&self) -> bool {
        let table = self.table();
        let is_through = ["writethrough", "passthrough"].iter().any(|mode| table.contains(mode));
        is_through && self.dirty().bytes == 0
    }

    fn is_complete(&self) -> bool {
        true
    }
}

/// A table, for a cache of this many blocks.
#[derive(Clone, Debug)]
struct Line {
    slots: u64,
    args: TableArgs,
}

/// The devices of a history, and the tables that its servers take in turns. The judge takes the
/// first, and so does a server whose own would lose dirty blocks; that cache is the longest.
#[derive(Clone, Debug)]
pub struct CacheKind {
    lines: Vec<Line>,
}

impl CacheKind {
    /// For each table the blocks of the cache, and the words after the block size.
    pub fn new(lines: &[(u64, &str)]) -> CacheKind {
        let line = |&(slots, words): &(u64, &str)| {
            let table = format!("M C O {} {words}", BLOCK_BYTES / 512);
            Line { slots, args: TableArgs::parse(&Word::list(&table)).unwrap() }
        };
        CacheKind { lines: lines.iter().map(line).collect() }
    }

    fn data_bytes(&self) -> usize {
        (self.lines[0].slots * BLOCK_BYTES) as usize
    }

    fn open_line(&self, line: &Line, devices: &Devices, who: Who) -> udm::error::Result<Cache> {
        let cache: Arc<dyn Disk> = devices.ssds.data.beginning(line.slots * BLOCK_BYTES);
        let Devices { ssds, origin, .. } = devices.clone();
        let disks = Disks { metadata: ssds.metadata, cache, origin };
        let options = OpenOptions { force_format: who == Who::Formatter, ..OpenOptions::default() };
        Cache::open(line.args.clone(), ORIGIN_BYTES, disks, options)
    }
}

/// Whether a table is refused because of dirty blocks.
fn is_refusal(error: &str) -> bool {
    ["write it back first", "passthrough mode needs a cache without dirty blocks"]
        .iter()
        .any(|why| error.contains(why))
}

impl Kind for CacheKind {
    fn device_bytes(&self) -> usize {
        self.data_bytes() + METADATA_BYTES
    }

    fn metadata_bytes(&self) -> usize {
        METADATA_BYTES
    }

    fn ground(&self) -> Ground {
        Ground::Disk
    }

    fn passes_by(&self) -> PassesBy {
        PassesBy::Always
    }

    fn copied_bytes(&self) -> u64 {
        BLOCK_BYTES
    }

    fn shared_words(&self) -> usize {
        0
    }

    fn owner_words(&self) -> [u32; 2] {
        unreachable!("it does without shared memory")
    }

    fn open(&self, devices: Devices, attaches: u64, who: Who) -> Result<Box<dyn Subject>, String> {
        let first = &self.lines[0];
        let line = match who {
            Who::Judge => first,
            _ => &self.lines[attaches as usize % self.lines.len()],
        };
        let opened = match self.open_line(line, &devices, who) {
            Err(error) if is_refusal(&error.to_string()) => self.open_line(first, &devices, who),
            opened => opened,
        };
        opened.map(|cache| Box::new(cache) as _).map_err(|error| error.to_string())
    }

    fn binds_empty(&self) -> bool {
        false
    }

    /// The metadata.
    fn is_telling(&self, at: u32) -> bool {
        at as usize >= self.data_bytes()
    }

    /// A kernel would accept the metadata.
    fn look(&self, sim: &Arc<SimMedium>, model: &Model, _: bool) -> Result<(), String> {
        if !model.is_labelled {
            return Ok(());
        }
        let source: Arc<dyn Disk> = Ssds::new(sim, self.data_bytes(), METADATA_BYTES).metadata;
        let superblock = survey::superblock(&source).map_err(|error| error.to_string())?;
        match survey(&source, superblock).findings().next() {
            Some(finding) => Err(format!("a check of the metadata finds: {finding}")),
            None => Ok(()),
        }
    }

    fn check(&self, subject: &dyn Subject, _: &Model) -> Result<(), String> {
        let status = subject.status();
        match status.contains("Fail") || status.contains("needs_check") {
            true => Err(format!("an error state: {status}")),
            false => Ok(()),
        }
    }

    fn elsewhere(&self, _: &SimMedium, _: What, _: &mut Model, _: &[u64]) -> Vec<(usize, u64)> {
        unreachable!("no kernel has the media meanwhile")
    }
}
