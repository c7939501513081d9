//! Unix sockets of exports: parsing their paths, opening them, and cleaning up.

use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FileType, Gid, Mode, Stat, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use udm::error::{Error, Kind, Result};

use crate::activation;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;
/// The longest path that fits into a Unix socket's address.
const PATH_BYTES_MAX: usize = 107;

/// Parses the path after `scheme` in a URI.
pub fn parse_path(text: &str, scheme: &str) -> std::result::Result<PathBuf, String> {
    if !text.starts_with('/') || text.ends_with('/') {
        return Err(format!("needs the absolute path of a socket after {scheme}"));
    }
    if text.contains(['?', '#']) {
        return Err("takes a path without options".into());
    }
    if text.len() > PATH_BYTES_MAX {
        let bytes = text.len();
        return Err(format!(
            "has a path of {bytes} bytes, and a Unix socket's may have {PATH_BYTES_MAX}"
        ));
    }
    if text.contains('\0') {
        return Err("has a NUL byte in its path".into());
    }
    Ok(text.into())
}

/// The users that may connect to a socket, in addition to root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Permission bits; default 0600, the owner only.
    mode: Option<u32>,
    /// `USER`, `USER:GROUP` or `:GROUP`, by name or number; default: the user who runs the server.
    owner: Option<String>,
}

impl Access {
    /// Parses the values of `mode=` and `owner=`.
    pub fn parse(mode: Option<&str>, owner: Option<&str>) -> std::result::Result<Access, String> {
        let parse_mode = |text: &str| {
            let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
            mode.ok_or_else(|| {
                format!("has mode={text:?}, which is not an octal number from 0 to 0777")
            })
        };
        if let Some(owner) = owner
            && (owner.is_empty() || owner == ":" || owner.matches(':').count() > 1)
        {
            return Err(format!("has owner={owner:?}, which is not USER, USER:GROUP or :GROUP"));
        }
        Ok(Access { mode: mode.map(parse_mode).transpose()?, owner: owner.map(str::to_owned) })
    }

    /// Formats the access as options of a URI.
    pub fn options(&self) -> Vec<String> {
        let mode = self.mode.map(|mode| format!("mode={mode:04o}"));
        let owner = self.owner.as_ref().map(|owner| format!("owner={owner}"));
        mode.into_iter().chain(owner).collect()
    }

    /// Sets mode and owner of the socket file at `path`.
    pub(crate) fn apply(&self, path: &Path) -> Result<()> {
        let place = path.display();
        if let Some(owner) = &self.owner {
            let (user, group) = owner.split_once(':').unwrap_or((owner, ""));
            let user = number_of(user, "/etc/passwd", "user")?.map(Uid::from_raw);
            let group = number_of(group, "/etc/group", "group")?.map(Gid::from_raw);
            rustix::fs::chown(path, user, group).map_err(|errno| {
                Error::from_io("setting the owner of", place.to_string(), errno.into())
            })?;
        }
        let mode = Mode::from_raw_mode(self.mode.unwrap_or(0o600));
        rustix::fs::chmod(path, mode)
            .map_err(|errno| Error::from_io("setting the mode of", place, errno.into()))
    }
}

/// Returns the number of a user or group: `word` itself, or the number of that name in `file`.
/// Network directories are not asked: give their users by number.
fn number_of(word: &str, file: &str, kind: &str) -> Result<Option<u32>> {
    if word.is_empty() {
        return Ok(None);
    }
    if let Ok(number) = word.parse() {
        return Ok(Some(number));
    }
    let lines = std::fs::read_to_string(file)
        .map_err(|error| Error::from_io("looking for a name in", file, error))?;
    let number = lines.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(word)).then(|| fields.nth(1)?.parse().ok())?
    });
    number.map(Some).ok_or_else(|| {
        let message = format!("{file} has no {kind} {word:?}; a number also works");
        Error::new(Kind::NotFound, message)
    })
}

