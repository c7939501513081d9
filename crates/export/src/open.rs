//! Opening an export of any kind, and the limits of all kinds.

use std::path::Path;

use udm::base::limits::Limit;
use udm::device::Device;
use udm::error::Result;
use udm::sync::Arc;

use crate::export::Export;
use crate::uri::Uri;
use crate::{nbd, ublk, vhost};

/// Opens an export of `device` at `uri`, which accepts no clients before [`Export::begin`]. If an
/// export outlives its server, a new server of the same `home` and device name takes it over.
pub fn open(device: &Arc<Device>, uri: &Uri, home: &str) -> Result<Box<dyn Export>> {
    Ok(match uri {
        Uri::Nbd(uri) => Box::new(nbd::Server::open_at(device, uri, Path::new(home))?),
        Uri::Ublk(uri) => Box::new(ublk::Server::open(device, uri, home)?),
        Uri::Vhost(uri) => Box::new(vhost::Server::open(device, uri)?),
    })
}

/// Returns the stated maxima of all exports.
pub fn limits() -> Vec<Limit> {
    nbd::limits().into_iter().chain(vhost::limits()).chain(ublk::limits()).collect()
}
