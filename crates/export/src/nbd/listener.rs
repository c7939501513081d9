//! The listening socket of an NBD server: creation and options.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use udm::error::{Error, Result};

use super::uri::{Place, Uri};
use crate::activation;
use crate::socket::{self, SocketFile};

/// Binds the address of `uri`. Returns the socket, the address with its actual port, and the file
/// to clean up. Clients cannot connect before [`begin`].
pub fn bind(uri: &Uri) -> Result<(OwnedFd, Uri, Option<SocketFile>)> {
    match &uri.place {
        Place::Unix(path, access) => {
            let (socket, file) = socket::bind_unix(path, access)?;
            Ok((socket, uri.clone(), file))
        }
        Place::Tcp { address, is_insecure } => {
            if let Some(socket) = activation::at_address(*address)? {
                return Ok((socket, uri.clone(), None));
            }
            let failed =
                |source: rustix::io::Errno| Error::from_io("listening at", uri, source.into());
            let socket = bind_tcp(*address).map_err(failed)?;
            let address = rustix::net::getsockname(&socket).map_err(failed)?;
            let address = SocketAddr::try_from(address).map_err(failed)?;
            let place = Place::Tcp { address, is_insecure: *is_insecure };
            Ok((socket, Uri { place, ..uri.clone() }, None))
        }
    }
}

fn bind_tcp(address: SocketAddr) -> std::result::Result<OwnedFd, rustix::io::Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Connections of a server that ended may keep the port for a minute.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

/// Lets clients connect.
pub fn begin(socket: impl AsFd, uri: &Uri) -> Result<()> {
    socket::begin_to_listen(socket, uri)
}

/// Sets options of a new connection. A failure costs speed, not correctness.
pub fn tune(connection: impl AsFd, uri: &Uri) {
    if let Place::Tcp { .. } = uri.place {
        let _ = sockopt::set_tcp_nodelay(&connection, true);
        let _ = sockopt::set_socket_keepalive(&connection, true);
    }
}
