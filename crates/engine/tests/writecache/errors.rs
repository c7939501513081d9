//! Devices that fail: the origin loses no data, and stale data is not read without the cache.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{DiskIo, Effect, Fault};
use udm::error::Status;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::basics::in_both_modes;
use crate::fixture::{Cache, Fixture};

const MIB: u64 = 1 << 20;

fn is_at(name: &'static str) -> impl Fn(&DiskIo) -> bool {
    move |io| io.disk.limits().name == name
}

#[test]
fn a_failing_origin_loses_nothing_and_is_tried_again() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.refuses = Box::new(is_at("origin"));
        let blocks = fixture.status(2);
        for block in 0..blocks {
            fixture.write(block * 4096, &[block as u8; 4096], false);
            fixture.tick(SECOND / 10);
        }
        fixture.flush();
        assert_eq!((fixture.status(1), fixture.status(3)), (1, 0));
        assert_eq!(fixture.fact("writeback_is_failing"), 1);
        assert!(fixture.fact("writeback_pause_ms") > 100, "pauses grow");
        for block in 0..blocks {
            assert_eq!(fixture.read(block * 4096, 4096), [block as u8; 4096]);
        }
        // No room is left: one more waits, and goes on when the origin is back.
        fixture.submit(Bio::write(blocks * 4096, Buffer::from_bytes(&[7; 4096]), false, 0));
        fixture.settle();
        assert_eq!(fixture.port.parked.len(), 1);
        fixture.refuses = Box::new(|_| false);
        for _ in 0..20 {
            fixture.tick(SECOND);
        }
        let parked = fixture.port.parked.pop_front().unwrap();
        assert!(fixture.run(parked).status.is_ok());
        fixture.drain();
        assert_eq!(fixture.status(1), 0);
        let origin = fixture.origin.image();
        for block in 0..blocks as usize {
            assert_eq!(origin[block * 4096], block as u8);
        }
    });
}

#[test]
fn a_full_cache_before_a_dead_origin_gives_up_in_time() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.refuses = Box::new(is_at("origin"));
        let blocks = fixture.status(2);
        for block in 0..blocks {
            fixture.write(block * 4096, &[1; 4096], false);
        }
        let bio = Bio::write(blocks * 4096, Buffer::from_bytes(&[7; 4096]), false, 0);
        fixture.submit(bio);
        for second in 0.. {
            assert!(second < 80, "{}: it waits indefinitely", fixture.table);
            fixture.tick(SECOND);
            if let Some(done) = fixture.done() {
                return assert_eq!(done.status, Err(Status::NoSpace));
            }
            let parked = fixture.port.parked.pop_front().unwrap();
            fixture.submit(parked);
        }
    });
}

#[test]
fn a_failed_flush_of_the_origin_frees_nothing() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 65536], true);
        let mut failures = 3;
        fixture.refuses = Box::new(move |io| {
            let fails = is_at("origin")(io) && io.op == Op::Flush && failures > 0;
            failures -= i32::from(fails);
            fails
        });
        fixture.message("flush").unwrap();
        fixture.tick(SECOND);
        assert_eq!(fixture.status(3), fixture.status(2) - 16);
        for _ in 0..10 {
            fixture.tick(SECOND);
        }
        assert_eq!(fixture.status(3), fixture.status(2));
        assert_eq!(fixture.fact("writeback_failures_total"), 3);
    });
}

#[test]
fn a_cache_disk_that_fails_reads_fails_them_and_nothing_stale_comes() {
    let mut fixture = Fixture::new("s O C 4096 0", MIB, 4 * MIB);
    fixture.origin.poke(0, &[9; 8192]);
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.refuses = Box::new(|io| is_at("cache")(io) && io.op == Op::Read);
    assert_eq!(fixture.try_read(0, 4096), Err(Status::Io));
    assert_eq!(fixture.read(4096, 4096), [9; 4096]);
    assert_eq!(fixture.try_read(0, 8192), Err(Status::Io));
    fixture.message("flush").unwrap();
    fixture.tick(SECOND);
    assert_eq!((fixture.status(1), fixture.status(3)), (1, fixture.status(2) - 1));
    fixture.refuses = Box::new(|_| false);
    for _ in 0..20 {
        fixture.tick(SECOND);
    }
    assert_eq!((fixture.status(1), fixture.status(3)), (0, fixture.status(2)));
    assert_eq!(fixture.origin.image()[..4096], [1; 4096]);
}

