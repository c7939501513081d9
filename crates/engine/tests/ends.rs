//! Orderly ends of every cache, in every mode, each followed by a power failure that takes back all
//! data that no flush has made durable; and drains during the writes of a client that never stops.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

#[path = "ends/failing.rs"]
mod failing;

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::cache::Devices;
use udm::cache::{self, Cache};
use udm::disk::{Disk, Effect, Fault, Ring, SimDisk};
use udm::error::{Result, Status};
use udm::pcache::layout::Geometry;
use udm::pcache::{self, Pcache};
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::shm::SharedWords;
use udm::table::Word;
use udm::target::{Port, Target};
use udm::units::{Nanos, SECOND};
use udm::writecache::{self, Writecache};

const STRIPES: usize = 3;
const BLOCK: usize = 4096;
/// Blocks that the tests write, one in each block of a `cache`.
const BLOCKS: u64 = 48;
const STEP: u64 = 32 << 10;
const ORIGIN_BYTES: u64 = 4 << 20;

/// The words of each table, including its mode.
const TABLES: [&str; 13] = [
    "pcache C O 0",
    "pcache C O 2 writeback_order fast",
    "writecache p O C 4096 0",
    "writecache p O C 4096 1 cleaner",
    "writecache s O C 4096 0",
    "writecache s O C 4096 1 cleaner",
    "writecache s O C 4096 0 atomic_blocks false",
    "cache M C O 64 2 metadata2 writeback smq 0",
    "cache M C O 64 1 writeback smq 0",
    "cache M C O 64 2 metadata2 writeback cleaner 0",
    "cache M C O 64 2 metadata2 writethrough smq 0",
    "cache M C O 64 2 metadata2 writethrough probation 0",
    "cache M C O 64 2 metadata2 passthrough smq 0",
];

/// A cache over simulated devices, driven from one thread.
struct Fixture {
    table: &'static str,
    memory: Arc<SimPmem>,
    metadata: Arc<SimDisk>,
    fast: Arc<SimDisk>,
    origin: Arc<SimDisk>,
    shared: SharedWords,
    target: Option<Box<dyn Target>>,
    port: Port,
    ring: Ring,
    now: Nanos,
    boot: u64,
    room: u64,
}

/// Memory that outlives a server and not the machine.
fn shared(table: &str, boot: u64) -> SharedWords {
    let words = match table.starts_with("pcache") {
        true => pcache::shared_words(STRIPES),
        false => writecache::shared_words(STRIPES),
    };
    SharedWords::private(words).in_boot(boot)
}

impl Fixture {
    fn new(table: &'static str) -> Fixture {
        let mut fixture = Fixture {
            table,
            memory: Arc::new(SimPmem::new(20480 + 64 * (64 << 10), Persistence::Cpu)),
            metadata: Arc::new(SimDisk::new(128 * 4096, 512).named("meta")),
            fast: Arc::new(SimDisk::new(4 << 20, 512).named("fast")),
            origin: Arc::new(SimDisk::new(ORIGIN_BYTES, 512).named("origin")),
            shared: shared(table, 1),
            target: None,
            port: Port::new(0),
            ring: Ring::without_kernel(),
            now: 0,
            boot: 1,
            room: 0,
        };
        fixture.open();
        fixture
    }

    fn open(&mut self) {
        let target = self.opened().unwrap_or_else(|error| panic!("{}: {error}", self.table));
        self.room = target.events().unwrap().room_epoch();
        self.target = Some(target);
    }

    fn opened(&self) -> Result<Box<dyn Target>> {
        let (name, words) = self.table.split_once(' ').unwrap();
        let words = Word::list(words);
        let (origin, shared): (Arc<dyn Disk>, _) = (self.origin.clone(), self.shared.clone());
        let id = self.boot * 0x1_0001;
        Ok(match name {
            "pcache" => {
                let geometry = Geometry { segment_bytes: 64 << 10, device_bytes_min: 0 };
                let stripes = STRIPES;
                let options =
                    pcache::OpenOptions { geometry, stripes, ..pcache::OpenOptions::new(id) };
                let args = pcache::TableArgs::parse(&words)?;
                let memory = self.memory.clone();
                Box::new(Pcache::open(args, ORIGIN_BYTES, memory, origin, shared, &options)?)
            }
            "writecache" => {
                let stripes = STRIPES;
                let options =
                    writecache::OpenOptions { stripes, ..writecache::OpenOptions::new(id) };
                let args = writecache::TableArgs::parse(&words)?;
                match args.mode {
                    writecache::Mode::Pmem => {
                        let memory = self.memory.clone();
                        let open = Writecache::open_pmem;
                        Box::new(open(args, ORIGIN_BYTES, origin, memory, shared, &options)?)
                    }
                    writecache::Mode::Ssd => {
                        let fast: Arc<dyn Disk> = self.fast.clone();
                        let open = Writecache::open_disk;
                        Box::new(open(args, ORIGIN_BYTES, origin, fast, shared, &options)?)
                    }
                }
            }
            _ => {
                let args = cache::TableArgs::parse(&words)?;
                let (metadata, cache) = (self.metadata.clone(), self.fast.clone());
                let devices = Devices { metadata, cache, origin };
                let options = cache::OpenOptions::default();
                Box::new(Cache::open(args, ORIGIN_BYTES, devices, options)?)
            }
        })
    }

