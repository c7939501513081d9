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
use crate::fixture::Fixture;

const MIB: u64 = 1 << 20;

fn is_of(name: &'static str, op: Op) -> impl Fn(&DiskIo) -> bool {
    move |io| io.disk.limits().name == name && io.op == op
}

fn ssd(options: &str) -> Fixture {
    Fixture::new(&format!("s O C 4096 {options}"), MIB, 4 * MIB)
}

/// Live entries: how often each (sector, number), and each sector, is there.
fn live_entries(fixture: &Fixture) -> (HashMap<(u64, u64), u32>, HashMap<u64, u32>) {
    let (mut pairs, mut sectors) = (HashMap::new(), HashMap::new());
    for index in 0..fixture.status(2) {
        let (sector, seq) = fixture.entry(index);
        if seq < fixture.seq_count() {
            *pairs.entry((sector, seq)).or_default() += 1;
            *sectors.entry(sector).or_default() += 1;
        }
    }
    (pairs, sectors)
}

#[test]
fn a_fua_writes_are_durable() {
    in_both_modes("4096 4 autocommit_time 3600000 autocommit_blocks 1000000", |mut fixture| {
        for seed in 0..20 {
            fixture.open();
            fixture.write(8192, &[seed as u8 + 1; 8192], true);
            fixture.power_cut(&mut Prng::new(seed));
            fixture.open();
            assert_eq!(fixture.read(8192, 8192), [seed as u8 + 1; 8192]);
        }
    });
}

#[test]
fn b_a_flush_is_not_skipped_while_all_is_under_write_back() {
    let mut fixture = ssd("4 autocommit_time 3600000 pause_writeback 0");
    fixture.open();
    fixture.write(0, &[1; 4096], false);
    fixture.flush();
    fixture.holds = Box::new(is_of("origin", Op::Write));
    fixture.message("flush").unwrap();
    fixture.tick(SECOND);
    assert_eq!(fixture.held.len(), 1, "the only block is on its way to the origin");
    fixture.write(0, &[2; 4096], false);
    fixture.history.clear();
    fixture.flush();
    assert!(fixture.history.iter().any(|(name, op, ..)| name == "cache" && *op == Op::Flush));
    for seed in 0..10 {
        fixture.power_cut(&mut Prng::new(seed));
        fixture.open();
        assert_eq!(fixture.read(0, 4096), [2; 4096]);
    }
}

#[test]
fn c_no_two_entries_of_a_sector_have_one_number() {
    in_both_modes("4096 2 autocommit_time 3600000", |mut fixture| {
        fixture.open();
        fixture.write(4096, &[1; 4096], false);
        fixture.write(0, &[2; 16384], false);
        fixture.write(8192, &[3; 4096], false);
        fixture.flush();
        let (pairs, sectors) = live_entries(&fixture);
        assert_eq!((pairs.len(), sectors.len()), (4, 4));
        assert!(pairs.values().all(|&count| count == 1));
        fixture.write(0, &[4; 16384], false);
        fixture.flush();
        let (pairs, _) = live_entries(&fixture);
        assert!(pairs.values().all(|&count| count == 1));
        fixture.power_cut(&mut Prng::new(1));
        fixture.open();
        assert_eq!(fixture.read(0, 16384), [4; 16384]);
    });
}

#[test]
fn c2_write_back_of_an_uncommitted_block_commits_it_first() {
    in_both_modes("4096 4 autocommit_time 3600000 max_age 1", |mut fixture| {
        fixture.open();
        for block in 0..100 {
            fixture.write(block * 4096, &[block as u8; 4096], false);
            fixture.write(block / 2 * 4096, &[block as u8; 4096], false);
            fixture.tick(SECOND / 100);
        }
        fixture.drain();
        assert_eq!(fixture.status(1), 0);
        let content = fixture.content();
        assert!(fixture.origin.image()[..content.len()] == content[..]);
    });
}

#[test]
fn d_a_failed_cache_write_leaves_the_older_version() {
    let mut fixture = ssd("0");
    fixture.origin.poke(0, &[9; 8192]);
    fixture.open();
    fixture.write(0, &[1; 4096], false);
    let data_at = 4096 + 64;
    fixture.refuses = Box::new(move |io| is_of("cache", Op::Write)(io) && io.offset > data_at);
    assert!(fixture.try_write(0, &[2; 4096], false).is_err());
    assert!(fixture.try_write(4096, &[3; 4096], false).is_err());
    fixture.refuses = Box::new(|_| false);
    assert_eq!(fixture.read(0, 8192), [[1; 4096], [9; 4096]].concat());
    fixture.flush();
    fixture.kill();
    fixture.open();
    assert_eq!(fixture.read(0, 8192), [[1; 4096], [9; 4096]].concat());
    fixture.drain();
    assert_eq!(fixture.origin.image()[..8192], [[1; 4096], [9; 4096]].concat());
    // The slots that failed are free again.
    assert_eq!(fixture.status(3), fixture.status(2));
}

