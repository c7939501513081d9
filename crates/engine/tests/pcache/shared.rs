//! Reads into memory that others use too, and writes from there: what takes no more than a copy,
//! and nothing else. Others may change that memory, or cut it short, while it is copied.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use udm::bio::Op;
use udm::device::{Device, LoadedTable};
use udm::disk::RamDisk;
use udm::error::Status;
use udm::foreign::Foreign;
use udm::local::{Local, ManualClock};
use udm::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use udm::pmem::sim::SimPmem;
use udm::pmem::sink::{FilePart, Sink};
use udm::pmem::{Medium, Pmem};
use udm::shm::SharedWords;
use udm::table::Word;
use udm::target::Target;
use udm::units::SECOND;

use crate::world::{Setup, World};

const BYTES: u64 = 64 << 10;

/// What is read in place, to memory or by a call; nothing if it takes a bio.
fn read(world: &World, offset: u64, len: usize, is_by_call: bool) -> Option<Vec<u8>> {
    let file = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES).unwrap();
    let memory = Foreign::map(&file, 0, BYTES).unwrap();
    let into = match is_by_call {
        true => FilePart::new(&file, 512, len).into(),
        false => memory.shared(512, len).into(),
    };
    let mut bytes = vec![0; len];
    let is_read = world.target().read_into(offset, into, 0);
    memory.load(512, &mut bytes);
    is_read.then_some(bytes)
}

#[test]
fn hits_are_read_in_place_and_everything_else_takes_a_bio() {
    let mut world = World::new(Setup::small());
    world.open();
    world.write(8192, &[7; 8192], false);
    world.write(8192 + 512, &[9; 512], false);
    let expected = [vec![7; 512], vec![9; 512], vec![7; 7168]].concat();
    let hits = world.fact("read_hits_total");
    assert_eq!(read(&world, 8192, 8192, false), Some(expected));
    assert_eq!(read(&world, 8192, 8192, true), None, "three pieces are three calls");
    assert_eq!(world.fact("read_hits_total"), hits + 1, "each is counted once");
    for is_by_call in [false, true] {
        let read = |offset, len| read(&world, offset, len, is_by_call);
        let hits = world.fact("read_hits_total");
        assert_eq!(read(8704, 512), Some(vec![9; 512]));
        assert_eq!(read(12288, 4096), Some(vec![7; 4096]));
        assert_eq!(world.fact("read_hits_total"), hits + 2, "each is counted once");
        // A part of it, or all of it, is on the backing device alone.
        for (offset, len) in [(4096, 8192), (12288, 8192), (32768, 512)] {
            assert_eq!(read(offset, len), None);
        }
        assert_eq!(world.fact("read_hits_total"), hits + 2);
    }
    world.zero(Op::WriteZeroes, 8192, 512, false);
    for is_by_call in [false, true] {
        let bytes = read(&world, 8704, 512, is_by_call);
        assert_eq!(bytes, Some(vec![9; 512]), "what is next to zeroes is still there");
    }
    assert_eq!(world.read(8192, 1024), [[0; 512], [9; 512]].concat());
}

#[test]
fn data_with_checksums_is_checked_where_nobody_else_stores() {
    let mut world = World::new(Setup::small().table("C B 2 data_crc true"));
    world.open();
    world.write(8192, &[7; 4096], false);
    assert_eq!([false, true].map(|by_call| read(&world, 8192, 4096, by_call)), [None, None]);
    assert_eq!(world.read(8192, 4096), [7; 4096]);
}

/// What others do before the next access of the medium goes on.
type Meddle = Box<dyn FnOnce() + Send>;

/// A medium of which a user may be held up just before it copies.
struct Slow {
    pmem: SimPmem,
    /// Before the next load.
    meddle: Mutex<Option<Meddle>>,
    /// Before the next store.
    before_store: Mutex<Option<Meddle>>,
}

fn meddle(with: &Mutex<Option<Meddle>>) {
    let meddle = with.lock().unwrap().take();
    if let Some(meddle) = meddle {
        meddle();
    }
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
        meddle(&self.before_store);
        self.pmem.store(at, bytes);
    }

    fn zero(&self, at: u64, len: u64) {
        self.pmem.zero(at, len);
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), Status> {
        meddle(&self.meddle);
        self.pmem.load(at, into)
    }

    fn drain(&self) -> Result<(), Status> {
        self.pmem.drain()
    }

    fn sync(&self) -> Result<(), Status> {
        self.pmem.sync()
    }
}

/// What outlives a server, and how many there were.
struct Stage {
    pmem: Arc<Slow>,
    backing: Arc<RamDisk>,
    words: SharedWords,
    table: &'static str,
    servers: u64,
}

impl Stage {
    fn new(table: &'static str) -> Stage {
        let setup = Setup::small();
        let pmem = SimPmem::new(setup.cache_bytes, setup.persistence);
        let (meddle, before_store) = Default::default();
        let pmem = Arc::new(Slow { pmem, meddle, before_store });
        let backing = Arc::new(RamDisk::new(setup.backing_bytes, 512));
        let words = SharedWords::private(shared_words(setup.stripes)).in_boot(1);
        Stage { pmem, backing, words, table, servers: 0 }
    }

