//! The address of an export, as users write it. The scheme selects the kind of export.

use std::fmt;
use std::str::FromStr;

use udm::error::{Error, Kind, Result};

use crate::activation::Address;
use crate::nbd::uri as nbd;
use crate::ublk::uri as ublk;
use crate::vhost::uri as vhost;

/// All forms, for messages.
pub const FORMS: &str = "ublk:[NUMBER], nbd+unix:///PATH, nbd://ADDR:PORT[/NAME], \
    nbds://ADDR:PORT?tls=FOLDER, or vhost-user:///PATH[?poll=never]";

/// The address of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uri {
    /// `nbd+unix:///PATH`, `nbd://ADDR:PORT`, or one of them with `nbds`.
    Nbd(nbd::Uri),
    /// `ublk:`, or `ublk:NUMBER`.
    Ublk(ublk::Uri),
    /// `vhost-user:///PATH`.
    Vhost(vhost::Uri),
}

impl Uri {
    /// Whether `text` names this address: as it was opened, without its options, or as clients
    /// write it.
    pub fn is_at(&self, text: &str) -> bool {
        let own = self.to_string();
        let bare = match self {
            Uri::Nbd(uri) => uri.bare(),
            _ => own.split('?').next().unwrap_or(&own).to_owned(),
        };
        text == own || text == bare || text == self.for_clients()
    }

    /// The address of its socket, if it listens at one.
    pub fn socket(&self) -> Option<Address> {
        match self {
            Uri::Nbd(uri) => Some(match &uri.place {
                nbd::Place::Unix(path, _) => Address::Unix(path.clone()),
                nbd::Place::Tcp { address, .. } => Address::Tcp(*address),
            }),
            Uri::Ublk(_) => None,
            Uri::Vhost(uri) => Some(Address::Unix(uri.path.clone())),
        }
    }

    /// The place that no other export can have at the same time: a socket, the name of an NBD
    /// export at an address that several share, or a disk. `None` if the kernel chooses a free one.
    pub fn place(&self) -> Option<String> {
        let is_shared = matches!(self, Uri::Nbd(uri) if uri.name.is_some());
        match (self, self.socket()) {
            (Uri::Ublk(uri), _) => uri.disk(),
            (_, Some(Address::Tcp(address))) if address.port() == 0 => None,
            _ if is_shared => Some(self.for_clients()),
            (_, Some(Address::Tcp(address))) => Some(address.to_string()),
            (_, Some(Address::Unix(path))) => Some(path.display().to_string()),
            (_, None) => None,
        }
    }

    /// Whether an export that was opened at this address may have the address `open`: the kernel
    /// replaces port 0, and chooses the number of `ublk:`.
    pub fn may_become(&self, open: &Uri) -> bool {
        let mut chosen = self.clone();
        match (&mut chosen, open) {
            (Uri::Nbd(uri), Uri::Nbd(open)) => {
                if let (nbd::Place::Tcp { address, .. }, nbd::Place::Tcp { address: actual, .. }) =
                    (&mut uri.place, &open.place)
                    && address.port() == 0
                {
                    address.set_port(actual.port());
                }
            }
            (Uri::Ublk(uri), Uri::Ublk(open)) => uri.number = uri.number.or(open.number),
            _ => {}
        }
        chosen == *open
    }

    /// Whether exports at the two addresses cannot be open at the same time.
    pub fn excludes(&self, other: &Uri) -> bool {
        let name = |uri: &Uri| match uri {
            Uri::Nbd(uri) => uri.name.clone(),
            _ => None,
        };
        if self.place().is_none() || other.place().is_none() {
            return false;
        }
        let (one, two) = (self.socket(), other.socket());
        match (one.is_some() && one == two, name(self), name(other)) {
            (true, Some(one), Some(two)) => one == two,
            (is_same, ..) => is_same || self.place() == other.place(),
        }
    }

    /// Returns the form of the address that clients accept.
    pub fn for_clients(&self) -> String {
        match self {
            Uri::Nbd(uri) => uri.for_clients(),
            Uri::Ublk(uri) => uri.disk().unwrap_or_else(|| uri.to_string()),
            Uri::Vhost(uri) => uri.to_string(),
        }
    }
}

