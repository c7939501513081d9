//! One address for several exports, of one process or of many: each has its own name there.
//!
//! The exports share the listening socket itself. Any of them accepts a connection and negotiates
//! until an option names another export; that export then gets the connection together with the
//! state of its handshake. The exports need no central process and do not depend on each
//! other: when the process of one dies, the others keep serving.
//!
//! An export's entry is a datagram socket in its user's directory, named by address and export. It
//! takes two messages, each with a file descriptor: a connection to continue with, and a request
//! for the listening socket. Other users cannot access that directory, so all messages are from
//! this user's processes; they are checked nevertheless, and invalid ones are dropped.
//!
//! 1. No thread blocks in `accept`: all wait until the listener is readable, and the first one gets
//!    the connection. If the kernel woke only one waiter, a stopped one (SIGSTOP) could keep a
//!    connection from the others.
//! 2. An entry whose process died refuses messages, so it counts as removed. The next export of
//!    that name replaces it, or `udm remove --force` removes it.
//! 3. Exports open and close one at a time, under a lock on the directory. The last one to close
//!    removes the file of a Unix socket.
//! 4. Sending never blocks on another process: if an entry is full for two seconds, its export does
//!    not get the connection, and the client is refused.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg,
    sendmsg_addr, sockopt,
};
use udm::error::{Error, Kind, Result};
use udm::sync::Arc;
use udm::sync::statics::atomic::{AtomicU64, Ordering};

use super::handshake::{Neighbours, PASSED_MAX, Said};
use super::listener;
use super::proto::OPTIONS_MAX;
use super::uri::{Place, Uri};
use crate::socket::{Access, SocketFile};

/// Maximum exports at one address.
pub const EXPORTS_MAX: usize = 256;
/// Maximum received bytes without an answer that are sent with a connection: an option is shorter.
const REST_BYTES_MAX: usize = 64 << 10;
/// Maximum bytes of a message.
const MESSAGE_BYTES_MAX: usize = REST_BYTES_MAX + 1024;
/// Maximum wait for free space in another export's entry.
const FULL_MAX: Duration = Duration::from_secs(2);
/// Maximum wait of an opening or closing export for the directory's lock, and for the listener.
const LOCK_MAX: Duration = Duration::from_secs(3);
/// Time between two attempts.
const TRY_EVERY: Duration = Duration::from_millis(5);
/// First byte of a message with a connection. It changes with the format.
const CONNECTION: u8 = 0x11;
/// First byte of a message that asks for the listener.
const LISTENER: u8 = 0x12;
/// The suffix of every entry's name.
const SUFFIX: &str = ".export";

/// A message to an export's entry.
#[derive(Debug)]
pub enum Message {
    /// A connection, the state of its handshake, and received bytes without an answer.
    Connection(OwnedFd, Said, Vec<u8>),
    /// Another export asks for the listener; the answer is sent to this socket.
    Listener(OwnedFd),
}

/// An export at a shared address.
#[derive(Debug)]
pub struct Member {
    folder: OwnedFd,
    /// The prefix of the names of entries at this address.
    prefix: String,
    name: String,
    /// Its entry; `None` before it has one.
    entry: Option<SocketFile>,
    /// The Unix socket's file, if this process must remove it.
    file: Option<SocketFile>,
    /// Connections that were handed over to other exports.
    handed_over: AtomicU64,
}

/// A member, and its two sockets.
#[derive(Debug)]
pub struct Joined {
    /// The member.
    pub member: Arc<Member>,
    /// The socket to which clients connect.
    pub listener: Arc<OwnedFd>,
    /// The socket to which other exports send messages.
    pub entry: Arc<OwnedFd>,
    /// The address, with its port.
    pub uri: Uri,
}

/// Opens an export of `uri`, which names it, next to the exports at the same address. `home` is the
/// directory of their entries.
pub fn join(uri: &Uri, home: &Path) -> Result<Joined> {
    let name = uri.name.clone().unwrap_or_default();
    let folder = open_folder(home)?;
    let _lock = Lock::take(home)?;
    let mut member = Member {
        folder,
        prefix: prefix(&uri.place),
        name,
        entry: None,
        file: None,
        handed_over: 0.into(),
    };
    let (listener, uri, file) = match member.find_listener(uri)? {
        Some((listener, is_ours)) => (listener, uri.clone(), member.share(uri, is_ours)?),
        None => listener::bind(uri)?,
    };
    (member.prefix, member.file) = (prefix(&uri.place), file);
    // An export that loses the race to accept a connection must not block until the next one.
    let failed = |errno: Errno| Error::from_io("sharing", &uri, errno.into());
    rustix::io::ioctl_fionbio(&listener, true).map_err(failed)?;
    let entry = member.bind_entry()?;
    let (member, listener) = (Arc::new(member), Arc::new(listener));
    Ok(Joined { member, listener, entry: Arc::new(entry), uri })
}