#[test]
fn e_nothing_hangs_after_a_write_back_error() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 65536], false);
        fixture.refuses = Box::new(is_of("origin", Op::Write));
        fixture.message("flush").unwrap();
        fixture.tick(SECOND);
        fixture.tick(SECOND);
        assert_eq!(fixture.status(1), 1, "the error is shown");
        assert_eq!(fixture.status(3), fixture.status(2) - 16, "all data is cached");
        fixture.suspend();
        fixture.target().resume().unwrap();
        fixture.refuses = Box::new(|_| false);
        fixture.drain();
        fixture.tick(SECOND);
        assert_eq!((fixture.status(1), fixture.status(3)), (0, fixture.status(2)));
        assert_eq!(fixture.origin.image()[..65536], [1; 65536]);
    });
}

#[test]
fn f_suspend_and_resume_with_an_error_show_no_stale_data() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.origin.poke(0, &[9; 4096]);
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.refuses = Box::new(is_of("origin", Op::Write));
        fixture.message("flush").unwrap();
        fixture.tick(SECOND);
        assert_eq!(fixture.status(1), 1);
        fixture.suspend();
        fixture.target().resume().unwrap();
        assert_eq!(fixture.read(0, 4096), [1; 4096]);
        assert_eq!(fixture.status(3), fixture.status(2) - 1);
    });
}

#[test]
fn g_mode_p_needs_no_dax() {
    // A file of any file system: the page cache holds its data.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    let mut fixture = Fixture::new("p O C 4096 0", MIB, 4 * MIB);
    let options = DaxOptions { persistence: Some(Persistence::Msync), ..DaxOptions::default() };
    let shared = SharedWords::private(shared_words(STRIPES));
    for version in 1..3 {
        let pmem = Arc::new(DaxPmem::open(&path, options).unwrap());
        let shared = shared.clone();
        let (args, origin) = (fixture.args(), fixture.origin.clone());
        let how = OpenOptions::new(version);
        let opened = Writecache::open_pmem(args, 4 * MIB, origin, pmem, shared, &how);
        fixture.target = Some(opened.unwrap());
        if version > 1 {
            assert_eq!(fixture.read(4096, 8192), [version as u8 - 1; 8192]);
        }
        fixture.write(4096, &[version as u8; 8192], false);
        fixture.flush();
        fixture.target = None;
    }
    // A device that cannot be mapped is refused.
    assert!(DaxPmem::open(folder.path(), options).is_err());
}

#[test]
fn h_a_write_that_is_half_cached_is_committed_whole() {
    in_both_modes("4096 2 autocommit_time 1000", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.message("cleaner").unwrap();
        fixture.holds = Box::new(is_of("origin", Op::Flush));
        // Block 0 is cached, block 1 is not and passes by.
        fixture.submit(Bio::write(0, Buffer::from_bytes(&[2; 8192]), true, 0));
        assert!(fixture.done().is_none(), "the part that passed by is not durable");
        fixture.release();
        assert!(fixture.done().expect("durable now").status.is_ok());
        assert_eq!(fixture.status(10), 1);
        fixture.write(0, &[3; 8192], false);
        fixture.tick(SECOND * 2);
        fixture.tick(SECOND * 2);
        assert!(fixture.seq_count() >= 2, "the timer runs for the cached part");
        fixture.power_cut(&mut Prng::new(4));
        fixture.open();
        let found = fixture.read(0, 8192);
        assert_eq!(found[..4096], [3; 4096]);
        assert!(found[4096..].iter().all(|byte| [2, 3].contains(byte)));
    });
}

#[test]
fn i_a_torn_overwrite_leaves_the_committed_version_whole() {
    in_both_modes("4096 2 autocommit_time 3600000", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        for seed in 0..30 {
            fixture.write(0, &[2; 4096], false);
            fixture.power_cut(&mut Prng::new(seed));
            fixture.open();
            assert_eq!(fixture.read(0, 4096), [1; 4096]);
        }
    });
}

#[test]
fn j_autocommit_does_not_queue_behind_write_back() {
    in_both_modes("4096 2 autocommit_time 1000", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.holds = Box::new(is_of("origin", Op::Write));
        fixture.message("flush").unwrap();
        fixture.tick(SECOND);
        assert!(!fixture.held.is_empty());
        fixture.write(4096, &[2; 4096], false);
        fixture.tick(SECOND / 100);
        let before = fixture.seq_count();
        fixture.tick(SECOND * 11 / 10);
        assert_eq!(fixture.seq_count(), before + 1);
    });
}

#[test]
fn steady_flushes_do_not_starve_write_back() {
    let mut fixture = ssd("0");
    fixture.open();
    for block in 0..fixture.status(2) * 3 / 4 {
        fixture.write(block * 4096, &[1; 4096], false);
        if block % 4 == 0 {
            fixture.flush();
        }
        fixture.tick(SECOND / 100);
    }
    fixture.tick(SECOND / 100);
    let (blocks, free) = (fixture.status(2), fixture.status(3));
    assert!(free + 1 >= (blocks * 50 + 50) / 100, "{free} of {blocks}");
}

#[test]
fn pauses_follow_writes_that_pass_by() {
    let mut fixture = ssd("0");
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.message("cleaner").unwrap();
    fixture.tick(SECOND);
    fixture.tick(SECOND);
    assert_eq!(fixture.status(3), fixture.status(2), "a cleaner does not pause");
}
