//! Unix sockets of doors: named, made, and cleaned up.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use udm::error::{Error, Kind, Result};

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

/// The file of a Unix socket; removed when dropped, if it still is ours.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
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

/// Listens at `path`, for this user alone. Returns the socket, and what to clean up.
pub fn listen_unix(path: &Path) -> Result<(OwnedFd, SocketFile)> {
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
    // No client can connect before `listen`, so none can before the mode is right.
    let stat: Stat = rustix::fs::lstat(path).map_err(failed("looking at socket"))?;
    let file = SocketFile { path: path.into(), device: stat.st_dev, inode: stat.st_ino };
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).map_err(failed("setting the mode of"))?;
    rustix::net::listen(&socket, BACKLOG).map_err(failed("listening at"))?;
    Ok((socket, file))
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
