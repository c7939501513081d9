//! `create --origin SLOW --fast FAST`: one step instead of a table. Tests the choice of the target,
//! the refusals, a second run with the same arguments, and the printed command for the kernel.

use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::{Loop, Udm, pattern, read_export, text, write_export};

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
        // The folder of a test may be in memory.
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
    assert_eq!(
        table(&["--fast", "ssd.img", "--mode", "writethrough"]),
        "0 131072 cache /x/ssd.img?size=5M /x/ssd.img?offset=5M&size=27M /x/slow.img 128 2 \
         metadata2 writethrough smq 0"
    );
    // The options of the fast device decide its target.
    assert!(table(&["--fast", "ssd.img?persist=msync"]).contains("pcache"));
    assert!(table(&["--fast", &format!("{fast}?io=buffered")]).contains("writecache s"));
    assert!(table(&["--fast", &fast, "--target", "writecache"]).contains("writecache p"));
    assert!(
        table(&["--fast", "ssd.img", "--block-size", "8K"]).ends_with(" 8192 0"),
        "a block size with its unit"
    );
    let part = table(&["--fast", "ssd.img?offset=8M&size=16M"]);
    assert!(part.contains("/x/ssd.img?offset=8M&size=16M"), "{part}");
    assert_eq!(bench.udm.left(), [""; 0], "a dry run leaves no files");
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
        assert!(made["fast"].as_str().unwrap().contains("was formatted"), "{made}");
        let data = pattern(target.len() as u64, 8 << 20);
        write_export(&bench.udm, &uri, &data);
        // It exists.
        assert!(bench.refused(&words).contains("it exists already"));
        bench.udm.kill_server("vol");
        let again = bench.create(&words);
        assert_eq!(again["table"], made["table"]);
        assert!(again["fast"].as_str().unwrap().contains("is reopened"), "{again}");
        assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
        bench.udm.ok(&["remove", "vol"]);
        bench.create(&words);
        assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
        // Another target would overwrite it, with its dirty data.
        write_export(&bench.udm, &uri, &data);
        bench.udm.ok(&["suspend", "vol"]);
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
fn metadata_and_blocks_of_a_cache_share_one_device() {
    let bench = Bench::new();
    let uri = bench.udm.uri("vol.sock");
    let words = ["--fast", "ssd.img", "--target", "cache", "--export", &uri];
    let dry = bench.create(&[&words[..], &["--dry-run"]].concat());
    let here = |value: &serde_json::Value| {
        value.as_str().unwrap().replace(text(&bench.udm.path("")), "/x/")
    };
    assert_eq!(
        here(&dry["table"]),
        "0 131072 cache /x/ssd.img?size=5M /x/ssd.img?offset=5M&size=27M /x/slow.img 128 2 \
         metadata2 writeback smq 0"
    );
    let kernel: Vec<String> = dry["kernel"].as_array().unwrap().iter().map(here).collect();
    assert_eq!(
        kernel,
        [
            "origin=$(losetup --find --show /x/slow.img)",
            "meta=$(losetup --find --show --sizelimit 5242880 /x/ssd.img)",
            "fast=$(losetup --find --show --offset 5242880 --sizelimit 28311552 /x/ssd.img)",
            "dmsetup create vol --table \"0 131072 cache $meta $fast $origin 128 2 metadata2 \
             writeback smq 0\"",
        ]
    );
    let made = bench.create(&words);
    assert_eq!(made["table"], dry["table"]);
    let mut data = pattern(7, 8 << 20);
    // A file system at the front of the origin, which will be at the front of a slot.
    data[4086..4096].copy_from_slice(b"SWAPSPACE2");
    write_export(&bench.udm, &uri, &data);
    bench.udm.kill_server("vol");
    // The content of the medium decides the target without --target, and another target is refused.
    let again = bench.create(&["--fast", "ssd.img", "--export", &uri]);
    assert_eq!(again["table"], made["table"]);
    assert!(again["fast"].as_str().unwrap().contains("is reopened"), "{again}");
    assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
    write_export(&bench.udm, &uri, &data);
    bench.udm.ok(&["suspend", "vol"]);
    bench.udm.ok(&["remove", "vol"]);
    let line = bench.refused(&["--fast", "ssd.img", "--target", "writecache", "--force-format"]);
    assert!(line.contains("holds a cache"), "{line}");
    let line = bench.refused(&["--fast", "ssd.img", "--block-size", "32K"]);
    assert!(line.contains("blocks of 64.0 KiB, not 32.0 KiB"), "{line}");
    assert!(bench.udm.ok(&["inspect", "ssd.img"]).contains("cache metadata"));
    bench.create(&words);
    assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
    let removed = bench.udm.json(&["remove", "vol", "--drain", "--wipe"]);
    assert!(removed["is_wiped"] == true && removed["dirty_bytes"] == 0, "{removed}");
    assert!(std::fs::read(bench.udm.path("slow.img")).unwrap()[..8 << 20] == data);
    assert_eq!(bench.udm.run(&["inspect", "ssd.img"]).code, 1);
    // After the wipe, no old content is in the way of another target.
    bench.create(&["--fast", "ssd.img", "--target", "writecache"]);
    bench.udm.ok(&["remove", "vol", "--drain", "--wipe"]);
    bench.create(&words);
    bench.udm.ok(&["remove", "vol", "--drain", "--wipe"]);
}

