//! The negotiation before transmission: bytes in, bytes out, no I/O.
//!
//! The server greets, and the client answers with its flags. The client then sends options until
//! one of them starts transmission (GO or EXPORT_NAME) or ends the connection (ABORT). Unknown
//! options are skipped and refused, as fixed newstyle requires. The number of options and the
//! length of each are bounded ([`OPTIONS_MAX`], [`OPTION_BYTES_MAX`], [`OPTION_SKIP_MAX`]); the
//! caller bounds the time.
//!
//! If several exports share an address, an option may name another export. This handshake does not
//! answer such an option: it hands the connection over, together with the state of the handshake
//! and the option, and the other export continues.

use std::fmt::Debug;

use udm::units::BIO_BYTES_MAX;

use super::proto::{
    self, CLIENT_FLAGS_BYTES, EXPORT_NAME_ZEROES, GoOption, MetaContextOption, OPTION_BYTES_MAX,
    OPTION_HEADER_BYTES, OPTION_SKIP_MAX, OPTIONS_MAX, OptionHeader, STRING_BYTES_MAX, Violation,
    export_flag, handshake_flag, info, option, reply,
};

/// The least preferred request size, in bytes.
const PREFERRED_BYTES: u32 = 4096;

/// Maximum number of hand-overs of one connection.
pub const PASSED_MAX: u8 = 16;

/// The export that clients are offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its name. The empty name also selects this export, unless the address has others.
    pub name: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Smallest unit of a request, in bytes.
    pub block_bytes: u32,
    /// The smallest efficient I/O, in bytes.
    pub minimum_bytes: u32,
    /// Whether TRIM has an effect.
    pub has_discard: bool,
    /// Whether writes are refused.
    pub is_read_only: bool,
    /// Whether clients must encrypt.
    pub needs_tls: bool,
}

impl ExportInfo {
    fn flags(&self, is_structured: bool) -> u16 {
        let mut flags = export_flag::HAS_FLAGS
            | export_flag::SEND_FLUSH
            | export_flag::SEND_FUA
            | export_flag::SEND_WRITE_ZEROES
            | export_flag::SEND_FAST_ZERO
            | export_flag::SEND_CACHE
            | export_flag::CAN_MULTI_CONN;
        if self.is_read_only {
            flags |= export_flag::READ_ONLY;
        } else if self.has_discard {
            flags |= export_flag::SEND_TRIM;
        }
        if is_structured {
            flags |= export_flag::SEND_DF;
        }
        flags
    }
}

/// The result of the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// Reads are answered in chunks, errors with messages.
    pub is_structured: bool,
    /// BLOCK_STATUS is allowed.
    pub has_block_status: bool,
    /// Writes are refused.
    pub is_read_only: bool,
    /// The client has asked for the block sizes, so it must keep to them.
    pub has_block_sizes: bool,
    /// The smallest block, in bytes.
    pub block_bytes: u32,
}

/// The state of a handshake that another export needs to continue it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// No zeroes follow the answer to EXPORT_NAME.
    pub no_zeroes: bool,
    /// Replies are sent in chunks.
    pub is_structured: bool,
    /// Number of options so far.
    pub options: u32,
    /// Number of hand-overs so far.
    pub passed: u8,
    /// The export name to which the chosen contexts belong.
    pub context_of: Option<String>,
}

/// The other exports at the same address.
pub trait Neighbours: Debug + Send {
    /// Returns their names.
    fn names(&self) -> Vec<String>;

    /// Hands the connection over to the export `name`; `rest` holds received bytes without an
    /// answer. Returns the reason if the connection cannot be handed over.
    fn pass_on(&self, name: &str, said: &Said, rest: &[u8]) -> Result<(), &'static str>;
}

/// The state of the handshake after some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More bytes are needed.
    Waiting,
    /// The next byte belongs to the transmission.
    Agreed(Agreement),
    /// The next byte belongs to TLS; the handshake continues inside TLS.
    Secure,
    /// The next byte starts an option that names another export: see [`Handshake::pass_on`].
    Elsewhere,
    /// The client has ended the handshake; close the connection once everything is sent.
    Over,
}

