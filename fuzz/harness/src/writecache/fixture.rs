//! A writecache over simulated devices.

use std::sync::Arc;

use udm::disk::RamDisk;
use udm::error::Result;
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::shm::SharedWords;
use udm::table::Word;
use udm::units::{MIB, SECTOR};
use udm::writecache::media::Medium;
use udm::writecache::{OpenOptions, TableArgs, Writecache, shared_words};

use crate::client::Client;
use crate::input::Input;

/// Some regions, the last one short.
pub const ORIGIN_BYTES: u64 = 2 * MIB + MIB / 2;

/// The options of the table.
const OPTIONS: [&str; 6] = [
    "0",
    "2 start_sector 8",
    "2 autocommit_blocks 2",
    "2 max_age 1000",
    "4 high_watermark 10 low_watermark 10",
    "1 cleaner",
];

/// The devices of the cache.
enum Ground {
    Pmem(Arc<SimPmem>),
    Disk(Arc<RamDisk>),
}

pub struct Fixture {
    pub medium: Medium,
    pub block_bytes: u64,
    pub shared: SharedWords,
    pub client: Client,
    /// Some memory cannot be read.
    pub is_poisoned: bool,
    pub is_formatting: bool,
    ground: Ground,
    options: usize,
    rebinds: bool,
    stripes: usize,
    disk: Arc<RamDisk>,
    attaches: u64,
}

impl Fixture {
    /// A medium of zeroes whose shape the input chooses.
    pub fn from_input(input: &mut Input<'_>) -> Fixture {
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
        Fixture {
            medium: match &ground {
                Ground::Pmem(pmem) => Medium::Pmem(pmem.clone()),
                Ground::Disk(disk) => Medium::Disk(disk.clone()),
            },
            block_bytes,
            shared: SharedWords::private(shared_words(stripes)),
            client: Client::new(),
            is_poisoned: false,
            is_formatting: false,
            ground,
            options: usize::from(input.u8()) % OPTIONS.len(),
            rebinds: false,
            stripes,
            disk: Arc::new(RamDisk::new(ORIGIN_BYTES, 512)),
            attaches: 0,
        }
    }

    /// The user opens it again with other options.
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

    /// A place in memory that cannot be read.
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

    /// The number of blocks in the superblock, at most as many as are possible.
    pub fn blocks(&self) -> u64 {
        self.field(16).min(self.len_bytes() / self.block_bytes)
    }

    pub fn seq_count(&self) -> u64 {
        self.field(24)
    }

    pub fn open(&mut self) -> Result<()> {
        self.attaches += 1;
        let options = OpenOptions {
            force_format: self.is_formatting,
            stripes: self.stripes,
            ..OpenOptions::new(self.attaches)
        };
        let mode = if matches!(self.ground, Ground::Pmem(_)) { 'p' } else { 's' };
        let rebind = if self.rebinds { " rebind true" } else { "" };
        let line = format!("{mode} O C {} {}{rebind}", self.block_bytes, OPTIONS[self.options]);
        let args = TableArgs::parse(&Word::list(&line)).unwrap();
        let (disk, shared) = (self.disk.clone(), self.shared.clone());
        let target = match &self.ground {
            Ground::Pmem(pmem) => {
                Writecache::open_pmem(args, ORIGIN_BYTES, disk, pmem.clone(), shared, &options)
            }
            Ground::Disk(cache) => {
                Writecache::open_disk(args, ORIGIN_BYTES, disk, cache.clone(), shared, &options)
            }
        };
        self.client.open(target?);
        Ok(())
    }

    pub fn message(&mut self, choice: u8) {
        let words = ["flush", "flush_on_suspend", "cleaner", "clear_stats", "nonsense"];
        let word = words[usize::from(choice) % words.len()];
        let answer = self.client.target().message(&[word.to_string()]);
        assert!(answer.is_ok() == (word != "nonsense") || self.is_poisoned, "{word}: {answer:?}");
        self.client.settle();
    }
}
