//! Acknowledged writes that a dead server left in shared memory, and a medium that cannot be
//! recognised as theirs: never dropped in silence.

use std::sync::Arc;

use udm::error::Kind;
use udm::pcache::inspect::inspect;
use udm::pmem::sim::SimPmem;
use udm::target::{FactValue, Target};

use crate::builder::cache_info;
use crate::world::{Setup, World};

const ACCEPT: &str = "C B 0 lost_memory accept";

/// A server that stored cache_info and its label more than once, and was killed with one flushed
/// and two unflushed writes. Slot 0 of cache_info is the current one.
fn killed() -> World {
    let mut world = World::new(Setup::small());
    world.disk.load_image(&vec![0xEE; 12 << 20]);
    world.open();
    world.remove();
    world.open();
    world.target().message(&["gc_percent".into(), "80".into()]).unwrap();
    world.remove();
    world.open();
    world.write(0, &[1; 4096], true);
    world.write(8192, &[2; 4096], false);
    world.write(4 << 20, &[3; 512], false);
    world.kill();
    world
}

pub fn notes(world: &World) -> Vec<String> {
    let facts = world.target().facts();
    let notes = facts.into_iter().filter(|fact| fact.name == "attach_note");
    notes.map(|note| if let FactValue::Text(text) = note.value { text } else { panic!() }).collect()
}

/// Opens, and expects a refusal that names what would be lost, twice; then goes on without it.
fn refused_until_told(mut world: World, damaged: &str) {
    for _ in 0..2 {
        let before = world.pmem.image();
        let error = world.try_open(false).unwrap_err();
        assert_eq!(error.kind(), Kind::Io, "{error}");
        let text = error.to_string();
        for words in ["2 writes (4.5 KiB)", damaged, "lost_memory accept"] {
            assert!(text.contains(words), "'{words}' is not in: {text}");
        }
        assert!(world.pmem.image() == before, "a refused medium is not touched");
    }
    world.setup.table = ACCEPT;
    world.open();
    assert!(matches!(&notes(&world)[..], [note] if note.contains("2 writes (4.5 KiB)")));
    assert_eq!(world.read(0, 4096), [1; 4096], "what was flushed");
    assert_eq!(world.read(8192, 4096), [0xEE; 4096]);
    world.remove();
    world.setup.table = "C B 0";
    world.open();
    assert!(notes(&world).is_empty(), "said once");
}

#[test]
fn what_is_recognised_is_taken_up_without_a_word() {
    let mut world = killed();
    world.open();
    assert_eq!(world.read(8192, 4096), [2; 4096]);
    assert!(notes(&world).is_empty());
}

#[test]
fn rot_of_the_current_cache_info_is_not_silent() {
    let world = killed();
    assert_eq!(&world.pmem.peek(8192 + 4, 1)[..], [2], "slot 0 is the current one");
    world.pmem.corrupt(8192 + 16, |byte| byte ^ 1);
    refused_until_told(world, "cache_info");
}

#[test]
fn rot_of_the_current_label_is_not_silent() {
    let mut world = killed();
    let sequence = |slot: u64| world.pmem.peek(slot * 2048 + 4, 1)[0];
    let current = u64::from(sequence(1) > sequence(0));
    world.pmem.corrupt(current * 2048 + 100, |byte| byte ^ 1);
    // The other one says the same.
    world.open();
    assert_eq!(world.read(8192, 4096), [2; 4096]);
    assert!(notes(&world).is_empty());
    world.write(8192, &[4; 4096], false);
    world.kill();
    [100, 2148].into_iter().for_each(|at| world.pmem.corrupt(at, |byte| byte ^ 1));
    let text = world.try_open(false).unwrap_err().to_string();
    assert!(text.contains("both copies of the label are damaged"), "{text}");
    world.setup.table = ACCEPT;
    world.open();
    assert_eq!(world.read(8192, 4096), [2; 4096], "what was logged");
}

#[test]
fn a_medium_put_back_to_an_older_copy_of_itself_is_recognised() {
    for is_logged in [false, true] {
        let mut world = killed();
        world.open();
        let old = world.pmem.crash_with(|_, words| words);
        world.write(0, &[7; 512], is_logged);
        world.write(16384, &[8; 4096], false);
        world.kill();
        let newest = std::mem::replace(&mut world.pmem, Arc::new(old));
        let before = world.pmem.image();
        let error = world.try_open(false).unwrap_err();
        assert_eq!(error.kind(), Kind::Refused, "{error}");
        let what = if is_logged { "its log ends at" } else { "the data of a write of" };
        let text = error.to_string();
        assert!(text.contains(what) && text.contains("lost_memory accept"), "{text}");
        assert!(world.pmem.image() == before, "a refused medium is not touched");
        let old = std::mem::replace(&mut world.pmem, newest);
        world.open();
        assert_eq!(world.read(16384, 4096), [8; 4096], "the newest one has it all");
        world.remove();
        world.pmem = old;
        world.setup.table = ACCEPT;
        world.open();
        assert!(matches!(&notes(&world)[..], [note] if note.contains("LOST")));
        assert_eq!(world.read(8192, 4096), [2; 4096], "what the copy has");
        assert_eq!(world.read(16384, 4096), [0xEE; 4096]);
    }
}

