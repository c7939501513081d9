//! A writecache over simulated devices, driven from one thread, with a model of what was written.

use std::collections::HashMap;
use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{RamDisk, Ring};
use udm::error::{Result, Status};
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::shm::SharedWords;
use udm::target::{Port, Target};
use udm::units::{MIB, Nanos, SECOND, SECTOR};
use udm::writecache::media::Medium;
use udm::writecache::{OpenOptions, TableArgs, Writecache, shared_words};

use crate::input::Input;

/// Some regions, the last one short.
pub const ORIGIN_BYTES: u64 = 2 * MIB + MIB / 2;
/// In so many ticks of a second each request must be answered, and each drain done.
const PATIENCE: usize = 400;

/// The options of the table.
const OPTIONS: [&str; 6] = [
    "0",
    "2 start_sector 8",
    "2 autocommit_blocks 2",
    "2 max_age 1000",
    "4 high_watermark 10 low_watermark 10",
    "1 cleaner",
];

/// What the cache stands on.
enum Ground {
    Pmem(Arc<SimPmem>),
    Disk(Arc<RamDisk>),
}

pub struct World {
    pub medium: Medium,
    pub block_bytes: u64,
    pub shared: SharedWords,
    /// What each sector must hold: all its bytes are the same.
    pub model: HashMap<u64, u8>,
    /// Some memory cannot be read.
    pub is_poisoned: bool,
    pub is_formatting: bool,
    ground: Ground,
    options: usize,
    rebinds: bool,
    stripes: usize,
    disk: Arc<RamDisk>,
    target: Option<Writecache>,
    port: Port,
    ring: Ring,
    now: Nanos,
    attaches: u64,
    writes: u8,
}

impl World {
    /// A medium of zeroes whose shape the input chooses.
    pub fn from_input(input: &mut Input<'_>) -> World {
        let shape = input.u8();
        let block_bytes = 512 << (shape >> 1 & 3);
        let blocks = 4 + input.below(120);
        let len = (4096 + 16 * blocks).next_multiple_of(block_bytes) + blocks * block_bytes;
        let len = if shape & 0xC0 == 0xC0 { input.near(len).min(2 * len) } else { len };
        let persistence = if shape & 0x20 == 0 { Persistence::Cpu } else { Persistence::Msync };
        let ground = match shape & 1 {
            0 => Ground::Pmem(Arc::new(SimPmem::new(len.max(64) / 8 * 8, persistence))),
            _ => Ground::Disk(Arc::new(RamDisk::new(len.max(512), 512).named("cache"))),
        };
        let stripes = 1 + usize::from(input.u8() % 4);
        World {
            medium: match &ground {
                Ground::Pmem(pmem) => Medium::Pmem(pmem.clone()),
                Ground::Disk(disk) => Medium::Disk(disk.clone()),
            },
            block_bytes,
            shared: SharedWords::private(shared_words(stripes)),
            model: HashMap::new(),
            is_poisoned: false,
            is_formatting: false,
            ground,
            options: usize::from(input.u8()) % OPTIONS.len(),
            rebinds: false,
            stripes,
            disk: Arc::new(RamDisk::new(ORIGIN_BYTES, 512)),
            target: None,
            port: Port::new(0),
            ring: Ring::without_kernel(),
            now: 0,
            attaches: 0,
            writes: 0,
        }
    }

    /// The user comes back with other wishes.
    pub fn change_table(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        if choice & 3 == 3 {
            self.options = usize::from(choice >> 2) % OPTIONS.len();
        }
        self.rebinds = choice & 0x40 != 0;
        self.is_formatting = choice & 0x84 == 0x84;
    }

    /// First byte of the cache.
    pub fn start(&self) -> u64 {
        if self.options == 1 { 8 * SECTOR } else { 0 }
    }

    pub fn is_open(&self) -> bool {
        self.target.is_some()
    }

    pub fn len_bytes(&self) -> u64 {
        self.medium.size_bytes()
    }

