//! Damage on the cache device: contained, never silent, healed by writing.

use udm::error::Status;
use udm::pmem::Persistence;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::builder::{Builder, CLEAN};
use crate::fixture::{Fixture, Setup};

const CRC: &str = "C B 2 data_crc true";

/// The address of the cached copy of a block of `fill` bytes.
fn find(fixture: &Fixture, fill: u8) -> u64 {
    let image = fixture.pmem.image();
    let at = image.chunks(512).position(|sector| sector == [fill; 512]).expect("it is cached");
    at as u64 * 512
}

fn corrupt(fixture: &Fixture, fill: u8) {
    fixture.pmem.corrupt(find(fixture, fill) + 100, |byte| byte ^ 1);
}

#[test]
fn damaged_dirty_data_fails_reads_is_not_written_back_and_heals_by_writing() {
    let mut fixture = Fixture::new(Setup::small().table(CRC));
    fixture.disk.load_image(&vec![0xEE; 12 << 20]);
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.write(8192, &[2; 4096], true);
    corrupt(&fixture, 1);
    assert_eq!(fixture.try_read(0, 4096), Err(Status::Corrupt));
    assert_eq!(fixture.read(8192, 4096), [2; 4096], "damage is contained");
    fixture.drain();
    assert_eq!(fixture.fact("quarantined_bytes"), 4096);
    let image = fixture.disk.image();
    assert_eq!((image[0], image[8192]), (0xEE, 2), "damaged data is not written back");
    assert_eq!(fixture.try_read(0, 512), Err(Status::Corrupt), "nor the outdated data read");
    for _ in 0..2 {
        fixture.remove();
        fixture.open();
        assert_eq!(fixture.try_read(0, 512), Err(Status::Corrupt), "a restart does not help");
    }
    fixture.write(0, &[3; 2048], false);
    assert_eq!(fixture.read(0, 2048), [3; 2048]);
    assert_eq!(fixture.try_read(2048, 512), Err(Status::Corrupt), "the rest is still bad");
    assert_eq!(fixture.fact("quarantined_bytes"), 4096, "a power cut could undo the write");
    fixture.drain();
    assert_eq!(fixture.fact("quarantined_bytes"), 2048);
    assert_eq!(fixture.try_read(2048, 512), Err(Status::Corrupt));
    fixture.write(2048, &[3; 2048], true);
    fixture.drain();
    assert_eq!(fixture.disk.image()[..4096], [3; 4096]);
    assert_eq!(fixture.fact("quarantined_bytes"), 0);
}

#[test]
fn a_heal_that_a_power_cut_loses_leaves_the_damage_known() {
    for seed in 0..20 {
        let mut fixture = Fixture::new(Setup::small().table(CRC));
        fixture.disk.load_image(&vec![0xEE; 12 << 20]);
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        corrupt(&fixture, 1);
        fixture.drain();
        fixture.write(0, &[3; 4096], false);
        fixture.power_cut(&mut Prng::new(seed));
        fixture.open();
        match fixture.try_read(0, 4096) {
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
        let mut fixture = Fixture::new(Setup::small().table(CRC));
        fixture.open();
        let data = [[5; 8192], [6; 8192]].concat();
        fixture.write(BORDER - 8192, &data, true);
        fixture.drain();
        assert_eq!(find(&fixture, 6), find(&fixture, 5) + 8192, "one piece");
        corrupt(&fixture, [5, 6][damaged]);
        assert_eq!(fixture.read(BORDER - 8192, 16384), data);
        assert_eq!(fixture.read(BORDER - 8192, 16384), data);
        assert!(fixture.fact("damaged_reads_total") >= 1);
    }
}

#[test]
fn damaged_clean_data_is_read_again_from_the_origin() {
    let mut fixture = Fixture::new(Setup::small().table(CRC));
    fixture.disk.load_image(&vec![0xEE; 12 << 20]);
    fixture.open();
    fixture.read(4096, 4096);
    fixture.write(0, &[1; 4096], true);
    fixture.drain();
    corrupt(&fixture, 1);
    corrupt(&fixture, 0xEE);
    assert_eq!(fixture.read(0, 4096), [1; 4096]);
    assert_eq!(fixture.read(4096, 4096), [0xEE; 4096]);
    assert_eq!(fixture.fact("quarantined_bytes"), 0);
    assert!(fixture.fact("damaged_reads_total") >= 2);
    fixture.kill();
    fixture.open();
    assert_eq!(fixture.read(0, 8192), [[1; 4096], [0xEE; 4096]].concat());
}

#[test]
fn unreadable_dirty_data_is_quarantined_without_checksums_too() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.write(8192, &[2; 4096], true);
    fixture.pmem.poison(find(&fixture, 1), 64);
    assert_eq!(fixture.try_read(0, 512), Err(Status::Io));
    fixture.drain();
    assert_eq!(fixture.disk.image()[8192], 2);
    assert!(fixture.try_read(0, 512).is_err());
    assert_eq!(fixture.fact("quarantined_bytes"), 4096);
}

