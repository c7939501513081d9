//! What is not opened: foreign devices, wrong sizes, another origin.

use std::sync::Arc;

use udm::disk::SimDisk;
use udm::error::Kind;

use crate::basics::in_both_modes;
use crate::world::World;

const MIB: u64 = 1 << 20;

fn refusal(world: &mut World) -> (Kind, String) {
    let error = world.try_open(false).unwrap_err();
    (error.kind(), error.to_string())
}

#[test]
fn what_may_hold_data_is_not_formatted() {
    in_both_modes("4096 0", |mut world| {
        world.cache.poke(5000, b"precious");
        let (kind, text) = refusal(&mut world);
        assert_eq!(kind, Kind::Refused, "{text}");
        assert_eq!(world.cache.peek(0, 64), [0; 64]);
        world.try_open(true).unwrap();
        world.write(0, &[1; 4096], true);
        world.kill();
        let error = world.try_open(true).unwrap_err().to_string();
        assert!(error.contains("dirty blocks"), "{error}");
        world.open();
        assert_eq!(world.read(0, 4096), [1; 4096]);
    });
}

#[test]
fn dirty_blocks_of_another_origin_are_refused() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 4096], true);
        world.remove();
        let mine = world.origin.clone();
        world.origin = Arc::new(SimDisk::new(4 * MIB, 512).named("another"));
        let (kind, text) = refusal(&mut world);
        assert!(kind == Kind::Refused && text.contains("caches another origin"), "{text}");
        world.origin = mine;
        world.open();
        world.drain();
        world.remove();
        // Without dirty blocks it belongs to nobody.
        world.origin = Arc::new(SimDisk::new(4 * MIB, 512).named("another"));
        world.open();
        world.write(0, &[2; 4096], true);
        world.remove();
        world.origin = Arc::new(SimDisk::new(4 * MIB, 512).named("moved"));
        world.table = format!("{} rebind true", world.table);
        world.open();
        assert_eq!(world.read(0, 4096), [2; 4096]);
    });
}

/// A server that died with writes that no entry names yet: they are dirty blocks as any others.
#[test]
fn writes_in_memory_alone_do_not_go_to_another_origin() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 4096], false);
        world.kill();
        let mine = world.origin.clone();
        world.origin = Arc::new(SimDisk::new(4 * MIB, 512).named("another"));
        let (kind, text) = refusal(&mut world);
        assert!(kind == Kind::Refused && text.contains("caches another origin"), "{text}");
        world.origin = mine;
        world.open();
        assert_eq!(world.read(0, 4096), [1; 4096]);
    });
}

#[test]
fn a_cache_without_a_label_is_a_kernels_and_is_taken() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 4096], true);
        world.remove();
        world.cache.poke(32, &[0; 32]);
        world.origin = Arc::new(SimDisk::new(4 * MIB, 512).named("another"));
        world.open();
        assert_eq!(world.read(0, 4096), [1; 4096]);
    });
}

#[test]
fn the_label_stays_through_commits() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        let label = world.cache.peek(32, 32);
        assert_ne!(label, [0; 32]);
        world.write(0, &[1; 4096], true);
        world.write(0, &[1; 4096], true);
        world.suspend();
        assert_eq!(world.cache.peek(32, 32), label);
        world.remove();
        assert_ne!(world.cache.peek(32, 32), label, "it is at rest");
    });
}

#[test]
fn sizes_that_do_not_fit_are_named() {
    let wrong = |table: &str, cache_bytes, origin_bytes, words: &str| {
        for mode in ["p", "s"] {
            let mut world = World::new(&format!("{mode} {table}"), cache_bytes, origin_bytes);
            let (_, text) = refusal(&mut world);
            assert!(text.contains(words), "{text}");
        }
    };
    wrong("O C 4096 0", 4096, MIB, "Unable to initialize device");
    wrong("O C 4096 0", MIB, 2048, "Cannot calculate initial queue limits");
    wrong("O C 4096 2 start_sector 2048", MIB, MIB, "Invalid optional argument");
}

#[test]
fn a_cache_may_start_anywhere() {
    in_both_modes("4096 2 start_sector 3", |mut world| {
        world.cache.poke(0, &[7; 1536]);
        world.open();
        world.write(0, &[1; 65536], false);
        world.remove();
        assert_eq!(world.cache.peek(0, 1536), [7; 1536]);
        assert_eq!(world.cache.peek(1536, 4), [0x21, 0x93, 0x48, 0x23]);
        world.open();
        assert_eq!(world.read(0, 65536), [1; 65536]);
    });
}

#[test]
fn shared_memory_of_another_attach_is_not_believed() {
    in_both_modes("4096 0", |mut world| {
        world.open();
        world.write(0, &[1; 4096], false);
        world.kill();
        let left = world.shared.clone();
        // An opener without that memory is refused, or accepts that it is lost.
        world.shared = udm::shm::SharedWords::private(left.words().len()).in_boot(left.boot());
        let error = world.try_open(false).unwrap_err().to_string();
        assert!(error.contains("lost_memory accept"), "{error}");
        world.table += " lost_memory accept";
        world.open();
        assert!(facts_say(&world, "LOST"));
        world.write(4096, &[2; 4096], true);
        world.remove();
        world.shared = left;
        world.open();
        assert_eq!(world.read(0, 8192), [[0; 4096], [2; 4096]].concat());
        assert!(!facts_say(&world, "LOST"), "that was told");
    });
}

fn facts_say(world: &World, what: &str) -> bool {
    udm::target::Target::facts(world.target())
        .into_iter()
        .any(|fact| matches!(fact.value, udm::target::FactValue::Text(text) if text.contains(what)))
}

#[test]
fn a_medium_put_back_to_an_older_copy_of_itself_is_recognised() {
    for is_committed in [false, true] {
        in_both_modes("4096 0", move |mut world| {
            world.open();
            world.write(0, &[1; 4096], true);
            let old = world.cache.image();
            world.write(4096, &[2; 4096], is_committed);
            world.write(8192, &[3; 4096], false);
            world.kill();
            let newest = world.cache.image();
            world.cache.poke(0, &old);
            let error = world.try_open(false).unwrap_err().to_string();
            assert!(error.contains("older copy") && error.contains("lost_memory"), "{error}");
            world.cache.poke(0, &newest);
            world.open();
            assert_eq!(world.read(8192, 4096), [3; 4096], "the newest one has it all");
            world.remove();
            world.cache.poke(0, &old);
            world.table += " lost_memory accept";
            world.open();
            assert_eq!(world.read(0, 8192), [[1; 4096], [0; 4096]].concat());
        });
    }
}
