//! Options, messages, status and table line.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::error::Kind;
use udm::target::Target;
use udm::units::SECOND;

use crate::basics::in_both_modes;
use crate::world::World;

const MIB: u64 = 1 << 20;
const MILLI: u64 = SECOND / 1000;

#[test]
fn autocommit_by_blocks() {
    // In mode `s` the background does it, which is woken.
    in_both_modes("4096 4 autocommit_blocks 4 autocommit_time 3600000", |mut world| {
        world.open();
        for block in 0..3 {
            world.write(block * 4096, &[1; 4096], false);
        }
        assert_eq!(world.seq_count(), 0);
        world.write(3 * 4096, &[1; 4096], false);
        world.tick(0);
        assert_eq!(world.seq_count(), 1);
        world.write(4 * 4096, &[1; 20480], false);
        world.tick(0);
        assert_eq!(world.seq_count(), 2);
    });
    in_both_modes("4096 2 autocommit_blocks 0", |mut world| {
        world.open();
        for block in 0..3 {
            world.write(block * 4096, &[1; 4096], false);
            world.tick(0);
            assert_eq!(world.seq_count(), block + 1);
        }
    });
}

#[test]
fn autocommit_by_time_counts_from_the_first_write() {
    in_both_modes("4096 2 autocommit_time 500", |mut world| {
        world.open();
        world.tick(SECOND);
        world.write(0, &[1; 4096], false);
        world.tick(0);
        for _ in 0..4 {
            world.tick(100 * MILLI);
            world.write(0, &[1; 4096], false);
        }
        assert_eq!(world.seq_count(), 0);
        world.tick(100 * MILLI);
        assert_eq!(world.seq_count(), 1);
    });
}

#[test]
fn old_blocks_are_written_back() {
    in_both_modes("4096 2 max_age 16000", |mut world| {
        world.open();
        world.write(0, &[1; 4096], true);
        world.tick(SECOND);
        for _ in 0..8 {
            world.tick(SECOND);
        }
        world.write(1 << 20, &[2; 4096], true);
        world.tick(SECOND);
        assert_eq!(world.status(3), world.status(2) - 2);
        for _ in 0..8 {
            world.tick(SECOND);
        }
        assert_eq!(world.status(3), world.status(2) - 1, "only the old one");
        for _ in 0..8 {
            world.tick(SECOND);
        }
        assert_eq!(world.status(3), world.status(2));
    });
}

#[test]
fn a_cleaner_admits_nothing_new_and_empties_the_cache() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 8192], false);
        world.message("Cleaner").unwrap();
        world.write(8192, &[2; 8192], false);
        assert_eq!(world.status(10), 2);
        assert_eq!(world.origin.image()[8192..16384], [2; 8192]);
        world.write(0, &[3; 4096], false);
        assert_eq!(world.status(10), 2, "what is cached is written to the cache");
        for _ in 0..5 {
            world.tick(SECOND);
        }
        assert_eq!(world.status(3), world.status(2));
        assert_eq!(world.read(0, 8192), [[3; 4096], [1; 4096]].concat());
        assert!(!world.target().table().contains("cleaner"));
    });
}

#[test]
fn metadata_only_admits_what_is_said_to_be_metadata() {
    in_both_modes("4096 1 metadata_only", |mut world| {
        world.open();
        world.write(0, &[1; 4096], false);
        assert_eq!((world.status(10), world.status(11)), (1, 0));
        let mut bio = Bio::write(4096, Buffer::from_bytes(&[2; 4096]), false, 0);
        bio.is_metadata = true;
        assert!(world.run(bio).status.is_ok());
        assert_eq!((world.status(10), world.status(11)), (1, 1));
        assert_eq!(world.read(0, 8192), [[1; 4096], [2; 4096]].concat());
        // A flush reaches the origin too, for what passed by.
        world.history.clear();
        world.flush();
        assert!(world.history.iter().any(|(name, op, ..)| name == "origin" && *op == Op::Flush));
    });
}

#[test]
fn write_back_rests_after_writes_that_pass_by() {
    let mut world = World::new("s O C 4096 3 metadata_only pause_writeback 2000", MIB, 4 * MIB);
    world.open();
    let blocks = world.status(2);
    for block in 0..blocks * 3 / 5 {
        let mut bio = Bio::write(block * 4096, Buffer::from_bytes(&[2; 4096]), false, 0);
        bio.is_metadata = true;
        assert!(world.run(bio).status.is_ok());
    }
    world.write(3 * MIB, &[1; 4096], false);
    world.flush();
    world.tick(MILLI);
    world.tick(1900 * MILLI);
    assert_eq!(world.fact("written_back_bytes_total"), 0);
    world.tick(200 * MILLI);
    assert!(world.fact("written_back_bytes_total") > 0);
}

