//! Devices that fail: the one that failed is named, the other blocks are written back, and a drain
//! can end.

use std::collections::BTreeSet;
use std::sync::Arc;

use udm::cache::metadata::load;
use udm::disk::{Disk, Effect, Fault, SimDisk};
use udm::error::Status;
use udm::target::{FactValue, Target};
use udm::units::SECOND;

use crate::fixture::{BLOCK, Fixture, disks};

const TABLE: &str = "64 1 metadata2 smq 0";

/// A cache with these dirty blocks, each with its own content.
fn dirty(blocks: u64) -> Fixture {
    let mut fixture = Fixture::opened(TABLE, 64, 64 * BLOCK);
    for block in 0..blocks {
        fixture.bring(block);
        fixture.write(block * BLOCK, &[block as u8 + 1; BLOCK as usize]);
    }
    fixture.flush();
    assert_eq!(fixture.target().dirty().bytes, blocks * BLOCK);
    fixture
}

fn words(fixture: &Fixture, name: &str) -> Option<String> {
    let fact = fixture.target().facts().into_iter().find(|fact| fact.name == name)?;
    match fact.value {
        FactValue::Text(words) => Some(words),
        other => panic!("{name}: {other:?}"),
    }
}

/// Drains for some seconds, or until a fact reports that no more can be written back.
fn drain_to_the_end(fixture: &mut Fixture) {
    fixture.target().set_draining(true);
    for _ in 0..100 {
        fixture.tick(SECOND / 10);
        let has_ended = fixture.target().dirty().bytes == 0
            || words(fixture, "medium_failure").is_some()
            || words(fixture, "origin_failure").is_some();
        if has_ended {
            break;
        }
    }
    fixture.target().set_draining(false);
}

fn on_origin(fixture: &Fixture, block: u64) -> u8 {
    let mut bytes = [0; 512];
    fixture.disks[2].peek(block * BLOCK, &mut bytes);
    bytes[0]
}

/// The slot of a block, by its content.
fn slot_of(fixture: &Fixture, block: u64) -> u64 {
    let mut bytes = [0; 512];
    (0..64)
        .find(|slot| {
            fixture.disks[1].peek(slot * BLOCK, &mut bytes);
            bytes == [block as u8 + 1; 512]
        })
        .expect("it is cached")
}

fn fail(op: Option<udm::bio::Op>) -> Fault {
    let fault = Fault::new(Effect::Fail(Status::Io));
    op.map_or(fault.clone(), |op| fault.of(op))
}

#[test]
fn a_dead_cache_device_is_not_taken_for_a_dead_origin() {
    use udm::bio::Op;
    for blocks in [1, 40] {
        for dead_to in [None, Some(Op::Read)] {
            let mut fixture = dirty(blocks);
            fixture.disks[..2].iter().for_each(|disk| disk.inject(fail(dead_to)));
            drain_to_the_end(&mut fixture);
            let said = words(&fixture, "medium_failure").expect("the drain can end");
            assert!(said.contains("cache device cache failed"), "{said}");
            assert_eq!(words(&fixture, "origin_failure"), None);
            assert!(!fixture.target().dirty().is_failing && fixture.fact("medium_has_failed") == 1);
            let health = fixture.target().health();
            assert!(!health.is_failing && health.medium_failure.is_some(), "{health:?}");
            assert_eq!(fixture.fact("failed_batches_total"), 0, "no batch of the origin failed");
            let lost = fixture.target().only_cached().unwrap();
            assert_eq!(lost.ranges, [(0, blocks * BLOCK)], "and that is lost");
            // The disks work again: no data is lost.
            fixture.disks[..2].iter().for_each(|disk| disk.heal());
            fixture.drain();
            assert!((0..blocks).all(|block| on_origin(&fixture, block) == block as u8 + 1));
            assert!(words(&fixture, "medium_failure").is_none());
            assert_eq!(fixture.fact("medium_has_failed"), 0);
        }
    }
}

#[test]
fn a_block_that_the_cache_device_does_not_give_keeps_no_other() {
    let mut fixture = dirty(20);
    let slot = slot_of(&fixture, 7);
    fixture.disks[1].inject(fail(None).within(slot * BLOCK + 4096..slot * BLOCK + 8192));
    drain_to_the_end(&mut fixture);
    assert_eq!(fixture.target().dirty().bytes, BLOCK);
    let said = words(&fixture, "medium_failure").expect("the drain can end");
    assert!(said.contains(&format!("{BLOCK} bytes at byte {}", 7 * BLOCK)), "{said}");
    assert_eq!(fixture.target().only_cached().unwrap().ranges, [(7 * BLOCK, BLOCK)]);
    assert_eq!(fixture.fact("quarantined_bytes"), BLOCK);
    assert!(!fixture.target().dirty().is_failing);
    assert!((0..20).all(|block| on_origin(&fixture, block) == block as u8 + 1));
    let mut origin = [0; 512];
    fixture.disks[2].peek(7 * BLOCK + 4096, &mut origin);
    assert_eq!(origin, [0; 512], "that is what could not be read");
    // Data written from now on is written back.
    fixture.write(3 * BLOCK, &[99; 512]);
    assert!(words(&fixture, "medium_failure").is_none() && fixture.fact("medium_has_failed") == 1);
    drain_to_the_end(&mut fixture);
    assert_eq!((on_origin(&fixture, 3), fixture.target().dirty().bytes), (99, BLOCK));
    // A write of all of it heals the device, as writes do.
    fixture.disks[1].heal();
    fixture.drain();
    assert_eq!((fixture.fact("quarantined_bytes"), fixture.fact("medium_has_failed")), (0, 0));
}

