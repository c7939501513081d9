//! Servers that hang: every command ends, names the process and its current work, and gives
//! a remedy. The server drops the request of a command that is gone.

use std::io::Read;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::ticks::Ticks;
use crate::common::{
    Udm, client, errors_until, pattern, read_export, seconds_after, signal, text, wait_until,
    write_export,
};

const MIB: u64 = 1 << 20;

/// A command waits this long before it reports a silent server.
const SILENCE: Duration = Duration::from_secs(10);
/// More seconds than two such waits, one after the other.
const TOO_LONG: f64 = 25.0;

#[test]
fn a_stopped_server_is_named_by_every_command() {
    let udm = Udm::new();
    let origin = udm.file("origin.img", 8 * MIB);
    let cache = udm.file("cache.img", 8 * MIB);
    let table = format!("0 16384 writecache s {} {} 4096 0", text(&origin), text(&cache));
    udm.ok(&["create", "vol", "--table", &table]);
    udm.ok(&["create", "well", "--table", "0 8 zero"]);
    let pid = udm.pid("vol");
    signal(pid, "STOP");
    let wanted = format!("process {pid} is stopped (state T); `kill -CONT {pid}` resumes it");
    let commands: [&[&str]; 14] = [
        &["remove", "vol"],
        &["remove", "vol", "--drain"],
        &["remove", "vol", "--force"],
        &["drain", "vol"],
        &["flush", "vol"],
        &["status", "vol"],
        &["info", "vol"],
        &["message", "vol", "0", "flush"],
        &["suspend", "vol"],
        &["resume", "vol"],
        &["load", "vol", "--table", "0 8 zero"],
        &["rename", "vol", "other"],
        &["wait", "vol", "--until", "clean"],
        &["create", "vol", "--table", &table],
    ];
    let (start, ticks) = (Instant::now(), Ticks::start());
    let running: Vec<_> = commands.iter().map(|words| (words, udm.spawn(words))).collect();
    for (words, child) in running {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
        assert!(said.starts_with(&format!("udm: {}: vol: ", words[0])), "{said}");
        assert!(said.contains(&wanted) && said.lines().count() == 1, "{words:?}: {said}");
    }
    assert!(start.elapsed() >= SILENCE, "{:?}", start.elapsed());
    assert!(ticks.seconds() < TOO_LONG, "all at once: {} s", ticks.seconds());

    // When the server continues, it does not execute the dropped requests.
    signal(pid, "CONT");
    assert_eq!(udm.json(&["info", "vol"])["state"], "active");
    assert_eq!(udm.pid("vol"), pid);
    assert_eq!(udm.ok(&["table", "vol", "--inactive"]), "");
}

#[test]
fn ls_asks_all_at_once_and_shows_who_does_not_answer() {
    let udm = Udm::new();
    let names: Vec<String> = (0..6).map(|nth| format!("hung{nth}")).collect();
    for name in &names {
        udm.ok(&["create", name, "--table", "0 8 zero"]);
    }
    udm.ok(&["create", "dead", "--table", "0 8 zero"]);
    udm.ok(&["create", "well", "--table", "0 8 zero"]);
    udm.kill_server("dead");
    let pids: Vec<u64> = names.iter().map(|name| udm.pid(name)).collect();
    pids.iter().for_each(|pid| signal(*pid, "STOP"));
    let ticks = Ticks::start();
    let (list, status) = std::thread::scope(|scope| {
        let list = scope.spawn(|| udm.json(&["ls"]));
        let status = scope.spawn(|| udm.run(&["status"]));
        (list.join().unwrap(), status.join().unwrap())
    });
    assert!(ticks.seconds() < TOO_LONG, "one deadline for all: {} s", ticks.seconds());
    let state_of = |name: &str| {
        let all = list.as_array().unwrap();
        all.iter().find(|device| device["name"] == name).unwrap()["state"].clone()
    };
    assert_eq!((state_of("dead"), state_of("well")), ("dead".into(), "active".into()));
    // `status` says the same of them.
    assert!(status.out.contains("dead: dead\n") && status.out.contains("well: 0 8 zero"));
    for (name, pid) in names.iter().zip(&pids) {
        assert_eq!(state_of(name), "hung");
        assert!(status.out.contains(&format!("{name}: hung\n")), "{status:?}");
        assert!(status.err.contains(&format!("process {pid} is stopped")), "{status:?}");
    }
    assert_eq!(status.code, 1);
    pids.iter().for_each(|pid| signal(*pid, "CONT"));
    let states = udm.json(&["ls"]);
    let is_active = |device: &serde_json::Value| device["state"] == "active";
    assert_eq!(states.as_array().unwrap().iter().filter(|device| is_active(device)).count(), 7);
}

