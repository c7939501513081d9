//! Devices below that hang: `drain`, `ls`, `info` and the log name the device that hangs, and
//! everything continues when the device answers.

use std::io::{Read, Write};
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::clients::{agreed, request};
use crate::common::{
    Udm, client, errors_until, pattern, seconds_after, text, wait_until, write_export,
};
use crate::disks::Disks;

/// Disks by their names, each on a file system of its own, so that one that hangs keeps no request
/// of another waiting.
struct Each(Vec<(String, Disks)>);

impl Each {
    /// None where they cannot be mounted.
    fn mount(udm: &Udm, sizes: &[(&str, u64)]) -> Option<Each> {
        let mount = |(name, bytes): &(&str, u64)| {
            let disk = [("disk".to_owned(), *bytes)];
            Some(((*name).to_owned(), Disks::mount(&udm.path(name), &disk, 1)?))
        };
        sizes.iter().map(mount).collect::<Option<Vec<_>>>().map(Each)
    }

    fn of(&self, name: &str) -> &Disks {
        &self.0.iter().find(|disk| disk.0 == name).expect("a disk").1
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.of(name).path("disk")
    }
}

const MIB: u64 = 1 << 20;
/// Dirty data: too few requests for the hanging ones to block the other device's queue.
const DIRTY: usize = 128 << 10;

/// Hangs one of the disks of a device with dirty data, and expects that `name` is named.
fn hang(udm: &Udm, disks: &Each, disk: &str, name: &str) {
    disks.of(disk).hang("disk");
    let mut drain = udm.spawn(&["drain", "vol"]);
    wait_until("the device is named", || {
        udm.json(&["info", "vol"])["stalls"] != Value::Array(vec![])
    });
    let info = udm.json(&["info", "vol"]);
    let stall = &info["stalls"][0];
    assert_eq!((&stall["start"], &stall["waits_for"]), (&0.into(), &name.into()), "{disk}: {info}");
    assert!(stall["seconds"].as_u64().unwrap() >= 10, "{info}");
    let has_waited = |text: &str, before: &str| {
        let words = format!("{before}waits for {name}, which has not answered for ");
        seconds_after(text, &words) >= Some(10)
    };
    let said = udm.ok(&["info", "vol"]);
    let is_row = |line: &str| line.starts_with("Write-back:") && has_waited(line, "");
    assert!(said.lines().any(is_row), "{said}");
    let listed = udm.run(&["ls", "--json"]);
    let list: Value = serde_json::from_str(&listed.out).unwrap();
    let note = list[0]["notes"][0].as_str().unwrap();
    let is_first = note.starts_with("write-back waits for ");
    assert!(is_first && has_waited(note, "write-back "), "{disk}: {listed:?}");
    assert!(has_waited(&udm.run(&["ls"]).err, "write-back "), "{disk}");
    let metrics = udm.ok(&["metrics", "vol"]);
    assert!(metrics.contains("udm_device_stalled_lines{device=\"vol\"} 1"), "{metrics}");
    let (mut errors, mut said) = errors_until(&mut drain, "no progress for ");
    disks.of(disk).heal();
    errors.read_to_string(&mut said).unwrap();
    let status = drain.wait().unwrap();
    assert_eq!(status.code(), Some(0), "{disk}: {said}");
    assert!(seconds_after(&said, "no progress for ") >= Some(15), "{disk}: {said}");
    assert!(said.contains(&format!(" s: {name} does not answer")), "{disk}: {said}");
    wait_until("it continues", || udm.json(&["info", "vol"])["stalls"] == Value::Array(vec![]));
    let log = std::fs::read_to_string(udm.runtime().join("vol.log")).unwrap();
    assert!(has_waited(&log, "write-back "), "{log}");
    wait_until("the log has the failure", || {
        let log = std::fs::read_to_string(udm.runtime().join("vol.log")).unwrap();
        log.contains(&format!("{name} answers again"))
    });
}

/// Serves `table` on disks that can hang, and hangs each of `disks` under a drain.
fn hang_each(sizes: &[(&str, u64)], table: impl Fn(&Each) -> String, disks: &[(&str, &str)]) {
    for (disk, name) in disks {
        let udm = Udm::new();
        let Some(mounted) = Each::mount(&udm, sizes) else { return };
        let uri = udm.uri("vol.sock");
        udm.ok(&["create", "vol", "--table", &table(&mounted), "--export", &uri]);
        let data = pattern(3, DIRTY);
        write_export(&udm, &uri, &data);
        udm.ok(&["flush", "vol"]);
        write_export(&udm, &uri, &data);
        hang(&udm, &mounted, disk, name);
        udm.ok(&["remove", "vol", "--drain"]);
        let origin = std::fs::read(mounted.path("origin")).unwrap();
        assert!(origin[..DIRTY] == data, "{disk}");
    }
}

const WRITECACHE: [(&str, u64); 2] = [("origin", 16 * MIB), ("fast", 16 * MIB)];

fn writecache(disks: &Each) -> String {
    let (origin, fast) = (disks.path("origin"), disks.path("fast"));
    format!("0 32768 writecache s {} {} 4096 2 high_watermark 100", text(&origin), text(&fast))
}

const CACHE: [(&str, u64); 3] = [("meta", MIB), ("fast", 16 * MIB), ("origin", 16 * MIB)];

