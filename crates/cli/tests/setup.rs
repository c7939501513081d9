//! `create --origin SLOW --fast FAST`: one step instead of a table. What is chosen, what is
//! refused, what goes on when it is given again, and what it says the kernel would be told.

#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::FileExt;
use std::path::Path;

use common::{Loop, Udm, pattern, read_export, text, write_export};

const MIB: u64 = 1 << 20;

/// A udm with an origin, and a fast device of each sort.
struct Bench {
    udm: Udm,
    memory: tempfile::NamedTempFile,
    _ssd: tempfile::NamedTempFile,
}

impl Bench {
    fn new() -> Bench {
        let udm = Udm::new();
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let memory = tempfile::NamedTempFile::new_in(folder).unwrap();
        memory.as_file().set_len(512 * MIB).unwrap();
        udm.file("slow.img", 64 * MIB);
        // The folder of a test may be in memory, too.
        let ssd = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        ssd.as_file().set_len(32 * MIB).unwrap();
        std::os::unix::fs::symlink(ssd.path(), udm.path("ssd.img")).unwrap();
        Bench { udm, memory, _ssd: ssd }
    }

    fn fast(&self) -> String {
        text(self.memory.path()).to_owned()
    }

    /// `create vol` with more words; it must succeed.
    fn create(&self, words: &[&str]) -> serde_json::Value {
        self.udm.json(&[&["create", "vol", "--origin", "slow.img"], words].concat())
    }

    fn refused(&self, words: &[&str]) -> String {
        let outcome = self.udm.run(&[&["create", "vol", "--origin", "slow.img"], words].concat());
        assert_eq!(outcome.code, 1, "{words:?}: {outcome:?}");
        assert_eq!(outcome.out, "", "{outcome:?}");
        outcome.err
    }
}

