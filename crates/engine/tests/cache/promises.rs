//! Promises that random histories meet rarely or not at all, each in a case made for it. The
//! deliberate bugs of `CASES` must be found by one of these.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::cache::metadata::contents::mapping;
use udm::cache::metadata::format::write_whole;
use udm::cache::metadata::superblock::CLEAN_SHUTDOWN;
use udm::cache::metadata::{Contents, Superblock, load};
use udm::disk::{Disk, DiskIo, Effect, Fault};
use udm::error::Status;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::{BLOCK, Fixture, SECTOR, disks};

const ORIGIN: u64 = 8 * BLOCK;
const TABLE: &str = "64 1 metadata2 smq 0";
const THROUGH: &str = "64 2 metadata2 writethrough smq 0";

/// Every case, for the tests of deliberate bugs.
#[cfg(feature = "mutants")]
pub const CASES: &[fn()] = &[
    two_writes_through_leave_both_devices_the_same,
    a_mark_stays_while_a_write_through_is_under_way,
    what_a_superblock_leads_to_that_failed_is_left_alone,
    every_slot_of_a_word_is_marked_in_version_1,
    a_slot_is_not_given_away_while_it_is_read,
    zeroes_cancel_a_promotion,
    a_block_whose_copy_failed_does_not_come,
    hints_of_another_policy_are_dropped,
    what_a_dead_server_left_is_durable_before_it_is_believed,
    a_read_does_not_show_a_write_that_a_death_would_take_back,
    a_read_does_not_show_a_write_through_that_may_still_fail,
    a_read_does_not_show_zeroes_that_a_death_would_take_back,
    a_flush_that_failed_beside_zeroes_does_not_cost_their_block,
    another_table_does_not_forget_what_the_origin_has_lost,
    two_flushes_fail_of_which_the_origin_refuses_one,
    a_drain_waits_for_blocks_whose_flush_failed,
    a_commit_after_a_failed_one_flushes_the_data_of_both,
    crate::basics::passthrough_gives_up_what_is_written_to,
    crate::parts::scattered_writes_are_all_written_back,
    crate::parts::zeroes_of_a_part_are_written_back,
    crate::parts::zeroes_that_failed_below_a_slot_do_not_stay_below_it,
    crate::in_part::a_write_does_not_wait_for_a_fill_and_spoils_it,
    crate::in_part::what_is_zeroed_below_is_not_read_from_the_slot,
    crate::in_part::a_slot_with_a_part_is_not_given_away_while_it_is_read,
    crate::in_part::a_whole_block_is_not_written_over_a_fill,
    crate::through::no_request_fails_because_of_the_cache_device,
    crate::through::writethrough_is_never_dirty_and_its_origin_has_everything,
    crate::through::what_a_dead_server_left_in_writethrough_is_not_believed,
    crate::through::a_block_that_came_before_a_failed_flush_is_written_back,
    crate::through::a_message_invalidates_all_of_a_range,
    crate::through::what_is_after_the_end_of_the_table_stays_as_it_is,
    crate::through::a_cache_is_wiped_after_its_origin_is_flushed,
    crate::doubt::data_that_a_cache_device_may_have_lost_is_written_to_it_again,
    crate::doubt::a_drain_at_rest_leaves_no_block_that_the_cache_device_may_have_lost,
    crate::doubt::blocks_of_an_origin_that_failed_a_flush_enter_dirty_under_the_next_server,
    crate::doubt::new_metadata_keeps_the_mark,
    crate::failing::a_slot_where_a_write_failed_is_given_up,
    crate::failing::a_block_of_the_origin_where_a_write_failed_is_written_back,
    crate::promotion::a_miss_of_4_kib_moves_4_kib_before_its_answer_and_its_block_once,
    crate::bitmaps::metadata_of_several_bitmaps_grow_and_shrink,
    crate::bitmaps::a_served_cache_frees_blocks_in_another_bitmap_than_it_allocates,
];

fn is_on(io: &DiskIo, device: &str) -> bool {
    io.disk.limits().name == device
}

