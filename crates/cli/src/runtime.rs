//! The runtime directory: where servers and commands find each other.
//!
//! For each device it holds `NAME.ctl` (the control socket), `NAME.log` (the server's log; it
//! outlives the device), `NAME.table` (the active table), `NAME.media` (the marks that identify its
//! caches, `dead.rs`) and `NAME.lock` (with the record of the server, `last_end.rs`). The directory
//! also holds the shared memory of open key sets and lists, named by the attach in the cache's
//! label, so that the next server that opens the cache takes it up.
//!
//! Invariants:
//! 1. The directory belongs to this user and no other user may enter: its sockets command servers.
//!    Any other directory is refused, and never changed (`directory.rs`).
//! 2. A server holds a lock (flock) on `NAME.lock` from before it opens any device until it has
//!    closed all devices. The kernel releases the lock when the process ends, so a command can
//!    distinguish the files of a killed server from the files of a live one without process ids.
//! 3. Files of a name are created, replaced and removed only by the holder of that name's lock.
//! 4. Anybody may clean these files away: a program that removes old files, or the end of a login
//!    session. So the holder of a name also holds its *guard*, an abstract Unix socket, named
//!    after the directory and the device. No file can take it away, and it ends with the process.
//!    The server restores the missing files (`upkeep.rs`).

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use rustix::event::epoll;
use rustix::fs::{FlockOperation, OFlags};

use crate::{directory, last_end, log};

/// The longest name: a control socket's path, by way of `/proc/self/fd`, must fit a socket's
/// address.
const NAME_BYTES_MAX: usize = 80;

/// The longest path that a Unix socket's address holds, without the final NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The longest record of a server in its lock's file.
const RECORD_BYTES_MAX: u64 = 4096;

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
    handle: Mutex<File>,
}

impl RuntimeDir {
    /// Opens the directory of this user, and makes it if need be.
    pub fn open() -> Result<RuntimeDir> {
        RuntimeDir::open_at(Self::locate()?)
    }

    /// Opens the directory at `path`, and makes it if need be.
    pub fn open_at(path: PathBuf) -> Result<RuntimeDir> {
        let place = || format!("runtime directory {}", path.display());
        let handle = Mutex::new(directory::open_own(&path).with_context(place)?);
        Ok(RuntimeDir { path, handle })
    }

    /// Makes the directory again if it was removed. Returns whether another one is at the path now.
    pub fn renew(&self) -> Result<bool> {
        let mut handle = self.handle();
        if is_at(&handle, &self.path) {
            return Ok(false);
        }
        *handle = directory::open_own(&self.path)?;
        Ok(true)
    }

    fn handle(&self) -> MutexGuard<'_, File> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
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
        PathBuf::from(format!("/proc/self/fd/{}/{name}.ctl", self.handle().as_raw_fd()))
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
                .read(true)
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
                    let mut record = String::new();
                    // An unreadable record was not written by udm.
                    let _ = (&file).take(RECORD_BYTES_MAX).read_to_string(&mut record);
                    let Some(guard) = self.guard(name) else {
                        // The server of the name lives, and its lock's file was removed.
                        if !is_inherited {
                            let _ = fs::remove_file(&path);
                        }
                        return Ok(None);
                    };
                    let name = name.clone();
                    return Ok(Some(NameLock { name, is_inherited, record, file, guard }));
                }
                _ => {}
            }
        }
        bail!("{}: it keeps being replaced", place())
    }

    /// Takes the guard of `name`; `None` if a living process of this user has it. A guard that
    /// another user has taken, to be in the way, does not count.
    fn guard(&self, name: &DeviceName) -> Option<Guard> {
        let Some(address) = self.guard_address(name) else { return Some(Guard(None)) };
        match UnixListener::bind_addr(&address) {
            Ok(listener) => {
                // Without this, `answer_guard` would wait.
                let is_ready = listener.set_nonblocking(true).is_ok();
                Some(Guard(Some(listener).filter(|_| is_ready)))
            }
            Err(_) if self.is_guarded(name) => None,
            Err(_) => Some(Guard(None)),
        }
    }

    /// Whether a living process of this user has the guard of `name`.
    pub fn is_guarded(&self, name: &DeviceName) -> bool {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let address = self
            .guard_name(name)
            .and_then(|name| SocketAddrUnix::new_abstract_name(name.as_bytes()).ok());
        let Some(address) = address else { return false };
        let Ok(socket) =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        else {
            return false;
        };
        // The owner of the socket: another user may have made it, to be in the way.
        rustix::net::connect(&socket, &address).is_ok()
            && sockopt::socket_peercred(&socket)
                .is_ok_and(|peer| peer.uid == rustix::process::geteuid())
    }

    fn guard_address(&self, name: &DeviceName) -> Option<SocketAddr> {
        SocketAddr::from_abstract_name(self.guard_name(name)?).ok()
    }

    /// The name of an abstract socket, unless it would be too long, which takes a name of nearly 80
    /// characters and a file system with long inode numbers.
    fn guard_name(&self, name: &DeviceName) -> Option<String> {
        let place = self.handle().metadata().ok()?;
        let name = format!("udm/{:x}.{:x}/{name}", place.dev(), place.ino());
        (name.len() <= SOCKET_PATH_BYTES_MAX).then_some(name)
    }

    /// The process that took the lock of `name` last.
    pub fn holder(&self, name: &DeviceName) -> Option<i32> {
        last_end::process_of(&fs::read_to_string(self.lock_path(name)).ok()?)
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
    record: String,
    file: File,
    guard: Guard,
}

/// The right to a name that outlives a removal of files, if the system has abstract sockets.
#[derive(Debug)]
struct Guard(Option<UnixListener>);

/// Whether `file` is the one at `path`.
pub fn is_at(file: &File, path: &Path) -> bool {
    let own = file.metadata().map(|meta| (meta.dev(), meta.ino()));
    let found = fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()));
    matches!((own, found), (Ok(own), Ok(found)) if own == found)
}

impl NameLock {
    /// The locked name.
    pub fn name(&self) -> &DeviceName {
        &self.name
    }

    /// The lock's file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Restores the lock's file if it was removed. `is_new_place`: the directory is another one.
    /// Returns whether the file was made, or an error if another server has got the name.
    pub fn renew(&mut self, runtime: &RuntimeDir, is_new_place: bool) -> Result<bool> {
        if is_new_place {
            // The old guard is kept until the new one is there.
            let Some(guard) = runtime.guard(&self.name) else {
                bail!("another server has taken the name");
            };
            self.guard = guard;
        }
        let path = runtime.lock_path(&self.name);
        if is_at(&self.file, &path) {
            return Ok(false);
        }
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(no_follow())
            .open(&path)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        last_end::begin(&file);
        self.file = file;
        Ok(true)
    }

    /// Makes `epoll` report commands that ask for the guard. False if that is not possible.
    pub fn report_guard(&self, epoll: impl AsFd) -> bool {
        let Guard(Some(listener)) = &self.guard else { return true };
        let flags = epoll::EventFlags::IN;
        let added = epoll::add(epoll, listener, epoll::EventData::new_u64(0), flags);
        matches!(added, Ok(()) | Err(rustix::io::Errno::EXIST))
    }

    /// Drops the connections of commands that asked for the guard, so that its queue has space.
    pub fn answer_guard(&self) {
        let Guard(Some(listener)) = &self.guard else { return };
        listener.incoming().take_while(Result::is_ok).for_each(drop);
    }

    /// The record of the last server, if it died (`last_end.rs`).
    pub fn last_record(&self) -> &str {
        &self.record
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
