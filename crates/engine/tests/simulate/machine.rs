//! The devices and the server on them: attach, death, power cuts.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use udm::build::{BuildOptions, Opener, build};
use udm::device::{Device, LoadedTable, PortHandle};
use udm::disk::{Disk, Ring, SimDisk};
use udm::error::Result;
use udm::pcache::ReplayPace;
use udm::pcache::layout::Geometry;
use udm::pmem::Pmem;
use udm::pmem::sim::SimPmem;
use udm::prng::Prng;
use udm::shm::{SharedStore, SharedWords};
use udm::table::{DeviceWord, Table};
use udm::target::{Port, Wake};
use udm::units::{Nanos, SECTOR};

use crate::cached::{self, Beginning};
use crate::plan::{Engine, Setup};

/// The devices and memory that outlive a server.
pub struct Machine {
    pub pmem: Arc<SimPmem>,
    /// The cache, where it is a disk.
    pub ssd: Arc<SimDisk>,
    pub disk: Arc<SimDisk>,
    /// The metadata of a cache.
    pub meta: Arc<SimDisk>,
    /// The disk of the lines that are not cached.
    pub aside: Arc<SimDisk>,
    cuts: Option<(usize, usize)>,
    is_on_disk: bool,
    has_meta: bool,
    shared: Mutex<SharedWords>,
    attaches: u64,
}

/// A server: a device, its clients' ports, and last the background's.
pub struct Server {
    pub device: Arc<Device>,
    pub ports: Vec<Driver>,
    pub work: Arc<Signal>,
    pub next_tick: Option<Nanos>,
}

/// A thread that drives a port.
pub struct Driver {
    pub port: Port,
    pub ring: Ring,
    pub room_epoch: u64,
    pub is_background: bool,
    // Dropped last: a port is detached when its requests and I/O are gone.
    _seat: PortHandle,
}

/// Remembers that it was woken.
#[derive(Debug, Default)]
pub struct Signal(AtomicBool);