/// The slot of a block, as the medium has it.
fn slot_of(fixture: &Fixture, block: u64) -> u64 {
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    let contents = load(&disk).unwrap().contents;
    contents.in_use().find(|(_, held)| *held == block).expect("it is in the cache").0
}

fn peek(fixture: &Fixture, disk: usize, at: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    fixture.disks[disk].peek(at, &mut bytes);
    bytes
}

/// A cache in writethrough whose block 3 has a slot that may be written to, and the slot.
fn through() -> (Fixture, u64) {
    let mut fixture = Fixture::opened(THROUGH, 4, ORIGIN);
    fixture.bring(3);
    fixture.write(3 * BLOCK, &[1; 512]);
    let slot = slot_of(&fixture, 3);
    assert_eq!(peek(&fixture, 1, slot * BLOCK), [1; 512]);
    (fixture, slot)
}

#[test]
pub fn two_writes_through_leave_both_devices_the_same() {
    let (mut fixture, slot) = through();
    fixture.holds = Box::new(|io| io.op == Op::Write && !is_on(io, "meta"));
    for value in [2, 3] {
        fixture.submit(Bio::write(
            3 * BLOCK,
            Buffer::from_bytes(&[value; 512]),
            false,
            value.into(),
        ));
        fixture.settle();
    }
    // The devices are free to carry them out in orders of their own.
    fixture.held.sort_by_key(|io| match (is_on(io, "cache"), io.buffer.as_slice()[0]) {
        (true, value) => u8::MAX - value,
        (false, value) => value,
    });
    fixture.release();
    assert_eq!(fixture.port.done.len(), 2);
    assert_eq!(peek(&fixture, 1, slot * BLOCK), peek(&fixture, 2, 3 * BLOCK));
}

#[test]
pub fn a_mark_stays_while_a_write_through_is_under_way() {
    let (mut fixture, slot) = through();
    fixture.holds = Box::new(|io| io.op == Op::Write && is_on(io, "origin"));
    fixture.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[2; 512]), false, 1));
    for _ in 0..5 {
        fixture.tick(11 * SECOND);
    }
    fixture.tick(2 * SECOND);
    assert_eq!((fixture.held.len(), peek(&fixture, 1, slot * BLOCK)), (1, [2; 512]));
    fixture.kill();
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    assert!(load(&disk).unwrap().contents.dirty.is_set(slot), "the devices differ");
}

/// Holds the second flush of the metadata from now on: the flush of a commit's superblock.
fn hold_superblock_flush(fixture: &mut Fixture) {
    let mut flushes = 0;
    fixture.holds = Box::new(move |io| {
        flushes += u64::from(is_on(io, "meta") && io.op == Op::Flush);
        is_on(io, "meta") && io.op == Op::Flush && flushes == 2
    });
}

#[test]
pub fn what_a_dead_server_left_is_durable_before_it_is_believed() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(3);
    fixture.tick(2 * SECOND);
    let slot = slot_of(&fixture, 3);
    hold_superblock_flush(&mut fixture);
    fixture.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[2; 512]), false, 1));
    fixture.settle();
    assert_eq!(fixture.held.len(), 1, "the mark is written, and not durable");
    fixture.kill();
    fixture.open();
    fixture.write(3 * BLOCK, &[3; 512]);
    fixture.flush();
    // A power cut that takes all that was not flushed.
    let disks = fixture.disks.clone().map(|disk| Arc::new(disk.crash_with(|_, _| 0)));
    fixture.kill();
    fixture.disks = disks;
    let metadata: Arc<dyn Disk> = fixture.disks[0].clone();
    assert!(load(&metadata).unwrap().contents.dirty.is_set(slot), "a flushed write is lost");
    assert_eq!(peek(&fixture, 1, slot * BLOCK), [3; 512]);
}

/// A write of a whole block that waits for the commit of its slot's mapping, and its value.
fn write_that_brings_its_block(fixture: &mut Fixture) -> u8 {
    for value in 1..=u8::MAX {
        fixture.holds = Box::new(|io| is_on(io, "meta") && io.op == Op::Flush);
        let data = Buffer::from_bytes(&[value; BLOCK as usize]);
        fixture.submit(Bio::write(3 * BLOCK, data, false, value.into()));
        fixture.settle();
        if fixture.port.done.pop_front().is_none() {
            return value;
        }
    }
    panic!("the policy does not want the block: {}", fixture.target().status());
}

