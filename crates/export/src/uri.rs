//! The address of a door, as users write it. The scheme says what kind of door.

use std::fmt;
use std::str::FromStr;

use udm::error::{Error, Result};

use crate::{nbd, vhost};

/// All forms, for people.
pub const FORMS: &str = "nbd+unix:///PATH, nbd://ADDR:PORT, or vhost-user:///PATH";

/// The address of a door.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uri {
    /// `nbd+unix:///PATH` or `nbd://ADDR:PORT`.
    Nbd(nbd::Uri),
    /// `vhost-user:///PATH`.
    Vhost(vhost::Uri),
}

impl Uri {
    /// The same in the form that clients take.
    pub fn for_clients(&self) -> String {
        match self {
            Uri::Nbd(uri) => uri.for_clients(),
            Uri::Vhost(uri) => uri.to_string(),
        }
    }
}

impl FromStr for Uri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Uri> {
        if text.starts_with(vhost::uri::SCHEME) {
            return text.parse().map(Uri::Vhost);
        }
        text.parse().map(Uri::Nbd)
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Uri::Nbd(uri) => uri.fmt(f),
            Uri::Vhost(uri) => uri.fmt(f),
        }
    }
}
