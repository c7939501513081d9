//! Where an NBD server listens, as users write it:
//!
//! | form | options after `?`, joined by `&` |
//! |---|---|
//! | `nbd+unix:///PATH` | `mode=`, `owner=` |
//! | `nbd://ADDR:PORT` | `insecure` |
//! | `nbds+unix:///PATH` | `tls=`, `clients=`, `mode=`, `owner=` |
//! | `nbds://ADDR:PORT` | `tls=`, `clients=` |
//!
//! The schemes are those of NBD's URI specification; the options are udm's.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use udm::error::{Error, Kind, Result};

use crate::options::Options;
use crate::socket::{self, Access};

/// The port that is NBD's by assignment.
const DEFAULT_PORT: u16 = 10809;

/// An address to listen at, and who may come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// Where.
    pub place: Place,
    /// Clients must encrypt, and how the two sides prove who they are.
    pub tls: Option<Tls>,
}

/// An address to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A Unix socket at an absolute path, and whom the file system lets connect to it.
    Unix(PathBuf, Access),
    /// A TCP port; 0 lets the kernel choose.
    Tcp {
        /// Where.
        address: SocketAddr,
        /// The user knows that the network sees and changes everything.
        is_insecure: bool,
    },
}

/// How TLS is spoken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The folder with `server-cert.pem`, `server-key.pem` and `ca-cert.pem`: the names that
    /// nbdkit, libnbd and QEMU have for them.
    pub folder: PathBuf,
    /// Whether clients without a certificate of `ca-cert.pem` may come, too.
    pub takes_any_client: bool,
}

impl Uri {
    /// A Unix socket for this user alone.
    pub fn unix(path: impl Into<PathBuf>) -> Uri {
        Uri { place: Place::Unix(path.into(), Access::default()), tls: None }
    }

    fn scheme(&self) -> &'static str {
        match (&self.place, &self.tls) {
            (Place::Unix(..), None) => "nbd+unix://",
            (Place::Unix(..), Some(_)) => "nbds+unix://",
            (Place::Tcp { .. }, None) => "nbd://",
            (Place::Tcp { .. }, Some(_)) => "nbds://",
        }
    }

    /// The URI that NBD clients (libnbd, fio, QEMU) take.
    pub fn for_clients(&self) -> String {
        let scheme = self.scheme();
        match &self.place {
            Place::Unix(path, _) => format!("{scheme}/?socket={}", path.display()),
            Place::Tcp { address, .. } => format!("{scheme}{address}"),
        }
    }

    /// Parses what follows the scheme.
    fn parse(text: &str, is_unix: bool, is_tls: bool) -> std::result::Result<Uri, String> {
        // Clients write `nbd+unix:///?socket=PATH`; take that as well.
        let of_client = text.strip_prefix("/?socket=").or_else(|| text.strip_prefix("?socket="));
        let (place, words) = match of_client.filter(|_| is_unix) {
            Some(rest) => rest.split_once('&').unwrap_or((rest, "")),
            None => text.split_once('?').unwrap_or((text, "")),
        };
        let mut options = Options::parse(words)?;
        let place = if is_unix {
            let access = Access::parse(options.take("mode"), options.take("owner"))?;
            Place::Unix(socket::parse_path(place, "nbd+unix://")?, access)
        } else {
            let is_insecure = !is_tls && options.take_flag("insecure");
            Place::Tcp { address: parse_tcp(place)?, is_insecure }
        };
        let tls = if is_tls { Some(parse_tls(&mut options)?) } else { None };
        options.end(
            "nbds takes tls= and clients=, a socket's path takes mode= and owner=, nbd:// takes \
             insecure",
        )?;
        let uri = Uri { place, tls };
        match &uri.place {
            Place::Tcp { address, is_insecure: false }
                if uri.tls.is_none() && !address.ip().to_canonical().is_loopback() =>
            {
                Err("would let everybody on the network read and write the device, unencrypted: \
                    use nbds://ADDRESS:PORT?tls=FOLDER, or add ?insecure if the network is safe"
                    .into())
            }
            _ => Ok(uri),
        }
    }
}

fn parse_tls(options: &mut Options<'_>) -> std::result::Result<Tls, String> {
    let folder = options.take("tls").filter(|folder| folder.starts_with('/')).ok_or(
        "needs ?tls=FOLDER, an absolute path: the folder of server-cert.pem, server-key.pem and \
         ca-cert.pem",
    )?;
    let takes_any_client = match options.take("clients") {
        None | Some("verified") => false,
        Some("any") => true,
        Some(other) => {
            return Err(format!("has clients={other:?}, which is neither verified nor any"));
        }
    };
    Ok(Tls { folder: folder.into(), takes_any_client })
}

fn parse_tcp(text: &str) -> std::result::Result<SocketAddr, String> {
    let text = text.strip_suffix('/').unwrap_or(text);
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(address);
    }
    let bare_v6 = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let host = match bare_v6 {
        Some(text) => text.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        None => text.parse::<IpAddr>().ok().filter(IpAddr::is_ipv4),
    };
    host.map(|host| SocketAddr::new(host, DEFAULT_PORT)).ok_or_else(|| {
        "needs an address and a port, as in nbd://127.0.0.1:10809 or nbd://[::1]:10809 \
         (0.0.0.0 listens everywhere)"
            .into()
    })
}

