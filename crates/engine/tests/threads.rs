//! Many threads on one small cache, with write-back and collection under way: each thread reads
//! its own writes, and in the end the backing device has all of them.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use udm::build::{BuildOptions, NamedDevices, build};
use udm::device::Device;
use udm::disk::RamDisk;
use udm::local::{Clock, Local};
use udm::pcache::layout::Geometry;
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::prng::Prng;
use udm::table::Table;
use udm::units::{MIB, Nanos};

const THREADS: u64 = 5;
const OPERATIONS: u64 = 20_000;
/// Bytes of the device that belong to one thread; no multiple of a region.
const OWN: u64 = 1 << 20;

/// Real time, fast enough that waits for seconds are short.
struct Fast(Instant);

impl Clock for Fast {
    fn now(&mut self) -> Nanos {
        self.0.elapsed().as_nanos() as u64 * 100
    }

    fn skip_to(&mut self, _: Nanos) -> bool {
        false
    }
}

/// Sectors as operation `nth` writes them at `at`: where they belong, and by whom.
fn fill(at: u64, nth: u64, bytes: &mut [u8]) {
    for (sector, bytes) in (at / 512..).zip(bytes.chunks_exact_mut(512)) {
        for word in bytes.as_chunks_mut::<16>().0 {
            word[..8].copy_from_slice(&sector.to_le_bytes());
            word[8..].copy_from_slice(&nth.to_le_bytes());
        }
    }
}

/// Panics unless both are the same, with the data that was found.
fn compare(what: &str, at: u64, found: &[u8], expected: &[u8]) {
    let head = |bytes: &[u8]| {
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        (word(&bytes[..8]), word(&bytes[8..16]))
    };
    let pairs = found.chunks(512).zip(expected.chunks(512));
    for (sector, (found, expected)) in (at / 512..).zip(pairs) {
        assert!(
            found == expected,
            "{what}: sector {sector} should be {:?} (sector, operation), but is {:?}",
            head(expected),
            head(found)
        );
    }
}

/// Writes, zeroes and reads one thread's part of the device, and returns what it should hold.
/// Requests are multiples of `unit` bytes.
fn work(device: &Arc<Device>, thread: u64, unit: u64, seed: u64) -> Vec<u8> {
    let mut local = Local::without_kernel(device).unwrap();
    let mut prng = Prng::new(seed + thread);
    let mut model = vec![0; OWN as usize];
    let mut into = vec![0; 16 << 10];
    for nth in 0..OPERATIONS {
        let len = (1 + prng.below((16 << 10) / unit)) * unit;
        let from = prng.below((OWN - len) / unit) * unit;
        let part = &mut model[from as usize..(from + len) as usize];
        let at = thread * OWN + from;
        match prng.below(8) {
            0..3 => {
                let into = &mut into[..len as usize];
                local.read_at(into, at).unwrap();
                compare(&format!("operation {nth}"), at, into, part);
            }
            3 | 4 => {
                part.fill(0);
                local.write_zeroes(at, len, prng.one_in(8)).unwrap();
            }
            _ => {
                fill(at, nth, part);
                local.write_at(part, at, prng.one_in(8)).unwrap();
            }
        }
    }
    model
}

/// The device of a table over a small cache, `M` in memory or `S` on a disk, and its origin `O`.
/// The metadata of a `cache` is on `D`.
fn device(table: &str) -> (Arc<Device>, Arc<RamDisk>) {
    let geometry = Geometry { segment_bytes: 64 << 10, device_bytes_min: 0 };
    let pmem = SimPmem::new(20480 + 64 * geometry.segment_bytes, Persistence::Cpu);
    let origin = Arc::new(RamDisk::new(THREADS * OWN, 512));
    let mut devices = NamedDevices::new();
    devices.add_pmem("M", Arc::new(pmem));
    devices.add_disk("S", Arc::new(RamDisk::new(2 * MIB, 512)));
    devices.add_disk("D", Arc::new(RamDisk::new(MIB, 512)));
    devices.add_disk("O", origin.clone());
    let table = Table::parse(&format!("0 {} {table}", THREADS * OWN / 512)).unwrap();
    let geometry = Some(geometry);
    let options = BuildOptions { geometry, ..BuildOptions::named(1) };
    let table = build(&table, &devices, &options).unwrap();
    (Device::with_table("busy", table).unwrap(), origin)
}

