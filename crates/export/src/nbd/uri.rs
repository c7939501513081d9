//! The address of an NBD server, as users write it:
//!
//! | form | options after `?`, joined by `&` |
//! |---|---|
//! | `nbd+unix:///PATH`, `nbd+unix:///NAME?socket=PATH` | `mode=`, `owner=`, `poll=`, `readonly` |
//! | `nbd://ADDR:PORT`, `nbd://ADDR:PORT/NAME` | `insecure`, `poll=`, `readonly` |
//! | `nbds+unix:///PATH`, `nbds+unix:///NAME?socket=PATH` | `tls=`, `clients=`, and those above |
//! | `nbds://ADDR:PORT`, `nbds://ADDR:PORT/NAME` | `tls=`, `clients=`, `poll=`, `readonly` |
//!
//! The schemes are those of NBD's URI specification; the options are udm's. Exports with a NAME can
//! share their address.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use udm::error::{Error, Kind, Result};

use crate::options::Options;
use crate::socket::{self, Access};

/// The common prefix of its schemes.
pub const SCHEME: &str = "nbd";
/// The longest name of an export, equal to a device's.
pub const NAME_BYTES_MAX: usize = 80;
/// NBD's assigned port.
const DEFAULT_PORT: u16 = 10809;

/// An address to listen at, and the clients that may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// The address.
    pub place: Place,
    /// TLS, if clients must encrypt: how both sides authenticate.
    pub tls: Option<Tls>,
    /// The export's name. Without one, the export has the device's name and does not share the
    /// address.
    pub name: Option<String>,
    /// Whether the thread briefly polls the socket of a fast client before it sleeps.
    pub is_polled: bool,
    /// Whether clients may only read.
    pub is_read_only: bool,
}

/// An address to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A Unix socket at an absolute path, and the users who may connect to it.
    Unix(PathBuf, Access),
    /// A TCP port; 0 lets the kernel choose.
    Tcp {
        /// IP address and port.
        address: SocketAddr,
        /// The user accepts that the network can read and change all data.
        is_insecure: bool,
    },
}

/// TLS options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The folder with `server-cert.pem`, `server-key.pem` and `ca-cert.pem`, the file names of
    /// nbdkit, libnbd and QEMU.
    pub folder: PathBuf,
    /// Whether clients without a certificate of `ca-cert.pem` are also accepted.
    pub takes_any_client: bool,
}

impl Uri {
    /// A Unix socket for this user only.
    pub fn unix(path: impl Into<PathBuf>) -> Uri {
        let place = Place::Unix(path.into(), Access::default());
        Uri { place, tls: None, name: None, is_polled: true, is_read_only: false }
    }

