//! The defects of the kernel's implementation (specification section 22), each shown to be absent.
//!
//! | defect | shown by |
//! |---|---|
//! | D1 D2 D3 D4 D6 D11 D13 D14 D16 D17 D19 | the tests `d..` here |
//! | D5 | `origin::d05_a_failed_flush_writes_the_batch_again` |
//! | D7 | `damage`: read again, quarantined, healed; attach and write-back continue |
//! | D8 | `damage::log_damage_...`, `damage::damage_at_the_end_of_a_log_segment_...` |
//! | D9 D10 D12 D15 | `refusals`: cache_info, generations, bounds, keys, the label |
//! | D18 | devices are opened exclusively: the server's tests, with processes |
//! | A1 A2 A3 A4 A6 A7 | the tests `a..` here |
//! | A5 | `origin::a_failing_origin_...`, `damage::more_damage_than_the_list_holds_...` |
//! | A8 | measured, not tested: one pass over the log; checksums wait until data is used |

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::RamDisk;
use udm::pcache::inspect::inspect;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::builder::{Builder, Key, kset};
use crate::fixture::{Fixture, SMALL, Setup};

#[test]
fn d01_the_first_tail_update_after_an_attach_spares_the_current_copy() {
    for seq in [0, 1, 200, 255] {
        let mut built = Builder::new(24);
        built.seq = seq;
        built.gc_percent = 0;
        let key = built.key(0, 5, 0, &[1; 512], 0);
        built.append(&[key], 1);
        let mut fixture = Fixture::of_image(&built.finish(), "C B 0");
        fixture.open();
        // The builder's current copies: key_tail in slot 0, dirty_tail in slot 1.
        let before = fixture.pmem.peek(16384, 64);
        fixture.drain();
        let after = fixture.pmem.peek(16384, 64);
        assert_eq!((&after[..16], &after[48..]), (&before[..16], &before[48..]), "seq {seq}");
        assert_ne!(after[16..48], before[16..48]);
        assert!(fixture.target().status().ends_with("0:64 0:64 0:64"));
    }
}

#[test]
fn d02_old_key_sets_behind_the_log_never_come_alive() {
    let planted = Key { off: 1 << 19, len: 4096, segment: 9, ..Key::default() };
    for fence in 1..9 {
        for seed in 0..12 {
            let mut built = Builder::new(24);
            let good = built.key(0, 9, 0, &[1; 4096], 0);
            built.append(&[good], 1);
            // Old sets wherever the new one may end.
            for at in (built.head.1 + 24..4096).step_by(64) {
                built.data(0, at, &kset(&[planted]));
            }
            let mut fixture = Fixture::of_image(&built.finish(), "C B 0");
            fixture.open();
            fixture.pmem.arm_cut(fence);
            fixture.write(8192, &[2; 512], true);
            let Some(cut) = fixture.pmem.take_cut() else { continue };
            fixture.kill();
            fixture.reboot();
            fixture.pmem = Arc::new(cut.crash(&mut Prng::new(seed)));
            fixture.open();
            let found = fixture.read(1 << 19, 4096);
            assert_eq!(found, [0xEE; 4096], "fence {fence}, seed {seed}");
        }
    }
}

/// Writes in laps, with cuts before every fence; `judge` looks at what each left.
fn laps_with_cuts(table: &'static str, mut judge: impl FnMut(&Fixture, u64)) {
    let mut prng = Prng::new(3);
    let mut fixture = Fixture::new(Setup::small().table(table));
    fixture.open();
    for step in 0..700_u64 {
        let n = 1 + prng.below(6);
        fixture.pmem.arm_cut(n);
        let block = prng.below(300);
        fixture.write(block * 4096, &[step as u8; 4096], prng.one_in(3));
        if prng.one_in(5) {
            fixture.tick(SECOND);
        }
        if let Some(cut) = fixture.pmem.take_cut() {
            let left = Fixture::over(
                fixture.setup.clone(),
                Arc::new(cut.crash(&mut prng)),
                Arc::new(RamDisk::new(fixture.setup.backing_bytes, 512)),
            );
            left.disk.load_image(&fixture.disk.image());
            judge(&left, step);
        }
    }
    assert!(fixture.fact("recycled_segments_total") > 20, "laps were made");
}

#[test]
fn d03_no_power_cut_leaves_a_key_whose_segment_was_reused() {
    for table in ["C B 0 max_age 0", "C B 2 data_crc true max_age 0"] {
        let mut judged = 0;
        laps_with_cuts(table, |left, step| {
            let report = inspect(left.pmem.clone(), SMALL).unwrap();
            assert_eq!(report.stale_keys, 0, "step {step}");
            assert_eq!(report.notes, [""; 0], "step {step}");
            judged += 1;
        });
        assert!(judged > 300);
    }
}

