//! A table that takes a live cache's media over, and failures of metadata that end.

use std::sync::Arc;

use udm::bio::Op;
use udm::cache::{Incoming, OpenOptions, TableArgs};
use udm::disk::{Effect, Fault};
use udm::error::{Result, Status};
use udm::table::Word;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::{BLOCK, Fixture};

const TABLE: &str = "64 1 metadata2 smq 0";
const ORIGIN: u64 = 8 * BLOCK;

/// What another table over the same devices would make.
fn coming(fixture: &Fixture, table: &str, len_bytes: u64) -> Result<Incoming> {
    let args = TableArgs::parse(&Word::list(&format!("M C O {table}")))?;
    Incoming::new(args, len_bytes, fixture.devices(), OpenOptions::default())
}

/// A suspended cache that has handed over: block 2 is dirty, block 6 clean.
fn handed_over() -> Fixture {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(2);
    fixture.bring(6);
    fixture.drain();
    fixture.write(2 * BLOCK, &[7; 512]);
    fixture.suspend();
    fixture.target().hand_over().unwrap();
    fixture
}

fn words(target: &dyn Target) -> Vec<String> {
    target.status().split(' ').map(str::to_owned).collect()
}

#[test]
fn what_takes_over_knows_what_is_dirty_and_writes_nothing_if_nothing_changes() {
    let mut fixture = handed_over();
    let before = fixture.disks[0].image();
    let other = coming(&fixture, "64 2 metadata2 writethrough smq 0", ORIGIN).unwrap();
    assert_eq!(other.table(), "meta cache origin 64 2 metadata2 writethrough smq 0");
    assert!(fixture.disks[0].image() == before, "it waits");
    let taken = other.take_effect().unwrap().unwrap();
    let found = words(&*taken);
    assert_eq!((found[3].as_str(), found[10].as_str()), ("2/4", "1"), "{found:?}");
    drop(taken);
    assert!(fixture.disks[0].image() == before);
    // The change was called off: the old one goes on.
    fixture.target().resume().unwrap();
    assert_eq!(fixture.read(2 * BLOCK, 512), [7; 512]);
    fixture.drain();
}

#[test]
fn a_change_that_failed_is_taken_back_if_the_metadata_is_as_it_was() {
    let mut fixture = handed_over();
    // A shorter origin cuts block 6 off.
    let other = coming(&fixture, TABLE, 4 * BLOCK).unwrap();
    let fault = Fault::new(Effect::Fail(Status::Io)).of(Op::Write).times(1);
    fixture.disks[0].inject(fault);
    assert!(other.take_effect().is_err());
    fixture.target().resume().unwrap();
    assert_eq!(fixture.read(6 * BLOCK, 512), [0; 512]);
    fixture.write(6 * BLOCK, &[8; 512]);
    fixture.suspend();
    fixture.target().hand_over().unwrap();
    // Dirty blocks are not cut off, and the media are not written.
    let before = fixture.disks[0].image();
    let error = coming(&fixture, TABLE, 4 * BLOCK).unwrap().take_effect().unwrap_err();
    assert!(error.to_string().contains("beyond the end of the table"), "{error}");
    assert!(fixture.disks[0].image() == before);
    fixture.target().resume().unwrap();
    fixture.drain();
    fixture.suspend();
    fixture.target().hand_over().unwrap();
    let taken = coming(&fixture, TABLE, 4 * BLOCK).unwrap().take_effect().unwrap().unwrap();
    assert_eq!(words(&*taken)[3], "1/4");
    // The old one does not continue with its outdated state.
    drop(taken);
    let error = fixture.target().resume().unwrap_err();
    assert!(error.to_string().contains("has changed the metadata"), "{error}");
}

#[test]
fn metadata_that_cannot_be_written_makes_it_read_only_until_it_can() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(2);
    fixture.drain();
    fixture.write(2 * BLOCK, &[1; 512]);
    fixture.bring(3);
    fixture.tick(3 * SECOND);
    fixture.disks[0].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write));
    // Block 5 is new, so its slot needs a commit; a dirty block needs none.
    fixture.bring(5);
    let mut is_read_only = false;
    for _ in 0..20 {
        let _ = fixture.try_write(5 * BLOCK, &[2; 512]);
        is_read_only |= fixture.target().status().contains(" ro ");
    }
    assert!(is_read_only, "{}", fixture.target().status());
    fixture.write(2 * BLOCK, &[3; 512]);
    assert_eq!(fixture.read(2 * BLOCK, 512), [3; 512]);
    assert!(fixture.message("migration_threshold 4096").is_err());
    fixture.suspend();
    let error = fixture.target().hand_over().unwrap_err();
    assert!(error.to_string().contains("cannot be written at the moment"), "{error}");
    fixture.target().resume().unwrap();
    fixture.disks[0].heal();
    for _ in 0..40 {
        fixture.tick(10 * SECOND);
    }
    assert!(fixture.target().status().contains(" rw - "), "{}", fixture.target().status());
    fixture.write(5 * BLOCK, &[4; 512]);
    fixture.flush();
    fixture.drain();
    fixture.suspend();
    fixture.target().hand_over().unwrap();
}

#[test]
fn what_cannot_be_right_is_refused_before_anything_is_suspended() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    let refused = |fixture: &Fixture, table: &str, len: u64| {
        coming(fixture, table, len).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(refused(&fixture, "128 0 smq 0", ORIGIN).contains("blocks of 64 sectors, not 128"));
    assert!(refused(&fixture, TABLE, ORIGIN + 512).contains("the table is"));
    fixture.write(0, &[1; 512]);
    assert_eq!(fixture.read(0, 512), [1; 512]);
}

/// At each of its I/O of the metadata, by a kill and by a power cut that takes all it can.
#[test]
fn a_server_that_dies_while_a_table_takes_effect_loses_nothing() {
    for (table, len) in
        [(TABLE, 4 * BLOCK), (TABLE, ORIGIN), ("64 1 metadata2 probation 0", ORIGIN)]
    {
        let mut was_whole = 0;
        for nth in 0..40 {
            let mut fixture = handed_over();
            fixture.target().resume().unwrap();
            fixture.write(3 * BLOCK, &[9; 512]);
            fixture.flush();
            if len < ORIGIN {
                fixture.drain();
            }
            fixture.suspend();
            fixture.target().hand_over().unwrap();
            fixture.disks[0].inject(Fault::new(Effect::Stick).after(nth));
            let taken = coming(&fixture, table, len).and_then(|coming| coming.take_effect());
            was_whole += u64::from(taken.is_ok());
            drop(taken);
            if nth % 2 == 0 {
                let disks = fixture.disks.clone();
                fixture.disks = disks.map(|disk| Arc::new(disk.crash_with(|_, _| 0)));
            }
            fixture.kill();
            fixture.disks[0].heal();
            fixture.open();
            for (block, value) in [(2, 7), (3, 9), (6, 0)] {
                assert_eq!(
                    fixture.read(block * BLOCK, 512),
                    [value; 512],
                    "I/O {nth}, block {block}"
                );
            }
            fixture.drain();
            fixture.remove();
            let origin = fixture.disks[2].image();
            assert_eq!(origin[3 * BLOCK as usize..][..512], [9; 512], "I/O {nth}");
        }
        assert!(was_whole > 0 && was_whole < 40, "it dies in the middle of some: {was_whole}");
    }
}