/// The file of a Unix socket. Dropping it removes the file, if it is still the same file.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// Records the file at `path`.
    pub(crate) fn at(path: &Path) -> Result<SocketFile> {
        let stat: Stat = rustix::fs::lstat(path)
            .map_err(|errno| Error::from_io("looking at", path.display(), errno.into()))?;
        Ok(SocketFile { path: path.into(), device: stat.st_dev, inode: stat.st_ino })
    }

    /// Keeps the file: another process listens there.
    pub(crate) fn leave(mut self) {
        self.inode = 0;
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Ok(stat) = rustix::fs::lstat(&self.path)
            && (stat.st_dev, stat.st_ino) == (self.device, self.inode)
        {
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

/// Binds a socket at `path`, for the users that `access` allows. Returns the socket, and the file
/// to clean up. Clients cannot connect before `begin_to_listen`.
///
/// A socket that was passed for this path is used unchanged. Then `access` must be the default, and
/// the file is not cleaned up.
pub fn bind_unix(path: &Path, access: &Access) -> Result<(OwnedFd, Option<SocketFile>)> {
    if let Some(socket) = activation::at_path(path)? {
        if *access != Access::default() {
            let place = path.display();
            let message = format!(
                "{place} was created by the program that started udm: set its mode and owner there"
            );
            return Err(Error::new(Kind::Invalid, message));
        }
        return Ok((socket, None));
    }
    let failed = |operation: &'static str| {
        move |errno: Errno| Error::from_io(operation, path.display(), errno.into())
    };
    remove_stale(path)?;
    let socket = stream_socket(SocketFlags::CLOEXEC).map_err(failed("creating a socket for"))?;
    let address = SocketAddrUnix::new(path).map_err(failed("naming a socket"))?;
    rustix::net::bind(&socket, &address).map_err(failed("creating socket"))?;
    // Clients cannot connect before `listen`, and so not before mode and owner are set.
    let file = SocketFile::at(path)?;
    access.apply(path)?;
    Ok((socket, Some(file)))
}

/// Lets clients connect to a bound socket. A socket that already listens, because it was passed to
/// this process or is shared, is left unchanged.
pub(crate) fn begin_to_listen(socket: impl AsFd, place: impl Display) -> Result<()> {
    if sockopt::socket_acceptconn(&socket) == Ok(true) {
        return Ok(());
    }
    rustix::net::listen(socket, BACKLOG)
        .map_err(|errno| Error::from_io("listening at", place.to_string(), errno.into()))
}

fn stream_socket(flags: SocketFlags) -> std::result::Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Tries to connect to `path`, to learn whether a process listens there. It does not block: if the
/// owner is stopped or never accepts, its queue is full, and a blocking `connect` would wait for
/// the owner's whole life.
fn try_to_connect(path: &Path) -> std::result::Result<(), Errno> {
    let socket = stream_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::AGAIN) => Ok(()),
        result => result,
    }
}

/// Connects to the server at `path`. If the server's queue is full, waits at most `longest`.
pub(crate) fn connect_within(
    path: &Path,
    longest: Duration,
) -> std::result::Result<UnixStream, Errno> {
    let socket = stream_socket(SocketFlags::CLOEXEC)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(longest))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Whether a process has bound a socket to `path` without listening yet: it is opening its exports.
/// Its socket refuses connections, just like the socket of a dead owner.
fn is_bound(path: &Path) -> bool {
    let Ok(table) = std::fs::read("/proc/net/unix") else { return false };
    let path = path.as_os_str().as_bytes();
    let ends_with_it =
        |line: &[u8]| line.strip_suffix(path).is_some_and(|before| before.last() == Some(&b' '));
    table.split(|byte| *byte == b'\n').any(ends_with_it)
}

/// Removes a socket file whose server is gone. Any other file is kept and returned
/// as an error.
fn remove_stale(path: &Path) -> Result<()> {
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(Error::from_io("looking at", path.display(), errno.into())),
    };
    let place = path.display();
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        let message = format!("{place} exists and is not a socket; choose another path");
        return Err(Error::new(Kind::Exists, message));
    }
    match try_to_connect(path) {
        Err(Errno::CONNREFUSED) if is_bound(path) => {
            let message = format!("{place} is in use: another server is about to listen there");
            Err(Error::new(Kind::Busy, message))
        }
        Err(Errno::CONNREFUSED) => rustix::fs::unlink(path)
            .map_err(|errno| Error::from_io("removing stale socket", place, errno.into())),
        Err(Errno::NOENT) => Ok(()),
        Err(errno) => {
            Err(Error::from_io("connecting to the existing socket at", place, errno.into()))
        }
        Ok(()) => {
            let message = format!("{place} is in use: another server listens there");
            Err(Error::new(Kind::Busy, message))
        }
    }
}
