//! A reference client, written from the protocol document, without the server's
//! encoder; and a served RAM disk for it.

#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use udm::device::{Device, LoadedTable};
use udm::disk::{Disk, RamDisk};
use udm::queue::Queue;
use udm::simple::{Linear, LinearArgs};
use udm::sync::Arc;
use udm::table::Table;
use udm_export::nbd::{Connections, Server};

// The tests of the command load it too, beside this module.
#[allow(clippy::duplicate_mod)]
#[path = "../../../cli/tests/common/ticks.rs"]
pub mod ticks;

/// FUA, as clients write it.
pub const FUA: u16 = 1;

pub fn client_flags(flags: u32) -> Vec<u8> {
    flags.to_be_bytes().to_vec()
}

pub fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

/// Data of GO and INFO.
pub fn go(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&(infos.len() as u16).to_be_bytes());
    infos.iter().for_each(|info| data.extend_from_slice(&info.to_be_bytes()));
    data
}

/// Data of the two META_CONTEXT options.
pub fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend_from_slice(&string(query)));
    data
}

/// The usual start of a client until transmission: flags, structured replies, context, GO.
pub fn usual_handshake(is_structured: bool) -> Vec<u8> {
    let mut bytes = client_flags(3);
    if is_structured {
        bytes.extend(option(8, &[]));
        bytes.extend(option(10, &contexts("", &["base:allocation"])));
    }
    bytes.extend(option(7, &go("", &[3])));
    bytes
}

/// Bytes of the answer to that without structured replies: greeting, two facts about the export,
/// and the ACK.
pub const USUAL_ANSWER_BYTES: usize = 18 + (20 + 12) + (20 + 14) + 20;

pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes
}

pub fn write(flags: u16, cookie: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    [request(flags, 1, cookie, offset, data.len() as u32), data.to_vec()].concat()
}

/// An answer to an option: the option, the reply's type, its data.
pub type OptionReply = (u32, u32, Vec<u8>);

pub fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (head, rest) = bytes.split_at(count);
    *bytes = rest;
    head
}

pub fn take_u16(bytes: &mut &[u8]) -> u16 {
    u16::from_be_bytes(take(bytes, 2).try_into().unwrap())
}

pub fn take_u32(bytes: &mut &[u8]) -> u32 {
    u32::from_be_bytes(take(bytes, 4).try_into().unwrap())
}

pub fn take_u64(bytes: &mut &[u8]) -> u64 {
    u64::from_be_bytes(take(bytes, 8).try_into().unwrap())
}

/// Reads the greeting and returns its flags.
pub fn take_greeting(bytes: &mut &[u8]) -> u16 {
    assert_eq!(take(bytes, 16), b"NBDMAGICIHAVEOPT");
    take_u16(bytes)
}

/// Reads one answer to an option.
pub fn take_option_reply(bytes: &mut &[u8]) -> OptionReply {
    assert_eq!(take_u64(bytes), 0x0003_e889_0455_65a9);
    let (option, kind, len) = (take_u32(bytes), take_u32(bytes), take_u32(bytes));
    (option, kind, take(bytes, len as usize).to_vec())
}

/// Reads answers to options up to the ACK of GO.
pub fn take_handshake(bytes: &mut &[u8]) -> Vec<OptionReply> {
    take_greeting(bytes);
    let mut replies = Vec::new();
    loop {
        let reply = take_option_reply(bytes);
        let is_last = (reply.0, reply.1) == (7, 1);
        replies.push(reply);
        if is_last {
            return replies;
        }
    }
}

/// An answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    pub error: u32,
    /// Data read, or the raw extents.
    pub data: Vec<u8>,
}

