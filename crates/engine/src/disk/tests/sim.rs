//! Tests of the malicious disk: it does everything that it may do, and no more.

use std::collections::BTreeSet;

use super::conformance::{SIZE, check_all};
use super::{bare, io, pattern, read, transfer, write};
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo, Effect, Fault, Ring, SimDisk};
use crate::error::Status;
use crate::prng::Prng;
use crate::sync::Arc;

fn sim(size: u64) -> (Arc<SimDisk>, Arc<dyn Disk>, Ring) {
    let disk = Arc::new(SimDisk::new(size, 512));
    (disk.clone(), disk, Ring::without_kernel())
}

/// Starts a write of sectors full of `byte`.
fn start(disk: &Arc<dyn Disk>, ring: &mut Ring, sector: u64, count: usize, byte: u8) {
    let buffer = Buffer::from_bytes(&vec![byte; count * 512]);
    disk.start(transfer(disk, Op::Write, sector * 512, buffer, byte.into()), ring);
}

/// The first byte of each sector.
fn first_bytes(image: &[u8]) -> Vec<u8> {
    image.chunks(512).map(|sector| sector[0]).collect()
}

/// All that a crash may leave, by trying all choices.
fn all_crashes(disk: &SimDisk) -> BTreeSet<Vec<u8>> {
    let mut found = BTreeSet::new();
    let mut choices: Vec<(usize, usize)> = Vec::new();
    loop {
        let mut depth = 0;
        let left = disk.crash_with(|_, options| {
            if depth == choices.len() {
                choices.push((0, options));
            }
            depth += 1;
            choices[depth - 1].0
        });
        assert!(left.image() == left.durable_image());
        found.insert(first_bytes(&left.image()));
        while let Some((choice, options)) = choices.pop() {
            if choice + 1 < options {
                choices.push((choice + 1, options));
                break;
            }
        }
        if choices.is_empty() {
            return found;
        }
    }
}

#[test]
fn sim_disk_conforms() {
    let (_, disk, mut ring) = sim(SIZE);
    check_all(&disk, &mut ring);
}

#[test]
fn a_crash_tears_what_was_not_flushed() {
    let (sim, disk, mut ring) = sim(4 * 512);
    write(&disk, &mut ring, 0, &[1; 1024]).unwrap();
    bare(&disk, &mut ring, Op::Flush, 0, 0).unwrap();
    write(&disk, &mut ring, 512, &[2; 1024]).unwrap();
    write(&disk, &mut ring, 1024, &[3; 512]).unwrap();
    let expected: BTreeSet<Vec<u8>> =
        [[1, 1, 0, 0], [1, 2, 0, 0], [1, 1, 2, 0], [1, 2, 2, 0], [1, 1, 3, 0], [1, 2, 3, 0]]
            .map(|bytes| bytes.to_vec())
            .into();
    assert_eq!(all_crashes(&sim), expected);
    assert_eq!(first_bytes(&sim.image()), [1, 2, 3, 0]);
    assert_eq!(first_bytes(&sim.durable_image()), [1, 1, 0, 0]);
    let mut prng = Prng::new(1);
    let by_chance = (0..200).map(|_| first_bytes(&sim.crash(&mut prng).image())).collect();
    assert_eq!(expected, by_chance);
    assert_eq!(first_bytes(&sim.crash_with(|_, options| options - 1).image()), [1, 2, 3, 0]);
}

#[test]
fn the_first_choice_is_durable_and_the_last_is_newest() {
    let (sim, disk, mut ring) = sim(512);
    for byte in [1, 2, 1, 0] {
        write(&disk, &mut ring, 0, &[byte; 512]).unwrap();
    }
    let mut counts = Vec::new();
    let first = sim.crash_with(|sector, options| {
        counts.push((sector, options));
        0
    });
    let last = sim.crash_with(|_, options| options - 1);
    assert_eq!((first_bytes(&first.image()), first_bytes(&last.image())), (vec![0], vec![0]));
    assert_eq!(counts, [(0, 4)]);
    assert_eq!(all_crashes(&sim), [vec![0], vec![1], vec![2]].into());
}

#[test]
fn a_held_write_may_be_on_the_medium_already() {
    let (sim, disk, mut ring) = sim(2 * 512);
    sim.hold(true);
    start(&disk, &mut ring, 0, 2, 7);
    assert_eq!(first_bytes(&sim.image()), [0, 0]);
    assert_eq!(all_crashes(&sim).len(), 4);
    assert!(sim.complete_one(0, &mut ring));
    assert_eq!(first_bytes(&sim.image()), [7, 7]);
    assert_eq!(ring.pop_completed().unwrap().result, Ok(()));
    assert!(!sim.complete_one(0, &mut ring));
}

