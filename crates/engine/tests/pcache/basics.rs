//! Small test cases, one for each promise.

use std::sync::Arc;

use udm::base::attaching::AttachStep;
use udm::bio::Op;
use udm::disk::RamDisk;
use udm::pcache::layout::Geometry;
use udm::pmem::sim::SimPmem;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::{Fixture, Setup};

#[test]
fn a_fresh_cache_has_the_kernels_bytes() {
    let len = 576 << 20;
    let setup = Setup { geometry: Geometry::KERNEL, cache_bytes: len, ..Setup::small() };
    let mut fixture = Fixture::new(setup);
    assert_eq!(fixture.open().status(), "0 35 35 1 70 1182 0:0 0:0 0:0");
    // Specification 25.1: the complete content of a fresh 576 MiB device.
    let mut expected = vec![
        (4096, "d89d2fee00000000ef96c596fa5eb0652300000000000000".to_string()),
        (12288, "e91115bd01000000000000002300000082110000 00000000".replace(' ', "")),
        (16384, "b0dff56e010000000000000000000000".to_string()),
        (16416, "b0dff56e010000000000000000000000".to_string()),
    ];
    let links = [(0, "318e663b"), (1, "08074459"), (2, "b0ad0184"), (33, "8313618e")];
    for i in 0..35_u64 {
        let at = 20480 + i * 16_777_216;
        if let Some((_, crc)) = links.iter().find(|(nth, _)| *nth == i) {
            expected.push((at, format!("{crc}0200000003000000{:02x}000000", i + 1)));
        }
        expected.push((at + 4096, "fe258dfc010000000200000000000000".to_string()));
        expected.push((at + 8208, "b0dff56e010000000000000000000000".to_string()));
    }
    for (at, hex) in &expected {
        let bytes = fixture.pmem.peek(*at, hex.len() / 2);
        let found: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(&found, hex, "at {at}");
    }
    // Everything else in the metadata is zero.
    for i in 0..35_u64 {
        let at = 20480 + i * 16_777_216;
        let mut meta = fixture.pmem.peek(at, 12288 + 24);
        let link = if i < 34 { 0..16 } else { 0..0 };
        meta[link].fill(0);
        meta[4096..4112].fill(0);
        meta[8208..8224].fill(0);
        assert!(meta.iter().all(|&byte| byte == 0), "segment {i}");
    }
}

#[test]
fn what_was_written_is_read_and_survives_reopening() {
    for table in ["C B 0", "C B 2 data_crc true"] {
        let mut fixture = Fixture::new(Setup::small().table(table));
        fixture.open();
        fixture.write(8192, &[7; 4096], false);
        fixture.write(8704, &[9; 512], true);
        fixture.write((4 << 20) - 1024, &[5; 4096], false);
        let before = fixture.content();
        assert_eq!(before[8192], 7);
        assert_eq!(before[8704], 9);
        assert_eq!(before[9216], 7);
        assert_eq!(before[4 << 20], 5);
        fixture.remove();
        fixture.open();
        assert_eq!(fixture.content(), before);
        fixture.drain();
        assert_eq!(fixture.disk.image(), before);
    }
}

#[test]
fn a_killed_server_loses_no_completed_write() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    for block in 0..40_u64 {
        fixture.write(block * 300 * 512, &[block as u8 + 1; 1024], false);
    }
    let before = fixture.content();
    fixture.kill();
    fixture.open();
    assert_eq!(fixture.content(), before);
    fixture.drain();
    assert_eq!(fixture.disk.image(), before);
}

#[test]
fn discards_and_zeroes_read_as_zeroes_and_survive() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.disk.load_image(&vec![0xEE; 12 << 20]);
    fixture.open();
    fixture.write(0, &[1; 64 << 10], false);
    fixture.zero(Op::Discard, 4096, 8192, false);
    fixture.zero(Op::WriteZeroes, 512 * 41, 512, true);
    fixture.zero(Op::Discard, 3 << 20, 4 << 20, true);
    let before = fixture.content();
    assert!(before[4096..12288].iter().all(|&byte| byte == 0));
    assert!(before[3 << 20..7 << 20].iter().all(|&byte| byte == 0));
    assert_eq!((before[512 * 41 - 1], before[512 * 41], before[512 * 42]), (1, 0, 1));
    fixture.kill();
    fixture.open();
    assert_eq!(fixture.content(), before);
    fixture.drain();
    assert_eq!(fixture.disk.image(), before);
}

