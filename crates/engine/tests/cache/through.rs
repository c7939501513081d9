//! In writethrough and passthrough the origin has all data: no request fails because of the cache
//! device, no block is dirty, and no later server trusts data that the cache device could not
//! store.

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::cache::metadata::load;
use udm::cache::wipe::wipe;
use udm::disk::{Disk, DiskIo, Effect, Fault};
use udm::error::Status;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::{BLOCK, Fixture, SECTOR, disks};

const SLOTS: u64 = 8;
const BLOCKS: u64 = 12;
const BACK: &str = "64 1 metadata2 smq 0";
const THROUGH: &str = "64 2 metadata2 writethrough smq 0";
const PASS: &str = "64 2 metadata2 passthrough smq 0";

fn fail() -> Fault {
    Fault::new(Effect::Fail(Status::Io))
}

/// A cache that has these blocks of an origin whose blocks hold their number.
fn warm(table: &str, blocks: u64) -> Fixture {
    let mut fixture = Fixture::new(THROUGH, disks(SLOTS, BLOCKS * BLOCK));
    for block in 0..BLOCKS {
        fixture.disks[2].poke(block * BLOCK, &[block as u8; BLOCK as usize]);
    }
    fixture.open();
    (0..blocks).for_each(|block| fixture.bring(block));
    fixture.tick(2 * SECOND);
    fixture.remove();
    fixture.table = table.into();
    fixture.open();
    assert_eq!(
        fixture.fact("cached_bytes"),
        blocks * BLOCK,
        "an orderly stop keeps what is cached"
    );
    fixture
}

/// How the cache device, or both of its parts, can die.
fn deaths() -> Vec<(&'static str, Vec<(usize, Fault)>)> {
    vec![
        ("writes of data", vec![(1, fail().of(Op::Write))]),
        ("writes of metadata", vec![(0, fail().of(Op::Write))]),
        ("flushes of metadata", vec![(0, fail().of(Op::Flush))]),
        ("flushes of data", vec![(1, fail().of(Op::Flush))]),
        ("reads of data", vec![(1, fail().of(Op::Read))]),
        ("writes", vec![(0, fail().of(Op::Write)), (1, fail().of(Op::Write))]),
        ("everything", vec![(0, fail()), (1, fail())]),
    ]
}

/// The data that one request writes to a block, and the block's content afterwards.
fn change(fixture: &mut Fixture, nth: u64, block: u64) -> Vec<u8> {
    let value = 100 + nth as u8;
    let mut after = fixture.read(block * BLOCK, BLOCK as usize);
    let at = block * BLOCK;
    let run = |fixture: &mut Fixture, bio: Bio| fixture.run(bio).status.unwrap();
    match nth % 6 {
        0 => {
            after[1024..5120].fill(value);
            fixture.write(at + 1024, &[value; 4096]);
        }
        1 => {
            after.fill(value);
            fixture.write(at, &[value; BLOCK as usize]);
        }
        2 => {
            after[512..1024].fill(0);
            run(fixture, Bio::bare(Op::WriteZeroes, at + 512, 512, false, 0));
        }
        3 => {
            after.fill(0);
            run(fixture, Bio::bare(Op::WriteZeroes, at, BLOCK, true, 0));
        }
        4 => {
            after[..512].fill(value);
            run(fixture, Bio::write(at, Buffer::from_bytes(&[value; 512]), true, 0));
        }
        _ => {
            after.fill(0);
            run(fixture, Bio::bare(Op::Discard, at, BLOCK, false, 0));
        }
    }
    assert_eq!(fixture.read(at, BLOCK as usize), after, "{nth}");
    after
}

fn origin(fixture: &Fixture, block: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK as usize];
    fixture.disks[2].peek(block * BLOCK, &mut bytes);
    bytes
}

