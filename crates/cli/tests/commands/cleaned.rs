//! Files of the runtime directory that others clean away: the living server keeps its name, is
//! reached again, and restores its files; no other server gets its name.

use std::path::PathBuf;

use crate::common::{Udm, is_gone, pattern, read_export, signal, text, wait_until, write_export};

const MIB: u64 = 1 << 20;

/// The files of a server, as they are cleaned away.
const FILES: [&str; 7] = ["lock", "ctl", "table", "media", "log", "shm", "all of them"];

fn files(udm: &Udm, which: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(udm.runtime()).unwrap().flatten();
    let all = entries.map(|entry| entry.path());
    let is_one = |path: &PathBuf| path.extension().is_some_and(|end| end == which);
    all.filter(|path| which == "all of them" || is_one(path)).collect()
}

/// A device with unflushed data, whose table is given.
fn create(udm: &Udm, table: &str) -> u64 {
    let uri = udm.uri("v.sock");
    udm.ok(&["create", "v", "--table", table, "--export", &uri]);
    write_export(udm, &uri, &pattern(1, MIB as usize));
    udm.pid("v")
}

fn table(udm: &Udm) -> String {
    let (origin, fast) = (udm.file("o", 16 * MIB), udm.file("f", 512 * MIB));
    format!("0 32768 pcache {} {} 0 max_age 3600000", text(&fast), text(&origin))
}

#[test]
fn a_living_server_restores_its_files_and_keeps_its_name() {
    let udm = Udm::new();
    let table = table(&udm);
    let mut pid = create(&udm, &table);
    let before = udm.left().len();
    for which in FILES {
        let gone = files(&udm, which);
        assert!(!gone.is_empty(), "{which}");
        gone.iter().for_each(|path| std::fs::remove_file(path).unwrap());
        // Immediately: no other server gets the name, and commands find the living one.
        let line = udm.refused(&["create", "v", "--table", "0 8 zero"]);
        assert!(line.contains("exists already"), "{which}: {line}");
        assert_eq!(udm.pid("v"), pid, "{which}");
        wait_until(which, || gone.iter().all(|path| path.exists()) && udm.left().len() >= before);
        // While its shared memory gets new files, the device is suspended.
        wait_until(which, || udm.json(&["ls"])[0]["state"] == "active");
        let log = udm.runtime().join("v.log");
        wait_until("the log has it", || {
            std::fs::read_to_string(&log).unwrap_or_default().contains("were restored: ")
        });
        // The new files serve like the old ones: a killed server loses no data.
        signal(pid, "KILL");
        wait_until("it is gone", || is_gone(pid));
        let other = udm.refused(&["create", "v", "--table", "0 8 zero"]);
        assert!(other.contains("had another table"), "{which}: {other}");
        udm.ok(&["create", "v", "--table", &table, "--export", &udm.uri("v.sock")]);
        let log = std::fs::read_to_string(&log).unwrap();
        assert!(log.contains(&format!("process {pid}")), "{which}: {log}");
        pid = udm.pid("v");
        let read = read_export(&udm, &udm.uri("v.sock"));
        assert!(read[..MIB as usize] == pattern(1, MIB as usize)[..], "{which}");
    }
    udm.ok(&["remove", "v", "--force"]);
    assert_eq!(udm.left(), Vec::<String>::new(), "nothing comes back after the end");
}

#[test]
fn files_that_are_cleaned_while_a_server_ends_stay_away() {
    for which in FILES {
        let udm = Udm::new();
        let table = table(&udm);
        let pid = create(&udm, &table);
        // The server is stopped in the middle of its end by a clients' request that waits.
        signal(pid, "STOP");
        let mut remove = udm.spawn(&["remove", "v", "--force"]);
        files(&udm, which).iter().for_each(|path| std::fs::remove_file(path).unwrap());
        signal(pid, "CONT");
        assert!(remove.wait().unwrap().code().is_some(), "{which}");
        if !is_gone(pid) {
            // The command had not reached the server before its socket was removed.
            udm.ok(&["remove", "v", "--force"]);
        }
        wait_until("it is gone", || is_gone(pid));
        assert_eq!(udm.left(), Vec::<String>::new(), "{which}");
        udm.ok(&["create", "v", "--table", &table, "--export", &udm.uri("v.sock")]);
        let read = read_export(&udm, &udm.uri("v.sock"));
        assert!(read[..MIB as usize] == pattern(1, MIB as usize)[..], "{which}");
    }
}

#[test]
fn the_directory_itself_may_be_removed() {
    let udm = Udm::new();
    udm.ok(&["create", "v", "--table", "0 8 zero"]);
    let pid = udm.pid("v");
    std::fs::remove_dir_all(udm.runtime()).unwrap();
    wait_until("it is there again", || udm.runtime().join("v.ctl").exists());
    assert_eq!(udm.pid("v"), pid);
    let line = udm.refused(&["create", "v", "--table", "0 8 zero"]);
    assert!(line.contains("exists already"), "{line}");
    udm.ok(&["remove", "v"]);
}

#[test]
fn a_refused_command_removes_nothing_of_a_living_server() {
    let udm = Udm::new();
    udm.ok(&["create", "v", "--table", "0 8 zero"]);
    let before = udm.left();
    for words in [
        &["create", "v", "--table", "0 8 zero"][..],
        &["create", "v", "--table", "0 8 zero", "--foreground"],
        &["create", "w", "--table", "0 8 nothing"],
        &["rename", "v", "v/w"],
    ] {
        assert_ne!(udm.run(words).code, 0, "{words:?}");
        let _ = std::fs::remove_file(udm.runtime().join("v.lock"));
        assert_ne!(udm.run(words).code, 0, "{words:?}");
        wait_until("the lock is there again", || udm.runtime().join("v.lock").exists());
        let mut left = udm.left();
        let mut before = before.clone();
        left.sort();
        before.sort();
        assert_eq!(left, before, "{words:?}");
    }
}