#[test]
fn a_flush_covers_what_completed_before_it_started() {
    let (sim, disk, mut ring) = sim(3 * 512);
    sim.hold(true);
    start(&disk, &mut ring, 0, 1, 1);
    sim.complete_all(&mut ring);
    start(&disk, &mut ring, 1, 1, 2);
    disk.start(io(&disk, Op::Flush, 0, 0, Buffer::empty(), 0), &mut ring);
    start(&disk, &mut ring, 2, 1, 3);
    // In flight when the flush starts, completed before the flush does.
    assert!(sim.complete_one(0, &mut ring));
    assert!(sim.complete_one(0, &mut ring));
    sim.complete_all(&mut ring);
    let left = all_crashes(&sim);
    assert!(left.iter().all(|bytes| bytes[0] == 1));
    assert_eq!(left.len(), 4, "the other two may be lost: {left:?}");
}

#[test]
fn overlapping_writes_take_effect_in_the_order_of_completion() {
    let (sim, disk, mut ring) = sim(512);
    sim.hold(true);
    start(&disk, &mut ring, 0, 1, 1);
    start(&disk, &mut ring, 0, 1, 2);
    assert!(sim.complete_one(1, &mut ring));
    assert!(sim.complete_one(0, &mut ring));
    assert_eq!(first_bytes(&sim.image()), [1]);
    assert_eq!(all_crashes(&sim), [vec![0], vec![1], vec![2]].into());
}

#[test]
fn each_ring_gets_its_own_back() {
    let (sim, disk, mut ring) = sim(4 * 512);
    let mut other = Ring::without_kernel();
    sim.hold(true);
    start(&disk, &mut ring, 0, 1, 1);
    start(&disk, &mut other, 1, 1, 2);
    start(&disk, &mut other, 2, 1, 3);
    assert_eq!((sim.held(&ring), sim.held(&other)), (1, 2));
    let mut prng = Prng::new(3);
    while sim.step(&mut other, &mut prng) {}
    let mut tokens = [other.pop_completed().unwrap().token, other.pop_completed().unwrap().token];
    tokens.sort_unstable();
    assert_eq!(tokens, [2, 3]);
    assert!(ring.pop_completed().is_none());
    sim.abandon();
    assert_eq!(sim.held(&ring), 0);
}

#[test]
fn faults_hit_what_they_name() {
    let (sim, disk, mut ring) = sim(8 * 512);
    sim.load_image(&pattern(8 * 512, 1));
    let fail = Fault::new(Effect::Fail(Status::Io)).of(Op::Write).within(1024..1536);
    sim.inject(fail.after(1).times(2));
    let mut write_at = |sector: u64| write(&disk, &mut ring, sector * 512, &[1; 512]);
    assert_eq!(write_at(2), Ok(()), "skipped");
    assert_eq!(write_at(3), Ok(()), "outside");
    assert_eq!(write_at(2), Err(Status::Io));
    assert_eq!(write_at(2), Err(Status::Io));
    assert_eq!(write_at(2), Ok(()), "over");

    sim.inject(Fault::new(Effect::Fail(Status::Timeout)).of(Op::Read));
    assert_eq!(read(&disk, &mut ring, 0, 512), Err(Status::Timeout));
    assert_eq!(write(&disk, &mut ring, 0, &[2; 512]), Ok(()));
    sim.heal();
    assert_eq!(read(&disk, &mut ring, 0, 512).unwrap(), [2; 512]);
}

#[test]
fn lies_are_told_with_success() {
    let (sim, disk, mut ring) = sim(8 * 512);
    let once = |effect, op| sim.inject(Fault::new(effect).of(op).times(1));
    once(Effect::Lose, Op::Write);
    write(&disk, &mut ring, 0, &[1; 512]).unwrap();
    assert_eq!(first_bytes(&sim.image())[..2], [0, 0]);

    once(Effect::Misdirect(1024), Op::Write);
    write(&disk, &mut ring, 0, &[2; 512]).unwrap();
    assert_eq!(first_bytes(&sim.image())[..4], [0, 0, 2, 0]);

    once(Effect::Misdirect(1024), Op::Read);
    assert_eq!(read(&disk, &mut ring, 512, 512).unwrap(), [2; 512]);

    once(Effect::Corrupt(1030), Op::Read);
    let mut expected = vec![2; 512];
    expected[6] = 3;
    assert_eq!(read(&disk, &mut ring, 1024, 512).unwrap(), expected);
    assert_eq!(read(&disk, &mut ring, 1024, 512).unwrap(), [2; 512]);
}

