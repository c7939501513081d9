//! The common interface of all exports, for any client protocol.

use std::fmt::Debug;

use udm::error::Result;
use udm::target::Fact;

use crate::uri::Uri;

/// An export: clients of a mapped device connect to it. Dropping it closes it.
pub trait Export: Debug + Send {
    /// Its address as it was opened, with the parts that the system has filled in.
    fn uri(&self) -> Uri;

    /// Lets clients in. All exports of a device are opened before the first begins: if one cannot
    /// be opened, clients of the others were never connected and need not be disconnected.
    fn begin(&mut self) -> Result<()>;

    /// Number of connected clients.
    fn clients(&self) -> u64;

    /// Facts about its clients. Every export has two facts by these names: `violations`, the number
    /// of clients that were disconnected because they broke the protocol, and `last_violation`, the
    /// reason for the last disconnection.
    fn facts(&self) -> Vec<Fact>;

    /// Notes for the user who opens the export: one sentence each.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Limits the number of clients at a time to `max` from now on.
    fn set_clients_max(&self, max: usize);

    /// The device has a new table, and maybe a new size.
    fn device_has_changed(&self) -> Result<()> {
        Ok(())
    }

    /// Accepts no more clients, answers the requests in flight, and disconnects the clients.
    fn stop(self: Box<Self>);
}
