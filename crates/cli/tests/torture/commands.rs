//! `udm` commands of a case, each with a deadline, and the server's process.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// How long a command may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// The result of a command.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// A command with its output in files, so that it does not block while the test is busy.
pub struct Running {
    child: Child,
    words: String,
    out: tempfile::NamedTempFile,
    err: tempfile::NamedTempFile,
}

/// Starts a command of `udm` in the runtime directory `runtime`; if `boot` is a file, that says
/// which boot of the machine this is.
pub fn start(
    udm: &Path,
    home: &Path,
    runtime: &Path,
    boot: Option<&Path>,
    words: &[&str],
) -> Running {
    let (out, err) = (temporary(home), temporary(home));
    let mut command = Command::new(if boot.is_some() { Path::new("unshare") } else { udm });
    if let Some(boot) = boot {
        let hide = "mount --bind \"$1\" /proc/sys/kernel/random/boot_id && shift && exec \"$@\"";
        command.args(["--mount", "sh", "-c", hide, "sh"]).args([boot, udm]);
    }
    let child = command
        .args(words)
        .env("UDM_RUNTIME_DIR", runtime)
        .env("UDM_STATE_DIR", home.join("state"))
        .env("RUST_BACKTRACE", "1")
        .current_dir(home)
        .stdin(Stdio::null())
        .stdout(out.reopen().unwrap())
        .stderr(err.reopen().unwrap())
        .spawn()
        .unwrap();
    Running { child, words: words.join(" "), out, err }
}

fn temporary(home: &Path) -> tempfile::NamedTempFile {
    tempfile::NamedTempFile::new_in(home).unwrap()
}

impl Running {
    /// Waits for the command's end.
    pub fn outcome(mut self) -> Outcome {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > PATIENCE {
                let _ = self.child.kill();
                panic!("udm {}: no end for {PATIENCE:?}", self.words);
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        Outcome {
            code: status.code().unwrap_or(-1),
            out: std::fs::read_to_string(self.out.path()).unwrap_or_default(),
            err: std::fs::read_to_string(self.err.path()).unwrap_or_default(),
        }
    }

    /// Kills the command itself.
    pub fn kill(mut self) -> Outcome {
        let _ = self.child.kill();
        self.outcome()
    }
}

fn process(pid: u64) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}

/// Kills a server; whether it was still there.
pub fn kill_server(pid: u64) -> bool {
    kill_process(process(pid), Signal::KILL).is_ok()
}

/// Stops a server, or lets it go on.
pub fn stop_server(pid: u64, is_stopped: bool) {
    let signal = if is_stopped { Signal::STOP } else { Signal::CONT };
    kill_process(process(pid), signal).unwrap();
}

/// Whether a process exists and is not a zombie. A process's files are open until its last thread
/// has ended, which need not be the first one.
pub fn is_alive(pid: u64) -> bool {
    if test_kill_process(process(pid)).is_err() {
        return false;
    }
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    let is_zombie = stat.rsplit(')').next().unwrap_or("").trim_start().starts_with('Z');
    !is_zombie || threads > 1
}

/// Waits until a process has ended.
pub fn wait_for_end(pid: u64) {
    let start = Instant::now();
    while is_alive(pid) {
        assert!(start.elapsed() < PATIENCE, "process {pid} does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The current work of a process's threads, for the report of a failure.
pub fn threads_of(pid: u64) -> String {
    let mut text = String::new();
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return text };
    for task in tasks.flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let (name, place) = (read("comm"), read("wchan"));
        text += &format!("{} {} in {place}\n{}", task.path().display(), name.trim(), read("stack"));
    }
    text
}
