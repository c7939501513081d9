//! Write-back copies the sectors that are newer than the origin, and never fewer.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{Effect, Fault};
use udm::error::Status;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::world::{BLOCK, SECTOR, World, disks};

const TABLE: &str = "64 1 metadata2 smq 0";
const THROUGH: &str = "64 2 metadata2 writethrough smq 0";

/// A cache with block 3, clean, of an origin full of nines.
fn with_block(table: &str) -> World {
    let mut world = World::new(table, disks(4, 8 * BLOCK));
    world.disks[2].poke(0, &vec![9; 8 * BLOCK as usize]);
    world.open();
    world.bring(3);
    world.tick(2 * SECOND);
    world.history.clear();
    world
}

/// What was written to the origin in block 3, in bytes from its start.
fn written_back(world: &World) -> Vec<(u64, u64)> {
    let writes = world.history.iter();
    let writes = writes.filter(|(name, op, ..)| name == "origin" && *op == Op::Write);
    writes.map(|(_, _, at, len)| (at - 3 * BLOCK, *len)).collect()
}

/// The origin's block 3 is the same as what clients see.
fn assert_drained(world: &mut World) {
    let seen = world.read(3 * BLOCK, BLOCK as usize);
    let mut below = vec![0; BLOCK as usize];
    world.disks[2].peek(3 * BLOCK, &mut below);
    let differs = (0..BLOCK as usize / 512).find(|nth| seen[nth * 512] != below[nth * 512]);
    assert!(seen == below, "sector {differs:?}");
}

#[test]
fn write_back_moves_what_was_written() {
    let mut world = with_block(TABLE);
    world.write(3 * BLOCK + 4096, &[1; 4096]);
    world.write(3 * BLOCK + 8192, &[2; 512]);
    world.write(3 * BLOCK + 20480, &[3; 1024]);
    world.write(3 * BLOCK + 4096, &[4; 512]);
    assert_eq!(world.fact("dirty_bytes"), BLOCK);
    world.drain();
    assert_eq!(written_back(&world), [(4096, 4608), (20480, 1024)]);
    assert_drained(&mut world);
    // It was clean in between.
    world.history.clear();
    world.write(3 * BLOCK, &[5; 512]);
    world.drain();
    assert_eq!(written_back(&world), [(0, 512)]);
    assert_drained(&mut world);
}

#[test]
fn what_a_dead_server_left_is_written_back_as_a_whole() {
    let mut world = with_block(TABLE);
    world.write(3 * BLOCK + 512, &[1; 512]);
    world.kill();
    world.open();
    world.write(3 * BLOCK, &[2; 512]);
    world.history.clear();
    world.drain();
    assert_eq!(written_back(&world), [(0, BLOCK)]);
    assert_drained(&mut world);
}

#[test]
pub fn scattered_writes_are_all_written_back() {
    let mut prng = Prng::new(11);
    let mut world = with_block(TABLE);
    for _ in 0..30 {
        for _ in 0..1 + prng.below(40) {
            let sector = prng.below(BLOCK / SECTOR);
            world.write(3 * BLOCK + sector * SECTOR, &[1 + prng.below(250) as u8; 512]);
        }
        world.drain();
        assert_drained(&mut world);
    }
}

#[test]
pub fn zeroes_of_a_part_are_written_back() {
    for op in [Op::Discard, Op::WriteZeroes] {
        let mut world = with_block(TABLE);
        world.write(3 * BLOCK, &[1; 512]);
        world.bare(op, 3 * BLOCK + 2048, 4096);
        world.history.clear();
        world.drain();
        assert_eq!(written_back(&world), [(0, 512), (2048, 4096)]);
        assert_drained(&mut world);
    }
}

#[test]
fn what_is_written_during_a_copy_that_fails_is_not_all_that_is_written_back() {
    let mut world = with_block(TABLE);
    world.write(3 * BLOCK, &[1; 512]);
    world.holds =
        Box::new(|io| io.op == Op::Write && udm::disk::Disk::limits(&*io.disk).name == "origin");
    world.target().set_draining(true);
    world.tick(SECOND);
    assert_eq!(world.held.len(), 1);
    let other = Bio::write(3 * BLOCK + 8192, Buffer::from_bytes(&[2; 512]), false, 1);
    world.submit(other);
    world.settle();
    assert!(world.port.done.pop_front().is_some_and(|bio| bio.status.is_ok()), "it waits");
    world.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write).times(1));
    world.release();
    world.drain();
    assert_eq!(written_back(&world), [(0, 512), (0, 512), (8192, 512)]);
    assert_drained(&mut world);
}

#[test]
fn a_write_through_that_failed_leaves_all_of_its_block_dirty() {
    let mut world = with_block(THROUGH);
    world.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write).times(1));
    world.try_write(3 * BLOCK, &[1; 512]).unwrap_err();
    assert_eq!(world.fact("dirty_bytes"), BLOCK);
    world.history.clear();
    world.write(3 * BLOCK + 512, &[2; 512]);
    world.drain();
    assert_eq!(written_back(&world), [(0, BLOCK)]);
    assert_drained(&mut world);
}

#[test]
fn what_is_clean_and_cannot_be_read_does_not_keep_the_rest_from_the_origin() {
    let mut world = with_block(TABLE);
    world.write(3 * BLOCK, &[1; 512]);
    // A part that nobody wrote to.
    let slot =
        world.history.iter().rev().find(|(name, op, ..)| name == "cache" && *op == Op::Write);
    let slot_at = slot.expect("the write was a hit").2;
    let bad = slot_at + 8192..slot_at + 12288;
    world.disks[1].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Read).within(bad));
    world.drain();
    assert_eq!(written_back(&world), [(0, 512)]);
    let found = world.read(3 * BLOCK, BLOCK as usize);
    assert!(found[..512] == [1; 512] && found[512..].iter().all(|byte| *byte == 9));
    assert_eq!(world.fact("fallbacks_total"), 1);
}
