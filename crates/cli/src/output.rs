//! The output of commands, and their errors.
//!
//! Results go to standard output, progress and errors to standard error. If the reader of a pipe
//! stops (`udm status | head -1`), that is not an error: the command ends quietly.

use std::borrow::Cow;
use std::fmt;
use std::io::{ErrorKind, IsTerminal, Write};

use anyhow::Result;
use serde_json::Value;

/// The exit code of a command that was used wrongly.
pub const USAGE: i32 = 2;

/// An error in the arguments, found after they were parsed.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Several devices were asked and some did not answer well; each was reported already.
#[derive(Debug)]
pub struct Reported;

impl fmt::Display for Reported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("failed for some devices")
    }
}

impl std::error::Error for Reported {}

/// An error about a place in a text, such as a word of a table.
#[derive(Debug)]
pub struct Pointed {
    /// The error, in one line that names the place.
    pub message: String,
    /// The line of the text, and carets under the wrong part.
    pub pointer: String,
}

impl Pointed {
    /// `error`, with the line of `text` and the place that it is about, if there is one.
    pub fn from(text: &str, error: &udm::error::Error) -> anyhow::Error {
        let message = error.to_string();
        match udm::table::pointer(text, error) {
            Some(pointer) => Pointed { message, pointer }.into(),
            None => anyhow::anyhow!(message),
        }
    }
}

impl fmt::Display for Pointed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Pointed {}

/// `text` without characters that would control a terminal: a part of it may come from a medium, or
/// be a name of a file.
fn harmless(text: &str) -> Cow<'_, str> {
    let is_harmful = |c: char| c.is_control() && c != '\n' && c != '\t';
    match text.contains(is_harmful) {
        true => text.replace(is_harmful, "\u{FFFD}").into(),
        false => text.into(),
    }
}

/// Prints `text`, without characters that would control a terminal.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(harmless(text).as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        result => Ok(result?),
    }
}

/// Prints `text` and a newline.
pub fn print_line(text: &str) -> Result<()> {
    print(&format!("{text}\n"))
}

/// Prints JSON for people and programs alike: indented, with a newline.
pub fn print_json(value: &Value) -> Result<()> {
    print_line(&serde_json::to_string_pretty(value)?)
}

/// Prints an error: one line, whatever its text holds. At a terminal, the place of the error is
/// shown below it.
pub fn print_error(what: &str, error: &anyhow::Error) {
    let text = without_numbers(&format!("{error:#}"));
    let text = harmless(&text);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    // If standard error is closed, the error cannot be printed.
    let _ = writeln!(std::io::stderr(), "udm: {what}: {}", lines.join(" "));
    if let Some(pointed) = error.downcast_ref::<Pointed>()
        && std::io::stderr().is_terminal()
    {
        for line in harmless(&pointed.pointer).lines() {
            let _ = writeln!(std::io::stderr(), "  {line}");
        }
    }
}

/// Takes ` (os error 2)` out of `No such file or directory (os error 2)`.
pub fn without_numbers(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let mut clean = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        clean += part.split_once(')').map_or(part, |(_, rest)| rest);
    }
    clean
}

/// Prints a remark that is neither result nor error.
pub fn print_note(text: &str) {
    let _ = writeln!(std::io::stderr(), "udm: note: {}", harmless(text));
}

/// A word, quoted for a shell.
pub fn shell(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%,=".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::{harmless, without_numbers};

    #[test]
    fn no_text_controls_a_terminal() {
        assert_eq!(harmless("a\n\tb"), "a\n\tb");
        let text = "\u{1b}]0;title\u{7}\u{1b}[2J\u{9b}m\r\u{8}";
        assert_eq!(harmless(text), "\u{FFFD}]0;title\u{FFFD}\u{FFFD}[2J\u{FFFD}m\u{FFFD}\u{FFFD}");
    }

    #[test]
    fn numbers_of_errors_say_nothing_more() {
        let text = "open /x: No such file or directory (os error 2); try (again)";
        assert_eq!(without_numbers(text), "open /x: No such file or directory; try (again)");
        assert_eq!(without_numbers("plain"), "plain");
    }
}
