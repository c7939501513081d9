//! Table lines, exactly as `dmsetup` takes them: `start length target arguments...`.
//!
//! The grammar, in full:
//!
//! * A table is a text of lines. A blank line, or one whose first character is `#`, is skipped.
//! * The first three words are taken literally: two decimal numbers of 512-byte sectors (no
//!   hexadecimal, no octal, no unit; dmsetup takes a leading `+`, and so does udm) and the target's
//!   name, at most 15 characters.
//! * In the arguments, a backslash makes the next character an ordinary one, so `\ ` is a blank
//!   inside a word and `\\` a backslash; quotes are not special. `#` starts a comment, even inside
//!   a word; `\#` is the character (the one thing that dmsetup cannot express).
//! * Lines follow each other without gap or overlap from sector 0; none is empty.
//!
//! Every error names its line and column, and [`pointer()`] draws a caret under the word.

mod word;

use std::fmt;

use crate::error::{Error, Kind, Place, Result};

pub use word::{DeviceOptions, DeviceWord, Word};

/// At most this many bytes in a table's text.
pub const TABLE_BYTES_MAX: usize = 256 << 10;
/// At most this many targets in a table.
pub const TABLE_LINES_MAX: usize = 4096;
/// At most this many arguments after a target's name.
pub const LINE_WORDS_MAX: usize = 256;
/// At most this many bytes in a target's name; the kernel's own limit.
pub const TARGET_NAME_BYTES_MAX: usize = 15;
/// At most this many sectors in a device: its bytes fit 63 bits, as file offsets must.
pub const TABLE_SECTORS_MAX: u64 = i64::MAX as u64 / crate::units::SECTOR;

/// A mapped device's table: its lines, in order, without gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// At least one.
    pub lines: Vec<TableLine>,
}

/// One line: a target and the range that it serves, in sectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableLine {
    /// First sector on the mapped device.
    pub start: u64,
    /// Sectors; not 0.
    pub len: u64,
    /// The target's name.
    pub target: Word,
    /// The target's arguments.
    pub args: Vec<Word>,
}

impl Table {
    /// Parses a table.
    pub fn parse(text: &str) -> Result<Table> {
        if text.len() > TABLE_BYTES_MAX {
            let bytes = text.len();
            return Err(invalid(format!("a table of {bytes} bytes; at most {TABLE_BYTES_MAX}")));
        }
        let mut lines = Vec::new();
        let mut next_start = 0;
        for (index, text) in text.split('\n').enumerate() {
            let words = words_of_line(text, index as u32 + 1)?;
            let Some(first) = words.first() else { continue };
            if lines.len() == TABLE_LINES_MAX {
                return Err(first.error(
                    Kind::Invalid,
                    format!("more than {TABLE_LINES_MAX} targets in a table"),
                ));
            }
            let line = TableLine::from_words(words, next_start)?;
            next_start = line.start + line.len;
            lines.push(line);
        }
        if lines.is_empty() {
            return Err(invalid("the table is empty: expected `start length target arguments`"));
        }
        Ok(Table { lines })
    }

    /// Parses a table from untrusted bytes.
    pub fn parse_bytes(bytes: &[u8]) -> Result<Table> {
        if bytes.len() > TABLE_BYTES_MAX {
            let bytes = bytes.len();
            return Err(invalid(format!("a table of {bytes} bytes; at most {TABLE_BYTES_MAX}")));
        }
        match std::str::from_utf8(bytes) {
            Ok(text) => Table::parse(text),
            Err(error) => {
                let good = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
                let line = good.matches('\n').count() as u32 + 1;
                let tail = good.rsplit('\n').next().unwrap_or_default();
                let column = tail.chars().count() as u32 + 1;
                Err(at(Place { line, column, width: 1 }, Kind::Invalid, "not UTF-8 text"))
            }
        }
    }

    /// Sectors in the whole device.
    pub fn len_sectors(&self) -> u64 {
        self.lines.last().map_or(0, |line| line.start + line.len)
    }
}

