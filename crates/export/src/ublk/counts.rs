//! Counts of a disk's requests, shared by its queues.

use udm::sync::atomic::{AtomicU64, Ordering};
use udm::sync::{Mutex, lock};

use super::proto::Description;

/// Counts of a disk's requests.
#[derive(Debug, Default)]
pub struct Counts {
    answered: AtomicU64,
    failed: AtomicU64,
    read_in_place: AtomicU64,
    shared: AtomicU64,
    wrong: AtomicU64,
    last_wrong: Mutex<Option<String>>,
    queues_ended: AtomicU64,
    failure: Mutex<Option<String>>,
}

impl Counts {
    /// Counts an answered request.
    pub fn was_answered(&self, result: i32) {
        self.answered.fetch_add(1, Ordering::Relaxed);
        if result < 0 {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a read whose data was copied straight from the device's memory.
    pub fn was_read_in_place(&self) {
        self.read_in_place.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request whose data was in memory that its client shares.
    pub fn was_shared(&self) {
        self.shared.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an invalid request.
    pub fn was_wrong(&self, description: &Description) {
        self.wrong.fetch_add(1, Ordering::Relaxed);
        *lock(&self.last_wrong) = Some(description.to_string());
    }

    /// Counts a queue that is not served any more.
    pub fn queue_has_ended(&self, failure: Option<&std::io::Error>) {
        self.queues_ended.fetch_add(1, Ordering::Relaxed);
        if let Some(failure) = failure {
            *lock(&self.failure) = Some(failure.to_string());
        }
    }

    /// Requests answered.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Answered requests with an error.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Reads whose data was copied straight from the device's memory.
    pub fn read_in_place(&self) -> u64 {
        self.read_in_place.load(Ordering::Relaxed)
    }

    /// Requests whose data was in memory that their client shares.
    pub fn shared(&self) -> u64 {
        self.shared.load(Ordering::Relaxed)
    }

    /// Invalid requests, and the last of them.
    pub fn wrong(&self) -> (u64, Option<String>) {
        (self.wrong.load(Ordering::Relaxed), lock(&self.last_wrong).clone())
    }

    /// Queues that are not served any more, and the driver's error, if it refused a command.
    pub fn ended(&self) -> (u64, Option<String>) {
        (self.queues_ended.load(Ordering::Relaxed), lock(&self.failure).clone())
    }
}
