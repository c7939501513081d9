//! When write-back works: it waits for age, fill or idleness, and does not write data that is
//! overwritten meanwhile.

use udm::bio::Op;
use udm::prng::Prng;
use udm::units::{Nanos, SECOND};

use crate::fixture::{Fixture, Setup};

const BLOCK: u64 = 4096;
/// Room for data of the small setup.
const ROOM: u64 = 24 * (52 << 10);

fn fixture(table: &'static str) -> Fixture {
    let mut fixture = Fixture::new(Setup::small().table(table));
    fixture.open();
    fixture
}

/// The writes to the backing device so far, in order: the block, and its first byte.
fn written(fixture: &Fixture) -> Vec<(u64, u8)> {
    let writes = fixture.history.iter().filter(|(op, ..)| *op == Op::Write);
    writes
        .flat_map(|(_, offset, data)| {
            let blocks = data.chunks(BLOCK as usize).enumerate();
            blocks.map(move |(nth, block)| (offset / BLOCK + nth as u64, block[0]))
        })
        .collect()
}

/// A client at work, which keeps write-back from taking the time for idle.
fn at_work(fixture: &mut Fixture, nanos: Nanos) {
    for _ in 0..nanos / (SECOND / 2) {
        fixture.read(11 << 20, 512);
        fixture.tick(SECOND / 2);
    }
}

#[test]
fn what_is_overwritten_within_the_age_is_written_once() {
    let mut fixture = fixture("C B 0");
    for round in 1..=9_u8 {
        for block in 0..4 {
            fixture.write(block * BLOCK, &[round; BLOCK as usize], false);
        }
        fixture.tick(SECOND / 2);
    }
    assert_eq!(written(&fixture), [], "it waits for more");
    at_work(&mut fixture, 8 * SECOND);
    assert_eq!(written(&fixture), [(0, 9), (1, 9), (2, 9), (3, 9)]);
    assert_eq!(fixture.fact("dirty_bytes"), 0);
}

/// The batch ends long before the newer versions, which are found anyway.
#[test]
fn what_was_overwritten_later_than_the_batch_goes_is_left_out() {
    let mut fixture = fixture("C B 0 high_watermark 10");
    let mut prng = Prng::new(5);
    // Eight blocks, written fifty times as much as a gentle share of the cache takes in one go.
    for step in 0..1600_u64 {
        fixture.write(prng.below(8) * BLOCK, &[step as u8; BLOCK as usize], false);
        if step % 32 == 0 {
            fixture.tick(SECOND / 20);
        }
    }
    let count = written(&fixture).len();
    assert!((1..400).contains(&count), "{count} blocks written back of 1600 that came");
    assert!(fixture.fact("dirty_bytes") < ROOM / 2);
    let content = fixture.read(0, 8 * BLOCK as usize);
    fixture.drain();
    assert_eq!(fixture.disk.image()[..content.len()], content);
}

#[test]
fn no_dirty_data_gets_much_older_than_the_age() {
    for (table, age) in [("C B 0", 10), ("C B 0 max_age 3000", 3)] {
        let mut fixture = fixture(table);
        let mut written_at = Vec::new();
        // A block of its own every half second, for a minute, and a client that never rests.
        for step in 0..120_u64 {
            fixture.write(step * BLOCK, &[1; BLOCK as usize], false);
            written_at.push(fixture.now);
            at_work(&mut fixture, SECOND / 2);
            for (block, _) in written(&fixture) {
                written_at[block as usize] = Nanos::MAX;
            }
            let oldest = written_at.iter().min().copied().unwrap_or(Nanos::MAX);
            let bound = (age + age / 8 + 2) * SECOND;
            assert!(fixture.now.saturating_sub(oldest) <= bound, "{table}: at {}", fixture.now);
        }
        let count = written(&fixture).len();
        assert!(count > 90 && count < 120, "{table}: {count} written, each once");
    }
}

#[test]
fn much_dirty_data_starts_it_at_the_mark() {
    for (table, percent) in [("C B 0", 40), ("C B 0 high_watermark 20", 20)] {
        let mut fixture = fixture(table);
        let mut started_at = None;
        for block in 0..ROOM * 60 / 100 / BLOCK {
            fixture.write(block * BLOCK, &[2; BLOCK as usize], false);
            fixture.tick(SECOND / 1000);
            if started_at.is_none() && !written(&fixture).is_empty() {
                started_at = Some(block * BLOCK);
            }
        }
        let started_at = started_at.expect("it begins") * 100 / ROOM;
        assert!((percent - 1..=percent + 4).contains(&started_at), "{table}: at {started_at} %");
    }
}

