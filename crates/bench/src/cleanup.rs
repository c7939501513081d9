//! Cleanup after the end of this process. A shell waits for the end and then
//! cleans up, because SIGKILL and a panic end a process as well.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// A shell that waits until this is dropped, or the process is gone.
#[derive(Debug)]
pub struct Afterwards(Child);

impl Afterwards {
    /// Runs `script` then, with `words` as its arguments.
    pub fn run<W: AsRef<OsStr>>(script: &str, words: &[W]) -> Result<Afterwards> {
        // Its input ends when the last of us is gone: no child of ours has the other end. A group
        // of its own, because Ctrl-C goes to all of ours.
        let waits = format!("trap '' INT TERM HUP; cat > /dev/null; {script}");
        let mut command = Command::new("sh");
        command.arg("-c").arg(waits).arg("udm-bench").args(words).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Afterwards(command.spawn().context("cannot start a shell that tidies up in the end")?))
    }

    /// Removes folders.
    pub fn remove<W: AsRef<OsStr>>(folders: &[W]) -> Result<Afterwards> {
        Afterwards::run("rm -rf -- \"$@\"", folders)
    }

    /// Writes to files: a name, then what goes there, and so on.
    pub fn write<W: AsRef<OsStr>>(names_and_texts: &[W]) -> Result<Afterwards> {
        let script = "while [ $# -gt 1 ]; do printf %s \"$2\" > \"$1\"; shift 2; done";
        Afterwards::run(script, names_and_texts)
    }
}

impl Drop for Afterwards {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_happens_when_the_process_that_asked_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a 'name'");
        std::fs::write(&path, "old").unwrap();
        let name = path.to_str().unwrap();
        let after = Afterwards::write(&[name, "new\n"]).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old", "too early");
        drop(after);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new\n");
        let made = folder.path().join("-made");
        std::fs::create_dir_all(made.join("within")).unwrap();
        drop(Afterwards::remove(&[&made]).unwrap());
        assert!(!made.exists());
    }
}
