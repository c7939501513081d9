//! What all doors have in common, whatever their clients speak.

use std::fmt::Debug;

use udm::device::Device;
use udm::error::Result;
use udm::limits::Limit;
use udm::sync::Arc;
use udm::target::Fact;

use crate::nbd;
use crate::uri::Uri;

/// A way in for clients of a mapped device. Dropping it closes it.
pub trait Door: Debug + Send {
    /// Where it is: what it was opened with, with what was left to the system to choose.
    fn uri(&self) -> Uri;

    /// How many clients use it now.
    fn clients(&self) -> u64;

    /// What its clients were and did. Two facts every door has by these names: `violations`, how
    /// many clients were disconnected because they broke the protocol, and `last_violation`, what
    /// the last of those did.
    fn facts(&self) -> Vec<Fact>;

    /// Serves at most `max` clients at a time from now on.
    fn set_clients_max(&self, max: usize);

    /// Lets nobody in any more, answers the requests in flight, sends the clients away.
    fn stop(self: Box<Self>);
}

/// Opens a way into `device` at `uri`.
pub fn open(device: &Arc<Device>, uri: &Uri) -> Result<Box<dyn Door>> {
    Ok(match uri {
        Uri::Nbd(uri) => Box::new(nbd::Server::start(device, uri)?),
    })
}

/// The stated maxima of all doors.
pub fn limits() -> Vec<Limit> {
    nbd::limits().into()
}
