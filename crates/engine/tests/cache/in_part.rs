//! Partially cached blocks: the data that a miss moves, when sectors are valid, and that the medium
//! never names such blocks.

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::cache::metadata::{Contents, load};
use udm::cache::{Incoming, OpenOptions, TableArgs};
use udm::disk::{Disk, DiskIo, Effect, Fault};
use udm::error::Status;
use udm::table::Word;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::{BLOCK, Fixture, SECTOR, disks};

const TABLE: &str = "64 1 metadata2 probation 0";
const ORIGIN: u64 = 8 * BLOCK;

/// Every sector of the origin has a value of its own.
pub fn content(at: u64, len: u64) -> Vec<u8> {
    (at / SECTOR..(at + len) / SECTOR).flat_map(|sector| [(sector % 251 + 1) as u8; 512]).collect()
}

/// An empty cache of this many slots.
fn opened(slots: u64) -> Fixture {
    let mut fixture = Fixture::new(TABLE, disks(slots, ORIGIN));
    fixture.disks[2].poke(0, &content(0, ORIGIN));
    fixture.open();
    fixture.settle();
    fixture.history.clear();
    fixture
}

pub fn is_on(io: &DiskIo, device: &str) -> bool {
    Disk::limits(&*io.disk).name == device
}

/// Bytes that were moved to or from a device since the history was cleared.
pub fn moved(fixture: &Fixture, device: &str, op: Op) -> u64 {
    let ios = fixture.history.iter().filter(|(name, did, ..)| name == device && *did == op);
    ios.map(|(.., len)| len).sum()
}

fn on_medium(fixture: &Fixture) -> Contents {
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    load(&disk).unwrap().contents
}

/// A bio that is done by now.
fn done(fixture: &mut Fixture, bio: Bio) -> Bio {
    fixture.submit(bio);
    fixture.settle();
    fixture.port.done.pop_front().expect("it does not wait")
}

#[test]
fn a_miss_moves_what_was_asked_for_and_is_answered_first() {
    let mut fixture = opened(4);
    fixture.holds = Box::new(|io| io.op == Op::Write && is_on(io, "cache"));
    let bio = done(&mut fixture, Bio::read(3 * BLOCK + 4096, Buffer::zeroed(4096), 1));
    assert_eq!(bio.buffer.as_slice(), content(3 * BLOCK + 4096, 4096));
    assert_eq!((fixture.held.len(), fixture.held[0].len), (1, 4096));
    fixture.release();
    for at in [4096, 4608, 7680] {
        assert_eq!(fixture.read(3 * BLOCK + at, 512), content(3 * BLOCK + at, 512));
    }
    assert_eq!(
        (moved(&fixture, "origin", Op::Read), moved(&fixture, "cache", Op::Write)),
        (4096, 4096)
    );
    assert_eq!(moved(&fixture, "cache", Op::Read), 3 * 512);
    // A write that misses.
    fixture.history.clear();
    fixture.write(5 * BLOCK, &[7; 4096]);
    assert_eq!(fixture.read(5 * BLOCK, 4096), [7; 4096]);
    assert_eq!(
        (moved(&fixture, "origin", Op::Write), moved(&fixture, "cache", Op::Write)),
        (4096, 4096)
    );
    assert_eq!(
        (moved(&fixture, "origin", Op::Read), moved(&fixture, "cache", Op::Read)),
        (0, 4096)
    );
}

