//! `detach`: the fast device is dead. The report names the lost data, if its place is known, the
//! printed commands find the affected files, and the origin does not change.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Udm, client, for_clients, pattern, text, wait_until, write_export};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 64 * MIB;

/// A udm, a cache, and the table of a device.
struct Bench {
    udm: Udm,
    cache: tempfile::NamedTempFile,
    table: String,
    uri: String,
    is_exact: bool,
}

impl Bench {
    fn all() -> Vec<Bench> {
        let memory = Path::new("/dev/shm");
        let memory = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let disk = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let new = |folder: &Path, bytes: u64, line: &dyn Fn(&str, &str) -> String| {
            let udm = Udm::new();
            let cache = tempfile::NamedTempFile::new_in(folder).unwrap();
            cache.as_file().set_len(bytes).unwrap();
            let origin = udm.file("origin.img", ORIGIN_BYTES);
            let line = line(text(&origin), text(cache.path()));
            let table = format!("0 {} {line}", ORIGIN_BYTES / 512);
            let uri = udm.uri("vol.sock");
            Bench { udm, cache, is_exact: !line.starts_with("pcache"), table, uri }
        };
        vec![
            new(&memory, 512 * MIB, &|origin, cache| format!("pcache {cache} {origin}")),
            new(&memory, 72 * MIB, &|origin, cache| {
                format!("writecache p {origin} {cache} 4096 0")
            }),
            new(&disk, 72 * MIB, &|origin, cache| format!("writecache s {origin} {cache} 4096 0")),
        ]
    }

    fn create(&self) {
        self.udm.ok(&["create", "vol", "--table", &self.table, "--export", &self.uri]);
    }

    /// Writes, and holds write-back.
    fn write(&self, bytes: &[u8]) {
        write_export(&self.udm, &self.uri, bytes);
        self.udm.ok(&["suspend", "vol"]);
    }

    /// The fast device is no more.
    fn kill_cache(&self) {
        self.cache.as_file().set_len(0).unwrap();
        wait_until("the server has seen it", || {
            !self.udm.json(&["info", "vol"])["notes"].as_array().unwrap().is_empty()
        });
    }

    fn origin(&self) -> Vec<u8> {
        std::fs::read(self.udm.path("origin.img")).unwrap()
    }
}

#[test]
fn a_server_that_lives_knows_what_is_lost() {
    for bench in Bench::all() {
        let udm = &bench.udm;
        bench.create();
        write_export(udm, &bench.uri, &pattern(1, 8 << 20));
        udm.ok(&["drain", "vol"]);
        let before = bench.origin();
        bench.write(&pattern(2, 4 << 20));
        // As long as the cache works, detach is refused.
        let line = udm.refused(&["detach", "vol", "--accept-loss"]);
        assert!(line.contains("has not failed") && line.contains("--drain"), "{line}");
        bench.kill_cache();
        let line = udm.refused(&["detach", "vol"]);
        assert!(line.contains("no change was made") && line.contains("--accept-loss"), "{line}");
        udm.ok(&["status", "vol"]);
        let value = udm.json(&["detach", text(&udm.path("origin.img")), "--accept-loss"]);
        assert_eq!(value["is_exact"], bench.is_exact, "{value}");
        let ranges = value["lost_ranges"].as_array().unwrap();
        let bytes = value["lost_bytes"].as_u64().unwrap();
        assert!(ranges.iter().any(|range| range["offset"] == 0), "{value}");
        let most = if bench.is_exact { 4 * MIB } else { 8 * MIB };
        assert!((4 * MIB..=most).contains(&bytes), "{value}");
        assert!(value["is_detached"] == true && value["name"] == "vol");
        assert!(bench.origin() == before, "the origin is as it was: {}", bench.table);
        assert_eq!(udm.ok(&["ls"]), "No devices found\n");
        let line = udm.refused(&["detach", "vol"]);
        assert!(line.contains("no such device"), "{line}");
    }
}

#[test]
fn what_is_not_known_is_said_and_what_can_be_read_is_not_given_up() {
    for bench in Bench::all() {
        let udm = &bench.udm;
        bench.create();
        bench.write(&pattern(2, 4 << 20));
        udm.kill_server("vol");
        let before = bench.origin();
        let line = udm.refused(&["detach", "vol", "--accept-loss"]);
        assert!(line.contains("can be read") && line.contains("udm recover"), "{line}");
        let copy = std::fs::read(bench.cache.path()).unwrap();
        bench.cache.as_file().set_len(0).unwrap();
        let line = udm.refused(&["detach", "vol"]);
        assert!(line.contains("it is unknown for which ranges"), "{line}");
        let value = udm.json(&["detach", "vol", "--accept-loss"]);
        assert!(value["is_known"] == false && value["lost_bytes"].is_null(), "{value}");
        assert!(value["why"].as_str().unwrap().contains("cannot be read"), "{value}");
        assert_eq!(udm.ok(&["ls"]), "No devices found\n");
        assert!(bench.origin() == before);
        // The device works again: its content is intact.
        std::fs::write(bench.cache.path(), copy).unwrap();
        bench.create();
        udm.ok(&["remove", "vol", "--drain"]);
        assert!(bench.origin()[..4 << 20] == pattern(2, 4 << 20));
    }
    // An origin without a known cache.
    let udm = Udm::new();
    let origin = udm.file("origin.img", MIB);
    let value = udm.json(&["detach", text(&origin), "--accept-loss"]);
    assert!(value["is_known"] == false && value["is_detached"] == false, "{value}");
    udm.ok(&["create", "plain", "--table", "0 8 linear origin.img 0"]);
    assert!(udm.refused(&["detach", "plain"]).contains("it has no cache"));
    udm.ok(&["remove", "plain"]);
}

