//! The address of a ublk export, as users write it: `ublk:` for the next free number, `ublk:N` for
//! `/dev/ublkbN`. `?queues=` and `?depth=` set the number of requests in flight, `?shared=` names
//! the memory that clients share with the server.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use udm::error::{Error, Kind, Result};

use super::{DEPTH_MAX, QUEUES_MAX};
use crate::options::Options;

/// The scheme of these URIs.
pub const SCHEME: &str = "ublk:";
/// The kernel's highest device number.
const NUMBER_MAX: u32 = (1 << 20) - 1;
/// Default requests per queue.
const DEPTH: u16 = 128;

/// A disk of the kernel's ublk driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// Its number; `None` for the next free one.
    pub number: Option<u32>,
    /// Number of queues; default: one for each processor, at most four.
    pub queues: Option<u16>,
    /// Maximum requests of a queue in flight.
    pub depth: u16,
    /// Absolute path of the memory file in which clients keep their data.
    pub shared: Option<PathBuf>,
}

impl Uri {
    /// The disk's file, once it has a number.
    pub fn disk(&self) -> Option<String> {
        self.number.map(|number| format!("/dev/ublkb{number}"))
    }
}

impl FromStr for Uri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Uri> {
        let wrong = |why| Error::new(Kind::Invalid, format!("export {text:?} {why}"));
        let Some(rest) = text.strip_prefix(SCHEME) else {
            return Err(wrong("is not ublk: or ublk:NUMBER".into()));
        };
        let (number, words) = rest.split_once('?').unwrap_or((rest, ""));
        let mut options = Options::parse(words).map_err(wrong)?;
        let number = match number {
            "" => None,
            digits => Some(at_most(digits, 0, NUMBER_MAX).map_err(wrong)?),
        };
        let mut small = |name: &str, max: u16| {
            let digits = options.take(name);
            let parse = |digits| at_most(digits, 1, max.into());
            let named = |why| wrong(format!("{why} for {name}="));
            digits.map(parse).transpose().map_err(named)
        };
        let queues = small("queues", QUEUES_MAX)?.map(|queues| queues as u16);
        let depth = small("depth", DEPTH_MAX)?.map_or(DEPTH, |depth| depth as u16);
        let shared = options.take("shared").map(file).transpose().map_err(wrong)?;
        options.end("ublk takes queues=, depth= and shared=").map_err(wrong)?;
        Ok(Uri { number, queues, depth, shared })
    }
}

fn file(path: &str) -> std::result::Result<PathBuf, String> {
    if !path.starts_with('/') || path.ends_with('/') || path.contains('\0') {
        return Err(format!("has shared={path:?}, which is not the absolute path of a file"));
    }
    Ok(path.into())
}

fn at_most(digits: &str, min: u32, max: u32) -> std::result::Result<u32, String> {
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse().ok().filter(|_| is_plain);
    let is_wrong = || format!("has {digits:?}, which is not a number from {min} to {max}");
    number.filter(|number| (min..=max).contains(number)).ok_or_else(is_wrong)
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}")?;
        if let Some(number) = self.number {
            write!(f, "{number}")?;
        }
        let queues = self.queues.map(|queues| format!("queues={queues}"));
        let depth = (self.depth != DEPTH).then(|| format!("depth={}", self.depth));
        let shared = self.shared.as_ref().map(|path| format!("shared={}", path.display()));
        let options: Vec<String> = queues.into_iter().chain(depth).chain(shared).collect();
        let mark = if options.is_empty() { "" } else { "?" };
        write!(f, "{mark}{}", options.join("&"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn uris_are_printed_as_they_are_read_and_wrong_ones_refused() {
        let texts = ["ublk:", "ublk:0", "ublk:17?queues=2", "ublk:?queues=1&depth=64"];
        for text in
            texts.into_iter().chain(["ublk:?shared=/dev/shm/a?b", "ublk:3?depth=1&shared=/x"])
        {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        let uri: Uri = "ublk:3?depth=128".parse().unwrap();
        assert_eq!((uri.to_string(), uri.disk()), ("ublk:3".into(), Some("/dev/ublkb3".into())));
        for (text, word) in [
            ("ublk", "is not ublk:"),
            ("ublk:x", "which is not a number from 0 to 1048575"),
            ("ublk:+1", "which is not a number from"),
            ("ublk:-1", "which is not a number from"),
            ("ublk:1048576", "which is not a number from"),
            ("ublk:0?depth=0", "has \"0\", which is not a number from 1 to 1024 for depth="),
            ("ublk:0?queues=17", "which is not a number from 1 to 16"),
            ("ublk:0?queues=1&queues=2", "twice"),
            ("ublk:0?shared=/a&shared=/b", "has \"shared\" twice"),
            ("ublk:0?shared=", "not the absolute path of a file"),
            ("ublk:0?shared=a", "has shared=\"a\", which is not the absolute path of a file"),
            ("ublk:0?shared=/dev/shm/", "not the absolute path"),
            ("ublk:0?poll=auto", "ublk takes queues=, depth= and shared="),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