/// Reads block 3 while a commit is held. Returns the data that a later server reads there.
fn read_and_die(fixture: &mut Fixture) -> u8 {
    fixture.submit(Bio::read(3 * BLOCK, Buffer::zeroed(512), 0));
    fixture.settle();
    assert!(fixture.port.done.is_empty(), "the metadata is not durable");
    fixture.kill();
    fixture.open();
    fixture.read(3 * BLOCK, 512)[0]
}

/// Reads block 3 while a commit is held that then continues. Returns the data of the read.
fn read_and_go_on(fixture: &mut Fixture) -> u8 {
    fixture.submit(Bio::read(3 * BLOCK, Buffer::zeroed(512), 0));
    fixture.release();
    let done = fixture.port.done.iter().find(|bio| bio.op == Op::Read).expect("it is durable now");
    done.buffer.as_slice()[0]
}

#[test]
pub fn a_read_does_not_show_a_write_that_a_death_would_take_back() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    let value = write_that_brings_its_block(&mut fixture);
    assert_eq!(read_and_die(&mut fixture), value - 1);
    let value = write_that_brings_its_block(&mut fixture);
    assert_eq!(read_and_go_on(&mut fixture), value);
}

#[test]
pub fn a_read_does_not_show_a_write_through_that_may_still_fail() {
    let (mut world, slot) = through();
    let before = world.read(3 * BLOCK, 512);
    world.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write));
    world.holds = Box::new(|io| io.op == Op::Write && is_on(io, "origin"));
    world.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[2; 512]), false, 1));
    world.settle();
    assert_eq!((world.held.len(), peek(&world, 1, slot * BLOCK)), (1, [2; 512]));
    assert_eq!(world.read(3 * BLOCK, 512), before);
    world.release();
    assert!(world.port.done.drain(..).any(|bio| (bio.token, bio.status) == (1, Err(Status::Io))));
    assert_eq!(world.read(3 * BLOCK, 512), before);
}

#[test]
pub fn a_read_does_not_show_zeroes_that_a_death_would_take_back() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(3);
    let zero = |fixture: &mut Fixture| {
        fixture.write(3 * BLOCK, &[7; 512]);
        fixture.holds = Box::new(|io| is_on(io, "meta") && io.op == Op::Flush);
        fixture.submit(Bio::bare(Op::WriteZeroes, 3 * BLOCK, BLOCK, false, 1));
        fixture.settle();
    };
    zero(&mut fixture);
    assert_eq!(read_and_die(&mut fixture), 7);
    zero(&mut fixture);
    assert_eq!(read_and_go_on(&mut fixture), 0);
}

/// The flush of another client loses the zeroes, and the one that follows them is good.
#[test]
pub fn a_flush_that_failed_beside_zeroes_does_not_cost_their_block() {
    for seed in 0..20 {
        let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
        fixture.bring(3);
        fixture.write(3 * BLOCK, &[7; BLOCK as usize]);
        fixture.write(6 * BLOCK, &[1; 512]);
        fixture.holds = Box::new(|io| is_on(io, "origin") && io.op == Op::Flush);
        fixture.submit(Bio::flush(1));
        fixture.settle();
        fixture.submit(Bio::bare(Op::WriteZeroes, 3 * BLOCK, BLOCK, false, 2));
        fixture.settle();
        assert_eq!(fixture.held.len(), 2, "of the client, and after the zeroes");
        fixture.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
        fixture.release();
        let mut done = fixture.port.done.drain(..).map(|bio| (bio.token, bio.status));
        assert!(done.all(|(_, status)| status == Err(Status::Io)));
        drop(done);
        fixture.tick(2 * SECOND);
        fixture.crash(&mut Prng::new(seed));
        fixture.open();
        assert_eq!(fixture.read(3 * BLOCK, BLOCK as usize), [7; BLOCK as usize], "{seed}");
    }
}