impl Signal {
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    pub fn clear(&self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Wake for Signal {
    fn wake(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Opener for Machine {
    fn disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        Ok(match word.path.as_str() {
            "C" => match word.options.area.len_bytes() {
                None => self.ssd.clone(),
                Some(len) => Arc::new(Beginning::new(self.ssd.clone(), len / SECTOR)),
            },
            "M" => self.meta.clone(),
            "L" => self.aside.clone(),
            _ => self.disk.clone(),
        })
    }

    fn pmem(&self, _: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        Ok(self.pmem.clone())
    }

    fn shared_store(&self, _: &'static str, _: &str) -> Result<SharedStore> {
        Ok(self.shared.lock().unwrap().clone().into())
    }
}

impl Machine {
    pub fn new(setup: &Setup) -> Machine {
        let held = |bytes: u64, name: &str| {
            let disk = SimDisk::new(bytes, 512).named(name);
            let disk = if setup.seed % 4 == 3 { disk.with_holes() } else { disk };
            disk.seed(setup.seed);
            disk.hold(true);
            Arc::new(disk)
        };
        let machine = Machine {
            ssd: held(setup.cache_bytes(), "ssd"),
            meta: held(cached::METADATA_BYTES, "meta"),
            disk: held((setup.cuts.1 - setup.cuts.0) * SECTOR, "sim"),
            aside: held(setup.backing_bytes, "aside"),
            cuts: setup.is_cut().then(|| {
                let (from, to) = setup.cuts;
                ((from * SECTOR) as usize, (to * SECTOR) as usize)
            }),
            pmem: Arc::new(SimPmem::new(setup.cache_bytes(), setup.persistence)),
            is_on_disk: setup.is_on_disk(),
            has_meta: setup.is_cache(),
            shared: Mutex::new(SharedWords::private(match setup.engine {
                Engine::Pcache { .. } => udm::pcache::shared_words(8),
                _ => udm::writecache::shared_words(8),
            })),
            attaches: 0,
        };
        machine.prepare_flushes();
        machine
    }

    /// Flushes of a cache's fast disks may fail. The data that they lose can still be read, by a
    /// server that does not know of the failure yet.
    fn prepare_flushes(&self) {
        for disk in [&self.ssd, &self.meta].into_iter().filter(|_| self.has_meta) {
            disk.show_lost();
            disk.say_to_all();
        }
    }

    /// Starts a server.
    pub fn start(&mut self, setup: &Setup) -> Result<Server> {
        self.attaches += 1;
        let prng = &mut Prng::new(setup.seed + self.attaches);
        let table = match self.build(setup, &setup.table(prng), false) {
            Err(error) if cached::is_refusal(&error.to_string()) => {
                self.build(setup, &setup.table_for_all(prng), false)?
            }
            table => table?,
        };
        let device = Device::with_table("sim", table)?;
        let work = Arc::new(Signal::default());
        work.wake();
        device.events().set_background(Some(work.clone()));
        let ports = (0..=setup.clients)
            .map(|nth| {
                let (seat, port) = device.attach_port(Arc::new(Signal::default()))?;
                Ok(Driver {
                    port,
                    ring: Ring::without_kernel(),
                    room_epoch: 0,
                    is_background: nth == setup.clients,
                    _seat: seat,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Server { device, ports, work, next_tick: None })
    }

    /// The targets of a table; `is_live`: another one is active.
    pub fn build(&self, setup: &Setup, text: &str, is_live: bool) -> Result<LoadedTable> {
        let geometry = match setup.engine {
            Engine::Pcache { segment_bytes, .. } => {
                Some(Geometry { segment_bytes, device_bytes_min: 0 })
            }
            _ => None,
        };
        let options = BuildOptions {
            force_format: false,
            is_live,
            attach_id: setup.seed << 16 | self.attaches,
            geometry,
            // Most servers serve before they have replayed the log.
            replay: [None, Some(1), Some(5), Some(40)][(setup.seed + self.attaches) as usize % 4]
                .map(|slice| ReplayPace { at_once_max: 0, slice }),
            progress: Arc::default(),
        };
        build(&Table::parse(text)?, self, &options)
    }

    /// The server of `self` has died: of the I/O under way, some still happens.
    pub fn end_io(&self, server: &mut Server, prng: &mut Prng) {
        for driver in &mut server.ports {
            for disk in self.disks() {
                let happens = prng.below(disk.held(&driver.ring) as u64 + 1);
                for _ in 0..happens {
                    disk.step(&mut driver.ring, prng);
                }
            }
        }
        self.disks().iter().for_each(|disk| disk.abandon());
    }

    /// The disks that the device is made of.
    pub fn disks(&self) -> Vec<Arc<SimDisk>> {
        let ssd = self.is_on_disk.then(|| self.ssd.clone());
        let aside = self.cuts.map(|_| self.aside.clone());
        let meta = self.has_meta.then(|| self.meta.clone());
        std::iter::once(self.disk.clone()).chain(ssd).chain(aside).chain(meta).collect()
    }

    /// What all of the device reads as without its cache, of which the power cut left `disk`.
    pub fn image(&self, disk: &SimDisk) -> Vec<u8> {
        let Some((from, to)) = self.cuts else { return disk.image() };
        let mut image = self.aside.image();
        image[from..to].copy_from_slice(&disk.image());
        image
    }

    /// All data in memory is lost; `pmem` is the state of the cache device at that moment.
    pub fn lose_power(&mut self, pmem: &SimPmem, prng: &mut Prng) {
        self.pmem = Arc::new(pmem.crash(prng));
        let mut after = |disk: &SimDisk| {
            let left = disk.crash(prng);
            left.seed(prng.next_u64());
            disk.abandon();
            Arc::new(left)
        };
        self.disk = after(&self.disk);
        if self.is_on_disk {
            self.ssd = after(&self.ssd);
        }
        if self.has_meta {
            self.meta = after(&self.meta);
        }
        if self.cuts.is_some() {
            self.aside = after(&self.aside);
        }
        self.prepare_flushes();
        self.forget_shared();
    }

    pub fn forget_shared(&mut self) {
        let mut shared = self.shared.lock().unwrap();
        let boot = shared.boot() + 1;
        *shared = SharedWords::private(shared.words().len()).in_boot(boot);
    }

    /// Shared memory.
    pub fn shared(&self) -> SharedWords {
        self.shared.lock().unwrap().clone()
    }

    /// The server died when the cache was `pmem` and shared memory `words`.
    pub fn go_back(&mut self, pmem: &SimPmem, words: &[u64]) {
        self.pmem = Arc::new(pmem.crash_with(|_, words| words));
        let mut shared = self.shared.lock().unwrap();
        let left = SharedWords::private(words.len()).in_boot(shared.boot());
        left.words().iter().zip(words).for_each(|(to, from)| to.store(*from, Ordering::SeqCst));
        *shared = left;
    }
}

impl Server {
    /// Dies with all requests in flight, as a process does, without any cleanup.
    pub fn die(self) {
        // The unwinding code leaves its data in any state.
        let died = catch_unwind(AssertUnwindSafe(move || {
            let _server = self;
            resume_unwind(Box::new("killed"));
        }));
        assert!(died.is_err());
    }
}