#[test]
fn memory_that_should_be_there_is_not_done_without() {
    let mut world = killed();
    let left = world.shared.clone();
    world.shared = udm::shm::SharedWords::private(left.words().len()).in_boot(left.boot());
    for is_forced in [false, true] {
        let error = world.try_open(is_forced).unwrap_err();
        assert!(error.to_string().contains("lost_memory accept"), "{error}");
    }
    world.shared = left;
    let error = world.try_open(true).unwrap_err().to_string();
    assert!(error.contains("4.5 KiB that it had acknowledged are in memory"), "{error}");
    world.open();
    assert_eq!(world.read(8192, 4096), [2; 4096]);
    assert!(notes(&world).is_empty());
}

#[test]
fn the_last_boot_is_told_of_and_nothing_of_it_believed() {
    let mut world = killed();
    world.reboot();
    world.open();
    assert!(matches!(&notes(&world)[..], [note] if note.contains("started again")));
    assert_eq!(world.read(0, 4096), [1; 4096], "what was flushed");
    world.remove();
    world.reboot();
    world.open();
    assert!(notes(&world).is_empty(), "it was detached in order");
}

#[test]
fn rot_without_unflushed_writes_needs_no_word() {
    let mut world = killed();
    world.open();
    world.flush();
    world.kill();
    world.pmem.corrupt(8192 + 16, |byte| byte ^ 1);
    world.open();
    assert!(notes(&world).is_empty());
    assert_eq!(world.read(8192, 4096), [2; 4096]);
}

#[test]
fn a_kernel_that_attached_since_costs_unflushed_writes_and_is_told() {
    let mut world = killed();
    let flags = world.pmem.peek(8192 + 16, 4);
    let flags = u32::from_le_bytes(flags.try_into().unwrap());
    world.pmem.poke(8192 + 4096, &cache_info(3, 0, 24, flags));
    world.open();
    assert!(matches!(&notes(&world)[..], [note] if note.contains("LOST")), "{:?}", notes(&world));
    assert_eq!(world.read(8192, 4096), [0xEE; 4096]);
}

#[test]
fn another_medium_in_the_same_place_gets_nothing() {
    let mut world = killed();
    world.pmem = Arc::new(SimPmem::new(world.setup.cache_bytes, world.setup.persistence));
    world.open();
    assert!(notes(&world).is_empty(), "{:?}", notes(&world));
    assert_eq!(world.read(8192, 4096), [0xEE; 4096]);
}

#[test]
fn keys_that_were_logged_and_whose_segment_was_reused_are_not_taken_up() {
    // A thread logs the keys of its set, and loses its processor before it empties the set. What
    // others do meanwhile needs none of its locks: they collect what it logged, and reuse the
    // segment. Then the process dies.
    let mut world = World::new(Setup::small().table("C B 2 retention fifo"));
    world.open();
    world.target().message(&["gc_percent".into(), "0".into()]).unwrap();
    world.write(0, &[1; 4096], false);
    let words =
        || world.shared.words().iter().map(|word| word.load(std::sync::atomic::Ordering::SeqCst));
    let left: Vec<u64> = words().collect();
    for nth in 1..=90 {
        world.write(nth << 12, &[2; 4096], nth % 30 == 0);
    }
    world.drain();
    world.tick(2_000_000_000);
    assert!(world.fact("recycled_segments_total") > 3, "its segment is free");
    for nth in 1..=240 {
        world.write((nth % 90) << 12, &[3; 4096], nth % 30 == 0);
    }
    world.drain();
    world.kill();
    // The sets, not what stands in front of them.
    for (word, value) in world.shared.words().iter().zip(left).skip(16) {
        word.store(value, std::sync::atomic::Ordering::SeqCst);
    }
    world.open();
    assert_eq!(world.target().dirty().bytes, 0, "nothing of it is in the cache any more");
    for nth in 0..90 {
        assert!(world.read(nth << 12, 4096) == [3; 4096], "block {nth}");
    }
    world.write(0, &[4; 4096], true);
    world.drain();
    world.remove();
    let report = inspect(world.pmem.clone(), world.setup.geometry).unwrap();
    assert_eq!(report.stale_keys, 0, "keys of reused segments are not logged again");
}
