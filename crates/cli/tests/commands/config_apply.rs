//! `diff` and `apply`: a running device and its configuration file.

use serde_json::{Value, json};

use super::clients::agreed;
use super::config::write;
use crate::common::{Outcome, Udm, pattern, read_export, text, wait_until, write_export};

const MIB: u64 = 1 << 20;

/// A device `v` of zeroes, whose file also has these lines.
fn create(udm: &Udm, lines: &str) {
    std::fs::create_dir(udm.path("etc")).unwrap();
    change(udm, lines);
    udm.ok(&["create", "--config", text(&udm.path("etc/v.conf"))]);
}

fn change(udm: &Udm, lines: &str) {
    write(udm, "etc/v.conf", &format!("table = '0 2048 zero'\n{lines}"));
}

fn exports(uris: &[&str]) -> String {
    format!("exports = {uris:?}\n")
}

fn is_open(udm: &Udm, socket: &str) -> bool {
    let exports = udm.json(&["save", "v"])["exports"].clone();
    exports.as_array().unwrap().iter().any(|uri| uri.as_str().unwrap().contains(socket))
}

/// The keys that `diff` lists.
fn differing(outcome: &Outcome) -> Vec<&str> {
    outcome.out.lines().filter_map(|line| line.strip_prefix("v: ")?.split(": ").next()).collect()
}

#[test]
fn differences_are_listed_with_both_values() {
    let udm = Udm::new();
    let (one, two) = (udm.uri("one.sock"), udm.uri("two.sock"));
    create(&udm, &exports(&[&one]));
    let outcome = udm.run(&["diff", "v"]);
    assert!(outcome.code == 0 && outcome.out.is_empty() && outcome.err.is_empty(), "{outcome:?}");
    // The same in other words.
    let table = "table = '''\n# All zero.\n0   2048 zero # here\n'''\n";
    let own = udm.path("one.sock");
    let exports_of_clients = exports(&[&format!("nbd+unix:///?socket={}", text(&own))]);
    write(&udm, "etc/v.conf", &format!("{table}{exports_of_clients}queues = 64\n"));
    assert_eq!(udm.run(&["diff", "v"]).code, 0);

    let more = "queues = 3\nmetrics = '127.0.0.1:0'\n";
    let content = format!("table = '0 4096 zero'\n{}{more}", exports(&[&two]));
    let new = write(&udm, "new.conf", &content);
    let outcome = udm.run(&["diff", "v", "--config", text(&new)]);
    assert!(outcome.code == 1 && outcome.err.is_empty(), "{outcome:?}");
    assert_eq!(differing(&outcome), ["table", "exports", "queues", "metrics"], "{outcome:?}");
    for line in [
        "v: table: running `0 2048 zero`, file `0 4096 zero`",
        "v: queues: running 64, file 3",
        "v: metrics: running none, file `127.0.0.1:0`",
    ] {
        assert!(outcome.out.lines().any(|it| it == line), "{line}: {outcome:?}");
    }
    let outcome = udm.run(&["diff", "v", "--config", text(&new), "--json"]);
    let value: Value = serde_json::from_str(&outcome.out).unwrap();
    assert!(outcome.code == 1 && value["differences"][1]["file"] == json!([two]), "{value}");
    // A port that the kernel chose is not a difference.
    udm.ok(&["remove", "v"]);
    udm.ok(&["create", "v", "--config", text(&new)]);
    assert_eq!(udm.run(&["diff", "v", "--config", text(&new)]).code, 0);
}

#[test]
fn a_device_that_does_not_run_is_created_by_the_printed_command() {
    let udm = Udm::new();
    create(&udm, "");
    udm.ok(&["remove", "v"]);
    let file = udm.path("etc/v.conf");
    let command = format!("udm create --config {}", text(&file));
    let outcome = udm.run(&["diff", "v"]);
    assert_eq!((outcome.code, outcome.out), (1, format!("v: stopped: `{command}` starts it\n")));
    assert!(udm.refused(&["apply", "v"]).contains(&command));
    let all = udm.ok(&["apply", "--all"]);
    assert_eq!(all, format!("v: stopped: `{command}` starts it\n"));
    let named = udm.run(&["diff", "w", "--config", text(&file)]).out;
    assert!(named.contains(&format!("udm create w --config {}", text(&file))), "{named}");
    let words: Vec<_> = command.split(' ').skip(1).collect();
    udm.ok(&words);
    assert_eq!(udm.run(&["diff", "v"]).code, 0);
    udm.kill_server("v");
    let outcome = udm.run(&["diff", "v"]);
    assert_eq!((outcome.code, outcome.out), (1, format!("v: dead: `{command}` starts it\n")));
    let outcome = udm.run(&["apply", "--all"]);
    assert_eq!((outcome.code, outcome.out), (1, format!("v: dead: `{command}` starts it\n")));
}

