//! Where an NBD server listens: made and tuned.

use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::sockopt;
use udm::error::{Error, Result};

use super::uri::{Place, Uri};
use crate::activation;
use crate::socket::{self, SocketFile};

/// Listens at `uri`. Returns the socket, the address with its actual port, and what to clean up.
pub fn listen(uri: &Uri) -> Result<(OwnedFd, Uri, Option<SocketFile>)> {
    match &uri.place {
        Place::Unix(path, access) => {
            let (socket, file) = socket::listen_unix(path, access)?;
            Ok((socket, uri.clone(), file))
        }
        Place::Tcp { address, is_insecure } => {
            if let Some(socket) = activation::at_address(*address)? {
                return Ok((socket, uri.clone(), None));
            }
            let failed = |source| Error::from_io("listening at", uri, source);
            let listener = TcpListener::bind(address).map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            let place = Place::Tcp { address, is_insecure: *is_insecure };
            Ok((listener.into(), Uri { place, ..uri.clone() }, None))
        }
    }
}

/// Sets options of a new connection. If that fails, it costs speed, not correctness.
pub fn tune(connection: impl AsFd, uri: &Uri) {
    if let Place::Tcp { .. } = uri.place {
        let _ = sockopt::set_tcp_nodelay(&connection, true);
        let _ = sockopt::set_socket_keepalive(&connection, true);
    }
}
