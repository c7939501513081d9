//! The simulator for test cases: devices that let other threads run in the middle of each operation
//! (a copy of 4 KiB is eight copies of 512 bytes, and a power cut may happen between any two),
//! clients that record every operation in the history, and a background.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shuttle::thread::{self, JoinHandle};

use super::history::{History, INITIAL, ZERO};
use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::device::Device;
use crate::disk::{Disk, DiskIo, DiskLimits, Ring};
use crate::error::Status;
use crate::local::{Clock, Local};
use crate::pmem::client_memory::ClientMemory;
use crate::pmem::copy_target::{CopyTarget, FilePart};
use crate::pmem::{Medium, Persistence, Pmem};
use crate::prng::Prng;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, ThreadId, current_thread, others_may_go_on};
use crate::topology::Topology;
use crate::units::{MIB, Nanos, SECTOR};

/// Bytes copied without another thread in between.
const PIECE: usize = SECTOR as usize;
/// Bytes of a client's memory.
const CLIENT_BYTES: u64 = 64 << 10;
/// Two regions of pcache, so that two stripes are in use.
pub const BACKING_BYTES: u64 = 8 * MIB;

/// The eight-byte word that fills a sector written with `tag`.
fn word(sector: u64, tag: u64) -> u64 {
    if tag == ZERO { 0 } else { tag << 16 | sector }
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

/// A store that is not durable yet.
#[derive(Debug)]
struct Store {
    at: u64,
    bytes: Vec<u8>,
    by: ThreadId,
    nth: u64,
}

#[derive(Debug)]
struct Memory {
    visible: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<Store>,
    stores: u64,
    /// Decides which stores of others have left their CPU already.
    luck: Prng,
}

impl Memory {
    /// The memory's content as the thread `by` reads it: with its own stores, the stores that other
    /// threads have drained, and any of their other stores. (A disk, which looks the same to all
    /// threads, has `visible`.)
    fn seen(&mut self, by: ThreadId, at: usize, into: &mut [u8]) {
        let end = at + into.len();
        into.copy_from_slice(&self.durable[at..end]);
        for store in &self.pending {
            let (from, to) = (store.at as usize, store.at as usize + store.bytes.len());
            let (first, last) = (from.max(at), to.min(end));
            if first < last && (store.by == by || self.luck.one_in(2)) {
                into[first - at..last - at]
                    .copy_from_slice(&store.bytes[first - from..last - from]);
            }
        }
    }
}

/// The cache medium: memory, or through [`SimMediumDisk`] a disk.
#[derive(Debug)]
pub struct SimMedium {
    medium: Medium,
    len_bytes: u64,
    memory: Mutex<Memory>,
}

impl SimMedium {
    pub fn new(image: Vec<u8>) -> SimMedium {
        let medium = Medium {
            name: "sim".into(),
            persistence: Persistence::Cpu,
            is_volatile: false,
            description: String::new(),
            kernel_name: "sim".into(),
        };
        let len_bytes = image.len() as u64;
        let (durable, luck) = (image.clone(), Prng::new(len_bytes));
        let memory = Memory { durable, visible: image, pending: Vec::new(), stores: 0, luck };
        SimMedium { medium, len_bytes, memory: Mutex::new(memory) }
    }

    fn store_piece(&self, at: u64, bytes: &[u8]) {
        others_may_go_on();
        let by = current_thread().id();
        let mut memory = self.memory.lock().unwrap();
        memory.visible[at as usize..][..bytes.len()].copy_from_slice(bytes);
        memory.stores += 1;
        let nth = memory.stores;
        memory.pending.push(Store { at, bytes: bytes.to_vec(), by, nth });
    }

    fn load_pieces(
        &self,
        at: u64,
        into: &mut [u8],
        mut look: impl FnMut(&mut Memory, usize, &mut [u8]),
    ) {
        for (nth, piece) in into.chunks_mut(PIECE).enumerate() {
            others_may_go_on();
            look(&mut self.memory.lock().unwrap(), at as usize + nth * PIECE, piece);
        }
    }

    fn settle(&self, is_covered: impl Fn(&Store) -> bool) {
        let Memory { durable, pending, .. } = &mut *self.memory.lock().unwrap();
        pending.retain(|store| {
            if is_covered(store) {
                durable[store.at as usize..][..store.bytes.len()].copy_from_slice(&store.bytes);
            }
            !is_covered(store)
        });
    }

    /// Everything that is durable.
    pub fn durable(&self) -> Vec<u8> {
        self.memory.lock().unwrap().durable.clone()
    }

    /// Everything that loads see.
    pub fn image(&self) -> Vec<u8> {
        self.memory.lock().unwrap().visible.clone()
    }

    /// Damages the sector that holds the first copy of `bytes`, unnoticed.
    pub fn corrupt(&self, bytes: &[u8]) {
        let mut memory = self.memory.lock().unwrap();
        let found = memory.visible.chunks(PIECE).position(|sector| sector == bytes);
        let at = found.expect("the data is in the cache") * PIECE;
        memory.visible[at] ^= 0xFF;
        memory.durable[at] ^= 0xFF;
    }

    /// The content after a power cut, in which aligned units of `atom` bytes are never torn.
    pub fn cut(&self, prng: &mut Prng, atom: usize) -> Vec<u8> {
        let memory = self.memory.lock().unwrap();
        let mut image = memory.durable.clone();
        let kept_of_4 = prng.below(5);
        for store in &memory.pending {
            for (nth, word) in store.bytes.chunks(atom).enumerate() {
                if prng.below(4) < kept_of_4 {
                    image[store.at as usize + nth * atom..][..word.len()].copy_from_slice(word);
                }
            }
        }
        image
    }
}

impl Pmem for SimMedium {
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
        let by = current_thread().id();
        self.load_pieces(at, into, |memory, at, piece| memory.seen(by, at, piece));
        Ok(())
    }

    fn drain(&self) -> Result<(), Status> {
        others_may_go_on();
        let by = current_thread().id();
        self.settle(|store| store.by == by);
        Ok(())
    }

    fn sync(&self) -> Result<(), Status> {
        Ok(())
    }
}