#[test]
fn memory_that_cannot_be_read_stays_dirty_and_the_rest_goes_on() {
    let mut fixture = Fixture::new("p O C 4096 0", MIB, 4 * MIB);
    fixture.open();
    for block in 0..8_u8 {
        fixture.write(u64::from(block) * 4096, &[block + 1; 4096], false);
    }
    fixture.flush();
    let Cache::Memory(pmem) = fixture.cache.clone() else { unreachable!() };
    // Block 3 is in slot 3, after the metadata.
    let metadata_bytes = (64_u64 + 16 * fixture.status(2)).next_multiple_of(4096);
    pmem.poison(metadata_bytes + 3 * 4096, 4096);
    assert!(fixture.try_read(3 * 4096, 4096).is_err());
    assert_eq!(fixture.read(4 * 4096, 4096), [5; 4096]);
    fixture.message("flush").unwrap();
    fixture.tick(SECOND);
    assert_eq!(fixture.status(3), fixture.status(2) - 1);
    assert_eq!(fixture.origin.image()[2 * 4096..3 * 4096], [3; 4096]);
    assert_eq!(fixture.origin.image()[4 * 4096..5 * 4096], [5; 4096]);
    pmem.heal();
    for _ in 0..20 {
        fixture.tick(SECOND);
    }
    assert_eq!((fixture.status(3), fixture.status(1)), (fixture.status(2), 0));
}

#[test]
fn a_commit_that_fails_fails_all_but_reads_of_what_was_committed() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.write(4096, &[2; 4096], false);
        match fixture.cache.clone() {
            Cache::Memory(pmem) => pmem.fail_syncs_from(1),
            Cache::Disk(_) => {
                fixture.refuses = Box::new(|io| is_at("cache")(io) && io.op == Op::Flush);
            }
        }
        assert_eq!(fixture.run(Bio::flush(0)).status, Err(Status::Io));
        assert!(fixture.try_write(8192, &[3; 4096], false).is_err());
        assert_eq!(fixture.read(0, 4096), [1; 4096]);
        // A failed flush may have lost it; the origin's data would be older still.
        assert_eq!(fixture.try_read(4096, 4096), Err(Status::Io));
        assert_eq!(fixture.status(1), 1);
        assert!(fixture.target().suspend().is_err());
    });
}

/// The data of a failed flush can be read, but later flushes do not make it durable: an attach with
/// such a failure tells the next one, which must not build on that data.
#[test]
fn after_an_attach_that_failed_nothing_is_built_on_what_may_be_lost() {
    for seed in 0..200 {
        let prng = &mut Prng::new(seed);
        let mut fixture = Fixture::new("s O C 4096 0", MIB, 4 * MIB);
        fixture.origin.poke(0, &[9; 8192]);
        let Cache::Disk(disk) = fixture.cache.clone() else { unreachable!() };
        disk.seed(seed);
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.write(4096, &[2; 4096], false);
        fixture.kill();
        disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).after(seed % 4).times(1));
        let has_failed = fixture.try_open(false).is_err();
        fixture.kill();
        disk.heal();
        fixture.open();
        let seen = fixture.read(4096, 4096);
        assert!(seen == [2; 4096] || seen == [9; 4096] && has_failed, "{seed}: {}", seen[0]);
        fixture.write(8192, &[3; 4096], false);
        fixture.flush();
        fixture.power_cut(prng);
        fixture.open();
        assert_eq!(fixture.read(0, 4096), [1; 4096], "{seed}");
        assert_eq!(fixture.read(4096, 4096), seen, "{seed}");
        assert_eq!(fixture.read(8192, 4096), [3; 4096], "{seed}");
    }
}

#[test]
fn a_format_that_could_not_be_flushed_is_not_built_on() {
    for seed in 0..200 {
        let prng = &mut Prng::new(seed);
        let mut fixture = Fixture::new("s O C 4096 0", MIB, 4 * MIB);
        let Cache::Disk(disk) = fixture.cache.clone() else { unreachable!() };
        disk.seed(seed);
        disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).after(seed % 4).times(1));
        let _ = fixture.try_open(false);
        fixture.kill();
        disk.heal();
        // A format that was cut short is simply begun again.
        fixture.try_open(false).unwrap();
        fixture.write(8192, &[3; 4096], false);
        fixture.flush();
        fixture.power_cut(prng);
        fixture.open();
        assert_eq!(fixture.read(8192, 4096), [3; 4096], "{seed}");
    }
}

#[test]
fn a_request_that_the_origin_serves_ends_a_pause() {
    in_both_modes("4096 0", |mut fixture| {
        for is_drain in [false, true] {
            fixture.open();
            fixture.write(0, &[1; 4096], true);
            fixture.target().set_draining(true);
            fixture.refuses = Box::new(|io| is_at("origin")(io) && io.op != udm::bio::Op::Read);
            while fixture.fact("writeback_pause_ms") < 1000 {
                fixture.tick(SECOND / 20);
            }
            fixture.refuses = Box::new(|_| false);
            fixture.tick(SECOND / 1000);
            assert_eq!(fixture.target().dirty().bytes, 4096, "the pause is not over");
            if is_drain {
                fixture.target().set_draining(false);
                fixture.target().set_draining(true);
            } else {
                fixture.read(65536, 4096);
            }
            fixture.tick(SECOND / 1000);
            assert_eq!(fixture.target().dirty().bytes, 0, "drain: {is_drain}");
            fixture.remove();
        }
    });
}
