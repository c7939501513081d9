//! Devices that fail: nothing is lost with the origin, nothing stale is read without the cache.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{DiskIo, Effect, Fault};
use udm::error::Status;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::basics::in_both_modes;
use crate::world::{Cache, World};

const MIB: u64 = 1 << 20;

fn is_at(name: &'static str) -> impl Fn(&DiskIo) -> bool {
    move |io| io.disk.limits().name == name
}

#[test]
fn a_failing_origin_loses_nothing_and_is_tried_again() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.refuses = Box::new(is_at("origin"));
        let blocks = world.status(2);
        for block in 0..blocks {
            world.write(block * 4096, &[block as u8; 4096], false);
            world.tick(SECOND / 10);
        }
        world.flush();
        assert_eq!((world.status(1), world.status(3)), (1, 0));
        assert_eq!(world.fact("writeback_is_failing"), 1);
        assert!(world.fact("writeback_pause_ms") > 100, "pauses grow");
        for block in 0..blocks {
            assert_eq!(world.read(block * 4096, 4096), [block as u8; 4096]);
        }
        // No room is left: one more waits, and goes on when the origin is back.
        world.submit(Bio::write(blocks * 4096, Buffer::from_bytes(&[7; 4096]), false, 0));
        world.settle();
        assert_eq!(world.port.parked.len(), 1);
        world.refuses = Box::new(|_| false);
        for _ in 0..20 {
            world.tick(SECOND);
        }
        let parked = world.port.parked.pop_front().unwrap();
        assert!(world.run(parked).status.is_ok());
        world.drain();
        assert_eq!(world.status(1), 0);
        let origin = world.origin.image();
        for block in 0..blocks as usize {
            assert_eq!(origin[block * 4096], block as u8);
        }
    });
}

#[test]
fn a_full_cache_before_a_dead_origin_gives_up_in_time() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.refuses = Box::new(is_at("origin"));
        let blocks = world.status(2);
        for block in 0..blocks {
            world.write(block * 4096, &[1; 4096], false);
        }
        let bio = Bio::write(blocks * 4096, Buffer::from_bytes(&[7; 4096]), false, 0);
        world.submit(bio);
        for second in 0.. {
            assert!(second < 80, "{}: it waits for ever", world.table);
            world.tick(SECOND);
            if let Some(done) = world.done() {
                return assert_eq!(done.status, Err(Status::NoSpace));
            }
            let parked = world.port.parked.pop_front().unwrap();
            world.submit(parked);
        }
    });
}

#[test]
fn a_failed_flush_of_the_origin_frees_nothing() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 65536], true);
        let mut failures = 3;
        world.refuses = Box::new(move |io| {
            let fails = is_at("origin")(io) && io.op == Op::Flush && failures > 0;
            failures -= i32::from(fails);
            fails
        });
        world.message("flush").unwrap();
        world.tick(SECOND);
        assert_eq!(world.status(3), world.status(2) - 16);
        for _ in 0..10 {
            world.tick(SECOND);
        }
        assert_eq!(world.status(3), world.status(2));
        assert_eq!(world.fact("writeback_failures_total"), 3);
    });
}

#[test]
fn a_cache_disk_that_fails_reads_fails_them_and_nothing_stale_comes() {
    let mut world = World::new("s O C 4096 0", MIB, 4 * MIB);
    world.origin.poke(0, &[9; 8192]);
    world.open();
    world.write(0, &[1; 4096], true);
    world.refuses = Box::new(|io| is_at("cache")(io) && io.op == Op::Read);
    assert_eq!(world.try_read(0, 4096), Err(Status::Io));
    assert_eq!(world.read(4096, 4096), [9; 4096]);
    assert_eq!(world.try_read(0, 8192), Err(Status::Io));
    world.message("flush").unwrap();
    world.tick(SECOND);
    assert_eq!((world.status(1), world.status(3)), (1, world.status(2) - 1));
    world.refuses = Box::new(|_| false);
    for _ in 0..20 {
        world.tick(SECOND);
    }
    assert_eq!((world.status(1), world.status(3)), (0, world.status(2)));
    assert_eq!(world.origin.image()[..4096], [1; 4096]);
}

