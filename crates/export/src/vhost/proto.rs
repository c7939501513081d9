//! The messages of vhost-user, as QEMU's `docs/interop/vhost-user.rst` defines them: a header and a
//! payload, with file descriptors.
//!
//! All numbers are in native byte order, since both sides run on this machine.

#![allow(clippy::host_endian_bytes, reason = "vhost-user is spoken within one machine")]

use std::fmt;
use std::os::fd::OwnedFd;

/// Bytes of a message's header.
pub const HEADER_BYTES: usize = 12;
/// An upper bound for payloads; all supported messages are shorter.
pub const PAYLOAD_BYTES_MAX: usize = 4096;
/// Maximum file descriptors of a message.
pub const FDS_MAX: usize = 8;

/// A client's violation of the protocol, which ends its connection or the ring in question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(String);

impl Violation {
    /// Creates a violation with a message for people, without a full stop.
    pub fn new(words: impl Into<String>) -> Violation {
        Violation(words.into())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns a violation as an error.
pub fn wrong<T>(words: impl Into<String>) -> Result<T, Violation> {
    Err(Violation::new(words))
}

macro_rules! messages {
    ($($name:ident = $number:literal,)*) => {
        /// The type of a message.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "names of the specification")]
        pub enum Request { $($name = $number,)* }

        impl Request {
            /// Returns the request with this number.
            pub fn known(number: u32) -> Option<Request> {
                match number {
                    $($number => Some(Request::$name),)*
                    _ => None,
                }
            }
        }
    };
}

messages! {
    GetFeatures = 1,
    SetFeatures = 2,
    SetOwner = 3,
    ResetOwner = 4,
    SetMemTable = 5,
    SetVringNum = 8,
    SetVringAddr = 9,
    SetVringBase = 10,
    GetVringBase = 11,
    SetVringKick = 12,
    SetVringCall = 13,
    SetVringErr = 14,
    GetProtocolFeatures = 15,
    SetProtocolFeatures = 16,
    GetQueueNum = 17,
    SetVringEnable = 18,
    SetBackendReqFd = 21,
    GetConfig = 24,
    SetConfig = 25,
    GetInflightFd = 31,
    SetInflightFd = 32,
    GetMaxMemSlots = 36,
    AddMemReg = 37,
    RemMemReg = 38,
}

/// Bits of a header's flags: the version, a reply, a request for an acknowledgement.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const IS_REPLY: u32 = 1 << 2;
const NEEDS_REPLY: u32 = 1 << 3;

/// Feature bits of the device that belong to the protocol and to rings.
pub mod feature {
    /// Protocol features can be negotiated, and rings are enabled one by one.
    pub const PROTOCOL: u64 = 1 << 30;
    /// A descriptor may refer to a table of descriptors.
    pub const INDIRECT: u64 = 1 << 28;
    /// Both sides publish the entry at which they want a notification.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The current version of virtio.
    pub const VERSION_1: u64 = 1 << 32;
    /// Rings are packed: both sides cycle through one table.
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Protocol feature bits.
pub mod protocol {
    /// Several rings.
    pub const MQ: u64 = 1 << 0;
    /// Messages without a reply of their own may ask for an acknowledgement.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The server has a channel of its own for messages to the client.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// Messages read and write the device's configuration.
    pub const CONFIG: u64 = 1 << 9;
    /// Requests in flight are logged in memory that outlives the server.
    pub const INFLIGHT: u64 = 1 << 12;
    /// Memory is added and removed region by region.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// All features of this server.
    pub const OFFERED: u64 = MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT | CONFIGURE_MEM_SLOTS;
}

/// Encodes the notice that the device's configuration has changed.
pub fn config_has_changed() -> Vec<u8> {
    const CONFIG_CHANGE: u32 = 2;
    [CONFIG_CHANGE, VERSION, 0].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// A message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The type of the message.
    pub request: Request,
    /// Whether the client wants an acknowledgement.
    pub needs_reply: bool,
    /// Bytes of the payload.
    pub payload_bytes: usize,
}

impl Header {
    /// Decodes a header.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Violation> {
        let (number, flags, size) = (u32_at(bytes, 0), u32_at(bytes, 4), u32_at(bytes, 8));
        if flags & VERSION_MASK != VERSION || flags & IS_REPLY != 0 {
            return wrong(format!("a message has flags {flags:#x}"));
        }
        let Some(request) = Request::known(number) else {
            return wrong(format!("message {number} is not supported"));
        };
        if size as usize > PAYLOAD_BYTES_MAX {
            return wrong(format!("{request:?} with {size} bytes"));
        }
        let needs_reply = flags & NEEDS_REPLY != 0;
        Ok(Header { request, needs_reply, payload_bytes: size as usize })
    }
}

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// The type of the message.
    pub request: Request,
    /// Whether the client wants an acknowledgement.
    pub needs_reply: bool,
    /// The payload.
    pub payload: Vec<u8>,
    /// The file descriptors.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// Returns the payload, if it has the right length.
    pub fn fixed<const N: usize>(&self) -> Result<&[u8; N], Violation> {
        self.payload.as_slice().try_into().map_err(|_| {
            let (request, bytes) = (self.request, self.payload.len());
            Violation::new(format!("{request:?} with {bytes} bytes instead of {N}"))
        })
    }

    /// Returns the payload as one number.
    pub fn number(&self) -> Result<u64, Violation> {
        self.fixed::<8>().map(|bytes| u64_at(bytes, 0))
    }

    /// Returns the payload as a ring's index and a number.
    pub fn ring_state(&self) -> Result<(usize, u32), Violation> {
        self.fixed::<8>().map(|bytes| (u32_at(bytes, 0) as usize, u32_at(bytes, 4)))
    }

    /// Returns the file descriptor, if there is exactly one.
    pub fn only_fd(&mut self) -> Result<OwnedFd, Violation> {
        match (self.fds.pop(), self.fds.is_empty()) {
            (Some(fd), true) => Ok(fd),
            _ => wrong(format!("{:?} needs one file", self.request)),
        }
    }
}

/// An answer.
#[derive(Debug, Default)]
pub struct Reply {
    /// All bytes, with the header.
    pub bytes: Vec<u8>,
    /// A file descriptor to send with it.
    pub fd: Option<OwnedFd>,
}

impl Reply {
    /// Creates the answer to `request`.
    pub fn new(request: Request, payload: &[u8]) -> Reply {
        let words = [request as u32, VERSION | IS_REPLY, payload.len() as u32];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend_from_slice(payload);
        Reply { bytes, fd: None }
    }