#[test]
fn zeroes_shared_by_keys_are_checked_over_their_whole_length() {
    let mut fixture = Fixture::new(Setup::small().table(CRC));
    fixture.disk.load_image(&vec![0xEE; 12 << 20]);
    fixture.open();
    fixture.zero(udm::bio::Op::WriteZeroes, 0, 512, true);
    fixture.zero(udm::bio::Op::WriteZeroes, 8192, 4096, true);
    // Both keys name the same zeroes; find them by damaging what the second one reads.
    let segment_data = (1..24).map(|nth| 20480 + nth * 65536 + 12288);
    for place in segment_data {
        fixture.pmem.corrupt(place + 3000, |byte| byte ^ 1);
    }
    assert_eq!(fixture.try_read(8192, 4096), Err(Status::Corrupt));
}

#[test]
fn more_damage_than_the_list_holds_pauses_write_back_without_spinning() {
    let mut fixture = Fixture::new(Setup::small().table(CRC));
    fixture.open();
    for block in 0..120_u64 {
        fixture.write(block * 8192, &[block as u8 + 1; 512], false);
    }
    fixture.flush();
    for block in 0..120 {
        corrupt(&fixture, block + 1);
    }
    fixture.target().set_draining(true);
    let mut port = udm::target::Port::new(0);
    let mut ticks = 0;
    while fixture.now < 30 * SECOND {
        let next = fixture.target().tick(fixture.now, &mut port).unwrap_or(fixture.now + SECOND);
        assert!(port.ios.is_empty());
        assert!(next >= fixture.now);
        fixture.now = next;
        ticks += 1;
        assert!(ticks < 100, "spinning");
    }
    assert_eq!(fixture.fact("writeback_is_failing"), 1);
    assert_eq!(fixture.try_read(0, 512), Err(Status::Corrupt));
}

/// The list of bad ranges joins neighbours.
#[test]
fn sequential_damage_is_one_range() {
    let setup = Setup { cache_bytes: 20480 + 64 * (64 << 10), ..Setup::small().table(CRC) };
    let mut fixture = Fixture::new(setup);
    fixture.open();
    for block in 0..512_u64 {
        fixture.write(block * 4096, &[0x55; 4096], block % 2 == 0);
    }
    fixture.write(4 << 20, &[0xAA; 4096], true);
    let image = fixture.pmem.image();
    let is_damaged = |sector: &[u8]| sector == [0x55; 512];
    for (nth, _) in image.chunks(512).enumerate().filter(|(_, sector)| is_damaged(sector)) {
        fixture.pmem.corrupt(nth as u64 * 512 + 7, |byte| byte ^ 1);
    }
    fixture.drain();
    assert_eq!(fixture.fact("quarantined_bytes"), 2 << 20);
    assert_eq!(fixture.disk.image()[4 << 20], 0xAA, "what is good is written back");
    for _ in 0..2 {
        assert_eq!(fixture.try_read((2 << 20) - 512, 512), Err(Status::Corrupt));
        assert_eq!(fixture.read(2 << 20, 512), [0; 512]);
        fixture.remove();
        fixture.open();
    }
    // A hole in the middle makes two ranges of it.
    fixture.write(1 << 20, &[0xBB; 4096], true);
    fixture.drain();
    assert_eq!(fixture.fact("quarantined_bytes"), (2 << 20) - 4096);
}

