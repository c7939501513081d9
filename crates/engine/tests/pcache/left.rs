//! Acknowledged writes that a dead server left in shared memory, and a medium that cannot be
//! recognised as theirs: never dropped in silence.

use std::sync::Arc;

use udm::error::Kind;
use udm::pcache::inspect::inspect;
use udm::pmem::sim::SimPmem;
use udm::target::{FactValue, Target};

use crate::builder::cache_info;
use crate::fixture::{Fixture, Setup};

const ACCEPT: &str = "C B 0 lost_memory accept";

/// A server that stored cache_info and its label more than once, and was killed with one flushed
/// and two unflushed writes. Slot 0 of cache_info is the current one.
fn killed() -> Fixture {
    let mut fixture = Fixture::new(Setup::small());
    fixture.disk.load_image(&vec![0xEE; 12 << 20]);
    fixture.open();
    fixture.remove();
    fixture.open();
    fixture.target().message(&["gc_percent".into(), "80".into()]).unwrap();
    fixture.remove();
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.write(8192, &[2; 4096], false);
    fixture.write(4 << 20, &[3; 512], false);
    fixture.kill();
    fixture
}

pub fn notes(fixture: &Fixture) -> Vec<String> {
    let facts = fixture.target().facts();
    let notes = facts.into_iter().filter(|fact| fact.name == "attach_note");
    notes.map(|note| if let FactValue::Text(text) = note.value { text } else { panic!() }).collect()
}

/// Opens, and expects a refusal that names what would be lost, twice; then goes on without it.
fn refused_until_told(mut fixture: Fixture, damaged: &str) {
    for _ in 0..2 {
        let before = fixture.pmem.image();
        let error = fixture.try_open(false).unwrap_err();
        assert_eq!(error.kind(), Kind::Io, "{error}");
        let text = error.to_string();
        for words in ["2 writes (4.5 KiB)", damaged, "lost_memory accept"] {
            assert!(text.contains(words), "'{words}' is not in: {text}");
        }
        assert!(fixture.pmem.image() == before, "a refused medium is not touched");
    }
    fixture.setup.table = ACCEPT;
    fixture.open();
    assert!(matches!(&notes(&fixture)[..], [note] if note.contains("2 writes (4.5 KiB)")));
    assert_eq!(fixture.read(0, 4096), [1; 4096], "flushed data");
    assert_eq!(fixture.read(8192, 4096), [0xEE; 4096]);
    fixture.remove();
    fixture.setup.table = "C B 0";
    fixture.open();
    assert!(notes(&fixture).is_empty(), "said once");
}

#[test]
fn what_is_recognised_is_taken_up_without_a_word() {
    let mut fixture = killed();
    fixture.open();
    assert_eq!(fixture.read(8192, 4096), [2; 4096]);
    assert!(notes(&fixture).is_empty());
}

#[test]
fn rot_of_the_current_cache_info_is_not_silent() {
    let fixture = killed();
    assert_eq!(&fixture.pmem.peek(8192 + 4, 1)[..], [2], "slot 0 is the current one");
    fixture.pmem.corrupt(8192 + 16, |byte| byte ^ 1);
    refused_until_told(fixture, "cache_info");
}

#[test]
fn rot_of_the_current_label_is_not_silent() {
    let mut fixture = killed();
    let sequence = |slot: u64| fixture.pmem.peek(slot * 2048 + 4, 1)[0];
    let current = u64::from(sequence(1) > sequence(0));
    fixture.pmem.corrupt(current * 2048 + 100, |byte| byte ^ 1);
    // The other one says the same.
    fixture.open();
    assert_eq!(fixture.read(8192, 4096), [2; 4096]);
    assert!(notes(&fixture).is_empty());
    fixture.write(8192, &[4; 4096], false);
    fixture.kill();
    [100, 2148].into_iter().for_each(|at| fixture.pmem.corrupt(at, |byte| byte ^ 1));
    let text = fixture.try_open(false).unwrap_err().to_string();
    assert!(text.contains("both copies of the label are damaged"), "{text}");
    fixture.setup.table = ACCEPT;
    fixture.open();
    assert_eq!(fixture.read(8192, 4096), [2; 4096], "logged data");
}

#[test]
fn a_medium_put_back_to_an_older_copy_of_itself_is_recognised() {
    for is_logged in [false, true] {
        let mut fixture = killed();
        fixture.open();
        let old = fixture.pmem.crash_with(|_, words| words);
        fixture.write(0, &[7; 512], is_logged);
        fixture.write(16384, &[8; 4096], false);
        fixture.kill();
        let newest = std::mem::replace(&mut fixture.pmem, Arc::new(old));
        let before = fixture.pmem.image();
        let error = fixture.try_open(false).unwrap_err();
        assert_eq!(error.kind(), Kind::Refused, "{error}");
        let what = if is_logged { "its log ends at" } else { "the data of a write of" };
        let text = error.to_string();
        assert!(text.contains(what) && text.contains("lost_memory accept"), "{text}");
        assert!(fixture.pmem.image() == before, "a refused medium is not touched");
        let old = std::mem::replace(&mut fixture.pmem, newest);
        fixture.open();
        assert_eq!(fixture.read(16384, 4096), [8; 4096], "the newest one has it all");
        fixture.remove();
        fixture.pmem = old;
        fixture.setup.table = ACCEPT;
        fixture.open();
        assert!(matches!(&notes(&fixture)[..], [note] if note.contains("LOST")));
        assert_eq!(fixture.read(8192, 4096), [2; 4096], "data of the copy");
        assert_eq!(fixture.read(16384, 4096), [0xEE; 4096]);
    }
}

