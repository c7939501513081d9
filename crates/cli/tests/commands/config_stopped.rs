//! `ls --all`: devices that have a configuration file and no server, and the data in their caches.

use std::os::unix::fs::FileExt;

use serde_json::Value;

use super::config::write;
use crate::common::{Loop, Udm, pattern, text, write_export};

const MIB: u64 = 1 << 20;

/// State and dirty bytes of a device in `ls --all`.
fn listed(udm: &Udm, name: &str) -> (Value, Value) {
    let all = udm.json(&["ls", "--all"]);
    let devices = all.as_array().unwrap();
    let device = devices.iter().find(|device| device["name"] == name).expect("it is listed");
    (device["state"].clone(), device["dirty_bytes"].clone())
}

fn of_devices(origin: &str, fast: &str, target: &str, uri: &str) -> String {
    format!("origin = '{origin}'\nfast = '{fast}'\ntarget = '{target}'\nexports = ['{uri}']\n")
}

/// Dirty data of a device that is not served is listed.
#[test]
fn devices_that_are_not_served_are_listed() {
    let udm = Udm::new();
    std::fs::create_dir(udm.path("etc")).unwrap();
    for target in ["cache", "pcache", "writecache"] {
        let origin = udm.file(&format!("{target}-o"), 16 * MIB);
        let (fast, uri) = (udm.file(&format!("{target}-f"), 512 * MIB), udm.uri(target));
        let content = of_devices(text(&origin), text(&fast), target, &uri);
        let file = write(&udm, &format!("etc/{target}.conf"), &content);
        assert_eq!(listed(&udm, target), ("stopped".into(), Value::Null), "not formatted yet");
        udm.ok(&["create", "--config", text(&file)]);
        udm.ok(&["suspend", target]);
        assert_eq!(listed(&udm, target).0, "suspended");
        udm.ok(&["resume", target]);
        write_export(&udm, &uri, &pattern(1, MIB as usize));
        udm.ok(&["suspend", target]);
        udm.ok(&["remove", target]);
        let (state, dirty) = listed(&udm, target);
        assert_eq!(state, "stopped");
        let inspected = udm.json(&["inspect", text(&fast)])["dirty_bytes"].clone();
        assert!(dirty == inspected && dirty.is_u64(), "{target}: {dirty}");
    }
    write(&udm, "etc/plain.conf", "table = '0 8 zero'\n");
    assert_eq!(listed(&udm, "plain"), ("stopped".into(), 0.into()), "it has no cache");
    write(&udm, "etc/wrong.conf", "tabel = '0 8 zero'\n");
    assert_eq!(listed(&udm, "wrong"), ("stopped".into(), Value::Null));
    assert!(udm.run(&["ls", "--all"]).err.contains("wrong.conf:1:1: unknown key"));
    // A list of one target has the devices whose targets are unknown.
    let out = udm.ok(&["ls", "--all", "--target", "writecache"]);
    let names: Vec<_> = out.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["NAME", "writecache", "wrong"], "{out}");
    assert_eq!(udm.ok(&["ls"]), "No devices found\n");
}

/// The cache of a file is listed even if a server with another table has the file's name.
#[test]
fn a_server_of_the_same_name_hides_no_cache() {
    let udm = Udm::new();
    std::fs::create_dir(udm.path("etc")).unwrap();
    let (origin, fast) = (udm.file("o", 16 * MIB), udm.file("f", 64 * MIB));
    let uri = udm.uri("s.sock");
    let content = of_devices(text(&origin), text(&fast), "writecache", &uri);
    let file = write(&udm, "etc/w.conf", &content);
    let rows = || {
        let all = udm.json(&["ls", "--all"]);
        let rows = all.as_array().unwrap().iter();
        rows.map(|row| (row["state"].clone(), row["dirty_bytes"].clone())).collect::<Vec<_>>()
    };
    udm.ok(&["create", "--config", text(&file)]);
    write_export(&udm, &uri, &pattern(1, MIB as usize));
    assert_eq!(rows().len(), 1, "its server has the cache");
    udm.ok(&["remove", "w"]);
    udm.ok(&["create", "w", "--table", "0 8 zero"]);
    let row = |state: &str, dirty_bytes: u64| (Value::from(state), Value::from(dirty_bytes));
    assert_eq!(rows(), [row("active", 0), row("stopped", MIB)]);
    let notes = udm.run(&["ls", "--all"]).err;
    assert!(notes.contains("w: a server with another table has this name"), "{notes}");
}