/// If a damaged range does not fit into the list, the rest of the batch reaches the origin.
#[test]
fn a_full_list_of_damage_does_not_hold_good_data_back() {
    let mut fixture = Fixture::new(Setup::small().table(CRC));
    fixture.open();
    for block in 0..100_u64 {
        fixture.write(block * 8192, &[block as u8 + 1; 512], false);
    }
    fixture.write(8 << 20, &[0xAA; 4096], false);
    fixture.flush();
    for block in 0..100 {
        corrupt(&fixture, block + 1);
    }
    fixture.target().set_draining(true);
    (0..50).for_each(|_| fixture.tick(SECOND));
    assert_eq!(fixture.fact("writeback_is_failing"), 1);
    assert_eq!(fixture.fact("quarantined_bytes"), 96 * 512);
    assert_eq!(fixture.disk.image()[8 << 20..][..4096], [0xAA; 4096]);
    assert_eq!(fixture.try_read(99 * 8192, 512), Err(Status::Corrupt));
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
    let mut fixture = Fixture::of_image(&damaged_log(true), "C B 0");
    fixture.open();
    assert_eq!(fixture.read(8192, 4096), [3; 4096], "the dirty key behind the damage");
    assert_eq!(fixture.read(0, 8192), [0xEE; 8192], "clean data is read from the origin");
    let notes = fixture.target().facts().iter().filter(|fact| fact.name == "attach_note").count();
    assert_eq!(notes, 1);
    fixture.drain();
    assert_eq!(fixture.disk.image()[8192], 3);
}

#[test]
fn log_damage_among_dirty_keys_is_refused_or_cut_off_on_request() {
    let image = damaged_log(false);
    let mut fixture = Fixture::of_image(&image, "C B 0");
    let error = fixture.try_open(false).unwrap_err().to_string();
    assert!(error.contains("log damaged at 0:64") && error.contains("log_damage truncate"));
    let mut fixture = Fixture::of_image(&image, "C B 0 log_damage truncate");
    fixture.open();
    assert_eq!(fixture.read(0, 12288), [[1; 4096], [0xEE; 4096], [0xEE; 4096]].concat());
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
        let error = Fixture::of_image(&image, "C B 0").try_open(false).expect_err(what).to_string();
        assert!(error.contains("log damaged at 0:"), "{what}: {error}");
    }
}

#[test]
fn a_torn_append_before_old_history_is_no_damage() {
    // Segments larger than the range that is zeroed ahead, with whole old key sets after the
    // zeroes.
    let mut setup = Setup::small();
    setup.geometry.segment_bytes = 256 << 10;
    setup.cache_bytes = 20480 + 24 * (256 << 10);
    let mut fixture = Fixture::new(setup);
    fixture.open();
    fixture.write(0, &[1; 512], true);
    let key = crate::builder::Key { len: 512, segment: 1, ..Default::default() };
    let log = 20480 + 12288;
    for place in (100 << 10..200 << 10).step_by(4096) {
        fixture.pmem.poke(log + place, &crate::builder::kset(&[key]));
    }
    let head = fixture.target().status().split(' ').nth(6).unwrap().to_string();
    let head: u64 = head.strip_prefix("0:").unwrap().parse().unwrap();
    fixture.pmem.poke(log + head, &crate::builder::kset(&[key])[..40]);
    fixture.kill();
    fixture.open();
    assert_eq!(fixture.read(0, 512), [1; 512]);
}

