//! A small cache over devices that let other threads go on in the middle of everything: a copy of
//! 4 KiB is eight copies of 512 bytes, and a power cut may come between any two.

use std::collections::HashMap;
use std::sync::Mutex;

use shuttle::thread::{self, JoinHandle};

use super::history::{History, INITIAL, Record};
use crate::device::{Device, LoadedTable};
use crate::disk::{Disk, DiskIo, DiskLimits, Ring};
use crate::error::Status;
use crate::local::{Clock, Local, ManualClock};
use crate::pcache::layout::{Geometry, SEGMENT_META_BYTES, SEGMENTS_AT};
use crate::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use crate::pmem::{Medium, Persistence, Pmem};
use crate::prng::Prng;
use crate::shm::SharedWords;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, ThreadId, current_thread, others_may_go_on};
use crate::units::{MIB, Nanos, SECTOR};

/// Bytes copied without another thread in between.
const PIECE: usize = SECTOR as usize;
/// Two regions, so that two stripes are in use.
pub const BACKING_BYTES: u64 = 8 * MIB;
/// Data of a segment: one block.
pub const GEOMETRY: Geometry =
    Geometry { segment_bytes: SEGMENT_META_BYTES + 4096, device_bytes_min: 0 };

/// The eight-byte word that fills a sector written with `tag`.
fn word(sector: u64, tag: u64) -> u64 {
    if tag == super::history::ZERO { 0 } else { tag << 16 | sector }
}

/// The content of `count` sectors.
pub fn content(sector: u64, count: u64, tag: u64) -> Vec<u8> {
    let sectors = sector..sector + count;
    sectors.flat_map(|sector| word(sector, tag).to_le_bytes().repeat(PIECE / 8)).collect()
}

/// The tags of sectors. Panics if one is torn or is not that sector's.
pub fn tags_of(sector: u64, bytes: &[u8]) -> Vec<u64> {
    let tag_of = |(sector, bytes): (u64, &[u8])| {
        let mut words = bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        let first = words.next().unwrap();
        assert!(words.all(|word| word == first), "sector {sector} is torn");
        assert!(first == 0 || first & 0xFFFF == sector, "sector {sector} has foreign data");
        first >> 16
    };
    (sector..).zip(bytes.chunks(PIECE)).map(tag_of).collect()
}

#[derive(Debug)]
struct Memory {
    visible: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<(u64, Vec<u8>, ThreadId)>,
}

/// The cache medium.
#[derive(Debug)]
pub struct Twin {
    medium: Medium,
    len_bytes: u64,
    memory: Mutex<Memory>,
}

impl Twin {
    fn new(image: Vec<u8>) -> Twin {
        let medium = Medium {
            name: "twin".into(),
            persistence: Persistence::Cpu,
            is_volatile: false,
            description: String::new(),
            kernel_name: "twin".into(),
        };
        let len_bytes = image.len() as u64;
        let memory = Memory { durable: image.clone(), visible: image, pending: Vec::new() };
        Twin { medium, len_bytes, memory: Mutex::new(memory) }
    }

    fn store_piece(&self, at: u64, bytes: &[u8]) {
        others_may_go_on();
        let thread = current_thread().id();
        let mut memory = self.memory.lock().unwrap();
        memory.visible[at as usize..][..bytes.len()].copy_from_slice(bytes);
        memory.pending.push((at, bytes.to_vec(), thread));
    }

    /// Everything that loads see.
    pub fn image(&self) -> Vec<u8> {
        self.memory.lock().unwrap().visible.clone()
    }

    /// Damages the sector that holds the first copy of `bytes`, behind everybody's back.
    pub fn corrupt(&self, bytes: &[u8]) {
        let mut memory = self.memory.lock().unwrap();
        let found = memory.visible.chunks(PIECE).position(|sector| sector == bytes);
        let at = found.expect("the data is in the cache") * PIECE;
        memory.visible[at] ^= 0xFF;
        memory.durable[at] ^= 0xFF;
    }

