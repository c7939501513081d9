//! pcache under exploration.

use std::sync::Arc;

use udm::pcache::layout::Geometry;
use udm::pcache::{OpenOptions, Pcache, ReplayPace, TableArgs, inspect, shared_words};
use udm::pmem::Persistence;
use udm::table::Word;

use crate::elsewhere::{self, What};
use crate::model::{Model, ORIGIN_BYTES};
use crate::sim::SimMedium;
use crate::subject::{Devices, Ground, Kind, PassesBy, Subject, Who};

pub const GEOMETRY: Geometry = Geometry { segment_bytes: 12288 + 4096, device_bytes_min: 0 };
const STRIPES: usize = 2;

impl Subject for Pcache {
    fn is_origin_consistent(&self) -> bool {
        self.is_origin_consistent()
    }

    fn is_complete(&self) -> bool {
        !self.is_replaying()
    }
}

/// The devices and options of a history.
#[derive(Clone, Debug)]
pub struct PcacheKind {
    segments: u64,
    persistence: Persistence,
    args: TableArgs,
}

impl PcacheKind {
    pub fn new(segments: u64, persistence: Persistence, table: &str) -> PcacheKind {
        let args = TableArgs::parse(&Word::list(table)).unwrap();
        PcacheKind { segments, persistence, args }
    }
}

/// Servers have the slots of a region in an array immediately, soon, or (the judge) not.
fn flat_from(attaches: u64, who: Who) -> usize {
    match who {
        Who::Judge => usize::MAX,
        _ => [1, 6, usize::MAX][(attaches / 3) as usize % 3],
    }
}

/// Servers replay the log immediately, or late and slowly; the judge looks before and after.
fn pace(attaches: u64, who: Who) -> ReplayPace {
    match (who, attaches % 3) {
        (Who::Judge, _) => ReplayPace { at_once_max: 0, slice: 64 },
        (_, 0) => ReplayPace::default(),
        _ => ReplayPace { at_once_max: 0, slice: 1 },
    }
}

impl Kind for PcacheKind {
    fn device_bytes(&self) -> usize {
        (20480 + self.segments * GEOMETRY.segment_bytes) as usize
    }

    fn ground(&self) -> Ground {
        Ground::Memory(self.persistence)
    }

    fn passes_by(&self) -> PassesBy {
        PassesBy::Never
    }

    fn shared_words(&self) -> usize {
        shared_words(STRIPES)
    }

    fn owner_words(&self) -> [u32; 2] {
        [2, 11]
    }

    fn open(&self, devices: Devices, attaches: u64, who: Who) -> Result<Box<dyn Subject>, String> {
        let mut args = self.args.clone();
        args.fills_reads &= who != Who::Judge;
        let options = OpenOptions {
            force_format: who == Who::Formatter,
            geometry: GEOMETRY,
            stripes: STRIPES,
            replay: pace(attaches, who),
            flat_from: flat_from(attaches, who),
            ..OpenOptions::new(attaches.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 1)
        };
        let shared_store = devices.shared_store();
        let Devices { sim, origin, .. } = devices;
        let pcache = Pcache::open(args, ORIGIN_BYTES, sim, origin, shared_store, &options);
        pcache.map(|pcache| Box::new(pcache) as _).map_err(|error| error.to_string())
    }

    fn binds_empty(&self) -> bool {
        true
    }

    /// A record that allows the reuse of a segment: a tail, or a generation.
    fn is_telling(&self, at: u32) -> bool {
        let at = u64::from(at);
        let in_segment = at.wrapping_sub(20480) % GEOMETRY.segment_bytes;
        (16384..20480).contains(&at) || at >= 20480 && (8192..12288).contains(&in_segment)
    }

    /// No key of a reused segment is in a log that only udm wrote.
    fn look(&self, sim: &Arc<SimMedium>, model: &Model, _: bool) -> Result<(), String> {
        if !model.is_pure {
            return Ok(());
        }
        match inspect::inspect(sim.clone(), GEOMETRY) {
            Ok(report) if report.stale_keys > 0 => {
                Err(format!("{} keys of reused segments are in the log", report.stale_keys))
            }
            Err(error) if model.is_labelled => Err(format!("inspect: {error}")),
            _ => Ok(()),
        }
    }

    fn check(&self, subject: &dyn Subject, model: &Model) -> Result<(), String> {
        if model.percents == [70] {
            return Ok(());
        }
        let status = subject.status();
        let found = status.split(' ').nth(4).and_then(|word| word.parse().ok());
        match found {
            Some(percent) if model.percents.contains(&percent) => Ok(()),
            _ => Err(format!("gc_percent is none of {:?}: {status}", model.percents)),
        }
    }

    fn elsewhere(
        &self,
        sim: &SimMedium,
        what: What,
        model: &mut Model,
        origin: &[u64],
    ) -> Vec<(usize, u64)> {
        elsewhere::change(sim, what, model, origin)
    }
}