#[test]
fn d03_stale_keys_are_collected_first_of_all() {
    let mut built = Builder::new(24);
    built.generations[6] = 1;
    let mut stale = built.key(0, 6, 0, &[1; 512], 0);
    stale.generation = 0;
    let good = built.key(4096, 5, 0, &[2; 512], 0);
    built.append(&[stale, good], 1);
    built.dirty_tail = built.head;
    let image = built.finish();
    // The end of the log is the key of the last read.
    let tables = [("C B 0 retention fifo", " 0:168", 0xEE), ("C B 0", " 0:104", 2)];
    for (table, key_tail, content) in tables {
        let mut fixture = Fixture::of_image(&image, table);
        fixture.open();
        assert_eq!(fixture.read(0, 512), [0xEE; 512]);
        fixture.tick(SECOND);
        assert!(fixture.target().status().ends_with(key_tail), "{}", fixture.target().status());
        assert_eq!(fixture.read(4096, 512), [content; 512], "{table}: collected, or kept");
    }
}

/// Fills the cache, with its backing device held, until a write parks.
fn fill_until_parked(fixture: &mut Fixture, from: u64) -> (u64, Bio) {
    fixture.is_held = true;
    for block in from..3000 {
        let data = Buffer::from_bytes(&[block as u8; 4096]);
        fixture.submit(Bio::write(block % 1500 * 4096, data, false, block));
        fixture.settle();
        fixture.tick(SECOND / 100);
        if fixture.port.done.pop_front().is_none() {
            return (block, fixture.port.parked.pop_front().unwrap());
        }
    }
    panic!("a cache without write-back is full some day");
}

#[test]
fn d04_a_write_that_waits_for_room_exposes_nothing_old() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.disk.load_image(&vec![0xEE; 12 << 20]);
    fixture.open();
    let (filled, parked) = fill_until_parked(&mut fixture, 0);
    assert!(filled > 100);
    for block in 0..filled {
        let data = Buffer::from_bytes(&[0xDD; 4096]);
        fixture.submit(Bio::write(block * 4096, data, true, 0));
        if let Some(waiting) = fixture.port.parked.pop_front() {
            assert_eq!(waiting.status, Ok(()));
            assert_eq!(
                fixture.read(block * 4096, 4096),
                [block as u8; 4096],
                "acknowledged before"
            );
        }
        fixture.port.done.clear();
    }
    fixture.release();
    assert!(fixture.run(parked).status.is_ok());
}

#[test]
fn d06_a_fill_never_uses_the_readers_buffer() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    let buffer = Buffer::zeroed(4096);
    let place = buffer.as_slice().as_ptr();
    fixture.submit(Bio::read(0, buffer, 0));
    let io = fixture.port.ios.front().unwrap();
    assert_ne!(io.buffer.as_slice().as_ptr(), place);
}

#[test]
fn d11_a_lost_superblock_is_not_formatted_over() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.kill();
    let superblock = fixture.pmem.peek(4096, 24);
    fixture.pmem.poke(4096, &[0; 24]);
    let error = fixture.try_open(false).unwrap_err();
    assert_eq!(error.kind(), udm::error::Kind::Refused, "{error}");
    fixture.pmem.poke(4096, &superblock);
    fixture.open();
    assert_eq!(fixture.read(0, 4096), [1; 4096]);
}

#[test]
fn d13_removal_of_a_full_cache_loses_no_acknowledged_write() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    let (filled, _parked) = fill_until_parked(&mut fixture, 0);
    // Whether or not its keys find free space, every answer is right and no data is lost.
    let suspended = fixture.target().suspend();
    if suspended.is_ok() {
        fixture.target().detach();
        fixture.kill();
        fixture.reboot();
    }
    fixture.kill();
    fixture.open();
    for block in filled.saturating_sub(1500)..filled {
        let at = block % 1500 * 4096;
        assert_eq!(fixture.read(at, 512), [block as u8; 512], "{suspended:?}");
    }
}

#[test]
fn d14_removal_waits_for_write_back_in_flight() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.is_held = true;
    fixture.tick(SECOND);
    fixture.tick(2 * SECOND);
    assert!(!fixture.held.is_empty());
    fixture.target().suspend().unwrap();
    assert!(!fixture.target().is_idle(), "an I/O is in flight");
    fixture.release();
    assert!(fixture.target().is_idle());
}

#[test]
fn d16_block_size_is_the_backing_devices() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.disk = Arc::new(RamDisk::new(fixture.setup.backing_bytes, 4096));
    assert_eq!(fixture.open().limits().block_bytes, 4096);
}