#[test]
fn what_is_there_as_a_whole_is_named_and_nothing_before() {
    let mut fixture = opened(4);
    for at in (0..BLOCK).step_by(4096) {
        fixture.tick(2 * SECOND);
        assert_eq!(on_medium(&fixture).mapped(), 0);
        fixture.read(2 * BLOCK + at, 4096);
        if fixture.status(9) == "1" {
            break;
        }
    }
    fixture.tick(3 * SECOND);
    let contents = on_medium(&fixture);
    let (slot, block) = contents.in_use().next().unwrap();
    assert_eq!((block, contents.mapped(), contents.dirty.ones()), (2, 1, 0));
    let mut held = vec![0; BLOCK as usize];
    fixture.disks[1].peek(slot * BLOCK, &mut held);
    assert!(held == content(2 * BLOCK, BLOCK));
    assert_eq!(moved(&fixture, "origin", Op::Read), BLOCK, "each sector once");
    // From now on it takes writes.
    fixture.write(2 * BLOCK, &[1; 512]);
    assert_eq!(fixture.fact("dirty_bytes"), BLOCK);
    fixture.kill();
    fixture.open();
    assert_eq!(fixture.read(2 * BLOCK, 512), [1; 512]);
}

#[test]
pub fn a_write_does_not_wait_for_a_fill_and_spoils_it() {
    for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
        let mut fixture = opened(4);
        fixture.holds = Box::new(|io| io.op == Op::Write && is_on(io, "cache"));
        done(&mut fixture, Bio::read(3 * BLOCK, Buffer::zeroed(8192), 1)).status.unwrap();
        assert_eq!(fixture.held.len(), 1);
        let (bio, now) = match op {
            Op::Write => (Bio::write(3 * BLOCK + 1024, Buffer::from_bytes(&[9; 512]), false, 2), 9),
            _ => (Bio::bare(op, 3 * BLOCK + 1024, 512, false, 2), 0),
        };
        done(&mut fixture, bio).status.unwrap();
        // The rest of a block that is written to is also read.
        let overlapping = fixture.held.iter().filter(|io| io.offset % BLOCK < 8192).count();
        assert_eq!(overlapping, 1, "of what overlaps, only the first gets to the slot");
        fixture.release();
        let mut wanted = content(3 * BLOCK, 8192);
        wanted[1024..1536].fill(now);
        for _ in 0..3 {
            assert!(fixture.read(3 * BLOCK, 8192) == wanted);
        }
    }
}

#[test]
pub fn what_is_zeroed_below_is_not_read_from_the_slot() {
    for op in [Op::Discard, Op::WriteZeroes] {
        let mut fixture = opened(4);
        fixture.read(3 * BLOCK, 8192);
        assert_eq!(fixture.read(3 * BLOCK, 8192), content(3 * BLOCK, 8192));
        fixture.bare(op, 3 * BLOCK + 512, 1024);
        let mut wanted = content(3 * BLOCK, 8192);
        wanted[512..1536].fill(0);
        assert!(fixture.read(3 * BLOCK, 8192) == wanted);
        fixture.bare(op, 3 * BLOCK, BLOCK);
        assert_eq!(fixture.read(3 * BLOCK, 512), [0; 512]);
    }
}

#[test]
pub fn a_slot_with_a_part_is_not_given_away_while_it_is_read() {
    let mut fixture = opened(1);
    fixture.read(3 * BLOCK, 4096);
    fixture.holds = Box::new(|io| io.op == Op::Read && is_on(io, "cache"));
    fixture.submit(Bio::read(3 * BLOCK, Buffer::zeroed(512), 77));
    fixture.settle();
    assert_eq!(fixture.held.len(), 1);
    for nth in 0..200 {
        fixture.submit(Bio::read(5 * BLOCK + nth % 60 * SECTOR, Buffer::zeroed(512), 1));
        fixture.tick(SECOND / 10);
        fixture.port.done.clear();
    }
    fixture.release();
    let done = fixture.port.done.iter().find(|bio| bio.token == 77).expect("the read ends");
    assert_eq!(done.buffer.as_slice(), content(3 * BLOCK, 512));
    // When it has ended, others get the slot.
    for _ in 0..20 {
        fixture.read(5 * BLOCK, 512);
        fixture.tick(SECOND / 10);
    }
    fixture.history.clear();
    assert_eq!(fixture.read(5 * BLOCK, 512), content(5 * BLOCK, 512));
    assert_eq!(moved(&fixture, "origin", Op::Read), 0);
}