/// The file names devices: the table is the one that `create` would use.
#[test]
fn devices_are_compared_by_their_table() {
    for target in ["cache", "pcache", "writecache"] {
        let udm = Udm::new();
        std::fs::create_dir(udm.path("etc")).unwrap();
        let (origin, fast) = (udm.file("o", 16 * MIB), udm.file("f", 512 * MIB));
        let uri = udm.uri("v.sock");
        let content = format!(
            "origin = '{}'\nfast = '{}'\ntarget = '{target}'\n{}",
            text(&origin),
            text(&fast),
            exports(&[&uri])
        );
        let file = write(&udm, "etc/v.conf", &content);
        udm.ok(&["create", "--config", text(&file)]);
        write_export(&udm, &uri, &pattern(1, MIB as usize));
        let outcome = udm.run(&["diff", "v"]);
        assert!(outcome.code == 0 && outcome.err.is_empty(), "{target}: {outcome:?}");
        udm.file("p", 16 * MIB);
        let other = content.replace(text(&origin), text(&udm.path("p")));
        write(&udm, "etc/v.conf", &other);
        let outcome = udm.run(&["diff", "v"]);
        assert_eq!((outcome.code, differing(&outcome)), (1, vec!["table"]), "{outcome:?}");
        assert!(read_export(&udm, &uri)[..MIB as usize] == pattern(1, MIB as usize)[..]);
        udm.ok(&["remove", "v", "--drain"]);
    }
}

/// New exports are opened, and old ones are closed unless a client is connected.
#[test]
fn exports_change_under_a_client_that_stays() {
    let udm = Udm::new();
    let [one, two, three] = ["one.sock", "two.sock", "three.sock"].map(|name| udm.uri(name));
    create(&udm, &exports(&[&one, &two]));
    let client = agreed(&udm.path("one.sock"));
    wait_until("it is a client", || udm.json(&["info", "v"])["clients"] == 1);
    change(&udm, &exports(&[&three]));

    let outcome = udm.run(&["apply", "v", "--dry-run"]);
    assert_eq!(outcome.code, 1, "{outcome:?}");
    for line in [
        format!("v: would open {three}"),
        format!("v: would close {two}"),
        format!("v: unchanged: {one}: 1 client is connected; --force closes it"),
    ] {
        assert!(outcome.out.lines().any(|it| it == line), "{line}: {outcome:?}");
    }
    assert!(!is_open(&udm, "three.sock") && is_open(&udm, "two.sock"), "it was a dry run");

    let outcome = udm.run(&["apply", "v"]);
    assert_eq!(outcome.code, 1, "{outcome:?}");
    let kept = format!("v: unchanged: {one}: 1 client is connected; disconnect");
    assert!(outcome.out.contains(&kept), "{outcome:?}");
    assert!(is_open(&udm, "three.sock") && is_open(&udm, "one.sock"));
    assert!(!is_open(&udm, "two.sock") && udm.json(&["info", "v"])["clients"] == 1);
    let outcome = udm.run(&["diff", "v"]);
    assert_eq!((outcome.code, differing(&outcome)), (1, vec!["exports"]), "{outcome:?}");

    assert_eq!(udm.ok(&["apply", "v", "--force"]), format!("v: closed {one}\n"));
    assert!(!is_open(&udm, "one.sock"));
    drop(client);
    let value = udm.json(&["apply", "v"]);
    assert_eq!((&value["opened"], &value["kept"]), (&json!([]), &json!([])), "{value}");
    assert!(udm.ok(&["apply", "v"]).contains("v: is as "));
    assert_eq!(udm.run(&["diff", "v"]).code, 0);
}

