//! A pcache over simulated devices, driven from one thread: what every test here starts from.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use udm::base::attaching::AttachProgress;
use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{Disk, DiskIo, RamDisk, Ring};
use udm::error::{Result, Status};
use udm::pcache::layout::Geometry;
use udm::pcache::{OpenOptions, Pcache, ReplayPace, TableArgs, shared_words};
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::shm::{SharedStore, SharedWords};
use udm::table::Word;
use udm::target::{FactValue, Port, Target};
use udm::units::{Nanos, SECOND};

/// Segments of 64 KiB, so that a few writes make laps.
pub const SMALL: Geometry = Geometry { segment_bytes: 64 << 10, device_bytes_min: 0 };

/// The parts of a fixture.
#[derive(Clone)]
pub struct Setup {
    pub geometry: Geometry,
    pub table: &'static str,
    pub cache_bytes: u64,
    pub backing_bytes: u64,
    pub stripes: usize,
    pub persistence: Persistence,
    pub replay: ReplayPace,
}

/// A key set, or a region, with each tick; the first request comes before.
pub const LATE: ReplayPace = ReplayPace { at_once_max: 0, slice: 1 };

impl Setup {
    pub fn small() -> Setup {
        Setup {
            geometry: SMALL,
            table: "C B 0",
            cache_bytes: 20480 + 24 * (64 << 10),
            backing_bytes: 12 << 20,
            stripes: 3,
            persistence: Persistence::Cpu,
            replay: ReplayPace::default(),
        }
    }

    pub fn late(mut self) -> Setup {
        self.replay = LATE;
        self
    }

    pub fn table(mut self, table: &'static str) -> Setup {
        self.table = table;
        self
    }
}

/// No two runs of a machine are the same.
fn next_boot() -> u64 {
    static BOOTS: AtomicU64 = AtomicU64::new(1);
    BOOTS.fetch_add(1, Ordering::Relaxed)
}

pub struct Fixture {
    pub setup: Setup,
    pub pmem: Arc<SimPmem>,
    pub disk: Arc<RamDisk>,
    pub shared: SharedWords,
    /// Used in place of `shared`, until the machine is started again.
    pub store: Option<SharedStore>,
    pub pcache: Option<Pcache>,
    pub port: Port,
    pub ring: Ring,
    pub now: Nanos,
    /// While set, I/O to the backing device is kept here instead of being done.
    pub is_held: bool,
    pub held: VecDeque<DiskIo>,
    /// I/O to the backing device that this says true of fails without being done.
    pub refuses: Box<dyn FnMut(&DiskIo) -> bool>,
    /// The operations on the backing device: operation, offset, data.
    pub history: Vec<(Op, u64, Vec<u8>)>,
    /// Catch a power cut of the cache together with the backing device at that moment.
    pub catches_cut: bool,
    pub cut: Option<(SimPmem, Vec<u8>)>,
    attaches: u64,
    /// The counts of the last attach.
    pub progress: Arc<AttachProgress>,
}

impl Fixture {
    pub fn new(setup: Setup) -> Fixture {
        let pmem = Arc::new(SimPmem::new(setup.cache_bytes, setup.persistence));
        let disk = Arc::new(RamDisk::new(setup.backing_bytes, 512).with_evidence());
        Fixture::over(setup, pmem, disk)
    }

    pub fn over(setup: Setup, pmem: Arc<SimPmem>, disk: Arc<RamDisk>) -> Fixture {
        let shared = SharedWords::private(shared_words(setup.stripes)).in_boot(next_boot());
        Fixture {
            setup,
            pmem,
            disk,
            shared,
            store: None,
            pcache: None,
            port: Port::new(0),
            ring: Ring::without_kernel(),
            now: 0,
            is_held: false,
            held: VecDeque::new(),
            refuses: Box::new(|_| false),
            history: Vec::new(),
            catches_cut: false,
            cut: None,
            attaches: 0,
            progress: Arc::default(),
        }
    }

