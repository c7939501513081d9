//! A device fails a flush, and returns the lost data until the power fails. The next server does
//! not know this from the device.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use udm::base::attaching::AttachProgress;
use udm::bio::{Bio, Op};
use udm::cache::drain::Drain;
use udm::cache::metadata::format::write_whole;
use udm::cache::metadata::{Contents, Doubt, Superblock, load};
use udm::disk::{Disk, Effect, Fault};
use udm::error::Status;
use udm::target::{Fact, FactValue, Target};
use udm::units::SECOND;

use crate::fixture::{BLOCK, Fixture};

const SLOTS: u64 = 16;
const ORIGIN: u64 = 16 * BLOCK;
/// Both formats.
const TABLES: [&str; 2] = ["64 1 metadata2 smq 0", "64 1 writeback smq 0"];
const OF_CACHE: Doubt = Doubt { cache: true, origin: false };
const OF_ORIGIN: Doubt = Doubt { cache: false, origin: true };

fn fail(op: Op) -> Fault {
    Fault::new(Effect::Fail(Status::Io)).of(op)
}

/// A flush of a client fails, because disk `nth` fails one.
fn fail_flush(fixture: &mut Fixture, nth: usize) {
    fixture.disks[nth].show_lost();
    fixture.disks[nth].inject(fail(Op::Flush).times(1));
    assert!(fixture.run(Bio::flush(0)).status.is_err());
    fixture.settle();
}

/// The record of the medium.
fn told(fixture: &Fixture) -> Doubt {
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    load(&disk).unwrap().superblock.doubt
}

/// A power failure that keeps only durable data.
fn lose_power(fixture: &mut Fixture) {
    let disks = fixture.disks.clone().map(|disk| Arc::new(disk.crash_with(|_, _| 0)));
    fixture.kill();
    fixture.disks = disks;
}

/// A cache whose device has [50; 512] of a dirty block durably, returns [60; 512], and failed a
/// flush. Its server was killed.
fn lost(table: &str) -> Fixture {
    let mut fixture = Fixture::opened(table, SLOTS, ORIGIN);
    for (block, data) in [(1, 50), (2, 70)] {
        fixture.bring(block);
        fixture.write(block * BLOCK, &[data; 512]);
    }
    fixture.bring(3);
    fixture.tick(3 * SECOND);
    fixture.write(BLOCK, &[50; 512]);
    fixture.flush();
    fixture.write(BLOCK, &[60; 512]);
    fail_flush(&mut fixture, 1);
    assert_eq!(told(&fixture), OF_CACHE, "without any request");
    fixture.kill();
    fixture
}

#[test]
pub fn data_that_a_cache_device_may_have_lost_is_written_to_it_again() {
    for table in TABLES {
        let mut fixture = lost(table);
        fixture.open();
        assert_eq!(told(&fixture), Doubt::default());
        let has_note = |fact: &Fact| match &fact.value {
            FactValue::Text(note) => note.contains("failed a flush since the machine started"),
            _ => false,
        };
        assert!(fixture.target().facts().iter().any(has_note));
        assert_eq!(fixture.read(BLOCK, 512), [60; 512]);
        lose_power(&mut fixture);
        fixture.open();
        assert_eq!(fixture.read(BLOCK, 512), [60; 512], "{table}: a client has seen it");
        fixture.drain();
        let mut origin = [0; 512];
        fixture.disks[2].peek(BLOCK, &mut origin);
        assert_eq!(origin, [60; 512], "{table}");
    }
}

#[test]
pub fn a_drain_at_rest_leaves_no_block_that_the_cache_device_may_have_lost() {
    for table in TABLES {
        let mut fixture = lost(table);
        let devices = fixture.devices();
        let loaded = load(&devices.metadata).unwrap();
        let mut drain = Drain::new(devices, loaded, None).unwrap();
        while !drain.is_done() {
            drain.step().unwrap();
        }
        drain.finish().unwrap();
        lose_power(&mut fixture);
        let disk: Arc<dyn Disk> = fixture.disks[0].clone();
        assert_eq!(load(&disk).unwrap().contents.mapped(), 0, "{table}");
        fixture.open();
        assert_eq!(fixture.read(BLOCK, 512), [60; 512], "{table}");
        assert_eq!(fixture.read(2 * BLOCK, 512), [70; 512], "{table}");
    }
}

/// Otherwise a slot could become clean whose data the device does not have durably.
#[test]
fn a_cache_device_that_still_fails_is_not_opened() {
    let mut fixture = lost(TABLES[0]);
    for op in [Op::Read, Op::Write, Op::Flush] {
        fixture.disks[1].inject(fail(op).times(1));
        let refused = fixture.try_open().unwrap_err().to_string();
        assert!(refused.contains("udm recover"), "{op:?}: {refused}");
        assert_eq!(told(&fixture), OF_CACHE);
    }
    fixture.open();
    assert_eq!(told(&fixture), Doubt::default());
    lose_power(&mut fixture);
    fixture.open();
    assert_eq!(fixture.read(BLOCK, 512), [60; 512]);
}

