//! Configuration files: checked, created from, and saved.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::Value;

use crate::common::{Udm, client, for_clients, pattern, read_export, text, write_export};

const MIB: u64 = 1 << 20;

pub fn write(udm: &Udm, name: &str, content: &str) -> PathBuf {
    let path = udm.path(name);
    std::fs::write(&path, content).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    path
}

/// A device from a file, saved and created again, is the same device with its data.
#[test]
fn a_device_is_saved_and_created_again() {
    let udm = Udm::new();
    let (origin, fast) = (udm.file("o", 16 * MIB), udm.file("f", 512 * MIB));
    let (origin, fast) = (text(&origin), text(&fast));
    let uri = udm.uri("v.sock");
    let file = write(
        &udm,
        "v.conf",
        &format!(
            "origin = '{origin}'\nfast = '{fast}'\ntarget = 'writecache'\nqueues = 3\n\
             exports = ['{uri}']\nmetrics = '127.0.0.1:0'\n"
        ),
    );
    assert_eq!(udm.ok(&["check-config", text(&file)]), format!("{}: correct\n", text(&file)));
    udm.ok(&["create", "--config", text(&file)]);
    write_export(&udm, &uri, &pattern(1, MIB as usize));
    let saved = udm.ok(&["save", "v"]);
    let of_server = udm.json(&["save", "v"]);
    udm.ok(&["save", "v", "-o", text(&file)]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), saved);
    udm.refused(&["save", "absent", "-o", text(&file)]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), saved, "the old file stays");
    assert_eq!(of_server["queues"], 3);
    assert_eq!(of_server["exports"][0], udm.json(&["info", "v"])["exports"][0]["uri"]);
    let again = write(&udm, "again.conf", &saved);
    udm.ok(&["check-config", text(&again)]);
    let table = udm.ok(&["table", "v"]);
    udm.ok(&["remove", "v"]);
    udm.ok(&["create", "v", "--config", text(&again)]);
    assert_eq!(udm.ok(&["table", "v"]), table);
    let read = read_export(&udm, &uri);
    assert!(read[..MIB as usize] == pattern(1, MIB as usize)[..]);
    assert_eq!(udm.json(&["save", "v"]), of_server, "saved again");
    udm.ok(&["remove", "v", "--drain"]);
}

#[test]
fn the_command_line_replaces_keys() {
    let udm = Udm::new();
    let uri = udm.uri("file.sock");
    let content = format!("table = '0 2048 zero'\nexports = ['{uri}']\nqueues = 3\n");
    let file = write(&udm, "v.conf", &content);
    let own = udm.uri("own.sock");
    udm.ok(&["create", "w", "--config", text(&file), "--export", &own, "--queues", "5"]);
    let saved = udm.json(&["save", "w"]);
    assert_eq!(saved["queues"], 5);
    let exports = saved["exports"].as_array().unwrap();
    assert!(exports.len() == 1 && exports[0].as_str().unwrap().contains("own.sock"), "{saved}");
    udm.ok(&["remove", "w"]);
    for (more, why) in [
        (["--table", "0 8 zero"], "--config names the devices"),
        (["--mode", "writeback"], "--mode needs an origin and a fast device, from the file"),
    ] {
        let outcome = udm.run(&[&["create", "--config", text(&file)][..], &more].concat());
        assert!(outcome.code == 2 && outcome.err.contains(why), "{outcome:?}");
    }
    let outcome = udm.run(&["create", "--config", text(&file), "--dry-run"]);
    assert!(outcome.code == 2 && udm.json(&["ls"]) == Value::Array(Vec::new()), "{outcome:?}");
}

#[test]
fn options_for_devices_replace_keys_of_a_file() {
    let udm = Udm::new();
    let (origin, fast) = (udm.file("o", 16 * MIB), udm.file("f", 64 * MIB));
    let (origin, fast) = (text(&origin), text(&fast));
    let keys = "target = 'writecache'\nblock_size = '4K'\n";
    let content = format!("origin = '{origin}'\nfast = '{fast}'\n{keys}");
    let file = write(&udm, "v.conf", &content);
    let dry = |more: &[&str]| {
        let words = ["create", "--config", text(&file), "--dry-run"];
        udm.json(&[&words, more].concat())["table"].as_str().unwrap().to_owned()
    };
    assert!(dry(&[]).contains("writecache") && dry(&[]).contains(" 4096 "), "{}", dry(&[]));
    assert!(dry(&["--block-size", "512"]).contains(" 512 "));
    assert!(
        dry(&["--target", "cache", "--block-size", "64K", "--mode", "writethrough"])
            .contains("writethrough")
    );
    assert!(dry(&["--rebind"]).contains("rebind true"));
    assert_eq!(udm.json(&["ls"]), Value::Array(Vec::new()));
}

