//! The backing device: its failures, its state without the cache, and changes by others.

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::error::Status;
use udm::prng::Prng;
use udm::target::{Port, Target};
use udm::units::SECOND;

use crate::builder::{Builder, Key, cache_info, kset};
use crate::fixture::{Fixture, Setup};

#[test]
fn a_failing_origin_loses_nothing_and_is_asked_once_a_second_in_the_end() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    let log = Arc::new(std::sync::Mutex::new(0));
    let tries = log.clone();
    fixture.refuses = Box::new(move |io| {
        *tries.lock().unwrap() += u32::from(io.op == Op::Write);
        io.op == Op::Write
    });
    let mut times = Vec::new();
    let mut port = Port::new(9);
    while fixture.now < 120 * SECOND {
        fixture.tick(SECOND / 20);
        if std::mem::take(&mut *log.lock().unwrap()) > 0 {
            times.push(fixture.now);
        }
        assert!(
            fixture.target().tick(fixture.now, &mut port).is_some_and(|next| next > fixture.now)
        );
    }
    let pauses: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.windows(2).all(|pair| pair[1] + SECOND / 10 >= pair[0]), "{pauses:?}");
    assert!(*pauses.last().unwrap() >= SECOND * 9 / 10 && times.len() < 130, "{pauses:?}");
    assert_eq!(fixture.fact("writeback_is_failing"), 1);
    assert!(fixture.target().dirty().is_failing);
    assert_eq!(fixture.fact("dirty_bytes"), 4096);
    assert_eq!(fixture.read(0, 4096), [1; 4096], "reads of cached data go on");
    fixture.write(8192, &[2; 512], true);
    fixture.refuses = Box::new(|_| false);
    fixture.drain();
    assert_eq!(fixture.fact("writeback_is_failing"), 0);
    let image = fixture.disk.image();
    assert_eq!((image[0], image[8192]), (1, 2));
}

/// Fails write-back until the pauses have their full length, and returns just after a failure.
fn paused() -> Fixture {
    let mut fixture = Fixture::new(Setup::small().table("C B 0 max_age 1 read_fill never"));
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.refuses = Box::new(|io| io.op != Op::Read);
    while fixture.fact("writeback_pause_ms") < 1000 {
        fixture.tick(SECOND / 20);
    }
    fixture
}

#[test]
fn a_read_that_the_origin_serves_ends_a_pause() {
    let mut fixture = paused();
    fixture.refuses = Box::new(|_| false);
    fixture.tick(SECOND / 1000);
    assert_eq!(fixture.fact("dirty_bytes"), 4096, "the pause is not over");
    // A read of a cached block does not use the origin.
    fixture.read(0, 4096);
    fixture.tick(SECOND / 1000);
    assert_eq!(fixture.fact("dirty_bytes"), 4096);
    fixture.read(65536, 4096);
    fixture.tick(SECOND / 1000);
    assert_eq!((fixture.fact("dirty_bytes"), fixture.fact("writeback_is_failing")), (0, 0));
}

#[test]
fn a_drain_ends_a_pause() {
    let mut fixture = paused();
    fixture.refuses = Box::new(|_| false);
    fixture.target().set_draining(true);
    fixture.tick(SECOND / 1000);
    assert_eq!(fixture.fact("dirty_bytes"), 0);
}

#[test]
fn reads_do_not_make_attempts_frequent_while_writes_fail() {
    let mut fixture = paused();
    let log = Arc::new(std::sync::Mutex::new(0));
    let tries = log.clone();
    fixture.refuses = Box::new(move |io| {
        *tries.lock().unwrap() += u32::from(io.op == Op::Write);
        io.op != Op::Read
    });
    for nth in 0..1000 {
        fixture.read(65536 + nth % 8 * 4096, 4096);
        fixture.tick(SECOND / 100);
    }
    let tries = *log.lock().unwrap();
    assert!((10..=22).contains(&tries), "{tries} in 10 seconds");
}

/// After the last batch stood only a CLEAN key and a mark. Write-back passed them without a flush,
/// and then did not check for free space until the next tick, while writes waited for it.
#[test]
fn what_write_back_passes_last_is_collected_at_once() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.target().message(&["gc_percent".to_string(), "0".to_string()]).unwrap();
    fixture.write(0, &[1; 4096], true);
    fixture.is_held = true;
    fixture.tick(SECOND);
    fixture.tick(2 * SECOND);
    assert!(!fixture.held.is_empty(), "the batch is on its way");
    fixture.is_held = false;
    fixture.submit(Bio::read(1 << 20, Buffer::zeroed(4096), 0));
    fixture.submit(Bio::flush(0));
    fixture.settle();
    fixture.submit(Bio::flush(0));
    fixture.release();
    let status = fixture.target().status();
    let [.., head, _, key_tail] = status.split(' ').collect::<Vec<_>>()[..] else { panic!() };
    assert_eq!(key_tail, head, "{status}");
}