    fn target(&self) -> &dyn Target {
        &**self.target.as_ref().expect("open")
    }

    /// Takes one step: an I/O, or its end. Whether there was one.
    fn step(&mut self) -> bool {
        let target = self.target.as_ref().expect("open");
        if let Some(io) = self.ring.pop_completed() {
            target.complete(io, &mut self.port);
        } else if let Some(io) = self.port.ios.pop_front() {
            io.disk.clone().start(io, &mut self.ring);
        } else if target.events().unwrap().room_epoch() != self.room {
            self.room = target.events().unwrap().room_epoch();
            for bio in std::mem::take(&mut self.port.parked) {
                target.submit(bio, &mut self.port);
            }
        } else {
            return false;
        }
        true
    }

    fn settle(&mut self) {
        while self.step() {}
    }

    fn tick(&mut self) {
        self.now += SECOND / 100;
        self.target.as_ref().expect("open").tick(self.now, &mut self.port);
    }

    fn submit(&mut self, bio: Bio) {
        self.target.as_ref().expect("open").submit(bio, &mut self.port);
    }

    fn run(&mut self, bio: Bio) -> std::result::Result<Bio, Status> {
        self.submit(bio);
        for _ in 0..5000 {
            self.settle();
            if let Some(done) = self.port.done.pop_front() {
                return done.status.map(|()| done);
            }
            self.tick();
        }
        panic!("{}: a bio waits forever: {}", self.table, self.target().status());
    }

    fn write(&mut self, block: u64, version: u64) {
        self.run(Bio::write(block * STEP, content(block, version), false, 0)).unwrap();
    }

    /// The version that a read shows.
    fn version(&mut self, block: u64) -> u64 {
        let bio = self.run(Bio::read(block * STEP, Buffer::zeroed(BLOCK), 0)).unwrap();
        version_of(bio.buffer.as_slice(), block)
    }

    /// The version that the origin shows after a power cut.
    fn durable(&self, block: u64) -> u64 {
        let image = self.origin.durable_image();
        let at = (block * STEP) as usize;
        version_of(&image[at..at + BLOCK], block)
    }

    /// Writes back what is dirty now, and flushes, as `udm drain` does.
    fn drain(&mut self) {
        self.target().set_draining(true);
        for _ in 0..5000 {
            self.settle();
            if self.target().left_to_drain() == 0 {
                self.target().set_draining(false);
                self.run(Bio::flush(0)).unwrap();
                return;
            }
            self.tick();
        }
        panic!("{}: a drain does not end: {}", self.table, self.target().status());
    }

    fn suspend(&mut self) {
        self.target().suspend().unwrap();
        for _ in 0..5000 {
            self.tick();
            self.settle();
            if self.target().is_idle() {
                return;
            }
        }
        panic!("{}: a suspend does not end: {}", self.table, self.target().status());
    }

    /// The orderly end, and a power cut.
    fn end(&mut self) {
        self.suspend();
        assert!(self.target().is_durable(), "{}", self.table);
        self.target().detach();
        self.cut();
    }

    /// A power failure that keeps only flushed data.
    fn cut(&mut self) {
        self.target = None;
        (self.port, self.ring) = (Port::new(0), Ring::without_kernel());
        for disk in [&mut self.metadata, &mut self.fast, &mut self.origin] {
            disk.abandon();
            *disk = Arc::new(disk.crash_with(|_, _| 0));
        }
        self.memory = Arc::new(self.memory.snapshot_durable());
        self.boot += 1;
        self.shared = shared(self.table, self.boot);
    }
}

/// A block that contains its own number and version.
fn content(block: u64, version: u64) -> Buffer {
    let mut bytes = vec![0; BLOCK];
    for word in bytes.as_chunks_mut().0 {
        *word = (block << 32 | version).to_le_bytes();
    }
    Buffer::from_bytes(&bytes)
}

/// The version that it says, if it is one block's whole content or zeroes.
fn version_of(bytes: &[u8], block: u64) -> u64 {
    let words = bytes.as_chunks().0.iter();
    let words: Vec<u64> = words.map(|word| u64::from_le_bytes(*word)).collect();
    assert!(words.iter().all(|word| *word == words[0]), "block {block} is torn");
    assert!(words[0] == 0 || words[0] >> 32 == block, "block {block} has {:#x}", words[0]);
    words[0] & 0xFFFF_FFFF
}

/// Blocks that are cached, and new ones: some go to the cache, some pass by.
fn write_all(fixture: &mut Fixture, version: u64) {
    (0..BLOCKS).for_each(|block| fixture.write(block, version));
}

