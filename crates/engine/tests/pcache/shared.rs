//! Reads into memory that clients use as well, and writes from there: they take one copy.
//! Clients may change that memory, or cut it short, while it is copied.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use udm::bio::Op;
use udm::device::{Device, LoadedTable};
use udm::disk::RamDisk;
use udm::error::Status;
use udm::local::{Local, ManualClock};
use udm::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use udm::pmem::client_memory::ClientMemory;
use udm::pmem::copy_target::{CopyTarget, FilePart};
use udm::pmem::sim::SimPmem;
use udm::pmem::{Medium, Pmem};
use udm::shm::SharedWords;
use udm::table::Word;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::{Fixture, Setup};

const BYTES: u64 = 64 << 10;

/// The data of a read in place, to memory or by a call; `None` if it takes a bio.
fn read(fixture: &Fixture, offset: u64, len: usize, is_by_call: bool) -> Option<Vec<u8>> {
    let file = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES).unwrap();
    let memory = ClientMemory::map(&file, 0, BYTES).unwrap();
    let into = match is_by_call {
        true => FilePart::new(&file, 512, len).into(),
        false => memory.shared(512, len).into(),
    };
    let mut bytes = vec![0; len];
    let is_read = fixture.target().read_into(offset, into, 0);
    memory.load(512, &mut bytes);
    is_read.then_some(bytes)
}

#[test]
fn hits_are_read_in_place_and_everything_else_takes_a_bio() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(8192, &[7; 8192], false);
    fixture.write(8192 + 512, &[9; 512], false);
    let expected = [vec![7; 512], vec![9; 512], vec![7; 7168]].concat();
    let hits = fixture.fact("read_hits_total");
    assert_eq!(read(&fixture, 8192, 8192, false), Some(expected));
    assert_eq!(read(&fixture, 8192, 8192, true), None, "three pieces are three calls");
    assert_eq!(fixture.fact("read_hits_total"), hits + 1, "each is counted once");
    for is_by_call in [false, true] {
        let read = |offset, len| read(&fixture, offset, len, is_by_call);
        let hits = fixture.fact("read_hits_total");
        assert_eq!(read(8704, 512), Some(vec![9; 512]));
        assert_eq!(read(12288, 4096), Some(vec![7; 4096]));
        assert_eq!(fixture.fact("read_hits_total"), hits + 2, "each is counted once");
        // A part of it, or all of it, is on the backing device alone.
        for (offset, len) in [(4096, 8192), (12288, 8192), (32768, 512)] {
            assert_eq!(read(offset, len), None);
        }
        assert_eq!(fixture.fact("read_hits_total"), hits + 2);
    }
    fixture.zero(Op::WriteZeroes, 8192, 512, false);
    for is_by_call in [false, true] {
        let bytes = read(&fixture, 8704, 512, is_by_call);
        assert_eq!(bytes, Some(vec![9; 512]), "data next to zeroes is still there");
    }
    assert_eq!(fixture.read(8192, 1024), [[0; 512], [9; 512]].concat());
}

#[test]
fn data_with_checksums_is_checked_where_nobody_else_stores() {
    let mut fixture = Fixture::new(Setup::small().table("C B 2 data_crc true"));
    fixture.open();
    fixture.write(8192, &[7; 4096], false);
    assert_eq!([false, true].map(|by_call| read(&fixture, 8192, 4096, by_call)), [None, None]);
    assert_eq!(fixture.read(8192, 4096), [7; 4096]);
}

/// The clients' steps before the next access of the medium continues.
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

/// The state that outlives a server, and the number of servers.
struct Surviving {
    pmem: Arc<Slow>,
    backing: Arc<RamDisk>,
    words: SharedWords,
    table: &'static str,
    servers: u64,
}

