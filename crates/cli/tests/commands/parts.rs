//! Caches and origins that are parts of a file: `?offset=` and `?size=` after a device's name.
//! Everything else that may touch the same file is tried: another server, another word of the same
//! table, another name, a part that overlaps, a part elsewhere.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::{Udm, pattern, read_export, text, write_export};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 64 * MIB;

/// A file whose middle is used, with other people's data on both sides.
struct Shared {
    file: tempfile::NamedTempFile,
    start: u64,
    len: u64,
}

impl Shared {
    fn new(folder: &Path, start: u64, len: u64) -> Shared {
        let file = tempfile::NamedTempFile::new_in(folder).unwrap();
        file.as_file().set_len(2 * start + len).unwrap();
        for at in [0, start + len] {
            file.as_file().write_all_at(&vec![7; start as usize], at).unwrap();
        }
        Shared { file, start, len }
    }

    fn path(&self) -> &str {
        text(self.file.path())
    }

    fn word(&self) -> String {
        format!("{}?offset={}B&size={}M", self.path(), self.start, self.len / MIB)
    }

    /// Whether what is not ours is as it was.
    fn is_untouched(&self) -> bool {
        let mut bytes = vec![0; self.start as usize];
        [0, self.start + self.len].iter().all(|at| {
            self.file.as_file().read_exact_at(&mut bytes, *at).unwrap();
            bytes.iter().all(|byte| *byte == 7)
        }) && self.file.as_file().metadata().unwrap().len() == 2 * self.start + self.len
    }
}

fn memory() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

fn on_disk() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

/// The table of each sort of cache.
fn tables(origin: &str) -> Vec<(Shared, String)> {
    let sectors = ORIGIN_BYTES / 512;
    let pcache = Shared::new(&memory(), 4 * MIB, 512 * MIB);
    let pmem = Shared::new(&memory(), MIB, 32 * MIB);
    let disk = Shared::new(&on_disk(), MIB + 512, 32 * MIB);
    let lines = [
        format!("0 {sectors} pcache {} {origin}", pcache.word()),
        format!("0 {sectors} writecache p {origin} {} 4096 0", pmem.word()),
        format!("0 {sectors} writecache s {origin} {} 4096 0", disk.word()),
    ];
    [pcache, pmem, disk].into_iter().zip(lines).collect()
}

#[test]
fn a_cache_on_a_part_serves_dies_goes_on_and_is_recovered() {
    let udm = Udm::new();
    let origin = Shared::new(&on_disk(), MIB, ORIGIN_BYTES);
    for (cache, table) in tables(&origin.word()) {
        let uri = udm.uri("vol.sock");
        let create = ["create", "vol", "--table", &table, "--export", &uri];
        udm.ok(&create);
        let data = pattern(cache.start, 4 << 20);
        write_export(&udm, &uri, &data);
        udm.kill_server("vol");
        udm.ok(&create);
        assert!(read_export(&udm, &uri)[..4 << 20] == data);
        // The printed table is accepted again.
        let printed = udm.ok(&["table", "vol"]);
        let sector = cache.start / 512;
        assert!(printed.contains(&format!("?offset={sector}&size={}", cache.len / 512)));
        let newer = pattern(cache.start + 1, 2 << 20);
        udm.ok(&["suspend", "vol"]);
        udm.ok(&["resume", "vol"]);
        write_export(&udm, &uri, &newer);
        udm.ok(&["remove", "vol", "--force"]);
        udm.ok(&["create", "vol", "--table", &printed, "--export", &uri]);
        assert!(read_export(&udm, &uri)[..2 << 20] == newer);
        udm.ok(&["remove", "vol"]);
        let found = udm.json(&["inspect", &cache.word()]);
        assert_eq!(found["size_bytes"], cache.len);
        udm.ok(&["recover", &cache.word(), &origin.word()]);
        let mut bytes = vec![0; 4 << 20];
        origin.file.as_file().read_exact_at(&mut bytes, origin.start).unwrap();
        assert!(bytes[..2 << 20] == newer && bytes[2 << 20..] == data[2 << 20..], "{table}");
        assert!(cache.is_untouched() && origin.is_untouched(), "{table}");
    }
}

