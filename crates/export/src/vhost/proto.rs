//! The words of vhost-user, as QEMU's `docs/interop/vhost-user.rst` defines them: messages of a
//! header and a payload, with file descriptors beside them.
//!
//! All numbers are of this machine's own order, since both sides run on it.

#![allow(clippy::host_endian_bytes, reason = "vhost-user is spoken within one machine")]

use std::fmt;
use std::os::fd::OwnedFd;

/// Bytes of a message's header.
pub const HEADER_BYTES: usize = 12;
/// The longest payload that any message we take has; all of them are shorter.
pub const PAYLOAD_BYTES_MAX: usize = 4096;
/// Most file descriptors of a message.
pub const FDS_MAX: usize = 8;

/// What a client did that ends its connection, or the ring it did it on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(String);

impl Violation {
    /// Words for people, without a full stop.
    pub fn new(words: impl Into<String>) -> Violation {
        Violation(words.into())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A violation, as the result of a call.
pub fn wrong<T>(words: impl Into<String>) -> Result<T, Violation> {
    Err(Violation::new(words))
}

macro_rules! messages {
    ($($name:ident = $number:literal,)*) => {
        /// What a message asks for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the names are those of the specification")]
        pub enum Request { $($name = $number,)* }

        impl Request {
            /// The request with this number.
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

/// Bits of a header's flags: the version, whether it is a reply, whether it wants one.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const IS_REPLY: u32 = 1 << 2;
const NEEDS_REPLY: u32 = 1 << 3;

/// Bits of the device's features that belong to the protocol and to rings.
pub mod feature {
    /// Protocol features can be negotiated, and rings are enabled one by one.
    pub const PROTOCOL: u64 = 1 << 30;
    /// A descriptor may lead to a table of descriptors.
    pub const INDIRECT: u64 = 1 << 28;
    /// Both sides say from which entry on they want to be notified.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The current version of virtio.
    pub const VERSION_1: u64 = 1 << 32;
    /// Rings are packed: one table, in which both sides go round.
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Bits of the protocol's features.
pub mod protocol {
    /// Several rings.
    pub const MQ: u64 = 1 << 0;
    /// Messages without a reply of their own may ask for one.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The server has a channel of its own, for messages to the client.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The device's configuration is read and written by messages.
    pub const CONFIG: u64 = 1 << 9;
    /// What is in flight is noted in memory that outlives the server.
    pub const INFLIGHT: u64 = 1 << 12;
    /// Memory comes and goes region by region.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// All that this server has.
    pub const OFFERED: u64 = MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT | CONFIGURE_MEM_SLOTS;
}

/// The message to a client whose device's configuration has changed.
pub fn config_has_changed() -> Vec<u8> {
    const CONFIG_CHANGE: u32 = 2;
    [CONFIG_CHANGE, VERSION, 0].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// A message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What is asked.
    pub request: Request,
    /// The client wants to hear whether it was done.
    pub needs_reply: bool,
    /// Bytes of the payload.
    pub payload_bytes: usize,
}

impl Header {
    /// Reads a header.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Violation> {
        let (number, flags, size) = (u32_at(bytes, 0), u32_at(bytes, 4), u32_at(bytes, 8));
        if flags & VERSION_MASK != VERSION || flags & IS_REPLY != 0 {
            return wrong(format!("a message has flags {flags:#x}"));
        }
        let Some(request) = Request::known(number) else {
            return wrong(format!("message {number} is not one that this server takes"));
        };
        if size as usize > PAYLOAD_BYTES_MAX {
            return wrong(format!("{request:?} with {size} bytes"));
        }
        let needs_reply = flags & NEEDS_REPLY != 0;
        Ok(Header { request, needs_reply, payload_bytes: size as usize })
    }
}

/// A message as it came.
#[derive(Debug)]
pub struct Message {
    /// What is asked.
    pub request: Request,
    /// The client wants to hear whether it was done.
    pub needs_reply: bool,
    /// What comes with it.
    pub payload: Vec<u8>,
    /// The files that come with it.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// The payload, if it has the right length.
    pub fn fixed<const N: usize>(&self) -> Result<&[u8; N], Violation> {
        self.payload.as_slice().try_into().map_err(|_| {
            let (request, bytes) = (self.request, self.payload.len());
            Violation::new(format!("{request:?} with {bytes} bytes instead of {N}"))
        })
    }

    /// The payload as one number.
    pub fn number(&self) -> Result<u64, Violation> {
        self.fixed::<8>().map(|bytes| u64_at(bytes, 0))
    }

    /// The payload as a ring's index and a number.
    pub fn ring_state(&self) -> Result<(usize, u32), Violation> {
        self.fixed::<8>().map(|bytes| (u32_at(bytes, 0) as usize, u32_at(bytes, 4)))
    }

    /// The only file, if there is exactly one.
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
    /// A file to send with it.
    pub fd: Option<OwnedFd>,
}

impl Reply {
    /// The answer to `request`.
    pub fn new(request: Request, payload: &[u8]) -> Reply {
        let words = [request as u32, VERSION | IS_REPLY, payload.len() as u32];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend_from_slice(payload);
        Reply { bytes, fd: None }
    }

    /// The answer that is one number.
    pub fn number(request: Request, value: u64) -> Reply {
        Reply::new(request, &value.to_ne_bytes())
    }

    /// The answer that is a ring's index and a number.
    pub fn ring_state(request: Request, index: usize, value: u32) -> Reply {
        let index = index as u32;
        Reply::new(request, &[index.to_ne_bytes(), value.to_ne_bytes()].concat())
    }
}

/// A region of the client's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Where the guest sees it.
    pub guest: u64,
    /// Bytes.
    pub len: u64,
    /// Where the client's own process sees it.
    pub user: u64,
    /// Where it begins in its file.
    pub offset: u64,
}

/// Bytes of a region in a message.
pub const REGION_BYTES: usize = 32;

impl Region {
    /// Reads a region.
    pub fn parse(bytes: &[u8; REGION_BYTES]) -> Region {
        let [guest, len, user, offset] = [0, 8, 16, 24].map(|at| u64_at(bytes, at));
        Region { guest, len, user, offset }
    }
}

/// Where a ring's parts are, as the client's own process sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptors.
    pub descriptors: u64,
    /// What the device has used.
    pub used: u64,
    /// What the driver has made available.
    pub available: u64,
}

/// The payload of `SetVringAddr`: the ring's index, and its addresses.
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
