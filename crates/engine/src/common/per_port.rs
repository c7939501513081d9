//! A table of values that wait for a completion inside a target, split by port.
//!
//! A target has many ports, each with its own thread. The values of different ports have different
//! locks (shards), so only ports that share a shard contend for its lock.

use crate::base::pending::Pending;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::target::Port;

/// Shards of a [`PerPort`]. More threads than that share locks.
const SHARDS: usize = 16;

/// A [`Pending`] for each port (or few ports), each on cache lines of its own.
#[derive(Debug)]
pub struct PerPort<T> {
    shards: [Shard<T>; SHARDS],
}

#[derive(Debug)]
#[repr(align(128))]
struct Shard<T>(Mutex<Pending<T>>);

impl<T> Default for PerPort<T> {
    fn default() -> Self {
        PerPort { shards: std::array::from_fn(|_| Shard(Mutex::new(Pending::default()))) }
    }
}

impl<T> PerPort<T> {
    /// The table of `port`. Hold it only briefly.
    pub fn of(&self, port: &Port) -> MutexGuard<'_, Pending<T>> {
        lock(&self.shards[port.id % SHARDS].0)
    }

    /// Values inside, over all ports.
    #[cfg(all(test, feature = "shuttle"))]
    pub fn count(&self) -> usize {
        self.shards.iter().map(|shard| lock(&shard.0).count()).sum()
    }
}
