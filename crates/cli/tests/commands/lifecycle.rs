//! A device's life over real processes and sockets, with targets that need no cache.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;

use crate::common::{
    Udm, client, for_clients, is_gone, pattern, read_export, signal, text, wait_until, write_export,
};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

#[test]
fn a_zero_device_from_create_to_remove() {
    let udm = Udm::new();
    let uri = udm.uri("z.sock");
    let said = udm.ok(&["create", "z", "--table", "0 131072 zero", "--export", &uri]);
    assert_eq!(said, format!("z: serving 64.0 MiB at {}\n", for_clients(&uri)));
    assert_eq!(udm.ok(&["status", "z"]).trim_end(), "0 131072 zero");
    assert_eq!(udm.ok(&["status"]).trim_end(), "z: 0 131072 zero");
    assert_eq!(udm.ok(&["table", "z"]).trim_end(), "0 131072 zero");
    assert_eq!(udm.json(&["status", "z"])["name"], "z");
    assert_eq!(udm.json(&["status"])[0]["name"], "z");

    let info = udm.json(&["info", "z"]);
    assert_eq!(info["state"], "active");
    assert_eq!(info["size_bytes"], 64 * MIB);
    assert_eq!(info["dirty_bytes"], 0);
    assert_eq!(info["exports"][0]["uri"], uri);
    assert_eq!(info["lines"][0]["target"], "zero");
    assert!(udm.ok(&["info", "z"]).contains("ACTIVE"));
    assert!(udm.ok(&["ls"]).contains("64.0 MiB"));
    assert!(udm.ok(&["ls", "--target", "pcache"]).contains("No devices found"));

    assert_eq!(client("nbdinfo", &["--size", &for_clients(&uri)]).trim(), "67108864");
    assert!(read_export(&udm, &uri).iter().all(|&byte| byte == 0));

    let pid = udm.pid("z");
    assert_eq!(udm.ok(&["remove", "z"]), "z: removed\n");
    assert!(is_gone(pid), "remove waits for the process");
    assert!(udm.refused(&["status", "z"]).contains("no such device"));
    let left = udm.left();
    assert!(left.is_empty(), "{left:?}");
    assert!(!udm.path("z.sock").exists());
}

#[test]
fn a_linear_device_keeps_what_is_written() {
    let udm = Udm::new();
    let disk = udm.file("disk.img", 8 * MIB);
    let uri = udm.uri("l.sock");
    let table = format!("0 8192 linear {} 4096", text(&disk));
    udm.ok(&["create", "l", "--table", &table, "--export", &uri]);
    let data = pattern(1, 4 << 20);
    write_export(&udm, &uri, &data);
    assert_eq!(read_export(&udm, &uri), data);
    udm.ok(&["flush", "l"]);
    let on_disk = std::fs::read(&disk).unwrap();
    assert!(on_disk[2 << 20..6 << 20] == data[..]);

    // The same command opens a dead server's device again.
    udm.kill_server("l");
    let line = udm.refused(&["status", "l"]);
    assert!(line.contains("l: its server died") && line.contains("l.log"), "{line}");
    assert!(udm.ok(&["ls"]).contains("dead"));
    assert_eq!(udm.json(&["ls"])[0]["state"], "dead");
    udm.ok(&["create", "l", "--table", &table, "--export", &uri]);
    assert_eq!(read_export(&udm, &uri), data);
    udm.ok(&["remove", "l", "--drain"]);
}

#[test]
fn what_a_dead_server_left_can_be_cleared() {
    let udm = Udm::new();
    udm.ok(&["create", "d", "--table", "0 8 zero"]);
    udm.kill_server("d");
    udm.refused(&["remove", "d"]);
    assert!(udm.ok(&["remove", "d", "--force"]).contains("its server had died"));
    assert!(udm.refused(&["remove", "d", "--force"]).contains("no such device"));
}

