//! Origins that are used without their cache: written to, restored, mounted. Their cache was ended
//! in order before. The clean data of the cache is older then, and is never read or mixed in. Dirty
//! data is written over the origin's new data only if the user asks for that.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::{
    Loop, Udm, client, is_gone, pattern, read_export, signal, text, wait_until, write_export,
};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 16 * MIB;
const TARGETS: [&str; 4] = ["cache", "pcache", "writecache p", "writecache s"];

/// A cache of a target, whose devices are files.
struct Case {
    udm: Udm,
    target: &'static str,
    origin: String,
}

impl Case {
    fn new(target: &'static str) -> Case {
        let udm = Udm::new();
        udm.file("M", MIB);
        udm.file("C", if target == "pcache" { 512 * MIB } else { 64 * MIB });
        let origin = text(&udm.file("O", ORIGIN_BYTES)).to_owned();
        std::fs::write(&origin, pattern(1, ORIGIN_BYTES as usize)).unwrap();
        Case { udm, target, origin }
    }

    /// A table line; `suffix` follows each device's name, `words` the line.
    fn table(&self, suffix: &str, words: &str) -> String {
        let (sectors, origin) = (ORIGIN_BYTES / 512, format!("{}{suffix}", self.origin));
        match self.target {
            "cache" => format!(
                "0 {sectors} cache M{suffix} C{suffix} {origin} 64 1 writeback smq 0 {words}"
            ),
            "pcache" => format!("0 {sectors} pcache C{suffix} {origin} 0 {words}"),
            target => format!("0 {sectors} {target} {origin} C{suffix} 4096 0 {words}"),
        }
    }

    /// Serves it. Returns the notes that the command printed in addition to its result.
    fn create(&self, words: &str) -> String {
        let table = self.table("", words);
        let uri = self.udm.uri("v");
        let outcome = self.udm.run(&["create", "v", "--table", &table, "--export", &uri]);
        assert_eq!(outcome.code, 0, "{}: {outcome:?}", self.target);
        outcome.err
    }

    fn write(&self, bytes: &[u8]) {
        write_export(&self.udm, &self.udm.uri("v"), bytes);
    }

    fn read(&self) -> Vec<u8> {
        read_export(&self.udm, &self.udm.uri("v"))
    }

    fn recover(&self, options: &[&str]) -> Vec<String> {
        let devices = if self.target == "cache" { &["M", "C"][..] } else { &["C"] };
        let words = [&["recover"], devices, &[&self.origin], options].concat();
        words.into_iter().map(str::to_owned).collect()
    }

    /// Changes the origin as another program would.
    fn change(&self, at: u64, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(&self.origin).unwrap();
        file.write_all_at(bytes, at).unwrap();
        file.sync_all().unwrap();
    }

    fn on_origin(&self) -> Vec<u8> {
        std::fs::read(&self.origin).unwrap()
    }

    /// The first bytes of the media, with the formats' headers.
    fn media(&self) -> [Vec<u8>; 2] {
        ["M", "C"].map(|name| {
            let mut front = vec![0; MIB as usize];
            let file = std::fs::File::open(self.udm.path(name)).unwrap();
            file.read_exact_at(&mut front, 0).unwrap();
            front
        })
    }

    fn term(&self) {
        let pid = self.udm.pid("v");
        signal(pid, "TERM");
        wait_until("the server ends", || is_gone(pid));
    }
}

#[test]
fn clean_data_does_not_outlive_a_change_of_the_origin() {
    for target in TARGETS {
        for end in ["remove --drain", "drain and SIGTERM"] {
            let case = Case::new(target);
            case.create("");
            case.write(&pattern(2, 8 << 20));
            assert!(case.read()[..8 << 20] == pattern(2, 8 << 20));
            match end {
                "remove --drain" => drop(case.udm.ok(&["remove", "v", "--drain"])),
                _ => {
                    case.udm.ok(&["drain", "v"]);
                    case.term();
                }
            }
            case.change(MIB + 512, &pattern(3, 3 << 20));
            let expected = case.on_origin();
            let said = case.create("");
            assert!(case.read() == expected, "{target}, {end}: older data is read");
            if !target.starts_with("writecache") {
                assert!(said.contains("was changed since its cache ended"), "{target}: {said}");
                assert!(said.contains("dropped"), "{target}: {said}");
            }
            // Later writes do not bring it back, even after a crash.
            case.write(&pattern(4, 1 << 20));
            case.udm.kill_server("v");
            case.create("");
            let mut expected = expected;
            expected[..1 << 20].copy_from_slice(&pattern(4, 1 << 20));
            assert!(case.read() == expected, "{target}, {end}: after a crash");
            case.udm.ok(&["remove", "v", "--drain"]);
            assert!(case.on_origin() == expected, "{target}, {end}: mixed");
        }
    }
}

