//! The runtime directory: where servers and commands find each other.
//!
//! For each device it holds `NAME.ctl` (the control socket), `NAME.log` (the server's log; it
//! outlives the device), `NAME.table` (the active table), `NAME.media` (the marks that identify its
//! caches, `dead.rs`) and `NAME.lock`. The directory also holds the shared memory of open key sets
//! and lists, named by the attach in the cache's label, so that the next server that opens the
//! cache takes it up.
//!
//! Invariants:
//! 1. The directory belongs to this user and no other user may enter: its sockets command servers.
//!    Any other directory is refused, and never changed (`directory.rs`).
//! 2. A server holds a lock (flock) on `NAME.lock` from before it opens any device until it has
//!    closed all devices. The kernel releases the lock when the process ends, so a command can
//!    distinguish the files of a killed server from the files of a live one without process ids.
//! 3. Files of a name are created, replaced and removed only by the holder of that name's lock.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, OFlags};

use crate::{directory, log};

/// The longest name: a control socket's path, by way of `/proc/self/fd`, must fit a socket's
/// address.
const NAME_BYTES_MAX: usize = 80;

/// The longest path that a Unix socket's address holds, without the final NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Logs of devices that are gone: the newest ones, up to this many, are kept.
pub const GONE_LOGS_MAX: usize = 32;

/// A device's name: the characters that device-mapper's tools accept without mangling.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceName(String);

impl DeviceName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceName, String> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "#+-.:=@_".contains(c);
        if text.is_empty() {
            return Err("a name cannot be empty".into());
        }
        if text.len() > NAME_BYTES_MAX {
            return Err(format!("a name has at most {NAME_BYTES_MAX} characters"));
        }
        if let Some(bad) = text.chars().find(|&c| !is_plain(c)) {
            return Err(format!(
                "a name cannot contain {bad:?}; letters, digits and #+-.:=@_ can be used"
            ));
        }
        if text.starts_with(['.', '-']) {
            return Err("a name cannot start with '.' or '-'".into());
        }
        Ok(DeviceName(text.to_owned()))
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The runtime directory, opened.
#[derive(Debug)]
pub struct RuntimeDir {
    path: PathBuf,
    handle: File,
}

impl RuntimeDir {
    /// Opens the directory of this user, and makes it if need be.
    pub fn open() -> Result<RuntimeDir> {
        RuntimeDir::open_at(Self::locate()?)
    }

    /// Opens the directory at `path`, and makes it if need be.
    pub fn open_at(path: PathBuf) -> Result<RuntimeDir> {
        let place = || format!("runtime directory {}", path.display());
        let handle = directory::open_own(&path).with_context(place)?;
        Ok(RuntimeDir { path, handle })
    }

    /// The path of this user's directory, whether it exists or not.
    pub fn locate() -> Result<PathBuf> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let path = if let Some(own) = set("UDM_RUNTIME_DIR") {
            PathBuf::from(own)
        } else if rustix::process::geteuid().is_root() {
            PathBuf::from("/run/udm")
        } else if let Some(session) = set("XDG_RUNTIME_DIR") {
            Path::new(&session).join("udm")
        } else {
            bail!(
                "no runtime directory: XDG_RUNTIME_DIR is not set; \
                 set UDM_RUNTIME_DIR to a directory of yours"
            );
        };
        std::path::absolute(&path).with_context(|| format!("runtime directory {}", path.display()))
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The control socket of `name`.
    pub fn control(&self, name: &DeviceName) -> PathBuf {
        self.path.join(format!("{name}.ctl"))
    }

    /// The log of `name`.
    pub fn log(&self, name: &DeviceName) -> PathBuf {
        self.path.join(format!("{name}.log"))
    }

    /// The file with the active table of `name`.
    pub fn table(&self, name: &DeviceName) -> PathBuf {
        self.path.join(format!("{name}.table"))
    }

    /// The file to which the table is written before it is renamed to the table's path.
    pub fn new_table(&self, name: &DeviceName) -> PathBuf {
        self.path.join(format!("{name}.table.new"))
    }

    /// The file with the marks that identify the caches of `name`.
    pub fn media(&self, name: &DeviceName) -> PathBuf {
        self.path.join(format!("{name}.media"))
    }