    fn scheme(&self) -> &'static str {
        match (&self.place, &self.tls) {
            (Place::Unix(..), None) => "nbd+unix://",
            (Place::Unix(..), Some(_)) => "nbds+unix://",
            (Place::Tcp { .. }, None) => "nbd://",
            (Place::Tcp { .. }, Some(_)) => "nbds://",
        }
    }

    /// Returns the URI in the form of NBD clients (libnbd, fio, QEMU).
    pub fn for_clients(&self) -> String {
        let scheme = self.scheme();
        let name = self.name.as_deref().unwrap_or_default();
        match &self.place {
            Place::Unix(path, _) => format!("{scheme}/{name}?socket={}", path.display()),
            Place::Tcp { address, .. } if name.is_empty() => format!("{scheme}{address}"),
            Place::Tcp { address, .. } => format!("{scheme}{address}/{name}"),
        }
    }

    /// Returns the URI without its options.
    pub fn bare(&self) -> String {
        match &self.place {
            Place::Unix(path, _) if self.name.is_none() => {
                format!("{}{}", self.scheme(), path.display())
            }
            _ => self.for_clients(),
        }
    }

    /// Parses the part after the scheme.
    fn parse(text: &str, is_unix: bool, is_tls: bool) -> std::result::Result<Uri, String> {
        // Clients write `nbd+unix:///NAME?socket=PATH`.
        let of_client = text.split_once("?socket=").filter(|_| is_unix);
        let (place, name, words) = match (of_client, is_unix) {
            (Some((name, rest)), _) => {
                let (place, words) = rest.split_once('&').unwrap_or((rest, ""));
                (place, name.strip_prefix('/').unwrap_or(name), words)
            }
            (None, true) => {
                let (place, words) = text.split_once('?').unwrap_or((text, ""));
                (place, "", words)
            }
            (None, false) => {
                let (place, words) = text.split_once('?').unwrap_or((text, ""));
                let (place, name) = place.split_once('/').unwrap_or((place, ""));
                (place, name, words)
            }
        };
        let name = if name.is_empty() { None } else { Some(parse_name(name)?) };
        let mut options = Options::parse(words)?;
        let place = if is_unix {
            let access = Access::parse(options.take("mode"), options.take("owner"))?;
            Place::Unix(socket::parse_path(place, "nbd+unix://")?, access)
        } else {
            let is_insecure = !is_tls && options.take_flag("insecure");
            Place::Tcp { address: parse_tcp(place)?, is_insecure }
        };
        let tls = if is_tls { Some(parse_tls(&mut options)?) } else { None };
        let is_polled = parse_poll(options.take("poll"))?;
        let is_read_only = options.take_flag("readonly");
        options.end(
            "nbds takes tls= and clients=, a socket's path takes mode= and owner=, nbd:// takes \
             insecure, and all take poll= and readonly",
        )?;
        let uri = Uri { place, tls, name, is_polled, is_read_only };
        match &uri.place {
            Place::Tcp { address, is_insecure: false }
                if uri.tls.is_none() && !address.ip().to_canonical().is_loopback() =>
            {
                Err("would let anyone on the network read and write the device, unencrypted: use \
                    nbds://ADDRESS:PORT?tls=FOLDER, or add ?insecure if the network is safe"
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

fn parse_poll(word: Option<&str>) -> std::result::Result<bool, String> {
    match word {
        None | Some("auto") => Ok(true),
        Some("never") => Ok(false),
        Some(other) => Err(format!("has poll={other:?}, which is neither auto nor never")),
    }
}

/// Parses an export's name, which becomes a part of file names and addresses.
fn parse_name(text: &str) -> std::result::Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "+-.:=@_".contains(c);
    if text.len() > NAME_BYTES_MAX {
        let bytes = text.len();
        return Err(format!(
            "names an export with {bytes} bytes; at most {NAME_BYTES_MAX} are possible"
        ));
    }
    match text.chars().find(|&c| !is_plain(c)) {
        None => Ok(text.to_owned()),
        Some(bad) => {
            Err(format!("names an export with {bad:?}; letters, digits and +-.:=@_ can be used"))
        }
    }
}

fn parse_tcp(text: &str) -> std::result::Result<SocketAddr, String> {
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
                Err("is neither nbd+unix:///PATH nor nbd://ADDRESS:PORT, nor one of them with nbds"
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
        match &self.place {
            Place::Unix(_, access) => options.extend(access.options()),
            Place::Tcp { is_insecure, .. } => {
                options.extend(is_insecure.then(|| "insecure".to_owned()));
            }
        }
        options.extend((!self.is_polled).then(|| "poll=never".to_owned()));
        options.extend(self.is_read_only.then(|| "readonly".to_owned()));
        let bare = self.bare();
        write!(f, "{bare}")?;
        if !options.is_empty() {
            let mark = if bare.contains("?socket=") { '&' } else { '?' };
            write!(f, "{mark}{}", options.join("&"))?;
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
            "nbd+unix:///a?readonly",
            "nbd+unix:///a?mode=0660&poll=never&readonly",
            "nbd://127.0.0.1:10809/vol-1.x?poll=never",
            "nbds://0.0.0.0:10809?tls=/etc/udm/pki&poll=never",
            "nbd+unix:///vol?socket=/run/a",
            "nbd+unix:///vol?socket=/run/a&mode=0660&readonly",
            "nbd://127.0.0.1:10809/vol-1.x",
            "nbds://[::1]:7/vol?tls=/pki&readonly",
        ] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        for (text, canonical) in [
            ("nbd+unix:///?socket=/tmp/a b", "nbd+unix:///tmp/a b"),
            ("nbd+unix:///a?poll=auto", "nbd+unix:///a"),
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
        let uri: Uri = "nbd+unix:///vol?socket=/run/a&readonly".parse().unwrap();
        assert_eq!(uri.for_clients(), "nbd+unix:///vol?socket=/run/a");
        assert_eq!((uri.name.as_deref(), uri.is_read_only), (Some("vol"), true));
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
            ("nbd+unix:///a/b?socket=/x", "names an export with '/'"),
            ("nbd+unix:///a?socket=", "absolute path"),
            ("nbd+unix:///a?socket=/x&socket=/y", "has the unknown option"),
            ("nbd://127.0.0.1:1/a/b", "names an export with '/'"),
            ("nbd://127.0.0.1:1/a b", "names an export with ' '"),
            ("nbd://0.0.0.0:1/a", "?insecure"),
            ("nbd+unix:///a?b=c", "has the unknown option"),
            ("nbd+unix:///a?insecure", "has the unknown option"),
            ("nbd+unix:///a?poll", "has the unknown option"),
            ("nbd+unix:///a?poll=always", "neither auto nor never"),
            ("nbd://127.0.0.1:1?poll=never&poll=auto", "twice"),
            ("nbd+unix:///a?tls=/pki", "has the unknown option"),
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
            ("nbds://127.0.0.1:1?tls=/pki&insecure", "has the unknown option"),
            ("nbds://127.0.0.1:1?tls=/pki&clients=all", "neither verified nor any"),
        ] {
            let error = text.parse::<Uri>().unwrap_err();
            assert!(error.to_string().contains(word), "{text}: {error}");
        }
        let long = format!("nbd://127.0.0.1:1/{}", "x".repeat(81));
        assert!(long.parse::<Uri>().unwrap_err().to_string().contains("with 81 bytes"));
        let long = format!("nbd+unix:///{}", "x".repeat(200));
        assert!(long.parse::<Uri>().unwrap_err().to_string().contains("201 bytes"));
    }
}