/// The cache medium as a disk. A flush covers the writes that ended before it was started.
#[derive(Debug)]
pub struct SimMediumDisk {
    limits: DiskLimits,
    sim: Arc<SimMedium>,
}

impl SimMediumDisk {
    pub fn new(sim: Arc<SimMedium>) -> SimMediumDisk {
        let limits = DiskLimits {
            name: "sim".into(),
            size_bytes: sim.len_bytes,
            block_bytes: 512,
            atomic_bytes: 512,
            has_discard: false,
            topology: Topology::default(),
            identity: "sim".into(),
            kernel_name: "sim".into(),
        };
        SimMediumDisk { limits, sim }
    }
}

impl Disk for SimMediumDisk {
    fn limits(&self) -> &DiskLimits {
        &self.limits
    }

    fn start(&self, mut io: DiskIo, ring: &mut Ring) {
        match io.op {
            Op::Read => {
                let into = io.buffer.as_mut_slice();
                self.sim.load_pieces(io.offset, into, |memory, at, piece| {
                    piece.copy_from_slice(&memory.visible[at..at + piece.len()]);
                });
            }
            Op::Write => self.sim.store(io.offset, io.buffer.as_slice()),
            Op::Flush => {
                let last = self.sim.memory.lock().unwrap().stores;
                others_may_go_on();
                self.sim.settle(|store| store.nth <= last);
            }
            Op::Discard | Op::WriteZeroes => self.sim.zero(io.offset, io.len),
        }
        others_may_go_on();
        ring.finish(io, Ok(()));
    }
}

#[derive(Clone, Debug, Default)]
pub struct Platter {
    durable: HashMap<u64, u64>,
    /// Since the last flush, in order.
    unflushed: Vec<(u64, u64)>,
    writes: u64,
    flushes: u64,
    /// This many of the next writes fail.
    failing: u64,
}

impl Platter {
    pub fn tag(&self, sector: u64) -> u64 {
        let newest = self.unflushed.iter().rev().find(|(of, _)| *of == sector);
        newest.map(|(_, tag)| tag).or(self.durable.get(&sector)).copied().unwrap_or(INITIAL)
    }
}

/// The backing device: whole sectors with tags. Writes to it must be whole.
#[derive(Debug)]
pub struct Origin {
    limits: DiskLimits,
    platter: Mutex<Platter>,
}