#[test]
fn consents_are_not_saved() {
    let udm = Udm::new();
    let (origin, fast) = (udm.file("o", 16 * MIB), udm.file("f", 512 * MIB));
    let words = ["create", "v", "--origin", text(&origin), "--fast", text(&fast), "--rebind"];
    udm.ok(&[&words[..], &["--target", "pcache"]].concat());
    let saved = udm.ok(&["save", "v"]);
    assert!(saved.contains("pcache") && !saved.contains("rebind"), "{saved}");
    udm.ok(&["remove", "v"]);
}

/// A file must not contain a consent. Options of the command line give it, for one attach.
#[test]
fn consents_are_given_on_the_command_line() {
    for target in ["cache", "pcache", "writecache"] {
        let udm = Udm::new();
        let (origin, other) = (udm.file("o", 16 * MIB), udm.file("p", 16 * MIB));
        let (fast, meta) = (udm.file("f", 512 * MIB), udm.file("m", MIB));
        let (uri, fast, meta) = (udm.uri("v.sock"), text(&fast), text(&meta));
        let line = |origin: &str| match target {
            "cache" => format!("cache {meta} {fast} {origin} 64 1 writeback smq 0"),
            "pcache" => format!("pcache {fast} {origin} 0"),
            _ => format!("writecache s {origin} {fast} 4096 0"),
        };
        let content = |origin: &str, more: &str| {
            format!("table = '0 32768 {}{more}'\nexports = ['{uri}']\n", line(origin))
        };
        let file = write(&udm, "v.conf", &content(text(&origin), ""));
        udm.ok(&["create", "--config", text(&file)]);
        write_export(&udm, &uri, &pattern(1, 65536));
        udm.ok(&["suspend", "v"]);
        udm.ok(&["remove", "v"]);

        write(&udm, "v.conf", &content(text(&other), " rebind true"));
        let outcome = udm.run(&["check-config", text(&file)]);
        let words = "`rebind true` must not be in a file";
        assert!(outcome.code == 1 && outcome.out.contains(words), "{target}: {outcome:?}");
        let refused = udm.refused(&["create", "--config", text(&file)]);
        assert!(refused.contains(words) && refused.contains("give --rebind once"), "{refused}");
        write(&udm, "v.conf", &content(text(&other), ""));
        let refused = udm.refused(&["create", "--config", text(&file)]);
        assert!(refused.contains("give --rebind"), "{target}: {refused}");
        assert!(!refused.contains("to the table"), "{target}: {refused}");
        udm.ok(&["create", "--config", text(&file), "--rebind"]);
        assert!(!udm.ok(&["save", "v"]).contains("rebind"));
        udm.ok(&["remove", "v"]);
        udm.ok(&["create", "--config", text(&file)]);
        assert!(read_export(&udm, &uri)[..65536] == pattern(1, 65536)[..], "{target}");
        udm.ok(&["remove", "v", "--drain"]);
    }
    let udm = Udm::new();
    let file = write(&udm, "v.conf", "table = '0 8 zero'\n");
    for option in ["--rebind", "--accept-loss"] {
        let outcome = udm.run(&["create", "--config", text(&file), option]);
        let why = format!("{option} does not apply to this table");
        assert!(outcome.code == 2 && outcome.err.contains(&why), "{outcome:?}");
    }
}

