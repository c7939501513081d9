//! The wire format of NBD's fixed newstyle: every number and every message, no state and no I/O.
//!
//! Numbers are big-endian. Whatever comes from a client is checked here before anyone uses it as
//! a length; what a length may be at most is stated beside the constants. Names are those of the
//! protocol document, without its `NBD_` prefix.

/// What a client did against the protocol; it ends that client's connection and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Flags that the server did not offer.
    #[error("client flags {0:#x} hold bits that were not offered")]
    ClientFlags(u32),
    /// The client speaks a dialect without error replies, which cannot be haggled with.
    #[error("client does not speak fixed newstyle")]
    Oldstyle,
    /// Not an option where one had to be.
    #[error("option starts with {0:#018x} instead of IHAVEOPT")]
    OptionMagic(u64),
    /// Nobody needs that much.
    #[error("option {option} carries {len} bytes, more than {OPTION_SKIP_MAX}")]
    OptionLength {
        /// The option.
        option: u32,
        /// What its header claims.
        len: u32,
    },
    /// Nobody needs that many.
    #[error("more than {OPTIONS_MAX} options in one handshake")]
    TooManyOptions,
    /// There is no way to answer that.
    #[error("EXPORT_NAME names an export that does not exist")]
    ExportName,
    /// The handshake takes too long.
    #[error("handshake took longer than {0} seconds")]
    TooSlow(u64),
    /// Not a request where one had to be.
    #[error("request starts with {0:#010x} instead of the magic number")]
    RequestMagic(u32),
    /// Skipping this much is not sane.
    #[error("write of {0} bytes, more than twice the maximum")]
    WriteLength(u32),
    /// Somebody between could have written them: what follows STARTTLS has to be encrypted.
    #[error("bytes followed STARTTLS before its answer")]
    Unencrypted,
    /// The client went away in the middle of a message.
    #[error("connection ended inside a message")]
    Truncated,
}

/// Longest data of an option that is parsed; longer ones are skipped and refused.
pub const OPTION_BYTES_MAX: u32 = 32 << 10;
/// Longest data of an option that is skipped; a longer one ends the connection.
pub const OPTION_SKIP_MAX: u32 = 1 << 20;
/// Most options in one handshake.
pub const OPTIONS_MAX: u32 = 128;

/// First eight bytes of a server's greeting.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT": marks the newstyle greeting and each option.
pub const MAGIC_OPTION: u64 = 0x4948_4156_454f_5054;
/// Marks the reply to an option.
pub const MAGIC_OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Marks a request.
pub const MAGIC_REQUEST: u32 = 0x2560_9513;
/// Marks a simple reply.
pub const MAGIC_SIMPLE_REPLY: u32 = 0x6744_6698;
/// Marks a chunk of a structured reply.
pub const MAGIC_CHUNK: u32 = 0x668e_33ef;

/// Handshake flags of the server; the client echoes those it wants.
pub mod handshake_flag {
    /// Options may be haggled over.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No 124 zero bytes after the answer to EXPORT_NAME.
    pub const NO_ZEROES: u16 = 2;
}

