//! Mode `s` overwrites committed blocks where they are, if the device writes them whole, or if the
//! table says that they may be torn.

use udm::bio::{Bio, Op};
use udm::disk::DiskIo;
use udm::prng::Prng;
use udm::units::SECOND;

use crate::world::World;

const MIB: u64 = 1 << 20;
/// A device of 512-byte sectors may tear such blocks.
const TORN: &str = "s O C 4096 2 autocommit_time 3600000 atomic_blocks false";
/// And writes these whole.
const WHOLE: &str = "s O C 512 2 autocommit_time 3600000";

fn cache_write(io: &DiskIo) -> bool {
    io.disk.limits().name == "cache" && io.op == Op::Write
}

#[test]
fn a_committed_block_costs_one_write_and_one_flush() {
    for (table, block, is_overwritten) in [
        (TORN, 4096, true),
        (WHOLE, 512, true),
        ("s O C 4096 0", 4096, false),
        ("s O C 512 0 atomic_blocks true", 512, false),
    ] {
        let mut world = World::new(table, MIB, 4 * MIB);
        world.open();
        world.write(block * 8, &vec![1; block as usize], false);
        world.flush();
        world.history.clear();
        world.write(block * 8, &vec![2; block as usize], false);
        world.flush();
        let ops: Vec<_> = world.history.iter().map(|(_, op, ..)| *op).collect();
        match is_overwritten {
            true => assert_eq!(ops, [Op::Write, Op::Flush], "{table}"),
            false => assert_eq!(ops.len(), 5, "{table}: data, entries, flush, counter, flush"),
        }
        assert_eq!(world.fact("overwritten_blocks_total"), u64::from(is_overwritten));
        for seed in 0..10 {
            world.power_cut(&mut Prng::new(seed));
            world.open();
            assert_eq!(world.read(block * 8, block as usize), vec![2; block as usize]);
        }
    }
}

#[test]
fn what_is_not_flushed_is_old_or_new_sector_by_sector() {
    let mut world = World::new(TORN, MIB, 4 * MIB);
    world.open();
    world.write(0, &[1; 4096], true);
    let mut torn = 0;
    for seed in 0..30 {
        world.write(0, &[2; 4096], false);
        world.power_cut(&mut Prng::new(seed));
        world.open();
        let found = world.read(0, 4096);
        let is_whole =
            |sector: &[u8]| sector.iter().all(|byte| *byte == sector[0] && [1, 2].contains(byte));
        assert!(found.chunks(512).all(is_whole));
        torn += u32::from(found.iter().any(|byte| *byte != found[0]));
        world.write(0, &[1; 4096], true);
    }
    assert!(torn > 0, "the test would not see a block that is not overwritten");
}

#[test]
fn a_block_that_is_written_back_or_scattered_gets_free_slots() {
    let mut world = World::new(TORN, MIB, 4 * MIB);
    world.open();
    world.write(4096, &[1; 4096], false);
    world.write(0, &[1; 4096], true);
    // Neighbours, but their slots are the other way round.
    world.write(0, &[2; 8192], true);
    assert_eq!(world.fact("overwritten_blocks_total"), 0);
    world.write(0, &[3; 8192], true);
    assert_eq!(world.fact("overwritten_blocks_total"), 2);
    world.holds = Box::new(|io| io.disk.limits().name == "origin" && io.op == Op::Write);
    world.message("flush").unwrap();
    world.tick(SECOND);
    assert_eq!(world.held.len(), 1);
    world.write(0, &[4; 8192], true);
    assert_eq!(world.fact("overwritten_blocks_total"), 2);
    world.release();
    world.drain();
    assert_eq!(world.origin.image()[..8192], [4; 8192]);
}

