//! When a device's changes are locked: while a port is attached that has written, or zeroed, parts
//! of blocks.
//!
//! Ports lock their changes under their own lock, which each bio takes anyway. So a device without
//! such a port pays for one comparison of a field, and its ports share no state. The switch visits
//! all ports, attached or not, one after the other.

use super::Device;
use super::block_locks::BlockLocks;
use crate::sync::{Arc, Mutex, lock};
use crate::target::Events;

/// The locks of a device, and the number of ports that need them.
#[derive(Debug)]
pub(super) struct LockSwitch {
    locks: Arc<BlockLocks>,
    /// Held while ports are visited. No port's lock is held by a thread that waits for this.
    users: Mutex<Users>,
}

#[derive(Debug, Default)]
struct Users {
    count: usize,
    /// Counts how often the first user came. It wraps around: a bio would have to stay in a target
    /// for 65535 times. 0 is left out, because bios without an entry have it.
    epoch: u16,
}

impl LockSwitch {
    pub fn new(events: &Arc<Events>) -> LockSwitch {
        LockSwitch { locks: Arc::new(BlockLocks::new(events)), users: Mutex::default() }
    }
}

impl Device {
    /// Changes of all ports are locked from now on, and parts of blocks may be changed through
    /// `port`, which has parked such requests.
    pub(super) fn begin_locks(&self, port: usize) {
        let LockSwitch { locks, users } = &self.locks;
        let mut users = lock(users);
        let is_first = users.count == 0;
        if is_first {
            users.epoch = users.epoch.checked_add(1).unwrap_or(1);
            locks.begin();
            for (id, cell) in self.seats.iter().enumerate() {
                lock(&cell.0).set_locks(id, Some(locks), users.epoch);
            }
        }
        users.count += usize::from(self.seat_of(port).parts().become_user());
        drop(users);
        if is_first {
            // Until here it stood for ports that were not visited.
            locks.unlisted_left();
        }
        self.events.room();
    }

    /// A port that needed the locks was detached.
    pub(super) fn end_locks(&self) {
        // After a panic, other threads do not use the device any more.
        let Ok(mut users) = self.locks.users.lock() else { return };
        users.count = users.count.checked_sub(1).expect("a user is counted once");
        if users.count > 0 {
            return;
        }
        for (id, cell) in self.seats.iter().enumerate() {
            let Ok(mut seat) = cell.0.lock() else { return };
            seat.set_locks(id, None, users.epoch);
        }
    }
}
