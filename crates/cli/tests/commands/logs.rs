//! Logs: the messages that udm writes without being asked, and how long it keeps them.

use crate::common::{Udm, client, for_clients, pattern, signal, text, wait_until, write_export};

const MIB: u64 = 1 << 20;

fn log(udm: &Udm, file: &str) -> String {
    std::fs::read_to_string(udm.runtime().join(file)).unwrap_or_default()
}

fn lines_with<'a>(log: &'a str, what: &str) -> Vec<&'a str> {
    log.lines().filter(|line| line.contains(what)).collect()
}

#[test]
fn a_log_is_opened_anew_outlives_its_device_and_is_bounded() {
    let udm = Udm::new();
    udm.ok(&["create", "v", "--table", "0 8 zero"]);
    let pid = udm.pid("v");
    let (here, away) = (udm.runtime().join("v.log"), udm.path("moved.log"));
    std::fs::rename(&here, &away).unwrap();
    signal(pid, "HUP");
    wait_until("the log is there again", || log(&udm, "v.log").contains("reopened"));
    assert!(std::fs::read_to_string(&away).unwrap().contains("serves"));
    udm.ok(&["suspend", "v"]);
    assert!(log(&udm, "v.log").contains("v: suspend"));

    // One that is too long makes room.
    std::fs::OpenOptions::new().append(true).open(&here).unwrap().set_len(MIB).unwrap();
    udm.ok(&["resume", "v"]);
    udm.ok(&["suspend", "v"]);
    assert_eq!(std::fs::metadata(udm.runtime().join("v.log.1")).unwrap().len() >> 20, 1);
    assert!(std::fs::metadata(&here).unwrap().len() < 1000);

    // A log follows the device's name, stays after the device is removed, and the next device
    // continues it.
    udm.ok(&["rename", "v", "w"]);
    udm.ok(&["remove", "w"]);
    assert!(log(&udm, "w.log").contains("w: removed; 0 B of dirty data"));
    udm.ok(&["create", "w", "--table", "0 8 zero"]);
    assert_eq!(lines_with(&log(&udm, "w.log"), "removed").len(), 1);
    udm.ok(&["remove", "w"]);
    assert!(udm.refused(&["create", "x", "--table", "0 8 nothing"]).contains("nothing"));
    assert!(!udm.runtime().join("x.log").exists(), "a refusal leaves none");

    // Of devices that are gone, the newest are kept.
    for nth in 0..40 {
        let old = udm.runtime().join(format!("old{nth}.log"));
        std::fs::write(&old, "x").unwrap();
        client("touch", &["-d", &format!("2001-01-01 00:{nth:02}:00"), text(&old)]);
    }
    udm.ok(&["create", "y", "--table", "0 8 zero"]);
    let logs = std::fs::read_dir(udm.runtime()).unwrap().flatten();
    let names: Vec<_> = logs.map(|entry| entry.file_name().into_string().unwrap()).collect();
    let old: Vec<_> = names.iter().filter(|name| name.starts_with("old")).collect();
    assert!(old.len() == 31 && !names.contains(&"old8.log".into()), "{names:?}");
    assert!(names.contains(&"old9.log".into()) && names.contains(&"w.log".into()), "{names:?}");
}

/// A small file system that can be filled.
struct Small(std::path::PathBuf);

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").args(["-l", text(&self.0)]).status();
    }
}

#[test]
fn a_failing_origin_and_a_full_cache_are_told_once_with_errno() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tested: only root can mount a small file system");
        return;
    }
    let udm = Udm::new();
    let folder = udm.path("small");
    std::fs::create_dir(&folder).unwrap();
    client("mount", &["-t", "tmpfs", "-o", "size=8m", "tmpfs", text(&folder)]);
    let small = Small(folder.clone());
    // The origin is sparse, and finds no room when it is written.
    let origin = folder.join("origin.img");
    std::fs::File::create(&origin).unwrap().set_len(64 * MIB).unwrap();
    std::fs::write(folder.join("ballast"), vec![1; 7 << 20]).unwrap();
    udm.file("cache.img", 16 * MIB);
    let uri = udm.uri("vol.sock");
    let table = format!("0 131072 writecache s {} cache.img 4096 0", text(&origin));
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    let data = pattern(6, 24 << 20);
    std::fs::write(udm.path("data"), &data).unwrap();
    let mut writer = std::process::Command::new("nbdcopy")
        .args([text(&udm.path("data")), &for_clients(&uri)])
        .spawn()
        .unwrap();
    let told = |what: &str| {
        let log = log(&udm, "vol.log");
        lines_with(&log, what).len()
    };
    wait_until("the origin fails", || told("the origin fails: ") == 1);
    wait_until("writes wait", || told("dirty data nearly fills the cache") == 1);
    assert!(told("(errno 28)") == 1, "{}", log(&udm, "vol.log"));
    wait_until("write-back pauses", || told("write-back pauses") == 1);
    let info = udm.json(&["info", "vol"]);
    let facts = &info["lines"][0]["facts"];
    assert!(facts["origin_last_error"].as_str().unwrap().contains("errno 28"), "{facts}");

    client("mount", &["-o", "remount,size=128m", text(&folder)]);
    assert!(writer.wait().unwrap().success());
    udm.ok(&["drain", "vol"]);
    for what in ["the origin works again", "write-back resumes", "writes wait no longer"] {
        wait_until(what, || told(what) == 1);
    }
    for what in ["the origin fails: ", "write-back pauses", "dirty data nearly fills"] {
        assert_eq!(told(what), 1, "{}", log(&udm, "vol.log"));
    }
    udm.ok(&["remove", "vol"]);
    assert!(std::fs::read(&origin).unwrap()[..data.len()] == data[..]);
    drop(small);
}

#[test]
fn clients_without_manners_are_told() {
    use std::io::Write;
    let udm = Udm::new();
    let uri = udm.uri("c.sock");
    udm.ok(&["create", "c", "--table", "0 2048 zero", "--export", &uri]);
    write_export(&udm, &uri, &[0; 4096]);
    let mut stranger = std::os::unix::net::UnixStream::connect(udm.path("c.sock")).unwrap();
    stranger.write_all(&[0xFF; 64]).unwrap();
    wait_until("it is told", || {
        log(&udm, "c.log").contains("for violating the protocol (1 so far)")
    });
}