impl Surviving {
    fn new(table: &'static str) -> Surviving {
        let setup = Setup::small();
        let pmem = SimPmem::new(setup.cache_bytes, setup.persistence);
        let (meddle, before_store) = Default::default();
        let pmem = Arc::new(Slow { pmem, meddle, before_store });
        let backing = Arc::new(RamDisk::new(setup.backing_bytes, 512));
        let words = SharedWords::private(shared_words(setup.stripes)).in_boot(1);
        Surviving { pmem, backing, words, table, servers: 0 }
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
        let mut surviving = Surviving::new(Setup::small().table);
        let (device, pmem) = (surviving.serve(), surviving.pmem.clone());
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
        let memory = ClientMemory::map(&file, 0, BYTES).unwrap();
        let into = match way {
            "in place" => Some(CopyTarget::from(memory.shared(0, 4096))),
            "by a call" => Some(CopyTarget::from(FilePart::new(&file, 0, 4096))),
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

/// If a write takes a bio after all, a part that was already stored would be stored twice, and hide
/// writes that others made in between.
#[test]
fn a_write_that_finds_room_for_a_part_alone_is_not_begun() {
    const LEN: usize = 12_800;
    let file = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES).unwrap();
    let memory = ClientMemory::map(&file, 0, BYTES).unwrap();
    memory.store(0, &[7; LEN]);
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    let write = |at: u64| fixture.target().write_from(at, memory.source(0, LEN), false, 0);
    let places = || (0..u64::MAX).map(|nth| nth * LEN as u64);
    let refused = places().find(|at| !write(*at)).unwrap();
    assert!(refused > 0, "there was room at first");
    let shown = fixture.read(refused, LEN);
    assert!(shown.chunks(512).all(|sector| sector != [7; 512]), "a part is there");
}

/// Where clients write here: across the border of two regions if it is long.
const PLACE: u64 = (4 << 20) - 8192;
/// The data that was written there before.
const OLD: u8 = 5;

/// Writes what is in `memory`, as an export does it: in place, else by a bio with a copy of its
/// own, if all of it is there. Returns whether that was in place.
fn write(device: &Arc<Device>, memory: &ClientMemory, len: usize, fua: bool) -> Option<bool> {
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
fn surviving(table: &'static str) -> (Surviving, Arc<Device>, Arc<ClientMemory>, Arc<OwnedFd>) {
    let mut surviving = Surviving::new(table);
    let device = surviving.serve();
    Local::without_kernel(&device).unwrap().write_at(&[OLD; 16384], PLACE, false).unwrap();
    let file = memfd_create("changing", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES).unwrap();
    let memory = Arc::new(ClientMemory::map(&file, 0, BYTES).unwrap());
    (surviving, device, memory, Arc::new(file))
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

/// A client's data changes while it is copied, even from or to zeroes. Readers see exactly the
/// stored mixture, before a kill and after it, and the origin gets it.
fn a_client_changes_its_data(table: &'static str) {
    for (first, then) in [(0, 9), (9, 0), (7, 9)] {
        for (len, fua) in LENGTHS.into_iter().flat_map(|len| [(len, false), (len, true)]) {
            let why = format!("{table}: {len} bytes of {first}, then {then}, fua {fua}");
            let (mut surviving, device, memory, _file) = surviving(table);
            memory.store(0, &vec![first; len]);
            let (pmem, changed) = (surviving.pmem.clone(), memory.clone());
            let meddle = move || changed.store(0, &vec![then; len]);
            *pmem.before_store.lock().unwrap() = Some(Box::new(meddle));
            let is_in_place = write(&device, &memory, len, fua).unwrap();
            assert!(pmem.before_store.lock().unwrap().is_none(), "{why}: it was changed");
            assert!(is_in_place || table.contains("crc"), "{why}: a bio was needed");
            let seen = read_device(&device, len);
            assert!(seen.iter().all(|byte| [first, then].contains(byte)), "{why}: {seen:?}");
            drop(device);
            let device = surviving.serve();
            assert!(read_device(&device, len) == seen, "{why}: after a kill");
            drain(&device);
            let image = surviving.backing.image();
            assert!(image[PLACE as usize..][..len] == seen, "{why}: on the origin");
        }
    }
}

/// A client's memory is cut short before its data is copied, or meanwhile. Then the write does not
/// happen, and the missing part is not stored as zeroes.
fn a_client_cuts_its_memory_short(table: &'static str) {
    for (len, is_before) in LENGTHS.into_iter().flat_map(|len| [(len, false), (len, true)]) {
        let why = format!("{table}: {len} bytes, before the copy: {is_before}");
        let (mut surviving, device, memory, file) = surviving(table);
        memory.store(0, &vec![9; len]);
        let cut = move || ftruncate(&*file, 0).unwrap();
        match is_before {
            true => cut(),
            false => *surviving.pmem.before_store.lock().unwrap() = Some(Box::new(cut)),
        }
        let done = write(&device, &memory, len, false);
        // The loaded bytes are the client's data. A bio's copy is made first.
        let is_lost = is_before || (len > 4096 && !table.contains("crc"));
        assert_eq!(done.is_none(), is_lost, "{why}");
        for _ in 0..2 {
            let seen = read_device(&device, len);
            let is_sound = |byte: &u8| *byte == if is_lost { OLD } else { 9 };
            // Data copied before in another region may have been stored, as part of a request
            // that was not answered.
            assert!(seen[8192.min(len)..].iter().all(is_sound), "{why}: {seen:?}");
            assert!(!seen.contains(&0), "{why}: {seen:?}");
        }
        drop(device);
        let seen = read_device(&surviving.serve(), len);
        assert!(!seen.contains(&0), "{why}: after a kill");
    }
}

/// A client's request is gone before its data arrives. Its buffer is ignored then.
fn a_client_takes_no_data(table: &'static str) {
    let (_stage, device, memory, file) = surviving(table);
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

    let is_found = |mutant: &Mutant, case: fn(&'static str)| {
        set(Some(*mutant));
        let found = catch_unwind(AssertUnwindSafe(|| CHANGING.into_iter().for_each(case)));
        set(None);
        found.is_err()
    };
    let missed = Mutant::PCACHE_SOURCES.iter().filter(|mutant| {
        let cases =
            [a_client_changes_its_data, a_client_cuts_its_memory_short, a_client_takes_no_data];
        !cases.into_iter().any(|case| is_found(mutant, case))
    });
    assert_eq!(missed.collect::<Vec<_>>(), Vec::<&Mutant>::new());
}