#[test]
fn a_block_that_the_origin_does_not_take_keeps_no_other() {
    use udm::bio::Op;
    for blocks in [1, 20] {
        let mut fixture = dirty(blocks);
        let bad = blocks / 3;
        let range = bad * BLOCK + 4096..bad * BLOCK + 8192;
        fixture.disks[2].inject(fail(Some(Op::Write)).within(range));
        drain_to_the_end(&mut fixture);
        assert_eq!(fixture.target().dirty().bytes, BLOCK);
        let said = words(&fixture, "origin_failure").expect("the drain can end");
        let named = format!(
            "origin origin refuses some blocks, and all others are written back (no error): \
             {BLOCK} bytes at byte {}",
            bad * BLOCK
        );
        assert_eq!(said, named);
        assert_eq!(fixture.fact("refused_bytes"), BLOCK);
        assert_eq!(
            (words(&fixture, "medium_failure"), fixture.fact("medium_has_failed")),
            (None, 0)
        );
        let is_there = |block: u64| on_origin(&fixture, block) == block as u8 + 1;
        assert!((0..blocks).all(is_there), "also all other pieces of the bad block");
        fixture.disks[2].heal();
        fixture.drain();
        assert_eq!((fixture.fact("refused_bytes"), words(&fixture, "origin_failure")), (0, None));
    }
}

#[test]
fn a_dead_origin_is_waited_for() {
    use udm::bio::Op;
    for blocks in [3, 40] {
        let mut fixture = dirty(blocks);
        fixture.disks[2].inject(fail(Some(Op::Write)));
        drain_to_the_end(&mut fixture);
        assert_eq!(
            (words(&fixture, "origin_failure"), words(&fixture, "medium_failure")),
            (None, None)
        );
        assert!(fixture.target().dirty().is_failing && fixture.fact("medium_has_failed") == 0);
        fixture.disks[2].heal();
        // A drain that begins does not wait for a pause that an earlier failure made.
        fixture.target().set_draining(true);
        fixture.tick(SECOND / 100);
        assert_eq!(
            (fixture.target().dirty().bytes, fixture.target().dirty().is_failing),
            (0, false)
        );
    }
}

#[test]
fn a_request_that_the_origin_serves_ends_a_pause() {
    use udm::bio::Op;
    for blocks in [3, 40] {
        let mut fixture = dirty(blocks);
        fixture.target().set_draining(true);
        fixture.disks[2].inject(fail(Some(Op::Write)));
        // Just after a failure: the pauses have their full length.
        let tries = |fixture: &Fixture| fixture.fact("failed_batches_total");
        let mut before = 0;
        for _ in 0..8 {
            before = tries(&fixture);
            while tries(&fixture) == before {
                fixture.tick(SECOND / 20);
            }
        }
        fixture.disks[2].heal();
        fixture.tick(SECOND / 1000);
        assert!(fixture.target().dirty().is_failing, "the pause is not over");
        fixture.read(50 * BLOCK, 4096);
        (0..4).for_each(|_| fixture.tick(SECOND / 1000));
        let dirty = fixture.target().dirty();
        assert_eq!((dirty.bytes, dirty.is_failing), (0, false), "{before} failures");
    }
}

#[test]
fn a_refused_flush_of_the_cache_device_ends_a_drain() {
    let mut fixture = dirty(2);
    fixture.write(0, &[7; 512]);
    fixture.disks[1].inject(fail(Some(udm::bio::Op::Flush)));
    assert!(fixture.run(udm::bio::Bio::flush(0)).status.is_err());
    drain_to_the_end(&mut fixture);
    let said = words(&fixture, "medium_failure").expect("the drain can end");
    assert!(said.contains("a flush failed") && !fixture.target().dirty().is_failing, "{said}");
}

