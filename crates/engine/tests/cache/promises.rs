//! Promises that random histories meet rarely or not at all, each in a scene made for it. The
//! deliberate bugs of `SCENES` must be found by one of these.

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

use crate::world::{BLOCK, SECTOR, World, disks};

const ORIGIN: u64 = 8 * BLOCK;
const TABLE: &str = "64 1 metadata2 smq 0";
const THROUGH: &str = "64 2 metadata2 writethrough smq 0";

/// Every scene, for the tests of deliberate bugs.
#[cfg(feature = "mutants")]
pub const SCENES: &[fn()] = &[
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
    a_read_does_not_show_zeroes_that_a_death_would_take_back,
    a_flush_that_failed_beside_zeroes_does_not_cost_their_block,
    another_table_does_not_forget_what_the_origin_has_lost,
    crate::basics::passthrough_gives_up_what_is_written_to,
    crate::parts::scattered_writes_are_all_written_back,
    crate::parts::zeroes_of_a_part_are_written_back,
    crate::in_part::a_write_does_not_wait_for_a_fill_and_spoils_it,
    crate::in_part::what_is_zeroed_below_is_not_read_from_the_slot,
    crate::in_part::a_slot_with_a_part_is_not_given_away_while_it_is_read,
    crate::in_part::a_whole_block_is_not_written_over_a_fill,
    crate::promotion::a_miss_of_4_kib_moves_4_kib_before_its_answer_and_its_block_once,
];

fn is_on(io: &DiskIo, device: &str) -> bool {
    io.disk.limits().name == device
}

/// The slot of a block, as the medium has it.
fn slot_of(world: &World, block: u64) -> u64 {
    let disk: Arc<dyn Disk> = world.disks[0].clone();
    let contents = load(&disk).unwrap().contents;
    contents.in_use().find(|(_, held)| *held == block).expect("it is in the cache").0
}

fn peek(world: &World, disk: usize, at: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    world.disks[disk].peek(at, &mut bytes);
    bytes
}

/// A cache in writethrough whose block 3 has a slot that may be written to, and the slot.
fn through() -> (World, u64) {
    let mut world = World::opened(THROUGH, 4, ORIGIN);
    world.bring(3);
    world.write(3 * BLOCK, &[1; 512]);
    let slot = slot_of(&world, 3);
    assert_eq!(peek(&world, 1, slot * BLOCK), [1; 512]);
    (world, slot)
}

#[test]
pub fn two_writes_through_leave_both_devices_the_same() {
    let (mut world, slot) = through();
    world.holds = Box::new(|io| io.op == Op::Write && !is_on(io, "meta"));
    for value in [2, 3] {
        world.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[value; 512]), false, value.into()));
        world.settle();
    }
    // The devices are free to carry them out in orders of their own.
    world.held.sort_by_key(|io| match (is_on(io, "cache"), io.buffer.as_slice()[0]) {
        (true, value) => u8::MAX - value,
        (false, value) => value,
    });
    world.release();
    assert_eq!(world.port.done.len(), 2);
    assert_eq!(peek(&world, 1, slot * BLOCK), peek(&world, 2, 3 * BLOCK));
}

#[test]
pub fn a_mark_stays_while_a_write_through_is_under_way() {
    let (mut world, slot) = through();
    world.holds = Box::new(|io| io.op == Op::Write && is_on(io, "origin"));
    world.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[2; 512]), false, 1));
    for _ in 0..5 {
        world.tick(11 * SECOND);
    }
    world.tick(2 * SECOND);
    assert_eq!((world.held.len(), peek(&world, 1, slot * BLOCK)), (1, [2; 512]));
    world.kill();
    let disk: Arc<dyn Disk> = world.disks[0].clone();
    assert!(load(&disk).unwrap().contents.dirty.is_set(slot), "the devices differ");
}

/// Holds the second flush of the metadata from now on: that of a commit's superblock.
fn hold_superblock_flush(world: &mut World) {
    let mut flushes = 0;
    world.holds = Box::new(move |io| {
        flushes += u64::from(is_on(io, "meta") && io.op == Op::Flush);
        is_on(io, "meta") && io.op == Op::Flush && flushes == 2
    });
}