fn cache(disks: &Each) -> String {
    let [meta, fast, origin] = ["meta", "fast", "origin"].map(|name| disks.path(name));
    let names = format!("{} {} {}", text(&meta), text(&fast), text(&origin));
    format!("0 32768 cache {names} 64 2 metadata2 writeback smq 2 migration_threshold 0")
}

const PCACHE: [(&str, u64); 1] = [("origin", 16 * MIB)];

/// The disk `fast` is a file in `folder`.
fn pcache(disks: &Each, folder: &Path) -> String {
    let fast = folder.join("fast");
    std::fs::File::create(&fast).unwrap().set_len(520 * MIB).unwrap();
    format!("0 32768 pcache {} {}", text(&fast), text(&disks.path("origin")))
}

#[test]
fn a_hanging_device_of_a_writecache_is_named() {
    let disks = [("fast", "the cache device"), ("origin", "the origin")];
    hang_each(&WRITECACHE, writecache, &disks);
}

#[test]
fn a_hanging_device_of_a_cache_is_named() {
    hang_each(&CACHE, cache, &[("fast", "the cache device"), ("origin", "the origin")]);
}

#[test]
fn a_hanging_origin_of_a_pcache_is_named() {
    let folder = tempfile::tempdir().unwrap();
    hang_each(&PCACHE, |disks| pcache(disks, folder.path()), &[("origin", "the origin")]);
}

/// A client reads from the disk that hangs: dirty data from the SSD, other data from the origin.
fn hang_a_read(sizes: &[(&str, u64)], table: impl Fn(&Each) -> String, disk: &str, name: &str) {
    let udm = Udm::new();
    let Some(disks) = Each::mount(&udm, sizes) else { return };
    let uri = udm.uri("vol.sock");
    udm.ok(&["create", "vol", "--table", &table(&disks), "--export", &uri]);
    for _ in 0..2 {
        write_export(&udm, &uri, &pattern(3, DIRTY));
        udm.ok(&["flush", "vol"]);
    }
    disks.of(disk).hang("disk");
    let mut stream = agreed(&udm.path("vol.sock"));
    let offset = if disk == "origin" { 8 * MIB } else { 0 };
    stream.write_all(&request(0, 7, offset, 4096)).unwrap();
    wait_until("the request is slow", || {
        udm.json(&["info", "vol"])["slow_requests"] != Value::Array(vec![])
    });
    let info = udm.json(&["info", "vol"]);
    assert_eq!(info["slow_requests"][0]["waits_for"], name, "{disk}: {info}");
    let said = udm.ok(&["info", "vol"]);
    let words = format!("read, 4096 bytes at {offset}: has waited for {name} for ");
    assert!(seconds_after(&said, &words) >= Some(10), "{said}");
    let log = std::fs::read_to_string(udm.runtime().join("vol.log")).unwrap();
    assert!(log.contains(&format!("waiting for {name}")), "{log}");
    disks.of(disk).heal();
    stream.read_exact(&mut [0; 16 + 4096]).unwrap();
    udm.ok(&["remove", "vol", "--drain", "--force"]);
}

#[test]
fn a_hanging_device_is_named_for_a_clients_request() {
    let folder = tempfile::tempdir().unwrap();
    let pcache = |disks: &Each| pcache(disks, folder.path());
    std::thread::scope(|scope| {
        scope.spawn(|| hang_a_read(&WRITECACHE, writecache, "fast", "the cache device"));
        scope.spawn(|| hang_a_read(&WRITECACHE, writecache, "origin", "the origin"));
        scope.spawn(|| hang_a_read(&CACHE, cache, "fast", "the cache device"));
        scope.spawn(|| hang_a_read(&CACHE, cache, "origin", "the origin"));
        scope.spawn(|| hang_a_read(&PCACHE, pcache, "origin", "the origin"));
    });
}

#[test]
fn a_hanging_cache_file_of_a_pcache_is_named() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can freeze a file system");
        return;
    }
    let udm = Udm::new();
    let (disk, folder) = (udm.file("disk.img", 800 * MIB), udm.path("mnt"));
    std::fs::create_dir_all(&folder).unwrap();
    client("mke2fs", &["-q", "-t", "ext4", "-F", text(&disk)]);
    client("mount", &["-o", "loop", text(&disk), text(&folder)]);
    let run = |program: &str, words: &[&str]| {
        let mut command = std::process::Command::new(program);
        let _ = command.args(words).arg(&folder).stderr(Stdio::null()).status();
    };
    let fast = folder.join("fast");
    std::fs::File::create(&fast).unwrap().set_len(520 * MIB).unwrap();
    let (origin, uri) = (udm.file("origin.img", 16 * MIB), udm.uri("vol.sock"));
    let table = format!("0 32768 pcache {} {}", text(&fast), text(&origin));
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    write_export(&udm, &uri, &pattern(3, DIRTY));
    run("fsfreeze", &["-f"]);
    let outcome = udm.run(&["drain", "vol"]);
    let listed = udm.run(&["ls"]);
    run("fsfreeze", &["-u"]);
    let removed = udm.run(&["remove", "vol", "--drain"]);
    run("umount", &["-l"]);
    for said in [&outcome.err, &listed.err] {
        assert!(said.contains("a mapped file, which is the cache device of a pcache"), "{said}");
    }
    assert_eq!(removed.code, 0, "{removed:?}");
}