/// Which version the medium has, and which it will have, nobody knows: the block is not shown
/// until the next server has settled it.
#[test]
fn after_a_failed_overwrite_nothing_doubtful_is_shown() {
    let mut world = World::new(TORN, MIB, 4 * MIB);
    world.open();
    world.write(0, &[1; 8192], true);
    world.write(8192, &[5; 4096], false);
    world.refuses = Box::new(cache_write);
    assert!(world.try_write(0, &[2; 4096], false).is_err());
    world.refuses = Box::new(|_| false);
    assert!(world.try_read(0, 4096).is_err());
    assert_eq!(world.read(4096, 4096), [1; 4096]);
    assert!(world.try_write(4096, &[3; 4096], false).is_err(), "the cache has failed");
    assert_eq!(world.status(1), 1);
    world.kill();
    world.open();
    // What others were told is there, is there.
    assert_eq!(world.read(0, 12288), [[1; 4096], [1; 4096], [5; 4096]].concat());
    world.flush();
    for seed in 0..10 {
        world.power_cut(&mut Prng::new(seed));
        world.open();
        assert_eq!(world.read(0, 12288), [[1; 4096], [1; 4096], [5; 4096]].concat());
    }
    world.drain();
    assert_eq!(world.origin.image()[..12288], [[1; 4096], [1; 4096], [5; 4096]].concat());
}

#[test]
fn a_flush_is_not_skipped_while_all_else_is_under_write_back() {
    let mut world = World::new(&TORN.replace("2 a", "4 pause_writeback 0 a"), MIB, 4 * MIB);
    world.open();
    world.write(0, &[1; 4096], true);
    world.write(0, &[2; 4096], false);
    world.holds = Box::new(|io| io.disk.limits().name == "origin");
    world.message("flush").unwrap();
    // What is not flushed is not written back: it could be taken back by a power cut.
    world.history.clear();
    world.tick(SECOND);
    let first = world.history.iter().find(|(name, ..)| name == "cache").map(|(_, op, ..)| *op);
    assert_eq!(first, Some(Op::Flush));
    world.write(4096, &[3; 4096], true);
    world.write(4096, &[4; 4096], false);
    world.history.clear();
    world.flush();
    assert!(world.history.iter().any(|(name, op, ..)| name == "cache" && *op == Op::Flush));
    world.power_cut(&mut Prng::new(1));
    world.open();
    assert_eq!(world.read(0, 8192), [[2; 4096], [4; 4096]].concat());
}

/// Holds a round of `world` that a flush asks for, at its first flush of the cache device.
fn hold_a_round(world: &mut World) {
    world.holds = Box::new(|io| io.disk.limits().name == "cache" && io.op == Op::Flush);
    world.submit(Bio::flush(0));
    assert!(world.done().is_none() && world.held.len() == 1, "a round is under way");
}

/// What a block looked like when its round was begun is not asked for when it was overwritten
/// again since, however many writes came after that.
#[test]
fn a_block_that_is_overwritten_twice_is_known_by_the_second_time() {
    let mut world = World::new(TORN, 4 * MIB, 4 * MIB);
    world.open();
    world.write(0, &[1; 4096], true);
    world.write(0, &[2; 4096], false);
    hold_a_round(&mut world);
    world.write(0, &[3; 4096], false);
    assert_eq!(world.fact("overwritten_blocks_total"), 2);
    for block in 1..400 {
        world.write(block * 4096, &[4; 4096], false);
    }
    world.kill();
    world.open();
    assert_eq!(world.read(0, 8192), [[3; 4096], [4; 4096]].concat());
}

/// A round of overwritten blocks leaves the commit counter as it is. The lists that are filled
/// before and after it must be told apart anyway.
#[test]
fn of_two_lists_the_next_server_knows_the_newer_one() {
    for rounds in 1..=4 {
        let mut world = World::new(TORN, 4 * MIB, 4 * MIB);
        world.open();
        world.write(0, &[1; 4096], true);
        for _ in 0..rounds {
            world.write(0, &[2; 4096], true);
        }
        assert_eq!(world.fact("overwritten_blocks_total"), rounds);
        world.write(4096, &[3; 4096], false);
        hold_a_round(&mut world);
        world.write(4096, &[4; 4096], false);
        world.kill();
        world.open();
        assert_eq!(world.read(0, 8192), [[2; 4096], [4; 4096]].concat(), "{rounds} rounds");
    }
}
