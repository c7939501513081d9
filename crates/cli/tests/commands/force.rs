//! `create --force-format`, as one table: each state of a fast device, with the flag and without,
//! for each target, in one step and by a table. docs/tables.md has the same table.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::common::{Outcome, Udm, pattern, read_export, text, write_export};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 16 * MIB;
/// Written to a cache before it is forced.
const DATA: usize = 1 << 20;

/// The content of the fast device.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Holds {
    Nothing,
    /// A cache of this target and origin; one of another origin; one of another target.
    Own(Care),
    ClientMemory(Care),
    OtherTarget(Care),
    /// A clean cache whose superblock is damaged.
    Damaged,
    /// A clean cache, and another shape is asked for.
    OtherShape,
    /// A dirty cache that is longer than its device.
    CutOff,
    /// Bytes of an unknown owner.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Care {
    Clean,
    Dirty,
}

/// What `create` does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    Formats,
    GoesOn,
    /// In any words.
    Refuses,
    /// And names the ways out.
    RefusesDirty,
}

use Care::{Clean, Dirty};
use Then::{Formats, GoesOn, Refuses, RefusesDirty};

/// State, without the flag, with it.
const RULES: [(Holds, Then, Then); 11] = [
    (Holds::Nothing, Formats, Formats),
    (Holds::Unknown, Refuses, Formats),
    (Holds::Own(Clean), GoesOn, Formats),
    (Holds::Own(Dirty), GoesOn, RefusesDirty),
    (Holds::ClientMemory(Clean), Refuses, Formats),
    (Holds::ClientMemory(Dirty), Refuses, RefusesDirty),
    (Holds::OtherTarget(Clean), Refuses, Formats),
    (Holds::OtherTarget(Dirty), Refuses, RefusesDirty),
    (Holds::OtherShape, Refuses, Formats),
    (Holds::Damaged, Refuses, RefusesDirty),
    (Holds::CutOff, Refuses, Refuses),
];

struct Bench {
    udm: Udm,
    target: &'static str,
    fast_bytes: u64,
}

impl Bench {
    fn new(target: &'static str) -> Bench {
        Bench { udm: Udm::new(), target, fast_bytes: 512 * MIB }
    }

    fn fast(&self) -> PathBuf {
        self.udm.path("fast.img")
    }

