//! Servers that hang: every command ends, names the process and its current work, and gives
//! a remedy. The server drops the request of a command that is gone.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::common::ticks::Ticks;
use crate::common::{
    Udm, client, errors_until, is_gone, pattern, read_export, seconds_after, signal, text,
    wait_until, write_export,
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

/// A device `vol` with dirty data, whose origin can be frozen.
struct Bench {
    system: FileSystem,
    origin: PathBuf,
    uri: String,
    data: Vec<u8>,
}

impl Bench {
    /// `None`, with a message, where a file system cannot be frozen.
    fn new(udm: &Udm) -> Option<Bench> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not tested: only root can freeze a file system");
            return None;
        }
        let system = FileSystem::new(udm);
        let origin = system.mount.join("origin.img");
        std::fs::File::create(&origin).unwrap().set_len(32 * MIB).unwrap();
        let (cache, uri) = (udm.file("cache.img", 64 * MIB), udm.uri("vol.sock"));
        let words = "4096 2 high_watermark 100";
        let table = format!("0 65536 writecache s {} {} {words}", text(&origin), text(&cache));
        udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
        let data = pattern(4, 16 << 20);
        write_export(udm, &uri, &data);
        wait_until("the clients are gone", || udm.json(&["info", "vol"])["clients"] == 0);
        Some(Bench { system, origin, uri, data })
    }

    /// The origin hangs. Returns the command whose write does.
    fn freeze(&self, udm: &Udm) -> Child {
        self.system.freeze("-f");
        let drain = udm.spawn(&["drain", "vol"]);
        wait_until("a write hangs", || is_hanging(udm.pid("vol")));
        drain
    }

    /// Whether the export is open and has all data.
    fn is_served(&self, udm: &Udm) -> bool {
        read_export(udm, &self.uri)[..self.data.len()] == self.data[..]
    }

    fn is_on_origin(&self) -> bool {
        std::fs::read(&self.origin).unwrap()[..self.data.len()] == self.data[..]
    }
}

fn end(mut command: Child) {
    command.kill().unwrap();
    command.wait().unwrap();
}

fn wait_for_state(udm: &Udm, state: &str) {
    wait_until(state, || udm.json(&["info", "vol"])["state"] == state);
}

fn has_no_exports(udm: &Udm) -> bool {
    udm.json(&["info", "vol"])["exports"] == serde_json::json!([])
}

/// The threads of `pid` that wait in the kernel.
fn waiting_threads(pid: u64) -> Vec<PathBuf> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let waits = |task: &PathBuf| {
        std::fs::read_to_string(task.join("stat")).is_ok_and(|stat| stat.contains(") D "))
    };
    tasks.map(|task| task.path()).filter(waits).collect()
}

/// Whether a thread of `pid` hangs in the kernel: it waits there for longer than for a disk.
fn is_hanging(pid: u64) -> bool {
    let before = waiting_threads(pid);
    if before.is_empty() {
        return false;
    }
    std::thread::sleep(Duration::from_millis(200));
    waiting_threads(pid).iter().any(|task| before.contains(task))
}