impl Origin {
    pub fn new(platter: Platter) -> Origin {
        let limits = DiskLimits {
            name: "origin".into(),
            size_bytes: BACKING_BYTES,
            block_bytes: 512,
            atomic_bytes: 512,
            has_discard: true,
            topology: Topology::default(),
            identity: "origin".into(),
            kernel_name: "origin".into(),
        };
        Origin { limits, platter: Mutex::new(platter) }
    }

    /// The number of writes and flushes.
    pub fn works(&self) -> u64 {
        let platter = self.platter.lock().unwrap();
        platter.writes + platter.flushes
    }

    /// A copy of its content.
    pub fn platter(&self) -> Platter {
        self.platter.lock().unwrap().clone()
    }

    /// The next `count` writes fail.
    pub fn fail(&self, count: u64) {
        self.platter.lock().unwrap().failing = count;
    }

    fn carry_out(&self, io: &mut DiskIo) -> Result<(), Status> {
        let mut platter = self.platter.lock().unwrap();
        if io.op == Op::Write && platter.failing > 0 {
            platter.failing -= 1;
            platter.writes += 1;
            return Err(Status::Io);
        }
        let (sector, count) = (io.offset / SECTOR, io.len / SECTOR);
        match io.op {
            Op::Read => {
                for nth in 0..count {
                    let tag = platter.tag(sector + nth);
                    let into = &mut io.buffer.as_mut_slice()[nth as usize * PIECE..][..PIECE];
                    into.copy_from_slice(&content(sector + nth, 1, tag));
                }
            }
            Op::Write => {
                let tags = tags_of(sector, io.buffer.as_slice());
                platter.unflushed.extend((sector..).zip(tags));
                platter.writes += 1;
            }
            Op::Flush => {
                let unflushed = std::mem::take(&mut platter.unflushed);
                platter.durable.extend(unflushed);
                platter.flushes += 1;
            }
            Op::Discard | Op::WriteZeroes => {
                platter.unflushed.extend((sector..sector + count).map(|sector| (sector, 0)));
                platter.writes += 1;
            }
        }
        Ok(())
    }

    /// The content after a power cut: each sector has any of its contents since the last flush.
    pub fn cut(&self, prng: &mut Prng) -> Platter {
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
        let result = self.carry_out(&mut io);
        others_may_go_on();
        ring.finish(io, result);
    }
}

/// Real time stands still, so that no timeout can hide a lost wake-up.
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

/// The background's thread.
pub struct Background {
    thread: JoinHandle<()>,
    is_over: Arc<AtomicBool>,
    device: Arc<Device>,
}

impl Background {
    /// Starts the background.
    pub fn start(device: &Arc<Device>, clock: impl Clock + 'static) -> Background {
        let device = device.clone();
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
        Background { thread, is_over, device }
    }

    /// Ends the background.
    pub fn stop(self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.device.events().work();
        self.thread.join().unwrap();
    }
}

/// Requests of a client.
#[derive(Clone, Copy, Debug)]
pub enum Ask {
    Read(u64, u64),
    Write(u64, u64, bool),
    Flush,
}

/// Reads and writes of one thread, which all go into the history.
pub struct Client {
    local: Local,
    history: Arc<History>,
    /// Memory like a virtual machine's. If possible, every second read is copied into it, and every
    /// second write is copied from it. Every second one of those reads uses a call for the copy.
    memory: ClientMemory,
    file: OwnedFd,
    requests: u64,
}

impl Client {
    pub fn new(device: &Arc<Device>, history: Arc<History>) -> Client {
        let file = memfd_create("client", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, CLIENT_BYTES).unwrap();
        let memory = ClientMemory::map(&file, 0, CLIENT_BYTES).unwrap();
        let local = Local::without_kernel(device).unwrap();
        Client { local, history, memory, file, requests: 0 }
    }

    /// The client also does the background's work.
    pub fn with_background(self, clock: impl Clock + 'static) -> Client {
        Client { local: self.local.with_background(clock), ..self }
    }

    pub fn write(&mut self, sector: u64, count: u64, fua: bool) {
        let tag = self.history.new_tag();
        let bytes = content(sector, count, tag);
        let actions = self.history.writes(sector, count, tag, fua);
        if !self.is_copied(&bytes, sector * SECTOR, fua) {
            self.local.write_at(&bytes, sector * SECTOR, fua).unwrap();
        }
        self.history.wrote(actions);
    }