impl FromStr for Uri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Uri> {
        if text.contains(char::is_control) {
            let message = format!("export {text:?} has a control character");
            return Err(Error::new(Kind::Invalid, message));
        }
        if text.starts_with(vhost::SCHEME) {
            return text.parse().and_then(vhost::Uri::for_server).map(Uri::Vhost);
        }
        if text.starts_with(ublk::SCHEME) {
            return text.parse().map(Uri::Ublk);
        }
        if text.starts_with(nbd::SCHEME) {
            return text.parse().map(Uri::Nbd);
        }
        Err(Error::new(Kind::Invalid, format!("export {text:?} is none of {FORMS}")))
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Uri::Nbd(uri) => uri.fmt(f),
            Uri::Ublk(uri) => uri.fmt(f),
            Uri::Vhost(uri) => uri.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_one_exports_whatever_its_options() {
        let place = |text: &str| text.parse::<Uri>().unwrap().place();
        for (one, other) in [
            ("nbd+unix:///run/a.sock", "vhost-user:///run/a.sock?poll=never"),
            ("nbd://127.0.0.1:10809", "nbd://127.0.0.1:10809?poll=never"),
            ("ublk:3", "ublk:3?queues=2"),
        ] {
            assert!(place(one).is_some() && place(one) == place(other), "{one} {other}");
        }
        assert_ne!(place("nbd://127.0.0.1:10809/a"), place("nbd://127.0.0.1:10809/b"));
        for free in ["ublk:", "ublk:?queues=2", "nbd://127.0.0.1:0"] {
            assert_eq!(place(free), None, "{free}");
        }
    }

    #[test]
    fn the_kernel_chooses_free_places_only() {
        let uri = |text: &str| text.parse::<Uri>().unwrap();
        for (given, open, is_it) in [
            ("ublk:", "ublk:3", true),
            ("ublk:4", "ublk:3", false),
            ("ublk:?queues=2", "ublk:3", false),
            ("nbd://127.0.0.1:0", "nbd://127.0.0.1:4711", true),
            ("nbd://127.0.0.1:0", "nbd://[::1]:4711", false),
            ("nbd://127.0.0.1:0/a", "nbd://127.0.0.1:4711/b", false),
            ("nbd+unix:///a", "nbd+unix:///?socket=/a", true),
            ("nbd+unix:///a", "nbd+unix:///a?readonly", false),
            ("nbd+unix:///a", "vhost-user:///a", false),
        ] {
            assert_eq!(uri(given).may_become(&uri(open)), is_it, "{given} {open}");
        }
    }

    #[test]
    fn exports_at_one_place_exclude_each_other() {
        let uri = |text: &str| text.parse::<Uri>().unwrap();
        for (one, other, exclude) in [
            ("nbd+unix:///a", "nbd+unix:///a?readonly", true),
            ("nbd+unix:///a", "vhost-user:///a", true),
            ("nbd+unix:///a", "nbd+unix:///b", false),
            ("nbd+unix:///a", "nbd+unix:///x?socket=/a", true),
            ("nbd+unix:///x?socket=/a", "nbd+unix:///x?socket=/a&readonly", true),
            ("nbd+unix:///x?socket=/a", "nbd+unix:///y?socket=/a", false),
            ("nbd://127.0.0.1:0", "nbd://127.0.0.1:0", false),
            ("ublk:3", "ublk:3?queues=2", true),
            ("ublk:", "ublk:3", false),
        ] {
            assert_eq!(uri(one).excludes(&uri(other)), exclude, "{one} {other}");
            assert_eq!(uri(other).excludes(&uri(one)), exclude, "{other} {one}");
        }
    }

    /// Errors are one line, and do not control a terminal.
    #[test]
    fn control_characters_are_refused_and_escaped() {
        for text in [
            "nbd+unix:///a\nb",
            "nbd+unix:///a?mode=\u{1b}[2J",
            "nbd://127.0.0.1:1/\u{9b}m",
            "ublk:\u{7}",
            "vhost-user:///a?poll=\r",
            "vhost-user:///a\0",
            "\u{1b}",
        ] {
            let said = text.parse::<Uri>().unwrap_err().to_string();
            assert!(!said.contains(char::is_control) && said.contains("a control character"));
        }
    }

    #[test]
    fn an_unknown_scheme_is_told_all_forms() {
        for text in ["foo:bar", "", "http://a", "/run/udm/vol.sock"] {
            let said = text.parse::<Uri>().unwrap_err().to_string();
            for scheme in ["ublk:", "nbd+unix://", "nbds://", "vhost-user://"] {
                assert!(said.contains(scheme), "{said}");
            }
        }
        assert!("nbd:a".parse::<Uri>().unwrap_err().to_string().contains("neither nbd+unix"));
    }
}
