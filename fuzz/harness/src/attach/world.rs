//! A cache over simulated devices, driven from one thread, with a model of what was written.

use std::collections::HashMap;
use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{RamDisk, Ring};
use udm::error::{Result, Status};
use udm::pcache::layout::{Geometry, SEGMENTS_AT};
use udm::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use udm::pmem::sim::SimPmem;
use udm::pmem::{Persistence, Pmem};
use udm::shm::SharedWords;
use udm::target::{FactValue, Port, Target};
use udm::units::{KIB, MIB, Nanos, SECOND, SECTOR};

use crate::input::Input;

/// Two regions, the second one short.
pub const BACKING_BYTES: u64 = 5 * MIB;
pub const OPERATIONS_MAX: u8 = 48;
pub const DAMAGE_MAX: u8 = 16;
/// In so many ticks of a second each request must be answered, and each drain done.
const PATIENCE: usize = 400;

/// The optional words of the table; odd ones have checksums of data.
const TABLES: [&str; 6] = [
    "",
    "2 data_crc true",
    "0 writeback_order fast",
    "2 data_crc true read_fill never",
    "0 read_fill never log_damage truncate",
    "2 data_crc true log_damage truncate",
];

pub struct World {
    pub geometry: Geometry,
    pub pmem: Arc<SimPmem>,
    pub shared: SharedWords,
    /// What each sector must hold: all its bytes are the same.
    pub model: HashMap<u64, u8>,
    /// Some memory cannot be read.
    pub is_poisoned: bool,
    /// Some of it holds records with two slots: what is stored to one of them may be lost.
    pub has_poisoned_records: bool,
    pub is_formatting: bool,
    table: usize,
    rebinds: bool,
    stripes: usize,
    disk: Arc<RamDisk>,
    pcache: Option<Pcache>,
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
        let segment_bytes = if shape & 1 == 0 { 32 * KIB } else { 64 * KIB };
        let segments = 4 + u64::from(shape >> 1 & 0xF);
        let persistence = if shape & 0x20 == 0 { Persistence::Cpu } else { Persistence::Msync };
        let mut len = SEGMENTS_AT + segments * segment_bytes;
        if shape & 0xC0 == 0xC0 {
            len = input.near(len).min(len + segment_bytes);
        }
        let stripes = 1 + usize::from(input.u8() % 4);
        World {
            geometry: Geometry { segment_bytes, device_bytes_min: 0 },
            pmem: Arc::new(SimPmem::new(len, persistence)),
            shared: SharedWords::private(shared_words(stripes)),
            model: HashMap::new(),
            is_poisoned: false,
            has_poisoned_records: false,
            is_formatting: false,
            table: usize::from(input.u8()) % TABLES.len(),
            rebinds: false,
            stripes,
            disk: Arc::new(RamDisk::new(BACKING_BYTES, 512)),
            pcache: None,
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
            self.table = usize::from(choice >> 2) % TABLES.len();
        }
        self.rebinds = choice & 0x40 != 0;
        self.is_formatting = choice & 0x84 == 0x84;
    }

    pub fn has_data_crc(&self) -> bool {
        self.table % 2 == 1
    }

    pub fn is_open(&self) -> bool {
        self.pcache.is_some()
    }

    pub fn len_bytes(&self) -> u64 {
        self.pmem.len_bytes()
    }

    fn target(&self) -> &Pcache {
        self.pcache.as_ref().unwrap()
    }

    pub fn open(&mut self) -> Result<()> {
        self.attaches += 1;
        let options = OpenOptions {
            force_format: self.is_formatting,
            geometry: self.geometry,
            stripes: self.stripes,
            attach_id: self.attaches,
        };
        let rebind = if self.rebinds { " rebind true" } else { "" };
        let line = match TABLES[self.table] {
            "" if self.rebinds => format!("C B 0{rebind}"),
            words => format!("C B {words}{rebind}"),
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        let args = TableArgs::parse(&words).unwrap();
        let (pmem, disk) = (self.pmem.clone(), self.disk.clone());
        let shared = self.shared.clone();
        let pcache = Pcache::open(args, BACKING_BYTES, pmem, disk, shared, &options)?;
        self.pcache = Some(pcache);
        Ok(())
    }

    /// The end of the process: devices and shared memory stay.
    pub fn kill(&mut self) {
        self.pcache = None;
        self.port = Port::new(0);
        self.ring = Ring::without_kernel();
    }

    /// An orderly end, unless there is no room for the open keys; they are in shared memory.
    pub fn remove(&mut self) {
        let _ = self.target().suspend();
        self.settle();
        assert!(self.target().is_idle());
        self.kill();
    }

    /// Carries out what the target wants until nothing is left to do now.
    fn settle(&mut self) {
        let pcache = self.pcache.as_ref().unwrap();
        loop {
            while let Some(io) = self.port.ios.pop_front() {
                io.disk.clone().start(io, &mut self.ring);
            }
            let Some(io) = self.ring.pop_completed() else { return };
            let range = (io.op, io.offset, io.len);
            assert_ne!(io.result, Err(Status::Invalid), "I/O outside the device: {range:?}");
            pcache.complete(io, &mut self.port);
        }
    }

    pub fn tick(&mut self, nanos: Nanos) {
        self.now += nanos;
        self.pcache.as_ref().unwrap().tick(self.now, &mut self.port);
        self.settle();
        self.check_facts();
    }

    /// What the target says of itself can be printed, and no damage stops its background that
    /// the attach should have seen.
    fn check_facts(&self) {
        assert!(!self.target().status().is_empty());
        let stuck =
            self.target().facts().into_iter().find(|fact| {
                fact.name.ends_with("_is_stuck") && fact.value == FactValue::Flag(true)
            });
        assert!(stuck.is_none() || self.is_poisoned || self.is_worn(), "{stuck:?}");
    }

    /// Whether a segment claims to have been reused more often than can be counted.
    fn is_worn(&self) -> bool {
        let segments = self.geometry.segments_on(self.len_bytes()) as u32;
        (0..segments).any(|segment| {
            let bytes = self.pmem.peek(self.geometry.generation_at(segment), 32);
            [bytes[15], bytes[31]].iter().any(|byte| byte & 0x70 != 0)
        })
    }

    fn run(&mut self, bio: Bio) -> Bio {
        self.pcache.as_ref().unwrap().submit(bio, &mut self.port);
        for _ in 0..PATIENCE {
            self.settle();
            if let Some(done) = self.port.done.pop_front() {
                assert!(self.port.parked.is_empty());
                assert_ne!(done.status, Err(Status::Invalid));
                return done;
            }
            self.tick(SECOND);
            if let Some(parked) = self.port.parked.pop_front() {
                self.pcache.as_ref().unwrap().submit(parked, &mut self.port);
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

    pub fn message(&mut self, percent: u8) {
        let words = ["gc_percent".to_string(), percent.to_string()];
        let answer = self.target().message(&words);
        assert!(answer.is_ok() == (percent <= 90) || self.is_poisoned);
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
                assert!(is_right || self.has_poisoned_records, "sector {sector}: {byte}");
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
