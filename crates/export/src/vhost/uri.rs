//! Where a vhost-user server listens, as users write it: `vhost-user:///PATH`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use udm::error::{Error, Kind, Result};

use crate::socket;

/// What such a URI begins with.
pub const SCHEME: &str = "vhost-user://";

/// The Unix socket to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// Its absolute path.
    pub path: PathBuf,
}

impl FromStr for Uri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Uri> {
        let parsed = match text.strip_prefix(SCHEME) {
            Some(path) => socket::parse_path(path, SCHEME),
            None => Err("is not vhost-user:///PATH".into()),
        };
        let path =
            parsed.map_err(|why| Error::new(Kind::Invalid, format!("export {text:?} {why}")))?;
        Ok(Uri { path })
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.path.display())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn uris_are_printed_as_they_are_read_and_wrong_ones_refused() {
        let text = "vhost-user:///run/udm/a b.sock";
        assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        for (text, word) in [
            ("vhost-user://x", "absolute path of a socket after vhost-user://"),
            ("vhost-user:///", "absolute path"),
            ("vhost-user:///a?b", "nothing after"),
            ("vhost:///a", "is not vhost-user"),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
