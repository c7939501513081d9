//! An origin that fails, or never answers: after the death of the server no flushed data is lost,
//! and meanwhile the background sleeps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{Effect, Fault, Ring};
use udm::error::Status;
use udm::sync::Arc as Shared;
use udm::target::{Port, Wake};
use udm::units::{Nanos, SECOND};

use super::{BLOCK, BLOCKS, Fixture, STEP, TABLES, content, version_of, write_all};

/// For more reasons to wake up.
const BUSY_TABLES: [&str; 4] = [
    "writecache p O C 4096 2 autocommit_time 0",
    "writecache s O C 4096 2 autocommit_time 0",
    "writecache p O C 4096 2 max_age 1000",
    "writecache s O C 4096 4 autocommit_time 0 max_age 1000",
];

impl Fixture {
    /// The end of the process: devices and shared memory stay.
    fn kill(&mut self) {
        self.target = None;
        (self.port, self.ring) = (Port::new(0), Ring::without_kernel());
        for disk in [&self.metadata, &self.fast, &self.origin] {
            disk.abandon();
        }
    }

    fn flush(&mut self) -> Result<(), Status> {
        self.run(Bio::flush(0)).map(drop)
    }
}

/// The lowest version in the sectors of a block: data whose flush has failed may be there in part.
fn lowest_version(bytes: &[u8], block: u64) -> u64 {
    bytes.chunks(512).map(|sector| version_of(sector, block)).min().unwrap()
}

/// Writes back while flush number `nth` of the origin fails, which returns the lost data
/// afterwards; the server is killed within the next attempts. The next server writes and flushes;
/// then the power fails.
fn lose_by_origin(table: &'static str, nth: u64, ticks: u64) {
    let what = format!("{table}: flush {nth}, {ticks} ticks");
    let mut fixture = Fixture::new(table);
    // The version of each block that a flush has acknowledged.
    let mut flushed = BTreeMap::new();
    write_all(&mut fixture, 1);
    fixture.flush().unwrap();
    flushed.extend((0..BLOCKS).map(|block| (block, 1)));
    fixture.origin.show_lost();
    let fault = Fault::new(Effect::Fail(Status::Io)).of(Op::Flush);
    fixture.origin.inject(fault.after(nth).times(1));
    (0..BLOCKS / 2).for_each(|block| fixture.write(block, 2));
    if fixture.flush().is_ok() {
        flushed.extend((0..BLOCKS / 2).map(|block| (block, 2)));
    }
    fixture.target().set_draining(true);
    for _ in 0..ticks {
        fixture.tick();
        fixture.settle();
    }
    fixture.kill();
    fixture.origin.heal();
    fixture.boot += 1;
    fixture.open();
    for block in (0..BLOCKS).step_by(3) {
        fixture.write(block, 3);
    }
    if fixture.flush().is_ok() {
        flushed.extend((0..BLOCKS).step_by(3).map(|block| (block, 3)));
    }
    if ticks % 2 == 1 {
        fixture.drain();
        let image = fixture.origin.durable_image();
        for (block, version) in &flushed {
            let at = (block * STEP) as usize;
            let found = lowest_version(&image[at..at + BLOCK], *block);
            assert!(found >= *version, "{what}: block {block} of the origin has {found}");
        }
    }
    fixture.cut();
    fixture.open();
    for (block, version) in flushed {
        let bio = Bio::read(block * STEP, Buffer::zeroed(BLOCK), 0);
        let found = lowest_version(fixture.run(bio).unwrap().buffer.as_slice(), block);
        assert!(found >= version, "{what}: block {block} has {found}, not {version}");
    }
}

#[test]
fn a_flush_of_the_origin_that_fails_before_the_death_of_a_server_loses_nothing() {
    for table in TABLES {
        for nth in 0..3 {
            for ticks in [1, 2, 7, 300] {
                lose_by_origin(table, nth, ticks);
            }
        }
    }
}

#[derive(Debug, Default)]
struct Wakes(AtomicU64);

impl Wake for Wakes {
    fn wake(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Ticks when the background asks for it, for this long. Returns the number of ticks.
fn doze(fixture: &mut Fixture, long: Nanos) -> u64 {
    let wakes = Arc::new(Wakes::default());
    fixture.target().events().unwrap().set_background(Some(Shared::clone(&wakes) as _));
    let until = fixture.now + long;
    let mut ticks = 0;
    while fixture.now < until {
        ticks += 1;
        assert!(ticks < 100_000, "{}: the background spins at {}", fixture.table, fixture.now);
        let target = fixture.target.as_ref().expect("open");
        let next = target.tick(fixture.now, &mut fixture.port);
        fixture.settle();
        if wakes.0.swap(0, Ordering::SeqCst) == 0 {
            fixture.now = next.unwrap_or(until).max(fixture.now).min(until);
        }
    }
    fixture.target().events().unwrap().set_background(None);
    ticks
}

#[test]
fn the_background_sleeps_while_the_origin_fails_or_is_stuck() {
    const LONG: Nanos = 60 * SECOND;
    for table in TABLES.into_iter().chain(BUSY_TABLES) {
        for op in [Op::Write, Op::Flush] {
            for effect in [Effect::Fail(Status::Io), Effect::Stick] {
                for drains in [false, true] {
                    let mut fixture = Fixture::new(table);
                    fixture.now = SECOND;
                    (0..8).for_each(|block| fixture.write(block, 1));
                    fixture.flush().unwrap();
                    fixture.origin.inject(Fault::new(effect).of(op));
                    fixture.target().set_draining(drains);
                    (8..16).for_each(|block| {
                        let bio = Bio::write(block * STEP, content(block, 1), false, 0);
                        fixture.submit(bio);
                    });
                    fixture.settle();
                    let ticks = doze(&mut fixture, LONG);
                    // Ten for each second are the looks at what may have changed.
                    assert!(ticks < 2000, "{table}: {ticks} ticks, {op:?} {effect:?} {drains}");
                }
            }
        }
    }
}

/// The cache device never ends a flush: the round of a commit stays under way.
#[test]
fn the_background_sleeps_while_a_commit_is_stuck() {
    for table in BUSY_TABLES.into_iter().filter(|table| table.starts_with("writecache s")) {
        let mut fixture = Fixture::new(table);
        fixture.now = SECOND;
        fixture.fast.inject(Fault::new(Effect::Stick).of(Op::Flush));
        (0..8).for_each(|block| {
            fixture.submit(Bio::write(block * STEP, content(block, 1), false, 0));
        });
        fixture.settle();
        let ticks = doze(&mut fixture, 60 * SECOND);
        assert!(ticks < 2000, "{table}: {ticks} ticks");
    }
}
