//! A small cache with its three devices, clients and background.

use crate::cache::Devices;
use crate::cache::metadata::contents::mapping;
use crate::cache::metadata::format::write_whole;
use crate::cache::metadata::superblock::CLEAN_SHUTDOWN;
use crate::cache::metadata::{Contents, Superblock};
use crate::cache::{Cache, OpenOptions, TableArgs};
use crate::device::{Device, LoadedTable};
use crate::disk::{Disk, RamDisk};
use crate::local::ManualClock;
use crate::prng::Prng;
use crate::schedules::base::{Areas, BaseFixture, Rest};
use crate::schedules::history::{History, INITIAL};
use crate::schedules::simulator::{
    BACKING_BYTES, Background, Client, Frozen, Origin, Part, Platter, SimMedium, SimMediumDisk,
    content,
};
use crate::sync::Arc;
use crate::table::Word;
use crate::units::SECTOR;

/// Sectors of a block: the fewest there can be.
pub const BLOCK: u64 = 64;
/// Blocks that clients use.
pub const BLOCKS: u64 = 4;
/// Two sectors of each, so that a write can collide with a copy of a block.
pub const AREAS: Areas = &[(0, 2), (BLOCK, 2), (2 * BLOCK, 2), (3 * BLOCK, 2)];
/// Bytes of the metadata device.
const METADATA_BYTES: u64 = 64 * 4096;

/// The parameters of a fixture.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub slots: u64,
    /// This many slots have the blocks with their numbers, clean.
    pub cached: u64,
    /// The words after the block size in the table line.
    pub options: &'static str,
}

/// A cache in use.
pub struct Fixture {
    pub plan: Plan,
    pub cache: Arc<Cache>,
    metadata: Arc<SimMedium>,
    base: BaseFixture,
}

/// The state after a power failure, with the metadata.
pub type Left = (Rest, Vec<u8>);

impl std::ops::Deref for Fixture {
    type Target = BaseFixture;

    fn deref(&self) -> &BaseFixture {
        &self.base
    }
}

/// Metadata of a cache that was shut down cleanly.
fn metadata(plan: &Plan) -> Vec<u8> {
    let mut contents = Contents::empty(plan.slots);
    for nth in 0..plan.cached {
        contents.mappings[nth as usize] = mapping(Some(nth));
    }
    let mut superblock = Superblock::fresh(2, BLOCK as u32);
    superblock.put_flag(CLEAN_SHUTDOWN, true);
    let ram = Arc::new(RamDisk::new(METADATA_BYTES, 512));
    let disk: Arc<dyn Disk> = ram.clone();
    write_whole(&disk, superblock, &contents).unwrap_or_else(|error| panic!("{error}"));
    let mut image = vec![0; METADATA_BYTES as usize];
    ram.peek(0, &mut image);
    image
}

impl Fixture {
    /// A cache with some blocks.
    pub fn new(plan: Plan) -> Fixture {
        let mut image = content(0, plan.cached * BLOCK, INITIAL);
        image.resize((plan.slots * BLOCK * SECTOR) as usize, 0);
        Fixture::open(plan, metadata(&plan), image, Platter::default(), Arc::default())
    }

    fn open(
        plan: Plan,
        metadata: Vec<u8>,
        image: Vec<u8>,
        platter: Platter,
        history: Arc<History>,
    ) -> Fixture {
        let (metadata, sim) = (Arc::new(SimMedium::new(metadata)), Arc::new(SimMedium::new(image)));
        let origin = Arc::new(Origin::new(platter));
        let args = TableArgs::parse(&Word::list(&format!("M C O {BLOCK} {}", plan.options)));
        let args = args.unwrap_or_else(|error| panic!("a good table: {error}"));
        let devices = Devices {
            metadata: Arc::new(SimMediumDisk::new(metadata.clone())),
            cache: Arc::new(SimMediumDisk::new(sim.clone())),
            origin: origin.clone(),
        };
        let cache = Cache::open(args, BACKING_BYTES, devices, OpenOptions::default());
        let cache = Arc::new(cache.unwrap_or_else(|error| panic!("the open failed: {error}")));
        let table = LoadedTable::single(cache.clone(), BACKING_BYTES);
        let device = Device::with_table("fixture", table).unwrap();
        let base = BaseFixture { sim, origin, device, history, areas: AREAS };
        Fixture { plan, cache, metadata, base }
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

    /// A thread on which the policy wants one of `blocks` after the other.
    pub fn wishes(&self, prng: &mut Prng, blocks: &'static [u64]) -> Part {
        let cache = self.cache.clone();
        let mut prng = Prng::new(prng.next_u64());
        Box::new(move || {
            for _ in 0..1 + prng.below(4) {
                let block = blocks[prng.below(blocks.len() as u64) as usize];
                let mut turns = prng.below(40);
                // It may have to wait for room, and for writers.
                while turns > 0 && !cache.wish(block) {
                    shuttle::thread::yield_now();
                    turns -= 1;
                }
                (0..turns).for_each(|_| shuttle::thread::yield_now());
            }
        })
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

    /// A power cut at this very moment; the fixture itself goes on.
    pub fn cut(&self, prng: &mut Prng) -> Left {
        let metadata = self.metadata.cut(prng, SECTOR as usize);
        (self.base.cut(prng, SECTOR as usize), metadata)
    }

    /// When all threads are done: reads must be explained, then also after the death of the server,
    /// and at last on the origin alone; in half of the fixtures, on the origin before that as well.
    pub fn judge(self) {
        self.audit();
        self.read_all();
        self.history.judge();
        // A dead server leaves more marks than there are dirty blocks, which hides some mistakes.
        if self.history.now().is_multiple_of(2) {
            self.drain();
        }
        let Fixture { plan, base, metadata, .. } = self;
        let BaseFixture { sim, origin, history, .. } = base;
        let next = Fixture::open(plan, metadata.image(), sim.image(), origin.platter(), history);
        next.read_all();
        next.history.judge();
        next.drain();
    }

    fn audit(&self) {
        if let Err(wrong) = self.cache.audit(BLOCKS) {
            panic!("accounts: {wrong}");
        }
    }

    /// Writes all dirty blocks back; then the origin has the data of the cache.
    fn drain(&self) {
        self.base.drain(|| true);
        self.audit();
    }

    /// Opens what a cut left and judges it.
    pub fn judge_left(plan: Plan, (mut rest, metadata): Left) {
        let (image, platter) = (std::mem::take(&mut rest.image), rest.platter.clone());
        let fixture = Fixture::open(plan, metadata, image, platter, Arc::default());
        fixture.judge_after(&rest);
        fixture.drain();
    }
}
