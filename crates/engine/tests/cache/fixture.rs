//! A served cache over three simulated disks, driven from one thread: what every test of serving
//! starts from.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::cache::Devices;
use udm::cache::{Cache, OpenOptions, TableArgs};
use udm::disk::{Disk, DiskIo, DiskLimits, Extent, Ring, SimDisk};
use udm::error::{Result, Status};
use udm::prng::Prng;
use udm::table::Word;
use udm::target::{FactValue, Port, Target, Wake};
use udm::units::{Nanos, SECOND};

pub const SECTOR: u64 = 512;
/// Bytes of a block in these tests.
pub const BLOCK: u64 = 32 << 10;

#[derive(Debug, Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Which I/O.
type Chosen = Box<dyn FnMut(&DiskIo) -> bool>;

pub struct Fixture {
    /// The words after the three devices.
    pub table: String,
    /// The metadata device, the cache device and the origin.
    pub disks: [Arc<SimDisk>; 3],
    /// Bytes of the cache device that the table says, if not all.
    pub cut: Option<u64>,
    /// Bytes of the origin that the table says, if not all.
    pub len: Option<u64>,
    pub target: Option<Cache>,
    pub port: Port,
    pub ring: Ring,
    pub now: Nanos,
    /// The I/O that disks received: device, operation, offset, length.
    pub history: Vec<(String, Op, u64, u64)>,
    /// I/O that this says true of is kept in `held` instead of being done.
    pub holds: Chosen,
    pub held: Vec<DiskIo>,
    work: Arc<Flag>,
    room_epoch: u64,
}

/// The beginning of a disk.
#[derive(Debug)]
struct Beginning {
    disk: Arc<SimDisk>,
    limits: DiskLimits,
}

impl Beginning {
    fn new(disk: Arc<SimDisk>, size_bytes: u64) -> Beginning {
        let limits = DiskLimits { size_bytes, ..disk.limits().clone() };
        Beginning { disk, limits }
    }
}

impl Disk for Beginning {
    fn limits(&self) -> &DiskLimits {
        &self.limits
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        assert!(io.offset + io.len <= self.limits.size_bytes, "beyond the end of the table's part");
        self.disk.start(io, ring);
    }

    fn carry_out(&self, ios: Vec<DiskIo>) -> Vec<DiskIo> {
        self.disk.carry_out(ios)
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        self.disk.extent(offset, len)
    }
}

/// Disks for a cache of `slots` blocks in front of `origin_bytes`.
pub fn disks(slots: u64, origin_bytes: u64) -> [Arc<SimDisk>; 3] {
    let disk = |bytes: u64, name: &str| Arc::new(SimDisk::new(bytes, 512).named(name));
    let origin = SimDisk::new(origin_bytes, 512).named("origin").with_evidence();
    [disk(128 * 4096, "meta"), disk(slots * BLOCK, "cache"), Arc::new(origin)]
}

impl Fixture {
    pub fn new(table: &str, disks: [Arc<SimDisk>; 3]) -> Fixture {
        Fixture {
            table: table.into(),
            disks,
            cut: None,
            len: None,
            target: None,
            port: Port::new(0),
            ring: Ring::without_kernel(),
            now: 0,
            history: Vec::new(),
            holds: Box::new(|_| false),
            held: Vec::new(),
            work: Arc::default(),
            room_epoch: 0,
        }
    }

    /// A cache that is open, of 32 KiB blocks.
    pub fn opened(table: &str, slots: u64, origin_bytes: u64) -> Fixture {
        let mut fixture = Fixture::new(table, disks(slots, origin_bytes));
        fixture.open();
        fixture
    }

    pub fn devices(&self) -> Devices {
        let [metadata, cache, origin] = self.disks.clone();
        let cache: Arc<dyn Disk> = match self.cut {
            Some(bytes) => Arc::new(Beginning::new(cache, bytes)),
            None => cache,
        };
        Devices { metadata, cache, origin }
    }

    pub fn try_open(&mut self) -> Result<()> {
        self.open_with(OpenOptions::default())
    }

    /// A new cache in place of the present one.
    pub fn format(&mut self) {
        self.open_with(OpenOptions { force_format: true, ..OpenOptions::default() }).unwrap();
    }

    fn open_with(&mut self, options: OpenOptions) -> Result<()> {
        let args = TableArgs::parse(&Word::list(&format!("M C O {}", self.table)))?;
        let len = self.len.unwrap_or_else(|| Disk::limits(&*self.disks[2]).size_bytes);
        let target = Cache::open(args, len, self.devices(), options)?;
        let events = target.events().unwrap();
        events.set_background(Some(self.work.clone()));
        self.room_epoch = events.room_epoch();
        self.target = Some(target);
        self.work.wake();
        Ok(())
    }

    pub fn open(&mut self) {
        self.try_open().unwrap();
    }

    pub fn target(&self) -> &Cache {
        self.target.as_ref().expect("open")
    }

