//! Finds the exports that work on this machine: it tries each as far as possible without a device.
//!
//! Each try is undone before it returns: sockets are closed, their files removed, and no disk is
//! created. No check relies on a version number.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::event::EventfdFlags;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use udm::error::{Error, Result};
use udm::ring::Ring;
use udm::units::MIB;

use crate::nbd::{self, uri::Tls};
use crate::socket::{self, Access};
use crate::ublk;
use crate::vhost::{memory::Memory, proto::Region};

/// The result of a try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The name of the check.
    pub name: &'static str,
    /// Whether it works.
    pub works: bool,
    /// The method that works, or the reason of the failure.
    pub what: String,
    /// The setting or package that would help.
    pub help: Option<String>,
}

impl Check {
    /// A check that works, with the method.
    pub fn good(name: &'static str, what: impl Into<String>) -> Check {
        Check { name, works: true, what: what.into(), help: None }
    }

    /// A check that failed, with the reason.
    pub fn bad(name: &'static str, what: impl Into<String>) -> Check {
        Check { name, works: false, what: what.into(), help: None }
    }

    /// Adds help, if the check has failed.
    pub fn or(self, help: impl Into<String>) -> Check {
        let help = Some(help.into()).filter(|_| !self.works);
        Check { help: self.help.or(help), ..self }
    }

    /// Turns the result of a try into a check.
    pub fn of(name: &'static str, result: Result<String>) -> Check {
        match result {
            Ok(what) => Check::good(name, what),
            Err(error) => Check::refused(name, &error.to_string()),
        }
    }

    /// A failed check from an error's text; the part after `; ` becomes the help.
    pub fn refused(name: &'static str, text: &str) -> Check {
        match text.split_once("; ") {
            Some((what, help)) => Check::bad(name, what).or(help),
            None => Check::bad(name, text),
        }
    }
}

/// The exports, by the names that `exports` uses.
const EXPORTS: [&str; 5] = ["ublk", "vhost-user", "nbd+unix", "nbd", "nbds"];

/// Fails every export, because servers cannot start without `what`.
pub fn no_exports(what: &str, help: &str) -> Vec<Check> {
    EXPORTS.map(|name| Check::bad(name, what).or(help)).into()
}

/// Tries every export. `home` is a directory that only this user may access.
pub fn exports(home: &Path) -> Vec<Check> {
    // Every export is served through a ring.
    if let Err(error) = ring() {
        return no_exports("udm needs io_uring to serve devices", &io_uring_help(&error));
    }
    let [ublk_, vhost_, unix, tcp, tls] = EXPORTS;
    vec![
        Check::of(ublk_, ublk()),
        Check::of(vhost_, vhost(home)),
        Check::of(unix, nbd_unix(home)),
        Check::of(tcp, nbd_tcp()),
        Check::of(tls, nbd_tls()),
    ]
}

/// Checks how this process can use io_uring.
pub fn io_uring() -> Check {
    match ring() {
        Ok(way) => Check::good("io_uring", way),
        Err(error) => Check::bad("io_uring", error.to_string()).or(io_uring_help(&error)),
    }
}

fn ring() -> Result<String> {
    let way = Ring::<()>::new(8)?.way().to_owned();
    // ublk issues commands, whose entries are longer.
    let commands = match Ring::<()>::with_commands(8) {
        Ok(_) => "",
        Err(_) => "; without commands (Linux 5.19), so ublk does not work",
    };
    Ok(format!("{way}{commands}"))
}

fn io_uring_help(error: &Error) -> String {
    let path = "/proc/sys/kernel/io_uring_disabled";
    match std::fs::read_to_string(path).as_deref().map(str::trim) {
        Ok("0") | Err(_) => format!(
            "a container's seccomp profile may forbid io_uring_setup, or the kernel lacks \
             CONFIG_IO_URING ({error})"
        ),
        Ok(_) => "sysctl kernel.io_uring_disabled=0, or a group of this user in \
                  kernel.io_uring_group"
            .into(),
    }
}

fn ublk() -> Result<String> {
    let features = ublk::control::Control::open()?.features()?;
    let has = |bit, words| if features & bit != 0 { words } else { "" };
    Ok(format!(
        "the driver creates disks that survive a killed server{}{}",
        has(ublk::proto::feature::UPDATE_SIZE, ", and grow"),
        has(ublk::proto::feature::QUIESCE, ", and are handed over cleanly"),
    ))
}

