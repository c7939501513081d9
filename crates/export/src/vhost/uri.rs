//! Where a vhost-user server listens, as users write it: `vhost-user:///PATH`, and `?poll=auto` to
//! look at the rings before sleeping.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use udm::error::{Error, Kind, Result};

use super::poll::Poll;
use crate::socket;

/// What such a URI begins with.
pub const SCHEME: &str = "vhost-user://";

/// The Unix socket to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// Its absolute path.
    pub path: PathBuf,
    /// Whether this side looks at rings before it sleeps.
    pub poll: Poll,
}

impl FromStr for Uri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Uri> {
        let wrong = |why| Error::new(Kind::Invalid, format!("export {text:?} {why}"));
        let Some(rest) = text.strip_prefix(SCHEME) else {
            return Err(wrong("is not vhost-user:///PATH".into()));
        };
        let (path, poll) = match rest.split_once("?poll=") {
            Some((path, word)) => {
                (path, word.parse().map_err(|error| wrong(format!("has {error}")))?)
            }
            None => (rest, Poll::default()),
        };
        let path = socket::parse_path(path, SCHEME).map_err(wrong)?;
        Ok(Uri { path, poll })
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.path.display())?;
        match self.poll {
            Poll::Never => Ok(()),
            poll => write!(f, "?poll={}", poll.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn uris_are_printed_as_they_are_read_and_wrong_ones_refused() {
        for rest in ["", "?poll=auto", "?poll=always"] {
            let text = format!("vhost-user:///run/udm/a b.sock{rest}");
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        let never = "vhost-user:///a?poll=never".parse::<Uri>().unwrap();
        assert_eq!((never.to_string(), never.poll), ("vhost-user:///a".into(), Poll::Never));
        for (text, word) in [
            ("vhost-user://x", "absolute path of a socket after vhost-user://"),
            ("vhost-user:///", "absolute path"),
            ("vhost-user:///a?b", "nothing after"),
            ("vhost-user:///a?poll=", "auto, never or always"),
            ("vhost-user:///a?poll=auto&x=1", "poll=auto&x=1: auto, never or always"),
            ("vhost-user:///a?poll=auto?poll=auto", "auto, never or always"),
            ("vhost:///a", "is not vhost-user"),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