    /// The next server; the one before has died, or there was none.
    fn serve(&mut self) -> Arc<Device> {
        self.servers += 1;
        let setup = Setup::small();
        let options = OpenOptions {
            geometry: setup.geometry,
            stripes: setup.stripes,
            ..OpenOptions::new(self.servers * 0x1_0001)
        };
        let args = TableArgs::parse(&Word::list(self.table)).unwrap();
        let (pmem, backing) = (self.pmem.clone(), self.backing.clone());
        let len = setup.backing_bytes;
        let pcache = Pcache::open(args, len, pmem, backing, self.words.clone(), &options).unwrap();
        Device::with_table("slow", LoadedTable::single(Arc::new(pcache), len)).unwrap()
    }
}

/// A hit was found, and before its copy others wrote until its place held something else.
#[test]
fn a_hit_whose_place_is_reused_meanwhile_is_not_shown() {
    for way in ["in place", "by a call", "by a bio"] {
        let mut stage = Stage::new(Setup::small().table);
        let (device, pmem) = (stage.serve(), stage.pmem.clone());
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
        let file = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, BYTES).unwrap();
        let memory = Foreign::map(&file, 0, BYTES).unwrap();
        let into = match way {
            "in place" => Some(Sink::from(memory.shared(0, 4096))),
            "by a call" => Some(Sink::from(FilePart::new(&file, 0, 4096))),
            _ => None,
        };
        let is_read = into.is_some_and(|into| device.read_into(8192, into, reader.port_id()));
        assert!(!is_read, "{way}: its place was reused");
        let mut bytes = [0; 4096];
        reader.read_at(&mut bytes, 8192).unwrap();
        assert_eq!(bytes, [8; 4096], "{way}");
        assert!(pmem.meddle.lock().unwrap().is_none(), "{way}: the reader was held up");
    }
}

/// What is done of a write that takes a bio after all would be done twice, and hide what came in
/// between from others.
#[test]
fn a_write_that_finds_room_for_a_part_alone_is_not_begun() {
    const LEN: usize = 12_800;
    let file = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES).unwrap();
    let memory = Foreign::map(&file, 0, BYTES).unwrap();
    memory.store(0, &[7; LEN]);
    let mut world = World::new(Setup::small());
    world.open();
    let write = |at: u64| world.target().write_from(at, memory.source(0, LEN), false, 0);
    let places = || (0..u64::MAX).map(|nth| nth * LEN as u64);
    let refused = places().find(|at| !write(*at)).unwrap();
    assert!(refused > 0, "there was room at first");
    let shown = world.read(refused, LEN);
    assert!(shown.chunks(512).all(|sector| sector != [7; 512]), "a part is there");
}

/// Where clients write here: across the border of two regions if it is long.
const PLACE: u64 = (4 << 20) - 8192;
/// What was written there before.
const OLD: u8 = 5;

/// Writes what is in `memory`, as a door does it: in place, else by a bio with a copy of its own,
/// if all of it is there. Returns whether that was in place.
fn write(device: &Arc<Device>, memory: &Foreign, len: usize, fua: bool) -> Option<bool> {
    let mut local = Local::without_kernel(device).unwrap();
    let from = memory.source(0, len);
    if device.write_from(PLACE, from, fua, local.port_id()) {
        return Some(true);
    }
    let mut data = vec![0; len];
    memory.load(0, &mut data);
    if memory.has_damage() {
        return None;
    }
    local.write_at(&data, PLACE, fua).unwrap();
    Some(false)
}

fn read_device(device: &Arc<Device>, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Local::without_kernel(device).unwrap().read_at(&mut bytes, PLACE).unwrap();
    bytes
}

/// A server that has `OLD` where is written, and memory of a client, with its file.
fn stage(table: &'static str) -> (Stage, Arc<Device>, Arc<Foreign>, Arc<OwnedFd>) {
    let mut stage = Stage::new(table);
    let device = stage.serve();
    Local::without_kernel(&device).unwrap().write_at(&[OLD; 16384], PLACE, false).unwrap();
    let file = memfd_create("changing", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES).unwrap();
    let memory = Arc::new(Foreign::map(&file, 0, BYTES).unwrap());
    (stage, device, memory, Arc::new(file))
}

const LENGTHS: [usize; 5] = [512, 4096, 4608, 12_288, 16_384];

/// Everything goes to the origin.
fn drain(device: &Arc<Device>) {
    let clock = ManualClock::default();
    let mut local = Local::without_kernel(device).unwrap().with_background(clock.clone());
    device.set_draining(true);
    for _ in 0..1000 {
        local.turn();
        clock.advance(SECOND);
    }
    assert_eq!(device.dirty().bytes, 0);
}

