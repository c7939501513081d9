//! Requests are served before all of the log is replayed: missing data is read from the backing
//! device, and data replayed later never covers newer data.

use udm::bio::Op;
use udm::pmem::Pmem;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::{Fixture, Setup};

const BLOCK: u64 = 4096;

/// A cache with `clean` blocks of 1s that were written back, then `dirty` ones of 2s that were
/// not, opened again without replaying anything yet.
fn opened_late(table: &'static str, clean: u64, dirty: u64) -> Fixture {
    let mut fixture = Fixture::new(Setup::small().table(table).late());
    fixture.open();
    (0..clean).for_each(|nth| fixture.write(nth * BLOCK, &[1; BLOCK as usize], true));
    fixture.drain();
    // What came by an overwrite of part of a block.
    (0..dirty).for_each(|nth| fixture.write(nth * 2 * BLOCK + 512, &[2; 1024], true));
    fixture.remove();
    fixture.open();
    fixture.history.clear();
    assert!(fixture.target().is_replaying());
    fixture
}

fn finish(fixture: &mut Fixture) {
    for _ in 0..10_000 {
        if !fixture.target().is_replaying() {
            return;
        }
        fixture.tick(0);
    }
    panic!("the replay does not end");
}

fn notes(fixture: &Fixture) -> Vec<String> {
    let facts = fixture.target().facts();
    let notes = facts.iter().filter(|fact| fact.name == "attach_note");
    notes.map(|note| format!("{:?}", note.value)).collect()
}

fn expected(nth: u64, dirty: u64) -> Vec<u8> {
    let mut block = vec![1; BLOCK as usize];
    if nth.is_multiple_of(2) && nth / 2 < dirty {
        block[512..1536].fill(2);
    }
    block
}

#[test]
fn dirty_data_is_served_from_the_cache_and_clean_data_from_the_backing_device() {
    let mut fixture = opened_late("C B 0", 60, 20);
    assert_eq!(fixture.target().cached_bytes_in(0, 60 * BLOCK), 20 * 1024, "dirty data");
    let hits = |fixture: &Fixture| fixture.fact("read_hits_total");
    assert_eq!(fixture.read(512, 1024), [2; 1024]);
    assert_eq!(hits(&fixture), 1);
    for nth in 0..60 {
        assert_eq!(fixture.read(nth * BLOCK, BLOCK as usize), expected(nth, 20), "{nth}");
    }
    assert_eq!(hits(&fixture), 1);
    assert_eq!(fixture.fact("filled_bytes_total"), 0, "a hit is not cached again");
    assert_eq!(fixture.fact("replay_left_keys"), 80);
    finish(&mut fixture);
    for nth in 0..60 {
        assert_eq!(fixture.read(nth * BLOCK, BLOCK as usize), expected(nth, 20), "{nth}");
    }
    assert_eq!(hits(&fixture), 61);
}

#[test]
fn it_ends_with_what_a_replay_at_once_ends_with() {
    let mut late = opened_late("C B 0", 60, 20);
    let image = late.pmem.crash_with(|_, words| words);
    finish(&mut late);
    let disk = late.disk.clone();
    let mut at_once = Fixture::over(Setup::small(), std::sync::Arc::new(image), disk);
    at_once.open();
    assert!(!at_once.target().is_replaying());
    for nth in 0..3 * 1024 {
        let cached = |fixture: &Fixture| fixture.target().cached_bytes_in(nth * BLOCK, BLOCK);
        assert_eq!(cached(&late), cached(&at_once), "block {nth}");
    }
    assert!(late.content() == at_once.content());
    assert_eq!(late.target().status(), at_once.target().status());
    for name in ["dirty_bytes", "cached_bytes", "free_segments"] {
        assert_eq!(late.fact(name), at_once.fact(name), "{name}");
    }
}

#[test]
fn what_is_replayed_never_covers_what_was_written_since() {
    for is_zeroes in [false, true] {
        let mut fixture = opened_late("C B 0", 60, 20);
        // Whole blocks, parts of blocks, all of it written back before the rest is replayed.
        match is_zeroes {
            true => fixture.zero(Op::Discard, 7 * BLOCK, BLOCK, false),
            false => fixture.write(7 * BLOCK, &[0; BLOCK as usize], false),
        }
        fixture.write(9 * BLOCK + 2048, &[3; 512], false);
        fixture.write(8 * BLOCK, &[4; 1024], false);
        fixture.target().set_draining(true);
        fixture.tick(SECOND);
        assert_eq!(fixture.fact("dirty_bytes"), 0);
        assert!(fixture.target().is_replaying());
        let before = fixture.content();
        finish(&mut fixture);
        assert!(fixture.content() == before);
        assert_eq!(fixture.read(7 * BLOCK, BLOCK as usize), [0; BLOCK as usize]);
        assert_eq!(fixture.read(8 * BLOCK, 1024), [4; 1024]);
        assert_eq!(fixture.read(8 * BLOCK + 1024, 512), [2; 512]);
        assert_eq!(fixture.read(9 * BLOCK + 2048, 512), [3; 512]);
    }
}

