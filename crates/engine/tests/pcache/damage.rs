//! Damage on the cache device: contained, never silent, healed by writing.

use udm::error::Status;
use udm::pmem::Persistence;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::builder::{Builder, CLEAN};
use crate::world::{Setup, World};

const CRC: &str = "C B 2 data_crc true";

/// Where the cached copy of a block of `fill` bytes stands.
fn find(world: &World, fill: u8) -> u64 {
    let image = world.pmem.image();
    let at = image.chunks(512).position(|sector| sector == [fill; 512]).expect("it is cached");
    at as u64 * 512
}

fn corrupt(world: &World, fill: u8) {
    world.pmem.corrupt(find(world, fill) + 100, |byte| byte ^ 1);
}

#[test]
fn damaged_dirty_data_fails_reads_is_not_written_back_and_heals_by_writing() {
    let mut world = World::new(Setup::small().table(CRC));
    world.disk.load_image(&vec![0xEE; 12 << 20]);
    world.open();
    world.write(0, &[1; 4096], true);
    world.write(8192, &[2; 4096], true);
    corrupt(&world, 1);
    assert_eq!(world.try_read(0, 4096), Err(Status::Corrupt));
    assert_eq!(world.read(8192, 4096), [2; 4096], "damage is contained");
    world.drain();
    assert_eq!(world.fact("quarantined_bytes"), 4096);
    let image = world.disk.image();
    assert_eq!((image[0], image[8192]), (0xEE, 2), "damaged data is not written back");
    assert_eq!(world.try_read(0, 512), Err(Status::Corrupt), "nor the outdated data read");
    for _ in 0..2 {
        world.remove();
        world.open();
        assert_eq!(world.try_read(0, 512), Err(Status::Corrupt), "a restart changes nothing");
    }
    world.write(0, &[3; 2048], false);
    assert_eq!(world.read(0, 2048), [3; 2048]);
    assert_eq!(world.try_read(2048, 512), Err(Status::Corrupt), "the rest is still bad");
    assert_eq!(world.fact("quarantined_bytes"), 4096, "a power cut could undo the write");
    world.drain();
    assert_eq!(world.fact("quarantined_bytes"), 2048);
    assert_eq!(world.try_read(2048, 512), Err(Status::Corrupt));
    world.write(2048, &[3; 2048], true);
    world.drain();
    assert_eq!(world.disk.image()[..4096], [3; 4096]);
    assert_eq!(world.fact("quarantined_bytes"), 0);
}

#[test]
fn a_heal_that_a_power_cut_loses_leaves_the_damage_known() {
    for seed in 0..20 {
        let mut world = World::new(Setup::small().table(CRC));
        world.disk.load_image(&vec![0xEE; 12 << 20]);
        world.open();
        world.write(0, &[1; 4096], true);
        corrupt(&world, 1);
        world.drain();
        world.write(0, &[3; 4096], false);
        world.power_cut(&mut Prng::new(seed));
        world.open();
        match world.try_read(0, 4096) {
            Ok(data) => assert_eq!(data, [3; 4096], "seed {seed}: outdated data, silently"),
            Err(status) => assert_eq!(status, Status::Corrupt),
        }
    }
}

/// Data on both sides of a region's border that stands together in the cache, which the simulation
/// met: it is one piece to read, and each side is dropped by itself.
#[test]
fn damage_at_the_border_of_two_regions_is_read_again_from_the_origin() {
    const BORDER: u64 = 4 << 20;
    for damaged in [0, 1] {
        let mut world = World::new(Setup::small().table(CRC));
        world.open();
        let data = [[5; 8192], [6; 8192]].concat();
        world.write(BORDER - 8192, &data, true);
        world.drain();
        assert_eq!(find(&world, 6), find(&world, 5) + 8192, "one piece");
        corrupt(&world, [5, 6][damaged]);
        assert_eq!(world.read(BORDER - 8192, 16384), data);
        assert_eq!(world.read(BORDER - 8192, 16384), data);
        assert!(world.fact("damaged_reads_total") >= 1);
    }
}

#[test]
fn damaged_clean_data_is_read_again_from_the_origin() {
    let mut world = World::new(Setup::small().table(CRC));
    world.disk.load_image(&vec![0xEE; 12 << 20]);
    world.open();
    world.read(4096, 4096);
    world.write(0, &[1; 4096], true);
    world.drain();
    corrupt(&world, 1);
    corrupt(&world, 0xEE);
    assert_eq!(world.read(0, 4096), [1; 4096]);
    assert_eq!(world.read(4096, 4096), [0xEE; 4096]);
    assert_eq!(world.fact("quarantined_bytes"), 0);
    assert!(world.fact("damaged_reads_total") >= 2);
    world.kill();
    world.open();
    assert_eq!(world.read(0, 8192), [[1; 4096], [0xEE; 4096]].concat());
}