#[test]
pub fn no_request_fails_because_of_the_cache_device() {
    for table in [THROUGH, PASS] {
        for (what, faults) in deaths() {
            for end in ["stop", "kill", "power"] {
                let mut fixture = warm(table, 6);
                // As with files, each client gets the error.
                fixture.disks.iter().for_each(|disk| disk.say_to_all());
                // One of them may be written to without a commit.
                fixture.write(0, &[77; 512]);
                for (disk, fault) in faults.clone() {
                    fixture.disks[disk].inject(fault);
                }
                let mut has = vec![Vec::new(); BLOCKS as usize];
                for round in 0..4 {
                    for block in 0..BLOCKS {
                        has[block as usize] = change(&mut fixture, round * 5 + block, block);
                        assert_eq!(fixture.fact("dirty_bytes"), 0, "{table}, {what}");
                    }
                    fixture.flush();
                    fixture.tick(3 * SECOND);
                }
                let health = fixture.target().health();
                let counted = fixture.fact("passed_by_total") + fixture.fact("fallbacks_total");
                let is_named = health.medium_failure.is_some() || health.metadata_failure.is_some();
                let is_known = is_named || counted > 0;
                // Passthrough does not use the data.
                let is_quiet = table == PASS && what.ends_with("of data");
                assert!(is_known || is_quiet, "{table}, {what}: {health:?}");
                assert!(!health.is_failing, "the origin is well");
                assert_eq!(fixture.target().losses(), 0, "no client has lost anything");
                match end {
                    "stop" => fixture.remove(),
                    "kill" => fixture.kill(),
                    _ => fixture.crash(&mut Prng::new(3)),
                }
                fixture.disks.iter().for_each(|disk| disk.heal());
                fixture.open();
                for (block, has) in (0..).zip(&has) {
                    let found = fixture.read(block * BLOCK, BLOCK as usize);
                    assert!(found == *has, "{table}, {what}, {end}: block {block}");
                    assert!(origin(&fixture, block) == *has, "{table}, {what}, {end}: {block}");
                }
                assert_eq!(fixture.fact("dirty_bytes"), 0);
            }
        }
    }
}

#[test]
pub fn writethrough_is_never_dirty_and_its_origin_has_everything() {
    let mut fixture = warm(THROUGH, 6);
    for nth in 0..60 {
        let block = nth * 7 % BLOCKS;
        let after = change(&mut fixture, nth, block);
        assert!(origin(&fixture, block) == after && fixture.fact("dirty_bytes") == 0);
        assert_eq!(fixture.status(10), "0", "the kernel's status shows it");
    }
    assert_eq!(fixture.fact("passed_by_total"), 0);
}

#[test]
fn a_write_that_the_origin_refuses_makes_nothing_dirty() {
    let mut fixture = warm(THROUGH, 6);
    fixture.write(0, &[77; 512]);
    fixture.disks[2].inject(fail().of(Op::Write));
    for block in 0..6 {
        assert!(fixture.try_write(block * BLOCK, &[9; 512]).is_err());
    }
    fixture.disks[2].heal();
    for block in 0..6 {
        let below = origin(&fixture, block);
        assert!(fixture.read(block * BLOCK, BLOCK as usize) == below, "the origin counts");
    }
    assert_eq!(fixture.fact("dirty_bytes"), 0);
}

#[test]
pub fn what_a_dead_server_left_in_writethrough_is_not_believed() {
    let mut fixture = warm(THROUGH, 6);
    fixture.disks[0].inject(fail().of(Op::Write));
    fixture.write(3 * BLOCK, &[50; BLOCK as usize]);
    fixture.flush();
    // The power fails: by the metadata, the slot has the old data of block 3.
    fixture.crash(&mut Prng::new(5));
    let metadata: Arc<dyn Disk> = fixture.disks[0].clone();
    let loaded = load(&metadata).unwrap();
    assert!(loaded.contents.in_use().any(|(_, block)| block == 3));
    assert_eq!(loaded.contents.opened(&loaded.superblock).mapped(), 0);
    fixture.table = BACK.into();
    fixture.open();
    assert_eq!(fixture.read(3 * BLOCK, 512), [50; 512]);
    assert_eq!(fixture.fact("cached_bytes"), 0);
}

