//! A udm of its own for each test: a fresh runtime directory, and commands run in it.

// Each test program uses its part of this.
#![allow(dead_code, clippy::unwrap_used)]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

#[path = "ticks.rs"]
pub mod ticks;

/// How long anything in a test may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A runtime directory and a folder for files; servers that are left end with it.
pub struct Udm {
    folder: tempfile::TempDir,
}

/// The result of a command.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Udm {
    pub fn new() -> Udm {
        let folder = tempfile::tempdir().unwrap();
        let mut own = std::fs::DirBuilder::new();
        own.mode(0o700).create(folder.path().join("run")).unwrap();
        Udm { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn runtime(&self) -> PathBuf {
        self.path("run")
    }

    /// The names in the runtime directory, except those of logs, which outlive their devices.
    pub fn left(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.runtime()).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| !name.ends_with(".log") && !name.ends_with(".log.1")).collect()
    }

    /// A file of `len` bytes, all zero.
    pub fn file(&self, name: &str, len: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(len).unwrap();
        path
    }

    /// The URI of an export over a Unix socket.
    pub fn uri(&self, name: &str) -> String {
        format!("nbd+unix://{}", self.path(name).display())
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(crate::PROGRAM);
        command.args(words);
        self.at_home(command)
    }

    /// A command with this test's folders.
    pub fn at_home(&self, mut command: Command) -> Command {
        command.env("UDM_RUNTIME_DIR", self.runtime()).current_dir(self.folder.path());
        command.env("UDM_STATE_DIR", self.path("state"));
        command.env("UDM_CONFIG_DIR", self.path("etc"));
        command.stdin(Stdio::null()).env_remove("RUST_BACKTRACE");
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, words: &[&str]) -> Outcome {
        let output = self.command(words).output().unwrap();
        Outcome {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Runs a command that must succeed; its output.
    pub fn ok(&self, words: &[&str]) -> String {
        let outcome = self.run(words);
        assert_eq!(outcome.code, 0, "udm {words:?}: {outcome:?}");
        outcome.out
    }

    /// Runs a command that must be refused; the one line that says why.
    pub fn refused(&self, words: &[&str]) -> String {
        let outcome = self.run(words);
        assert_eq!(outcome.code, 1, "udm {words:?}: {outcome:?}");
        outcome.one_line(words[0])
    }

    /// Runs a command with `--json` that must succeed.
    pub fn json(&self, words: &[&str]) -> Value {
        let mut words = words.to_vec();
        words.push("--json");
        let out = self.ok(&words);
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("udm {words:?}: {error}: {out}"))
    }

    /// The server's process.
    pub fn pid(&self, name: &str) -> u64 {
        self.json(&["info", name])["pid"].as_u64().unwrap()
    }

    /// Kills the server immediately, as a crash would.
    pub fn kill_server(&self, name: &str) {
        let pid = self.pid(name);
        signal(pid, "KILL");
        wait_until("the server is gone", || is_gone(pid));
    }

    /// Starts a command and leaves it running.
    pub fn spawn(&self, words: &[&str]) -> Child {
        self.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

impl Drop for Udm {
    fn drop(&mut self) {
        let Ok(entries) = std::fs::read_dir(self.runtime()) else { return };
        for entry in entries.flatten() {
            let file = entry.file_name().into_string().unwrap_or_default();
            if let Some(name) = file.strip_suffix(".ctl") {
                let pid = self.run(&["info", name, "--json"]);
                let outcome = self.run(&["remove", "--force", name]);
                if let (true, Ok(info)) = (outcome.code != 0, serde_json::from_str(&pid.out)) {
                    let info: Value = info;
                    signal(info["pid"].as_u64().unwrap_or(0), "KILL");
                }
            }
        }
    }
}

impl Outcome {
    /// The error, which is one line that begins with `udm: WHAT: ` or `udm-bench: `.
    pub fn one_line(&self, what: &str) -> String {
        assert_eq!(self.err.lines().count(), 1, "{self:?}");
        let program = Path::new(crate::PROGRAM).file_name().unwrap().to_str().unwrap();
        let command = if program == "udm" { format!(" {what}:") } else { String::new() };
        assert!(self.err.starts_with(&format!("{program}:{command} ")), "{self:?}");
        assert_eq!(self.out, "", "{self:?}");
        self.err.trim_end().to_owned()
    }
}

pub fn signal(pid: u64, name: &str) {
    assert!(pid > 1);
    let _ = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
}

/// Whether a process is gone, or is a zombie that its parent has not reaped. Its files are open
/// until its last thread has ended, which need not be the first one.
pub fn is_gone(pid: u64) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return true };
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    let is_zombie = stat.rsplit(')').next().unwrap_or("").trim_start().starts_with('Z');
    is_zombie && threads <= 1
}

/// The whole seconds that follow `words` in `text`.
pub fn seconds_after(text: &str, words: &str) -> Option<u64> {
    let rest = text.split_once(words)?.1;
    let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// Reads the standard error of a command up to the first line that contains `words`.
pub fn errors_until(child: &mut Child, words: &str) -> (BufReader<ChildStderr>, String) {
    let words = words.to_owned();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut said = String::new();
        while !said.contains(&words) && errors.read_line(&mut said).is_ok_and(|len| len > 0) {}
        let _ = sender.send((errors, said));
    });
    receiver.recv_timeout(PATIENCE).expect("a line in time")
}

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "timeout before {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a client that must succeed; its output.
pub fn client(program: &str, words: &[&str]) -> String {
    let output = Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}; the tests need it installed"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {words:?}: {text} {errors}");
    text
}

/// `len` bytes that look random and are the same for each `seed`.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Writes `bytes` to the start of an export with nbdcopy.
pub fn write_export(udm: &Udm, uri: &str, bytes: &[u8]) {
    let file = udm.path("to-write");
    std::fs::write(&file, bytes).unwrap();
    client("nbdcopy", &["--flush", text(&file), &for_clients(uri)]);
}

/// A URI of ours in the form that NBD clients know.
pub fn for_clients(uri: &str) -> String {
    match uri.strip_prefix("nbd+unix://") {
        Some(path) => format!("nbd+unix:///?socket={path}"),
        None => uri.to_owned(),
    }
}

/// All bytes of an export.
pub fn read_export(udm: &Udm, uri: &str) -> Vec<u8> {
    let file = udm.path("was-read");
    let _ = std::fs::remove_file(&file);
    client("nbdcopy", &[&for_clients(uri), text(&file)]);
    std::fs::read(&file).unwrap()
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A loop device, detached at the end.
pub struct Loop(pub PathBuf);

impl Loop {
    /// Attaches `file` with these arguments of losetup; `None` if this machine lacks loop devices.
    pub fn attach(file: &Path, words: &[&str]) -> Option<Loop> {
        let words = [&["--find", "--show"], words, &[text(file)]].concat();
        match Command::new("losetup").args(words).output() {
            Ok(output) if output.status.success() => {
                Some(Loop(String::from_utf8(output.stdout).unwrap().trim().into()))
            }
            other => {
                eprintln!("SKIPPED: no loop device: {other:?}");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let is_detached = Command::new("losetup").arg("--detach").arg(&self.0).status();
        assert!(is_detached.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}
