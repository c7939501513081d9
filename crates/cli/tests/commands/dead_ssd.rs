//! An SSD that dies, while its origin is well: it is named, `drain` ends, `detach` lists what is
//! lost, and no command promises data that is not there. The SSD is a file on an ext4 that is shut
//! down.

use std::process::Command;

use crate::common::{Udm, client, pattern, text, wait_until, write_export};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 32 * MIB;
/// How many bytes are dirty.
const DIRTY: usize = 4 << 20;

/// A file system of its own for the fast file, which can be shut down.
struct Mounted(std::path::PathBuf);

impl Mounted {
    /// None where file systems cannot be mounted.
    fn new(udm: &Udm) -> Option<Mounted> {
        let (disk, folder) = (udm.file("disk.img", 72 * MIB), udm.path("mnt"));
        std::fs::create_dir_all(&folder).unwrap();
        client("mke2fs", &["-q", "-t", "ext4", "-F", text(&disk)]);
        let words = ["-o", "loop", text(&disk), text(&folder)];
        let mounted = Command::new("mount").args(words).output();
        if !mounted.is_ok_and(|output| output.status.success()) {
            eprintln!("SKIPPED: no loop mount");
            return None;
        }
        let fast = folder.join("fast");
        std::fs::File::create(&fast).unwrap().set_len(40 * MIB).unwrap();
        Some(Mounted(folder))
    }

    fn fast(&self) -> std::path::PathBuf {
        self.0.join("fast")
    }

