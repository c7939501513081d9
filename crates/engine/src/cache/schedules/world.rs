//! A small cache with its three devices, clients and background.

use crate::cache::drain::Devices;
use crate::cache::metadata::contents::mapping;
use crate::cache::metadata::format::write_whole;
use crate::cache::metadata::superblock::CLEAN_SHUTDOWN;
use crate::cache::metadata::{Contents, Superblock};
use crate::cache::{Cache, OpenOptions, TableArgs};
use crate::device::{Device, LoadedTable};
use crate::disk::{Disk, RamDisk};
use crate::local::ManualClock;
use crate::prng::Prng;
use crate::schedules::history::{History, INITIAL};
use crate::schedules::scene::{Areas, Rest, Scene};
use crate::schedules::stage::{
    BACKING_BYTES, Client, Frozen, Keeper, Origin, Part, Platter, Twin, TwinDisk, content,
};
use crate::sync::Arc;
use crate::table::Word;
use crate::units::SECTOR;

/// Sectors of a block: the fewest there can be.
pub const BLOCK: u64 = 64;
/// Blocks that clients use.
pub const BLOCKS: u64 = 4;
/// Two sectors of each, so that a copy of a block can be overtaken.
pub const AREAS: Areas = &[(0, 2), (BLOCK, 2), (2 * BLOCK, 2), (3 * BLOCK, 2)];
/// Bytes of the metadata device.
const METADATA_BYTES: u64 = 64 * 4096;

/// What a world is made of.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub slots: u64,
    /// This many slots have the blocks with their numbers, clean.
    pub cached: u64,
    /// The words after the block size in the table line.
    pub options: &'static str,
}

/// A cache in use.
pub struct World {
    pub plan: Plan,
    pub cache: Arc<Cache>,
    metadata: Arc<Twin>,
    scene: Scene,
}

/// What a power cut leaves, with the metadata.
pub type Left = (Rest, Vec<u8>);

impl std::ops::Deref for World {
    type Target = Scene;

    fn deref(&self) -> &Scene {
        &self.scene
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

impl World {
    /// A cache with some blocks.
    pub fn new(plan: Plan) -> World {
        let mut image = content(0, plan.cached * BLOCK, INITIAL);
        image.resize((plan.slots * BLOCK * SECTOR) as usize, 0);
        World::open(plan, metadata(&plan), image, Platter::default(), Arc::default())
    }

    fn open(
        plan: Plan,
        metadata: Vec<u8>,
        image: Vec<u8>,
        platter: Platter,
        history: Arc<History>,
    ) -> World {
        let (metadata, twin) = (Arc::new(Twin::new(metadata)), Arc::new(Twin::new(image)));
        let origin = Arc::new(Origin::new(platter));
        let args = TableArgs::parse(&Word::list(&format!("M C O {BLOCK} {}", plan.options)));
        let args = args.unwrap_or_else(|error| panic!("a good table: {error}"));
        let devices = Devices {
            metadata: Arc::new(TwinDisk::new(metadata.clone())),
            cache: Arc::new(TwinDisk::new(twin.clone())),
            origin: origin.clone(),
        };
        let cache = Cache::open(args, BACKING_BYTES, devices, OpenOptions::default());
        let cache = Arc::new(cache.unwrap_or_else(|error| panic!("the open failed: {error}")));
        let table = LoadedTable::single(cache.clone(), BACKING_BYTES);
        let device = Device::with_table("world", table).unwrap();
        let scene = Scene { twin, origin, device, history, areas: AREAS };
        World { plan, cache, metadata, scene }
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

    /// Starts the background, whose time stands still by chance: then whatever happens must
    /// happen because of something.
    pub fn keeper(&self, prng: &mut Prng) -> Keeper {
        if prng.one_in(2) { self.keep(Frozen) } else { self.keep(ManualClock::default()) }
    }

    /// A power cut at this very moment; the world itself goes on.
    pub fn cut(&self, prng: &mut Prng) -> Left {
        let metadata = self.metadata.cut(prng, SECTOR as usize);
        (self.scene.cut(prng, SECTOR as usize), metadata)
    }

    /// When all threads are done: reads must be explained, then also after the death of the server,
    /// and at last on the origin alone; of every other world on the origin before that, too.
    pub fn judge(self) {
        self.audit();
        self.read_all();
        self.history.judge();
        // A dead server leaves more marks than there are dirty blocks, which hides some mistakes.
        if self.history.now().is_multiple_of(2) {
            self.drain();
        }
        let World { plan, scene, metadata, .. } = self;
        let Scene { twin, origin, history, .. } = scene;
        let next = World::open(plan, metadata.image(), twin.image(), origin.platter(), history);
        next.read_all();
        next.history.judge();
        next.drain();
    }

    fn audit(&self) {
        if let Err(wrong) = self.cache.audit(BLOCKS) {
            panic!("accounts: {wrong}");
        }
    }

    /// Writes everything back; then the origin is what the cache was.
    fn drain(&self) {
        self.scene.drain(|| true);
        self.audit();
    }

    /// Opens what a cut left and judges it.
    pub fn judge_left(plan: Plan, (mut rest, metadata): Left) {
        let (image, platter) = (std::mem::take(&mut rest.image), rest.platter.clone());
        let world = World::open(plan, metadata, image, platter, Arc::default());
        world.judge_after(&rest);
        world.drain();
    }
}