#[test]
fn a_failing_cache_device_fails_requests_and_never_serves_outdated_data() {
    for persistence in [Persistence::Cpu, Persistence::Msync] {
        let mut fixture = Fixture::new(Setup { persistence, ..Setup::small() });
        fixture.disk.load_image(&vec![0xEE; 12 << 20]);
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        match persistence {
            Persistence::Cpu => fixture.pmem.fail_drains_from(1),
            Persistence::Msync => fixture.pmem.fail_syncs_from(1),
        }
        let bio = udm::bio::Bio::write(0, udm::buffer::Buffer::from_bytes(&[2; 4096]), true, 0);
        assert_eq!(fixture.run(bio).status, Err(Status::Io));
        let flush = fixture.run(udm::bio::Bio::flush(0)).status;
        if persistence == Persistence::Msync {
            assert_eq!(flush, Err(Status::Io), "the medium does not become durable");
        }
        match fixture.try_read(0, 4096) {
            Ok(data) => assert!(data[0] == 1 || data[0] == 2, "{}", data[0]),
            Err(status) => assert_eq!(status, Status::Io),
        }
        for _ in 0..5 {
            fixture.tick(SECOND);
        }
        let is_seen = fixture.fact("medium_has_failed") + fixture.fact("writeback_is_stuck");
        assert!(is_seen > 0, "{persistence:?}");
        fixture.kill();
        fixture.pmem.fail_drains_from(u64::MAX);
        fixture.pmem.fail_syncs_from(u64::MAX);
        fixture.open();
        let data = fixture.read(0, 4096);
        assert!(data == [1; 4096] || data == [2; 4096], "{}", data[0]);
    }
}

/// Data of a failed sync can be read, and no later sync makes it durable: the next server must not
/// rely on it. The failure occurs in a flush, or in the attach after a death.
#[test]
fn after_a_failed_sync_nothing_is_built_on_what_may_be_lost() {
    for (seed, is_attach) in (0..64).flat_map(|seed| [(seed, false), (seed, true)]) {
        let prng = &mut udm::prng::Prng::new(seed);
        let setup = Setup { persistence: Persistence::Msync, ..Setup::small() };
        let mut fixture = Fixture::new(setup);
        fixture.disk.load_image(&vec![0xEE; 12 << 20]);
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.write(4096, &[2; 4096], false);
        if is_attach {
            fixture.kill();
            fixture.pmem.fail_syncs_from(1 + seed % 8);
            let _ = fixture.try_open(false).map(|()| fixture.kill());
        } else {
            fixture.pmem.fail_syncs_from(1 + seed % 4);
            let _ = fixture.run(udm::bio::Bio::flush(0));
            fixture.kill();
        }
        fixture.pmem.fail_syncs_from(u64::MAX);
        fixture.open();
        let seen = fixture.read(4096, 4096);
        let is_said = crate::left::notes(&fixture).iter().any(|note| note.contains("LOST"));
        let is_lost = seen == [0xEE; 4096];
        assert!(is_lost && is_said || seen == [2; 4096], "seed {seed}: {is_said} {}", seen[0]);
        fixture.write(8192, &[3; 4096], false);
        fixture.flush();
        fixture.power_cut(prng);
        fixture.open();
        for (offset, wanted) in [(0, vec![1; 4096]), (4096, seen), (8192, vec![3; 4096])] {
            let found = fixture.read(offset, 4096)[0];
            assert_eq!(found, wanted[0], "seed {seed}, {is_attach}: {offset}");
        }
    }
}

/// Where leaving the CPU is enough, a medium that fails further operations has not lost
/// acknowledged data.
#[test]
fn memory_that_fails_keeps_what_was_acknowledged() {
    let mut fixture = Fixture::new(Setup { persistence: Persistence::Cpu, ..Setup::small() });
    fixture.open();
    fixture.write(4096, &[2; 4096], false);
    fixture.pmem.fail_syncs_from(1);
    assert_eq!(fixture.run(udm::bio::Bio::flush(0)).status, Err(Status::Io));
    fixture.kill();
    fixture.pmem.fail_syncs_from(u64::MAX);
    fixture.open();
    assert_eq!(fixture.read(4096, 4096), [2; 4096]);
    assert!(crate::left::notes(&fixture).is_empty());
}

