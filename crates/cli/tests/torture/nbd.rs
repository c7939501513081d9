//! An NBD client: its requests and the replies.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long a reply may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// NBD's commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Read = 0,
    Write = 1,
    Flush = 3,
    Trim = 4,
    WriteZeroes = 6,
}

/// A connection to an export, after its handshake.
pub struct Nbd {
    stream: UnixStream,
    /// The bytes that are not sent yet.
    unsent: Vec<u8>,
}

impl Nbd {
    /// Connects; `bytes` is how large the export must be.
    pub fn connect(socket: &Path, bytes: u64) -> io::Result<Nbd> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        // Fixed newstyle without the padding; then EXPORT_NAME with the empty name.
        stream.write_all(&3_u32.to_be_bytes())?;
        stream.write_all(&[&b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0; 4]].concat())?;
        let mut export = [0; 10];
        stream.read_exact(&mut export)?;
        assert_eq!(u64::from_be_bytes(export[..8].try_into().unwrap()), bytes, "the size");
        Ok(Nbd { stream, unsent: Vec::new() })
    }

    /// The socket, by which another thread can end this connection.
    pub fn socket(&self) -> UnixStream {
        self.stream.try_clone().unwrap()
    }

    /// Prepares a request; `send` sends it.
    pub fn ask(&mut self, request: &Request, data: &[u8]) {
        let unsent = &mut self.unsent;
        unsent.extend_from_slice(&0x2560_9513_u32.to_be_bytes());
        unsent.extend_from_slice(&u16::from(request.is_fua).to_be_bytes());
        unsent.extend_from_slice(&(request.command as u16).to_be_bytes());
        unsent.extend_from_slice(&request.cookie.to_be_bytes());
        unsent.extend_from_slice(&request.offset.to_be_bytes());
        unsent.extend_from_slice(&request.len.to_be_bytes());
        unsent.extend_from_slice(data);
    }

    /// Sends what was prepared, in one piece.
    pub fn send(&mut self) -> io::Result<()> {
        let sent = self.stream.write_all(&self.unsent);
        self.unsent.clear();
        sent
    }

    /// The next reply: its request's cookie, and NBD's error.
    pub fn receive(&mut self) -> io::Result<(u64, u32)> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes(), "the start of a reply");
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        Ok((u64::from_be_bytes(reply[8..].try_into().unwrap()), error))
    }

    /// The data after a reply to a read.
    pub fn receive_data(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.stream.read_exact(bytes)
    }
}

/// A request in its form on the wire.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub command: Command,
    pub is_fua: bool,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}
