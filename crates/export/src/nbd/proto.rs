//! The wire format of NBD's fixed newstyle: every number and every message, no state and no I/O.
//!
//! Numbers are big-endian. All values from a client are checked here before they are used as a
//! length; each maximum is stated with the constants. Names follow the protocol document,
//! without its `NBD_` prefix.

/// A client's violation of the protocol. It ends that client's connection only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Flags that the server did not offer.
    #[error("client flags {0:#x} hold bits that were not offered")]
    ClientFlags(u32),
    /// The client speaks a dialect without error replies, which does not allow negotiation.
    #[error("client does not speak fixed newstyle")]
    Oldstyle,
    /// The option's magic number is missing.
    #[error("option starts with {0:#018x} instead of IHAVEOPT")]
    OptionMagic(u64),
    /// The option is too long even to be skipped.
    #[error("option {option} carries {len} bytes, more than {OPTION_SKIP_MAX}")]
    OptionLength {
        /// The option.
        option: u32,
        /// The length in its header.
        len: u32,
    },
    /// Too many options.
    #[error("more than {OPTIONS_MAX} options in one handshake")]
    TooManyOptions,
    /// EXPORT_NAME does not allow an error reply.
    #[error("EXPORT_NAME names an export that does not exist")]
    ExportName,
    /// The handshake takes too long.
    #[error("handshake took longer than {0} seconds")]
    TooSlow(u64),
    /// The request's magic number is missing.
    #[error("request starts with {0:#010x} instead of the magic number")]
    RequestMagic(u32),
    /// The payload is too long even to be skipped.
    #[error("write of {0} bytes, more than twice the maximum")]
    WriteLength(u32),
    /// Bytes after STARTTLS must be encrypted: a third party on the network could have sent these.
    #[error("bytes followed STARTTLS before its answer")]
    Unencrypted,
    /// The client disconnected in the middle of a message.
    #[error("connection ended inside a message")]
    Truncated,
}

/// Longest data of an option that is parsed; longer ones are skipped and refused.
pub const OPTION_BYTES_MAX: u32 = 32 << 10;
/// Longest data of an option that is skipped; a longer one ends the connection.
pub const OPTION_SKIP_MAX: u32 = 1 << 20;
/// Maximum options in one handshake.
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

/// Handshake flags of the server; the client echoes the flags that it accepts.
pub mod handshake_flag {
    /// Unknown options are refused instead of ending the connection.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No 124 zero bytes after the answer to EXPORT_NAME.
    pub const NO_ZEROES: u16 = 2;
}