#[test]
fn a_cache_on_a_part_knows_its_origins_place() {
    let udm = Udm::new();
    let origin = udm.file("origins.img", 2 * ORIGIN_BYTES);
    let [here, there] =
        [0, 64].map(|at| format!("{}?offset={at}M&size={}M", text(&origin), ORIGIN_BYTES / MIB));
    for (here_line, there_line) in tables(&here).into_iter().zip(tables(&there)) {
        let (cache, table) = here_line;
        let other = there_line.1.replace(&there_line.0.word(), &cache.word());
        let uri = udm.uri("vol.sock");
        udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
        write_export(&udm, &uri, &pattern(1, 4 << 20));
        udm.ok(&["suspend", "vol"]);
        udm.kill_server("vol");
        let line = udm.refused(&["create", "vol", "--table", &other]);
        assert!(line.contains("it had another table"), "{line}");
        udm.ok(&["create", "vol", "--table", &table]);
        udm.ok(&["suspend", "vol"]);
        udm.ok(&["remove", "vol"]);
        let line = udm.refused(&["create", "vol", "--table", &other]);
        assert!(line.contains("rebind true"), "{line}");
    }
}

#[test]
fn one_file_belongs_to_one_table_whatever_its_names() {
    let udm = Udm::new();
    let origin = udm.file("origin.img", ORIGIN_BYTES);
    let other = udm.file("other.img", ORIGIN_BYTES);
    let sectors = ORIGIN_BYTES / 512;
    for (cache, table) in tables(text(&origin)) {
        udm.ok(&["create", "vol", "--table", &table]);
        let link = cache.file.path().with_extension("link");
        std::fs::hard_link(cache.path(), &link).unwrap();
        // The unused parts are locked as well: the lock covers the file.
        for word in [
            cache.word(),
            cache.path().to_owned(),
            format!("{}?size=1M", cache.path()),
            format!("{}?offset={}B", text(&link), cache.start + cache.len),
        ] {
            for table in [
                format!("0 {sectors} pcache {word} {}", text(&other)),
                format!("0 {sectors} writecache s {} {word} 4096 0", text(&other)),
                format!("0 8 linear {word} 0"),
            ] {
                let line = udm.refused(&["create", "other", "--table", &table]);
                assert!(line.contains("in use"), "{table}: {line}");
            }
        }
        std::fs::remove_file(&link).unwrap();
        udm.ok(&["remove", "vol"]);
        assert!(cache.is_untouched());
    }
}

#[test]
fn the_words_of_a_table_name_parts_that_do_not_overlap() {
    let udm = Udm::new();
    let both = udm.file("both.img", 128 * MIB);
    std::fs::hard_link(&both, udm.path("link.img")).unwrap();
    let line = |origin: &str, cache: &str| format!("0 65536 writecache s {origin} {cache} 4096 0");
    // Origin and cache on one file, apart.
    let table = line("both.img?size=32M", "link.img?offset=32M&size=32M");
    let uri = udm.uri("vol.sock");
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    let data = pattern(3, 8 << 20);
    write_export(&udm, &uri, &data);
    udm.ok(&["remove", "vol", "--drain"]);
    assert!(std::fs::read(&both).unwrap()[..8 << 20] == data);
    for (origin, cache) in [
        ("both.img?size=32M", "both.img?offset=65535"),
        ("both.img?size=32M", "link.img?offset=31M&size=32M"),
        ("both.img", "link.img?offset=64M"),
        ("both.img", "link.img"),
    ] {
        let error = udm.refused(&["create", "vol", "--table", &line(origin, cache)]);
        assert!(error.contains("overlaps"), "{origin} {cache}: {error}");
    }
    for cache in ["both.img", "both.img?io=buffered"] {
        let error = udm.refused(&["create", "vol", "--table", &line("both.img", cache)]);
        assert!(error.contains("the cache device and the origin are the same"), "{error}");
    }
    // Two caches on one device, by one word and by two.
    let two = |one: &str, other: &str| {
        format!("0 8192 writecache s o1 {one} 4096 0\n8192 8192 writecache s o2 {other} 4096 0\n")
    };
    udm.file("o1", 32 * MIB);
    udm.file("o2", 32 * MIB);
    let cache = "both.img?offset=64M&size=32M";
    let outcome = udm.run(&["create", "vol", "--table", &two(cache, cache)]);
    assert!(
        outcome.code == 1 && outcome.err.contains("needs its device for itself"),
        "{outcome:?}"
    );
    let outcome = udm.run(&["create", "vol", "--table", &two(cache, "link.img?offset=80M")]);
    assert!(outcome.code == 1 && outcome.err.contains("overlaps"), "{outcome:?}");
    let outcome = udm.run(&[
        "create",
        "vol",
        "--table",
        &format!("{}\n65536 8 linear {cache} 0", line("o1", cache)),
    ]);
    assert!(outcome.code == 1 && outcome.err.contains("cache device of another line"));
    udm.ok(&["create", "vol", "--table", &two(cache, "link.img?offset=96M")]);
    udm.ok(&["remove", "vol"]);
    assert!(std::fs::read(&both).unwrap()[..8 << 20] == data, "udm wrote meanwhile");
}