#[test]
pub fn a_whole_block_is_not_written_over_a_fill() {
    let mut fixture = opened(4);
    fixture.holds = Box::new(|io| io.op == Op::Write && is_on(io, "cache"));
    fixture.read(3 * BLOCK, 4096);
    assert_eq!(fixture.held.len(), 1);
    fixture.write(3 * BLOCK, &vec![9; BLOCK as usize]);
    assert_eq!(moved(&fixture, "origin", Op::Write), BLOCK);
    fixture.release();
    assert!(fixture.read(3 * BLOCK, BLOCK as usize) == vec![9; BLOCK as usize]);
}

#[test]
fn a_whole_block_goes_to_the_slot_that_has_a_part() {
    let mut fixture = opened(4);
    fixture.read(3 * BLOCK, 4096);
    let hits = fixture.status(6);
    fixture.history.clear();
    fixture.write(3 * BLOCK, &vec![7; BLOCK as usize]);
    assert_eq!(moved(&fixture, "origin", Op::Write), 0);
    assert_eq!((fixture.fact("cached_bytes"), fixture.fact("dirty_bytes")), (BLOCK, BLOCK));
    assert_ne!(fixture.status(6), hits);
    // Its writer waited for the commit, so that no death takes it back.
    fixture.kill();
    fixture.open();
    assert!(fixture.read(3 * BLOCK, BLOCK as usize) == vec![7; BLOCK as usize]);
    // A write that the cache device fails goes to the origin.
    let mut fixture = opened(4);
    fixture.read(3 * BLOCK, 4096);
    fixture.disks[1].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write).times(1));
    fixture.history.clear();
    fixture.write(3 * BLOCK, &vec![7; BLOCK as usize]);
    assert_eq!(moved(&fixture, "origin", Op::Write), BLOCK);
    assert_eq!((fixture.fact("dirty_bytes"), fixture.fact("passed_by_total")), (0, 1));
    assert!(fixture.read(3 * BLOCK, BLOCK as usize) == vec![7; BLOCK as usize]);
}

#[test]
fn a_block_that_is_written_to_again_comes_as_a_whole_and_takes_writes() {
    let mut fixture = opened(4);
    fixture.write(3 * BLOCK, &[1; 512]);
    fixture.write(3 * BLOCK, &[2; 512]);
    assert_eq!(moved(&fixture, "origin", Op::Write), 1024);
    fixture.tick(SECOND / 100);
    fixture.write(3 * BLOCK, &[3; 512]);
    assert_eq!(moved(&fixture, "origin", Op::Write), 1024, "the slot has it");
    assert_eq!(fixture.fact("dirty_bytes"), BLOCK);
    fixture.kill();
    fixture.open();
    assert_eq!(fixture.read(3 * BLOCK, 512), [3; 512]);
}

#[test]
fn what_failed_is_not_valid() {
    for (device, op) in [("origin", Op::Read), ("cache", Op::Write), ("cache", Op::Read)] {
        let mut fixture = opened(4);
        if op == Op::Read && device == "cache" {
            fixture.read(3 * BLOCK, 8192);
        }
        let nth = if device == "cache" { 1 } else { 2 };
        fixture.disks[nth].inject(Fault::new(Effect::Fail(Status::Io)).of(op).times(1));
        let first = fixture.try_read(3 * BLOCK, 8192);
        assert_eq!(first.is_err(), device == "origin");
        for _ in 0..3 {
            assert!(fixture.read(3 * BLOCK, 8192) == content(3 * BLOCK, 8192), "{device} {op:?}");
        }
        fixture.history.clear();
        fixture.read(3 * BLOCK, 8192);
        assert_eq!(moved(&fixture, "origin", Op::Read), 0, "{device} {op:?}: it was filled again");
    }
}