/// The memory of a dead server is lost: a user accepts that once.
#[test]
fn a_loss_is_accepted_on_the_command_line() {
    for target in ["pcache", "writecache"] {
        let udm = Udm::new();
        let (origin, fast) = (udm.file("o", 16 * MIB), udm.file("f", 512 * MIB));
        let (uri, origin, fast) = (udm.uri("v.sock"), text(&origin), text(&fast));
        let line = match target {
            "pcache" => format!("0 32768 pcache {fast} {origin}"),
            _ => format!("0 32768 writecache s {origin} {fast} 4096 0"),
        };
        let content = format!("table = '{line}'\nexports = ['{uri}']\n");
        let file = write(&udm, "v.conf", &content);
        udm.ok(&["create", "--config", text(&file)]);
        let data = udm.path("data");
        std::fs::write(&data, pattern(1, 65536)).unwrap();
        client("nbdcopy", &[text(&data), &for_clients(&uri)]);
        udm.kill_server("v");
        for entry in std::fs::read_dir(udm.runtime()).unwrap().flatten() {
            if entry.file_name().to_string_lossy().contains(".shm") {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        let refused = udm.refused(&["create", "--config", text(&file)]);
        assert!(refused.contains("give --accept-loss"), "{target}: {refused}");
        udm.ok(&["create", "--config", text(&file), "--accept-loss"]);
        let saved = udm.ok(&["save", "v"]);
        for word in ["lost_memory", "lost_entries", "log_damage"] {
            assert!(!saved.contains(word), "{saved}");
        }
        let again = write(&udm, "again.conf", &saved);
        udm.ok(&["check-config", text(&again)]);
        udm.ok(&["remove", "v", "--drain"]);
        udm.ok(&["create", "v", "--table", &line]);
    }
}

/// The open of a FIFO without a writer would wait for one.
#[test]
fn special_files_are_refused_at_once() {
    let udm = Udm::new();
    std::fs::create_dir(udm.path("etc")).unwrap();
    let fifo = udm.path("etc/fifo.conf");
    client("mkfifo", &["-m", "600", text(&fifo)]);
    let _socket = std::os::unix::net::UnixListener::bind(udm.path("etc/socket.conf")).unwrap();
    std::fs::create_dir(udm.path("etc/folder.conf")).unwrap();
    std::os::unix::fs::symlink("/dev/null", udm.path("etc/null.conf")).unwrap();
    let refused = udm.refused(&["create", "--config", text(&fifo)]);
    assert!(refused.ends_with("fifo.conf: not a regular file"), "{refused}");
    let outcome = udm.run(&["check-config"]);
    assert!(outcome.err.contains("4 mistakes in 4 of 4 files"), "{outcome:?}");
    assert_eq!(outcome.out.matches("not a regular file").count(), 3, "{outcome:?}");
    for words in [&["diff", "fifo"][..], &["apply", "fifo"]] {
        assert!(udm.refused(words).contains("not a regular file"), "{words:?}");
    }
}

/// A name with a line break does not look like two files.
#[test]
fn names_of_files_are_escaped() {
    let udm = Udm::new();
    std::fs::create_dir(udm.path("etc")).unwrap();
    write(&udm, "etc/a\nb: correct\u{1b}.conf", "table = '0 8 zero'\n");
    let outcome = udm.run(&["check-config"]);
    let all = format!("{}{}", outcome.out, outcome.err);
    assert!(all.contains("a\\nb: correct\\u{1b}.conf: "), "{all:?}");
    assert_eq!(outcome.out.lines().count(), 1, "{all:?}");
    let outcome = udm.run(&["ls", "--all"]);
    assert!(outcome.code == 0 && !outcome.err.contains("\nb: correct"), "{outcome:?}");
    let outcome = udm.run(&["apply", "--all"]);
    assert!(outcome.code == 1 && outcome.err.contains("no device was changed"), "{outcome:?}");
}

#[test]
fn mistakes_are_listed_with_their_places() {
    let udm = Udm::new();
    let uri = udm.uri("v.sock");
    let right = format!("table = '0 8 zero'\nexports = ['{uri}']\n");
    let (one, two) = (write(&udm, "one.conf", &right), write(&udm, "two.conf", &right));
    let wrong = write(&udm, "three.conf", "tabel = '0 8 zero'\nqueues = 99\n");
    let odd = write(&udm, "odd.txt", &right);
    let outcome = udm.run(&["check-config", text(&one), text(&two), text(&wrong), text(&odd)]);
    assert_eq!(outcome.code, 1);
    for line in [
        format!("{}: correct", text(&one)),
        format!("{}: {} uses {} too", text(&two), text(&one), text(&udm.path("v.sock"))),
        format!("{}:1:1: unknown key \"tabel\"", text(&wrong)),
        format!("{}:2:10: expected a number from 1 to 64", text(&wrong)),
        format!("{}: a configuration file is named NAME.conf", text(&odd)),
    ] {
        assert!(outcome.out.contains(&line), "{line:?} in {}", outcome.out);
    }
    assert!(outcome.err.contains("5 mistakes in 3 of 4 files"), "{}", outcome.err);
    let refused = udm.refused(&["create", "--config", text(&wrong)]);
    let first = format!("{}:1:1: unknown key", text(&wrong));
    assert!(refused.contains(&first) && refused.contains("and 1 more"), "{refused}");
    let twice = udm.path(".").join("one.conf");
    udm.ok(&["check-config", text(&one), text(&twice)]);
    // Other users must not choose the devices.
    std::fs::set_permissions(&one, PermissionsExt::from_mode(0o666)).unwrap();
    let refused = udm.refused(&["create", "--config", text(&one)]);
    assert!(refused.contains("any user may change it"), "{refused}");
    let open = udm.path("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
    let inside = write(&udm, "open/in.conf", &right);
    let refused = udm.refused(&["create", "--config", text(&inside)]);
    assert!(refused.contains("other users may write"), "{refused}");
    assert_eq!(udm.json(&["ls"]), Value::Array(Vec::new()));
}

#[test]
fn the_schema_has_the_keys_of_the_documents() {
    let udm = Udm::new();
    let schema: Value = serde_json::from_str(&udm.ok(&["check-config", "--schema"])).unwrap();
    let keys: Vec<_> = schema["properties"].as_object().unwrap().keys().cloned().collect();
    let page = include_str!("../../../../docs/configuration.md");
    for key in &keys {
        assert!(page.contains(&format!("`{key}`")), "{key} is not in docs/configuration.md");
    }
    assert_eq!(keys.len(), 10);
}