/// While a client's data is copied it changes, from or to zeroes too. Whatever mixture is stored
/// then: readers see that and nothing else, before a kill and after it, and the origin gets it.
fn a_client_changes_its_data(table: &'static str) {
    for (first, then) in [(0, 9), (9, 0), (7, 9)] {
        for (len, fua) in LENGTHS.into_iter().flat_map(|len| [(len, false), (len, true)]) {
            let why = format!("{table}: {len} bytes of {first}, then {then}, fua {fua}");
            let (mut stage, device, memory, _file) = stage(table);
            memory.store(0, &vec![first; len]);
            let (pmem, changed) = (stage.pmem.clone(), memory.clone());
            let meddle = move || changed.store(0, &vec![then; len]);
            *pmem.before_store.lock().unwrap() = Some(Box::new(meddle));
            let is_in_place = write(&device, &memory, len, fua).unwrap();
            assert!(pmem.before_store.lock().unwrap().is_none(), "{why}: it was changed");
            assert!(is_in_place || table.contains("crc"), "{why}: a bio was needed");
            let seen = read_device(&device, len);
            assert!(seen.iter().all(|byte| [first, then].contains(byte)), "{why}: {seen:?}");
            drop(device);
            let device = stage.serve();
            assert!(read_device(&device, len) == seen, "{why}: after a kill");
            drain(&device);
            let image = stage.backing.image();
            assert!(image[PLACE as usize..][..len] == seen, "{why}: on the origin");
        }
    }
}

/// A client's memory is cut short before its data is copied, or while it is. Nothing is done then,
/// and no zeroes of ours are stored for what was cut off.
fn a_client_cuts_its_memory_short(table: &'static str) {
    for (len, is_before) in LENGTHS.into_iter().flat_map(|len| [(len, false), (len, true)]) {
        let why = format!("{table}: {len} bytes, before the copy: {is_before}");
        let (mut stage, device, memory, file) = stage(table);
        memory.store(0, &vec![9; len]);
        let cut = move || ftruncate(&*file, 0).unwrap();
        match is_before {
            true => cut(),
            false => *stage.pmem.before_store.lock().unwrap() = Some(Box::new(cut)),
        }
        let done = write(&device, &memory, len, false);
        // What was there when it was loaded is the client's data. A bio's copy is made before all.
        let is_lost = is_before || (len > 4096 && !table.contains("crc"));
        assert_eq!(done.is_none(), is_lost, "{why}");
        for _ in 0..2 {
            let seen = read_device(&device, len);
            let is_sound = |byte: &u8| *byte == if is_lost { OLD } else { 9 };
            // What was copied before in another region may have been stored, as part of a request
            // that was not answered.
            assert!(seen[8192.min(len)..].iter().all(is_sound), "{why}: {seen:?}");
            assert!(!seen.contains(&0), "{why}: {seen:?}");
        }
        drop(device);
        let seen = read_device(&stage.serve(), len);
        assert!(!seen.contains(&0), "{why}: after a kill");
    }
}

/// A client's request is gone before its data comes. What it has been given means nothing.
fn a_client_takes_no_data(table: &'static str) {
    let (_stage, device, memory, file) = stage(table);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let short = memfd_create("short", flags).unwrap();
    ftruncate(&short, 4096).unwrap();
    fcntl_add_seals(&short, SealFlags::GROW).unwrap();
    let local = Local::without_kernel(&device).unwrap();
    // Within one region.
    let read = |file: &OwnedFd, at, len: usize| {
        device.read_into(PLACE, FilePart::new(file, at, len).into(), local.port_id())
    };
    let can = !table.contains("crc");
    assert_eq!(read(&file, 0, 8192), can, "{table}");
    let mut bytes = [0; 8192];
    memory.load(0, &mut bytes);
    assert!(!can || bytes == [OLD; 8192], "{table}");
    for (at, len) in [(4096, 4096), (0, 8192), (2048, 4096)] {
        assert!(!read(&short, at, len), "{table}: {len} bytes at {at} of 4096");
    }
    assert_eq!(read_device(&device, 8192), [OLD; 8192], "{table}: it can be read again");
}

const CHANGING: [&str; 3] = ["C B 0", "C B 2 data_crc true", "C B 2 writeback_order fast"];

#[test]
fn what_is_copied_while_its_client_changes_it_is_one_thing_for_all() {
    CHANGING.into_iter().for_each(a_client_changes_its_data);
}

#[test]
fn what_is_cut_short_while_it_is_copied_is_not_written() {
    CHANGING.into_iter().for_each(a_client_cuts_its_memory_short);
}

#[test]
fn what_its_client_does_not_take_is_not_read() {
    CHANGING.into_iter().for_each(a_client_takes_no_data);
}

#[cfg(feature = "mutants")]
#[test]
fn every_mutant_of_a_changing_source_is_found() {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use udm::mutants::{Mutant, set};

    let is_found = |mutant: &Mutant, scene: fn(&'static str)| {
        set(Some(*mutant));
        let found = catch_unwind(AssertUnwindSafe(|| CHANGING.into_iter().for_each(scene)));
        set(None);
        found.is_err()
    };
    let missed = Mutant::PCACHE_SOURCES.iter().filter(|mutant| {
        let scenes =
            [a_client_changes_its_data, a_client_cuts_its_memory_short, a_client_takes_no_data];
        !scenes.into_iter().any(|scene| is_found(mutant, scene))
    });
    assert_eq!(missed.collect::<Vec<_>>(), Vec::<&Mutant>::new());
}
