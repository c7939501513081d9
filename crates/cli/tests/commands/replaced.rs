//! A server died with dirty data, and something else lies in the place of its cache: it is refused,
//! by `create` under any name and by `recover`, until the right device is back or the dead one is
//! given up.

use std::path::PathBuf;
use std::time::Duration;

use crate::common::{Udm, is_gone, pattern, read_export, signal, text, wait_until, write_export};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 16 * MIB;
const FAST_BYTES: u64 = 512 * MIB;
const TARGETS: [&str; 3] = ["pcache", "writecache", "cache"];

struct Bench {
    udm: Udm,
    target: &'static str,
}

impl Bench {
    /// A device whose server died with 1 MiB of flushed data that its origin has not.
    fn died(target: &'static str) -> Bench {
        let bench = Bench { udm: Udm::new(), target };
        bench.udm.file("slow.img", ORIGIN_BYTES);
        bench.udm.file("fast.img", FAST_BYTES);
        bench.create("vol");
        // A copy of the cache from before, in order.
        bench.udm.ok(&["remove", "vol"]);
        bench.copy("fast.img", "older.img");
        bench.create("vol");
        write_export(&bench.udm, &bench.udm.uri("vol.sock"), &pattern(1, 1 << 20));
        bench.udm.ok(&["suspend", "vol"]);
        bench.udm.kill_server("vol");
        bench.copy("fast.img", "newest.img");
        bench
    }

    fn words<'a>(&'a self, name: &'a str, uri: &'a str) -> Vec<&'a str> {
        let target = self.target;
        let words = ["create", name, "--origin", "slow.img", "--fast", "fast.img"];
        [&words[..], &["--target", target, "--export", uri]].concat()
    }

    fn create(&self, name: &str) -> String {
        let uri = self.udm.uri("vol.sock");
        self.udm.ok(&self.words(name, &uri))
    }

    /// In place: the file stays the same one.
    fn copy(&self, from: &str, to: &str) {
        let sparse = ["--sparse=auto", "--no-preserve=all"];
        let (from, to) = (self.udm.path(from), self.udm.path(to));
        crate::common::client("cp", &[&sparse[..], &[text(&from), text(&to)]].concat());
    }

    fn fast(&self) -> PathBuf {
        self.udm.path("fast.img")
    }

    fn refused(&self, words: &[&str]) -> String {
        let outcome = self.udm.run(words);
        assert_eq!(outcome.code, 1, "{} {words:?}: {outcome:?}", self.target);
        let line = outcome.err;
        assert!(line.contains("its server died"), "{line}");
        assert!(line.contains("udm detach vol --accept-loss"), "{line}");
        assert!(line.contains(text(&self.fast())), "it names the dead device: {line}");
        line
    }

    /// Any content there is refused, and does not change.
    fn check_refused(&self) {
        let before = std::fs::read(self.fast()).unwrap();
        let uri = self.udm.uri("vol.sock");
        self.refused(&self.words("vol", &uri));
        self.refused(&[&self.words("vol", &uri)[..], &["--force-format"]].concat());
        self.refused(&self.words("another", &uri));
        assert!(std::fs::read(self.fast()).unwrap() == before, "{}", self.target);
        let origin = std::fs::read(self.udm.path("slow.img")).unwrap();
        assert!(origin.iter().all(|byte| *byte == 0), "{}", self.target);
    }

    fn check_the_newest_has_everything(&self) {
        self.create("vol");
        let read = read_export(&self.udm, &self.udm.uri("vol.sock"));
        assert!(read[..1 << 20] == pattern(1, 1 << 20), "{}", self.target);
        self.udm.ok(&["remove", "vol", "--drain"]);
        assert_eq!(self.udm.left(), [""; 0], "{}", self.target);
    }
}

#[test]
fn a_blank_device_does_not_take_the_place_of_a_dirty_cache() {
    for target in TARGETS {
        let bench = Bench::died(target);
        // Emptied, and another file.
        std::fs::remove_file(bench.fast()).unwrap();
        bench.udm.file("fast.img", FAST_BYTES);
        bench.check_refused();
        std::fs::remove_file(bench.fast()).unwrap();
        std::fs::rename(bench.udm.path("newest.img"), bench.fast()).unwrap();
        if target == "cache" {
            // Its metadata names the file with the blocks.
            let uri = bench.udm.uri("vol.sock");
            let words = bench.words("vol", &uri);
            let outcome = bench.udm.run(&words);
            assert!(outcome.err.contains("give --rebind"), "{outcome:?}");
            bench.udm.ok(&[&words[..], &["--rebind"]].concat());
            let read = read_export(&bench.udm, &uri);
            assert!(read[..1 << 20] == pattern(1, 1 << 20));
            bench.udm.ok(&["remove", "vol", "--drain"]);
            assert_eq!(bench.udm.left(), [""; 0]);
        } else {
            bench.check_the_newest_has_everything();
        }
    }
}

