//! The first `create` does not format over existing data, or data that it cannot identify. It
//! repeats its own interrupted formats.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::{Udm, text, wait_until};

const MIB: u64 = 1 << 20;
const TARGETS: [&str; 3] = ["pcache", "writecache p", "writecache s"];

struct Bench {
    udm: Udm,
    target: &'static str,
    cache: PathBuf,
    origin: PathBuf,
}

impl Bench {
    fn new(target: &'static str) -> Bench {
        let udm = Udm::new();
        let cache = udm.file("cache.img", 512 * MIB);
        let origin = udm.file("origin.img", 1024 * MIB);
        Bench { udm, target, cache, origin }
    }

    fn table_of(&self, cache: &Path, origin: &Path) -> String {
        let (cache, origin) = (text(cache), text(origin));
        match self.target.split_once(' ') {
            None => format!("0 131072 pcache {cache} {origin}"),
            Some((_, mode)) => format!("0 131072 writecache {mode} {origin} {cache} 4096 0"),
        }
    }

    fn table(&self) -> String {
        self.table_of(&self.cache, &self.origin)
    }

    fn put(path: &Path, at: u64, bytes: &[u8]) {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(bytes, at).unwrap();
    }
}

#[test]
fn what_holds_something_is_not_formatted_and_what_it_is_is_said() {
    let end = 512 * MIB;
    let md = b"\xFC\x4E\x2B\xA9\x01\x00\x00\x00";
    let cases: [(&str, u64, &[u8]); 8] = [
        ("btrfs (byte 65600)", 65_600, b"_BHRfS_M"),
        ("linux_raid_member (1.0) (byte 536862720)", end - 8192, md),
        ("linux_raid_member (0.90)", end - 65_536, &md[..4]),
        ("gpt (the copy at the end) (byte 536870400)", end - 512, b"EFI PART"),
        ("xfs (byte 0)", 0, b"XFSB"),
        ("LVM2_member (byte 512)", 512, b"LABELONE"),
        ("zfs_member (byte 536739840)", end - 131_072, b"\x0C\xB1\xBA\0\0\0\0\0"),
        ("not empty where the format would write", 100_000, b"the user's only copy"),
    ];
    for target in TARGETS {
        let bench = Bench::new(target);
        let udm = &bench.udm;
        for (what, at, bytes) in cases {
            let (at, is_pcache) = (if at == 100_000 { 33 * MIB } else { at }, target == "pcache");
            // After its first 64 KiB, each target writes somewhere else.
            let at = match at == 33 * MIB {
                true if is_pcache => 2 * 16 * MIB + 20_480 + 100,
                true => 100_000,
                false => at,
            };
            Bench::put(&bench.cache, at, bytes);
            let line = udm.refused(&["create", "vol", "--table", &bench.table()]);
            assert!(line.contains(what) && line.contains("may hold data"), "{target}: {line}");
            assert!(line.contains(text(&bench.cache)), "{target}: {line}");
            let mut found = vec![0; bytes.len()];
            let file = std::fs::File::open(&bench.cache).unwrap();
            file.read_exact_at(&mut found, at).unwrap();
            assert!(found == bytes, "{target}: {what} is still there");
            Bench::put(&bench.cache, at, &vec![0; bytes.len()]);
        }
        udm.ok(&["create", "vol", "--table", &bench.table()]);
        udm.ok(&["remove", "vol"]);
    }
}

#[test]
fn force_formats_all_the_same() {
    for target in TARGETS {
        let bench = Bench::new(target);
        Bench::put(&bench.cache, 65_600, b"_BHRfS_M");
        bench.udm.refused(&["create", "vol", "--table", &bench.table()]);
        bench.udm.ok(&["create", "vol", "--force-format", "--table", &bench.table()]);
        bench.udm.ok(&["remove", "vol"]);
    }
}

