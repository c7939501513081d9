//! Devices that may only be read: refused where writes will come, offered where they will not.

use std::io::Read;
use std::process::Command;

use crate::common::{Loop, Udm, client, for_clients, pattern, text};

const MIB: u64 = 1 << 20;

#[test]
fn a_read_only_device_is_refused_where_writes_will_come() {
    let udm = Udm::new();
    let origin = udm.file("origin.img", 64 * MIB);
    let cache = udm.file("cache.img", 512 * MIB);
    let Some(device) = Loop::attach(&origin, &["--read-only"]) else { return };
    let (origin, cache) = (text(&device.0), text(&cache));
    for table in [
        format!("0 131072 linear {origin} 0"),
        format!("0 131072 pcache {cache} {origin}"),
        format!("0 131072 writecache p {origin} {cache} 4096 0"),
        format!("0 131072 writecache s {origin} {cache} 4096 0"),
    ] {
        let line = udm.refused(&["create", "vol", "--table", &table]);
        assert!(line.contains("read-only block device") && line.contains("?readonly"), "{line}");
    }
    udm.ok(&["create", "vol", "--table", &format!("0 131072 linear {origin}?readonly 0")]);
    udm.ok(&["remove", "vol"]);
    // A cache writes to both of its devices.
    for table in [
        format!("0 131072 pcache {cache} {origin}?readonly"),
        format!("0 131072 pcache {cache}?readonly {origin}"),
        format!("0 131072 writecache s {origin}?readonly {cache} 4096 0"),
        format!("0 131072 writecache s {origin} {cache}?readonly 4096 0"),
    ] {
        let line = udm.refused(&["create", "vol", "--table", &table]);
        assert!(line.contains("a cache writes to both of its devices"), "{line}");
    }
}

#[test]
fn what_is_read_only_says_so_and_is_shared() {
    let udm = Udm::new();
    let origin = udm.file("golden.img", 4 * MIB);
    let data = pattern(1, 4 << 20);
    std::fs::write(&origin, &data).unwrap();
    let table = format!("0 8192 linear {}?readonly 0", text(&origin));
    for name in ["one", "two"] {
        let uri = udm.uri(&format!("{name}.sock"));
        udm.ok(&["create", name, "--table", &table, "--export", &uri]);
        let outcome =
            Command::new("nbdinfo").args(["--is", "readonly", &for_clients(&uri)]).status();
        assert!(outcome.unwrap().success(), "{name}: clients see that it is read-only");
        assert!(crate::common::read_export(&udm, &uri) == data);
        let words = ["-f", "raw", "-r", "-c", "read 0 512", &for_clients(&uri)];
        client("qemu-io", &words);
        assert!(udm.ok(&["info", name]).contains("Read-only:"));
        assert_eq!(udm.json(&["info", name])["is_read_only"], true);
    }
    let printed = udm.ok(&["table", "one"]);
    assert!(printed.contains("golden.img?readonly 0"), "{printed}");
    // A device cannot be written below its read-only users.
    let writer = format!("0 8192 linear {} 0", text(&origin));
    assert!(udm.refused(&["create", "three", "--table", &writer]).contains("in use"));
    udm.ok(&["remove", "one"]);
    udm.ok(&["create", "one", "--table", printed.trim()]);
    udm.ok(&["remove", "one"]);
    udm.ok(&["remove", "two"]);
    udm.ok(&["create", "three", "--table", &writer]);
    assert!(udm.refused(&["create", "one", "--table", &table]).contains("in use"));
    assert_eq!(std::fs::read(&origin).unwrap(), data);
}