#[test]
fn a_cache_that_writes_through_never_has_dirty_data() {
    let bench = Bench::new();
    let uri = bench.udm.uri("vol.sock");
    let words = ["--fast", "ssd.img", "--target", "cache", "--mode", "writethrough"];
    let made = bench.create(&[&words[..], &["--export", &uri, "--block-size", "32K"]].concat());
    assert!(made["table"].as_str().unwrap().contains(" 64 2 metadata2 writethrough smq 0"));
    let data = pattern(3, 8 << 20);
    for _ in 0..3 {
        write_export(&bench.udm, &uri, &data);
        assert!(std::fs::read(bench.udm.path("slow.img")).unwrap()[..8 << 20] == data);
    }
    // The mode is an argument of the table, and no dirty blocks remain for another mode.
    assert_eq!(bench.udm.json(&["remove", "vol"])["dirty_bytes"], 0);
    bench.create(&["--fast", "ssd.img", "--export", &uri]);
    assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
    assert_eq!(bench.udm.json(&["remove", "vol"])["dirty_bytes"], 0);
    // A killed server loses no data either. But blocks of recent writes are marked dirty, because a
    // write makes its block dirty between its two halves. The next server cleans them.
    bench.create(&[&words[..], &["--export", &uri]].concat());
    let data = pattern(4, 8 << 20);
    write_export(&bench.udm, &uri, &data);
    bench.udm.kill_server("vol");
    assert!(std::fs::read(bench.udm.path("slow.img")).unwrap()[..8 << 20] == data);
    bench.create(&["--fast", "ssd.img", "--export", &uri]);
    assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
    assert_eq!(bench.udm.json(&["remove", "vol", "--drain"])["dirty_bytes"], 0);
}

#[test]
fn writethrough_on_a_disk_is_a_cache_that_is_never_dirty() {
    let bench = Bench::new();
    let uri = bench.udm.uri("vol.sock");
    let words = ["--fast", "ssd.img", "--mode", "writethrough", "--export", &uri];
    let made = bench.create(&words);
    let why = "cache, because ssd.img is reached as a disk, and it has the mode that --mode names";
    assert_eq!(made["why"], why, "{made}");
    let data = pattern(3, 8 << 20);
    write_export(&bench.udm, &uri, &data);
    let info = bench.udm.json(&["info", "vol"]);
    assert_eq!(info["dirty_bytes"], 0, "{info}");
    // The origin alone has what was written, and the fast device may die.
    assert!(std::fs::read(bench.udm.path("slow.img")).unwrap()[..8 << 20] == data);
    bench.udm.ok(&["remove", "vol"]);
    // The same arguments open it again, although they could also select another target.
    let made = bench.create(&words);
    assert_eq!(made["why"], "cache, which ssd.img holds");
    assert!(made["table"].as_str().unwrap().contains(" writethrough "), "{made}");
    assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
    bench.udm.ok(&["remove", "vol", "--drain", "--wipe"]);
    // A writecache that is there is not overwritten because of a mode.
    bench.create(&["--fast", "ssd.img"]);
    bench.udm.ok(&["remove", "vol"]);
    let before = std::fs::read(bench.udm.path("ssd.img")).unwrap();
    let line = bench.refused(&["--fast", "ssd.img", "--mode", "writethrough"]);
    assert!(line.contains("writecache: it does not offer mode writethrough"), "{line}");
    assert!(line.trim_end().ends_with("omit --mode"), "{line}");
    assert!(std::fs::read(bench.udm.path("ssd.img")).unwrap() == before);
}

