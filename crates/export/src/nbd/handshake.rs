//! The negotiation before transmission: bytes in, bytes out, no I/O.
//!
//! The server greets, the client answers with its flags and sends options until one of them
//! (GO or EXPORT_NAME) starts transmission or ABORT ends it. Options we don't know are skipped
//! and refused, as fixed newstyle asks. The number of options and the length of each are bounded
//! ([`OPTIONS_MAX`], [`OPTION_BYTES_MAX`], [`OPTION_SKIP_MAX`]); time is bounded by the caller.
//!
//! Where several doors share an address, an option may name an export of another one. Then nothing
//! is answered here: the connection goes there as it is, with what was said so far and the option,
//! and that door goes on with it.

use std::fmt::Debug;

use udm::units::BIO_BYTES_MAX;

use super::proto::{
    self, CLIENT_FLAGS_BYTES, EXPORT_NAME_ZEROES, GoOption, MetaContextOption, OPTION_BYTES_MAX,
    OPTION_HEADER_BYTES, OPTION_SKIP_MAX, OPTIONS_MAX, OptionHeader, STRING_BYTES_MAX, Violation,
    export_flag, handshake_flag, info, option, reply,
};

/// The request size that suits the server best, in bytes.
const PREFERRED_BYTES: u32 = 4096;

/// A connection passes at most this many doors.
pub const PASSED_MAX: u8 = 16;

/// What clients are offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its name; the empty name means this export too, unless there are others at its address.
    pub name: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Smallest unit of a request, in bytes.
    pub block_bytes: u32,
    /// Whether TRIM does something.
    pub has_discard: bool,
    /// Whether writes are refused.
    pub is_read_only: bool,
    /// Whether clients have to encrypt.
    pub needs_tls: bool,
}

impl Export {
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

/// What the two sides agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreement {
    /// Reads are answered in chunks, errors with words.
    pub is_structured: bool,
    /// BLOCK_STATUS may be asked.
    pub has_block_status: bool,
    /// Writes are refused.
    pub is_read_only: bool,
}

/// What a client has said so far: what another door has to know to go on with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// No zeroes follow the answer to EXPORT_NAME.
    pub no_zeroes: bool,
    /// Replies come in chunks.
    pub is_structured: bool,
    /// How many options there were.
    pub options: u32,
    /// How many doors the connection has passed.
    pub passed: u8,
    /// The export name that the chosen contexts belong to.
    pub context_of: Option<String>,
}

/// The other exports at the same address, of other doors.
pub trait Neighbours: Debug + Send {
    /// Their names.
    fn names(&self) -> Vec<String>;

    /// Gives the connection to the door of `name`; `rest` was received and not answered. Returns
    /// why not, in words, if it stays here.
    fn pass_on(&self, name: &str, said: &Said, rest: &[u8]) -> Result<(), &'static str>;
}

/// The state of the handshake after some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More bytes are needed.
    Waiting,
    /// The next byte is the transmission's.
    Agreed(Agreement),
    /// The next byte is TLS's; what it encrypts goes on here.
    Secure,
    /// The next byte begins an option that names another door's export: see
    /// [`Handshake::pass_on`].
    Elsewhere,
    /// The client said good-bye; close once everything is sent.
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
    export: Export,
    state: State,
    said: Said,
    /// Everything from here on is encrypted.
    is_secure: bool,
    neighbours: Option<Box<dyn Neighbours>>,
    /// Another door's export, which the next option names.
    wanted: Option<String>,
    /// Why that option is answered here.
    refusal: Option<&'static str>,
}

impl Handshake {
    /// Greets the client.
    pub fn start(export: Export, out: &mut Vec<u8>) -> Handshake {
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        proto::encode_greeting(flags, out);
        Handshake { state: State::ClientFlags, ..Handshake::resume(export, Said::default()) }
    }

    /// Goes on with a client that another door has greeted.
    pub fn resume(export: Export, said: Said) -> Handshake {
        let state = State::Option;
        let (neighbours, wanted, refusal) = (None, None, None);
        Handshake { export, state, said, is_secure: false, neighbours, wanted, refusal }
    }

    /// The address has other doors, too.
    pub fn beside(&mut self, neighbours: Box<dyn Neighbours>) {
        self.neighbours = Some(neighbours);
    }

    /// Gives the connection to the door whose export the next option names; `rest` begins with
    /// that option. If it stays here, the option will be refused. Returns whether it is gone.
    pub fn pass_on(&mut self, rest: &[u8]) -> bool {
        let (Some(name), Some(neighbours)) = (self.wanted.take(), &self.neighbours) else {
            return false;
        };
        let said = Said { passed: self.said.passed.saturating_add(1), ..self.said.clone() };
        let passed = match said.passed {
            ..=PASSED_MAX => neighbours.pass_on(&name, &said, rest),
            _ => Err("this connection has named exports of too many servers: open another"),
        };
        self.refusal = passed.err();
        self.refusal.is_none()
    }

    /// Takes what it can use of `input`, which continues where the last call stopped taking, and
    /// appends the answers to `out`. Returns how many bytes it took.
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

    /// The export that an option names, if it is another door's.
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

    /// Whether `name` is this export. The empty name is, where it is the only one.
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
        Ok(Progress::Agreed(self.agreement(name)))
    }

    fn go(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Verdict {
        let go = GoOption::decode(data)
            .ok_or((reply::ERR_INVALID, "the lengths inside the option do not add up"))?;
        self.check_name(go.name)?;
        let mut tell = |data: &[u8]| proto::encode_option_reply(option, reply::INFO, data, out);
        let flags = self.export.flags(self.said.is_structured);
        tell(&proto::encode_info_export(self.export.size_bytes, flags));
        let max = BIO_BYTES_MAX as u32;
        let preferred = PREFERRED_BYTES.max(self.export.block_bytes);
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
        Ok(Progress::Agreed(self.agreement(go.name)))
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
                "this server has no TLS: nbds:// is the address of one",
            ));
        }
        if !data.is_empty() {
            return Err((reply::ERR_INVALID, "STARTTLS carries no data"));
        }
        if self.is_secure {
            return Err((reply::ERR_INVALID, "everything is encrypted already"));
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
            // A list only names the context; its number means nothing there.
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
            return Err((
                reply::ERR_UNKNOWN,
                "there are several exports here: name the one you mean",
            ));
        }
        if !self.is_called(name) {
            return Err((reply::ERR_UNKNOWN, "there is no export of that name"));
        }
        Ok(())
    }

    fn agreement(&self, name: &str) -> Agreement {
        let has_block_status = self.said.context_of.as_deref() == Some(name);
        let (is_structured, is_read_only) = (self.said.is_structured, self.export.is_read_only);
        Agreement { is_structured, has_block_status, is_read_only }
    }
}

/// The type of an error reply, and its words.
type Refusal = (u32, &'static str);
type Verdict = Result<Progress, Refusal>;