#[test]
fn nothing_is_collected_before_all_is_replayed() {
    let mut fixture = opened_late("C B 0", 200, 0);
    let key_tail =
        |fixture: &Fixture| fixture.target().status().rsplit(' ').next().map(str::to_owned);
    let before = key_tail(&fixture);
    fixture.target().message(&["gc_percent".into(), "0".into()]).unwrap();
    for nth in 0..20 {
        fixture.write(nth * BLOCK, &[5; BLOCK as usize], true);
        fixture.tick(SECOND);
        assert!(fixture.target().is_replaying() && key_tail(&fixture) == before);
    }
    finish(&mut fixture);
    (0..3).for_each(|_| fixture.tick(SECOND));
    assert!(key_tail(&fixture) != before);
    (0..20).for_each(|nth| assert_eq!(fixture.read(nth * BLOCK, 512), [5; 512]));
    (20..200).for_each(|nth| assert_eq!(fixture.read(nth * BLOCK, 512), [1; 512]));
}

#[test]
fn writes_that_find_no_room_wait_for_the_end_of_the_replay() {
    let mut fixture = Fixture::new(Setup::small().late());
    fixture.open();
    // More than the cache can hold, so that it is full of clean data.
    (0..1000).for_each(|nth| fixture.write(nth % 600 * BLOCK, &[nth as u8; 4096], false));
    fixture.drain();
    fixture.remove();
    fixture.open();
    for nth in 0..1000 {
        fixture.write((nth * 7) % 701 * BLOCK, &[nth as u8 ^ 0x55; 4096], false);
    }
    assert!(!fixture.target().is_replaying());
    for nth in 300..1000 {
        assert_eq!(fixture.read((nth * 7) % 701 * BLOCK, 512), [nth as u8 ^ 0x55; 512], "{nth}");
    }
}

#[test]
fn a_damaged_copy_that_a_read_dropped_does_not_give_way_to_an_older_one() {
    let mut fixture = opened_late("C B 2 data_crc true", 60, 0);
    fixture.write(5 * BLOCK, &[6; BLOCK as usize], true);
    fixture.target().set_draining(true);
    fixture.tick(SECOND);
    assert!(fixture.target().is_replaying() && fixture.fact("dirty_bytes") == 0);
    // The newer copy rots.
    let image = fixture.pmem.peek(0, fixture.pmem.len_bytes() as usize);
    let at = image.windows(4096).position(|bytes| bytes == [6; 4096]).unwrap();
    fixture.pmem.poke(at as u64, &[7]);
    assert_eq!(fixture.read(5 * BLOCK, BLOCK as usize), [6; BLOCK as usize]);
    assert_eq!(fixture.target().cached_bytes_in(5 * BLOCK, BLOCK), 0);
    finish(&mut fixture);
    assert_eq!(fixture.read(5 * BLOCK, BLOCK as usize), [6; BLOCK as usize]);
    assert!(fixture.target().cached_bytes_in(0, 60 * BLOCK) >= 59 * BLOCK);
}

#[test]
fn a_log_that_rots_meanwhile_costs_no_more_than_what_is_clean() {
    let mut fixture = opened_late("C B 0", 60, 20);
    // The first key set, after the format: of clean data.
    let at = 32768;
    let byte = fixture.pmem.peek(at + 30, 1)[0];
    fixture.pmem.poke(at + 30, &[byte ^ 1]);
    finish(&mut fixture);
    assert!(
        notes(&fixture).iter().any(|note| note.contains("a second time")),
        "{:?}",
        notes(&fixture)
    );
    for nth in 0..60 {
        assert_eq!(fixture.read(nth * BLOCK, BLOCK as usize), expected(nth, 20), "{nth}");
    }
    fixture.write(0, &[9; 4096], true);
    assert_eq!(fixture.read(0, 4096), [9; 4096]);
    fixture.drain();
    assert_eq!(fixture.disk.image()[2 * BLOCK as usize..3 * BLOCK as usize], expected(2, 20));
    assert_eq!(fixture.disk.image()[..4096], [9; 4096]);
}

#[test]
fn damage_that_the_attach_finds_is_refused_as_ever() {
    let mut fixture = opened_late("C B 0", 60, 20);
    fixture.kill();
    // A key of the clean part, with its key set, names a segment that is not there.
    let at = 32768;
    let mut set = fixture.pmem.peek(at, 64);
    set[24 + 16..24 + 20].copy_from_slice(&77_u32.to_le_bytes());
    let crc = udm::base::crc::pcache_crc(&set[4..]);
    set[..4].copy_from_slice(&crc.to_le_bytes());
    fixture.pmem.poke(at, &set);
    let error = fixture.try_open(false).unwrap_err().to_string();
    assert!(error.contains("data in segment 77"), "{error}");
}

#[test]
fn it_rests_while_suspended_and_begins_again_after_a_death() {
    let mut fixture = opened_late("C B 0", 60, 20);
    fixture.tick(0);
    fixture.target().suspend().unwrap();
    (0..10_000).for_each(|_| fixture.tick(0));
    assert!(fixture.target().is_replaying());
    fixture.target().resume().unwrap();
    fixture.tick(0);
    fixture.write(3 * BLOCK, &[8; BLOCK as usize], false);
    fixture.kill();
    fixture.open();
    assert!(fixture.target().is_replaying());
    assert_eq!(fixture.read(3 * BLOCK, BLOCK as usize), [8; BLOCK as usize]);
    finish(&mut fixture);
    for nth in (0..60).filter(|nth| *nth != 3) {
        assert_eq!(fixture.read(nth * BLOCK, BLOCK as usize), expected(nth, 20), "{nth}");
    }
}