#[test]
fn the_fast_device_chooses_the_target() {
    let bench = Bench::new();
    let fast = bench.fast();
    let table = |words: &[&str]| {
        let words = [words, &["--dry-run"]].concat();
        bench.create(&words)["table"].as_str().unwrap().replace(text(&bench.udm.path("")), "/x/")
    };
    assert_eq!(
        table(&["--fast", &fast]),
        format!("0 131072 pcache {fast} /x/slow.img 4 cache_mode writeback data_crc false")
    );
    let on_disk = "0 131072 writecache s /x/slow.img /x/ssd.img 4096 0";
    assert_eq!(table(&["--fast", "ssd.img"]), on_disk);
    assert_eq!(table(&["--fast", "ssd.img", "--mode", "writeback"]), on_disk);
    // How it is to be reached says what it is.
    assert!(table(&["--fast", "ssd.img?persist=msync"]).contains("pcache"));
    assert!(table(&["--fast", &format!("{fast}?io=buffered")]).contains("writecache s"));
    assert!(table(&["--fast", &fast, "--target", "writecache"]).contains("writecache p"));
    assert!(
        table(&["--fast", "ssd.img", "--block-size", "8K"]).ends_with(" 8192 0"),
        "a block size with its unit"
    );
    let part = table(&["--fast", "ssd.img?offset=8M&size=16M"]);
    assert!(part.contains("/x/ssd.img?offset=8M&size=16M"), "{part}");
    assert_eq!(bench.udm.left(), [""; 0], "a dry run leaves nothing");
    assert!(std::fs::read(bench.udm.path("ssd.img")).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn one_command_makes_a_cache_and_again_goes_on() {
    let bench = Bench::new();
    let uri = bench.udm.uri("vol.sock");
    for (fast, target) in [(bench.fast(), "pcache"), ("ssd.img".into(), "writecache")] {
        let words = ["--fast", &fast, "--export", &uri];
        let made = bench.create(&words);
        assert!(made["table"].as_str().unwrap().contains(target), "{made}");
        assert!(made["fast"].as_str().unwrap().contains("is formatted"), "{made}");
        let data = pattern(target.len() as u64, 8 << 20);
        write_export(&bench.udm, &uri, &data);
        // It exists.
        assert!(bench.refused(&words).contains("it exists already"));
        bench.udm.kill_server("vol");
        let again = bench.create(&words);
        assert_eq!(again["table"], made["table"]);
        assert!(again["fast"].as_str().unwrap().contains("goes on"), "{again}");
        assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
        bench.udm.ok(&["remove", "vol"]);
        bench.create(&words);
        assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
        // Another target would overwrite it.
        bench.udm.ok(&["remove", "vol"]);
        let other = if target == "pcache" { "writecache" } else { "pcache" };
        let line = bench.refused(&["--fast", &fast, "--target", other, "--force-format"]);
        assert!(line.contains(&format!("holds a {target}")), "{line}");
        // The table that was printed means the same.
        let table = made["table"].as_str().unwrap();
        bench.udm.ok(&["create", "vol", "--table", table, "--export", &uri]);
        bench.udm.ok(&["remove", "vol", "--drain"]);
        assert!(std::fs::read(bench.udm.path("slow.img")).unwrap()[..8 << 20] == data);
    }
}

#[test]
fn a_cache_of_other_words_is_taken_as_it_is() {
    let bench = Bench::new();
    let fast = bench.fast();
    let sectors = 64 * MIB / 512;
    bench.udm.ok(&[
        "create",
        "vol",
        "--table",
        &format!("0 {sectors} pcache {fast} slow.img 2 data_crc true"),
    ]);
    bench.udm.ok(&["remove", "vol"]);
    let made = bench.create(&["--fast", &fast]);
    assert!(made["table"].as_str().unwrap().ends_with("data_crc true"), "{made}");
    bench.udm.ok(&["remove", "vol"]);
    let line = format!("0 {sectors} writecache s slow.img ssd.img 1024 0");
    bench.udm.ok(&["create", "vol", "--table", &line]);
    bench.udm.ok(&["remove", "vol"]);
    let line = bench.refused(&["--fast", "ssd.img", "--block-size", "4096"]);
    assert!(line.contains("blocks of 1.0 KiB, not 4.0 KiB"), "{line}");
    let made = bench.create(&["--fast", "ssd.img"]);
    assert!(made["table"].as_str().unwrap().ends_with(" 1024 0"), "{made}");
    bench.udm.ok(&["remove", "vol"]);
}

#[test]
fn a_format_that_was_cut_off_is_done_again() {
    let bench = Bench::new();
    let uri = bench.udm.uri("vol.sock");
    // What a format of each sort leaves that ends after its first step: see docs/formats.md.
    let ssd = std::fs::File::options().write(true).open(bench.udm.path("ssd.img")).unwrap();
    ssd.write_all_at(b"udm fmt1", 32).unwrap();
    ssd.write_all_at(&[0xFF; 512], 4096).unwrap();
    let words = ["--fast", "ssd.img", "--export", &uri];
    let made = bench.create(&words);
    assert!(made["table"].as_str().unwrap().contains("writecache s"), "{made}");
    bench.udm.ok(&["remove", "vol"]);
}

#[test]
fn what_may_hold_data_is_refused_with_the_word_that_overrides() {
    let bench = Bench::new();
    let ssd = std::fs::File::options().write(true).open(bench.udm.path("ssd.img")).unwrap();
    ssd.write_all_at(b"SWAPSPACE2", 4086).unwrap();
    let before = std::fs::read(bench.udm.path("ssd.img")).unwrap();
    let told = bench.create(&["--fast", "ssd.img", "--dry-run"]);
    let fate = told["fast"].as_str().unwrap();
    assert!(fate.contains("swap (byte 4086)") && fate.contains("--force-format"), "{told}");
    let line = bench.refused(&["--fast", "ssd.img"]);
    assert!(line.contains("swap (byte 4086)") && line.contains("--force-format"), "{line}");
    assert!(std::fs::read(bench.udm.path("ssd.img")).unwrap() == before);
    bench.create(&["--fast", "ssd.img", "--force-format"]);
    bench.udm.ok(&["remove", "vol"]);
}

#[test]
fn slips_are_refused_before_anything_is_written() {
    let bench = Bench::new();
    let fast = bench.fast();
    bench.udm.file("other.img", 64 * MIB);
    std::fs::hard_link(bench.udm.path("slow.img"), bench.udm.path("same.img")).unwrap();
    for (words, what) in [
        (&["--fast", "slow.img"][..], "are the same device"),
        (&["--fast", "same.img"], "are the same device"),
        (&["--fast", "none.img"], "none.img"),
        (&["--fast", "ssd.img?readonly"], "writes to both"),
        (&["--fast", "ssd.img?offset=32M"], "ssd.img?offset=65536"),
        (&["--fast", "ssd.img", "--block-size", "1000"], "power of two"),
        (&["--fast", "ssd.img", "--mode", "writethrough"], "no mode writethrough"),
        (&["--fast", &fast, "--mode", "writethrough"], "no mode writethrough"),
        (&["--fast", &fast, "--block-size", "4K"], "no blocks of one size"),
    ] {
        let line = bench.refused(words);
        assert!(line.contains(what), "{words:?}: {line}");
    }
    for words in [
        &["create", "vol", "--origin", "slow.img"][..],
        &["create", "vol", "--fast", "ssd.img"],
        &["create", "vol", "--table", "0 8 zero", "--dry-run"],
        &["create", "vol", "--table", "0 8 zero", "--origin", "slow.img", "--fast", "ssd.img"],
        &["create", "vol", "--origin", "slow.img", "--fast", "ssd.img", "--target", "linear"],
        &["create", "vol", "--origin", "slow.img", "--fast", "ssd.img", "--block-size", "big"],
    ] {
        assert_eq!(bench.udm.run(words).code, 2, "{words:?}");
    }
    // A cache of another origin, and the two swapped.
    let uri = bench.udm.uri("vol.sock");
    bench.create(&["--fast", "ssd.img", "--export", &uri]);
    write_export(&bench.udm, &uri, &pattern(1, 4 << 20));
    bench.udm.ok(&["suspend", "vol"]);
    bench.udm.ok(&["remove", "vol"]);
    let outcome = bench.udm.run(&["create", "vol", "--origin", "other.img", "--fast", "ssd.img"]);
    assert!(outcome.code == 1 && outcome.err.contains("rebind true"), "{outcome:?}");
    let outcome = bench.udm.run(&["create", "vol", "--origin", "ssd.img", "--fast", "other.img"]);
    assert!(outcome.code == 1 && outcome.err.contains("swapped"), "{outcome:?}");
    assert!(std::fs::read(bench.udm.path("other.img")).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn an_origin_that_is_no_whole_number_of_blocks_is_cached_whole() {
    let bench = Bench::new();
    let origin = bench.udm.file("slow.img", 64 * MIB + 1536);
    let uri = bench.udm.uri("vol.sock");
    let made = bench.create(&["--fast", "ssd.img", "--export", &uri]);
    assert!(made["table"].as_str().unwrap().ends_with(" 512 0"), "{made}");
    assert!(made["table"].as_str().unwrap().starts_with("0 131075 "), "{made}");
    let data = pattern(1, (64 << 20) + 1536);
    std::fs::write(bench.udm.path("to-write"), &data).unwrap();
    common::client(
        "nbdcopy",
        &["--flush", text(&bench.udm.path("to-write")), &common::for_clients(&uri)],
    );
    bench.udm.ok(&["remove", "vol", "--drain"]);
    assert!(std::fs::read(origin).unwrap() == data);
}

#[test]
fn the_kernel_is_told_the_same() {
    let bench = Bench::new();
    let lines = |words: &[&str]| {
        let words = [words, &["--dry-run"]].concat();
        let made = bench.create(&words);
        let lines = made["kernel"].as_array().unwrap().clone();
        let folder = format!("{}/", text(&bench.udm.path("")).trim_end_matches('/'));
        lines.iter().map(|line| line.as_str().unwrap().replace(&folder, "/x/")).collect::<Vec<_>>()
    };
    assert_eq!(
        lines(&["--fast", "ssd.img?offset=1M&size=8M"]),
        [
            "origin=$(losetup --find --show /x/slow.img)",
            "fast=$(losetup --find --show --offset 1048576 --sizelimit 8388608 /x/ssd.img)",
            "dmsetup create vol --table \"0 131072 writecache s $origin $fast 4096 0\"",
        ]
    );
    // A block device is named as it is, and a part of it is a linear device.
    let Some(device) = Loop::attach(&bench.udm.path("ssd.img"), &[]) else { return };
    let node = text(&device.0);
    let part = format!("{node}?offset=2048&size=16M");
    assert_eq!(
        lines(&["--fast", &part])[1..],
        [
            format!("dmsetup create vol-fast --table \"0 32768 linear {node} 2048\""),
            "dmsetup create vol --table \"0 131072 writecache s $origin /dev/mapper/vol-fast 4096 \
             0\""
            .into(),
        ]
    );
    assert!(lines(&["--fast", node])[1].contains(&format!("$origin {node} 4096")));
}
