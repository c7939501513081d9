//! A table that takes a live cache's media over, and failures of metadata that end.

use std::sync::Arc;

use udm::bio::Op;
use udm::cache::{Coming, OpenOptions, TableArgs};
use udm::disk::{Effect, Fault};
use udm::error::{Result, Status};
use udm::table::Word;
use udm::target::Target;
use udm::units::SECOND;

use crate::world::{BLOCK, World};

const TABLE: &str = "64 1 metadata2 smq 0";
const ORIGIN: u64 = 8 * BLOCK;

/// What another table over the same devices would make.
fn coming(world: &World, table: &str, len_bytes: u64) -> Result<Coming> {
    let args = TableArgs::parse(&Word::list(&format!("M C O {table}")))?;
    Coming::new(args, len_bytes, world.devices(), OpenOptions::default())
}

/// A suspended cache that has handed over: block 2 is dirty, block 6 clean.
fn handed_over() -> World {
    let mut world = World::opened(TABLE, 4, ORIGIN);
    world.bring(2);
    world.bring(6);
    world.drain();
    world.write(2 * BLOCK, &[7; 512]);
    world.suspend();
    world.target().hand_over().unwrap();
    world
}

fn words(target: &dyn Target) -> Vec<String> {
    target.status().split(' ').map(str::to_owned).collect()
}

#[test]
fn what_takes_over_knows_what_is_dirty_and_writes_nothing_if_nothing_changes() {
    let mut world = handed_over();
    let before = world.disks[0].image();
    let other = coming(&world, "64 2 metadata2 writethrough smq 0", ORIGIN).unwrap();
    assert_eq!(other.table(), "meta cache origin 64 2 metadata2 writethrough smq 0");
    assert!(world.disks[0].image() == before, "it waits");
    let taken = other.take_effect().unwrap().unwrap();
    let found = words(&*taken);
    assert_eq!((found[3].as_str(), found[10].as_str()), ("2/4", "1"), "{found:?}");
    drop(taken);
    assert!(world.disks[0].image() == before);
    // The change was called off: the old one goes on.
    world.target().resume().unwrap();
    assert_eq!(world.read(2 * BLOCK, 512), [7; 512]);
    world.drain();
}

#[test]
fn a_change_that_failed_is_taken_back_if_the_metadata_is_as_it_was() {
    let mut world = handed_over();
    // A shorter origin cuts block 6 off.
    let other = coming(&world, TABLE, 4 * BLOCK).unwrap();
    let fault = Fault::new(Effect::Fail(Status::Io)).of(Op::Write).times(1);
    world.disks[0].inject(fault);
    assert!(other.take_effect().is_err());
    world.target().resume().unwrap();
    assert_eq!(world.read(6 * BLOCK, 512), [0; 512]);
    world.write(6 * BLOCK, &[8; 512]);
    world.suspend();
    world.target().hand_over().unwrap();
    // Dirty blocks are not cut off, and nothing is written.
    let before = world.disks[0].image();
    let error = coming(&world, TABLE, 4 * BLOCK).unwrap().take_effect().unwrap_err();
    assert!(error.to_string().contains("beyond the end of the table"), "{error}");
    assert!(world.disks[0].image() == before);
    world.target().resume().unwrap();
    world.drain();
    world.suspend();
    world.target().hand_over().unwrap();
    let taken = coming(&world, TABLE, 4 * BLOCK).unwrap().take_effect().unwrap().unwrap();
    assert_eq!(words(&*taken)[3], "1/4");
    // The old one does not go on with what it thinks is there.
    drop(taken);
    let error = world.target().resume().unwrap_err();
    assert!(error.to_string().contains("has changed the metadata"), "{error}");
}

#[test]
fn metadata_that_cannot_be_written_makes_it_read_only_until_it_can() {
    let mut world = World::opened(TABLE, 4, ORIGIN);
    world.bring(2);
    world.drain();
    world.write(2 * BLOCK, &[1; 512]);
    world.bring(3);
    world.tick(3 * SECOND);
    world.disks[0].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write));
    // Block 5 is new, so its slot needs a commit; a dirty block needs none.
    world.bring(5);
    let mut is_read_only = false;
    for _ in 0..20 {
        let _ = world.try_write(5 * BLOCK, &[2; 512]);
        is_read_only |= world.target().status().contains(" ro ");
    }
    assert!(is_read_only, "{}", world.target().status());
    world.write(2 * BLOCK, &[3; 512]);
    assert_eq!(world.read(2 * BLOCK, 512), [3; 512]);
    assert!(world.message("migration_threshold 4096").is_err());
    world.suspend();
    let error = world.target().hand_over().unwrap_err();
    assert!(error.to_string().contains("cannot be written at the moment"), "{error}");
    world.target().resume().unwrap();
    world.disks[0].heal();
    for _ in 0..40 {
        world.tick(10 * SECOND);
    }
    assert!(world.target().status().contains(" rw - "), "{}", world.target().status());
    world.write(5 * BLOCK, &[4; 512]);
    world.flush();
    world.drain();
    world.suspend();
    world.target().hand_over().unwrap();
}

#[test]
fn what_cannot_be_right_is_refused_before_anything_is_suspended() {
    let mut world = World::opened(TABLE, 4, ORIGIN);
    let refused = |world: &World, table: &str, len: u64| {
        coming(world, table, len).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(refused(&world, "128 0 smq 0", ORIGIN).contains("blocks of 64 sectors, not 128"));
    assert!(refused(&world, TABLE, ORIGIN + 512).contains("the table is"));
    world.write(0, &[1; 512]);
    assert_eq!(world.read(0, 512), [1; 512]);
}

/// At each of its I/O of the metadata, by a kill and by a power cut that takes all it can.
#[test]
fn a_server_that_dies_while_a_table_takes_effect_loses_nothing() {
    for (table, len) in
        [(TABLE, 4 * BLOCK), (TABLE, ORIGIN), ("64 1 metadata2 probation 0", ORIGIN)]
    {
        let mut was_whole = 0;
        for nth in 0..40 {
            let mut world = handed_over();
            world.target().resume().unwrap();
            world.write(3 * BLOCK, &[9; 512]);
            world.flush();
            if len < ORIGIN {
                world.drain();
            }
            world.suspend();
            world.target().hand_over().unwrap();
            world.disks[0].inject(Fault::new(Effect::Stick).after(nth));
            let taken = coming(&world, table, len).and_then(|coming| coming.take_effect());
            was_whole += u64::from(taken.is_ok());
            drop(taken);
            if nth % 2 == 0 {
                let disks = world.disks.clone();
                world.disks = disks.map(|disk| Arc::new(disk.crash_with(|_, _| 0)));
            }
            world.kill();
            world.disks[0].heal();
            world.open();
            for (block, value) in [(2, 7), (3, 9), (6, 0)] {
                assert_eq!(
                    world.read(block * BLOCK, 512),
                    [value; 512],
                    "I/O {nth}, block {block}"
                );
            }
            world.drain();
            world.remove();
            let origin = world.disks[2].image();
            assert_eq!(origin[3 * BLOCK as usize..][..512], [9; 512], "I/O {nth}");
        }
        assert!(was_whole > 0 && was_whole < 40, "it dies in the middle of some: {was_whole}");
    }
}
