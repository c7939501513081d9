//! What all doors have in common, whatever protocol their clients speak.

use std::fmt::Debug;
use std::path::Path;

use udm::device::Device;
use udm::error::Result;
use udm::limits::Limit;
use udm::sync::Arc;
use udm::target::Fact;

use crate::uri::Uri;
use crate::{nbd, ublk, vhost};

/// A way in for clients of a mapped device. Dropping it closes it.
pub trait Door: Debug + Send {
    /// Its address: as it was opened, with the parts filled in that were left to the system.
    fn uri(&self) -> Uri;

    /// How many clients use it now.
    fn clients(&self) -> u64;

    /// Facts about its clients. Every door has two facts by these names: `violations`, how many
    /// clients were disconnected because they broke the protocol, and `last_violation`, what the
    /// last of those did.
    fn facts(&self) -> Vec<Fact>;

    /// Serves at most `max` clients at a time from now on.
    fn set_clients_max(&self, max: usize);

    /// The device has another table: its size may be another.
    fn device_has_changed(&self) -> Result<()> {
        Ok(())
    }

    /// Accepts no more clients, answers the requests in flight, disconnects the clients.
    fn stop(self: Box<Self>);
}

/// Opens a door to `device` at `uri`. A door that outlives a server that died is taken over by a
/// server of the same `home` with a device of the same name.
pub fn open(device: &Arc<Device>, uri: &Uri, home: &str) -> Result<Box<dyn Door>> {
    Ok(match uri {
        Uri::Nbd(uri) => Box::new(nbd::Server::start_at(device, uri, Path::new(home))?),
        Uri::Ublk(uri) => Box::new(ublk::Server::start(device, uri, home)?),
        Uri::Vhost(uri) => Box::new(vhost::Server::start(device, uri)?),
    })
}

/// The stated maxima of all doors.
pub fn limits() -> Vec<Limit> {
    nbd::limits().into_iter().chain(vhost::limits()).chain(ublk::limits()).collect()
}