#[test]
fn d17_a_suspended_cache_is_at_rest_and_its_media_hold_everything() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    for block in 0..50_u64 {
        fixture.write(block * 8192, &[block as u8; 512], false);
    }
    fixture.target().suspend().unwrap();
    fixture.settle();
    fixture.history.clear();
    let (image, durable) = (fixture.pmem.image(), fixture.pmem.snapshot_durable().image());
    assert!(image == durable);
    for _ in 0..10 {
        fixture.tick(SECOND);
    }
    assert!(fixture.pmem.image() == image && fixture.history.is_empty(), "an idle tick writes");
    let mut copy = Fixture::over(fixture.setup.clone(), fixture.pmem.clone(), fixture.disk.clone());
    copy.open();
    for block in 0..50_u64 {
        assert_eq!(copy.read(block * 8192, 512), [block as u8; 512]);
    }
}

#[test]
fn d19_one_unreadable_copy_is_what_the_other_is_for() {
    let mut built = Builder::new(24);
    let key = built.key(0, 5, 0, &[1; 512], 0);
    built.append(&[key], 1);
    let image = built.finish();
    let segment = built.segment_at(5) as u64;
    for bad in [8192, 16400, 16416, segment + 4096, segment + 8192] {
        let mut fixture = Fixture::of_image(&image, "C B 0");
        fixture.pmem.poison(bad, 16);
        fixture.open();
        assert_eq!(fixture.read(0, 512), [1; 512], "{bad}");
    }
    // An unreadable log is damage, not its end.
    let mut fixture = Fixture::of_image(&image, "C B 0");
    fixture.pmem.poison(built.place(0, 0) as u64, 64);
    assert!(fixture.try_open(false).unwrap_err().to_string().contains("0:0"));
}

#[test]
fn a01_idle_writers_pin_few_segments() {
    let mut fixture = Fixture::new(Setup { cache_bytes: 20480 + 31 * 65536, ..Setup::small() });
    fixture.open();
    for writer in 0..64_u64 {
        fixture.port.id = writer as usize;
        fixture.write(writer * 4096, &[1; 512], false);
    }
    assert!(fixture.fact("free_segments") >= 20, "{}", fixture.target().status());
}

#[test]
fn a02_the_log_has_segments_that_data_never_takes() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fill_until_parked(&mut fixture, 0);
    fixture.submit(Bio::flush(0));
    assert!(fixture.port.done.pop_front().is_some_and(|bio| bio.status.is_ok()), "keys find room");
}

#[test]
fn a03_a04_a_full_cache_makes_room_at_once_not_at_the_next_poll() {
    // Large writes fill data segments; small FUA writes fill log segments.
    for (len, fua) in [(32768, false), (512, true)] {
        let mut fixture = Fixture::new(Setup::small());
        fixture.open();
        for nth in 0..4000_u64 {
            let data = Buffer::from_bytes(&vec![nth as u8; len]);
            fixture.submit(Bio::write(nth * 7 % 300 * 32768, data, fua, 0));
            if let Some(parked) = fixture.port.parked.pop_front() {
                let epoch = fixture.target().events().unwrap().room_epoch();
                fixture.tick(0);
                assert_ne!(fixture.target().events().unwrap().room_epoch(), epoch, "not told");
                fixture.submit(parked);
            }
            let done = fixture.port.done.pop_front();
            assert!(done.is_some_and(|bio| bio.status.is_ok()), "waits: {nth}");
        }
        assert_eq!(fixture.now, 0, "no time has passed");
    }
}

#[test]
fn a06_a_write_that_waited_goes_on_where_it_was() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    let len = 3 << 20;
    let data = Buffer::from_bytes(&vec![7; len]);
    fixture.submit(Bio::write(0, data, false, 0));
    let parked = fixture.port.parked.pop_front().expect("it is larger than the cache");
    assert!(parked.progress > 0);
    let before = parked.progress;
    fixture.tick(SECOND);
    fixture.submit(parked);
    if let Some(parked) = fixture.port.parked.pop_front() {
        assert!(parked.progress >= before);
        assert!(fixture.run(parked).status.is_ok());
    }
    assert_eq!(fixture.read(0, len), vec![7; len]);
}

#[test]
fn a07_thresholds_count_the_chain_not_the_superblock() {
    let mut image = Builder::new(24).finish();
    image[12288..12312].copy_from_slice(&crate::builder::cache_info(1, 0, 8, 0x1182));
    image[16416..16432].copy_from_slice(&crate::builder::tail(2, (0, 0)));
    let mut fixture = Fixture::of_image(&image, "C B 0");
    fixture.open();
    for nth in 0..600_u64 {
        fixture.write(nth * 4096 % (4 << 20), &[nth as u8; 4096], false);
    }
    fixture.zero(Op::Discard, 0, 4096, false);
    assert_eq!(fixture.read(0, 4096), [0; 4096]);
}
