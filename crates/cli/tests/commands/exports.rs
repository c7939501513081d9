//! Several exports at one address, served by processes of their own, with real clients. Each client
//! gets the export that it names. A server that ends, dies or is stopped does not keep clients from
//! the other exports.

use std::io::Read;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::Duration;

use crate::common::ticks::Ticks;
use crate::common::{PATIENCE, Udm, client, pattern, signal, text, wait_until};

const MIB: u64 = 1 << 20;

/// Makes a device over a file of its own, at an address that all share.
fn create(udm: &Udm, name: &str) {
    let file = udm.path(&format!("{name}.img"));
    if !file.exists() {
        udm.file(&format!("{name}.img"), MIB);
    }
    let table = format!("0 2048 linear {} 0", file.display());
    udm.ok(&["create", name, "--table", &table, "--export", &uri(udm, name)]);
}

fn uri(udm: &Udm, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", udm.path("nbd.sock").display())
}

/// Whether the server of an export listens for clients. The kernel closes a killed process's rings
/// a moment later.
fn hears(udm: &Udm, name: &str) -> bool {
    let end = format!(".{name}.export");
    let entries = std::fs::read_dir(udm.runtime()).unwrap().map(|entry| entry.unwrap().path());
    let mut entries = entries.filter(|path| text(path).ends_with(&end));
    entries.any(|path| UnixDatagram::unbound().unwrap().connect(path).is_ok())
}

/// The names that nbdinfo lists.
fn list(uri: &str) -> Vec<String> {
    let said = client("nbdinfo", &["--list", uri]);
    let names = said.lines().filter_map(|line| line.strip_prefix("export=\"")?.strip_suffix("\":"));
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    names
}

/// Writes to an export, and finds it in its device's file.
fn check(udm: &Udm, name: &str, seed: u64) {
    let data = pattern(seed, MIB as usize);
    let file = udm.path("data");
    std::fs::write(&file, &data).unwrap();
    client("nbdcopy", &["--flush", text(&file), &uri(udm, name)]);
    assert!(std::fs::read(udm.path(&format!("{name}.img"))).unwrap() == data, "{name}");
}

#[test]
fn devices_share_an_address_and_each_may_end_or_die() {
    let udm = Udm::new();
    for name in ["a", "b", "c"] {
        create(&udm, name);
    }
    assert_eq!(list(&uri(&udm, "")), ["a", "b", "c"]);
    for (nth, name) in ["a", "b", "c"].into_iter().enumerate() {
        check(&udm, name, nth as u64);
    }
    // The one that made the socket dies, with the others' clients connected.
    udm.kill_server("a");
    wait_until("it does not listen", || !hears(&udm, "a"));
    assert_eq!(list(&uri(&udm, "")), ["b", "c"]);
    check(&udm, "b", 7);
    create(&udm, "a");
    assert_eq!(list(&uri(&udm, "")), ["a", "b", "c"]);
    check(&udm, "a", 8);
    udm.ok(&["remove", "b"]);
    assert_eq!(list(&uri(&udm, "")), ["a", "c"]);
    // One device under two names, of which one is to read.
    let reading = format!("{}&readonly", uri(&udm, "c-to-read"));
    let answer = udm.json(&["export", "c", &reading]);
    assert_eq!(answer["client_uri"], uri(&udm, "c-to-read").as_str());
    assert_eq!(list(&uri(&udm, "")), ["a", "c", "c-to-read"]);
    check(&udm, "c", 9);
    let said = client("nbdinfo", &[&uri(&udm, "c-to-read")]);
    assert!(said.contains("is_read_only: true"), "{said}");
    client("nbdcopy", &[&uri(&udm, "c-to-read"), text(&udm.path("read"))]);
    assert!(std::fs::read(udm.path("read")).unwrap() == pattern(9, MIB as usize));
    let refused = udm.refused(&["export", "a", &uri(&udm, "c")]);
    assert!(refused.contains("that export name is already served at this address"), "{refused}");
    udm.ok(&["unexport", "c", &uri(&udm, "c-to-read")]);
    udm.ok(&["remove", "a"]);
    udm.ok(&["remove", "c"]);
    assert!(!udm.path("nbd.sock").exists(), "the last one removes the socket");
    assert_eq!(udm.left(), Vec::<String>::new());
}

#[test]
fn a_port_is_shared_and_a_stopped_server_keeps_nobody_out() {
    let udm = Udm::new();
    for name in ["one", "two", "three"] {
        udm.ok(&["create", name, "--table", "0 2048 zero"]);
    }
    let answer = udm.json(&["export", "one", "nbd://127.0.0.1:0/one"]);
    let first = answer["client_uri"].as_str().unwrap().to_owned();
    let place = first.strip_suffix("/one").unwrap();
    for name in ["two", "three"] {
        udm.ok(&["export", name, &format!("{place}/{name}")]);
    }
    assert_eq!(list(place), ["one", "three", "two"]);
    let stopped = udm.pid("one");
    signal(stopped, "STOP");
    let ticks = Ticks::start();
    for _ in 0..20 {
        client("nbdinfo", &["--size", &format!("{place}/two")]);
        client("nbdinfo", &["--size", &format!("{place}/three")]);
    }
    assert!(ticks.seconds() < 30.0, "{} s", ticks.seconds());
    // A client of the stopped server is served when the server continues.
    let waits = format!("{place}/one");
    let waiting = std::thread::spawn(move || client("nbdinfo", &["--size", &waits]));
    std::thread::sleep(Duration::from_millis(300));
    assert!(!waiting.is_finished());
    signal(stopped, "CONT");
    assert_eq!(waiting.join().unwrap().trim(), MIB.to_string());
    // An address without a name belongs to one export.
    let refused = udm.refused(&["export", "two", place]);
    assert!(refused.contains("exports with names share it (one, three, two)"), "{refused}");
}

#[test]
fn clients_that_say_nothing_are_held_by_one_server_alone() {
    let udm = Udm::new();
    create(&udm, "a");
    create(&udm, "b");
    let silent: Vec<UnixStream> = (0..150)
        .map(|_| {
            let mut stream = UnixStream::connect(udm.path("nbd.sock")).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.read_exact(&mut [0; 18]).unwrap();
            stream
        })
        .collect();
    // They make room for those that name something.
    check(&udm, "a", 1);
    check(&udm, "b", 2);
    drop(silent);
    wait_until("no client is connected", || {
        ["a", "b"].iter().all(|name| udm.json(&["info", name])["clients"] == 0)
    });
}

#[test]
fn the_next_server_listens_again_where_all_have_died() {
    let udm = Udm::new();
    for name in ["a", "b"] {
        create(&udm, name);
    }
    for name in ["a", "b"] {
        udm.kill_server(name);
    }
    let socket = udm.path("nbd.sock");
    // The kernel closes a killed process's rings a moment later.
    wait_until("no server listens", || UnixStream::connect(&socket).is_err());
    assert!(socket.exists());
    create(&udm, "b");
    assert_eq!(list(&uri(&udm, "")), ["b"]);
    check(&udm, "b", 3);
    // A removed export leaves no entries, and the entries of the live ones stay.
    let entries = || udm.left().iter().filter(|name| name.ends_with(".export")).count();
    assert_eq!(entries(), 2);
    udm.ok(&["remove", "a", "--force"]);
    assert_eq!(entries(), 1);
    assert_eq!(list(&uri(&udm, "")), ["b"]);
    udm.ok(&["remove", "b"]);
    assert_eq!(udm.left(), Vec::<String>::new());
}