/// A cache that cannot be read, or that another server has, is never reported as clean.
#[test]
fn caches_that_are_not_readable_are_not_clean() {
    let udm = Udm::new();
    std::fs::create_dir(udm.path("etc")).unwrap();
    let (origin, fast) = (udm.file("o", 16 * MIB), udm.file("f", 64 * MIB));
    let uri = udm.uri("s.sock");
    let content = of_devices(text(&origin), text(&fast), "writecache", &uri);
    let file = write(&udm, "etc/w.conf", &content);
    udm.ok(&["create", "other", "--config", text(&file)]);
    write_export(&udm, &uri, &pattern(1, MIB as usize));
    assert_eq!(listed(&udm, "w"), ("in use".into(), Value::Null));
    let notes = udm.run(&["ls", "--all"]).err;
    assert!(!notes.contains("died") && notes.contains("another server or program"), "{notes}");
    udm.ok(&["remove", "other"]);
    assert_eq!(listed(&udm, "w"), ("stopped".into(), MIB.into()));

    // The end of the entries is missing.
    let image = std::fs::read(&fast).unwrap();
    let medium = std::fs::File::options().write(true).open(&fast).unwrap();
    medium.set_len(64 << 10).unwrap();
    assert_eq!(listed(&udm, "w"), ("stopped".into(), Value::Null));
    assert!(udm.run(&["ls", "--all"]).err.contains(text(&fast)));
    // Another file is there.
    medium.set_len(0).unwrap();
    medium.write_all_at(&pattern(7, MIB as usize), 0).unwrap();
    assert_eq!(listed(&udm, "w"), ("stopped".into(), Value::Null));
    std::fs::remove_file(&fast).unwrap();
    assert_eq!(listed(&udm, "w"), ("stopped".into(), Value::Null));
    std::fs::write(&fast, image).unwrap();
    assert_eq!(listed(&udm, "w"), ("stopped".into(), MIB.into()));
}

/// A server that was killed, and that the runtime directory has forgotten, may have left data in
/// its memory.
#[test]
fn a_killed_server_may_have_left_more() {
    let udm = Udm::new();
    std::fs::create_dir(udm.path("etc")).unwrap();
    let (origin, fast) = (udm.file("o", 16 * MIB), udm.file("f", 64 * MIB));
    let content = of_devices(text(&origin), text(&fast), "writecache", &udm.uri("s.sock"));
    let file = write(&udm, "etc/w.conf", &content);
    udm.ok(&["create", "--config", text(&file)]);
    udm.kill_server("w");
    assert_eq!(listed(&udm, "w").0, "dead");
    for entry in std::fs::read_dir(udm.runtime()).unwrap().flatten() {
        if !entry.file_name().to_string_lossy().contains(".shm") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    assert_eq!(listed(&udm, "w"), ("stopped".into(), Value::Null));
    assert!(udm.run(&["ls", "--all"]).err.contains("its server died"));
}

/// `ls --all` also notices a block device that a server of another name uses.
#[test]
fn a_block_device_that_is_served_is_in_use() {
    let udm = Udm::new();
    std::fs::create_dir(udm.path("etc")).unwrap();
    let (origin, image) = (udm.file("o", 16 * MIB), udm.file("f", 64 * MIB));
    let Some(fast) = Loop::attach(&image, &[]) else { return };
    let uri = udm.uri("s.sock");
    let content = of_devices(text(&origin), text(&fast.0), "writecache", &uri);
    let file = write(&udm, "etc/w.conf", &content);
    udm.ok(&["create", "other", "--config", text(&file)]);
    write_export(&udm, &uri, &pattern(1, MIB as usize));
    assert_eq!(listed(&udm, "w"), ("in use".into(), Value::Null));
    udm.ok(&["remove", "other"]);
    assert_eq!(listed(&udm, "w"), ("stopped".into(), MIB.into()));
}