impl FromStr for Uri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Uri> {
        let schemes = [
            ("nbd+unix://", true, false),
            ("nbds+unix://", true, true),
            ("nbd://", false, false),
            ("nbds://", false, true),
        ];
        let parsed = schemes
            .into_iter()
            .find_map(|(scheme, is_unix, is_tls)| {
                Some(Uri::parse(text.strip_prefix(scheme)?, is_unix, is_tls))
            })
            .unwrap_or_else(|| {
                Err("is neither nbd+unix:///PATH nor nbd://ADDRESS:PORT, nor one of them with \
                    nbds, nor vhost-user:///PATH"
                    .into())
            });
        parsed.map_err(|why| Error::new(Kind::Invalid, format!("export {text:?} {why}")))
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut options = Vec::new();
        if let Some(Tls { folder, takes_any_client }) = &self.tls {
            options.push(format!("tls={}", folder.display()));
            options.extend(takes_any_client.then(|| "clients=any".to_owned()));
        }
        write!(f, "{}", self.scheme())?;
        match &self.place {
            Place::Unix(path, access) => {
                write!(f, "{}", path.display())?;
                options.extend(access.options());
            }
            Place::Tcp { address, is_insecure } => {
                write!(f, "{address}")?;
                options.extend(is_insecure.then(|| "insecure".to_owned()));
            }
        }
        if !options.is_empty() {
            write!(f, "?{}", options.join("&"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn uris_are_printed_as_they_are_read() {
        for text in [
            "nbd+unix:///run/udm/a.sock",
            "nbd+unix:///run/udm/a.sock?mode=0660&owner=root:disk",
            "nbd://127.0.0.1:10809",
            "nbd://[::1]:7",
            "nbd://10.0.0.1:10809?insecure",
            "nbds://0.0.0.0:10809?tls=/etc/udm/pki",
            "nbds://[::1]:7?tls=/etc/udm/pki&clients=any",
            "nbds+unix:///run/a?tls=/pki&mode=0600",
        ] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        for (text, canonical) in [
            ("nbd+unix:///?socket=/tmp/a b", "nbd+unix:///tmp/a b"),
            ("nbd+unix:///?socket=/tmp/a&mode=600", "nbd+unix:///tmp/a?mode=0600"),
            ("nbd://0.0.0.0?insecure", "nbd://0.0.0.0:10809?insecure"),
            ("nbd://[::1]/", "nbd://[::1]:10809"),
            ("nbd://[::ffff:127.0.0.1]:1", "nbd://[::ffff:127.0.0.1]:1"),
            ("nbd://10.0.0.1:0/?insecure", "nbd://10.0.0.1:0?insecure"),
            ("nbds://10.0.0.1?clients=verified&tls=/pki", "nbds://10.0.0.1:10809?tls=/pki"),
        ] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), canonical);
        }
    }

    #[test]
    fn clients_get_the_form_they_know() {
        let uri: Uri = "nbd+unix:///run/a".parse().unwrap();
        assert_eq!(uri.for_clients(), "nbd+unix:///?socket=/run/a");
        assert_eq!(uri.for_clients().parse::<Uri>().unwrap(), uri);
        let uri: Uri = "nbds://127.0.0.1:7?tls=/pki".parse().unwrap();
        assert_eq!(uri.for_clients(), "nbds://127.0.0.1:7");
    }

    #[test]
    fn wrong_uris_are_refused_with_words() {
        for (text, word) in [
            ("", "neither"),
            ("vhost-user:///x", "neither"),
            ("nbd+unix://x", "absolute path"),
            ("nbd+unix:///", "absolute path"),
            ("nbd+unix:///a?b=c", "means nothing"),
            ("nbd+unix:///a?insecure", "means nothing"),
            ("nbd+unix:///a?tls=/pki", "means nothing"),
            ("nbd+unix:///a?mode=0999", "mode="),
            ("nbd+unix:///a?mode=01777", "mode="),
            ("nbd+unix:///a?mode=0600&mode=0666", "twice"),
            ("nbd+unix:///a?owner=", "owner="),
            ("nbd://", "needs an address"),
            ("nbd://:10809", "needs an address"),
            ("nbd://1.2.3.4:99999", "needs an address"),
            ("nbd://::1:5", "needs an address"),
            ("nbd://0.0.0.0:10809", "?insecure"),
            ("nbd://[::]", "?insecure"),
            ("nbd://192.168.0.1:1", "?insecure"),
            ("nbds://127.0.0.1:1", "needs ?tls=FOLDER"),
            ("nbds://127.0.0.1:1?tls=pki", "needs ?tls=FOLDER"),
            ("nbds://127.0.0.1:1?tls=/pki&insecure", "means nothing"),
            ("nbds://127.0.0.1:1?tls=/pki&clients=all", "neither verified nor any"),
        ] {
            let error = text.parse::<Uri>().unwrap_err();
            assert!(error.to_string().contains(word), "{text}: {error}");
        }
        let long = format!("nbd+unix:///{}", "x".repeat(200));
        assert!(long.parse::<Uri>().unwrap_err().to_string().contains("201 bytes"));
    }
}