#[test]
pub fn what_a_dead_server_left_is_durable_before_it_is_believed() {
    let mut world = World::opened(TABLE, 4, ORIGIN);
    world.bring(3);
    world.tick(2 * SECOND);
    let slot = slot_of(&world, 3);
    hold_superblock_flush(&mut world);
    world.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[2; 512]), false, 1));
    world.settle();
    assert_eq!(world.held.len(), 1, "the mark is written, and not durable");
    world.kill();
    world.open();
    world.write(3 * BLOCK, &[3; 512]);
    world.flush();
    // A power cut that takes all that was not flushed.
    let disks = world.disks.clone().map(|disk| Arc::new(disk.crash_with(|_, _| 0)));
    world.kill();
    world.disks = disks;
    let metadata: Arc<dyn Disk> = world.disks[0].clone();
    assert!(load(&metadata).unwrap().contents.dirty.is_set(slot), "a flushed write is lost");
    assert_eq!(peek(&world, 1, slot * BLOCK), [3; 512]);
}

/// A write of a whole block that waits for the commit of its slot's mapping, and its value.
fn write_that_brings_its_block(world: &mut World) -> u8 {
    for value in 1..=u8::MAX {
        world.holds = Box::new(|io| is_on(io, "meta") && io.op == Op::Flush);
        let data = Buffer::from_bytes(&[value; BLOCK as usize]);
        world.submit(Bio::write(3 * BLOCK, data, false, value.into()));
        world.settle();
        if world.port.done.pop_front().is_none() {
            return value;
        }
    }
    panic!("the policy does not want the block: {}", world.target().status());
}

/// Reads block 3 while a commit is held, and says what a server that comes later reads there.
fn read_and_die(world: &mut World) -> u8 {
    world.submit(Bio::read(3 * BLOCK, Buffer::zeroed(512), 0));
    world.settle();
    assert!(world.port.done.is_empty(), "the metadata is not durable");
    world.kill();
    world.open();
    world.read(3 * BLOCK, 512)[0]
}

/// Reads block 3 while a commit is held that goes on then, and says what the read shows.
fn read_and_go_on(world: &mut World) -> u8 {
    world.submit(Bio::read(3 * BLOCK, Buffer::zeroed(512), 0));
    world.release();
    let done = world.port.done.iter().find(|bio| bio.op == Op::Read).expect("it is durable now");
    done.buffer.as_slice()[0]
}

#[test]
pub fn a_read_does_not_show_a_write_that_a_death_would_take_back() {
    let mut world = World::opened(TABLE, 4, ORIGIN);
    let value = write_that_brings_its_block(&mut world);
    assert_eq!(read_and_die(&mut world), value - 1);
    let value = write_that_brings_its_block(&mut world);
    assert_eq!(read_and_go_on(&mut world), value);
}

#[test]
pub fn a_read_does_not_show_zeroes_that_a_death_would_take_back() {
    let mut world = World::opened(TABLE, 4, ORIGIN);
    world.bring(3);
    let zero = |world: &mut World| {
        world.write(3 * BLOCK, &[7; 512]);
        world.holds = Box::new(|io| is_on(io, "meta") && io.op == Op::Flush);
        world.submit(Bio::bare(Op::WriteZeroes, 3 * BLOCK, BLOCK, false, 1));
        world.settle();
    };
    zero(&mut world);
    assert_eq!(read_and_die(&mut world), 7);
    zero(&mut world);
    assert_eq!(read_and_go_on(&mut world), 0);
}

