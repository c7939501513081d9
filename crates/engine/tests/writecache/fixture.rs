//! A writecache over simulated devices, driven from one thread: what every test here starts from.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use udm::base::attaching::AttachProgress;
use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{Disk, DiskIo, Ring, SimDisk};
use udm::error::{Result, Status};
use udm::pmem::sim::SimPmem;
use udm::pmem::{Persistence, Pmem};
use udm::prng::Prng;
use udm::shm::{SharedStore, SharedWords};
use udm::table::Word;
use udm::target::{FactValue, Port, Target};
use udm::units::{Nanos, SECOND};
use udm::writecache::{Mode, OpenOptions, TableArgs, Writecache, shared_words};

const STRIPES: usize = 3;

/// The cache device, in one of the two ways.
#[derive(Clone, Debug)]
pub enum Cache {
    Memory(Arc<SimPmem>),
    Disk(Arc<SimDisk>),
}

impl Cache {
    pub fn new(mode: Mode, bytes: u64) -> Cache {
        match mode {
            Mode::Pmem => Cache::Memory(Arc::new(SimPmem::new(bytes, Persistence::Cpu))),
            Mode::Ssd => Cache::Disk(Arc::new(SimDisk::new(bytes, 512).named("cache"))),
        }
    }

    pub fn of_image(mode: Mode, image: &[u8]) -> Cache {
        match mode {
            Mode::Pmem => Cache::Memory(Arc::new(SimPmem::from_image(image, Persistence::Cpu))),
            Mode::Ssd => {
                let disk = SimDisk::new(image.len() as u64, 512).named("cache");
                disk.load_image(image);
                Cache::Disk(Arc::new(disk))
            }
        }
    }

    pub fn image(&self) -> Vec<u8> {
        match self {
            Cache::Memory(pmem) => pmem.image(),
            Cache::Disk(disk) => disk.image(),
        }
    }

    pub fn poke(&self, at: u64, bytes: &[u8]) {
        match self {
            Cache::Memory(pmem) => pmem.poke(at, bytes),
            Cache::Disk(disk) => disk.poke(at, bytes),
        }
    }

    pub fn peek(&self, at: u64, len: usize) -> Vec<u8> {
        match self {
            Cache::Memory(pmem) => pmem.peek(at, len),
            Cache::Disk(disk) => {
                let mut bytes = vec![0; len];
                disk.peek(at, &mut bytes);
                bytes
            }
        }
    }

    pub fn crash(&self, prng: &mut Prng) -> Cache {
        match self {
            Cache::Memory(pmem) => Cache::Memory(Arc::new(pmem.crash(prng))),
            Cache::Disk(disk) => Cache::Disk(Arc::new(disk.crash(prng))),
        }
    }
}

/// No two runs of a machine are the same.
fn next_boot() -> u64 {
    static BOOTS: AtomicU64 = AtomicU64::new(1);
    BOOTS.fetch_add(1, Ordering::Relaxed)
}

pub struct Fixture {
    /// The words after `writecache`, `O` and `C` standing for the devices.
    pub table: String,
    pub cache: Cache,
    pub origin: Arc<SimDisk>,
    pub shared: SharedWords,
    /// Used in place of `shared`, until the machine is started again.
    pub store: Option<SharedStore>,
    pub target: Option<Writecache>,
    pub port: Port,
    pub ring: Ring,
    pub now: Nanos,
    /// I/O that this says true of is kept in `held` instead of being done.
    pub holds: Box<dyn FnMut(&DiskIo) -> bool>,
    pub held: VecDeque<DiskIo>,
    /// I/O that this says true of fails without being done.
    pub refuses: Box<dyn FnMut(&DiskIo) -> bool>,
    /// The operations on disks: device, operation, offset, length.
    pub history: Vec<(String, Op, u64, u64)>,
    attaches: u64,
    /// That share an attach.
    pub threads: usize,
    /// The counts of the last attach.
    pub progress: Arc<AttachProgress>,
}

impl Fixture {
    /// A blank cache in front of an origin of zeroes.
    pub fn new(table: &str, cache_bytes: u64, origin_bytes: u64) -> Fixture {
        let cache = Cache::new(mode_of(table), cache_bytes);
        let origin = SimDisk::new(origin_bytes, 512).named("origin").with_evidence();
        Fixture::over(table, cache, Arc::new(origin))
    }