#[test]
fn an_orderly_end_keeps_what_no_client_has_flushed() {
    for table in TABLES {
        let mut fixture = Fixture::new(table);
        for version in 1..=3 {
            write_all(&mut fixture, version);
            fixture.end();
            fixture.open();
            let found: Vec<u64> = (0..BLOCKS).map(|block| fixture.version(block)).collect();
            assert!(found.iter().all(|found| *found == version), "{table}: {found:?}");
        }
    }
}

#[test]
fn after_a_drain_a_power_cut_leaves_everything_on_the_origin() {
    for table in TABLES {
        let mut fixture = Fixture::new(table);
        for version in 1..=3 {
            write_all(&mut fixture, version);
            fixture.drain();
            let found: Vec<u64> = (0..BLOCKS).map(|block| fixture.durable(block)).collect();
            assert!(found.iter().all(|found| *found == version), "{table}: {found:?}");
            match version {
                1 => fixture.cut(),
                _ => fixture.end(),
            }
            let found: Vec<u64> = (0..BLOCKS).map(|block| fixture.durable(block)).collect();
            assert!(found.iter().all(|found| *found == version), "{table}: {found:?}");
            fixture.open();
        }
    }
}

/// The clients: one writes all blocks in turn, one a single block all the time. A request of each
/// is on its way between any two steps of the cache.
#[test]
fn a_drain_ends_beside_clients_that_never_stop() {
    for table in TABLES {
        for seed in 0..6 {
            let mut fixture = Fixture::new(table);
            let mut version = 1;
            write_all(&mut fixture, version);
            if seed % 2 == 1 {
                // Some are overwritten in their places.
                fixture.run(Bio::flush(0)).unwrap();
                version += 1;
                write_all(&mut fixture, version);
            }
            drain_beside_writers(&mut fixture, version, seed);
        }
    }
}

fn drain_beside_writers(fixture: &mut Fixture, first: u64, seed: u64) {
    let (table, mut version) = (fixture.table, first);
    fixture.target().set_draining(true);
    let mut steps = 0;
    while fixture.target().left_to_drain() > 0 {
        steps += 1;
        assert!(
            steps < 60_000,
            "{table}: a drain chases its clients: {}",
            fixture.target().status()
        );
        if fixture.port.done.len() + fixture.port.parked.len() < 64 && steps % (1 + seed) == 0 {
            version += 1;
            let turn = version % BLOCKS;
            for block in [turn, seed * 5] {
                fixture.submit(Bio::write(block * STEP, content(block, version), false, 0));
            }
        }
        fixture.port.done.clear();
        fixture.step();
        if steps % 16 == 0 {
            fixture.tick();
        }
    }
    fixture.target().set_draining(false);
    let passes_by = table.starts_with("cache") || table.contains("cleaner");
    let late: Vec<u64> = (0..BLOCKS).filter(|block| fixture.durable(*block) < first).collect();
    assert!(passes_by || late.is_empty(), "{table}: not on the origin: {late:?}");
    // Everything that passed by is flushed, as `udm drain` does at its end.
    fixture.settle();
    fixture.port.done.clear();
    fixture.run(Bio::flush(0)).unwrap();
    let found: Vec<u64> = (0..BLOCKS).map(|block| fixture.durable(block)).collect();
    assert!(found.iter().all(|found| *found >= first), "{table}: {found:?}");
}

#[test]
fn an_end_whose_origin_refuses_the_flush_is_no_durable_one() {
    let passes_by = |table: &&str| table.contains("cleaner") || table.contains("through");
    for table in TABLES.into_iter().filter(passes_by) {
        let mut fixture = Fixture::new(table);
        write_all(&mut fixture, 1);
        let refusal = Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(100);
        fixture.origin.inject(refusal);
        fixture.suspend();
        assert!(!fixture.target().is_durable(), "{table}");
        // It heals, and the next end is one.
        fixture.origin.heal();
        fixture.target().resume().unwrap();
        fixture.settle();
        write_all(&mut fixture, 2);
        fixture.end();
        fixture.open();
        let found: Vec<u64> = (0..BLOCKS).map(|block| fixture.version(block)).collect();
        assert!(found.iter().all(|found| *found == 2), "{table}: {found:?}");
    }
}

#[cfg(feature = "mutants")]
#[test]
fn every_mutant_is_found() {
    use udm::mutants::{Mutant, set};
    let cases: [fn(); 3] = [
        an_orderly_end_keeps_what_no_client_has_flushed,
        after_a_drain_a_power_cut_leaves_everything_on_the_origin,
        a_drain_ends_beside_clients_that_never_stop,
    ];
    let is_missed = |mutant: &&Mutant| {
        set(Some(**mutant));
        let found = std::panic::catch_unwind(|| cases.iter().for_each(|case| case()));
        set(None);
        found.is_ok()
    };
    let missed: Vec<_> = Mutant::ENDS.iter().filter(is_missed).collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