#[test]
fn a_device_of_several_caches_is_not_given_up_for_one() {
    let udm = Udm::new();
    let mut table = String::new();
    for (at, name) in ["a", "b"].iter().enumerate() {
        let origin = udm.file(&format!("{name}.img"), 64 * MIB);
        let cache = udm.file(&format!("{name}.cache"), 32 * MIB);
        let (at, origin, cache) = (at as u64 * 131_072, text(&origin), text(&cache));
        table += &format!("{at} 131072 writecache s {origin} {cache} 4096 0\n");
    }
    let uri = udm.uri("vol.sock");
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    write_export(&udm, &uri, &pattern(3, 1 << 20));
    udm.ok(&["suspend", "vol"]);
    for device in ["vol", text(&udm.path("a.img")), text(&udm.path("b.img"))] {
        let line = udm.refused(&["detach", device, "--accept-loss"]);
        assert!(line.contains("has 2 caches") && line.contains("remove vol --force"), "{line}");
    }
    udm.ok(&["resume", "vol"]);
    udm.ok(&["remove", "vol", "--drain"]);
    assert!(std::fs::read(udm.path("a.img")).unwrap()[..1 << 20] == pattern(3, 1 << 20));
}

/// Runs the printed commands that only query.
fn answers(value: &serde_json::Value, tool: &str) -> String {
    let commands = value["commands"].as_array().unwrap();
    let wanted = commands.iter().filter_map(|line| line.as_str()).filter(|line| {
        line.contains(tool) && !line.contains("e2fsck") && !line.contains("MOUNTPOINT")
    });
    let mut said = String::new();
    for line in wanted {
        let output = Command::new("sh").args(["-c", line]).output().unwrap();
        said += &String::from_utf8_lossy(&output.stdout);
    }
    said
}

#[test]
fn the_files_of_an_ext4_are_found() {
    let bench = Bench::all().pop().unwrap();
    let udm = &bench.udm;
    let (files, tree) = (udm.path("files"), udm.path("tree.img"));
    std::fs::create_dir(&files).unwrap();
    std::fs::write(files.join("greeting"), pattern(1, 300_000)).unwrap();
    client("mke2fs", &["-q", "-t", "ext4", "-d", text(&files), text(&tree), "64M"]);
    bench.create();
    client("nbdcopy", &["--flush", text(&tree), &for_clients(&bench.uri)]);
    udm.ok(&["drain", "vol"]);
    bench.write(&std::fs::read(&tree).unwrap()[..48 << 20]);
    bench.kill_cache();
    let value = udm.json(&["detach", "vol", "--accept-loss"]);
    assert!(answers(&value, "debugfs").contains("/greeting"), "{value}");
    client("e2fsck", &["-fn", text(&udm.path("origin.img"))]);
}

#[test]
fn the_files_of_an_xfs_are_found() {
    let has = |tool: &str| Command::new(tool).arg("-V").output().is_ok();
    if !has("mkfs.xfs") || !has("xfs_db") {
        return eprintln!("SKIPPED: no xfsprogs");
    }
    let udm = Udm::new();
    let (bytes, data) = (512 * MIB, udm.path("data"));
    std::fs::write(&data, pattern(1, 300_000)).unwrap();
    let proto = udm.path("proto");
    let words = format!("/\n0 0\nd--755 0 0\ngreeting ---644 0 0 {}\n$\n", text(&data));
    std::fs::write(&proto, words).unwrap();
    let origin = udm.file("origin.img", bytes);
    client("mkfs.xfs", &["-q", "-p", text(&proto), text(&origin)]);
    let cache = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    cache.as_file().set_len(72 * MIB).unwrap();
    let table =
        format!("0 {} writecache s {} {} 4096 0", bytes / 512, text(&origin), text(cache.path()));
    let uri = udm.uri("vol.sock");
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    // The same bytes once more.
    write_export(&udm, &uri, &std::fs::read(&origin).unwrap()[..1 << 20]);
    udm.ok(&["suspend", "vol"]);
    cache.as_file().set_len(0).unwrap();
    wait_until("the server has seen it", || {
        !udm.json(&["info", "vol"])["notes"].as_array().unwrap().is_empty()
    });
    let value = udm.json(&["detach", "vol", "--accept-loss"]);
    assert!(answers(&value, "xfs_db").contains("greeting"), "{value}");
}