#[test]
fn an_origin_that_is_as_it_was_left_keeps_its_cache() {
    for target in TARGETS {
        let case = Case::new(target);
        case.create("");
        case.write(&pattern(2, 8 << 20));
        case.udm.ok(&["remove", "v"]);
        for _ in 0..3 {
            let said = case.create("");
            assert!(!said.contains("changed"), "{target}: {said}");
            assert!(case.read()[..8 << 20] == pattern(2, 8 << 20), "{target}");
            case.udm.ok(&["remove", "v"]);
        }
        // It is recovered, and still the same.
        let words = case.recover(&[]);
        case.udm.ok(&words.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(case.on_origin()[..8 << 20] == pattern(2, 8 << 20), "{target}");
        let said = case.create("");
        assert!(!said.contains("changed"), "{target}: {said}");
        if target == "cache" {
            let cached = case.udm.json(&["info", "v"]);
            assert!(cached.to_string().contains("\"cached_bytes\""), "{cached}");
        }
        case.udm.ok(&["remove", "v"]);
    }
}

#[test]
fn dirty_data_is_not_written_over_a_changed_origin_unless_asked_to() {
    for target in TARGETS {
        let case = Case::new(target);
        case.create("");
        case.write(&pattern(2, 2 << 20));
        case.udm.ok(&["remove", "v"]);
        // The last time with the mtime set back.
        let file = OpenOptions::new().write(true).open(&case.origin).unwrap();
        let mtime = file.metadata().unwrap().modified().unwrap();
        case.change(MIB, &pattern(3, 4 << 20));
        file.set_modified(mtime).unwrap();
        drop(file);
        let (origin, media) = (case.on_origin(), case.media());
        let why = "was changed since its cache ended";
        let line = case.udm.refused(&["create", "v", "--table", &case.table("", "")]);
        assert!(line.contains(why) && line.contains("`rebind true`"), "{target}: {line}");
        let line = case.udm.refused(&["create", "v", "--table", &case.table("?readonly", "")]);
        assert!(line.contains(why) && line.contains("`rebind true`"), "{target}: {line}");
        let words = case.recover(&[]);
        let line = case.udm.refused(&words.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(line.contains(why) && line.contains("give --rebind"), "{target}: {line}");
        assert!(case.on_origin() == origin && case.media() == media, "{target}: it was refused");
        // Served to read, and to write; then recovered.
        let mut expected = origin;
        expected[..2 << 20].copy_from_slice(&pattern(2, 2 << 20));
        let table = case.table("?readonly", "rebind true");
        let uri = case.udm.uri("v");
        case.udm.ok(&["create", "v", "--table", &table, "--export", &uri]);
        assert!(case.read() == expected, "{target}: to read");
        case.udm.ok(&["remove", "v"]);
        case.create("rebind true");
        assert!(case.read() == expected, "{target}: to write");
        case.udm.kill_server("v");
        case.create("rebind true");
        assert!(case.read() == expected, "{target}: after a crash");
        case.udm.ok(&["remove", "v"]);
        let words = case.recover(&["--rebind"]);
        case.udm.ok(&words.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(case.on_origin() == expected, "{target}");
        case.create("");
        assert!(case.read() == expected, "{target}: at last");
        case.udm.ok(&["remove", "v"]);
    }
}

#[test]
fn a_file_system_that_was_mounted_meanwhile_is_seen() {
    for target in TARGETS {
        let mut case = Case::new(target);
        let image = case.udm.path("O");
        client("mke2fs", &["-q", "-F", "-t", "ext4", text(&image)]);
        let Some(device) = Loop::attach(&image, &[]) else { return };
        case.origin = text(&device.0).to_owned();
        case.create("");
        case.read();
        // The same bytes again: they are in the cache now.
        case.write(&std::fs::read(&image).unwrap());
        case.udm.ok(&["remove", "v", "--drain"]);
        let said = case.create("");
        assert!(!said.contains("changed"), "{target}: {said}");
        case.udm.ok(&["remove", "v", "--drain"]);
        mounted(&case.udm, &device.0, |root| {
            std::fs::write(root.join("file"), pattern(5, 300_000)).unwrap();
        });
        let said = case.create("");
        let expected = std::fs::read(&device.0).unwrap();
        assert!(case.read() == expected, "{target}: older data is read");
        assert!(target.starts_with("writecache") || said.contains("dropped"), "{target}: {said}");
        case.udm.ok(&["remove", "v", "--drain"]);
        mounted(&case.udm, &device.0, |root| {
            assert!(std::fs::read(root.join("file")).unwrap() == pattern(5, 300_000), "{target}");
        });
        client("e2fsck", &["-fn", text(&device.0)]);
    }
}

fn mounted(udm: &Udm, device: &Path, run: impl Fn(&Path)) {
    let root = udm.path("mounted");
    std::fs::create_dir_all(&root).unwrap();
    client("mount", &[text(device), text(&root)]);
    run(&root);
    client("umount", &[text(&root)]);
}

/// The same data in a new place: the cache recognizes a copy with its times, and no other copy.
#[test]
fn a_copy_of_the_origin_keeps_its_clean_data_only_with_its_times() {
    for (target, keeps) in [("cache", true), ("cache", false), ("pcache", true), ("pcache", false)]
    {
        let mut case = Case::new(target);
        case.create("");
        case.write(&pattern(2, 4 << 20));
        case.udm.ok(&["remove", "v", "--drain"]);
        let copy = case.udm.path("O2");
        let option = if keeps { "--preserve=timestamps" } else { "--no-preserve=timestamps" };
        client("cp", &[option, &case.origin, text(&copy)]);
        case.origin = text(&copy).to_owned();
        let line = case.udm.refused(&["create", "v", "--table", &case.table("", "")]);
        assert!(line.contains("rebind true"), "{target}: {line}");
        let said = case.create("rebind true");
        assert_eq!(said.contains("dropped"), !keeps, "{target}: {said}");
        assert!(case.read() == case.on_origin(), "{target}");
        case.udm.ok(&["remove", "v"]);
    }
}