#[test]
fn memory_that_should_be_there_is_not_done_without() {
    let mut fixture = killed();
    let left = fixture.shared.clone();
    fixture.shared = udm::shm::SharedWords::private(left.words().len()).in_boot(left.boot());
    for is_forced in [false, true] {
        let error = fixture.try_open(is_forced).unwrap_err();
        assert!(error.to_string().contains("lost_memory accept"), "{error}");
    }
    fixture.shared = left;
    let error = fixture.try_open(true).unwrap_err().to_string();
    assert!(error.contains("4.5 KiB of acknowledged writes are only in shared memory"), "{error}");
    fixture.open();
    assert_eq!(fixture.read(8192, 4096), [2; 4096]);
    assert!(notes(&fixture).is_empty());
}

#[test]
fn the_last_boot_is_told_of_and_nothing_of_it_believed() {
    let mut fixture = killed();
    fixture.reboot();
    fixture.open();
    assert!(matches!(&notes(&fixture)[..], [note] if note.contains("was rebooted")));
    assert_eq!(fixture.read(0, 4096), [1; 4096], "flushed data");
    fixture.remove();
    fixture.reboot();
    fixture.open();
    assert!(notes(&fixture).is_empty(), "it was detached in order");
}

#[test]
fn rot_without_unflushed_writes_needs_no_word() {
    let mut fixture = killed();
    fixture.open();
    fixture.flush();
    fixture.kill();
    fixture.pmem.corrupt(8192 + 16, |byte| byte ^ 1);
    fixture.open();
    assert!(notes(&fixture).is_empty());
    assert_eq!(fixture.read(8192, 4096), [2; 4096]);
}

#[test]
fn a_kernel_that_attached_since_costs_unflushed_writes_and_is_told() {
    let mut fixture = killed();
    let flags = fixture.pmem.peek(8192 + 16, 4);
    let flags = u32::from_le_bytes(flags.try_into().unwrap());
    fixture.pmem.poke(8192 + 4096, &cache_info(3, 0, 24, flags));
    fixture.open();
    assert!(
        matches!(&notes(&fixture)[..], [note] if note.contains("LOST")),
        "{:?}",
        notes(&fixture)
    );
    assert_eq!(fixture.read(8192, 4096), [0xEE; 4096]);
}

#[test]
fn another_medium_in_the_same_place_gets_nothing() {
    let mut fixture = killed();
    fixture.pmem = Arc::new(SimPmem::new(fixture.setup.cache_bytes, fixture.setup.persistence));
    fixture.open();
    assert!(notes(&fixture).is_empty(), "{:?}", notes(&fixture));
    assert_eq!(fixture.read(8192, 4096), [0xEE; 4096]);
}

#[test]
fn keys_that_were_logged_and_whose_segment_was_reused_are_not_taken_up() {
    // A thread logs the keys of its set, and loses its processor before it empties the set. What
    // others do meanwhile needs none of its locks: they collect what it logged, and reuse the
    // segment. Then the process dies.
    let mut fixture = Fixture::new(Setup::small().table("C B 2 retention fifo"));
    fixture.open();
    fixture.target().message(&["gc_percent".into(), "0".into()]).unwrap();
    fixture.write(0, &[1; 4096], false);
    let words =
        || fixture.shared.words().iter().map(|word| word.load(std::sync::atomic::Ordering::SeqCst));
    let left: Vec<u64> = words().collect();
    for nth in 1..=90 {
        fixture.write(nth << 12, &[2; 4096], nth % 30 == 0);
    }
    fixture.drain();
    fixture.tick(2_000_000_000);
    assert!(fixture.fact("recycled_segments_total") > 3, "its segment is free");
    for nth in 1..=240 {
        fixture.write((nth % 90) << 12, &[3; 4096], nth % 30 == 0);
    }
    fixture.drain();
    fixture.kill();
    // The sets, not what stands in front of them.
    for (word, value) in fixture.shared.words().iter().zip(left).skip(16) {
        word.store(value, std::sync::atomic::Ordering::SeqCst);
    }
    fixture.open();
    assert_eq!(fixture.target().dirty().bytes, 0, "dropped data is in the cache");
    for nth in 0..90 {
        assert!(fixture.read(nth << 12, 4096) == [3; 4096], "block {nth}");
    }
    fixture.write(0, &[4; 4096], true);
    fixture.drain();
    fixture.remove();
    let report = inspect(fixture.pmem.clone(), fixture.setup.geometry).unwrap();
    assert_eq!(report.stale_keys, 0, "keys of reused segments are not logged again");
}