#[derive(Clone, Copy, Debug)]
enum State {
    ClientFlags,
    Option,
    Skip { left: u32 },
    Over,
}

/// One client's handshake.
#[derive(Debug)]
pub struct Handshake {
    export: ExportInfo,
    state: State,
    said: Said,
    /// All further bytes are encrypted.
    is_secure: bool,
    neighbours: Option<Box<dyn Neighbours>>,
    /// Another export, which the next option names.
    wanted: Option<String>,
    /// The reason why that option is refused here.
    refusal: Option<&'static str>,
}

impl Handshake {
    /// Greets the client.
    pub fn start(export: ExportInfo, out: &mut Vec<u8>) -> Handshake {
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        proto::encode_greeting(flags, out);
        Handshake { state: State::ClientFlags, ..Handshake::resume(export, Said::default()) }
    }

    /// Continues with a client that another export has greeted.
    pub fn resume(export: ExportInfo, said: Said) -> Handshake {
        let state = State::Option;
        let (neighbours, wanted, refusal) = (None, None, None);
        Handshake { export, state, said, is_secure: false, neighbours, wanted, refusal }
    }

    /// Adds the other exports at the same address.
    pub fn beside(&mut self, neighbours: Box<dyn Neighbours>) {
        self.neighbours = Some(neighbours);
    }

    /// Hands the connection over to the export that the next option names; `rest` starts with that
    /// option. If that fails, the option will be refused. Returns whether it was handed over.
    pub fn pass_on(&mut self, rest: &[u8]) -> bool {
        let (Some(name), Some(neighbours)) = (self.wanted.take(), &self.neighbours) else {
            return false;
        };
        let said = Said { passed: self.said.passed.saturating_add(1), ..self.said.clone() };
        let passed = match said.passed {
            ..=PASSED_MAX => neighbours.pass_on(&name, &said, rest),
            _ => Err("this connection has named exports of too many servers: open another \
                connection"),
        };
        self.refusal = passed.err();
        self.refusal.is_none()
    }

    /// Parses `input`, which continues after the bytes that the last call took, and appends the
    /// answers to `out`. Returns the number of bytes taken.
    pub fn advance(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, Progress), Violation> {
        let mut taken = 0;
        loop {
            let rest = &input[taken..];
            let (step, progress) = match self.state {
                State::ClientFlags => self.client_flags(rest)?,
                State::Option => self.option(rest, out)?,
                State::Skip { left } => self.skip(rest, left),
                State::Over => (0, Progress::Over),
            };
            taken += step;
            match progress {
                Progress::Waiting if step > 0 => {}
                Progress::Waiting | Progress::Secure | Progress::Elsewhere => {
                    return Ok((taken, progress));
                }
                Progress::Agreed(_) | Progress::Over => {
                    self.state = State::Over;
                    return Ok((taken, progress));
                }
            }
        }
    }

    fn client_flags(&mut self, input: &[u8]) -> Result<(usize, Progress), Violation> {
        let Some(flags) = proto::decode_client_flags(input) else {
            return Ok((0, Progress::Waiting));
        };
        let fixed = u32::from(handshake_flag::FIXED_NEWSTYLE);
        let no_zeroes = u32::from(handshake_flag::NO_ZEROES);
        if flags & !(fixed | no_zeroes) != 0 {
            return Err(Violation::ClientFlags(flags));
        }
        if flags & fixed == 0 {
            return Err(Violation::Oldstyle);
        }
        self.said.no_zeroes = flags & no_zeroes != 0;
        self.state = State::Option;
        Ok((CLIENT_FLAGS_BYTES, Progress::Waiting))
    }

    fn skip(&mut self, input: &[u8], left: u32) -> (usize, Progress) {
        let step = input.len().min(left as usize);
        let left = left - step as u32;
        self.state = if left == 0 { State::Option } else { State::Skip { left } };
        (step, Progress::Waiting)
    }