    /// Whether a write was done without a bio.
    fn is_copied(&mut self, bytes: &[u8], at: u64, fua: bool) -> bool {
        self.requests += 1;
        if !self.requests.is_multiple_of(2) || bytes.len() as u64 > CLIENT_BYTES {
            return false;
        }
        self.memory.store(0, bytes);
        let (from, port) = (self.memory.source(0, bytes.len()), self.local.port_id());
        self.local.device().write_from(at, from, fua, port)
    }

    /// At most once per sector, because zeroes do not have tags.
    pub fn discard(&mut self, sector: u64, count: u64) {
        let actions = self.history.writes(sector, count, ZERO, false);
        self.local.discard(sector * SECTOR, count * SECTOR).unwrap();
        self.history.wrote(actions);
    }

    /// Like [`Client::discard`], but the zeroes may be made durable.
    pub fn zero(&mut self, sector: u64, count: u64, fua: bool) {
        let actions = self.history.writes(sector, count, ZERO, fua);
        self.local.write_zeroes(sector * SECTOR, count * SECTOR, fua).unwrap();
        self.history.wrote(actions);
    }

    pub fn read(&mut self, sector: u64, count: u64) -> Result<Vec<u64>, Status> {
        let mut bytes = vec![0; (count * SECTOR) as usize];
        let start = self.history.now();
        let (at, len, port) = (sector * SECTOR, bytes.len(), self.local.port_id());
        self.requests += 1;
        let into = (self.requests.is_multiple_of(2) && len as u64 <= CLIENT_BYTES).then(|| {
            match self.requests.is_multiple_of(4) {
                true => CopyTarget::from(FilePart::new(&self.file, 0, len)),
                false => CopyTarget::from(self.memory.shared(0, len)),
            }
        });
        match into {
            Some(into) if self.local.device().read_into(at, into, port) => {
                self.memory.load(0, &mut bytes);
            }
            _ => self.local.read_at(&mut bytes, at)?,
        }
        let tags = tags_of(sector, &bytes);
        self.history.found(sector, &tags, start);
        Ok(tags)
    }

    pub fn flush(&mut self) {
        let start = self.history.now();
        self.local.flush().unwrap();
        self.history.flushed(start);
    }

    /// Notes what was signalled so far. A new caller tries a request that waits once more before it
    /// sleeps, which may hide a lost wake-up.
    pub fn catch_up(&mut self) {
        self.local.turn();
    }

    /// Several requests in flight together. None may fail.
    pub fn several(&mut self, asks: &[Ask]) {
        let mut begun = Vec::new();
        for (token, ask) in (0..).zip(asks) {
            let (bio, actions) = match *ask {
                Ask::Read(sector, count) => {
                    let buffer = Buffer::zeroed((count * SECTOR) as usize);
                    (Bio::read(sector * SECTOR, buffer, token), (0, 0))
                }
                Ask::Write(sector, count, fua) => {
                    let tag = self.history.new_tag();
                    let buffer = Buffer::from_bytes(&content(sector, count, tag));
                    let actions = self.history.writes(sector, count, tag, fua);
                    (Bio::write(sector * SECTOR, buffer, fua, token), actions)
                }
                Ask::Flush => (Bio::flush(token), (0, 0)),
            };
            begun.push((self.history.now(), actions));
            self.local.submit(bio);
        }
        while let Some(bio) = self.local.wait() {
            bio.status.unwrap();
            let (start, actions) = begun[bio.token as usize];
            match asks[bio.token as usize] {
                Ask::Read(sector, _) => {
                    self.history.found(sector, &tags_of(sector, bio.buffer.as_slice()), start);
                }
                Ask::Write(..) => self.history.wrote(actions),
                Ask::Flush => self.history.flushed(start),
            }
        }
    }
}

/// The work of one thread of a test case.
pub type Part = Box<dyn FnOnce() + Send>;

/// Runs each part on a thread of its own, to its end.
pub fn together(parts: Vec<Part>) {
    let threads: Vec<_> = parts.into_iter().map(thread::spawn).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
