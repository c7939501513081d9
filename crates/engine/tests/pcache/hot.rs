//! Hot data stays when space is short, over scans and restarts.

use std::cell::Cell;
use std::rc::Rc;

use udm::bio::Op;
use udm::target::Target;
use udm::units::{KIB, MIB, SECOND};

use crate::fixture::{Fixture, Setup};

const HOT: u64 = 16 * KIB;

/// A cache with some data that was read again.
fn warm(table: &'static str) -> Fixture {
    let mut fixture = Fixture::new(Setup::small().table(table));
    // Zeroes would be special: they may be stored once for many keys.
    fixture.disk.load_image(&[0xEE; 12 << 20]);
    fixture.open();
    fixture.write(0, &[7; HOT as usize], true);
    fixture.drain();
    for _ in 0..3 {
        assert_eq!(fixture.read(0, HOT as usize), [7; HOT as usize]);
    }
    fixture
}

/// Reads much more than the cache holds, once.
fn scan(fixture: &mut Fixture, from: u64) {
    for at in (from..from + 4 * MIB).step_by(32 << 10) {
        fixture.read(at, 32 << 10);
        fixture.tick(SECOND / 10);
    }
}

#[test]
fn a_scan_leaves_what_was_read_again() {
    for table in ["C B 0", "C B 2 data_crc true"] {
        let mut fixture = warm(table);
        scan(&mut fixture, 4 * MIB);
        assert!(fixture.fact("moved_bytes_total") >= HOT, "{table}");
        assert_eq!(fixture.target().cached_bytes_in(0, HOT), HOT, "{table}");
        // The next server finds it in the log, and keeps it in its place.
        for round in 0..2 {
            fixture.remove();
            fixture.open();
            scan(&mut fixture, (4 + 4 * round) * MIB);
            assert!(fixture.fact("kept_bytes_total") >= HOT, "{table}");
            assert_eq!(fixture.target().cached_bytes_in(0, HOT), HOT, "{table}, round {round}");
        }
        assert_eq!(fixture.read(0, HOT as usize), [7; HOT as usize]);
    }
}

#[test]
fn the_kernels_policy_forgets_it() {
    let mut fixture = warm("C B 0 retention fifo");
    scan(&mut fixture, 4 * MIB);
    assert_eq!(fixture.target().cached_bytes_in(0, HOT), 0);
    assert_eq!(fixture.read(0, HOT as usize), [7; HOT as usize], "the backing device has it");
}

#[test]
fn what_is_written_again_is_never_older() {
    let mut fixture = warm("C B 0");
    for round in 1..30_u8 {
        fixture.write(u64::from(round % 4) * 4 * KIB, &[round; 4096], round % 3 == 0);
        scan(&mut fixture, 4 * MIB);
        assert_eq!(fixture.read(u64::from(round % 4) * 4 * KIB, 4096), [round; 4096]);
        if round % 7 == 0 {
            fixture.kill();
            fixture.open();
        }
    }
    for block in 0..4_u8 {
        let newest = (0..30).rev().find(|round| round % 4 == block).unwrap();
        assert_eq!(fixture.read(u64::from(block) * 4 * KIB, 4096), [newest; 4096]);
    }
}

/// A block was zeroed, written and zeroed again. The first zeroes and the data are on the backing
/// device, whose next write of the block fails: the last zeroes are dirty while collection passes
/// the key of the first ones, which names the same place.
#[test]
fn collection_of_old_zeroes_leaves_new_ones() {
    for table in ["C B 0", "C B 2 data_crc true"] {
        // The server that wrote them moves them; the next one, which has not read them, drops them.
        for is_next in [false, true] {
            zeroed_again(table, is_next);
        }
    }
}

fn zeroed_again(table: &'static str, is_next: bool) {
    const LEN: u64 = 4 * KIB;
    let mut fixture = Fixture::new(Setup::small().table(table).late());
    fixture.open();
    fixture.is_held = true;
    fixture.zero(Op::WriteZeroes, 0, LEN, true);
    fixture.write(0, &[7; LEN as usize], true);
    fixture.zero(Op::WriteZeroes, 0, LEN, false);
    let is_failing = Rc::new(Cell::new(true));
    let fails = Rc::clone(&is_failing);
    let mut has_data = false;
    fixture.refuses = Box::new(move |io| {
        let is_first = io.op == Op::Write && io.offset == 0;
        has_data |= is_first && io.buffer.as_slice()[0] == 7;
        has_data && is_first && io.buffer.as_slice()[0] == 0 && fails.get()
    });
    fixture.release();
    let zeroes = [0; LEN as usize];
    let what = format!("{table}, by the next server: {is_next}");
    (0..20).for_each(|_| fixture.tick(SECOND / 2));
    assert_eq!(fixture.disk.image()[..zeroes.len()], [7; LEN as usize], "{what}: not written back");
    fill(&mut fixture);
    if is_next {
        fixture.kill();
        fixture.open();
    }
    (0..100).for_each(|_| fixture.tick(SECOND / 100));
    assert!(fixture.fact("collected_keys_total") >= 2, "{what}: no key was collected");
    assert!(fixture.target().dirty().bytes > 0);
    let is_zero = |bytes: &[u8]| bytes[..zeroes.len()] == zeroes;
    assert!(is_zero(&fixture.read(0, zeroes.len())), "{what}: next to the dirty zeroes");
    is_failing.set(false);
    fixture.drain();
    assert!(is_zero(&fixture.read(0, zeroes.len())), "{what}: written back");
    assert!(is_zero(&fixture.disk.image()), "{what}: on the backing device");
}

/// Writes until few segments are free.
fn fill(fixture: &mut Fixture) {
    for at in (4 * MIB..12 * MIB).step_by(32 << 10) {
        if fixture.fact("free_segments") <= 3 {
            return;
        }
        fixture.write(at, &[1; 32 << 10], false);
    }
}

/// A batch ends after the suspend: what collection could pass now would be logged again.
#[test]
fn a_batch_that_ends_after_a_suspend_adds_no_keys() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.disk.load_image(&[0xEE; 12 << 20]);
    fixture.open();
    // Collection cannot pass this key before it is written back.
    fixture.write(8 * MIB, &[1; 4 * KIB as usize], true);
    // Some data that was read again, and is kept, then more than there is space for.
    for end in [512 * KIB, 512 * KIB, 512 * KIB, 2 * MIB] {
        for at in (0..end).step_by(32 << 10) {
            fixture.read(at, 32 << 10);
        }
    }
    fixture.is_held = true;
    while fixture.held.is_empty() {
        fixture.tick(SECOND);
        assert!(fixture.now < 60 * SECOND, "write-back does not begin");
    }
    while !fixture.held.iter().any(|io| io.op == Op::Flush) {
        fixture.release_held();
        assert!(!fixture.held.is_empty(), "the batch has ended");
    }
    let kept =
        |fixture: &Fixture| fixture.fact("kept_bytes_total") + fixture.fact("moved_bytes_total");
    let before = kept(&fixture);
    fixture.target().suspend().unwrap();
    assert!(fixture.target().is_durable());
    fixture.release();
    fixture.tick(SECOND);
    assert!(fixture.target().is_idle());
    assert!(fixture.target().is_durable(), "keys were added after the suspend");
    assert_eq!(kept(&fixture), before);
    fixture.target().detach();
    assert!(fixture.target().is_origin_marked(), "the end is recorded");
}
