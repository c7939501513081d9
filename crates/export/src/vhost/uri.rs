//! The address of a vhost-user server, as users write it: `vhost-user:///PATH`. `?poll=` sets the
//! busy polling of rings, `mode=` and `owner=` the users who may connect, `shared` allows several
//! clients at a time. `packed=off`, `event_idx=off` and `indirect=off` withhold a feature of rings
//! from clients that use it wrongly. For a client, `reconnect=` sets its wait for the next server
//! when its own is gone.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use udm::error::{Error, Kind, Result};

use super::poll::Poll;
use super::proto::feature;
use crate::options::Options;
use crate::socket::{self, Access};

/// The scheme of these URIs.
pub const SCHEME: &str = "vhost-user://";

/// Features of rings that an option may withhold, by the names that QEMU has for them.
const FEATURES: [(&str, u64); 3] = [
    ("packed", feature::RING_PACKED),
    ("event_idx", feature::EVENT_IDX),
    ("indirect", feature::INDIRECT),
];

/// A Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// Its absolute path.
    pub path: PathBuf,
    /// The users that the file system lets connect to it.
    pub access: Access,
    /// Whether this side polls rings before it sleeps.
    pub poll: Poll,
    /// Whether several clients are served at a time; they must coordinate their writes.
    pub is_shared: bool,
    /// The features that are not offered to clients: a mask of bits.
    pub withheld: u64,
    /// Maximum wait of a client for the next server, in seconds; 0: requests end with an error.
    pub reconnect: Option<u32>,
}

/// The default of a client.
pub const RECONNECT_SECONDS: u32 = 30;
/// One hour.
const RECONNECT_SECONDS_MAX: u32 = 3600;

impl Uri {
    /// A socket for this user only.
    pub fn new(path: impl Into<PathBuf>, poll: Poll) -> Uri {
        let (path, access) = (path.into(), Access::default());
        Uri { path, access, poll, is_shared: false, withheld: 0, reconnect: None }
    }

    /// Refuses the options of clients.
    pub fn for_server(self) -> Result<Uri> {
        match self.reconnect {
            None => Ok(self),
            Some(_) => {
                let text = self.to_string();
                let message = format!("export {text:?} has reconnect=, which is for clients only");
                Err(Error::new(Kind::Invalid, message))
            }
        }
    }
}

impl FromStr for Uri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Uri> {
        let wrong = |why| Error::new(Kind::Invalid, format!("export {text:?} {why}"));
        let Some(rest) = text.strip_prefix(SCHEME) else {
            return Err(wrong("is not vhost-user:///PATH".into()));
        };
        let (path, words) = rest.split_once('?').unwrap_or((rest, ""));
        let mut options = Options::parse(words).map_err(wrong)?;
        let poll = match options.take("poll") {
            Some(word) => word.parse().map_err(|error| wrong(format!("has {error}")))?,
            None => Poll::default(),
        };
        let access = Access::parse(options.take("mode"), options.take("owner")).map_err(wrong)?;
        let reconnect = match options.take("reconnect") {
            Some(word) => Some(seconds(word).ok_or_else(|| {
                wrong(format!("has reconnect={word:?}, not 0 to {RECONNECT_SECONDS_MAX} seconds"))
            })?),
            None => None,
        };
        let is_shared = options.take_flag("shared");
        let mut withheld = 0;
        for (name, bit) in FEATURES {
            withheld |= match options.take(name) {
                Some("off") => bit,
                Some("on") | None => 0,
                Some(word) => return Err(wrong(format!("has {name}={word:?}, not on or off"))),
            };
        }
        let known = "vhost-user takes poll=, mode=, owner=, shared, packed=, event_idx= and \
                     indirect=, and for clients reconnect=";
        options.end(known).map_err(wrong)?;
        let path = socket::parse_path(path, SCHEME).map_err(wrong)?;
        Ok(Uri { path, access, poll, is_shared, withheld, reconnect })
    }
}

fn seconds(word: &str) -> Option<u32> {
    word.parse().ok().filter(|seconds| *seconds <= RECONNECT_SECONDS_MAX)
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let poll = (self.poll != Poll::default()).then(|| format!("poll={}", self.poll.name()));
        let reconnect = self.reconnect.map(|seconds| format!("reconnect={seconds}"));
        let shared = self.is_shared.then(|| "shared".to_owned());
        let is_withheld = |bit: u64| self.withheld & bit != 0;
        let withheld = FEATURES.iter().filter(|(_, bit)| is_withheld(*bit));
        let withheld = withheld.map(|(name, _)| format!("{name}=off"));
        let options = poll.into_iter().chain(self.access.options()).chain(shared).chain(withheld);
        let options: Vec<String> = options.chain(reconnect).collect();
        let mark = if options.is_empty() { "" } else { "?" };
        write!(f, "{SCHEME}{}{mark}{}", self.path.display(), options.join("&"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn uris_are_printed_as_they_are_read_and_wrong_ones_refused() {
        for rest in [
            "",
            "?poll=never",
            "?poll=always&mode=0660&owner=root:kvm",
            "?shared",
            "?packed=off",
            "?shared&packed=off&event_idx=off&indirect=off",
        ] {
            let text = format!("vhost-user:///run/udm/a b.sock{rest}");
            assert_eq!(text.parse::<Uri>().unwrap().for_server().unwrap().to_string(), text);
        }
        for seconds in [0, 30, 3600] {
            let text = format!("vhost-user:///a?poll=never&reconnect={seconds}");
            let uri = text.parse::<Uri>().unwrap();
            assert_eq!((uri.to_string(), uri.reconnect), (text, Some(seconds)));
            let error = uri.for_server().unwrap_err().to_string();
            assert!(error.contains("reconnect=, which is for clients"), "{error}");
        }
        let auto = "vhost-user:///a?poll=auto".parse::<Uri>().unwrap();
        assert_eq!((auto.to_string(), auto.poll), ("vhost-user:///a".into(), Poll::Auto));
        for (text, word) in [
            ("vhost-user://x", "absolute path of a socket after vhost-user://"),
            ("vhost-user:///", "absolute path"),
            ("vhost-user:///a?b", "has the unknown option"),
            ("vhost-user:///a?poll=", "auto, never or always"),
            ("vhost-user:///a?poll=auto&x=1", "has the unknown option \"x=1\""),
            ("vhost-user:///a?poll=auto?poll=auto", "auto, never or always"),
            ("vhost-user:///a?poll=auto&poll=auto", "twice"),
            ("vhost-user:///a?mode=rw", "mode="),
            ("vhost-user:///a?reconnect=3601", "reconnect=\"3601\", not 0 to 3600 seconds"),
            ("vhost-user:///a?reconnect=", "not 0 to 3600"),
            ("vhost-user:///a?shared=yes", "shared"),
            ("vhost-user:///a?packed=no", "packed=\"no\", not on or off"),
            ("vhost-user:///a?event_idx", "event_idx"),
            ("vhost:///a", "is not vhost-user"),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
