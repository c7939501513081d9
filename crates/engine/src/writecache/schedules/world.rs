//! A small writecache with its devices, clients and background.

use crate::device::{Device, LoadedTable};
use crate::local::ManualClock;
use crate::prng::Prng;
use crate::schedules::history::History;
use crate::schedules::scene::{Areas, Rest, Scene};
use crate::schedules::stage::{
    BACKING_BYTES, Client, Frozen, Keeper, Origin, Part, Platter, Twin, TwinDisk,
};
use crate::shm::SharedWords;
use crate::sync::Arc;
use crate::table::Word;
use crate::target::Target;
use crate::units::SECTOR;
use crate::writecache::layout::{ENTRY_BYTES, SUPERBLOCK_BYTES};
use crate::writecache::{Mode, OpenOptions, TableArgs, Writecache, shared_words_for};

/// Bytes of a block: two sectors, so that a copy of one can be overtaken.
const BLOCK_BYTES: u64 = 1024;
const STRIPES: usize = 2;

/// What a world is made of.
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
pub struct World {
    pub plan: Plan,
    pub cache: Arc<Writecache>,
    scene: Scene,
    shared: SharedWords,
    attach_id: u64,
}

impl std::ops::Deref for World {
    type Target = Scene;

    fn deref(&self) -> &Scene {
        &self.scene
    }
}

impl World {
    /// A freshly formatted cache.
    pub fn new(plan: Plan) -> World {
        let metadata = (SUPERBLOCK_BYTES + plan.slots * ENTRY_BYTES).next_multiple_of(BLOCK_BYTES);
        let bytes = metadata + plan.slots * BLOCK_BYTES;
        let shared = SharedWords::private(shared_words_for(STRIPES, plan.list_max));
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
        let options = OpenOptions { stripes: STRIPES, ..OpenOptions::new(attach_id) };
        let line = format!("{} O C {BLOCK_BYTES} {}", plan.mode.word(), plan.options);
        let args = TableArgs::parse(&Word::list(&line));
        let args = args.unwrap_or_else(|error| panic!("a good table: {error}"));
        let (len, disk, words) = (BACKING_BYTES, origin.clone(), shared.clone());
        let cache = match plan.mode {
            Mode::Pmem => Writecache::open_pmem(args, len, disk, twin.clone(), words, &options),
            Mode::Ssd => {
                let medium = Arc::new(TwinDisk::new(twin.clone()));
                Writecache::open_disk(args, len, disk, medium, words, &options)
            }
        };
        let cache = Arc::new(cache.unwrap_or_else(|error| panic!("the attach failed: {error}")));
        assert_eq!(cache.device.geometry.blocks, plan.slots);
        let table = LoadedTable::single(cache.clone(), BACKING_BYTES);
        let device = Device::with_table("world", table).unwrap();
        let scene = Scene { twin, origin, device, history, areas: plan.areas };
        World { plan, cache, scene, shared, attach_id }
    }

    /// What one client does, on a thread of its own.
    pub fn part(
        &self,
        prng: &mut Prng,
        act: impl FnOnce(&mut Client, &mut Prng) + Send + 'static,
    ) -> Part {
        let mut client = self.client();
        let mut prng = Prng::new(prng.next_u64());
        Box::new(move || act(&mut client, &mut prng))
    }

    /// Starts the background, whose time stands still by chance: then whatever happens must
    /// happen because of something.
    pub fn keeper(&self, prng: &mut Prng) -> Keeper {
        if prng.one_in(2) { self.keep(Frozen) } else { self.keep(ManualClock::default()) }
    }

    /// A power cut at this very moment; the world itself goes on.
    pub fn cut(&self, prng: &mut Prng) -> Rest {
        self.scene.cut(prng, if self.plan.mode == Mode::Pmem { 8 } else { SECTOR as usize })
    }

    /// When all threads are done: reads must be explained, accounts must be right, then also
    /// after the death of the server, and at last on the origin alone.
    pub fn judge(self) {
        self.audit();
        self.read_all();
        self.history.judge();
        let World { plan, scene, shared, attach_id, .. } = self;
        let Scene { twin, origin, history, .. } = scene;
        let platter = origin.platter();
        let next = World::open(plan, twin.image(), platter, history, shared, attach_id + 1);
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

    /// Writes everything back; then the origin is what the cache was.
    pub fn drain(&self) {
        self.scene.drain(|| self.cache.is_settled());
        self.audit();
        assert_eq!(self.cache.index.linked(), 0, "slots are in use after a drain");
    }

    /// Sends a message of one word.
    pub fn message(&self, word: &str) {
        self.cache.message(&[word.to_string()]).unwrap();
    }

    /// The server dies at this very moment; the world itself goes on.
    pub fn die(&self) -> Rest {
        self.scene.die(&self.shared)
    }

    /// Attaches what a cut, or a death, left and judges it.
    pub fn judge_rest(plan: Plan, mut rest: Rest) {
        let shared = rest.shared(shared_words_for(STRIPES, plan.list_max));
        let history = Arc::new(History::default());
        let (image, platter) = (std::mem::take(&mut rest.image), rest.platter.clone());
        let world = World::open(plan, image, platter, history, shared, 2);
        world.audit();
        world.judge_after(&rest);
        world.drain();
    }
}