/// What clients ask for during the handshake.
pub mod option {
    /// Choose an export, the old way: no error reply is possible.
    pub const EXPORT_NAME: u32 = 1;
    /// Good-bye.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Encrypt from here on.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Choose an export.
    pub const GO: u32 = 7;
    /// Replies in chunks from here on.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the contexts of BLOCK_STATUS.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose contexts for BLOCK_STATUS.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// What the server answers to options.
pub mod reply {
    const ERROR: u32 = 1 << 31;
    /// Done.
    pub const ACK: u32 = 1;
    /// Name of an export.
    pub const SERVER: u32 = 2;
    /// A fact about an export.
    pub const INFO: u32 = 3;
    /// A context of BLOCK_STATUS.
    pub const META_CONTEXT: u32 = 4;
    /// Option unknown.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// Option's data is wrong.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// Only after STARTTLS.
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The option's data is too long.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Facts about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// Text for humans.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, best and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub mod export_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes fail.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The FUA flag works.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES works.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The DF flag works.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers what was acknowledged on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// CACHE works.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The FAST_ZERO flag is understood.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands of the transmission phase.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write; the payload follows the header.
    pub const WRITE: u16 = 1;
    /// Good-bye, when everything in flight is answered.
    pub const DISC: u16 = 2;
    /// Make durable what was acknowledged.
    pub const FLUSH: u16 = 3;
    /// The range is not needed any more.
    pub const TRIM: u16 = 4;
    /// The range will be read.
    pub const CACHE: u16 = 5;
    /// The range reads as zeroes from here on.
    pub const WRITE_ZEROES: u16 = 6;
    /// What is there.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a command.
pub mod command_flag {
    /// Answer when durable.
    pub const FUA: u16 = 1 << 0;
    /// Zeroes shall take room.
    pub const NO_HOLE: u16 = 1 << 1;
    /// One chunk only.
    pub const DF: u16 = 1 << 2;
    /// One extent only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeroes only if faster than a write.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Types and flags of chunks.
pub mod chunk {
    /// The last chunk of its reply.
    pub const FLAG_DONE: u16 = 1;
    /// Data read, with its offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error, with words.
    pub const ERROR: u16 = (1 << 15) | 1;
}

/// Errors of the transmission phase; the values of Linux, fixed by the protocol.
pub mod errno {
    /// Read-only.
    pub const EPERM: u32 = 1;
    /// The device failed.
    pub const EIO: u32 = 5;
    /// There is no memory for the request.
    pub const ENOMEM: u32 = 12;
    /// The request is wrong.
    pub const EINVAL: u32 = 22;
    /// Beyond the end, or full.
    pub const ENOSPC: u32 = 28;
    /// Not possible here.
    pub const ENOTSUP: u32 = 95;
    /// The server stops.
    pub const ESHUTDOWN: u32 = 108;
}

/// Bytes of the server's greeting.
pub const GREETING_BYTES: usize = 18;
/// Bytes of the client's flags that follow it.
pub const CLIENT_FLAGS_BYTES: usize = 4;
/// Bytes of an option's header.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Bytes of a request's header.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a simple reply's header.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a chunk's header.
pub const CHUNK_BYTES: usize = 20;
/// Longest string on the wire.
pub const STRING_BYTES_MAX: usize = 4096;
/// Zero bytes after the answer to EXPORT_NAME, unless the client knows better.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// The only context that the server has, and its number.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// See [`BASE_ALLOCATION`].
pub const BASE_ALLOCATION_ID: u32 = 1;

/// Takes numbers and strings off the front of untrusted bytes.
#[derive(Debug)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(head)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(self.take(8)?.try_into().ok()?))
    }

    fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()? as usize;
        std::str::from_utf8(self.take(len)?).ok()
    }
}

/// The greeting of a server with `flags`.
pub fn encode_greeting(flags: u16, out: &mut Vec<u8>) {
    out.extend_from_slice(&MAGIC.to_be_bytes());
    out.extend_from_slice(&MAGIC_OPTION.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
}

/// The client's flags; `None` while bytes are missing.
pub fn decode_client_flags(bytes: &[u8]) -> Option<u32> {
    Reader(bytes).u32()
}

/// The header of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// One of [`option`], or anything.
    pub option: u32,
    /// Bytes of data that follow.
    pub len: u32,
}

impl OptionHeader {
    /// Reads a header; `None` while bytes are missing.
    pub fn decode(bytes: &[u8]) -> Result<Option<OptionHeader>, Violation> {
        let mut reader = Reader(bytes);
        let Some(magic) = reader.u64() else { return Ok(None) };
        if magic != MAGIC_OPTION {
            return Err(Violation::OptionMagic(magic));
        }
        let (Some(option), Some(len)) = (reader.u32(), reader.u32()) else { return Ok(None) };
        Ok(Some(OptionHeader { option, len }))
    }
}

/// The data of GO and INFO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoOption<'a> {
    /// The export.
    pub name: &'a str,
    /// Whether the client asks for the canonical name.
    pub wants_name: bool,
    /// Whether it asks for a description.
    pub wants_description: bool,
}