/// What such an origin returns is not a durable copy: otherwise cache and origin would differ after
/// a power failure, and a drain would not write the block.
#[test]
pub fn blocks_of_an_origin_that_failed_a_flush_enter_dirty_under_the_next_server() {
    for table in TABLES {
        let mut fixture = Fixture::opened(table, SLOTS, ORIGIN);
        fixture.write(5 * BLOCK, &[5; 512]);
        fail_flush(&mut fixture, 2);
        assert_eq!(told(&fixture), OF_ORIGIN, "{table}: without any request");
        fixture.remove();
        for _ in 0..2 {
            fixture.open();
            assert_eq!(told(&fixture), OF_ORIGIN);
            fixture.kill();
        }
        fixture.open();
        fixture.bring(5);
        assert_eq!(fixture.fact("dirty_bytes"), BLOCK, "{table}");
        fixture.tick(3 * SECOND);
        fixture.flush();
        lose_power(&mut fixture);
        fixture.open();
        assert_eq!(fixture.read(5 * BLOCK, 512), [5; 512], "{table}");
        fixture.drain();
        let mut origin = [0; 512];
        fixture.disks[2].peek(5 * BLOCK, &mut origin);
        assert_eq!(origin, [5; 512], "{table}");
    }
}

/// The origin returns data that it may lose, whichever cache is in front of it.
#[test]
pub fn new_metadata_keeps_the_mark() {
    for is_forced in [false, true] {
        let mut fixture = Fixture::opened(TABLES[0], SLOTS, ORIGIN);
        fixture.write(5 * BLOCK, &[5; 512]);
        fail_flush(&mut fixture, 2);
        fixture.drain();
        fixture.remove();
        if is_forced {
            fixture.format();
        } else {
            let disk: Arc<dyn Disk> = fixture.disks[0].clone();
            let sectors = load(&disk).unwrap().superblock.fields.data_sectors.get();
            let fresh = Superblock::fresh(2, sectors);
            write_whole(&disk, fresh, &Contents::default()).unwrap();
            fixture.open();
        }
        assert_eq!(told(&fixture), OF_ORIGIN, "forced: {is_forced}");
        fixture.bring(5);
        assert_eq!(fixture.fact("dirty_bytes"), BLOCK, "forced: {is_forced}");
    }
}

#[test]
fn the_doubt_is_recorded_when_the_metadata_device_works_again() {
    for (nth, doubt) in [(1, OF_CACHE), (2, OF_ORIGIN)] {
        let mut fixture = Fixture::opened(TABLES[0], SLOTS, ORIGIN);
        fixture.bring(1);
        fixture.tick(3 * SECOND);
        fixture.write(BLOCK, &[1; 512]);
        fixture.write(5 * BLOCK, &[5; 512]);
        fixture.tick(3 * SECOND);
        fixture.disks[0].inject(fail(Op::Write));
        fail_flush(&mut fixture, nth);
        fixture.tick(10 * SECOND);
        assert_eq!(told(&fixture), Doubt::default());
        fixture.disks[0].heal();
        fixture.tick(2 * SECOND);
        assert_eq!(told(&fixture), doubt);
        let writes = fixture.disks[0].counts().writes;
        for _ in 0..20 {
            fixture.tick(SECOND);
        }
        assert!(fixture.disks[0].counts().writes <= writes + 8, "once");
    }
}

/// Each commit of the cache writes the record, so a row of commits cannot delay it.
#[test]
fn any_commit_has_the_record() {
    let mut fixture = Fixture::opened(TABLES[0], SLOTS, ORIGIN);
    fixture.bring(1);
    fixture.tick(3 * SECOND);
    fixture.write(5 * BLOCK, &[5; 512]);
    fixture.disks[0].inject(fail(Op::Write).times(1));
    fail_flush(&mut fixture, 2);
    assert_eq!(told(&fixture), Doubt::default());
    // The clock stands still: only the commit of this write comes.
    fixture.write(BLOCK, &[1; 512]);
    assert_eq!(told(&fixture), OF_ORIGIN);
}