    /// The words that choose this target, and another shape of it if wanted.
    fn setup<'a>(&self, target: &'a str, other_shape: bool) -> Vec<&'a str> {
        let mut words = vec!["--fast", "fast.img", "--target", target];
        match target {
            "cache" if other_shape => words.extend(["--block-size", "128K"]),
            "writecache" if other_shape => words.extend(["--block-size", "8K"]),
            _ => {}
        }
        words
    }

    /// The table that one step would make of a blank device.
    fn table(&self, other_shape: bool) -> String {
        let words = self.setup(self.target, other_shape);
        let words = [&["create", "dry", "--origin", "slow.img", "--dry-run"], &words[..]].concat();
        let table = self.udm.json(&words)["table"].as_str().unwrap().to_owned();
        match (self.target, other_shape) {
            ("pcache", true) => table.replace("data_crc false", "data_crc true"),
            _ => table,
        }
    }

    /// A cache of `target` in front of `origin`.
    fn make(&self, target: &str, origin: &str, care: Care) {
        let uri = self.udm.uri("vol.sock");
        let words = self.setup(target, false);
        let create = ["create", "vol", "--origin", origin, "--export", &uri];
        self.udm.ok(&[&create, &words[..]].concat());
        write_export(&self.udm, &uri, &pattern(1, DATA));
        match care {
            Clean => self.udm.ok(&["remove", "vol", "--drain"]),
            Dirty => {
                self.udm.ok(&["suspend", "vol"]);
                self.udm.ok(&["remove", "vol"])
            }
        };
    }

    /// Brings the fast device into this state.
    fn prepare(&self, holds: Holds) {
        for origin in ["slow.img", "other.img"] {
            self.udm.file(origin, ORIGIN_BYTES);
        }
        self.udm.file("fast.img", self.fast_bytes);
        let file = std::fs::File::options().write(true).open(self.fast()).unwrap();
        let other = if self.target == "cache" { "writecache" } else { "cache" };
        match holds {
            Holds::Nothing => {}
            Holds::Unknown => file.write_all_at(b"the user's only copy", 8192).unwrap(),
            Holds::Own(care) => self.make(self.target, "slow.img", care),
            Holds::ClientMemory(care) => self.make(self.target, "other.img", care),
            Holds::OtherTarget(care) => self.make(other, "slow.img", care),
            Holds::OtherShape => self.make(self.target, "slow.img", Clean),
            Holds::Damaged => {
                self.make(self.target, "slow.img", Clean);
                // After the magic number, in a field that a checksum or a rule covers.
                let at = match self.target {
                    "pcache" => 4104 + 8,
                    "writecache" => 8,
                    _ => 64,
                };
                file.write_all_at(&[0x5a; 8], at).unwrap();
            }
            Holds::CutOff => {
                self.make(self.target, "slow.img", Dirty);
                file.set_len(self.fast_bytes / 4 * 3).unwrap();
            }
        }
    }

    fn front(&self) -> Vec<u8> {
        let mut bytes = vec![0; 16 << 20];
        std::fs::File::open(self.fast()).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// `create`, in one step or by a table.
    fn create(&self, table: Option<&str>, other_shape: bool, is_forced: bool) -> Outcome {
        let uri = self.udm.uri("vol.sock");
        let mut words = vec!["create", "vol", "--export", &uri];
        match table {
            Some(table) => words.extend(["--table", table]),
            None => {
                words.extend(["--origin", "slow.img"]);
                words.extend(self.setup(self.target, other_shape));
            }
        }
        if is_forced {
            words.push("--force-format");
        }
        self.udm.run(&words)
    }

    fn check(&self, holds: Holds, table: Option<&str>, is_forced: bool, then: Then) {
        let is_other_shape = holds == Holds::OtherShape;
        if is_other_shape && self.target == "pcache" && table.is_none() {
            // One step takes a pcache's one word of shape from the medium.
            return;
        }
        self.prepare(holds);
        if then == Formats {
            // A read must be able to tell the origins apart.
            std::fs::write(self.udm.path("slow.img"), pattern(2, ORIGIN_BYTES as usize)).unwrap();
        }
        let before = self.front();
        let outcome = self.create(table, is_other_shape, is_forced);
        let what = format!(
            "{} {holds:?} {} force {is_forced}: {outcome:?}",
            self.target,
            if table.is_some() { "table" } else { "one step" }
        );
        let has_said = outcome.out.contains("formatted");
        match then {
            Formats | GoesOn => {
                assert_eq!(outcome.code, 0, "{what}");
                let is_silent = table.is_some() && !is_forced;
                assert!(has_said == (then == Formats && !is_silent), "{what}");
                assert!(
                    outcome.out.contains("is reopened") == (then == GoesOn && table.is_none()),
                    "{what}"
                );
                let read = read_export(&self.udm, &self.udm.uri("vol.sock"));
                let is_old = read[..DATA] == pattern(1, DATA);
                assert!(is_old == (then == GoesOn), "{what}");
                assert!(is_old || read == pattern(2, ORIGIN_BYTES as usize), "{what}");
                self.udm.ok(&["remove", "vol", "--drain"]);
            }
            Refuses | RefusesDirty => {
                assert_eq!(outcome.code, 1, "{what}");
                let names_ways =
                    outcome.err.contains("udm recover") && outcome.err.contains("64 KiB");
                assert!(then == Refuses || names_ways, "{what}");
                assert!(!has_said || outcome.err.contains("formatted with data_crc"), "{what}");
                assert!(self.front() == before, "{what}: it is as it was");
            }
        }
    }

    fn check_all(&self) {
        self.prepare(Holds::Nothing);
        for (holds, without, with) in RULES {
            for (is_forced, then) in [(false, without), (true, with)] {
                // Without the flag, `moved`, `setup` and the targets' tests have these.
                let is_open = matches!(holds, Holds::ClientMemory(_) | Holds::Own(Clean));
                if !is_forced && is_open {
                    continue;
                }
                self.prepare(Holds::Nothing);
                let table = self.table(holds == Holds::OtherShape);
                self.check(holds, None, is_forced, then);
                self.check(holds, Some(&table), is_forced, then);
            }
        }
        assert_eq!(self.udm.left(), [""; 0], "{}", text(&self.fast()));
    }
}

#[test]
fn force_formats_a_clean_pcache_and_no_dirty_one() {
    Bench::new("pcache").check_all();
}

#[test]
fn force_formats_a_clean_writecache_and_no_dirty_one() {
    Bench::new("writecache").check_all();
}

#[test]
fn force_formats_a_clean_cache_and_no_dirty_one() {
    Bench::new("cache").check_all();
}