/// Data that cannot be stored again after a failed sync is refused by name.
#[test]
fn after_a_failed_sync_what_cannot_be_read_is_refused() {
    let setup = Setup { persistence: Persistence::Msync, ..Setup::small() };
    let mut fixture = Fixture::new(setup);
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.write(4096, &[2; 4096], false);
    fixture.pmem.fail_syncs_from(1);
    assert_eq!(fixture.run(udm::bio::Bio::flush(0)).status, Err(Status::Io));
    fixture.kill();
    fixture.pmem.fail_syncs_from(u64::MAX);
    fixture.pmem.poison(0x14_0000, 64);
    let error = fixture.try_open(false).unwrap_err().to_string();
    assert!(
        error.contains("a flush of it has failed") && error.contains("byte 1048576"),
        "{error}"
    );
    fixture.pmem.heal();
    fixture.open();
    assert_eq!(fixture.read(0, 4096), [1; 4096]);
}

#[test]
fn a_format_that_could_not_be_synced_is_not_built_on() {
    for seed in 0..64 {
        let prng = &mut udm::prng::Prng::new(seed);
        let mut fixture = Fixture::new(Setup { persistence: Persistence::Msync, ..Setup::small() });
        fixture.pmem.fail_syncs_from(1 + seed % 16);
        let _ = fixture.try_open(false);
        fixture.kill();
        fixture.pmem.fail_syncs_from(u64::MAX);
        fixture.open();
        fixture.write(8192, &[3; 4096], false);
        fixture.flush();
        fixture.power_cut(prng);
        fixture.open();
        assert_eq!(fixture.read(8192, 4096), [3; 4096], "seed {seed}");
    }
}

/// Damage that may get into the log while a cache runs, unnoticed by it.
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
        ("a LAST to its own segment", crate::builder::last(0)),
        ("a key of no segment", set(&|key| key.segment = 24)),
        ("a key beyond its segment", set(&|key| key.at = u32::MAX - 511)),
        ("a key beyond all numbers", set(&|key| key.off = u64::MAX - 511)),
        ("a key without length", set(&|key| key.len = 0)),
        ("a key set beyond the head", crate::builder::kset(&[good; 128])),
        ("nothing", vec![0; 64]),
    ]
}

#[test]
fn a_log_that_changes_under_a_running_cache_is_no_guide() {
    for (what, record) in hostile_records() {
        for is_written_back in [false, true] {
            let mut fixture = Fixture::new(Setup::small().table(CRC));
            fixture.disk.load_image(&vec![0xEE; 12 << 20]);
            fixture.open();
            fixture.write(0, &[1; 4096], true);
            fixture.write(8192, &[2; 4096], true);
            // The log begins at the front of segment 0.
            fixture.pmem.poke(20480 + 12288, &record);
            corrupt(&fixture, 1);
            if is_written_back {
                for _ in 0..5 {
                    fixture.tick(SECOND);
                }
                assert_eq!(fixture.disk.image()[..4096], [0xEE; 4096], "{what}");
            }
            let read = fixture.try_read(0, 4096);
            assert_eq!(read, Err(Status::Corrupt), "{what}: in doubt, it is dirty");
            assert_eq!(fixture.read(8192, 4096), [2; 4096], "{what}");
        }
    }
}

#[test]
fn clean_keys_of_unreadable_data_are_read_again() {
    let mut built = Builder::new(24);
    let clean = built.key(0, 5, 0, &[1; 4096], CLEAN);
    built.append(&[clean], 1);
    let mut fixture = Fixture::of_image(&built.finish(), "C B 0");
    fixture.open();
    fixture.pmem.poison(built.place(5, 512) as u64, 64);
    assert_eq!(fixture.read(0, 4096), [0xEE; 4096]);
}
