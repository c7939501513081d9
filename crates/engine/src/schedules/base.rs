//! The parts that the fixtures of all targets share: devices, a history and clients, and the check
//! of the data that clients read and of the origin's final content.

use shuttle::thread;

use super::history::{History, Record};
use super::simulator::{Background, Client, Origin, Platter, SimMedium};
use crate::device::Device;
use crate::local::{Clock, Local, ManualClock};
use crate::prng::Prng;
use crate::shm::SharedWords;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, SharedWord};

/// Sectors that clients use: the first of each area, and their number.
pub type Areas = &'static [(u64, u64)];

/// A cache's surroundings.
pub struct BaseFixture {
    pub sim: Arc<SimMedium>,
    pub origin: Arc<Origin>,
    pub device: Arc<Device>,
    pub history: Arc<History>,
    pub areas: Areas,
}

/// The state that a power cut or a death leaves, with the record at that time.
pub struct Rest {
    pub image: Vec<u8>,
    pub platter: Platter,
    pub record: Record,
    /// Words of shared memory; none after a power cut.
    pub words: Vec<u64>,
}

impl Rest {
    /// The shared memory that the next server finds, with this many words.
    pub fn shared(&self, words: usize) -> SharedWords {
        // A power cut leaves no shared memory, and the machine was restarted.
        let boot = u64::from(self.words.is_empty());
        let shared = SharedWords::private(words).in_boot(boot);
        for (word, value) in shared.words().iter().zip(&self.words) {
            word.store(*value, Ordering::SeqCst);
        }
        shared
    }
}

/// How often a server dies in a case about that.
const DEATHS: usize = 4;

/// States left by deaths at some moments, while other threads are at work.
pub fn deaths(prng: &mut Prng, die: impl Fn() -> Rest) -> Vec<Rest> {
    let longest = 2 << prng.below(6);
    let mut one = || {
        (0..prng.below(longest)).for_each(|_| thread::yield_now());
        die()
    };
    (0..DEATHS).map(|_| one()).collect()
}

impl BaseFixture {
    /// A client that reads and writes.
    pub fn client(&self) -> Client {
        Client::new(&self.device, self.history.clone())
    }

    /// Starts the background. It ends by [`Background::stop`].
    pub fn start_background(&self, clock: impl Clock + 'static) -> Background {
        Background::start(&self.device, clock)
    }

    /// Cuts the power at this moment, with stores of `atom` bytes whole; the fixture itself
    /// continues.
    pub fn cut(&self, prng: &mut Prng, atom: usize) -> Rest {
        // No other thread runs in between, because this code does not use the scheduler's locks.
        let record = self.history.record_now();
        let (image, platter) = (self.sim.cut(prng, atom), self.origin.cut(prng));
        Rest { image, platter, record, words: Vec::new() }
    }

    /// The server dies at this moment, and leaves `shared`; the fixture itself continues.
    pub fn die(&self, shared: &SharedWords) -> Rest {
        let words = shared.words().iter().map(SharedWord::peek).collect();
        let record = self.history.record_now();
        Rest { image: self.sim.image(), platter: self.origin.platter(), record, words }
    }

    /// Reads everything; returns the content area by area.
    pub fn read_all(&self) -> Vec<Vec<u64>> {
        let mut client = self.client();
        self.areas.iter().map(|&(at, count)| client.read(at, count).unwrap()).collect()
    }

    /// Writes all data back, until `is_settled` also holds; then checks that the origin has the
    /// cache's content.
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

    /// Checks the data that is read after a power cut or a death against the record at that time.
    pub fn judge_after(&self, rest: &Rest) {
        let is_cut = rest.words.is_empty();
        for (&(sector, _), tags) in self.areas.iter().zip(self.read_all()) {
            for (sector, tag) in (sector..).zip(tags) {
                rest.record.judge_after(sector, tag, is_cut);
            }
        }
    }
}
