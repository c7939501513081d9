//! Counts of a server's clients, shared by all of their threads.

use udm::sync::{Arc, Mutex, lock};

use super::poll::Spent;
use super::proto::Violation;

/// Counts of a server's clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clients {
    /// Connected now. A client that hung up does not count, even while its requests are in flight.
    pub current: u64,
    /// Accepted since the start.
    pub accepted: u64,
    /// Refused, or closed for a new client.
    pub refused: u64,
    /// Disconnected because they broke the protocol.
    pub violations: u64,
    /// Rings that are not served any more because of an error in them.
    pub failed_rings: u64,
    /// The last violation of the protocol or of a ring.
    pub last_violation: Option<String>,
}

/// The shared counts.
#[derive(Debug, Default)]
pub struct Counts {
    clients: Mutex<Clients>,
    /// Time spent polling rings.
    pub polled: Arc<Spent>,
}

impl Counts {
    /// Returns the current counts.
    pub fn get(&self) -> Clients {
        lock(&self.clients).clone()
    }

    /// Counts a new client. Returns its number.
    pub fn has_come(&self) -> u64 {
        let mut clients = lock(&self.clients);
        clients.accepted += 1;
        clients.current += 1;
        clients.accepted
    }

    /// Counts a disconnection, and the violation that caused it, if any.
    pub fn has_gone(&self, violation: Option<&Violation>) {
        let mut clients = lock(&self.clients);
        clients.current -= 1;
        if let Some(violation) = violation {
            clients.violations += 1;
            clients.last_violation = Some(violation.to_string());
        }
    }

    /// Counts a client that was not served.
    pub fn was_refused(&self) {
        lock(&self.clients).refused += 1;
    }

    /// Counts a failed ring.
    pub fn ring_is_broken(&self, violation: &Violation) {
        let mut clients = lock(&self.clients);
        clients.failed_rings += 1;
        clients.last_violation = Some(violation.to_string());
    }
}
