//! Updates of the parameters with which a thread serves a ring. A message that changes them is
//! acknowledged only after the thread has taken the change: from then on the ring knows added
//! memory, and does not use removed memory any more.

use std::os::fd::OwnedFd;

use udm::device::Reported;
use udm::sync::atomic::{AtomicBool, Ordering};
use udm::sync::{Arc, Condvar, Mutex, lock};

use super::memory::Memory;
use super::proto::Violation;

/// The parameters with which a ring is served. All of them may change while it is served.
#[derive(Clone, Debug)]
pub struct Params {
    /// The client's memory.
    pub memory: Arc<Memory>,
    /// The eventfd that notifies the driver; without it, the driver polls.
    pub call: Option<Arc<OwnedFd>>,
    /// The eventfd that reports a failed ring.
    pub err: Option<Arc<OwnedFd>>,
}

/// The final state of a ring.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Its position, once the worker has ended.
    pub base: u32,
    /// The error in the ring.
    pub violation: Option<Violation>,
    /// The losses that were reported to the ring's driver.
    pub reported: Option<Reported>,
}

/// State shared by a worker's thread and by its client's thread, which stores new parameters.
#[derive(Debug)]
pub(super) struct SharedParams {
    given: Mutex<Given>,
    has_changed: AtomicBool,
    is_taken: Condvar,
    pub outcome: Mutex<Outcome>,
}

#[derive(Debug)]
struct Given {
    params: Params,
    is_taken: bool,
    /// The worker's thread takes no more updates.
    has_ended: bool,
}

impl SharedParams {
    pub fn new(params: Params, outcome: Outcome) -> SharedParams {
        SharedParams {
            given: Mutex::new(Given { params, is_taken: true, has_ended: false }),
            has_changed: AtomicBool::new(false),
            is_taken: Condvar::new(),
            outcome: Mutex::new(outcome),
        }
    }

    /// Stores new parameters. The caller must wake the worker's thread afterwards.
    pub fn give(&self, params: Params) {
        let mut given = lock(&self.given);
        (given.params, given.is_taken) = (params, false);
        self.has_changed.store(true, Ordering::SeqCst);
    }

    /// Waits until the last parameters were taken, or the worker's thread has ended.
    pub fn wait(&self) {
        let mut given = lock(&self.given);
        while !given.is_taken && !given.has_ended {
            given = self.is_taken.wait(given).expect("no thread panics while it holds this lock");
        }
    }

    /// Whether there are parameters that the worker has not taken.
    #[inline]
    pub fn has_changed(&self) -> bool {
        self.has_changed.load(Ordering::Relaxed)
    }

    /// Returns the parameters, if they have changed. The worker calls [`SharedParams::taken`] as
    /// soon as it does not use the old ones any more.
    pub fn take_changed(&self) -> Option<Params> {
        let has_changed = self.has_changed.swap(false, Ordering::SeqCst);
        has_changed.then(|| lock(&self.given).params.clone())
    }

    /// Records that the worker uses the last parameters.
    pub fn taken(&self) {
        let mut given = lock(&self.given);
        // New parameters may have arrived in the meantime; the worker has not taken those.
        given.is_taken = !self.has_changed.load(Ordering::SeqCst);
        self.is_taken.notify_all();
    }
}

/// The worker's side of [`SharedParams`]. Dropping it, however the thread ends, releases the
/// waiting client.
#[derive(Debug)]
pub(super) struct ParamsReader(pub Arc<SharedParams>);

impl Drop for ParamsReader {
    fn drop(&mut self) {
        lock(&self.0.given).has_ended = true;
        self.0.is_taken.notify_all();
    }
}
