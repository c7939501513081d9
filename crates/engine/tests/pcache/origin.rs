//! The backing device: when it fails, when it alone is left, and when somebody else was here.

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::error::Status;
use udm::prng::Prng;
use udm::target::{Port, Target};
use udm::units::SECOND;

use crate::builder::{Builder, Key, cache_info, kset};
use crate::world::{Setup, World};

#[test]
fn a_failing_origin_loses_nothing_and_is_asked_ever_more_seldom() {
    let mut world = World::new(Setup::small());
    world.open();
    world.write(0, &[1; 4096], true);
    let log = Arc::new(std::sync::Mutex::new(0));
    let tries = log.clone();
    world.refuses = Box::new(move |io| {
        *tries.lock().unwrap() += u32::from(io.op == Op::Write);
        io.op == Op::Write
    });
    let mut times = Vec::new();
    let mut port = Port::new(9);
    while world.now < 120 * SECOND {
        world.tick(SECOND / 20);
        if std::mem::take(&mut *log.lock().unwrap()) > 0 {
            times.push(world.now);
        }
        assert!(world.target().tick(world.now, &mut port).is_some_and(|next| next > world.now));
    }
    let pauses: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.windows(2).all(|pair| pair[1] + SECOND / 10 >= pair[0]), "{pauses:?}");
    assert!(*pauses.last().unwrap() >= 9 * SECOND && times.len() < 25, "{pauses:?}");
    assert_eq!(world.fact("writeback_is_failing"), 1);
    assert!(world.target().dirty().is_failing);
    assert_eq!(world.fact("dirty_bytes"), 4096);
    assert_eq!(world.read(0, 4096), [1; 4096], "reads of cached data go on");
    world.write(8192, &[2; 512], true);
    world.refuses = Box::new(|_| false);
    world.drain();
    assert_eq!(world.fact("writeback_is_failing"), 0);
    let image = world.disk.image();
    assert_eq!((image[0], image[8192]), (1, 2));
}

/// After the last batch stood only a CLEAN key and a mark. Write-back passed them without a flush,
/// after which nobody looked for room until the clock said so, while writes waited for it.
#[test]
fn what_write_back_passes_last_is_collected_at_once() {
    let mut world = World::new(Setup::small());
    world.open();
    world.target().message(&["gc_percent".to_string(), "0".to_string()]).unwrap();
    world.write(0, &[1; 4096], true);
    world.is_held = true;
    world.tick(SECOND);
    world.tick(2 * SECOND);
    assert!(!world.held.is_empty(), "the batch is on its way");
    world.is_held = false;
    world.submit(Bio::read(1 << 20, Buffer::zeroed(4096), 0));
    world.submit(Bio::flush(0));
    world.settle();
    world.submit(Bio::flush(0));
    world.release();
    let status = world.target().status();
    let [.., head, _, key_tail] = status.split(' ').collect::<Vec<_>>()[..] else { panic!() };
    assert_eq!(key_tail, head, "{status}");
}

#[test]
fn d05_a_failed_flush_writes_the_batch_again() {
    let mut world = World::new(Setup::small());
    world.open();
    world.write(0, &[1; 4096], true);
    let mut failures = 2;
    world.refuses = Box::new(move |io| {
        let fails = io.op == Op::Flush && failures > 0;
        failures -= i32::from(fails);
        fails
    });
    world.drain();
    let ops: Vec<Op> = world.history.iter().map(|(op, ..)| *op).collect();
    assert_eq!(ops, [Op::Write, Op::Write, Op::Write, Op::Flush]);
}

#[test]
fn a_read_error_of_the_origin_is_the_readers_alone() {
    let mut world = World::new(Setup::small());
    world.open();
    world.write(0, &[1; 4096], true);
    world.refuses = Box::new(|io| io.op == Op::Read && io.offset >= 1 << 20);
    assert_eq!(world.try_read(1 << 20, 4096), Err(Status::Io));
    assert_eq!(world.read(0, 8192), [[1; 4096], [0; 4096]].concat());
    world.refuses = Box::new(|_| false);
    assert_eq!(world.read(1 << 20, 4096), [0; 4096], "and was not cached");
}