    fn option(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(usize, Progress), Violation> {
        let Some(OptionHeader { option, len }) = OptionHeader::decode(input)? else {
            return Ok((0, Progress::Waiting));
        };
        if len > OPTION_SKIP_MAX {
            return Err(Violation::OptionLength { option, len });
        }
        if len > OPTION_BYTES_MAX {
            self.count_option()?;
            let words = "the option's data is too long";
            proto::encode_option_reply(option, reply::ERR_TOO_BIG, words.as_bytes(), out);
            self.state = State::Skip { left: len };
            return Ok((OPTION_HEADER_BYTES, Progress::Waiting));
        }
        let end = OPTION_HEADER_BYTES + len as usize;
        let Some(data) = input.get(OPTION_HEADER_BYTES..end) else {
            return Ok((0, Progress::Waiting));
        };
        if self.refusal.is_none() {
            self.wanted = self.elsewhere(option, data);
            if self.wanted.is_some() {
                return Ok((0, Progress::Elsewhere));
            }
        }
        self.count_option()?;
        Ok((end, self.answer(option, data, out)?))
    }

    /// Returns the name in an option, if it is another export's.
    fn elsewhere(&self, option: u32, data: &[u8]) -> Option<String> {
        let neighbours = self.neighbours.as_ref()?;
        let name = match option {
            option::EXPORT_NAME => std::str::from_utf8(data).ok()?,
            option::GO | option::INFO => GoOption::decode(data)?.name,
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                MetaContextOption::decode(data)?.name
            }
            _ => return None,
        };
        let is_theirs = name != self.export.name && neighbours.names().iter().any(|it| it == name);
        is_theirs.then(|| name.to_owned())
    }

    /// Whether `name` is this export. The empty name names it if the address has only this export.
    fn is_called(&self, name: &str) -> bool {
        let is_alone = || self.neighbours.as_ref().is_none_or(|them| them.names().is_empty());
        name == self.export.name || (name.is_empty() && is_alone())
    }

    fn count_option(&mut self) -> Result<(), Violation> {
        self.said.options += 1;
        if self.said.options > OPTIONS_MAX { Err(Violation::TooManyOptions) } else { Ok(()) }
    }

    fn answer(
        &mut self,
        option: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Progress, Violation> {
        let is_locked = self.export.needs_tls && !self.is_secure;
        let refusal = self.refusal.take();
        let verdict = match option {
            option::EXPORT_NAME if is_locked || refusal.is_some() => {
                return Err(Violation::ExportName);
            }
            option::EXPORT_NAME => return self.export_name(data, out),
            option::ABORT => {
                proto::encode_option_reply(option, reply::ACK, &[], out);
                return Ok(Progress::Over);
            }
            option::STARTTLS => self.start_tls(data),
            _ if is_locked => Err((reply::ERR_TLS_REQD, "this server speaks after STARTTLS only")),
            _ if refusal.is_some() => Err((reply::ERR_UNKNOWN, refusal.unwrap_or_default())),
            option::GO | option::INFO => self.go(option, data, out),
            option::LIST => self.list(data, out),
            option::STRUCTURED_REPLY => self.structured_reply(data),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(option, data, out)
            }
            _ => Err((reply::ERR_UNSUP, "this server does not know that option")),
        };
        match verdict {
            Ok(progress) => {
                proto::encode_option_reply(option, reply::ACK, &[], out);
                Ok(progress)
            }
            Err((kind, words)) => {
                proto::encode_option_reply(option, kind, words.as_bytes(), out);
                Ok(Progress::Waiting)
            }
        }
    }

    fn export_name(&mut self, data: &[u8], out: &mut Vec<u8>) -> Result<Progress, Violation> {
        let name = std::str::from_utf8(data).ok().filter(|name| self.is_called(name));
        let Some(name) = name else { return Err(Violation::ExportName) };
        let flags = self.export.flags(self.said.is_structured);
        out.extend_from_slice(&proto::encode_info_export(self.export.size_bytes, flags)[2..]);
        if !self.said.no_zeroes {
            out.resize(out.len() + EXPORT_NAME_ZEROES, 0);
        }
        Ok(Progress::Agreed(self.agreement(name, false)))
    }

