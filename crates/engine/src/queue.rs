//! A queue: one thread, one ring, one loop. Targets do not read the clock: they get the
//! time from a queue or from an in-process caller ([`local`](crate::local)).
//!
//! The job of a queue is its [`Role`]; [`Queue::run`] takes any role. The roles in this module are
//! serving one client's conversation over a stream ([`Queue::serve`]), running a device's
//! background ([`Queue::background`]), accepting connections ([`Queue::listen`]). The loop is the
//! same for all:
//!
//! 1. Events of the ring go to the role, then the role takes a turn: all that can be done now.
//! 2. When a turn leaves no work, the queue announces that it sleeps, checks once more
//!    whether it was woken meanwhile, and waits in the ring for an event, a wake or its deadline.
//!    So a [`Wake`] costs a system call only if the queue really sleeps, and none is lost.
//! 3. [`Queue::stop`] asks a role to end. The role ends in its own way, but in bounded time, and
//!    dropping the queue waits for that.

mod activity;
mod background;
mod listener;
mod prefault;
mod stream;
mod watch;

use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::time::ClockId;

pub use activity::{await_work, note_work, wait_for_work};
pub use prefault::prefault;
pub use stream::{Conversation, Socket, Space};
pub use watch::{Watched, watched};

use crate::device::{Device, Driver};
use crate::disk::{DiskIo, Ring};
use crate::error::{Error, Result};
use crate::ring::{Event, Mailbox, SubmissionQueue};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::target::Wake;
use crate::units::{Nanos, SECOND};

/// Submissions that a queue's ring can hold at a time.
const RING_ENTRIES: u32 = 256;
/// A queue that is asked to stop drops requests that still wait after this long.
const STOP_SECONDS_MAX: u64 = 20;

/// The current time, in nanoseconds since an arbitrary origin that all queues share.
pub fn now() -> Nanos {
    let time = rustix::time::clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * SECOND + time.tv_nsec as u64
}

/// The part of a queue that other threads use.
#[derive(Debug)]
struct Shared {
    mailbox: Arc<Mailbox<DiskIo>>,
    is_stopping: AtomicBool,
}

impl Wake for Shared {
    fn wake(&self) {
        self.mailbox.wake();
    }
}

/// The result of a role's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// There may be more to do.
    Again,
    /// No work before the next event, or before this time.
    Idle(Option<Nanos>),
    /// The role has ended.
    Over,
}

/// The job of a queue.
pub trait Role {
    /// Tags of the role's requests to the ring, as events name them.
    type Tag: Copy + PartialEq;

    /// A request to the ring has ended.
    fn event(&mut self, event: Event<Self::Tag>, core: &mut Core<Self::Tag>);

    /// Does what can be done now. `is_stopping`: a stop was asked for, and stays so.
    fn turn(&mut self, core: &mut Core<Self::Tag>, is_stopping: bool) -> Turn;

    /// Called after the last turn: gives up what the role holds.
    fn leave(self, core: &mut Core<Self::Tag>);
}

/// The loop's own state, which roles use.
#[derive(Debug)]
pub struct Core<T> {
    shared: Arc<Shared>,
    submissions: SubmissionQueue<T, DiskIo>,
}

impl<T: Copy + PartialEq> Core<T> {
    fn new(mut ring: Ring) -> Result<Core<T>> {
        let mailbox = ring.mailbox()?;
        let shared = Arc::new(Shared { mailbox, is_stopping: AtomicBool::new(false) });
        Ok(Core { shared, submissions: SubmissionQueue::new(ring) })
    }

    /// The ring.
    pub fn ring(&self) -> &Ring {
        self.submissions.ring()
    }

    /// The ring, for a [`Driver`].
    pub fn ring_mut(&mut self) -> &mut Ring {
        self.submissions.ring_mut()
    }

    /// Where the role makes requests to the ring; the answers are events.
    pub fn submissions(&mut self) -> &mut SubmissionQueue<T, DiskIo> {
        &mut self.submissions
    }

    /// Whether a stop was asked for.
    pub fn is_stopping(&self) -> bool {
        self.shared.is_stopping.load(Ordering::SeqCst)
    }

    /// Makes this queue take another turn.
    pub fn waker(&self) -> Arc<dyn Wake> {
        self.shared.clone()
    }