#[test]
fn a_discard_with_fua_is_durable_where_its_last_part_needs_no_key() {
    let setup = Setup::small();
    let pmem = Arc::new(SimPmem::new(setup.cache_bytes, setup.persistence));
    let disk = Arc::new(RamDisk::new(setup.backing_bytes, 512).with_holes());
    let mut fixture = Fixture::over(setup, pmem, disk);
    fixture.open();
    fixture.write(0, &[1; 8192], true);
    fixture.write(5 << 20, &[1; 4096], true);
    // From data into a hole, and over a region's border.
    fixture.zero(Op::Discard, 4096, 6 << 20, true);
    fixture.pmem = Arc::new(fixture.pmem.snapshot_durable());
    fixture.kill();
    fixture.reboot();
    fixture.open();
    let after = fixture.content();
    assert!(after[..4096].iter().all(|&byte| byte == 1));
    assert!(after[4096..].iter().all(|&byte| byte == 0));
}

#[test]
fn write_back_begins_by_itself_and_the_device_falls_asleep() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(0, &[1; 4096], false);
    for _ in 0..6 {
        fixture.tick(SECOND);
    }
    assert_eq!(fixture.target().dirty().bytes, 0);
    let mut port = udm::target::Port::new(0);
    assert_eq!(fixture.target().tick(fixture.now + SECOND, &mut port), None, "no work");
}

#[test]
fn messages_are_the_kernels() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    let message = |fixture: &Fixture, words: &[&str]| {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        fixture.target().message(&words)
    };
    assert_eq!(message(&fixture, &["GC_percent", "+0"]).unwrap(), "");
    assert!(fixture.target().status().contains(" 0 2 "), "{}", fixture.target().status());
    for words in [&["gc_percent", "91"][..], &["gc_percent"], &["x", "1"], &["gc_percent", "-1"]] {
        assert_eq!(message(&fixture, words).unwrap_err().kind().errno(), 22, "{words:?}");
    }
    fixture.write(0, &[1; 512], false);
    fixture.kill();
    fixture.open();
    assert!(fixture.target().status().contains(" 0 2 "), "{}", fixture.target().status());
    assert_eq!(fixture.read(0, 512), [1; 512], "shared memory still matched the media");
}

#[test]
fn facts_count_what_is_cached_and_what_is_dirty() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(8192, &[7; 4096], false);
    fixture.write(8704, &[9; 512], false);
    fixture.write(1 << 20, &[5; 1536], true);
    let number = |fixture: &Fixture, name: &str| {
        let facts = fixture.target().facts();
        let fact = facts.into_iter().find(|fact| fact.name == name).unwrap();
        match fact.value {
            udm::target::FactValue::Number(value) => value,
            other => panic!("{name} is {other:?}"),
        }
    };
    assert_eq!(number(&fixture, "cached_bytes"), 4096 + 1536);
    assert_eq!(number(&fixture, "dirty_bytes"), 4096 + 512 + 1536);
    fixture.drain();
    assert_eq!(number(&fixture, "cached_bytes"), 4096 + 1536);
    assert_eq!(number(&fixture, "dirty_bytes"), 0);
}

#[test]
fn an_attach_says_how_many_keys_it_has_read() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    assert_eq!(fixture.progress.look().map(|step| step.done), Some(0));
    (0..9).for_each(|nth| fixture.write(nth * 8192, &[1; 4096], false));
    fixture.remove();
    fixture.open();
    let expected = AttachStep { what: "keys of the log", done: 9, total: None };
    assert_eq!(fixture.progress.look(), Some(expected));
}