/// The metadata device takes longer to fail than the pause between two tries.
#[test]
fn a_suspend_ends_although_the_metadata_device_fails_slowly() {
    for nth in [1, 2] {
        let mut fixture = Fixture::opened(TABLES[0], SLOTS, ORIGIN);
        fixture.bring(1);
        fixture.write(BLOCK, &[1; 512]);
        fixture.write(5 * BLOCK, &[5; 512]);
        let is_slow = Rc::new(Cell::new(true));
        let holds = is_slow.clone();
        fixture.holds = Box::new(move |io| {
            holds.get() && io.disk.limits().name == "meta" && io.op == Op::Write
        });
        fixture.disks[0].inject(fail(Op::Write));
        fail_flush(&mut fixture, nth);
        fixture.target().suspend().unwrap();
        for _ in 0..20 {
            fixture.tick(2 * SECOND);
            is_slow.set(false);
            let held: Vec<_> = fixture.held.drain(..).collect();
            fixture.port.ios.extend(held);
            fixture.turn();
            is_slow.set(true);
            fixture.settle();
        }
        assert!(fixture.target().is_idle(), "disk {nth}");
    }
}

/// The end of a server is the last chance to record a flush that its own rest could not do.
#[test]
fn a_flush_that_fails_at_the_end_is_recorded() {
    let mut fixture = Fixture::opened(TABLES[0], SLOTS, ORIGIN);
    fixture.write(5 * BLOCK, &[5; 512]);
    fixture.disks[2].show_lost();
    fixture.disks[2].inject(fail(Op::Flush).times(1));
    fixture.remove();
    assert_eq!(told(&fixture), OF_ORIGIN);
}

/// The metadata device returns a superblock that it does not have durably, and a good flush does
/// not write it.
#[test]
pub fn a_superblock_that_may_be_lost_is_written_again() {
    for table in TABLES {
        for at_rest in [false, true] {
            let mut fixture = Fixture::opened(table, SLOTS, ORIGIN);
            fixture.bring(1);
            fixture.tick(3 * SECOND);
            fixture.tick(60 * SECOND);
            fixture.disks[0].show_lost();
            fixture.disks[0].inject(fail(Op::Flush).after(1).times(1));
            let refused = fixture.try_write(BLOCK, &[1; 512]);
            assert_eq!(refused, Err(Status::Io), "the last flush of its commit failed");
            fixture.kill();
            if at_rest {
                let devices = fixture.devices();
                let loaded = load(&devices.metadata).unwrap();
                let mut drain = Drain::new(devices, loaded, None).unwrap();
                while !drain.is_done() {
                    drain.step().unwrap();
                }
            } else {
                fixture.open();
                fixture.write(BLOCK, &[2; 512]);
                fixture.flush();
            }
            lose_power(&mut fixture);
            fixture.open();
            let wanted = if at_rest { [0; 512] } else { [2; 512] };
            assert_eq!(fixture.read(BLOCK, 512), wanted, "{table}");
            fixture.drain();
            let mut origin = [0; 512];
            fixture.disks[2].peek(BLOCK, &mut origin);
            assert_eq!(origin, wanted, "{table}, at rest: {at_rest}");
        }
    }
}

/// An earlier server met the error. After a failed commit of this one, flushes succeed.
#[test]
fn an_inherited_doubt_fails_no_flush() {
    let mut fixture = Fixture::opened(TABLES[0], SLOTS, ORIGIN);
    fixture.write(5 * BLOCK, &[5; 512]);
    fail_flush(&mut fixture, 2);
    fixture.kill();
    fixture.open();
    fixture.bring(1);
    fixture.drain();
    // The marks of clean slots go.
    (0..6).for_each(|_| fixture.tick(10 * SECOND));
    fixture.disks[0].inject(fail(Op::Write));
    fixture.holds = Box::new(|io| io.disk.limits().name == "origin" && io.op == Op::Flush);
    fixture.write(6 * BLOCK, &[6; 512]);
    fixture.submit(Bio::flush(0));
    fixture.settle();
    assert_eq!(fixture.try_write(BLOCK, &[1; 512]), Err(Status::Io), "its commit failed");
    assert!(fixture.fact("failed_commits_total") > 0 && !fixture.held.is_empty());
    fixture.release();
    assert_eq!(fixture.port.done.pop_front().map(|bio| bio.status), Some(Ok(())));
    fixture.disks[0].heal();
    fixture.drain();
    fixture.suspend();
    fixture.target().hand_over().unwrap();
}

/// A later cache must know it.
#[test]
fn a_flush_that_fails_before_a_wipe_is_recorded() {
    let mut fixture = Fixture::opened(TABLES[0], SLOTS, ORIGIN);
    fixture.write(5 * BLOCK, &[5; 512]);
    fixture.kill();
    fixture.disks[2].show_lost();
    fixture.disks[2].inject(fail(Op::Flush).times(1));
    let failed = udm::cache::wipe::wipe(&fixture.devices(), &AttachProgress::default());
    assert!(failed.unwrap_err().to_string().contains("origin: wiping a cache"));
    assert_eq!(told(&fixture), OF_ORIGIN);
}