    /// Starts what the target wants, and takes what is back. Whether there was anything.
    pub fn turn(&mut self) -> bool {
        let target = self.target.as_ref().expect("open");
        let mut is_busy = false;
        while let Some(io) = self.port.ios.pop_front() {
            is_busy = true;
            if (self.holds)(&io) {
                self.held.push(io);
                continue;
            }
            let name = Disk::limits(&*io.disk).name.clone();
            self.history.push((name, io.op, io.offset, io.len));
            io.disk.clone().start(io, &mut self.ring);
        }
        while let Some(io) = self.ring.pop_completed() {
            is_busy = true;
            target.complete(io, &mut self.port);
        }
        let epoch = target.events().unwrap().room_epoch();
        if epoch != self.room_epoch {
            self.room_epoch = epoch;
            for bio in std::mem::take(&mut self.port.parked) {
                is_busy = true;
                target.submit(bio, &mut self.port);
            }
        }
        if self.work.0.swap(false, Ordering::SeqCst) {
            is_busy = true;
            target.tick(self.now, &mut self.port);
        }
        is_busy
    }

    /// Continues until no work is left to do now.
    pub fn settle(&mut self) {
        while self.turn() {}
    }

    /// Lets held I/O go on.
    pub fn release(&mut self) {
        self.holds = Box::new(|_| false);
        self.port.ios.extend(self.held.drain(..));
        self.settle();
    }

    /// Lets time pass.
    pub fn tick(&mut self, nanos: Nanos) {
        self.now += nanos;
        self.work.wake();
        self.settle();
    }

    pub fn submit(&mut self, bio: Bio) {
        self.target.as_ref().expect("open").submit(bio, &mut self.port);
    }

    /// Submits a bio and waits for it.
    pub fn run(&mut self, bio: Bio) -> Bio {
        self.submit(bio);
        for _ in 0..1000 {
            self.settle();
            if let Some(done) = self.port.done.pop_front() {
                return done;
            }
            self.tick(SECOND / 100);
        }
        panic!("a bio waits indefinitely: {}", self.target().status());
    }

    pub fn try_write(&mut self, at: u64, data: &[u8]) -> std::result::Result<(), Status> {
        self.run(Bio::write(at, Buffer::from_bytes(data), false, 0)).status
    }

    pub fn write(&mut self, at: u64, data: &[u8]) {
        self.try_write(at, data).unwrap();
    }

    pub fn try_read(&mut self, at: u64, len: usize) -> std::result::Result<Vec<u8>, Status> {
        let bio = self.run(Bio::read(at, Buffer::zeroed(len), 0));
        bio.status.map(|()| bio.buffer.as_slice().to_vec())
    }

    pub fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        self.try_read(at, len).unwrap()
    }

    pub fn flush(&mut self) {
        self.run(Bio::flush(0)).status.unwrap();
    }

    pub fn bare(&mut self, op: Op, at: u64, len: u64) {
        self.run(Bio::bare(op, at, len, false, 0)).status.unwrap();
    }

    pub fn message(&mut self, words: &str) -> Result<String> {
        let words: Vec<String> = words.split_whitespace().map(String::from).collect();
        let done = self.target().message(&words);
        self.settle();
        done
    }

    /// A number among the facts, or a flag as 0 or 1.
    pub fn fact(&self, name: &str) -> u64 {
        let fact = self.target().facts().into_iter().find(|fact| fact.name == name);
        match fact.map(|fact| fact.value) {
            Some(FactValue::Number(number)) => number,
            Some(FactValue::Flag(flag)) => flag.into(),
            other => panic!("{name}: {other:?}"),
        }
    }

    /// Word `nth` of the status line.
    pub fn status(&self, nth: usize) -> String {
        self.target().status().split(' ').nth(nth).unwrap().to_owned()
    }

    /// Brings a block into the cache: it is read until the policy wants it.
    pub fn bring(&mut self, block: u64) {
        for _ in 0..4000 {
            let hits = self.status(4);
            self.read(block * BLOCK, 512);
            if self.status(4) != hits {
                return;
            }
        }
        panic!("block {block} does not come: {}", self.target().status());
    }

    pub fn drain(&mut self) {
        self.target().set_draining(true);
        for _ in 0..1000 {
            self.tick(SECOND / 10);
            if self.target().dirty().bytes == 0 {
                return self.target().set_draining(false);
            }
        }
        panic!("drain makes no progress: {}", self.target().status());
    }

    pub fn suspend(&mut self) {
        self.target().suspend().unwrap();
        for _ in 0..1000 {
            self.tick(SECOND / 100);
            if self.target().is_idle() {
                return;
            }
        }
        panic!("a suspend does not end: {}", self.target().status());
    }

    /// The end of the process.
    pub fn kill(&mut self) {
        self.target = None;
        self.port = Port::new(0);
        self.ring = Ring::without_kernel();
        self.held.clear();
        self.holds = Box::new(|_| false);
        self.disks.iter().for_each(|disk| disk.abandon());
    }

    pub fn remove(&mut self) {
        self.suspend();
        self.target().detach();
        self.kill();
    }

    /// A power cut.
    pub fn crash(&mut self, prng: &mut Prng) {
        let disks = self.disks.clone().map(|disk| Arc::new(disk.crash(prng)));
        self.kill();
        self.disks = disks;
    }
}