#[test]
fn what_the_cache_device_may_have_lost_is_not_read() {
    let mut fixture = opened(4);
    fixture.read(3 * BLOCK, 4096);
    fixture.disks[1].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    assert!(fixture.run(Bio::flush(1)).status.is_err());
    for slot in 0..4 {
        fixture.disks[1].poke(slot * BLOCK, &vec![0xEE; BLOCK as usize]);
    }
    assert_eq!(fixture.read(3 * BLOCK, 4096), content(3 * BLOCK, 4096));
    fixture.write(3 * BLOCK, &[5; 512]);
    assert_eq!(fixture.read(3 * BLOCK, 512), [5; 512]);
}

#[test]
fn a_flush_makes_durable_what_was_written_to_a_part() {
    let mut fixture = opened(4);
    fixture.read(3 * BLOCK, 4096);
    fixture.write(3 * BLOCK + 512, &[5; 512]);
    fixture.flush();
    fixture.crash(&mut udm::prng::Prng::new(1));
    assert_eq!(on_medium(&fixture).mapped(), 0);
    fixture.open();
    assert_eq!(fixture.read(3 * BLOCK + 512, 512), [5; 512]);
    assert_eq!(fixture.read(3 * BLOCK, 512), content(3 * BLOCK, 512));
}

#[test]
fn what_is_there_in_part_ends_with_a_suspend() {
    let mut fixture = opened(4);
    fixture.read(3 * BLOCK, 4096);
    assert_eq!(fixture.fact("cached_bytes"), BLOCK);
    // One is on its way.
    fixture.holds = Box::new(|io| io.op == Op::Write && is_on(io, "cache"));
    done(&mut fixture, Bio::read(4 * BLOCK, Buffer::zeroed(4096), 1)).status.unwrap();
    fixture.target().suspend().unwrap();
    fixture.tick(SECOND);
    assert!(!fixture.target().is_idle(), "it waits for the fill");
    fixture.release();
    fixture.suspend();
    assert_eq!((fixture.fact("cached_bytes"), on_medium(&fixture).mapped()), (0, 0));
    fixture.target().hand_over().unwrap();
    let args = TableArgs::parse(&Word::list("M C O 64 1 metadata2 smq 0")).unwrap();
    let options = OpenOptions::default();
    let coming = Incoming::new(args, ORIGIN - 2 * BLOCK, fixture.devices(), options).unwrap();
    assert!(coming.take_effect().unwrap().is_some());
    fixture.target().resume().unwrap();
    assert_eq!(fixture.read(3 * BLOCK, 4096), content(3 * BLOCK, 4096));
}

#[test]
fn what_was_used_on_probation_comes_as_a_whole_and_the_kernel_knows_whose_hints_there_are() {
    let mut fixture = opened(4);
    for _ in 0..5 {
        fixture.read(3 * BLOCK, 4096);
    }
    for block in [0, 1, 2, 4, 5, 6, 7] {
        fixture.read(block * BLOCK, 4096);
        fixture.tick(SECOND / 2);
    }
    fixture.tick(3 * SECOND);
    let found = on_medium(&fixture);
    assert!(found.in_use().any(|(_, block)| block == 3), "{}", fixture.target().status());
    fixture.remove();
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    let loaded = load(&disk).unwrap();
    assert_eq!(loaded.superblock.policy(), "probation");
    assert!(loaded.contents.hints.is_some());
    for table in [TABLE, "64 1 metadata2 smq 0", TABLE] {
        fixture.table = table.into();
        fixture.open();
        fixture.history.clear();
        assert_eq!(fixture.read(3 * BLOCK, BLOCK as usize), content(3 * BLOCK, BLOCK));
        assert_eq!(moved(&fixture, "origin", Op::Read), 0);
        fixture.remove();
        let policy = load(&disk).unwrap().superblock.policy().to_owned();
        assert!(table.contains(&policy), "{policy}");
    }
}