#[test]
fn a_full_cache_before_a_dead_origin_fails_writes_in_the_end() {
    let mut world = World::new(Setup::small());
    world.open();
    world.refuses = Box::new(|io| io.op != Op::Read);
    let mut acked = Vec::new();
    let failed = 'full: loop {
        for block in 0..2000_u64 {
            let data = Buffer::from_bytes(&[block as u8; 4096]);
            world.submit(Bio::write(block * 4096, data, false, 0));
            while world.port.done.is_empty() {
                let parked = world.port.parked.pop_front().unwrap();
                world.tick(SECOND);
                world.submit(parked);
                assert!(world.now < 600 * SECOND, "waits for ever");
            }
            match world.port.done.pop_front().unwrap().status {
                Ok(()) => acked.push(block),
                Err(status) => break 'full status,
            }
        }
    };
    assert_eq!(failed, Status::NoSpace);
    for block in acked.iter().step_by(17) {
        assert_eq!(world.read(block * 4096, 4096), [*block as u8; 4096]);
    }
    world.refuses = Box::new(|_| false);
    world.drain();
    world.write(0, &[9; 4096], true);
    for block in &acked[1..] {
        assert_eq!(world.read(block * 4096, 512), [*block as u8; 512]);
    }
}

#[test]
fn a_chain_too_short_for_data_is_refused_and_the_shortest_other_works() {
    for n_segs in 1..6 {
        let mut image = Builder::new(24).finish();
        image[12288..12312].copy_from_slice(&cache_info(1, 0, n_segs, 0x1182));
        image[16416..16432].copy_from_slice(&crate::builder::tail(2, (0, 0)));
        let mut world = World::of_image(&image, "C B 0");
        if let Err(error) = world.try_open(false) {
            assert!(n_segs < 4 && error.to_string().contains("cache_info"), "{error}");
            continue;
        }
        for block in 0..60_u64 {
            world.write(block * 4096, &[1; 4096], false);
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
    let mut world = World::new(Setup::small());
    world.open();
    let mut written: Written = vec![Vec::new(); SECTORS as usize];
    let mut flushes = 0;
    for version in 1..500_u64 {
        let group = prng.below(3);
        let first = prng.below(SECTORS / 3 - 8);
        let count = 1 + prng.below(8);
        let data: Vec<u8> = (0..count * 64).flat_map(|_| version.to_le_bytes()).collect();
        world.write((group * 8192 + first) * 512, &data, false);
        for sector in first..first + count {
            written[(group * SECTORS / 3 + sector) as usize].push((version, flushes));
        }
        if prng.one_in(7) {
            world.flush();
            flushes += 1;
        }
        if prng.one_in(9) {
            world.tick(prng.below(2 * SECOND));
        }
        if prng.one_in(60) {
            world.kill();
            world.open();
        }
    }
    world.drain();
    // Every state that the origin went through, write by write.
    let mut origin = vec![0_u64; SECTORS as usize];
    let mut at = 0;
    for (nth, (op, offset, data)) in world.history.iter().enumerate() {
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
            panic!("seed {seed}: after I/O {nth} the origin is no state of a power cut")
        });
    }
    assert!(world.history.len() > 100);
}

#[test]
fn ordered_write_back_leaves_the_origin_as_a_power_cut_could_have() {
    for seed in 0..20 {
        ordered_history(seed);
    }
}

/// A flush that fails leaves a batch half done for as long as the test wants.
fn hold_batches(world: &mut World) {
    world.refuses = Box::new(|io| io.op == Op::Flush);
}