#[test]
fn writeback_jobs_bound_a_batch() {
    in_both_modes("4096 2 writeback_jobs 5", |mut world| {
        world.open();
        for block in 0..100 {
            world.write(block * 8192, &[1; 4096], false);
        }
        world.flush();
        world.holds = Box::new(|io| io.disk.limits().name == "origin");
        world.message("flush").unwrap();
        world.tick(SECOND);
        assert!((1..=5).contains(&world.status(4)), "{}", world.status(4));
        world.release();
        world.drain();
    });
}

#[test]
fn neighbours_are_written_together_whatever_their_order() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        for nth in 0..64_u64 {
            world.write((nth * 37 % 64) * 4096, &[nth as u8; 4096], false);
        }
        world.history.clear();
        world.drain();
        let is_write =
            |(name, op, ..): &&(String, Op, u64, u64)| name == "origin" && *op == Op::Write;
        let writes: Vec<u64> = world.history.iter().filter(is_write).map(|io| io.3).collect();
        assert_eq!(writes, [64 * 4096]);
    });
}

#[test]
fn messages_are_the_kernels() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 4096], false);
        for (words, kind) in
            [("nonsense", Kind::Invalid), ("", Kind::Invalid), ("flush now", Kind::Invalid)]
        {
            assert_eq!(world.message(words).unwrap_err().kind(), kind, "{words}");
        }
        assert!(
            world.message("nonsense").unwrap_err().to_string().contains("unrecognised message")
        );
        world.message("CLEAR_stats").unwrap();
        assert_eq!(world.status(7), 0);
        world.message("flush").unwrap();
        for _ in 0..3 {
            world.tick(SECOND);
        }
        assert_eq!(world.status(3), world.status(2));
        world.suspend();
        assert_eq!(world.message("flush").unwrap_err().kind(), Kind::Busy);
        world.message("flush_on_suspend").unwrap();
        world.message("cleaner").unwrap();
        world.message("clear_stats").unwrap();
    });
}

#[test]
fn status_counts_as_the_kernel_does() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        let free = world.status(2);
        world.write(0, &[1; 8192], false);
        world.write(0, &[1; 4096], false);
        world.flush();
        world.write(4096, &[1; 4096], false);
        world.read(0, 16384);
        let is_pmem = world.table.starts_with('p');
        let allocated = if is_pmem { 3 } else { 2 };
        let wanted = format!("0 {free} {} 0 4 2 4 1 1 0 {allocated} 0 1 0", free - 3);
        assert_eq!(world.target().status(), wanted);
        world.flush();
        world.zero(Op::Discard, 0, 8192);
        assert_eq!(world.status(14), 2);
        assert_eq!(world.status(3), free);
    });
}

#[test]
fn the_table_line_has_what_was_given() {
    in_both_modes("4096 3 cleaner high_watermark 60", |mut world| {
        world.open();
        let mode = &world.table[..1];
        let cache = if mode == "p" { "sim" } else { "cache" };
        let wanted = format!("{mode} origin {cache} 4096 3 high_watermark 60 cleaner");
        assert_eq!(world.target().table(), wanted);
    });
}

#[test]
fn the_origin_says_when_it_is_consistent() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        assert_eq!(world.fact("origin_is_consistent"), 1);
        world.write(0, &[1; 8192], true);
        world.write(1 << 20, &[1; 8192], true);
        assert_eq!(world.fact("origin_is_consistent"), 1);
        let mut writes = 0;
        world.holds = Box::new(move |io| {
            writes += i32::from(io.op == Op::Write && io.disk.limits().name == "origin");
            writes > 1
        });
        world.message("flush").unwrap();
        world.tick(SECOND);
        assert_eq!(world.fact("origin_is_consistent"), 0);
        world.tick(SECOND * 3);
        assert_eq!(world.fact("origin_inconsistent_s"), 3);
        world.release();
        world.tick(SECOND);
        assert_eq!(world.fact("origin_is_consistent"), 1);
        assert_eq!(world.fact("origin_inconsistent_s"), 0);
    });
}
