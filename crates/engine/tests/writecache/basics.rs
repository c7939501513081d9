//! The steps of a cache, in both modes.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::DiskIo;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::Fixture;

const MIB: u64 = 1 << 20;

/// The same test in both modes.
pub fn in_both_modes(words: &str, test: impl Fn(Fixture)) {
    for mode in ["p", "s"] {
        test(Fixture::new(&format!("{mode} O C {words}"), MIB, 4 * MIB));
    }
}

#[test]
fn what_is_written_is_read_and_nothing_else() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.origin.poke(0, &[9; 4 * 4096]);
        fixture.open();
        fixture.write(4096, &[1; 4096], false);
        fixture.write(3 * 4096, &[3; 4096], false);
        let found = fixture.read(0, 4 * 4096);
        for (nth, wanted) in [9, 1, 9, 3].into_iter().enumerate() {
            assert!(found[nth * 4096..][..4096].iter().all(|&byte| byte == wanted), "block {nth}");
        }
        fixture.write(4096, &[2; 8192], false);
        assert_eq!(fixture.read(4096, 8192), [2; 8192]);
        assert_eq!(fixture.status(7), 4);
    });
}

#[test]
fn media_follow_the_specifications_steps() {
    for mode in ["p", "s"] {
        let mut fixture = Fixture::new(&format!("{mode} O C 4096 0"), MIB, 4 * MIB);
        fixture.open();
        let free = (u64::MAX, u64::MAX);
        assert_eq!((fixture.seq_count(), fixture.entry(0)), (0, free));
        fixture.write(4096, &[1; 4096], false);
        assert_eq!((fixture.seq_count(), fixture.entry(0)), (0, free), "{mode}: in memory only");
        fixture.flush();
        assert_eq!((fixture.seq_count(), fixture.entry(0)), (1, (8, 0)), "{mode}");
        // Never in place: a new slot, and the old one is let go with the next round.
        fixture.write(4096, &[2; 4096], false);
        fixture.flush();
        assert_eq!((fixture.seq_count(), fixture.entry(1)), (2, (8, 1)), "{mode}");
        fixture.flush();
        fixture.remove();
        assert_eq!(fixture.entry(0).1, u64::MAX, "{mode}");
        assert_eq!(fixture.seq_count(), 2);
    }
}

#[test]
fn a_commit_of_mode_s_writes_no_more_than_it_must() {
    let mut fixture = Fixture::new("s O C 4096 0", MIB, 4 * MIB);
    fixture.open();
    fixture.write(4096, &[1; 4096], false);
    fixture.history.clear();
    fixture.flush();
    let cache = |op, offset, len| ("cache".to_string(), op, offset, len);
    assert_eq!(
        fixture.history,
        [
            cache(Op::Write, 0, 512),
            cache(Op::Flush, 0, 0),
            cache(Op::Write, 0, 512),
            cache(Op::Flush, 0, 0)
        ]
    );
    fixture.history.clear();
    fixture.flush();
    assert_eq!(fixture.history, [], "no work");
}

#[test]
fn flushed_data_survives_and_unflushed_data_survives_the_process() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.write(4096, &[2; 4096], false);
        fixture.kill();
        fixture.open();
        assert_eq!(fixture.read(0, 8192), [[1; 4096], [2; 4096]].concat());
        fixture.write(4096, &[3; 4096], false);
        let mut prng = udm::prng::Prng::new(3);
        fixture.power_cut(&mut prng);
        fixture.open();
        assert_eq!(fixture.read(0, 8192), [[1; 4096], [2; 4096]].concat());
    });
}

#[test]
fn write_back_keeps_between_the_watermarks() {
    in_both_modes("4096 2 pause_writeback 0", |mut fixture| {
        if fixture.table.starts_with('p') {
            fixture.table = "p O C 4096 0".into();
        }
        fixture.open();
        let blocks = fixture.status(2);
        let (high, low) = ((blocks * 50 + 50) / 100, (blocks * 55 + 50) / 100);
        let mut lowest = blocks;
        for block in 0..blocks * 3 {
            fixture.write(block % 1000 * 4096, &[block as u8; 4096], false);
            fixture.tick(0);
            lowest = lowest.min(fixture.status(3));
        }
        assert!(lowest >= high - 1, "{lowest} of {blocks}");
        fixture.tick(SECOND * 2);
        fixture.tick(SECOND * 2);
        assert!(fixture.status(3) <= low + 128, "only what is needed");
        assert!(fixture.fact("written_back_bytes_total") > 0);
    });
}

