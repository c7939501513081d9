//! What a first `create` formats: nothing that holds, or may hold, anybody's data; and what it does
//! about its own formats that were cut off.

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
        ("not empty where the format would write", 100_000, b"somebody's only copy"),
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
        assert!(line.contains("ext") && line.contains("look swapped"), "{target}: {line}");
        // One that was used the right way before.
        udm.ok(&["create", "vol", "--table", &bench.table()]);
        udm.ok(&["remove", "vol"]);
        let line = udm.refused(&["create", "vol", "--table", &swapped]);
        let own = target.split(' ').next().unwrap();
        let holds = format!("{} holds {own}", text(&bench.cache));
        assert!(line.contains(&holds) && line.contains("look swapped"), "{target}: {line}");
        // Even when the other one is empty.
        Bench::put(&bench.origin, 1080, &[0; 2]);
        let line = udm.refused(&["create", "vol", "--table", &swapped]);
        assert!(line.contains("it is empty") && line.contains("look swapped"), "{target}: {line}");
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
