//! What a cache does, step by step, in both modes.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::target::Target;
use udm::units::SECOND;

use crate::world::World;

const MIB: u64 = 1 << 20;

/// The same test in both modes.
pub fn in_both_modes(words: &str, test: impl Fn(World)) {
    for mode in ["p", "s"] {
        test(World::new(&format!("{mode} O C {words}"), MIB, 4 * MIB));
    }
}

#[test]
fn what_is_written_is_read_and_nothing_else() {
    in_both_modes("4096 0", |mut world| {
        world.origin.poke(0, &[9; 4 * 4096]);
        world.open();
        world.write(4096, &[1; 4096], false);
        world.write(3 * 4096, &[3; 4096], false);
        let found = world.read(0, 4 * 4096);
        for (nth, wanted) in [9, 1, 9, 3].into_iter().enumerate() {
            assert!(found[nth * 4096..][..4096].iter().all(|&byte| byte == wanted), "block {nth}");
        }
        world.write(4096, &[2; 8192], false);
        assert_eq!(world.read(4096, 8192), [2; 8192]);
        assert_eq!(world.status(7), 4);
    });
}

#[test]
fn media_follow_the_specifications_steps() {
    for mode in ["p", "s"] {
        let mut world = World::new(&format!("{mode} O C 4096 0"), MIB, 4 * MIB);
        world.open();
        let free = (u64::MAX, u64::MAX);
        assert_eq!((world.seq_count(), world.entry(0)), (0, free));
        world.write(4096, &[1; 4096], false);
        assert_eq!((world.seq_count(), world.entry(0)), (0, free), "{mode}: in memory only");
        world.flush();
        assert_eq!((world.seq_count(), world.entry(0)), (1, (8, 0)), "{mode}");
        // Never in place: a new slot, and the old one is let go with the next round.
        world.write(4096, &[2; 4096], false);
        world.flush();
        assert_eq!((world.seq_count(), world.entry(1)), (2, (8, 1)), "{mode}");
        world.flush();
        world.remove();
        assert_eq!(world.entry(0).1, u64::MAX, "{mode}");
        assert_eq!(world.seq_count(), 2);
    }
}

#[test]
fn a_commit_of_mode_s_writes_no_more_than_it_must() {
    let mut world = World::new("s O C 4096 0", MIB, 4 * MIB);
    world.open();
    world.write(4096, &[1; 4096], false);
    world.history.clear();
    world.flush();
    let cache = |op, offset, len| ("cache".to_string(), op, offset, len);
    assert_eq!(
        world.history,
        [
            cache(Op::Write, 0, 512),
            cache(Op::Flush, 0, 0),
            cache(Op::Write, 0, 512),
            cache(Op::Flush, 0, 0)
        ]
    );
    world.history.clear();
    world.flush();
    assert_eq!(world.history, [], "nothing to do");
}

#[test]
fn flushed_data_survives_and_unflushed_data_survives_the_process() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 4096], true);
        world.write(4096, &[2; 4096], false);
        world.kill();
        world.open();
        assert_eq!(world.read(0, 8192), [[1; 4096], [2; 4096]].concat());
        world.write(4096, &[3; 4096], false);
        let mut prng = udm::prng::Prng::new(3);
        world.power_cut(&mut prng);
        world.open();
        assert_eq!(world.read(0, 8192), [[1; 4096], [2; 4096]].concat());
    });
}

#[test]
fn write_back_keeps_between_the_watermarks() {
    in_both_modes("4096 2 pause_writeback 0", |mut world| {
        if world.table.starts_with('p') {
            world.table = "p O C 4096 0".into();
        }
        world.open();
        let blocks = world.status(2);
        let (high, low) = ((blocks * 50 + 50) / 100, (blocks * 55 + 50) / 100);
        let mut lowest = blocks;
        for block in 0..blocks * 3 {
            world.write(block % 1000 * 4096, &[block as u8; 4096], false);
            world.tick(0);
            lowest = lowest.min(world.status(3));
        }
        assert!(lowest >= high - 1, "{lowest} of {blocks}");
        world.tick(SECOND * 2);
        world.tick(SECOND * 2);
        assert!(world.status(3) <= low + 128, "only what is needed");
        assert!(world.fact("written_back_bytes_total") > 0);
    });
}

#[test]
fn a_cache_of_one_block_works() {
    for mode in ["p", "s"] {
        let mut world = World::new(&format!("{mode} O C 4096 0"), 8192, MIB);
        world.open();
        assert_eq!(world.status(2), 1);
        for block in 0..50 {
            world.write(block * 4096, &[block as u8 + 1; 4096], false);
        }
        world.write(0, &[7; 8 * 4096], false);
        let content = world.content();
        for block in 0..50 {
            let wanted = if block < 8 { 7 } else { block as u8 + 1 };
            assert!(content[block * 4096..][..4096].iter().all(|&byte| byte == wanted));
        }
    }
}

#[test]
fn discards_and_zeroes_read_as_zeroes() {
    in_both_modes("4096 0", |mut world| {
        world.origin.poke(0, &[9; 1 << 16]);
        world.open();
        world.write(0, &[1; 8192], false);
        world.flush();
        world.write(8192, &[2; 8192], false);
        world.zero(Op::Discard, 4096, 8192);
        world.zero(Op::WriteZeroes, 32768, 4096);
        let found = world.read(0, 16384);
        assert!(found[..4096] == [1; 4096] && found[4096..12288] == [0; 8192]);
        assert!(found[12288..] == [2; 4096]);
        assert_eq!(world.read(32768, 4096), [0; 4096]);
        world.kill();
        world.open();
        assert_eq!(world.read(4096, 8192), [0; 8192]);
        assert_eq!(world.status(14), 0);
    });
}

#[test]
fn requests_that_are_not_aligned_are_refused() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        let unaligned = Bio::write(512, Buffer::from_bytes(&[1; 4096]), false, 0);
        assert!(world.run(unaligned).status.is_err());
        let short = Bio::read(0, Buffer::zeroed(512), 0);
        assert!(world.run(short).status.is_err());
        assert_eq!(world.target().limits().block_bytes, 4096);
    });
}

#[test]
fn a_suspended_cache_is_at_rest_on_its_medium() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 8192], false);
        world.suspend();
        assert_eq!(world.seq_count(), 1);
        world.target().resume().unwrap();
        world.write(0, &[2; 4096], false);
        world.message("flush_on_suspend").unwrap();
        world.suspend();
        assert_eq!((world.status(3), world.status(2)), (world.status(2), world.status(2)));
        let mut found = [0; 8192];
        world.origin.peek(0, &mut found);
        assert!(found[..4096] == [2; 4096] && found[4096..] == [1; 4096]);
    });
}

#[test]
fn an_attach_says_how_many_entries_of_all_it_has_read() {
    let mut world = World::new("p O C 4096 0", MIB, 4 * MIB);
    world.try_open(false).unwrap();
    let step = world.progress.look().unwrap();
    assert_eq!((step.what, step.total), ("entries", Some(step.done)));
    assert!((200..256).contains(&step.done), "{} blocks of 4 KiB in a MiB", step.done);
}