#[test]
fn a_batch_across_flushes_makes_the_origin_alone_inconsistent_until_it_is_done() {
    for (order, is_torn) in [
        ("C B 0 writeback_order ordered", false),
        ("C B 0 writeback_order fast", true),
        ("C B 0 writeback_order adaptive", false),
    ] {
        let mut world = World::new(Setup::small().table(order));
        world.open();
        hold_batches(&mut world);
        // Two writes, each flushed: a batch of both is no state of any flush halfway.
        world.write(0, &[1; 4096], true);
        world.write(8192, &[2; 4096], true);
        assert_eq!(world.fact("origin_is_consistent"), 1, "{order}: nothing has begun");
        world.tick(SECOND);
        world.tick(2 * SECOND);
        assert!(world.fact("writeback_failures_total") > 0, "{order}: it has begun");
        assert_eq!(world.fact("origin_is_consistent"), u64::from(!is_torn), "{order}");
        // A new server knows it from the label, and says so until it is mended.
        world.kill();
        world.open();
        assert_eq!(
            world.fact("origin_is_consistent"),
            u64::from(!is_torn),
            "{order}, a new server"
        );
        world.refuses = Box::new(|_| false);
        world.drain();
        assert_eq!(world.fact("origin_is_consistent"), 1, "{order}, drained");
        world.kill();
        world.open();
        assert_eq!(world.fact("origin_is_consistent"), 1, "{order}, drained, a new server");
    }
}

#[test]
fn adaptive_write_back_merges_while_much_is_dirty_and_no_longer() {
    let mut world = World::new(Setup::small().table("C B 0 writeback_order adaptive"));
    world.open();
    hold_batches(&mut world);
    // More than half of the cache's room, each write flushed.
    let much = 24 * (52 << 10) * 55 / 100;
    for nth in 0..much / 4096 + 4 {
        world.write(nth * 4096, &[nth as u8; 4096], true);
    }
    world.tick(SECOND);
    world.tick(30 * SECOND);
    assert_eq!(world.fact("origin_is_consistent"), 0);
    world.tick(30 * SECOND);
    assert!(world.fact("origin_inconsistent_s") >= 30, "since when is told");
    world.refuses = Box::new(|_| false);
    world.history.clear();
    world.drain();
    let flushes = world.history.iter().filter(|(op, ..)| *op == Op::Flush).count();
    assert!(flushes < 10, "{flushes} flushes: nothing was merged");
    assert_eq!(world.fact("origin_is_consistent"), 1);
    assert_eq!(world.fact("origin_inconsistent_s"), 0);
    // With little dirty it is ordered again.
    hold_batches(&mut world);
    world.write(0, &[1; 4096], true);
    world.write(8192, &[2; 4096], true);
    world.tick(30 * SECOND);
    assert_eq!(world.fact("origin_is_consistent"), 1);
}

#[test]
fn after_a_kernel_was_here_shared_memory_is_stale_and_every_key_set_may_end_at_a_flush() {
    let mut world = World::new(Setup::small());
    world.disk.load_image(&vec![0xEE; 12 << 20]);
    world.open();
    world.write(0, &[1; 4096], true);
    world.write(8192, &[2; 4096], false);
    world.kill();
    // The kernel attaches (cache_info), never sees the open keys, and logs three sets.
    let head = world.target_head();
    world.pmem.poke(8192, &cache_info(2, 0, 24, 0x1182));
    let mut at = 20480 + 12288 + head;
    for nth in 0..3_u32 {
        let off = 65536 + u64::from(nth) * 4096;
        let key = Key { off, len: 4096, segment: 20, at: nth * 4096, ..Key::default() };
        world.pmem.poke(20480 + 20 * 65536 + 12288 + u64::from(key.at), &[7 + nth as u8; 4096]);
        world.pmem.poke(at, &[kset(&[key]), vec![0; 24]].concat());
        at += 64;
    }
    world.open();
    assert_eq!(world.read(8192, 4096), [0xEE; 4096], "an unflushed write that the kernel missed");
    assert_eq!(world.read(0, 4096), [1; 4096]);
    for nth in 0..3_u8 {
        assert_eq!(world.read(65536 + u64::from(nth) * 4096, 4096), [7 + nth; 4096]);
    }
    world.history.clear();
    world.drain();
    let flushes = world.history.iter().filter(|(op, ..)| *op == Op::Flush).count();
    assert_eq!(flushes, 4, "one batch for each key set");
}