#[test]
fn a_flush_that_the_origin_refused_leaves_nothing_that_is_believed() {
    let mut fixture = warm(THROUGH, 6);
    fixture.disks[2].show_lost();
    fixture.write(3 * BLOCK, &[50; 512]);
    fixture.disks[2].inject(fail().of(Op::Flush).times(1));
    assert!(fixture.run(Bio::flush(0)).status.is_err());
    fixture.tick(3 * SECOND);
    assert_eq!(fixture.fact("dirty_bytes"), 0);
    fixture.remove();
    let disks = fixture.disks.clone().map(|disk| Arc::new(disk.crash_with(|_, _| 0)));
    fixture.disks = disks;
    fixture.open();
    assert!(fixture.read(3 * BLOCK, BLOCK as usize) == origin(&fixture, 3));
}

#[test]
fn dirty_blocks_of_an_earlier_table_are_kept() {
    let mut fixture = warm(BACK, 6);
    fixture.write(2 * BLOCK, &[60; 512]);
    fixture.remove();
    fixture.table = THROUGH.into();
    fixture.open();
    fixture.write(4 * BLOCK, &[61; 512]);
    fixture.flush();
    fixture.crash(&mut Prng::new(1));
    fixture.open();
    assert_eq!((fixture.read(2 * BLOCK, 512)[0], fixture.read(4 * BLOCK, 512)[0]), (60, 61));
    // When they are written back, the medium records that the origin has all data.
    fixture.drain();
    fixture.tick(SECOND);
    fixture.disks[..2].iter().for_each(|disk| disk.inject(fail()));
    fixture.write(5 * BLOCK, &[62; 512]);
    fixture.flush();
    fixture.crash(&mut Prng::new(2));
    fixture.open();
    assert_eq!([2, 4, 5].map(|block| fixture.read(block * BLOCK, 512)[0]), [60, 61, 62]);
}

#[test]
fn a_whole_block_that_the_cache_device_refuses_goes_to_the_origin() {
    let mut fixture = Fixture::opened(BACK, SLOTS, BLOCKS * BLOCK);
    fixture.disks[1].inject(fail().of(Op::Write));
    for nth in 0..200 {
        let block = nth % BLOCKS;
        fixture.write(block * BLOCK, &[nth as u8; BLOCK as usize]);
        assert_eq!(origin(&fixture, block)[0], nth as u8);
    }
    fixture.flush();
    assert!(fixture.fact("passed_by_total") > 0 && fixture.fact("dirty_bytes") == 0);
    fixture.disks[1].heal();
    // Two blocks in one request, of which one has a slot.
    fixture.bring(1);
    fixture.disks[1].inject(fail().of(Op::Write));
    let done = fixture.try_write(BLOCK, &[201; 3 * BLOCK as usize]);
    fixture.disks[1].heal();
    let found = fixture.read(BLOCK, 3 * BLOCK as usize);
    assert!(done.is_err() || found.iter().all(|byte| *byte == 201));
}

/// A flush of the origin fails between a block's arrival and its commit.
#[test]
pub fn a_block_that_came_before_a_failed_flush_is_written_back() {
    let mut fixture = Fixture::opened(BACK, SLOTS, BLOCKS * BLOCK);
    fixture.disks[2].show_lost();
    fixture.write(5 * BLOCK, &[50; 4096]);
    fixture.bring(5);
    fixture.disks[2].inject(fail().of(Op::Flush).times(1));
    assert!(fixture.run(Bio::flush(0)).status.is_err());
    for _ in 0..5 {
        fixture.tick(3 * SECOND);
    }
    fixture.remove();
    let disks = fixture.disks.clone().map(|disk| Arc::new(disk.crash_with(|_, _| 0)));
    fixture.disks = disks;
    let metadata: Arc<dyn Disk> = fixture.disks[0].clone();
    let contents = load(&metadata).unwrap().contents;
    for (slot, block) in contents.in_use().filter(|(slot, _)| !contents.dirty.is_set(*slot)) {
        let mut held = vec![0; BLOCK as usize];
        fixture.disks[1].peek(slot * BLOCK, &mut held);
        assert!(held == origin(&fixture, block), "block {block} is clean, and not the origin's");
    }
}