#[test]
fn a_cache_and_its_origin_are_read_and_stay_as_they_are() {
    for target in ["pcache", "writecache"] {
        let udm = Udm::new();
        let cache = udm.file("cache.img", 512 * MIB);
        let origin = udm.file("origin.img", 64 * MIB);
        let old = pattern(2, 64 << 20);
        std::fs::write(&origin, &old).unwrap();
        let words = |readonly: &str| {
            let (cache, origin) = (text(&cache), text(&origin));
            match target {
                "pcache" => format!("0 131072 pcache {cache}{readonly} {origin}{readonly}"),
                _ => format!("0 131072 writecache s {origin}{readonly} {cache}{readonly} 4096 0"),
            }
        };
        let uri = udm.uri("vol.sock");
        // A device that holds no cache is not formatted.
        let line = udm.refused(&["create", "vol", "--table", &words("?readonly")]);
        assert!(line.contains("magic"), "{target}: {line}");
        udm.ok(&["create", "vol", "--table", &words(""), "--export", &uri]);
        let data = pattern(3, 8 << 20);
        crate::common::write_export(&udm, &uri, &data);
        let line = udm.refused(&["create", "one", "--table", &words("?readonly")]);
        assert!(line.contains("in use"), "{target}: {line}");
        udm.kill_server("vol");
        let front = |path| {
            let mut bytes = Vec::new();
            std::fs::File::open(path).unwrap().take(64 * MIB).read_to_end(&mut bytes).unwrap();
            bytes
        };
        let before = [&cache, &origin].map(front);
        let memory = udm.left();
        for name in ["one", "two"] {
            let uri = udm.uri(&format!("{name}.sock"));
            udm.ok(&["create", name, "--table", &words("?readonly"), "--export", &uri]);
            let status =
                Command::new("nbdinfo").args(["--is", "readonly", &for_clients(&uri)]).status();
            assert!(status.unwrap().success(), "{target}: clients see that it is read-only");
            let found = crate::common::read_export(&udm, &uri);
            assert!(found[..data.len()] == data && found[data.len()..] == old[data.len()..]);
        }
        let line = udm.refused(&["create", "vol", "--table", &words("")]);
        assert!(line.contains("in use"), "{target}: {line}");
        udm.ok(&["remove", "one"]);
        udm.ok(&["remove", "two"]);
        assert!(before == [&cache, &origin].map(front), "{target}");
        let is_kept = |name: &String| !name.ends_with(".shm") || udm.left().contains(name);
        assert!(memory.iter().all(is_kept), "{target}: {memory:?}");
        udm.ok(&["create", "vol", "--table", &words("")]);
        udm.ok(&["remove", "vol", "--drain"]);
        assert!(std::fs::read(&origin).unwrap()[..data.len()] == data, "{target}");
    }
}

#[test]
fn a_cache_with_metadata_is_read_and_stays_as_it_is() {
    let udm = Udm::new();
    let meta = udm.file("meta.img", 4 * MIB);
    let cache = udm.file("cache.img", 16 * MIB);
    let origin = udm.file("origin.img", 64 * MIB);
    let old = pattern(2, 64 << 20);
    std::fs::write(&origin, &old).unwrap();
    let words = |options: [&str; 3]| {
        let [m, c, o] = options;
        let (meta, cache, origin) = (text(&meta), text(&cache), text(&origin));
        format!("0 131072 cache {meta}{m} {cache}{c} {origin}{o} 64 1 writeback smq 0")
    };
    let (to_write, to_read) = (words([""; 3]), words(["?readonly"; 3]));
    for options in [["?readonly", "", ""], ["", "?readonly", ""], ["", "?readonly", "?readonly"]] {
        let line = udm.refused(&["create", "vol", "--table", &words(options)]);
        assert!(line.contains("a cache writes to all of its devices"), "{line}");
    }
    let line = udm.refused(&["create", "vol", "--table", &to_read]);
    assert!(line.contains("the device is not formatted"), "{line}");
    let uri = udm.uri("vol.sock");
    udm.ok(&["create", "vol", "--table", &to_write, "--export", &uri]);
    let data = pattern(3, 8 << 20);
    crate::common::write_export(&udm, &uri, &data);
    let line = udm.refused(&["create", "one", "--table", &to_read]);
    assert!(line.contains("in use"), "{line}");
    udm.kill_server("vol");
    let content = |path| std::fs::read(path).unwrap();
    let before = [&meta, &cache, &origin].map(content);
    assert!(before[2][..data.len()] != data, "something is only in the cache");
    for name in ["one", "two"] {
        let uri = udm.uri(&format!("{name}.sock"));
        udm.ok(&["create", name, "--table", &to_read, "--export", &uri]);
        let status =
            Command::new("nbdinfo").args(["--is", "readonly", &for_clients(&uri)]).status();
        assert!(status.unwrap().success(), "clients see that it is read-only");
        let found = crate::common::read_export(&udm, &uri);
        assert!(found[..data.len()] == data && found[data.len()..] == old[data.len()..]);
    }
    let line = udm.refused(&["create", "vol", "--table", &to_write]);
    assert!(line.contains("in use"), "{line}");
    // The printed table makes the same device again.
    let printed = udm.ok(&["table", "one"]);
    udm.ok(&["remove", "one"]);
    udm.ok(&["create", "one", "--table", printed.trim()]);
    udm.ok(&["remove", "one"]);
    udm.ok(&["remove", "two"]);
    assert!(before == [&meta, &cache, &origin].map(content));
    udm.ok(&["create", "vol", "--table", &to_write]);
    udm.ok(&["remove", "vol", "--drain"]);
    assert!(content(&origin)[..data.len()] == data);
}