/// Reads one answer; `read_len` tells how many bytes a successful simple reply carries.
pub fn take_reply(bytes: &mut &[u8], read_len: impl Fn(u64) -> usize) -> Reply {
    match take_u32(bytes) {
        0x6744_6698 => {
            let (error, cookie) = (take_u32(bytes), take_u64(bytes));
            let len = if error == 0 { read_len(cookie) } else { 0 };
            Reply { cookie, error, data: take(bytes, len).to_vec() }
        }
        0x668e_33ef => {
            let (flags, kind) = (take_u16(bytes), take_u16(bytes));
            let (cookie, len) = (take_u64(bytes), take_u32(bytes));
            assert_eq!(flags, 1, "we send one chunk per reply");
            let mut chunk = take(bytes, len as usize);
            match kind {
                1 => {
                    take_u64(&mut chunk);
                    Reply { cookie, error: 0, data: chunk.to_vec() }
                }
                5 => Reply { cookie, error: 0, data: chunk.to_vec() },
                0x8001 => {
                    let error = take_u32(&mut chunk);
                    let words = take_u16(&mut chunk) as usize;
                    assert_eq!(words, chunk.len());
                    assert!(words > 0, "an error is sent with words");
                    Reply { cookie, error, data: Vec::new() }
                }
                other => panic!("chunk of type {other:#x}"),
            }
        }
        other => panic!("reply starts with {other:#x}"),
    }
}

/// A device that is all of `disk`.
pub fn linear(disk: Arc<dyn Disk>) -> Arc<Device> {
    Device::with_table("memory", linear_table(disk)).unwrap()
}

/// A table that is all of `disk`.
pub fn linear_table(disk: Arc<dyn Disk>) -> LoadedTable {
    let size_bytes = disk.limits().size_bytes;
    let table = Table::parse(&format!("0 {} linear memory 0", size_bytes / 512)).unwrap();
    let args = LinearArgs::parse(&table.lines[0].args).unwrap();
    let linear = Linear::new(&args, size_bytes, disk).unwrap();
    LoadedTable::single(Arc::new(linear), size_bytes)
}

/// A RAM disk served by the linear target at a Unix socket in a folder of its own.
pub struct Served {
    pub folder: tempfile::TempDir,
    pub disk: Arc<RamDisk>,
    pub device: Arc<Device>,
    pub server: Server,
    _background: Queue,
}

impl Served {
    pub fn start(size_bytes: u64) -> Served {
        let folder = tempfile::tempdir().unwrap();
        let uri = format!("nbd+unix://{}/socket", folder.path().display());
        Served::start_at(size_bytes, folder, &uri)
    }

    pub fn start_at(size_bytes: u64, folder: tempfile::TempDir, uri: &str) -> Served {
        let disk = Arc::new(RamDisk::new(size_bytes, 512));
        let device = linear(disk.clone());
        let server = Server::start(&device, &uri.parse().unwrap()).unwrap();
        let background = Queue::background("background", &device).unwrap();
        Served { folder, disk, device, server, _background: background }
    }

    /// The URI for clients.
    pub fn uri(&self) -> String {
        self.server.uri().for_clients()
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// A new connection, without any message yet.
    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// A client in transmission.
    pub fn client(&self) -> Client {
        let mut stream = self.connect();
        stream.write_all(&usual_handshake(false)).unwrap();
        stream.read_exact(&mut [0; USUAL_ANSWER_BYTES]).unwrap();
        Client { stream }
    }

    /// Waits until `is_true` of the server's counts.
    pub fn wait_until(&self, what: &str, is_true: impl Fn(&Connections) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_true(&self.server.connections()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.server.connections());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A client with simple replies.
pub struct Client {
    pub stream: UnixStream,
}

impl Client {
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Reads a reply. Unless it is an error, `len` bytes of data follow.
    pub fn reply(&mut self, len: usize) -> Reply {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head).unwrap();
        let mut rest = &head[..];
        assert_eq!(take_u32(&mut rest), 0x6744_6698);
        let (error, cookie) = (take_u32(&mut rest), take_u64(&mut rest));
        let mut data = vec![0; if error == 0 { len } else { 0 }];
        self.stream.read_exact(&mut data).unwrap();
        Reply { cookie, error, data }
    }

    /// Writes a sector and reads it back, to see that all is well.
    pub fn check(&mut self) {
        let sector: Vec<u8> = (0..512).map(|byte| (byte % 253) as u8).collect();
        self.send(&write(0, 1, 0, &sector));
        self.send(&request(0, 3, 2, 0, 0));
        assert_eq!((self.reply(0).error, self.reply(0).error), (0, 0));
        self.send(&request(0, 0, 3, 0, 512));
        assert_eq!(self.reply(512).data, sector);
    }

    /// Whether the server has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0) | Err(_))
    }
}