impl TableLine {
    fn from_words(words: Vec<Word>, expected_start: u64) -> Result<TableLine> {
        let mut words = words.into_iter();
        let first = words.next().expect("the caller saw a word");
        let start = first.signed_sectors("the start sector")?;
        let length = words
            .next()
            .ok_or_else(|| first.behind("the length in sectors is missing after this"))?;
        let len = length.signed_sectors("the length in sectors")?;
        if len == 0 {
            return Err(length.error(Kind::Invalid, "zero-length target"));
        }
        let end = start.checked_add(len).filter(|end| *end <= TABLE_SECTORS_MAX);
        if end.is_none() {
            let message = format!("the device is too long: at most {TABLE_SECTORS_MAX} sectors");
            return Err(length.error(Kind::Invalid, message));
        }
        if start != expected_start {
            let wrong =
                if start > expected_start { "Gap in table" } else { "Gap in table (overlap)" };
            let message = format!("{wrong}: this line must start at sector {expected_start}");
            return Err(first.error(Kind::Invalid, message));
        }
        let target =
            words.next().ok_or_else(|| length.behind("the target's name is missing after this"))?;
        if target.text.len() > TARGET_NAME_BYTES_MAX {
            let message = format!("a target's name has at most {TARGET_NAME_BYTES_MAX} characters");
            return Err(target.error(Kind::Invalid, message));
        }
        Ok(TableLine { start, len, target, args: words.collect() })
    }

    /// The length of the target's range, converted from sectors to bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len * crate::units::SECTOR
    }
}

impl fmt::Display for TableLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.start, self.len, self.target.text)?;
        self.args.iter().try_for_each(|word| write!(f, " {}", word.quoted()))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

impl std::str::FromStr for Table {
    type Err = Error;

    fn from_str(text: &str) -> Result<Table> {
        Table::parse(text)
    }
}

/// Draws the line of `text` that `error` is about, and carets under the wrong word:
/// ```text
/// 0 131072 pcachee /dev/pmem0 /dev/sdb
///          ^^^^^^^
/// ```
/// `None` if the error does not point into the text.
pub fn pointer(text: &str, error: &Error) -> Option<String> {
    let place = error.place()?;
    let line = text.split('\n').nth(place.line.checked_sub(1)? as usize)?;
    let shown: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let shown = shown.trim_end();
    let before = place.column.checked_sub(1)? as usize;
    // A caret may be one character after the line's end, where a word is missing.
    let room = (shown.chars().count() + 1).saturating_sub(before).max(1);
    let carets = (place.width.max(1) as usize).min(room);
    Some(format!("{shown}\n{}{}", " ".repeat(before), "^".repeat(carets)))
}

/// Splits a line into words. The first three are taken literally. In the others a backslash quotes
/// the next character, and `#` at the start of a word ends the line. dmsetup cuts the line at any
/// `#`; udm refuses a `#` within a word, because cutting would change the path of a device.
fn words_of_line(text: &str, line: u32) -> Result<Vec<Word>> {
    let mut words: Vec<Word> = Vec::new();
    let mut chars = (1u32..).zip(text.chars()).peekable();
    loop {
        while chars.next_if(|(_, c)| is_blank(*c)).is_some() {}
        let Some(&(column, first)) = chars.peek() else { return Ok(words) };
        let is_raw = words.len() < 3;
        if first == '#' && (words.is_empty() || !is_raw) {
            return Ok(words);
        }
        let mut word = Word { text: String::new(), line, column, width: 0 };
        while let Some((here, c)) = chars.next_if(|(_, c)| !is_blank(*c)) {
            if !is_raw && c == '#' {
                let place = Place { line, column: here, width: 1 };
                let what = "a comment would begin here, as for dmsetup, and cut this word: write \
                            `\\#` for a `#` in a word, and a blank in front of a comment";
                return Err(at(place, Kind::Invalid, what));
            }
            let quoted = if !is_raw && c == '\\' { chars.next() } else { None };
            let (here, c) = quoted.unwrap_or((here, c));
            if c.is_control() && !is_blank(c) {
                let place = Place { line, column: here, width: 1 };
                return Err(at(place, Kind::Invalid, "a control character in a table"));
            }
            word.text.push(c);
            word.width = here + 1 - column;
        }
        if words.len() == 3 + LINE_WORDS_MAX {
            return Err(word.error(Kind::Invalid, format!("more than {LINE_WORDS_MAX} arguments")));
        }
        words.push(word);
    }
}

/// What C calls a space, without the newline.
fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\r' | '\u{b}' | '\u{c}')
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(Kind::Invalid, message)
}

/// An error at `place`, which its text names too.
fn at(place: Place, kind: Kind, message: impl Into<String>) -> Error {
    Error::new(kind, message).at(Shown(place)).with_place(place)
}

/// A place in words.
struct Shown(Place);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "table line {}, column {}", self.0.line, self.0.column)
    }
}

#[cfg(test)]
mod tests;
