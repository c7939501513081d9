//! Counts of a server's clients, shared by all of their threads.

use udm::sync::{Arc, Mutex, lock};

use super::poll::Spent;
use super::proto::Violation;

/// Counts of a server's clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clients {
    /// Connected now.
    pub current: u64,
    /// Accepted since the start.
    pub accepted: u64,
    /// Turned away, or closed to make room.
    pub refused: u64,
    /// Disconnected because they broke the protocol.
    pub violations: u64,
    /// Rings that are not served any more because something was wrong with them.
    pub broken_rings: u64,
    /// What the last client did that broke the protocol or a ring.
    pub last_violation: Option<String>,
}

/// The same, shared.
#[derive(Debug, Default)]
pub struct Counts {
    clients: Mutex<Clients>,
    /// Time spent looking at rings.
    pub polled: Arc<Spent>,
}

impl Counts {
    /// What they are now.
    pub fn get(&self) -> Clients {
        lock(&self.clients).clone()
    }

    /// A client has come. Returns how many came before, and it.
    pub fn has_come(&self) -> u64 {
        let mut clients = lock(&self.clients);
        clients.accepted += 1;
        clients.current += 1;
        clients.accepted
    }

    /// A client has gone, because of what it did if there is a violation.
    pub fn has_gone(&self, violation: Option<&Violation>) {
        let mut clients = lock(&self.clients);
        clients.current -= 1;
        if let Some(violation) = violation {
            clients.violations += 1;
            clients.last_violation = Some(violation.to_string());
        }
    }

    /// A client was not served.
    pub fn was_refused(&self) {
        lock(&self.clients).refused += 1;
    }

    /// A ring is broken.
    pub fn ring_is_broken(&self, violation: &Violation) {
        let mut clients = lock(&self.clients);
        clients.broken_rings += 1;
        clients.last_violation = Some(violation.to_string());
    }
}
