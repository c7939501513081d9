//! Mode `s` overwrites committed blocks in place, if the device writes them whole, or if the
//! table allows torn blocks.

use udm::bio::{Bio, Op};
use udm::disk::DiskIo;
use udm::prng::Prng;
use udm::units::SECOND;

use crate::fixture::Fixture;

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
        let mut fixture = Fixture::new(table, MIB, 4 * MIB);
        fixture.open();
        fixture.write(block * 8, &vec![1; block as usize], false);
        fixture.flush();
        fixture.history.clear();
        fixture.write(block * 8, &vec![2; block as usize], false);
        fixture.flush();
        let ops: Vec<_> = fixture.history.iter().map(|(_, op, ..)| *op).collect();
        match is_overwritten {
            true => assert_eq!(ops, [Op::Write, Op::Flush], "{table}"),
            false => assert_eq!(ops.len(), 5, "{table}: data, entries, flush, counter, flush"),
        }
        assert_eq!(fixture.fact("overwritten_blocks_total"), u64::from(is_overwritten));
        for seed in 0..10 {
            fixture.power_cut(&mut Prng::new(seed));
            fixture.open();
            assert_eq!(fixture.read(block * 8, block as usize), vec![2; block as usize]);
        }
    }
}

#[test]
fn what_is_not_flushed_is_old_or_new_sector_by_sector() {
    let mut fixture = Fixture::new(TORN, MIB, 4 * MIB);
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    let mut torn = 0;
    for seed in 0..30 {
        fixture.write(0, &[2; 4096], false);
        fixture.power_cut(&mut Prng::new(seed));
        fixture.open();
        let found = fixture.read(0, 4096);
        let is_whole =
            |sector: &[u8]| sector.iter().all(|byte| *byte == sector[0] && [1, 2].contains(byte));
        assert!(found.chunks(512).all(is_whole));
        torn += u32::from(found.iter().any(|byte| *byte != found[0]));
        fixture.write(0, &[1; 4096], true);
    }
    assert!(torn > 0, "the test would not see a block that is not overwritten");
}

#[test]
fn a_block_that_is_written_back_or_scattered_gets_free_slots() {
    let mut fixture = Fixture::new(TORN, MIB, 4 * MIB);
    fixture.open();
    fixture.write(4096, &[1; 4096], false);
    fixture.write(0, &[1; 4096], true);
    // Neighbours, but their slots are the other way round.
    fixture.write(0, &[2; 8192], true);
    assert_eq!(fixture.fact("overwritten_blocks_total"), 0);
    fixture.write(0, &[3; 8192], true);
    assert_eq!(fixture.fact("overwritten_blocks_total"), 2);
    fixture.holds = Box::new(|io| io.disk.limits().name == "origin" && io.op == Op::Write);
    fixture.message("flush").unwrap();
    fixture.tick(SECOND);
    assert_eq!(fixture.held.len(), 1);
    fixture.write(0, &[4; 8192], true);
    assert_eq!(fixture.fact("overwritten_blocks_total"), 2);
    fixture.release();
    fixture.drain();
    assert_eq!(fixture.origin.image()[..8192], [4; 8192]);
}

/// The version on the medium is unknown, now and later: the block is not shown
/// until the next server has settled it.
#[test]
fn after_a_failed_overwrite_nothing_doubtful_is_shown() {
    let mut fixture = Fixture::new(TORN, MIB, 4 * MIB);
    fixture.open();
    fixture.write(0, &[1; 8192], true);
    fixture.write(8192, &[5; 4096], false);
    fixture.refuses = Box::new(cache_write);
    assert!(fixture.try_write(0, &[2; 4096], false).is_err());
    fixture.refuses = Box::new(|_| false);
    assert!(fixture.try_read(0, 4096).is_err());
    assert_eq!(fixture.read(4096, 4096), [1; 4096]);
    assert!(fixture.try_write(4096, &[3; 4096], false).is_err(), "the cache has failed");
    assert_eq!(fixture.status(1), 1);
    fixture.kill();
    fixture.open();
    // Data that others were promised is there.
    assert_eq!(fixture.read(0, 12288), [[1; 4096], [1; 4096], [5; 4096]].concat());
    fixture.flush();
    for seed in 0..10 {
        fixture.power_cut(&mut Prng::new(seed));
        fixture.open();
        assert_eq!(fixture.read(0, 12288), [[1; 4096], [1; 4096], [5; 4096]].concat());
    }
    fixture.drain();
    assert_eq!(fixture.origin.image()[..12288], [[1; 4096], [1; 4096], [5; 4096]].concat());
}

#[test]
fn a_flush_is_not_skipped_while_all_else_is_under_write_back() {
    let mut fixture = Fixture::new(&TORN.replace("2 a", "4 pause_writeback 0 a"), MIB, 4 * MIB);
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.write(0, &[2; 4096], false);
    fixture.holds = Box::new(|io| io.disk.limits().name == "origin");
    fixture.message("flush").unwrap();
    // Unflushed data is not written back: a power cut could take it back.
    fixture.history.clear();
    fixture.tick(SECOND);
    let first = fixture.history.iter().find(|(name, ..)| name == "cache").map(|(_, op, ..)| *op);
    assert_eq!(first, Some(Op::Flush));
    fixture.write(4096, &[3; 4096], true);
    fixture.write(4096, &[4; 4096], false);
    fixture.history.clear();
    fixture.flush();
    assert!(fixture.history.iter().any(|(name, op, ..)| name == "cache" && *op == Op::Flush));
    fixture.power_cut(&mut Prng::new(1));
    fixture.open();
    assert_eq!(fixture.read(0, 8192), [[2; 4096], [4; 4096]].concat());
}

/// Holds a round of `fixture` that a flush asks for, at its first flush of the cache device.
fn hold_a_round(fixture: &mut Fixture) {
    fixture.holds = Box::new(|io| io.disk.limits().name == "cache" && io.op == Op::Flush);
    fixture.submit(Bio::flush(0));
    assert!(fixture.done().is_none() && fixture.held.len() == 1, "a round is under way");
}

/// The block's state at the start of its round does not matter if it was overwritten
/// again since, however many writes came after that.
#[test]
fn a_block_that_is_overwritten_twice_is_known_by_the_second_time() {
    let mut fixture = Fixture::new(TORN, 4 * MIB, 4 * MIB);
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.write(0, &[2; 4096], false);
    hold_a_round(&mut fixture);
    fixture.write(0, &[3; 4096], false);
    assert_eq!(fixture.fact("overwritten_blocks_total"), 2);
    for block in 1..400 {
        fixture.write(block * 4096, &[4; 4096], false);
    }
    fixture.kill();
    fixture.open();
    assert_eq!(fixture.read(0, 8192), [[3; 4096], [4; 4096]].concat());
}

/// A round of overwritten blocks does not change the commit counter. The lists that are filled
/// before and after it must be told apart anyway.
#[test]
fn of_two_lists_the_next_server_knows_the_newer_one() {
    for rounds in 1..=4 {
        let mut fixture = Fixture::new(TORN, 4 * MIB, 4 * MIB);
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        for _ in 0..rounds {
            fixture.write(0, &[2; 4096], true);
        }
        assert_eq!(fixture.fact("overwritten_blocks_total"), rounds);
        fixture.write(4096, &[3; 4096], false);
        hold_a_round(&mut fixture);
        fixture.write(4096, &[4; 4096], false);
        fixture.kill();
        fixture.open();
        assert_eq!(fixture.read(0, 8192), [[2; 4096], [4; 4096]].concat(), "{rounds} rounds");
    }
}