#[test]
fn devices_that_were_swapped_are_told() {
    for target in TARGETS {
        let bench = Bench::new(target);
        let udm = &bench.udm;
        // A new cache in front of an origin with a file system, the wrong way round.
        Bench::put(&bench.origin, 1080, b"\x53\xEF");
        let swapped = bench.table_of(&bench.origin, &bench.cache);
        let line = udm.refused(&["create", "vol", "--table", &swapped]);
        assert!(line.contains("ext") && line.contains("may be swapped"), "{target}: {line}");
        // One that was used the right way before.
        udm.ok(&["create", "vol", "--table", &bench.table()]);
        udm.ok(&["remove", "vol"]);
        let line = udm.refused(&["create", "vol", "--table", &swapped]);
        let own = target.split(' ').next().unwrap();
        let holds = format!("{} holds {own}", text(&bench.cache));
        assert!(line.contains(&holds) && line.contains("may be swapped"), "{target}: {line}");
        // Even when the other one is empty.
        Bench::put(&bench.origin, 1080, &[0; 2]);
        let line = udm.refused(&["create", "vol", "--table", &swapped]);
        assert!(
            line.contains("it is empty") && line.contains("may be swapped"),
            "{target}: {line}"
        );
        udm.ok(&["create", "vol", "--table", &bench.table()]);
        udm.ok(&["remove", "vol"]);
    }
}

#[test]
fn a_first_create_that_was_killed_can_be_given_again() {
    for target in TARGETS {
        for nth in 0..6 {
            let bench = Bench::new(target);
            let udm = &bench.udm;
            let table = bench.table();
            let words = ["create", "vol", "--foreground", "--table", &table];
            let mut server = udm.spawn(&words);
            std::thread::sleep(Duration::from_millis(2 + 3 * nth));
            server.kill().unwrap();
            server.wait().unwrap();
            udm.ok(&["create", "vol", "--table", &table]);
            assert!(udm.ok(&["status", "vol"]).starts_with("0 131072 "));
            let pid = udm.pid("vol");
            udm.ok(&["remove", "vol"]);
            wait_until("the server is gone", || crate::common::is_gone(pid));
        }
    }
}

/// The table of each sort of cache over one device.
fn tables(fast: &str, origin: &str) -> [String; 4] {
    [
        format!("pcache {fast} {origin}"),
        format!("writecache p {origin} {fast} 4096 0"),
        format!("writecache s {origin} {fast} 4096 0"),
        format!("cache {fast}?size=8M {fast}?offset=8M {origin} 128 1 writeback smq 0"),
    ]
    .map(|line| format!("0 131072 {line}"))
}

/// Data at `places` of `fast` is seen, and the device is blank again after a wipe.
fn check_data_behind(udm: &Udm, file: &Path, fast: &str, places: &[u64]) {
    let origin = udm.path("origin.img");
    let uri = udm.uri("vol.sock");
    for table in tables(fast, text(&origin)) {
        let create = ["create", "vol", "--table", &table, "--export", &uri];
        for &at in places {
            Bench::put(file, at, b"the user's only copy");
            let line = udm.refused(&create);
            assert!(line.contains("holds data (byte "), "{table} {at}: {line}");
            assert!(line.contains("--force-format"), "{table} {at}: {line}");
            let mut found = [0; 20];
            std::fs::File::open(file).unwrap().read_exact_at(&mut found, at).unwrap();
            assert!(found == *b"the user's only copy", "{table}: {at}");
            Bench::put(file, at, &[0; 20]);
        }
        // Zeroes that take space are not data. A wiped cache holds none.
        udm.ok(&create);
        crate::common::write_export(udm, &uri, &crate::common::pattern(1, 8 << 20));
        udm.ok(&["remove", "vol", "--drain", "--wipe"]);
        udm.ok(&create);
        udm.ok(&["remove", "vol", "--drain", "--wipe"]);
        // --force-format overwrites the data.
        Bench::put(file, places[0], b"the user's only copy");
        udm.ok(&[&create[..], &["--force-format"]].concat());
        udm.ok(&["remove", "vol", "--drain", "--wipe"]);
    }
}

#[test]
fn data_behind_an_empty_front_is_seen_in_a_file() {
    let udm = Udm::new();
    udm.file("origin.img", 64 * MIB);
    let fast = udm.file("fast.img", 512 * MIB);
    let places = [9 * MIB + 4000, 20 * MIB + 12_345, 300 * MIB + 4096, 512 * MIB - 20];
    check_data_behind(&udm, &fast, text(&fast), &places);
}

#[test]
fn data_behind_an_empty_front_is_seen_on_a_block_device_by_samples() {
    let udm = Udm::new();
    udm.file("origin.img", 64 * MIB);
    let file = udm.file("fast.img", 512 * MIB);
    let Some(device) = crate::common::Loop::attach(&file, &[]) else { return };
    check_data_behind(&udm, &device.0, text(&device.0), &[20 * MIB, 300 * MIB]);
}
