//! Words of a table line, and the words among them that name a device.

use std::fmt;

use crate::base::area::Area;
use crate::base::seek::Seek;
use crate::disk::{IoMode, ReadMode, window_of};
use crate::error::{Error, Kind, Place, Result};
use crate::pmem::Persistence;

/// A word, and where it stood. Words are equal when their text is.
#[derive(Clone)]
pub struct Word {
    /// The word, without its backslashes.
    pub text: String,
    /// Line of the table's text, from 1; 0 for a word that comes from no text.
    pub line: u32,
    /// Column of its first character, from 1.
    pub column: u32,
    /// Characters it takes in the text.
    pub width: u32,
}

impl Word {
    /// A word that comes from no text.
    pub fn new(text: impl Into<String>) -> Word {
        Word { text: text.into(), line: 0, column: 0, width: 0 }
    }

    /// The words of `text`, which come from no table.
    pub fn list(text: &str) -> Vec<Word> {
        text.split_whitespace().map(Word::new).collect()
    }

    /// An error that points at this word and shows it.
    pub fn error(&self, kind: Kind, message: impl fmt::Display) -> Error {
        self.point(Error::new(kind, format!("`{}`: {message}", self.text.escape_debug())))
    }

    /// An error that points after this word, where something is missing.
    pub fn behind(&self, message: impl fmt::Display) -> Error {
        let message = format!("{message} (`{}`)", self.text.escape_debug());
        self.point_behind(Error::new(Kind::Invalid, message))
    }

    /// Makes `error`, whose text is complete by itself, point at this word.
    pub fn point(&self, error: Error) -> Error {
        match self.place() {
            Some(place) => error.at(super::Shown(place)).with_place(place),
            None => error,
        }
    }

    /// Makes `error`, about something that is missing, point after this word.
    pub fn point_behind(&self, error: Error) -> Error {
        match self.place() {
            Some(Place { line, column, width }) => {
                let place = Place { line, column: column + width, width: 1 };
                error.at(super::Shown(place)).with_place(place)
            }
            None => error,
        }
    }

    /// Makes `error` point at word `nth` of `words`, or after the last one if it is missing. If
    /// `words` is empty, the error points nowhere.
    pub fn point_at(words: &[Word], nth: usize, error: Error) -> Error {
        match (words.get(nth), words.last()) {
            (Some(word), _) => word.point(error),
            (None, Some(last)) => last.point_behind(error),
            (None, None) => error,
        }
    }

    /// Where it stood; `None` if nowhere.
    pub fn place(&self) -> Option<Place> {
        (self.line != 0).then_some(Place {
            line: self.line,
            column: self.column,
            width: self.width,
        })
    }

    /// The word as a plain decimal number; `what` names it in the error.
    pub fn number(&self, what: &str) -> Result<u64> {
        let digits = &self.text;
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(self.error(Kind::Invalid, format!("{what} is a plain decimal number")));
        }
        digits.parse().map_err(|_| self.error(Kind::Invalid, format!("{what} is too large")))
    }

    /// The word as a number of sectors that a device can have.
    pub fn sectors(&self, what: &str) -> Result<u64> {
        let sectors = self.number(what)?;
        if sectors > super::TABLE_SECTORS_MAX {
            return Err(self.error(Kind::Invalid, format!("{what} is too large")));
        }
        Ok(sectors)
    }

    /// As `sectors`, with an optional plus sign in front.
    pub(super) fn signed_sectors(&self, what: &str) -> Result<u64> {
        match self.text.strip_prefix('+') {
            Some(digits) => Word { text: digits.into(), ..self.clone() }.sectors(what),
            None => self.sectors(what),
        }
    }

    /// The word as a number of at most `max`.
    pub fn number_up_to(&self, what: &str, max: u64) -> Result<u64> {
        let number = self.number(what)?;
        if number > max {
            return Err(self.error(Kind::Invalid, format!("{what} is at most {max}")));
        }
        Ok(number)
    }

    /// The word as it must be written in a table line.
    pub fn quoted(&self) -> String {
        let mut quoted = String::with_capacity(self.text.len());
        for c in self.text.chars() {
            if super::is_blank(c) || matches!(c, '\\' | '#') {
                quoted.push('\\');
            }
            quoted.push(c);
        }
        quoted
    }

    /// The word as the name of a device, with its options.
    pub fn device(&self) -> Result<DeviceWord> {
        DeviceWord::parse(self)
    }
}

impl PartialEq for Word {
    fn eq(&self, other: &Word) -> bool {
        self.text == other.text
    }
}

impl Eq for Word {}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}@{}:{}", self.text, self.line, self.column)
    }
}

/// The options after the `?` of a device word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// `io=direct|buffered|dontcache|lazy`.
    pub io: Option<IoMode>,
    /// `io=lazy,read=buffered`.
    pub reads: ReadMode,
    /// `window=`: most bytes that are not written out, for `io=lazy`.
    pub window: Option<u64>,
    /// `persist=cpu|msync`.
    pub persist: Option<Persistence>,
    /// `readonly`.
    pub is_read_only: bool,
    /// `offset=` and `size=`: the part of the device that is meant.
    pub area: Area,
    /// `seek=`: the disk's times that `delay` pretends.
    pub(crate) seek: Option<Seek>,
}