#[test]
fn a_torn_write_fails_with_some_sectors_written() {
    let (sim, disk, mut ring) = sim(64 * 512);
    sim.inject(Fault::new(Effect::Tear(Status::Io)).of(Op::Write));
    assert_eq!(write(&disk, &mut ring, 0, &[1; 64 * 512]), Err(Status::Io));
    let written = first_bytes(&sim.image()).iter().filter(|byte| **byte == 1).count();
    assert!((10..54).contains(&written), "{written}");
}

#[test]
fn a_stuck_write_waits_for_its_release() {
    let (sim, disk, mut ring) = sim(512);
    sim.inject(Fault::new(Effect::Stick).of(Op::Write).times(1));
    start(&disk, &mut ring, 0, 1, 1);
    sim.complete_all(&mut ring);
    assert!(ring.pop_completed().is_none());
    assert_eq!(read(&disk, &mut ring, 0, 512).unwrap(), [0; 512]);
    sim.heal();
    sim.complete_all(&mut ring);
    assert_eq!(ring.pop_completed().unwrap().result, Ok(()));
    assert_eq!(read(&disk, &mut ring, 0, 512).unwrap(), [1; 512]);
}

#[test]
fn a_failed_flush_loses_data_for_ever() {
    let (sim, disk, mut ring) = sim(256 * 512);
    write(&disk, &mut ring, 0, &[1; 256 * 512]).unwrap();
    sim.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Err(Status::Io));
    assert_eq!(bare(&disk, &mut ring, Op::Flush, 0, 0), Ok(()));
    let visible = first_bytes(&sim.image());
    let durable = first_bytes(&sim.durable_image());
    let count = |seen: u8, kept: u8| {
        visible.iter().zip(&durable).filter(|pair| *pair == (&seen, &kept)).count()
    };
    assert!(count(1, 1) > 80, "made durable after all, by this flush or the next");
    assert!(count(0, 0) > 30, "gone");
    assert!(count(1, 0) > 30, "readable, but a crash takes it");
    assert_eq!(count(0, 1), 0);
    assert_eq!(all_crashes_are(&sim, &durable), 1);
}

/// The number of different states that a crash may leave, of which `expected` is one.
fn all_crashes_are(sim: &SimDisk, expected: &[u8]) -> usize {
    let all = all_crashes(sim);
    assert!(all.contains(expected));
    all.len()
}

/// Random histories: after a crash, the content of each sector was written at or after the last
/// flush that covered it.
#[test]
fn random_histories_keep_the_contract() {
    for seed in 0..300 {
        let mut prng = Prng::new(seed);
        let (sim, disk, mut ring) = sim(4 * 512);
        sim.hold(true);
        // For each sector, all possible contents, oldest first; a flush has made the first one
        // durable.
        let mut allowed: Vec<Vec<u8>> = vec![vec![0]; 4];
        let mut next_byte = 0u8;
        for _ in 0..40 {
            match prng.below(6) {
                0..3 => {
                    let sector = prng.below(4);
                    let count = 1 + prng.below(4 - sector) as usize;
                    next_byte += 1;
                    start(&disk, &mut ring, sector, count, next_byte);
                    for versions in &mut allowed[sector as usize..][..count] {
                        versions.push(next_byte);
                    }
                }
                3 | 4 => {
                    sim.step(&mut ring, &mut prng);
                }
                _ => {
                    sim.complete_all(&mut ring);
                    disk.start(io(&disk, Op::Flush, 0, 0, Buffer::empty(), 0), &mut ring);
                    sim.complete_all(&mut ring);
                    for (versions, now) in allowed.iter_mut().zip(first_bytes(&sim.image())) {
                        assert!(versions.contains(&now));
                        *versions = vec![now];
                    }
                }
            }
            while let Some(DiskIo { result, .. }) = ring.pop_completed() {
                result.unwrap();
            }
            let left = first_bytes(&sim.crash(&mut prng).image());
            for (found, versions) in left.iter().zip(&allowed) {
                assert!(versions.contains(found), "seed {seed}: {left:?} of {allowed:?}");
            }
        }
        sim.abandon();
    }
}