#[test]
fn idle_clients_have_nothing_against_it() {
    let mut fixture = fixture("C B 0");
    fixture.write(0, &[3; BLOCK as usize], false);
    at_work(&mut fixture, 3 * SECOND);
    assert_eq!(written(&fixture), []);
    fixture.tick(SECOND / 2);
    assert_eq!(written(&fixture), [], "the device is not idle yet");
    fixture.tick(SECOND);
    assert_eq!(written(&fixture), [(0, 3)]);
}

#[test]
fn a_drain_waits_for_nothing() {
    let mut fixture = fixture("C B 0");
    fixture.write(0, &[4; BLOCK as usize], false);
    at_work(&mut fixture, SECOND);
    udm::target::Target::set_draining(fixture.target(), true);
    fixture.tick(0);
    assert_eq!(written(&fixture), [(0, 4)]);
    assert_eq!(fixture.fact("dirty_bytes"), 0);
}

/// A flush between two versions of a block: the older one belongs to a state that a power cut could
/// have left, so it is written; and in its own batch.
#[test]
fn what_a_flush_made_durable_is_written_although_it_was_overwritten() {
    let mut fixture = fixture("C B 0");
    for (block, byte) in [(0, 1), (1, 1)] {
        fixture.write(block * BLOCK, &[byte; BLOCK as usize], false);
    }
    fixture.flush();
    fixture.write(0, &[2; BLOCK as usize], false);
    fixture.write(2 * BLOCK, &[2; BLOCK as usize], false);
    fixture.flush();
    at_work(&mut fixture, 12 * SECOND);
    assert_eq!(written(&fixture), [(0, 1), (1, 1), (0, 2), (2, 2)]);
}

/// The older version is logged, the newer one only in memory: who leaves out the older one must
/// log the newer one first, or a power cut brings back what was there before both.
#[test]
fn what_is_left_out_has_a_newer_version_that_survives() {
    for cut_after in 1..12 {
        let mut fixture = fixture("C B 0");
        fixture.write(0, &[1; BLOCK as usize], true);
        fixture.drain();
        // Logged, but not flushed by a client; another block gives the batch something to write.
        fixture.write(0, &[2; BLOCK as usize], false);
        fixture.write(BLOCK, &[2; BLOCK as usize], false);
        fixture.tick(SECOND);
        let is_logged = fixture.fact("dirty_bytes") > 0;
        assert!(is_logged);
        fixture.write(0, &[3; BLOCK as usize], false);
        fixture.catches_cut = true;
        fixture.pmem.arm_cut(cut_after);
        fixture.drain();
        let Some((cut, image)) = fixture.cut.take() else { continue };
        let mut left = Fixture::over(
            fixture.setup.clone(),
            std::sync::Arc::new(cut.crash(&mut Prng::new(cut_after))),
            std::sync::Arc::new(udm::disk::RamDisk::new(fixture.setup.backing_bytes, 512)),
        );
        left.disk.load_image(&image);
        left.open();
        let found = left.read(0, 1)[0];
        left.drain();
        assert_eq!(left.disk.image()[0], found, "cut {cut_after}: unlike the read");
    }
}

/// While clients are at work, a tick passes a bounded stretch of the log, and write-back rests in
/// proportion to how long it took.
#[test]
fn it_rests_between_batches_while_clients_are_at_work() {
    let mut fixture = fixture("C B 0 high_watermark 1");
    for block in 0..8 {
        fixture.write(block * BLOCK, &[1; BLOCK as usize], true);
    }
    fixture.is_held = true;
    fixture.tick(SECOND / 1000);
    assert_eq!(fixture.held.len(), 1, "one batch: each FUA write is one");
    // It takes a fifth of a second; with a share of little more than a quarter, it rests for as
    // long as it may.
    fixture.now += SECOND / 5;
    fixture.release();
    fixture.is_held = true;
    fixture.write(0, &[2; BLOCK as usize], false);
    fixture.tick(SECOND / 1000);
    assert!(fixture.held.is_empty(), "it rests");
    fixture.tick(SECOND / 5);
    assert!(fixture.held.is_empty(), "it still rests");
    fixture.tick(SECOND / 5);
    assert_eq!(fixture.held.len(), 1, "and goes on");
}
