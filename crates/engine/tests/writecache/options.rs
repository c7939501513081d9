//! Options, messages, status and table line.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::error::Kind;
use udm::target::Target;
use udm::units::SECOND;

use crate::basics::in_both_modes;
use crate::fixture::Fixture;

const MIB: u64 = 1 << 20;
const MILLI: u64 = SECOND / 1000;

#[test]
fn autocommit_by_blocks() {
    // In mode `s` the background does it, which is woken.
    in_both_modes("4096 4 autocommit_blocks 4 autocommit_time 3600000", |mut fixture| {
        fixture.open();
        for block in 0..3 {
            fixture.write(block * 4096, &[1; 4096], false);
        }
        assert_eq!(fixture.seq_count(), 0);
        fixture.write(3 * 4096, &[1; 4096], false);
        fixture.tick(0);
        assert_eq!(fixture.seq_count(), 1);
        fixture.write(4 * 4096, &[1; 20480], false);
        fixture.tick(0);
        assert_eq!(fixture.seq_count(), 2);
    });
    in_both_modes("4096 2 autocommit_blocks 0", |mut fixture| {
        fixture.open();
        for block in 0..3 {
            fixture.write(block * 4096, &[1; 4096], false);
            fixture.tick(0);
            assert_eq!(fixture.seq_count(), block + 1);
        }
    });
}

#[test]
fn autocommit_by_time_counts_from_the_first_write() {
    in_both_modes("4096 2 autocommit_time 500", |mut fixture| {
        fixture.open();
        fixture.tick(SECOND);
        fixture.write(0, &[1; 4096], false);
        fixture.tick(0);
        for _ in 0..4 {
            fixture.tick(100 * MILLI);
            fixture.write(0, &[1; 4096], false);
        }
        assert_eq!(fixture.seq_count(), 0);
        fixture.tick(100 * MILLI);
        assert_eq!(fixture.seq_count(), 1);
    });
}

#[test]
fn old_blocks_are_written_back() {
    in_both_modes("4096 2 max_age 16000", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.tick(SECOND);
        for _ in 0..8 {
            fixture.tick(SECOND);
        }
        fixture.write(1 << 20, &[2; 4096], true);
        fixture.tick(SECOND);
        assert_eq!(fixture.status(3), fixture.status(2) - 2);
        for _ in 0..8 {
            fixture.tick(SECOND);
        }
        assert_eq!(fixture.status(3), fixture.status(2) - 1, "only the old one");
        for _ in 0..8 {
            fixture.tick(SECOND);
        }
        assert_eq!(fixture.status(3), fixture.status(2));
    });
}

#[test]
fn a_cleaner_admits_nothing_new_and_empties_the_cache() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 8192], false);
        fixture.message("Cleaner").unwrap();
        fixture.write(8192, &[2; 8192], false);
        assert_eq!(fixture.status(10), 2);
        assert_eq!(fixture.origin.image()[8192..16384], [2; 8192]);
        fixture.write(0, &[3; 4096], false);
        assert_eq!(fixture.status(10), 2, "cached blocks are written to the cache");
        for _ in 0..5 {
            fixture.tick(SECOND);
        }
        assert_eq!(fixture.status(3), fixture.status(2));
        assert_eq!(fixture.read(0, 8192), [[3; 4096], [1; 4096]].concat());
        assert!(!fixture.target().table().contains("cleaner"));
    });
}

#[test]
fn metadata_only_admits_what_is_said_to_be_metadata() {
    in_both_modes("4096 1 metadata_only", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], false);
        assert_eq!((fixture.status(10), fixture.status(11)), (1, 0));
        let mut bio = Bio::write(4096, Buffer::from_bytes(&[2; 4096]), false, 0);
        bio.is_metadata = true;
        assert!(fixture.run(bio).status.is_ok());
        assert_eq!((fixture.status(10), fixture.status(11)), (1, 1));
        assert_eq!(fixture.read(0, 8192), [[1; 4096], [2; 4096]].concat());
        // A flush reaches the origin too, for what passed by.
        fixture.history.clear();
        fixture.flush();
        assert!(fixture.history.iter().any(|(name, op, ..)| name == "origin" && *op == Op::Flush));
    });
}

#[test]
fn write_back_rests_after_writes_that_pass_by() {
    let mut fixture = Fixture::new("s O C 4096 3 metadata_only pause_writeback 2000", MIB, 4 * MIB);
    fixture.open();
    let blocks = fixture.status(2);
    for block in 0..blocks * 3 / 5 {
        let mut bio = Bio::write(block * 4096, Buffer::from_bytes(&[2; 4096]), false, 0);
        bio.is_metadata = true;
        assert!(fixture.run(bio).status.is_ok());
    }
    fixture.write(3 * MIB, &[1; 4096], false);
    fixture.flush();
    fixture.tick(MILLI);
    fixture.tick(1900 * MILLI);
    assert_eq!(fixture.fact("written_back_bytes_total"), 0);
    fixture.tick(200 * MILLI);
    assert!(fixture.fact("written_back_bytes_total") > 0);
}

