//! A background that sleeps until a later time is woken by what lets waiting clients go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::DiskIo;
use udm::target::{Target, Wake};

use crate::fixture::Fixture;

/// The background would look again in minutes.
const TABLE: &str = "s O C 4096 2 max_age 3600000 atomic_blocks false";
const BLOCK: u64 = 4096;

/// Counts how often the background is woken.
#[derive(Default)]
struct Calls(AtomicU64);

impl Wake for Calls {
    fn wake(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A cache whose slots all have committed data of the first blocks, and their number.
fn full() -> (Fixture, Arc<Calls>, u64) {
    let mut fixture = Fixture::new(TABLE, 8 * BLOCK, 64 * BLOCK);
    fixture.open();
    let slots = fixture.status(3);
    assert!((2..=16).contains(&slots), "{slots} slots");
    fixture.write(0, &vec![1; (slots * BLOCK) as usize], true);
    assert_eq!(fixture.status(3), 0);
    let calls = Arc::new(Calls::default());
    fixture.target().events().unwrap().set_background(Some(calls.clone()));
    (fixture, calls, slots)
}

/// Sends a request that moves all blocks, and holds its I/O; then another client's write waits for
/// a slot, and the background finds no work.
fn meanwhile_a_write_waits(fixture: &mut Fixture, bio: Bio, held: fn(&DiskIo) -> bool) {
    fixture.holds = Box::new(held);
    fixture.submit(bio);
    fixture.settle();
    assert_eq!(fixture.held.len(), 1);
    let other = Buffer::from_bytes(&[3; BLOCK as usize]);
    fixture.submit(Bio::write(40 * BLOCK, other, false, 2));
    fixture.tick(1);
    fixture.tick(1);
    assert_eq!(fixture.port.parked.len(), 1);
}

fn is_woken(fixture: &mut Fixture, calls: &Calls) {
    let before = calls.0.load(Ordering::SeqCst);
    fixture.release();
    assert!(calls.0.load(Ordering::SeqCst) > before, "the background sleeps on");
    // Write-back makes room.
    for _ in 0..5 {
        fixture.tick(1);
    }
    let waiting = fixture.port.parked.pop_front().expect("a write waits");
    fixture.submit(waiting);
    fixture.settle();
    assert!(fixture.port.parked.is_empty(), "there is room");
}

#[test]
fn the_end_of_an_overwrite_wakes_it() {
    let (mut fixture, calls, slots) = full();
    let data = Buffer::from_bytes(&vec![2; (slots * BLOCK) as usize]);
    let is_overwrite = |io: &DiskIo| io.disk.limits().name == "cache" && io.op == Op::Write;
    meanwhile_a_write_waits(&mut fixture, Bio::write(0, data, false, 1), is_overwrite);
    is_woken(&mut fixture, &calls);
}

#[test]
fn the_end_of_a_failed_discard_wakes_it() {
    let (mut fixture, calls, slots) = full();
    let is_zeroing = |io: &DiskIo| io.op == Op::WriteZeroes;
    let bio = Bio::bare(Op::Discard, 0, slots * BLOCK, false, 1);
    meanwhile_a_write_waits(&mut fixture, bio, is_zeroing);
    fixture.refuses = Box::new(is_zeroing);
    is_woken(&mut fixture, &calls);
}

#[cfg(feature = "mutants")]
#[test]
fn every_mutant_that_does_not_wake_it_is_found() {
    use udm::mutants::{Mutant, set};
    for mutant in Mutant::WRITECACHE_WAITS {
        let tests = [the_end_of_an_overwrite_wakes_it, the_end_of_a_failed_discard_wakes_it];
        set(Some(*mutant));
        let is_found = tests.into_iter().any(|test| std::panic::catch_unwind(test).is_err());
        set(None);
        assert!(is_found, "{mutant:?}");
    }
}