    /// Every I/O fails from now on.
    fn die(&self) -> bool {
        let code = "import fcntl, os, struct, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), \
                    0x8004587d, struct.pack('I', 2))";
        let done = Command::new("python3").args(["-c", code, text(&self.fast())]).output();
        let is_dead = done.as_ref().is_ok_and(|output| output.status.success());
        if !is_dead {
            eprintln!("SKIPPED: the file system cannot be shut down: {done:?}");
        }
        is_dead
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A device with dirty data whose SSD is dead; none where that cannot be had.
fn with_dead_ssd(udm: &Udm, target: &str) -> Option<Mounted> {
    let ssd = with_ssd(udm, target)?;
    ssd.die().then_some(ssd)
}

/// A device with dirty data whose SSD can die.
fn with_ssd(udm: &Udm, target: &str) -> Option<Mounted> {
    let ssd = Mounted::new(udm)?;
    let (origin, uri) = (udm.file("origin.img", ORIGIN_BYTES), udm.uri("vol.sock"));
    let fast = ssd.fast();
    let words = ["--origin", text(&origin), "--fast", text(&fast), "--target", target];
    udm.ok(&[&["create", "vol"], &words[..], &["--export", &uri]].concat());
    write_export(udm, &uri, &pattern(1, DIRTY));
    if target == "cache" {
        // Idle clients do not start write-back.
        udm.ok(&["message", "vol", "0", "migration_threshold", "0"]);
    }
    udm.ok(&["suspend", "vol"]);
    udm.ok(&["resume", "vol"]);
    Some(ssd)
}

/// Whether a text reports that the SSD, or the part of it with the blocks, failed.
fn names_ssd(text: &str) -> bool {
    text.split_once("cache device ").is_some_and(|(_, rest)| {
        rest.contains("mnt/fast") && rest.contains(" failed: ") && !rest.contains("origin.img")
    })
}

#[test]
fn a_dead_ssd_is_named_and_not_the_origin() {
    for target in ["writecache", "cache"] {
        let udm = Udm::new();
        let Some(_ssd) = with_dead_ssd(&udm, target) else { return };
        let before = std::fs::read(udm.path("origin.img")).unwrap();
        let outcome = udm.run(&["remove", "vol", "--drain"]);
        assert_eq!(outcome.code, 1, "{target}: {outcome:?}");
        assert!(!outcome.err.contains("origin fails"), "{target}: {outcome:?}");
        assert!(names_ssd(&outcome.err), "{target}: {outcome:?}");
        let info = udm.json(&["info", "vol"]);
        assert_eq!(info["is_writeback_failing"], false, "{target}: {info}");
        let failure = info["medium_failure"].as_str().unwrap();
        assert!(names_ssd(failure), "{target}: {info}");
        assert_eq!(udm.json(&["ls"])[0]["state"], "failed", "{target}");
        assert!(udm.ok(&["metrics", "vol"]).contains("udm_medium_has_failed{"), "{target}");
        wait_until("the log has the failure", || {
            let log = std::fs::read_to_string(udm.runtime().join("vol.log")).unwrap();
            log.contains("the cache device has failed") && !log.contains("the origin fails")
        });
        let line = udm.refused(&["detach", "vol"]);
        assert!(line.contains("lost:") && line.contains("no change was made"), "{line}");
        let dirty = info["dirty_bytes"].as_u64().unwrap();
        let value = udm.json(&["detach", "vol", "--accept-loss"]);
        assert_eq!(value["lost_bytes"].as_u64(), Some(dirty), "{target}: {value}");
        assert!(!value["lost_ranges"].as_array().unwrap().is_empty(), "{target}: {value}");
        assert_eq!(udm.ok(&["ls"]), "No devices found\n");
        assert!(std::fs::read(udm.path("origin.img")).unwrap()[DIRTY..] == before[DIRTY..]);
    }
}

/// The server has not read the dead SSD: `detach` finds out that dirty data cannot be read.
#[test]
fn a_dead_ssd_is_detached_before_the_server_has_met_an_error() {
    for target in ["writecache", "cache"] {
        let udm = Udm::new();
        let Some(ssd) = with_ssd(&udm, target) else { return };
        let line = udm.refused(&["detach", "vol", "--accept-loss"]);
        assert!(line.contains("has not failed") && line.contains("--drain"), "{target}: {line}");
        assert!(line.contains("dirty data can be read (") || target == "cache", "{line}");
        if !ssd.die() {
            return;
        }
        let dirty = udm.json(&["info", "vol"])["dirty_bytes"].as_u64().unwrap();
        assert!(dirty > 0, "{target}");
        let line = udm.refused(&["detach", "vol"]);
        assert!(line.contains("lost:") && line.contains("no change was made"), "{target}: {line}");
        let value = udm.json(&["detach", "vol", "--accept-loss"]);
        assert_eq!(value["lost_bytes"].as_u64(), Some(dirty), "{target}: {value}");
        let first = value["lost_ranges"][0]["len"].as_u64();
        assert!(first.is_some_and(|len| len > 0), "{target}: {value}");
        assert_eq!(udm.ok(&["ls"]), "No devices found\n");
    }
}

#[test]
fn nothing_is_promised_of_a_dead_ssd() {
    for target in ["writecache", "cache"] {
        let udm = Udm::new();
        let Some(_ssd) = with_dead_ssd(&udm, target) else { return };
        // The server finds out when it tries.
        let _ = udm.run(&["drain", "vol"]);
        let said = udm.ok(&["remove", "vol", "--force"]);
        assert!(said.contains("which has failed"), "{target}: {said}");
        assert!(!said.contains("stay in the cache"), "{target}: {said}");
    }
}

#[test]
fn a_server_that_died_with_its_ssd_is_detached_and_cleared() {
    for target in ["writecache", "cache"] {
        for words in [["detach", "vol", "--accept-loss"], ["remove", "vol", "--force"]] {
            let udm = Udm::new();
            let Some(_ssd) = with_dead_ssd(&udm, target) else { return };
            udm.kill_server("vol");
            let said = udm.ok(&words);
            assert!(said.contains("cannot be read"), "{target}: {said}");
            assert!(!said.contains("has no cache"), "{target}: {said}");
            assert!(!said.contains("stays in the cache"), "{target}: {said}");
            assert_eq!(udm.ok(&["ls"]), "No devices found\n");
        }
    }
}

/// The metadata live, the blocks do not: the ranges are known.
#[test]
fn the_ranges_of_a_dead_cache_device_are_known_by_its_metadata() {
    let udm = Udm::new();
    let Some(ssd) = Mounted::new(&udm) else { return };
    let (origin, uri) = (udm.file("origin.img", ORIGIN_BYTES), udm.uri("vol.sock"));
    let (metadata, fast) = (udm.file("meta.img", 4 * MIB), ssd.fast());
    let (meta, slow, fast) = (text(&metadata), text(&origin), text(&fast));
    let table = format!("0 65536 cache {meta} {fast} {slow} 64 1 writeback smq 0");
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    write_export(&udm, &uri, &pattern(1, DIRTY));
    udm.ok(&["flush", "vol"]);
    let dirty = udm.json(&["info", "vol"])["dirty_bytes"].as_u64().unwrap();
    if dirty == 0 {
        panic!("no block was cached: {}", udm.ok(&["status", "vol"]));
    }
    udm.kill_server("vol");
    let line = udm.refused(&["detach", "vol", "--accept-loss"]);
    assert!(line.contains("can be read") && line.contains("udm recover"), "{line}");
    if !ssd.die() {
        return;
    }
    let value = udm.json(&["detach", "vol", "--accept-loss"]);
    assert!(value["is_known"] == true, "{value}");
    assert!(value["lost_bytes"].as_u64().unwrap() >= dirty.min(DIRTY as u64), "{value}");
    assert!(value["why"].as_str().unwrap().contains("cannot be read"), "{value}");
}
