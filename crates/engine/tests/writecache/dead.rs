//! A cache device that does not give dirty data back, or takes none: the error is the device's, and
//! the origin gets everything else.

use udm::bio::{Bio, Op};
use udm::disk::DiskIo;
use udm::error::Status;
use udm::target::{FactValue, Target};
use udm::units::SECOND;

use crate::fixture::{Cache, Fixture};

const MIB: u64 = 1 << 20;
const TABLE: &str = "s O C 4096 0";

fn is_at(name: &'static str) -> impl Fn(&DiskIo) -> bool {
    move |io| io.disk.limits().name == name
}

fn text(fixture: &Fixture, name: &str) -> Option<String> {
    let fact = fixture.target().facts().into_iter().find(|fact| fact.name == name)?;
    match fact.value {
        FactValue::Text(text) => Some(text),
        _ => None,
    }
}

fn written(table: &str, blocks: u64) -> Fixture {
    let mut fixture = Fixture::new(table, MIB, 4 * MIB);
    fixture.open();
    for block in 0..blocks {
        // Not neighbours: each is read by itself.
        fixture.write(block * 8192, &[1 + block as u8; 4096], false);
    }
    fixture.flush();
    fixture
}

/// Lets a drain try for a while.
fn try_to_drain(fixture: &mut Fixture) {
    fixture.target().set_draining(true);
    for _ in 0..60 {
        fixture.tick(SECOND);
    }
}

#[test]
fn a_cache_disk_that_cannot_be_read_is_the_one_that_failed() {
    let mut fixture = written(TABLE, 40);
    fixture.refuses = Box::new(|io| is_at("cache")(io) && io.op == Op::Read);
    try_to_drain(&mut fixture);
    assert!(!fixture.target().dirty().is_failing, "the origin is well");
    assert_eq!((fixture.fact("writeback_is_failing"), fixture.fact("medium_has_failed")), (0, 1));
    let failure = text(&fixture, "medium_failure").unwrap();
    assert!(failure.contains("cache device cache failed: dirty data cannot be read"), "{failure}");
    assert_eq!(fixture.target().health().medium_failure, Some(failure));
    assert_eq!(fixture.status(1), 1);
    // All of it is known to be lost with the device.
    let lost = fixture.target().only_cached().unwrap();
    assert!(lost.is_exact && lost.bytes() == 40 * 4096);
    // A suspend does not wait for it.
    fixture.message("flush_on_suspend").unwrap();
    fixture.suspend();
    assert_eq!(fixture.target().dirty().bytes, 40 * 4096);
    fixture.target().resume().unwrap();
    // The device works again: no data was given up.
    fixture.refuses = Box::new(|_| false);
    try_to_drain(&mut fixture);
    assert_eq!((fixture.target().left_to_drain(), fixture.fact("medium_has_failed")), (0, 0));
    assert_eq!(text(&fixture, "medium_failure"), None);
    assert!((0..40).all(|block| fixture.origin.image()[block * 8192] == 1 + block as u8));
}

#[test]
fn bad_blocks_are_named_and_keep_no_other_block() {
    for (table, neighbours) in [(TABLE, false), (TABLE, true), ("p O C 4096 0", true)] {
        let mut fixture = Fixture::new(table, MIB, 4 * MIB);
        fixture.open();
        let step = if neighbours { 4096 } else { 8192 };
        for block in 0..20 {
            fixture.write(block * step, &[1 + block as u8; 4096], false);
        }
        fixture.flush();
        let metadata_bytes = (64 + 16 * fixture.status(2)).next_multiple_of(4096);
        let bad = metadata_bytes + 7 * 4096;
        match fixture.cache.clone() {
            Cache::Memory(pmem) => pmem.poison(bad, 4096),
            Cache::Disk(_) => {
                fixture.refuses = Box::new(move |io| {
                    let meets = io.offset < bad + 4096 && bad < io.offset + io.len;
                    is_at("cache")(io) && io.op == Op::Read && meets
                });
            }
        }
        try_to_drain(&mut fixture);
        assert_eq!(fixture.target().left_to_drain(), 4096, "{table}");
        assert_eq!(fixture.fact("unreadable_bytes"), 4096, "{table}");
        let failure = text(&fixture, "medium_failure").unwrap();
        assert!(failure.ends_with(&format!(": 4096 bytes at byte {}", 7 * step)), "{failure}");
        let origin = fixture.origin.image();
        for block in (0..20).filter(|block| *block != 7) {
            assert_eq!(origin[(block * step) as usize], 1 + block as u8, "{table}: {block}");
        }
        // Blocks that are written now are written back: the cache works.
        fixture.write(2 * MIB, &[99; 4096], false);
        try_to_drain(&mut fixture);
        assert_eq!(fixture.origin.image()[2 * MIB as usize], 99, "{table}");
        // Written again, the bad block has another slot.
        fixture.write(7 * step, &[77; 4096], false);
        try_to_drain(&mut fixture);
        assert_eq!(fixture.target().left_to_drain(), 0, "{table}");
        assert_eq!((fixture.fact("medium_has_failed"), fixture.status(1)), (0, 0), "{table}");
        assert_eq!(fixture.origin.image()[(7 * step) as usize], 77, "{table}");
    }
}

