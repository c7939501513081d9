//! Devices that are not opened: foreign ones, wrong sizes, another origin.

use std::sync::Arc;

use udm::disk::SimDisk;
use udm::error::Kind;
use udm::prng::Prng;
use udm::target::Target;

use crate::basics::in_both_modes;
use crate::fixture::Fixture;

const MIB: u64 = 1 << 20;

fn refusal(fixture: &mut Fixture) -> (Kind, String) {
    let error = fixture.try_open(false).unwrap_err();
    (error.kind(), error.to_string())
}

#[test]
fn what_may_hold_data_is_not_formatted() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.cache.poke(5000, b"precious");
        let (kind, text) = refusal(&mut fixture);
        assert_eq!(kind, Kind::Refused, "{text}");
        assert_eq!(fixture.cache.peek(0, 64), [0; 64]);
        fixture.try_open(true).unwrap();
        fixture.write(0, &[1; 4096], true);
        fixture.kill();
        let error = fixture.try_open(true).unwrap_err().to_string();
        assert!(error.contains("dirty blocks"), "{error}");
        fixture.open();
        assert_eq!(fixture.read(0, 4096), [1; 4096]);
    });
}

#[test]
fn dirty_blocks_of_another_origin_are_refused() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.remove();
        let mine = fixture.origin.clone();
        fixture.origin = Arc::new(SimDisk::new(4 * MIB, 512).named("another"));
        let (kind, text) = refusal(&mut fixture);
        assert!(kind == Kind::Refused && text.contains("belongs to another origin"), "{text}");
        fixture.origin = mine;
        fixture.open();
        fixture.drain();
        fixture.remove();
        // Without dirty blocks it is free.
        fixture.origin = Arc::new(SimDisk::new(4 * MIB, 512).named("another"));
        fixture.open();
        fixture.write(0, &[2; 4096], true);
        fixture.remove();
        fixture.origin = Arc::new(SimDisk::new(4 * MIB, 512).named("moved"));
        fixture.table = format!("{} rebind true", fixture.table);
        fixture.open();
        assert_eq!(fixture.read(0, 4096), [2; 4096]);
    });
}

/// A server that died with writes that no entry names yet: they are dirty blocks as any others.
#[test]
fn writes_in_memory_alone_do_not_go_to_another_origin() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], false);
        fixture.kill();
        let mine = fixture.origin.clone();
        fixture.origin = Arc::new(SimDisk::new(4 * MIB, 512).named("another"));
        let (kind, text) = refusal(&mut fixture);
        assert!(kind == Kind::Refused && text.contains("belongs to another origin"), "{text}");
        fixture.origin = mine;
        fixture.open();
        assert_eq!(fixture.read(0, 4096), [1; 4096]);
    });
}

#[test]
fn a_cache_without_a_label_is_a_kernels_and_is_taken() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.remove();
        fixture.cache.poke(32, &[0; 32]);
        fixture.origin = Arc::new(SimDisk::new(4 * MIB, 512).named("another"));
        fixture.open();
        assert_eq!(fixture.read(0, 4096), [1; 4096]);
    });
}

/// It named an origin, and perhaps memory with acknowledged writes.
#[test]
fn a_damaged_label_is_refused() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.kill();
        let label = fixture.cache.peek(32, 32);
        for at in [0, 4, 8, 16] {
            fixture.cache.poke(32 + at, &[label[at as usize] ^ 1]);
            let (kind, text) = refusal(&mut fixture);
            assert!(kind == Kind::Io && text.contains("the label is damaged (byte 32)"), "{text}");
            assert!(text.contains("lost_memory accept"), "{text}");
            fixture.cache.poke(32 + at, &[label[at as usize]]);
        }
        fixture.cache.poke(32, &[label[0] ^ 1]);
        fixture.table = format!("{} lost_memory accept", fixture.table);
        fixture.open();
        assert_eq!(fixture.read(0, 4096), [1; 4096], "committed data");
    });
}

#[test]
fn the_label_stays_through_commits() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        let label = fixture.cache.peek(32, 32);
        assert_ne!(label, [0; 32]);
        fixture.write(0, &[1; 4096], true);
        fixture.write(0, &[1; 4096], true);
        fixture.suspend();
        assert_eq!(fixture.cache.peek(32, 32), label);
        fixture.remove();
        assert_ne!(fixture.cache.peek(32, 32), label, "it is at rest");
    });
}

#[test]
fn sizes_that_do_not_fit_are_named() {
    let wrong = |table: &str, cache_bytes, origin_bytes, words: &str| {
        for mode in ["p", "s"] {
            let mut fixture = Fixture::new(&format!("{mode} {table}"), cache_bytes, origin_bytes);
            let (_, text) = refusal(&mut fixture);
            assert!(text.contains(words), "{text}");
        }
    };
    wrong("O C 4096 0", 4096, MIB, "Unable to initialize device");
    wrong("O C 4096 0", MIB, 2048, "Cannot calculate initial queue limits");
    wrong("O C 4096 2 start_sector 2048", MIB, MIB, "Invalid optional argument");
}