#[test]
fn unreadable_dirty_data_is_quarantined_without_checksums_too() {
    let mut world = World::new(Setup::small());
    world.open();
    world.write(0, &[1; 4096], true);
    world.write(8192, &[2; 4096], true);
    world.pmem.poison(find(&world, 1), 64);
    assert_eq!(world.try_read(0, 512), Err(Status::Io));
    world.drain();
    assert_eq!(world.disk.image()[8192], 2);
    assert!(world.try_read(0, 512).is_err());
    assert_eq!(world.fact("quarantined_bytes"), 4096);
}

#[test]
fn zeroes_shared_by_keys_are_checked_over_their_whole_length() {
    let mut world = World::new(Setup::small().table(CRC));
    world.disk.load_image(&vec![0xEE; 12 << 20]);
    world.open();
    world.zero(udm::bio::Op::WriteZeroes, 0, 512, true);
    world.zero(udm::bio::Op::WriteZeroes, 8192, 4096, true);
    // Both keys name the same zeroes; find them by damaging what the second one reads.
    let segment_data = (1..24).map(|nth| 20480 + nth * 65536 + 12288);
    for place in segment_data {
        world.pmem.corrupt(place + 3000, |byte| byte ^ 1);
    }
    assert_eq!(world.try_read(8192, 4096), Err(Status::Corrupt));
}

#[test]
fn more_damage_than_the_list_holds_pauses_write_back_without_spinning() {
    let mut world = World::new(Setup::small().table(CRC));
    world.open();
    for block in 0..120_u64 {
        world.write(block * 8192, &[block as u8 + 1; 512], false);
    }
    world.flush();
    for block in 0..120 {
        corrupt(&world, block + 1);
    }
    world.target().set_draining(true);
    let mut port = udm::target::Port::new(0);
    let mut ticks = 0;
    while world.now < 30 * SECOND {
        let next = world.target().tick(world.now, &mut port).unwrap_or(world.now + SECOND);
        assert!(port.ios.is_empty());
        assert!(next >= world.now);
        world.now = next;
        ticks += 1;
        assert!(ticks < 100, "spinning");
    }
    assert_eq!(world.fact("writeback_is_failing"), 1);
    assert_eq!(world.try_read(0, 512), Err(Status::Corrupt));
}

/// Three FUA writes in a log; the image with the key set of the second damaged.
fn damaged_log(is_behind_dirty_tail: bool) -> Vec<u8> {
    let mut built = Builder::new(24);
    let mut sets = Vec::new();
    for nth in 0..3_u8 {
        let key = built.key(u64::from(nth) * 4096, 5, u32::from(nth) * 4096, &[nth + 1; 4096], 0);
        sets.push(built.place(0, built.head.1));
        built.append(&[key], 1);
        if nth == 1 && is_behind_dirty_tail {
            built.dirty_tail = built.head;
        }
    }
    let mut image = built.finish();
    image[sets[1] + 40] ^= 1;
    image
}

#[test]
fn log_damage_before_dirty_tail_costs_clean_data_only() {
    let mut world = World::of_image(&damaged_log(true), "C B 0");
    world.open();
    assert_eq!(world.read(8192, 4096), [3; 4096], "the dirty key behind the damage");
    assert_eq!(world.read(0, 8192), [0xEE; 8192], "clean data comes from the origin");
    let notes = world.target().facts().iter().filter(|fact| fact.name == "attach_note").count();
    assert_eq!(notes, 1);
    world.drain();
    assert_eq!(world.disk.image()[8192], 3);
}

#[test]
fn log_damage_among_dirty_keys_is_refused_or_cut_off_on_request() {
    let image = damaged_log(false);
    let mut world = World::of_image(&image, "C B 0");
    let error = world.try_open(false).unwrap_err().to_string();
    assert!(error.contains("log damaged at 0:64") && error.contains("log_damage truncate"));
    let mut world = World::of_image(&image, "C B 0 log_damage truncate");
    world.open();
    assert_eq!(world.read(0, 12288), [[1; 4096], [0xEE; 4096], [0xEE; 4096]].concat());
}

#[test]
fn damage_at_the_end_of_a_log_segment_is_not_taken_for_a_torn_append() {
    for what in ["last key set", "LAST record"] {
        let mut built = Builder::new(24);
        let key = built.key(0, 5, 0, &[1; 512], 0);
        let mut at = 0;
        while built.log.len() == 1 {
            if built.data_bytes() - built.head.1 >= 64 + 24 {
                at = built.place(0, built.head.1);
            }
            built.append(&[key], 3);
        }
        let flushed = built.key(4096, 5, 4096, &[2; 512], 0);
        built.append(&[flushed], 1);
        let mut image = built.finish();
        let at = if what == "LAST record" { at + 64 } else { at };
        image[at + 4] ^= 0x40;
        let error = World::of_image(&image, "C B 0").try_open(false).expect_err(what).to_string();
        assert!(error.contains("log damaged at 0:"), "{what}: {error}");
    }
}