    /// A cache device with this content and small segments; the backing device begins with a MiB
    /// of 0xEE.
    pub fn of_image(image: &[u8], table: &'static str) -> Fixture {
        let setup = Setup { cache_bytes: image.len() as u64, ..Setup::small().table(table) };
        let disk = RamDisk::new(setup.backing_bytes, 512);
        disk.poke(0, &[0xEE; 1 << 20]);
        Fixture::over(setup, Arc::new(SimPmem::from_image(image, Persistence::Cpu)), Arc::new(disk))
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

    /// Where the log ends, in segment 0, as an attach would find it.
    pub fn target_head(&self) -> u64 {
        let report = udm::pcache::inspect::inspect(self.pmem.clone(), self.setup.geometry).unwrap();
        assert_eq!(report.head.segment, 0);
        u64::from(report.head.offset)
    }

    /// Opens the cache with the present content of the devices.
    pub fn try_open(&mut self, force_format: bool) -> Result<()> {
        self.attaches += 1;
        let options = OpenOptions {
            force_format,
            geometry: self.setup.geometry,
            stripes: self.setup.stripes,
            replay: self.setup.replay,
            flat_from: [100, 1][self.attaches as usize % 2],
            ..OpenOptions::new(self.attaches * 0x1_0001)
        };
        self.progress = Arc::clone(&options.progress);
        let args = TableArgs::parse(&Word::list(self.setup.table))?;
        let backing: Arc<dyn Disk> = self.disk.clone();
        let len = self.setup.backing_bytes;
        let pmem = self.pmem.clone();
        let shared = self.store.clone().unwrap_or_else(|| self.shared.clone().into());
        let pcache = Pcache::open(args, len, pmem, backing, shared, &options)?;
        self.pcache = Some(pcache);
        Ok(())
    }

    pub fn open(&mut self) -> &Pcache {
        self.try_open(false).unwrap();
        self.target()
    }

    pub fn target(&self) -> &Pcache {
        self.pcache.as_ref().expect("open")
    }

    /// Carries out all work of the target that is possible now.
    pub fn settle(&mut self) {
        let pcache = self.pcache.as_ref().expect("open");
        loop {
            let mut is_quiet = true;
            // The backing device's content changes only below.
            if self.catches_cut
                && let Some(cut) = self.pmem.take_cut()
            {
                self.cut = Some((cut, self.disk.image()));
            }
            while let Some(io) = self.port.ios.pop_front() {
                is_quiet = false;
                if self.is_held {
                    self.held.push_back(io);
                } else if (self.refuses)(&io) {
                    let failed = DiskIo { result: Err(Status::Io), ..io };
                    pcache.complete(failed, &mut self.port);
                } else {
                    if io.op != Op::Read {
                        let data = match io.op {
                            Op::Write => io.buffer.as_slice().to_vec(),
                            _ => vec![0; io.len as usize],
                        };
                        self.history.push((io.op, io.offset, data));
                    }
                    io.disk.clone().start(io, &mut self.ring);
                }
            }
            while let Some(io) = self.ring.pop_completed() {
                is_quiet = false;
                pcache.complete(io, &mut self.port);
            }
            if is_quiet {
                return;
            }
        }
    }

    /// Lets held I/O go on.
    pub fn release(&mut self) {
        self.is_held = false;
        self.port.ios.append(&mut self.held);
        self.settle();
    }

    /// Carries out what is held now; what follows from it is held again.
    pub fn release_held(&mut self) {
        let pcache = self.pcache.as_ref().expect("open");
        for io in std::mem::take(&mut self.held) {
            io.disk.clone().start(io, &mut self.ring);
        }
        while let Some(io) = self.ring.pop_completed() {
            pcache.complete(io, &mut self.port);
        }
        self.settle();
    }

    /// Lets time pass, with a background tick at its end.
    pub fn tick(&mut self, nanos: Nanos) {
        self.now += nanos;
        self.pcache.as_ref().expect("open").tick(self.now, &mut self.port);
        self.settle();
    }

    /// Submits a bio and waits for it, with background ticks while it is parked.
    pub fn run(&mut self, bio: Bio) -> Bio {
        self.submit(bio);
        for _ in 0..1000 {
            self.settle();
            if let Some(done) = self.port.done.pop_front() {
                assert!(self.port.parked.is_empty());
                return done;
            }
            if let Some(parked) = self.port.parked.pop_front() {
                self.tick(SECOND / 100);
                self.submit(parked);
            } else {
                self.tick(SECOND / 100);
            }
        }
        panic!("a bio waited indefinitely: {}", self.target().status());
    }

    /// Submits a bio, no more.
    pub fn submit(&mut self, bio: Bio) {
        self.pcache.as_ref().expect("open").submit(bio, &mut self.port);
    }

    pub fn write(&mut self, offset: u64, data: &[u8], fua: bool) {
        self.run(Bio::write(offset, Buffer::from_bytes(data), fua, 0)).status.unwrap();
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

    pub fn zero(&mut self, op: Op, offset: u64, len: u64, fua: bool) {
        self.run(Bio::bare(op, offset, len, fua, 0)).status.unwrap();
    }

    /// The whole mapped device.
    pub fn content(&mut self) -> Vec<u8> {
        let len = self.setup.backing_bytes;
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
        self.pcache = None;
        self.port = Port::new(0);
        self.ring = Ring::without_kernel();
        self.held.clear();
        self.is_held = false;
    }

    /// An orderly removal.
    pub fn remove(&mut self) {
        self.target().suspend().unwrap();
        self.settle();
        assert!(self.target().is_idle());
        self.target().detach();
        self.kill();
    }

    /// A power cut: unflushed data of the cache may be lost, and shared memory is lost.
    pub fn power_cut(&mut self, prng: &mut udm::prng::Prng) {
        self.kill();
        self.pmem = Arc::new(self.pmem.crash(prng));
        self.reboot();
    }

    /// The runtime directory is gone.
    pub fn lose_memory(&mut self) {
        let words = shared_words(self.setup.stripes);
        self.shared = SharedWords::private(words).in_boot(self.shared.boot());
    }

    /// The machine is started again: shared memory is gone.
    pub fn reboot(&mut self) {
        self.store = None;
        let words = shared_words(self.setup.stripes);
        self.shared = SharedWords::private(words).in_boot(next_boot());
    }
}