#[test]
fn create_prints_what_went_wrong_in_the_server() {
    let udm = Udm::new();
    let line = udm.refused(&["create", "v", "--table", "0 131072 zeroo"]);
    assert!(line.contains("zeroo"), "{line}");
    let line = udm.refused(&["create", "v", "--table", "0 100 linear /nonexistent/disk 0"]);
    assert!(line.contains("/nonexistent/disk") && line.contains("No such file"), "{line}");
    let line = udm.refused(&["create", "v", "--table", "10 100 zero"]);
    assert!(line.contains("Gap in table"), "{line}");
    let line = udm.refused(&["create", "v", "--table", "0 8 zero", "--export", "http://x"]);
    assert!(line.contains("http://x"), "{line}");
    let line = udm.refused(&["create", "v", "--table", ""]);
    assert!(line.contains("table"), "{line}");
    let missing = udm.uri("no/such/folder/v.sock");
    let line = udm.refused(&["create", "v", "--table", "0 8 zero", "--export", &missing]);
    assert!(line.contains("no/such/folder"), "{line}");
    let left = udm.left();
    assert!(left.is_empty(), "a refused create leaves no files: {left:?}");
}

#[test]
fn a_name_is_taken_once() {
    let udm = Udm::new();
    udm.ok(&["create", "v", "--table", "0 8 zero"]);
    let line = udm.refused(&["create", "v", "--table", "0 16 zero"]);
    assert!(line.contains("v: it exists already"), "{line}");
    assert_eq!(udm.ok(&["status", "v"]).trim_end(), "0 8 zero", "the first is untouched");
    // Before anything of the devices is looked at.
    let line = udm.refused(&["create", "v", "--origin", "/no/origin", "--fast", "/no/fast"]);
    assert!(line.contains("v: it exists already"), "{line}");

    // Help that cannot be printed is an error.
    for words in [&["--help"][..], &["create", "--help"], &["--version"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = udm.command(words).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("No space left on device"), "{said}");
    }

    // Many at the same time: one wins, all others hear why not.
    let racers: Vec<_> =
        (0..6).map(|_| udm.spawn(&["create", "race", "--table", "0 8 zero"])).collect();
    let outcomes: Vec<_> =
        racers.into_iter().map(|racer| racer.wait_with_output().unwrap()).collect();
    let winners = outcomes.iter().filter(|outcome| outcome.status.success()).count();
    assert_eq!(winners, 1, "{outcomes:?}");
    for loser in outcomes.iter().filter(|outcome| !outcome.status.success()) {
        assert!(String::from_utf8_lossy(&loser.stderr).contains("race: it exists already"));
    }
}

#[test]
fn a_backing_device_is_used_once() {
    let udm = Udm::new();
    let disk = udm.file("disk.img", MIB);
    let table = format!("0 2048 linear {} 0", text(&disk));
    udm.ok(&["create", "a", "--table", &table]);
    let line = udm.refused(&["create", "b", "--table", &table]);
    assert!(line.contains("disk.img") && line.contains("in use"), "{line}");
    udm.ok(&["remove", "a"]);
    udm.ok(&["create", "b", "--table", &table]);
}

#[test]
fn suspend_holds_requests_until_resume() {
    let udm = Udm::new();
    let disk = udm.file("disk.img", MIB);
    // Holes would not have to be read.
    std::fs::write(&disk, pattern(5, MIB as usize)).unwrap();
    let uri = udm.uri("s.sock");
    let table = format!("0 2048 linear {} 0", text(&disk));
    udm.ok(&["create", "s", "--table", &table, "--export", &uri]);
    udm.ok(&["suspend", "s"]);
    udm.ok(&["suspend", "s"]);
    assert_eq!(udm.json(&["info", "s"])["state"], "suspended");
    let copy = udm.path("copy");
    let mut reader = std::process::Command::new("nbdcopy")
        .args([&for_clients(&uri), text(&copy)])
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(reader.try_wait().unwrap().is_none(), "a read waits while suspended");
    udm.ok(&["resume", "s"]);
    assert!(reader.wait().unwrap().success());
    assert_eq!(udm.json(&["info", "s"])["state"], "active");
    let line = udm.refused(&["message", "s", "0", "hello"]);
    assert!(line.contains("linear"), "{line}");
    // A suspended device can be removed as well.
    udm.ok(&["suspend", "s"]);
    udm.ok(&["remove", "s"]);
}

