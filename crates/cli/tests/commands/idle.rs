//! A server without clients sleeps: none of its threads wakes from time to time.

use std::time::{Duration, Instant};

use crate::common::{PATIENCE, Udm, pattern, text, wait_until, write_export};

const MIB: u64 = 1 << 20;
/// Longer than any pause of a thread that looks from time to time.
const QUIET: Duration = Duration::from_secs(3);

/// How often threads of a process have slept.
fn sleeps(pid: u64) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let status = threads.map(|thread| std::fs::read_to_string(thread.path().join("status")));
    let lines = status.flatten().collect::<String>();
    let counts = lines.lines().filter_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    counts.map(|count| count.trim().parse::<u64>().unwrap()).sum()
}

/// Waits until no thread of the servers wakes any more.
fn wait_for_quiet(pids: &[u64]) {
    let counts = || pids.iter().map(|pid| sleeps(*pid)).collect::<Vec<_>>();
    let deadline = Instant::now() + PATIENCE;
    let mut before = counts();
    loop {
        std::thread::sleep(QUIET);
        let now = counts();
        if now == before {
            return;
        }
        assert!(Instant::now() < deadline, "threads wake all the time: {before:?}, then {now:?}");
        before = now;
    }
}

#[test]
fn servers_without_clients_sleep() {
    let udm = Udm::new();
    udm.file("meta", 4 * MIB);
    let files =
        ["o", "f"].map(|name| [1, 2, 3].map(|nth| udm.file(&format!("{name}{nth}"), 600 * MIB)));
    let [origin, fast] = files.each_ref().map(|files| files.each_ref().map(|file| text(file)));
    let tables = [
        format!("0 131072 pcache {} {} 0", fast[0], origin[0]),
        format!("0 131072 writecache s {} {} 4096 0", origin[1], fast[1]),
        format!("0 131072 cache meta {} {} 64 1 writeback smq 0", fast[2], origin[2]),
    ];
    let mut pids = Vec::new();
    for (nth, table) in tables.iter().enumerate() {
        let (name, uri) = (format!("v{nth}"), udm.uri(&format!("v{nth}.sock")));
        udm.ok(&["create", &name, "--table", table, "--export", &uri, "--metrics", "127.0.0.1:0"]);
        write_export(&udm, &uri, &pattern(1, MIB as usize));
        udm.ok(&["drain", &name]);
        pids.push(udm.pid(&name));
    }
    wait_for_quiet(&pids);
    // Another device comes and goes, and a file is restored.
    udm.ok(&["create", "other", "--table", "0 8 zero"]);
    udm.ok(&["remove", "other"]);
    std::fs::remove_file(udm.runtime().join("v1.table")).unwrap();
    wait_until("the file is restored", || udm.runtime().join("v1.table").exists());
    wait_for_quiet(&pids);
    for nth in 0..3 {
        udm.ok(&["remove", &format!("v{nth}")]);
    }
}