    /// What a power cut leaves.
    fn cut(&self, prng: &mut Prng) -> Vec<u8> {
        let memory = self.memory.lock().unwrap();
        let mut image = memory.durable.clone();
        let kept_of_4 = prng.below(5);
        for (at, bytes, _) in &memory.pending {
            for (nth, word) in bytes.chunks(8).enumerate() {
                if prng.below(4) < kept_of_4 {
                    image[*at as usize + nth * 8..][..word.len()].copy_from_slice(word);
                }
            }
        }
        image
    }
}

impl Pmem for Twin {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn medium(&self) -> &Medium {
        &self.medium
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        for (nth, piece) in bytes.chunks(PIECE).enumerate() {
            self.store_piece(at + (nth * PIECE) as u64, piece);
        }
    }

    fn zero(&self, at: u64, len: u64) {
        self.store_piece(at, &vec![0; len as usize]);
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), Status> {
        for (nth, piece) in into.chunks_mut(PIECE).enumerate() {
            others_may_go_on();
            let memory = self.memory.lock().unwrap();
            let from = at as usize + nth * PIECE;
            piece.copy_from_slice(&memory.visible[from..from + piece.len()]);
        }
        Ok(())
    }

    fn drain(&self) -> Result<(), Status> {
        others_may_go_on();
        let thread = current_thread().id();
        let Memory { durable, pending, .. } = &mut *self.memory.lock().unwrap();
        pending.retain(|(at, bytes, of)| {
            if *of == thread {
                durable[*at as usize..][..bytes.len()].copy_from_slice(bytes);
            }
            *of != thread
        });
        Ok(())
    }