    /// Removes the oldest logs of devices that are gone.
    pub fn forget_logs(&self) {
        let mut logs = Vec::new();
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let file = entry.file_name();
            let name = file.to_str().and_then(|file| file.strip_suffix(".log"));
            let Some(name) = name.and_then(|name| name.parse::<DeviceName>().ok()) else {
                continue;
            };
            let is_gone = !self.control(&name).exists() && !self.lock_path(&name).exists();
            if let (true, Ok(meta)) = (is_gone, entry.metadata()) {
                logs.push((meta.mtime(), name));
            }
        }
        logs.sort();
        let spare = logs.len().saturating_sub(GONE_LOGS_MAX);
        for (_, name) in logs.into_iter().take(spare) {
            let _ = fs::remove_file(log::before(&self.log(&name)));
            let _ = fs::remove_file(self.log(&name));
        }
    }

    fn lock_path(&self, name: &DeviceName) -> PathBuf {
        self.path.join(format!("{name}.lock"))
    }

    /// The control socket's path in a form short enough for a socket's address.
    pub fn control_address(&self, name: &DeviceName) -> PathBuf {
        let path = self.control(name);
        if path.as_os_str().len() <= SOCKET_PATH_BYTES_MAX {
            return path;
        }
        PathBuf::from(format!("/proc/self/fd/{}/{name}.ctl", self.handle.as_raw_fd()))
    }

    /// Opens the log of `name` for appending.
    pub fn open_log(&self, name: &DeviceName) -> Result<File> {
        let path = self.log(name);
        OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .custom_flags(no_follow())
            .open(&path)
            .with_context(|| path.display().to_string())
    }

    /// The devices that have a server, or had one that died; sorted.
    pub fn names(&self) -> Result<Vec<DeviceName>> {
        let place = || format!("runtime directory {}", self.path.display());
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path).with_context(place)? {
            let file = entry.with_context(place)?.file_name();
            let name = file.to_str().and_then(|file| file.strip_suffix(".ctl"));
            names.extend(name.and_then(|name| name.parse().ok()));
        }
        names.sort();
        Ok(names)
    }

    /// Takes the lock of `name`; `None` when a living process holds it.
    pub fn try_lock(&self, name: &DeviceName) -> Result<Option<NameLock>> {
        let path = self.lock_path(name);
        let place = || path.display().to_string();
        // The holder removes the file when it is done, so a lock counts only if the path still
        // names the file that was locked.
        for _ in 0..1000 {
            let is_inherited = path.exists();
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .custom_flags(no_follow())
                .open(&path)
                .with_context(place)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error).with_context(place),
            }
            let ours = file.metadata().with_context(place)?;
            match fs::metadata(&path) {
                Ok(there) if there.ino() == ours.ino() && there.dev() == ours.dev() => {
                    // The process id is for messages only: the lock itself shows whether a process
                    // holds it.
                    let _ = file.set_len(0);
                    let _ = (&file).write_all(format!("{}\n", std::process::id()).as_bytes());
                    return Ok(Some(NameLock { name: name.clone(), is_inherited, _file: file }));
                }
                _ => {}
            }
        }
        bail!("{}: it keeps being replaced", place())
    }

    /// The process that took the lock of `name` last.
    pub fn holder(&self, name: &DeviceName) -> Option<i32> {
        let text = fs::read_to_string(self.lock_path(name)).ok()?;
        text.trim().parse().ok().filter(|pid| *pid > 0)
    }

    /// Restores the files of a name as they were before its lock was taken.
    pub fn give_up(&self, lock: &NameLock) {
        if !lock.is_inherited {
            let _ = fs::remove_file(self.lock_path(&lock.name));
        }
    }

    /// Removes the files of the name whose lock this is.
    pub fn clear(&self, lock: &NameLock, keep_log: KeepLog) {
        let _ = fs::remove_file(self.control(&lock.name));
        let _ = fs::remove_file(self.table(&lock.name));
        let _ = fs::remove_file(self.new_table(&lock.name));
        let _ = fs::remove_file(self.media(&lock.name));
        let _ = fs::remove_file(self.media(&lock.name).with_extension("media.new"));
        if keep_log == KeepLog::No {
            let _ = fs::remove_file(self.log(&lock.name));
        }
        let _ = fs::remove_file(self.lock_path(&lock.name));
    }
}

/// O_NOFOLLOW: udm never creates links here.
fn no_follow() -> i32 {
    OFlags::NOFOLLOW.bits() as i32
}

/// Whether a log outlives its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepLog {
    /// The log of a device that was served.
    Yes,
    /// The log contains only a refusal, which `create` has printed.
    No,
}

/// The right to be the server of a name, as long as it lives.
#[derive(Debug)]
pub struct NameLock {
    name: DeviceName,
    is_inherited: bool,
    _file: File,
}

impl NameLock {
    /// The locked name.
    pub fn name(&self) -> &DeviceName {
        &self.name
    }

    /// Whether the lock's file existed before: then its last holder died, since a server that ends
    /// in order removes the file.
    pub fn is_inherited(&self) -> bool {
        self.is_inherited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_device_mappers_rules() {
        for good in ["vol", "a", "vg-lv", "x.y", "0", "#+-.:=@_", "A".repeat(80).as_str()] {
            assert!(good.parse::<DeviceName>().is_ok(), "{good}");
        }
        let long = "a".repeat(81);
        for bad in ["", "a/b", "..", ".", "-x", "a b", "a\n", "\u{e9}", long.as_str()] {
            assert!(bad.parse::<DeviceName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_lock_excludes_and_ends_with_its_holder() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open_at(folder.path().join("udm")).unwrap();
        let name: DeviceName = "vol".parse().unwrap();
        let lock = runtime.try_lock(&name).unwrap().expect("free");
        assert!(!lock.is_inherited());
        assert!(runtime.try_lock(&name).unwrap().is_none());
        drop(lock);
        let lock = runtime.try_lock(&name).unwrap().expect("free again");
        assert!(lock.is_inherited());
        runtime.clear(&lock, KeepLog::No);
        assert!(!folder.path().join("udm/vol.lock").exists());
    }

    #[test]
    fn a_long_directory_still_gives_a_short_socket_address() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("d".repeat(120));
        let runtime = RuntimeDir::open_at(path).unwrap();
        let name: DeviceName = "n".repeat(80).parse().unwrap();
        assert!(runtime.control_address(&name).as_os_str().len() <= SOCKET_PATH_BYTES_MAX);
    }
}