#[test]
fn dirty_data_is_written_back_while_metadata_cannot_be_written() {
    use udm::bio::Op;
    let mut fixture = dirty(5);
    fixture.disks[0].inject(fail(Some(Op::Write)));
    // A block that is written as a whole waits for a commit, and fails.
    let tries = (0..50).map(|_| fixture.try_write(9 * BLOCK, &[10; BLOCK as usize]));
    let has_failed = tries.into_iter().any(|done| done.is_err());
    drain_to_the_end(&mut fixture);
    assert_eq!((fixture.target().dirty().bytes, words(&fixture, "medium_failure")), (0, None));
    assert!((0..5).all(|block| on_origin(&fixture, block) == block as u8 + 1));
    assert!(!has_failed || on_origin(&fixture, 9) == 10, "the waiting write is there as well");
}

#[test]
fn a_metadata_device_that_fails_is_named() {
    use udm::bio::Op;
    for (op, named) in [(Op::Write, "a write of metadata"), (Op::Flush, "a flush of metadata")] {
        let mut fixture = dirty(5);
        fixture.disks[0].inject(fail(Some(op)));
        for _ in 0..50 {
            let _ = fixture.try_write(9 * BLOCK, &[10; BLOCK as usize]);
        }
        let said = words(&fixture, "metadata_failure").expect("a commit has failed");
        assert!(said.contains("metadata device meta does not take commits: "), "{said}");
        assert!(said.contains(named), "{said}");
        let health = fixture.target().health();
        assert_eq!((health.metadata_failure, health.medium_failure), (Some(said), None));
        assert_eq!(
            (words(&fixture, "medium_failure"), fixture.fact("medium_has_failed")),
            (None, 0)
        );
        assert!(fixture.target().status().contains(" ro "), "{}", fixture.target().status());
        // Clients are served from both devices.
        fixture.write(30 * BLOCK, &[31; 512]);
        fixture.flush();
        assert_eq!(
            (fixture.read(30 * BLOCK, 512), fixture.read(0, 512)),
            (vec![31; 512], vec![1; 512])
        );
        drain_to_the_end(&mut fixture);
        assert_eq!(fixture.target().dirty().bytes, 0);
        assert!((0..5).all(|block| on_origin(&fixture, block) == block as u8 + 1));
        fixture.disks[0].heal();
        (0..100).for_each(|_| fixture.tick(SECOND));
        assert_eq!(words(&fixture, "metadata_failure"), None);
        assert!(fixture.target().status().contains(" rw "), "{}", fixture.target().status());
    }
}

#[test]
fn writethrough_serves_without_its_metadata_device() {
    for op in [udm::bio::Op::Write, udm::bio::Op::Flush] {
        let mut fixture = Fixture::opened("64 2 metadata2 writethrough smq 0", 64, 64 * BLOCK);
        (0..5).for_each(|block| fixture.bring(block));
        fixture.disks[0].inject(fail(Some(op)));
        for block in 0..40 {
            for _ in 0..3 {
                fixture.write(block * BLOCK, &[block as u8 + 1; BLOCK as usize]);
                assert_eq!(fixture.read(block * BLOCK, 512), [block as u8 + 1; 512]);
                fixture.flush();
                assert_eq!(on_origin(&fixture, block), block as u8 + 1);
            }
        }
        fixture.tick(SECOND);
        assert!(words(&fixture, "metadata_failure").is_some());
        assert_eq!(fixture.target().dirty().bytes, 0);
    }
}

/// A commit needs more free blocks than the format. The first whole block that waits for a commit
/// fails; from then on the origin takes the writes.
#[test]
fn a_full_metadata_device_loses_no_data() {
    for blocks in [13, 14] {
        let [_, cache, origin] = disks(64, 64 * BLOCK);
        let metadata = Arc::new(SimDisk::new(blocks * 4096, 512).named("meta"));
        let mut fixture = Fixture::new(TABLE, [metadata, cache, origin]);
        fixture.open();
        let mut refused = BTreeSet::new();
        for round in 0..3 {
            for block in 0..40 {
                let data = [block as u8 + 1 + round; BLOCK as usize];
                if fixture.try_write(block * BLOCK, &data).is_err() {
                    refused.insert(block);
                } else {
                    assert_eq!(fixture.read(block * BLOCK, BLOCK as usize), data);
                }
            }
            fixture.tick(SECOND / 10);
        }
        assert!(refused.len() <= 1, "{blocks} blocks: {refused:?}");
        let said = words(&fixture, "metadata_failure").expect("it is full");
        let why = format!("metadata device meta does not take commits: it is full: 9 of {blocks}");
        assert!(said.contains(&why) && said.contains("`udm cache restore`"), "{said}");
        assert!(fixture.target().status().contains(" ro - "), "{}", fixture.target().status());
        drain_to_the_end(&mut fixture);
        assert_eq!(fixture.target().dirty().bytes, 0);
        let is_there = |block| on_origin(&fixture, block) == block as u8 + 3;
        assert!((0..40).all(|block| is_there(block) || refused.contains(&block)));
    }
}

