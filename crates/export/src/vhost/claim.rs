//! Ownership of the rings. Two machines that write to one disk destroy its file system. So only one
//! client's rings are served at a time, unless the address has `?shared` or the device is
//! read-only.

use std::time::{Duration, Instant};

use udm::sync::{Arc, Condvar, Mutex, lock};

use super::proto::{Violation, wrong};

/// Maximum wait of a client for the previous owner, which may be disconnecting.
const PATIENCE: Duration = Duration::from_secs(1);
/// Interval of a waiting client's checks for the previous owner's end.
const LOOK: Duration = Duration::from_millis(100);

/// The owner of a socket's rings.
#[derive(Debug, Default)]
pub struct Ownership {
    owner: Mutex<Option<Owner>>,
    has_left: Condvar,
}

#[derive(Debug)]
struct Owner {
    client: u64,
    /// The owner has disconnected, and its last requests are ending in bounded time.
    is_leaving: bool,
}

/// A client's claim to the rings.
#[derive(Debug)]
pub struct Claim {
    ownership: Arc<Ownership>,
    client: u64,
}

impl Claim {
    /// Creates the claim of the client with this number.
    pub fn new(ownership: &Arc<Ownership>, client: u64) -> Claim {
        Claim { ownership: ownership.clone(), client }
    }

    /// Takes the rings, if the client does not own them yet.
    pub fn take(&self) -> Result<(), Violation> {
        let deadline = Instant::now() + PATIENCE;
        let mut owner = lock(&self.ownership.owner);
        while let Some(Owner { client, is_leaving }) = *owner {
            if client == self.client {
                return Ok(());
            }
            if !is_leaving && Instant::now() >= deadline {
                return wrong("another client is connected; ?shared in the address admits several");
            }
            let waited = self.ownership.has_left.wait_timeout(owner, LOOK);
            owner = waited.expect("no thread panics while it holds this lock").0;
        }
        *owner = Some(Owner { client: self.client, is_leaving: false });
        Ok(())
    }

    /// Records that the client has disconnected; [`Claim::release`] follows.
    pub fn leave(&self) {
        if let Some(owner) = &mut *lock(&self.ownership.owner)
            && owner.client == self.client
        {
            owner.is_leaving = true;
        }
    }

    /// Releases the rings for other clients.
    pub fn release(&self) {
        let mut owner = lock(&self.ownership.owner);
        if owner.as_ref().is_some_and(|owner| owner.client == self.client) {
            *owner = None;
            self.ownership.has_left.notify_all();
        }
    }
}