#[test]
fn a_dead_device_alone_is_no_empty_list() {
    let udm = Udm::new();
    udm.ok(&["create", "d", "--table", "0 8 zero"]);
    udm.kill_server("d");
    assert!(udm.ok(&["ls"]).contains("dead"));
    let outcome = udm.run(&["status"]);
    assert_eq!((outcome.code, outcome.out.as_str()), (1, "d: dead\n"));
    let states = udm.run(&["status", "--json"]).out;
    let states: serde_json::Value = serde_json::from_str(&states).unwrap();
    assert_eq!((&states[0]["name"], &states[0]["state"]), (&"d".into(), &"dead".into()));
}

/// A file system on a loop device, which can be frozen: writes to its files then hang.
struct FileSystem {
    mount: PathBuf,
}

impl FileSystem {
    fn new(udm: &Udm) -> FileSystem {
        let image = udm.file("fs.img", 96 * MIB);
        let mount = udm.path("mnt");
        std::fs::create_dir(&mount).unwrap();
        client("mke2fs", &["-q", "-t", "ext4", text(&image)]);
        client("mount", &["-o", "loop", text(&image), text(&mount)]);
        FileSystem { mount }
    }

    fn freeze(&self, how: &str) {
        client("fsfreeze", &[how, text(&self.mount)]);
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        for (program, words) in [("fsfreeze", ["-u"].as_slice()), ("umount", &["-l"])] {
            let mut command = std::process::Command::new(program);
            let _ = command.args(words).arg(&self.mount).stderr(Stdio::null()).status();
        }
    }
}

/// Whether a thread of `pid` waits in the kernel.
fn is_hanging(pid: u64) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let mut stats = tasks.map(|task| std::fs::read_to_string(task.path().join("stat")));
    stats.any(|stat| stat.is_ok_and(|stat| stat.contains(") D ")))
}

#[test]
fn an_origin_that_does_not_answer_keeps_no_command_and_loses_no_device() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tested: only root can freeze a file system");
        return;
    }
    let udm = Udm::new();
    let system = FileSystem::new(&udm);
    let origin = system.mount.join("origin.img");
    std::fs::File::create(&origin).unwrap().set_len(32 * MIB).unwrap();
    let cache = udm.file("cache.img", 64 * MIB);
    let uri = udm.uri("vol.sock");
    let words = "4096 2 high_watermark 100";
    let table = format!("0 65536 writecache s {} {} {words}", text(&origin), text(&cache));
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    let data = pattern(4, 16 << 20);
    write_export(&udm, &uri, &data);
    system.freeze("-f");
    let pid = udm.pid("vol");

    // A command that suspends and goes away leaves no suspended device.
    let mut drain = udm.spawn(&["drain", "vol"]);
    wait_until("a write hangs", || is_hanging(pid));
    let mut suspend = udm.spawn(&["suspend", "vol"]);
    wait_until("it suspends", || udm.json(&["info", "vol"])["state"] == "suspended");
    suspend.kill().unwrap();
    suspend.wait().unwrap();
    wait_until("it serves again", || udm.json(&["info", "vol"])["state"] == "active");
    assert!(read_export(&udm, &uri)[..data.len()] == data[..]);
    drain.kill().unwrap();
    drain.wait().unwrap();

    let mut drain = udm.spawn(&["drain", "vol"]);
    let notes = udm.runtime().join("vol.table");
    let line = std::thread::scope(|scope| {
        let remove = scope.spawn(|| udm.refused(&["remove", "vol"]));
        wait_until("the end begins", || udm.json(&["info", "vol"])["state"] == "suspended");
        std::fs::remove_file(&notes).unwrap();
        remove.join().unwrap()
    });
    wait_until("a file that was removed meanwhile is restored", || notes.exists());
    assert!(line.contains("vol: not removed: write-back to its devices is still not"), "{line}");
    assert!(line.contains("the device still serves, `udm remove --force vol` ends it"), "{line}");
    assert_eq!(
        (udm.json(&["info", "vol"])["state"].clone(), udm.pid("vol")),
        ("active".into(), pid)
    );
    assert!(read_export(&udm, &uri)[..data.len()] == data[..], "its ways in are open");
    system.freeze("-u");
    let _ = drain.wait().unwrap();
    udm.ok(&["remove", "vol", "--drain"]);
    assert!(std::fs::read(&origin).unwrap()[..data.len()] == data[..]);
}