/// A flush that failed may have lost data that another flush under way should cover.
#[test]
pub fn two_flushes_fail_of_which_the_origin_refuses_one() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.write(6 * BLOCK, &[1; 512]);
    fixture.holds = Box::new(|io| is_on(io, "origin") && io.op == Op::Flush);
    for token in [1, 2] {
        fixture.submit(Bio::flush(token));
        fixture.settle();
    }
    assert_eq!(fixture.held.len(), 2);
    fixture.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    fixture.release();
    let done: Vec<_> = fixture.port.done.drain(..).map(|bio| bio.status).collect();
    assert_eq!(done, [Err(Status::Io); 2]);
    fixture.flush();
}

/// The client whose flush failed got the error. A durable write that waits for a commit meanwhile
/// does not get it as well.
#[test]
pub fn a_failed_flush_does_not_fail_writes_that_wait_for_a_commit() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(3);
    fixture.write(6 * BLOCK, &[1; 512]);
    fixture.holds = Box::new(|io| is_on(io, "origin") && io.op == Op::Flush);
    fixture.submit(Bio::flush(1));
    fixture.settle();
    fixture.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[7; 512]), true, 2));
    fixture.settle();
    fixture.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    fixture.release();
    fixture.holds = Box::new(|_| false);
    for _ in 0..10 {
        fixture.tick(SECOND / 1000);
        fixture.release();
    }
    let mut done: Vec<_> = fixture.port.done.drain(..).map(|bio| (bio.token, bio.status)).collect();
    done.sort_by_key(|(token, _)| *token);
    assert_eq!(done, [(1, Err(Status::Io)), (2, Ok(()))]);
    assert_eq!(fixture.read(3 * BLOCK, 512), [7; 512]);
}

/// A client whose flushes fail without end does not keep others waiting for a commit.
#[test]
pub fn a_commit_is_not_repeated_without_end() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(3);
    fixture.write(6 * BLOCK, &[1; 512]);
    let passing = Rc::new(Cell::new(0_usize));
    let left = passing.clone();
    fixture.holds = Box::new(move |io| {
        let is_flush = is_on(io, "origin") && io.op == Op::Flush;
        is_flush && left.replace(left.get().saturating_sub(1)) == 0
    });
    fixture.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[7; 512]), true, 1000));
    fixture.settle();
    let mut failed = 0;
    for token in 0..50 {
        fixture.submit(Bio::write(6 * BLOCK, Buffer::from_bytes(&[1; 512]), false, token));
        fixture.settle();
        fixture.submit(Bio::flush(100 + token));
        fixture.settle();
        fixture.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
        // The origin completes the client's flush first, and then the commit's.
        passing.set(fixture.held.len());
        let held = fixture.held.drain(..).rev().collect::<Vec<_>>();
        fixture.port.ios.extend(held);
        fixture.settle();
        for bio in fixture.port.done.drain(..) {
            if bio.token == 1000 {
                assert!(bio.status.is_err() && failed >= 4, "{:?} after {failed}", bio.status);
                return;
            }
            failed += u32::from(bio.status.is_err());
        }
    }
    panic!("the write waits without end");
}

#[test]
pub fn a_drain_waits_for_blocks_whose_flush_failed() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(3);
    fixture.write(3 * BLOCK, &[7; 512]);
    fixture.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush));
    fixture.target().set_draining(true);
    for _ in 0..50 {
        fixture.tick(SECOND / 10);
        assert!(fixture.target().left_to_drain() > 0, "the origin may not have the block");
    }
    fixture.disks[2].heal();
    for _ in 0..600 {
        fixture.tick(SECOND / 10);
    }
    assert_eq!(fixture.target().left_to_drain(), 0);
    let origin = fixture.disks[2].crash_with(|_, _| 0);
    let mut data = [0; 512];
    origin.peek(3 * BLOCK, &mut data);
    assert_eq!(data, [7; 512]);
}