impl<'a> GoOption<'a> {
    /// Reads the data, which must be complete; `None` if it is malformed.
    pub fn decode(data: &'a [u8]) -> Option<GoOption<'a>> {
        let mut reader = Reader(data);
        let name = reader.string()?;
        let count = reader.u16()?;
        if reader.0.len() != usize::from(count) * 2 {
            return None;
        }
        let mut go = GoOption { name, wants_name: false, wants_description: false };
        while let Some(info) = reader.u16() {
            go.wants_name |= info == info::NAME;
            go.wants_description |= info == info::DESCRIPTION;
        }
        Some(go)
    }
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextOption<'a> {
    /// The export.
    pub name: &'a str,
    /// How many queries there are.
    pub queries: u32,
    /// Whether one of them is our context's name.
    pub names_base_allocation: bool,
    /// Whether one of them asks for everything in our context's namespace.
    pub names_base: bool,
}

impl<'a> MetaContextOption<'a> {
    /// Reads the data, which must be complete; `None` if it is malformed.
    pub fn decode(data: &'a [u8]) -> Option<MetaContextOption<'a>> {
        let mut reader = Reader(data);
        let name = reader.string()?;
        let queries = reader.u32()?;
        let mut meta =
            MetaContextOption { name, queries, names_base_allocation: false, names_base: false };
        // Each query takes four bytes at least, so `data` bounds this loop, not `queries`.
        for _ in 0..queries {
            let query = reader.string()?;
            meta.names_base_allocation |= query == BASE_ALLOCATION;
            meta.names_base |= query == "base:";
        }
        reader.0.is_empty().then_some(meta)
    }
}

/// The reply of type `kind` to `option`, with `data`.
pub fn encode_option_reply(option: u32, kind: u32, data: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&MAGIC_OPTION_REPLY.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
}

/// The data of a SERVER reply.
pub fn encode_server(name: &str) -> Vec<u8> {
    let mut data = Vec::with_capacity(4 + name.len());
    data.extend_from_slice(&(name.len() as u32).to_be_bytes());
    data.extend_from_slice(name.as_bytes());
    data
}

/// The data of an INFO reply that carries text: NAME or DESCRIPTION.
pub fn encode_info_text(kind: u16, text: &str) -> Vec<u8> {
    [&kind.to_be_bytes()[..], text.as_bytes()].concat()
}

/// The data of an INFO reply about size and flags; without its first two bytes it is the answer
/// to EXPORT_NAME.
pub fn encode_info_export(size_bytes: u64, flags: u16) -> Vec<u8> {
    [&info::EXPORT.to_be_bytes()[..], &size_bytes.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// The data of an INFO reply about block sizes.
pub fn encode_info_block_size(min: u32, preferred: u32, max: u32) -> Vec<u8> {
    let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
    for size in [min, preferred, max] {
        data.extend_from_slice(&size.to_be_bytes());
    }
    data
}

/// The data of a META_CONTEXT reply.
pub fn encode_meta_context(id: u32, name: &str) -> Vec<u8> {
    [&id.to_be_bytes()[..], name.as_bytes()].concat()
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Of [`command_flag`], or anything.
    pub flags: u16,
    /// Of [`command`], or anything.
    pub command: u16,
    /// The client's mark.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

impl Request {
    /// Reads a header; `None` while bytes are missing.
    pub fn decode(bytes: &[u8]) -> Result<Option<Request>, Violation> {
        let mut reader = Reader(bytes);
        let Some(magic) = reader.u32() else { return Ok(None) };
        if magic != MAGIC_REQUEST {
            return Err(Violation::RequestMagic(magic));
        }
        Ok(Request::decode_behind_magic(&mut reader))
    }

    fn decode_behind_magic(reader: &mut Reader<'_>) -> Option<Request> {
        Some(Request {
            flags: reader.u16()?,
            command: reader.u16()?,
            cookie: reader.u64()?,
            offset: reader.u64()?,
            len: reader.u32()?,
        })
    }
}

/// A simple reply's header; for a successful read the data follows.
pub fn encode_simple_reply(error: u32, cookie: u64) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut bytes = [0; SIMPLE_REPLY_BYTES];
    bytes[..4].copy_from_slice(&MAGIC_SIMPLE_REPLY.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// The header of a structured reply's only chunk; `len` bytes follow.
pub fn encode_chunk(kind: u16, cookie: u64, len: u32) -> [u8; CHUNK_BYTES] {
    let mut bytes = [0; CHUNK_BYTES];
    bytes[..4].copy_from_slice(&MAGIC_CHUNK.to_be_bytes());
    bytes[4..6].copy_from_slice(&chunk::FLAG_DONE.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// An OFFSET_DATA chunk up to its data, of which `len` bytes follow.
pub fn encode_offset_data(cookie: u64, offset: u64, len: u32) -> [u8; CHUNK_BYTES + 8] {
    let mut bytes = [0; CHUNK_BYTES + 8];
    bytes[..CHUNK_BYTES].copy_from_slice(&encode_chunk(chunk::OFFSET_DATA, cookie, len + 8));
    bytes[CHUNK_BYTES..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

/// An ERROR chunk with words for humans.
pub fn encode_error_chunk(cookie: u64, error: u32, words: &str) -> Vec<u8> {
    let words = &words.as_bytes()[..words.len().min(STRING_BYTES_MAX)];
    let mut bytes = encode_chunk(chunk::ERROR, cookie, 6 + words.len() as u32).to_vec();
    bytes.extend_from_slice(&error.to_be_bytes());
    bytes.extend_from_slice(&(words.len() as u16).to_be_bytes());
    bytes.extend_from_slice(words);
    bytes
}

/// What BLOCK_STATUS says of an extent in the context "base:allocation".
pub mod allocation {
    /// It takes no room.
    pub const HOLE: u32 = 1 << 0;
    /// It reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// A BLOCK_STATUS chunk: extents (their lengths and flags), one after the other, in context `id`.
pub fn encode_block_status(cookie: u64, id: u32, extents: &[(u32, u32)]) -> Vec<u8> {
    let len = 4 + 8 * extents.len() as u32;
    let mut bytes = Vec::with_capacity(CHUNK_BYTES + len as usize);
    bytes.extend_from_slice(&encode_chunk(chunk::BLOCK_STATUS, cookie, len));
    bytes.extend_from_slice(&id.to_be_bytes());
    for (len, flags) in extents {
        bytes.extend_from_slice(&len.to_be_bytes());
        bytes.extend_from_slice(&flags.to_be_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_greeting_reads_nbdmagic_ihaveopt() {
        let mut out = Vec::new();
        encode_greeting(3, &mut out);
        assert_eq!(out, b"NBDMAGICIHAVEOPT\0\x03");
        assert_eq!(out.len(), GREETING_BYTES);
    }

    #[test]
    fn a_request_is_read_field_by_field() {
        let mut bytes = vec![0x25, 0x60, 0x95, 0x13, 0, 1, 0, 6];
        bytes.extend_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        bytes.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 16, 0]);
        let request = Request::decode(&bytes).unwrap().unwrap();
        assert_eq!((request.flags, request.command), (1, command::WRITE_ZEROES));
        assert_eq!(request.cookie, 0x0102_0304_0506_0708);
        assert_eq!((request.offset, request.len), (1 << 32, 4096));
        for cut in 4..REQUEST_BYTES {
            assert_eq!(Request::decode(&bytes[..cut]), Ok(None));
        }
    }

    #[test]
    fn a_context_query_cannot_claim_more_than_it_carries() {
        let mut data = vec![0, 0, 0, 0];
        data.extend_from_slice(&u32::MAX.to_be_bytes());
        data.extend_from_slice(&[0, 0, 0, 5]);
        data.extend_from_slice(b"base:");
        assert_eq!(MetaContextOption::decode(&data), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = OptionHeader::decode(&bytes);
            let _ = GoOption::decode(&bytes);
            let _ = MetaContextOption::decode(&bytes);
            let _ = Request::decode(&bytes);
            let _ = decode_client_flags(&bytes);
        }

        #[test]
        fn go_is_read_back(
            name in "[a-z/]{0,40}",
            infos in proptest::collection::vec(0..9u16, 0..9),
        ) {
            let mut data = encode_server(&name);
            data.extend_from_slice(&(infos.len() as u16).to_be_bytes());
            for info in &infos {
                data.extend_from_slice(&info.to_be_bytes());
            }
            let go = GoOption::decode(&data).unwrap();
            prop_assert_eq!(go.name, &name);
            prop_assert_eq!(go.wants_name, infos.contains(&info::NAME));
            for cut in 0..data.len() {
                prop_assert_eq!(GoOption::decode(&data[..cut]), None);
            }
        }
    }
}
