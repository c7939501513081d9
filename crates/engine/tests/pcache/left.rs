//! Acknowledged writes that a dead server left in shared memory, and a medium that cannot be
//! recognised as theirs: never dropped in silence.

use std::sync::Arc;

use udm::error::Kind;
use udm::pmem::sim::SimPmem;
use udm::target::{FactValue, Target};

use crate::builder::cache_info;
use crate::world::{Setup, World};

const TRUNCATE: &str = "C B 0 log_damage truncate";

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
        for words in ["2 writes (4.5 KiB)", damaged, "log_damage truncate"] {
            assert!(text.contains(words), "'{words}' is not in: {text}");
        }
        assert!(world.pmem.image() == before, "a refused medium is not touched");
    }
    world.setup.table = TRUNCATE;
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
    let world = killed();
    let sequence = |slot: u64| world.pmem.peek(slot * 2048 + 4, 1)[0];
    let current = u64::from(sequence(1) > sequence(0));
    world.pmem.corrupt(current * 2048 + 100, |byte| byte ^ 1);
    refused_until_told(world, "the label");
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
fn another_medium_in_the_same_place_gets_nothing_and_says_so() {
    let mut world = killed();
    world.pmem = Arc::new(SimPmem::new(world.setup.cache_bytes, world.setup.persistence));
    world.open();
    assert!(matches!(&notes(&world)[..], [note] if note.contains("LOST")), "{:?}", notes(&world));
    assert_eq!(world.read(8192, 4096), [0xEE; 4096]);
}

#[test]
fn a_server_that_died_before_it_served_leaves_nothing_to_complain_of() {
    // It had logged the keys and stored its label, but not cleared the shared memory yet.
    let mut world = killed();
    let words =
        || world.shared.words().iter().map(|word| word.load(std::sync::atomic::Ordering::SeqCst));
    let left: Vec<u64> = words().collect();
    world.open();
    world.kill();
    for (word, value) in world.shared.words().iter().zip(left) {
        word.store(value, std::sync::atomic::Ordering::SeqCst);
    }
    world.open();
    assert!(notes(&world).is_empty(), "{:?}", notes(&world));
    assert_eq!(world.read(8192, 4096), [2; 4096]);
}
