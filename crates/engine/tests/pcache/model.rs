//! Random histories against an array of sectors: every read, and after crashes the promise that
//! no sector is older than its last flushed version.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::pmem::Persistence;
use udm::prng::Prng;
use udm::units::SECOND;

use crate::fixture::{Fixture, Setup};
use crate::sectors::{Model, SECTOR};

fn history(seed: u64, setup: Setup, steps: usize) {
    let mut prng = Prng::new(seed);
    let sectors = (setup.backing_bytes as usize) / SECTOR;
    let mut fixture = Fixture::new(setup);
    let mut model = Model::new(sectors);
    fixture.open();
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
                fixture.run(bio).status.unwrap();
                if fua {
                    model.flushed(first..first + count);
                }
            }
            50..75 => assert_eq!(
                fixture.read(offset, count * SECTOR),
                model.current(first, count),
                "{why}: read {first}+{count}"
            ),
            75..80 => {
                let op = if prng.one_in(2) { Op::Discard } else { Op::WriteZeroes };
                model.write(first, count, true);
                fixture.zero(op, offset, (count * SECTOR) as u64, false);
            }
            80..86 => {
                fixture.flush();
                model.flushed(0..sectors);
            }
            86..92 => fixture.tick(SECOND * prng.below(3)),
            92..94 => {
                fixture.remove();
                fixture.open();
            }
            94..96 => {
                fixture.kill();
                fixture.open();
            }
            96..99 => {
                fixture.power_cut(&mut prng);
                fixture.try_open(false).unwrap_or_else(|error| panic!("{why}: {error}"));
                let found = fixture.content();
                model.adopt(&found, &why);
            }
            _ => {
                fixture.drain();
                let image = fixture.disk.image();
                assert!(image == model.current(0, sectors), "{why}: drained origin differs");
            }
        }
    }
    assert!(fixture.content() == model.current(0, sectors), "seed {seed}: at the end");
    fixture.drain();
    assert!(fixture.disk.image() == model.current(0, sectors), "seed {seed}: drained");
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

#[test]
fn random_histories_that_go_on_before_the_log_is_replayed() {
    for seed in 400..424 {
        let tables = ["C B 0", "C B 2 data_crc true", "C B 2 retention fifo"];
        history(seed, Setup::small().table(tables[seed as usize % 3]).late(), 300);
    }
}
