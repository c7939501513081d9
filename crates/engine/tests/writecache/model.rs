//! Random histories against an array of sectors: every read, and after crashes the promise that
//! no sector is older than its last flushed version.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::Disk;
use udm::prng::Prng;
use udm::units::SECOND;

use crate::fixture::Fixture;
use crate::sectors::{Model, SECTOR};

fn history(seed: u64, table: &str, steps: usize) {
    let mut prng = Prng::new(seed);
    let mut fixture = Fixture::new(table, 256 << 10, 2 << 20);
    let block = fixture.args().block_bytes as usize / SECTOR;
    let sectors = (fixture.origin.limits().size_bytes as usize) / SECTOR;
    let blocks = sectors / block;
    let mut model = Model::new(sectors);
    fixture.open();
    for step in 0..steps {
        let why = format!("{table}, seed {seed}, step {step}");
        let first = match prng.below(3) {
            0 => prng.below(16.min(blocks as u64)) as usize,
            1 => (blocks / 2 - 8) + prng.below(16) as usize,
            _ => prng.below(blocks as u64) as usize,
        };
        let longest = if prng.one_in(8) { 40 } else { 4 };
        let count = (1 + prng.below(longest) as usize).min(blocks - first) * block;
        let first = first * block;
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
            50..75 => assert!(
                fixture.read(offset, count * SECTOR) == model.current(first, count),
                "{why}: read {first}+{count}"
            ),
            75..80 => {
                let op = if prng.one_in(2) { Op::Discard } else { Op::WriteZeroes };
                model.write(first, count, true);
                fixture.zero(op, offset, (count * SECTOR) as u64);
            }
            80..86 => {
                fixture.flush();
                model.flushed(0..sectors);
            }
            86..92 => fixture.tick(SECOND * prng.below(3)),
            92..94 => {
                fixture.remove();
                model.flushed(0..sectors);
                if prng.one_in(2) {
                    fixture.power_cut(&mut prng);
                }
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
            _ => assert!(drained(&mut fixture) == model.current(0, sectors), "{why}: drained"),
        }
    }
    assert!(fixture.content() == model.current(0, sectors), "seed {seed}: at the end");
    assert!(drained(&mut fixture) == model.current(0, sectors), "seed {seed}: drained");
}

/// The origin's data when everything is written back.
fn drained(fixture: &mut Fixture) -> Vec<u8> {
    fixture.drain();
    fixture.origin.image()
}

#[test]
fn random_histories_with_crashes_keep_the_promises_in_mode_p() {
    for (nth, block_bytes) in [512, 1024, 2048, 4096].into_iter().enumerate() {
        for seed in 0..8 {
            history(seed * 10 + nth as u64, &format!("p O C {block_bytes} 0"), 400);
        }
    }
}

#[test]
fn random_histories_with_crashes_keep_the_promises_in_mode_s() {
    for (nth, block_bytes) in [512, 1024, 2048, 4096].into_iter().enumerate() {
        for seed in 0..8 {
            let table = format!("s O C {block_bytes} 2 pause_writeback 0");
            history(seed * 10 + nth as u64, &table, 400);
        }
    }
}

#[test]
fn random_histories_with_other_options() {
    for (nth, options) in [
        "2 autocommit_blocks 0",
        "2 max_age 500",
        "4 high_watermark 100 low_watermark 100",
        "4 high_watermark 0 low_watermark 0",
        "3 writeback_jobs 1 cleaner",
        "1 metadata_only",
    ]
    .into_iter()
    .enumerate()
    {
        for mode in ["p", "s"] {
            for seed in 0..4 {
                history(1000 + seed * 10 + nth as u64, &format!("{mode} O C 1024 {options}"), 300);
            }
        }
    }
}