/// An export whose options change has the address of the old one, which is closed first.
#[test]
fn an_export_changes_its_options() {
    let udm = Udm::new();
    let uri = udm.uri("one.sock");
    let reading = format!("{uri}?readonly");
    create(&udm, &exports(&[&uri]));
    let client = agreed(&udm.path("one.sock"));
    wait_until("it is a client", || udm.json(&["info", "v"])["clients"] == 1);
    change(&udm, &exports(&[&reading]));
    let outcome = udm.run(&["apply", "v"]);
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert!(outcome.out.contains(&format!("{reading}: {uri} has its address")), "{outcome:?}");
    assert_eq!(udm.json(&["save", "v"])["exports"], json!([uri]));
    drop(client);
    wait_until("the client is gone", || udm.json(&["info", "v"])["clients"] == 0);
    let value = udm.json(&["apply", "v"]);
    assert_eq!((&value["opened"], &value["closed"]), (&json!([reading]), &json!([uri])));
    assert_eq!(udm.json(&["save", "v"])["exports"], json!([reading]));
}

/// If a new export cannot be opened, or a file has a mistake, the device stays the same.
#[test]
fn a_failure_changes_nothing() {
    let udm = Udm::new();
    let [one, two] = ["one.sock", "two.sock"].map(|name| udm.uri(name));
    create(&udm, &exports(&[&one]));
    let before = udm.json(&["save", "v"])["exports"].clone();
    let absent = udm.uri("absent/three.sock");
    change(&udm, &exports(&[&two, &absent]));
    let refused = udm.refused(&["apply", "v"]);
    assert!(refused.contains("absent"), "{refused}");
    assert_eq!(udm.json(&["save", "v"])["exports"], before);
    change(&udm, &format!("{}quues = 3\n", exports(&[&two])));
    assert!(udm.refused(&["apply", "v"]).contains("unknown key \"quues\""));
    change(&udm, &exports(&[&two, &format!("{two}?readonly")]));
    assert!(udm.refused(&["apply", "v"]).contains("there twice"));
    // A mistake in one file keeps `--all` from changing any device.
    change(&udm, &exports(&[&two]));
    write(&udm, "etc/other.conf", "tabel = '0 8 zero'\n");
    let outcome = udm.run(&["apply", "--all"]);
    assert!(outcome.code == 1 && outcome.err.contains("no device was changed"), "{outcome:?}");
    assert!(outcome.err.contains("other.conf:1:1: unknown key"), "{outcome:?}");
    assert_eq!(udm.json(&["save", "v"])["exports"], before);
    std::fs::remove_file(udm.path("etc/other.conf")).unwrap();
    let all = udm.ok(&["apply", "--all"]);
    assert_eq!(all, format!("v: opened {two}\nv: closed {one}\n"));
}

/// The old exports were closed before the new one with the address of one of them failed.
#[test]
fn closed_exports_are_opened_again() {
    let udm = Udm::new();
    let [one, two, three] = ["one.sock", "two.sock", "three.sock"].map(|name| udm.uri(name));
    create(&udm, &exports(&[&one, &two]));
    // The owner is looked up when the socket is bound.
    change(&udm, &exports(&[&format!("{one}?owner=nosuchuser"), &three]));
    let refused = udm.refused(&["apply", "v"]);
    assert!(refused.contains("nosuchuser"), "{refused}");
    assert!(!refused.contains("closed now") && !refused.contains("stays open"), "{refused}");
    assert!(is_open(&udm, "one.sock") && is_open(&udm, "two.sock"));
    assert!(!is_open(&udm, "three.sock"));
    let refused = udm.refused(&["apply", "v", "--force"]);
    assert!(refused.contains(&format!("; {two} is open again, but --force ")), "{refused}");
    for uri in [&one, &two] {
        assert!(read_export(&udm, uri).iter().all(|byte| *byte == 0));
    }
}

/// The printed command restarts the device with the rest of its file.
#[test]
fn a_restart_is_needed_for_the_rest() {
    let udm = Udm::new();
    let one = udm.uri("one.sock");
    create(&udm, "");
    let file = udm.path("etc/v.conf");
    let content = format!("table = '0 4096 zero'\nqueues = 3\n{}", exports(&[&one]));
    write(&udm, "etc/v.conf", &content);
    let restart = format!("udm remove v && udm create --config {}", text(&file));
    assert_eq!(
        udm.ok(&["apply", "v"]),
        format!("v: opened {one}\nv: a restart is needed for table, queues: `{restart}`\n")
    );
    assert_eq!(udm.json(&["info", "v"])["size_bytes"], MIB);
    for command in restart.split(" && ") {
        udm.ok(&command.split(' ').skip(1).collect::<Vec<_>>());
    }
    assert_eq!(udm.json(&["info", "v"])["size_bytes"], 2 * MIB);
    assert_eq!(udm.run(&["diff", "v"]).code, 0);
}
