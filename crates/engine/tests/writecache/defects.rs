//! The kernel's own defects, as the specification lists them in section 17: none is here.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::DiskIo;
use udm::pmem::Persistence;
use udm::pmem::dax::{DaxOptions, DaxPmem};
use udm::prng::Prng;
use udm::shm::SharedWords;
use udm::target::Target;
use udm::units::SECOND;
use udm::writecache::{OpenOptions, STRIPES, Writecache, shared_words};

use crate::basics::in_both_modes;
use crate::world::World;

const MIB: u64 = 1 << 20;

fn is_of(name: &'static str, op: Op) -> impl Fn(&DiskIo) -> bool {
    move |io| io.disk.limits().name == name && io.op == op
}

fn ssd(options: &str) -> World {
    World::new(&format!("s O C 4096 {options}"), MIB, 4 * MIB)
}

/// Live entries: how often each (sector, number), and each sector, is there.
fn live_entries(world: &World) -> (HashMap<(u64, u64), u32>, HashMap<u64, u32>) {
    let (mut pairs, mut sectors) = (HashMap::new(), HashMap::new());
    for index in 0..world.status(2) {
        let (sector, seq) = world.entry(index);
        if seq < world.seq_count() {
            *pairs.entry((sector, seq)).or_default() += 1;
            *sectors.entry(sector).or_default() += 1;
        }
    }
    (pairs, sectors)
}

#[test]
fn a_fua_writes_are_durable() {
    in_both_modes("4096 4 autocommit_time 3600000 autocommit_blocks 1000000", |mut world| {
        for seed in 0..20 {
            world.open();
            world.write(8192, &[seed as u8 + 1; 8192], true);
            world.power_cut(&mut Prng::new(seed));
            world.open();
            assert_eq!(world.read(8192, 8192), [seed as u8 + 1; 8192]);
        }
    });
}

#[test]
fn b_a_flush_is_not_skipped_while_all_is_under_write_back() {
    let mut world = ssd("4 autocommit_time 3600000 pause_writeback 0");
    world.open();
    world.write(0, &[1; 4096], false);
    world.flush();
    world.holds = Box::new(is_of("origin", Op::Write));
    world.message("flush").unwrap();
    world.tick(SECOND);
    assert_eq!(world.held.len(), 1, "the only block is on its way to the origin");
    world.write(0, &[2; 4096], false);
    world.history.clear();
    world.flush();
    assert!(world.history.iter().any(|(name, op, ..)| name == "cache" && *op == Op::Flush));
    for seed in 0..10 {
        world.power_cut(&mut Prng::new(seed));
        world.open();
        assert_eq!(world.read(0, 4096), [2; 4096]);
    }
}

#[test]
fn c_no_two_entries_of_a_sector_have_one_number() {
    in_both_modes("4096 2 autocommit_time 3600000", |mut world| {
        world.open();
        world.write(4096, &[1; 4096], false);
        world.write(0, &[2; 16384], false);
        world.write(8192, &[3; 4096], false);
        world.flush();
        let (pairs, sectors) = live_entries(&world);
        assert_eq!((pairs.len(), sectors.len()), (4, 4));
        assert!(pairs.values().all(|&count| count == 1));
        world.write(0, &[4; 16384], false);
        world.flush();
        let (pairs, _) = live_entries(&world);
        assert!(pairs.values().all(|&count| count == 1));
        world.power_cut(&mut Prng::new(1));
        world.open();
        assert_eq!(world.read(0, 16384), [4; 16384]);
    });
}

#[test]
fn c2_write_back_of_an_uncommitted_block_commits_it_first() {
    in_both_modes("4096 4 autocommit_time 3600000 max_age 1", |mut world| {
        world.open();
        for block in 0..100 {
            world.write(block * 4096, &[block as u8; 4096], false);
            world.write(block / 2 * 4096, &[block as u8; 4096], false);
            world.tick(SECOND / 100);
        }
        world.drain();
        assert_eq!(world.status(1), 0);
        let content = world.content();
        assert!(world.origin.image()[..content.len()] == content[..]);
    });
}

#[test]
fn d_a_failed_cache_write_leaves_the_older_version() {
    let mut world = ssd("0");
    world.origin.poke(0, &[9; 8192]);
    world.open();
    world.write(0, &[1; 4096], false);
    let data_at = 4096 + 64;
    world.refuses = Box::new(move |io| is_of("cache", Op::Write)(io) && io.offset > data_at);
    assert!(world.try_write(0, &[2; 4096], false).is_err());
    assert!(world.try_write(4096, &[3; 4096], false).is_err());
    world.refuses = Box::new(|_| false);
    assert_eq!(world.read(0, 8192), [[1; 4096], [9; 4096]].concat());
    world.flush();
    world.kill();
    world.open();
    assert_eq!(world.read(0, 8192), [[1; 4096], [9; 4096]].concat());
    world.drain();
    assert_eq!(world.origin.image()[..8192], [[1; 4096], [9; 4096]].concat());
    // The slots that failed are free again.
    assert_eq!(world.status(3), world.status(2));
}

