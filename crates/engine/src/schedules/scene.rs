//! What the worlds of all targets are made of: devices, a history, clients; and how they are judged
//! by what clients read and by what the origin holds in the end.

use super::history::{History, Record};
use super::stage::{Client, Keeper, Origin, Platter, Twin};
use crate::device::Device;
use crate::local::{Clock, Local, ManualClock};
use crate::prng::Prng;
use crate::sync::Arc;

/// Sectors that clients use: where they begin, how many.
pub type Areas = &'static [(u64, u64)];

/// A cache's surroundings.
pub struct Scene {
    pub twin: Arc<Twin>,
    pub origin: Arc<Origin>,
    pub device: Arc<Device>,
    pub history: Arc<History>,
    pub areas: Areas,
}

/// What is left after a power cut, and what was known then.
pub struct Rest {
    pub image: Vec<u8>,
    pub platter: Platter,
    pub record: Record,
}

impl Scene {
    /// Someone who reads and writes.
    pub fn client(&self) -> Client {
        Client::new(&self.device, self.history.clone())
    }

    /// Starts the background. It ends by [`Keeper::stop`].
    pub fn keep(&self, clock: impl Clock + 'static) -> Keeper {
        Keeper::start(&self.device, clock)
    }

    /// A power cut at this very moment, with stores of `atom` bytes whole; the world itself goes
    /// on.
    pub fn cut(&self, prng: &mut Prng, atom: usize) -> Rest {
        // Nobody else goes on in between: nothing here is the scheduler's.
        let record = self.history.record_now();
        Rest { image: self.twin.cut(prng, atom), platter: self.origin.cut(prng), record }
    }

    /// Reads everything; what is there, area by area.
    pub fn read_all(&self) -> Vec<Vec<u64>> {
        let mut client = self.client();
        self.areas.iter().map(|&(at, count)| client.read(at, count).unwrap()).collect()
    }

    /// Writes everything back, until `is_settled` too; then the origin is what the cache was.
    pub fn drain(&self, is_settled: impl Fn() -> bool) {
        let before = self.read_all();
        self.device.set_draining(true);
        let mut local =
            Local::without_kernel(&self.device).unwrap().with_background(ManualClock::default());
        for _ in 0..200 {
            if self.device.dirty().bytes == 0 && is_settled() {
                break;
            }
            if !local.turn() {
                local.rest();
            }
        }
        assert_eq!(self.device.dirty().bytes, 0, "the drain makes no progress");
        self.compare(&before);
    }

    /// Panics unless the origin has `wanted`, area by area.
    pub fn compare(&self, wanted: &[Vec<u64>]) {
        let platter = self.origin.platter();
        for (&(sector, count), wanted) in self.areas.iter().zip(wanted) {
            let found: Vec<u64> = (sector..sector + count).map(|at| platter.tag(at)).collect();
            assert_eq!(found, *wanted, "the origin is not what the cache was at {sector}");
        }
    }

    /// Judges what is read after a cut by what was known then.
    pub fn judge_after_cut(&self, record: &Record) {
        for (&(sector, _), tags) in self.areas.iter().zip(self.read_all()) {
            for (sector, tag) in (sector..).zip(tags) {
                record.judge_after_cut(sector, tag);
            }
        }
    }
}