    fn go(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Verdict {
        let go = GoOption::decode(data)
            .ok_or((reply::ERR_INVALID, "the lengths inside the option do not add up"))?;
        self.check_name(go.name)?;
        let mut tell = |data: &[u8]| proto::encode_option_reply(option, reply::INFO, data, out);
        let flags = self.export.flags(self.said.is_structured);
        tell(&proto::encode_info_export(self.export.size_bytes, flags));
        let max = BIO_BYTES_MAX as u32;
        let preferred = PREFERRED_BYTES.max(self.export.minimum_bytes);
        // Also to a client that does not ask: if it reads them, its requests are faster.
        tell(&proto::encode_info_block_size(self.export.block_bytes, preferred, max));
        if go.wants_name {
            tell(&proto::encode_info_text(info::NAME, &self.export.name));
        }
        if go.wants_description {
            tell(&proto::encode_info_text(info::DESCRIPTION, "a mapped device of udm"));
        }
        if option == option::INFO {
            return Ok(Progress::Waiting);
        }
        Ok(Progress::Agreed(self.agreement(go.name, go.wants_block_sizes)))
    }

    fn list(&mut self, data: &[u8], out: &mut Vec<u8>) -> Verdict {
        if !data.is_empty() {
            return Err((reply::ERR_INVALID, "LIST carries no data"));
        }
        let others = self.neighbours.as_ref().map_or_else(Vec::new, |others| others.names());
        for name in std::iter::once(&self.export.name).chain(&others) {
            let name = proto::encode_server(name);
            proto::encode_option_reply(option::LIST, reply::SERVER, &name, out);
        }
        Ok(Progress::Waiting)
    }

    fn start_tls(&mut self, data: &[u8]) -> Verdict {
        if !self.export.needs_tls {
            return Err((
                reply::ERR_UNSUP,
                "this server has no TLS: connect to one that is exported with nbds://",
            ));
        }
        if !data.is_empty() {
            return Err((reply::ERR_INVALID, "STARTTLS carries no data"));
        }
        if self.is_secure {
            return Err((reply::ERR_INVALID, "the connection is already encrypted"));
        }
        self.is_secure = true;
        Ok(Progress::Secure)
    }

    fn structured_reply(&mut self, data: &[u8]) -> Verdict {
        if !data.is_empty() {
            return Err((reply::ERR_INVALID, "STRUCTURED_REPLY carries no data"));
        }
        self.said.is_structured = true;
        Ok(Progress::Waiting)
    }

    fn meta_context(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Verdict {
        let is_set = option == option::SET_META_CONTEXT;
        if is_set {
            // This choice replaces any earlier one, even if it fails.
            self.said.context_of = None;
        }
        if !self.said.is_structured {
            return Err((reply::ERR_INVALID, "contexts need STRUCTURED_REPLY first"));
        }
        let meta = MetaContextOption::decode(data)
            .ok_or((reply::ERR_INVALID, "the lengths inside the option do not add up"))?;
        self.check_name(meta.name)?;
        let is_listed = !is_set && (meta.queries == 0 || meta.names_base);
        if meta.names_base_allocation || is_listed {
            // A list only names the context; its number is not used there.
            let id = if is_set { proto::BASE_ALLOCATION_ID } else { 0 };
            let data = proto::encode_meta_context(id, proto::BASE_ALLOCATION);
            proto::encode_option_reply(option, reply::META_CONTEXT, &data, out);
            if is_set {
                self.said.context_of = Some(meta.name.to_owned());
            }
        }
        Ok(Progress::Waiting)
    }

    fn check_name(&self, name: &str) -> Result<(), Refusal> {
        if name.len() > STRING_BYTES_MAX {
            return Err((reply::ERR_TOO_BIG, "the export's name is longer than 4096 bytes"));
        }
        if name.is_empty() && !self.is_called(name) {
            return Err((reply::ERR_UNKNOWN, "this address has several exports: name one"));
        }
        if !self.is_called(name) {
            return Err((reply::ERR_UNKNOWN, "this address has no export of that name"));
        }
        Ok(())
    }

    fn agreement(&self, name: &str, has_block_sizes: bool) -> Agreement {
        Agreement {
            is_structured: self.said.is_structured,
            has_block_status: self.said.context_of.as_deref() == Some(name),
            is_read_only: self.export.is_read_only,
            has_block_sizes,
            block_bytes: self.export.block_bytes,
        }
    }
}

/// The type and the message of an error reply.
type Refusal = (u32, &'static str);
type Verdict = Result<Progress, Refusal>;