#[test]
pub fn a_message_invalidates_all_of_a_range() {
    let mut fixture = warm(PASS, 6);
    let metadata: Arc<dyn Disk> = fixture.disks[0].clone();
    let used = load(&metadata).unwrap().contents.in_use().map(|(slot, _)| slot).max().unwrap();
    fixture.message(&format!("invalidate_cblocks 0-{}", used + 1)).unwrap();
    fixture.tick(2 * SECOND);
    assert_eq!(fixture.fact("cached_bytes"), 0);
    fixture.remove();
    assert_eq!(load(&metadata).unwrap().contents.mapped(), 0);
}

#[test]
pub fn what_is_after_the_end_of_the_table_stays_as_it_is() {
    let mut fixture = Fixture::new(BACK, disks(SLOTS, 4 * BLOCK));
    let len = 3 * BLOCK + 5 * SECTOR;
    fixture.len = Some(len);
    fixture.disks[2].poke(len, &[1; 8192]);
    fixture.open();
    for nth in 0..300 {
        fixture.write(3 * BLOCK, &[nth as u8; 5 * SECTOR as usize]);
        fixture.read(3 * BLOCK, 5 * SECTOR as usize);
        if nth % 20 == 0 {
            fixture.tick(SECOND);
        }
    }
    fixture.write(3 * BLOCK, &[99; 5 * SECTOR as usize]);
    fixture.flush();
    // A server that comes later writes dirty blocks back whole. Meanwhile another user of the disk
    // writes there.
    fixture.kill();
    fixture.disks[2].poke(len, &[2; 8192]);
    fixture.open();
    fixture.drain();
    fixture.remove();
    let mut after = [0; 8192];
    fixture.disks[2].peek(len, &mut after);
    assert!(after == [2; 8192], "it was overwritten");
    assert_eq!(origin(&fixture, 3)[..5 * SECTOR as usize], [99; 5 * SECTOR as usize]);
}

#[test]
pub fn a_cache_is_wiped_after_its_origin_is_flushed() {
    let mut fixture = Fixture::opened(BACK, SLOTS, BLOCKS * BLOCK);
    fixture.write(7 * BLOCK, &[7; 512]);
    fixture.drain();
    fixture.remove();
    // Something writes to the origin before the wipe.
    let disk: Arc<dyn Disk> = fixture.disks[2].clone();
    let io = DiskIo::new(&disk, Op::Write, 9 * BLOCK, Buffer::from_bytes(&[9; 512]), 0);
    disk.carry_out(vec![io]);
    wipe(&fixture.devices(), &Default::default()).unwrap();
    let left = fixture.disks[2].crash_with(|_, _| 0);
    let mut found = [[0; 512]; 2];
    left.peek(7 * BLOCK, &mut found[0]);
    left.peek(9 * BLOCK, &mut found[1]);
    assert_eq!(found, [[7; 512], [9; 512]]);
}

#[test]
pub fn an_orderly_stop_flushes_the_origin() {
    let mut fixture = Fixture::opened(BACK, SLOTS, BLOCKS * BLOCK);
    fixture.write(7 * BLOCK, &[7; 512]);
    fixture.remove();
    let left = fixture.disks[2].crash_with(|_, _| 0);
    let mut found = [0; 512];
    left.peek(7 * BLOCK, &mut found);
    assert_eq!(found, [7; 512]);
}