#[test]
fn a_cache_may_start_anywhere() {
    in_both_modes("4096 2 start_sector 3", |mut fixture| {
        fixture.cache.poke(0, &[7; 1536]);
        fixture.open();
        fixture.write(0, &[1; 65536], false);
        fixture.remove();
        assert_eq!(fixture.cache.peek(0, 1536), [7; 1536]);
        assert_eq!(fixture.cache.peek(1536, 4), [0x21, 0x93, 0x48, 0x23]);
        fixture.open();
        assert_eq!(fixture.read(0, 65536), [1; 65536]);
    });
}

#[test]
fn shared_memory_of_another_attach_is_not_believed() {
    in_both_modes("4096 0", |mut fixture| {
        fixture.open();
        fixture.write(0, &[1; 4096], false);
        fixture.kill();
        let left = fixture.shared.clone();
        // An opener without that memory is refused, or accepts that it is lost.
        fixture.shared = udm::shm::SharedWords::private(left.words().len()).in_boot(left.boot());
        let error = fixture.try_open(false).unwrap_err().to_string();
        assert!(error.contains("lost_memory accept"), "{error}");
        fixture.table += " lost_memory accept";
        fixture.open();
        assert!(facts_say(&fixture, "LOST"));
        fixture.write(4096, &[2; 4096], true);
        fixture.remove();
        fixture.shared = left;
        fixture.open();
        assert_eq!(fixture.read(0, 8192), [[0; 4096], [2; 4096]].concat());
        assert!(!facts_say(&fixture, "LOST"), "the loss was reported before");
    });
}

fn facts_say(fixture: &Fixture, what: &str) -> bool {
    udm::target::Target::facts(fixture.target())
        .into_iter()
        .any(|fact| matches!(fact.value, udm::target::FactValue::Text(text) if text.contains(what)))
}

#[test]
fn a_medium_put_back_to_an_older_copy_of_itself_is_recognised() {
    for is_committed in [false, true] {
        in_both_modes("4096 0", move |mut fixture| {
            fixture.open();
            fixture.write(0, &[1; 4096], true);
            let old = fixture.cache.image();
            fixture.write(4096, &[2; 4096], is_committed);
            fixture.write(8192, &[3; 4096], false);
            fixture.kill();
            let newest = fixture.cache.image();
            fixture.cache.poke(0, &old);
            let error = fixture.try_open(false).unwrap_err().to_string();
            assert!(error.contains("older copy") && error.contains("lost_memory"), "{error}");
            fixture.cache.poke(0, &newest);
            fixture.open();
            assert_eq!(fixture.read(8192, 4096), [3; 4096], "the newest one has it all");
            fixture.remove();
            fixture.cache.poke(0, &old);
            fixture.table += " lost_memory accept";
            fixture.open();
            assert_eq!(fixture.read(0, 8192), [[1; 4096], [0; 4096]].concat());
        });
    }
}

#[test]
fn dirty_blocks_of_a_changed_origin_are_refused() {
    in_both_modes("4096 0", |mut fixture| {
        let table = fixture.table.clone();
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        for _ in 0..3 {
            fixture.remove();
            fixture.open();
        }
        fixture.remove();
        fixture.origin.poke(8192, &[9; 512]);
        let (kind, text) = refusal(&mut fixture);
        let is_told = text.contains("was changed since its cache ended");
        assert!(kind == Kind::Refused && is_told && text.contains("rebind true"), "{text}");
        fixture.table = format!("{table} rebind true");
        fixture.open();
        assert_eq!(fixture.read(0, 4096), [1; 4096]);
        assert_eq!(fixture.read(8192, 4096)[..512], [9; 512]);
        // A server that dies leaves no note, whenever the power goes.
        for seed in 0..8 {
            let mut prng = Prng::new(seed);
            if seed % 2 == 1 {
                fixture.suspend();
                fixture.target().detach();
            }
            fixture.power_cut(&mut prng);
            fixture.table = table.clone();
            fixture.open();
            assert_eq!(fixture.read(0, 4096), [1; 4096]);
        }
        // Nor does one that a kernel has written to: its counter went on.
        fixture.remove();
        let seq = fixture.seq_count() + 1;
        fixture.cache.poke(24, &seq.to_le_bytes());
        fixture.origin.poke(8192, &[7; 512]);
        fixture.open();
        assert_eq!(fixture.read(8192, 4096)[..512], [7; 512]);
    });
}
