//! A small pcache with its devices, clients and background.

use crate::device::{Device, LoadedTable};
use crate::local::ManualClock;
use crate::pcache::layout::{Geometry, SEGMENT_META_BYTES, SEGMENTS_AT};
use crate::pcache::{OpenOptions, Pcache, ReplayPace, TableArgs, shared_words};
use crate::prng::Prng;
use crate::schedules::base::{Areas, BaseFixture, Rest};
use crate::schedules::history::History;
use crate::schedules::simulator::{BACKING_BYTES, Client, Origin, Platter, SimMedium};
use crate::shm::SharedWords;
use crate::sync::Arc;
use crate::table::Word;

/// Bytes of persistent memory that are never torn.
const WORD: usize = 8;
/// Data of a segment: one block.
pub const GEOMETRY: Geometry =
    Geometry { segment_bytes: SEGMENT_META_BYTES + 4096, device_bytes_min: 0 };

/// The parameters of a fixture.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub segments: u64,
    pub table: &'static str,
    pub areas: Areas,
}

/// A cache in use.
pub struct Fixture {
    pub plan: Plan,
    pub cache: Arc<Pcache>,
    base: BaseFixture,
    shared: SharedWords,
    attach_id: u64,
}

impl std::ops::Deref for Fixture {
    type Target = BaseFixture;

    fn deref(&self) -> &BaseFixture {
        &self.base
    }
}

/// Some regions of the index get an array.
const FLAT_FROM: usize = 4;
/// The whole log before the first request.
const AT_ONCE: ReplayPace = ReplayPace { at_once_max: u64::MAX, slice: 1 };

impl Fixture {
    /// A freshly formatted cache.
    pub fn new(plan: Plan) -> Fixture {
        let bytes = SEGMENTS_AT + plan.segments * GEOMETRY.segment_bytes;
        let shared = SharedWords::private(shared_words(2));
        let image = vec![0; bytes as usize];
        Fixture::open(plan, image, Platter::default(), Arc::default(), shared, 1, AT_ONCE)
    }

    fn open(
        plan: Plan,
        image: Vec<u8>,
        platter: Platter,
        history: Arc<History>,
        shared: SharedWords,
        attach_id: u64,
        replay: ReplayPace,
    ) -> Fixture {
        let (sim, origin) = (Arc::new(SimMedium::new(image)), Arc::new(Origin::new(platter)));
        let geometry = GEOMETRY;
        let options = OpenOptions {
            geometry,
            stripes: 2,
            replay,
            // Packed regions join under a lock of their own.
            flat_from: if replay.at_once_max == 0 { 1 } else { FLAT_FROM },
            ..OpenOptions::new(attach_id * 0x1_0001)
        };
        let args = TableArgs::parse(&Word::list(plan.table));
        let args = args.unwrap_or_else(|error| panic!("a good table: {error}"));
        let (pmem, disk) = (sim.clone(), origin.clone());
        let cache = Pcache::open(args, BACKING_BYTES, pmem, disk, shared.clone(), &options);
        let cache = Arc::new(cache.unwrap_or_else(|error| panic!("the attach failed: {error}")));
        let table = LoadedTable::single(cache.clone(), BACKING_BYTES);
        let device = Device::with_table("fixture", table).unwrap();
        let base = BaseFixture { sim, origin, device, history, areas: plan.areas };
        Fixture { plan, cache, base, shared, attach_id }
    }

    /// A client that also does the background's work, as the only thread.
    pub fn client_alone(&self) -> Client {
        self.client().with_background(ManualClock::default())
    }

    /// A power cut at this very moment; the fixture itself goes on.
    pub fn cut(&self, prng: &mut Prng) -> Rest {
        self.base.cut(prng, WORD)
    }

    /// When all threads are done: reads must be explained, accounts must be right, then also after
    /// the death of the server, and at last on the backing device alone.
    pub fn judge(self) {
        self.audit();
        self.read_all();
        self.history.judge();
        let Fixture { plan, base, shared, attach_id, .. } = self;
        let BaseFixture { sim, origin, history, .. } = base;
        let platter = origin.platter();
        let next =
            Fixture::open(plan, sim.image(), platter, history, shared, attach_id + 1, AT_ONCE);
        next.read_all();
        next.history.judge();
        next.drain();
    }

    /// The next server, which replays as much as it can only while clients are present.
    pub fn opened_late(self) -> Fixture {
        let Fixture { plan, base, shared, attach_id, .. } = self;
        let BaseFixture { sim, origin, history, .. } = base;
        let late = ReplayPace { at_once_max: 0, slice: 1 };
        let platter = origin.platter();
        Fixture::open(plan, sim.image(), platter, history, shared, attach_id + 1, late)
    }

    /// Panics if the accounts are wrong. No thread is at work.
    pub fn audit(&self) {
        if let Err(wrong) = self.cache.audit() {
            panic!("accounts: {wrong}");
        }
    }

    /// Writes all dirty data back; then the backing device has the data of the cache.
    pub fn drain(&self) {
        self.base.drain(|| !self.cache.stripes.has_open_keys() && !self.cache.is_replaying());
    }

    /// The server dies at this moment; the fixture itself continues.
    pub fn die(&self) -> Rest {
        self.base.die(&self.shared)
    }

    /// Attaches what a cut, or a death, left and judges it.
    pub fn judge_rest(plan: Plan, mut rest: Rest) {
        let shared = rest.shared(shared_words(2));
        let history = Arc::new(History::default());
        let (image, platter) = (std::mem::take(&mut rest.image), rest.platter.clone());
        let fixture = Fixture::open(plan, image, platter, history, shared, 2, AT_ONCE);
        fixture.audit();
        fixture.judge_after(&rest);
        fixture.drain();
    }
}