/// A word that names a device: `/data/slow.img?io=direct`.
///
/// Options are `key=value` or `readonly`, joined by `&`, after the last `?` of the word; a last `?`
/// that is followed by anything else belongs to the path. A file whose name itself ends like an
/// option is named by giving any option after it: `/data/odd?io=direct?io=direct`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceWord {
    /// The path, or `major:minor`.
    pub path: String,
    /// Its options.
    pub options: DeviceOptions,
    /// The whole word, for errors and for printing.
    pub word: Word,
}

impl DeviceWord {
    /// Parses `word`.
    pub fn parse(word: &Word) -> Result<DeviceWord> {
        let mut options = DeviceOptions::default();
        let (path, list) = match word.text.rsplit_once('?') {
            Some((path, list)) if list.split('&').all(looks_like_option) => (path, Some(list)),
            _ => (word.text.as_str(), None),
        };
        if path.is_empty() {
            return Err(word.error(Kind::Invalid, "the device's path is missing"));
        }
        let listed: Vec<&str> = list.into_iter().flat_map(|list| list.split('&')).collect();
        for (nth, option) in listed.iter().enumerate() {
            if listed[..nth].iter().any(|other| key_of(other) == key_of(option)) {
                let message = format!("{option}: it is given twice");
                return Err(word.error(Kind::Invalid, message));
            }
            options.set(option).map_err(|error| word.error(error.kind(), error))?;
        }
        if options.window.is_some() && options.io != Some(IoMode::Lazy) {
            return Err(word.error(Kind::Invalid, "window is for io=lazy"));
        }
        Ok(DeviceWord { path: path.to_string(), options, word: word.clone() })
    }

    /// Major and minor number, if it names a device by them, as the kernel's tables do.
    pub fn number(&self) -> Option<(u32, u32)> {
        let (major, minor) = self.path.split_once(':')?;
        let number = |digits: &str| {
            let is_plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            is_plain.then(|| digits.parse().ok()).flatten()
        };
        Some((number(major)?, number(minor)?))
    }

    /// The word for `len` bytes at byte `start` of the device of this word: one device may carry a
    /// cache's metadata and its data. The caller knows that they are there.
    pub fn part(&self, start: u64, len: u64) -> Word {
        let area = Area::new(self.options.area.start() + start, len);
        let rest = self.word.text[self.path.len()..].trim_start_matches('?').split('&');
        let is_kept = |option: &&str| {
            !option.is_empty() && !option.starts_with("offset=") && !option.starts_with("size=")
        };
        let options: Vec<String> =
            rest.filter(is_kept).map(str::to_owned).chain(area.words()).collect();
        Word { text: format!("{}?{}", self.path, options.join("&")), ..self.word.clone() }
    }

    /// An error if it has options that only a `delay` supports.
    pub(crate) fn refuse_seek(&self) -> Result<()> {
        match self.options.seek {
            None => Ok(()),
            Some(_) => Err(self.error(Kind::Invalid, "seek is for the target delay")),
        }
    }

    /// An error that points at this device's word.
    pub fn error(&self, kind: Kind, message: impl fmt::Display) -> Error {
        self.word.error(kind, message)
    }
}

impl fmt::Display for DeviceWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.word.text)
    }
}

impl DeviceOptions {
    fn set(&mut self, option: &str) -> Result<()> {
        if option == READ_ONLY {
            self.is_read_only = true;
            return Ok(());
        }
        let (key, value) = option.split_once('=').expect("checked by looks_like_option");
        match (key, value) {
            ("io", _) => {
                let (io, reads) = IoMode::parse(value)?;
                (self.io, self.reads) = (Some(io), reads);
            }
            ("window", _) => self.window = Some(window_of(value)?),
            ("persist", "cpu") => self.persist = Some(Persistence::Cpu),
            ("persist", "msync") => self.persist = Some(Persistence::Msync),
            ("seek", _) => self.seek = Some(Seek::parse(value)?),
            ("offset", _) => self.area.set_offset(value)?,
            ("size", _) => self.area.set_size(value)?,
            ("persist", _) => {
                let message = format!("persist={value}: expected cpu or msync");
                return Err(Error::new(Kind::Invalid, message));
            }
            _ => {
                let message = format!(
                    "unknown option {key}; the options are io, window, persist, offset, size, seek \
                     and readonly"
                );
                return Err(Error::new(Kind::Invalid, message));
            }
        }
        Ok(())
    }
}

fn key_of(option: &str) -> &str {
    option.split('=').next().unwrap_or(option)
}

/// The option without a value.
const READ_ONLY: &str = "readonly";

fn looks_like_option(text: &str) -> bool {
    let has_value = text.split_once('=').is_some_and(|(key, _)| {
        !key.is_empty() && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
    });
    has_value || text == READ_ONLY
}