    fn sync(&self) -> Result<(), Status> {
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
struct Platter {
    durable: HashMap<u64, u64>,
    /// Since the last flush, in order.
    unflushed: Vec<(u64, u64)>,
    writes: u64,
    flushes: u64,
}

impl Platter {
    fn tag(&self, sector: u64) -> u64 {
        let newest = self.unflushed.iter().rev().find(|(of, _)| *of == sector);
        newest.map(|(_, tag)| tag).or(self.durable.get(&sector)).copied().unwrap_or(INITIAL)
    }
}

/// The backing device: whole sectors with tags. What is written there must be whole.
#[derive(Debug)]
pub struct Origin {
    limits: DiskLimits,
    platter: Mutex<Platter>,
}

impl Origin {
    fn new(platter: Platter) -> Origin {
        let limits = DiskLimits {
            name: "origin".into(),
            size_bytes: BACKING_BYTES,
            block_bytes: 512,
            has_discard: true,
            identity: "origin".into(),
            kernel_name: "origin".into(),
        };
        Origin { limits, platter: Mutex::new(platter) }
    }

    /// How many writes and flushes there were.
    pub fn works(&self) -> u64 {
        let platter = self.platter.lock().unwrap();
        platter.writes + platter.flushes
    }

    fn carry_out(&self, io: &mut DiskIo) {
        let mut platter = self.platter.lock().unwrap();
        let (sector, count) = (io.offset / SECTOR, io.len / SECTOR);
        match io.op {
            crate::bio::Op::Read => {
                for nth in 0..count {
                    let tag = platter.tag(sector + nth);
                    let into = &mut io.buffer.as_mut_slice()[nth as usize * PIECE..][..PIECE];
                    into.copy_from_slice(&content(sector + nth, 1, tag));
                }
            }
            crate::bio::Op::Write => {
                let tags = tags_of(sector, io.buffer.as_slice());
                platter.unflushed.extend((sector..).zip(tags));
                platter.writes += 1;
            }
            crate::bio::Op::Flush => {
                let unflushed = std::mem::take(&mut platter.unflushed);
                platter.durable.extend(unflushed);
                platter.flushes += 1;
            }
            crate::bio::Op::Discard | crate::bio::Op::WriteZeroes => {
                platter.unflushed.extend((sector..sector + count).map(|sector| (sector, 0)));
                platter.writes += 1;
            }
        }
    }

    /// What a power cut leaves: of every sector any content since the last flush.
    fn cut(&self, prng: &mut Prng) -> Platter {
        let mut platter = self.platter.lock().unwrap().clone();
        let kept_of_4 = prng.below(5);
        for (sector, tag) in std::mem::take(&mut platter.unflushed) {
            if prng.below(4) < kept_of_4 {
                platter.durable.insert(sector, tag);
            }
        }
        platter
    }
}

impl Disk for Origin {
    fn limits(&self) -> &DiskLimits {
        &self.limits
    }

    fn start(&self, mut io: DiskIo, ring: &mut Ring) {
        others_may_go_on();
        self.carry_out(&mut io);
        others_may_go_on();
        ring.finish(io, Ok(()));
    }
}

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

/// Real time stands still: whatever happens must happen because of something.
#[derive(Debug)]
pub struct Frozen;

impl Clock for Frozen {
    fn now(&mut self) -> Nanos {
        0
    }

    fn skip_to(&mut self, _: Nanos) -> bool {
        false
    }
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
        let local = Local::without_kernel(&self.device).unwrap();
        Client { local, history: self.history.clone() }
    }

    /// Someone who does the background's work too, while nobody else is there.
    pub fn client_alone(&self) -> Client {
        let Client { local, history } = self.client();
        Client { local: local.with_background(ManualClock::default()), history }
    }

    /// Starts the background. It ends by [`Keeper::stop`].
    pub fn keeper(&self, clock: impl Clock + 'static) -> Keeper {
        let device = self.device.clone();
        let is_over = Arc::new(AtomicBool::new(false));
        let told = is_over.clone();
        let mut local = Local::without_kernel(&device).unwrap().with_background(clock);
        let thread = thread::spawn(move || {
            while !told.load(Ordering::SeqCst) {
                if !local.turn() {
                    local.rest();
                }
                thread::yield_now();
            }
        });
        Keeper { thread, is_over, device }
    }

    /// A power cut at this very moment; the world itself goes on.
    pub fn cut(&self, prng: &mut Prng) -> Rest {
        // Nobody else goes on in between: nothing here is the scheduler's.
        let record = self.history.record_now();
        Rest { image: self.twin.cut(prng), platter: self.origin.cut(prng), record }
    }

    /// When all threads are done: reads must be explained, accounts must be right, then also
    /// after the death of the server, and at last on the backing device alone.
    pub fn judge(self) {
        self.audit();
        self.read_all();
        self.history.judge();
        let World { plan, twin, origin, history, shared, attach_id, .. } = self;
        let platter = origin.platter.lock().unwrap().clone();
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
        let platter = self.origin.platter.lock().unwrap();
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

/// The background's thread.
pub struct Keeper {
    thread: JoinHandle<()>,
    is_over: Arc<AtomicBool>,
    device: Arc<Device>,
}

impl Keeper {
    /// Ends the background.
    pub fn stop(self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.device.events().work();
        self.thread.join().unwrap();
    }
}

/// Reads and writes of one thread, which all go into the history.
pub struct Client {
    local: Local,
    history: Arc<History>,
}

impl Client {
    pub fn write(&mut self, sector: u64, count: u64, fua: bool) {
        let tag = self.history.new_tag();
        let bytes = content(sector, count, tag);
        let acts = self.history.writes(sector, count, tag, fua);
        self.local.write_at(&bytes, sector * SECTOR, fua).unwrap();
        self.history.wrote(acts);
    }

    /// To be done once per sector: zeroes have no tags.
    pub fn discard(&mut self, sector: u64, count: u64) {
        let acts = self.history.writes(sector, count, super::history::ZERO, false);
        self.local.discard(sector * SECTOR, count * SECTOR).unwrap();
        self.history.wrote(acts);
    }

    pub fn read(&mut self, sector: u64, count: u64) -> Result<Vec<u64>, Status> {
        let mut bytes = vec![0; (count * SECTOR) as usize];
        let start = self.history.now();
        self.local.read_at(&mut bytes, sector * SECTOR)?;
        let tags = tags_of(sector, &bytes);
        self.history.found(sector, &tags, start);
        Ok(tags)
    }

    pub fn flush(&mut self) {
        let start = self.history.now();
        self.local.flush().unwrap();
        self.history.flushed(start);
    }
}
