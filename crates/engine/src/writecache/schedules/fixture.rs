//! A small writecache with its devices, clients and background.

use crate::device::{Device, LoadedTable};
use crate::local::ManualClock;
use crate::prng::Prng;
use crate::schedules::base::{Areas, BaseFixture, Rest};
use crate::schedules::history::History;
use crate::schedules::simulator::{
    BACKING_BYTES, Background, Client, Frozen, Origin, Part, Platter, SimMedium, SimMediumDisk,
};
use crate::shm::SharedWords;
use crate::sync::Arc;
use crate::table::Word;
use crate::target::Target;
use crate::units::SECTOR;
use crate::writecache::layout::{ENTRY_BYTES, SUPERBLOCK_BYTES};
use crate::writecache::{Mode, OpenOptions, TableArgs, Writecache, shared_words_for};

/// Bytes of a block: two sectors, so that a write can collide with a copy of the block.
const BLOCK_BYTES: u64 = 1024;
const STRIPES: usize = 2;

/// The parameters of a fixture.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub mode: Mode,
    pub slots: u64,
    /// The words after the block size in the table line.
    pub options: &'static str,
    /// Room in a list of uncommitted blocks.
    pub list_max: usize,
    pub areas: Areas,
}

/// A cache in use.
pub struct Fixture {
    pub plan: Plan,
    pub cache: Arc<Writecache>,
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

impl Fixture {
    /// A freshly formatted cache.
    pub fn new(plan: Plan) -> Fixture {
        let metadata = (SUPERBLOCK_BYTES + plan.slots * ENTRY_BYTES).next_multiple_of(BLOCK_BYTES);
        let bytes = metadata + plan.slots * BLOCK_BYTES;
        let shared = SharedWords::private(shared_words_for(STRIPES, plan.list_max));
        Fixture::open(plan, vec![0; bytes as usize], Platter::default(), Arc::default(), shared, 1)
    }

    fn open(
        plan: Plan,
        image: Vec<u8>,
        platter: Platter,
        history: Arc<History>,
        shared: SharedWords,
        attach_id: u64,
    ) -> Fixture {
        let (sim, origin) = (Arc::new(SimMedium::new(image)), Arc::new(Origin::new(platter)));
        let options = OpenOptions { stripes: STRIPES, ..OpenOptions::new(attach_id) };
        let line = format!("{} O C {BLOCK_BYTES} {}", plan.mode.word(), plan.options);
        let args = TableArgs::parse(&Word::list(&line));
        let args = args.unwrap_or_else(|error| panic!("a good table: {error}"));
        let (len, disk, words) = (BACKING_BYTES, origin.clone(), shared.clone());
        let cache = match plan.mode {
            Mode::Pmem => Writecache::open_pmem(args, len, disk, sim.clone(), words, &options),
            Mode::Ssd => {
                let medium = Arc::new(SimMediumDisk::new(sim.clone()));
                Writecache::open_disk(args, len, disk, medium, words, &options)
            }
        };
        let cache = Arc::new(cache.unwrap_or_else(|error| panic!("the attach failed: {error}")));
        assert_eq!(cache.device.geometry.blocks, plan.slots);
        let table = LoadedTable::single(cache.clone(), BACKING_BYTES);
        let device = Device::with_table("fixture", table).unwrap();
        let base = BaseFixture { sim, origin, device, history, areas: plan.areas };
        Fixture { plan, cache, base, shared, attach_id }
    }

    /// The actions of one client, on its own thread.
    pub fn part(
        &self,
        prng: &mut Prng,
        act: impl FnOnce(&mut Client, &mut Prng) + Send + 'static,
    ) -> Part {
        let mut client = self.client();
        let mut prng = Prng::new(prng.next_u64());
        Box::new(move || act(&mut client, &mut prng))
    }

    /// Starts the background, whose clock stands still in some schedules: then only events can
    /// cause progress.
    pub fn random_background(&self, prng: &mut Prng) -> Background {
        if prng.one_in(2) {
            self.start_background(Frozen)
        } else {
            self.start_background(ManualClock::default())
        }
    }

    /// Cuts the power at this moment; the fixture itself continues.
    pub fn cut(&self, prng: &mut Prng) -> Rest {
        self.base.cut(prng, if self.plan.mode == Mode::Pmem { 8 } else { SECTOR as usize })
    }

    /// The check after all threads have ended: all reads are explained and the accounts are right,
    /// then again after the death of the server, and at last on the origin alone.
    pub fn judge(self) {
        self.audit();
        self.read_all();
        self.history.judge();
        let Fixture { plan, base, shared, attach_id, .. } = self;
        let BaseFixture { sim, origin, history, .. } = base;
        let platter = origin.platter();
        let next = Fixture::open(plan, sim.image(), platter, history, shared, attach_id + 1);
        next.audit();
        next.read_all();
        next.history.judge();
        next.drain();
    }

    fn audit(&self) {
        if let Err(wrong) = self.cache.audit() {
            panic!("accounts: {wrong}");
        }
    }

    /// Writes all dirty blocks back; then the origin has the data of the cache.
    pub fn drain(&self) {
        self.base.drain(|| self.cache.is_settled());
        self.audit();
        assert_eq!(self.cache.index.linked(), 0, "slots are in use after a drain");
    }

    /// Sends a message of one word.
    pub fn message(&self, word: &str) {
        self.cache.message(&[word.to_string()]).unwrap();
    }

    /// The server dies at this moment; the fixture itself continues.
    pub fn die(&self) -> Rest {
        self.base.die(&self.shared)
    }

    /// Attaches the media that a power cut or a death left, and checks them.
    pub fn judge_rest(plan: Plan, mut rest: Rest) {
        let shared = rest.shared(shared_words_for(STRIPES, plan.list_max));
        let history = Arc::new(History::default());
        let (image, platter) = (std::mem::take(&mut rest.image), rest.platter.clone());
        let fixture = Fixture::open(plan, image, platter, history, shared, 2);
        fixture.audit();
        fixture.judge_after(&rest);
        fixture.drain();
    }
}
