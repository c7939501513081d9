//! Blocks of devices and the lines of tables. Sizes that do not fit are refused before a format, or
//! their end is left out with a note. No export has a size that its clients cannot reach.

use std::os::unix::fs::{FileExt, MetadataExt};

use serde_json::json;

use crate::common::{Loop, Udm, client, for_clients, text};

const MIB: u64 = 1 << 20;

/// A loop device with blocks of 4096 bytes over a file of `len` bytes.
fn big_blocks(udm: &Udm, name: &str, len: u64) -> Option<Loop> {
    Loop::attach(&udm.file(name, len), &["--sector-size", "4096"])
}

#[test]
fn lines_keep_to_the_blocks_of_their_devices() {
    let udm = Udm::new();
    let Some(disk) = big_blocks(&udm, "disk.img", 16 * MIB + 512) else { return };
    let disk = text(&disk.0);
    let file = udm.file("file.img", 16 * MIB + 512);
    let file = text(&file);
    let fast = udm.file("fast.img", 600 * MIB);
    let fast = text(&fast);
    let meta = udm.file("meta.img", 4 * MIB);
    let meta = text(&meta);
    let tables = [
        // A length, a start, an offset there, for each target that has a device.
        format!("0 32769 linear {disk} 0"),
        format!("0 1 zero\n1 8 linear {disk} 0"),
        format!("0 8 linear {disk} 1"),
        format!("0 8 delay {disk} 4 0"),
        format!("0 8 delay {file} 4 0 {disk} 4 0"),
        format!("0 8 flakey {disk} 3 1 1"),
        format!("0 32769 pcache {fast} {disk} 4 cache_mode writeback data_crc false"),
        format!("0 32769 pcache {fast} {disk}?readonly 4 cache_mode writeback data_crc false"),
        format!("0 32769 cache {meta} {fast} {disk} 128 1 writeback smq 0"),
        format!("0 32769 cache {meta} {disk} {file} 128 1 writeback smq 0"),
        format!("0 32769 writecache s {disk} {fast} 4096 0"),
        // Together: the end of a small block is not the end of a large one.
        format!("0 8 linear {disk} 0\n8 1 zero"),
    ];
    for table in &tables {
        let outcome = udm.run(&["create", "vol", "--table", table]);
        assert_eq!(outcome.code, 1, "{table}: {outcome:?}");
        let is_said = outcome.err.contains("not aligned to h/w logical block size 4096")
            || table.contains("?readonly") && outcome.err.contains("readonly");
        assert!(is_said, "{table}: {outcome:?}");
    }
    for path in [fast, meta] {
        let mut begin = [0; 64 << 10];
        std::fs::File::open(path).unwrap().read_exact_at(&mut begin, 0).unwrap();
        assert!(begin.iter().all(|byte| *byte == 0), "{path} was formatted");
    }
    // Whole blocks, and more than one line of a small device in a large block.
    let table = format!("0 3 zero\n3 5 zero\n8 32760 linear {disk} 8");
    udm.ok(&["create", "vol", "--table", &table, "--export", &udm.uri("vol.sock")]);
    let uri = for_clients(&udm.uri("vol.sock"));
    assert_eq!(client("nbdinfo", &["--size", &uri]).trim(), (16 * MIB).to_string());
    let said = udm.refused(&["load", "vol", "--table", &format!("0 9 linear {disk} 0")]);
    assert!(said.contains("length, 9 sectors, is not a multiple of 8"), "{said}");
}