/// The block is clean, and no flush covered its slot. The first commit that marks it as clean fails
/// before it has flushed anything.
#[test]
pub fn a_commit_after_a_failed_one_flushes_the_data_of_both() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(3);
    fixture.write(3 * BLOCK, &[7; 512]);
    fixture.drain();
    let slot = slot_of(&fixture, 3);
    let metadata: Arc<dyn Disk> = fixture.disks[0].clone();
    let is_marked = |metadata: &Arc<dyn Disk>| load(metadata).unwrap().contents.dirty.is_set(slot);
    assert!(is_marked(&metadata));
    fixture.disks[0].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write).times(1));
    for _ in 0..120 {
        fixture.tick(SECOND);
    }
    assert!(fixture.fact("failed_commits_total") == 1 && !is_marked(&metadata));
    let disks = fixture.disks.clone().map(|disk| Arc::new(disk.crash_with(|_, _| 0)));
    fixture.kill();
    fixture.disks = disks;
    fixture.open();
    assert_eq!(fixture.read(3 * BLOCK, 512), [7; 512]);
}

/// Only the old table knows: no client got the error, and promoted blocks may equal data that the
/// origin shows and a power failure takes away.
#[test]
pub fn another_table_does_not_forget_what_the_origin_has_lost() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(3);
    fixture.drain();
    fixture.write(3 * BLOCK, &[7; 512]);
    fixture.write(5 * BLOCK, &[8; 512]);
    fixture.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    fixture.drain();
    fixture.suspend();
    let error = fixture.target().hand_over().unwrap_err();
    assert!(error.to_string().contains("its origin failed a flush"), "{error}");
    fixture.target().resume().unwrap();
    assert_eq!(fixture.run(Bio::flush(1)).status, Err(Status::Io), "a client gets the error");
    fixture.flush();
}

/// The write was refused, and a crash may leave it or not: this is unknown until a commit decides
/// it.
#[test]
fn what_a_failed_commit_leaves_open_is_not_read_until_another_decides() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    let value = write_that_brings_its_block(&mut fixture);
    fixture.disks[0].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush));
    fixture.release();
    assert_eq!(fixture.port.done.pop_front().map(|bio| bio.status), Some(Err(Status::Io)));
    assert_eq!(fixture.try_read(3 * BLOCK, 512), Err(Status::Io));
    fixture.disks[0].heal();
    fixture.tick(60 * SECOND);
    assert_eq!(fixture.read(3 * BLOCK, 512), [value; 512]);
}

#[test]
pub fn what_a_superblock_leads_to_that_failed_is_left_alone() {
    let mut fixture = Fixture::opened(TABLE, 130, ORIGIN);
    fixture.bring(3);
    fixture.tick(2 * SECOND);
    let written = |fixture: &Fixture| -> Vec<u64> {
        let writes = fixture.history.iter();
        let writes =
            writes.filter(|(name, op, at, _)| name == "meta" && *op == Op::Write && *at > 0);
        writes.map(|(_, _, at, _)| *at).collect()
    };
    hold_superblock_flush(&mut fixture);
    fixture.history.clear();
    fixture.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[2; 512]), false, 1));
    fixture.settle();
    assert_eq!(fixture.held.len(), 1);
    let first = written(&fixture);
    fixture.disks[0].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    fixture.history.clear();
    fixture.release();
    assert_eq!(fixture.fact("failed_commits_total"), 1);
    for _ in 0..20 {
        fixture.tick(SECOND);
    }
    let second = written(&fixture);
    assert!(!first.is_empty() && !second.is_empty());
    let reused: Vec<&u64> = first.iter().filter(|at| second.contains(at)).collect();
    assert!(reused.is_empty(), "{reused:?} may be what the superblock on the device leads to");
}

#[test]
pub fn every_slot_of_a_word_is_marked_in_version_1() {
    // Blocks of mappings have 509 elements; the word of the slots 448 to 511 is in two of them.
    let mut fixture = Fixture::new("64 0 smq 0", disks(520, 16 * BLOCK));
    let mut contents = Contents::empty(520);
    for (slot, block) in [(500, 1), (508, 2), (509, 3), (511, 4), (512, 5)] {
        contents.mappings[slot] = mapping(Some(block));
    }
    let mut superblock = Superblock::fresh(1, 64);
    superblock.put_flag(CLEAN_SHUTDOWN, true);
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    write_whole(&disk, superblock, &contents).unwrap();
    for (slot, block) in [(511, 4), (500, 1), (512, 5)] {
        fixture.open();
        fixture.write(block * BLOCK, &[block as u8; 512]);
        fixture.kill();
        assert!(load(&disk).unwrap().contents.dirty.is_set(slot), "slot {slot}");
    }
}