#[test]
fn a_policy_is_taken_and_may_be_another_the_next_time() {
    let bench = Bench::new();
    let uri = bench.udm.uri("vol.sock");
    let words = ["--fast", "ssd.img", "--target", "cache", "--export", &uri];
    let data = pattern(7, 8 << 20);
    for policy in ["probation", "smq", "probation"] {
        let made = bench.create(&[&words[..], &["--policy", policy]].concat());
        assert!(made["table"].as_str().unwrap().trim_end().ends_with(&format!(" {policy} 0")));
        assert!(made["kernel"].to_string().contains(" smq 0"), "{made}");
        write_export(&bench.udm, &uri, &data);
        assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
        bench.udm.ok(&["remove", "vol"]);
    }
    bench.create(&words);
    assert!(read_export(&bench.udm, &uri)[..8 << 20] == data);
    bench.udm.ok(&["remove", "vol", "--drain"]);
    assert!(std::fs::read(bench.udm.path("slow.img")).unwrap()[..8 << 20] == data);
}

#[test]
fn a_cache_on_one_device_takes_nobodys_data() {
    let bench = Bench::new();
    let words = ["--fast", "ssd.img", "--target", "cache"];
    let path = bench.udm.path("ssd.img");
    let ssd = std::fs::File::options().write(true).open(&path).unwrap();
    let before = |at: u64, bytes: &[u8]| {
        ssd.set_len(0).unwrap();
        ssd.set_len(32 * MIB).unwrap();
        ssd.write_all_at(bytes, at).unwrap();
        std::fs::read(&path).unwrap()
    };
    // At its front, where metadata would be; at its end; in the part with the blocks; unknown data.
    let gpt = 32 * MIB - 512;
    for (at, bytes, what) in [
        (4086, &b"SWAPSPACE2"[..], "swap"),
        (gpt, b"EFI PART", "gpt"),
        (5 * MIB + 4086, b"SWAPSPACE2", "swap"),
        (100, b"the user's own", "(byte 0), and is not cache metadata"),
        (8192, b"the user's own", "(byte 8192), and is not cache metadata"),
    ] {
        let image = before(at, bytes);
        let line = bench.refused(&words);
        assert!(line.contains(what) && line.contains("--force-format"), "{line}");
        assert!(std::fs::read(&path).unwrap() == image, "{what}");
    }
    bench.create(&[&words[..], &["--force-format"]].concat());
    bench.udm.ok(&["remove", "vol"]);
    // A server that died in its format left some of it, and no superblock.
    ssd.write_all_at(&[0; 4096], 0).unwrap();
    bench.create(&words);
    bench.udm.ok(&["remove", "vol"]);
    let half = vec![0; 2048];
    ssd.write_all_at(&[0; 4096], 0).unwrap();
    ssd.write_all_at(&half, 3 * 4096 + 2048).unwrap();
    bench.create(&words);
    bench.udm.ok(&["remove", "vol"]);
    // Metadata of a cache whose blocks are elsewhere, and a device that was cut.
    ssd.set_len(16 * MIB).unwrap();
    let line = bench.refused(&words);
    assert!(line.contains("on another device") && line.contains("cut short"), "{line}");
    ssd.set_len(32 * MIB).unwrap();
    bench.create(&words);
    bench.udm.ok(&["remove", "vol", "--drain", "--wipe"]);
    for (words, what) in [
        (&["--block-size", "48K"][..], "not a multiple of 32.0 KiB"),
        (&["--block-size", "4K"], "not a multiple of 32.0 KiB"),
        (&["--fast", "ssd.img?persist=msync"], "persist"),
        (&["--fast", "ssd.img?size=5M"], "metadata and one block of 64.0 KiB take"),
    ] {
        let fast = if words[0] == "--fast" { &[][..] } else { &["--fast", "ssd.img"] };
        let line = bench.refused(&[words, fast, &["--target", "cache"]].concat());
        assert!(line.contains(what), "{words:?}: {line}");
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
    // The state after the first step of an interrupted format, of each target: see docs/formats.md.
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
        (
            &["--fast", "ssd.img", "--target", "writecache", "--mode", "writethrough"],
            "writecache: it does not offer mode writethrough",
        ),
        (&["--fast", &fast, "--mode", "writethrough"], "pcache: it does not offer mode write"),
        (&["--fast", "ssd.img", "--mode", "writethrough", "--block-size", "4K"], "32.0 KiB"),
        (&["--fast", "ssd.img", "--policy", "probation"], "one policy"),
        (&["--fast", &fast, "--block-size", "4K"], "block size is not fixed"),
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
    assert!(outcome.code == 1 && outcome.err.contains("give --rebind"), "{outcome:?}");
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
    crate::common::client(
        "nbdcopy",
        &["--flush", text(&bench.udm.path("to-write")), &crate::common::for_clients(&uri)],
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
    // A table names a whole block device by its path, and a part of it as a linear device.
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