    /// A driver of `device`, run by this queue.
    pub fn driver(&self, device: &Arc<Device>) -> Result<Driver> {
        Driver::new(device, self.waker())
    }

    /// Waits for the requests in flight and gives up the driver's port. Parked bios are dropped:
    /// their client is gone, or has waited long enough.
    pub fn leave(&mut self, mut driver: Driver) {
        let deadline = now() + STOP_SECONDS_MAX * SECOND;
        loop {
            driver.pump(self.submissions.ring_mut(), |_, _, _| {});
            if driver.is_all_parked() && self.ring().awaited() == 0 {
                return;
            }
            if now() >= deadline {
                // If a device never returns a bio, its port is lost as well; everything else
                // continues.
                driver.abandon();
                std::mem::forget(driver);
                return;
            }
            self.submissions.ring_mut().submit_and_wait(Some(Duration::from_millis(10)));
            while self.submissions.pop_event().is_some() {}
        }
    }

    fn run(&mut self, mut role: impl Role<Tag = T>) {
        loop {
            note_work();
            self.ring().answer_wakes();
            while let Some(event) = self.submissions.pop_event() {
                role.event(event, self);
            }
            let is_stopping = self.is_stopping();
            match role.turn(self, is_stopping) {
                Turn::Again => {}
                Turn::Idle(deadline) => self.sleep(deadline),
                Turn::Over => return role.leave(self),
            }
        }
    }

    fn sleep(&mut self, deadline: Option<Nanos>) {
        let timeout = deadline.map(|at| Duration::from_nanos(at.saturating_sub(now())));
        note_work();
        self.submissions.ring_mut().sleep(timeout);
    }
}

/// A running queue. Dropping it stops it and waits for its end.
pub struct Queue {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Ends a sleep of its thread outside the ring.
    interrupt: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Queue {
    /// Starts a thread on which `arrive` makes a role, and which runs that role until it ends.
    /// Returns when `arrive` has returned.
    pub fn run<R: Role>(
        name: &str,
        arrive: impl FnOnce(&mut Core<R::Tag>) -> Result<R> + Send + 'static,
    ) -> Result<Queue> {
        Queue::run_in(name, || Ring::new(RING_ENTRIES), arrive)
    }

    /// As [`Queue::run`], for a role that gives commands to drivers.
    pub fn run_with_commands<R: Role>(
        name: &str,
        arrive: impl FnOnce(&mut Core<R::Tag>) -> Result<R> + Send + 'static,
    ) -> Result<Queue> {
        Queue::run_in(name, || Ring::with_commands(RING_ENTRIES), arrive)
    }

    fn run_in<R: Role>(
        name: &str,
        ring: impl FnOnce() -> Result<Ring> + Send + 'static,
        arrive: impl FnOnce(&mut Core<R::Tag>) -> Result<R> + Send + 'static,
    ) -> Result<Queue> {
        let (report, arrived) = mpsc::sync_channel(1);
        let body = move || {
            let core = ring().and_then(Core::new);
            let made = core.and_then(|mut core| arrive(&mut core).map(|role| (core, role)));
            match made {
                Ok((mut core, role)) => {
                    let _ = report.send(Ok(core.shared.clone()));
                    core.run(role);
                    // The role may have changed something at its end.
                    note_work();
                }
                Err(error) => {
                    let _ = report.send(Err(error));
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(body)
            .map_err(|source| Error::from_io("starting thread", name, source))?;
        let shared = arrived.recv().expect("the thread reports before it does anything else")?;
        Ok(Queue { shared, thread: Some(thread), interrupt: None })
    }

    /// For a role whose thread may sleep outside the ring: a stop calls `interrupt`, which ends
    /// such a sleep.
    pub fn interrupted_by(mut self, interrupt: impl Fn() + Send + Sync + 'static) -> Queue {
        self.interrupt = Some(Box::new(interrupt));
        self
    }

    /// Makes its role take another turn, soon.
    pub fn wake(&self) {
        self.shared.wake();
    }

    /// Asks the queue to end, without waiting for it.
    pub fn stop(&self) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        self.shared.wake();
        if let Some(interrupt) = &self.interrupt {
            interrupt();
        }
    }

    /// Whether its thread has ended.
    pub fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue({:?})", self.thread)
    }
}

#[cfg(test)]
mod tests;

impl Drop for Queue {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