#[test]
fn a_torn_append_before_old_history_is_no_damage() {
    // Segments larger than what is zeroed ahead, with whole old key sets after the zeroes.
    let mut setup = Setup::small();
    setup.geometry.segment_bytes = 256 << 10;
    setup.cache_bytes = 20480 + 24 * (256 << 10);
    let mut world = World::new(setup);
    world.open();
    world.write(0, &[1; 512], true);
    let key = crate::builder::Key { len: 512, segment: 1, ..Default::default() };
    let log = 20480 + 12288;
    for place in (100 << 10..200 << 10).step_by(4096) {
        world.pmem.poke(log + place, &crate::builder::kset(&[key]));
    }
    let head = world.target().status().split(' ').nth(6).unwrap().to_string();
    let head: u64 = head.strip_prefix("0:").unwrap().parse().unwrap();
    world.pmem.poke(log + head, &crate::builder::kset(&[key])[..40]);
    world.kill();
    world.open();
    assert_eq!(world.read(0, 512), [1; 512]);
}

#[test]
fn a_failing_cache_device_fails_requests_and_never_serves_outdated_data() {
    for persistence in [Persistence::Cpu, Persistence::Msync] {
        let mut world = World::new(Setup { persistence, ..Setup::small() });
        world.disk.load_image(&vec![0xEE; 12 << 20]);
        world.open();
        world.write(0, &[1; 4096], true);
        match persistence {
            Persistence::Cpu => world.pmem.fail_drains_from(1),
            Persistence::Msync => world.pmem.fail_syncs_from(1),
        }
        let bio = udm::bio::Bio::write(0, udm::buffer::Buffer::from_bytes(&[2; 4096]), true, 0);
        assert_eq!(world.run(bio).status, Err(Status::Io));
        let flush = world.run(udm::bio::Bio::flush(0)).status;
        if persistence == Persistence::Msync {
            assert_eq!(flush, Err(Status::Io), "nothing is durable any more");
        }
        match world.try_read(0, 4096) {
            Ok(data) => assert!(data[0] == 1 || data[0] == 2, "{}", data[0]),
            Err(status) => assert_eq!(status, Status::Io),
        }
        for _ in 0..5 {
            world.tick(SECOND);
        }
        let is_seen = world.fact("medium_has_failed") + world.fact("writeback_is_stuck");
        assert!(is_seen > 0, "{persistence:?}");
        world.kill();
        world.pmem.fail_drains_from(u64::MAX);
        world.pmem.fail_syncs_from(u64::MAX);
        world.open();
        let data = world.read(0, 4096);
        assert!(data == [1; 4096] || data == [2; 4096], "{}", data[0]);
    }
}

/// What a failed sync left can be read, and no later sync makes it durable: the next server must
/// not build on it. The failure meets a flush, or the attach after a death.
#[test]
fn after_a_failed_sync_nothing_is_built_on_what_may_be_lost() {
    for (seed, is_attach) in (0..64).flat_map(|seed| [(seed, false), (seed, true)]) {
        let prng = &mut udm::prng::Prng::new(seed);
        let setup = Setup { persistence: Persistence::Msync, ..Setup::small() };
        let mut world = World::new(setup);
        world.disk.load_image(&vec![0xEE; 12 << 20]);
        world.open();
        world.write(0, &[1; 4096], true);
        world.write(4096, &[2; 4096], false);
        if is_attach {
            world.kill();
            world.pmem.fail_syncs_from(1 + seed % 8);
            let _ = world.try_open(false).map(|()| world.kill());
        } else {
            world.pmem.fail_syncs_from(1 + seed % 4);
            let _ = world.run(udm::bio::Bio::flush(0));
            world.kill();
        }
        world.pmem.fail_syncs_from(u64::MAX);
        world.open();
        let seen = world.read(4096, 4096);
        let is_said = crate::left::notes(&world).iter().any(|note| note.contains("LOST"));
        let is_lost = seen == [0xEE; 4096];
        assert!(is_lost && is_said || seen == [2; 4096], "seed {seed}: {is_said} {}", seen[0]);
        world.write(8192, &[3; 4096], false);
        world.flush();
        world.power_cut(prng);
        world.open();
        for (offset, wanted) in [(0, vec![1; 4096]), (4096, seen), (8192, vec![3; 4096])] {
            let found = world.read(offset, 4096)[0];
            assert_eq!(found, wanted[0], "seed {seed}, {is_attach}: {offset}");
        }
    }
}