#[test]
fn d05_a_failed_flush_writes_the_batch_again() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    let mut failures = 2;
    fixture.refuses = Box::new(move |io| {
        let fails = io.op == Op::Flush && failures > 0;
        failures -= i32::from(fails);
        fails
    });
    fixture.drain();
    let ops: Vec<Op> = fixture.history.iter().map(|(op, ..)| *op).collect();
    assert_eq!(ops, [Op::Write, Op::Write, Op::Write, Op::Flush]);
}

#[test]
fn a_read_error_of_the_origin_is_the_readers_alone() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.refuses = Box::new(|io| io.op == Op::Read && io.offset >= 1 << 20);
    assert_eq!(fixture.try_read(1 << 20, 4096), Err(Status::Io));
    assert_eq!(fixture.read(0, 8192), [[1; 4096], [0; 4096]].concat());
    fixture.refuses = Box::new(|_| false);
    assert_eq!(fixture.read(1 << 20, 4096), [0; 4096], "and was not cached");
}

#[test]
fn a_full_cache_before_a_dead_origin_fails_writes_in_the_end() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.refuses = Box::new(|io| io.op != Op::Read);
    let mut acked = Vec::new();
    let failed = 'full: loop {
        for block in 0..2000_u64 {
            let data = Buffer::from_bytes(&[block as u8; 4096]);
            fixture.submit(Bio::write(block * 4096, data, false, 0));
            while fixture.port.done.is_empty() {
                let parked = fixture.port.parked.pop_front().unwrap();
                fixture.tick(SECOND);
                fixture.submit(parked);
                assert!(fixture.now < 600 * SECOND, "waits indefinitely");
            }
            match fixture.port.done.pop_front().unwrap().status {
                Ok(()) => acked.push(block),
                Err(status) => break 'full status,
            }
        }
    };
    assert_eq!(failed, Status::NoSpace);
    for block in acked.iter().step_by(17) {
        assert_eq!(fixture.read(block * 4096, 4096), [*block as u8; 4096]);
    }
    fixture.refuses = Box::new(|_| false);
    fixture.drain();
    fixture.write(0, &[9; 4096], true);
    for block in &acked[1..] {
        assert_eq!(fixture.read(block * 4096, 512), [*block as u8; 512]);
    }
}

#[test]
fn a_chain_too_short_for_data_is_refused_and_the_shortest_other_works() {
    for n_segs in 1..6 {
        let mut image = Builder::new(24).finish();
        image[12288..12312].copy_from_slice(&cache_info(1, 0, n_segs, 0x1182));
        image[16416..16432].copy_from_slice(&crate::builder::tail(2, (0, 0)));
        let mut fixture = Fixture::of_image(&image, "C B 0");
        if let Err(error) = fixture.try_open(false) {
            assert!(n_segs < 4 && error.to_string().contains("cache_info"), "{error}");
            continue;
        }
        for block in 0..60_u64 {
            fixture.write(block * 4096, &[1; 4096], false);
        }
    }
}

/// Per sector, the versions written to it, each with the number of flushes before it.
type Written = Vec<Vec<(u64, usize)>>;

/// Whether the origin may show `version` of a sector, if `flushes` flushes are the last that it
/// surely holds: the flushed version, or any of the interval that follows.
fn is_allowed(versions: &[(u64, usize)], version: u64, flushes: usize) -> bool {
    let flushed = versions.iter().rev().find(|(_, before)| *before < flushes);
    let flushed = flushed.map_or(0, |(version, _)| *version);
    version == flushed || versions.contains(&(version, flushes))
}

fn ordered_history(seed: u64) {
    const SECTORS: u64 = 96;
    let mut prng = Prng::new(seed);
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    let mut written: Written = vec![Vec::new(); SECTORS as usize];
    let mut flushes = 0;
    for version in 1..500_u64 {
        let group = prng.below(3);
        let first = prng.below(SECTORS / 3 - 8);
        let count = 1 + prng.below(8);
        let data: Vec<u8> = (0..count * 64).flat_map(|_| version.to_le_bytes()).collect();
        fixture.write((group * 8192 + first) * 512, &data, false);
        for sector in first..first + count {
            written[(group * SECTORS / 3 + sector) as usize].push((version, flushes));
        }
        if prng.one_in(7) {
            fixture.flush();
            flushes += 1;
        }
        if prng.one_in(9) {
            fixture.tick(prng.below(2 * SECOND));
        }
        if prng.one_in(60) {
            fixture.kill();
            fixture.open();
        }
    }
    fixture.drain();
    // Every state that the origin went through, write by write.
    let mut origin = vec![0_u64; SECTORS as usize];
    let mut at = 0;
    for (nth, (op, offset, data)) in fixture.history.iter().enumerate() {
        assert!(matches!(op, Op::Write | Op::Flush));
        for (sector, bytes) in data.chunks(512).enumerate() {
            let sector = offset / 512 + sector as u64;
            let sector = sector / 8192 * SECTORS / 3 + sector % 8192;
            origin[sector as usize] = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        }
        let fits = |flushes: usize| {
            written.iter().zip(&origin).all(|(versions, now)| is_allowed(versions, *now, flushes))
        };
        at = (at..=flushes).find(|flushes| fits(*flushes)).unwrap_or_else(|| {
            panic!("seed {seed}: after I/O {nth} the origin does not match a power cut")
        });
    }
    assert!(fixture.history.len() > 100);
}

