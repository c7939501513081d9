//! A small subset of XML, enough for descriptions of metadata: elements with attributes, comments,
//! a declaration in front. No text between elements, no documents within documents.

use std::borrow::Cow;

use crate::error::{Error, Kind, Place, Result};

/// An attribute: its name, its value, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute<'a> {
    /// The name.
    pub name: &'a str,
    /// The value.
    pub value: Cow<'a, str>,
    /// Where in the text the name begins.
    pub at: usize,
}

/// A part of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Token<'a> {
    /// `<name attribute="value">`, or with `/>` at the end.
    Open {
        /// The name.
        name: &'a str,
        /// Its attributes.
        attributes: Vec<Attribute<'a>>,
        /// Whether it is empty.
        is_closed: bool,
        /// Where in the text it begins.
        at: usize,
    },
    /// `</name>`.
    Close {
        /// The name.
        name: &'a str,
        /// Where in the text it begins.
        at: usize,
    },
}

/// No element has more attributes.
const ATTRIBUTES_MAX: usize = 16;

/// Cuts a text into its parts.
#[derive(Debug)]
pub struct Scan<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Scan<'a> {
    /// Begins with the text's start.
    pub fn new(text: &'a str) -> Scan<'a> {
        Scan { text, at: 0 }
    }

    /// An error about what stands at byte `at`.
    pub fn error(&self, at: usize, what: impl std::fmt::Display) -> Error {
        let before = &self.text[..at];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        let place = Place { line: line as u32, column: column as u32, width: 1 };
        Error::new(Kind::Invalid, format!("line {line}, column {column}: {what}")).with_place(place)
    }

    /// The text's end.
    pub fn end(&self) -> usize {
        self.text.len()
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_blanks(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\r', '\n']).len();
    }

    fn take(&mut self, word: &str) -> bool {
        let is_there = self.rest().starts_with(word);
        self.at += if is_there { word.len() } else { 0 };
        is_there
    }

    fn expect(&mut self, word: &str) -> Result<()> {
        match self.take(word) {
            true => Ok(()),
            false => Err(self.error(self.at, format!("expected {word}"))),
        }
    }

    fn name(&mut self) -> Result<&'a str> {
        let rest = self.rest();
        let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let name = &rest[..rest.find(|c| !is_of_name(c)).unwrap_or(rest.len())];
        if name.is_empty() {
            return Err(self.error(self.at, "expected a name"));
        }
        self.at += name.len();
        Ok(name)
    }

    /// The next part, or none at the text's end.
    pub fn next_token(&mut self) -> Result<Option<Token<'a>>> {
        loop {
            self.skip_blanks();
            let at = self.at;
            if self.rest().is_empty() {
                return Ok(None);
            }
            if self.take("<!--") {
                self.skip_to("-->", at, "a comment without an end")?;
            } else if self.take("<?") {
                self.skip_to("?>", at, "a declaration without an end")?;
            } else if self.take("</") {
                let name = self.name()?;
                self.skip_blanks();
                self.expect(">")?;
                return Ok(Some(Token::Close { name, at }));
            } else if self.take("<") {
                return self.open(at).map(Some);
            } else {
                return Err(self.error(at, "expected an element"));
            }
        }
    }

    fn skip_to(&mut self, end: &str, start: usize, what: &str) -> Result<()> {
        let found = self.rest().find(end).ok_or_else(|| self.error(start, what))?;
        self.at += found + end.len();
        Ok(())
    }

    fn open(&mut self, at: usize) -> Result<Token<'a>> {
        let name = self.name()?;
        let mut attributes: Vec<Attribute<'a>> = Vec::new();
        loop {
            let before = self.at;
            self.skip_blanks();
            if self.take("/>") {
                return Ok(Token::Open { name, attributes, is_closed: true, at });
            }
            if self.take(">") {
                return Ok(Token::Open { name, attributes, is_closed: false, at });
            }
            if before == self.at {
                return Err(self.error(self.at, "expected a blank, > or />"));
            }
            let attribute = self.attribute()?;
            if attributes.iter().any(|known| known.name == attribute.name) {
                let what = format!("{} is there twice", attribute.name);
                return Err(self.error(attribute.at, what));
            }
            if attributes.len() == ATTRIBUTES_MAX {
                return Err(self.error(attribute.at, "more attributes than any element has"));
            }
            attributes.push(attribute);
        }
    }

    fn attribute(&mut self) -> Result<Attribute<'a>> {
        let at = self.at;
        let name = self.name()?;
        self.skip_blanks();
        self.expect("=")?;
        self.skip_blanks();
        let quote = if self.take("'") {
            '\''
        } else {
            self.expect("\"")?;
            '"'
        };
        let rest = self.rest();
        let end = rest.find([quote, '<']).filter(|end| rest[*end..].starts_with(quote));
        let end = end.ok_or_else(|| self.error(at, format!("{name} does not end")))?;
        let value = self.unescaped(&rest[..end])?;
        self.at += end + 1;
        Ok(Attribute { name, value, at })
    }

    /// A value without what stands for other letters.
    fn unescaped(&self, value: &'a str) -> Result<Cow<'a, str>> {
        if !value.contains('&') {
            return Ok(Cow::Borrowed(value));
        }
        const LETTERS: [(&str, char); 5] =
            [("&amp;", '&'), ("&lt;", '<'), ("&gt;", '>'), ("&quot;", '"'), ("&apos;", '\'')];
        let (mut clean, mut rest) = (String::new(), value);
        while let Some(at) = rest.find('&') {
            clean += &rest[..at];
            rest = &rest[at..];
            let known = LETTERS.iter().find(|(word, _)| rest.starts_with(word));
            let Some((word, letter)) = known else {
                let place = self.at + value.len() - rest.len();
                return Err(self.error(place, "an & that begins no known entity"));
            };
            clean.push(*letter);
            rest = &rest[word.len()..];
        }
        Ok(Cow::Owned(clean + rest))
    }
}