/// Where leaving the CPU is enough, a medium that refuses to work on has lost nothing that was
/// acknowledged.
#[test]
fn memory_that_fails_keeps_what_was_acknowledged() {
    let mut world = World::new(Setup { persistence: Persistence::Cpu, ..Setup::small() });
    world.open();
    world.write(4096, &[2; 4096], false);
    world.pmem.fail_syncs_from(1);
    assert_eq!(world.run(udm::bio::Bio::flush(0)).status, Err(Status::Io));
    world.kill();
    world.pmem.fail_syncs_from(u64::MAX);
    world.open();
    assert_eq!(world.read(4096, 4096), [2; 4096]);
    assert!(crate::left::notes(&world).is_empty());
}

/// What cannot be stored again after a failed sync is refused by name.
#[test]
fn after_a_failed_sync_what_cannot_be_read_is_refused() {
    let setup = Setup { persistence: Persistence::Msync, ..Setup::small() };
    let mut world = World::new(setup);
    world.open();
    world.write(0, &[1; 4096], true);
    world.write(4096, &[2; 4096], false);
    world.pmem.fail_syncs_from(1);
    assert_eq!(world.run(udm::bio::Bio::flush(0)).status, Err(Status::Io));
    world.kill();
    world.pmem.fail_syncs_from(u64::MAX);
    world.pmem.poison(0x14_0000, 64);
    let error = world.try_open(false).unwrap_err().to_string();
    assert!(
        error.contains("a flush of it has failed") && error.contains("byte 1048576"),
        "{error}"
    );
    world.pmem.heal();
    world.open();
    assert_eq!(world.read(0, 4096), [1; 4096]);
}

#[test]
fn a_format_that_could_not_be_synced_is_not_built_on() {
    for seed in 0..64 {
        let prng = &mut udm::prng::Prng::new(seed);
        let mut world = World::new(Setup { persistence: Persistence::Msync, ..Setup::small() });
        world.pmem.fail_syncs_from(1 + seed % 16);
        let _ = world.try_open(false);
        world.kill();
        world.pmem.fail_syncs_from(u64::MAX);
        world.open();
        world.write(8192, &[3; 4096], false);
        world.flush();
        world.power_cut(prng);
        world.open();
        assert_eq!(world.read(8192, 4096), [3; 4096], "seed {seed}");
    }
}

/// What may get into the log while a cache runs and does not notice.
fn hostile_records() -> Vec<(&'static str, Vec<u8>)> {
    let good = crate::builder::Key { len: 512, segment: 1, ..Default::default() };
    let set = |change: &dyn Fn(&mut crate::builder::Key)| {
        let mut key = good;
        change(&mut key);
        crate::builder::kset(&[key])
    };
    vec![
        ("a LAST to nowhere", crate::builder::last(u32::MAX)),
        ("a LAST behind the last segment", crate::builder::last(24)),
        ("a LAST to where it stands", crate::builder::last(0)),
        ("a key of no segment", set(&|key| key.segment = 24)),
        ("a key beyond its segment", set(&|key| key.at = u32::MAX - 511)),
        ("a key beyond all numbers", set(&|key| key.off = u64::MAX - 511)),
        ("a key of nothing", set(&|key| key.len = 0)),
        ("a key set beyond the head", crate::builder::kset(&[good; 128])),
        ("nothing", vec![0; 64]),
    ]
}

#[test]
fn a_log_that_changes_under_a_running_cache_is_no_guide() {
    for (what, record) in hostile_records() {
        for is_written_back in [false, true] {
            let mut world = World::new(Setup::small().table(CRC));
            world.disk.load_image(&vec![0xEE; 12 << 20]);
            world.open();
            world.write(0, &[1; 4096], true);
            world.write(8192, &[2; 4096], true);
            // The log begins at the front of segment 0.
            world.pmem.poke(20480 + 12288, &record);
            corrupt(&world, 1);
            if is_written_back {
                for _ in 0..5 {
                    world.tick(SECOND);
                }
                assert_eq!(world.disk.image()[..4096], [0xEE; 4096], "{what}");
            }
            let read = world.try_read(0, 4096);
            assert_eq!(read, Err(Status::Corrupt), "{what}: in doubt, it is dirty");
            assert_eq!(world.read(8192, 4096), [2; 4096], "{what}");
        }
    }
}

#[test]
fn clean_keys_of_unreadable_data_are_read_again() {
    let mut built = Builder::new(24);
    let clean = built.key(0, 5, 0, &[1; 4096], CLEAN);
    built.append(&[clean], 1);
    let mut world = World::of_image(&built.finish(), "C B 0");
    world.open();
    world.pmem.poison(built.place(5, 512) as u64, 64);
    assert_eq!(world.read(0, 4096), [0xEE; 4096]);
}