    pub fn over(table: &str, cache: Cache, origin: Arc<SimDisk>) -> Fixture {
        Fixture {
            table: table.into(),
            cache,
            origin,
            shared: SharedWords::private(shared_words(STRIPES)).in_boot(next_boot()),
            store: None,
            target: None,
            port: Port::new(0),
            ring: Ring::without_kernel(),
            now: 0,
            holds: Box::new(|_| false),
            held: VecDeque::new(),
            refuses: Box::new(|_| false),
            history: Vec::new(),
            attaches: 0,
            threads: 1,
            progress: Arc::default(),
        }
    }

    pub fn args(&self) -> TableArgs {
        TableArgs::parse(&Word::list(&self.table)).unwrap()
    }

    /// Opens the cache with the present content of the devices.
    pub fn try_open(&mut self, force_format: bool) -> Result<()> {
        self.attaches += 1;
        let attach_id = self.attaches * 0x1_0001;
        let threads = self.threads;
        let options =
            OpenOptions { force_format, stripes: STRIPES, threads, ..OpenOptions::new(attach_id) };
        self.progress = Arc::clone(&options.progress);
        let origin: Arc<dyn Disk> = self.origin.clone();
        let len = origin.limits().size_bytes / u64::from(self.args().block_bytes)
            * u64::from(self.args().block_bytes);
        let shared = self.store.clone().unwrap_or_else(|| self.shared.clone().into());
        let args = self.args();
        self.target = Some(match &self.cache {
            Cache::Memory(pmem) => {
                let pmem: Arc<dyn Pmem> = pmem.clone();
                Writecache::open_pmem(args, len, origin, pmem, shared, &options)?
            }
            Cache::Disk(disk) => {
                let disk: Arc<dyn Disk> = disk.clone();
                Writecache::open_disk(args, len, origin, disk, shared, &options)?
            }
        });
        Ok(())
    }

    pub fn open(&mut self) -> &Writecache {
        self.try_open(false).unwrap();
        self.target()
    }

    pub fn target(&self) -> &Writecache {
        self.target.as_ref().expect("open")
    }

    /// Carries out all work of the target that is possible now.
    pub fn settle(&mut self) {
        while self.turn() {}
    }

    fn turn(&mut self) -> bool {
        let target = self.target.as_ref().expect("open");
        let mut is_busy = false;
        while let Some(io) = self.port.ios.pop_front() {
            is_busy = true;
            if (self.holds)(&io) {
                self.held.push_back(io);
            } else if (self.refuses)(&io) {
                let failed = DiskIo { result: Err(Status::Io), ..io };
                target.complete(failed, &mut self.port);
            } else {
                let name = io.disk.limits().name.clone();
                self.history.push((name, io.op, io.offset, io.len));
                io.disk.clone().start(io, &mut self.ring);
            }
        }
        while let Some(io) = self.ring.pop_completed() {
            is_busy = true;
            target.complete(io, &mut self.port);
        }
        is_busy
    }

    /// Lets held I/O go on.
    pub fn release(&mut self) {
        self.holds = Box::new(|_| false);
        self.port.ios.append(&mut self.held);
        self.settle();
    }

    /// Lets time pass, with a background tick at its end.
    pub fn tick(&mut self, nanos: Nanos) {
        self.now += nanos;
        self.target.as_ref().expect("open").tick(self.now, &mut self.port);
        self.settle();
    }

    /// Submits a bio and waits for it, with background ticks while it is parked.
    pub fn run(&mut self, bio: Bio) -> Bio {
        self.submit(bio);
        for _ in 0..5000 {
            self.settle();
            if let Some(done) = self.port.done.pop_front() {
                assert!(self.port.parked.is_empty());
                return done;
            }
            self.tick(SECOND / 100);
            if let Some(parked) = self.port.parked.pop_front() {
                self.submit(parked);
            }
        }
        panic!("a bio waited indefinitely: {}", self.target().status());
    }

    /// Submits a bio, no more.
    pub fn submit(&mut self, bio: Bio) {
        self.target.as_ref().expect("open").submit(bio, &mut self.port);
    }

    /// Whether a bio that was submitted is done now.
    pub fn done(&mut self) -> Option<Bio> {
        self.settle();
        self.port.done.pop_front()
    }