#[test]
fn a_cache_of_one_block_works() {
    for mode in ["p", "s"] {
        let mut fixture = Fixture::new(&format!("{mode} O C 4096 0"), 8192, MIB);
        fixture.open();
        assert_eq!(fixture.status(2), 1);
        for block in 0..50 {
            fixture.write(block * 4096, &[block as u8 + 1; 4096], false);
        }
        fixture.write(0, &[7; 8 * 4096], false);
        let content = fixture.content();
        for block in 0..50 {
            let wanted = if block < 8 { 7 } else { block as u8 + 1 };
            assert!(content[block * 4096..][..4096].iter().all(|&byte| byte == wanted));
        }
    }
}

#[test]
fn discards_and_zeroes_read_as_zeroes() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.origin.poke(0, &[9; 1 << 16]);
        fixture.open();
        fixture.write(0, &[1; 8192], false);
        fixture.flush();
        fixture.write(8192, &[2; 8192], false);
        fixture.zero(Op::Discard, 4096, 8192);
        fixture.zero(Op::WriteZeroes, 32768, 4096);
        let found = fixture.read(0, 16384);
        assert!(found[..4096] == [1; 4096] && found[4096..12288] == [0; 8192]);
        assert!(found[12288..] == [2; 4096]);
        assert_eq!(fixture.read(32768, 4096), [0; 4096]);
        fixture.kill();
        fixture.open();
        assert_eq!(fixture.read(4096, 8192), [0; 8192]);
        assert_eq!(fixture.status(14), 0);
    });
}

#[test]
fn requests_that_are_not_aligned_are_refused() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        let unaligned = Bio::write(512, Buffer::from_bytes(&[1; 4096]), false, 0);
        assert!(fixture.run(unaligned).status.is_err());
        let short = Bio::read(0, Buffer::zeroed(512), 0);
        assert!(fixture.run(short).status.is_err());
        assert_eq!(fixture.target().limits().block_bytes, 4096);
    });
}

#[test]
fn a_suspended_cache_is_at_rest_on_its_medium() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 8192], false);
        fixture.suspend();
        assert_eq!(fixture.seq_count(), 1);
        fixture.target().resume().unwrap();
        fixture.write(0, &[2; 4096], false);
        fixture.message("flush_on_suspend").unwrap();
        fixture.suspend();
        assert_eq!((fixture.status(3), fixture.status(2)), (fixture.status(2), fixture.status(2)));
        let mut found = [0; 8192];
        fixture.origin.peek(0, &mut found);
        assert!(found[..4096] == [2; 4096] && found[4096..] == [1; 4096]);
    });
}

#[test]
fn an_attach_says_how_many_entries_of_all_it_has_read() {
    let mut fixture = Fixture::new("p O C 4096 0", MIB, 4 * MIB);
    fixture.try_open(false).unwrap();
    let step = fixture.progress.look().unwrap();
    assert_eq!((step.what, step.total), ("entries", Some(step.done)));
    assert!((200..256).contains(&step.done), "{} blocks of 4 KiB in a MiB", step.done);
}

/// Discards of an origin of 15 TiB in the pieces of an export: each is one I/O of the origin, and
/// does not visit blocks that are not in the cache. (Otherwise this test takes minutes.)
#[test]
fn discards_cost_what_is_there() {
    const ALL: u64 = 15 << 40;
    const PIECE: u64 = 32 * MIB;
    in_both_modes("4096 0", |fixture| {
        let mut fixture = Fixture::new(&fixture.table, MIB, ALL);
        fixture.open();
        let last = ALL - 4096;
        fixture.write(last, &[7; 4096], true);
        let commits = fixture.fact("commits_total");
        assert!(fixture.fact("index_bytes") < ALL / MIB, "memory");
        for _ in 0..2 {
            for offset in (0..ALL - PIECE).step_by(PIECE as usize) {
                fixture.submit(Bio::bare(Op::Discard, offset, PIECE, false, 0));
                let zeroes = fixture.port.ios.pop_front().unwrap();
                assert_eq!((zeroes.offset, zeroes.len), (offset, PIECE));
                let done = DiskIo { result: Ok(()), ..zeroes };
                fixture.target.as_ref().unwrap().complete(done, &mut fixture.port);
                assert!(fixture.port.ios.is_empty() && fixture.port.done.pop_front().is_some());
            }
        }
        assert_eq!(fixture.fact("commits_total"), commits);
        assert_eq!(fixture.target().extent(0, ALL).0, last);
        assert_eq!(fixture.read(last, 4096), [7; 4096]);
    });
}