fn share(table: &str, unit: u64, seed: u64) {
    // Shown when it fails.
    println!("{table}, seed {seed}");
    let (device, origin) = device(table);
    let is_over = AtomicBool::new(false);
    let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let clock = Fast(Instant::now());
            let mut shared_store = Local::without_kernel(&device).unwrap().with_background(clock);
            while !is_over.load(Ordering::Relaxed) || device.dirty().bytes > 0 {
                device.set_draining(is_over.load(Ordering::Relaxed));
                shared_store.turn();
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        let device = &device;
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| scope.spawn(move || work(device, thread, unit, seed)))
            .collect();
        let models: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        is_over.store(true, Ordering::Relaxed);
        models.into_iter().map(|model| model.unwrap()).collect()
    });
    println!("{}", device.status().join("; "));
    for (thread, model) in models.iter().enumerate() {
        let mut found = vec![0; OWN as usize];
        origin.peek(thread as u64 * OWN, &mut found);
        compare("on the origin", thread as u64 * OWN, &found, model);
    }
}

/// Each table, and what its requests are multiples of.
const PCACHE: [(&str, u64); 1] = [("pcache M O", 512)];
const WRITECACHE_IN_MEMORY: [(&str, u64); 2] =
    [("writecache p O M 512 0", 512), ("writecache p O M 4096 2 autocommit_blocks 16", 4096)];
const WRITECACHE_ON_A_DISK: [(&str, u64); 2] = [
    ("writecache s O S 512 4 autocommit_blocks 16 pause_writeback 0", 512),
    // Blocks that a power cut may tear.
    ("writecache s O S 4096 4 autocommit_blocks 16 pause_writeback 0 atomic_blocks false", 4096),
];
const CACHE: [(&str, u64); 2] =
    [("cache D S O 64 1 writeback default 0", 512), ("cache D S O 64 1 writethrough smq 0", 512)];

fn share_each(tables: &[(&str, u64)], seed: u64) {
    for (table, unit) in tables {
        share(table, *unit, seed);
    }
}

#[test]
fn threads_share_a_small_pcache() {
    share_each(&PCACHE, 0);
}

#[test]
fn threads_share_a_small_writecache_in_memory() {
    share_each(&WRITECACHE_IN_MEMORY, 0);
}

#[test]
fn threads_share_a_small_writecache_on_a_disk() {
    share_each(&WRITECACHE_ON_A_DISK, 0);
}

#[test]
fn threads_share_a_small_cache() {
    share_each(&CACHE, 0);
}

/// For `THREADS_SECONDS`, from `THREADS_SEED`: threads meet otherwise each time.
#[test]
#[ignore = "runs for a given time: scripts/soak.sh runs it"]
fn soak() {
    let number = |name: &str| std::env::var(name).ok().map(|word| word.parse::<u64>().unwrap());
    let end = Instant::now() + Duration::from_secs(number("THREADS_SECONDS").unwrap_or(10));
    let first = number("THREADS_SEED").unwrap_or(0);
    let mut seed = first;
    while Instant::now() < end {
        for tables in [&PCACHE[..], &WRITECACHE_IN_MEMORY, &WRITECACHE_ON_A_DISK, &CACHE] {
            share_each(tables, seed);
        }
        // Each thread has a seed of its own.
        seed += THREADS;
    }
    println!("threads: {} rounds over all tables from seed {first}", (seed - first) / THREADS);
}