    pub fn try_write(
        &mut self,
        offset: u64,
        data: &[u8],
        fua: bool,
    ) -> std::result::Result<(), Status> {
        self.run(Bio::write(offset, Buffer::from_bytes(data), fua, 0)).status
    }

    pub fn write(&mut self, offset: u64, data: &[u8], fua: bool) {
        self.try_write(offset, data, fua).unwrap();
    }

    pub fn try_read(&mut self, offset: u64, len: usize) -> std::result::Result<Vec<u8>, Status> {
        let bio = self.run(Bio::read(offset, Buffer::zeroed(len), 0));
        bio.status.map(|()| bio.buffer.as_slice().to_vec())
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.try_read(offset, len).unwrap()
    }

    pub fn flush(&mut self) {
        self.run(Bio::flush(0)).status.unwrap();
    }

    pub fn zero(&mut self, op: Op, offset: u64, len: u64) {
        self.run(Bio::bare(op, offset, len, false, 0)).status.unwrap();
    }

    pub fn message(&mut self, words: &str) -> Result<String> {
        let words: Vec<String> = words.split_whitespace().map(String::from).collect();
        self.target().message(&words)
    }

    /// The whole mapped device.
    pub fn content(&mut self) -> Vec<u8> {
        let block_bytes = u64::from(self.args().block_bytes);
        let len = self.origin.limits().size_bytes / block_bytes * block_bytes;
        let mut content = Vec::new();
        for offset in (0..len).step_by(1 << 20) {
            content.extend(self.read(offset, (len - offset).min(1 << 20) as usize));
        }
        content
    }

    /// Writes everything back.
    pub fn drain(&mut self) {
        self.target().set_draining(true);
        for _ in 0..100_000 {
            if self.target().dirty().bytes == 0 {
                self.target().set_draining(false);
                return;
            }
            self.tick(SECOND / 10);
        }
        panic!("drain makes no progress: {}", self.target().status());
    }

    /// The end of the process, without any farewell: devices and shared memory stay.
    pub fn kill(&mut self) {
        self.target = None;
        self.port = Port::new(0);
        self.ring = Ring::without_kernel();
        self.held.clear();
        self.holds = Box::new(|_| false);
    }

    pub fn suspend(&mut self) {
        self.target().suspend().unwrap();
        for _ in 0..10_000 {
            self.tick(SECOND / 100);
            if self.target().is_idle() {
                return;
            }
        }
        panic!("suspend does not end");
    }

    /// An orderly removal.
    pub fn remove(&mut self) {
        self.suspend();
        self.target().detach();
        self.kill();
    }

    /// A power cut: unflushed data of any device may be lost, and shared memory is lost.
    pub fn power_cut(&mut self, prng: &mut Prng) {
        self.kill();
        self.cache = self.cache.crash(prng);
        self.origin = Arc::new(self.origin.crash(prng));
        self.reboot();
    }

    /// The machine is started again: shared memory is gone.
    pub fn reboot(&mut self) {
        self.store = None;
        self.shared = SharedWords::private(shared_words(STRIPES)).in_boot(next_boot());
    }

    /// The runtime directory is gone.
    pub fn lose_memory(&mut self) {
        let boot = self.shared.boot();
        self.shared = SharedWords::private(shared_words(STRIPES)).in_boot(boot);
    }

    /// The number or flag that the target calls `name`.
    pub fn fact(&self, name: &str) -> u64 {
        let facts = self.target().facts();
        let fact = facts.iter().find(|fact| fact.name == name).expect("a fact of that name");
        match &fact.value {
            FactValue::Number(number) => *number,
            FactValue::Flag(flag) => u64::from(*flag),
            other => panic!("{name} is not a number: {other:?}"),
        }
    }

    /// A number of the kernel's status line, counted from 1.
    pub fn status(&self, field: usize) -> u64 {
        let line = self.target().status();
        line.split(' ').nth(field - 1).expect("14 fields").parse().unwrap()
    }

    /// Entry `index` and the commit counter, as the medium has them.
    pub fn entry(&self, index: u64) -> (u64, u64) {
        let bytes = self.cache.peek(64 + 16 * index, 16);
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        (number(0), number(8))
    }

    pub fn seq_count(&self) -> u64 {
        u64::from_le_bytes(self.cache.peek(24, 8).try_into().unwrap())
    }
}

pub fn mode_of(table: &str) -> Mode {
    if table.starts_with('p') { Mode::Pmem } else { Mode::Ssd }
}