/// Returns the names of the live exports at an address.
pub fn exports_at(place: &Place, home: &Path) -> Vec<String> {
    let Ok(folder) = open_folder(home) else { return Vec::new() };
    living(&folder, &prefix(place))
}

/// Removes the entries that exports of dead servers have left in `home`.
pub fn forget_dead(home: &Path) -> Result<()> {
    let folder = open_folder(home)?;
    let _lock = Lock::take(home)?;
    for entry in std::fs::read_dir(home).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let name = file.to_str().and_then(|file| file.strip_suffix(SUFFIX));
        if name.is_some_and(|name| !is_alive(&folder, "", name)) {
            let _ = rustix::fs::unlinkat(&folder, &file, AtFlags::empty());
        }
    }
    Ok(())
}

fn living(folder: &OwnedFd, prefix: &str) -> Vec<String> {
    let path = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let name = file.to_str().and_then(|file| file.strip_prefix(prefix));
        let name = name.and_then(|file| file.strip_suffix(SUFFIX));
        names.extend(name.filter(|name| is_alive(folder, prefix, name)).map(str::to_owned));
    }
    names.sort_unstable();
    names
}

/// The address of an entry, short enough for a socket's.
fn address(folder: &OwnedFd, prefix: &str, name: &str) -> rustix::io::Result<SocketAddrUnix> {
    SocketAddrUnix::new(path(folder, prefix, name))
}

fn path(folder: &OwnedFd, prefix: &str, name: &str) -> PathBuf {
    format!("/proc/self/fd/{}/{prefix}{name}{SUFFIX}", folder.as_raw_fd()).into()
}

fn is_alive(folder: &OwnedFd, prefix: &str, name: &str) -> bool {
    let address = address(folder, prefix, name);
    let connect = |socket: OwnedFd| rustix::net::connect(&socket, &address?);
    datagram().and_then(connect).is_ok()
}

/// The prefix of the names of an address's entries: a checksum, because paths are longer than names
/// may be.
fn prefix(place: &Place) -> String {
    let text = match place {
        Place::Unix(path, _) => format!("unix {}", path.display()),
        Place::Tcp { address, .. } => format!("tcp {address}"),
    };
    // FNV-1a.
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, step);
    format!("{hash:016x}.")
}

fn open_folder(home: &Path) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(home, flags, Mode::empty())
        .map_err(|errno| Error::from_io("opening", home.display(), errno.into()))
}

/// The lock under which exports open and close.
struct Lock(#[expect(dead_code, reason = "the lock is the open file's")] OwnedFd);

impl Lock {
    fn take(home: &Path) -> Result<Lock> {
        Lock::on(open_folder(home)?, &home.display().to_string())
    }

    fn on(folder: OwnedFd, home: &str) -> Result<Lock> {
        let deadline = Instant::now() + LOCK_MAX;
        loop {
            match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Lock(folder)),
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(TRY_EVERY);
                }
                Err(Errno::WOULDBLOCK) => {
                    let message = format!(
                        "{home}: another export has been opening or closing for {} s: its server \
                        may be stopped",
                        LOCK_MAX.as_secs()
                    );
                    return Err(Error::new(Kind::Refused, message));
                }
                Err(errno) => return Err(Error::from_io("locking", home, errno.into())),
            }
        }
    }
}

impl Member {
    /// Number of connections that were handed over to other exports.
    pub fn handed_over(&self) -> u64 {
        self.handed_over.load(Ordering::Relaxed)
    }

    /// Returns the names of the other live exports at this address, sorted.
    pub fn others(&self) -> Vec<String> {
        let mut names = living(&self.folder, &self.prefix);
        names.retain(|name| *name != self.name);
        names
    }

    /// Asks the exports at this address for their listener; `None` if there are none. Also returns
    /// whether the exports own the listener's file and remove it.
    fn find_listener(&self, uri: &Uri) -> Result<Option<(OwnedFd, bool)>> {
        if matches!(&uri.place, Place::Tcp { address, .. } if address.port() == 0) {
            return Ok(None);
        }
        let deadline = Instant::now() + LOCK_MAX;
        loop {
            if is_alive(&self.folder, &self.prefix, &self.name) {
                let message = format!(
                    "{}: that export name is already served at this address",
                    uri.for_clients()
                );
                return Err(Error::new(Kind::Busy, message));
            }
            let others = self.others();
            if others.is_empty() {
                return Ok(None);
            }
            if others.len() >= EXPORTS_MAX {
                let message = format!("{uri}: it already has {EXPORTS_MAX} exports");
                return Err(Error::new(Kind::NoSpace, message));
            }
            if let Some(found) = others.iter().find_map(|name| self.ask(name)) {
                return Ok(Some(found));
            }
            if Instant::now() >= deadline {
                let message = format!(
                    "{uri}: the servers of the other exports there do not answer: {}",
                    others.join(", ")
                );
                return Err(Error::new(Kind::Refused, message));
            }
        }
    }