    /// Creates an answer of one number.
    pub fn number(request: Request, value: u64) -> Reply {
        Reply::new(request, &value.to_ne_bytes())
    }

    /// Creates an answer of a ring's index and a number.
    pub fn ring_state(request: Request, index: usize, value: u32) -> Reply {
        let index = index as u32;
        Reply::new(request, &[index.to_ne_bytes(), value.to_ne_bytes()].concat())
    }
}

/// A region of the client's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its guest address.
    pub guest: u64,
    /// Length in bytes.
    pub len: u64,
    /// Its address in the client's process.
    pub user: u64,
    /// Its offset in its file.
    pub offset: u64,
}

/// Bytes of a region in a message.
pub const REGION_BYTES: usize = 32;

impl Region {
    /// Decodes a region.
    pub fn parse(bytes: &[u8; REGION_BYTES]) -> Region {
        let [guest, len, user, offset] = [0, 8, 16, 24].map(|at| u64_at(bytes, at));
        Region { guest, len, user, offset }
    }
}

/// Addresses of a ring's parts in the client's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptors.
    pub descriptors: u64,
    /// The used ring.
    pub used: u64,
    /// The available ring.
    pub available: u64,
}

/// Decodes the payload of `SetVringAddr`: the ring's index, and its addresses.
pub fn ring_addresses(bytes: &[u8; 40]) -> Result<(usize, RingAddresses), Violation> {
    let (index, flags) = (u32_at(bytes, 0) as usize, u32_at(bytes, 4));
    if flags != 0 {
        return wrong(format!("a ring with flags {flags:#x}: logging was not offered"));
    }
    let [descriptors, used, available] = [8, 16, 24].map(|at| u64_at(bytes, at));
    Ok((index, RingAddresses { descriptors, used, available }))
}

/// The two bytes at `at`.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(chunk(bytes, at))
}

/// The four bytes at `at`.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(chunk(bytes, at))
}

/// The eight bytes at `at`.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(chunk(bytes, at))
}

fn chunk<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("a number within a payload of known length")
}