    pub fn peek(&self, at: u64, len: usize) -> Vec<u8> {
        match &self.ground {
            Ground::Pmem(pmem) => pmem.peek(at, len),
            Ground::Disk(disk) => {
                let mut bytes = vec![0; len];
                disk.peek(at, &mut bytes);
                bytes
            }
        }
    }

    pub fn poke(&self, at: u64, bytes: &[u8]) {
        if at + bytes.len() as u64 > self.len_bytes() {
            return;
        }
        match &self.ground {
            Ground::Pmem(pmem) => pmem.poke(at, bytes),
            Ground::Disk(disk) => disk.poke(at, bytes),
        }
    }

    /// A place that cannot be read, where there is memory.
    pub fn poison(&mut self, input: &mut Input<'_>) {
        let at = input.below(self.len_bytes() / 64) * 64;
        if let Ground::Pmem(pmem) = &self.ground {
            pmem.poison(at, 64);
            self.is_poisoned = true;
        }
    }

    pub fn writes_to_cache(&self) -> u64 {
        match &self.ground {
            Ground::Pmem(pmem) => pmem.counts().stores,
            Ground::Disk(disk) => disk.counts().writes,
        }
    }

    fn field(&self, at: u64) -> u64 {
        if self.start() + at + 8 > self.len_bytes() {
            return 0;
        }
        let bytes = self.peek(self.start() + at, 8);
        u64::from_le_bytes(bytes.try_into().unwrap())
    }

    /// Blocks, as the superblock has them; no more than there can be.
    pub fn blocks(&self) -> u64 {
        self.field(16).min(self.len_bytes() / self.block_bytes)
    }

    pub fn seq_count(&self) -> u64 {
        self.field(24)
    }

    fn target(&self) -> &Writecache {
        self.target.as_ref().unwrap()
    }

    pub fn open(&mut self) -> Result<()> {
        self.attaches += 1;
        let options = OpenOptions {
            force_format: self.is_formatting,
            stripes: self.stripes,
            attach_id: self.attaches,
        };
        let mode = if matches!(self.ground, Ground::Pmem(_)) { 'p' } else { 's' };
        let rebind = if self.rebinds { " rebind true" } else { "" };
        let line = format!("{mode} O C {} {}{rebind}", self.block_bytes, OPTIONS[self.options]);
        let words: Vec<&str> = line.split_whitespace().collect();
        let args = TableArgs::parse(&words).unwrap();
        let (disk, shared) = (self.disk.clone(), self.shared.clone());
        let target = match &self.ground {
            Ground::Pmem(pmem) => {
                Writecache::open_pmem(args, ORIGIN_BYTES, disk, pmem.clone(), shared, &options)
            }
            Ground::Disk(cache) => {
                Writecache::open_disk(args, ORIGIN_BYTES, disk, cache.clone(), shared, &options)
            }
        };
        self.target = Some(target?);
        Ok(())
    }

    /// The end of the process: devices and shared memory stay.
    pub fn kill(&mut self) {
        self.target = None;
        self.port = Port::new(0);
        self.ring = Ring::without_kernel();
    }

    /// An orderly end.
    pub fn remove(&mut self) {
        let _ = self.target().suspend();
        for _ in 0..PATIENCE {
            self.settle();
            if self.target().is_idle() {
                return self.kill();
            }
            self.tick(SECOND);
        }
        panic!("no rest after a suspend: {}", self.target().status());
    }

    /// Carries out what the target wants until nothing is left to do now.
    fn settle(&mut self) {
        let target = self.target.as_ref().unwrap();
        loop {
            while let Some(io) = self.port.ios.pop_front() {
                io.disk.clone().start(io, &mut self.ring);
            }
            let Some(io) = self.ring.pop_completed() else { return };
            let range = (io.op, io.offset, io.len);
            assert_ne!(io.result, Err(Status::Invalid), "I/O outside the device: {range:?}");
            target.complete(io, &mut self.port);
        }
    }

    pub fn tick(&mut self, nanos: Nanos) {
        self.now += nanos;
        self.target.as_ref().unwrap().tick(self.now, &mut self.port);
        self.settle();
        assert!(!self.target().status().is_empty() && !self.target().facts().is_empty());
    }