    /// Asks the export `name` for the listener.
    fn ask(&self, name: &str) -> Option<(OwnedFd, bool)> {
        let flags = SocketFlags::CLOEXEC;
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (mine, theirs) = pair.ok()?;
        let patience = Some(Duration::from_millis(500));
        sockopt::set_socket_timeout(&mine, sockopt::Timeout::Recv, patience).ok()?;
        self.send(name, &[LISTENER], theirs.as_fd()).ok()?;
        drop(theirs);
        let mut byte = [0];
        let (count, files) = receive(&mine, &mut byte, RecvFlags::empty()).ok()?;
        let listener = files.into_iter().next().filter(|_| count == 1)?;
        // It need not listen yet: the exports of a device open before any of them lets clients in.
        let is_stream = sockopt::socket_type(&listener) == Ok(SocketType::STREAM);
        is_stream.then_some((listener, byte[0] == 1))
    }

    /// Takes a share in the file of a Unix socket: the last export to close removes it.
    fn share(&self, uri: &Uri, is_ours: bool) -> Result<Option<SocketFile>> {
        let Place::Unix(path, access) = &uri.place else { return Ok(None) };
        if *access != Access::default() {
            access.apply(path)?;
        }
        if is_ours { SocketFile::at(path).map(Some) } else { Ok(None) }
    }

    fn bind_entry(&mut self) -> Result<OwnedFd> {
        let failed = |errno: Errno| Error::from_io("naming export", &self.name, errno.into());
        let place = path(&self.folder, &self.prefix, &self.name);
        // A check found that the owner of the entry is gone, and the directory is locked.
        let _ = rustix::fs::unlink(&place);
        let socket = datagram().map_err(failed)?;
        let address = SocketAddrUnix::new(&place).map_err(failed)?;
        rustix::net::bind(&socket, &address).map_err(failed)?;
        self.entry = Some(SocketFile::at(&place)?);
        Ok(socket)
    }

    /// Sends a message with a file descriptor to the export `name`.
    fn send(&self, name: &str, bytes: &[u8], file: BorrowedFd<'_>) -> rustix::io::Result<()> {
        let socket = datagram()?;
        let address = address(&self.folder, &self.prefix, name)?;
        let files = [file];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sendmsg_addr(&socket, &address, &[IoSlice::new(bytes)], &mut control, flags).map(|_| ())
    }

    /// Answers an export that asks for the listener. If sending fails, the other export gets no
    /// answer.
    pub fn answer(&self, to: &OwnedFd, listener: &OwnedFd) {
        let files = [listener.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let bytes = [u8::from(self.file.is_some())];
        let _ = sendmsg(to, &[IoSlice::new(&bytes)], &mut control, flags);
    }

    /// Returns the other exports, for the one connection that `socket` duplicates.
    pub fn neighbour(self: &Arc<Member>, socket: OwnedFd) -> Box<dyn Neighbours> {
        Box::new(Beside { member: self.clone(), socket })
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let entry = self.entry.take();
        // Without the lock, two exports that close at the same time could both leave the file to
        // each other. The next export to open would then find a file without a listener.
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(&self.folder, ".", flags, Mode::empty());
        // An export that failed before it had an entry still holds the lock of its opening.
        let _lock = folder.ok().filter(|_| entry.is_some()).map(|it| Lock::on(it, &self.name));
        drop(entry);
        if let Some(file) = self.file.take()
            && !self.others().is_empty()
        {
            file.leave();
        }
    }
}

/// The other exports, as seen by one connection.
#[derive(Debug)]
struct Beside {
    member: Arc<Member>,
    socket: OwnedFd,
}

impl Neighbours for Beside {
    fn names(&self) -> Vec<String> {
        self.member.others()
    }

