//! Sockets that the parent process opened for this one: socket activation, as systemd does it.
//!
//! An export at the address of such a socket listens there instead of opening its own. The socket
//! outlives the server, so clients that connect between two servers wait instead of being refused.
//! The parent sets the file, mode and owner of the socket.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use listenfd::ListenFd;
use rustix::net::sockopt;
use udm::error::{Error, Kind, Result};
use udm::sync::{Mutex, lock};

/// Maximum number of sockets taken; systemd's own limit is larger than any use.
const PASSED_MAX: usize = 64;

/// The address at which an export listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
}

/// A listening socket.
#[derive(Debug)]
enum Passed {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// Kept for the life of the process: an export that is closed and opened again finds its socket
/// here.
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

    fn is_at(&self, address: &Address) -> bool {
        match address {
            Address::Unix(path) => self.is_at_path(path),
            Address::Tcp(address) => self.is_at_address(*address),
        }
    }

    /// The address, for messages.
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

    /// Makes the socket blocking. Returns whether it listens.
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

    /// Duplicates the socket, in blocking mode.
    fn duplicate(&self) -> std::io::Result<OwnedFd> {
        self.prepare()?;
        Ok(match self {
            Passed::Unix(it) => it.try_clone()?.into(),
            Passed::Tcp(it) => it.try_clone()?.into(),
        })
    }
}

/// Returns the socket that was passed for a path.
pub(crate) fn at_path(path: &Path) -> Result<Option<OwnedFd>> {
    find(|passed| passed.is_at_path(path))
}

/// Returns the socket that was passed for an address.
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

/// Takes the sockets that were passed to this process (`LISTEN_FDS`, `LISTEN_PID`) for exports at
/// `addresses`. Call this once, before the first export opens.
///
/// # Errors
/// Returns an error if a passed descriptor is not a listening stream socket, or if its address is
/// not in `addresses`: clients that connect there would wait indefinitely.
pub fn take(addresses: &[Address]) -> Result<()> {
    if !is_asked() {
        return Ok(());
    }
    let mut passed = ListenFd::from_env();
    let count = passed.len();
    if count > PASSED_MAX {
        let message = format!("{count} sockets were passed, but at most {PASSED_MAX} can be used");
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
                Ok(true) if !addresses.iter().any(|address| socket.is_at(address)) => {
                    format!("listens at {}, but no --export has this address", socket.place())
                }
                Ok(true) => String::new(),
            },
        };
        if !wrong.is_empty() {
            let message = format!("the passed socket with file descriptor {} {wrong}", 3 + nth);
            return Err(Error::new(Kind::Invalid, message));
        }
        lock(&PASSED).extend(socket);
    }
    Ok(())
}