#[test]
fn memory_that_cannot_be_read_stays_dirty_and_the_rest_goes_on() {
    let mut world = World::new("p O C 4096 0", MIB, 4 * MIB);
    world.open();
    for block in 0..8_u8 {
        world.write(u64::from(block) * 4096, &[block + 1; 4096], false);
    }
    world.flush();
    let Cache::Memory(pmem) = world.cache.clone() else { unreachable!() };
    // Block 3 is in slot 3, after the metadata.
    let metadata_bytes = (64_u64 + 16 * world.status(2)).next_multiple_of(4096);
    pmem.poison(metadata_bytes + 3 * 4096, 4096);
    assert!(world.try_read(3 * 4096, 4096).is_err());
    assert_eq!(world.read(4 * 4096, 4096), [5; 4096]);
    world.message("flush").unwrap();
    world.tick(SECOND);
    assert_eq!(world.status(3), world.status(2) - 1);
    assert_eq!(world.origin.image()[2 * 4096..3 * 4096], [3; 4096]);
    assert_eq!(world.origin.image()[4 * 4096..5 * 4096], [5; 4096]);
    pmem.heal();
    for _ in 0..20 {
        world.tick(SECOND);
    }
    assert_eq!((world.status(3), world.status(1)), (world.status(2), 0));
}

#[test]
fn a_commit_that_fails_fails_all_but_reads_of_what_was_committed() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 4096], true);
        world.write(4096, &[2; 4096], false);
        match world.cache.clone() {
            Cache::Memory(pmem) => pmem.fail_syncs_from(1),
            Cache::Disk(_) => {
                world.refuses = Box::new(|io| is_at("cache")(io) && io.op == Op::Flush);
            }
        }
        assert_eq!(world.run(Bio::flush(0)).status, Err(Status::Io));
        assert!(world.try_write(8192, &[3; 4096], false).is_err());
        assert_eq!(world.read(0, 4096), [1; 4096]);
        // A flush that failed may have lost it; what the origin has would be older still.
        assert_eq!(world.try_read(4096, 4096), Err(Status::Io));
        assert_eq!(world.status(1), 1);
        assert!(world.target().suspend().is_err());
    });
}

/// What a failed flush left can be read, and no later flush makes it durable: an attach that meets
/// the failure tells the next one, which must not build on it.
#[test]
fn after_an_attach_that_failed_nothing_is_built_on_what_may_be_lost() {
    for seed in 0..200 {
        let prng = &mut Prng::new(seed);
        let mut world = World::new("s O C 4096 0", MIB, 4 * MIB);
        world.origin.poke(0, &[9; 8192]);
        let Cache::Disk(disk) = world.cache.clone() else { unreachable!() };
        disk.seed(seed);
        world.open();
        world.write(0, &[1; 4096], true);
        world.write(4096, &[2; 4096], false);
        world.kill();
        disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).after(seed % 4).times(1));
        let has_failed = world.try_open(false).is_err();
        world.kill();
        disk.heal();
        world.open();
        let seen = world.read(4096, 4096);
        assert!(seen == [2; 4096] || seen == [9; 4096] && has_failed, "{seed}: {}", seen[0]);
        world.write(8192, &[3; 4096], false);
        world.flush();
        world.power_cut(prng);
        world.open();
        assert_eq!(world.read(0, 4096), [1; 4096], "{seed}");
        assert_eq!(world.read(4096, 4096), seen, "{seed}");
        assert_eq!(world.read(8192, 4096), [3; 4096], "{seed}");
    }
}

#[test]
fn a_format_that_could_not_be_flushed_is_not_built_on() {
    for seed in 0..200 {
        let prng = &mut Prng::new(seed);
        let mut world = World::new("s O C 4096 0", MIB, 4 * MIB);
        let Cache::Disk(disk) = world.cache.clone() else { unreachable!() };
        disk.seed(seed);
        disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).after(seed % 4).times(1));
        let _ = world.try_open(false);
        world.kill();
        disk.heal();
        // A format that was cut short is simply begun again.
        world.try_open(false).unwrap();
        world.write(8192, &[3; 4096], false);
        world.flush();
        world.power_cut(prng);
        world.open();
        assert_eq!(world.read(8192, 4096), [3; 4096], "{seed}");
    }
}