#[test]
fn a_cache_disk_that_takes_no_writes_is_named_and_can_be_drained() {
    let mut fixture = written(TABLE, 20);
    fixture.refuses = Box::new(|io| is_at("cache")(io) && io.op == Op::Write);
    assert_eq!(fixture.try_write(3 * MIB, &[9; 4096], false), Err(Status::Io));
    let refusal = text(&fixture, "medium_refusal").unwrap();
    assert!(refusal.contains("cache device cache refuses writes"), "{refusal}");
    try_to_drain(&mut fixture);
    assert_eq!(fixture.target().left_to_drain(), 0);
    assert!((0..20).all(|block| fixture.origin.image()[block * 8192] == 1 + block as u8));
    // The origin has everything, so an end of the device is an orderly one.
    fixture.suspend();
    assert!(fixture.target().is_durable());
}

#[test]
fn a_cache_disk_that_hangs_is_the_one_that_is_waited_for() {
    let mut fixture = written(TABLE, 20);
    let waits_for = |fixture: &Fixture| fixture.target().waits_for().map(|waiting| waiting.device);
    assert_eq!(waits_for(&fixture), None);
    fixture.holds = Box::new(|io| is_at("cache")(io) && io.op == Op::Read);
    fixture.target().set_draining(true);
    fixture.tick(SECOND);
    assert_eq!(waits_for(&fixture), Some("the cache device"));
    fixture.release();
    fixture.holds = Box::new(is_at("origin"));
    fixture.write(3 * MIB, &[9; 4096], true);
    fixture.tick(SECOND);
    assert_eq!(waits_for(&fixture), Some("the origin"));
    fixture.release();
    for _ in 0..20 {
        fixture.tick(SECOND);
    }
    assert_eq!(fixture.target().dirty().bytes, 0);
}

#[test]
fn an_origin_that_fails_is_not_taken_for_the_cache_device() {
    let mut fixture = written(TABLE, 20);
    fixture.refuses = Box::new(is_at("origin"));
    try_to_drain(&mut fixture);
    assert!(fixture.target().dirty().is_failing);
    assert_eq!((fixture.fact("medium_has_failed"), text(&fixture, "medium_failure")), (0, None));
    assert!(fixture.run(Bio::flush(0)).status.is_ok());
}

#[test]
fn a_write_to_a_full_cache_that_cannot_be_read_fails_soon() {
    // A dead device, and one of which all dirty blocks are bad.
    for bytes in [MIB, 64 << 10] {
        let mut fixture = Fixture::new(TABLE, bytes, 4 * MIB);
        fixture.open();
        let slots = fixture.status(2);
        fixture.refuses = Box::new(|io| is_at("cache")(io) && io.op == Op::Read);
        let mut at = 0;
        for _ in 0..slots {
            fixture.write(at, &[1; 4096], false);
            at += 8192;
        }
        let before = fixture.now;
        assert_eq!(fixture.try_write(at, &[2; 4096], false), Err(Status::Io), "{slots} slots");
        let took = fixture.now - before;
        assert!(took < 10 * SECOND, "{slots} slots: after {took} ns");
        // The next write does not wait either.
        let before = fixture.now;
        assert_eq!(fixture.try_write(at, &[2; 4096], false), Err(Status::Io), "{slots} slots");
        assert_eq!(fixture.now, before);
        assert!(text(&fixture, "medium_failure").unwrap().contains("cache device cache failed"));
        // The cache device can be read again, so slots can be freed.
        fixture.refuses = Box::new(|_| false);
        for _ in 0..20 {
            fixture.tick(SECOND);
        }
        fixture.write(at, &[2; 4096], false);
        assert_eq!(fixture.read(at, 4096), [2; 4096]);
    }
}