#[test]
fn an_origin_that_does_not_answer_keeps_no_command_and_loses_no_device() {
    let udm = Udm::new();
    let Some(bench) = Bench::new(&udm) else { return };
    let pid = udm.pid("vol");

    // A command that suspends and goes away leaves no suspended device.
    let drain = bench.freeze(&udm);
    let suspend = udm.spawn(&["suspend", "vol"]);
    wait_for_state(&udm, "suspended");
    end(suspend);
    wait_for_state(&udm, "active");
    assert!(bench.is_served(&udm));
    end(drain);

    let mut drain = udm.spawn(&["drain", "vol"]);
    let notes = udm.runtime().join("vol.table");
    let line = std::thread::scope(|scope| {
        let remove = scope.spawn(|| udm.refused(&["remove", "vol"]));
        wait_for_state(&udm, "suspended");
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
    assert!(bench.is_served(&udm), "its exports are open");
    bench.system.freeze("-u");
    let _ = drain.wait().unwrap();
    udm.ok(&["remove", "vol", "--drain"]);
    assert!(bench.is_on_origin());
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

/// While a removal is under way, the device takes no change; while the removal waits for a request,
/// it takes no second removal either. After a refused removal it does.
#[test]
fn a_device_that_is_being_removed_takes_no_table() {
    let udm = Udm::new();
    let Some(bench) = Bench::new(&udm) else { return };
    let stream = crate::clients::agreed(&udm.path("vol.sock"));
    assert!(udm.refused(&["remove", "vol"]).contains("1 client is connected"));
    drop(stream);
    wait_until("the client is gone", || udm.json(&["info", "vol"])["clients"] == 0);
    let mut drain = bench.freeze(&udm);

    // This one waits for its data without a limit.
    let remove = udm.spawn(&["remove", "vol", "--drain"]);
    wait_until("the removal has begun", || udm.run(&["save", "vol"]).code != 0);
    let other = udm.uri("other.sock");
    let changes: [&[&str]; 8] = [
        &["load", "vol", "--table", "0 8 zero"],
        &["suspend", "vol"],
        &["resume", "vol"],
        &["rename", "vol", "other"],
        &["message", "vol", "0", "flush"],
        &["export", "vol", &other],
        &["unexport", "vol", &bench.uri],
        &["save", "vol"],
    ];
    for words in changes {
        let line = udm.refused(words);
        assert!(line.contains("the device is being removed"), "{words:?}: {line}");
    }
    end(remove);
    wait_until("the removal fails", || udm.run(&["save", "vol"]).code == 0);

    let remove = udm.spawn(&["remove", "vol"]);
    wait_for_state(&udm, "suspended");
    for words in [&["remove", "vol"][..], &["remove", "vol", "--force"]] {
        let line = udm.refused(words);
        assert!(line.contains("the device is being removed already"), "{words:?}: {line}");
        assert!(has_no_exports(&udm), "the other removal has closed them");
    }
    end(remove);
    wait_for_state(&udm, "active");
    wait_until("its export is open", || udm.run(&["save", "vol"]).out.contains(&bench.uri));
    assert_eq!(udm.ok(&["table", "vol", "--inactive"]), "");
    udm.ok(&["load", "vol", "--table", "0 8 zero"]);
    assert!(bench.is_served(&udm));
    let log = std::fs::read_to_string(udm.runtime().join("vol.log")).unwrap();
    for why in ["1 client is connected", "the caller has disconnected"] {
        assert!(log.contains(&format!("vol: not removed: {why}")), "{log}");
    }
    bench.system.freeze("-u");
    let _ = drain.wait().unwrap();
    udm.ok(&["remove", "vol", "--drain"]);
    assert!(bench.is_on_origin());
}

/// A removal that fails leaves the state that it found when it could change it, and not the
/// passing state of another command.
#[test]
fn a_removal_that_waited_for_a_suspend_leaves_no_suspended_device() {
    let udm = Udm::new();
    let Some(bench) = Bench::new(&udm) else { return };
    let mut drain = bench.freeze(&udm);
    let suspend = udm.spawn(&["suspend", "vol"]);
    wait_for_state(&udm, "suspended");
    let remove = udm.spawn(&["remove", "vol"]);
    wait_until("the removal has begun", || has_no_exports(&udm));
    // The suspend is cancelled, and the removal suspends the device for itself.
    end(suspend);
    let log = udm.runtime().join("vol.log");
    let has = |words: &str| std::fs::read_to_string(&log).unwrap().contains(words);
    wait_until("the suspend is cancelled", || has("control connection closed"));
    wait_for_state(&udm, "suspended");
    end(remove);
    wait_until("the removal fails", || has("vol: not removed: the caller has disconnected"));
    wait_for_state(&udm, "active");
    assert!(bench.is_served(&udm));
    bench.system.freeze("-u");
    let _ = drain.wait().unwrap();
    udm.ok(&["remove", "vol", "--drain"]);
    assert!(bench.is_on_origin());
}

/// A signal ends the server, whatever becomes of a removal that was under way.
#[test]
fn a_removal_that_fails_does_not_take_back_the_end_that_a_signal_began() {
    let udm = Udm::new();
    let Some(bench) = Bench::new(&udm) else { return };
    let pid = udm.pid("vol");
    let drain = bench.freeze(&udm);
    let remove = udm.spawn(&["remove", "vol"]);
    wait_for_state(&udm, "suspended");
    signal(pid, "TERM");
    let log = udm.runtime().join("vol.log");
    let has = |words: &str| std::fs::read_to_string(&log).unwrap().contains(words);
    wait_until("the server ends", || has("vol: ending on "));
    end(remove);
    wait_until("the removal fails", || has("vol: not removed: the caller has disconnected"));
    assert!(has_no_exports(&udm));
    bench.system.freeze("-u");
    wait_until("the server has ended", || is_gone(pid));
    let _ = drain.wait_with_output();
    assert_eq!(udm.ok(&["ls"]), "No devices found\n");
    assert_eq!(udm.left(), Vec::<String>::new());
}

/// A removal whose command was killed does not keep the next one from its work, and one that still
/// writes back gives way to one by force.
#[test]
fn a_removal_gives_way() {
    let udm = Udm::new();
    let Some(bench) = Bench::new(&udm) else { return };
    let mut drain = bench.freeze(&udm);
    let mut first = udm.spawn(&["remove", "vol", "--drain"]);
    let _errors = errors_until(&mut first, "drain vol: ");
    end(first);
    let mut second = udm.spawn(&["remove", "vol", "--drain"]);
    let (mut errors, mut said) = errors_until(&mut second, "drain vol: ");
    // It overtakes the second one, and ends the device when its origin works again.
    let third = udm.spawn(&["remove", "vol", "--force"]);
    errors.read_to_string(&mut said).unwrap();
    assert_eq!(second.wait().unwrap().code(), Some(1), "{said}");
    assert!(said.contains("the device is being removed by another command"), "{said}");
    bench.system.freeze("-u");
    let third = third.wait_with_output().unwrap();
    assert!(third.status.success(), "{third:?}");
    let _ = drain.wait().unwrap();
    assert_eq!(udm.ok(&["ls"]), "No devices found\n");
}
