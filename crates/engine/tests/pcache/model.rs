//! Random histories against an array of sectors: every read, and after crashes the promise that
//! no sector is older than its last flushed version.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::pmem::Persistence;
use udm::prng::Prng;
use udm::units::SECOND;

use crate::world::{Setup, World};

const SECTOR: usize = 512;

/// Per sector: all versions since the last flushed one, oldest first; the last is the current.
struct Model {
    versions: Vec<Vec<u64>>,
    next: u64,
}

impl Model {
    fn new(sectors: usize) -> Model {
        Model { versions: vec![vec![0]; sectors], next: 1 }
    }

    /// A new version for a range; the bytes that carry it.
    fn write(&mut self, first: usize, count: usize, is_zero: bool) -> Vec<u8> {
        let mut data = Vec::with_capacity(count * SECTOR);
        for sector in first..first + count {
            let version = if is_zero { 0 } else { self.next };
            self.versions[sector].push(version);
            data.extend(content(sector, version));
        }
        self.next += 1;
        data
    }

    fn flushed(&mut self, sectors: std::ops::Range<usize>) {
        for versions in &mut self.versions[sectors] {
            let last = *versions.last().unwrap();
            *versions = vec![last];
        }
    }

    fn current(&self, first: usize, count: usize) -> Vec<u8> {
        (first..first + count)
            .flat_map(|sector| content(sector, *self.versions[sector].last().unwrap()))
            .collect()
    }

    /// After a crash: each sector shows one of its versions, and from now on that is the one.
    fn adopt(&mut self, found: &[u8], why: &str) {
        for (sector, bytes) in found.chunks(SECTOR).enumerate() {
            let versions = &mut self.versions[sector];
            let version = versions.iter().rev().find(|&&version| content(sector, version) == bytes);
            let Some(&version) = version else {
                panic!("{why}: sector {sector} is none of {versions:?}: {:?}", &bytes[..16]);
            };
            *versions = vec![version];
        }
    }
}

fn content(sector: usize, version: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if version != 0 {
        for pair in bytes.chunks_mut(16) {
            pair[..8].copy_from_slice(&(sector as u64).to_le_bytes());
            pair[8..].copy_from_slice(&version.to_le_bytes());
        }
    }
    bytes
}

fn history(seed: u64, setup: Setup, steps: usize) {
    let mut prng = Prng::new(seed);
    let sectors = (setup.backing_bytes as usize) / SECTOR;
    let mut world = World::new(setup);
    let mut model = Model::new(sectors);
    world.open();
    for step in 0..steps {
        let why = format!("seed {seed}, step {step}");
        let first = match prng.below(3) {
            0 => prng.below(64) as usize,
            1 => 8192 - 32 + prng.below(64) as usize,
            _ => prng.below(sectors as u64) as usize,
        };
        let longest = if prng.one_in(8) { 200 } else { 12 };
        let count = (1 + prng.below(longest) as usize).min(sectors - first);
        let offset = (first * SECTOR) as u64;
        match prng.below(100) {
            0..50 => {
                let fua = prng.one_in(8);
                let data = model.write(first, count, false);
                let bio = Bio::write(offset, Buffer::from_bytes(&data), fua, 0);
                world.run(bio).status.unwrap();
                if fua {
                    model.flushed(first..first + count);
                }
            }
            50..75 => assert_eq!(
                world.read(offset, count * SECTOR),
                model.current(first, count),
                "{why}: read {first}+{count}"
            ),
            75..80 => {
                let op = if prng.one_in(2) { Op::Discard } else { Op::WriteZeroes };
                model.write(first, count, true);
                world.zero(op, offset, (count * SECTOR) as u64, false);
            }
            80..86 => {
                world.flush();
                model.flushed(0..sectors);
            }
            86..92 => world.tick(SECOND * prng.below(3)),
            92..94 => {
                world.remove();
                world.open();
            }
            94..96 => {
                world.kill();
                world.open();
            }
            96..99 => {
                world.power_cut(&mut prng);
                world.try_open(false).unwrap_or_else(|error| panic!("{why}: {error}"));
                let found = world.content();
                model.adopt(&found, &why);
            }
            _ => {
                world.drain();
                let image = world.disk.image();
                assert!(image == model.current(0, sectors), "{why}: drained origin differs");
            }
        }
    }
    assert!(world.content() == model.current(0, sectors), "seed {seed}: at the end");
    world.drain();
    assert!(world.disk.image() == model.current(0, sectors), "seed {seed}: drained");
}

#[test]
fn random_histories_with_crashes_keep_the_promises() {
    for seed in 0..24 {
        history(seed, Setup::small(), 400);
    }
}

#[test]
fn random_histories_with_data_crc() {
    for seed in 100..112 {
        history(seed, Setup::small().table("C B 2 data_crc true"), 400);
    }
}

#[test]
fn random_histories_over_page_cache_media() {
    for seed in 200..212 {
        let setup = Setup { persistence: Persistence::Msync, ..Setup::small() };
        history(seed, setup, 300);
    }
}

#[test]
fn random_histories_in_fast_order_without_fills() {
    for seed in 300..308 {
        let table = "C B 2 data_crc false writeback_order fast read_fill never";
        history(seed, Setup::small().table(table), 400);
    }
}