#[test]
pub fn a_slot_where_a_write_failed_is_given_up() {
    use udm::bio::Op;
    let mut fixture = Fixture::opened(TABLE, 4, 8 * BLOCK);
    fixture.bring(3);
    fixture.tick(2 * SECOND);
    fixture.write(3 * BLOCK, &[1; 512]);
    fixture.disks[1].inject(fail(Some(Op::Write)).times(1));
    assert!(fixture.try_write(3 * BLOCK, &[2; 512]).is_err());
    fixture.drain();
    fixture.tick(2 * SECOND);
    assert_eq!(on_origin(&fixture, 3), 1);
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    let named = load(&disk).unwrap().contents.mapped();
    assert_eq!(named, 0, "a power failure may change what the slot shows");
}

#[test]
pub fn a_block_of_the_origin_where_a_write_failed_is_written_back() {
    use udm::bio::Op;
    let mut fixture = Fixture::opened(TABLE, 4, 8 * BLOCK);
    fixture.write(3 * BLOCK, &[1; 512]);
    fixture.disks[2].inject(fail(Some(Op::Write)).times(1));
    assert!(fixture.try_write(3 * BLOCK, &[2; 512]).is_err());
    fixture.bring(3);
    assert_eq!(fixture.fact("dirty_bytes"), BLOCK, "a power failure may change the origin below");
    fixture.drain();
    assert_eq!(on_origin(&fixture, 3), 1);
}

/// How often the cache is looked at in a minute, without requests, if it decides when.
fn looks_in_a_minute(fixture: &mut Fixture) -> usize {
    let end = fixture.now + 60 * SECOND;
    let mut looks = 0;
    fixture.settle();
    while fixture.now < end {
        looks += 1;
        let next = fixture.target.as_ref().unwrap().tick(fixture.now, &mut fixture.port);
        fixture.settle();
        assert!(looks < 100_000, "it does not sleep");
        fixture.now = next.unwrap_or(end).clamp(fixture.now, end);
    }
    looks
}

#[test]
fn a_cache_whose_devices_fail_sleeps_between_its_tries() {
    use udm::bio::Op;
    for (nth, op) in
        [(0, Op::Write), (0, Op::Flush), (1, Op::Flush), (2, Op::Write), (2, Op::Flush)]
    {
        let mut fixture = dirty(4);
        for block in 20..24 {
            fixture.write(block * BLOCK, &[1; 512]);
        }
        fixture.write(0, &[9; 512]);
        fixture.disks[nth].inject(fail(Some(op)));
        let _ = fixture.run(udm::bio::Bio::flush(0)).status;
        let looks = looks_in_a_minute(&mut fixture);
        assert!(looks < 400, "{op:?} of disk {nth}: {looks}");
        fixture.target().set_draining(true);
        let looks = looks_in_a_minute(&mut fixture);
        assert!(looks < 400, "{op:?} of disk {nth}, draining: {looks}");
        // It finds out by itself that the device is well again.
        fixture.disks[nth].heal();
        looks_in_a_minute(&mut fixture);
        let has_lost = (nth, op) == (1, Op::Flush);
        assert_eq!(fixture.target().dirty().bytes > 0, has_lost, "{op:?} of disk {nth}");
    }
}

#[test]
fn a_cache_waits_for_a_slow_commit_asleep() {
    let mut fixture = Fixture::opened(TABLE, 64, 64 * BLOCK);
    fixture.bring(20);
    fixture.tick(3 * SECOND);
    fixture.holds = Box::new(|io| io.disk.limits().name == "meta");
    for block in [21, 22] {
        fixture.bring(block);
        fixture.tick(2 * SECOND);
    }
    let looks = looks_in_a_minute(&mut fixture);
    assert!(looks < 400, "{looks}");
    fixture.release();
    looks_in_a_minute(&mut fixture);
    let contents = load(&fixture.devices().metadata).unwrap().contents;
    assert!([20, 21, 22].iter().all(|nth| contents.in_use().any(|(_, block)| block == *nth)));
}

/// Otherwise writes would fail until the next start, with a device that works again.
#[test]
fn a_rest_that_failed_without_changes_is_tried_again() {
    use udm::bio::Op;
    let mut fixture = Fixture::opened(TABLE, 64, 64 * BLOCK);
    fixture.bring(3);
    fixture.tick(60 * SECOND);
    fixture.disks[0].inject(fail(Some(Op::Write)).times(1));
    fixture.suspend();
    assert_eq!(fixture.fact("metadata_is_failing"), 1);
    fixture.target().resume().unwrap();
    looks_in_a_minute(&mut fixture);
    assert_eq!(fixture.fact("metadata_is_failing"), 0);
    fixture.write(3 * BLOCK, &[1; 512]);
}
