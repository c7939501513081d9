//! A real kernel as the client: Linux as a process of this machine (User Mode Linux), with its NBD
//! driver and its file systems. Its root is this machine's, so udm runs inside it.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::common::{Udm, text};

/// What runs in place of init.
const PAYLOAD: &str = include_str!("kernel.sh");
const ORIGIN_BYTES: u64 = 400 << 20;
/// Only a kernel that hangs runs so long: it takes half a minute on idle processors, and ten times
/// as long when they are busy.
const HANGS_AFTER: Duration = Duration::from_secs(900);

/// Such a kernel may lose the signal of its only timer: no sleep ends then. A signal too many does
/// not harm it.
const NUDGE_AFTER: Duration = Duration::from_secs(5);

/// Boots a kernel that runs `payload` as its first process, with the file `disk` as `/dev/ubda`.
/// Returns its output. A kernel that hangs is ended.
fn boot(udm: &Udm, payload: &str, disk: &Path, memory: &str) -> String {
    let (init, output) = (udm.path("init"), udm.path("output"));
    let path = std::env::var("PATH").unwrap();
    let head = format!("#!/bin/bash\nexec 2>&1\nexport PATH={path}:/usr/sbin:/sbin\n");
    std::fs::write(&init, head + payload).unwrap();
    std::fs::set_permissions(&init, Permissions::from_mode(0o755)).unwrap();
    let words = "rootfstype=hostfs rootflags=/ rw con=null con0=null,fd:1 con1=null ssl=null quiet \
                 loglevel=3 panic=-1";
    let mut kernel = Command::new("linux.uml")
        .args(words.split(' '))
        .args([format!("init={}", text(&init)), format!("ubda={}", text(disk))])
        .arg(format!("mem={memory}"))
        .current_dir(udm.path(""))
        .stdin(Stdio::null())
        .stdout(File::create(&output).unwrap())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap();
    let start = Instant::now();
    let mut nudged = start;
    while kernel.try_wait().unwrap().is_none() && start.elapsed() < HANGS_AFTER {
        std::thread::sleep(Duration::from_millis(20));
        if nudged.elapsed() > NUDGE_AFTER && catches_alarms(&kernel) {
            let _ = kill_process(Pid::from_child(&kernel), Signal::ALARM);
            nudged = Instant::now();
        }
    }
    // Its processes are processes here, and may outlive it.
    let _ = kill_process_group(Pid::from_child(&kernel), Signal::KILL);
    kernel.wait().unwrap();
    String::from_utf8_lossy(&std::fs::read(output).unwrap()).into_owned()
}

/// Whether the kernel has begun to handle the signals of its timer, which would end it otherwise.
fn catches_alarms(kernel: &Child) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", kernel.id()));
    let caught = status
        .unwrap_or_default()
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
    caught.is_some_and(|signals| signals >> (Signal::ALARM.as_raw() - 1) & 1 == 1)
}

/// Why this test cannot run here.
fn obstacle() -> Option<String> {
    for program in ["linux.uml", "nbd-client", "insmod", "mkfs.xfs", "mkfs.ext4", "jq"] {
        let found = Command::new("sh")
            .args(["-c", &format!("PATH=$PATH:/usr/sbin:/sbin command -v {program}")])
            .output();
        if !found.is_ok_and(|found| found.status.success()) {
            return Some(format!("{program} is missing"));
        }
    }
    if !rustix::process::geteuid().is_root() {
        return Some("it needs root".into());
    }
    // Linux 6.1 does not start on processors with AMX.
    let udm = Udm::new();
    let said = boot(&udm, "echo IT RUNS\npoweroff -f\n", &udm.file("disk", 1 << 20), "64M");
    (!said.contains("IT RUNS")).then(|| format!("linux.uml does not start: {said:?}"))
}

/// A file system on the target keeps every synced file when servers are killed.
fn serve_file_systems(target: &str, memory: &str) {
    if let Some(why) = obstacle() {
        return println!("SKIPPED: no kernel is a client of {target}: {why}");
    }
    let udm = Udm::new();
    let words = format!("udm={} target={target}\n", crate::PROGRAM);
    let disk = udm.file("origin", ORIGIN_BYTES);
    let said = boot(&udm, &(words + PAYLOAD), &disk, memory);
    println!("{said}");
    assert!(said.lines().any(|line| line.trim() == "RIGHT"), "{target}: {said}");
}

#[test]
fn a_file_system_on_a_cache_survives_kills() {
    serve_file_systems("cache", "400M");
}

#[test]
fn a_file_system_on_a_pcache_survives_kills() {
    serve_file_systems("pcache", "1000M");
}

#[test]
fn a_file_system_on_a_writecache_survives_kills() {
    serve_file_systems("writecache", "400M");
}