#[test]
fn a_loaded_table_becomes_live_on_resume() {
    let udm = Udm::new();
    udm.ok(&["create", "t", "--table", "0 2048 zero"]);
    let disk = udm.file("disk.img", MIB);
    // Relative paths start where the command was given.
    let loaded = udm.ok(&["load", "t", "--table", "0 2048 linear disk.img 0"]);
    assert!(loaded.contains("udm resume t"), "{loaded}");
    assert_eq!(udm.ok(&["table", "t"]).trim_end(), "0 2048 zero");
    assert!(udm.ok(&["table", "t", "--inactive"]).contains("linear"));
    udm.ok(&["suspend", "t"]);
    udm.ok(&["resume", "t"]);
    assert!(udm.ok(&["table", "t"]).contains("linear"));
    assert_eq!(udm.ok(&["table", "t", "--inactive"]), "");
    assert!(udm.refused(&["load", "t", "--table", "0 2048 unknown"]).contains("unknown"));
    // As with dmsetup, a device that serves is suspended for the moment of the change.
    udm.ok(&["load", "t", "--table", "0 4096 zero"]);
    udm.ok(&["resume", "t"]);
    assert_eq!(udm.ok(&["table", "t"]).trim_end(), "0 4096 zero");
    drop(disk);
}

#[test]
fn a_printed_table_makes_the_same_device() {
    let udm = Udm::new();
    let (cache, slow) = (udm.file("cache.img", 600 * MIB), udm.file("slow disk.img", MIB));
    let words = "pcache cache.img?persist=msync slow\\ disk.img?io=buffered 0";
    udm.ok(&["create", "t", "--table", &format!("0 2048 {words}")]);
    let printed = udm.ok(&["table", "t"]);
    for option in ["cache.img?persist=msync ", "disk.img?io=buffered "] {
        assert!(printed.contains(option), "{printed}");
    }
    udm.ok(&["remove", "t"]);
    udm.ok(&["create", "t", "--table", &printed]);
    assert_eq!(udm.ok(&["table", "t"]), printed);
    udm.ok(&["remove", "t"]);
    let words = "writecache p slow\\ disk.img fast\\ memory.img 512 0";
    let fast = udm.file("fast memory.img", MIB);
    udm.ok(&["create", "t", "--table", &format!("0 2048 {words}")]);
    assert_eq!(udm.ok(&["table", "t"]).matches("\\ ").count(), 2);
    drop((cache, slow, fast));
}

#[test]
fn a_renamed_device_goes_on() {
    let udm = Udm::new();
    let uri = udm.uri("r.sock");
    udm.ok(&["create", "old", "--table", "0 2048 zero", "--export", &uri]);
    udm.ok(&["create", "other", "--table", "0 8 zero"]);
    assert!(udm.refused(&["rename", "old", "other"]).contains("exists already"));
    udm.ok(&["rename", "old", "new"]);
    assert!(udm.refused(&["status", "old"]).contains("no such device"));
    assert_eq!(udm.ok(&["status", "new"]).trim_end(), "0 2048 zero");
    assert_eq!(read_export(&udm, &uri).len() as u64, MIB);
    udm.ok(&["create", "old", "--table", "0 16 zero"]);
    let both = udm.ok(&["status", "new", "old"]);
    assert!(both.contains("new: 0 2048 zero") && both.contains("old: 0 16 zero"), "{both}");
    assert!(udm.refused(&["create", "new", "--table", "0 8 zero"]).contains("exists already"));
    udm.ok(&["remove", "new"]);
    assert_eq!(udm.json(&["ls"]).as_array().unwrap().len(), 2);
}