#[test]
fn a_drain_ends_with_its_command() {
    let udm = Udm::new();
    let (origin, cache) = (udm.file("origin.img", 32 * MIB), udm.file("cache.img", 64 * MIB));
    let uri = udm.uri("vol.sock");
    let words = "4096 2 high_watermark 100";
    let table = format!("0 65536 writecache s {} {} {words}", text(&origin), text(&cache));
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    write_export(&udm, &uri, &pattern(3, 16 << 20));
    let mut drain = udm.spawn(&["drain", "vol"]);
    drain.kill().unwrap();
    drain.wait().unwrap();
    udm.ok(&["remove", "vol", "--drain"]);
}

/// The server that `create` started, once it runs. Before that it is a copy of `create`, for which
/// `create` waits in the kernel.
fn child_of(pid: u32) -> Option<u64> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    let child = children.split_whitespace().next()?;
    let words = std::fs::read(format!("/proc/{child}/cmdline")).ok()?;
    let is_server = String::from_utf8_lossy(&words).contains("serve");
    is_server.then(|| child.parse().ok()).flatten()
}

#[test]
fn a_server_that_hangs_while_it_opens_a_cache_is_told_about() {
    let udm = Udm::new();
    let origin = udm.file("origin.img", 64 * MIB);
    let cache = udm.file("cache.img", 512 * MIB);
    let table = format!("0 131072 pcache {} {}", text(&cache), text(&origin));
    // Stopped while it opens the cache, which may take some tries.
    let (mut create, server, mut errors, mut said) = (0..100)
        .find_map(|_| {
            let mut create = udm.spawn(&["create", "vol", "--table", &table]);
            let mut server = None;
            wait_until("there is a server", || {
                server = server.or_else(|| child_of(create.id()));
                server.is_some() || create.try_wait().unwrap().is_some()
            });
            server.into_iter().for_each(|pid| signal(pid, "STOP"));
            std::thread::sleep(Duration::from_millis(300));
            if let (Some(server), None) = (server, create.try_wait().unwrap()) {
                // Before or after it opens the cache, it "has not answered for 10 s".
                let (errors, said) = errors_until(&mut create, "for 10 s");
                if said.contains("has made no progress") {
                    return Some((create, server, errors, said));
                }
            }
            server.into_iter().for_each(|pid| signal(pid, "KILL"));
            let _ = create.wait();
            None
        })
        .expect("a server that is stopped in time");
    signal(server, "KILL");
    let ticks = Ticks::start();
    errors.read_to_string(&mut said).unwrap();
    let status = create.wait().unwrap();
    assert!(ticks.seconds() < TOO_LONG, "it does not wait for a server that has died");
    assert_eq!(status.code(), Some(1), "{said}");
    let is_told = said.contains("has made no progress for 10 s") && said.contains("kill -CONT");
    assert!(is_told && said.contains("ended by signal 9"), "{said}");
}

#[test]
fn a_flush_of_a_command_that_hangs_is_told_as_a_clients() {
    let udm = Udm::new();
    let origin = udm.file("origin.img", MIB);
    let origin = text(&origin);
    let table = format!("0 2048 delay {origin} 0 0 {origin} 0 0 {origin} 0 25000");
    udm.ok(&["create", "vol", "--table", &table]);
    let flush = udm.spawn(&["flush", "vol"]);
    std::thread::sleep(SILENCE);
    let mut slow = serde_json::Value::Null;
    wait_until("the flush is slow", || {
        slow = udm.json(&["info", "vol"])["slow_requests"].clone();
        slow != serde_json::json!([])
    });
    assert!(slow.to_string().contains("flush"), "{slow}");
    let log = std::fs::read_to_string(udm.runtime().join("vol.log")).unwrap();
    assert!(seconds_after(&log, "flush: not answered for ") >= Some(10), "{log}");
    assert_eq!(flush.wait_with_output().unwrap().status.code(), Some(0));
    let info = udm.json(&["info", "vol"]);
    assert_eq!(
        (&info["slow_requests"], &info["slow_requests_total"]),
        (&serde_json::json!([]), &1.into())
    );
}