#[test]
fn writeback_jobs_bound_a_batch() {
    in_both_modes("4096 2 writeback_jobs 5", |mut fixture| {
        fixture.open();
        for block in 0..100 {
            fixture.write(block * 8192, &[1; 4096], false);
        }
        fixture.flush();
        fixture.holds = Box::new(|io| io.disk.limits().name == "origin");
        fixture.message("flush").unwrap();
        fixture.tick(SECOND);
        assert!((1..=5).contains(&fixture.status(4)), "{}", fixture.status(4));
        fixture.release();
        fixture.drain();
    });
}

#[test]
fn neighbours_are_written_together_whatever_their_order() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        for nth in 0..64_u64 {
            fixture.write((nth * 37 % 64) * 4096, &[nth as u8; 4096], false);
        }
        fixture.history.clear();
        fixture.drain();
        let is_write =
            |(name, op, ..): &&(String, Op, u64, u64)| name == "origin" && *op == Op::Write;
        let writes: Vec<u64> = fixture.history.iter().filter(is_write).map(|io| io.3).collect();
        assert_eq!(writes, [64 * 4096]);
    });
}

#[test]
fn messages_are_the_kernels() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], false);
        for (words, kind) in
            [("nonsense", Kind::Invalid), ("", Kind::Invalid), ("flush now", Kind::Invalid)]
        {
            assert_eq!(fixture.message(words).unwrap_err().kind(), kind, "{words}");
        }
        assert!(
            fixture.message("nonsense").unwrap_err().to_string().contains("unrecognised message")
        );
        fixture.message("CLEAR_stats").unwrap();
        assert_eq!(fixture.status(7), 0);
        fixture.message("flush").unwrap();
        for _ in 0..3 {
            fixture.tick(SECOND);
        }
        assert_eq!(fixture.status(3), fixture.status(2));
        fixture.suspend();
        assert_eq!(fixture.message("flush").unwrap_err().kind(), Kind::Busy);
        fixture.message("flush_on_suspend").unwrap();
        fixture.message("cleaner").unwrap();
        fixture.message("clear_stats").unwrap();
    });
}

#[test]
fn status_counts_as_the_kernel_does() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        let free = fixture.status(2);
        fixture.write(0, &[1; 8192], false);
        fixture.write(0, &[1; 4096], false);
        fixture.flush();
        fixture.write(4096, &[1; 4096], false);
        fixture.read(0, 16384);
        let is_pmem = fixture.table.starts_with('p');
        let allocated = if is_pmem { 3 } else { 2 };
        let wanted = format!("0 {free} {} 0 4 2 4 1 1 0 {allocated} 0 1 0", free - 3);
        assert_eq!(fixture.target().status(), wanted);
        fixture.flush();
        fixture.zero(Op::Discard, 0, 8192);
        assert_eq!(fixture.status(14), 2);
        assert_eq!(fixture.status(3), free);
    });
}

#[test]
fn the_table_line_has_what_was_given() {
    in_both_modes("4096 3 cleaner high_watermark 60", |mut fixture| {
        fixture.open();
        let mode = &fixture.table[..1];
        let cache = if mode == "p" { "sim" } else { "cache" };
        let wanted = format!("{mode} origin {cache} 4096 3 high_watermark 60 cleaner");
        assert_eq!(fixture.target().table(), wanted);
    });
}

#[test]
fn the_origin_says_when_it_is_consistent() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        assert_eq!(fixture.fact("origin_is_consistent"), 1);
        fixture.write(0, &[1; 8192], true);
        fixture.write(1 << 20, &[1; 8192], true);
        assert_eq!(fixture.fact("origin_is_consistent"), 1);
        let mut writes = 0;
        fixture.holds = Box::new(move |io| {
            writes += i32::from(io.op == Op::Write && io.disk.limits().name == "origin");
            writes > 1
        });
        fixture.message("flush").unwrap();
        fixture.tick(SECOND);
        assert_eq!(fixture.fact("origin_is_consistent"), 0);
        fixture.tick(SECOND * 3);
        assert_eq!(fixture.fact("origin_inconsistent_s"), 3);
        fixture.release();
        fixture.tick(SECOND);
        assert_eq!(fixture.fact("origin_is_consistent"), 1);
        assert_eq!(fixture.fact("origin_inconsistent_s"), 0);
    });
}
