//! Signals and resource limits: which of them end a server, and how the next server reports it.

use std::process::Command;

use crate::common::{
    Outcome, Udm, client, for_clients, is_gone, pattern, read_export, signal, text, wait_until,
    write_export,
};

const MIB: u64 = 1 << 20;

fn log(udm: &Udm, name: &str) -> String {
    std::fs::read_to_string(udm.runtime().join(format!("{name}.log"))).unwrap_or_default()
}

/// Runs a command of udm with limits of `prlimit`, or with signals that a shell has set.
fn run_under(udm: &Udm, words: &[&str], under: &[&str]) -> Outcome {
    let own = udm.command(words);
    let mut limited = udm.at_home(Command::new(under[0]));
    limited.args(&under[1..]).arg(own.get_program()).args(own.get_args());
    let output = limited.output().unwrap();
    Outcome {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The tables of all targets over `o`, with their fast device `f`.
const TABLES: [(&str, &[&str]); 4] = [
    ("linear", &["--table", "0 131072 linear o 0"]),
    ("writecache", &["--origin", "o", "--fast", "f", "--target", "writecache"]),
    ("cache", &["--origin", "o", "--fast", "f", "--target", "cache"]),
    ("pcache", &["--origin", "o", "--fast", "f", "--target", "pcache"]),
];

#[test]
fn a_write_beyond_the_limit_of_file_sizes_is_an_error_like_others() {
    for (target, words) in TABLES {
        let udm = Udm::new();
        udm.file("o", 64 * MIB);
        udm.file("f", 600 * MIB);
        let uri = udm.uri("v.sock");
        let words = [&["create", "v"], words, &["--export", &uri]].concat();
        let limit = if target == "pcache" { 610 * MIB } else { 20 * MIB };
        let limited = format!("--fsize={limit}:unlimited");
        // The signal's action is the default one, even if this test's parent ignores it.
        let created = run_under(&udm, &words, &["prlimit", &limited, "--"]);
        let is_created = created.code == 0;
        assert!(is_created || target != "linear", "{target}: {created:?}");
        if !is_created {
            // The file of the cache cannot be reserved below the limit, which is an error.
            assert_eq!(created.code, 1, "{target}: {created:?}");
            continue;
        }
        if limit < 64 * MIB {
            assert!(created.err.contains("ulimit -f"), "{target}: {created:?}");
        }
        let pid = udm.pid("v");
        client("prlimit", &["--pid", &pid.to_string(), &format!("--fsize={}:unlimited", 20 * MIB)]);
        let mut io = Command::new("qemu-io");
        io.args(["-f", "raw", "-c", "write 0 64k", "-c", "write 48M 64k", "-c", "flush"]);
        let _ = io.arg(for_clients(&uri)).output().unwrap();
        let mut drain = udm.spawn(&["drain", "v"]);
        let fails = || log(&udm, "v").contains("(errno 27)");
        wait_until("the error is in the log", || {
            fails() || drain.try_wait().unwrap().is_some() || is_gone(pid)
        });
        assert_eq!(udm.pid("v"), pid, "{target}: the server is the same");
        client("prlimit", &["--pid", &pid.to_string(), "--fsize=unlimited:unlimited"]);
        wait_until("the drain ends", || drain.try_wait().unwrap().is_some());
        wait_until("all is written back", || udm.run(&["drain", "v"]).code == 0);
    }
}

#[test]
fn signals_without_a_meaning_are_logged_once_and_ignored() {
    let udm = Udm::new();
    udm.file("o", 4 * MIB);
    let uri = udm.uri("v.sock");
    udm.ok(&["create", "v", "--table", "0 8192 linear o 0", "--export", &uri]);
    let pid = udm.pid("v");
    let names = ["XCPU", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "IO"];
    for name in names.iter().chain(&["XFSZ", "PIPE", "WINCH", "URG", "CHLD", "CONT"]) {
        signal(pid, name);
        signal(pid, name);
    }
    for name in names {
        wait_until(name, || log(&udm, "v").contains(&format!("(SIG{name}): ignored")));
    }
    signal(pid, "USR1");
    write_export(&udm, &uri, &pattern(1, 1 << 20));
    assert_eq!(udm.pid("v"), pid);
    assert_eq!(log(&udm, "v").matches("(SIGUSR1)").count(), 1, "{}", log(&udm, "v"));
    assert!(read_export(&udm, &uri)[..1 << 20] == pattern(1, 1 << 20));
    // After an orderly end the next server does not report a death.
    signal(pid, "TERM");
    wait_until("it is gone", || is_gone(pid));
    assert!(log(&udm, "v").contains("ending on signal 15 (SIGTERM)"));
    udm.ok(&["create", "v", "--table", "0 8192 linear o 0"]);
    assert!(!log(&udm, "v").contains("died"), "{}", log(&udm, "v"));
}

#[test]
fn the_next_server_logs_how_the_last_one_ended() {
    let udm = Udm::new();
    let words = ["create", "v", "--table", "0 8 zero"];
    for (name, told) in [
        ("QUIT", "ended by signal 3 (SIGQUIT)"),
        ("KILL", "it is not known how process {} ended; SIGKILL"),
        ("ABRT", "it is not known how process {} ended; SIGKILL"),
    ] {
        udm.ok(&words);
        let pid = udm.pid("v");
        signal(pid, name);
        wait_until("it is gone", || is_gone(pid));
        // A refused attempt does not change the record.
        let other = udm.refused(&["create", "v", "--table", "0 16 zero"]);
        assert!(!other.contains("died") || other.contains("another table"), "{other}");
        udm.ok(&words);
        let told = told.replace("{}", &pid.to_string());
        let log = log(&udm, "v");
        let line = log.lines().rfind(|line| line.contains("the previous server died: "));
        let line = line.unwrap_or_else(|| panic!("{name}: {log}"));
        assert!(line.contains(&told) && line.contains(&format!("process {pid}")), "{line}");
        udm.ok(&["remove", "v"]);
    }
    // Another boot, as the record of the dead server has it.
    udm.ok(&words);
    udm.kill_server("v");
    std::fs::write(udm.runtime().join("v.lock"), "77\nanother boot\n").unwrap();
    udm.ok(&words);
    assert!(log(&udm, "v").contains("process 77 ended with the last boot of this machine"));
}

#[test]
fn limits_that_are_too_low_are_noted_at_create() {
    let udm = Udm::new();
    let disk = udm.file("o", 64 * MIB);
    let table = format!("0 131072 linear {} 0", text(&disk));
    let uri = udm.uri("v.sock");
    let words = ["create", "v", "--table", &table, "--export", &uri];
    for (limit, told) in [
        ("--fsize=20971520", "at most 20.0 MiB (ulimit -f)"),
        ("--nofile=60", "at most 60 files (ulimit -n)"),
        ("--as=300000000", "of address space (ulimit -v)"),
    ] {
        let created = run_under(&udm, &words, &["prlimit", limit, "--"]);
        assert!(created.code == 0 && created.err.contains(told), "{limit}: {created:?}");
        assert!(created.err.contains("prlimit --pid"), "{limit}: {created:?}");
        assert!(log(&udm, "v").contains(told), "{limit}");
        udm.ok(&["remove", "v"]);
    }
    let created = run_under(&udm, &words, &["prlimit", "--nofile=1024", "--memlock=0", "--"]);
    assert!(created.code == 0 && created.err.is_empty(), "{created:?}");
}