/// The flush of another client loses the zeroes, and the one that follows them is good.
#[test]
pub fn a_flush_that_failed_beside_zeroes_does_not_cost_their_block() {
    for seed in 0..20 {
        let mut world = World::opened(TABLE, 4, ORIGIN);
        world.bring(3);
        world.write(3 * BLOCK, &[7; BLOCK as usize]);
        world.write(6 * BLOCK, &[1; 512]);
        world.holds = Box::new(|io| is_on(io, "origin") && io.op == Op::Flush);
        world.submit(Bio::flush(1));
        world.settle();
        world.submit(Bio::bare(Op::WriteZeroes, 3 * BLOCK, BLOCK, false, 2));
        world.settle();
        assert_eq!(world.held.len(), 2, "of the client, and after the zeroes");
        world.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
        world.release();
        let mut done = world.port.done.drain(..).map(|bio| (bio.token, bio.status));
        assert!(done.all(|(_, status)| status == Err(Status::Io)));
        drop(done);
        world.tick(2 * SECOND);
        world.crash(&mut Prng::new(seed));
        world.open();
        assert_eq!(world.read(3 * BLOCK, BLOCK as usize), [7; BLOCK as usize], "{seed}");
    }
}

/// Nobody but the old table knows: a client has not heard of it, and blocks that come may equal
/// what the origin shows and a power cut takes away.
#[test]
pub fn another_table_does_not_forget_what_the_origin_has_lost() {
    let mut world = World::opened(TABLE, 4, ORIGIN);
    world.bring(3);
    world.drain();
    world.write(3 * BLOCK, &[7; 512]);
    world.write(5 * BLOCK, &[8; 512]);
    world.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    world.drain();
    world.suspend();
    let error = world.target().hand_over().unwrap_err();
    assert!(error.to_string().contains("its origin has refused a flush"), "{error}");
    world.target().resume().unwrap();
    assert_eq!(world.run(Bio::flush(1)).status, Err(Status::Io), "a client hears of it");
    world.flush();
}

/// The write was refused, and a crash may leave it or not: until a commit says which, nobody can.
#[test]
fn what_a_failed_commit_leaves_open_is_not_read_until_another_decides() {
    let mut world = World::opened(TABLE, 4, ORIGIN);
    let value = write_that_brings_its_block(&mut world);
    world.disks[0].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush));
    world.release();
    assert_eq!(world.port.done.pop_front().map(|bio| bio.status), Some(Err(Status::Io)));
    assert_eq!(world.try_read(3 * BLOCK, 512), Err(Status::Io));
    world.disks[0].heal();
    world.tick(60 * SECOND);
    assert_eq!(world.read(3 * BLOCK, 512), [value; 512]);
}

#[test]
pub fn what_a_superblock_leads_to_that_failed_is_left_alone() {
    let mut world = World::opened(TABLE, 130, ORIGIN);
    world.bring(3);
    world.tick(2 * SECOND);
    let written = |world: &World| -> Vec<u64> {
        let writes = world.history.iter();
        let writes =
            writes.filter(|(name, op, at, _)| name == "meta" && *op == Op::Write && *at > 0);
        writes.map(|(_, _, at, _)| *at).collect()
    };
    hold_superblock_flush(&mut world);
    world.history.clear();
    world.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[2; 512]), false, 1));
    world.settle();
    assert_eq!(world.held.len(), 1);
    let first = written(&world);
    world.disks[0].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    world.history.clear();
    world.release();
    assert_eq!(world.fact("failed_commits_total"), 1);
    for _ in 0..20 {
        world.tick(SECOND);
    }
    let second = written(&world);
    assert!(!first.is_empty() && !second.is_empty());
    let reused: Vec<&u64> = first.iter().filter(|at| second.contains(at)).collect();
    assert!(reused.is_empty(), "{reused:?} may be what the superblock on the device leads to");
}

