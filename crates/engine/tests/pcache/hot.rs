//! What is hot stays when space is short, over scans and restarts.

use udm::units::{KIB, MIB, SECOND};

use crate::world::{Setup, World};

const HOT: u64 = 16 * KIB;

/// A cache with some data that was read again.
fn warm(table: &'static str) -> World {
    let mut world = World::new(Setup::small().table(table));
    world.open();
    world.write(0, &[7; HOT as usize], true);
    world.drain();
    for _ in 0..3 {
        assert_eq!(world.read(0, HOT as usize), [7; HOT as usize]);
    }
    world
}

/// Reads much more than the cache holds, once.
fn scan(world: &mut World, from: u64) {
    for at in (from..from + 4 * MIB).step_by(32 << 10) {
        world.read(at, 32 << 10);
        world.tick(SECOND / 10);
    }
}

#[test]
fn a_scan_leaves_what_was_read_again() {
    for table in ["C B 0", "C B 2 data_crc true"] {
        let mut world = warm(table);
        scan(&mut world, 4 * MIB);
        assert!(world.fact("moved_bytes_total") >= HOT, "{table}");
        assert_eq!(world.target().cached_bytes_in(0, HOT), HOT, "{table}");
        // The next server finds it in the log, and keeps it in its place.
        for round in 0..2 {
            world.remove();
            world.open();
            scan(&mut world, (4 + 4 * round) * MIB);
            assert!(world.fact("kept_bytes_total") >= HOT, "{table}");
            assert_eq!(world.target().cached_bytes_in(0, HOT), HOT, "{table}, round {round}");
        }
        assert_eq!(world.read(0, HOT as usize), [7; HOT as usize]);
    }
}

#[test]
fn the_kernels_policy_forgets_it() {
    let mut world = warm("C B 0 retention fifo");
    scan(&mut world, 4 * MIB);
    assert_eq!(world.target().cached_bytes_in(0, HOT), 0);
    assert_eq!(world.read(0, HOT as usize), [7; HOT as usize], "the backing device has it");
}

#[test]
fn what_is_written_again_is_never_older() {
    let mut world = warm("C B 0");
    for round in 1..30_u8 {
        world.write(u64::from(round % 4) * 4 * KIB, &[round; 4096], round % 3 == 0);
        scan(&mut world, 4 * MIB);
        assert_eq!(world.read(u64::from(round % 4) * 4 * KIB, 4096), [round; 4096]);
        if round % 7 == 0 {
            world.kill();
            world.open();
        }
    }
    for block in 0..4_u8 {
        let newest = (0..30).rev().find(|round| round % 4 == block).unwrap();
        assert_eq!(world.read(u64::from(block) * 4 * KIB, 4096), [newest; 4096]);
    }
}