#[test]
fn a_server_is_called_by_its_device() {
    let udm = Udm::new();
    let read = |pid: u64, file: &str| {
        String::from_utf8(std::fs::read(format!("/proc/{pid}/{file}")).unwrap()).unwrap()
    };
    udm.ok(&["create", "vol", "--table", "0 8 zero"]);
    let pid = udm.pid("vol");
    assert_eq!(read(pid, "comm"), "udm: vol\n");
    assert!(read(pid, "cmdline").starts_with("udm: vol\0"));
    udm.ok(&["rename", "vol", "a-name-of-more-than-ten"]);
    assert_eq!(read(pid, "comm"), "udm: a-name-of-\n");
}

#[test]
fn exports_come_and_go() {
    let udm = Udm::new();
    let said = udm.ok(&["create", "e", "--table", "0 2048 zero"]);
    assert!(said.contains("udm export e URI"), "{said}");
    let uri = udm.uri("e.sock");
    udm.ok(&["export", "e", &uri]);
    assert!(udm.refused(&["export", "e", &uri]).contains("e.sock"));
    let answer = udm.json(&["export", "e", "nbd://127.0.0.1:0"]);
    let tcp = answer["uri"].as_str().unwrap().to_owned();
    assert_ne!(tcp, "nbd://127.0.0.1:0");
    for uri in [&uri, &tcp] {
        assert_eq!(read_export(&udm, uri).len() as u64, MIB);
    }
    udm.ok(&["unexport", "e", &tcp]);
    assert!(udm.refused(&["unexport", "e", &tcp]).contains("no export"));
    assert_eq!(udm.json(&["info", "e"])["exports"].as_array().unwrap().len(), 1);
    assert!(!udm.path("e.sock").metadata().unwrap().is_file());
}

#[test]
fn clients_keep_a_device_from_being_removed() {
    let udm = Udm::new();
    let uri = udm.uri("c.sock");
    udm.ok(&["create", "c", "--table", "0 2048 zero", "--export", &uri]);
    let mut socket = UnixStream::connect(udm.path("c.sock")).unwrap();
    let mut greeting = [0; 18];
    socket.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    let mut stranger = UnixStream::connect(udm.path("c.sock")).unwrap();
    stranger.write_all(&[0xFF; 64]).unwrap();
    wait_until("a client without manners is counted", || {
        udm.json(&["info", "c"])["exports"][0]["violations"] == 1
    });
    wait_until("the client is counted", || udm.json(&["info", "c"])["clients"] == 1);
    let line = udm.refused(&["remove", "c"]);
    assert!(line.contains("1 client is connected") && line.contains("--force"), "{line}");
    assert!(udm.refused(&["unexport", "c", &uri]).contains("1 client"));
    udm.ok(&["remove", "c", "--force"]);
    assert_eq!(socket.read(&mut [0; 1]).unwrap_or(0), 0, "the client was disconnected");
}

#[test]
fn signals_end_a_server_in_order() {
    let udm = Udm::new();
    for name in ["TERM", "INT"] {
        udm.ok(&["create", "v", "--table", "0 8 zero"]);
        let pid = udm.pid("v");
        signal(pid, name);
        wait_until("the server has ended", || is_gone(pid));
        assert!(udm.refused(&["status", "v"]).contains("no such device"), "{name}");
    }
    udm.ok(&["create", "v", "--table", "0 8 zero"]);
    let pid = udm.pid("v");
    signal(pid, "PIPE");
    signal(pid, "HUP");
    assert_eq!(udm.pid("v"), pid, "a hang-up is about the log");
    // In the foreground there is none.
    let words = ["create", "f", "--foreground", "--table", "0 8 zero"];
    let mut server = udm.spawn(&words);
    udm.ok(&["wait", "f", "--timeout", "30"]);
    signal(u64::from(server.id()), "HUP");
    assert!(server.wait().unwrap().success());
}