#[test]
fn hostile_parts_are_refused_by_their_word() {
    let udm = Udm::new();
    udm.file("o", ORIGIN_BYTES);
    udm.file("c", 32 * MIB);
    let most = u64::MAX.to_string();
    for options in [
        "offset=",
        "offset=-1",
        "offset=1.5M",
        "offset=513B",
        "offset=32M",
        "offset=31M&size=2M",
        "size=0",
        "size=33M",
        "size=65537",
        "offset=1&offset=2",
        "offset=9007199254740991T",
        &format!("offset={most}"),
        &format!("offset={most}B&size={most}B"),
        "offset=18014398509481983&size=18014398509481983",
    ] {
        for line in [
            format!("0 8 linear c?{options} 0"),
            format!("0 8 writecache s o c?{options} 4096 0"),
            format!("0 8 writecache p o c?{options} 4096 0"),
            format!("0 8 writecache s c?{options} o 4096 0"),
            format!("0 8 pcache c?{options} o"),
        ] {
            let outcome = udm.run(&["create", "vol", "--table", &line]);
            let is_named = outcome.err.contains("table line 1, column ")
                && outcome
                    .err
                    .contains(options.split('&').next().unwrap().split('=').next().unwrap());
            assert!(outcome.code == 1 && is_named, "{line}: {outcome:?}");
        }
    }
    // A mapped medium begins at a page.
    let line = udm.run(&["create", "vol", "--table", "0 8 pcache c?offset=1 o"]).err;
    assert!(line.contains("begin at multiples of 4096 bytes"), "{line}");
}

#[test]
fn a_part_that_holds_something_or_lies_in_something_is_not_formatted() {
    let udm = Udm::new();
    udm.file("o", ORIGIN_BYTES);
    let cache = udm.file("c", 64 * MIB);
    let file = std::fs::File::options().write(true).open(&cache).unwrap();
    // A swap area within a part, and one on all of it.
    let table = |part: &str| format!("0 8192 writecache s o c?{part} 4096 0");
    udm.ok(&["create", "vol", "--table", &table("offset=8M&size=8M")]);
    udm.ok(&["remove", "vol"]);
    file.write_all_at(b"SWAPSPACE2", 24 * MIB + 4086).unwrap();
    let line = udm.refused(&["create", "vol", "--table", &table("offset=24M&size=8M")]);
    assert!(line.contains("swap (byte 4086)") && line.contains("--force-format"), "{line}");
    // A table that forgets the part, or takes another one around it, does not format over it.
    for part in ["size=64M", "offset=4M&size=32M", "size=9M"] {
        let line = udm.refused(&["create", "vol", "--table", &table(part)]);
        assert!(line.contains("holds writecache (byte "), "{part}: {line}");
    }
    udm.ok(&["create", "vol", "--table", &table("size=8M")]);
    udm.ok(&["remove", "vol"]);
    let (swap, zero) = ([0; 64], vec![0; 1 << 20]);
    file.write_all_at(&swap, 24 * MIB + 4080).unwrap();
    // An ext4 on the whole device, which includes the part, although the part is empty.
    file.write_all_at(&zero, 0).unwrap();
    file.write_all_at(b"\x53\xEF", 1080).unwrap();
    let words = ["create", "vol", "--table", &table("offset=24M&size=8M")];
    let line = udm.refused(&words);
    assert!(line.contains("on the whole device, ext") && line.contains("--force-format"), "{line}");
    udm.ok(&[&words[..], &["--force-format"]].concat());
    udm.ok(&["remove", "vol"]);
    // A device that already holds a cache does not need --force-format.
    udm.ok(&words);
    udm.ok(&["remove", "vol"]);
}
