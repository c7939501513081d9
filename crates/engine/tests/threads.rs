//! Many threads on one small cache, with write-back and collection under way: everybody reads
//! what they wrote, and in the end the backing device has all of it.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use udm::device::{Device, LoadedTable};
use udm::disk::RamDisk;
use udm::local::{Clock, Local};
use udm::pcache::layout::Geometry;
use udm::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::prng::Prng;
use udm::shm::SharedWords;
use udm::units::Nanos;

const THREADS: u64 = 5;
const WRITES: usize = 3000;
/// Bytes of the device that belong to one thread; no multiple of a region.
const OWN: u64 = 1 << 20;

/// Real time, fast enough that nothing waits for seconds to pass.
struct Fast(std::time::Instant);

impl Clock for Fast {
    fn now(&mut self) -> Nanos {
        self.0.elapsed().as_nanos() as u64 * 100
    }

    fn skip_to(&mut self, _: Nanos) -> bool {
        false
    }
}

/// Writes and reads one thread's part of the device, and returns what it should hold.
fn work(device: &Arc<Device>, thread: u64) -> Vec<u8> {
    let mut local = Local::without_kernel(device).unwrap();
    let mut prng = Prng::new(thread);
    let mut model = vec![0; OWN as usize];
    let mut into = vec![0; 16 << 10];
    for nth in 0..WRITES {
        let len = (1 + prng.below(32)) * 512;
        let at = prng.below((OWN - len) / 512) * 512;
        let part = &mut model[at as usize..(at + len) as usize];
        if prng.one_in(3) {
            let into = &mut into[..len as usize];
            local.read_at(into, thread * OWN + at).unwrap();
            assert!(into == part, "thread {thread}, operation {nth}: {len} bytes at {at}");
        } else {
            prng.fill(part);
            local.write_at(part, thread * OWN + at, prng.one_in(8)).unwrap();
        }
    }
    model
}

#[test]
fn threads_share_a_small_cache() {
    let geometry = Geometry { segment_bytes: 64 << 10, device_bytes_min: 0 };
    let pmem = Arc::new(SimPmem::new(20480 + 64 * geometry.segment_bytes, Persistence::Cpu));
    let options = OpenOptions { geometry, ..OpenOptions::new(1) };
    let shared = SharedWords::private(shared_words(options.stripes));
    let disk = Arc::new(RamDisk::new(THREADS * OWN, 512));
    let args = TableArgs::parse(&["c", "b", "0"]).unwrap();
    let backing = disk.clone();
    let cache = Pcache::open(args, THREADS * OWN, pmem, backing, shared, &options).unwrap();
    let table = LoadedTable::single(Arc::new(cache), THREADS * OWN);
    let device = Device::with_table("busy", table).unwrap();
    let is_over = AtomicBool::new(false);
    let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let clock = Fast(std::time::Instant::now());
            let mut keeper = Local::without_kernel(&device).unwrap().with_background(clock);
            while !is_over.load(Ordering::Relaxed) || device.dirty().bytes > 0 {
                device.set_draining(is_over.load(Ordering::Relaxed));
                keeper.turn();
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        let device = &device;
        let workers: Vec<_> =
            (0..THREADS).map(|thread| scope.spawn(move || work(device, thread))).collect();
        let models = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        is_over.store(true, Ordering::Relaxed);
        models
    });
    for (thread, model) in models.iter().enumerate() {
        let mut found = vec![0; OWN as usize];
        disk.peek(thread as u64 * OWN, &mut found);
        assert!(found == *model, "the part of thread {thread} is not on the backing device");
    }
}