#[test]
fn a_dead_device_keeps_its_name_and_table() {
    let udm = Udm::new();
    udm.file("a.img", MIB);
    udm.file("b.img", MIB);
    let (first, other) = ("0 2048 linear a.img 0", "0 2048 linear b.img 0");
    udm.ok(&["create", "d", "--table", first]);
    udm.kill_server("d");
    for table in [other, "0 8 zero", "0 1024 linear a.img 0"] {
        let line = udm.refused(&["create", "d", "--table", table]);
        assert!(
            line.contains("its server died, and it had another table (0 2048 linear "),
            "{line}"
        );
        assert!(line.contains("a.img 0)") && line.contains("`udm remove --force d`"), "{line}");
        assert_eq!(udm.json(&["ls"])[0]["state"], "dead", "it is as it was");
    }
    // A server of an older version that died in its first moment left it empty.
    let note = udm.path("run/d.table");
    let had = std::fs::read(&note).unwrap();
    std::fs::write(&note, "").unwrap();
    udm.ok(&["create", "d", "--table", first]);
    udm.kill_server("d");
    assert_eq!(std::fs::read(&note).unwrap(), had);
    // The same table, written otherwise and from elsewhere, goes on.
    let path = udm.path("a.img?io=buffered");
    let same = format!(" 0  2048 linear {} 0 # the first", text(&path));
    let mut create = udm.command(&["create", "d", "--table", &same]);
    assert!(create.current_dir("/").output().unwrap().status.success());
    // The table that was loaded meanwhile is its table now.
    udm.ok(&["load", "d", "--table", other]);
    udm.ok(&["resume", "d"]);
    udm.ok(&["rename", "d", "e"]);
    udm.kill_server("e");
    assert!(udm.refused(&["create", "e", "--table", first]).contains("b.img"));
    udm.ok(&["remove", "--force", "e"]);
    udm.ok(&["create", "e", "--table", first]);
    udm.ok(&["remove", "e"]);
    assert!(udm.left().is_empty(), "{:?}", udm.left());
}

#[test]
fn the_foreground_serves_in_place() {
    let udm = Udm::new();
    let words = ["create", "f", "--foreground", "--table", "0 8 zero", "--json"];
    let mut server = udm.spawn(&words);
    udm.ok(&["wait", "f", "--timeout", "30"]);
    assert_eq!(udm.pid("f"), u64::from(server.id()));
    udm.ok(&["remove", "f"]);
    let mut said = String::new();
    server.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    let ready: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(ready["name"], "f");
    assert!(server.wait().unwrap().success());
}

#[test]
fn waiting_ends_when_it_is_so() {
    let udm = Udm::new();
    let mut waiting = udm.spawn(&["wait", "w", "--timeout", "30"]);
    udm.ok(&["create", "w", "--table", "0 8 zero"]);
    assert!(waiting.wait().unwrap().success());
    udm.ok(&["wait", "w", "--until", "clean"]);
    assert!(udm.refused(&["wait", "w", "--until", "removed", "--timeout", "0"]).contains("exists"));
    let mut waiting = udm.spawn(&["wait", "w", "--until", "removed", "--timeout", "30"]);
    udm.ok(&["remove", "w"]);
    assert!(waiting.wait().unwrap().success());
}

#[test]
fn metrics_over_the_command_and_http() {
    let udm = Udm::new();
    let words = ["create", "m", "--table", "0 8 zero", "--metrics", "127.0.0.1:0"];
    let ready = udm.json(&words);
    let url = ready["metrics"].as_str().unwrap();
    let address = url.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
    let sample = "udm_device_bytes{device=\"m\"} 4096\n";
    assert!(udm.ok(&["metrics", "m"]).contains(sample));
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200 OK") && reply.contains(sample), "{reply}");
}