#[test]
pub fn a_slot_is_not_given_away_while_it_is_read() {
    let mut fixture = Fixture::new(TABLE, disks(1, ORIGIN));
    for block in 0..8 {
        let content = vec![block as u8 + 1; BLOCK as usize];
        fixture.disks[2].poke(block * BLOCK, &content);
    }
    fixture.open();
    fixture.bring(3);
    fixture.holds = Box::new(|io| io.op == Op::Read && is_on(io, "cache"));
    fixture.submit(Bio::read(3 * BLOCK, Buffer::zeroed(512), 77));
    fixture.settle();
    assert_eq!(fixture.held.len(), 1);
    for nth in 0..3000 {
        fixture.submit(Bio::read(5 * BLOCK + nth % 60 * SECTOR, Buffer::zeroed(512), 1));
        fixture.settle();
        fixture.port.done.clear();
        if nth % 50 == 0 {
            fixture.tick(SECOND);
        }
    }
    fixture.release();
    let done = fixture.port.done.iter().find(|bio| bio.token == 77).expect("the read ends");
    assert_eq!(done.buffer.as_slice(), [4; 512]);
}

/// A cache that is promoting block 3: the data has been read and is about to be written.
fn promoting() -> Fixture {
    let mut fixture = Fixture::new(TABLE, disks(4, ORIGIN));
    fixture.disks[2].poke(3 * BLOCK, &vec![7; BLOCK as usize]);
    fixture.open();
    fixture.holds = Box::new(|io| io.op == Op::Write && is_on(io, "cache"));
    for _ in 0..4000 {
        fixture.read(3 * BLOCK, 512);
        if !fixture.held.is_empty() {
            return fixture;
        }
    }
    panic!("block 3 does not come: {}", fixture.target().status());
}

#[test]
pub fn zeroes_cancel_a_promotion() {
    for op in [Op::Discard, Op::WriteZeroes] {
        let mut fixture = promoting();
        fixture.bare(op, 3 * BLOCK, 512);
        fixture.release();
        assert_eq!(fixture.read(3 * BLOCK, 1024), [vec![0; 512], vec![7; 512]].concat());
        fixture.remove();
        fixture.open();
        assert_eq!(fixture.read(3 * BLOCK, 1024), [vec![0; 512], vec![7; 512]].concat());
    }
}

#[test]
pub fn a_block_whose_copy_failed_does_not_come() {
    let mut fixture = promoting();
    fixture.disks[1].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write).times(1));
    fixture.release();
    assert_eq!(fixture.fact("cached_bytes"), 0);
    assert_eq!(fixture.read(3 * BLOCK, 512), [7; 512]);
}

#[test]
pub fn hints_of_another_policy_are_dropped() {
    for (policy, is_believed) in [("smq", true), ("other", false)] {
        let mut fixture = Fixture::new(TABLE, disks(4, ORIGIN));
        let mut contents = Contents::empty(4);
        (0..4).for_each(|slot| contents.mappings[slot] = mapping(Some(slot as u64)));
        contents.hints = Some(vec![63; 4]);
        let mut superblock = Superblock::fresh(2, 64);
        superblock.put_flag(CLEAN_SHUTDOWN, true);
        superblock.set_policy(policy).unwrap();
        superblock.fields.policy_version[0].set(2);
        superblock.fields.hint_bytes.set(4);
        let disk: Arc<dyn Disk> = fixture.disks[0].clone();
        write_whole(&disk, superblock, &contents).unwrap();
        fixture.open();
        fixture.remove();
        let hints = load(&disk).unwrap().contents.hints.unwrap();
        assert_eq!(hints == [63; 4], is_believed, "{policy}: {hints:?}");
    }
}