#[test]
fn a_cache_in_one_step_has_whole_blocks_and_says_what_it_leaves_out() {
    for target in ["pcache", "writecache", "cache"] {
        let udm = Udm::new();
        let Some(disk) = big_blocks(&udm, "disk.img", 16 * MIB + 1536) else { return };
        let Some(ssd) = big_blocks(&udm, "ssd.img", 600 * MIB) else { return };
        let file = udm.file("file.img", 16 * MIB + 1536);
        // A disk of large blocks below a file in memory, and a file below an SSD of large blocks.
        let fast = udm.file("fast.img", 600 * MIB);
        for (origin, fast) in [(text(&disk.0), text(&fast)), (text(&file), text(&ssd.0))] {
            let sock = udm.uri("vol.sock");
            let words = ["create", "vol", "--origin", origin, "--fast", fast, "--target", target];
            let outcome = udm.run(&[&words[..], &["--export", &sock]].concat());
            assert_eq!(outcome.code, 0, "{target} {origin}: {outcome:?}");
            // A pcache stores to its origin file, which takes any number of bytes.
            let is_whole = target == "pcache" && origin == text(&file);
            let left_out =
                outcome.err.contains(&format!("{origin}: the last 1536 bytes are unused"));
            assert_eq!(left_out, !is_whole, "{target} {origin}: {outcome:?}");
            let size = if is_whole { 16 * MIB + 1536 } else { 16 * MIB };
            let uri = for_clients(&sock);
            assert_eq!(client("nbdinfo", &["--size", &uri]).trim(), size.to_string());
            // All of it can be written, and written back.
            let data = udm.path("data");
            std::fs::write(&data, vec![7; size as usize]).unwrap();
            client("nbdcopy", &["--flush", text(&data), &uri]);
            udm.ok(&["remove", "vol", "--drain"]);
            let mut end = [0; 512];
            let origin = std::fs::File::open(origin).unwrap();
            origin.read_exact_at(&mut end, size - 512).unwrap();
            assert_eq!(end, [7; 512], "{target}");
        }
    }
}

#[test]
fn last_bytes_that_no_sector_has_are_left_out_with_a_note() {
    let udm = Udm::new();
    let origin = udm.file("origin.img", MIB + 100);
    let origin = text(&origin);
    let fast = udm.file("fast.img", 16 * MIB);
    let note = format!("note: vol: {origin}: the last 100 bytes are unused");
    let create = |words: &[&str]| {
        let outcome = udm.run(&[&["create", "vol"], words].concat());
        assert_eq!(outcome.code, 0, "{words:?}: {outcome:?}");
        outcome.err
    };
    let fast = ["--fast", text(&fast), "--target", "writecache"];
    let said = create(&[&["--origin", origin][..], &fast].concat());
    assert!(said.contains(&note), "{said}");
    udm.ok(&["remove", "vol"]);
    let log = std::fs::read_to_string(udm.runtime().join("vol.log")).unwrap();
    assert!(log.contains("the last 100 bytes are unused"), "{log}");

    let said = create(&["--table", &format!("0 8 zero\n8 2040 linear {origin} 8")]);
    assert!(said.contains(&note), "{said}");
    // A line that ends earlier was meant to, and so was a part.
    for table in [
        format!("0 2047 linear {origin} 0"),
        format!("0 8 linear {origin}?size=8 0"),
        format!("0 2048 error {origin} 0"),
    ] {
        let outcome = udm.run(&["load", "vol", "--table", &table]);
        assert_eq!((outcome.code, outcome.err.as_str()), (0, ""), "{table}");
    }
    let part = udm.run(&["load", "vol", "--table", &format!("0 2047 linear {origin}?offset=1 0")]);
    assert!(part.code == 0 && part.err.contains("the last 100 bytes are unused"), "{part:?}");
    let json = udm.run(&["load", "vol", "--json", "--table", &format!("0 2048 linear {origin} 0")]);
    assert!(json.code == 0 && json.err.contains(&note), "{json:?}");
}

#[test]
fn info_prints_the_limits_that_all_exports_report() {
    let udm = Udm::new();
    let file = udm.file("file.img", MIB);
    let hole = std::fs::metadata(&file).unwrap().blksize();
    let limits = |discard: Option<u64>| {
        json!({
            "block_bytes": 512, "physical_block_bytes": 512, "minimum_io_bytes": 512,
            "optimal_io_bytes": 512, "discard_bytes": discard,
        })
    };
    let table = format!("0 8 error\n8 2048 linear {} 0", text(&file));
    for (name, table, discard) in [("a", "0 8 error", None), ("b", &table, Some(hole))] {
        udm.ok(&["create", name, "--table", table]);
        assert_eq!(udm.json(&["info", name])["limits"], limits(discard), "{table}");
    }
}