/// Tries a client's memory, its eventfds and its socket.
fn vhost(home: &Path) -> Result<String> {
    share(MemfdFlags::CLOEXEC, MIB)?;
    let _bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
        .map_err(|errno| failed("making", "an eventfd", errno))?;
    listen_unix(home, "vhost")?;
    Ok("memfd, eventfd and Unix sockets work".into())
}

/// Checks huge pages for the memory of virtual machines. The export does not need them.
pub fn huge_pages() -> Check {
    let works = share(MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB, 2 * MIB);
    let works = works.map(|()| "virtual machines may use pages of 2 MiB".into());
    Check::of("huge pages", works).or("`sysctl vm.nr_hugepages=N`; vhost-user works without")
}

/// Maps a client's memory of `bytes`.
fn share(flags: MemfdFlags, bytes: u64) -> Result<()> {
    let failed = |errno| failed("making", "a memfd", errno);
    let file: OwnedFd = memfd_create("udm-doctor", flags).map_err(failed)?;
    ftruncate(&file, bytes).map_err(failed)?;
    // Without this, the first access to a missing huge page would raise a signal.
    fallocate(&file, FallocateFlags::empty(), 0, bytes).map_err(failed)?;
    let region = Region { guest: 0, len: bytes, user: 0, offset: 0 };
    Memory::default()
        .add(region, &file)
        .map_err(|violation| Error::new(udm::error::Kind::Unsupported, violation.to_string()))
}

fn nbd_unix(home: &Path) -> Result<String> {
    listen_unix(home, "nbd")?;
    Ok("programs of this host, of users that the socket's mode admits".into())
}

/// Opens a socket as exports do, and connects to it.
fn listen_unix(home: &Path, kind: &str) -> Result<()> {
    let path = home.join(format!("doctor-{}.{kind}", std::process::id()));
    let (socket, _file) = socket::bind_unix(&path, &Access::default())?;
    socket::begin_to_listen(&socket, path.display())?;
    UnixStream::connect(&path)
        .map_err(|error| Error::from_io("connecting to", path.display(), error))?;
    Ok(())
}

fn nbd_tcp() -> Result<String> {
    let v4 = connect_to_self(SocketAddr::from(([127, 0, 0, 1], 0)));
    let v6 = connect_to_self(SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 0)));
    match (v4, v6) {
        (Ok(()), Ok(())) => Ok("this host, with IPv4 and IPv6".into()),
        (Ok(()), Err(_)) => Ok("this host, with IPv4 only".into()),
        (Err(_), Ok(())) => Ok("this host, with IPv6 only".into()),
        (Err(error), Err(_)) => Err(Error::from_io("listening at", "127.0.0.1", error)),
    }
}

fn connect_to_self(address: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    TcpStream::connect(listener.local_addr()?).map(|_| ())
}

fn nbd_tls() -> Result<String> {
    nbd_tcp()?;
    nbd::tls::try_out()?;
    Ok("other hosts, encrypted, with the certificates of ?tls=FOLDER".into())
}

/// Whether the certificates in `folder` work for `?tls=FOLDER`; `None` if there are none.
pub fn certificates(folder: &Path) -> Option<Check> {
    let is_there = folder.join(nbd::tls::CERTIFICATE).exists();
    let tls = Tls { folder: folder.into(), takes_any_client: false };
    let works = |_| format!("?tls={} serves clients with a certificate", folder.display());
    is_there.then(|| Check::of("certificates", nbd::tls::configure(&tls).map(works)))
}

fn failed(doing: &str, what: &str, errno: rustix::io::Errno) -> Error {
    Error::from_io(doing, what, errno.into())
}

/// The file system that holds `path`: type and source, as the kernel lists them.
pub fn file_system(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut best = ("", "unknown", "");
    for line in mounts.lines() {
        let mut fields = line.split(' ');
        let (Some(source), Some(place), Some(kind)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        if path.starts_with(place) && place.len() >= best.0.len() {
            best = (place, kind, source);
        }
    }
    format!("{} ({})", best.1, best.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_are_found() {
        assert!(file_system(Path::new("/proc")).starts_with("proc ("));
    }
}