#[test]
pub fn every_slot_of_a_word_is_marked_in_version_1() {
    // Blocks of mappings have 509 elements; the word of the slots 448 to 511 is in two of them.
    let mut world = World::new("64 0 smq 0", disks(520, 16 * BLOCK));
    let mut contents = Contents::empty(520);
    for (slot, block) in [(500, 1), (508, 2), (509, 3), (511, 4), (512, 5)] {
        contents.mappings[slot] = mapping(Some(block));
    }
    let mut superblock = Superblock::fresh(1, 64);
    superblock.put_flag(CLEAN_SHUTDOWN, true);
    let disk: Arc<dyn Disk> = world.disks[0].clone();
    write_whole(&disk, superblock, &contents).unwrap();
    for (slot, block) in [(511, 4), (500, 1), (512, 5)] {
        world.open();
        world.write(block * BLOCK, &[block as u8; 512]);
        world.kill();
        assert!(load(&disk).unwrap().contents.dirty.is_set(slot), "slot {slot}");
    }
}

#[test]
pub fn a_slot_is_not_given_away_while_it_is_read() {
    let mut world = World::new(TABLE, disks(1, ORIGIN));
    for block in 0..8 {
        let content = vec![block as u8 + 1; BLOCK as usize];
        world.disks[2].poke(block * BLOCK, &content);
    }
    world.open();
    world.bring(3);
    world.holds = Box::new(|io| io.op == Op::Read && is_on(io, "cache"));
    world.submit(Bio::read(3 * BLOCK, Buffer::zeroed(512), 77));
    world.settle();
    assert_eq!(world.held.len(), 1);
    for nth in 0..3000 {
        world.submit(Bio::read(5 * BLOCK + nth % 60 * SECTOR, Buffer::zeroed(512), 1));
        world.settle();
        world.port.done.clear();
        if nth % 50 == 0 {
            world.tick(SECOND);
        }
    }
    world.release();
    let done = world.port.done.iter().find(|bio| bio.token == 77).expect("the read ends");
    assert_eq!(done.buffer.as_slice(), [4; 512]);
}

/// A cache with a copy of block 3 on its way into it: what it has read is about to be written.
fn promoting() -> World {
    let mut world = World::new(TABLE, disks(4, ORIGIN));
    world.disks[2].poke(3 * BLOCK, &vec![7; BLOCK as usize]);
    world.open();
    world.holds = Box::new(|io| io.op == Op::Write && is_on(io, "cache"));
    for _ in 0..4000 {
        world.read(3 * BLOCK, 512);
        if !world.held.is_empty() {
            return world;
        }
    }
    panic!("block 3 does not come: {}", world.target().status());
}

#[test]
pub fn zeroes_cancel_a_promotion() {
    for op in [Op::Discard, Op::WriteZeroes] {
        let mut world = promoting();
        world.bare(op, 3 * BLOCK, 512);
        world.release();
        assert_eq!(world.read(3 * BLOCK, 1024), [vec![0; 512], vec![7; 512]].concat());
        world.remove();
        world.open();
        assert_eq!(world.read(3 * BLOCK, 1024), [vec![0; 512], vec![7; 512]].concat());
    }
}

#[test]
pub fn a_block_whose_copy_failed_does_not_come() {
    let mut world = promoting();
    world.disks[1].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write).times(1));
    world.release();
    assert_eq!(world.fact("cached_bytes"), 0);
    assert_eq!(world.read(3 * BLOCK, 512), [7; 512]);
}

#[test]
pub fn hints_of_another_policy_are_dropped() {
    for (policy, is_believed) in [("smq", true), ("other", false)] {
        let mut world = World::new(TABLE, disks(4, ORIGIN));
        let mut contents = Contents::empty(4);
        (0..4).for_each(|slot| contents.mappings[slot] = mapping(Some(slot as u64)));
        contents.hints = Some(vec![63; 4]);
        let mut superblock = Superblock::fresh(2, 64);
        superblock.put_flag(CLEAN_SHUTDOWN, true);
        superblock.set_policy(policy).unwrap();
        superblock.fields.policy_version[0].set(2);
        superblock.fields.hint_bytes.set(4);
        let disk: Arc<dyn Disk> = world.disks[0].clone();
        write_whole(&disk, superblock, &contents).unwrap();
        world.open();
        world.remove();
        let hints = load(&disk).unwrap().contents.hints.unwrap();
        assert_eq!(hints == [63; 4], is_believed, "{policy}: {hints:?}");
    }
}
