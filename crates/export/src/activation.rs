//! Sockets that the parent process made for this one: socket activation, as systemd does it.
//!
//! A door at the address of such a socket listens there instead of making one of its own. The
//! socket outlives the server, so clients that come while there is none wait and are not refused.
//! Its file, mode and owner are those that the other side gave it.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use listenfd::ListenFd;
use rustix::net::sockopt;
use udm::error::{Error, Kind, Result};
use udm::sync::{Mutex, lock};

use crate::nbd::uri::Place;
use crate::uri::Uri;

/// Most sockets that are taken; systemd's own limit is larger than any use.
const PASSED_MAX: usize = 64;

/// A socket that listens already.
#[derive(Debug)]
enum Passed {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// Kept for as long as the process lives: a door that is closed and opened again finds it there.
static PASSED: Mutex<Vec<Passed>> = Mutex::new(Vec::new());

impl Passed {
    fn is_at_path(&self, path: &Path) -> bool {
        match self {
            Passed::Unix(it) => it.local_addr().is_ok_and(|at| at.as_pathname() == Some(path)),
            Passed::Tcp(_) => false,
        }
    }

    fn is_at_address(&self, address: SocketAddr) -> bool {
        match self {
            Passed::Unix(_) => false,
            Passed::Tcp(it) => it.local_addr().is_ok_and(|at| at == address),
        }
    }

    /// Whether a door at `uri` listens here.
    fn is_for(&self, uri: &Uri) -> bool {
        match uri {
            Uri::Nbd(uri) => match &uri.place {
                Place::Unix(path, _) => self.is_at_path(path),
                Place::Tcp { address, .. } => self.is_at_address(*address),
            },
            Uri::Vhost(uri) => self.is_at_path(&uri.path),
            Uri::Ublk(_) => false,
        }
    }

    /// Where it listens, for messages.
    fn place(&self) -> String {
        match self {
            Passed::Unix(it) => match it.local_addr() {
                Ok(at) => format!("{at:?}"),
                Err(error) => error.to_string(),
            },
            Passed::Tcp(it) => match it.local_addr() {
                Ok(at) => at.to_string(),
                Err(error) => error.to_string(),
            },
        }
    }

    /// Lets its users wait in it. Returns whether it listens.
    fn prepare(&self) -> std::io::Result<bool> {
        match self {
            Passed::Unix(it) => it.set_nonblocking(false)?,
            Passed::Tcp(it) => it.set_nonblocking(false)?,
        }
        Ok(match self {
            Passed::Unix(it) => sockopt::socket_acceptconn(it)?,
            Passed::Tcp(it) => sockopt::socket_acceptconn(it)?,
        })
    }

    /// One of its own, in which its users wait.
    fn duplicate(&self) -> std::io::Result<OwnedFd> {
        self.prepare()?;
        Ok(match self {
            Passed::Unix(it) => it.try_clone()?.into(),
            Passed::Tcp(it) => it.try_clone()?.into(),
        })
    }
}

/// The socket that was passed for a path, if there is one.
pub(crate) fn at_path(path: &Path) -> Result<Option<OwnedFd>> {
    find(|passed| passed.is_at_path(path))
}

/// The socket that was passed for an address, if there is one.
pub(crate) fn at_address(address: SocketAddr) -> Result<Option<OwnedFd>> {
    find(|passed| passed.is_at_address(address))
}

fn find(is_it: impl Fn(&Passed) -> bool) -> Result<Option<OwnedFd>> {
    let passed = lock(&PASSED);
    let socket = passed.iter().find(|passed| is_it(passed)).map(Passed::duplicate).transpose();
    socket.map_err(|error| Error::from_io("taking", "a socket that was passed", error))
}

/// Whether sockets were passed to this very process.
pub fn is_asked() -> bool {
    let own = std::process::id().to_string();
    std::env::var("LISTEN_PID").is_ok_and(|pid| pid == own) && std::env::var("LISTEN_FDS").is_ok()
}

/// Takes the sockets that were passed to this process (`LISTEN_FDS`, `LISTEN_PID`), for doors at
/// `uris`. Call it once, before the first door opens.
///
/// # Errors
/// Something that was passed is no stream socket that listens, or none of `uris` is its address: a
/// client that connects there would wait for ever.
pub fn take(uris: &[Uri]) -> Result<()> {
    if !is_asked() {
        return Ok(());
    }
    let mut passed = ListenFd::from_env();
    let count = passed.len();
    if count > PASSED_MAX {
        let message = format!("{count} sockets were passed; at most {PASSED_MAX} are taken");
        return Err(Error::new(Kind::Invalid, message));
    }
    for nth in 0..count {
        let unix = passed.take_unix_listener(nth).ok().flatten().map(Passed::Unix);
        let socket = unix.or_else(|| passed.take_tcp_listener(nth).ok().flatten().map(Passed::Tcp));
        let wrong = match &socket {
            None => "is neither a Unix nor a TCP stream socket".into(),
            Some(socket) => match socket.prepare() {
                Err(error) => format!("cannot be used: {error}"),
                Ok(false) => "does not listen".into(),
                Ok(true) if !uris.iter().any(|uri| socket.is_for(uri)) => {
                    format!("listens at {}, and no --export is there", socket.place())
                }
                Ok(true) => String::new(),
            },
        };
        if !wrong.is_empty() {
            let message = format!("file descriptor {} of those that were passed {wrong}", 3 + nth);
            return Err(Error::new(Kind::Invalid, message));
        }
        lock(&PASSED).extend(socket);
    }
    Ok(())
}