    /// Runs on the connection's own thread, so that a wait for free space delays no other client.
    fn pass_on(
        &self,
        name: &str,
        said: &Said,
        rest: &[u8],
    ) -> std::result::Result<(), &'static str> {
        let message =
            encode(said, rest).ok_or("the client sent too much data before the answer")?;
        let deadline = Instant::now() + FULL_MAX;
        loop {
            match self.member.send(name, &message, self.socket.as_fd()) {
                Ok(()) => break,
                Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {
                    std::thread::sleep(TRY_EVERY);
                }
                Err(Errno::AGAIN) => return Err("the server of that export refuses connections"),
                Err(_) => return Err("the server of that export cannot be reached"),
            }
        }
        self.member.handed_over.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Encodes a message with a connection; `None` if it is too long.
fn encode(said: &Said, rest: &[u8]) -> Option<Vec<u8>> {
    if rest.len() > REST_BYTES_MAX {
        return None;
    }
    let context = said.context_of.as_deref().unwrap_or_default();
    let flags = u8::from(said.no_zeroes)
        | u8::from(said.is_structured) << 1
        | u8::from(said.context_of.is_some()) << 2;
    let mut bytes = vec![CONNECTION, flags, said.passed, u8::try_from(context.len()).ok()?];
    bytes.extend_from_slice(&said.options.to_be_bytes());
    bytes.extend_from_slice(context.as_bytes());
    bytes.extend_from_slice(rest);
    Some(bytes)
}

fn decode(bytes: &[u8]) -> Option<(Said, Vec<u8>)> {
    let (&[kind, flags, passed, context], bytes) = bytes.split_first_chunk()?;
    let (options, bytes) = bytes.split_first_chunk()?;
    let (context, rest) = bytes.split_at_checked(context.into())?;
    let options = u32::from_be_bytes(*options);
    let is_sane = passed <= PASSED_MAX && options <= OPTIONS_MAX && rest.len() <= REST_BYTES_MAX;
    if kind != CONNECTION || flags > 0b111 || !is_sane {
        return None;
    }
    let context = std::str::from_utf8(context).ok()?.to_owned();
    let said = Said {
        no_zeroes: flags & 1 != 0,
        is_structured: flags & 2 != 0,
        options,
        passed,
        context_of: Some(context).filter(|_| flags & 4 != 0),
    };
    Some((said, rest.to_vec()))
}

/// Receives the next message at `entry`; `None` while there is none. Invalid messages are skipped.
pub fn next_message(entry: &OwnedFd) -> Option<Message> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    loop {
        let (count, files) = match receive(entry, &mut bytes, RecvFlags::DONTWAIT) {
            Ok(received) => received,
            Err(Errno::INTR) => continue,
            Err(_) => return None,
        };
        let mut files = files.into_iter();
        let (Some(file), None) = (files.next(), files.next()) else { continue };
        if sockopt::socket_type(&file) != Ok(SocketType::STREAM) {
            continue;
        }
        if bytes[..count] == [LISTENER] {
            return Some(Message::Listener(file));
        }
        if let Some((said, rest)) = decode(&bytes[..count]) {
            return Some(Message::Connection(file, said, rest));
        }
    }
}

/// Receives one message with its files.
fn receive(
    socket: &OwnedFd,
    bytes: &mut [u8],
    flags: RecvFlags,
) -> rustix::io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let vectors = &mut [IoSliceMut::new(bytes)];
    let received = recvmsg(socket, vectors, &mut control, flags | RecvFlags::CMSG_CLOEXEC)?;
    let files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    Ok((received.bytes, files.flatten().collect()))
}

fn datagram() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Some((said, rest)) = decode(&[&[CONNECTION][..], &bytes].concat()) {
                prop_assert!(said.passed <= PASSED_MAX && said.options <= OPTIONS_MAX);
                prop_assert!(rest.len() < bytes.len());
            }
        }
    }

    #[test]
    fn what_was_said_is_read_as_it_was_written_and_nothing_else_is_read() {
        for context_of in [None, Some(String::new()), Some("vol".into())] {
            let said =
                Said { no_zeroes: true, options: 77, passed: 3, context_of, ..Said::default() };
            let bytes = encode(&said, b"rest").unwrap();
            assert_eq!(decode(&bytes).unwrap(), (said, b"rest".to_vec()));
            for len in 0..bytes.len() - 4 {
                assert_eq!(decode(&bytes[..len]), None, "{len}");
            }
        }
        assert_eq!(encode(&Said::default(), &vec![0; REST_BYTES_MAX + 1]), None);
        assert_eq!(decode(&[LISTENER, 0, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(decode(&[CONNECTION, 8, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(decode(&[CONNECTION, 0, 17, 0, 0, 0, 0, 0]), None);
        assert_eq!(decode(&[CONNECTION, 0, 0, 0, 0, 0, 0, 129]), None);
        assert_eq!(decode(&[CONNECTION, 4, 0, 1, 0, 0, 0, 0, 0xff]), None);
    }
}