/// Options: the client's requests during the handshake.
pub mod option {
    /// Choose an export, the old way: no error reply is possible.
    pub const EXPORT_NAME: u32 = 1;
    /// End the connection.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Encrypt from here on.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Choose an export.
    pub const GO: u32 = 7;
    /// Use structured replies from here on.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the contexts of BLOCK_STATUS.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose contexts for BLOCK_STATUS.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options.
pub mod reply {
    const ERROR: u32 = 1 << 31;
    /// Done.
    pub const ACK: u32 = 1;
    /// Name of an export.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// A context of BLOCK_STATUS.
    pub const META_CONTEXT: u32 = 4;
    /// The option is unknown.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// The option's data is invalid.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// TLS is required first.
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    /// The export does not exist.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The option's data is too long.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// Description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum request size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Features of an export.
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
    /// End the connection once everything in flight is answered.
    pub const DISC: u16 = 2;
    /// Make acknowledged writes durable.
    pub const FLUSH: u16 = 3;
    /// The range is not needed any more.
    pub const TRIM: u16 = 4;
    /// The range will be read.
    pub const CACHE: u16 = 5;
    /// Make the range read as zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Report the extents of the range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a command.
pub mod command_flag {
    /// Answer when durable.
    pub const FUA: u16 = 1 << 0;
    /// Allocate space for the zeroes.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Reply in one chunk only.
    pub const DF: u16 = 1 << 2;
    /// Report one extent only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Write zeroes only if that is faster than a write.
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
    /// An error, with a message.
    pub const ERROR: u16 = (1 << 15) | 1;
}

/// Errors of the transmission phase: Linux's values, fixed by the protocol.
pub mod errno {
    /// Read-only.
    pub const EPERM: u32 = 1;
    /// The device failed.
    pub const EIO: u32 = 5;
    /// The server lacks memory for the request.
    pub const ENOMEM: u32 = 12;
    /// The request is invalid.
    pub const EINVAL: u32 = 22;
    /// Beyond the end of the device, or no space is left.
    pub const ENOSPC: u32 = 28;
    /// Not supported.
    pub const ENOTSUP: u32 = 95;
    /// The server is stopping.
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
/// Zero bytes after the answer to EXPORT_NAME, unless the client has set NO_ZEROES.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// The server's only metadata context.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The number of [`BASE_ALLOCATION`].
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

/// Encodes the greeting of a server with `flags`.
pub fn encode_greeting(flags: u16, out: &mut Vec<u8>) {
    out.extend_from_slice(&MAGIC.to_be_bytes());
    out.extend_from_slice(&MAGIC_OPTION.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
}

/// Decodes the client's flags; `None` while bytes are missing.
pub fn decode_client_flags(bytes: &[u8]) -> Option<u32> {
    Reader(bytes).u32()
}

/// The header of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// One of [`option`], or unknown.
    pub option: u32,
    /// Bytes of data that follow.
    pub len: u32,
}

impl OptionHeader {
    /// Decodes a header; `None` while bytes are missing.
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
    /// Whether it asks for the block sizes.
    pub wants_block_sizes: bool,
}

impl<'a> GoOption<'a> {
    /// Decodes the data, which must be complete; `None` if it is malformed.
    pub fn decode(data: &'a [u8]) -> Option<GoOption<'a>> {
        let mut reader = Reader(data);
        let name = reader.string()?;
        let count = reader.u16()?;
        if reader.0.len() != usize::from(count) * 2 {
            return None;
        }
        let mut go = GoOption {
            name,
            wants_name: false,
            wants_description: false,
            wants_block_sizes: false,
        };
        while let Some(info) = reader.u16() {
            go.wants_name |= info == info::NAME;
            go.wants_description |= info == info::DESCRIPTION;
            go.wants_block_sizes |= info == info::BLOCK_SIZE;
        }
        Some(go)
    }
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextOption<'a> {
    /// The export.
    pub name: &'a str,
    /// Number of queries.
    pub queries: u32,
    /// Whether one of them names the server's context.
    pub names_base_allocation: bool,
    /// Whether one of them asks for all contexts of the server's namespace.
    pub names_base: bool,
}

impl<'a> MetaContextOption<'a> {
    /// Decodes the data, which must be complete; `None` if it is malformed.
    pub fn decode(data: &'a [u8]) -> Option<MetaContextOption<'a>> {
        let mut reader = Reader(data);
        let name = reader.string()?;
        let queries = reader.u32()?;
        let mut meta =
            MetaContextOption { name, queries, names_base_allocation: false, names_base: false };
        // Each query takes at least four bytes, so `data` bounds this loop, not `queries`.
        for _ in 0..queries {
            let query = reader.string()?;
            meta.names_base_allocation |= query == BASE_ALLOCATION;
            meta.names_base |= query == "base:";
        }
        reader.0.is_empty().then_some(meta)
    }
}

/// Encodes the reply of type `kind` to `option`, with `data`.
pub fn encode_option_reply(option: u32, kind: u32, data: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&MAGIC_OPTION_REPLY.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
}

/// Encodes the data of a SERVER reply.
pub fn encode_server(name: &str) -> Vec<u8> {
    let mut data = Vec::with_capacity(4 + name.len());
    data.extend_from_slice(&(name.len() as u32).to_be_bytes());
    data.extend_from_slice(name.as_bytes());
    data
}

/// Encodes the data of an INFO reply that carries text: NAME or DESCRIPTION.
pub fn encode_info_text(kind: u16, text: &str) -> Vec<u8> {
    [&kind.to_be_bytes()[..], text.as_bytes()].concat()
}

/// Encodes the data of an INFO reply about size and flags. Without its first two bytes, it is the
/// answer to EXPORT_NAME.
pub fn encode_info_export(size_bytes: u64, flags: u16) -> Vec<u8> {
    [&info::EXPORT.to_be_bytes()[..], &size_bytes.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// Encodes the data of an INFO reply about block sizes.
pub fn encode_info_block_size(min: u32, preferred: u32, max: u32) -> Vec<u8> {
    let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
    for size in [min, preferred, max] {
        data.extend_from_slice(&size.to_be_bytes());
    }
    data
}

/// Encodes the data of a META_CONTEXT reply.
pub fn encode_meta_context(id: u32, name: &str) -> Vec<u8> {
    [&id.to_be_bytes()[..], name.as_bytes()].concat()
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Flags of [`command_flag`], or unknown ones.
    pub flags: u16,
    /// One of [`command`], or unknown.
    pub command: u16,
    /// The client's identifier of the request.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

impl Request {
    /// Decodes a header; `None` while bytes are missing.
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

/// Encodes a simple reply's header; the data of a successful read follows.
pub fn encode_simple_reply(error: u32, cookie: u64) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut bytes = [0; SIMPLE_REPLY_BYTES];
    bytes[..4].copy_from_slice(&MAGIC_SIMPLE_REPLY.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// Encodes the header of a structured reply's only chunk; `len` bytes follow.
pub fn encode_chunk(kind: u16, cookie: u64, len: u32) -> [u8; CHUNK_BYTES] {
    let mut bytes = [0; CHUNK_BYTES];
    bytes[..4].copy_from_slice(&MAGIC_CHUNK.to_be_bytes());
    bytes[4..6].copy_from_slice(&chunk::FLAG_DONE.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// Encodes an OFFSET_DATA chunk up to its data, of which `len` bytes follow.
pub fn encode_offset_data(cookie: u64, offset: u64, len: u32) -> [u8; CHUNK_BYTES + 8] {
    let mut bytes = [0; CHUNK_BYTES + 8];
    bytes[..CHUNK_BYTES].copy_from_slice(&encode_chunk(chunk::OFFSET_DATA, cookie, len + 8));
    bytes[CHUNK_BYTES..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

/// Encodes an ERROR chunk with a message for people.
pub fn encode_error_chunk(cookie: u64, error: u32, words: &str) -> Vec<u8> {
    let words = &words.as_bytes()[..words.len().min(STRING_BYTES_MAX)];
    let mut bytes = encode_chunk(chunk::ERROR, cookie, 6 + words.len() as u32).to_vec();
    bytes.extend_from_slice(&error.to_be_bytes());
    bytes.extend_from_slice(&(words.len() as u16).to_be_bytes());
    bytes.extend_from_slice(words);
    bytes
}

/// Flags of an extent in the context "base:allocation".
pub mod allocation {
    /// The extent has no space allocated.
    pub const HOLE: u32 = 1 << 0;
    /// The extent reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// Encodes a BLOCK_STATUS chunk: extents (their lengths and flags) in context `id`.
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