    fn run(&mut self, bio: Bio) -> Bio {
        self.target.as_ref().unwrap().submit(bio, &mut self.port);
        for _ in 0..PATIENCE {
            self.settle();
            if let Some(done) = self.port.done.pop_front() {
                assert!(self.port.parked.is_empty());
                assert_ne!(done.status, Err(Status::Invalid));
                return done;
            }
            self.tick(SECOND);
            if let Some(parked) = self.port.parked.pop_front() {
                self.target.as_ref().unwrap().submit(parked, &mut self.port);
            }
        }
        panic!("a request waits for ever: {}", self.target().status());
    }

    /// Writes a byte that no earlier write used, as far as there are so many.
    pub fn write(&mut self, offset: u64, len: u64, fua: bool) {
        self.writes = self.writes.wrapping_add(1);
        let mut buffer = Buffer::zeroed(len as usize);
        buffer.as_mut_slice().fill(self.writes);
        let done = self.run(Bio::write(offset, buffer, fua, 0));
        self.note(&done, self.writes);
    }

    pub fn zero(&mut self, offset: u64, len: u64, fua: bool) {
        let done = self.run(Bio::bare(Op::WriteZeroes, offset, len, fua, 0));
        self.note(&done, 0);
    }

    /// A failed write may have stored any part.
    fn note(&mut self, done: &Bio, byte: u8) {
        for sector in done.offset / SECTOR..done.end() / SECTOR {
            match done.status {
                Ok(()) => self.model.insert(sector, byte),
                Err(_) => self.model.remove(&sector),
            };
        }
    }

    pub fn read(&mut self, offset: u64, len: u64) -> std::result::Result<Vec<u8>, Status> {
        let done = self.run(Bio::read(offset, Buffer::zeroed(len as usize), 0));
        done.status.map(|()| done.buffer.as_slice().to_vec())
    }

    pub fn flush(&mut self) {
        self.run(Bio::flush(0));
    }

    pub fn message(&mut self, choice: u8) {
        let words = ["flush", "flush_on_suspend", "cleaner", "clear_stats", "nonsense"];
        let word = words[usize::from(choice) % words.len()];
        let answer = self.target().message(&[word.to_string()]);
        assert!(answer.is_ok() == (word != "nonsense") || self.is_poisoned, "{word}: {answer:?}");
        self.settle();
    }

    pub fn set_draining(&self, is_draining: bool) {
        self.target().set_draining(is_draining);
    }

    /// Every sector written since the damage is as it was written.
    pub fn check_model(&mut self) {
        let mut sectors: Vec<(u64, u8)> =
            self.model.iter().map(|(sector, byte)| (*sector, *byte)).collect();
        sectors.sort_unstable();
        for run in sectors.chunk_by(|(a, _), (b, _)| a + 1 == *b) {
            let offset = run[0].0 * SECTOR;
            let found = match self.read(offset, run.len() as u64 * SECTOR) {
                Ok(found) => found,
                Err(status) => {
                    assert!(self.is_poisoned, "{offset}: new data reads as {status:?}");
                    continue;
                }
            };
            for ((sector, byte), found) in run.iter().zip(found.chunks(SECTOR as usize)) {
                let is_right = found.iter().all(|found| found == byte);
                assert!(is_right || self.is_poisoned, "sector {sector}: {byte}");
            }
        }
    }

    /// Writes everything back, or fails to for a reason.
    pub fn drain(&mut self) {
        self.target().set_draining(true);
        for _ in 0..PATIENCE {
            let dirty = self.target().dirty();
            if dirty.bytes == 0 || dirty.is_failing {
                break;
            }
            self.tick(SECOND);
        }
        let dirty = self.target().dirty();
        let is_done = dirty.bytes == 0 || dirty.is_failing || self.is_poisoned;
        assert!(is_done, "{dirty:?} after a drain: {}", self.target().status());
        self.target().set_draining(false);
    }
}
