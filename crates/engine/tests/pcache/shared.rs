//! Reads into memory that others use too: what takes no more than a copy, and nothing else.

use std::fmt;
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::bio::Op;
use udm::device::{Device, LoadedTable};
use udm::disk::RamDisk;
use udm::error::Status;
use udm::foreign::Foreign;
use udm::local::{Local, ManualClock};
use udm::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use udm::pmem::sim::SimPmem;
use udm::pmem::{Medium, Pmem};
use udm::shm::SharedWords;
use udm::table::Word;
use udm::target::Target;

use crate::world::{Setup, World};

const BYTES: u64 = 64 << 10;

fn memory() -> Foreign {
    let file = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES).unwrap();
    Foreign::map(&file, 0, BYTES).unwrap()
}

/// What is read in place; nothing if it takes a bio.
fn read(world: &World, memory: &Foreign, offset: u64, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    let is_read = world.target().read_into(offset, memory.shared(512, len), 0);
    memory.load(512, &mut bytes);
    is_read.then_some(bytes)
}

#[test]
fn hits_are_read_in_place_and_everything_else_takes_a_bio() {
    let memory = memory();
    let mut world = World::new(Setup::small());
    world.open();
    world.write(8192, &[7; 8192], false);
    world.write(8192 + 512, &[9; 512], false);
    let hits = world.fact("read_hits_total");
    let expected = [vec![7; 512], vec![9; 512], vec![7; 7168]].concat();
    assert_eq!(read(&world, &memory, 8192, 8192), Some(expected));
    assert_eq!(read(&world, &memory, 8704, 512), Some(vec![9; 512]));
    assert_eq!(world.fact("read_hits_total"), hits + 2, "each is counted once");
    // A part of it, or all of it, is on the backing device alone.
    for (offset, len) in [(4096, 8192), (12288, 8192), (32768, 512)] {
        assert_eq!(read(&world, &memory, offset, len), None);
    }
    assert_eq!(world.fact("read_hits_total"), hits + 2);
    world.zero(Op::WriteZeroes, 8192, 512, false);
    let bytes = read(&world, &memory, 8704, 512);
    assert_eq!(bytes, Some(vec![9; 512]), "what is next to zeroes is still there");
    assert_eq!(world.read(8192, 1024), [[0; 512], [9; 512]].concat());
}

#[test]
fn data_with_checksums_is_checked_where_nobody_else_stores() {
    let memory = memory();
    let mut world = World::new(Setup::small().table("C B 2 data_crc true"));
    world.open();
    world.write(8192, &[7; 4096], false);
    assert_eq!(read(&world, &memory, 8192, 4096), None);
    assert_eq!(world.read(8192, 4096), [7; 4096]);
}

/// What others do before the next load of the medium goes on.
type Meddle = Box<dyn FnOnce() + Send>;

/// A medium of which a reader may be held up just before it copies.
struct Slow {
    pmem: SimPmem,
    meddle: Mutex<Option<Meddle>>,
}

impl fmt::Debug for Slow {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pmem.fmt(formatter)
    }
}

impl Pmem for Slow {
    fn len_bytes(&self) -> u64 {
        self.pmem.len_bytes()
    }

    fn medium(&self) -> &Medium {
        self.pmem.medium()
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        self.pmem.store(at, bytes);
    }

    fn zero(&self, at: u64, len: u64) {
        self.pmem.zero(at, len);
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), Status> {
        let meddle = self.meddle.lock().unwrap().take();
        if let Some(meddle) = meddle {
            meddle();
        }
        self.pmem.load(at, into)
    }

    fn drain(&self) -> Result<(), Status> {
        self.pmem.drain()
    }

    fn sync(&self) -> Result<(), Status> {
        self.pmem.sync()
    }
}

/// A device over a slow medium.
fn slow_device() -> (Arc<Slow>, Arc<Device>) {
    let setup = Setup::small();
    let pmem = SimPmem::new(setup.cache_bytes, setup.persistence);
    let pmem = Arc::new(Slow { pmem, meddle: Mutex::default() });
    let backing = Arc::new(RamDisk::new(setup.backing_bytes, 512));
    let words = SharedWords::private(shared_words(setup.stripes));
    let options = OpenOptions {
        geometry: setup.geometry,
        stripes: setup.stripes,
        ..OpenOptions::new(0x1_0001)
    };
    let args = TableArgs::parse(&Word::list(setup.table)).unwrap();
    let len = setup.backing_bytes;
    let pcache = Pcache::open(args, len, pmem.clone(), backing, words, &options).unwrap();
    let table = LoadedTable::single(Arc::new(pcache), len);
    (pmem, Device::with_table("slow", table).unwrap())
}

/// A hit was found, and before its copy others wrote until its place held something else.
#[test]
fn a_hit_whose_place_is_reused_meanwhile_is_not_shown() {
    for is_in_place in [true, false] {
        let (pmem, device) = slow_device();
        let mut writer =
            Local::without_kernel(&device).unwrap().with_background(ManualClock::default());
        let mut reader = Local::without_kernel(&device).unwrap();
        writer.write_at(&[7; 4096], 8192, false).unwrap();
        *pmem.meddle.lock().unwrap() = Some(Box::new(move || {
            writer.write_at(&[8; 4096], 8192, false).unwrap();
            for nth in 0..64 {
                writer.write_at(&[9; 64 << 10], (1 << 20) + nth * (64 << 10), false).unwrap();
            }
        }));
        if is_in_place {
            let memory = memory();
            let into = memory.shared(0, 4096);
            assert!(!device.read_into(8192, into, reader.port_id()), "its place was reused");
        }
        let mut bytes = [0; 4096];
        reader.read_at(&mut bytes, 8192).unwrap();
        assert_eq!(bytes, [8; 4096]);
        assert!(pmem.meddle.lock().unwrap().is_none(), "the reader was held up");
    }
}
