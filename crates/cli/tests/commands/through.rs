//! The target `cache` in writethrough, whose origin has everything; and the room of a cache's file.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use crate::common::{Udm, client, pattern, read_export, text, write_export};

const MIB: u64 = 1 << 20;

#[test]
fn a_cache_whose_server_was_killed_in_writethrough_begins_empty() {
    let udm = Udm::new();
    let uri = udm.uri("vol.sock");
    let meta = udm.file("meta", 4 * MIB);
    udm.file("cache", 8 * MIB);
    let origin = udm.file("origin", 16 * MIB);
    let table = |mode: &str| format!("0 32768 cache meta cache origin 64 2 metadata2 {mode} smq 0");
    let through = table("writethrough");
    let create = ["create", "vol", "--table", &through, "--export", &uri];
    udm.ok(&create);
    let mut data = Vec::new();
    for seed in 0..4 {
        data = pattern(seed, 16 << 20);
        write_export(&udm, &uri, &data);
        assert!(read_export(&udm, &uri) == data);
    }
    let info = || udm.json(&["info", "vol"])["lines"][0]["facts"].clone();
    assert_eq!(info()["dirty_bytes"], 0);
    assert!(info()["cached_bytes"].as_u64().unwrap() > 0);
    assert!(std::fs::read(&origin).unwrap() == data, "the origin has everything");
    udm.kill_server("vol");
    assert_eq!(udm.json(&["inspect", text(&meta)])["blocks_used"], 0);
    udm.ok(&["cache", "check", text(&meta)]);
    if Command::new("cache_check").arg("-V").output().is_ok() {
        client("cache_check", &[text(&meta)]);
    }
    udm.ok(&create);
    assert_eq!(info()["cached_bytes"], 0);
    assert!(read_export(&udm, &uri) == data);
    assert!(read_export(&udm, &uri) == data);
    let cached = info()["cached_bytes"].as_u64().unwrap();
    assert!(cached > 0);
    // An orderly stop keeps what is cached, for any mode.
    udm.ok(&["remove", "vol"]);
    assert_eq!(udm.json(&["inspect", text(&meta)])["blocks_used"], cached / 32768);
    let back = table("writeback");
    udm.ok(&["create", "vol", "--table", &back, "--export", &uri]);
    assert_eq!(info()["cached_bytes"], cached);
    assert!(read_export(&udm, &uri) == data);
    udm.ok(&["remove", "vol", "--drain"]);
}

#[test]
fn a_cache_keeps_room_for_its_file() {
    let udm = Udm::new();
    let fast = udm.file("fast", 32 * MIB);
    udm.file("slow", 64 * MIB);
    let words = ["--origin", "slow", "--fast", text(&fast), "--target", "cache"];
    udm.ok(&[&["create", "vol"], &words[..]].concat());
    let taken = std::fs::metadata(&fast).unwrap().blocks() * 512;
    assert!(taken >= 32 * MIB, "{taken} bytes are reserved");
    udm.ok(&["remove", "vol", "--drain", "--wipe"]);
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can mount a small file system");
    }
    let folder = udm.path("small");
    std::fs::create_dir(&folder).unwrap();
    client("mount", &["-t", "tmpfs", "-o", "size=16m", "none", text(&folder)]);
    let fast = folder.join("fast");
    std::fs::File::create(&fast).unwrap().set_len(32 * MIB).unwrap();
    let words = ["--origin", "slow", "--fast", text(&fast), "--target", "cache"];
    let outcome = udm.run(&[&["create", "vol"], &words[..]].concat());
    client("umount", &[text(&folder)]);
    let said = &outcome.err;
    assert!(outcome.code == 1 && said.contains("file system lacks the space"), "{outcome:?}");
}

/// Asks for a flush as a client that has written something.
fn try_flush(uri: &str, at: u64) -> bool {
    let write = format!("write -P 7 {at} 4096");
    let words = ["-f", "raw", "-c", &write, "-c", "flush", &crate::common::for_clients(uri)];
    let done = Command::new("qemu-io").args(words).output().unwrap();
    let said = [done.stdout, done.stderr].concat();
    !String::from_utf8_lossy(&said).contains("failed")
}

#[test]
fn metadata_that_was_cut_is_noticed_by_the_next_flush() {
    if Command::new("qemu-io").arg("--version").output().is_err() {
        return eprintln!("SKIPPED: no qemu-io");
    }
    for (mode, is_made_long_again) in
        [("writeback", false), ("writeback", true), ("writethrough", true)]
    {
        let udm = Udm::new();
        let uri = udm.uri("vol.sock");
        let meta = udm.file("meta", 4 * MIB);
        udm.file("cache", 8 * MIB);
        let origin = udm.file("origin", 16 * MIB);
        let table = format!("0 32768 cache meta cache origin 64 2 metadata2 {mode} smq 0");
        udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
        let mut data = pattern(5, 16 << 20);
        write_export(&udm, &uri, &data);
        write_export(&udm, &uri, &data);
        assert!(try_flush(&uri, 0));
        data[..4096].fill(7);
        let file = std::fs::OpenOptions::new().write(true).open(&meta).unwrap();
        file.set_len(8192).unwrap();
        if is_made_long_again {
            file.set_len(4 * MIB).unwrap();
        }
        // The server has this file open: reads from it return zeroes.
        let is_done = try_flush(&uri, 8 << 20);
        data[8 << 20..(8 << 20) + 4096].fill(7);
        assert_eq!(is_done, mode == "writethrough", "{mode}, long again: {is_made_long_again}");
        if mode == "writeback" {
            assert!(!try_flush(&uri, 0), "nor does the one after it succeed");
            let info = udm.json(&["info", "vol"]);
            let facts = &info["lines"][0]["facts"];
            let failure = facts["metadata_failure"].as_str().unwrap();
            assert!(failure.contains("metadata device") && failure.contains("failed"), "{facts}");
            assert!(info["notes"].to_string().contains("metadata device"), "{info}");
            assert!(udm.ok(&["ls"]).contains("failed"));
        }
        // Memory knows where dirty data is.
        udm.ok(&["drain", "vol"]);
        let below = std::fs::read(&origin).unwrap();
        assert!(below[..8 << 20] == data[..8 << 20]);
        if is_done {
            assert!(below == data);
        }
    }
}