#[test]
fn ordered_write_back_leaves_the_origin_as_a_power_cut_could_have() {
    for seed in 0..20 {
        ordered_history(seed);
    }
}

/// A flush that fails leaves a batch half done for as long as the test wants.
fn hold_batches(fixture: &mut Fixture) {
    fixture.refuses = Box::new(|io| io.op == Op::Flush);
}

#[test]
fn a_batch_across_flushes_makes_the_origin_alone_inconsistent_until_it_is_done() {
    for (order, is_torn) in [
        ("C B 0 writeback_order ordered", false),
        ("C B 0 writeback_order fast", true),
        ("C B 0 writeback_order adaptive", false),
    ] {
        let mut fixture = Fixture::new(Setup::small().table(order));
        fixture.open();
        hold_batches(&mut fixture);
        // Two writes, each flushed: half of a batch of both does not match any flush.
        fixture.write(0, &[1; 4096], true);
        fixture.write(8192, &[2; 4096], true);
        assert_eq!(fixture.fact("origin_is_consistent"), 1, "{order}: write-back has not begun");
        fixture.tick(SECOND);
        fixture.tick(2 * SECOND);
        assert!(fixture.fact("writeback_failures_total") > 0, "{order}: it has begun");
        assert_eq!(fixture.fact("origin_is_consistent"), u64::from(!is_torn), "{order}");
        // A new server reads it from the label, and reports it until the state is consistent again.
        fixture.kill();
        fixture.open();
        assert_eq!(
            fixture.fact("origin_is_consistent"),
            u64::from(!is_torn),
            "{order}, a new server"
        );
        fixture.refuses = Box::new(|_| false);
        fixture.drain();
        assert_eq!(fixture.fact("origin_is_consistent"), 1, "{order}, drained");
        fixture.kill();
        fixture.open();
        assert_eq!(fixture.fact("origin_is_consistent"), 1, "{order}, drained, a new server");
    }
}

#[test]
fn adaptive_write_back_merges_while_much_is_dirty_and_no_longer() {
    let mut fixture = Fixture::new(Setup::small().table("C B 0 writeback_order adaptive"));
    fixture.open();
    hold_batches(&mut fixture);
    // More than half of the cache's room, each write flushed.
    let much = 24 * (52 << 10) * 55 / 100;
    for nth in 0..much / 4096 + 4 {
        fixture.write(nth * 4096, &[nth as u8; 4096], true);
    }
    fixture.tick(SECOND);
    fixture.tick(30 * SECOND);
    assert_eq!(fixture.fact("origin_is_consistent"), 0);
    fixture.tick(30 * SECOND);
    assert!(fixture.fact("origin_inconsistent_s") >= 30, "the duration is reported");
    fixture.refuses = Box::new(|_| false);
    fixture.history.clear();
    fixture.drain();
    let flushes = fixture.history.iter().filter(|(op, ..)| *op == Op::Flush).count();
    assert!(flushes < 10, "{flushes} flushes: they were not merged");
    assert_eq!(fixture.fact("origin_is_consistent"), 1);
    assert_eq!(fixture.fact("origin_inconsistent_s"), 0);
    // With little dirty it is ordered again.
    hold_batches(&mut fixture);
    fixture.write(0, &[1; 4096], true);
    fixture.write(8192, &[2; 4096], true);
    fixture.tick(30 * SECOND);
    assert_eq!(fixture.fact("origin_is_consistent"), 1);
}

#[test]
fn after_a_kernel_was_here_shared_memory_is_stale_and_every_key_set_may_end_at_a_flush() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.disk.load_image(&vec![0xEE; 12 << 20]);
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.write(8192, &[2; 4096], false);
    fixture.kill();
    // The kernel attaches (cache_info), never sees the open keys, and logs three sets.
    let head = fixture.target_head();
    fixture.pmem.poke(8192, &cache_info(2, 0, 24, 0x1182));
    let mut at = 20480 + 12288 + head;
    for nth in 0..3_u32 {
        let off = 65536 + u64::from(nth) * 4096;
        let key = Key { off, len: 4096, segment: 20, at: nth * 4096, ..Key::default() };
        fixture.pmem.poke(20480 + 20 * 65536 + 12288 + u64::from(key.at), &[7 + nth as u8; 4096]);
        fixture.pmem.poke(at, &[kset(&[key]), vec![0; 24]].concat());
        at += 64;
    }
    fixture.open();
    assert_eq!(fixture.read(8192, 4096), [0xEE; 4096], "an unflushed write that the kernel missed");
    assert_eq!(fixture.read(0, 4096), [1; 4096]);
    for nth in 0..3_u8 {
        assert_eq!(fixture.read(65536 + u64::from(nth) * 4096, 4096), [7 + nth; 4096]);
    }
    fixture.history.clear();
    fixture.drain();
    let flushes = fixture.history.iter().filter(|(op, ..)| *op == Op::Flush).count();
    assert_eq!(flushes, 4, "one batch for each key set");
}