#[test]
fn a_device_that_was_emptied_is_given_up_by_its_name() {
    for target in TARGETS {
        let bench = Bench::died(target);
        let file = std::fs::File::options().write(true).open(bench.fast()).unwrap();
        file.set_len(0).unwrap();
        file.set_len(FAST_BYTES).unwrap();
        bench.check_refused();
        let value = bench.udm.json(&["detach", "vol", "--accept-loss"]);
        assert!(value["is_known"] == false && value["is_detached"] == true, "{value}");
        bench.create("vol");
        let read = read_export(&bench.udm, &bench.udm.uri("vol.sock"));
        assert!(read.iter().all(|byte| *byte == 0), "{target}");
        bench.udm.ok(&["remove", "vol", "--drain"]);
    }
}

#[test]
fn an_older_copy_does_not_take_the_place_of_a_dirty_cache() {
    // The metadata of a `cache` does not tell an older copy of itself: docs/limits.md.
    for target in ["pcache", "writecache"] {
        let bench = Bench::died(target);
        bench.copy("older.img", "fast.img");
        bench.check_refused();
        bench.refused(&["recover", "fast.img", "slow.img"]);
        // It is not confused with the dead server's device either.
        let line = bench.udm.refused(&["detach", "vol"]);
        assert!(line.contains("an older copy") && line.contains("it is unknown"), "{line}");
        bench.copy("newest.img", "fast.img");
        bench.check_the_newest_has_everything();
    }
}

#[test]
fn another_cache_does_not_take_the_place_of_a_dirty_one() {
    for target in TARGETS {
        let bench = Bench::died(target);
        // A clean one, of another origin, which has the file's name now.
        bench.udm.file("other.img", ORIGIN_BYTES);
        bench.udm.file("fast2.img", FAST_BYTES);
        let words = ["create", "second", "--origin", "other.img", "--fast", "fast2.img"];
        bench.udm.ok(&[&words[..], &["--target", target]].concat());
        bench.udm.ok(&["remove", "second"]);
        std::fs::rename(bench.udm.path("fast2.img"), bench.fast()).unwrap();
        bench.check_refused();
    }
}

#[test]
fn what_cannot_have_been_lost_is_not_asked_for() {
    // Another run of the machine: its memory, and a cache in memory, are gone in any case.
    let bench = Bench::died("writecache");
    bench.udm.file("fast.img", FAST_BYTES);
    let media = bench.udm.runtime().join("vol.media");
    let mut found: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&media).unwrap()).unwrap();
    found["boot"] = "another".into();
    std::fs::write(&media, found.to_string()).unwrap();
    bench.create("vol");
    bench.udm.ok(&["remove", "vol"]);
    // A cache that writes through: the origin has everything.
    let udm = Udm::new();
    udm.file("slow.img", ORIGIN_BYTES);
    udm.file("fast.img", FAST_BYTES);
    let words =
        ["create", "vol", "--origin", "slow.img", "--fast", "fast.img", "--target", "cache"];
    let words = [&words[..], &["--mode", "writethrough"]].concat();
    udm.ok(&words);
    udm.kill_server("vol");
    udm.file("fast.img", FAST_BYTES);
    assert!(udm.ok(&words).contains("was formatted"));
    udm.ok(&["remove", "vol"]);
}

/// The end of a service takes the attach from the medium, and lasts for some milliseconds.
#[test]
fn a_cache_whose_orderly_end_was_cut_off_is_known_again() {
    for target in TARGETS {
        let bench = Bench { udm: Udm::new(), target };
        bench.udm.file("slow.img", ORIGIN_BYTES);
        bench.udm.file("fast.img", FAST_BYTES);
        bench.create("vol");
        write_export(&bench.udm, &bench.udm.uri("vol.sock"), &pattern(1, 1 << 20));
        for millis in (0..60).step_by(3) {
            let pid = bench.udm.pid("vol");
            signal(pid, "TERM");
            std::thread::sleep(Duration::from_millis(millis));
            signal(pid, "KILL");
            wait_until("the server is gone", || is_gone(pid));
            bench.create("vol");
        }
        let read = read_export(&bench.udm, &bench.udm.uri("vol.sock"));
        assert!(read[..1 << 20] == pattern(1, 1 << 20), "{target}");
        bench.udm.ok(&["remove", "vol", "--drain"]);
    }
}
