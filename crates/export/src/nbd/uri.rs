//! Where an NBD server listens, as users write it: `nbd+unix:///PATH` or `nbd://ADDR:PORT`.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use udm::error::{Error, Kind, Result};

use crate::socket;

/// The port that is NBD's by assignment.
const DEFAULT_PORT: u16 = 10809;

/// An address to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uri {
    /// A Unix socket at an absolute path.
    Unix(PathBuf),
    /// A TCP port; 0 lets the kernel choose.
    Tcp(SocketAddr),
}

impl Uri {
    /// The URI that NBD clients (libnbd, fio, QEMU) take.
    pub fn for_clients(&self) -> String {
        match self {
            Uri::Unix(path) => format!("nbd+unix:///?socket={}", path.display()),
            Uri::Tcp(address) => format!("nbd://{address}"),
        }
    }

    fn parse_unix(text: &str) -> std::result::Result<Uri, String> {
        // Clients write `nbd+unix:///?socket=PATH`; take that as well.
        let path = match text.strip_prefix("/?socket=").or_else(|| text.strip_prefix("?socket=")) {
            Some(path) => path,
            None => text,
        };
        socket::parse_path(path, "nbd+unix://").map(Uri::Unix)
    }

    fn parse_tcp(text: &str) -> std::result::Result<Uri, String> {
        let text = text.strip_suffix('/').unwrap_or(text);
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(Uri::Tcp(address));
        }
        let bare_v6 = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        let host = match bare_v6 {
            Some(text) => text.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
            None => text.parse::<IpAddr>().ok().filter(IpAddr::is_ipv4),
        };
        match host {
            Some(host) => Ok(Uri::Tcp(SocketAddr::new(host, DEFAULT_PORT))),
            None => Err("needs an address and a port, as in nbd://127.0.0.1:10809 or \
                nbd://[::1]:10809 (nbd://0.0.0.0:10809 listens everywhere)"
                .into()),
        }
    }
}

impl FromStr for Uri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Uri> {
        let parsed = if let Some(rest) = text.strip_prefix("nbd+unix://") {
            Uri::parse_unix(rest)
        } else if let Some(rest) = text.strip_prefix("nbd://") {
            Uri::parse_tcp(rest)
        } else {
            Err("is neither nbd+unix:///PATH nor nbd://ADDRESS:PORT nor vhost-user:///PATH".into())
        };
        parsed.map_err(|why| Error::new(Kind::Invalid, format!("export {text:?} {why}")))
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Uri::Unix(path) => write!(f, "nbd+unix://{}", path.display()),
            Uri::Tcp(address) => write!(f, "nbd://{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn uris_are_printed_as_they_are_read() {
        for text in ["nbd+unix:///run/udm/a.sock", "nbd://127.0.0.1:10809", "nbd://[::1]:7"] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        for (text, canonical) in [
            ("nbd+unix:///?socket=/tmp/a b", "nbd+unix:///tmp/a b"),
            ("nbd://0.0.0.0", "nbd://0.0.0.0:10809"),
            ("nbd://[::]/", "nbd://[::]:10809"),
            ("nbd://10.0.0.1:0/", "nbd://10.0.0.1:0"),
        ] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), canonical);
        }
    }

    #[test]
    fn clients_get_the_form_they_know() {
        let uri: Uri = "nbd+unix:///run/a".parse().unwrap();
        assert_eq!(uri.for_clients(), "nbd+unix:///?socket=/run/a");
        assert_eq!(uri.for_clients().parse::<Uri>().unwrap(), uri);
    }

    #[test]
    fn wrong_uris_are_refused_with_words() {
        for (text, word) in [
            ("", "neither"),
            ("vhost-user:///x", "neither"),
            ("nbd+unix://x", "absolute path"),
            ("nbd+unix:///", "absolute path"),
            ("nbd+unix:///a?b=c", "nothing after"),
            ("nbd://", "needs an address"),
            ("nbd://:10809", "needs an address"),
            ("nbd://1.2.3.4:99999", "needs an address"),
            ("nbd://::1:5", "needs an address"),
        ] {
            let error = text.parse::<Uri>().unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
        let long = format!("nbd+unix:///{}", "x".repeat(200));
        assert!(long.parse::<Uri>().unwrap_err().to_string().contains("201 bytes"));
    }
}
