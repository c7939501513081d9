//! Which doors work on this machine, found by trying each as far as it goes without a device.
//!
//! What is tried is undone before the answer: sockets are closed, their files removed, and no disk
//! is made. Nothing is concluded from a version.

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

/// What came of a try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What was tried.
    pub name: &'static str,
    /// Whether it works.
    pub works: bool,
    /// How it works, or why it does not.
    pub what: String,
    /// The setting or package that would help.
    pub help: Option<String>,
}

impl Check {
    /// It works, and how.
    pub fn good(name: &'static str, what: impl Into<String>) -> Check {
        Check { name, works: true, what: what.into(), help: None }
    }

    /// It does not work, and why.
    pub fn bad(name: &'static str, what: impl Into<String>) -> Check {
        Check { name, works: false, what: what.into(), help: None }
    }

    /// The same with what would help, if it does not work.
    pub fn or(self, help: impl Into<String>) -> Check {
        let help = Some(help.into()).filter(|_| !self.works);
        Check { help: self.help.or(help), ..self }
    }

    /// What a try came to.
    pub fn of(name: &'static str, result: Result<String>) -> Check {
        match result {
            Ok(what) => Check::good(name, what),
            Err(error) => Check::refused(name, &error.to_string()),
        }
    }

    /// It does not work, by the words of an error; the part after `; ` is what would help.
    pub fn refused(name: &'static str, text: &str) -> Check {
        match text.split_once("; ") {
            Some((what, help)) => Check::bad(name, what).or(help),
            None => Check::bad(name, text),
        }
    }
}

/// Doors, as `doors` calls them.
const DOORS: [&str; 5] = ["ublk", "vhost-user", "nbd+unix", "nbd", "nbds"];

/// Every door, where no server can start for want of `what`.
pub fn no_doors(what: &str, help: &str) -> Vec<Check> {
    DOORS.map(|name| Check::bad(name, what).or(help)).into()
}

/// Tries every door. `home` is a directory of this user alone.
pub fn doors(home: &Path) -> Vec<Check> {
    // Every door is served through one.
    if let Err(error) = ring() {
        return no_doors("without io_uring nothing is served", &io_uring_help(&error));
    }
    let [ublk_, vhost_, unix, tcp, tls] = DOORS;
    vec![
        Check::of(ublk_, ublk()),
        Check::of(vhost_, vhost(home)),
        Check::of(unix, nbd_unix(home)),
        Check::of(tcp, nbd_tcp()),
        Check::of(tls, nbd_tls()),
    ]
}

/// The way in which this process uses io_uring.
pub fn io_uring() -> Check {
    match ring() {
        Ok(way) => Check::good("io_uring", way),
        Err(error) => Check::bad("io_uring", error.to_string()).or(io_uring_help(&error)),
    }
}

fn ring() -> Result<String> {
    let way = Ring::<()>::new(8)?.way().to_owned();
    // ublk gives commands, whose entries are longer.
    let commands = match Ring::<()>::with_commands(8) {
        Ok(_) => "",
        Err(_) => "; no commands (Linux 5.19), so no ublk",
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
        "the driver makes disks that outlive a killed server{}{}",
        has(ublk::proto::feature::UPDATE_SIZE, ", and grow"),
        has(ublk::proto::feature::QUIESCE, ", and are handed over in order"),
    ))
}

/// A client's memory, its bells and its socket.
fn vhost(home: &Path) -> Result<String> {
    share(MemfdFlags::CLOEXEC, MIB)?;
    let _bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
        .map_err(|errno| failed("making", "an eventfd", errno))?;
    listen_unix(home, "vhost")?;
    Ok("memory of memfds, eventfds and Unix sockets".into())
}

/// Memory of huge pages for virtual machines, of which the door needs none.
pub fn huge_pages() -> Check {
    let works = share(MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB, 2 * MIB);
    let works = works.map(|()| "virtual machines' memory may be of 2 MiB pages".into());
    Check::of("huge pages", works).or("`sysctl vm.nr_hugepages=N`; vhost-user works without")
}

/// Maps a client's memory of `bytes`.
fn share(flags: MemfdFlags, bytes: u64) -> Result<()> {
    let failed = |errno| failed("making", "a memfd", errno);
    let file: OwnedFd = memfd_create("udm-doctor", flags).map_err(failed)?;
    ftruncate(&file, bytes).map_err(failed)?;
    // A huge page that is not there would be missed with the first access, by a signal.
    fallocate(&file, FallocateFlags::empty(), 0, bytes).map_err(failed)?;
    let region = Region { guest: 0, len: bytes, user: 0, offset: 0 };
    Memory::default()
        .add(region, &file)
        .map_err(|violation| Error::new(udm::error::Kind::Unsupported, violation.to_string()))
}

fn nbd_unix(home: &Path) -> Result<String> {
    listen_unix(home, "nbd")?;
    Ok("programs of this host, as many users as the socket's mode lets in".into())
}

/// Makes a socket as doors do, and connects to it.
fn listen_unix(home: &Path, kind: &str) -> Result<()> {
    let path = home.join(format!("doctor-{}.{kind}", std::process::id()));
    let (_socket, _file) = socket::listen_unix(&path, &Access::default())?;
    UnixStream::connect(&path)
        .map_err(|error| Error::from_io("connecting to", path.display(), error))?;
    Ok(())
}

fn nbd_tcp() -> Result<String> {
    let v4 = connect_to_self(SocketAddr::from(([127, 0, 0, 1], 0)));
    let v6 = connect_to_self(SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 0)));
    match (v4, v6) {
        (Ok(()), Ok(())) => Ok("this host, by IPv4 and IPv6".into()),
        (Ok(()), Err(_)) => Ok("this host, by IPv4; no IPv6 here".into()),
        (Err(_), Ok(())) => Ok("this host, by IPv6; no IPv4 here".into()),
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

/// Whether the certificates in `folder` are good for `?tls=FOLDER`; `None` if there are none.
pub fn certificates(folder: &Path) -> Option<Check> {
    let is_there = folder.join(nbd::tls::CERTIFICATE).exists();
    let tls = Tls { folder: folder.into(), takes_any_client: false };
    let works = |_| format!("?tls={} serves clients with a certificate", folder.display());
    is_there.then(|| Check::of("certificates", nbd::tls::configure(&tls).map(works)))
}

fn failed(doing: &str, what: &str, errno: rustix::io::Errno) -> Error {
    Error::from_io(doing, what, errno.into())
}
