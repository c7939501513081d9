//! Several threads on one device, with the background on its own: no reader ever sees a sector
//! return to an older version, or a version older than the one that was complete when it began.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use udm::device::{Device, LoadedTable};
use udm::local::{Local, ManualClock};
use udm::prng::Prng;
use udm::units::SECOND;

use crate::fixture::{Fixture, Setup};

const SECTORS: usize = 4096;
/// Writers of one group take turns, so that its versions have an order.
const GROUP: usize = 64;

struct Sector {
    issued: AtomicU64,
    completed: AtomicU64,
}

struct Model {
    sectors: Vec<Sector>,
    groups: Vec<Mutex<()>>,
}

fn offset_of(sector: usize) -> u64 {
    // Half of them at the border of two regions.
    let base = if sector < SECTORS / 2 { 0 } else { 8192 - 3 * SECTORS / 4 };
    (base + sector) as u64 * 512
}

fn play(model: &Model, local: &mut Local, seed: u64, rounds: usize) {
    let mut prng = Prng::new(seed);
    let mut data = vec![0; GROUP * 512];
    let mut seen = vec![0_u64; SECTORS];
    for round in 0..rounds {
        // A few groups are hot.
        let groups = if prng.one_in(2) { 4 } else { (SECTORS / GROUP) as u64 };
        let group = prng.below(groups) as usize;
        let within = prng.below(GROUP as u64) as usize;
        let count = 1 + prng.below((GROUP - within) as u64) as usize;
        let first = group * GROUP + within;
        let range = &model.sectors[first..first + count];
        let bytes = &mut data[..count * 512];
        if prng.one_in(2) {
            let _turn = model.groups[group].lock().unwrap();
            for (sector, bytes) in range.iter().zip(bytes.chunks_mut(512)) {
                let version = sector.issued.fetch_add(1, Ordering::SeqCst) + 1;
                bytes.chunks_mut(8).for_each(|word| word.copy_from_slice(&version.to_le_bytes()));
            }
            local.write_at(bytes, offset_of(first), prng.one_in(16)).unwrap();
            for (sector, bytes) in range.iter().zip(bytes.chunks(512)) {
                let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                sector.completed.store(version, Ordering::SeqCst);
            }
        } else {
            let before: Vec<u64> =
                range.iter().map(|sector| sector.completed.load(Ordering::SeqCst)).collect();
            local.read_at(bytes, offset_of(first)).unwrap();
            for (nth, bytes) in bytes.chunks(512).enumerate() {
                let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                let why = format!("seed {seed}, round {round}, sector {}", first + nth);
                assert!(bytes.chunks(8).all(|word| word == &bytes[..8]), "{why}: torn");
                assert!(version >= before[nth], "{why}: {version} after {}", before[nth]);
                assert!(version >= seen[first + nth], "{why}: went back");
                assert!(version <= range[nth].issued.load(Ordering::SeqCst), "{why}: invented");
                seen[first + nth] = version;
            }
        }
        if prng.one_in(64) {
            local.flush().unwrap();
        }
    }
}

fn together(table: &'static str, seed: u64, threads: u64, rounds: usize) {
    let mut fixture = Fixture::new(Setup::small().table(table));
    fixture.open();
    let target = Arc::new(fixture.pcache.take().expect("open"));
    let loaded = LoadedTable::single(target.clone(), fixture.setup.backing_bytes);
    let device = Device::with_table("together", loaded).unwrap();
    let model = Model {
        sectors: (0..SECTORS)
            .map(|_| Sector { issued: AtomicU64::new(0), completed: AtomicU64::new(0) })
            .collect(),
        groups: (0..SECTORS / GROUP).map(|_| Mutex::new(())).collect(),
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let players: Vec<_> = (0..threads)
            .map(|nth| {
                let (model, device) = (&model, &device);
                scope.spawn(move || {
                    let mut local = Local::without_kernel(device).unwrap();
                    play(model, &mut local, seed * 100 + nth, rounds);
                })
            })
            .collect();
        let (device, is_over) = (&device, &is_over);
        let background = scope.spawn(move || {
            let clock = ManualClock::default();
            let mut local = Local::without_kernel(device).unwrap().with_background(clock.clone());
            while !is_over.load(Ordering::SeqCst) {
                clock.advance(SECOND / 50);
                device.events().work();
                local.turn();
                std::thread::yield_now();
            }
        });
        let results: Vec<_> = players.into_iter().map(|player| player.join()).collect();
        is_over.store(true, Ordering::SeqCst);
        background.join().unwrap();
        for result in results {
            result.unwrap();
        }
    });
    let mut local = Local::without_kernel(&device).unwrap();
    let mut bytes = [0; 512];
    for (nth, sector) in model.sectors.iter().enumerate() {
        local.read_at(&mut bytes, offset_of(nth)).unwrap();
        let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert_eq!(version, sector.completed.load(Ordering::SeqCst), "sector {nth} at the end");
    }
}

#[test]
fn threads_see_every_sector_go_forward_only() {
    for seed in 0..3 {
        together("C B 0", seed, 3, 3000);
    }
}

#[test]
fn threads_see_every_sector_go_forward_only_with_checksums() {
    together("C B 2 data_crc true", 10, 3, 2000);
}

#[test]
fn threads_see_every_sector_go_forward_only_in_fast_order() {
    together("C B 0 writeback_order fast", 20, 4, 2000);
}