/// One call over the raw socket; the answer.
fn call(udm: &Udm, name: &str, bytes: &[u8]) -> Option<Value> {
    let mut stream = UnixStream::connect(udm.runtime().join(format!("{name}.ctl"))).unwrap();
    // A server that has refused already may have closed.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = BufReader::new(stream).read_until(0, &mut answer);
    answer.pop()?;
    Some(serde_json::from_slice(&answer).unwrap())
}

#[test]
fn a_export_is_told_alike_by_all_commands() {
    let udm = Udm::new();
    let uris = [udm.uri("a.sock"), udm.uri("b.sock")];
    let told = |uri: &String| {
        json!({
            "uri": uri, "client_uri": for_clients(uri), "clients": 0, "accepted": 0, "refused": 0,
            "violations": 0, "last_violation": null, "unaligned_clients": 0,
            "unaligned_requests": 0, "notes": [],
        })
    };
    let created = udm.json(&["create", "d", "--table", "0 8 zero", "--export", &uris[0]]);
    assert_eq!(created["exports"], json!([told(&uris[0])]));
    assert_eq!(udm.json(&["export", "d", &uris[1]]), told(&uris[1]));
    let both = json!([told(&uris[0]), told(&uris[1])]);
    assert_eq!(udm.json(&["info", "d"])["exports"], both);
    assert_eq!(udm.json(&["status", "--all", "d"])["exports"], both);
    // On the control socket, what an export tells beside its place is a list of facts.
    let info = call(&udm, "d", b"{\"method\":\"udm.Device.Info\"}\0").unwrap();
    let facts = info["parameters"]["exports"][0]["facts"].as_array().unwrap();
    let names: Vec<&str> = facts.iter().map(|fact| fact["name"].as_str().unwrap()).collect();
    let unaligned = ["unaligned_clients", "unaligned_requests"];
    assert_eq!(names[..4], ["accepted", "refused", "violations", "last_violation"]);
    assert_eq!(names[4..], unaligned);
}

#[test]
fn the_control_socket_bears_anything() {
    let udm = Udm::new();
    udm.ok(&["create", "h", "--table", "0 8 zero"]);
    for garbage in [&b"\0"[..], b"\xff\xfe\0", b"[]\0", b"{\"method\":1}\0", &vec![b' '; 3 << 20]] {
        assert_eq!(call(&udm, "h", garbage), None);
    }
    let error = |request: Value| {
        let answer = call(&udm, "h", format!("{request}\0").as_bytes()).unwrap();
        answer["error"].as_str().unwrap().to_owned()
    };
    let unknown = "org.varlink.service.MethodNotFound";
    let wrong = "org.varlink.service.InvalidParameter";
    assert_eq!(error(json!({ "method": "udm.Device.Unknown" })), unknown);
    assert_eq!(error(json!({ "method": "x" })), "org.varlink.service.InterfaceNotFound");
    let call_with =
        |parameters| json!({ "method": "udm.Device.Message", "parameters": parameters });
    assert_eq!(error(call_with(json!({ "sector": -1, "words": [] }))), wrong);
    assert_eq!(error(call_with(json!([1, 2]))), wrong);
    assert_eq!(error(call_with(json!({ "sector": 0, "words": [] }))), "udm.Device.Failed");
    let rename = json!({ "method": "udm.Device.Rename", "parameters": { "to": "../x" } });
    assert_eq!(error(rename), wrong);
    let info = call(&udm, "h", b"{\"method\":\"org.varlink.service.GetInfo\"}\0").unwrap();
    assert_eq!(info["parameters"]["interfaces"][1], "udm.Device");

    // Silent connections do not keep others out, up to a limit.
    let silent: Vec<_> =
        (0..40).map(|_| UnixStream::connect(udm.runtime().join("h.ctl")).unwrap()).collect();
    assert_eq!(udm.ok(&["status", "h"]).trim_end(), "0 8 zero");
    drop(silent);
}
