//! A pcache over simulated devices.

use std::sync::Arc;

use udm::disk::RamDisk;
use udm::error::Result;
use udm::pcache::layout::{Geometry, SEGMENTS_AT};
use udm::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use udm::pmem::sim::SimPmem;
use udm::pmem::{Persistence, Pmem};
use udm::shm::SharedWords;
use udm::table::Word;
use udm::target::FactValue;
use udm::units::{KIB, MIB};

use crate::client::Client;
use crate::input::Input;

/// Two regions, the second one short.
pub const BACKING_BYTES: u64 = 5 * MIB;
pub const OPERATIONS_MAX: u8 = 48;
pub const DAMAGE_MAX: u8 = 16;

/// The optional words of the table; odd ones have checksums of data.
const TABLES: [&str; 6] = [
    "",
    "2 data_crc true",
    "0 writeback_order fast",
    "2 data_crc true read_fill never",
    "0 read_fill never log_damage truncate",
    "2 data_crc true log_damage truncate",
];

pub struct Fixture {
    pub geometry: Geometry,
    pub pmem: Arc<SimPmem>,
    pub shared: SharedWords,
    pub client: Client,
    /// Some memory cannot be read.
    pub is_poisoned: bool,
    /// Some of it holds records with two slots: a record stored there may be lost.
    pub has_poisoned_records: bool,
    pub is_formatting: bool,
    table: usize,
    rebinds: bool,
    stripes: usize,
    disk: Arc<RamDisk>,
    attaches: u64,
}

impl Fixture {
    /// A medium of zeroes whose shape the input chooses.
    pub fn from_input(input: &mut Input<'_>) -> Fixture {
        let shape = input.u8();
        let segment_bytes = if shape & 1 == 0 { 32 * KIB } else { 64 * KIB };
        let segments = 4 + u64::from(shape >> 1 & 0xF);
        let persistence = if shape & 0x20 == 0 { Persistence::Cpu } else { Persistence::Msync };
        let mut len = SEGMENTS_AT + segments * segment_bytes;
        if shape & 0xC0 == 0xC0 {
            len = input.near(len).min(len + segment_bytes);
        }
        let stripes = 1 + usize::from(input.u8() % 4);
        Fixture {
            geometry: Geometry { segment_bytes, device_bytes_min: 0 },
            pmem: Arc::new(SimPmem::new(len, persistence)),
            shared: SharedWords::private(shared_words(stripes)),
            client: Client::new(),
            is_poisoned: false,
            has_poisoned_records: false,
            is_formatting: false,
            table: usize::from(input.u8()) % TABLES.len(),
            rebinds: false,
            stripes,
            disk: Arc::new(RamDisk::new(BACKING_BYTES, 512)),
            attaches: 0,
        }
    }

    /// The user opens it again with other options.
    pub fn change_table(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        if choice & 3 == 3 {
            self.table = usize::from(choice >> 2) % TABLES.len();
        }
        self.rebinds = choice & 0x40 != 0;
        self.is_formatting = choice & 0x84 == 0x84;
    }

    pub fn has_data_crc(&self) -> bool {
        self.table % 2 == 1
    }

    pub fn len_bytes(&self) -> u64 {
        self.pmem.len_bytes()
    }

    pub fn open(&mut self) -> Result<()> {
        self.attaches += 1;
        let options = OpenOptions {
            force_format: self.is_formatting,
            geometry: self.geometry,
            stripes: self.stripes,
            flat_from: 3 * self.stripes,
            ..OpenOptions::new(self.attaches)
        };
        let rebind = if self.rebinds { " rebind true" } else { "" };
        let line = match TABLES[self.table] {
            "" if self.rebinds => format!("C B 0{rebind}"),
            words => format!("C B {words}{rebind}"),
        };
        let args = TableArgs::parse(&Word::list(&line)).unwrap();
        let (pmem, disk) = (self.pmem.clone(), self.disk.clone());
        let shared = self.shared.clone();
        let pcache = Pcache::open(args, BACKING_BYTES, pmem, disk, shared, &options)?;
        self.client.open(pcache);
        Ok(())
    }

    /// No damage that the attach should have found stops the background.
    pub fn check_background(&self) {
        let stuck =
            self.client.target().facts().into_iter().find(|fact| {
                fact.name.ends_with("_is_stuck") && fact.value == FactValue::Flag(true)
            });
        assert!(stuck.is_none() || self.is_poisoned || self.is_worn(), "{stuck:?}");
    }

    /// Whether the generation of a segment is above its maximum.
    fn is_worn(&self) -> bool {
        let segments = self.geometry.segments_on(self.len_bytes()) as u32;
        (0..segments).any(|segment| {
            let bytes = self.pmem.peek(self.geometry.generation_at(segment), 32);
            [bytes[15], bytes[31]].iter().any(|byte| byte & 0x70 != 0)
        })
    }

    pub fn message(&mut self, percent: u8) {
        let words = ["gc_percent".to_string(), percent.to_string()];
        let answer = self.client.target().message(&words);
        assert!(answer.is_ok() == (percent <= 90) || self.is_poisoned);
    }
    /// Writes everything back, if memory can be read.
    pub fn drain(&mut self) {
        self.client.drain(self.is_poisoned);
        self.check_background();
    }
}
