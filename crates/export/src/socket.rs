//! Unix sockets of doors: named, made, and cleaned up.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Gid, Mode, Stat, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use udm::error::{Error, Kind, Result};

use crate::activation;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;
/// The longest path that fits into a Unix socket's address.
const PATH_BYTES_MAX: usize = 107;

/// The path after `scheme` in a URI, or why it is none.
pub fn parse_path(text: &str, scheme: &str) -> std::result::Result<PathBuf, String> {
    if !text.starts_with('/') || text.ends_with('/') {
        return Err(format!("needs the absolute path of a socket after {scheme}"));
    }
    if text.contains(['?', '#']) {
        return Err("takes a path and nothing after it".into());
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

/// Whom the file system lets connect to a socket, apart from root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Permission bits; without them 0600: its owner alone.
    mode: Option<u32>,
    /// `USER`, `USER:GROUP` or `:GROUP`, by name or number; without it who runs the server.
    owner: Option<String>,
}

impl Access {
    /// From the values of `mode=` and `owner=`, or why they are wrong.
    pub fn parse(mode: Option<&str>, owner: Option<&str>) -> std::result::Result<Access, String> {
        let parse_mode = |text: &str| {
            let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
            mode.ok_or_else(|| format!("has mode={text}: no octal number from 0 to 0777"))
        };
        if let Some(owner) = owner
            && (owner.is_empty() || owner == ":" || owner.matches(':').count() > 1)
        {
            return Err(format!("has owner={owner}: neither USER nor USER:GROUP nor :GROUP"));
        }
        Ok(Access { mode: mode.map(parse_mode).transpose()?, owner: owner.map(str::to_owned) })
    }

    /// As they are written in a URI.
    pub fn options(&self) -> Vec<String> {
        let mode = self.mode.map(|mode| format!("mode={mode:04o}"));
        let owner = self.owner.as_ref().map(|owner| format!("owner={owner}"));
        mode.into_iter().chain(owner).collect()
    }

    /// Gives the socket file at `path` its mode and owner.
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

/// The number of a user or group: `word` itself, or what `file` says of that name. Directories on
/// the network are not asked: their users are given by number.
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
        let message = format!("{file} has no {kind} {word:?}; numbers are taken, too");
        Error::new(Kind::NotFound, message)
    })
}

/// The file of a Unix socket; removed when dropped, if it still is ours.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// The file that is there.
    pub(crate) fn at(path: &Path) -> Result<SocketFile> {
        let stat: Stat = rustix::fs::lstat(path)
            .map_err(|errno| Error::from_io("looking at", path.display(), errno.into()))?;
        Ok(SocketFile { path: path.into(), device: stat.st_dev, inode: stat.st_ino })
    }

    /// Leaves the file where it is: others listen there.
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

/// Listens at `path`, for those whom `access` lets in. Returns the socket, and what to clean up.
///
/// A socket that was passed for this path is taken as it is; then `access` must say nothing, and
/// its file is not ours to clean up.
pub fn listen_unix(path: &Path, access: &Access) -> Result<(OwnedFd, Option<SocketFile>)> {
    if let Some(socket) = activation::at_path(path)? {
        if *access != Access::default() {
            let place = path.display();
            let message = format!("{place} was made by who started udm: mode= and owner= go there");
            return Err(Error::new(Kind::Invalid, message));
        }
        return Ok((socket, None));
    }
    let failed = |operation: &'static str| {
        move |errno: Errno| Error::from_io(operation, path.display(), errno.into())
    };
    remove_stale(path)?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed("making a socket for"))?;
    let address = SocketAddrUnix::new(path).map_err(failed("naming a socket"))?;
    rustix::net::bind(&socket, &address).map_err(failed("creating socket"))?;
    // No client can connect before `listen`, so none can before mode and owner are right.
    let file = SocketFile::at(path)?;
    access.apply(path)?;
    rustix::net::listen(&socket, BACKLOG).map_err(failed("listening at"))?;
    Ok((socket, Some(file)))
}

/// Removes a socket file that no server listens at any more. Anything else stays and is an error.
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
    match UnixStream::connect(path) {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            rustix::fs::unlink(path)
                .map_err(|errno| Error::from_io("removing stale socket", place, errno.into()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::from_io("trying the socket that exists at", place, error)),
        Ok(_) => {
            let message = format!("{place} is in use: another server listens there");
            Err(Error::new(Kind::Busy, message))
        }
    }
}
