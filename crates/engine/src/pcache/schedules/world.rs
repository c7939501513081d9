//! A small pcache with its devices, clients and background.

use crate::device::{Device, LoadedTable};
use crate::local::{Clock, Local, ManualClock};
use crate::pcache::layout::{Geometry, SEGMENT_META_BYTES, SEGMENTS_AT};
use crate::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use crate::prng::Prng;
use crate::schedules::history::{History, Record};
use crate::schedules::stage::{BACKING_BYTES, Client, Keeper, Origin, Platter, Twin};
use crate::shm::SharedWords;
use crate::sync::Arc;

/// Bytes of persistent memory that are never torn.
const WORD: usize = 8;
/// Data of a segment: one block.
pub const GEOMETRY: Geometry =
    Geometry { segment_bytes: SEGMENT_META_BYTES + 4096, device_bytes_min: 0 };

/// What a world is made of.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub segments: u64,
    pub table: &'static str,
    /// Sectors that the clients use: where they begin, how many.
    pub areas: &'static [(u64, u64)],
}

/// What is left of a world after a power cut, and what was known then.
pub struct Rest {
    image: Vec<u8>,
    platter: Platter,
    record: Record,
}

/// A cache in use.
pub struct World {
    pub plan: Plan,
    pub twin: Arc<Twin>,
    pub origin: Arc<Origin>,
    pub cache: Arc<Pcache>,
    pub device: Arc<Device>,
    pub history: Arc<History>,
    shared: SharedWords,
    attach_id: u64,
}

impl World {
    /// A freshly formatted cache.
    pub fn new(plan: Plan) -> World {
        let bytes = SEGMENTS_AT + plan.segments * GEOMETRY.segment_bytes;
        let shared = SharedWords::private(shared_words(2));
        World::open(plan, vec![0; bytes as usize], Platter::default(), Arc::default(), shared, 1)
    }

    fn open(
        plan: Plan,
        image: Vec<u8>,
        platter: Platter,
        history: Arc<History>,
        shared: SharedWords,
        attach_id: u64,
    ) -> World {
        let (twin, origin) = (Arc::new(Twin::new(image)), Arc::new(Origin::new(platter)));
        let geometry = GEOMETRY;
        let options =
            OpenOptions { geometry, stripes: 2, ..OpenOptions::new(attach_id * 0x1_0001) };
        let words: Vec<&str> = plan.table.split_whitespace().collect();
        let args = TableArgs::parse(&words).unwrap_or_else(|_| panic!("a good table"));
        let (pmem, disk) = (twin.clone(), origin.clone());
        let cache = Pcache::open(args, BACKING_BYTES, pmem, disk, shared.clone(), &options);
        let cache = Arc::new(cache.unwrap_or_else(|error| panic!("the attach failed: {error}")));
        let table = LoadedTable::single(cache.clone(), BACKING_BYTES);
        let device = Device::with_table("world", table).unwrap();
        World { plan, twin, origin, cache, device, history, shared, attach_id }
    }

    /// Someone who reads and writes.
    pub fn client(&self) -> Client {
        Client::new(&self.device, self.history.clone())
    }

    /// Someone who does the background's work too, while nobody else is there.
    pub fn client_alone(&self) -> Client {
        self.client().with_background(ManualClock::default())
    }

    /// Starts the background. It ends by [`Keeper::stop`].
    pub fn keeper(&self, clock: impl Clock + 'static) -> Keeper {
        Keeper::start(&self.device, clock)
    }

    /// A power cut at this very moment; the world itself goes on.
    pub fn cut(&self, prng: &mut Prng) -> Rest {
        // Nobody else goes on in between: nothing here is the scheduler's.
        let record = self.history.record_now();
        Rest { image: self.twin.cut(prng, WORD), platter: self.origin.cut(prng), record }
    }

    /// When all threads are done: reads must be explained, accounts must be right, then also
    /// after the death of the server, and at last on the backing device alone.
    pub fn judge(self) {
        self.audit();
        self.read_all();
        self.history.judge();
        let World { plan, twin, origin, history, shared, attach_id, .. } = self;
        let platter = origin.platter();
        let next = World::open(plan, twin.image(), platter, history, shared, attach_id + 1);
        next.read_all();
        next.history.judge();
        next.drain();
    }

    /// Panics if the accounts are wrong. Nobody is at work.
    pub fn audit(&self) {
        if let Err(wrong) = self.cache.audit() {
            panic!("accounts: {wrong}");
        }
    }

    fn read_all(&self) {
        let mut client = self.client();
        for &(sector, count) in self.plan.areas {
            client.read(sector, count).unwrap();
        }
    }

    /// Writes everything back; then the backing device is what the cache was.
    pub fn drain(&self) {
        let mut client = self.client();
        let before: Vec<Vec<u64>> =
            self.plan.areas.iter().map(|&(at, n)| client.read(at, n).unwrap()).collect();
        self.device.set_draining(true);
        let mut local =
            Local::without_kernel(&self.device).unwrap().with_background(ManualClock::default());
        for _ in 0..200 {
            if self.device.dirty().bytes == 0 && !self.cache.has_open_keys() {
                break;
            }
            if !local.turn() {
                local.rest();
            }
        }
        assert_eq!(self.device.dirty().bytes, 0, "the drain makes no progress");
        let platter = self.origin.platter();
        for (&(sector, count), before) in self.plan.areas.iter().zip(before) {
            let found: Vec<u64> = (sector..sector + count).map(|at| platter.tag(at)).collect();
            assert_eq!(found, before, "the backing device is not what the cache was at {sector}");
        }
    }
}

impl Rest {
    /// Attaches what the cut left and judges it.
    pub fn judge(self, plan: Plan) {
        let shared = SharedWords::private(shared_words(2));
        let history = Arc::new(History::default());
        let world = World::open(plan, self.image, self.platter, history, shared, 2);
        let mut client = world.client();
        for &(sector, count) in plan.areas {
            for (sector, tag) in (sector..).zip(client.read(sector, count).unwrap()) {
                self.record.judge_after_cut(sector, tag);
            }
        }
        drop(client);
        world.drain();
    }
}