#[test]
fn e_nothing_hangs_after_a_write_back_error() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 65536], false);
        world.refuses = Box::new(is_of("origin", Op::Write));
        world.message("flush").unwrap();
        world.tick(SECOND);
        world.tick(SECOND);
        assert_eq!(world.status(1), 1, "the error is shown");
        assert_eq!(world.status(3), world.status(2) - 16, "nothing is lost");
        world.suspend();
        world.target().resume().unwrap();
        world.refuses = Box::new(|_| false);
        world.drain();
        world.tick(SECOND);
        assert_eq!((world.status(1), world.status(3)), (0, world.status(2)));
        assert_eq!(world.origin.image()[..65536], [1; 65536]);
    });
}

#[test]
fn f_suspend_and_resume_with_an_error_show_no_stale_data() {
    in_both_modes("4096 0", |mut world| {
        world.origin.poke(0, &[9; 4096]);
        world.open();
        world.write(0, &[1; 4096], true);
        world.refuses = Box::new(is_of("origin", Op::Write));
        world.message("flush").unwrap();
        world.tick(SECOND);
        assert_eq!(world.status(1), 1);
        world.suspend();
        world.target().resume().unwrap();
        assert_eq!(world.read(0, 4096), [1; 4096]);
        assert_eq!(world.status(3), world.status(2) - 1);
    });
}

#[test]
fn g_mode_p_needs_no_dax() {
    // A file of any file system: what is stored there goes through the page cache.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    let mut world = World::new("p O C 4096 0", MIB, 4 * MIB);
    let options = DaxOptions { persistence: Some(Persistence::Msync), ..DaxOptions::default() };
    let shared = SharedWords::private(shared_words(STRIPES));
    for version in 1..3 {
        let pmem = Arc::new(DaxPmem::open(&path, options).unwrap());
        let shared = shared.clone();
        let (args, origin) = (world.args(), world.origin.clone());
        let how = OpenOptions::new(version);
        let opened = Writecache::open_pmem(args, 4 * MIB, origin, pmem, shared, &how);
        world.target = Some(opened.unwrap());
        if version > 1 {
            assert_eq!(world.read(4096, 8192), [version as u8 - 1; 8192]);
        }
        world.write(4096, &[version as u8; 8192], false);
        world.flush();
        world.target = None;
    }
    // What cannot be mapped at all is refused.
    assert!(DaxPmem::open(folder.path(), options).is_err());
}

#[test]
fn h_a_write_that_is_half_cached_is_committed_whole() {
    in_both_modes("4096 2 autocommit_time 1000", |mut world| {
        world.open();
        world.write(0, &[1; 4096], true);
        world.message("cleaner").unwrap();
        world.holds = Box::new(is_of("origin", Op::Flush));
        // Block 0 is cached, block 1 is not and passes by.
        world.submit(Bio::write(0, Buffer::from_bytes(&[2; 8192]), true, 0));
        assert!(world.done().is_none(), "the part that passed by is not durable");
        world.release();
        assert!(world.done().expect("durable now").status.is_ok());
        assert_eq!(world.status(10), 1);
        world.write(0, &[3; 8192], false);
        world.tick(SECOND * 2);
        world.tick(SECOND * 2);
        assert!(world.seq_count() >= 2, "the timer runs for the cached part");
        world.power_cut(&mut Prng::new(4));
        world.open();
        let found = world.read(0, 8192);
        assert_eq!(found[..4096], [3; 4096]);
        assert!(found[4096..].iter().all(|byte| [2, 3].contains(byte)));
    });
}

#[test]
fn i_a_torn_overwrite_leaves_the_committed_version_whole() {
    in_both_modes("4096 2 autocommit_time 3600000", |mut world| {
        world.open();
        world.write(0, &[1; 4096], true);
        for seed in 0..30 {
            world.write(0, &[2; 4096], false);
            world.power_cut(&mut Prng::new(seed));
            world.open();
            assert_eq!(world.read(0, 4096), [1; 4096]);
        }
    });
}

#[test]
fn j_autocommit_does_not_queue_behind_write_back() {
    in_both_modes("4096 2 autocommit_time 1000", |mut world| {
        world.open();
        world.write(0, &[1; 4096], true);
        world.holds = Box::new(is_of("origin", Op::Write));
        world.message("flush").unwrap();
        world.tick(SECOND);
        assert!(!world.held.is_empty());
        world.write(4096, &[2; 4096], false);
        world.tick(SECOND / 100);
        let before = world.seq_count();
        world.tick(SECOND * 11 / 10);
        assert_eq!(world.seq_count(), before + 1);
    });
}

#[test]
fn steady_flushes_do_not_starve_write_back() {
    let mut world = ssd("0");
    world.open();
    for block in 0..world.status(2) * 3 / 4 {
        world.write(block * 4096, &[1; 4096], false);
        if block % 4 == 0 {
            world.flush();
        }
        world.tick(SECOND / 100);
    }
    world.tick(SECOND / 100);
    let (blocks, free) = (world.status(2), world.status(3));
    assert!(free + 1 >= (blocks * 50 + 50) / 100, "{free} of {blocks}");
}

#[test]
fn pauses_follow_writes_that_pass_by() {
    let mut world = ssd("0");
    world.open();
    world.write(0, &[1; 4096], true);
    world.message("cleaner").unwrap();
    world.tick(SECOND);
    world.tick(SECOND);
    assert_eq!(world.status(3), world.status(2), "a cleaner does not pause");
}
