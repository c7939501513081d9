//! Errors come from three sources. A bug in this program is an assertion; a failing device is a
//! [`Status`] on a bio; a wrong table, message, medium or set-up is an [`Error`] for the caller.

use std::fmt;

/// The result of a request. One byte, without context: it travels on the hot path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Status {
    /// The device under the request failed.
    #[error("input/output error")]
    Io,
    /// No room, and none will come.
    #[error("no space left")]
    NoSpace,
    /// The medium's content differs from the data that was written.
    #[error("data is damaged")]
    Corrupt,
    /// The device may only be read.
    #[error("device is read-only")]
    ReadOnly,
    /// The device cannot do that operation.
    #[error("operation not supported")]
    Unsupported,
    /// The device did not answer in time.
    #[error("timed out")]
    Timeout,
    /// The request itself is wrong: unaligned, or beyond the device.
    #[error("invalid request")]
    Invalid,
}

impl Status {
    /// The errno that Linux would answer with.
    pub fn errno(self) -> i32 {
        match self {
            Status::Io | Status::Corrupt => 5,
            Status::NoSpace => 28,
            Status::ReadOnly => 30,
            Status::Unsupported => 95,
            Status::Timeout => 110,
            Status::Invalid => 22,
        }
    }
}

/// The stable part of an [`Error`]: what callers match on. Each names its errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A word, number or option is wrong (EINVAL).
    Invalid,
    /// The medium or the device under it fails or is damaged (EIO).
    Io,
    /// Too small, or full (ENOSPC).
    NoSpace,
    /// The operation is not possible here (EOPNOTSUPP).
    Unsupported,
    /// The device is in use (EBUSY).
    Busy,
    /// There is no such thing (ENOENT).
    NotFound,
    /// It exists already (EEXIST).
    Exists,
    /// The chain of segments ends early (EFAULT, the kernel's own choice).
    Fault,
    /// Refused because it might destroy data; the user must request it explicitly (EPERM).
    Refused,
}

impl Kind {
    /// The errno that Linux would answer with.
    pub fn errno(self) -> i32 {
        match self {
            Kind::Invalid => 22,
            Kind::Io => 5,
            Kind::NoSpace => 28,
            Kind::Unsupported => 95,
            Kind::Busy => 16,
            Kind::NotFound => 2,
            Kind::Exists => 17,
            Kind::Fault => 14,
            Kind::Refused => 1,
        }
    }
}

/// The position of an error in a text, for a caret under it. Counted in characters, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The line.
    pub line: u32,
    /// The first character that is wrong.
    pub column: u32,
    /// The number of wrong characters.
    pub width: u32,
}

/// An error of set-up, media, tables or messages. Its one line names the failure, its place, its
/// cause and, if known, the remedy.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    place: Option<Place>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind`; `message` is one sentence without a full stop.
    pub fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), place: None, source: None }
    }

    /// Keeps the error that caused this one.
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
        self.source = Some(source.into());
        self
    }

    /// Puts the place in front: `context: message`.
    pub fn at(mut self, context: impl fmt::Display) -> Error {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// Marks the wrong characters of the text.
    pub fn with_place(mut self, place: Place) -> Error {
        self.place = Some(place);
        self
    }

    /// An I/O error of `operation` on `path`, with the kind that its errno means.
    pub fn from_io(operation: &str, path: impl fmt::Display, source: std::io::Error) -> Error {
        let kind = match source.raw_os_error() {
            Some(2) => Kind::NotFound,
            Some(16 | 11) => Kind::Busy,
            Some(17) => Kind::Exists,
            Some(22) => Kind::Invalid,
            Some(28) => Kind::NoSpace,
            Some(95) => Kind::Unsupported,
            Some(1 | 13) => Kind::Refused,
            _ => Kind::Io,
        };
        Error::new(kind, format!("{operation} {path}: {source}"))
    }

    /// The range of wrong characters, if the error is about a text.
    pub fn place(&self) -> Option<Place> {
        self.place
    }

    /// What sort of error this is.
    pub fn kind(&self) -> Kind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

/// The result of set-up, tables, messages and media.
pub type Result<T> = std::result::Result<T, Error>;
